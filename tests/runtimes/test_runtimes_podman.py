"""The Podman adapter keeps the contract on a real service: what the job sees, what is read back, what is left."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest
from contract_box import UID_BASE, Box
from daemons import PodmanService
from podman_jobs import PLAN, podman_job, podman_runtime

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.plan import ContainerPlan, JobUser
from forgeyard_model.policy import ROOT_IN_USERNS_CAPABILITIES, NetworkMode
from forgeyard_runtimes.comparison import compare, verify_effective
from forgeyard_runtimes.contract import ContainerRef, ContainerStatus
from forgeyard_runtimes.podman.runtime import PodmanRuntime
from forgeyard_runtimes.podman.translate import DECLARED

pytestmark = [pytest.mark.kernel, pytest.mark.daemon("podman")]
ROOT = replace(PLAN, user=JobUser(0, 0, name="root"), capabilities=ROOT_IN_USERNS_CAPABILITIES)


def within(
    service: PodmanService,
    body: Callable[[PodmanRuntime, Box], Awaitable[None]],
    plan: ContainerPlan = PLAN,
    netns: str | None = None,
) -> None:
    """Run `body` beside a container that waits at its gate."""

    async def main() -> None:
        async with podman_runtime(service) as runtime, podman_job(runtime, plan, netns=netns) as job:
            await body(runtime, job)

    asyncio.run(main())


def listed(service: PodmanService, *arguments: str) -> list[str]:
    """Words of a `podman` command at the service's storage."""
    done = subprocess.run(
        service.podman(*arguments), env=service.environment(), check=True, capture_output=True, text=True
    )
    return done.stdout.split()


@pytest.mark.parametrize("plan", [PLAN, ROOT], ids=["user", "root"])
def test_what_is_applied_is_the_bundle(podman_service: PodmanService, plan: ContainerPlan) -> None:
    """Read back at the gate, nothing is weaker than the bundle but what the adapter declares."""

    async def body(runtime: PodmanRuntime, job: Box) -> None:
        spec = runtime.effective_spec(job.ref)
        verify_effective(job.intended, spec, DECLARED)
        assert spec["linux"]["seccomp"]["syscalls"]
        assert compare(job.intended, {**spec, "mounts": []}).weaker

    within(podman_service, body, plan)


def test_steps_run_as_under_any_runtime(podman_service: PodmanService) -> None:
    """User, rights, environment, host name, limits and raw wait statuses are the plan's."""

    async def body(runtime: PodmanRuntime, job: Box) -> None:
        job.open_gate()
        assert await job.sh("exit 137") == (137 << 8, "")
        assert (await job.sh("kill -9 $$"))[0] == 9
        _, seen = await job.sh("id -u; hostname; env; grep -E '^(NoNewPrivs|CapBnd|Seccomp):' /proc/self/status")
        assert seen.split()[:2] == ["1000", job.sandbox.hostname]
        assert "HOSTNAME" not in seen
        assert "NoNewPrivs:\t1" in seen
        assert "CapBnd:\t0000000000000000" in seen
        assert "Seccomp:\t2" in seen
        assert (await job.sh("touch /etc/x 2>/dev/null || touch /etc/hostname 2>/dev/null"))[0] != 0
        assert (await job.sh("touch /tmp/x && touch /ram/x"))[0] == 0
        assert Path(job.directory, "scratch/x").stat().st_uid == UID_BASE + 1000

    within(podman_service, body)


def test_the_containers_root_writes_no_cgroup_directory(podman_service: PodmanService) -> None:
    """Where Podman can't make /sys/fs/cgroup read-only for root, root sees an empty one instead."""

    async def body(runtime: PodmanRuntime, job: Box) -> None:
        job.open_gate()
        assert (await job.sh("touch /sys/fs/cgroup/x"))[0] != 0

    within(podman_service, body, ROOT)


def test_the_group_is_below_ours(podman_service: PodmanService) -> None:
    """The container's group is in the one that the bundle names, with its limits, and holds PID 1 and no monitor."""

    async def body(runtime: PodmanRuntime, job: Box) -> None:
        group = runtime.cgroup(job.ref)
        assert group.startswith(f"{job.group.leaf('job')}/libpod-")
        leaf = group.removeprefix(f"{job.group.path}/")
        assert job.group.processes(leaf) == (job.pid,)
        assert job.group.applied(leaf).memory == 128 << 20
        assert job.group.processes("job") == ()

    within(podman_service, body)


def test_people_find_jobs_by_label(podman_service: PodmanService) -> None:
    """`podman ps --filter label=…` shows the job's container."""

    async def body(runtime: PodmanRuntime, job: Box) -> None:
        wanted = f"label=forgeyard.sandbox={job.sandbox.value}"
        names = await asyncio.to_thread(listed, podman_service, "ps", "--filter", wanted, "--format", "{{.Names}}")
        assert names == [job.ref.container_id]

    within(podman_service, body)


