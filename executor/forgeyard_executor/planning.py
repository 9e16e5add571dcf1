"""From a request and a rootfs to what is run and what the host must make for it. Pure: no side effects."""

from __future__ import annotations

import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forgeyard_executor.environment import HOME, check_length, check_text
from forgeyard_executor.steps import ResolvedStep, default_workdir, resolve_step
from forgeyard_host.operations import BindRequest, IdMapKind, OverlayRequest, RootDirectory, ScratchDir
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind
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
from forgeyard_process_shim.hostroot import EXTRA_WRITABLE, HOSTNAME, HOSTS, RESOLV_CONF

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
EXTRA_PLACES: Final = tuple((path.strip("/").replace("/", "-"), path, 0o1777) for path in EXTRA_WRITABLE)
"""Slot, path and mode of what is writable on the host rootfs beside that."""
CPU_TOPOLOGY: Final = "/sys/devices/system/cpu"
NETWORK_FILES: Final[Mapping[str, str]] = {
    "control": "ctl",
    "hosts": "hosts",
    "resolv": "resolv.conf",
    "hostname": "hostname",
}
"""Files of the attempt's own by slot, where it has a network of its own."""


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
    request: ExecutionRequest,
    rootfs: RootfsPlan,
    *,
    isolation: IsolationLevel,
    nofile_ceiling: int,
    networked: bool = False,
    user_namespace: bool = True,
) -> Planned:
    """Everything that can be decided before the host is touched.

    :param networked: the attempt has a network of its own, and with it its own resolver and host name files.
    :param user_namespace: the runtime gives each attempt one of its own.
    :raises SandboxError: UNSUPPORTED_ISOLATION, for root where that would be the host's.
    """
    user = rootfs.user or JobUser(1000, 1000)
    shared = () if user_namespace else shared_ids(user, "user")
    filesystem = request.sandbox.filesystem
    extra = (*filesystem.toolchains, *filesystem.allow_host_paths)
    _check_destinations(extra)
    limits, notes = rlimits(request.limits.nofile, nofile_ceiling, core_dumps=request.sandbox.process.core_dumps)
    steps = tuple(
        resolve_step(request, rootfs, step, index=index, user=user.name)
        for index, step in enumerate(request.spec.steps)
    )
    host_network = request.network.mode is NetworkMode.HOST
    mounts = _mounts(request, rootfs, extra, resolver=host_network or networked, hostname=networked)
    places = image_places(
        rootfs, mounts, bind_volumes=filesystem.root_read_only, workdir=default_workdir(request, rootfs)
    )
    root_binds, root_overlays = rootfs_requests(
        rootfs, places.directories, extra=bool(extra) or _caches_outside(request, rootfs)
    )
    source_binds, source_overlays = _source_requests(request)
    paths = tuple(
        BindRequest(f"path-{n}", path.source, IdMapKind.SHIFT, read_only=path.read_only) for n, path in enumerate(extra)
    )
    plan = _container_plan(request, rootfs, user, limits, (*places.mounts, *mounts), user_namespace=user_namespace)
    return Planned(
        plan=plan,
        steps=steps,
        binds=(*root_binds, *source_binds, *paths),
        overlays=(*root_overlays, *source_overlays),
        scratch=tuple(ScratchDir(name, name, mode, user.uid, user.gid) for name, _, mode in _writable(rootfs)),
        host_sources={"cpu": CPU_TOPOLOGY} | ({"resolv": RESOLV_CONF} if host_network else {}),
        attempt_files=NETWORK_FILES if networked else {"control": "ctl", "hosts": "hosts"},
        isolation=isolation,
        notes=(*rootfs.notes, *notes, *places.notes, *shared),
    )


