"""Plain HTTP by the fetch proxy: framing, headers, credentials, and requests made to be read in two ways."""

from __future__ import annotations

import asyncio
import base64
import re
import ssl

import pytest
import trustme
from fake_web import OK, FakeWeb, allow, connect_proxy, proxied, web

from forgeyard_networks.proxy_policy import ProxyLimits, ProxyPolicy, UpstreamCredential
from forgeyard_networks.proxy_records import ProxyVerdict
from forgeyard_oci.registry.proxies import Proxies

NAMES = {"a.example.org": ["127.0.0.1"], "b.example.org": ["127.0.0.1"]}
ALLOWED = allow("a.example.org:80", "127.0.0.0/8")


def listed(far: FakeWeb):
    return allow(f"a.example.org:{far.port}", "127.0.0.0/8")


def get(far: FakeWeb, *lines: str, method: str = "GET", version: str = "1.1", body: bytes = b"") -> bytes:
    head = "\r\n".join([f"{method} http://a.example.org:{far.port}/x HTTP/{version}", "Host: a.example.org", *lines])
    return head.encode() + b"\r\n\r\n" + body


def names_of(raw: bytes) -> list[str]:
    head = raw.partition(b"\r\n\r\n")[0].decode()
    return [line.partition(":")[0].lower() for line in head.split("\r\n")[1:]]


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ")[1])


def test_headers_of_one_connection_stay_there():
    """Hop-by-hop headers, what Connection names, and Proxy-Authorization go no further; others arrive as written."""

    async def scenario() -> None:
        answer = (
            b"HTTP/1.1 200 OK\r\nConnection: X-Hop\r\nX-Hop: 1\r\nKeep-Alive: 5\r\n"
            b"X-Kept: v\r\nContent-Length: 2\r\n\r\nhi"
        )
        async with web(answer) as far, proxied(listed(far), NAMES) as proxy:
            request = get(
                far,
                "Connection: keep-alive, X-Private, Content-Length",
                "X-Private: 1",
                "Proxy-Connection: keep-alive",
                "Proxy-Authorization: Basic eDp5",
                "TE: trailers",
                "Upgrade: h2c",
                "HTTP2-Settings: AA",
                "X-Kept: a",
                "x-kept: b",
            )
            back = await proxy.ask(request)
            assert names_of(far.seen[0]) == ["host", "x-kept", "x-kept", "connection"]
            assert names_of(back) == ["x-kept", "content-length", "connection"]

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("lines", "body"),
    [
        (["Content-Length: 5"], b"hello"),
        (["Transfer-Encoding: chunked"], b"2\r\nhe\r\n3;ext=1\r\nllo\r\n0\r\nTrailer: x\r\n\r\n"),
        (["Content-Length: 5", "Content-Length: 5"], b"hello"),
    ],
)
def test_body_is_framed_anew(lines: list[str], body: bytes):
    """A body arrives whole however it was framed; extensions and trailers of chunks do not."""

    async def scenario() -> None:
        async with web() as far, proxied(listed(far), NAMES) as proxy:
            answer = await proxy.ask(
                get(far, *lines, method="POST", body=body + b"GET http://b.example.org/ HTTP/1.1\r\n\r\n")
            )
            assert status_of(answer) == 200
            sent = far.seen[0]
            plain = re.sub(rb"(?:^|\r\n)[0-9a-f]+\r\n", b"", sent.partition(b"\r\n\r\n")[2])
            assert plain.startswith(b"hello")
            assert b"ext=1" not in sent
            assert b"Trailer" not in sent
            assert len(far.seen) == 1

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("request_text", "status"),
    [
        (
            b"POST http://a.example.org HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n",
            400,
        ),
        (b"POST http://a.example.org/ HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\n", 400),
        (b"POST http://a.example.org/ HTTP/1.1\r\nHost: a\r\nContent-Length: 5, 6\r\n\r\n", 400),
        (b"POST http://a.example.org/ HTTP/1.1\r\nHost: a\r\nContent-Length: +5\r\n\r\n", 400),
        (b"POST http://a.example.org/ HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999999999999999999\r\n\r\n", 400),
        (b"POST http://a.example.org/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: xchunked\r\n\r\n", 501),
        (b"POST http://a.example.org/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked, chunked\r\n\r\n", 501),
        (b"POST http://a.example.org/ HTTP/1.1\r\nHost: a\r\nTransfer-Encoding : chunked\r\n\r\n", 400),
        (b"POST http://a.example.org/ HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\nX: a\r\n folded\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\nX: a\x00b\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\nX: a\rY: b\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\nX: a\nTransfer-Encoding: chunked\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\nHost: a\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\nno colon\r\n\r\n", 400),
        (b"GET http://a.example.org/a b HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET  http://a.example.org/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"\r\nGET http://a.example.org/ HTTP/1.1\r\nHost: a\r\n\r\n", 400),
        (b"GET http://a.example.org/\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\n", 505),
        (b"TRACE http://a.example.org/ HTTP/1.1\r\nHost: a\r\n\r\n", 405),
        (b"CONNECT a.example.org:443 HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\nx", 400),
        (b"\x16\x03\x01\x00\xa5\x01\x00\r\n\r\n", 400),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\n" + b"X: y\r\n" * 100 + b"\r\n", 431),
        (b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 40000 + b"\r\n\r\n", 431),
    ],
)
def test_request_that_could_be_read_in_two_ways(request_text: bytes, status: int):
    """Smuggling, folding, bare line ends and oversized heads are answered with an error, and nothing goes out."""

    async def scenario() -> None:
        async with proxied(ALLOWED, NAMES) as proxy:
            assert status_of(await proxy.ask(request_text)) == status
            assert proxy.asked == []
            assert (await proxy.settled(1))[0].verdict is ProxyVerdict.REFUSED

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "body",
    [
        b"zz\r\nhello\r\n0\r\n\r\n",
        b"-5\r\nhello\r\n0\r\n\r\n",
        b"5\r\nhelloXX0\r\n\r\n",
        b"5\nhello\r\n0\r\n\r\n",
        b"fffffffffffffffffffff\r\nhello",
        b"5;" + b"x" * 70000,
    ],
)
def test_bad_chunk(body: bytes):
    """A chunk that can't be is answered with 400, and the request that was begun upstream never ends."""

    async def scenario() -> None:
        ended: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                ended.set_result(await reader.read())
            except ConnectionError:
                ended.set_result(b"")

        async with web(handler) as far, proxied(listed(far), NAMES) as proxy:
            answer = await proxy.ask(get(far, "Transfer-Encoding: chunked", method="POST", body=body))
            assert status_of(answer) == 400
            assert not (await ended).endswith(b"0\r\n\r\n")
            assert (await proxy.settled(1))[0].reason == "bad_body"

    asyncio.run(scenario())


