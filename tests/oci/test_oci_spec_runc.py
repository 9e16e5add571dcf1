"""A compiled bundle under a real runtime: what the kernel says about the sandbox, from inside and outside."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import ContainerPlan, JobUser, MountKind, Placement, PlanMount, Rlimit
from forgeyard_model.policy import ROOT_IN_USERNS_CAPABILITIES, NetworkMode
from forgeyard_oci.spec import compile_bundle, compile_exec

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("runc") is None, reason="needs root and runc"),
]

UID_BASE = 1_800_100_000
ENV = {"PATH": "/usr/bin:/bin", "HOME": "/tmp"}
PLAN = ContainerPlan(
    kind=ExecutorKind.PROCESS,
    rootfs_identity="test",
    root_read_only=True,
    mounts=(
        PlanMount("/usr", MountKind.BIND, slot="usr"),
        PlanMount("/tmp", MountKind.BIND, slot="tmp", read_only=False),
        PlanMount("/odd", MountKind.BIND, slot="odd", executable=False),
        PlanMount("/sys/devices/system/cpu", MountKind.BIND, slot="cpu", executable=False),
    ),
    user=JobUser(1000, 1000),
    user_namespace=True,
    network=NetworkMode.DENY,
    capabilities=(),
    seccomp="general-build",
    limits=ResourceLimits(cpus=1.5, memory=256 << 20, pids=64, shm=32 << 20),
    rlimits=(Rlimit("RLIMIT_NOFILE", 512, 1024),),
    umask=0o027,
    env=ENV,
    workdir="/tmp",
    steps=(),
)

PROBE = r"""
import errno, json, os, resource, socket, stat, subprocess
def attempt(act, *args):
    try:
        act(*args)
    except OSError as error:
        return errno.errorcode[error.errno]
    return "ok"
def read(path):
    with open(path) as file:
        return file.read()
def cgroup(name):
    for folder in ("memory", "pids", "cpu", ""):
        path = f"/sys/fs/cgroup/{folder}/{name}"
        if os.path.exists(path):
            return read(path).strip()
shm = os.statvfs("/dev/shm")
print(json.dumps({
    "status": dict(line.split(":\t", 1) for line in read("/proc/self/status").splitlines() if ":\t" in line),
    "ids": [os.getresuid(), os.getresgid(), os.getgroups()],
    "uid_map": read("/proc/self/uid_map").split(),
    "hostname": socket.gethostname(),
    "interfaces": sorted(name for _, name in socket.if_nameindex()),
    "umask": os.umask(0),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "nofile": resource.getrlimit(resource.RLIMIT_NOFILE),
    "shm": {"bytes": shm.f_blocks * shm.f_frsize, "mode": stat.S_IMODE(os.stat("/dev/shm").st_mode),
            "write": attempt(open, "/dev/shm/x", "w")},
    "memory": cgroup("memory.limit_in_bytes") or cgroup("memory.max"),
    "swap": cgroup("memory.memsw.limit_in_bytes"),
    "pids": cgroup("pids.max"),
    "quota": cgroup("cpu.cfs_quota_us"),
    "write": {path: attempt(open, path + "/x", "w") for path in
              ("", "/usr", "/sys", "/odd", "/sys/fs/cgroup/memory", "/sys/fs/cgroup/pids",
               "/dev", "/tmp", "/proc/sys")},
    "sysctl": attempt(open, "/proc/sys/kernel/hostname", "w"),
    "masked": {path: len(read(path)) for path in ("/proc/keys", "/proc/timer_list", "/proc/interrupts")
               if os.path.exists(path)},
    "devices": sorted(os.listdir("/dev")),
    "null": attempt(open, "/dev/null", "w"),
    "pty": attempt(os.openpty),
    "odd": os.listdir("/odd"),
    "cpus": os.path.exists("/sys/devices/system/cpu/online"),
    "mounts": {f[4]: f[5].split(",") for f in (line.split() for line in read("/proc/self/mountinfo").splitlines())},
    "shared": [line for line in read("/proc/self/mountinfo").splitlines() if "shared:" in line or "master:" in line],
    "mount": subprocess.run(["mount", "-t", "tmpfs", "x", "/tmp"], stderr=subprocess.DEVNULL).returncode,
    "unshare": subprocess.run(["unshare", "-Ur", "true"], stderr=subprocess.DEVNULL).returncode,
}))
"""


class Box:
    """A place on the host that a bundle can run from, and the runtime that runs it."""

    def __init__(self, base: Path) -> None:
        self.base = base
        for name in ("usr", "proc", "dev", "sys", "tmp", "odd"):
            (base / "rootfs" / name).mkdir(parents=True)
        for name in ("bin", "sbin", "lib", "lib64"):
            (base / "rootfs" / name).symlink_to(f"usr/{name}")
        self.odd = base / "a b,c=d ünïcode"
        self.odd.mkdir()
        (self.odd / "inside").touch()
        (base / "tmp").mkdir()
        os.chown(base / "tmp", UID_BASE + 1000, UID_BASE + 1000)
        self.runtime = ("runc", "--root", str(base / "runtime"))

    def placement(self, argv: Sequence[str]) -> Placement:
        """One attempt here."""
        sandbox = SandboxId.mint()
        cpu = "/sys/devices/system/cpu"
        return Placement(
            sandbox=sandbox,
            rootfs=str(self.base / "rootfs"),
            sources={"usr": "/usr", "tmp": str(self.base / "tmp"), "odd": str(self.odd), "cpu": cpu},
            uid_base=UID_BASE,
            uid_count=65536,
            cgroup=f"/forgeyard-test-{sandbox}",
            netns=None,
            argv=tuple(argv),
        )

    def write(self, plan: ContainerPlan, placement: Placement) -> str:
        """Compile into a bundle directory and return its path."""
        bundle = self.base / f"bundle-{placement.sandbox}"
        bundle.mkdir()
        config = compile_bundle(plan, placement, machine=platform.machine()).config
        (bundle / "config.json").write_bytes(config)
        return str(bundle)

    def run(self, plan: ContainerPlan, *argv: str) -> subprocess.CompletedProcess[str]:
        """Run `argv` as the container's init."""
        placement = self.placement(argv)
        bundle = self.write(plan, placement)
        return command(*self.runtime, "run", "-b", bundle, placement.sandbox.container)


