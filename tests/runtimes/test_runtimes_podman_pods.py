"""An attempt as Podman shows it: one pod with its job and its services, which comes and goes with them."""

from __future__ import annotations

import asyncio
import os
import subprocess
from pathlib import Path

import pytest
from daemons import PodmanService
from jobs import cleaned, sh
from podman_jobs import podman_runtime

from forgeyard_executor import Executor, Job, Outcome
from forgeyard_model.services import HealthCheck, LogProbe, ServiceNetwork, ServiceSpec
from forgeyard_runtimes.find import state_name
from forgeyard_runtimes.podman.removal import make_pod, remove_empty_pod

pytestmark = [pytest.mark.kernel, pytest.mark.daemon("podman")]


@pytest.fixture
def service(podman_service: PodmanService, monkeypatch: pytest.MonkeyPatch) -> PodmanService:
    """The service, where executors look for one."""
    monkeypatch.setenv("CONTAINER_HOST", podman_service.address)
    return podman_service


def podman(service: PodmanService, *words: str) -> list[str]:
    """Lines of a `podman` command."""
    argv = service.podman(*words)
    done = subprocess.run(argv, env=service.environment(), check=True, capture_output=True, text=True, timeout=60)
    return done.stdout.splitlines()


def beside(image: str, name: str, network: ServiceNetwork) -> ServiceSpec:
    """A service that does nothing."""
    health = HealthCheck(LogProbe("ready"), interval=0.1)
    command = ("/bin/sh", "-c", "echo ready; exec sleep 600")
    return ServiceSpec(name, image=image, entrypoint=(), command=command, health=health, network=network)


def pods_of(service: PodmanService, state: Path) -> list[str]:
    """Names of the pods of one state directory."""
    own = f"label=forgeyard.state={state_name(str(state))}"
    return podman(service, "pod", "ps", "--filter", own, "--format", "{{.Name}}")


def test_an_attempt_is_one_pod(service: PodmanService, state_dir: Path, busybox_image: str) -> None:
    """Job and services are in it, and found by its label; it is gone with the attempt."""
    services = (
        beside(busybox_image, "side", ServiceNetwork.LOCALHOST),
        beside(busybox_image, "other", ServiceNetwork.OWN),
    )
    job = Job(image=busybox_image, steps=(sh("echo up; sleep 600"),), services=services)

    def seen(sandbox: str) -> tuple[list[str], list[str]]:
        own = f"label=forgeyard.sandbox={sandbox}"
        pods = podman(service, "pod", "ps", "--filter", own, "--format", "{{.Name}} {{.Status}}")
        members = podman(service, "ps", "--filter", f"pod=fy-pod-{sandbox}", "--format", "{{.Names}}")
        return pods, members

    async def main() -> None:
        async with Executor.open(state_dir, runtime="podman") as executor, executor.run(job) as execution:
            async for _ in execution.output():
                break
            sandbox = str(execution.sandbox_id)
            pods, members = await asyncio.to_thread(seen, sandbox)
            (info,) = executor.list_sandboxes()
            await execution.cancel(kill=True)
            assert cleaned(await execution.wait()).outcome is Outcome.CANCELLED
        assert pods == [f"fy-pod-{sandbox} Running"]
        names = (sandbox, *(item.sandbox_id for item in info.services))
        assert sorted(members) == sorted(f"fy-{name}" for name in names)
        assert len(members) == 3

    asyncio.run(main())
    assert pods_of(service, state_dir) == []


def test_a_job_alone_is_in_no_pod(service: PodmanService, state_dir: Path, busybox_image: str) -> None:
    """Without a network made for it there is nothing to be one of; its container is found by its label."""
    job = Job(image=busybox_image, steps=(sh("echo up; sleep 600"),))

    async def main() -> None:
        async with Executor.open(state_dir, runtime="podman") as executor, executor.run(job) as execution:
            async for _ in execution.output():
                break
            own = f"label=forgeyard.sandbox={execution.sandbox_id}"
            found = await asyncio.to_thread(
                podman, service, "ps", "--filter", own, "--format", "{{.Names}} {{.PodName}}"
            )
            pods = await asyncio.to_thread(pods_of, service, state_dir)
            await execution.cancel(kill=True)
            await execution.wait()
        assert ([line.split() for line in found], pods) == ([[f"fy-{execution.sandbox_id}"]], [])

    asyncio.run(main())


def test_its_last_containers_may_be_removed_at_once(service: PodmanService) -> None:
    """Each removes the pod when none is left in it, and none of them fails for the other's having done so."""
    made = f"fy-pod-race-{os.getpid()}"

    async def main() -> None:
        async with podman_runtime(service) as runtime:
            client = runtime._client
            for _ in range(5):
                await make_pod(client, made, {})
                async with asyncio.TaskGroup() as group:
                    for _ in range(4):
                        group.create_task(remove_empty_pod(client, made))

    asyncio.run(main())
    assert made not in podman(service, "pod", "ps", "--format", "{{.Name}}")