def test_huge_chunk_is_streamed():
    """A chunk that claims to be enormous is passed on as it comes, in chunks of true sizes."""

    async def scenario() -> None:
        got: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()

        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            got.set_result(await reader.readuntil(b"hello\r\n"))
            writer.write(OK)

        async with web(handler) as far, proxied(listed(far), NAMES) as proxy:
            body = b"ffffffffffffffff\r\nhello"
            answer = await proxy.ask(get(far, "Transfer-Encoding: chunked", method="POST", body=body))
            assert await got == b"5\r\nhello\r\n"
            assert status_of(answer) == 200

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "body"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", b"hello"),
        (
            b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n",
            b"hello",
        ),
        (b"HTTP/1.0 200 OK\r\n\r\nhello", b"hello"),
        (b"HTTP/1.1 204 No\r\n\r\n", b""),
        (b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello", b"hello"),
    ],
)
def test_answer_for_http_1_0(answer: bytes, body: bytes):
    """A client of HTTP/1.0 gets bodies without chunks and no interim answers, whatever the server sends."""

    async def scenario() -> None:
        async with web(answer) as far, proxied(listed(far), NAMES) as proxy:
            back = await proxy.ask(get(far, version="1.0"))
            assert back.partition(b"\r\n\r\n")[2] == body
            assert b"chunked" not in back

    asyncio.run(scenario())


def test_head_and_redirect_are_passed_untouched():
    """HEAD keeps its Content-Length without a body, and a redirect reaches the job with its Location."""

    async def scenario() -> None:
        moved = b"HTTP/1.1 302 Found\r\nLocation: https://other.example.org/\r\nContent-Length: 0\r\n\r\n"
        async with web(b"HTTP/1.1 200 OK\r\nContent-Length: 5000\r\n\r\n") as far, proxied(listed(far), NAMES) as proxy:
            back = await proxy.ask(get(far, method="HEAD"))
            assert b"Content-Length: 5000\r\n" in back
            assert back.endswith(b"\r\n\r\n")
        async with web(moved) as far, proxied(listed(far), NAMES) as proxy:
            assert b"Location: https://other.example.org/\r\n" in await proxy.ask(get(far))

    asyncio.run(scenario())


