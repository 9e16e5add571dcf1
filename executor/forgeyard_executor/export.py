"""`forgeyard bundle generate`: a bundle complete in one directory, which plain `runc run -b` takes, without us.

What differs from a job's own bundle is where things are, never what they are allowed: trees are copied and owned by
the bundle's id range where a job has ID-mapped mounts, and the shim replays its steps from a file over its own stdio.
"""

from __future__ import annotations

import os
import platform
import shutil
import stat
from pathlib import Path

from forgeyard_executor.planning import UID_COUNT, Planned
from forgeyard_executor.services import HostServices
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import IdMapKind, OverlayRequest, SandboxSetup
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import SHIM_DIR, Bundle, NetworkAttachment, Placement, RootfsPlan
from forgeyard_model.policy import SourceMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_oci.spec import compile_bundle
from forgeyard_process_shim.hostroot import hosts_file
from forgeyard_process_shim.protocol import StepCommand
from forgeyard_process_shim.replay import REPLAY_ARGV, STEPS_FILE, ReplayStep, encode_replay


def export_bundle(
    services: HostServices,
    request: ExecutionRequest,
    rootfs: RootfsPlan,
    planned: Planned,
    network: NetworkAttachment,
    directory: Path,
) -> Bundle:
    """Write the bundle. Its id range is the first of the operator's block, not leased: run one at a time.

    :raises InvalidRequest: when `directory` is not absent or empty.
    """
    directory = directory.absolute()
    _check_free(directory)
    existed = directory.exists()
    try:
        return _export(services, request, rootfs, planned, network, directory)
    except BaseException:
        _empty(directory, keep=existed)
        raise


def _export(
    services: HostServices,
    request: ExecutionRequest,
    rootfs: RootfsPlan,
    planned: Planned,
    network: NetworkAttachment,
    directory: Path,
) -> Bundle:
    sandbox = SandboxId.mint()
    base = services.uids.block.start
    directory.mkdir(mode=0o711, parents=True, exist_ok=True)
    directory.chmod(0o711)
    _copy_rootfs(services, rootfs, directory / "rootfs", base)
    sources = dict(planned.host_sources)
    sources |= _scratch(planned, directory, base)
    sources |= _control(services, planned, directory, sandbox, merge_output=request.spec.merge_output)
    sources |= {bind.slot: bind.source for bind in planned.binds}
    if request.workspace.source is not None and request.sandbox.filesystem.source_mode is SourceMode.COW:
        user = planned.plan.user
        owner = Path(request.workspace.source).stat()
        _copy_tree(
            Path(request.workspace.source),
            directory / "source",
            base,
            swap=((owner.st_uid, user.uid), (owner.st_gid, user.gid)),
        )
        sources["source"] = str(directory / "source")
    placement = Placement(
        sandbox=sandbox,
        rootfs=str(directory / "rootfs"),
        sources=sources,
        uid_base=base,
        uid_count=UID_COUNT,
        cgroup=None,
        netns=network.netns,
        argv=REPLAY_ARGV,
    )
    bundle = compile_bundle(planned.plan, placement, machine=platform.machine())
    (directory / "config.json").write_bytes(bundle.config)
    return bundle


