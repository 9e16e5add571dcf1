"""What a pretended job does."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

from forgeyard_model.errors import ForgeyardError
from forgeyard_model.result import ExecutionOutcome

_NONE: Final[Mapping[str, bytes]] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class FakeRun:
    """How one job is to go. Times in seconds.

    :param output, error_output: what it writes to each stream as soon as it runs.
    :param service_output: what each service writes, by name.
    :param exit_code: of its last step.
    :param outcome: the verdict; None: what `exit_code` makes of it.
    :param seconds: how long it runs; with `holds` until `release` is called, or it is stopped.
    :param prepare_seconds: how long it takes to prepare.
    :param refused: what preparing it ends with. broken: what starting it ends with. lost: what waiting ends with.
    :param stubborn: it does not stop when it is asked to, only when it is killed or its grace is over.
    """

    output: bytes = b""
    error_output: bytes = b""
    service_output: Mapping[str, bytes] = field(default_factory=lambda: _NONE)
    exit_code: int = 0
    outcome: ExecutionOutcome | None = None
    seconds: float = 0.0
    holds: bool = False
    prepare_seconds: float = 0.0
    refused: ForgeyardError | None = None
    broken: ForgeyardError | None = None
    lost: ForgeyardError | None = None
    stubborn: bool = False
