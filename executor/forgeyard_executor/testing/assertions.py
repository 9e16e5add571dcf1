"""What to assert of an executor, pretended or not, and of what came of a job. Each says what it met."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from forgeyard_model.result import CLEANUP_NOTE, EndCause, ExecutionOutcome, ExecutionResult, StepResult

if TYPE_CHECKING:
    from forgeyard_executor.interface import JobExecutor, RunningAttempt
    from forgeyard_executor.testing.fake_executor import FakeExecutor

_CONTRACT: Final = ("name", "outcome", "failure_class", "exit_code", "end_cause", "cancellation", "exit")


async def output_of(attempt: RunningAttempt, service: str = "") -> tuple[bytes, bytes]:
    """All that a job, or one of its services, writes until its end: stdout and stderr."""
    chunks = attempt.service_output(service) if service else attempt.output()
    streams = {"stdout": bytearray(), "stderr": bytearray()}
    async for chunk in chunks:
        streams[chunk.stream] += chunk.data
    return bytes(streams["stdout"]), bytes(streams["stderr"])


async def assert_nothing_left(executor: JobExecutor, *, within: float = 30.0) -> None:
    """No attempt is there any more, and none that was prepared waits to be started.

    :param within: seconds that one which is ending has for it.
    """
    try:
        async with asyncio.timeout(within):
            while left := await executor.sandboxes():  # noqa: ASYNC110  # no executor announces the end of others' attempts
                await asyncio.sleep(0.02)  # no executor announces the end of others' attempts
    except TimeoutError:
        shown = ", ".join(f"{info.attempt_id} ({info.state})" for info in left)
        raise AssertionError(f"attempts were left behind: {shown}") from None


async def assert_ended_once(executor: FakeExecutor, attempt_id: str) -> ExecutionResult:
    """The attempt was prepared once, started once, and ended; its result, or what it was lost by, raised.

    What retries a call, or restarts and takes up what it had, is tested by this.
    """
    prepared = [item for item in executor.prepared if item.context.attempt_id == attempt_id]
    started = [item for item in executor.attempts if item.prepared.context.attempt_id == attempt_id]
    if len(prepared) != 1 or len(started) != 1:
        raise AssertionError(
            f"{attempt_id} was prepared {len(prepared)} times and started {len(started)} times, instead of once"
        )
    if not started[0].ended:
        raise AssertionError(f"{attempt_id} has not ended")
    return await started[0].wait()


def assert_sound(result: ExecutionResult) -> None:
    """`result` says one thing: outcome, class, cause, exit and steps agree, and everything could be undone."""
    if problems := list(_contradictions(result)):
        raise AssertionError(f"the result of {result.attempt_id} contradicts itself: {'; '.join(problems)}")


def assert_same_contract(one: ExecutionResult, other: ExecutionResult) -> None:
    """Both tell the same of their job: verdict, cause and exit, each step, services and outputs.

    Not compared: ids, times, figures, digests, and words for people.
    """
    left, right = _contract_of(one), _contract_of(other)
    differences = [
        f"{name}: {left.get(name)!r} and {right.get(name)!r}"
        for name in {**left, **right}
        if left.get(name) != right.get(name)
    ]
    if differences:
        raise AssertionError("the results differ in " + "; ".join(differences))


def _contract_of(result: ExecutionResult) -> dict[str, Any]:
    return {
        **{name: getattr(result, name) for name in _CONTRACT},
        **{f"steps[{index}]": _step(step) for index, step in enumerate(result.steps)},
        **{f"services.{service.name}": (service.state, service.exit) for service in result.services},
        **{f"outputs.{output.path}": (output.missing, output.optional) for output in result.outputs},
    }


def _step(step: StepResult) -> tuple[Any, ...]:
    return step.name, step.exit, step.skipped, step.masked, bool(step.error), step.exec_code


def _contradictions(result: ExecutionResult) -> Iterator[str]:
    outcome, cause = result.outcome, result.end_cause
    if result.failure_class is not outcome.failure_class:
        yield f"{outcome.value} is of class {outcome.failure_class.value}, not {result.failure_class.value}"
    if (result.exit_code == 0) is not (outcome is ExecutionOutcome.SUCCEEDED):
        yield f"{outcome.value} with exit code {result.exit_code}"
    if (cause is EndCause.CANCELLED) is not (outcome is ExecutionOutcome.CANCELLED):
        yield f"{outcome.value} for the cause {cause.value}"
    if (cause is EndCause.TIMED_OUT) is not (outcome is ExecutionOutcome.TIMED_OUT):
        yield f"{outcome.value} for the cause {cause.value}"
    if (result.cancellation is None) is (cause is EndCause.CANCELLED):
        yield f"cause {cause.value} and cancellation {result.cancellation}"
    if result.started_at > result.finished_at:
        yield "it ended before it began"
    if result.started_at.utcoffset() is None or result.finished_at.utcoffset() is None:
        yield "its times have no time zone"
    for step in result.steps:
        if step.skipped and (step.exit is not None or step.error):
            yield f"step {step.name} was skipped and ended"
    if outcome is ExecutionOutcome.SUCCEEDED and any(step.failed and not step.masked for step in result.steps):
        yield "it succeeded though a step failed"
    yield from (note for note in result.notes if note.startswith(CLEANUP_NOTE))
