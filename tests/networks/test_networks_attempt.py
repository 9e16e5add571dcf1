"""One attempt's network, from inside of it: what each mode reaches, who else is there, and what is seen of it."""

from __future__ import annotations

import errno
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from threading import Thread

import pytest
from net_host import METADATA, NEAR, OTHER, PRIVATE, SERVER, Attached, Host, OrderError, Process
from router_peers import ask_udp, connect, ping

from forgeyard_host.links import Links
from forgeyard_host.netns import in_namespace, udp_socket

pytestmark = pytest.mark.kernel

REFUSED = (3, 5)
"""Response codes of a name that is not looked up."""
WEB = {"cidr": f"{SERVER}/32", "ports": [80], "protocols": ["tcp"]}


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host and an outside."""
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def executor(host: Host, tmp_path: Path) -> Process:
    """An executor there, whose name server is at 127.0.0.1."""
    return host.process(**resolving(tmp_path))


def resolving(directory: Path) -> dict[str, str]:
    path = directory / "resolv.conf"
    path.write_text("nameserver 127.0.0.1\n")
    return {"resolv_conf": str(path)}


def lookup(attached: Attached, name: str, kind: int = 1, *, server: str = "") -> tuple[int, list[str]]:
    """Ask the network's resolver: the response code, and addresses."""
    question = b"".join(bytes((len(part),)) + part.encode() for part in name.split(".")) + b"\0"
    message = struct.pack(">HHHHHH", 7, 0x0100, 1, 0, 0, 0) + question + struct.pack(">HH", kind, 1)
    with udp_socket(attached.job.fd, attached.address(next(iter(attached.members))), 0) as client:
        client.settimeout(5)
        client.sendto(message, (server or attached.gateway, 53))
        answer = client.recv(4096)
    code, count = answer[3] & 15, int.from_bytes(answer[6:8], "big")
    return code, [socket.inet_ntoa(answer[-4:])] if count and kind == 1 else []


def test_a_denied_job_reaches_its_services_and_nobody_else(host: Host, executor: Process) -> None:
    """By name and by alias; outside, host and router are refused at once; a probe reaches the service too."""
    host.listen(host.outside, 80)
    host.listen(host.namespace, 8080)
    attached = executor.attach("a", members=[["job"], ["db", "db", ["postgres"]]])
    service = host.listen(attached.namespaces["db"], 5432)
    assert lookup(attached, "db") == (0, [attached.address("db")])
    assert lookup(attached, "postgres") == (0, [attached.address("db")])
    assert lookup(attached, "pypi.example.org")[0] in REFUSED
    assert connect(attached.job, attached.address("db"), 5432) == "ok"
    for address, port in ((SERVER, 80), (NEAR, 8080), (METADATA, 80), ("10.213.255.1", 80), (attached.gateway, 22)):
        assert connect(attached.job, address, port) == "ECONNREFUSED"
    assert ask_udp(attached.job, SERVER, 53) == "EHOSTUNREACH"
    service.settimeout(5)
    service.accept()[0].close()


def test_a_probe_comes_from_the_network_itself(host: Host, executor: Process) -> None:
    """The service sees the router; with a loopback address it is the job that is asked."""
    attached = executor.attach("a", members=[["job"], ["db"]])
    for where, address in (("db", attached.address("db")), ("job", "127.0.0.1")):
        server = host.listen(attached.namespaces[where], 6379, address)
        with pytest.raises(OrderError) as caught:  # nobody there
            executor.order("connect", name="a", address=address, port=6380)
        assert caught.value.type == "ConnectionRefusedError"

        def answer(server: socket.socket = server) -> None:
            connection, peer = server.accept()
            connection.sendall(f"hello {peer[0]}\n".encode())
            connection.close()

        thread = Thread(target=answer)
        thread.start()
        said = executor.order("connect", name="a", address=address, port=6379)
        thread.join()
        assert said == f"hello {attached.gateway if where == 'db' else '127.0.0.1'}\n"


