"""The calls of the API: messages in, messages out, and the table of attempts between."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing
from typing import Any, Final

import grpc

from forgeyard_api.observe import audit
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Caller
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.requests import wanted_from
from forgeyard_api.serve.shown import (
    attempt_message,
    capabilities_message,
    chunk_message,
    container_message,
    event_message,
    reason_from,
    state_from,
)
from forgeyard_api.wire.convert import from_message, to_message
from forgeyard_api.wire.errors import code_of, trailing
from forgeyard_api.wire.messages import API_VERSION, Method, methods
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError, InvalidRequest
from forgeyard_model.job import Step
from forgeyard_runtimes.spool_format import SpoolMark

log: Final = logging.getLogger("forgeyard.serve")

WAIT_SECONDS: Final = 50.0
"""A Wait answers by then, with the attempt as it stands; whoever still wants to wait asks again."""

CallerOf = Callable[["grpc.aio.ServicerContext[Any, Any]"], Caller]
Handler = Callable[[Any, Caller], Any]


class ExecutorService:
    """`forgeyard.executor.v1.Executor` over a table of attempts.

    :param checks: what of a Prepare is the operator's to allow.
    """

    def __init__(self, table: AttemptTable, checks: Checks, version: str) -> None:
        self._table = table
        self._checks = checks
        self._version = version

    async def capabilities(self, request: wire.CapabilitiesRequest, caller: Caller) -> wire.CapabilitiesResponse:
        """What one runtime can do here."""
        found = await self._executor(request.runtime).capabilities(renew=request.renew and caller.operator)
        return wire.CapabilitiesResponse(
            capabilities=capabilities_message(found),
            runtimes=list(self._table.executors),
            version=self._version,
            api_version=API_VERSION,
        )

    async def watch_capabilities(
        self, request: wire.WatchCapabilitiesRequest, caller: Caller
    ) -> AsyncIterator[wire.WatchCapabilitiesResponse]:
        """The same, and each change."""
        async with aclosing(self._executor(request.runtime).watch_capabilities()) as changes:
            async for found in changes:
                yield wire.WatchCapabilitiesResponse(capabilities=capabilities_message(found))

    async def prepare(self, request: wire.PrepareRequest, caller: Caller) -> wire.PrepareResponse:
        """Take an attempt in."""
        wanted = wanted_from(request, on_client_death=self._checks.on_client_death)
        self._checks.check(caller, wanted)
        view = await self._table.prepare(caller, wanted, request.SerializeToString(deterministic=True))
        return wire.PrepareResponse(attempt=attempt_message(view))

    async def start(self, request: wire.StartRequest, caller: Caller) -> wire.StartResponse:
        """Let it run."""
        return wire.StartResponse(attempt=attempt_message(await self._table.start(caller, request.attempt_id)))

    async def exec(self, request: wire.ExecRequest, caller: Caller) -> wire.ExecResponse:
        """Run one more step."""
        if not request.HasField("step"):
            raise InvalidRequest("step", "", "give the step to run")
        step = from_message(Step, request.step)
        audit.acted(audit.Event.EXEC, caller, self._table.find(caller, request.attempt_id), step=step.name)
        result = await self._table.exec(caller, request.attempt_id, step)
        response = wire.ExecResponse()
        to_message(result, response.result)
        return response

    async def finish(self, request: wire.FinishRequest, caller: Caller) -> wire.FinishResponse:
        """No further step comes."""
        await self._table.finish(caller, request.attempt_id)
        return wire.FinishResponse()

    async def wait(self, request: wire.WaitRequest, caller: Caller) -> wire.WaitResponse:
        """As far as asked, or as it stands after a while."""
        until = state_from(request.until) or AttemptState.ENDED
        view: AttemptView
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                view = await self._table.wait(caller, request.attempt_id, until)
        except TimeoutError:
            view = self._table.find(caller, request.attempt_id)
        return wire.WaitResponse(attempt=attempt_message(view))

    async def cancel(self, request: wire.CancelRequest, caller: Caller) -> wire.CancelResponse:
        """Ask it to stop."""
        view = self._table.find(caller, request.attempt_id)
        if view.owner_uid != caller.uid:
            audit.acted(audit.Event.CANCELLED, caller, view, kill=request.kill)
        await self._table.cancel(caller, request.attempt_id, reason_from(request.reason), kill=request.kill)
        return wire.CancelResponse()

    async def renew(self, request: wire.RenewRequest, caller: Caller) -> wire.RenewResponse:
        """Extend its lease."""
        lease = request.lease.ToTimedelta().total_seconds() if request.HasField("lease") else None
        response = wire.RenewResponse()
        response.expires_at.FromDatetime(await self._table.renew(caller, request.attempt_id, lease))
        return response

    async def output(self, request: wire.OutputRequest, caller: Caller) -> AsyncIterator[wire.OutputResponse]:
        """What it writes. A slow reader holds up nobody: it reads from disk."""
        stdout, stderr = request.after.stdout, request.after.stderr
        chunks = self._table.output(
            caller,
            request.attempt_id,
            request.service,
            after=SpoolMark(stdout, stderr),
            follow=not request.no_follow,
        )
        async with aclosing(chunks):
            async for chunk in chunks:
                passed = len(chunk.data) + chunk.dropped_before
                if chunk.stream == "stdout":
                    stdout += passed
                else:
                    stderr += passed
                yield chunk_message(chunk, SpoolMark(stdout, stderr))

    async def list_sandboxes(self, request: wire.ListSandboxesRequest, caller: Caller) -> wire.ListSandboxesResponse:
        """Those the caller may see."""
        states = [state for number in request.states if (state := state_from(number)) is not None]
        found = self._table.list(caller, states, dict(request.labels), request.tenant)
        return wire.ListSandboxesResponse(attempts=[attempt_message(view) for view in found])

    async def inspect(self, request: wire.InspectRequest, caller: Caller) -> wire.InspectResponse:
        """One of them, in every detail."""
        view, containers = await self._table.inspect(caller, request.attempt_id)
        return wire.InspectResponse(
            attempt=attempt_message(view), containers=[container_message(container) for container in containers]
        )

    async def cleanup(self, request: wire.CleanupRequest, caller: Caller) -> wire.CleanupResponse:
        """Forget it."""
        await self._table.cleanup(caller, request.attempt_id)
        return wire.CleanupResponse()

    async def events(self, request: wire.EventsRequest, caller: Caller) -> AsyncIterator[wire.EventsResponse]:
        """What becomes of attempts, from now on."""
        async with aclosing(self._table.events(caller, request.attempt_id)) as events:
            async for event in events:
                yield event_message(event)

    async def doctor(self, request: wire.DoctorRequest, caller: Caller) -> wire.DoctorResponse:
        """What the probes found."""
        found = await self._executor(request.runtime).capabilities()
        return wire.DoctorResponse(
            checks=[
                wire.DoctorCheck(name=probe.feature.value, works=probe.works, details=probe.details, cure=probe.cure)
                for probe in found.probes
            ]
        )

    async def drain(self, request: wire.DrainRequest, caller: Caller) -> wire.DrainResponse:
        """Take no more in."""
        if not caller.operator:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "not_allowed",
                f"uid {caller.uid} is no operator of this server",
                resolution="ask one, or add the uid to serve.operators",
            )
        audit.drained(caller, request.drain)
        self._table.drain(request.drain)
        running, queued = self._table.counts
        return wire.DrainResponse(draining=self._table.draining, running=running, queued=queued)

    def _executor(self, runtime: str) -> Any:
        executors = self._table.executors
        if not runtime:
            return next(iter(executors.values()))
        if runtime not in executors:
            raise InvalidRequest("runtime", runtime, f"this server has {', '.join(executors)}")
        return executors[runtime]


def handlers(service: str, target: object, caller_of: CallerOf) -> grpc.GenericRpcHandler:
    """gRPC's handlers for a service of the API, whose calls are methods of `target` in snake case."""
    found = {}
    for method in methods(service):
        act = getattr(target, snake(method.name))
        wrap, make = (
            (_streamed, grpc.unary_stream_rpc_method_handler)
            if method.streams
            else (_answered, grpc.unary_unary_rpc_method_handler)
        )
        found[method.name] = make(
            wrap(method, act, caller_of),
            request_deserializer=method.question.FromString,
            response_serializer=method.answer.SerializeToString,
        )
    return grpc.method_handlers_generic_handler(methods(service)[0].service, found)


