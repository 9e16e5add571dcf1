"""Trouble with containerd: away, closed, hung, restarted, killed, or changed by an operator. A typed end, no hang."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from containerd_jobs import (
    assert_empty,
    bare,
    bare_place,
    ctr,
    executor_at,
    own_daemon,
    result_of,
    runtime_at,
    settings_for,
    shims,
)
from daemons import Containerd
from jobs import collect, sh

from forgeyard_executor import Job, Outcome
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.containerd.connect import release
from forgeyard_runtimes.containerd.errors import call_failed
from forgeyard_runtimes.containerd.runtime import ContainerdRuntime
from forgeyard_runtimes.containerd.settings import ContainerdSettings
from forgeyard_runtimes.contract import ContainerRef, ContainerStatus

pytestmark = [pytest.mark.kernel, pytest.mark.daemon("containerd")]

daemon = pytest.fixture(scope="module")(own_daemon)
place = pytest.fixture(bare_place)

WAITS = "echo started; read -r line < /work/tmp/go; echo ended $line; exit 5"


def find(settings: ContainerdSettings) -> None:
    """Connect and let go."""

    async def main() -> None:
        await (await ContainerdRuntime.find(settings)).close()

    asyncio.run(main())


def test_a_daemon_that_is_not_there(tmp_path: Path) -> None:
    """No socket, a socket that nobody serves, a file, another host: each is named at once, with a cure."""
    dead = tmp_path / "dead.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(dead))
    (tmp_path / "file").touch()
    for address, words in (
        (f"unix://{tmp_path}/nosuch.sock", "not there"),
        (str(dead), "nobody listens"),
        (str(tmp_path / "file"), "nobody listens"),
        ("tcp://127.0.0.1:1", "no socket of this host"),
    ):
        with pytest.raises(ExecutorError, match=words) as caught:
            find(ContainerdSettings(address=address))
        assert caught.value.kind is ExecutorErrorKind.UNSUPPORTED
        assert caught.value.resolution


AS_NOBODY = """
import sys
from forgeyard_model.errors import ExecutorError
from forgeyard_runtimes.containerd.errors import check_socket
try:
    check_socket(sys.argv[1])
except ExecutorError as error:
    print(error.kind.value, error.reason, error.resolution)
"""


def test_a_socket_without_permission(daemon: Containerd) -> None:
    """Somebody who may not open the socket is told so, and not that nobody is there."""
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--bounding-set=-all", "--inh-caps=-all"]
    python = [sys.executable, "-c", AS_NOBODY, str(daemon.socket)]
    environment = {"PATH": "/usr/bin", "PYTHONPATH": ":".join(sys.path), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run([*drop, *python], env=environment, capture_output=True, text=True, timeout=30)
    if "Permission denied" in done.stderr or "ModuleNotFound" in done.stderr:
        pytest.skip("nobody can't read this Python")
    assert done.stdout.startswith("unsupported containerd_permission run the executor"), done.stderr


@pytest.mark.parametrize(
    ("told", "number"),
    [("1.6.20~ds1", "1.6.20"), ("v2.0.5", "2.0.5"), ("v1.7.0-rc.1", "1.7.0"), ("1.5.13", None), ("unknown", None)],
)
def test_versions(told: str, number: str | None) -> None:
    """As distributions and upstream write them; one that is too old is refused with what would do."""
    if number is not None:
        assert release(told) == number
        return
    with pytest.raises(ExecutorError, match="too old") as caught:
        release(told)
    assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.UNSUPPORTED, "containerd_too_old")


def test_a_daemon_that_hangs(daemon: Containerd, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call has a deadline; when the daemon goes on, so do we."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            await made.run(runtime)
            monkeypatch.setattr("forgeyard_runtimes.containerd.connect.FIND_DEADLINE", 0.3)
            daemon.freeze()
            try:
                with pytest.raises(ExecutorError) as caught:
                    await ContainerdRuntime.find(settings_for(daemon))
                assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.TIMEOUT, "containerd_hangs")
                asking = asyncio.ensure_future(runtime.state(made.ref))
                done, _ = await asyncio.wait((asking,), timeout=0.2)
                assert not done
            finally:
                daemon.thaw()
            assert (await asking).status is ContainerStatus.RUNNING
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def interrupted(
    daemon: Containerd,
    state: Path,
    monkeypatch: pytest.MonkeyPatch,
    trouble: Callable[[], object],
    after: Callable[[], object] = lambda: None,
) -> tuple[int | None, bytes]:
    """Run a job that waits, make trouble, let the job write its last word, and only then undo the trouble.

    :returns: exit code and output.
    """

    async def main() -> tuple[int | None, bytes]:
        async with executor_at(daemon, state, monkeypatch) as (executor, runtime):
            job = Job(rootfs="host", steps=(sh("mkfifo /work/tmp/go"), sh(WAITS)))
            async with executor.run(job) as execution:
                reading = asyncio.ensure_future(collect(execution))
                gate = state / "sandboxes" / execution.sandbox_id / "scratch/worktmp/go"
                while not gate.exists():
                    await asyncio.sleep(0.01)
                trouble()  # not in another thread: a daemon of these tests ends with the thread that started it
                listening = runtime._events._listener
                await asyncio.to_thread(gate.write_text, "well\n")
                out, _ = await reading
                after()
                assert listening is not None
                assert not listening.done()
                result = await execution.wait()
        return result.exit_code, out

    return asyncio.run(main())


def test_a_restart_does_not_touch_the_job(
    daemon: Containerd, shared_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is restarted in the middle: the job goes on, its result is right, nothing is left (C31a, C25)."""

    def restart() -> None:
        daemon.stop()
        daemon.start()

    code, out = interrupted(daemon, shared_state, monkeypatch, restart)
    assert (code, out) == (5, b"started\nended well\n")
    assert_empty(daemon)


