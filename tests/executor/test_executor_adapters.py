"""Whole jobs on adapters of daemons: networks, services, what is refused, and what is left at the daemon."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from adapter_jobs import ADDRESS_VARIABLES, Jobs, jobs_on
from adapters import DAEMON_FIXTURES, parameter
from jobs import sh
from killed import undone

from forgeyard_executor import Executor, ExecutorConfig, ExecutorError, ForgeyardError, Job, Limits, Network, Outcome
from forgeyard_model.policy import CapabilityGrant, IsolationLevel, NetworkDestination
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.services import HealthCheck, HttpProbe, ServiceSpec
from forgeyard_runtimes.containerd.runtime import ContainerdRuntime
from forgeyard_runtimes.find import state_name

pytestmark = pytest.mark.kernel

ON_DAEMONS = pytest.mark.parametrize("adapter", list(map(parameter, DAEMON_FIXTURES)), indirect=True)
ON_DOCKER = pytest.mark.parametrize("adapter", [parameter("docker")], indirect=True)
ON_CONTAINERD = pytest.mark.parametrize("adapter", [parameter("containerd")], indirect=True)
HTTPD = "mkdir -p /tmp/www; hostname > /tmp/www/index.html; exec httpd -f -p 80 -h /tmp/www"


@pytest.fixture
def adapter(request: pytest.FixtureRequest, shared_state: Path) -> Iterator[Jobs]:
    """Jobs on the daemon that the parameter names."""
    with jobs_on(request, shared_state) as jobs:
        yield jobs


def web(image: str, name: str = "web", **more: Any) -> ServiceSpec:
    """A service that answers on port 80 with its own host name, as nobody's root."""
    health = HealthCheck(HttpProbe(80))
    return ServiceSpec(
        name, image=image, entrypoint=(), command=("/bin/sh", "-c", HTTPD), user="1000", health=health, **more
    )


def left_at(request: pytest.FixtureRequest, name: str, state: Path) -> list[str]:
    """Containers of the executors of `state` that the daemon still has; other tests use the same daemon."""
    own = state_name(str(state))
    if name == "containerd":
        return tool(request, name, "containers", "ls", "-q", f'labels."forgeyard.state"=={own}')
    return tool(request, name, "ps", "-a", "--filter", f"label=forgeyard.state={own}", "--format", "{{.Names}}")


def tool(request: pytest.FixtureRequest, name: str, *words: str) -> list[str]:
    """What the daemon's own command line says, by words."""
    daemon = request.getfixturevalue(DAEMON_FIXTURES[name])
    argv = {"containerd": "ctr", "podman": "podman", "docker": "docker"}[name]
    done = subprocess.run(
        getattr(daemon, argv)(*words), env=daemon.environment(), stdout=subprocess.PIPE, check=True, timeout=60
    )
    return done.stdout.decode().split()


@ON_DAEMONS
def test_services_by_name(adapter: Jobs, busybox_image: str, request: pytest.FixtureRequest) -> None:
    """A job reaches services on a network without an outside, and reads where it is; nothing stays at the daemon."""
    script = "wget -q -O - http://web/; wget -q -O - http://alias.example/; ip -o -4 addr show eth0 | wc -l"
    services = (web(busybox_image), web(busybox_image, "two", aliases=("alias.example",)))
    job = Job(image=busybox_image, steps=(sh(script),), services=services, network=Network.deny())
    result, out, err = adapter.run(job)
    assert (result.outcome, out.split()) == (Outcome.SUCCEEDED, [b"web", b"two", b"1"]), (result.message, err)
    assert result.network is not None
    assert left_at(request, adapter.name, adapter.state) == []