def snake(name: str) -> str:
    """ListSandboxes as list_sandboxes."""
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).removeprefix("_")


def _answered(method: Method, act: Handler, caller_of: CallerOf) -> Any:
    async def call(request: Any, context: Any) -> Any:
        caller: Caller | None = None
        try:
            caller = caller_of(context)
            return await act(request, caller)
        except ForgeyardError as error:
            audit.answered(caller, method.name, error, getattr(request, "attempt_id", ""))
            await _refuse(context, error)
        except Exception as error:  # noqa: BLE001  # the edge: a caller gets one line, the log the whole
            await _refuse(context, _internal(method, error))

    return call


def _streamed(method: Method, act: Handler, caller_of: CallerOf) -> Any:
    async def call(request: Any, context: Any) -> Any:
        try:
            async with aclosing(act(request, caller_of(context))) as answers:
                async for answer in answers:
                    yield answer
        except ForgeyardError as error:
            await _refuse(context, error)
        except Exception as error:  # noqa: BLE001  # as above
            await _refuse(context, _internal(method, error))

    return call


async def _refuse(context: Any, error: ForgeyardError) -> None:
    context.set_trailing_metadata(trailing(error))
    await context.abort(code_of(error), str(error))


def _internal(method: Method, error: Exception) -> ExecutorError:
    log.exception("%s failed", method.path)
    return ExecutorError(
        ExecutorErrorKind.INTERNAL,
        "internal",
        f"{method.name} failed inside the server",
        details=f"{type(error).__name__}: {error}",
        resolution="report this with the server's log: it is a fault of ours",
    )
