"""From a request and a rootfs to what is run and what the host must make for it. Pure: no side effects."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forgeyard_executor.environment import HOME, check_text
from forgeyard_executor.steps import ResolvedStep, default_workdir, resolve_step
from forgeyard_host.operations import BindRequest, IdMapKind, OverlayRequest, ScratchDir
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.plan import (
    SHIM_DIR,
    ContainerPlan,
    JobUser,
    MountKind,
    PlanMount,
    Rlimit,
    RootfsPlan,
)
from forgeyard_model.policy import (
    ROOT_IN_USERNS_CAPABILITIES,
    ApprovedHostPath,
    CapabilityGrant,
    IsolationLevel,
    NetworkMode,
    SourceMode,
)
from forgeyard_model.request import ExecutionRequest
from forgeyard_process_shim.hostroot import EXTRA_WRITABLE, HOSTS, RESOLV_CONF

UID_COUNT: Final = 65536
SHIM_ENV: Final[Mapping[str, str]] = {"PATH": "/nonexistent"}
# Name in scratch, where it appears, mode. /tmp stays on the disk-limited layer: a tmpfs would count as memory.
_WRITABLE: Final = (
    ("build", "/work/build", 0o755),
    ("output", "/work/output", 0o755),
    ("worktmp", "/work/tmp", 0o755),
    ("tmp", "/tmp", 0o1777),  # noqa: S108  inside the sandbox
    ("home", HOME, 0o755),
)
_CPU_TOPOLOGY: Final = "/sys/devices/system/cpu"


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and the parts of the host's SandboxSetup that serve it.

    :param host_sources: sources of slots that need nothing made: paths of the host, bound as they are.
    :param attempt_files: slots that are files or directories of the attempt's own, by relative path.
    """

    plan: ContainerPlan
    steps: tuple[ResolvedStep, ...]
    binds: tuple[BindRequest, ...]
    overlays: tuple[OverlayRequest, ...]
    scratch: tuple[ScratchDir, ...]
    host_sources: Mapping[str, str]
    attempt_files: Mapping[str, str]
    isolation: IsolationLevel
    notes: tuple[str, ...]


def process_mode_user(text: str | None) -> JobUser:
    """The job's user on the host rootfs: forgeyard, root (of its user namespace), or a number.

    :raises InvalidRequest: for any other name, since only those are in the sandbox's passwd.
    """
    if text in (None, "", "forgeyard"):
        return JobUser(1000, 1000)
    if text in ("root", "0"):
        return JobUser(0, 0, name="root")
    uid, _, gid = (text or "").partition(":")
    if (
        len(uid) < 10
        and len(gid) < 10
        and uid.isdecimal()
        and (not gid or gid.isdecimal())
        and int(uid) < UID_COUNT
        and int(gid or 0) < UID_COUNT
    ):
        return JobUser(int(uid), int(gid) if gid else int(uid), name=uid)
    raise InvalidRequest("user", text, "on the host rootfs give forgeyard, root, or numbers UID[:GID] below 65536")


def plan_request(
    request: ExecutionRequest, rootfs: RootfsPlan, *, isolation: IsolationLevel, nofile_ceiling: int
) -> Planned:
    """Everything that can be decided before the host is touched."""
    user = rootfs.user or JobUser(1000, 1000)
    filesystem = request.sandbox.filesystem
    extra = (*filesystem.toolchains, *filesystem.allow_host_paths)
    _check_destinations(extra)
    rlimits, notes = _rlimits(request, nofile_ceiling)
    steps = tuple(
        resolve_step(request, rootfs, step, index=index, user=user.name)
        for index, step in enumerate(request.spec.steps)
    )
    root_binds, root_overlays = _rootfs_requests(rootfs, extra=bool(extra))
    source_binds, source_overlays = _source_requests(request)
    paths = tuple(
        BindRequest(f"path-{n}", path.source, IdMapKind.SHIFT, read_only=path.read_only) for n, path in enumerate(extra)
    )
    host_network = request.network.mode is NetworkMode.HOST
    capabilities = request.sandbox.privileges.capabilities
    plan = ContainerPlan(
        kind=rootfs.kind,
        rootfs_identity=rootfs.identity,
        root_read_only=filesystem.root_read_only,
        mounts=_mounts(request, rootfs, extra, host_network=host_network),
        user=user,
        user_namespace=True,
        network=request.network.mode,
        capabilities=ROOT_IN_USERNS_CAPABILITIES if capabilities is CapabilityGrant.ROOT_IN_USERNS else (),
        seccomp=request.sandbox.process.seccomp,
        limits=request.limits,
        rlimits=rlimits,
        umask=request.sandbox.process.umask,
        env=SHIM_ENV,
        workdir=default_workdir(request, rootfs),
        steps=request.spec.steps,
    )
    return Planned(
        plan=plan,
        steps=steps,
        binds=(*root_binds, *source_binds, *paths),
        overlays=(*root_overlays, *source_overlays),
        scratch=tuple(ScratchDir(name, name, mode, user.uid, user.gid) for name, _, mode in _writable(rootfs)),
        host_sources={"cpu": _CPU_TOPOLOGY} | ({"resolv": RESOLV_CONF} if host_network else {}),
        attempt_files={"control": "ctl", "hosts": "hosts"},
        isolation=isolation,
        notes=(*rootfs.notes, *notes),
    )