@ON_DAEMONS
def test_restricted_network(adapter: Jobs) -> None:
    """A policy is enforced in the same router: what it does not name is refused, and the evidence has it."""
    policy = Network.restricted(NetworkDestination(cidr="192.0.2.1/32", ports=(443,), protocols=("tcp",)))
    script = "nc -w 1 198.51.100.7 80 </dev/null || echo refused"
    result, out, err = adapter.run(Job(rootfs="host", steps=(sh(script),), network=policy))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"refused\n"), (result.message, err)
    assert result.network is not None
    assert result.network.backend


@ON_DAEMONS
def test_a_killed_executor_leaves_nothing(adapter: Jobs, state_dir: Path, request: pytest.FixtureRequest) -> None:
    """kill -9 of the executor while its job runs: the next one ends the job and removes it at the daemon."""
    with undone(state_dir, runtime=adapter.name):
        child = subprocess.Popen([sys.executable, "-c", CHILD, str(state_dir), adapter.name], stdout=subprocess.PIPE)
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"up\n"
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
        assert len(left_at(request, adapter.name, state_dir)) == 1

        async def recover() -> None:
            async with Executor.open(state_dir, runtime=adapter.name) as executor:
                assert len(executor.recovered.removed) == 1
                assert executor.recovered.errors == ()
                assert len(executor.recovered.swept) >= 1
                assert (await executor.recover()).swept == ()

        asyncio.run(recover())
        assert left_at(request, adapter.name, state_dir) == []
        assert list((state_dir / "sandboxes").iterdir()) == []


CHILD = """
import asyncio, sys
from forgeyard_executor import Executor, ExecutorConfig, Job, Step
from forgeyard_model.policy import Need

async def main():
    config = ExecutorConfig(user_namespace=Need.PREFERRED)
    async with Executor.open(sys.argv[1], runtime=sys.argv[2], config=config) as executor:
        job = Job(rootfs="host", steps=[Step("/bin/sh", "-c", "setsid sleep 600 & echo up; sleep 600")])
        async with executor.run(job) as execution:
            async for chunk in execution.output():
                print(chunk.data.decode(), end="", flush=True)

asyncio.run(main())
"""


@ON_DAEMONS
def test_provenance(adapter: Jobs, busybox_image: str) -> None:
    """The result tells the boundary that there was, not the one that was asked for."""
    user_namespace = adapter.name != "docker"
    for root, level in (
        ({"rootfs": "host"}, IsolationLevel.NAMESPACE if user_namespace else IsolationLevel.PROCESS),
        ({"image": busybox_image}, IsolationLevel.CONTAINER if user_namespace else IsolationLevel.NAMESPACE),
    ):
        result, _, _ = adapter.run(Job(**root, steps=(sh("true"),)))  # type: ignore[arg-type]  # by name
        assert result.outcome is Outcome.SUCCEEDED, result.message
        seen = result.provenance
        assert (seen.user_namespace, seen.isolation) == (user_namespace, level)
        assert seen.runtime.startswith(adapter.name)
        assert any("no user namespace" in note for note in result.notes) is not user_namespace


@ON_DOCKER
def test_docker_is_refused_where_a_user_namespace_is_required(
    adapter: Jobs, state_dir: Path, warm_rootfs: None
) -> None:
    """standard-ci needs the operator's word, release is not run at all, development runs."""

    async def main() -> None:
        async with Executor.open(state_dir, runtime="docker", config=ExecutorConfig()) as executor:
            with pytest.raises(ForgeyardError, match="user namespace"):
                async with executor.run(Job(rootfs="host", steps=(sh("true"),))):
                    pass
            job = Job(rootfs="host", steps=(sh("true"),), profile=ExecutionProfile.DEVELOPMENT)
            async with executor.run(job) as execution:
                assert (await execution.wait()).outcome is Outcome.SUCCEEDED

    asyncio.run(main())
    with pytest.raises(ForgeyardError, match="user namespace"):
        adapter.run(Job(rootfs="host", steps=(sh("true"),), profile=ExecutionProfile.RELEASE))


