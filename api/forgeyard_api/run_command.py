"""`forgeyard run`: one job from the command line, to its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgeyard_api.cli_flags import JobArguments, Runtime, StateDir, with_job_flags
from forgeyard_api.configured import configured
from forgeyard_api.main import REFUSED, USAGE, UnusableInput, as_usage, say
from forgeyard_model.errors import ForgeyardError

if TYPE_CHECKING:
    from forgeyard_api.interrupts import Interrupts
    from forgeyard_api.job_from_flags import PlannedRun
    from forgeyard_api.output_writer import OutputWriter
    from forgeyard_model.config import ExecutorConfig
    from forgeyard_model.result import ExecutionResult


@with_job_flags
def run(
    arguments: JobArguments,
    *,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Absent or empty directory for /work/output.")
    ] = None,
    result: Annotated[
        str | None, typer.Option("--result", metavar="FILE|-", help="Write the result as JSON; - is stdout.")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary when the job succeeded.")] = False,
    runtime: Runtime = None,
    state_dir: StateDir = None,
) -> int:
    """Run a job: from a job file, or a command after `--`.

    The exit code is the job's own; 124 timed out, 125 refused or failed around the job, 137 out of memory,
    130 or 143 cancelled by a signal, 2 a command line or job file that can't be used.
    """
    from forgeyard_api.job_from_flags import plan_run

    with as_usage():
        _check_targets(output, result)
    try:
        planned = plan_run(arguments)
        config = configured(state_dir, runtime)
        return _run_planned(planned, output=output, result=result, quiet=quiet, config=config)
    except UnusableInput as unusable:
        _write_error(result, unusable.error, USAGE)
        raise
    except ForgeyardError as error:
        _write_error(result, error, REFUSED)
        raise


def _run_planned(
    planned: PlannedRun, *, output: Path | None, result: str | None, quiet: bool, config: ExecutorConfig
) -> int:
    import asyncio

    session = _Session(planned, output=output, target=result, quiet=quiet, config=config)
    return asyncio.run(session.run())


class _Session:
    """One `forgeyard run`: its signals, its output, its result."""

    def __init__(
        self,
        planned: PlannedRun,
        *,
        output: Path | None,
        target: str | None,
        quiet: bool,
        config: ExecutorConfig,
    ) -> None:
        self._planned = planned
        self._output = None if output is None else str(output.absolute())
        self._target = target
        self._quiet = quiet
        self._config = config

    async def run(self) -> int:
        """The exit code. Everything of the attempt is gone when this returns."""
        import asyncio

        from forgeyard_api.interrupts import Interrupts
        from forgeyard_api.output_writer import OutputWriter

        writer = OutputWriter()
        attempt = asyncio.ensure_future(self._attempt(writer))
        interrupts = Interrupts(attempt, say=say, killed=writer.abandon)
        self._interrupts = interrupts
        interrupts.install(asyncio.get_running_loop())
        try:
            return await self._report(await attempt, writer)
        except asyncio.CancelledError:
            # Before the job had started there is no result, only the signal.
            say("cancelled before the job started")
            return interrupts.exit_code or REFUSED
        finally:
            writer.close()

    async def _attempt(self, writer: OutputWriter) -> ExecutionResult:
        from forgeyard_executor import Executor

        async with Executor.open(config=self._config) as executor:
            run = executor.run(self._planned.job, source=self._planned.source, output=self._output)
            async with run as execution:
                self._interrupts.attach(execution)
                async for chunk in execution.output():
                    await writer.write(2 if chunk.stream == "stderr" else 1, chunk.data)
                result: ExecutionResult = await execution.wait()
                await self._interrupts.settle()
        return as_interrupted(result, self._interrupts)

    async def _report(self, result: ExecutionResult, writer: OutputWriter) -> int:
        from forgeyard_api.summary import show_summary

        await writer.drain()
        lost = writer.losses()
        result = replace(result, notes=(*result.notes, *lost)) if lost else result
        if not self._quiet or result.exit_code:
            _ignoring_broken_stderr(show_summary, result)
        if self._target is not None:
            await _write(self._target, result, writer)
        return result.exit_code


def as_interrupted(result: ExecutionResult, interrupts: Interrupts) -> ExecutionResult:
    """`result` with the exit code of the signal that cancelled it: the executor knows of a cancel, not of its cause."""
    from forgeyard_model.result import ExecutionOutcome

    if result.outcome is ExecutionOutcome.CANCELLED and interrupts.exit_code is not None:
        return replace(result, exit_code=interrupts.exit_code)
    return result


def _ignoring_broken_stderr(show: Any, result: ExecutionResult) -> None:
    try:
        show(result)
    except (OSError, ValueError):
        # Nobody reads stderr any more; the exit code and --result still tell.
        return


async def _write(target: str, result: ExecutionResult, writer: OutputWriter) -> None:
    from forgeyard_api.result_file import STDOUT, result_json, write_result

    data = result_json(result)
    if target == STDOUT:
        await writer.write(1, data)
        await writer.drain()
        return
    try:
        write_result(Path(target), data)
    except OSError as error:
        raise ForgeyardError(f"--result {target}: can't be written", details=error.strerror or "") from error


def _write_error(target: str | None, error: ForgeyardError, exit_code: int) -> None:
    """A reader of --result must not find an older run's result beside a refusal."""
    from forgeyard_api.result_file import STDOUT, error_json, write_result

    if target is None:
        return
    path = Path("/dev/stdout") if target == STDOUT else Path(target)
    try:
        write_result(path, error_json(error, exit_code))
    except OSError as failure:
        say(f"--result {target}: can't be written: {failure.strerror}")


def _check_targets(output: Path | None, result: str | None) -> None:
    from forgeyard_api.result_file import check_absent_or_empty, check_target

    if result is not None:
        check_target(result)
    if output is not None:
        check_absent_or_empty("--output", output)