def _writable(rootfs: RootfsPlan) -> tuple[tuple[str, str, int], ...]:
    """On a read-only host rootfs also what programs expect to write to; an image brings its own."""
    extra = EXTRA_WRITABLE if rootfs.kind is ExecutorKind.PROCESS else ()
    return (*_WRITABLE, *((path.strip("/").replace("/", "-"), path, 0o1777) for path in extra))


def _rootfs_requests(rootfs: RootfsPlan, *, extra: bool) -> tuple[tuple[BindRequest, ...], tuple[OverlayRequest, ...]]:
    binds = tuple(BindRequest(f"rootfs-{n}", bind.source, IdMapKind.SHIFT) for n, bind in enumerate(rootfs.binds))
    if rootfs.writable or extra or len(rootfs.lowers) > 1:
        # Also where mount points are missing: the runtime makes them, and must not make them in a shared tree.
        return binds, (OverlayRequest("rootfs", rootfs.lowers, IdMapKind.SHIFT, upper="rootfs"),)
    return (BindRequest("rootfs", rootfs.lowers[0], IdMapKind.SHIFT), *binds), ()


def _source_requests(request: ExecutionRequest) -> tuple[tuple[BindRequest, ...], tuple[OverlayRequest, ...]]:
    source, mode = request.workspace.source, request.sandbox.filesystem.source_mode
    if source is None:
        return (), ()
    if mode is SourceMode.COW:
        return (), (OverlayRequest("source", (source,), IdMapKind.OWNER, upper="source"),)
    return (BindRequest("source", source, IdMapKind.OWNER, read_only=mode is SourceMode.RO),), ()


def _mounts(
    request: ExecutionRequest, rootfs: RootfsPlan, extra: tuple[ApprovedHostPath, ...], *, host_network: bool
) -> tuple[PlanMount, ...]:
    """In mounting order: what lies on top comes later, the shim's channel last so that nothing covers it."""
    mounts = [PlanMount(bind.destination, MountKind.BIND, f"rootfs-{n}") for n, bind in enumerate(rootfs.binds)]
    mounts.append(PlanMount(_CPU_TOPOLOGY, MountKind.BIND, "cpu", executable=False))
    mounts.append(PlanMount(HOSTS, MountKind.BIND, "hosts", executable=False, recursive=False))
    if host_network:
        mounts.append(PlanMount(RESOLV_CONF, MountKind.BIND, "resolv", executable=False, recursive=False))
    mounts.extend(PlanMount(where, MountKind.BIND, name, read_only=False) for name, where, _ in _writable(rootfs))
    if request.workspace.source is not None:
        read_only = request.sandbox.filesystem.source_mode is SourceMode.RO
        mounts.append(PlanMount("/work/source", MountKind.BIND, "source", read_only=read_only))
    mounts.extend(
        PlanMount(path.destination, MountKind.BIND, f"path-{n}", read_only=path.read_only)
        for n, path in enumerate(extra)
    )
    mounts.append(PlanMount(SHIM_DIR, MountKind.BIND, "control", recursive=False))
    return tuple(mounts)


_MOST_NAME: Final = 255
_MOST_PATH: Final = 4000
"""Bytes: PATH_MAX less room for the root that it is mounted below."""
_RESERVED: Final = ("/proc", "/sys", "/dev", SHIM_DIR, "/etc", "/work/source")


def _check_destinations(paths: tuple[ApprovedHostPath, ...]) -> None:
    for path in paths:
        where = path.destination
        check_text("destination", where)
        if not where.startswith("/") or where == "/" or ".." in where.split("/"):
            raise InvalidRequest("destination", where, "write an absolute path in the sandbox without '..'")
        if posixpath.normpath(where) != where or where.startswith("//"):
            raise InvalidRequest("destination", where, f"write it as {posixpath.normpath('/' + where.lstrip('/'))}")
        if len(os.fsencode(where)) > _MOST_PATH or any(
            len(os.fsencode(part)) > _MOST_NAME for part in where.split("/")
        ):
            raise InvalidRequest("destination", where, "is longer than Linux takes; choose a shorter path")
        if any(where == taken or where.startswith(taken + "/") for taken in _RESERVED):
            raise InvalidRequest("destination", where, "belongs to the sandbox itself; choose another path")


def _rlimits(request: ExecutionRequest, ceiling: int) -> tuple[tuple[Rlimit, ...], tuple[str, ...]]:
    wanted = request.limits.nofile or 1024
    nofile = min(wanted, ceiling)
    notes: tuple[str, ...] = ()
    if nofile < wanted:
        notes = (f"nofile clamped from {wanted} to {nofile}, the most this executor may set",)
    core = () if request.sandbox.process.core_dumps else (Rlimit("RLIMIT_CORE", 0, 0),)
    return (*core, Rlimit("RLIMIT_NOFILE", nofile, nofile)), notes