@ON_DOCKER
def test_root_is_refused_on_docker(adapter: Jobs, busybox_image: str) -> None:
    """Root inside would be the host's root: as a job, with capabilities, and as a service."""
    service = ServiceSpec("db", image=busybox_image, entrypoint=(), command=("/bin/sleep", "9"), user="0")
    for job, words in (
        (Job(image=busybox_image, user="0", steps=(sh("true"),)), "own root"),
        (
            Job(
                image=busybox_image,
                user="0",
                capabilities=CapabilityGrant.ROOT_IN_USERNS,
                profile=ExecutionProfile.DEVELOPMENT,
                steps=(sh("true"),),
            ),
            "user namespace",
        ),
        (Job(image=busybox_image, user="1000", steps=(sh("true"),), services=(service,)), "own root"),
    ):
        with pytest.raises(ForgeyardError, match=words):
            adapter.run(job)


@ON_DOCKER
def test_what_is_not_carried_is_refused_as_it_is_prepared(adapter: Jobs) -> None:
    """By the field's name, before anything of it is at the daemon; nothing of the attempt stays."""

    async def body(executor: Executor) -> None:
        job = Job(rootfs="host", steps=(sh("true"),), limits=Limits(memory="5MiB"))
        with pytest.raises(ExecutorError, match=r"can't carry linux\.resources\.memory\.limit") as caught:
            await executor.prepare_job(adapter.fitted(job))
        assert caught.value.reason == "runtime_cannot_carry"
        assert executor.list_sandboxes() == ()

    adapter.drive(body)


@ON_CONTAINERD
def test_a_weaker_container_is_never_released(
    adapter: Jobs, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A capability that nobody intended ends the job before its first byte, with an audit event."""
    really = ContainerdRuntime.effective_spec

    def weakened(self: ContainerdRuntime, ref: Any) -> Mapping[str, Any]:
        spec = dict(really(self, ref))
        sets = {"bounding": ["CAP_SYS_ADMIN"]}
        return {**spec, "process": {**spec["process"], "capabilities": sets}}

    monkeypatch.setattr(ContainerdRuntime, "effective_spec", weakened)
    with caplog.at_level(logging.ERROR, "forgeyard.audit"), pytest.raises(ExecutorError, match="CAP_SYS_ADMIN"):
        adapter.run(Job(rootfs="host", steps=(sh("touch /work/build/ran"),)))
    assert any(record.name == "forgeyard.audit" for record in caplog.records)
    assert left_at(request, adapter.name, adapter.state) == []


@ON_DAEMONS
def test_a_container_that_somebody_removes(adapter: Jobs, request: pytest.FixtureRequest) -> None:
    """It is no failure of the job's: how that would have ended nobody knows."""

    pids: dict[str, int] = {}

    def removed(name: str) -> None:
        if adapter.name == "containerd":  # has no removal by force: its shim is what an operator can take away
            shim = Path(f"/proc/{pids[name]}/stat").read_text().rpartition(")")[2].split()[1]
            os.kill(int(shim), signal.SIGKILL)
        else:
            tool(request, adapter.name, "rm", "-f", name)

    async def body(executor: Executor) -> None:
        async with executor.run(Job(rootfs="host", steps=(sh("echo up; sleep 600"),))) as execution:
            async for _ in execution.output():
                break
            own = next(item for item in executor.list_sandboxes() if item.sandbox_id == execution.sandbox_id)
            assert own.pid is not None
            pids[f"fy-{own.sandbox_id}"] = own.pid
            await asyncio.to_thread(removed, f"fy-{own.sandbox_id}")
            result = await execution.wait()
        assert result.outcome is Outcome.INFRASTRUCTURE_FAILURE, result.message

    adapter.drive(body)
    assert left_at(request, adapter.name, adapter.state) == []


def test_addresses_are_those_of_the_daemons_own_tools() -> None:
    """Every daemon has a variable by which its tools find it, and so do we."""
    assert set(ADDRESS_VARIABLES) == set(DAEMON_FIXTURES)