def test_a_crash_does_not_touch_the_job(
    daemon: Containerd, shared_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon is killed and comes back when the job is over: the result is right, the clean-up waits for it."""
    code, out = interrupted(daemon, shared_state, monkeypatch, daemon.kill, daemon.start)
    assert (code, out) == (5, b"started\nended well\n")
    assert_empty(daemon)


def test_an_end_during_a_break_is_found_afterwards(daemon: Containerd, place: Path) -> None:
    """Events are not repeated: after a reconnect the state is asked for."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            pid = await made.run(runtime)
            daemon.stop()
            os.kill(pid, signal.SIGKILL)
            daemon.start()
            async with asyncio.timeout(60):
                sight = await runtime._events.exited(made.ref.container_id)
            # 2.x removes a shim that it finds without processes: then only that it is over is known.
            assert sight.exit_status == 137 or sight.gone
            assert sight.breaks >= 1
            status = (await runtime.state(made.ref)).status
            assert status in (ContainerStatus.STOPPED, ContainerStatus.CREATING)
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def losses(runtime: ContainerdRuntime, monkeypatch: pytest.MonkeyPatch) -> list[ExecutorError | None]:
    """What the adapter says of each container's end, asked before its removal, when an executor asks."""
    said: list[ExecutorError | None] = []
    remove = runtime.remove

    async def asked(ref: ContainerRef) -> None:
        said.append(await runtime.loss(ref))
        await remove(ref)

    monkeypatch.setattr(runtime, "remove", asked)
    return said


def test_a_killed_shim_is_no_result(daemon: Containerd, shared_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim's death takes the container along: no exit status comes of it, and whose fault it is is said (C31b)."""

    async def main() -> None:
        async with executor_at(daemon, shared_state, monkeypatch) as (executor, runtime):
            said = losses(runtime, monkeypatch)
            job = Job(rootfs="host", steps=(sh("echo started; sleep 600"),))
            async with executor.run(job) as execution:
                (shim,) = shims(daemon)
                os.kill(shim, signal.SIGKILL)
                async with asyncio.timeout(60):
                    result = await execution.wait()
            assert result.exit is None
            assert result.outcome is not Outcome.SUCCEEDED
            assert [(lost.kind, lost.reason) for lost in said if lost] == [(ExecutorErrorKind.LOST, "runtime_lost")]
            following, _ = await result_of(executor, Job(rootfs="host", steps=(sh("exit 3"),)))
            assert following.exit_code == 3
            assert said[-1] is None

    asyncio.run(main())
    assert_empty(daemon)


def test_an_operator_ends_the_task(daemon: Containerd, shared_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed and deleted behind our back: no exit status, and the clean-up finds nothing to complain of."""

    async def main() -> None:
        async with executor_at(daemon, shared_state, monkeypatch) as (executor, _):
            job = Job(rootfs="host", steps=(sh("echo started; sleep 600"),))
            async with executor.run(job) as execution:
                name = f"fy-{execution.sandbox_id}"
                await asyncio.to_thread(ctr, daemon, "tasks", "kill", "--signal", "SIGKILL", "--all", name)
                async with asyncio.timeout(60):
                    result = await execution.wait()
            assert result.exit is None
            assert result.outcome is not Outcome.SUCCEEDED

    asyncio.run(main())
    assert_empty(daemon)


def test_an_operator_removes_the_container(daemon: Containerd, place: Path) -> None:
    """Everything is deleted behind our back: the pidfd tells, the state is absent, and removing it is no error."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            pidfd = os.pidfd_open(await made.run(runtime))
            ctr(daemon, "tasks", "delete", "--force", made.ref.container_id)
            ctr(daemon, "containers", "delete", made.ref.container_id)
            try:
                async with asyncio.timeout(60):
                    await runtime.wait(pidfd)
                await runtime.kill(made.ref, pidfd)
            finally:
                os.close(pidfd)
            assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_calls_while_it_is_away_are_typed(daemon: Containerd, place: Path) -> None:
    """What may not be asked twice fails at once when nobody is there; nothing of it is there afterwards."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            daemon.stop()
            removing = None
            try:
                made = bare(place)
                laying = asyncio.ensure_future(made.lay_down(runtime))
                # It has been missed by then; undoing what may have been made waits for the daemon.
                await asyncio.wait((laying,), timeout=3)
                removing = asyncio.ensure_future(runtime.remove(made.ref))
                done, _ = await asyncio.wait((removing,), timeout=0.2)
                assert not done
            finally:
                daemon.start()
            with pytest.raises(ExecutorError) as caught:
                await laying
            assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.LOST, "containerd_unavailable")
            await removing

    asyncio.run(main())
    assert_empty(daemon)


@pytest.mark.parametrize(
    ("method", "code", "details", "kind", "reason"),
    [
        ("Tasks/Create", "UNAVAILABLE", "broken", ExecutorErrorKind.LOST, "unavailable"),
        ("Tasks/Create", "DEADLINE_EXCEEDED", "", ExecutorErrorKind.TIMEOUT, "hangs"),
        ("Tasks/Create", "UNIMPLEMENTED", "unknown service", ExecutorErrorKind.UNSUPPORTED, "too_old"),
        ("Containers/Create", "PERMISSION_DENIED", "", ExecutorErrorKind.UNSUPPORTED, "denied"),
        ("Content/Write", "UNKNOWN", "write x: no space left on device", ExecutorErrorKind.IO_FAILED, "no_space"),
        ("Content/Write", "RESOURCE_EXHAUSTED", "", ExecutorErrorKind.IO_FAILED, "no_space"),
        ("Tasks/Create", "UNKNOWN", "runc create failed", ExecutorErrorKind.SPAWN_FAILED, "refused"),
        ("Images/Create", "INVALID_ARGUMENT", "name", ExecutorErrorKind.INTERNAL, "refused"),
        ("Containers/Delete", "NOT_FOUND", "x", ExecutorErrorKind.SPAWN_FAILED, "not_found"),
    ],
)
def test_what_each_refusal_means(method: str, code: str, details: str, kind: ExecutorErrorKind, reason: str) -> None:
    """Codes, and words where there is no code, become kinds of ours; the method and the daemon's words are kept."""
    error = call_failed(method, code, details, 5)
    assert (error.kind, error.reason) == (kind, f"containerd_{reason}")
    assert method in error.details
    assert details in error.details