def command(*argv: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the host to its end."""
    return subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=30, check=False)


@pytest.fixture(scope="module")
def box() -> Iterator[Box]:
    """A box below /var/tmp: a user namespace's root can't walk through pytest's own 0700 directories."""
    base = Path(tempfile.mkdtemp(prefix="fy-spec-", dir="/var/tmp"))
    base.chmod(0o711)
    yield Box(base)
    shutil.rmtree(base)


@pytest.fixture(scope="module")
def inside(box: Box) -> dict[str, Any]:
    """What a process of the job sees."""
    done = box.run(PLAN, "/usr/bin/python3", "-c", PROBE)
    assert done.returncode == 0, done.stderr
    value: dict[str, Any] = json.loads(done.stdout)
    return value


def test_no_capabilities_no_new_privs_and_a_filter(inside: dict[str, Any]) -> None:
    """All five capability sets are empty, no_new_privs is set, and seccomp runs in filter mode."""
    status = inside["status"]
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_identity_and_map(inside: dict[str, Any]) -> None:
    """The job is uid 1000 with no further group, mapped into the range of the attempt."""
    assert inside["ids"] == [[1000] * 3, [1000] * 3, []]
    assert inside["uid_map"] == ["0", str(UID_BASE), "65536"]


def test_names_limits_and_umask(inside: dict[str, Any]) -> None:
    """Host name, core limit, nofile and umask are the plan's; there is a loopback and nothing else."""
    assert inside["hostname"].startswith("fy-")
    assert inside["core"] == [0, 0]
    assert inside["nofile"] == [512, 1024]
    assert inside["umask"] == 0o027
    assert inside["interfaces"] == ["lo"]


def test_shared_memory_has_a_size_and_is_for_everybody(inside: dict[str, Any]) -> None:
    """/dev/shm has the plan's size, mode 1777, and a user other than root can write to it."""
    assert inside["shm"] == {"bytes": 32 << 20, "mode": 0o1777, "write": "ok"}


def test_the_job_sees_its_own_limits(inside: dict[str, Any]) -> None:
    """/sys/fs/cgroup shows this container's limits, which runtimes of languages size themselves by."""
    assert (inside["memory"], inside["pids"]) == (str(256 << 20), "64")
    if inside["quota"] is not None:  # cgroup v1
        assert (inside["swap"], inside["quota"]) == (str(256 << 20), "150000")
    assert inside["cpus"]


def test_only_what_is_meant_to_be_is_writable(inside: dict[str, Any]) -> None:
    """Root, /usr, /sys, cgroups and read-only binds refuse; /tmp takes files."""
    writes = inside["write"]
    assert writes.pop("/tmp") == "ok"
    # ENOENT: creating a file below /proc/sys, or below a hierarchy that a cgroup v2 host does not have.
    assert set(writes.values()) <= {"EROFS", "EACCES", "ENOENT"}
    assert {writes[path] for path in ("", "/usr", "/sys", "/odd")} == {"EROFS"}
    assert inside["sysctl"] == "EROFS"


def test_masked_paths_are_empty(inside: dict[str, Any]) -> None:
    """What engines mask reads as nothing."""
    assert inside["masked"]
    assert set(inside["masked"].values()) == {0}


def test_devices_are_the_minimum_and_work(inside: dict[str, Any]) -> None:
    """The default nodes and nothing of the host's; null and pseudo-terminals can be used."""
    plain = {"full", "null", "random", "tty", "urandom", "zero"}
    made = {"fd", "mqueue", "ptmx", "pts", "shm", "stderr", "stdin", "stdout", "core"}
    assert plain <= set(inside["devices"]) <= plain | made
    assert (inside["null"], inside["pty"]) == ("ok", "ok")


def test_paths_with_blanks_commas_and_unicode_are_mounted(inside: dict[str, Any]) -> None:
    """A source path needs no escaping anywhere between plan and mount."""
    assert inside["odd"] == ["inside"]


def test_binds_carry_their_flags(inside: dict[str, Any]) -> None:
    """nosuid and nodev on every bind, ro and noexec where the plan says so."""
    mounts = {path: set(options) for path, options in inside["mounts"].items()}
    assert mounts["/usr"] >= {"ro", "nosuid", "nodev"}
    assert mounts["/tmp"] >= {"rw", "nosuid", "nodev"}
    assert mounts["/odd"] >= {"ro", "nosuid", "nodev", "noexec"}


def test_no_mount_is_shared_with_the_host(inside: dict[str, Any]) -> None:
    """Neither side sees mounts that the other makes later."""
    assert inside["shared"] == []


def test_mount_and_unshare_are_refused(inside: dict[str, Any]) -> None:
    """A job can't mount, nor make a user namespace in which it could."""
    assert inside["mount"] != 0
    assert inside["unshare"] != 0


def test_granted_root_can_change_owners_and_nothing_more(box: Box) -> None:
    """root-in-userns chowns and switches uid; the switched process holds nothing, and mounts stay refused."""
    plan = replace(PLAN, user=JobUser(0, 0, name="root"), capabilities=ROOT_IN_USERNS_CAPABILITIES)
    script = (
        "touch /tmp/a && chown 12:13 /tmp/a && stat -c %u:%g /tmp/a\n"
        "setpriv --reuid 1000 --regid 1000 --clear-groups grep CapEff /proc/self/status\n"
        "mknod /tmp/n c 1 3 2>/dev/null || echo no-mknod\n"
        "mount -t tmpfs x /tmp 2>/dev/null || echo no-mount"
    )
    done = box.run(plan, "/bin/sh", "-c", script)
    assert done.stdout.split() == ["12:13", "CapEff:", "0" * 16, "no-mknod", "no-mount"], done.stderr


def test_mounts_below_an_approved_directory_are_read_only_too(box: Box) -> None:
    """A file system mounted somewhere under a read-only bind is no hole in it."""
    base = box.base / "deep"
    (base / "disk").mkdir(parents=True)
    assert command("mount", "-t", "tmpfs", "-o", "mode=777", "fy-test", str(base / "disk")).returncode == 0
    try:
        placement = replace(box.placement(("/bin/sh", "-c", "touch /odd/disk/x || cat /proc/self/mountinfo")))
        placement = replace(placement, sources={**placement.sources, "odd": str(base)})
        done = command(*box.runtime, "run", "-b", box.write(PLAN, placement), placement.sandbox.container)
    finally:
        assert command("umount", str(base / "disk")).returncode == 0
    assert "Read-only file system" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if " /odd/disk " in line]
    assert {"ro", "nosuid", "nodev", "noexec"} <= set(line.split()[5].split(","))


