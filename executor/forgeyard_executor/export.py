"""`forgeyard bundle generate`: a bundle complete in one directory, which plain `runc run -b` takes, without us.

What differs from a job's own bundle is where things are, never what they are allowed: trees are copied and owned by
the bundle's id range where a job has ID-mapped mounts, and the shim replays its steps from a file over its own stdio.
"""

from __future__ import annotations

import os
import platform
import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from forgeyard_executor.export_tree import copy_path, copy_tree
from forgeyard_executor.planning import UID_COUNT, Planned
from forgeyard_executor.services import HostServices
from forgeyard_executor.steps import ResolvedStep
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import IdMapKind, OverlayRequest, SandboxSetup
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import SHIM_DIR, Bundle, Placement, RootfsPlan
from forgeyard_model.policy import NetworkMode, SourceMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_oci.spec import compile_bundle
from forgeyard_process_shim.hostroot import hosts_file
from forgeyard_process_shim.protocol import StepCommand
from forgeyard_process_shim.replay import REPLAY_ARGV, STEPS_FILE, ReplayStep, encode_replay


def refuse_network(request: ExecutionRequest) -> None:
    """Refuse what a bundle by itself can't have: nobody would make its network, nor run its services.

    :raises InvalidRequest: for services, and for a network that is neither loopback alone nor the host's.
    """
    if request.spec.services:
        name = request.spec.services[0].name
        raise InvalidRequest("services", name, "a generated bundle is one container by itself: take services out")
    if request.network.mode not in (NetworkMode.DENY, NetworkMode.HOST):
        cure = "a generated bundle stands by itself, and nothing makes its network: use network deny"
        raise InvalidRequest("network", request.network.mode.value, cure)


@dataclass(frozen=True, slots=True)
class BundleExport:
    """One bundle to write. Its id range is the first of the operator's block, not leased: run one at a time."""

    services: HostServices
    request: ExecutionRequest
    rootfs: RootfsPlan
    planned: Planned

    def write(self, directory: Path) -> Bundle:
        """Write it into `directory`.

        :raises InvalidRequest: when `directory` is not absent or empty.
        """
        directory = directory.absolute()
        _check_free(directory)
        existed = directory.exists()
        try:
            return self._write(directory)
        except BaseException:
            _empty(directory, keep=existed)
            raise

    def _write(self, directory: Path) -> Bundle:
        sandbox = SandboxId.mint()
        base = self.services.uids.block.start
        directory.mkdir(mode=0o711, parents=True, exist_ok=True)
        directory.chmod(0o711)
        volumes = _copy_rootfs(self.services, self.rootfs, self.planned.overlays, directory / "rootfs", base)
        placement = Placement(
            sandbox=sandbox,
            rootfs=str(directory / "rootfs"),
            sources={
                **self.planned.host_sources,
                **self._binds(directory, base),
                **_scratch(self.planned, directory, base),
                **self._control(directory, sandbox),
                **self._source_copy(directory, base),
                **volumes,
            },
            uid_base=base,
            uid_count=UID_COUNT,
            cgroup=None,
            netns=None,
            argv=REPLAY_ARGV,
        )
        bundle = compile_bundle(self.planned.plan, placement, machine=platform.machine())
        (directory / "config.json").write_bytes(bundle.config)
        return bundle

    def _binds(self, directory: Path, base: int) -> dict[str, str]:
        """Where binds come from. What the host rootfs keeps in the state directory is copied: it may be gone later."""
        cache = f"{self.services.paths.rootfs}/"
        sources = {}
        for bind in self.planned.binds:
            sources[bind.slot] = bind.source
            if bind.source.startswith(cache):
                target = directory / "covers" / bind.slot
                target.parent.mkdir(mode=0o711, exist_ok=True)
                copy_path(Path(bind.source), target, base)
                sources[bind.slot] = str(target)
        return sources

    def _source_copy(self, directory: Path, base: int) -> dict[str, str]:
        """A source that is thrown away after a job is a copy here; others are bound as they are."""
        source = self.request.workspace.source
        if source is None or self.request.sandbox.filesystem.source_mode is not SourceMode.COW:
            return {}
        user, owner = self.planned.plan.user, Path(source).stat()
        swap = ((owner.st_uid, user.uid), (owner.st_gid, user.gid))
        copy_tree(Path(source), directory / "source", base, swap=swap)
        return {"source": str(directory / "source")}

    def _control(self, directory: Path, sandbox: SandboxId) -> dict[str, str]:
        """The shim, its steps and their scripts, where a job has its channel."""
        control = directory / "control"
        control.mkdir(mode=0o711)
        shutil.copyfile(self.services.shim, control / "init")
        (control / "init").chmod(0o555)
        (directory / "hosts").write_text(hosts_file(sandbox.hostname))
        merge = self.request.spec.merge_output
        steps = [
            _replay_step(control, index, resolved, merge_output=merge)
            for index, resolved in enumerate(self.planned.steps)
        ]
        (control / STEPS_FILE).write_bytes(encode_replay(steps))
        return {"control": str(control), "hosts": str(directory / "hosts")}


