"""Takes what a failed attempt leaves, in the moment between the death of its processes and its clean-up."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_executor.kept_failures import FailureKeeper, Keeping, Workspace
from forgeyard_model.result import DiskEvidence, Outcome
from forgeyard_model.sensitive import sensitive_values
from forgeyard_runtimes.shielding import shielded

if TYPE_CHECKING:
    from forgeyard_executor.attempt import Attempt
    from forgeyard_runtimes.spool import Spool

NO_FAILURE: Final = (Outcome.SUCCEEDED, Outcome.CANCELLED)
_OUTPUT_SECONDS: Final = 10.0
"""For the last of the output to be on disk; its writers are dead."""


async def keep(keeper: FailureKeeper, attempt: Attempt, disk: DiskEvidence) -> Keeping:
    """Copy the attempt's writable layers and its output. `Keeping.finish` completes it.

    :raises SandboxError: it can't be kept; nothing of it is.
    """
    # Not in the pool of host work: a workspace may be large, and other jobs' clean-up would wait for it.
    workspace = _workspace(attempt, disk.peak or 0)
    keeping = await shielded(asyncio.to_thread(keeper.begin, workspace))
    (keeping.partial / "config.json").write_bytes(attempt.job.bundle.config)
    await _save_output(attempt.spool, (keeping.partial / "stdout", keeping.partial / "stderr"))
    for container in attempt.services:
        target = keeping.partial / "services" / f"{container.spec.name}.log"
        target.parent.mkdir(mode=0o700, exist_ok=True)
        await _save_output(container.member.spool, (target, target))
    return keeping


def _workspace(attempt: Attempt, size: int) -> Workspace:
    planned, spec = attempt.planned, attempt.request.spec
    overlays = [(overlay.upper, f"{overlay.upper}/upper") for overlay in planned.overlays]
    return Workspace(
        sandbox=attempt.sandbox,
        scratch=attempt.job.placed.scratch,
        layers=(*overlays, *((part.name, part.name) for part in planned.scratch)),
        secrets=sensitive_values(attempt.request.environment.variables, tuple(spec.steps), spec.services),
        size=size,
    )


async def _save_output(spool: Spool, targets: Sequence[Path]) -> None:
    """Both streams, into two files or into one."""
    try:
        async with asyncio.timeout(_OUTPUT_SECONDS):
            async for chunk in spool.reader():
                target = targets[0] if chunk.stream == "stdout" else targets[1]
                await asyncio.to_thread(_append, target, chunk.data)
    except TimeoutError:
        return  # what is there is kept


def _append(target: Path, data: bytes) -> None:
    with target.open("ab") as file:
        file.write(data)