def test_a_restricted_job_reaches_what_is_named(host: Host, executor: Process) -> None:
    """By address, and by name from the moment the name was looked up; all else is refused at once."""
    for port in (80, 443):
        host.listen(host.outside, port)
    executor.order("names", zone={"a.example.org": [f"60 IN A {OTHER}"], "evil.example.org": [f"60 IN A {PRIVATE}"]})
    attached = executor.attach("a", "restricted", allow=[WEB, {"host": "*.example.org", "ports": [443]}])
    job = attached.job
    assert connect(job, SERVER, 80) == "ok"
    assert connect(job, OTHER, 443) == "ECONNREFUSED"
    assert lookup(attached, "a.example.org") == (0, [OTHER])
    assert connect(job, OTHER, 443) == "ok"
    assert connect(job, OTHER, 80) == "ECONNREFUSED"
    assert lookup(attached, "evil.example.org")[1] == []
    assert connect(job, PRIVATE, 443) == "ECONNREFUSED"
    assert lookup(attached, "a.example.net")[0] in REFUSED
    assert ping(job, SERVER) == "prohibited"

    seen = executor.order("evidence", name="a")
    rows = {(row["address"], row["port"], row["verdict"]): row for row in seen["destinations"]}
    assert rows[SERVER, 80, "allowed"]["count"] == 1
    assert rows[OTHER, 443, "allowed"]["name"] == "a.example.org"
    assert rows[OTHER, 443, "allowed"]["bytes_sent"] > 0
    assert rows[OTHER, 443, "refused"]["count"] == 1
    assert rows[SERVER, 0, "refused"]["protocol"] == "icmp"
    verdicts = {(item["name"], item["verdict"]) for item in seen["dns"]}
    assert {("a.example.org", "answered"), ("evil.example.org", "rebinding"), ("a.example.net", "refused")} <= verdicts
    assert (seen["mode"], seen["audit"], seen["truncated"]) == ("restricted", False, 0)
    assert seen["backend"]
    kinds = {(line["kind"], line["verdict"]) for line in executor.order("seen", name="a")}
    assert {("connection", "allowed"), ("connection", "refused"), ("dns", "answered")} <= kinds


def test_an_open_job_reaches_the_outside_and_neither_host_nor_private_ranges(host: Host, executor: Process) -> None:
    """Whatever address the host's services have: its own, link-local, or that of the uplink."""
    host.listen(host.outside, 80)
    host.listen(host.namespace, 80)
    executor.order("names", zone={"host.example.org": [f"60 IN A {NEAR}"]})
    attached = executor.attach("a", "allow")
    job = attached.job
    assert connect(job, SERVER, 80) == "ok"
    assert ping(job, SERVER) == "ok"
    uplink = next(text for text in host.state().addresses if "peer" in text).split()[1]
    for address in (NEAR, uplink, METADATA, PRIVATE, "127.0.0.1", "100.64.0.1"):
        assert connect(job, address, 80) == "ECONNREFUSED"
    assert lookup(attached, "host.example.org")[1] == []


def test_a_named_host_address_still_does_not_lead_to_the_host(host: Host, executor: Process) -> None:
    """A policy opens the outside; the executor's own namespace is no part of that."""
    host.listen(host.namespace, 80)
    attached = executor.attach("a", "restricted", allow=[{"cidr": f"{NEAR}/32"}, {"cidr": "10.213.0.0/16"}])
    assert connect(attached.job, NEAR, 80) == "ECONNREFUSED"
    uplink = next(text for text in host.state().addresses if "peer" in text).split()[1]
    assert connect(attached.job, uplink, 80) == "ECONNREFUSED"


def test_two_jobs_know_nothing_of_each_other(host: Host, executor: Process) -> None:
    """Not by address, not by the other's router, not by ARP, not by IPv6; from the outside nobody gets in."""
    one = executor.attach("one", "allow", members=[["job"], ["db"]])
    two = executor.attach("two", "allow", members=[["job"], ["db"]])
    for namespace in two.namespaces.values():
        host.listen(namespace, 80)
    for address in (two.address("job"), two.address("db"), two.gateway):
        assert connect(one.job, address, 80) == "ECONNREFUSED"
        assert ping(one.job, address) in ("prohibited", "ENETUNREACH", "EHOSTUNREACH")
    assert connect(one.job, two.gateway, 53) == "ECONNREFUSED"
    assert lookup(one, "db") == (0, [one.address("db")])
    links = Links.at(one.job.fd)
    seen = [text for text in links.dump().neighbours if two.address("job") in text or two.gateway in text]
    links.close()
    assert seen == []
    for stranger in (host.namespace, host.outside):  # nobody has to be told at once that it is refused there
        assert connect(stranger, two.address("job"), 80, wait=0.3) != "ok"


def test_ipv6_fails_at_once(executor: Process) -> None:
    """Neither an address outside nor a neighbour's link-local one can be tried."""
    attached = executor.attach("a", "allow")

    def tried() -> list[int]:
        codes = []
        for target in (("2001:db8::1", 80), ("fe80::1", 80, 0, socket.if_nametoindex("eth0"))):
            with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as client:
                client.settimeout(5)
                codes.append(client.connect_ex(target))
        return codes

    refused = (errno.ENETUNREACH, errno.EADDRNOTAVAIL, errno.EACCES, errno.EHOSTUNREACH)
    assert all(code in refused for code in in_namespace(attached.job.fd, tried))


