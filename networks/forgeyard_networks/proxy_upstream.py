"""From the proxy to where a request goes: straight to an address that was checked, or by a proxy of the executor."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address
from typing import Final
from urllib.parse import SplitResult, unquote, urlsplit

from forgeyard_host.failures import describe
from forgeyard_networks.dns_wire import TYPE_A
from forgeyard_networks.proxy_policy import NotServed, ProxyLimits, ProxyPolicy, Target, basic, failed
from forgeyard_networks.proxy_records import ProxyVerdict
from forgeyard_networks.proxy_streams import Stream
from forgeyard_networks.resolver_upstream import Upstream, UpstreamFailed
from forgeyard_oci.registry.proxies import Proxies

Resolve = Callable[[str], Awaitable[Sequence[IPv4Address]]]
"""Addresses of a name, empty for none. Raises OSError or UpstreamFailed."""

_MOST_TRIED: Final = 3
_PORTS: Final = {"http": 80, "https": 443}
_STATUS: Final = re.compile(rb"HTTP/1\.[01] (\d{3})[ \r]")


def resolve_by(upstream: Upstream) -> Resolve:
    """By the name servers that an attempt's resolver asks."""

    async def resolve(name: str) -> Sequence[IPv4Address]:
        return (await upstream.ask(name, TYPE_A)).addresses

    return resolve


@dataclass(frozen=True, slots=True)
class Reached:
    """A connection towards a target.

    :ivar address: that it goes to; empty when a proxy of the executor found it.
    :ivar absolute: whether requests need the whole URL, since a proxy reads them; `authorization`: for that proxy.
    """

    stream: Stream
    address: str = ""
    absolute: bool = False
    authorization: str = field(default="", repr=False)


class Outside:
    """Ways out, for one attempt's proxy."""

    def __init__(
        self,
        policy: ProxyPolicy,
        resolve: Resolve,
        proxies: Proxies,
        limits: ProxyLimits,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._policy, self._resolve, self._proxies, self._limits = policy, resolve, proxies, limits
        self._tls = tls

    async def tunnel(self, target: Target) -> Reached:
        """Bytes to the target, whatever they are.

        :raises NotServed: 403, 502, 504.
        """
        return await self._bounded(target, self._tunnel(target))

    async def secure(self, target: Target) -> Reached:
        """TLS to the target, its certificate checked.

        :raises NotServed: 403, 502, 504.
        """
        return await self._bounded(target, self._secure(target))

    async def plain(self, target: Target) -> Reached:
        """For requests of plain HTTP.

        :raises NotServed: 403, 502, 504.
        """
        return await self._bounded(target, self._plain(target))

    async def _bounded(self, target: Target, connecting: Awaitable[Reached]) -> Reached:
        try:
            async with asyncio.timeout(self._limits.connect_time):
                return await connecting
        except TimeoutError:
            text = f"{target}: no connection within {self._limits.connect_time:g} s"
            raise NotServed(504, "connect_timeout", text, ProxyVerdict.FAILED) from None

    async def _tunnel(self, target: Target) -> Reached:
        proxy = self._proxy("https", target)
        return await self._direct(target) if proxy is None else Reached(await self._through(proxy, target))

    async def _plain(self, target: Target) -> Reached:
        proxy = self._proxy("http", target)
        if proxy is None:
            return await self._direct(target)
        return Reached(await self._to_proxy(proxy), absolute=True, authorization=_authorization(proxy))

    async def _secure(self, target: Target) -> Reached:
        reached = await self._tunnel(target)
        try:
            return Reached(await reached.stream.secured(await self._context(), target.host), reached.address)
        except OSError as error:
            reached.stream.close()
            raise failed("tls", f"{target}: TLS: {_cause(error)}") from error
        except BaseException:
            reached.stream.close()
            raise

    async def _direct(self, target: Target) -> Reached:
        causes: list[str] = []
        addresses = (await self._addresses(target))[:_MOST_TRIED]
        for address in addresses:
            try:
                async with asyncio.timeout(self._limits.connect_time / len(addresses)):
                    return Reached(await Stream.connect(str(address), target.port, None), str(address))
            except TimeoutError:
                causes.append(f"{address}: no answer")
            except OSError as error:
                causes.append(f"{address}: {_cause(error)}")
        raise failed("connect", f"{target}: {'; '.join(causes)}")

    async def _addresses(self, target: Target) -> tuple[IPv4Address, ...]:
        """Looked up once: what is checked here is what is connected to."""
        if target.address is not None:
            return (target.address,)
        try:
            found = await self._resolve(target.host)
        except TimeoutError:
            raise failed("resolve", f"{target}: the name could not be looked up in time") from None
        except (OSError, UpstreamFailed) as error:
            raise failed("resolve", f"{target}: the name could not be looked up: {error}") from error
        if not found:
            raise failed("no_such_name", f"{target}: this name has no IPv4 address")
        return self._policy.admitted(target, found)

    def _proxy(self, scheme: str, target: Target) -> SplitResult | None:
        found = self._proxies.for_url(f"{scheme}://{target}/")
        return urlsplit(found[scheme]) if found else None

    async def _through(self, proxy: SplitResult, target: Target) -> Stream:
        stream = await self._to_proxy(proxy)
        try:
            authorization = _authorization(proxy)
            more = f"Proxy-Authorization: {authorization}\r\n" if authorization else ""
            await stream.send(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{more}\r\n".encode())
            answer = await stream.reader.readuntil(b"\r\n\r\n")
        except (OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            stream.close()
            raise failed("upstream_proxy", f"{target}: the executor's own proxy did not answer") from None
        except BaseException:
            stream.close()
            raise
        found = _STATUS.match(answer)
        if found is None or not found[1].startswith(b"2"):
            stream.close()
            said = found[1].decode() if found else "no HTTP"
            raise failed("upstream_proxy", f"{target}: the executor's own proxy answered {said}")
        return stream

    async def _to_proxy(self, proxy: SplitResult) -> Stream:
        tls = await self._context() if proxy.scheme == "https" else None
        host = proxy.hostname or ""
        try:
            return await Stream.connect(host, proxy.port or _PORTS[proxy.scheme], tls)
        except OSError as error:
            text = f"the executor's own proxy can't be reached: {_cause(error)}"
            raise failed("upstream_proxy", text) from error

    async def _context(self) -> ssl.SSLContext:
        if self._tls is None:
            self._tls = await asyncio.to_thread(ssl.create_default_context)
        return self._tls


def _authorization(proxy: SplitResult) -> str:
    if proxy.username is None:
        return ""
    return basic(unquote(proxy.username), unquote(proxy.password or ""))


def _cause(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return error.verify_message
    # asyncio puts its own sentence where the system's belongs.
    known = error.errno is not None and error.errno in errno.errorcode and not isinstance(error, ssl.SSLError)
    return os.strerror(error.errno) if known and error.errno else describe(error)
