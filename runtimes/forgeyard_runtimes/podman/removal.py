"""Removing a container, and the pod that is made with the first of its containers and goes with the last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_runtimes.podman.client import PodmanClient
from forgeyard_runtimes.podman.errors import NotThere, Refused

_EXISTS: Final = 409
_TRIES: Final = 3
"""To remove something. Podman may take a container that is just ending for a running one, and fail to stop it."""
REMOVAL: Final[Mapping[str, str]] = {"force": "true", "v": "true", "timeout": "0"}
"""With its anonymous volumes, and without a grace that nobody asked for."""


async def make_pod(client: PodmanClient, pod: str, labels: Mapping[str, str]) -> None:
    """Without a container of its own: its members share a network that we made, and nothing else.

    One that exists is fine: a container beside this one made it.
    """
    body = {"name": pod, "no_infra": True, "share_parent": False, "labels": dict(labels)}
    try:
        await client.call("POST", "pods/create", body=body)
    except Refused as error:
        if error.status != _EXISTS:
            raise


async def remove_container(client: PodmanClient, name: str) -> None:
    """Remove it; one that is not there is fine.

    :raises SandboxError: CLEANUP_FAILED, when it is still there.
    """
    for _ in range(_TRIES - 1):
        try:
            await _delete(client, f"containers/{name}", REMOVAL)
        except Refused:
            continue
        return
    await _delete_or_say(client, f"containers/{name}", REMOVAL)


async def remove_empty_pod(client: PodmanClient, pod: str) -> None:
    """Remove the pod, unless containers are left in it.

    Several of its last ones may be removed at once. To all but the first Podman says then that it failed.

    :raises SandboxError: CLEANUP_FAILED, when it is empty and still there.
    """
    for _ in range(_TRIES - 1):
        try:
            if await _is_empty(client, pod):
                await _delete(client, f"pods/{pod}", {})
        except Refused:
            continue
        return
    if await _is_empty(client, pod):
        await _delete_or_say(client, f"pods/{pod}", {})


async def _is_empty(client: PodmanClient, pod: str) -> bool:
    """Whether it is there, without containers."""
    try:
        answer = await client.call("GET", f"pods/{pod}/json")
    except NotThere:
        return False
    return not answer.get("Containers")


async def _delete(client: PodmanClient, what: str, query: Mapping[str, str]) -> None:
    try:
        await client.call("DELETE", what, query=query)
    except NotThere:
        return


async def _delete_or_say(client: PodmanClient, what: str, query: Mapping[str, str]) -> None:
    try:
        await _delete(client, what, query)
    except Refused as error:
        raise SandboxError(
            SandboxErrorKind.CLEANUP_FAILED,
            "runtime_delete",
            f"Podman can't remove {what}",
            details=error.details,
            resolution="`forgeyard gc` tries again",
        ) from error
