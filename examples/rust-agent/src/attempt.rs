//! One attempt at the server. Every call but `output` may be repeated, because the attempt has a name of ours.

use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status};

use crate::executor::executor_client::ExecutorClient;
use crate::executor::{
    Attempt as View, AttemptState, CleanupRequest, ClientDeath, Job, OutputMark, OutputRequest, OutputResponse,
    PrepareRequest, StartRequest, WaitRequest,
};
use crate::failure::Failure;

/// For calls that answer at once.
const CALL: Duration = Duration::from_secs(60);
/// More than the server takes to answer a Wait with the attempt as it stands, which is 50 seconds.
const WAIT: Duration = Duration::from_secs(90);
/// How long a server that is being restarted is waited for, and how often it is asked.
const TRIES: u32 = 60;
const PAUSE: Duration = Duration::from_millis(500);

/// An attempt that the server has taken in.
pub struct Attempt {
    client: ExecutorClient<Channel>,
    name: String,
}

impl Attempt {
    /// Ask the server behind the socket to take `job` in.
    pub async fn prepare(socket: &str, name: String, job: Job) -> Result<Self, Failure> {
        let channel = Endpoint::from_shared(format!("unix:{socket}"))?.connect_lazy();
        let mut client = ExecutorClient::new(channel);
        let request = PrepareRequest {
            attempt_id: name.clone(),
            job: Some(job),
            on_client_death: ClientDeath::Cancel.into(),
            ..PrepareRequest::default()
        };
        client.prepare(bounded(request, CALL)).await?;
        Ok(Self { client, name })
    }

    /// Let it run as soon as it is prepared.
    pub async fn start(&mut self) -> Result<(), Failure> {
        let request = StartRequest { attempt_id: self.name.clone() };
        self.client.start(bounded(request, CALL)).await?;
        Ok(())
    }

    /// Copy the job's output to ours, to its end. A broken connection is taken up again at the last mark.
    pub async fn copy_output(&mut self) -> Result<(), Failure> {
        let mut mark = OutputMark::default();
        let mut tries = 0;
        loop {
            let before = mark;
            match self.copy_from(&mut mark).await {
                Ok(()) => return Ok(()),
                Err(Failure::Refused(status)) if is_away(&status) && tries < TRIES => {
                    tries = if mark == before { tries + 1 } else { 0 };
                    tokio::time::sleep(PAUSE).await;
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    async fn copy_from(&mut self, mark: &mut OutputMark) -> Result<(), Failure> {
        let request = OutputRequest { attempt_id: self.name.clone(), after: Some(*mark), ..OutputRequest::default() };
        let mut pieces = self.client.output(request).await?.into_inner();
        while let Some(piece) = pieces.message().await? {
            write(&piece).await?;
            // Only once it is written: what we lose with our own death is what the next one asks for.
            *mark = piece.mark.unwrap_or(*mark);
        }
        Ok(())
    }

    /// The attempt, once it has ended.
    pub async fn wait(&mut self) -> Result<View, Failure> {
        let mut tries = 0;
        loop {
            let request = WaitRequest { attempt_id: self.name.clone(), until: AttemptState::Ended.into() };
            match self.client.wait(bounded(request, WAIT)).await.map(|answer| answer.into_inner().attempt) {
                Ok(Some(attempt)) if attempt.state() == AttemptState::Ended => return Ok(attempt),
                Ok(_) => tries = 0,
                Err(status) if is_away(&status) && tries < TRIES => {
                    tries += 1;
                    tokio::time::sleep(PAUSE).await;
                }
                Err(status) => return Err(status.into()),
            }
        }
    }

    /// Let the server forget it.
    pub async fn cleanup(&mut self) -> Result<(), Failure> {
        let request = CleanupRequest { attempt_id: self.name.clone() };
        self.client.cleanup(bounded(request, CALL)).await?;
        Ok(())
    }
}

fn bounded<T>(message: T, timeout: Duration) -> Request<T> {
    let mut request = Request::new(message);
    request.set_timeout(timeout);
    request
}

/// The server, or the way to it, is gone: the jobs are not, and the next server has them.
fn is_away(status: &Status) -> bool {
    matches!(status.code(), Code::Unavailable | Code::DeadlineExceeded | Code::Unknown)
}

async fn write(piece: &OutputResponse) -> std::io::Result<()> {
    if piece.stream == "stderr" {
        let mut stream = tokio::io::stderr();
        stream.write_all(&piece.data).await?;
        return stream.flush().await;
    }
    let mut stream = tokio::io::stdout();
    stream.write_all(&piece.data).await?;
    stream.flush().await
}
