"""Where the fetch proxy goes and where it does not."""

from __future__ import annotations

import asyncio
import json
from ipaddress import IPv4Address, IPv4Network

import pytest
from fake_web import Proxied, allow, proxied, web

from forgeyard_model.errors import InvalidRequest
from forgeyard_networks.proxy_policy import NotServed, ProxyPolicy, Target, UpstreamCredential
from forgeyard_networks.proxy_records import MOST_TOTALS, OTHERS, ProxyAudit, ProxyRecord, ProxyVerdict

HERE = {"index.example.org": ["127.0.0.1"]}


def connect(target: str) -> bytes:
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode()


async def refused(proxy: Proxied, request: bytes) -> tuple[int, str]:
    answer = await proxy.ask(request)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert body.count(b"\n") == 1
    await proxy.settled(1)
    return int(head.split(b" ")[1]), body.decode()


def test_listed_name_is_fetched_and_recorded():
    """A listed host is fetched, and the record says where the bytes came from."""

    async def scenario() -> None:
        async with web() as far, proxied(allow(f"index.example.org:{far.port}", "127.0.0.1/32"), HERE) as proxy:
            url = f"http://Index.Example.org.:{far.port}/simple/?a=b"
            answer = await proxy.ask(f"GET {url} HTTP/1.1\r\nHost: other.example.org\r\n\r\n".encode())
            assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
            assert answer.endswith(b"\r\n\r\nhi")
            assert far.seen == [
                f"GET /simple/?a=b HTTP/1.1\r\nHost: index.example.org:{far.port}\r\nConnection: close\r\n\r\n".encode()
            ]
            record = (await proxy.settled(1))[0]
            assert (record.method, record.host, record.port) == ("GET", "index.example.org", far.port)
            assert (record.address, record.verdict, record.reason) == ("127.0.0.1", ProxyVerdict.ALLOWED, "")
            assert record.status == 200
            assert record.bytes_down == 40
            assert 0 < record.duration < 5
            assert json.loads(json.dumps(record.document()))["verdict"] == "allowed"

    asyncio.run(scenario())


def test_refusal_names_host_port_and_cure():
    """A host that is not listed gets 403 with one line that says what to do, and is never looked up."""

    async def scenario() -> None:
        async with proxied(allow("index.example.org")) as proxy:
            status, text = await refused(proxy, connect("other.example.org:443"))
            assert status == 403
            assert text == (
                "forgeyard: other.example.org:443: this host is not listed for this job; "
                "name it under network.fetch of the executor's configuration\n"
            )
            assert proxy.asked == []
            record = (await proxy.settled(1))[0]
            assert (record.verdict, record.reason, record.status) == (ProxyVerdict.REFUSED, "host_not_listed", 403)

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("target", "reason"),
    [
        ("index.example.org:22", "port_not_listed"),
        ("index.example.org:80", "port_not_listed"),
        ("example.org:443", "host_not_listed"),
        ("evilexample.org:443", "host_not_listed"),
        ("index.example.org.evil.net:443", "host_not_listed"),
        ("203.0.113.9:443", "address_not_listed"),
        ("127.0.0.1:443", "address_not_listed"),
        ("169.254.169.254:443", "address_not_listed"),
        ("[::1]:443", "ipv6"),
        ("[2001:db8::1]:443", "ipv6"),
        ("[::ffff:127.0.0.1]:443", "ipv6"),
    ],
)
def test_connect_to_what_is_not_listed(target: str, reason: str):
    """CONNECT to another port, another name, or an address is refused with 403, before anything is looked up."""

    async def scenario() -> None:
        async with proxied(allow("index.example.org", "*.example.org", "203.0.113.0/29")) as proxy:
            status, _ = await refused(proxy, connect(target))
            assert (status, proxy.records[0].reason) == (403, reason)
            assert proxy.asked == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "target",
    [
        "user:pass@index.example.org:443",
        "index.example.org",
        "index.example.org:",
        "index.example.org:0",
        "index.example.org:65536",
        "index.example.org:443:443",
        "index.example.org:443/path",
        "http://index.example.org:443",
        ":443",
        "127.1:443",
        "2130706433:443",
        "0x7f000001:443",
        "0177.0.0.1:443",
        "index%2eexample.org:443",
        "index..example.org:443",
        "index.example.org#:443",
    ],
)
def test_connect_target_is_strict(target: str):
    """What is no HOST:PORT, or what some libraries read as another host, gets 400."""

    async def scenario() -> None:
        async with proxied(ProxyPolicy(any_name=True)) as proxy:
            assert (await refused(proxy, connect(target)))[0] == 400
            assert proxy.asked == []

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("/simple/", "not_a_proxy_request"),
        ("*", "not_a_proxy_request"),
        ("index.example.org:80", "not_a_proxy_request"),
        ("https://index.example.org/", "scheme"),
        ("ftp://index.example.org/", "scheme"),
        ("http://user@index.example.org/", "userinfo"),
        ("http://index.example.org/a#b", "fragment"),
        ("http:///simple/", "bad_target"),
        ("http://index.example.org\\@evil.net/", "userinfo"),
    ],
)
def test_plain_url_is_strict(url: str, reason: str):
    """Plain requests need a whole http URL without a user or a fragment."""

    async def scenario() -> None:
        async with proxied(allow("index.example.org")) as proxy:
            request = f"GET {url} HTTP/1.1\r\nHost: index.example.org\r\n\r\n".encode()
            assert (await refused(proxy, request))[0] == 400
            assert proxy.records[0].reason == reason

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "10.213.0.1", "169.254.169.254", "100.64.0.1", "192.168.1.1", "198.51.100.7", "0.0.0.0"]
)
def test_name_that_leads_inside(address: str):
    """A listed name that leads to a private address, or to the host's own, is refused: no rebinding."""

    async def scenario() -> None:
        policy = ProxyPolicy(allow("index.example.org", "0.0.0.0/0:8080"), (IPv4Network("198.51.100.7/32"),))
        async with proxied(policy, {"index.example.org": [address]}) as proxy:
            status, text = await refused(proxy, connect("index.example.org:443"))
            assert status == 403
            assert f"leads to {address}, which is not outside" in text
            assert proxy.records[0].reason == "private_address"

    asyncio.run(scenario())


