"""podman-py's session for a service's socket, with connections that are closed when they fail.

podman-py itself leaves the descriptor of a refused connection to the garbage collector. Imported when it is used.
"""

from __future__ import annotations

import socket
from pathlib import Path

from podman.api.client import APIClient
from podman.api.uds import UDSAdapter, UDSConnection, UDSConnectionPool


def session(path: Path, version: str, workers: int) -> APIClient:
    """A session for `workers` threads at once."""

    class Connection(UDSConnection):
        """To `path`, whatever host a URL names."""

        def connect(self) -> None:
            """Connect, within the time that a call has."""
            sock = socket.socket(socket.AF_UNIX)
            try:
                sock.settimeout(self.timeout)
                sock.connect(str(path))
            except BaseException:
                sock.close()
                raise
            self.sock = sock

    class Pool(UDSConnectionPool):
        """Connections to `path`."""

        ConnectionCls = Connection

    api = APIClient(base_url=f"unix://{path}", version=version, num_pools=1, max_pool_size=workers)
    adapter = api.get_adapter("http://podman")
    if isinstance(adapter, UDSAdapter) and adapter.poolmanager is not None:
        adapter.poolmanager.pool_classes_by_scheme = {"http": Pool}
    return api
