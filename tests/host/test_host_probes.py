"""Probes of the host's side: each uses what it judges, says so when it is not there, and leaves nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import pytest

from forgeyard_host.cgroups import AttemptCgroup, CgroupHost
from forgeyard_host.probes_cgroups import limit_probes
from forgeyard_host.probes_conditions import Status, host_conditions, uid_block
from forgeyard_host.probes_exposed import exposed_files
from forgeyard_host.probes_files import file_probes
from forgeyard_model.capabilities import Feature

LIMITS = {
    *(Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT, Feature.OOM_EVIDENCE),
    *(Feature.PIDS_LIMIT, Feature.CPU_LIMIT),
}
GROUP = f"/forgeyard-test-probes-{os.getpid()}/probe"


@pytest.fixture
def cgroups() -> Iterator[CgroupHost]:
    """This host's hierarchies; the test's group is gone from all of them at the end."""
    host = CgroupHost.detect()
    yield host
    left = AttemptCgroup.at(host, GROUP).exists()
    host.remove_empty(GROUP)
    assert not left


@pytest.mark.kernel
def test_limits_are_met(cgroups: CgroupHost) -> None:
    """Programs run into a memory, a pids and a cpu limit, and every one of them holds and is counted."""
    probes = {probe.feature: probe for probe in limit_probes(cgroups, GROUP)}
    assert set(probes) == LIMITS
    assert {feature: probe.details for feature, probe in probes.items() if not probe.works} == {}
    assert all(probe.by and not probe.cure for probe in probes.values())


@pytest.mark.kernel
@pytest.mark.parametrize(
    ("controller", "lost"),
    [
        ("memory", {Feature.MEMORY_LIMIT, Feature.SWAP_LIMIT, Feature.OOM_EVIDENCE}),
        ("pids", {Feature.PIDS_LIMIT}),
        ("cpu", {Feature.CPU_LIMIT}),
    ],
)
def test_controller_that_is_not_there(cgroups: CgroupHost, controller: str, lost: set[Feature]) -> None:
    """Without a controller its limits do not work, the others do, and the cure names it."""
    rest = {name: point for name, point in cgroups.controllers.items() if name != controller}
    probes = limit_probes(replace(cgroups, controllers=MappingProxyType(rest)), GROUP)
    broken = [probe for probe in probes if not probe.works]
    assert {probe.feature for probe in broken} == lost
    assert all(controller in probe.cure and controller in probe.details for probe in broken)


@pytest.mark.kernel
def test_controller_that_is_covered(tmp_path: Path, cgroups: CgroupHost) -> None:
    """A directory that only looks like a hierarchy limits nothing, and the probes are not taken in."""
    fake = {name: str(tmp_path) for name in cgroups.controllers}
    host = replace(cgroups, controllers=MappingProxyType(fake), hierarchies=(str(tmp_path),))
    assert not any(probe.works for probe in limit_probes(host, GROUP))


@pytest.mark.kernel
def test_mounts_and_files(state_dir: Path) -> None:
    """Each kind of mount is made and used on the given directory's filesystem; none is left, nor a loop device."""
    loops = loops_of(state_dir)
    probes = {probe.feature: probe for probe in file_probes(str(state_dir))}
    needed = {Feature.READ_ONLY_BIND, Feature.TMPFS, Feature.OVERLAY, Feature.DISK_LIMIT, Feature.IDMAPPED_MOUNT}
    assert {feature: probes[feature].details for feature in needed if not probes[feature].works} == {}
    assert set(probes) == needed | {Feature.REFLINK, Feature.QUOTA}
    assert all(probe.cure for probe in probes.values() if not probe.works)
    assert str(state_dir) not in Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    assert loops_of(state_dir) == loops == []


def loops_of(directory: Path) -> list[str]:
    """Loop devices whose file is, or was, below `directory`."""
    files = Path("/sys/block").glob("loop*/loop/backing_file")
    return [text for file in files if str(directory) in (text := file.read_text())]


