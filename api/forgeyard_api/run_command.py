"""`forgeyard run`: one job from the command line, to its end."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgeyard_api.cli_flags import JobArguments, Runtime, StateDir, with_job_flags
from forgeyard_api.configured import configured
from forgeyard_api.main import REFUSED, USAGE, UnusableInput, as_usage, say
from forgeyard_api.operate.kept import refuse_unless_allowed
from forgeyard_model.errors import ForgeyardError, InvalidRequest

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from forgeyard_api.interrupts import Interrupts
    from forgeyard_api.job_from_flags import PlannedRun
    from forgeyard_api.output_writer import OutputWriter
    from forgeyard_api.pull_progress import PullProgress
    from forgeyard_executor import Execution
    from forgeyard_executor.images import ImageOptions
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
    service_logs: Annotated[
        Path | None,
        typer.Option("--service-logs", metavar="DIR", help="Write what each service says to DIR/NAME.log."),
    ] = None,
    tenant: Annotated[str, typer.Option("--tenant", metavar="NAME", help="Whose caches the job sees.")] = "",
    untrusted: Annotated[bool, typer.Option("--untrusted", help="The job may not change what others read.")] = False,
    keep_on_failure: Annotated[
        bool, typer.Option("--keep-on-failure", help="Keep what a failed job wrote, where the operator allows it.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No summary when the job succeeded.")] = False,
    runtime: Runtime = None,
    state_dir: StateDir = None,
) -> int:
    """Run a job: from a job file, or a command after `--`.

    The exit code is the job's own; 124 timed out, 125 refused or failed around the job, 137 out of memory,
    130 or 143 cancelled by a signal, 2 a command line or job file that can't be used.
    """
    from forgeyard_api.image_flags import image_options
    from forgeyard_api.job_from_flags import plan_run
    from forgeyard_api.pull_progress import pull_progress

    with as_usage():
        check_targets(output, result)
        _check_logs(service_logs)
    try:
        planned = plan_run(arguments)
        progress = pull_progress(quiet=quiet)
        images = image_options(arguments, progress)
        config = configured(state_dir, runtime)
        if keep_on_failure:
            refuse_unless_allowed(config)
        session = Session(
            planned, output=output, target=result, quiet=quiet, config=config, images=images, progress=progress
        )
        session.belongs_to(tenant, trusted=not untrusted)
        session.service_logs = service_logs
        session.keep_failed = keep_on_failure
        for note in planned.notes:
            say(f"note: {note}")
        return session.run_to_end()
    except UnusableInput as unusable:
        _write_error(result, unusable.error, USAGE)
        raise
    except ForgeyardError as error:
        _write_error(result, error, REFUSED)
        raise


class Session:
    """One `forgeyard run`: its signals, its output, its result."""

    def __init__(
        self,
        planned: PlannedRun,
        *,
        output: Path | None,
        target: str | None,
        quiet: bool,
        config: ExecutorConfig,
        images: ImageOptions,
        progress: PullProgress,
    ) -> None:
        self._planned = planned
        self._output = None if output is None else str(output.absolute())
        self._target = target
        self._quiet = quiet
        self._config = config
        self._images = images
        self._progress = progress
        self._tenant, self._trusted = "", True
        self.service_logs: Path | None = None
        """Where the services' output goes; None for nowhere."""
        self.keep_failed = False
        """Keep what a failed job wrote."""
        self.result: ExecutionResult | None = None
        """What came of it, once there is one."""
        self._more: dict[str, Any] = {}

    def belongs_to(self, tenant: str, *, trusted: bool) -> None:
        """Whose job it is; without this the only tenant's, trusted."""
        self._tenant, self._trusted = tenant, trusted

    def run_to_end(self) -> int:
        """See `run`."""
        import asyncio

        return asyncio.run(self.run())

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
            self._progress.close()
            say("cancelled before the job started")
            return interrupts.exit_code or REFUSED
        finally:
            self._progress.close()
            writer.close()

    async def _attempt(self, writer: OutputWriter) -> ExecutionResult:
        from forgeyard_executor import Executor

        async with Executor.open(config=self._config, keep_failed=self.keep_failed) as executor:
            planned = self._planned
            run = executor.run(
                planned.job,
                source=planned.source,
                output=self._output,
                tenant=self._tenant,
                trusted=self._trusted,
                images=self._images,
            )
            async with run as execution:
                self._progress.close()
                self._interrupts.attach(execution)
                async with self._service_logs(execution):
                    async for chunk in execution.output():
                        await writer.write(2 if chunk.stream == "stderr" else 1, chunk.data)
                    result: ExecutionResult = await execution.wait()
                if self._target is not None:
                    self._more = self._reproduction(execution)
                await self._interrupts.settle()
        return as_interrupted(result, self._interrupts)

    def _reproduction(self, execution: Execution) -> dict[str, Any]:
        """What the result file holds beside the result."""
        from forgeyard_api.operate.reproduction import Origin, Pins, reproduction

        planned = self._planned
        origin = Origin(planned.source, self._tenant, self._trusted)
        return reproduction(planned.job, origin, self._config, Pins.of(execution.attempt))

    def _service_logs(self, execution: Execution) -> AbstractAsyncContextManager[None]:
        """For the block, the services' output is written as it comes; at its end all of it is there."""
        from contextlib import nullcontext

        services = self._planned.job.services
        if self.service_logs is None or not services:
            return nullcontext()
        from forgeyard_api.service_logs import service_logs

        return service_logs(execution, [service.name for service in services], self.service_logs)

    async def _report(self, result: ExecutionResult, writer: OutputWriter) -> int:
        from forgeyard_api.summary import show_summary

        await writer.drain()
        lost = writer.losses()
        self.result = result = replace(result, notes=(*result.notes, *lost)) if lost else result
        if not self._quiet or result.exit_code:
            _ignoring_broken_stderr(show_summary, result)
        if self._target is not None:
            await _write(self._target, result, writer, self._more)
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


async def _write(target: str, result: ExecutionResult, writer: OutputWriter, more: dict[str, Any]) -> None:
    from forgeyard_api.result_file import STDOUT, write_result
    from forgeyard_model.result_json import result_json

    data = result_json(result, **more)
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


def _check_logs(directory: Path | None) -> None:
    """Made before anything runs, so that a job does not end with nowhere to put them."""
    if directory is None:
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequest("--service-logs", directory, f"can't be made: {error.strerror}") from error


def check_targets(output: Path | None, result: str | None) -> None:
    """Before the job runs: there is where its output and its result can go.

    :raises InvalidRequest: names the flag.
    """
    from forgeyard_api.result_file import check_absent_or_empty, check_target

    if result is not None:
        check_target(result)
    if output is not None:
        check_absent_or_empty("--output", output)
