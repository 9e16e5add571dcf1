"""From a service and its root to what is run and what the host must make for it. Looks at the source for its files."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath
from typing import Final

from forgeyard_executor.environment import DEFAULT_PATH, check_arguments, step_environment
from forgeyard_executor.environment import HOME as JOB_HOME
from forgeyard_executor.planning import (
    CPU_TOPOLOGY,
    EXTRA_PLACES,
    NETWORK_FILES,
    SHIM_ENV,
    Planned,
    image_places,
    rlimits,
    root_mounts,
    rootfs_requests,
    shared_ids,
)
from forgeyard_executor.steps import ResolvedStep
from forgeyard_host.files import open_inside
from forgeyard_host.operations import BindRequest, IdMapKind, RootDirectory, ScratchDir
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.job import Step
from forgeyard_model.plan import SHIM_DIR, ContainerPlan, JobUser, MountKind, PlanMount, RootfsPlan
from forgeyard_model.policy import ROOT_IN_USERNS_CAPABILITIES, IsolationLevel
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.services import ServiceSpec
from forgeyard_oci.image_argv import image_argv

_OPEN: Final = 0o1777
_HOST_WRITABLE: Final = (("tmp", "/tmp", _OPEN), ("home", JOB_HOME, 0o755))  # noqa: S108  inside the sandbox


def plan_service(
    service: ServiceSpec,
    request: ExecutionRequest,
    rootfs: RootfsPlan,
    *,
    isolation: IsolationLevel,
    nofile_ceiling: int,
    user_namespace: bool = True,
) -> Planned:
    """What runs as `service`, a job's `request` has. Blocking: looks at the files that it names.

    :param rootfs: its image's, with the user it runs as; or the host's.
    :raises InvalidRequest: names the service and what of it can't be used.
    """
    user = rootfs.user or JobUser(1000, 1000)
    where = f"services.{service.name}"
    shared = () if user_namespace else shared_ids(user, f"{where}.user")
    hosted = rootfs.kind is ExecutorKind.PROCESS
    limits, notes = rlimits(service.limits.nofile, nofile_ceiling, core_dumps=False)
    mounts = root_mounts(rootfs, resolver=True, hostname=True)
    workdir = _workdir(service, rootfs)
    images = image_places(rootfs, mounts, bind_volumes=False, workdir=workdir)
    places = _places(service, request, rootfs, user)
    directories = (*images.directories, *places.directories)
    if service.workdir is not None and not hosted:
        directories = (*directories, RootDirectory(workdir, f"{where}.workdir"))
    root_binds, overlays = rootfs_requests(
        rootfs, directories, extra=bool(service.files or service.tmpfs or service.volumes)
    )
    step = _main(service, rootfs, user, workdir)
    return Planned(
        plan=ContainerPlan(
            kind=rootfs.kind,
            rootfs_identity=rootfs.identity,
            root_read_only=hosted,
            mounts=(*mounts, *places.mounts, PlanMount(SHIM_DIR, MountKind.BIND, "control", recursive=False)),
            user=user,
            user_namespace=user_namespace,
            network=request.network.mode,
            capabilities=ROOT_IN_USERNS_CAPABILITIES if user.uid == 0 and not hosted else (),
            seccomp=request.sandbox.process.seccomp,
            limits=service.limits,
            rlimits=limits,
            umask=request.sandbox.process.umask,
            env=SHIM_ENV,
            workdir=workdir,
            steps=(step.step,),
        ),
        steps=(step,),
        binds=(*root_binds, *places.binds),
        overlays=overlays,
        scratch=places.scratch,
        host_sources={"cpu": CPU_TOPOLOGY},
        attempt_files=NETWORK_FILES,
        isolation=isolation,
        notes=tuple(f"service {service.name}: {note}" for note in (*rootfs.notes, *notes, *images.notes, *shared)),
    )


def _workdir(service: ServiceSpec, rootfs: RootfsPlan) -> str:
    own = service.workdir
    if own is not None and (not own.startswith("/") or ".." in own.split("/")):
        raise InvalidRequest(
            f"services.{service.name}.workdir", own, "write an absolute path inside the service, without '..'"
        )
    return own or rootfs.workdir or (JOB_HOME if rootfs.kind is ExecutorKind.PROCESS else "/")


def _main(service: ServiceSpec, rootfs: RootfsPlan, user: JobUser, workdir: str) -> ResolvedStep:
    """Its program, as docker run has it: ENTRYPOINT, command, the image's environment, the home of its user."""
    where = f"services.{service.name}"
    if rootfs.kind is ExecutorKind.PROCESS:
        argv = service.argv
        env: Mapping[str, str] = step_environment({}, {}, service.env, user=user.name, toolchains=())
    else:
        try:
            argv = image_argv(service.entrypoint, rootfs.entrypoint, rootfs.cmd, service.command or ())
        except InvalidRequest as error:
            raise InvalidRequest(f"{where}.command", "", "the image has nothing to run: name a program") from error
        defaults = {"PATH": DEFAULT_PATH, "HOME": user.home or "/", "HOSTNAME": service.name}
        env = {**defaults, **rootfs.env, **service.env}
    check_arguments(where, argv, env)
    step = Step(*argv, name=service.name, env=service.env)
    return ResolvedStep(step, argv, env, workdir, rootfs.stop_signal)


