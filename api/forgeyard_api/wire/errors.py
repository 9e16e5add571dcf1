"""Our errors as statuses of gRPC, and back: the same type, kind, reason, words and cure on both sides of the socket."""

from __future__ import annotations

from typing import Final

import grpc
from google.rpc import status_pb2  # type: ignore[import-untyped]  # has no types

from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    ForgeyardError,
    InvalidRequest,
    RetryRule,
    SandboxError,
    SandboxErrorKind,
)

DETAILS: Final = "grpc-status-details-bin"
"""Trailing metadata that holds a google.rpc.Status, as every gRPC library reads it."""

_BY_REASON: Final = {
    "no_such_attempt": grpc.StatusCode.NOT_FOUND,
    "attempt_exists": grpc.StatusCode.ALREADY_EXISTS,
    "not_allowed": grpc.StatusCode.PERMISSION_DENIED,
    "queue_full": grpc.StatusCode.RESOURCE_EXHAUSTED,
    "draining": grpc.StatusCode.UNAVAILABLE,
    "keeper_unavailable": grpc.StatusCode.UNAVAILABLE,
    "not_offered": grpc.StatusCode.UNIMPLEMENTED,
}
_BY_KIND: Final = {
    ExecutorErrorKind.UNSUPPORTED: grpc.StatusCode.FAILED_PRECONDITION,
    ExecutorErrorKind.PREPARE: grpc.StatusCode.FAILED_PRECONDITION,
    ExecutorErrorKind.LOST: grpc.StatusCode.ABORTED,
    ExecutorErrorKind.TIMEOUT: grpc.StatusCode.ABORTED,
}


def code_of(error: ForgeyardError) -> grpc.StatusCode:
    """The status that `error` is sent under. Programs go by the details; this is for tools that know only gRPC."""
    if isinstance(error, InvalidRequest):
        return grpc.StatusCode.INVALID_ARGUMENT
    by_reason = _BY_REASON.get(str(getattr(error, "reason", "")))
    if by_reason is not None:
        return by_reason
    if isinstance(error, ExecutorError):
        return _BY_KIND.get(error.kind, grpc.StatusCode.INTERNAL)
    return grpc.StatusCode.FAILED_PRECONDITION


def detail_of(error: ForgeyardError) -> wire.ErrorDetail:
    """`error`, for the details of a status or the `error` of an attempt."""
    detail = wire.ErrorDetail(
        type=type(error).__name__,
        brief=error.brief,
        details=error.details,
        resolution=error.resolution,
        failure_class=error.failure_class.value,
        retryable=error.failure_class.retry is not RetryRule.NEVER,
    )
    if isinstance(error, InvalidRequest):
        detail.field, detail.value, detail.resolution = error.field, error.value, error.cure
    elif isinstance(error, ExecutorError | SandboxError):
        detail.kind, detail.reason = error.kind.value, error.reason
        if isinstance(error, ExecutorError) and error.sandbox is not None:
            detail.sandbox_kind = error.sandbox.kind.value
    return detail


def error_of(detail: wire.ErrorDetail) -> ForgeyardError:
    """The error that `detail` says. A kind this version does not know is INTERNAL, with the same words."""
    if detail.type == "InvalidRequest":
        return InvalidRequest(detail.field, detail.value, detail.resolution)
    words = {"details": detail.details, "resolution": detail.resolution}
    if detail.type == "SandboxError":
        return SandboxError(_sandbox_kind(detail.kind), detail.reason, detail.brief, **words)
    if detail.type == "ExecutorError":
        sandbox = None
        if detail.sandbox_kind:
            sandbox = SandboxError(_sandbox_kind(detail.sandbox_kind), detail.reason, detail.brief, **words)
        kind = detail.kind if detail.kind in set(ExecutorErrorKind) else ExecutorErrorKind.INTERNAL
        return ExecutorError(ExecutorErrorKind(kind), detail.reason, detail.brief, sandbox=sandbox, **words)
    return ForgeyardError(detail.brief, **words)


def _sandbox_kind(word: str) -> SandboxErrorKind:
    return SandboxErrorKind(word) if word in set(SandboxErrorKind) else SandboxErrorKind.INTERNAL


def trailing(error: ForgeyardError) -> tuple[tuple[str, bytes], ...]:
    """Trailing metadata for a call that ends with `error`."""
    status = status_pb2.Status(code=code_of(error).value[0], message=str(error))
    packed = status.details.add()
    packed.type_url = f"type.googleapis.com/{wire.ErrorDetail.DESCRIPTOR.full_name}"
    packed.value = detail_of(error).SerializeToString()
    return ((DETAILS, status.SerializeToString()),)


def from_rpc(error: grpc.aio.AioRpcError, target: str) -> ForgeyardError:
    """The error that a call to `target` ended with: the server's own, or one that names the broken connection."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS:
            status = status_pb2.Status.FromString(value if isinstance(value, bytes) else value.encode())
            for packed in status.details:
                if packed.type_url.endswith(f"/{wire.ErrorDetail.DESCRIPTOR.full_name}"):
                    return error_of(wire.ErrorDetail.FromString(packed.value))
    kind, reason = ExecutorErrorKind.LOST, "server_unavailable"
    if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
        kind, reason = ExecutorErrorKind.TIMEOUT, "call_deadline"
    elif error.code() is grpc.StatusCode.PERMISSION_DENIED:
        kind, reason = ExecutorErrorKind.UNSUPPORTED, "not_allowed"
    return ExecutorError(
        kind,
        reason,
        f"the call to {target} failed",
        details=f"{error.code().name}: {error.details() or ''}".rstrip(": "),
        resolution="check that `forgeyard serve` runs and that its socket may be used by you",
    )
