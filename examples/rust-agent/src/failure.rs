//! What can go wrong, in one line: the server's typed error where there is one.

use std::fmt::{Display, Formatter, Result};

use prost::Message;
use prost_types::Any;
use tonic::Status;

use crate::executor::ErrorDetail;

/// `google.rpc.Status`, as far as we read it: every gRPC library sends typed details in one.
#[derive(Clone, PartialEq, Message)]
struct RpcStatus {
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// Why there is no result.
#[derive(Debug)]
pub enum Failure {
    /// The server answered with an error, or did not answer.
    Refused(Box<Status>),
    /// An attempt ended without a result.
    Ended(Box<ErrorDetail>),
    /// The socket's name makes no address.
    Address(tonic::transport::Error),
    /// Our own output can't be written.
    Io(std::io::Error),
}

impl Display for Failure {
    fn fmt(&self, out: &mut Formatter<'_>) -> Result {
        match self {
            Self::Refused(status) => match detail_of(status) {
                Some(detail) => show(&detail, out),
                None => write!(out, "{}: {}", status.code(), status.message()),
            },
            Self::Ended(detail) => show(detail, out),
            Self::Address(error) => write!(out, "{error}"),
            Self::Io(error) => write!(out, "{error}"),
        }
    }
}

/// The typed error among a status's details.
fn detail_of(status: &Status) -> Option<ErrorDetail> {
    let details = RpcStatus::decode(status.details()).ok()?.details;
    let packed = details.iter().find(|any| any.type_url.ends_with("/forgeyard.executor.v1.ErrorDetail"))?;
    ErrorDetail::decode(packed.value.as_slice()).ok()
}

fn show(error: &ErrorDetail, out: &mut Formatter<'_>) -> Result {
    let named = if error.kind.is_empty() { &error.r#type } else { &error.kind };
    write!(out, "{named} {}: {}", error.reason, error.brief)?;
    if !error.details.is_empty() {
        write!(out, ": {}", error.details)?;
    }
    if !error.resolution.is_empty() {
        write!(out, " ({})", error.resolution)?;
    }
    Ok(())
}

impl From<Status> for Failure {
    fn from(status: Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

impl From<&ErrorDetail> for Failure {
    fn from(error: &ErrorDetail) -> Self {
        Self::Ended(Box::new(error.clone()))
    }
}

impl From<tonic::transport::Error> for Failure {
    fn from(error: tonic::transport::Error) -> Self {
        Self::Address(error)
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::Io(error)
    }
}
