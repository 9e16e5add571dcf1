"""What only a host with cgroup v2 can show. Run inside the guest by test_guest_v2.py, beside tests marked `guest`."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import collect, sh

from forgeyard_executor import Execution, ExecutionResult, Executor, Job, Limits, Outcome, Timeouts
from forgeyard_host.cgroups import AttemptCgroup, CgroupHost, CgroupMode
from forgeyard_model.profile import ExecutionProfile

pytestmark = [pytest.mark.kernel, pytest.mark.guest]

ROOT = Path("/sys/fs/cgroup")
MIB = 1 << 20
SEEN = "cd /sys/fs/cgroup && cat memory.max memory.swap.max pids.max cpu.max && cat /proc/self/cgroup"


def run(state: Path, runtime: str, job: Job) -> tuple[ExecutionResult, bytes]:
    """Run a job to its end with `runtime`."""

    async def main() -> tuple[ExecutionResult, bytes]:
        async with Executor.open(state, runtime=runtime) as executor, executor.run(job) as execution:
            out, _ = await collect(execution)
            return await execution.wait(), out

    return asyncio.run(main())


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """The cgroup tree is after the test what it was before, and so is its root's list of controllers."""
    before = groups()
    yield
    assert groups() == before


def groups() -> set[str]:
    """Every control group there is."""
    return {path for path, _, _ in os.walk(ROOT)}


def test_the_host_is_v2() -> None:
    """The hierarchy is found, with the controllers that limits need, and groups go below its root."""
    host = CgroupHost.detect()
    assert (host.mode, host.base, host.hierarchies) == (CgroupMode.V2, "", (str(ROOT),))
    assert {"cpu", "memory", "pids", "io"} <= set(host.controllers)


@pytest.mark.parametrize("runtime", ["runc", "crun"])
@pytest.mark.usefixtures("nothing_left")
def test_limits_are_seen_from_inside(shared_state: Path, runtime: str) -> None:
    """A job reads its own limits where language runtimes look for them, and its group is the root of what it sees."""
    limits = Limits(memory="64MiB", pids=50, cpus=0.5)
    result, out = run(shared_state, runtime, Job(rootfs="host", steps=(sh(SEEN),), limits=limits))
    assert (result.outcome, result.provenance.runtime.split()[0]) == (Outcome.SUCCEEDED, runtime), result
    assert out.decode().splitlines() == [str(64 * MIB), "0", "50", "50000 100000", "0::/"]
    assert result.usage.peak_memory
    assert result.usage.cpu_time


@pytest.mark.usefixtures("nothing_left")
def test_crun_counts_an_out_of_memory_kill(shared_state: Path) -> None:
    """The verdict does not depend on the runtime: crun's leaf has the same evidence."""
    job = Job(rootfs="host", steps=(sh("tail /dev/zero"),), limits=Limits(memory="32MiB"))
    result, _ = run(shared_state, "crun", job)
    assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, 137), result
    assert result.evidence.memory.limit == 32 * MIB


def test_a_job_cannot_write_to_its_group(shared_state: Path, busybox_image: str) -> None:
    """No process can be moved and no group made from inside: the mount is read-only, and root is somebody else."""
    tries = ("mkdir x && echo made", "echo 1 > memory.max && echo lifted", "echo $$ > cgroup.procs && echo moved")
    script = "; ".join(("cd /sys/fs/cgroup", *tries))
    steps = (sh(f"id -u; {script}; true"),)
    job = Job(image=busybox_image, profile=ExecutionProfile.DEVELOPMENT, user="root", steps=steps)
    result, out = run(shared_state, "runc", job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"0\n")


@pytest.mark.usefixtures("nothing_left")
def test_the_limits_of_a_running_job_are_the_kernels(shared_state: Path) -> None:
    """What the result claims is what the kernel has while the job runs, read from outside."""

    async def main() -> dict[str, str]:
        limits, timeouts = Limits(memory="96MiB", pids=40, cpus=1.5), Timeouts(grace=0.2)
        job = Job(rootfs="host", steps=(sh("echo up; sleep 600"),), limits=limits, timeouts=timeouts)
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            await up(execution)
            leaf = next(path for path in ROOT.glob("forgeyard/*/*/job"))
            names = ("memory.max", "memory.swap.max", "pids.max", "cpu.max")
            return {name: (leaf / name).read_text().strip() for name in names}

    applied = {"memory.max": str(96 * MIB), "memory.swap.max": "0", "pids.max": "40", "cpu.max": "150000 100000"}
    assert asyncio.run(main()) == applied