def test_expect_continue():
    """The host's own 100 reaches the job before its body is sent."""

    async def scenario() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            head = await reader.readuntil(b"\r\n\r\n")
            assert b"Expect: 100-continue" in head
            writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            assert await reader.readexactly(5) == b"hello"
            writer.write(OK)

        async with web(handler) as far, proxied(listed(far), NAMES) as proxy:
            reader, writer = await proxy.open()
            writer.write(get(far, "Content-Length: 5", "Expect: 100-continue", method="PUT"))
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 100 ")
            writer.write(b"hello")
            assert (await reader.read()).endswith(b"hi")
            writer.close()

    asyncio.run(scenario())


def test_early_answer_reaches_a_job_that_is_still_sending():
    """A host that answers before it has the body is heard by the job, whose sending does not cut the answer off."""

    async def scenario() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno")
            await writer.drain()

        async with web(handler) as far, proxied(listed(far), NAMES) as proxy:
            request = get(far, "Content-Length: 300000", method="PUT", body=b"x" * 150000)
            answer = await proxy.ask(request)
            assert answer.endswith(b"no")

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhi", "bad_answer"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nhi\r\n", "bad_answer"),
    ],
)
def test_answer_cut_short_does_not_look_whole(answer: bytes, reason: str):
    """When a host stops within its answer, the job's connection is reset, also where its end would mark the end."""

    async def scenario() -> None:
        async with web(answer) as far, proxied(listed(far), NAMES) as proxy:
            with pytest.raises(ConnectionResetError):
                await proxy.ask(get(far, version="1.0"))
            record = (await proxy.settled(1))[0]
            assert (record.verdict, record.reason, record.status) == (ProxyVerdict.FAILED, reason, 200)

    asyncio.run(scenario())


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n", b"HTTP/1.1 101 Sw\r\nUpgrade: x\r\n\r\n", b"X" * 70000])
def test_answer_that_is_none(answer: bytes):
    """A host that answers with no HTTP, or switches protocols unasked, gives 502."""

    async def scenario() -> None:
        async with web(answer) as far, proxied(listed(far), NAMES) as proxy:
            assert status_of(await proxy.ask(get(far))) == 502
            assert (await proxy.settled(1))[0].verdict is ProxyVerdict.FAILED

    asyncio.run(scenario())


def test_host_that_never_answers():
    """A host that takes the request and says nothing gives 504 after the idle time."""

    async def scenario() -> None:
        async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.read()

        limits = ProxyLimits(idle_time=0.1)
        async with web(handler) as far, proxied(listed(far), NAMES, limits=limits) as proxy:
            assert status_of(await proxy.ask(get(far))) == 504
            assert (await proxy.settled(1))[0].reason == "idle"

    asyncio.run(scenario())


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


