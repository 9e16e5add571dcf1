"""What containerd really runs: the spec in its store, and the one in the directory that it gave to runc."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forgeyard_host.processes import parent_of
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import Client
from forgeyard_runtimes.containerd.messages import SPEC, containers
from forgeyard_runtimes.containerd.task import get_task


@dataclass(frozen=True, slots=True)
class ReadBack:
    """`stored`: of the container's record. `written`: what runc was started with. They are the same, or it is odd."""

    stored: Mapping[str, Any]
    written: Mapping[str, Any]


async def read_back(client: Client, container_id: str) -> ReadBack:
    """Both specs of a container that has a process.

    :raises ForgeyardError: it is not there, has no process, or its spec is not a spec.
    """
    request = containers.GetContainerRequest(id=container_id)
    record = (await client.call(calls.CONTAINER_GET, request)).container
    process = await get_task(client, container_id)
    if record.spec.type_url != SPEC:
        raise _unreadable(f"{container_id} has {record.spec.type_url!r} for a spec")
    return ReadBack(_parsed(record.spec.value, container_id), written_spec(0 if process is None else process.pid))


def written_spec(pid: int) -> Mapping[str, Any]:
    """config.json in the working directory of the shim that holds the container.

    That directory is containerd's own bundle, wherever its state is.

    :param pid: of the container's PID 1, whose parent the shim is.
    :raises ExecutorError: LOST.
    """
    try:
        raw = Path(f"/proc/{parent_of(pid)}/cwd/config.json").read_bytes()
    except OSError as error:
        raise _unreadable(str(error)) from error
    return _parsed(raw, "the shim's bundle")


def shim_of(pid: int) -> int:
    """A pidfd of the shim that holds the container; -1 when that is gone already."""
    try:
        return os.pidfd_open(parent_of(pid))
    except OSError:
        return -1


def _parsed(raw: bytes, what: str) -> Mapping[str, Any]:
    try:
        spec = json.loads(raw)
    except ValueError as error:
        raise _unreadable(f"{what}: {error}") from error
    if not isinstance(spec, dict):
        raise _unreadable(f"{what} is not an object")
    return spec


def _unreadable(details: str) -> ExecutorError:
    brief = "what containerd runs can't be read back"
    return ExecutorError(ExecutorErrorKind.LOST, "effective_spec", brief, details=details)
