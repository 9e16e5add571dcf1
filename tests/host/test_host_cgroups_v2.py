"""The v2 half on a tree of plain files: this host may have no v2 controllers."""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import pytest

from forgeyard_host.cgroups import AppliedLimits, AttemptCgroup, CgroupHost, CgroupMode
from forgeyard_model.errors import SandboxError
from forgeyard_model.result import MemoryEvidence, PidsEvidence


@pytest.fixture
def host(tmp_path: Path) -> CgroupHost:
    """A v2 mount of three controllers."""
    write(tmp_path, {"cgroup.controllers": "cpu memory pids", "cgroup.subtree_control": "cpu"})
    controllers = MappingProxyType(dict.fromkeys(("cpu", "memory", "pids"), str(tmp_path)))
    return CgroupHost(CgroupMode.V2, (str(tmp_path),), controllers)


def write(directory: Path, contents: dict[str, str]) -> None:
    """Files of a group."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in contents.items():
        (directory / name).write_text(text + "\n")


LEAF = {
    "memory.max": "67108864",
    "memory.swap.max": "0",
    "memory.peak": "67100000",
    "memory.events": "low 0\nhigh 0\nmax 12\noom 2\noom_kill 1\noom_group_kill 0",
    "memory.stat": "anon 1\nshmem 4096",
    "pids.max": "64",
    "pids.peak": "64",
    "pids.events": "max 3",
    "cpu.max": "50000 100000",
    "cpu.stat": "usage_usec 1500000\nuser_usec 1\nsystem_usec 1",
    "io.stat": "8:0 rbytes=100 wbytes=200 rios=1\n8:16 rbytes=1 wbytes=2 rios=1",
}


def test_controllers_are_passed_on_down_to_the_attempt(host: CgroupHost, tmp_path: Path) -> None:
    """Each group above the leaf enables what it has and has not enabled yet."""
    for name in ("a", "a/b"):
        write(tmp_path / name, {"cgroup.controllers": "cpu memory pids", "cgroup.subtree_control": ""})

    AttemptCgroup.create(host, "/a/b")

    assert (tmp_path / "cgroup.subtree_control").read_text().startswith("+memory +pids")
    assert (tmp_path / "a/cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    assert (tmp_path / "a/b/cgroup.subtree_control").read_text() == "+cpu +memory +pids"


def test_evidence_and_usage_of_a_leaf(host: CgroupHost, tmp_path: Path) -> None:
    """v2's files are read for what they are."""
    write(tmp_path / "a/job", LEAF)
    group = AttemptCgroup.at(host, "/a")

    evidence = group.evidence("job")
    usage = group.usage("job")

    assert evidence.memory == MemoryEvidence(limit=67108864, peak=67100000, oom_kills=1, tmpfs=4096)
    assert evidence.pids == PidsEvidence(limit=64, peak=64, refused=3)
    assert (usage.cpu_time, usage.peak_memory, usage.io_read, usage.io_written) == (1.5, 67100000, 101, 202)
    assert group.applied("job") == AppliedLimits(memory=67108864, swap=0, pids=64, cpus=0.5)


def test_the_parent_speaks_for_a_leaf_that_is_gone(host: CgroupHost, tmp_path: Path) -> None:
    """After the runtime's delete the attempt's own group still has the counters."""
    write(tmp_path / "a", {"memory.events": "oom_kill 2", "memory.max": "max", "pids.events": "max 1"})

    evidence = AttemptCgroup.at(host, "/a").evidence("job")

    assert evidence.memory.oom_kills == 2
    assert evidence.memory.limit is None
    assert evidence.pids.refused == 1


def test_missing_files_are_none(host: CgroupHost, tmp_path: Path) -> None:
    """A kernel without memory.peak, or a missing controller, gives None and never 0."""
    (tmp_path / "a/job").mkdir(parents=True)
    group = AttemptCgroup.at(host, "/a")

    assert group.evidence("job").memory == MemoryEvidence()
    assert group.evidence("job").pids == PidsEvidence()
    assert group.usage("job").cpu_time is None
    assert group.applied("job") == AppliedLimits(None, None, None, None)


