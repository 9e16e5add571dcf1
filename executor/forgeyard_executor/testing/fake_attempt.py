"""A pretended attempt: the states and verdicts of a real one, and nothing behind them."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from forgeyard_executor.execution import Execution
from forgeyard_executor.testing.fake_sandbox import FakePrepared, FakeSandbox
from forgeyard_executor.verdict import End, Verdict
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.job import Step
from forgeyard_model.result import (
    CancellationReason,
    CollectedOutput,
    EndCause,
    Evidence,
    ExecutionOutcome,
    ExecutionResult,
)

if TYPE_CHECKING:
    from forgeyard_executor.attempt import Attempt


class FakeAttempt(Execution):
    """A started attempt: an `Execution`, with a pretended sandbox below it. `release` ends one that holds."""

    def __init__(self, prepared: FakePrepared) -> None:
        self._sandbox = FakeSandbox(prepared)
        self._sandbox.at_end = self._come_to
        # It has all that an execution uses of an attempt, which tests/executor/test_executor_contract.py goes through.
        super().__init__(cast("Attempt", self._sandbox))

    @property
    def prepared(self) -> FakePrepared:
        """What was started."""
        return self._sandbox.prepared

    @property
    def steps_run(self) -> list[Step]:
        """Every step that was run, in order, those sent later included."""
        return self._sandbox.steps_run

    @property
    def output_dropped(self) -> bool:
        """Whether somebody said that nobody wants its output any more."""
        return self._sandbox.spool.removed

    @property
    def ended(self) -> bool:
        """Whether it has a result."""
        return self._task.done()

    def release(self) -> None:
        """Let what holds come to its end."""
        self._sandbox.container.released.set()
        if not self.prepared.job.steps:
            self.finish()

    def lose(self, error: ForgeyardError | None = None) -> None:
        """Kill its sandbox from outside. `error`: what the engine knows of that."""
        self._sandbox.container.lose(error)

    def end_service(self, name: str, exit_code: int = 0, *, lost: bool = False) -> None:
        """Let a service's program end now; with `lost` its container, from outside.

        :raises KeyError: no such service was started.
        """
        self._sandbox.launcher.running[name].end(exit_code, lost=lost)

    async def over(self) -> None:
        """Return when it has ended, however that was."""
        await super().wait()

    async def wait(self) -> ExecutionResult:
        """The result that its `FakeRun` asks for, or `lost`."""
        result = await super().wait()
        if self.prepared.behaviour.lost is not None:
            raise self.prepared.behaviour.lost
        return result

    def _come_to(self, outcome: ExecutionOutcome) -> None:
        if outcome is ExecutionOutcome.TIMED_OUT:
            self._set_end(
                End(EndCause.TIMED_OUT, detail="timeout", limit=self.prepared.request.limits.wall_time or 0.0)
            )
        elif outcome is ExecutionOutcome.CANCELLED:
            self._set_end(End(EndCause.CANCELLED, cancellation=CancellationReason.USER))
        elif outcome is ExecutionOutcome.INFRASTRUCTURE_FAILURE:
            self._set_end(End(EndCause.INFRASTRUCTURE, detail="the sandbox was lost"))

    def _judge(self, evidence: Evidence, outputs: tuple[CollectedOutput, ...]) -> Verdict:
        verdict = super()._judge(evidence, outputs)
        violation = ExecutionOutcome.SANDBOX_VIOLATION
        if self.prepared.behaviour.outcome is violation and verdict.outcome is ExecutionOutcome.FAILED:
            return Verdict(violation, 159, "sandbox violation", verdict.notes)
        return verdict
