"""docker-py, called from a pool of its own: every call has a deadline, every failure is an error of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import requests
from docker import APIClient
from docker.errors import DockerException, InvalidVersion, NotFound
from docker.tls import TLSConfig
from docker.utils import version_lt

from forgeyard_runtimes.docker.endpoint import Endpoint
from forgeyard_runtimes.docker.errors import hangs, translate
from forgeyard_runtimes.docker.transport import URL, OnePoolAdapter

T = TypeVar("T")

QUERY_DEADLINE: Final = 20.0
CHANGE_DEADLINE: Final = 60.0
THREADS: Final = 8
OLDEST_API: Final = "1.41"
"""Docker 20.10: the first with a cgroup namespace by request."""
NEWEST_API: Final = "1.45"
"""What these requests were written for; later daemons speak it as well."""


@dataclass(frozen=True, slots=True)
class DockerSettings:
    """How to reach a daemon, and whose containers they are.

    :param host, context: as Docker's client takes them; empty: the environment decides.
    :param executor: id of this executor. state: what names its state directory.
    :param own_rootfs: images are unpacked by the executor; False leaves it to the engine.
    :param images: directory of the executor's image store: what that forgets goes here too.
    :param query, change: seconds that a question, and a change, may take.
    """

    host: str = ""
    context: str = ""
    executor: str = ""
    state: str = ""
    query: float = QUERY_DEADLINE
    change: float = CHANGE_DEADLINE
    own_rootfs: bool = True
    images: str = ""


class DockerClient:
    """One daemon. `connect` first; `close` at the end."""

    def __init__(self, endpoint: Endpoint, settings: DockerSettings) -> None:
        self.endpoint = endpoint
        self.settings = settings
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="docker")
        self._api: APIClient | None = None

    async def connect(self) -> None:
        """Agree on a version of the API.

        :raises ExecutorError: LOST (not there, no permission), UNSUPPORTED (too old), TIMEOUT.
        """
        there = f"connect to {self.endpoint.host}, named by {self.endpoint.origin}"
        self._api = await self._run(self._open, there, self.settings.query)

    def _open(self) -> APIClient:
        """Blocking. Of the API's versions, the newest that both sides know."""
        with self._client(OLDEST_API) as probe:
            found = probe.version(api_version=False)
        theirs = str(found.get("ApiVersion") or "")
        if not theirs or version_lt(theirs, OLDEST_API):
            raise InvalidVersion(f"Docker {found.get('Version')} speaks version {theirs or 'none'} of the API")
        return self._client(NEWEST_API if version_lt(NEWEST_API, theirs) else theirs)

    def _client(self, version: str) -> APIClient:
        timeout, socket = self._socket_timeout(), self.endpoint.socket
        client = APIClient(base_url=self.endpoint.host, version=version, timeout=timeout, tls=_tls(self.endpoint))
        if socket:
            client.mount(URL, OnePoolAdapter(socket, timeout, THREADS))
        return client

    def _socket_timeout(self) -> int:
        # Of one read; the deadline of a call is kept by its waiter. After it the thread is free again as well.
        return max(1, int(max(self.settings.query, self.settings.change)))

    @property
    def api(self) -> APIClient:
        """The blocking client, for functions that run in the pool."""
        if self._api is None:
            raise hangs("connect", "never connected")
        return self._api

    async def ask(self, work: Callable[[APIClient], T], doing: str) -> T:
        """Run a question in the pool.

        :raises ForgeyardError: what `translate` makes of its failure; TIMEOUT after the deadline.
        """
        return await self._run(lambda: work(self.api), doing, self.settings.query)

    async def change(self, work: Callable[[APIClient], T], doing: str, *, deadline: float | None = None) -> T:
        """Run a change in the pool. Raises as `ask`."""
        return await self._run(lambda: work(self.api), doing, deadline or self.settings.change)

    async def _run(self, work: Callable[[], T], doing: str, deadline: float) -> T:
        future = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            async with asyncio.timeout(deadline):
                return await asyncio.shield(future)
        except TimeoutError as error:
            future.add_done_callback(_seen)
            raise hangs(doing, f"no answer within {deadline:g}s") from error
        except asyncio.CancelledError:
            # A change that is under way is completed: who undoes it must not race it. Its deadline still holds.
            await asyncio.wait((future,), timeout=deadline)
            future.add_done_callback(_seen)
            raise
        except (DockerException, requests.RequestException, OSError) as error:
            raise translate(error, doing) from error

    async def close(self) -> None:
        """Let go of its connections and threads. A thread that waits for a hung daemon is not waited for."""
        if self._api is not None:
            self._api.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def create_container(api: Any, request: dict[str, Any], name: str) -> dict[str, Any]:
    """POST /containers/create with a body of ours; docker-py's own has no types."""
    answer: dict[str, Any] = api.create_container_from_config(request, name=name)
    return answer


def load_image(api: Any, identity: str, archive: bytes | Iterator[bytes]) -> dict[str, Any] | None:
    """Load an image that Docker lacks.

    :param archive: as `docker save` writes it; an iterator is not touched where the image is there.
    :returns: what Docker says of one that was there.
    :raises DockerException: with what the daemon said.
    """
    try:
        found: dict[str, Any] = api.inspect_image(identity)
    except NotFound:
        said = [str(line["error"]) for line in api.load_image(archive) if "error" in line]
        if said:
            raise DockerException("; ".join(said)) from None
        return None
    return found


def _tls(endpoint: Endpoint) -> Any:
    if endpoint.tls is None:
        return False
    cert, key = endpoint.tls.file("cert"), endpoint.tls.file("key")
    return TLSConfig(
        client_cert=(cert, key) if cert and key else None,
        ca_cert=endpoint.tls.file("ca"),
        verify=endpoint.tls.verify,
    )


def _seen(future: asyncio.Future[Any]) -> None:
    if not future.cancelled():
        future.exception()
