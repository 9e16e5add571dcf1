"""Tunnels of the fetch proxy: bytes both ways, ends, limits, floods, and its own end."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import socket
import ssl
import struct
import threading
from ipaddress import IPv4Address
from pathlib import Path

import pytest
import trustme
from fake_web import FakeWeb, allow, proxied, web

from forgeyard_host.netns import in_namespace, new_namespace, tcp_listener
from forgeyard_model.errors import SandboxError
from forgeyard_networks.proxy_policy import ProxyLimits
from forgeyard_networks.proxy_records import ProxyVerdict

NAMES = {"a.example.org": ["127.0.0.1"]}
MIB = 1 << 20


def listed(far: FakeWeb):
    return allow(f"a.example.org:{far.port}", "127.0.0.0/8")


async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()


async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    await reader.read()


def test_bytes_pass_both_ways_and_are_counted():
    """A tunnel passes bytes as they are, also those sent with the CONNECT itself, and counts them."""

    async def scenario() -> None:
        async with web(echo) as far, proxied(listed(far), NAMES) as proxy:
            target = f"a.example.org:{far.port}"
            reader, writer = await proxy.open()
            writer.write(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n\x00early".encode())
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            writer.write(b"late")
            writer.write_eof()
            assert await reader.read() == b"\x00earlylate"
            writer.close()
            record = (await proxy.settled(1))[0]
            assert (record.method, record.host, record.address) == ("CONNECT", "a.example.org", "127.0.0.1")
            assert (record.bytes_up, record.bytes_down) == (10, 10)
            assert (record.verdict, record.reason) == (ProxyVerdict.ALLOWED, "")

    asyncio.run(scenario())


def test_half_close_by_the_job():
    """A job that has said all still hears the host, which learns that the job has."""

    async def scenario() -> None:
        async def after_all(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"got " + await reader.read())

        async with web(after_all) as far, proxied(listed(far), NAMES) as proxy:
            reader, writer = await proxy.tunnel(f"a.example.org:{far.port}")
            writer.write(b"everything")
            writer.write_eof()
            assert await reader.read() == b"got everything"
            writer.close()

    asyncio.run(scenario())


def test_half_close_by_the_host():
    """A host that has said all still hears the job."""

    async def scenario() -> None:
        heard: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def first(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(b"bye")
            writer.write_eof()
            heard.set_result(await reader.read())

        async with web(first) as far, proxied(listed(far), NAMES) as proxy:
            reader, writer = await proxy.tunnel(f"a.example.org:{far.port}")
            assert await reader.read() == b"bye"
            writer.write(b"still here")
            writer.write_eof()
            assert await heard == b"still here"
            writer.close()

    asyncio.run(scenario())


def test_reset_by_the_host_is_a_reset_for_the_job():
    """A host that resets is not mistaken for one that ended."""

    async def scenario() -> None:
        async def reset(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readexactly(1)
            found = writer.get_extra_info("socket")
            found.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            writer.transport.abort()

        async with web(reset) as far, proxied(listed(far), NAMES) as proxy:
            reader, writer = await proxy.tunnel(f"a.example.org:{far.port}")
            writer.write(b"x")
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()
            record = (await proxy.settled(1))[0]
            assert (record.verdict, record.reason) == (ProxyVerdict.FAILED, "reset")

    asyncio.run(scenario())


def test_tls_passes_end_to_end():
    """A job that checks certificates sees the host's own through a tunnel."""

    async def scenario() -> None:
        authority = trustme.CA()
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("a.example.org").configure_cert(server)
        client = ssl.create_default_context()
        authority.configure_trust(client)
        async with web(tls=server) as far, proxied(listed(far), NAMES) as proxy:
            _, writer = await proxy.tunnel(f"a.example.org:{far.port}")
            await writer.start_tls(client, server_hostname="a.example.org")
            writer.write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            while not far.seen:
                await asyncio.sleep(0)
            writer.transport.abort()

    asyncio.run(scenario())