def _check_free(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise InvalidRequest("--to", directory, "exists and is not an empty directory")


def _copy_rootfs(services: HostServices, rootfs: RootfsPlan, target: Path, base: int) -> None:
    if rootfs.kind is ExecutorKind.PROCESS:
        _copy_tree(Path(rootfs.lowers[0]), target, base)
        return
    # Layers are merged by the kernel, in an attempt of its own that is undone at once.
    sandbox = SandboxId.mint()
    work = services.paths.attempt(sandbox)
    ledger = Ledger.open(str(services.paths.root), sandbox, services.executor_id)
    try:
        services.host.create_directory(sandbox, ledger)
        placed = services.host.setup(
            SandboxSetup(
                sandbox=sandbox,
                directory=str(work),
                uid_base=None,
                uid_count=UID_COUNT,
                job_uid=0,
                job_gid=0,
                overlays=(OverlayRequest("rootfs", rootfs.lowers, IdMapKind.NONE, upper="rootfs"),),
            ),
            ledger,
        )
        _copy_tree(Path(placed.sources["rootfs"]), target, base)
    finally:
        services.host.teardown(str(work))
        ledger.close_and_remove()


def _scratch(planned: Planned, directory: Path, base: int) -> dict[str, str]:
    made = {}
    for scratch in planned.scratch:
        path = directory / "scratch" / scratch.name
        path.mkdir(parents=True)
        path.chmod(scratch.mode)
        os.chown(path, base + scratch.uid, base + scratch.gid)
        made[scratch.slot] = str(path)
    return made


def _control(
    services: HostServices, planned: Planned, directory: Path, sandbox: SandboxId, *, merge_output: bool
) -> dict[str, str]:
    """The shim, its steps and their scripts, where a job has its channel."""
    control = directory / "control"
    control.mkdir(mode=0o711)
    shutil.copyfile(services.shim, control / "init")
    (control / "init").chmod(0o555)
    (directory / "hosts").write_text(hosts_file(sandbox.hostname))
    steps = []
    for index, resolved in enumerate(planned.steps):
        argv = resolved.argv
        stdin = ""
        if resolved.step.script is not None:
            (control / f"step-{index}").write_text(resolved.step.script)
            argv = (*argv, f"{SHIM_DIR}/step-{index}")
        if resolved.step.stdin is not None:
            (control / f"stdin-{index}").write_bytes(resolved.step.stdin)
            stdin = f"{SHIM_DIR}/stdin-{index}"
        step = resolved.step
        command = StepCommand(
            index + 1,
            argv,
            resolved.env,
            resolved.workdir,
            stdin=stdin,
            background=step.background,
            merge_output=merge_output,
        )
        steps.append(ReplayStep(command, step.continue_on_error, step.when))
    (control / STEPS_FILE).write_bytes(encode_replay(steps))
    return {"control": str(control), "hosts": str(directory / "hosts")}


def _copy_tree(
    source: Path, target: Path, base: int, *, swap: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
) -> None:
    """Copy with owners moved into the bundle's range; each pair of `swap` changes places, as an OWNER map has it."""

    def owner(info: os.stat_result) -> tuple[int, int]:
        return base + _swapped(info.st_uid, swap[0]), base + _swapped(info.st_gid, swap[1])

    def copy(origin: str, destination: str) -> str:
        info = os.lstat(origin)
        if stat.S_ISREG(info.st_mode):
            shutil.copyfile(origin, destination)
            os.chown(destination, *owner(info))
            os.chmod(destination, stat.S_IMODE(info.st_mode))
        return destination

    shutil.copytree(source, target, symlinks=True, copy_function=copy, ignore=_special)
    for path, directories, files in os.walk(source):
        there = target / Path(path).relative_to(source)
        for name in (*directories, *files):
            if (Path(path) / name).is_symlink():
                os.lchown(there / name, *owner(os.lstat(Path(path) / name)))
        info = os.lstat(path)
        os.chown(there, *owner(info))
        there.chmod(stat.S_IMODE(info.st_mode))


def _special(directory: str, names: list[str]) -> list[str]:
    """Devices, FIFOs and sockets: none of them belongs into a bundle."""
    return [name for name in names if not _ordinary(os.lstat(Path(directory) / name).st_mode)]


def _ordinary(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _swapped(number: int, pair: tuple[int, int]) -> int:
    first, second = pair
    moved = second if number == first else first if number == second else number
    return moved if moved < UID_COUNT else UID_COUNT - 1


def _empty(directory: Path, *, keep: bool) -> None:
    if not directory.is_dir():
        return
    for child in directory.iterdir():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    if not keep:
        directory.rmdir()