def server_tls(authority: trustme.CA, name: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert(name).configure_cert(context)
    return context


def client_tls(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


def with_secret(far: FakeWeb, tls: bool = True, host: str = "a.example.org") -> ProxyPolicy:
    secret = UpstreamCredential.basic(host, "robot", "hunter2", port=far.port, tls=tls)
    return ProxyPolicy(
        allow(f"a.example.org:{far.port}", f"b.example.org:{far.port}", "127.0.0.0/8"), credentials=(secret,)
    )


SECRET = "Basic " + base64.b64encode(b"robot:hunter2").decode()


def test_credential_is_added_over_tls(authority: trustme.CA):
    """A plain request to a host with a credential goes on by TLS with the proxy's header, and without the job's."""

    async def scenario() -> None:
        tls = server_tls(authority, "a.example.org")
        async with web(tls=tls) as far, proxied(with_secret(far), NAMES, tls=client_tls(authority)) as proxy:
            request = b"GET http://a.example.org/simple/ HTTP/1.1\r\nHost: a\r\nAuthorization: Basic am9i\r\n\r\n"
            answer = await proxy.ask(request)
            assert answer.endswith(b"hi")
            assert far.seen[0].count(b"Authorization:") == 1
            assert f"Authorization: {SECRET}\r\n".encode() in far.seen[0]
            assert far.seen[0].startswith(b"GET /simple/ HTTP/1.1\r\n")
            record = (await proxy.settled(1))[0]
            assert (record.host, record.port) == ("a.example.org", far.port)
            shown = f"{record}{proxy.proxy.totals()}{with_secret(far)!r}".encode() + answer
            assert SECRET.encode() not in shown
            assert b"hunter2" not in shown

    asyncio.run(scenario())


def test_credential_goes_to_no_other_host():
    """Another host, and a header that Connection names, change nothing about who gets the credential."""

    async def scenario() -> None:
        async with web() as far, proxied(with_secret(far, tls=False), NAMES) as proxy:
            await proxy.ask(f"GET http://b.example.org:{far.port}/ HTTP/1.1\r\nHost: a.example.org\r\n\r\n".encode())
            assert b"Authorization" not in far.seen[0]
            await proxy.ask(get(far, "Connection: Authorization", "Authorization: Basic am9i"))
            assert f"Authorization: {SECRET}\r\n".encode() in far.seen[1]

    asyncio.run(scenario())


def test_certificate_of_another_host(authority: trustme.CA):
    """A host with a credential whose certificate is not its own gets neither the request nor the credential."""

    async def scenario() -> None:
        tls = server_tls(authority, "b.example.org")
        async with web(tls=tls) as far, proxied(with_secret(far), NAMES, tls=client_tls(authority)) as proxy:
            answer = await proxy.ask(b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\n\r\n")
            assert status_of(answer) == 502
            assert far.seen == []
            assert (await proxy.settled(1))[0].reason == "tls"

    asyncio.run(scenario())


def test_job_may_not_go_to_a_host_for_its_credential_alone():
    """A credential lists no host: one that the policy does not list stays closed."""

    async def scenario() -> None:
        secret = UpstreamCredential("a.example.org", "Bearer x", tls=False, port=80)
        async with proxied(ProxyPolicy(credentials=(secret,)), NAMES) as proxy:
            assert status_of(await proxy.ask(b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\n\r\n")) == 403

    asyncio.run(scenario())


def test_plain_request_by_the_executors_own_proxy():
    """Plain requests go to the executor's proxy whole, with its credentials; names are left to it."""

    async def scenario() -> None:
        async with web() as far:
            own = Proxies(http=f"http://me:p%40ss@127.0.0.1:{far.port}")
            async with proxied(allow("a.example.org"), proxies=own) as proxy:
                assert status_of(await proxy.ask(b"GET http://a.example.org/x HTTP/1.1\r\nHost: a\r\n\r\n")) == 200
                assert proxy.asked == []
                assert far.seen[0].startswith(b"GET http://a.example.org/x HTTP/1.1\r\nHost: a.example.org\r\n")
                wanted = b"Proxy-Authorization: Basic " + base64.b64encode(b"me:p@ss") + b"\r\n"
                assert wanted in far.seen[0]

    asyncio.run(scenario())


def test_credentials_of_the_executors_proxy_stay_here():
    """A 407 of the executor's proxy becomes a 502, so that the job is never asked for its credentials."""

    async def scenario() -> None:
        wants = b'HTTP/1.1 407 No\r\nProxy-Authenticate: Basic realm="corp"\r\nContent-Length: 0\r\n\r\n'
        async with web(wants) as far:
            own = Proxies(http=f"http://me:secret@127.0.0.1:{far.port}")
            async with proxied(allow("a.example.org"), proxies=own) as proxy:
                answer = await proxy.ask(b"GET http://a.example.org/x HTTP/1.1\r\nHost: a\r\n\r\n")
                assert status_of(answer) == 502
                assert b"Authenticate" not in answer
                assert b"secret" not in answer

    asyncio.run(scenario())


@pytest.mark.parametrize("proxy_tls", [False, True])
def test_credential_over_tls_by_the_executors_own_proxy(authority: trustme.CA, proxy_tls: bool):
    """TLS to the host is spoken through a tunnel of the executor's proxy, itself with TLS or without."""

    async def scenario() -> None:
        own_tls = server_tls(authority, "localhost") if proxy_tls else None
        async with (
            web(tls=server_tls(authority, "a.example.org")) as far,
            web(connect_proxy(to=far.port), tls=own_tls) as own,
        ):
            # localhost is the machine itself, never proxied to; as the proxy's own name it is fine.
            url = f"{'https' if proxy_tls else 'http'}://localhost:{own.port}"
            options = {"tls": client_tls(authority), "proxies": Proxies(https=url)}
            async with proxied(with_secret(far), **options) as proxy:
                answer = await proxy.ask(b"GET http://a.example.org/ HTTP/1.1\r\nHost: a\r\n\r\n")
                assert answer.endswith(b"hi")
                assert f"Authorization: {SECRET}\r\n".encode() in far.seen[0]

    asyncio.run(scenario())
