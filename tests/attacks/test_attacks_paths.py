"""Files of the host, of the agent and of other attempts, and the host's /proc and /sys, as a job finds them."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path

import pytest
from attacks import HostFacts, build_attacker, run_attacks

from forgeyard_model.policy import CapabilityGrant

pytestmark = pytest.mark.kernel

CANARY = b"a secret of the host\n"
NOT_THERE = frozenset({"ENOENT", "EACCES", "EPERM"})
NOT_WRITABLE = NOT_THERE | {"EROFS"}
# Where the host keeps what a job must not see; a directory of the test's own is made in each.
PRIVATE = ("/root", "/home", "/var/lib", "/etc", "/srv", "/opt", "/run", "/mnt", "/var/log", "/tmp", "/usr/local/share")

READS = {
    "/etc/shadow": NOT_THERE,
    "/etc/gshadow": NOT_THERE,
    "/etc/ssl/private": NOT_THERE,
    "/root/.ssh/id_ed25519": NOT_THERE,
    "/root/.docker/config.json": NOT_THERE,
    "/proc/kcore": NOT_THERE | {"done 0"},  # masked by /dev/null
    "/proc/keys": NOT_THERE | {"done 0"},
    "/proc/timer_list": {"done 0"} | NOT_THERE,
    "/proc/kmsg": NOT_THERE,
    "/proc/kpagecount": NOT_THERE,
    "/proc/1/environ": NOT_THERE,
    "/proc/1/mem": NOT_THERE,
    "/proc/1/maps": NOT_THERE,
    "/proc/1/auxv": NOT_THERE,
    "/proc/1/root/etc/hostname": NOT_THERE,
    "/proc/1/cwd/etc/hostname": NOT_THERE,
    **{f"/proc/1/fd/{number}": NOT_THERE for number in range(3, 10)},
    "/dev/mem": NOT_THERE,
    "/dev/kmsg": NOT_THERE,
    "/dev/vda": NOT_THERE,
    "/dev/sda": NOT_THERE,
    "/dev/kvm": NOT_THERE,
    "/dev/fuse": NOT_THERE,
    "/dev/net/tun": NOT_THERE,
    "/dev/loop-control": NOT_THERE,
    "/dev/mapper/control": NOT_THERE,
    "/sys/kernel/security/lsm": NOT_THERE,
    "/sys/kernel/debug/tracing/trace": NOT_THERE,
    "/sys/firmware/dmi/tables/DMI": NOT_THERE,
    "/sys/class/net/eth0/address": NOT_THERE,
}
LISTS = {
    # Root of the user namespace may count the descriptors; open one it can't.
    "/proc/1/fd": NOT_THERE | {"done 10"},
    "/proc/1/map_files": NOT_THERE | {"done 0"},
    "/proc/1/root": NOT_THERE,
    "/sys/module": NOT_THERE,
    "/sys/block": NOT_THERE,
    "/sys/kernel/slab": NOT_THERE,
    "/sys/fs/bpf": NOT_THERE,
    "/proc/scsi": {"done 0"} | NOT_THERE,
    "/.forgeyard": NOT_THERE,
}
WRITES = (
    "/proc/sysrq-trigger",
    "/proc/sys/kernel/core_pattern",
    "/proc/sys/kernel/modprobe",
    "/proc/sys/kernel/sysrq",
    "/proc/sys/kernel/hostname",
    "/proc/sys/kernel/panic",
    "/proc/sys/kernel/shmmax",
    "/proc/sys/kernel/randomize_va_space",
    "/proc/sys/vm/panic_on_oom",
    "/proc/sys/vm/overcommit_memory",
    "/proc/sys/net/ipv4/ip_forward",
    "/proc/sys/net/ipv4/ip_unprivileged_port_start",
    "/proc/sys/fs/binfmt_misc/register",
    "/proc/sys/user/max_user_namespaces",
    "/proc/sys/user/max_inotify_instances",
    "/proc/irq/0/smp_affinity",
    "/proc/bus/pci/00/00.0",
    "/proc/1/mem",
    "/sys/kernel/uevent_helper",
    "/sys/kernel/mm/transparent_hugepage/enabled",
    "/sys/fs/cgroup/release_agent",
    "/sys/fs/cgroup/memory/release_agent",
    "/sys/fs/cgroup/rdma/release_agent",
    "/sys/fs/cgroup/memory/notify_on_release",
    "/sys/fs/cgroup/memory/memory.limit_in_bytes",
    "/sys/fs/cgroup/memory/cgroup.procs",
    "/sys/fs/cgroup/devices/devices.allow",
    "/sys/fs/cgroup/pids/pids.max",
    "/sys/fs/cgroup/cgroup.procs",
    "/sys/fs/cgroup/memory.max",
    "/sys/fs/cgroup/freezer/freezer.state",
    "/usr/bin/true",
    "/usr/lib/os-release",
    "/etc/passwd",
    "/etc/ld.so.preload",
    "/etc/resolv.conf",
    "/.forgeyard/init",
    "/toolchains/attack/data",
)
# Opened by whoever owns them, so these are written: what is refused is the text.
ECHOES = {
    "-1000>/proc/1/oom_score_adj": NOT_THERE,
    "-1000>/proc/self/oom_score_adj": NOT_THERE,
    "0 0 4294967295>/proc/1/uid_map": NOT_THERE,
    "0 0 4294967295>/proc/self/uid_map": NOT_THERE,
    "0 0 4294967295>/proc/self/gid_map": NOT_THERE,
    "deny>/proc/1/setgroups": NOT_THERE,
    "renamed>/proc/1/comm": NOT_THERE | {"EINVAL"},
}
CREATES = (
    *("/sys/fs/cgroup/attack", "/sys/fs/cgroup/memory/attack", "/sys/fs/cgroup/pids/attack", "/sys/attack"),
    *("/usr/attack", "/.forgeyard/control", "/.forgeyard/report", "/proc/attack", "/toolchains/attack/new"),
)
SOCKETS = (
    *("/run/docker.sock", "/var/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock"),
    *("/run/dbus/system_bus_socket", "/run/systemd/private", "/run/systemd/journal/socket"),
)


class Host:
    """Canaries in the places a job must not reach, a process with a secret, and the facts before and after."""

    def __init__(self, stack: ExitStack, state: Path) -> None:
        self.files = [stack.enter_context(_canary(place)) for place in PRIVATE if os.path.isdir(place)]
        self.files.append(stack.enter_context(_canary(str(state))))
        self.process = stack.enter_context(
            subprocess.Popen(["sleep", "600"], env={"SECRET": "x"}, stdin=subprocess.DEVNULL)
        )
        stack.callback(self.process.kill)
        self.before = HostFacts.look()
        self.after: HostFacts | None = None
        self.devices = sorted(os.listdir("/dev"))

    def assert_unchanged(self) -> None:
        """Every canary has its bytes and its mode, the process lives, the kernel's settings are as they were."""
        for path in self.files:
            assert path.read_bytes() == CANARY, path
            assert path.stat().st_mode & 0o777 == 0o666, path
        assert self.process.poll() is None
        assert sorted(os.listdir("/dev")) == self.devices
        if self.after is None:  # once: looking costs more than an attack
            self.after = HostFacts.look()
        self.before.assert_unchanged(self.after)


