"""Trouble with the Docker daemon is a typed error within its deadline; what is left is swept, ours and only ours."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import socket
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import requests
from daemons import Dockerd
from docker.errors import APIError, DockerException
from docker_jobs import DockerJob, docker, docker_job, settings

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, SandboxError, SandboxErrorKind
from forgeyard_process_shim.channel import ShimDied
from forgeyard_process_shim.protocol import Exited
from forgeyard_runtimes.contract import ContainerStatus
from forgeyard_runtimes.docker.client import DockerSettings
from forgeyard_runtimes.docker.errors import translate
from forgeyard_runtimes.docker.runtime import DockerRuntime
from forgeyard_runtimes.labels import owner_labels

daemon_test = pytest.mark.daemon("dockerd")


@pytest.fixture
def own() -> Iterator[Dockerd]:
    """A dockerd of this test's own, to be ill-treated."""
    with Dockerd() as daemon:
        yield daemon


def with_job(daemon: Dockerd, state: Path, body: Callable[[DockerJob], Awaitable[None]]) -> None:
    """Run `body` beside a container whose gate is open."""

    async def main() -> None:
        runtime = await DockerRuntime.find(settings(daemon, state))
        try:
            async with docker_job(runtime, state) as made:
                await made.open_gate()
                await body(made)
        finally:
            await runtime.close()

    asyncio.run(main())


def found(options: DockerSettings) -> ExecutorError:
    """The error that `find` meets."""

    async def main() -> None:
        await (await DockerRuntime.find(options)).close()

    with pytest.raises(ExecutorError) as caught:
        asyncio.run(main())
    return caught.value


def test_no_daemon_is_a_lost_one_with_a_cure(tmp_path: Path) -> None:
    """No socket, and a socket that nobody listens on, are told apart from a hang at once."""
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
    for host in (f"unix://{tmp_path}/nosuch.sock", f"unix://{path}"):
        error = found(DockerSettings(host=host))
        assert (error.kind, error.reason) == (ExecutorErrorKind.LOST, "docker_not_there"), str(error)
        assert error.resolution


def test_a_daemon_that_never_answers_is_given_up(tmp_path: Path) -> None:
    """Something that accepts and says nothing costs the deadline of a question and no more."""
    path = tmp_path / "docker.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        error = found(DockerSettings(host=f"unix://{path}", query=0.5, change=1))
    assert (error.kind, error.reason) == (ExecutorErrorKind.TIMEOUT, "runtime_hangs")


def api_error(status: int, said: str) -> APIError:
    """What docker-py raises for an answer."""
    response = requests.Response()
    response.status_code = status
    return APIError(said, response=response, explanation=said)


def test_errors_that_cannot_be_provoked_are_typed() -> None:
    """No permission (these tests are root), a full disk, a broken stream: each has a reason and a class."""
    denied = DockerException("Error while fetching server API version")
    denied.__cause__ = PermissionError(errno.EACCES, "Permission denied")
    cases = {
        "docker_permission": denied,
        "docker_disk_full": api_error(500, "mkdir /data/x: no space left on device"),
        "docker_not_found": api_error(404, "No such container"),
        "docker_refused": api_error(409, "Conflict"),
        "docker_lost": requests.exceptions.ConnectionError("Connection aborted."),
        "runtime_hangs": requests.exceptions.ReadTimeout("read timed out"),
    }
    for reason, error in cases.items():
        translated = translate(error, "do it")
        assert isinstance(translated, ExecutorError | SandboxError)
        assert translated.reason == reason
        assert translated.failure_class is FailureClass.INFRASTRUCTURE


@pytest.mark.kernel
@daemon_test
def test_a_hung_daemon_costs_its_deadline(own: Dockerd, shared_state: Path) -> None:
    """SIGSTOP to dockerd: the job's steps go on, questions time out, the kill works; thawed, the rest is removed."""

    async def body(made: DockerJob) -> None:
        client = made.runtime._client
        own.freeze()
        usual, client.settings = client.settings, replace(client.settings, query=1, change=1)
        try:
            assert await made.out("echo still here") == "still here"
            with pytest.raises(ExecutorError) as caught:
                await made.runtime.state(made.ref)
            assert caught.value.kind is ExecutorErrorKind.TIMEOUT
            await made.runtime.kill(made.ref, made.pidfd)
            await made.runtime.wait(made.pidfd)
            with pytest.raises(SandboxError) as left:
                await made.runtime.remove(made.ref)
            assert left.value.kind is SandboxErrorKind.CLEANUP_FAILED
        finally:
            own.thaw()
            client.settings = usual

    with_job(own, shared_state, body)


@pytest.mark.kernel
@daemon_test
def test_a_killed_daemon_ends_no_step(own: Dockerd, shared_state: Path) -> None:
    """dockerd dies: the step ends as it would have, what the daemon is asked is lost; a new one lets it be removed."""

    async def body(made: DockerJob) -> None:
        own.kill()
        end, said = await made.sh("echo on; exit 3")
        assert isinstance(end, Exited)
        assert (end.status, said) == (3 << 8, "on\n")
        for question in (made.runtime.state(made.ref), made.runtime.exec(made.ref, process(made), deadline=60)):
            with pytest.raises(ExecutorError) as caught:
                await question
            assert caught.value.kind is ExecutorErrorKind.LOST
        with pytest.raises(SandboxError, match="Docker"):
            await made.runtime.remove(made.ref)
        own.start()
        # A new daemon without live-restore ends what the old one left; either way nothing hangs.
        assert (await made.runtime.state(made.ref)).status in (ContainerStatus.RUNNING, ContainerStatus.STOPPED)

    with_job(own, shared_state, body)
    assert docker(own, "ps", "-aq") == ""


