"""The first words with a daemon: whether it is there, ours to use, and new enough."""

from __future__ import annotations

import os
import re
from typing import Final

from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import Client
from forgeyard_runtimes.containerd.endpoint import find_endpoint
from forgeyard_runtimes.containerd.errors import Code, check_socket, expecting, unsupported, version_too_old
from forgeyard_runtimes.containerd.messages import Empty, namespaces
from forgeyard_runtimes.containerd.settings import HANDLERS, ContainerdSettings
from forgeyard_runtimes.endpoints import rootless_engine

FIND_DEADLINE: Final = 5.0
"""Seconds for a daemon's first answer."""
_OLDEST: Final = (1, 6)


async def connect(settings: ContainerdSettings) -> tuple[Client, str]:
    """A client whose namespace exists, and the daemon's version.

    :raises ExecutorError: UNSUPPORTED when it is not there, not open to us, rootless, too old, or the handler can't run
        our shim; TIMEOUT when it does not answer.
    """
    _check_handler(settings.handler)
    endpoint = find_endpoint(settings.address, os.environ)
    if uid := check_socket(endpoint.path):
        shown = f"{endpoint.path}, named by {endpoint.origin}, is containerd's of uid {uid}"
        raise rootless_engine("containerd", shown, "use root's daemon, or --runtime runc")
    client = Client(endpoint.path, settings.namespace)
    try:
        answer = await client.call(calls.VERSION, Empty(), deadline=FIND_DEADLINE)
        number = release(answer.version)
        request = namespaces.CreateNamespaceRequest(namespace=namespaces.Namespace(name=client.namespace))
        with expecting(Code.ALREADY_EXISTS):
            await client.call(calls.NAMESPACE_CREATE, request, deadline=FIND_DEADLINE)
    except BaseException:
        await client.close()
        raise
    return client, number


def release(text: str) -> str:
    """The version that a daemon tells, without decoration.

    :raises ExecutorError: UNSUPPORTED, when it is older than what this adapter knows.
    """
    found = re.match(r"v?((\d+)\.(\d+)(?:\.\d+)?)", text)
    if found is None or (int(found[2]), int(found[3])) < _OLDEST:
        raise version_too_old(text)
    return found[1]


def _check_handler(handler: str) -> None:
    carriers = HANDLERS.get(handler)
    if carriers is None:
        raise unsupported("handler_unknown", f"no handler is called {handler!r}", f"use one of {', '.join(HANDLERS)}")
    if not carriers:
        brief = f"{handler} can't open the host FIFOs that carry a job's output"
        raise unsupported("runtime_carrier", brief, "use io.containerd.runc.v2")
