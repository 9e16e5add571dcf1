"""Runs resolved steps through a container's shim, and turns how they ended into results."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from forgeyard_executor.steps import ResolvedStep, exec_failure
from forgeyard_model.result import ProcessExit, StepResult
from forgeyard_process_shim.channel import ShimChannel
from forgeyard_process_shim.protocol import BackgroundExited, Exited, NoExec, Started, StepCommand
from forgeyard_runtimes.container import JobContainer
from forgeyard_runtimes.spool import Spool


def write_scripts(channel: ShimChannel, steps: tuple[ResolvedStep, ...]) -> dict[int, str]:
    """Write the scripts of `steps`, which all are known: sandbox path by index.

    Before anything runs, so that a disk that the job fills can't turn its own failure into ours.
    """
    return {
        index: channel.write_script(f"step-{index}", resolved.step.script)
        for index, resolved in enumerate(steps)
        if resolved.step.script is not None
    }


@dataclass(frozen=True, slots=True)
class StepRunner:
    """One container's. `scripts`: sandbox path of those already written, by the step's index."""

    container: JobContainer
    channel: ShimChannel
    spool: Spool
    scripts: Mapping[int, str]
    merge_output: bool

    async def run(self, index: int, resolved: ResolvedStep) -> StepResult:
        """Run step number `index` to its end; of a background step, until it runs.

        :raises ShimDied: the sandbox is gone.
        """
        step = resolved.step
        started, clock = datetime.now(UTC), time.monotonic()
        command = self._command(index, resolved)
        if step.background:
            end: Exited | NoExec | Started | BackgroundExited = await self.container.start_background(command)
        else:
            end = await self.container.run_step(command)
        await self.spool.drain()
        if command.stdin:
            self.channel.remove(command.stdin)
        begun = StepResult(step.name, None, started, time.monotonic() - clock)
        return _result(begun, resolved, end)

    def _command(self, index: int, resolved: ResolvedStep) -> StepCommand:
        step = resolved.step
        argv = resolved.argv
        if step.script is not None:
            path = self.scripts.get(index) or self.channel.write_script(f"step-{index}", step.script)
            argv = (*argv, path)
        return StepCommand(
            id=index + 1,
            argv=argv,
            env=resolved.env,
            cwd=resolved.workdir,
            stdin=self.channel.write_stdin(index, step.stdin) if step.stdin is not None else "",
            background=step.background,
            merge_output=self.merge_output,
        )


def _result(begun: StepResult, resolved: ResolvedStep, end: Exited | NoExec | Started | BackgroundExited) -> StepResult:
    may_fail = resolved.step.continue_on_error
    if isinstance(end, Started):
        return begun
    if isinstance(end, NoExec):
        code, error = exec_failure(resolved, end.stage.name.lower(), end.errno)
        return replace(begun, masked=may_fail, error=error, exec_code=code)
    process_exit = ProcessExit.from_wait_status(end.status)
    leftovers = end.leftovers if isinstance(end, Exited) else 0
    return replace(begun, exit=process_exit, masked=may_fail and not process_exit.ok, leftovers=leftovers)
