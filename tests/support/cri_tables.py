"""Tables of pretended attempts with a CRI endpoint over them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_bed import Endpoint, cri_over
from served import ALICE, JOB, ROOT, prepare, table_over

from forgeyard_api.cri.messages import cri
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Caller, Wanted
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_executor import Job
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.services import ServiceSpec

HOLDS = FakeRun(output=b"one\ntwo\nthr", error_output=b"bad\n", holds=True)
WITH_SERVICE = Job(rootfs="host", name="job", steps=JOB.steps, services=(ServiceSpec("db", argv=("x",)),))
WHEN = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


@asynccontextmanager
async def bed(
    state: Path, executor: FakeExecutor | None = None, **serve: Any
) -> AsyncIterator[tuple[AttemptTable, Endpoint]]:
    """A table over pretended jobs that hold, and an endpoint over that."""
    async with (
        table_over(state, executor or FakeExecutor(lambda _: HOLDS)) as table,
        cri_over(table, state, **serve) as endpoint,
    ):
        try:
            yield table, endpoint
        finally:
            for view in table.list(ROOT):
                await table.cancel(Caller(view.owner_uid, 0, 0), view.attempt_id, kill=True)
            await table.until_idle()


async def running(table: AttemptTable, name: str, caller: Caller = ALICE, **wanted: Any) -> AttemptView:
    """An attempt that runs."""
    await prepare(table, caller, replace(Wanted(name, JOB, start=True), **wanted))
    return await table.wait(caller, name, AttemptState.RUNNING)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


async def logged(endpoint: Endpoint, container: str) -> cri.ContainerStatus:
    """The status of a container, once it has a log."""
    while True:
        status = (await endpoint.call("ContainerStatus", container_id=container)).status
        if status.log_path:
            return status
        await asyncio.sleep(0.01)