def _replay_step(control: Path, index: int, resolved: ResolvedStep, *, merge_output: bool) -> ReplayStep:
    step, argv, stdin = resolved.step, resolved.argv, ""
    if step.script is not None:
        (control / f"step-{index}").write_text(step.script)
        argv = (*argv, f"{SHIM_DIR}/step-{index}")
    if step.stdin is not None:
        (control / f"stdin-{index}").write_bytes(step.stdin)
        stdin = f"{SHIM_DIR}/stdin-{index}"
    command = StepCommand(
        index + 1,
        argv,
        resolved.env,
        resolved.workdir,
        stdin=stdin,
        background=step.background,
        merge_output=merge_output,
    )
    return ReplayStep(command, step.continue_on_error, step.when)


def _check_free(directory: Path) -> None:
    if directory.is_dir() and not any(directory.iterdir()):
        return
    if directory.exists() or directory.is_symlink():
        raise InvalidRequest("--to", directory, "exists and is not an empty directory")


def _copy_rootfs(
    services: HostServices, rootfs: RootfsPlan, overlays: tuple[OverlayRequest, ...], target: Path, base: int
) -> dict[str, str]:
    """Copy the root; the sources of an image's volumes, which are copied as well."""
    if rootfs.kind is ExecutorKind.PROCESS:
        copy_tree(Path(rootfs.lowers[0]), target, base)
        return {}
    # Layers are merged by the kernel, in an attempt of its own that is undone at once.
    sandbox = SandboxId.mint()
    work = services.paths.attempt(sandbox)
    ledger = Ledger.open(str(services.paths.root), sandbox, services.executor_id)
    try:
        services.host.create_directory(sandbox, ledger)
        request = SandboxSetup(
            sandbox=sandbox,
            directory=str(work),
            uid_base=None,
            uid_count=UID_COUNT,
            job_uid=0,
            job_gid=0,
            overlays=tuple(replace(overlay, idmap=IdMapKind.NONE) for overlay in overlays if overlay.slot == "rootfs"),
        )
        placed = services.host.setup(request, ledger)
        copy_tree(Path(placed.sources["rootfs"]), target, base)
        volumes = {slot: source for slot, source in placed.sources.items() if slot != "rootfs"}
        for slot, source in volumes.items():
            (target.parent / "volumes").mkdir(mode=0o711, exist_ok=True)
            copy_tree(Path(source), target.parent / "volumes" / slot, base)
        return {slot: str(target.parent / "volumes" / slot) for slot in volumes}
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


def _empty(directory: Path, *, keep: bool) -> None:
    if not directory.is_dir():
        return
    for child in directory.iterdir():
        shutil.rmtree(child) if child.is_dir() and not child.is_symlink() else child.unlink()
    if not keep:
        directory.rmdir()
