"""The errors a caller can meet.

    ForgeyardError              brief, details, resolution
    ├── InvalidRequest          a field, its value and the cure; nothing was started
    ├── SandboxError            what could not be set up or undone (seed, section 242)
    └── ExecutorError           what went wrong around it (seed, section 243)

A job that fails is a result, never an exception.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final


class SandboxErrorKind(StrEnum):
    """Kinds of sandbox failure (seed, section 242)."""

    UNSUPPORTED_ISOLATION = "unsupported_isolation"
    INVALID_FILESYSTEM_PLAN = "invalid_filesystem_plan"
    MOUNT_FAILED = "mount_failed"
    NAMESPACE_FAILED = "namespace_failed"
    RESOURCE_LIMIT_FAILED = "resource_limit_failed"
    NETWORK_SETUP_FAILED = "network_setup_failed"
    PRIVILEGE_DROP_FAILED = "privilege_drop_failed"
    DEVICE_ATTACH_FAILED = "device_attach_failed"
    CLEANUP_FAILED = "cleanup_failed"
    SECURITY_VIOLATION = "security_violation"
    INTERNAL = "internal"


class ExecutorErrorKind(StrEnum):
    """Kinds of executor failure (seed, section 243). CANCELLED: before a workload started, so there is no result."""

    PREPARE = "prepare"
    SPAWN_FAILED = "spawn_failed"
    IO_FAILED = "io_failed"
    CANCELLED = "cancelled"
    CANCEL_FAILED = "cancel_failed"
    TIMEOUT = "timeout"
    LOST = "lost"
    UNSUPPORTED = "unsupported"
    INTERNAL = "internal"


class RetryRule(StrEnum):
    """What a scheduler may do with a failure of a class."""

    NEVER = "never"
    POLICY = "policy"
    YES = "yes"


class FailureClass(StrEnum):
    """Coarse classes that outcomes and errors map into (seed, section 244)."""

    NONE = "none"
    WORKLOAD = "workload"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    RESOURCE = "resource"
    SECURITY = "security"
    CONFIGURATION = "configuration"
    INFRASTRUCTURE = "infrastructure"

    @property
    def retry(self) -> RetryRule:
        """Whether running the same request again can help."""
        return _RETRY[self]


_RETRY: Final = {
    FailureClass.NONE: RetryRule.NEVER,
    FailureClass.WORKLOAD: RetryRule.NEVER,
    FailureClass.TIMEOUT: RetryRule.POLICY,
    FailureClass.CANCELLED: RetryRule.NEVER,
    FailureClass.RESOURCE: RetryRule.POLICY,
    FailureClass.SECURITY: RetryRule.NEVER,
    FailureClass.CONFIGURATION: RetryRule.NEVER,
    FailureClass.INFRASTRUCTURE: RetryRule.YES,
}


class ForgeyardError(Exception):
    """Base of every error of ours.

    :param brief: one line that says what went wrong.
    :param details: what is known beyond that (a command, an errno, a path); may be empty.
    :param resolution: what the reader can do about it; may be empty.
    """

    def __init__(self, brief: str, *, details: str = "", resolution: str = "") -> None:
        super().__init__(brief)
        self.brief = brief
        self.details = details
        self.resolution = resolution

    def __str__(self) -> str:
        text = self.brief
        if self.details:
            text += f": {self.details}"
        if self.resolution:
            text += f" ({self.resolution})"
        return text

    @property
    def failure_class(self) -> FailureClass:
        """The class a scheduler sees."""
        return FailureClass.INFRASTRUCTURE


class InvalidRequest(ForgeyardError):  # noqa: N818  it reads as what it is: the request is invalid
    """A value the caller gave cannot be used; nothing was started.

    :param field: dotted name of the field or the flag, as the user wrote it.
    :param value: the offending value, shortened for display.
    :param cure: what to write instead.
    """

    def __init__(self, field: str, value: object, cure: str) -> None:
        try:
            shown = str(value)
        except ValueError:  # an integer of thousands of digits, which Python does not write out
            shown = f"a {type(value).__name__} too long to show"
        shown = shown if len(shown) <= 80 else shown[:77] + "..."
        # repr keeps control characters and newlines of hostile input out of a one-line message.
        # A variable's name or a path is part of its field, and may be anything as well.
        named = field if field.isprintable() and len(field) <= 300 else repr(field[:300])
        super().__init__(f"{named} {shown!r}: {cure}")
        self.field = field
        self.value = shown
        self.cure = cure

    @property
    def failure_class(self) -> FailureClass:
        """A bad request stays bad however often it is sent."""
        return FailureClass.CONFIGURATION


class SandboxError(ForgeyardError):
    """Something about the sandbox could not be set up, held or undone.

    :param kind: the seed's kind.
    :param reason: a short snake_case word that says which case of the kind it is, for programs.
    """

    def __init__(
        self, kind: SandboxErrorKind, reason: str, brief: str, *, details: str = "", resolution: str = ""
    ) -> None:
        super().__init__(brief, details=details, resolution=resolution)
        self.kind = kind
        self.reason = reason

    @property
    def failure_class(self) -> FailureClass:
        """Refusals are the request's fault, violations the workload's, the rest the host's."""
        if self.kind in (SandboxErrorKind.UNSUPPORTED_ISOLATION, SandboxErrorKind.INVALID_FILESYSTEM_PLAN):
            return FailureClass.CONFIGURATION
        if self.kind is SandboxErrorKind.SECURITY_VIOLATION:
            return FailureClass.SECURITY
        return FailureClass.INFRASTRUCTURE


class ExecutorError(ForgeyardError):
    """The executor could not do what it was asked.

    :param kind: the seed's kind; PREPARE carries the SandboxError as ``sandbox``.
    :param reason: a short snake_case word, as with SandboxError.
    :param sandbox: the sandbox failure behind a PREPARE.
    """

    def __init__(
        self,
        kind: ExecutorErrorKind,
        reason: str,
        brief: str,
        *,
        details: str = "",
        resolution: str = "",
        sandbox: SandboxError | None = None,
    ) -> None:
        super().__init__(brief, details=details, resolution=resolution)
        self.kind = kind
        self.reason = reason
        self.sandbox = sandbox

    @classmethod
    def prepare(cls, error: SandboxError) -> ExecutorError:
        """Wrap a sandbox failure that happened before the workload started."""
        return cls(
            ExecutorErrorKind.PREPARE,
            error.reason,
            error.brief,
            details=error.details,
            resolution=error.resolution,
            sandbox=error,
        )

    @property
    def failure_class(self) -> FailureClass:
        """That of the sandbox failure behind it; unsupported requests are configuration."""
        if self.sandbox is not None:
            return self.sandbox.failure_class
        if self.kind is ExecutorErrorKind.CANCELLED:
            return FailureClass.CANCELLED
        if self.kind is ExecutorErrorKind.UNSUPPORTED:
            return FailureClass.CONFIGURATION
        return FailureClass.INFRASTRUCTURE
