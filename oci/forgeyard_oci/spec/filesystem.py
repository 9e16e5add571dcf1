"""Root, mounts, and what of /proc and /sys stays hidden."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.plan import MountKind, PlanMount
from forgeyard_oci.spec.compose import Fields

DEFAULT_SHM: Final = 64 << 20
"""Bytes of /dev/shm when the plan has none, as container engines have it."""

MASKED_PATHS: Final = (
    "/proc/acpi",
    "/proc/asound",
    "/proc/interrupts",
    "/proc/kcore",
    "/proc/keys",
    "/proc/latency_stats",
    "/proc/sched_debug",
    "/proc/scsi",
    "/proc/timer_list",
    "/proc/timer_stats",
    "/sys/dev/block",
    "/sys/devices/virtual/powercap",
    "/sys/firmware",
    "/sys/fs/selinux",
)
"""What the common engines hide, all of them together. One that the sandbox lacks is skipped by the runtime."""

# /sys/fs/cgroup: on v1 runc mounts the hierarchies read-only, on a tmpfs that stays writable for root of the namespace.
READONLY_PATHS: Final = ("/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger", "/sys/fs/cgroup")


def with_root(rootfs: str, *, read_only: bool) -> Fields:
    """The root filesystem. A read-only one becomes so after the runtime has made its mountpoints.

    :raises SandboxError: INVALID_FILESYSTEM_PLAN for a relative path.
    """
    if not rootfs.startswith("/"):
        raise _invalid("relative_rootfs", "the root filesystem is not an absolute path", rootfs)
    return {"root": {"path": rootfs, "readonly": read_only}}


def base_mounts(shm: int | None = None) -> tuple[PlanMount, ...]:
    """What every container has, in order; a plan's own mounts come after. `shm`: bytes of /dev/shm.

    /sys is a small tmpfs, not sysfs: a network namespace that host root made refuses sysfs, and a job needs only the
    two things that are put into it, its own cgroup and (by the plan) the list of cpus.
    """
    return (
        PlanMount("/proc", MountKind.PROC, read_only=False, executable=False),
        # Executable: programs map /dev/zero with PROT_EXEC.
        PlanMount("/dev", MountKind.TMPFS, read_only=False, size=64 << 20, mode=0o755),
        PlanMount("/dev/pts", MountKind.DEVPTS, read_only=False, executable=False),
        PlanMount(
            "/dev/shm",  # noqa: S108  a mount of the sandbox's own
            MountKind.TMPFS,
            read_only=False,
            executable=False,
            size=DEFAULT_SHM if shm is None else shm,
            mode=0o1777,
        ),
        PlanMount("/dev/mqueue", MountKind.MQUEUE, read_only=False, executable=False),
        PlanMount("/sys", MountKind.TMPFS, executable=False, size=1 << 20, mode=0o755),
        PlanMount("/sys/fs/cgroup", MountKind.CGROUP, executable=False),
    )


def with_mounts(mounts: Sequence[PlanMount], sources: Mapping[str, str], *, tty_group: bool) -> Fields:
    """All mounts, in order. `sources`: host path by slot. `tty_group`: gid 5 exists in the container.

    :raises SandboxError: INVALID_FILESYSTEM_PLAN for a slot without a source, a path that is not absolute and
        normal, or a mount that another one hides.
    """
    _check_destinations(mount.destination for mount in mounts)
    return {"mounts": [_render(mount, sources, tty_group=tty_group) for mount in mounts]}


def with_masked_paths() -> Fields:
    """Paths that read as empty, and paths that can't be written."""
    return {"linux/maskedPaths": list(MASKED_PATHS), "linux/readonlyPaths": list(READONLY_PATHS)}


def with_propagation() -> Fields:
    """No mount made later on either side shows on the other."""
    return {"linux/rootfsPropagation": "private"}


def _render(mount: PlanMount, sources: Mapping[str, str], *, tty_group: bool) -> dict[str, Any]:
    flags = ["nosuid", *(() if mount.kind is MountKind.DEVPTS else ("nodev",))]
    if mount.destination == "/dev":
        flags.remove("nodev")  # where the runtime may not bind device nodes it makes them here
    if not mount.executable:
        flags.append("noexec")
    if mount.read_only:
        flags.append("ro")
    if mount.kind is MountKind.BIND:
        return _bind(mount, _source(mount, sources), flags)
    return {
        "destination": mount.destination,
        "type": mount.kind.value,
        "source": mount.kind.value,
        "options": [*flags, *_data(mount, tty_group=tty_group)],
    }


def _bind(mount: PlanMount, source: str, flags: list[str]) -> dict[str, Any]:
    # "ro" and its like reach the top mount alone; the r-forms those below it too, so that a disk mounted somewhere
    # under an approved directory is no hole. Both, as the first are what a reader looks for.
    # Not where there are none: for an r-form crun (1.8.1) opens the target as a directory that it may list.
    recursive = [f"r{flag}" for flag in flags] if mount.recursive else []
    return {
        "destination": mount.destination,
        "type": "bind",
        "source": source,
        "options": ["rbind", "rprivate", *flags, *recursive],
    }


def _data(mount: PlanMount, *, tty_group: bool) -> list[str]:
    if mount.kind is MountKind.DEVPTS:
        return ["newinstance", "ptmxmode=0666", "mode=0620", *(["gid=5"] if tty_group else [])]
    data = []
    if mount.mode is not None:
        data.append(f"mode={mount.mode:o}")
    if mount.size is not None:
        data.append(f"size={mount.size}")
    return data


def _source(mount: PlanMount, sources: Mapping[str, str]) -> str:
    source = sources.get(mount.slot)
    if source is None:
        raise _invalid("slot_without_source", f"nothing was prepared for {mount.destination}", f"slot {mount.slot!r}")
    if not source.startswith("/"):
        raise _invalid("relative_source", f"the source of {mount.destination} is not an absolute path", source)
    return source


def _check_destinations(destinations: Iterable[str]) -> None:
    seen: set[str] = set()
    parents: set[str] = set()
    for path in destinations:
        if not path.startswith("/") or path == "/" or path.startswith("//") or posixpath.normpath(path) != path:
            raise _invalid("bad_destination", "a mount needs an absolute path without . and ..", path)
        if path.startswith("/proc/"):
            raise _invalid("mount_in_proc", "nothing is mounted over parts of /proc", path)
        if path in seen:
            raise _invalid("mounted_twice", "two mounts have the same destination", path)
        if path in parents:
            raise _invalid("mount_hidden", "a mount would hide an earlier one below it", path)
        seen.add(path)
        while path != "/":
            path = posixpath.dirname(path)  # noqa: PLW2901  walks up to the root
            parents.add(path)


def _invalid(reason: str, brief: str, details: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.INVALID_FILESYSTEM_PLAN,
        reason,
        brief,
        details=details,
        resolution="change the path in the request, or the policy that approves it",
    )