def test_a_fetching_job_has_the_proxy_and_nothing_else(host: Host, tmp_path: Path) -> None:
    """Variables and files point at it; it goes where the configuration says, and what it did is evidence."""
    host.listen(host.outside, 443)
    config = {"fetch": [{"cidr": f"{SERVER}/32", "ports": [443]}]}
    executor = host.process(config=config, **resolving(tmp_path))
    attached = executor.attach("a", "fetch-only", members=[["job"], ["db"]])
    member = attached.members["job"]
    assert member["environment"]["HTTPS_PROXY"] == f"http://{attached.gateway}:3128"
    assert attached.address("db") in member["environment"]["no_proxy"]
    assert ".m2/settings.xml" in member["home_files"]
    assert connect(attached.job, SERVER, 443) == "ECONNREFUSED"

    def fetch(target: str) -> bytes:
        with socket.create_connection((attached.gateway, 3128), 5) as client:
            client.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n\r\n".encode())
            return client.recv(1000)

    assert b" 200 " in in_namespace(attached.job.fd, lambda: fetch(f"{SERVER}:443"))
    assert b" 403 " in in_namespace(attached.job.fd, lambda: fetch(f"{OTHER}:443"))
    executor.order("close", name="a")


def test_an_audit_lets_through_and_tells(host: Host, executor: Process) -> None:
    """Everything outside, nothing private; the result says that it was one."""
    host.listen(host.outside, 80)
    attached = executor.attach("a", "allow", audit=True)
    assert connect(attached.job, OTHER, 80) == "ok"
    assert connect(attached.job, PRIVATE, 80) == "ECONNREFUSED"
    seen = executor.order("evidence", name="a")
    assert seen["audit"]
    assert {(row["address"], row["verdict"]) for row in seen["destinations"]} == {
        (OTHER, "allowed"),
        (PRIVATE, "refused"),
    }


def test_a_resolver_that_dies_is_told(executor: Process) -> None:
    """The attempt can't go on without names: whoever waits for `failed` hears of it, and closing still works."""
    executor.attach("a")
    executor.order("kill_resolver", name="a")
    assert executor.order("failed", name="a") == "network_part_died"
    executor.order("close", name="a")
    assert executor.end() == 0


def test_a_host_without_name_servers_says_so(host: Host, tmp_path: Path) -> None:
    """No public server is made up; names of members still work."""
    executor = host.process(resolv_conf=str(tmp_path / "absent"))
    attached = executor.attach("a", "allow", members=[["job"], ["db"]])
    assert any("no usable name server" in note for note in attached.notes)
    assert lookup(attached, "pypi.example.org")[0] == 2
    assert lookup(attached, "db") == (0, [attached.address("db")])


def test_files_of_each_member_name_all_of_them(executor: Process) -> None:
    """A service resolves its own name before its first instruction."""
    attached = executor.attach("a", members=[["job", "fy-x"], ["rabbit", "rabbit", ["mq"]]])
    assert f"{attached.address('rabbit')}\trabbit mq" in attached.members["rabbit"]["hosts"]
    assert f"{attached.address('rabbit')}\trabbit mq" in attached.members["job"]["hosts"]
    assert attached.members["job"]["hostname"] == "fy-x"
    assert attached.members["rabbit"]["resolv_conf"] == f"nameserver {attached.gateway}\n"


def test_a_published_port_leads_from_the_hosts_loopback_to_its_service(host: Host, executor: Process) -> None:
    """Bytes both ways; nobody but the host's own loopback is there; a port in use is refused by its number."""
    attached = executor.attach("a", members=[["job"], ["db"]], publish=[["db", 5432, 15432]])
    server = host.listen(attached.namespaces["db"], 5432)
    client = in_namespace(host.namespace.fd, lambda: socket.create_connection(("127.0.0.1", 15432), 5))
    connection, _ = server.accept()
    client.sendall(b"ask")
    assert connection.recv(10) == b"ask"
    connection.sendall(b"answer")
    connection.close()
    assert client.recv(10) == b"answer"
    assert client.recv(10) == b""
    client.close()
    assert connect(host.namespace, NEAR, 15432) == "ECONNREFUSED"
    with pytest.raises(OrderError) as caught:
        executor.attach("b", members=[["job"], ["db"]], publish=[["db", 5432, 15432]])
    assert caught.value.reason == "port_not_published"
    assert executor.order("resources")["blocks"] == 1