@pytest.mark.parametrize(("local", "refused"), [(False, 3), (True, 2)])
def test_refused_forks_are_counted_once(host: CgroupHost, tmp_path: Path, local: bool, refused: int) -> None:
    """Where pids.events counts what is below as well (Linux 6.11), nested groups are not added to it again."""
    more = {"pids.events.local": "max 1"} if local else {}
    write(tmp_path / "a/job", {"pids.events": "max 2"} | more)
    write(tmp_path / "a/job/nested", {"pids.events": "max 1"} | more)

    assert AttemptCgroup.at(host, "/a").evidence("job").pids.refused == refused


def test_kill_writes_cgroup_kill(host: CgroupHost, tmp_path: Path) -> None:
    """One write kills the tree; an empty group needs nothing more."""
    write(tmp_path / "a/job", {"cgroup.kill": "", "cgroup.procs": ""})
    (tmp_path / "a/job/cgroup.procs").write_text("")

    assert AttemptCgroup.at(host, "/a").kill("job")
    assert (tmp_path / "a/job/cgroup.kill").read_text().startswith("1")


def mountinfo(point: Path, kind: str = "cgroup2", options: str = "rw") -> str:
    """A line of /proc/self/mountinfo."""
    return f"30 23 0:26 / {point} rw,nosuid - {kind} cgroup {options}\n"


def test_detect_pure_v2_at_the_root(tmp_path: Path) -> None:
    """On a pure v2 host whose root is ours, groups go right below the root."""
    write(tmp_path, {"cgroup.controllers": "cpu memory", "cgroup.procs": "1"})

    host = CgroupHost.detect(mountinfo(tmp_path), "0::/\n")

    assert (host.mode, host.base, host.hierarchies) == (CgroupMode.V2, "", (str(tmp_path),))
    assert set(host.controllers) == {"cpu", "memory"}


@pytest.mark.parametrize(("procs", "base"), [("", "/svc"), ("77", "/svc/executor")])
def test_detect_a_delegated_group(tmp_path: Path, procs: str, base: str) -> None:
    """In a delegated service groups go beside the executor's own; if the parent holds processes, below its own."""
    write(tmp_path, {"cgroup.type": "domain", "cgroup.procs": "1"})
    write(tmp_path / "svc", {"cgroup.procs": procs, "cgroup.subtree_control": "", "cgroup.controllers": "memory"})
    write(tmp_path / "svc/executor", {"cgroup.procs": "5", "cgroup.controllers": "memory"})

    assert CgroupHost.detect(mountinfo(tmp_path), "0::/svc/executor\n").base == base


def test_detect_hybrid_and_shared_mounts(tmp_path: Path) -> None:
    """v1 controllers decide for v1; controllers mounted together are one hierarchy, and so is v2 beside them."""
    text = (
        mountinfo(tmp_path / "cpu,cpuacct", "cgroup", "rw,cpu,cpuacct")
        + mountinfo(tmp_path / "memory", "cgroup", "rw,memory")
        + mountinfo(tmp_path / "systemd", "cgroup", "rw,name=systemd")
        + mountinfo(tmp_path / "unified")
    )

    host = CgroupHost.detect(text, "")

    assert host.mode is CgroupMode.V1
    assert len(host.hierarchies) == 4
    assert host.controllers["cpu"] == host.controllers["cpuacct"] == str(tmp_path / "cpu,cpuacct")


def test_detect_nothing(tmp_path: Path) -> None:
    """Without any hierarchy the error is typed."""
    with pytest.raises(SandboxError, match="no cgroup"):
        CgroupHost.detect("21 1 0:1 / /proc rw - proc proc rw\n", "")
