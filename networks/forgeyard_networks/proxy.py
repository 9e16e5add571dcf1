"""The fetch proxy of one attempt: the way out for tools that speak HTTP, by name, to what a policy lists.

It listens in the attempt's network and connects from the executor's own. Each request is read strictly, its name is
looked up once, and the connection goes to the address that was checked.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from dataclasses import replace
from typing import Final, Self

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_networks.proxy_policy import ProxyLimits, ProxyPolicy
from forgeyard_networks.proxy_records import ProxyAudit, ProxyRecord, ProxyTotal, ProxyVerdict
from forgeyard_networks.proxy_session import Session, answer
from forgeyard_networks.proxy_upstream import Outside, Resolve
from forgeyard_oci.registry.proxies import Proxies

log: Final = logging.getLogger("forgeyard.networks")

_PAUSE: Final = 0.2
_EXHAUSTED: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM})
# accept(2): errors of a connection that waited, which say nothing of the listener.
_OF_A_PEER: Final = frozenset(
    {
        errno.ECONNABORTED,
        errno.EHOSTDOWN,
        errno.EHOSTUNREACH,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ENONET,
        errno.ENOPROTOOPT,
        errno.EOPNOTSUPP,
        errno.EPERM,
        errno.EPROTO,
    }
)


class FetchProxy:
    """Serves until closed. `failed` gets an exception when it had to stop: the attempt is then without a way out."""

    def __init__(self, listener: socket.socket, policy: ProxyPolicy, outside: Outside, limits: ProxyLimits) -> None:
        """Use `serve`."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._listener, self._policy, self._outside, self._limits = listener, policy, outside, limits
        self._audit = ProxyAudit()
        self._sessions: set[asyncio.Task[None]] = set()
        self._tunnels = asyncio.Semaphore(limits.tunnels)
        self._accepting: asyncio.Task[None] | None = None

    @classmethod
    def serve(
        cls,
        listener: socket.socket,
        *,
        policy: ProxyPolicy,
        resolve: Resolve,
        proxies: Proxies | None = None,
        limits: ProxyLimits | None = None,
        audit: Callable[[ProxyRecord], None] | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> Self:
        """Serve on a listening socket, which is the proxy's from here on. Needs a running loop.

        :param resolve: see `proxy_upstream.resolve_by`. :param proxies: the executor's own, for the way on.
        :param audit: called with every request when it has ended; `totals` has sums. `tls`: for hosts with credentials.
        :raises InvalidRequest: a credential that can't be sent.
        """
        for item in policy.credentials:
            item.check()
        bounds = limits or ProxyLimits()
        listener.setblocking(False)
        made = cls(listener, policy, Outside(policy, resolve, proxies or Proxies(), bounds, tls), bounds)
        made._audit = ProxyAudit(audit)
        made._accepting = made._loop.create_task(made._accept(), name="forgeyard-fetch-proxy")
        made._accepting.add_done_callback(made._stopped)
        return made

    @property
    def connections(self) -> int:
        """Open from the job's side."""
        return len(self._sessions)

    def totals(self) -> tuple[ProxyTotal, ...]:
        """What was fetched or refused so far."""
        return self._audit.totals()

    async def close(self) -> None:
        """End every connection and wait until their records are made. Idempotent."""
        tasks = list(self._sessions) if self._accepting is None else [self._accepting, *self._sessions]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._listener.close()
        if not self.failed.done():
            self.failed.cancel()

    async def _accept(self) -> None:
        exhausted = False
        while True:
            try:
                connected, _ = await self._loop.sock_accept(self._listener)
            except OSError as error:
                if error.errno in _EXHAUSTED:
                    if not exhausted:
                        log.warning("the fetch proxy can't take connections for now: %s", error.strerror)
                    exhausted = True
                    await asyncio.sleep(_PAUSE)
                elif error.errno not in _OF_A_PEER:
                    raise
                continue
            exhausted = False
            self._take(connected)

    def _take(self, connected: socket.socket) -> None:
        if len(self._sessions) >= self._limits.connections:
            self._turn_away(connected)
            return
        session = Session(self._policy, self._outside, self._limits, self._tunnels)
        task = self._loop.create_task(self._serve(session, connected))
        self._sessions.add(task)
        task.add_done_callback(self._sessions.discard)

    async def _serve(self, session: Session, connected: socket.socket) -> None:
        begun = self._loop.time()
        try:
            await session.run(connected)
        except Exception:
            # A job must not be able to end the network, whatever it found. The connection is closed by now.
            log.exception("the fetch proxy failed at a connection")
            session.record = replace(session.record, verdict=ProxyVerdict.FAILED, reason="internal")
        finally:
            if session.seen:
                self._audit.add(replace(session.result(), duration=round(self._loop.time() - begun, 6)))

    def _turn_away(self, connected: socket.socket) -> None:
        text = f"{self._limits.connections} connections are open already; close some"
        with contextlib.suppress(OSError):  # it left, or the answer does not fit: it is turned away all the same
            connected.send(answer(503, text))
        connected.close()
        self._audit.add(ProxyRecord("", "", 0, "", ProxyVerdict.REFUSED, "too_many_connections", 503, 0, 0, 0.0))

    def _stopped(self, task: asyncio.Task[None]) -> None:
        if task.cancelled() or self.failed.done():
            return
        cause = task.exception()
        error = SandboxError(
            SandboxErrorKind.NETWORK_SETUP_FAILED,
            "fetch_proxy_stopped",
            "the fetch proxy can't take connections any more",
            details=str(cause),
        )
        error.__cause__ = cause
        self.failed.set_exception(error)
        log.error("%s", error)