@pytest.mark.kernel
def test_mounts_that_are_refused(state_dir: Path) -> None:
    """Without CAP_SYS_ADMIN no mount probe works, and each says what it met and what to do."""
    script = (
        "import sys\n"
        "from forgeyard_host.probes_files import file_probes\n"
        "for probe in file_probes(sys.argv[1]):\n"
        "    print(probe.feature, probe.works, bool(probe.details and probe.cure))\n"
    )
    drop = ["setpriv", "--bounding-set", "-sys_admin", "--inh-caps", "-sys_admin"]
    run = subprocess.run([*drop, sys.executable, "-c", script, str(state_dir)], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    found = dict(line.split(" ", 1) for line in run.stdout.splitlines())
    for feature in ("read_only_bind", "tmpfs", "overlay", "disk_limit", "idmapped_mount"):
        assert found[feature] == "False True"


def test_conditions_have_a_cure_where_they_do_not_hold(tmp_path: Path) -> None:
    """Every condition says what was found; one that does not hold says what to do."""
    conditions = host_conditions(str(tmp_path / "absent"))
    assert len({item.name for item in conditions}) == len(conditions) == 10
    for item in conditions:
        assert item.details
        assert bool(item.cure) is (item.status is not Status.OK)


def test_closed_state_directory(tmp_path: Path) -> None:
    """A directory that others can't walk through is a problem, with the command that cures it."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o700)
    found = {item.name: item for item in host_conditions(str(closed))}["state directory"]
    assert (found.status, "chmod o+x" in found.cure) == (Status.PROBLEM, True)


@pytest.mark.parametrize(
    ("name", "line", "status"),
    [
        ("subuid", "builder:2000000000:65536", Status.WARNING),
        ("subuid", "builder:0:4000000000", Status.PROBLEM),
        ("passwd", "robot:x:2000000007:100::/:/bin/sh", Status.WARNING),
        ("subuid", "builder:100000:65536", Status.OK),
    ],
)
def test_uid_block_of_others(tmp_path: Path, name: str, line: str, status: Status) -> None:
    """Accounts and subordinate ids in the block are named; a block that all belongs to others is a problem."""
    (tmp_path / name).write_text(f"{line}\n")
    assert uid_block(range(2_000_000_000, 2_000_655_360), etc=str(tmp_path)).status is status


def test_uid_block_that_is_not_mapped(tmp_path: Path) -> None:
    """In a container whose user namespace ends below the block no job can have its ids."""
    (tmp_path / "uid_map").write_text("0 100000 65536\n")
    block = range(2_000_000_000, 2_000_655_360)
    found = uid_block(block, etc=str(tmp_path), uid_map=str(tmp_path / "uid_map"))
    assert found.status is Status.PROBLEM


@pytest.mark.kernel
def test_exposed_files(tmp_path: Path) -> None:
    """Readable keys, files for all to write and files of others are found; what jobs can't see or read is not."""
    for name in ("a.pem", "closed.pem", "cert.pem", "hidden/b.pem", "loose", "foreign", "fine"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("-----BEGIN PRIVATE KEY-----" if name != "cert.pem" else "CERTIFICATE")
        (tmp_path / name).chmod(0o644)
    (tmp_path / "closed.pem").chmod(0o600)
    (tmp_path / "loose").chmod(0o666)
    os.chown(tmp_path / "foreign", 4242, 0)
    found = {item.name: item for item in exposed_files(str(tmp_path), shows=lambda path: "hidden" not in path)}
    assert found["secrets in view"].details == f"{tmp_path}/a.pem"
    assert found["files for all to write"].details == f"{tmp_path}/loose"
    assert found["files of others"].details == f"{tmp_path}/foreign"
    assert {item.status for item in found.values()} == {Status.WARNING}


def test_exposed_files_say_when_they_did_not_finish(tmp_path: Path) -> None:
    """A tree that takes too long is not called clean."""
    (tmp_path / "file").write_text("")
    assert all("not all of" in item.details for item in exposed_files(str(tmp_path), patience=-1.0))


def test_inotify_condition_gives_its_descriptor_back(tmp_path: Path) -> None:
    """Looking at the conditions keeps no descriptor."""
    before = len(os.listdir("/proc/self/fd"))
    host_conditions(str(tmp_path))
    assert len(os.listdir("/proc/self/fd")) == before
