"""Host paths of a request made canonical, once, and checked against what no job may ever see."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Final

from forgeyard_executor.environment import check_text
from forgeyard_executor.request_checks import check_request
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.policy import ApprovedHostPath, NetworkMode
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace
from forgeyard_process_shim.hostroot import RESOLV_CONF

_ROOT_PARTS: Final = ("/usr/local", "/opt")


def canonical_request(request: ExecutionRequest, state_root: Path) -> ExecutionRequest:
    """`request` with symlink-free host paths. `host` opens them with no symlink allowed, so a later swap is refused.

    :raises InvalidRequest: for a path that is absent, or that holds or lies in the executor's own state.
    """
    check_request(request)
    workspace, filesystem = request.workspace, request.sandbox.filesystem
    source = None if workspace.source is None else _directory("source", workspace.source, state_root)
    output = None if workspace.output is None else _destination(workspace.output, state_root)
    if request.network.mode is NetworkMode.HOST and not Path(RESOLV_CONF).exists():
        raise InvalidRequest("network", "host", f"the host has no {RESOLV_CONF} to share; use network deny")
    filesystem = replace(
        filesystem,
        toolchains=tuple(
            replace(path, source=_directory("toolchains", path.source, state_root)) for path in filesystem.toolchains
        ),
        allow_host_paths=_approved("host_paths", filesystem.allow_host_paths, state_root),
    )
    return replace(
        request,
        workspace=PreparedWorkspace(source, output),
        sandbox=replace(request.sandbox, filesystem=filesystem),
    )


def split_root_approvals(request: ExecutionRequest) -> tuple[ExecutionRequest, bool, bool]:
    """Take approvals of /usr/local and /opt out of `request`: they are parts of the host rootfs, not mounts on it.

    :returns: the request without them, and whether each of the two is approved.
    """
    filesystem = request.sandbox.filesystem
    parts = {path.source for path in filesystem.allow_host_paths if path.source == path.destination}
    rest = tuple(path for path in filesystem.allow_host_paths if path.source not in parts & set(_ROOT_PARTS))
    sandbox = replace(request.sandbox, filesystem=replace(filesystem, allow_host_paths=rest))
    return replace(request, sandbox=sandbox), "/usr/local" in parts, "/opt" in parts


def _approved(field: str, paths: tuple[ApprovedHostPath, ...], state: Path) -> tuple[ApprovedHostPath, ...]:
    return tuple(replace(path, source=_existing(field, path.source, state)) for path in paths)


def _directory(field: str, path: str, state: Path) -> str:
    real = _existing(field, path, state)
    if not Path(real).is_dir():
        raise InvalidRequest(field, path, "is not a directory")
    return real


def _destination(path: str, state: Path) -> str:
    real = _real("output", path)
    own = Path(os.path.realpath(state))
    if real == own or own in real.parents:
        raise InvalidRequest("output", path, f"lies in the executor's own state in {own}; name another directory")
    return str(real)


def _real(field: str, path: str) -> Path:
    """`path` without symlinks, whether or not it exists."""
    if not path:
        # To the kernel's path walk "" is nothing, to Python's it is the working directory: neither was meant.
        raise InvalidRequest(field, path, "can't be empty: name a directory, or leave it out")
    check_text(field, path)
    return Path(os.path.realpath(path))


def _existing(field: str, path: str, state: Path) -> str:
    real = _real(field, path)
    try:
        real.stat()
    except OSError as error:
        missing = error.errno in (errno.ENOENT, errno.ENOTDIR)
        cure = "does not exist" if missing else f"can't be used: {error.strerror}"
        raise InvalidRequest(field, path, cure) from error
    own = Path(os.path.realpath(state))
    if real == own or real in own.parents or own in real.parents:
        raise InvalidRequest(
            field, path, f"would show the job the executor's own state in {own}; name another directory"
        )
    return str(real)
