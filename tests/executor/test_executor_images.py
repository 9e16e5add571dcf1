"""Pulls inside an executor: bounded in time, ended by a cancel, and never in another job's way."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from jobs import sh

from forgeyard_executor import Executor, ExecutorError, Job, Outcome, Timeouts
from forgeyard_executor.images import PULLS, ImageOptions
from forgeyard_model.errors import InvalidRequest

pytestmark = pytest.mark.kernel

DIGEST = f"sha256:{'a' * 64}"


@pytest.fixture
def silent() -> Iterator[tuple[str, Callable[[], bool]]]:
    """A registry that never answers: its address, and whether somebody has connected to it."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        server.settimeout(0)
        taken: list[socket.socket] = []

        def connected() -> bool:
            with contextlib.suppress(BlockingIOError):
                taken.append(server.accept()[0])
            return bool(taken)

        yield f"127.0.0.1:{server.getsockname()[1]}", connected
        for connection in taken:
            connection.close()


def pulling(host: str, number: int = 0, **more: object) -> Job:
    """A job whose image will never come."""
    return Job(image=f"{host}/app-{number}@{DIGEST}", steps=(sh("true"),), **more)  # type: ignore[arg-type]  # passed on


async def until(condition: Callable[[], bool]) -> None:
    """Wait for a condition that nothing announces."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def start(executor: Executor, job: Job) -> Outcome:
    """Run a job to its end."""
    async with executor.run(job) as execution:
        return (await execution.wait()).outcome


def test_pulls_do_not_hold_up_other_jobs(
    state_dir: Path, warm_rootfs: None, leaks: object, busybox_image: str, silent: tuple[str, Callable[[], bool]]
) -> None:
    """With more pulls waiting than the pool of host work has threads, other jobs run, end and are cleaned."""
    host, connected = silent

    async def main() -> tuple[Outcome, Outcome, list[object]]:
        async with Executor.open(state_dir) as executor:
            pulls = [asyncio.ensure_future(start(executor, pulling(host, n))) for n in range(PULLS - 2)]
            await until(connected)
            process = await start(executor, Job(rootfs="host", steps=(sh("true"),)))
            image = await start(executor, Job(image=busybox_image, steps=(sh("true"),)))
            for pull in pulls:
                pull.cancel()
            async with asyncio.timeout(60):  # a pull by itself has much longer
                ended = await asyncio.gather(*pulls, return_exceptions=True)
            return process, image, ended

    process, image, ended = asyncio.run(main())
    assert (process, image) == (Outcome.SUCCEEDED, Outcome.SUCCEEDED)
    assert all(isinstance(end, asyncio.CancelledError) for end in ended)
    assert not list((state_dir / "sandboxes").iterdir())
    assert not list((state_dir / "images" / "claims").iterdir())


def test_a_pull_has_the_time_of_preparing(
    state_dir: Path, leaks: object, silent: tuple[str, Callable[[], bool]]
) -> None:
    """prepare_timeout ends a pull with its own name; nothing of the attempt is left."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            await start(executor, pulling(silent[0], timeouts=Timeouts(prepare=0.5)))

    with pytest.raises(ExecutorError, match=r"prepare_timeout of 0\.5s expired") as caught:
        asyncio.run(main())
    assert caught.value.reason == "prepare_timeout"
    assert not list((state_dir / "sandboxes").iterdir())


def test_an_unknown_policy_is_refused(state_dir: Path, busybox_image: str) -> None:
    """A program's typing mistake is named before anything is made."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            job = Job(image=busybox_image, steps=(sh("true"),))
            async with executor.run(job, images=ImageOptions(pull="sometimes")):
                pass

    with pytest.raises(InvalidRequest, match="write missing, always, never"):
        asyncio.run(main())


def test_a_warm_image_job_imports_no_client(state_dir: Path, busybox_image: str) -> None:
    """The second process that runs an image loads neither the registry client, nor pydantic, nor a drawing library."""
    script = """
import asyncio, sys
from pathlib import Path
from forgeyard_executor import Executor, Job, Step
async def main():
    async with Executor.open(Path(sys.argv[1])) as executor:
        async with executor.run(Job(image=sys.argv[2], steps=(Step("true", entrypoint=True),))) as execution:
            assert (await execution.wait()).exit_code == 0
asyncio.run(main())
if sys.argv[3] == "warm":
    heavy = {"requests", "urllib3", "oras", "rich", "pydantic", "yaml"} & set(sys.modules)
    assert not heavy, heavy
"""
    for turn in ("cold", "warm"):
        run = subprocess.run(
            [sys.executable, "-c", script, str(state_dir), busybox_image, turn],
            capture_output=True,
            text=True,
            timeout=50,
        )
        assert run.returncode == 0, run.stderr
