"""Abuse of the fetch proxy from inside of a job that has no other way out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from egress_host import Attacked, EgressHost
from net_host import METADATA, NEAR, OTHER, PRIVATE, SERVER

from forgeyard_executor import ExecutorConfig, Network
from forgeyard_model.config import FetchCredential, NetworkConfig
from forgeyard_model.network import DestinationVerdict, FetchRecord
from forgeyard_model.policy import NetworkDestination

pytestmark = pytest.mark.kernel

SECRET = "s3cret-of-the-operator"
ZONE = {
    "packages.example.org": [f"60 IN A {SERVER}"],
    "private.example.org": [f"60 IN A {SERVER}"],
    "evil.example": [f"60 IN A {OTHER}"],
    "inner.example.org": [f"60 IN A {PRIVATE}"],
    "meta.example.org": [f"60 IN A {METADATA}"],
    "host.example.org": [f"60 IN A {NEAR}"],
    "self.example.org": ["60 IN A 127.0.0.1"],
}
LISTED = ("packages.example.org", "private.example.org", "inner.example.org", "meta.example.org", "host.example.org")


def connect(target: str, more: str = "") -> str:
    """A request for a tunnel."""
    return f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{more}\r\n"


def get(url: str, more: str = "", method: str = "GET") -> str:
    """A plain request."""
    return f"{method} {url} HTTP/1.1\r\nHost: packages.example.org\r\n{more}\r\n"


URL = "http://packages.example.org/"
ABUSES = {
    "a tunnel to an address": (connect(f"{SERVER}:443"), 403, "address_not_listed"),
    "a tunnel to a number": (connect("3405803778:443"), 400, "bad_target"),
    "a tunnel to half an address": (connect("203.0.2:443"), 400, "bad_target"),
    "a tunnel to ipv6": (connect("[2001:db8::1]:443"), 403, "ipv6"),
    "a tunnel to mapped ipv6": (connect(f"[::ffff:{PRIVATE}]:443"), 403, "ipv6"),
    "a tunnel to another port": (connect("packages.example.org:22"), 403, "port_not_listed"),
    "a tunnel to the plain port": (connect("packages.example.org:80"), 403, "port_not_listed"),
    "a tunnel to another host": (connect("evil.example:443"), 403, "host_not_listed"),
    "a tunnel below a listed host": (connect("x.packages.example.org:443"), 403, "host_not_listed"),
    "a tunnel with a user": (connect("packages.example.org:443@evil.example:443"), 400, "userinfo"),
    "a tunnel to the host's loopback": (connect("127.0.0.1:8081"), 403, "address_not_listed"),
    "a tunnel to localhost": (connect("localhost:8081"), 403, "host_not_listed"),
    "a tunnel to the host": (connect(f"{NEAR}:8080"), 403, "address_not_listed"),
    "a tunnel to the metadata": (connect(f"{METADATA}:80"), 403, "address_not_listed"),
    "a tunnel with a body": (connect("packages.example.org:443", "Content-Length: 4\r\n"), 400, "connect_with_body"),
    "a name that leads inside": (connect("inner.example.org:443"), 403, "private_address"),
    "a name that leads to the metadata": (get("http://meta.example.org/"), 403, "private_address"),
    "a name that leads to the host": (get("http://host.example.org/"), 403, "private_address"),
    "another host in plain": (get("http://evil.example/"), 403, "host_not_listed"),
    "another port in plain": (get("http://packages.example.org:8080/"), 403, "port_not_listed"),
    "a user in the url": (get("http://packages.example.org@evil.example/"), 400, "userinfo"),
    "a user behind the host": (get("http://evil.example#@packages.example.org/"), 400, "fragment"),
    "a backslash": (get("http://packages.example.org\\@evil.example/"), 400, "userinfo"),
    "another scheme": (get("file:///etc/shadow"), 400, "scheme"),
    "gopher": (get("gopher://packages.example.org:22/_x"), 400, "scheme"),
    "no proxy request": (get("/etc/shadow"), 400, "not_a_proxy_request"),
    "two framings": (get(URL, "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n"), 400, "two_framings"),
    "two lengths": (get(URL, "Content-Length: 5\r\nContent-Length: 6\r\n"), 400, "bad_request"),
    "a strange coding": (get(URL, "Transfer-Encoding: xchunked\r\n"), 501, "bad_request"),
    "a folded line": (get(URL, "X-A: b\r\n evil: c\r\n"), 400, "folded_line"),
    "a bare line end": (get(URL, "X-A: b\nHost: evil.example\r\n"), 400, "control_character"),
    "a blank before the colon": (get(URL, "Content-Length : 5\r\n"), 400, "bad_request"),
    "two hosts": (get(URL, "Host: evil.example\r\n"), 400, "bad_request"),
    "a null byte": (get(URL, "X-A: \0\r\n"), 400, "control_character"),
    "what comes back": (get("http://private.example.org/", method="TRACE"), 405, "method"),
    "a socks greeting": ("\x05\x01\x00\r\n\r\n", 400, "control_character"),
}
SMUGGLED = get("http://evil.example/smuggled")
ALLOWED = {
    "a tunnel": connect("packages.example.org:443") + "GET /in-the-tunnel HTTP/1.0\r\n\r\n",
    "a request with another behind it": get(f"{URL}first", "Connection: keep-alive\r\n") + SMUGGLED,
    "a body that is a request": get(f"{URL}body", f"Content-Length: {len(SMUGGLED)}\r\n", "POST") + SMUGGLED,
    "a credential of its own": get(
        "http://private.example.org/mine",
        "Authorization: Bearer mine\r\nProxy-Authorization: Basic bWluZQ==\r\nConnection: Authorization\r\n",
    ),
}
DIRECT = (
    ["tcp", SERVER, 80],
    ["tcp", SERVER, 443],
    ["udp", SERVER, 53],
    ["lookup", "packages.example.org"],
    ["dns", "GATEWAY", "packages.example.org"],
    ["tcp", "127.0.0.1", 3128],
)


@pytest.fixture(scope="module")
def attacked(shared_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Attacked]:
    """All abuses in one sandbox."""
    directory = tmp_path_factory.mktemp("host")
    host = EgressHost(directory)
    secret = directory / "secret"
    secret.touch(0o600)
    secret.write_text(f"{SECRET}\n")
    credential = FetchCredential("private.example.org", str(secret), port=80, tls=False)
    fetch = tuple(NetworkDestination(host=name) for name in LISTED)
    config = ExecutorConfig(network=NetworkConfig(fetch=fetch, credentials=(credential,)))
    requests = [request for request, _, _ in ABUSES.values()] + list(ALLOWED.values())
    attacks = [["tcp", "GATEWAY", 3128, request] for request in requests] + [list(words) for words in DIRECT]
    with closing(host):
        yield Attacked(host, shared_state, Network.fetch_only(), attacks, zone=ZONE, config=config)
        host.wait_clean()


def answered(attacked: Attacked, name: str) -> str:
    """What came back."""
    return str(attacked.answers[[*ABUSES, *ALLOWED].index(name)])


@pytest.mark.parametrize("name", ABUSES)
def test_abuse_is_refused_and_counted(attacked: Attacked, name: str) -> None:
    """An answer at once that says why, a row in the result with the reason, and no connection to anywhere."""
    _, status, reason = ABUSES[name]
    assert answered(attacked, name).startswith(f"HTTP/1.1 {status} "), answered(attacked, name)
    rows = [row for row in attacked.evidence.fetches if row.reason == reason and row.verdict == "refused"]
    same = sum(why == reason for _, _, why in ABUSES.values())
    assert sum(row.count for row in rows) == same


def test_nothing_of_it_arrived(attacked: Attacked) -> None:
    """The outside saw what was allowed and nothing else: no smuggled request, no address inside, no other port."""
    assert sorted(attacked.outside.seen) == [("tcp", SERVER, 80)] * 3 + [("tcp", SERVER, 443)]
    requests = [line for line in attacked.outside.heads if " HTTP/1." in line]
    assert sorted(requests) == [
        *("GET /first HTTP/1.1", "GET /in-the-tunnel HTTP/1.0", "GET /mine HTTP/1.1", "POST /body HTTP/1.1"),
    ]
    assert not any("evil" in line.lower() for line in attacked.outside.heads)


@pytest.mark.parametrize("name", ALLOWED)
def test_what_is_listed_is_fetched(attacked: Attacked, name: str) -> None:
    """One answer for each connection, whatever else came with the request."""
    assert answered(attacked, name).endswith("hello\n")
    assert answered(attacked, name).count("hello") == 1


def test_bytes_stand_in_the_result(attacked: Attacked) -> None:
    """Rows for what was fetched have the address and bytes of both directions."""
    rows: dict[tuple[str, int], FetchRecord] = {
        (row.host, row.port): row for row in attacked.evidence.fetches if row.verdict == "allowed"
    }
    assert {key: row.count for key, row in rows.items()} == {
        ("packages.example.org", 443): 1,
        ("packages.example.org", 80): 2,
        ("private.example.org", 80): 1,
    }
    sizes = [(row.address, row.bytes_sent > 20, row.bytes_received > 6) for row in rows.values()]
    assert sizes == [(SERVER, True, True)] * 3, rows


def test_the_operators_credential_replaces_the_jobs(attacked: Attacked) -> None:
    """It goes to its host alone, whatever the job sends, and comes back to the job in no way."""
    sent = [line for line in attacked.outside.heads if line.lower().startswith(("authorization", "proxy-"))]
    assert sent == [f"Authorization: Bearer {SECRET}"]
    assert SECRET not in str(attacked.answers)
    assert SECRET not in repr(attacked.result)


def test_there_is_no_way_beside_the_proxy(attacked: Attacked) -> None:
    """Not to the hosts that it fetches from, and not by names, which the proxy alone looks up."""
    plain, tls, datagram, lookup, question, local = attacked.answers[-len(DIRECT) :]
    assert (plain, tls, datagram) == ("ECONNREFUSED", "ECONNREFUSED", "EHOSTUNREACH")
    assert (lookup, question, local) == ("EAI_NONAME", [3, []], "ECONNREFUSED")
    assert set(attacked.rows(DestinationVerdict.REFUSED)) == {(SERVER, 80), (SERVER, 443), (SERVER, 53)}
    assert {name for name, *_ in attacked.dns.seen} <= set(LISTED)
