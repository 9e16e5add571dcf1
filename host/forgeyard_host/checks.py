"""Whether a request holds on this host, asked again whoever sent it (seed, section 136)."""

from __future__ import annotations

import re
import stat
from pathlib import Path
from typing import Final

from forgeyard_host.failures import bad_plan
from forgeyard_host.operations import OverlayRequest, SandboxSetup

_NAME: Final = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}\Z")

_LEAST_DISK: Final = 1 << 20
_MOST_DISK: Final = 1 << 62
_LEAST_FILES: Final = 1 << 16
_STICKY_RWX: Final = 0o1777
_MOST_ID: Final = (1 << 32) - 1
"""Itself no id: to chown(2) it means "leave it as it is"."""


def check_setup(request: SandboxSetup, directory: str, block: range) -> None:
    """What can be said of a request without touching the host.

    :param directory: the only one that its attempt may have.
    :param block: host ids that its range may lie in.
    :raises SandboxError: INVALID_FILESYSTEM_PLAN.
    """
    if request.directory != directory:
        raise bad_plan("directory_outside_state", f"{request.directory} is not this attempt's directory")
    base, count = request.uid_base, request.uid_count
    if base is not None:
        if count < 1 or base not in block or base + count - 1 not in block:
            raise bad_plan("uid_range_outside_block", f"uids {base} to {base + count - 1} are not ours to give")
        if not (0 <= request.job_uid < count and 0 <= request.job_gid < count):
            raise bad_plan("job_outside_range", f"user {request.job_uid}:{request.job_gid} is not below {count}")
    _check_sizes(request)
    slots = [bind.slot for bind in request.binds]
    slots += [overlay.slot for overlay in request.overlays]
    slots += [scratch.slot for scratch in request.scratch]
    for overlay in request.overlays:
        slots += [part.slot for part in overlay.directories if part.slot]
        _check_paths(overlay)
    _check_names(slots)
    _check_names([overlay.upper for overlay in request.overlays] + [part.name for part in request.scratch])


def _check_sizes(request: SandboxSetup) -> None:
    """Numbers that the kernel would refuse, cut or take for "no limit"."""
    if request.disk_limit is not None and not _LEAST_DISK <= request.disk_limit <= _MOST_DISK:
        raise bad_plan("bad_disk_limit", f"{request.disk_limit} bytes are no size for a disk")
    if not _LEAST_FILES <= request.files_size <= _MOST_DISK:
        raise bad_plan("bad_files_size", f"{request.files_size} bytes are no size for the attempt's files")
    for part in request.scratch:
        if not 0 <= part.mode <= _STICKY_RWX:
            raise bad_plan("bad_mode", f"{part.mode:o} is no mode for {part.name!r}")
        if not (0 <= part.uid < _MOST_ID and 0 <= part.gid < _MOST_ID):
            raise bad_plan("owner_outside_range", f"{part.uid}:{part.gid} own nothing")


def _check_paths(overlay: OverlayRequest) -> None:
    for part in overlay.directories:
        if not part.path.startswith("/") or "\0" in part.path:
            raise bad_plan("bad_path", f"{part.path!r} is no absolute path")


def check_searchable(state_root: str) -> None:
    """A runtime with a user namespace walks to the rootfs as a uid that is not root: all ancestors need o+x.

    :raises SandboxError: INVALID_FILESYSTEM_PLAN, reason state_directory_closed.
    """
    for path in (Path(state_root), *Path(state_root).parents):
        if not path.stat().st_mode & stat.S_IXOTH:
            raise bad_plan(
                "state_directory_closed",
                f"{path} is closed to others, so no user namespace can reach a sandbox below it",
                resolution=f"chmod o+x {path}, or use another state directory",
            )


def _check_names(names: list[str]) -> None:
    for name in names:
        if not _NAME.match(name):
            raise bad_plan("bad_name", f"{name!r} is no name for a slot or a directory")
    if len(set(names)) != len(names):
        raise bad_plan("double_name", f"a name is given twice: {', '.join(sorted(names))}")