def shared_ids(user: JobUser, field: str) -> tuple[str, ...]:
    """What a result says of a container without a user namespace.

    :param field: where the user can be named, for the cure.
    :raises SandboxError: UNSUPPORTED_ISOLATION: root inside would be root outside.
    """
    if user.uid == 0:
        raise SandboxError(
            SandboxErrorKind.UNSUPPORTED_ISOLATION,
            "root_without_user_namespace",
            "the container would run as this host's own root",
            details="this runtime has no user namespace of each attempt's own",
            resolution=f"name another {field}, such as 1000, or use a runtime with user namespaces",
        )
    return (f"no user namespace of its own: user {user.uid} inside is user {user.uid} of this host",)


def _container_plan(
    request: ExecutionRequest,
    rootfs: RootfsPlan,
    user: JobUser,
    limits: tuple[Rlimit, ...],
    mounts: tuple[PlanMount, ...],
    *,
    user_namespace: bool,
) -> ContainerPlan:
    capabilities = request.sandbox.privileges.capabilities
    return ContainerPlan(
        kind=rootfs.kind,
        rootfs_identity=rootfs.identity,
        root_read_only=request.sandbox.filesystem.root_read_only,
        mounts=mounts,
        user=user,
        user_namespace=user_namespace,
        network=request.network.mode,
        capabilities=ROOT_IN_USERNS_CAPABILITIES if capabilities is CapabilityGrant.ROOT_IN_USERNS else (),
        seccomp=request.sandbox.process.seccomp,
        limits=request.limits,
        rlimits=limits,
        umask=request.sandbox.process.umask,
        env=SHIM_ENV,
        workdir=default_workdir(request, rootfs),
        steps=request.spec.steps,
    )


def _writable(rootfs: RootfsPlan) -> tuple[tuple[str, str, int], ...]:
    """On a read-only host rootfs also what programs expect to write to; an image brings its own."""
    return (*_WRITABLE, *EXTRA_PLACES) if rootfs.kind is ExecutorKind.PROCESS else _WRITABLE


def _caches_outside(request: ExecutionRequest, rootfs: RootfsPlan) -> bool:
    """Whether a cache has its place in the root itself, and not in a directory that is the job's own."""
    tops = tuple(f"{path}/" for _, path, _ in _writable(rootfs))
    return any(not f"{cache.path}/".startswith(tops) for cache in request.spec.caches)


def rootfs_requests(
    rootfs: RootfsPlan, directories: tuple[RootDirectory, ...], *, extra: bool
) -> tuple[tuple[BindRequest, ...], tuple[OverlayRequest, ...]]:
    """What makes up the root. `extra`: mount points will be made in it that it may lack."""
    binds = tuple(BindRequest(f"rootfs-{n}", bind.source, IdMapKind.SHIFT) for n, bind in enumerate(rootfs.binds))
    if rootfs.writable or extra or len(rootfs.lowers) > 1:
        # Also where mount points are missing: the runtime makes them, and must not make them in a shared tree.
        return binds, (OverlayRequest("rootfs", rootfs.lowers, IdMapKind.SHIFT, "rootfs", directories),)
    return (BindRequest("rootfs", rootfs.lowers[0], IdMapKind.SHIFT), *binds), ()


@dataclass(frozen=True, slots=True)
class Places:
    """Directories that an image wants to have, and to write to."""

    directories: tuple[RootDirectory, ...] = ()
    mounts: tuple[PlanMount, ...] = ()
    notes: tuple[str, ...] = ()


def image_places(rootfs: RootfsPlan, ours: tuple[PlanMount, ...], *, bind_volumes: bool, workdir: str) -> Places:
    """WORKDIR and VOLUMEs. A writable root is as ephemeral as a volume has to be, so it only has to have them;
    over a read-only one each is bound writable, below all that the sandbox mounts itself."""
    if rootfs.kind is ExecutorKind.PROCESS:
        return Places()
    taken = (*_KERNEL_MOUNTS, *(mount.destination for mount in ours))
    directories: list[RootDirectory] = []
    mounts: list[PlanMount] = []
    notes: list[str] = []
    for number, path in enumerate(rootfs.volumes):
        cover = _cover(path, taken)
        if cover:
            notes.append(f"the image's volume {path} lies in {cover}, which is the sandbox's own: left out")
            continue
        slot = f"volume-{number}" if bind_volumes else ""
        directories.append(RootDirectory(path, "the image's volume", slot))
        if slot:
            mounts.append(PlanMount(path, MountKind.BIND, slot, read_only=False, recursive=False))
    if workdir == rootfs.workdir != "/" and not _cover(workdir, taken):
        directories.append(RootDirectory(workdir, "the image's WORKDIR"))
    return Places(tuple(directories), tuple(mounts), tuple(notes))


