"""Who an attempt is, on this host and to its caller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from forgeyard_model.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class SandboxId:
    """A ULID minted at prepare. Every name on the host comes from it, never from the caller's id.

    Kept in lower case, since cgroup, container and host names like that.
    """

    value: str

    @classmethod
    def mint(cls) -> SandboxId:
        """A new id: sorts by time, 80 random bits."""
        from ulid import ULID  # it reads its package's metadata when imported, which no `--help` should wait for

        return cls(str(ULID()).lower())

    @classmethod
    def parse(cls, text: str) -> SandboxId:
        """Read an id from a directory name or a command line.

        :raises InvalidRequest: when it is not a ULID.
        """
        from ulid import ULID

        try:
            return cls(str(ULID.from_str(text.upper())).lower())
        except ValueError as error:
            raise InvalidRequest("sandbox id", text, "give the 26 characters that `forgeyard ps` shows") from error

    @property
    def container(self) -> str:
        """Name of the job's container at its runtime."""
        return f"fy-{self.value}"

    @property
    def hostname(self) -> str:
        """Host name inside the sandbox: short, a legal DNS label, different for each attempt."""
        return f"fy-{self.value[-12:]}"

    def __str__(self) -> str:
        return self.value


_NO_LABELS: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class AttemptContext:
    """The caller's own names for the attempt. Data only: shown and recorded, never part of a host path.

    :param tenant: whose job it is; caches are kept apart by it. Empty is the one tenant of a host with no others.
    :param trusted: False for a ref that anybody may have written, such as a fork's: it never writes what trusted jobs
        read between jobs. Both come from the caller, never from a job file.
    :param deadline: when the steps must have ended, whatever the job's own timeout says (section 103).
    """

    attempt_id: str
    tenant: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: _NO_LABELS)
    deadline: datetime | None = None
    trusted: bool = True
