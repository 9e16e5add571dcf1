"""The steps file of a bundle that runs without an executor: plain ``runc run -b`` of a generated bundle.

It is a row of STEP frames; `init replay FILE` reads them one by one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.job import When
from forgeyard_model.plan import SHIM_DIR
from forgeyard_process_shim.protocol import StepCommand, StepFlag, encode_step

STEPS_FILE: Final = "steps"
"""Name of the file in the control directory."""
REPLAY_ARGV: Final = (f"{SHIM_DIR}/init", "replay", f"{SHIM_DIR}/{STEPS_FILE}")

_WHEN: Final = {When.ON_SUCCESS: StepFlag.NONE, When.ON_FAILURE: StepFlag.ON_FAILURE, When.ALWAYS: StepFlag.ALWAYS}


@dataclass(frozen=True, slots=True)
class ReplayStep:
    """A step and the rules that the executor would apply to it."""

    command: StepCommand
    continue_on_error: bool = False
    when: When = When.ON_SUCCESS


def encode_replay(steps: Iterable[ReplayStep]) -> bytes:
    """The steps file. init exits with the shell code of the first failure that `continue_on_error` does not mask.

    :raises InvalidRequest: there is no step, or one that no frame can hold.
    """
    frames = [encode_step(step.command, _flags(step)) for step in steps]
    if not frames:
        raise InvalidRequest("steps", "", "a bundle needs at least one step")
    return b"".join(frames)


def _flags(step: ReplayStep) -> StepFlag:
    return _WHEN[step.when] | (StepFlag.MASKED if step.continue_on_error else StepFlag.NONE)