_KERNEL_MOUNTS: Final = ("/proc", "/sys", "/dev")


def _cover(path: str, taken: tuple[str, ...]) -> str:
    return next((where for where in taken if path == where or path.startswith(f"{where}/")), "")


def _source_requests(request: ExecutionRequest) -> tuple[tuple[BindRequest, ...], tuple[OverlayRequest, ...]]:
    source, mode = request.workspace.source, request.sandbox.filesystem.source_mode
    if source is None:
        return (), ()
    if mode is SourceMode.COW:
        return (), (OverlayRequest("source", (source,), IdMapKind.OWNER, upper="source"),)
    return (BindRequest("source", source, IdMapKind.OWNER, read_only=mode is SourceMode.RO),), ()


def _mounts(
    request: ExecutionRequest,
    rootfs: RootfsPlan,
    extra: tuple[ApprovedHostPath, ...],
    *,
    resolver: bool,
    hostname: bool,
) -> tuple[PlanMount, ...]:
    """In mounting order: what lies on top comes later, the shim's channel last so that nothing covers it."""
    mounts = list(root_mounts(rootfs, resolver=resolver, hostname=hostname))
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


def root_mounts(rootfs: RootfsPlan, *, resolver: bool, hostname: bool) -> tuple[PlanMount, ...]:
    """What comes first in every sandbox: parts of its root, the list of cpus, the files that name hosts."""
    files = [("hosts", HOSTS), *([("resolv", RESOLV_CONF)] if resolver else [])]
    files += [("hostname", HOSTNAME)] if hostname else []
    return (
        *(PlanMount(bind.destination, MountKind.BIND, f"rootfs-{n}") for n, bind in enumerate(rootfs.binds)),
        PlanMount(CPU_TOPOLOGY, MountKind.BIND, "cpu", executable=False),
        *(PlanMount(path, MountKind.BIND, slot, executable=False, recursive=False) for slot, path in files),
    )


_RESERVED: Final = ("/proc", "/sys", "/dev", SHIM_DIR, "/etc", "/work/source")


def _check_destinations(paths: tuple[ApprovedHostPath, ...]) -> None:
    for path in paths:
        where = path.destination
        check_text("destination", where)
        if not where.startswith("/") or where == "/" or ".." in where.split("/"):
            raise InvalidRequest("destination", where, "write an absolute path in the sandbox without '..'")
        if posixpath.normpath(where) != where or where.startswith("//"):
            raise InvalidRequest("destination", where, f"write it as {posixpath.normpath('/' + where.lstrip('/'))}")
        check_length("destination", where)
        if any(where == taken or where.startswith(taken + "/") for taken in _RESERVED):
            raise InvalidRequest("destination", where, "belongs to the sandbox itself; choose another path")


def rlimits(wanted: int | None, ceiling: int, *, core_dumps: bool) -> tuple[tuple[Rlimit, ...], tuple[str, ...]]:
    """POSIX limits for `wanted` open files, and a note when that is more than `ceiling`."""
    wanted = wanted or 1024
    nofile = min(wanted, ceiling)
    notes: tuple[str, ...] = ()
    if nofile < wanted:
        notes = (f"nofile clamped from {wanted} to {nofile}, the most this executor may set",)
    core = () if core_dumps else (Rlimit("RLIMIT_CORE", 0, 0),)
    return (*core, Rlimit("RLIMIT_NOFILE", nofile, nofile)), notes
