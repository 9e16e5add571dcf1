"""A server that is killed again and again, at any moment: every attempt that it took in comes to its one right end."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from adapter_jobs import ADDRESS_VARIABLES
from adapters import DAEMON_FIXTURES, parameter
from daemon_objects import groups_of
from leftovers import containers_of
from server_process import ServerProcess, counted, served, whole

from forgeyard_api.client import RemoteExecutor
from forgeyard_executor import Job, Limits, Outcome, Step
from forgeyard_model.services import HealthCheck, ServiceSpec, TcpProbe

ADAPTERS = ("runc", "containerd", "podman", "docker")
KILLS = -(-int(os.environ.get("FORGEYARD_TEST_KILLS", "8")) // len(ADAPTERS))
"""Of the server, for each adapter: 50 of all in the nightly script."""
AT_ONCE = 2
LINES = 40
_HTTPD = "mkdir -p /tmp/www; exec httpd -f -p 80 -h /tmp/www"

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(300 + 60 * KILLS)]


@pytest.fixture
def daemon(request: pytest.FixtureRequest, adapter: str) -> Iterator[Any]:
    """The daemon of the adapter, which servers of this test find; None for runc."""
    if adapter not in DAEMON_FIXTURES:
        yield None
        return
    with pytest.MonkeyPatch.context() as patch:
        found = request.getfixturevalue(DAEMON_FIXTURES[adapter])
        patch.setenv(ADDRESS_VARIABLES[adapter], found.address)
        yield found


@pytest.mark.parametrize("adapter", list(map(parameter, ADAPTERS)))
def test_a_server_is_killed_again_and_again(adapter: str, daemon: Any, state_dir: Path, busybox_image: str) -> None:
    """Results are right, output is whole and comes once, nothing runs twice, and nothing is left."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    with served(state_dir, runtimes=(adapter,)) as server:
        names = asyncio.run(played(server, random.Random(seed), busybox_image))
        names |= {path.stem for path in (state_dir / "executors").iterdir()}
        server.kill()
        server.assert_nothing_left()
        server.assert_calm()
        assert groups_of(names) == []
        if daemon is not None:
            assert containers_of(daemon, state_dir) == set()


async def played(server: ServerProcess, dice: random.Random, image: str) -> set[str]:
    """Kill it while clients run one job after another; the sandboxes that those had."""
    over = asyncio.Event()
    sandboxes: set[str] = set()
    async with server.client() as client, asyncio.TaskGroup() as group:
        for worker in range(AT_ONCE):
            group.create_task(jobs(client, worker, over, image, sandboxes))
        for _ in range(KILLS):
            await asyncio.sleep(dice.random() * 3)  # the moment is the point
            server.kill()
            await asyncio.to_thread(server.start)
        over.set()
    assert sandboxes
    return sandboxes


async def jobs(client: RemoteExecutor, worker: int, over: asyncio.Event, image: str, sandboxes: set[str]) -> None:
    """One after another, each looked at whole; every other with a service."""
    number = 0
    while not over.is_set():
        code = number % 3
        async with client.run(
            job(code, image, service=(number + worker) % 2 == 1), attempt_id=f"{worker}-{number}"
        ) as execution:
            result, out = await whole(execution)
            assert result == await execution.wait()
        assert (result.exit_code, result.outcome is Outcome.SUCCEEDED) == (code, code == 0), result
        assert not [note for note in result.notes if note.startswith("cleanup: ")], result.notes
        assert out == counted(LINES), (len(out), out[:200])
        sandboxes.add(result.sandbox_id)
        number += 1


def job(code: int, image: str, *, service: bool) -> Job:
    """It says one line after another and then ends."""
    script = f"i=0; while [ $i -lt {LINES} ]; do echo line $i; i=$((i+1)); sleep 0.05; done; exit {code}"
    health = HealthCheck(TcpProbe(80), interval=0.1, retries=10_000)
    web = ServiceSpec("web", image=image, entrypoint=(), command=("/bin/sh", "-c", _HTTPD), user="1000", health=health)
    limits = Limits(memory="64MiB", pids=64)
    return Job(rootfs="host", steps=(Step("/bin/sh", "-c", script),), services=(web,) if service else (), limits=limits)
