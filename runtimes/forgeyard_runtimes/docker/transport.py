"""docker-py's way over a Unix socket, with two differences: one pool of connections, and none left open by a failure.

The library keeps a pool for each URL, of which ours are all different, and leaves the socket of a refused connection to
the garbage collector.
"""

from __future__ import annotations

import socket
from typing import Any, Final

from docker.transport import UnixHTTPAdapter
from docker.transport.unixconn import UnixHTTPConnection, UnixHTTPConnectionPool

URL: Final = "http+docker://"


class _Connection(UnixHTTPConnection):
    def connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(self.timeout)
            connection.connect(self.unix_socket)
        except BaseException:
            connection.close()
            raise
        self.sock = connection


class _Pool(UnixHTTPConnectionPool):
    def _new_conn(self) -> Any:
        return _Connection(self.base_url, self.socket_path, self.socket_timeout)

    def __init__(self, socket_path: str, timeout: int, size: int) -> None:
        super().__init__(URL, socket_path, timeout, maxsize=size)
        self.socket_timeout = timeout


class OnePoolAdapter(UnixHTTPAdapter):
    """An adapter for requests whose connections all go to one socket."""

    def __init__(self, socket_path: str, timeout: int, size: int) -> None:
        super().__init__(f"http+unix://{socket_path}", timeout, max_pool_size=size)
        self._pool = _Pool(socket_path, timeout, size)

    def get_connection(self, url: bytes | str, proxies: Any = None) -> UnixHTTPConnectionPool:
        """The one pool, whatever the URL."""
        return self._pool

    def close(self) -> None:
        """Close what is idle."""
        self._pool.close()
        super().close()