def test_name_is_looked_up_once_and_the_checked_address_is_used():
    """A name whose second answer would be private is asked for once; of several addresses only open ones are used."""

    async def scenario() -> None:
        async with web() as far:
            answers = [["10.0.0.1", "127.0.0.1"], ["10.0.0.1"]]

            async def resolve(name: str):
                return [IPv4Address(text) for text in answers.pop(0)]

            async with proxied(allow(f"a.example.org:{far.port}", "127.0.0.1/32"), resolve) as proxy:
                answer = await proxy.ask(f"GET http://a.example.org:{far.port}/ HTTP/1.0\r\n\r\n".encode())
                assert answer.endswith(b"hi")
                assert proxy.asked == ["a.example.org"]
                assert (await proxy.settled(1))[0].address == "127.0.0.1"

    asyncio.run(scenario())


def test_cidr_opens_its_ports_alone():
    """A CIDR lets an address through on its ports, as a literal and for names that lead there."""
    policy = ProxyPolicy(allow("a.example.org", "10.1.0.0/16:443"))
    inside = IPv4Address("10.1.2.3")
    policy.check(Target("10.1.2.3", 443, address=inside))
    assert policy.admitted(Target("a.example.org", 443), [inside]) == (inside,)
    for target in (Target("10.1.2.3", 80, (80, 443), inside), Target("10.2.0.1", 443, address=IPv4Address("10.2.0.1"))):
        with pytest.raises(NotServed):
            policy.check(target)
    with pytest.raises(NotServed):
        policy.admitted(Target("a.example.org", 80), [inside])


def test_learning_opens_names_and_no_private_range():
    """With any_name every outside host and port passes; private ranges stay closed."""
    policy = ProxyPolicy(any_name=True)
    policy.check(Target("whatever.example.net", 8443))
    policy.check(Target("203.0.113.9", 22, address=IPv4Address("203.0.113.9")))
    with pytest.raises(NotServed):
        policy.check(Target("10.0.0.1", 443, address=IPv4Address("10.0.0.1")))
    with pytest.raises(NotServed):
        policy.admitted(Target("whatever.example.net", 443), [IPv4Address("127.0.0.1")])


def test_name_without_an_address():
    """A name that does not exist, and one that can't be looked up, give 502 with the cause."""

    async def scenario() -> None:
        async def broken(name: str):
            raise OSError(5, "no server answers")

        async with proxied(allow("a.example.org")) as proxy:
            status, text = await refused(proxy, connect("a.example.org:443"))
            assert (status, proxy.records[0].reason) == (502, "no_such_name")
        async with proxied(allow("a.example.org"), broken) as proxy:
            status, text = await refused(proxy, connect("a.example.org:443"))
            assert (status, proxy.records[0].reason) == (502, "resolve")
            assert "no server answers" in text

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "item",
    [
        UpstreamCredential("*.example.org", "Basic x"),
        UpstreamCredential("Index.example.org", "Basic x"),
        UpstreamCredential("index.example.org", "Basic x\r\nX: y"),
        UpstreamCredential("index.example.org", "Basic x", header="Host"),
        UpstreamCredential("index.example.org", "Basic x", port=0),
    ],
)
def test_credential_that_cannot_be_sent(item: UpstreamCredential):
    """A credential with a wildcard, a line end or a framing header is refused, and its value is never shown."""
    with pytest.raises(InvalidRequest) as found:
        item.check()
    assert "Basic" not in str(found.value)
    assert "Basic" not in repr(item)


def test_totals_are_bounded():
    """However many hosts a job tries, the totals end at a number, and lose no count."""
    audit = ProxyAudit()
    for number in range(MOST_TOTALS + 50):
        audit.add(ProxyRecord("GET", f"h{number}", 80, "", ProxyVerdict.REFUSED, "host_not_listed", 403, 1, 0, 0.0))
    totals = audit.totals()
    assert len(totals) == MOST_TOTALS + 1
    assert totals[-1].host == OTHERS
    assert (totals[-1].count, sum(total.count for total in totals)) == (50, MOST_TOTALS + 50)


def test_audit_that_fails_ends_no_request(caplog: pytest.LogCaptureFixture):
    """A record that can't be passed on is logged; the next one is made."""

    def broken(record: ProxyRecord) -> None:
        raise OSError(28, "no space left")

    audit = ProxyAudit(broken)
    audit.add(ProxyRecord("GET", "h", 80, "", ProxyVerdict.REFUSED, "x", 403, 0, 0, 0.0))
    assert "could not be passed on" in caplog.text
    assert audit.totals()[0].count == 1
