"""System calls that would take a job out of its sandbox, tried in both modes and as root of a user namespace.

One sandbox per mode tries them all, each in a process of its own; each is a test of its own.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
from attacks import HostFacts, build_attacker, run_attacks

from forgeyard_model.policy import CapabilityGrant

pytestmark = pytest.mark.kernel

ROOT_DISK = os.stat("/").st_dev
DISK = f"call:mknod_disk={os.major(ROOT_DISK)},{os.minor(ROOT_DISK)}"

# By attack: the refusals that will do. EPERM where the filter names the call or the kernel wants a capability,
# ENOSYS where the filter has never heard of it.
REFUSALS = {
    **dict.fromkeys(("mount_proc", "mount_tmpfs", "mount_cgroup", "mount_bind", "remount_rw"), "EPERM"),
    **dict.fromkeys(("remount_proc_sys_rw", "mount_shared", "umount_proc", "umount_mask"), "EPERM"),
    **dict.fromkeys(("pivot_root", "chroot", "open_tree", "move_mount", "fsopen", "fsmount"), "EPERM"),
    **dict.fromkeys(("fspick", "mount_setattr"), "EPERM"),
    **dict.fromkeys(("mknod_mem", "mknod_kmsg", "mknod_fuse"), "EPERM"),
    **dict.fromkeys(("ptrace_attach", "ptrace_seize", "pidfd_getfd", "kcmp"), "EPERM"),
    **dict.fromkeys(("process_vm_readv", "process_vm_writev"), "EPERM"),
    **dict.fromkeys(("add_key", "keyctl", "request_key"), "EPERM"),
    **dict.fromkeys(("bpf", "perf_event_open", "userfaultfd"), "EPERM"),
    **dict.fromkeys(("io_uring_setup", "io_uring_enter", "clone3_user", "undefined_call", "modify_ldt"), "ENOSYS"),
    **dict.fromkeys(("unshare_user", "unshare_mount", "unshare_net", "unshare_pid"), "EPERM"),
    **dict.fromkeys(("clone_user", "clone_mount", "clone_net", "setns_own"), "EPERM"),
    "setns_init": "EACCES",
    **dict.fromkeys(("init_module", "finit_module", "delete_module", "kexec_load", "reboot"), "EPERM"),
    **dict.fromkeys(("swapon", "swapoff", "acct", "quotactl", "kernel_log", "vhangup"), "EPERM"),
    **dict.fromkeys(("clock_settime", "settimeofday", "adjtimex", "clock_adjtime"), "EPERM"),
    **dict.fromkeys(("sethostname", "setdomainname", "fanotify_init", "open_by_handle"), "EPERM"),
    **dict.fromkeys(("set_mempolicy", "move_pages"), "EPERM"),
    "personality": "ENOSYS",
    "foreign_abi": "SIGSYS",
    **dict.fromkeys(("capset", "capability_bound", "trusted_attribute"), "EPERM"),
    **dict.fromkeys(("privileges_on", "filter_off"), "EINVAL"),
    **dict.fromkeys(("rlimit_beyond", "real_time"), "EPERM"),
    "nice": "EACCES",
    "raw_socket": "EPERM",
    **dict.fromkeys(("packet_socket", "vsock", "alg_socket", "key_socket", "bluetooth"), "EAFNOSUPPORT"),
    "audit": "ECONNREFUSED",
    "add_address": "EPERM",
}
# What root of a user namespace with the grant `root-in-userns` may do in a file or to itself is no escape.
ONLY_WITHOUT_GRANT = dict.fromkeys(("setuid", "setgid", "setgroups", "file_capability"), "EPERM")


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attacker, as a toolchain."""
    return build_attacker(tmp_path_factory.mktemp("attacker"))


class Tried:
    """What came of all attacks in one mode, and the host before and after."""

    def __init__(self, state: Path, attacker: Path, mode: str, busybox: str) -> None:
        job: dict[str, object] = {"rootfs": "host"} if mode == "host" else {"image": busybox, "user": "app"}
        names = [*REFUSALS, *([] if mode == "granted" else ONLY_WITHOUT_GRANT)]
        if mode == "granted":
            job |= {"user": "root", "capabilities": CapabilityGrant.ROOT_IN_USERNS}
        self.before = HostFacts.look()
        attacks = [DISK, *(f"call:{name}" for name in names)]
        self.answers = run_attacks(state, attacker, attacks, **job)
        self.after = HostFacts.look()


@pytest.fixture(scope="module")
def sandboxes(shared_state: Path, attacker: Path, busybox_image: str) -> Callable[[str], Tried]:
    """One sandbox per mode, made when first asked for: tests in random order would make a parametrised one anew."""
    return cache(lambda mode: Tried(shared_state, attacker, mode, busybox_image))


@pytest.fixture(params=["host", "image", "granted"])
def tried(request: pytest.FixtureRequest, sandboxes: Callable[[str], Tried]) -> tuple[str, Tried]:
    """All attacks in one sandbox of each mode."""
    return request.param, sandboxes(request.param)


@pytest.mark.parametrize("name", [*REFUSALS, *ONLY_WITHOUT_GRANT])
def test_call_is_refused(tried: tuple[str, Tried], name: str) -> None:
    """The call fails with the errno of a refusal, and the host's kernel is as it was."""
    mode, result = tried
    if mode == "granted" and name in ONLY_WITHOUT_GRANT:
        pytest.skip("root of a user namespace may change its own ids")
    assert result.answers[f"call:{name}"] == (REFUSALS | ONLY_WITHOUT_GRANT)[name]
    result.before.assert_unchanged(result.after)


def test_disk_of_the_host_gets_no_device_node(tried: tuple[str, Tried]) -> None:
    """A node for the disk that the host's root is on can't be made, and the host's /tmp has none."""
    _, result = tried
    assert result.answers[DISK] == "EPERM"
    assert not os.path.exists("/tmp/device")