@dataclass(frozen=True, slots=True)
class _Places:
    """What a service has beside its root."""

    mounts: tuple[PlanMount, ...]
    directories: tuple[RootDirectory, ...]
    binds: tuple[BindRequest, ...]
    scratch: tuple[ScratchDir, ...]


def _places(service: ServiceSpec, request: ExecutionRequest, rootfs: RootfsPlan, user: JobUser) -> _Places:
    mounts: list[PlanMount] = []
    directories: list[RootDirectory] = []
    scratch: list[ScratchDir] = []

    def writable(slot: str, path: str, mode: int) -> None:
        scratch.append(ScratchDir(slot, slot, mode, user.uid, user.gid))
        mounts.append(PlanMount(path, MountKind.BIND, slot, read_only=False))

    if rootfs.kind is ExecutorKind.PROCESS:
        for slot, path, mode in (*_HOST_WRITABLE, *EXTRA_PLACES):
            writable(slot, path, mode)
    for number, path in enumerate(map(normpath, service.volumes)):
        if rootfs.kind is ExecutorKind.PROCESS:
            writable(f"own-{number}", path, 0o755)
        else:  # its root is writable, and as ephemeral as a volume has to be
            directories.append(RootDirectory(path, f"services.{service.name}.volumes"))
    for item in service.tmpfs:
        mode = _OPEN if item.mode is None else item.mode
        mounts.append(
            PlanMount(
                normpath(item.path), MountKind.TMPFS, read_only=False, executable=False, size=item.size, mode=mode
            )
        )
    binds = []
    for number, file in enumerate(service.files):
        source = _source_of(service, request, file.source)
        binds.append(BindRequest(f"file-{number}", source, IdMapKind.OWNER))
        mounts.append(PlanMount(normpath(file.destination), MountKind.BIND, f"file-{number}", recursive=False))
    # What lies in another one's place goes on top of it.
    ordered = sorted(mounts, key=lambda mount: mount.destination.count("/"))
    return _Places(tuple(ordered), tuple(directories), tuple(binds), tuple(scratch))


def _source_of(service: ServiceSpec, request: ExecutionRequest, path: str) -> str:
    """Host path of a file of the source, free of links. Links inside the source are followed, out of it they are not.

    `host` opens what this names with no link allowed, so that a later swap is refused.
    """
    field = f"services.{service.name}.files"
    source = request.workspace.source
    if source is None:
        raise InvalidRequest(field, path, "comes from the job's source, and there is none: add --source DIR")
    try:
        fd = open_inside(source, path)
    except OSError as error:
        raise InvalidRequest(field, path, f"can't be read in the source: {error.strerror}") from error
    try:
        kind = os.fstat(fd).st_mode
        if not (stat.S_ISREG(kind) or stat.S_ISDIR(kind)):
            raise InvalidRequest(field, path, "is neither a file nor a directory")
        return str(Path(f"/proc/self/fd/{fd}").readlink())
    finally:
        os.close(fd)
