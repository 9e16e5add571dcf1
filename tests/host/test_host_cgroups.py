"""Control groups on this host's real hierarchies."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeyard_host.cgroups import AttemptCgroup, CgroupHost, CgroupMode
from forgeyard_model.identity import SandboxId

pytestmark = [pytest.mark.kernel, pytest.mark.guest]

MIB = 1 << 20
# Joins the groups given as arguments, says so, and runs the rest of its arguments once told to.
JOIN = 'while [ "$1" != -- ]; do echo $$ > "$1/cgroup.procs" || exit 9; shift; done; shift; echo in; read go; exec "$@"'


@pytest.fixture
def host() -> CgroupHost:
    """The hierarchies of this host."""
    return CgroupHost.detect()


@pytest.fixture
def group(host: CgroupHost) -> Iterator[AttemptCgroup]:
    """An attempt's group with a leaf `job` in every hierarchy, as a runtime makes it."""
    made = AttemptCgroup.create(host, f"/forgeyard/test-cgroups/{SandboxId.mint()}")
    for path in host.paths(made.leaf("job")):
        os.mkdir(path)
    yield made
    made.kill()
    made.remove()
    host.remove_empty("/forgeyard/test-cgroups")


def joined(host: CgroupHost, group: AttemptCgroup, *argv: str, skip: tuple[str, ...] = ()) -> subprocess.Popen[str]:
    """A process inside the leaf, in every hierarchy that takes it (a bare cpuset takes none); waits for a line."""
    barred = {host.controllers.get("cpuset"), *(host.controllers.get(name) for name in skip)}
    if host.mode is CgroupMode.V2:
        barred = set()
    paths = [point + group.leaf("job") for point in host.hierarchies if point not in barred]
    process = subprocess.Popen(
        ["sh", "-c", JOIN, "sh", *paths, "--", *argv], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "in\n"
    return process


def go(process: subprocess.Popen[str]) -> None:
    """Let a joined process run its command."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def limit(host: CgroupHost, group: AttemptCgroup, controller: str, v1: dict[str, str], v2: dict[str, str]) -> None:
    """Write limits into the leaf, in the words of the mode."""
    for name, value in (v1 if host.mode is CgroupMode.V1 else v2).items():
        Path(host.controllers[controller] + group.leaf("job"), name).write_text(value)


def limit_memory(host: CgroupHost, group: AttemptCgroup, size: int) -> None:
    """A memory limit without swap."""
    v1 = {"memory.limit_in_bytes": str(size), "memory.memsw.limit_in_bytes": str(size)}
    limit(host, group, "memory", v1, {"memory.max": str(size), "memory.swap.max": "0"})


def test_an_out_of_memory_kill_is_counted(host: CgroupHost, group: AttemptCgroup) -> None:
    """A memory hog killed by its leaf's limit shows as a kill, with peak and limit in bytes."""
    limit_memory(host, group, 32 * MIB)
    assert group.evidence("job").memory.oom_kills == 0

    with joined(host, group, "tail", "/dev/zero") as hog:
        go(hog)
        assert hog.wait(30) == -9

    memory = group.evidence("job").memory
    assert memory.oom_kills == 1
    assert memory.limit == 32 * MIB
    assert memory.peak is not None
    assert 30 * MIB <= memory.peak <= 33 * MIB
    assert group.usage("job").peak_memory == memory.peak


def test_a_kill_by_hand_is_no_out_of_memory(host: CgroupHost, group: AttemptCgroup) -> None:
    """SIGKILL from anybody counts nothing."""
    limit_memory(host, group, 32 * MIB)
    with joined(host, group, "cat") as process:
        process.kill()

    assert group.evidence("job").memory.oom_kills == 0


def test_a_refused_fork_is_counted(host: CgroupHost, group: AttemptCgroup) -> None:
    """A fork beyond the pids limit is counted, with the limit and the peak."""
    limit(host, group, "pids", {"pids.max": "3"}, {"pids.max": "3"})
    forks = "for n in 1 2 3 4; do sleep 5 & done; wait"
    with joined(host, group, "sh", "-c", forks) as process:
        go(process)
        assert process.wait(30) != 0
    pids = group.evidence("job").pids

    assert pids.limit == 3
    assert pids.refused is not None
    assert pids.refused >= 1
    assert group.kill("job")


def test_usage_counts_what_was_used(host: CgroupHost, group: AttemptCgroup) -> None:
    """CPU seconds come from the leaf's own processes."""
    with joined(host, group, "sh", "-c", "n=0; while [ $n -lt 60000 ]; do n=$((n+1)); done") as process:
        go(process)
        assert process.wait(30) == 0

    cpu = group.usage("job").cpu_time
    assert cpu is not None
    assert 0.005 < cpu < 20


def test_applied_limits_are_read_back(host: CgroupHost, group: AttemptCgroup) -> None:
    """What the kernel has is reported, and no limit is None."""
    before = group.applied("job")
    limit_memory(host, group, 64 * MIB)
    limit(host, group, "pids", {"pids.max": "77"}, {"pids.max": "77"})
    limit(
        host,
        group,
        "cpu",
        {"cpu.cfs_period_us": "100000", "cpu.cfs_quota_us": "150000"},
        {"cpu.max": "150000 100000"},
    )
    after = group.applied("job")

    assert (before.memory, before.pids, before.cpus) == (None, None, None)
    assert (after.memory, after.swap, after.pids, after.cpus) == (64 * MIB, 0, 77, 1.5)


def test_nothing_is_claimed_of_a_missing_leaf(host: CgroupHost, group: AttemptCgroup) -> None:
    """Without a leaf there are no numbers on v1, not zeros."""
    if host.mode is CgroupMode.V1:
        assert group.evidence("gone").memory.oom_kills is None
        assert group.evidence("gone").pids.refused is None
        assert group.usage("gone").cpu_time is None
        assert group.usage("gone").io_written is None
    assert group.applied("gone").memory is None


@pytest.mark.parametrize("at_once", [True, False])
def test_a_forking_tree_is_killed(
    host: CgroupHost, group: AttemptCgroup, monkeypatch: pytest.MonkeyPatch, at_once: bool
) -> None:
    """Processes that fork without end in sessions of their own all die; so also where the kernel has no cgroup.kill."""
    if not at_once:
        monkeypatch.setattr("forgeyard_host.cgroups.kill._kill_at_once", lambda *_: False)
    limit(host, group, "pids", {"pids.max": "60"}, {"pids.max": "60"})
    # A shell that is refused a fork gives up, so one process that stays is started first.
    bomb = 'trap "" TERM INT HUP; setsid sleep 100 & f() { while :; do setsid sh -c ":; :" & f & done; }; f 2>/dev/null'
    with joined(host, group, "sh", "-c", bomb) as process:
        go(process)
        while (group.evidence("job").pids.refused or 0) < 5:
            os.sched_yield()
        assert not group.empty("job")

        assert group.kill("job", seconds=20)

        assert group.empty("job")
        process.wait(10)


def test_a_paused_container_is_killed(host: CgroupHost, group: AttemptCgroup) -> None:
    """A frozen leaf (runc pause) is thawed so that its processes can die."""
    with joined(host, group, "cat") as process:
        if host.mode is CgroupMode.V1:
            Path(host.controllers["freezer"] + group.leaf("job"), "freezer.state").write_text("FROZEN")
        else:
            Path(host.hierarchies[0] + group.leaf("job"), "cgroup.freeze").write_text("1")

        assert group.kill(seconds=10)
        assert process.wait(10) == -9


def test_a_process_in_one_hierarchy_only_is_killed(host: CgroupHost, group: AttemptCgroup) -> None:
    """A process that was placed in part of the hierarchies only is found and killed as well."""
    names = tuple(name for name in host.controllers if name != "pids")
    with joined(host, group, "cat", skip=names) as process:
        assert not group.empty()
        assert group.kill(seconds=10)
        assert process.wait(10) == -9


def test_the_neighbour_lives(host: CgroupHost, group: AttemptCgroup) -> None:
    """Killing and removing one attempt leaves the next one alone."""
    other = AttemptCgroup.create(host, f"/forgeyard/test-cgroups/{SandboxId.mint()}")
    try:
        for path in host.paths(other.leaf("job")):
            os.mkdir(path)
        with joined(host, other, "cat") as process:
            group.kill()
            group.remove()
            assert process.poll() is None
            process.kill()
    finally:
        other.kill()
        other.remove()


def test_remove_takes_nested_groups_along(host: CgroupHost, group: AttemptCgroup) -> None:
    """Groups that a job made below its own go too; a second removal is fine."""
    for path in host.paths(group.leaf("job")):
        os.makedirs(f"{path}/made/by/the/job")

    group.remove()
    group.remove()

    assert not group.exists()
    assert group.empty()


def test_remove_waits_for_the_dying(host: CgroupHost, group: AttemptCgroup) -> None:
    """A group whose last process has just been killed is removed all the same."""
    with joined(host, group, "cat") as process:
        process.kill()
        group.remove()

    assert not group.exists()


def test_create_twice_and_remove_empty(host: CgroupHost) -> None:
    """Making a group again is fine, and the executor's empty parent can be removed at the end."""
    path = f"/forgeyard/test-{SandboxId.mint()}/{SandboxId.mint()}"
    AttemptCgroup.create(host, path)
    group = AttemptCgroup.create(host, path)
    host.remove_empty(os.path.dirname(path))
    assert group.exists()

    group.remove()
    host.remove_empty(os.path.dirname(path))

    assert not any(os.path.exists(point + host.base + os.path.dirname(path)) for point in host.hierarchies)


def test_making_beside_executors_that_end(host: CgroupHost) -> None:
    """Others take the empty ancestors away all the while, as executors do at their end; every group is made."""
    base = f"/forgeyard-race-{os.getpid()}"
    stop = threading.Event()

    def take_away() -> None:
        while not stop.is_set():
            host.remove_empty(f"{base}/other")

    takers = [threading.Thread(target=take_away) for _ in range(2)]
    for taker in takers:
        taker.start()
    try:
        for number in range(100):
            AttemptCgroup.create(host, f"{base}/executor-{number}/attempt").remove()
            host.remove_empty(f"{base}/executor-{number}")
    finally:
        stop.set()
        for taker in takers:
            taker.join()
        host.remove_empty(base)
    assert not any(os.path.exists(path) for path in host.paths(base))
