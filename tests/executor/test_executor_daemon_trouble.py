"""Whole jobs whose daemon is killed, hung, full or cut off: a typed result in bounded time, and nothing left."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_jobs import ADDRESS_VARIABLES, config_for
from adapters import DAEMON_NAMES, parameter
from daemon_objects import assert_as_before, seen
from daemon_trouble import Cut, CutSocket, filled, small_disk
from daemons import DAEMONS, Daemon, Dockerd
from jobs import sh
from waiting_jobs import waiting

from forgeyard_executor import CancellationReason, Executor, ForgeyardError, Job, Outcome, Timeouts
from forgeyard_model.errors import FailureClass
from forgeyard_runtimes.containerd.client import Client
from forgeyard_runtimes.docker.client import DockerClient
from forgeyard_runtimes.podman.client import Deadlines

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

DISK = 192
"""MiB for a daemon: enough for all it keeps, and soon filled."""
CUTS: tuple[Cut, ...] = ("clean", "reset")


@pytest.fixture(scope="module", params=list(map(parameter, DAEMON_NAMES)))
def daemon(request: pytest.FixtureRequest, shared_state: Path) -> Iterator[Daemon]:
    """A daemon of this module's own, on a small disk, with nothing more at its end than after its first job.

    Docker's keeps its containers when it is away.
    """
    kind = DAEMONS[DAEMON_NAMES[request.param]]
    options: dict[str, Any] = {"options": ("--live-restore",)} if kind is Dockerd else {}
    with small_disk(DISK) as directory, kind(directory, **options) as started:
        asyncio.run(first_job(started, shared_state))
        before = seen(started)
        yield started
        assert_as_before(started, before)


@pytest.fixture
def state(shared_state: Path) -> Iterator[Path]:
    """A state directory that has nothing more of attempts afterwards."""
    before = left(shared_state)
    yield shared_state
    assert left(shared_state) == before


def name_of(daemon: Daemon) -> str:
    """The adapter's."""
    return next(adapter for adapter, name in DAEMON_NAMES.items() if isinstance(daemon, DAEMONS[name]))


@asynccontextmanager
async def executor_at(daemon: Daemon, state: Path, address: str = "") -> AsyncIterator[Executor]:
    """An executor on the daemon, or on what stands before it."""
    name = name_of(daemon)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLES[name], address or daemon.address)
        async with Executor.open(state, runtime=name, config=config_for(name)) as executor:
            yield executor


async def first_job(daemon: Daemon, state: Path) -> None:
    """Has made whatever is made once."""
    async with executor_at(daemon, state) as executor:
        assert await quick(executor) == 3


async def quick(executor: Executor) -> int | None:
    """The exit code of a job that makes no trouble itself."""
    async with executor.run(Job(rootfs="host", steps=(sh("exit 3"),))) as execution:
        return (await execution.wait()).exit_code


def left(state: Path) -> set[Path]:
    """What attempts have on the host."""
    return {*state.glob("sandboxes/*"), *state.glob("ledger/*")}


def kill_and_start(daemon: Daemon) -> None:
    """A crash, after which somebody starts it again."""
    daemon.kill()
    daemon.start()


@pytest.mark.parametrize("when", ["at once", "after the end"])
def test_a_crash_does_not_touch_the_job(daemon: Daemon, state: Path, when: str) -> None:
    """kill -9 of the daemon in the middle: the job goes on, is found again, and its result is right (C25, C31a)."""

    async def main() -> None:
        async with executor_at(daemon, state) as executor:
            async with waiting(executor, state) as job:
                daemon.kill()
                if when == "at once":
                    daemon.start()
                assert await job.end() == b"started\nended well\n"
                if when != "at once":
                    daemon.start()
                result = await job.execution.wait()
            assert (result.outcome, result.exit_code) == (Outcome.FAILED, 5), result.message
            assert await quick(executor) == 3
            await executor.recover()

    asyncio.run(main())


def test_a_restart_while_the_job_is_stopped(daemon: Daemon, state: Path) -> None:
    """Cancelled, and the daemon restarts within the grace: one result, and the job had its soft signal (C31d)."""

    async def main() -> None:
        script = "trap 'echo asked; read -r line < /work/tmp/go; exit 0' TERM; echo started; sleep 600 & wait"
        async with executor_at(daemon, state) as executor:
            async with waiting(executor, state, script, timeouts=Timeouts(grace=60)) as job:
                ending = asyncio.ensure_future(job.execution.cancel(CancellationReason.USER))
                async for chunk in job.execution.output():
                    if b"asked" in chunk.data:
                        break
                kill_and_start(daemon)
                await job.end()
                await ending
                result = await job.execution.wait()
            assert result.outcome is Outcome.CANCELLED, result.message
            await executor.recover()

    asyncio.run(main())


def test_a_hung_daemon_holds_up_nobody(daemon: Daemon, state: Path) -> None:
    """SIGSTOP: the job ends, or is killed; its result comes, the host is clean; what the daemon has is swept later."""

    async def main() -> None:
        before = left(state)
        async with executor_at(daemon, state) as executor:
            soon = Timeouts(grace=0.1)
            async with waiting(executor, state) as job, waiting(executor, state, timeouts=soon) as other:
                with hung(daemon):
                    assert await job.end() == b"started\nended well\n"
                    result = await job.execution.wait()
                    await other.execution.cancel(CancellationReason.USER)
                    cancelled = await other.execution.wait()
                    assert left(state) == before
            assert (result.outcome, result.exit_code) == (Outcome.FAILED, 5)
            assert cancelled.outcome is Outcome.CANCELLED
            assert any(note.startswith("cleanup: ") for note in result.notes)
            await executor.recover()

    asyncio.run(main())


