//! An agent that runs one command as a job: prepare, start, stream the output, wait, print the result.
//!
//!     rust-agent SOCKET COMMAND [ARGUMENT...]
//!
//! It ends with the job's exit code; with 125 when there is no result.

mod attempt;
mod failure;

/// What `build.rs` made of the proto files.
pub mod executor {
    // The words of the proto files are written for no particular language's documentation tool.
    #![allow(clippy::doc_lazy_continuation, clippy::doc_overindented_list_items, clippy::large_enum_variant)]
    tonic::include_proto!("forgeyard.executor.v1");
}

use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use attempt::Attempt;
use executor::{Attempt as Ended, ExecutionOutcome, Job, Step};
use failure::Failure;

const NO_RESULT: u8 = 125;
const USAGE: u8 = 2;

#[tokio::main(flavor = "current_thread")]
async fn main() -> ExitCode {
    let mut arguments = std::env::args().skip(1);
    let (Some(socket), command) = (arguments.next(), arguments.collect::<Vec<_>>()) else {
        return usage();
    };
    if command.is_empty() {
        return usage();
    }
    match run(&socket, command).await {
        Ok(code) => ExitCode::from(code),
        Err(failure) => {
            eprintln!("rust-agent: {failure}");
            ExitCode::from(NO_RESULT)
        }
    }
}

fn usage() -> ExitCode {
    eprintln!("usage: rust-agent SOCKET COMMAND [ARGUMENT...]");
    ExitCode::from(USAGE)
}

async fn run(socket: &str, command: Vec<String>) -> Result<u8, Failure> {
    let mut attempt = Attempt::prepare(socket, fresh_name(), job(command)).await?;
    // Whatever comes between, the server forgets the attempt at the end, which also ends a job that still runs.
    let ended = follow(&mut attempt).await;
    attempt.cleanup().await?;
    Ok(report(&ended?))
}

async fn follow(attempt: &mut Attempt) -> Result<Ended, Failure> {
    attempt.start().await?;
    attempt.copy_output().await?;
    attempt.wait().await
}

/// The host's own programs, read-only; every limit and the network are those of the profile `standard-ci`.
fn job(command: Vec<String>) -> Job {
    let step = Step { argv: command, ..Step::default() };
    Job { steps: vec![step], rootfs: Some("host".into()), ..Job::default() }
}

/// An agent takes the name that its scheduler gave the attempt, so that a second try after a crash finds the first.
fn fresh_name() -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    format!("rust-agent-{}-{}", std::process::id(), now.as_nanos())
}

fn report(ended: &Ended) -> u8 {
    if let Some(error) = &ended.error {
        eprintln!("rust-agent: {}", Failure::from(error));
        return NO_RESULT;
    }
    let Some(result) = &ended.result else {
        return NO_RESULT;
    };
    let outcome = result.outcome().as_str_name().trim_start_matches("EXECUTION_OUTCOME_").to_lowercase();
    eprintln!("rust-agent: {outcome}, exit code {}, sandbox {}", result.exit_code, result.sandbox_id);
    if result.message != outcome {
        eprintln!("rust-agent: {}", result.message);
    }
    // The number is for shells alone: what happened is the outcome, with the evidence beside it.
    match (result.outcome(), u8::try_from(result.exit_code)) {
        (ExecutionOutcome::Succeeded, _) => 0,
        (_, Ok(code)) if code != 0 => code,
        _ => NO_RESULT,
    }
}