async def up(execution: Execution) -> None:
    """Wait for the job's first word."""
    async for chunk in execution.output():
        assert chunk.data == b"up\n"
        return


@pytest.fixture
def attempt() -> Iterator[AttemptCgroup]:
    """An attempt's group on the real hierarchy."""
    host = CgroupHost.detect()
    made = AttemptCgroup.create(host, "/forgeyard/inside/attempt")
    yield made
    made.kill()
    made.remove()
    host.remove_empty("/forgeyard/inside")


def put(group: Path, **limits: str) -> Path:
    """Make a group with limits; ``memory_max`` is the file memory.max."""
    group.mkdir()
    for name, value in limits.items():
        (group / name.replace("_", ".", 1)).write_text(value)
    return group


def in_group(group: Path, script: str) -> int:
    """Run a shell script inside `group`."""
    argv = ["sh", "-c", f"echo $$ > {group}/cgroup.procs && {script}"]
    return subprocess.run(argv, timeout=60, check=False).returncode


def test_kills_are_known_after_the_leaf_is_gone(attempt: AttemptCgroup) -> None:
    """memory.events is hierarchical: the attempt's own group still has the count when a runtime removed its leaf."""
    leaf = put(ROOT / attempt.leaf("job").strip("/"), memory_max=str(16 * MIB))
    assert in_group(leaf, "exec tail /dev/zero") == -9
    before = attempt.evidence("job").memory
    leaf.rmdir()
    assert (before.oom_kills, attempt.evidence("job").memory.oom_kills) == (1, 1)
    assert before.peak is not None
    assert before.peak <= 16 * MIB


def test_refused_forks_in_nested_groups_are_counted_once(attempt: AttemptCgroup) -> None:
    """A refusal below the leaf is counted, once, whether this kernel counts in one group or in all above it."""
    leaf = put(ROOT / attempt.leaf("job").strip("/"))
    (leaf / "cgroup.subtree_control").write_text("+pids")
    nested = put(leaf / "nested", pids_max="1")
    assert in_group(nested, "(true) 2>/dev/null") != 0
    assert attempt.evidence("job").pids.refused == 1


def test_a_delegated_group_is_used() -> None:
    """In a child of a group that systemd has marked as delegated, groups go beside that child, controllers included."""
    service = put(ROOT / "test.service")
    own = put(service / "executor")
    os.setxattr(service, "trusted.delegate", b"1")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        (own / "cgroup.procs").write_text(str(process.pid))
        host = CgroupHost.detect(own=Path(f"/proc/{process.pid}/cgroup").read_text())
        group = AttemptCgroup.create(host, "/forgeyard/x/y")
        try:
            assert host.base == "/test.service"
            put(ROOT / group.leaf("job").strip("/"), memory_max=str(16 * MIB))
            assert group.applied("job").memory == 16 * MIB
        finally:
            group.remove()
            host.remove_empty("/forgeyard/x")
            process.kill()
            process.wait()
            own.rmdir()
            service.rmdir()


def test_a_group_with_processes_cannot_pass_controllers_on() -> None:
    """The executor right in its delegated group is refused, and the error says how to start it instead."""
    service = put(ROOT / "busy.service")
    host = CgroupHost(CgroupMode.V2, (str(ROOT),), {"memory": str(ROOT)}, "/busy.service")
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        (service / "cgroup.procs").write_text(str(process.pid))
        try:
            with pytest.raises(Exception, match="control groups") as caught:
                AttemptCgroup.create(host, "/forgeyard/x")
            error: Any = caught.value
            assert "DelegateSubgroup" in error.resolution
        finally:
            process.kill()
            process.wait()
            AttemptCgroup.at(host, "/forgeyard/x").remove()
            host.remove_empty("/forgeyard")
            service.rmdir()