def test_no_job_starts_at_a_hung_daemon(daemon: Daemon, state: Path) -> None:
    """Every call has a deadline: the start ends with a typed error that says who does not answer."""

    async def main() -> None:
        async with executor_at(daemon, state) as executor:
            with hung(daemon), pytest.raises(ForgeyardError) as caught:
                await quick(executor)
            assert caught.value.failure_class is FailureClass.INFRASTRUCTURE
            assert "answer" in str(caught.value)
            await executor.recover()

    asyncio.run(main())


@contextmanager
def hung(daemon: Daemon) -> Iterator[None]:
    """For a while the daemon answers nothing."""
    daemon.freeze()
    try:
        with short_deadlines():
            yield
    finally:
        daemon.thaw()


@contextmanager
def short_deadlines() -> Iterator[None]:
    """One second for whatever is asked of a daemon that will not answer."""
    ask, run = Client._ask, DockerClient._run

    async def asked(self: Client, call: Any, question: Any, seconds: float, *rest: Any, **more: Any) -> Any:
        return await ask(self, call, question, min(seconds, 1.0), *rest, **more)

    async def ran(self: DockerClient, work: Callable[[], Any], doing: str, deadline: float) -> Any:
        return await run(self, work, doing, 1.0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("forgeyard_executor.member.REMOVAL_DEADLINE", 1.0)
        patch.setattr(Client, "_ask", asked)
        patch.setattr(DockerClient, "_run", ran)
        patch.setattr(Deadlines, "of", lambda self, method: 1.0)
        yield


def test_a_full_disk(daemon: Daemon, state: Path) -> None:
    """Where the daemon keeps its state there is no byte left: a typed error, nothing stays, and then it works again."""

    async def main() -> None:
        async with executor_at(daemon, state) as executor:
            with filled(daemon.directory), pytest.raises(ForgeyardError) as caught:
                await quick(executor)
            assert caught.value.failure_class is FailureClass.INFRASTRUCTURE
            assert "space" in str(caught.value).lower()
            assert await quick(executor) == 3
            await executor.recover()

    asyncio.run(main())


@pytest.mark.parametrize("how", CUTS)
def test_a_cut_in_the_middle_is_no_end(daemon: Daemon, state: Path, how: Cut) -> None:
    """The socket is cut while the job runs, until it is over: its own end counts, and no stream's (C25)."""

    async def main(socket: CutSocket) -> None:
        async with executor_at(daemon, state, socket.address) as executor:
            async with waiting(executor, state) as job:
                socket.cut(how)
                assert await job.end() == b"started\nended well\n"
                await asyncio.to_thread(socket.wait_cut)
                socket.mend()
                result = await job.execution.wait()
            assert (result.outcome, result.exit_code) == (Outcome.FAILED, 5), result.message
            assert await quick(executor) == 3
            await executor.recover()

    with CutSocket(daemon.socket) as socket:
        asyncio.run(main(socket))


@pytest.mark.parametrize("how", [*CUTS, "unanswered"])
def test_a_cut_at_the_start_starts_nothing(daemon: Daemon, state: Path, how: Cut) -> None:
    """No answer comes, also to what was done: a typed error, and nothing of the attempt is anywhere."""

    async def main(socket: CutSocket) -> None:
        async with executor_at(daemon, state, socket.address) as executor:
            socket.cut(how)
            with short_deadlines(), pytest.raises(ForgeyardError) as caught:
                await quick(executor)
            socket.mend()
            assert caught.value.failure_class is FailureClass.INFRASTRUCTURE
            await executor.recover()

    with CutSocket(daemon.socket) as socket:
        asyncio.run(main(socket))


@pytest.mark.daemon("dockerd")
def test_docker_without_live_restore_loses_the_job(state: Path) -> None:
    """An orderly stop of dockerd ends its containers: an infrastructure failure, whatever the job would have said."""

    async def main(daemon: Dockerd) -> None:
        async with executor_at(daemon, state) as executor:
            async with waiting(executor, state) as job:
                await asyncio.to_thread(daemon.stop)
                async with asyncio.timeout(60):
                    result = await job.execution.wait()
                assert (result.outcome, result.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, 125), result.message
                assert result.exit is None
            daemon.start()
            await executor.recover()

    with Dockerd() as daemon:
        asyncio.run(main(daemon))


@pytest.mark.daemon("dockerd")
def test_dockers_image_removed_under_us(dockerd: Dockerd, state: Path) -> None:
    """An operator prunes the image that containers are made of, while a job runs on it: it is made once more."""
    argv = dockerd.docker("images", "--quiet", "forgeyard/skeleton")

    async def main() -> None:
        async with executor_at(dockerd, state) as executor, waiting(executor, state) as job:
            found = (await asyncio.to_thread(subprocess.check_output, argv, text=True)).split()
            for image in set(found):
                await asyncio.to_thread(subprocess.run, dockerd.docker("rmi", "--force", image), check=False)
            assert await quick(executor) == 3
            assert await job.end() == b"started\nended well\n"

    asyncio.run(main())