def process(made: DockerJob) -> bytes:
    """A compiled process of the job's container."""
    import json

    return json.dumps({**made.spec["process"], "args": ["/bin/true"]}).encode()


@pytest.mark.kernel
@daemon_test
def test_a_restarted_daemon_ends_the_job_as_lost(own: Dockerd, shared_state: Path) -> None:
    """An orderly stop of dockerd takes its containers along: the step's end is unknown, never a success."""

    async def body(made: DockerJob) -> None:
        step = asyncio.ensure_future(made.sh("exec sleep 60"))
        await asyncio.sleep(0)
        await asyncio.to_thread(own.stop)
        try:
            with pytest.raises(ShimDied):
                await asyncio.wait_for(step, 20)
        finally:
            own.start()
        assert (await made.runtime.state(made.ref)).status is ContainerStatus.STOPPED

    with_job(own, shared_state, body)


@pytest.mark.kernel
@daemon_test
def test_live_restore_keeps_the_job(shared_state: Path) -> None:
    """With live-restore a restart of dockerd is nothing to a job; the container is found again and removed."""

    async def body(made: DockerJob, daemon: Dockerd) -> None:
        await asyncio.to_thread(daemon.stop)
        assert await made.out("echo between") == "between"
        daemon.start()
        state = await made.runtime.state(made.ref)
        assert (state.status, state.pid) == (ContainerStatus.RUNNING, made.pid)
        assert await made.out("echo after") == "after"

    with Dockerd(options=("--live-restore",)) as daemon:
        with_job(daemon, shared_state, lambda made: body(made, daemon))
        assert docker(daemon, "ps", "-aq") == ""


@pytest.mark.kernel
@daemon_test
def test_the_sweep_takes_ours_and_only_ours(dockerd: Dockerd, shared_state: Path, tmp_path: Path) -> None:
    """Containers of dead executors go, also ended and never started ones; one that can't be removed stops nothing."""
    mine = settings(dockerd, tmp_path)

    async def main() -> None:
        runtime = await DockerRuntime.find(mine)
        try:
            async with docker_job(await runtime_for(dockerd, shared_state), shared_state) as made:
                await made.create()
                image = docker(dockerd, "images", "-q", "forgeyard/skeleton").split()[0]
            names = {
                "swept-dead": {**owner_labels(mine, "a"), "forgeyard.executor": "dead"},
                "swept-boot": {**owner_labels(mine, "b"), "forgeyard.boot": "another"},
                "kept-alive": owner_labels(mine, "c"),
                "kept-other": owner_labels(settings(dockerd, shared_state), "d"),
            }
            for name, labels in names.items():
                make_container(dockerd, name, image, labels)
            dead = labels_of({**owner_labels(mine, "v"), "forgeyard.executor": "dead"})
            docker(dockerd, "volume", "create", *dead, "stuck")
            docker(dockerd, "network", "create", "--internal", "--subnet", "10.255.254.0/28", *dead, "swept-network")
            make_container(dockerd, "kept-user", image, {}, "-v", "stuck:/usr")
            try:
                report = await runtime.sweep(lambda sandbox: sandbox == "c")
                there = set(docker(dockerd, "ps", "-a", "--format", "{{.Names}}").split())
                assert there >= {"kept-alive", "kept-other", "kept-user"}
                assert not there & {"swept-dead", "swept-boot"}
                assert sorted(report.removed) == [
                    "container swept-boot",
                    "container swept-dead",
                    "network swept-network",
                ]
                assert [what for what, _ in report.failed] == ["volume stuck"]
            finally:
                docker(dockerd, "rm", "-fv", "kept-alive", "kept-other", "kept-user")
            again = await runtime.sweep(lambda _: False)
            assert (again.removed, again.failed) == (("volume stuck",), ())
        finally:
            await runtime.close()

    asyncio.run(main())


async def runtime_for(daemon: Dockerd, state: Path) -> DockerRuntime:
    """Another adapter on the same daemon."""
    return await DockerRuntime.find(settings(daemon, state))


def labels_of(labels: dict[str, str]) -> list[str]:
    """Labels as docker's command line takes them."""
    return [word for name, value in labels.items() for word in ("--label", f"{name}={value}")]


def make_container(daemon: Dockerd, name: str, image: str, labels: dict[str, str], *more: str) -> None:
    """A container that is never started."""
    docker(daemon, "create", "--name", name, "--network", "none", *labels_of(labels), *more, image, "/none")


@pytest.mark.kernel
@daemon_test
def test_a_cancelled_start_leaves_nothing(dockerd: Dockerd, shared_state: Path) -> None:
    """A start that is cancelled is completed and undone: no container comes up behind its owner's back."""

    async def main() -> None:
        runtime = await DockerRuntime.find(settings(dockerd, shared_state))
        try:
            async with docker_job(runtime, shared_state) as made:
                await made.create()
                starting = asyncio.ensure_future(runtime.start(made.ref))
                await asyncio.sleep(0.01)
                starting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await starting
                assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT
        finally:
            await runtime.close()

    asyncio.run(main())