@contextmanager
def _canary(place: str) -> Iterator[Path]:
    """A file for everybody in a directory for everybody: nothing but the sandbox keeps a job from it."""
    directory = Path(tempfile.mkdtemp(prefix="forgeyard-canary-", dir=place))
    directory.chmod(0o777)
    path = directory / "canary"
    path.write_bytes(CANARY)
    path.chmod(0o666)
    try:
        yield path
    finally:
        shutil.rmtree(directory)


class Tried:
    """The answers to all attacks on paths in one mode."""

    def __init__(self, host: Host, state: Path, attacker: Path, mode: str, busybox: str) -> None:
        self.host, self.mode = host, mode
        job: dict[str, object] = {"rootfs": "host"} if mode == "host" else {"image": busybox, "user": "app"}
        if mode == "granted":
            job |= {"user": "root", "capabilities": CapabilityGrant.ROOT_IN_USERNS}
        attacks = [
            *(f"read:{path}" for path in (*READS, *map(str, host.files))),
            *(f"list:{path}" for path in LISTS),
            *(f"write:{path}" for path in WRITES),
            *(f"echo:{text}" for text in ECHOES),
            *(f"put:{path}" for path in map(str, host.files)),
            *(f"mkdir:{path}" for path in CREATES),
            *(f"call:unix_socket={path}" for path in SOCKETS),
        ]
        self.answers = run_attacks(state, attacker, attacks, **job)


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attacker, as a toolchain."""
    return build_attacker(tmp_path_factory.mktemp("attacker"))


@pytest.fixture(scope="module")
def sandboxes(shared_state: Path, attacker: Path, busybox_image: str) -> Iterator[Callable[[str], Tried]]:
    """One sandbox per mode, made when first asked for: tests in random order would make a parametrised one anew."""
    with ExitStack() as stack:
        yield cache(lambda mode: Tried(Host(stack, shared_state), shared_state, attacker, mode, busybox_image))


@pytest.fixture(params=["host", "image", "granted"])
def tried(request: pytest.FixtureRequest, sandboxes: Callable[[str], Tried]) -> Tried:
    """All attacks on paths in one sandbox of each mode, beside a host full of canaries."""
    return sandboxes(request.param)


@pytest.mark.acceptance("Synthetic HOME prevents host credential leakage.")
@pytest.mark.parametrize("path", READS)
def test_read_is_refused(tried: Tried, path: str) -> None:
    """A file of the host, of its kernel or of PID 1 is not there, closed, or empty."""
    assert tried.answers[f"read:{path}"] in READS[path]
    tried.host.assert_unchanged()


@pytest.mark.parametrize("path", LISTS)
def test_list_is_refused(tried: Tried, path: str) -> None:
    """A directory of the host's kernel, of PID 1 or of the shim shows nothing."""
    assert tried.answers[f"list:{path}"] in LISTS[path]
    tried.host.assert_unchanged()


