"""An attempt that runs behind a socket."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC
from typing import Any, Final

from forgeyard_api.client.calls import Calls, away
from forgeyard_api.wire.convert import enum_number, from_message, to_message
from forgeyard_api.wire.errors import error_of
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.errors import ForgeyardError
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Step
from forgeyard_model.result import CancellationReason, ExecutionResult, StepResult
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark

WAIT_SECONDS: Final = 90.0
"""More than a server takes to answer a Wait with the attempt as it stands."""
STEP_SECONDS: Final = 7 * 86400.0
_PAUSE: Final = 0.1


@dataclass(frozen=True, slots=True)
class RemotePrepared:
    """A prepared attempt of a server's."""

    sandbox_id: SandboxId
    context: AttemptContext
    bundle_digest: str
    notes: tuple[str, ...]


class RemoteAttempt:
    """A started attempt of a server's. It goes on when this object, or its process, is gone, unless the server was
    asked to end it then.

    :param reconnect: seconds for which a server that is away is waited for.
    """

    def __init__(self, calls: Calls, attempt_id: str, sandbox_id: str, *, reconnect: float) -> None:
        self.attempt_id = attempt_id
        self._calls = calls
        self._sandbox_id = sandbox_id
        self._reconnect = reconnect
        self._finishing: asyncio.Future[Any] | None = None

    @property
    def sandbox_id(self) -> str:
        """Its name on the server's host."""
        return self._sandbox_id

    async def wait(self) -> ExecutionResult:
        """The result, once nothing of the attempt is left on the server's host.

        :raises ForgeyardError: it ended without one, or the server stays away.
        """
        attempt = await reached(self._calls, self.attempt_id, wire.ATTEMPT_STATE_ENDED)
        if attempt.HasField("error"):
            raise error_of(attempt.error)
        return from_message(ExecutionResult, attempt.result)

    async def cancel(self, reason: CancellationReason = CancellationReason.USER, *, kill: bool = False) -> None:
        """Ask the job to stop: soft signal, grace, kill; with `kill` without grace. Returns at once."""
        request = wire.CancelRequest(attempt_id=self.attempt_id, kill=kill)
        enum = wire.CancelRequest.DESCRIPTOR.fields_by_name["reason"].enum_type
        request.reason = enum_number(enum, reason)  # type: ignore[assignment]  # a number of the enum
        await self._calls.call("Cancel", request)

    async def exec(self, step: Step) -> StepResult:
        """Run one more step in an attempt that was started without steps. Not repeated when the connection breaks.

        :raises ForgeyardError: as the server has it.
        """
        request = wire.ExecRequest(attempt_id=self.attempt_id)
        to_message(step, request.step)
        answer = await self._calls.once("Exec", request, seconds=STEP_SECONDS)
        return from_message(StepResult, answer.result)

    def finish(self) -> None:
        """Say that no further `exec` comes. A failure to say so shows in `wait`, which then does not end."""
        self._finishing = asyncio.ensure_future(
            self._calls.call("Finish", wire.FinishRequest(attempt_id=self.attempt_id))
        )
        self._finishing.add_done_callback(_seen)

    def output(self, *, after: SpoolMark = START, follow: bool = True) -> AsyncGenerator[OutputChunk, None]:
        """The job's output as it comes, until its end; over a server's restart too."""
        return self._output("", after, follow=follow)

    def service_output(
        self, name: str, *, after: SpoolMark = START, follow: bool = True
    ) -> AsyncGenerator[OutputChunk, None]:
        """The same of a service."""
        return self._output(name, after, follow=follow)

    async def drop_output(self) -> None:
        """Delete the spooled output, and forget the attempt."""
        await self._calls.call("Cleanup", wire.CleanupRequest(attempt_id=self.attempt_id), seconds=WAIT_SECONDS)

    async def _output(self, service: str, after: SpoolMark, *, follow: bool) -> AsyncGenerator[OutputChunk, None]:
        mark = after
        given_up = time.monotonic() + self._reconnect
        while True:
            request = wire.OutputRequest(
                attempt_id=self.attempt_id,
                service=service,
                after=wire.OutputMark(stdout=mark.stdout, stderr=mark.stderr),
                no_follow=not follow,
            )
            try:
                async with aclosing(self._calls.stream("Output", request)) as answers:
                    async for answer in answers:
                        mark = SpoolMark(answer.mark.stdout, answer.mark.stderr)
                        given_up = time.monotonic() + self._reconnect
                        time_ = answer.time.ToDatetime(tzinfo=UTC)
                        yield OutputChunk(answer.stream, time_, answer.data, answer.dropped_before)
            except ForgeyardError as error:
                if not away(error) or time.monotonic() >= given_up:
                    raise
            else:
                return
            await asyncio.sleep(_PAUSE)


def _seen(finishing: asyncio.Future[Any]) -> None:
    """Its failure is told by `wait`; asyncio need not tell it too."""
    if not finishing.cancelled():
        finishing.exception()


async def reached(calls: Calls, attempt_id: str, state: Any) -> wire.Attempt:
    """The attempt, once it has got as far as `state`, or has ended.

    :raises ForgeyardError: the server's, or LOST when it stays away.
    """
    request = wire.WaitRequest(attempt_id=attempt_id, until=state)
    while True:
        answer: wire.WaitResponse = await calls.call("Wait", request, seconds=WAIT_SECONDS)
        if answer.attempt.state >= state:
            return answer.attempt