def test_a_network_of_ours_is_joined_by_path_and_makes_a_pod(podman_service: PodmanService) -> None:
    """The job is in the namespace that was made for it; it is shown as a pod, which goes with its last container."""
    name = f"fy-podman-{os.getpid()}"
    subprocess.run(["ip", "netns", "add", name], check=True)

    async def body(runtime: PodmanRuntime, job: Box) -> None:
        assert Path(f"/proc/{job.pid}/ns/net").stat().st_ino == Path(f"/run/netns/{name}").stat().st_ino
        verify_effective(job.intended, runtime.effective_spec(job.ref), DECLARED)
        pods = await asyncio.to_thread(listed, podman_service, "pod", "ps", "--format", "{{.Name}}")
        assert f"fy-pod-{job.sandbox.value}" in pods

    try:
        within(podman_service, body, replace(PLAN, network=NetworkMode.RESTRICTED), f"/run/netns/{name}")
        assert listed(podman_service, "pod", "ps", "--quiet") == []
    finally:
        subprocess.run(["ip", "netns", "del", name], check=True)


def test_state_list_and_repeated_removal(podman_service: PodmanService) -> None:
    """The container is known as created, running, stopped and absent; removing it again is no error."""

    async def main() -> None:
        async with podman_runtime(podman_service) as runtime, podman_job(runtime, start=False) as job:
            await job.create()
            assert (await runtime.state(job.ref)).status is ContainerStatus.CREATED
            await job.start()
            state = await runtime.state(job.ref)
            assert (state.status, state.pid) == (ContainerStatus.RUNNING, job.pid)
            assert await runtime.list((job.directory,)) == (state,)
            assert await runtime.list((job.directory / "other",)) == ()
            await runtime.kill(job.ref, job.pidfd)
            await runtime.wait(job.pidfd)
            await runtime.kill(job.ref, job.pidfd)
            await runtime.remove(job.ref)
            await runtime.remove(job.ref)
            assert (await runtime.state(job.ref)).status is ContainerStatus.ABSENT
            assert await runtime.list((job.directory,)) == ()

    asyncio.run(main())


def test_exec_has_the_processs_code_and_never_more_rights(podman_service: PodmanService) -> None:
    """exec runs a compiled process with its code; other rights, a missing program and a deadline are typed errors."""

    async def body(runtime: PodmanRuntime, job: Box) -> None:
        async def run(*argv: str, deadline: float = 30) -> int:
            return await runtime.exec(job.ref, job.process(*argv), deadline=deadline)

        assert await run("/bin/sh", "-c", "exit 127") == 127
        assert await run("/bin/sh", "-c", "grep -q 'NoNewPrivs:.1' /proc/self/status && echo said") == 0
        with pytest.raises(ExecutorError, match="nosuch") as missing:
            await run("/nosuch")
        assert missing.value.kind is ExecutorErrorKind.SPAWN_FAILED
        with pytest.raises(ExecutorError) as late:
            await run("/bin/sleep", "600", deadline=3)
        assert late.value.kind is ExecutorErrorKind.TIMEOUT
        leaf = runtime.cgroup(job.ref).removeprefix(f"{job.group.path}/")
        async with asyncio.timeout(60):
            while job.group.processes(leaf) != (job.pid,):
                await asyncio.sleep(0)
        process = json.loads(job.process("/bin/true"))
        process["capabilities"]["bounding"] = ["CAP_SYS_ADMIN"]
        with pytest.raises(ExecutorError, match=r"process\.capabilities") as above:
            await runtime.exec(job.ref, json.dumps(process).encode(), deadline=20)
        assert above.value.kind is ExecutorErrorKind.UNSUPPORTED

    within(podman_service, body)


def test_a_failed_start_says_why_and_leaves_nothing(podman_service: PodmanService) -> None:
    """The OCI runtime's words are in the error; neither container nor pod is left at the service."""

    async def main() -> None:
        async with podman_runtime(podman_service) as runtime, podman_job(runtime, start=False) as job:
            (job.directory / "ctl/init").unlink()
            await job.create()
            with pytest.raises(Exception, match="init") as caught:
                await runtime.start(job.ref)
            assert getattr(caught.value, "reason", "") == "runtime_start"
            assert (await runtime.state(job.ref)).status is ContainerStatus.ABSENT

    asyncio.run(main())


def test_a_sweep_removes_what_is_dead_and_only_ours(podman_service: PodmanService) -> None:
    """Containers of sandboxes that are over go, those of living ones and other state directories stay."""

    async def main() -> None:
        async with podman_runtime(podman_service) as runtime, podman_job(runtime) as alive, podman_job(runtime) as dead:
            other = await PodmanRuntime.find(replace(runtime._settings, state="another"))
            report = await other.sweep(lambda _: False)
            await other.close()
            assert report.removed == report.kept == report.failed == ()
            report = await runtime.sweep(lambda sandbox: sandbox == alive.sandbox.value)
            assert report.removed == (f"container {dead.ref.container_id}",)
            assert report.kept == (f"container {alive.ref.container_id}",)
            assert (await runtime.state(alive.ref)).status is ContainerStatus.RUNNING
            absent = await runtime.state(ContainerRef(dead.ref.container_id, dead.directory))
            assert absent.status is ContainerStatus.ABSENT

    asyncio.run(main())
