"""What the server knows of callers and attempts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Final

from forgeyard_model.errors import ForgeyardError
from forgeyard_model.job import EMPTY, Job
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.result import ExecutionResult

MAX_ATTEMPT_ID: Final = 255
"""Characters of a caller's name for an attempt."""


class AttemptState(StrEnum):
    """How far an attempt has got. Only ENDED is final, and it is reached exactly once."""

    QUEUED = "queued"
    PREPARING = "preparing"
    PREPARED = "prepared"
    RUNNING = "running"
    ENDED = "ended"

    @property
    def rank(self) -> int:
        """States only grow."""
        return list(AttemptState).index(self)


class OnClientDeath(StrEnum):
    """What becomes of an attempt when the process that prepared it is gone."""

    CONTINUE = "continue"
    CANCEL = "cancel"


@dataclass(frozen=True, slots=True)
class Caller:
    """The process at the other end of a socket, as the kernel knew it when the connection was accepted.

    :param operator: sees everybody's attempts, and may stop them and drain the host.
    :param connection: a name for its connection; two calls over one have the same.
    """

    uid: int
    gid: int
    pid: int
    operator: bool = False
    connection: str = ""

    def may_see(self, owner_uid: int) -> bool:
        """Whether an attempt of `owner_uid` is any of its business."""
        return self.operator or self.uid == owner_uid


@dataclass(frozen=True, slots=True)
class Wanted:
    """A Prepare: what a caller asks for.

    :param attempt_id: its own name for the attempt; the same name again is the same attempt.
    :param runtime: empty takes the first that is configured.
    :param lease: seconds without a renewal after which the attempt is cancelled; None: it has none.
    :param start: run as soon as it is prepared.
    :param priority: larger first, among the attempts of one tenant.
    """

    attempt_id: str
    job: Job
    tenant: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    source: str | None = None
    output: str | None = None
    deadline: datetime | None = None
    trusted: bool = False
    runtime: str = ""
    pull: str = ""
    on_client_death: OnClientDeath = OnClientDeath.CONTINUE
    lease: float | None = None
    start: bool = False
    priority: int = 0


@dataclass(frozen=True, slots=True)
class AttemptView:
    """An attempt as it stands.

    :param sandbox_id: empty until it is prepared.
    :param result, error: at most one of them, and only of one that has ended.
    :param services: names of its services.
    :param reserved: what is set aside for it while it runs.
    """

    attempt_id: str
    tenant: str
    name: str
    state: AttemptState
    owner_uid: int
    created_at: datetime
    reserved: ResourceReservation
    runtime: str = ""
    sandbox_id: str = ""
    labels: Mapping[str, str] = field(default_factory=lambda: EMPTY)
    started_at: datetime | None = None
    finished_at: datetime | None = None
    result: ExecutionResult | None = None
    error: ForgeyardError | None = None
    queue_position: int = 0
    bundle_digest: str = ""
    notes: tuple[str, ...] = ()
    services: tuple[str, ...] = ()


class EventKind(StrEnum):
    """What can become of an attempt, and of the server. Those of the server have no attempt."""

    QUEUED = "queued"
    PREPARING = "preparing"
    PREPARED = "prepared"
    RUNNING = "running"
    ENDED = "ended"
    LOST = "lost"
    ADOPTED = "adopted"
    DRAIN = "drain"
    UNDRAIN = "undrain"
    CAPABILITIES = "capabilities"


@dataclass(frozen=True, slots=True)
class AttemptEvent:
    """Something that became of an attempt, or of the server.

    :param view: the attempt as it was at that moment.
    """

    time: datetime
    kind: EventKind
    attempt_id: str = ""
    message: str = ""
    owner_uid: int = 0
    view: AttemptView | None = None