@pytest.mark.parametrize("path", WRITES)
def test_write_is_refused(tried: Tried, path: str) -> None:
    """A setting of the kernel, a cgroup's file, a program of the host can't be opened to write."""
    if tried.mode == "granted" and path == "/etc/passwd":
        pytest.skip("an image's own files are the job's to change, in a layer that is dropped")
    assert tried.answers[f"write:{path}"] in NOT_WRITABLE
    tried.host.assert_unchanged()


@pytest.mark.parametrize("text", ECHOES)
def test_text_is_refused(tried: Tried, text: str) -> None:
    """What would shield a process from the OOM killer, or map it to the host's ids, is refused as it is written."""
    assert tried.answers[f"echo:{text}"] in ECHOES[text]
    tried.host.assert_unchanged()


@pytest.mark.acceptance("Toolchain store is read-only.")
@pytest.mark.parametrize("path", CREATES)
def test_nothing_can_be_made(tried: Tried, path: str) -> None:
    """No cgroup, no file beside the shim's, nothing in a toolchain or on the host's /usr."""
    if tried.mode == "granted" and path == "/usr/attack":
        pytest.skip("an image's own /usr is the job's to change, in a layer that is dropped")
    assert tried.answers[f"mkdir:{path}"] in NOT_WRITABLE
    assert not os.path.exists(path)
    tried.host.assert_unchanged()


@pytest.mark.acceptance("Docker socket is not exposed by default.")
@pytest.mark.parametrize("path", SOCKETS)
def test_control_sockets_are_not_there(tried: Tried, path: str) -> None:
    """No socket of a daemon of the host, whether or not this one has it."""
    assert tried.answers[f"call:unix_socket={path}"] in NOT_THERE
    tried.host.assert_unchanged()


@pytest.mark.acceptance("Workload cannot read agent credentials.")
@pytest.mark.acceptance("Workload cannot read another job workspace.")
@pytest.mark.parametrize("way", ["read", "put"])
def test_canaries_of_host_agent_and_neighbours(tried: Tried, way: str) -> None:
    """Files open to everybody on the host, in the state directory, in another attempt and in its output: not there."""
    for path in tried.host.files:
        assert tried.answers[f"{way}:{path}"] in NOT_THERE, path
    tried.host.assert_unchanged()
