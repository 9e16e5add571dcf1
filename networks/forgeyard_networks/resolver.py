"""The name server of one attempt: the only one its job and services can reach.

Its sockets are in the attempt's network, its own questions leave from the executor's. It answers members' names by
itself, asks the host's servers for names that the policy allows, and refuses the rest at once. Floods are bounded by
reading no faster than a rate: what is beyond waits in the kernel, which drops it.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Coroutine, Iterable, Mapping
from ipaddress import IPv4Address
from typing import Any, Final, Self

from forgeyard_host.netfilter import Flow
from forgeyard_networks.dns_wire import Malformed, Question, parse, render
from forgeyard_networks.resolver_answers import Answers
from forgeyard_networks.resolver_audit import DnsAudit, DnsRecord, ResolverStats
from forgeyard_networks.resolver_limits import Bucket, ResolverLimits
from forgeyard_networks.resolver_openings import OpenAddress, Openings
from forgeyard_networks.resolver_policy import Decision, NameRules, ResolverPolicy
from forgeyard_networks.resolver_tcp import MOST_QUESTION, Connections
from forgeyard_networks.resolver_upstream import Upstream

log: Final = logging.getLogger("forgeyard.networks")

Peer = tuple[str, int]
_BATCH: Final = 32
_PAUSE: Final = 0.02
_BUFFER: Final = 64 << 10


class Resolver:
    """Serves until closed. `failed` gets an exception when it had to stop: the attempt is then without names."""

    def __init__(
        self, udp: socket.socket, answers: Answers, openings: Openings, audit: DnsAudit, limits: ResolverLimits
    ) -> None:
        """Use `serve`."""
        self._loop = asyncio.get_running_loop()
        self.failed: asyncio.Future[None] = self._loop.create_future()
        self._udp, self._answers, self._openings, self._audit = udp, answers, openings, audit
        self._limits, self._bucket = limits, Bucket(limits.rate)
        self._connections = Connections(answers, audit, self._bucket, limits)
        self._tasks: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._server: asyncio.Server | None = None
        self._pause: asyncio.TimerHandle | None = None

    @classmethod
    async def serve(
        cls,
        udp: socket.socket,
        tcp: socket.socket,
        *,
        names: Mapping[str, IPv4Address],
        policy: ResolverPolicy,
        upstream: Upstream,
        open_addresses: OpenAddress,
        audit: Callable[[DnsRecord], None] | None = None,
        limits: ResolverLimits | None = None,
    ) -> Self:
        """Serve on two sockets, bound and listening; they are the resolver's from here on.

        :param names: of all members, as `name_table` makes it.
        :param open_addresses: called before an answer of a restricted job is sent, once per destination and address.
        :param audit: called with the first question of each kind; `records` has them all.
        """
        collected = DnsAudit(audit)
        openings = Openings(open_addresses)
        answers = Answers(NameRules.of(policy, names), upstream, openings, collected)
        made = cls(udp, answers, openings, collected, limits or ResolverLimits())
        # What clients leave unread is memory of this host: accepted connections get the listener's bounds.
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        tcp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        try:
            made._server = await asyncio.start_server(made._connected, sock=tcp, limit=MOST_QUESTION)
        except BaseException:
            udp.close()
            tcp.close()
            raise
        made._listen()
        return made

    @property
    def stats(self) -> ResolverStats:
        """Counts so far."""
        return self._audit.stats()

    @property
    def problem(self) -> str:
        """Why the last question that failed did; empty when none has."""
        return self._answers.problem

    def records(self) -> tuple[DnsRecord, ...]:
        """What was asked so far."""
        return self._audit.records()

    async def renew(self, flows: Iterable[Flow]) -> int:
        """Keep addresses open that `flows` use; call it at least every minute or so.

        :raises ForgeyardError: of the firewall.
        """
        return await self._openings.renew(flows)

    async def close(self) -> None:
        """End everything: no socket, no task is left. Idempotent."""
        self._stop()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        if not self.failed.cancel() and not self.failed.cancelled():
            self.failed.exception()  # logged when it happened; asyncio need not tell again that nobody looked

    def _stop(self) -> None:
        if self._stopped:
            return
        self._stopped = True
        if self._pause is not None:
            self._pause.cancel()
        self._loop.remove_reader(self._udp)
        self._udp.close()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()

    def _die(self, error: Exception) -> None:
        """Fail closed, and let whoever waits for `failed` know."""
        log.error("the resolver of a job's network stops: %s", error, exc_info=error)
        if not self.failed.done():
            self.failed.set_exception(error)
        self._stop()

    def _start(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._die(error)

    def _listen(self) -> None:
        self._pause = None
        self._loop.add_reader(self._udp, self._readable)

    def _readable(self) -> None:
        try:
            for _ in range(_BATCH):
                if not self._bucket.take():
                    self._loop.remove_reader(self._udp)
                    self._pause = self._loop.call_later(_PAUSE, self._listen)
                    return
                if not self._receive():
                    self._bucket.give_back()
                    return
        except Exception as error:  # noqa: BLE001  whatever it is, it must end the attempt instead of its names alone
            self._die(error)

    def _receive(self) -> bool:
        try:
            packet, peer = self._udp.recvfrom(MOST_QUESTION)
        except BlockingIOError:
            return False
        self._audit.questions += 1
        try:
            self._question(parse(packet), peer)
        except Malformed as error:
            self._audit.malformed += 1
            if error.reply is not None:
                self._send(error.reply, peer)
        return True

    def _question(self, question: Question, peer: Peer) -> None:
        found = self._answers.known(question)
        if isinstance(found, Decision):
            if len(self._tasks) < self._limits.pending:
                self._start(self._ask(question, found, peer))
                return
            found = self._answers.overloaded(question)
        self._send(render(question, found, question.most_udp), peer)

    async def _ask(self, question: Question, decision: Decision, peer: Peer) -> None:
        reply = await self._answers.asked(question, decision)
        self._send(render(question, reply, question.most_udp), peer)

    def _send(self, data: bytes, peer: Peer) -> None:
        try:
            self._udp.sendto(data, peer)
        except OSError:
            # A full buffer, or a client that is gone or called itself port 0. It will ask again, or never meant it.
            self._audit.unsent += 1

    def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = writer.get_extra_info("peername")  # None for a client that is gone already
        if self._stopped or peer is None or not self._connections.admit(peer[0]):
            writer.transport.abort()
            return
        task = self._start(self._connections.serve(peer[0], reader, writer))
        task.add_done_callback(lambda _: writer.transport.abort())  # also when it was cancelled before it began
