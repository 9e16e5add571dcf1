"""What Docker's containers have that no request can change, and how the job is kept from seeing it.

Declared differences, none of which gives a job anything that a bundle keeps from it:

- Root: the top of the root takes no new entries, even where the root is writable (EROFS).
- Files of Docker's own: an empty /.dockerenv at the top, and where the root has no /etc/hostname one with the host name
  inside. A root without any /etc shows Docker's few files there.
- /sys: sysfs instead of a small tmpfs. All of it but the job's own cgroup and the list of cpus reads as empty.
- seccomp: Docker before 23 drops the default errno. Calls that are not in a profile answer ENOSYS by rules that name
  them; only a personality(2) with unknown flags, and numbers no kernel gives to a call, answer EPERM instead.
- User namespace: none. Policies that need one are refused before a container is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

DECLARED_WEAKER: Final = frozenset({"linux.rootfsPropagation"})
"""Fields that a comparison with the bundle finds weaker. The root is a slave of the mount that Docker made for it: what
somebody with root on the host mounts below that directory of Docker's would show. Nothing of a job reaches it."""

DECLARED_STRICTER: Final[Mapping[str, str]] = {
    "linux.resources.blockIO": "the kernel's own weight for block devices is written out",
    "linux.seccomp.defaultErrnoRet": "before Docker 23 EPERM, behind a rule that answers ENOSYS to every named call",
    "linux.seccomp.syscalls": "before Docker 23 a few calls with arguments that are refused answer EPERM, not ENOSYS",
}
"""Fields that a comparison with the bundle finds stricter, in every job, and what that means."""

# As the kernel has them in a new network namespace. Docker sets both to let everybody ping and take low ports.
KERNEL_SYSCTLS: Final = {"net.ipv4.ip_unprivileged_port_start": "1024", "net.ipv4.ping_group_range": "1 0"}

NO_FORWARDING: Final = "IPv4 forwarding is disabled. Networking will not work."
"""What Docker says of every container but those that it is told to leave without a network. One that shares another's
has that one's, whatever the daemon's own host forwards."""

SHOWN_IN_SYS: Final = ("/sys/fs/cgroup", "/sys/devices/system/cpu")

# Calls of Linux that no profile of ours allows or refuses by name: the answer to them is the default's. Names that a
# machine's libseccomp does not know are skipped by the runtime, and answered ENOSYS by its own filter for new calls.
_UNNAMED_CALLS: Final = (
    *("_sysctl", "afs_syscall", "clone3", "create_module", "epoll_ctl_old", "epoll_wait_old", "file_getattr"),
    *("file_setattr", "futex_requeue", "futex_wait", "futex_wake", "get_kernel_syms", "getpmsg", "getxattrat"),
    *("io_uring_enter", "io_uring_register", "io_uring_setup", "listmount", "listns", "listxattrat"),
    *("lsm_get_self_attr", "lsm_list_modules", "lsm_set_self_attr", "map_shadow_stack", "modify_ldt", "mseal"),
    *("nfsservctl", "open_tree_attr", "putpmsg", "query_module", "removexattrat", "rseq_slice_yield", "security"),
    *("setxattrat", "statmount", "sysfs", "tuxcall", "uretprobe", "uselib", "ustat", "vserver"),
)


def seccomp_for_docker(seccomp: Mapping[str, Any]) -> dict[str, Any]:
    """The filter with its default errno written out as a rule, which a Docker that drops the default errno keeps."""
    default = seccomp.get("defaultErrnoRet")
    if default is None or seccomp["defaultAction"] != "SCMP_ACT_ERRNO":
        return dict(seccomp)
    named = {name for rule in seccomp["syscalls"] for name in rule["names"]}
    rule = {
        "names": [name for name in _UNNAMED_CALLS if name not in named],
        "action": "SCMP_ACT_ERRNO",
        "errnoRet": default,
    }
    return {**seccomp, "syscalls": [*seccomp["syscalls"], rule]}


def hidden_in_sys(already: Iterable[str], sys: Path = Path("/sys")) -> tuple[str, ...]:
    """What has to be masked so that sysfs shows SHOWN_IN_SYS alone: the entries beside the way to them.

    What a runtime masks is a directory or a file that exists, so this looks at the host's; a device that comes later
    lies in a directory that is masked, or beside one in /sys/devices.
    """
    masked = tuple(already)
    shown = tuple(f"{sys}{path.removeprefix('/sys')}" for path in SHOWN_IN_SYS)
    found: list[str] = []
    waiting = [str(sys)]
    while waiting:
        for entry in sorted(os.scandir(waiting.pop()), key=lambda entry: entry.name):
            if entry.path in shown or entry.is_symlink():
                continue
            if any(path.startswith(f"{entry.path}/") for path in shown):
                waiting.append(entry.path)
            elif f"/sys{entry.path.removeprefix(str(sys))}" not in masked:
                found.append(f"/sys{entry.path.removeprefix(str(sys))}")
    return tuple(found)
