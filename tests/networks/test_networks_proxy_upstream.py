"""The executor's own proxy behind the fetch proxy: gone through, failed on, and gone around."""

from __future__ import annotations

import asyncio

import pytest
from fake_web import FakeWeb, allow, connect_proxy, proxied, web

from forgeyard_oci.registry.proxies import Proxies

NAMES = {"a.example.org": ["127.0.0.1"]}


def listed(far: FakeWeb):
    return allow(f"a.example.org:{far.port}", "127.0.0.0/8")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


def test_tunnel_by_the_executors_own_proxy():
    """CONNECT goes on through the executor's proxy, with its credentials, and the name is left to it."""

    async def scenario() -> None:
        async with web(echo) as far, web(connect_proxy("Basic bWU6c2VjcmV0", to=far.port)) as own:
            proxies = Proxies(https=f"http://me:secret@127.0.0.1:{own.port}")
            async with proxied(allow("a.example.org"), proxies=proxies) as proxy:
                reader, writer = await proxy.tunnel("a.example.org:443")
                writer.write(b"through")
                writer.write_eof()
                assert await reader.read() == b"through"
                writer.close()
                assert proxy.asked == []
                assert (await proxy.settled(1))[0].address == ""

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 403 No\r\n\r\n",
        b"HTTP/1.1 407 No\r\nProxy-Authenticate: Basic\r\n\r\n",
        b"SSH-2.0-x\r\n\r\n",
        b"X" * 100_000,
        b"",
    ],
)
def test_bad_proxy_of_the_executor(answer: bytes):
    """An executor's proxy that refuses, talks something else, floods or hangs up gives 502, and 407 never goes on."""

    async def scenario() -> None:
        async with web(connect_proxy(answer=answer)) as own:
            proxies = Proxies(https=f"http://me:secret@127.0.0.1:{own.port}")
            async with proxied(allow("a.example.org"), proxies=proxies) as proxy:
                back = await proxy.ask(b"CONNECT a.example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n")
                assert back.startswith(b"HTTP/1.1 502 ")
                assert b"secret" not in back
                assert (await proxy.settled(1))[0].reason == "upstream_proxy"

    asyncio.run(scenario())


def test_no_proxy_goes_straight():
    """A host that NO_PROXY names is looked up here and connected to without the executor's proxy."""

    async def scenario() -> None:
        async with web(echo) as far:
            proxies = Proxies(https="http://127.0.0.1:1", no_proxy=(".example.org",))
            async with proxied(listed(far), NAMES, proxies=proxies) as proxy:
                _, writer = await proxy.tunnel(f"a.example.org:{far.port}")
                assert proxy.asked == ["a.example.org"]
                writer.close()

    asyncio.run(scenario())