def test_slow_side_holds_the_fast_one():
    """When the job reads nothing, the host can send no more than buffers hold: the proxy keeps nothing beyond."""

    async def scenario() -> None:
        sent = 0
        stuck = asyncio.Event()

        async def pour(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            nonlocal sent
            writer.transport.set_write_buffer_limits(high=0)
            while True:
                writer.write(bytes(65536))
                try:
                    async with asyncio.timeout(0.3):
                        await writer.drain()
                except TimeoutError:
                    stuck.set()
                    await writer.drain()
                sent += 65536

        async with web(pour) as far, proxied(listed(far), NAMES) as proxy:
            job = socket.socket()
            job.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            job.setblocking(False)
            await asyncio.get_running_loop().sock_connect(job, ("127.0.0.1", proxy.port))
            target = f"a.example.org:{far.port}"
            await asyncio.get_running_loop().sock_sendall(job, f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            async with asyncio.timeout(10):
                await stuck.wait()
            assert sent < 16 * MIB
            job.close()

    asyncio.run(scenario())


def test_big_transfer_in_flat_memory():
    """100 MB come through whole, and the process grows by no more than buffers."""

    async def scenario() -> None:
        block = os.urandom(MIB)
        wanted = hashlib.sha256()
        for _ in range(100):
            wanted.update(block)

        async def send(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for _ in range(100):
                writer.write(block)
                await writer.drain()

        async with web(send) as far, proxied(listed(far), NAMES) as proxy:
            reader, writer = await proxy.tunnel(f"a.example.org:{far.port}")
            writer.write_eof()
            before, got, size = resident(), hashlib.sha256(), 0
            while data := await reader.read(65536):
                got.update(data)
                size += len(data)
            assert (size, got.digest()) == (100 * MIB, wanted.digest())
            assert resident() - before < 16 * MIB
            writer.close()
            assert (await proxy.settled(1))[0].bytes_down == size

    asyncio.run(scenario())


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_silent_tunnel_ends():
    """A tunnel where nothing moves ends after the idle time, on both sides."""

    async def scenario() -> None:
        async with web(hold) as far, proxied(listed(far), NAMES, limits=ProxyLimits(idle_time=0.1)) as proxy:
            reader, writer = await proxy.tunnel(f"a.example.org:{far.port}")
            with pytest.raises(ConnectionResetError):
                await reader.read()
            writer.close()
            record = (await proxy.settled(1))[0]
            assert (record.verdict, record.reason) == (ProxyVerdict.FAILED, "idle")

    asyncio.run(scenario())


def test_tunnel_flood():
    """Beyond the limit a tunnel is refused with 503; one that ends makes room for another."""

    async def scenario() -> None:
        async with web(hold) as far, proxied(listed(far), NAMES, limits=ProxyLimits(tunnels=4)) as proxy:
            target = f"a.example.org:{far.port}"
            held = [await proxy.tunnel(target) for _ in range(4)]
            answer = await proxy.ask(f"CONNECT {target} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 503 ")
            assert (await proxy.settled(1))[0].reason == "too_many_tunnels"
            held[0][1].close()
            await proxy.settled(2)
            held.append(await proxy.tunnel(target))
            for _, writer in held:
                writer.close()

    asyncio.run(scenario())


def test_connection_flood():
    """Beyond the limit a connection gets 503 at once, and those that say nothing are ended by the head's time."""

    async def scenario() -> None:
        limits = ProxyLimits(connections=8, head_time=0.2)
        async with proxied(allow("a.example.org"), limits=limits) as proxy:
            silent = [await proxy.open() for _ in range(8)]
            assert (await proxy.ask(b"")).startswith(b"HTTP/1.1 503 ")
            for reader, writer in silent:
                assert (await reader.read()).startswith(b"HTTP/1.1 408 ")
                writer.close()
            reasons = [record.reason for record in await proxy.settled(9)]
            assert sorted(reasons) == ["head_too_slow"] * 8 + ["too_many_connections"]

    asyncio.run(scenario())


def test_slow_head():
    """A head that comes byte by byte has no more time than any other."""

    async def scenario() -> None:
        async with proxied(allow("a.example.org"), limits=ProxyLimits(head_time=0.3)) as proxy:
            reader, writer = await proxy.open()

            async def drip() -> None:
                with contextlib.suppress(ConnectionError):
                    while True:
                        writer.write(b"G")
                        await writer.drain()
                        await asyncio.sleep(0)

            dripping = asyncio.create_task(drip())
            assert (await reader.read(12)) == b"HTTP/1.1 408" or (await proxy.settled(1))[0].status == 431
            dripping.cancel()
            writer.close()

    asyncio.run(scenario())


def test_endless_head():
    """A head that never ends is refused at its limit, whatever has come by then."""

    async def scenario() -> None:
        async with proxied(allow("a.example.org")) as proxy:
            answer = await proxy.ask(b"GET http://a.example.org/" + b"a" * (200 << 10))
            assert answer.startswith(b"HTTP/1.1 431 ")

    asyncio.run(scenario())


def test_job_that_leaves_in_its_head():
    """A connection that ends without a word is no request; one that ends within its head is a bad one."""

    async def scenario() -> None:
        async with proxied(allow("a.example.org")) as proxy:
            assert await proxy.ask(b"", end=True) == b""
            assert (await proxy.ask(b"GET http://a.ex", end=True)).startswith(b"HTTP/1.1 400 ")
            assert [record.reason for record in await proxy.settled(1)] == ["head_incomplete"]

    asyncio.run(scenario())


def test_host_that_refuses():
    """A port where nobody listens gives 502 that names the address and the cause."""

    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        async with proxied(allow(f"a.example.org:{port}", "127.0.0.0/8"), NAMES) as proxy:
            answer = await proxy.ask(f"CONNECT a.example.org:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 502 ")
            assert b"127.0.0.1: Connection refused" in answer

    asyncio.run(scenario())


def test_next_address_is_tried():
    """When the first checked address refuses, the next one is used."""

    async def scenario() -> None:
        names = {"a.example.org": ["127.0.0.99", "127.0.0.1"]}
        async with web(echo) as far, proxied(listed(far), names) as proxy:
            _, writer = await proxy.tunnel(f"a.example.org:{far.port}")
            writer.close()
            assert (await proxy.settled(1))[0].address == "127.0.0.1"

    asyncio.run(scenario())


def test_host_that_takes_no_connection():
    """A host whose queue is full gives 504 after the time to connect."""

    async def scenario() -> None:
        with socket.socket() as full:
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            port = full.getsockname()[1]
            waiting = [socket.socket() for _ in range(4)]
            for item in waiting:
                item.setblocking(False)
                item.connect_ex(("127.0.0.1", port))
            limits = ProxyLimits(connect_time=0.2)
            async with proxied(allow(f"a.example.org:{port}", "127.0.0.0/8"), NAMES, limits=limits) as proxy:
                answer = await proxy.ask(f"CONNECT a.example.org:{port} HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                assert answer.split(b" ")[1] in (b"502", b"504")
                assert (await proxy.settled(1))[0].verdict is ProxyVerdict.FAILED
            for item in waiting:
                item.close()

    asyncio.run(scenario())


def test_name_server_that_never_answers():
    """A lookup without an end is bounded by the time to connect."""

    async def scenario() -> None:
        async def forever(name: str) -> list[IPv4Address]:
            await asyncio.get_running_loop().create_future()
            return []

        async with proxied(allow("a.example.org"), forever, limits=ProxyLimits(connect_time=0.1)) as proxy:
            answer = await proxy.ask(b"CONNECT a.example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 504 ")

    asyncio.run(scenario())


def test_close_ends_everything():
    """Closing ends tunnels and half-read heads, makes their records, and leaves no task and no descriptor."""

    async def scenario() -> None:
        async with web(hold) as far:
            before = descriptors()
            async with proxied(listed(far), NAMES) as proxy:
                reader, writer = await proxy.tunnel(f"a.example.org:{far.port}")
                other_reader, other_writer = await proxy.open()
                other_writer.write(b"GET ")
                while proxy.proxy.connections < 2:
                    await asyncio.sleep(0)
                await proxy.proxy.close()
                assert await reader.read() == b""
                with contextlib.suppress(ConnectionResetError):
                    assert await other_reader.read() == b""
                assert proxy.proxy.connections == 0
                assert [(item.verdict, item.reason) for item in proxy.records] == [(ProxyVerdict.ALLOWED, "cut")]
                assert proxy.proxy.failed.cancelled()
                writer.close()
                other_writer.close()
                await asyncio.gather(writer.wait_closed(), other_writer.wait_closed(), return_exceptions=True)
            while descriptors() > before:
                await asyncio.sleep(0)

    asyncio.run(scenario())


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_dead_listener_is_seen():
    """When the listening socket can't accept any more, `failed` says so: the attempt has lost its way out."""

    async def scenario() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        async with proxied(allow("a.example.org"), listener=listener) as proxy:
            listener.shutdown(socket.SHUT_RDWR)
            with pytest.raises(SandboxError) as found:
                await asyncio.wait_for(asyncio.shield(proxy.proxy.failed), 5)
            assert found.value.reason == "fetch_proxy_stopped"

    asyncio.run(scenario())


def test_exhausted_descriptors_end_nothing():
    """Without descriptors the proxy waits and goes on: other attempts share them."""

    async def scenario() -> None:
        class Exhausted(socket.socket):
            failures = 1

            def accept(self):
                if self.failures:
                    self.failures -= 1
                    raise OSError(errno.EMFILE, "too many open files")
                return super().accept()

        listener = Exhausted()
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        async with proxied(allow("a.example.org"), listener=listener) as proxy:
            answer = await proxy.ask(b"CONNECT b.example.org:443 HTTP/1.1\r\nHost: x\r\n\r\n")
            assert answer.startswith(b"HTTP/1.1 403 ")
            assert not proxy.proxy.failed.done()

    asyncio.run(scenario())


@pytest.mark.kernel
def test_listener_inside_and_upstream_outside():
    """With its listener in another namespace the proxy still connects from its own, where the job can't reach."""
    inside = new_namespace()

    async def scenario() -> None:
        async with web(echo) as far:
            listener = tcp_listener(inside.fd, "127.0.0.1", 3128)
            async with proxied(listed(far), NAMES, listener=listener):
                said = await asyncio.to_thread(lambda: in_namespace(inside.fd, lambda: from_inside(far.port)))
                assert said == ("refused", b"hello")

    try:
        asyncio.run(scenario())
    finally:
        inside.close()


def from_inside(port: int) -> tuple[str, bytes]:
    assert threading.current_thread() is not threading.main_thread()
    with socket.socket() as direct:
        straight = "refused" if direct.connect_ex(("127.0.0.1", port)) == errno.ECONNREFUSED else "reached"
    with socket.create_connection(("127.0.0.1", 3128), timeout=5) as job:
        job.sendall(f"CONNECT a.example.org:{port} HTTP/1.1\r\nHost: x\r\n\r\nhello".encode())
        job.shutdown(socket.SHUT_WR)
        back = b""
        while data := job.recv(4096):
            back += data
    return straight, back.partition(b"\r\n\r\n")[2]