def test_exec_runs_with_the_rights_of_init(box: Box) -> None:
    """A process.json compiled from the plan gives a process that /proc shows as confined as init."""
    placement = box.placement(("/bin/sleep", "60"))
    name = placement.sandbox.container
    file = box.base / "process.json"
    status = "grep -E '^(Cap|NoNewPrivs|Seccomp:|Uid|Gid|Groups)' /proc/{}/status; grep -h core /proc/{}/limits"
    script = f"{status.replace('{}', '1')}; echo --; {status.replace('{}', 'self')}"
    file.write_bytes(compile_exec(PLAN, placement, ("/bin/sh", "-c", script), ENV, "/tmp"))
    # Output to nowhere: a detached container would keep the test's pipes open.
    start = [*box.runtime, "run", "-d", "-b", box.write(PLAN, placement), name]
    subprocess.run(start, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    try:
        done = command(*box.runtime, "exec", "-p", str(file), name)
    finally:
        subprocess.run([*box.runtime, "delete", "-f", name], check=True)
    init, own = done.stdout.split("--\n")
    assert init == own
    assert "NoNewPrivs:\t1" in own


@pytest.mark.skipif(shutil.which("crun") is None, reason="needs crun")
def test_crun_reads_the_bundle(box: Box) -> None:
    """crun's parser, stricter about types than runc's, takes the bundle; on hosts it supports it runs it too."""
    placement = box.placement(("/bin/true",))
    bundle = box.write(PLAN, placement)
    done = command("crun", "--root", str(box.base / "crun"), "run", "-b", bundle, placement.sandbox.container)
    assert done.returncode == 0 or "cgroups in hybrid mode not supported" in done.stderr
