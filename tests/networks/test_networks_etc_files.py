"""/etc/hosts, /etc/resolv.conf and /etc/hostname: their text, and what real C libraries make of it in a namespace."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from ipaddress import IPv4Address
from pathlib import Path

import fake_dns
import pytest
from fake_dns import Zone

from forgeyard_host.netns import NetNamespace, new_namespace, tcp_listener, udp_socket
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.policy import NetworkDestination, NetworkMode
from forgeyard_networks.allowlist import Allowlist
from forgeyard_networks.etc_files import hostname_text, hosts_text, resolv_text
from forgeyard_networks.host_resolvers import host_resolvers
from forgeyard_networks.ipam import Blocks, parse_range
from forgeyard_networks.names import MemberNames, name_table
from forgeyard_networks.resolver import Resolver
from forgeyard_networks.resolver_policy import ResolverPolicy
from forgeyard_networks.resolver_upstream import Upstream
from forgeyard_networks.topology import Topology

OWN = MemberNames("job", IPv4Address("10.213.0.2"), hostname="sandbox-1")
DB = MemberNames("db", IPv4Address("10.213.0.3"), ("postgres", "pg"))
LOOKUP = r"""
#include <netdb.h>
#include <stdio.h>
#include <arpa/inet.h>
int main(int count, char **words) {
    struct addrinfo hints = {.ai_socktype = SOCK_STREAM}, *found;
    int error = getaddrinfo(words[1], 0, &hints, &found);
    if (error) { puts(gai_strerror(error)); return 2; }
    for (; found; found = found->ai_next) {
        char text[64];
        getnameinfo(found->ai_addr, found->ai_addrlen, text, sizeof text, 0, 0, NI_NUMERICHOST);
        puts(text);
    }
    return 0;
}
"""


def test_hosts_has_the_machine_itself_and_every_member() -> None:
    """The own host name has the own address: a broker that listens on its name is reached from outside then."""
    assert hosts_text(OWN, (OWN, DB)) == (
        "127.0.0.1\tlocalhost\n"
        "::1\tlocalhost ip6-localhost ip6-loopback\n"
        "10.213.0.2\tsandbox-1 job\n"
        "10.213.0.3\tdb postgres pg\n"
    )
    assert hosts_text(DB, (OWN, DB)).splitlines()[2] == "10.213.0.3\tdb postgres pg"


@pytest.mark.parametrize("bad", ["a b", "a\n1.2.3.4 github.com", "x#y", "localhost", ""])
def test_no_name_smuggles_a_line_into_hosts(bad: str) -> None:
    """It is refused by name."""
    with pytest.raises(InvalidRequest):
        hosts_text(OWN, (MemberNames("db", DB.address, (bad,)),))
    with pytest.raises(InvalidRequest):
        hostname_text(bad)


def test_a_collision_is_an_error() -> None:
    """Two members with one alias."""
    with pytest.raises(InvalidRequest, match="pg"):
        hosts_text(OWN, (DB, MemberNames("other", IPv4Address("10.213.0.4"), ("pg",))))


def test_resolv_conf_names_our_resolver_alone() -> None:
    """Or nobody who answers."""
    assert resolv_text(IPv4Address("10.213.0.1")) == "nameserver 10.213.0.1\n"
    assert "10." not in resolv_text(None)
    assert hostname_text("Sandbox-1") == "sandbox-1\n"


@pytest.mark.parametrize(
    ("text", "servers", "notes"),
    [
        ("nameserver 127.0.0.53\noptions edns0\nsearch corp.example\n", ("127.0.0.53",), 0),
        ("nameserver 127.0.0.1\n", ("127.0.0.1",), 0),
        ("nameserver 192.0.2.1 # office\n; nameserver 8.8.8.8\n#nameserver 8.8.4.4\n", ("192.0.2.1",), 0),
        ("nameserver fe80::1%eth0\nnameserver 2001:db8::1\n", ("fe80::1%eth0", "2001:db8::1"), 0),
        ("nameserver fe80::1\nnameserver 192.0.2.1\n", ("192.0.2.1",), 1),
        ("nameserver example.org\nnameserver 192.0.2.300\nnameserver 192.0.2.1\n", ("192.0.2.1",), 2),
        ("nameserver 192.0.2.1\n" * 9, ("192.0.2.1",), 0),
        (
            "".join(f"nameserver 192.0.2.{number}\n" for number in range(1, 6)),
            ("192.0.2.1", "192.0.2.2", "192.0.2.3"),
            2,
        ),
        ("nameserver 192.0.2.1\n\xff\xfe\n", ("192.0.2.1",), 0),
    ],
)
def test_the_hosts_servers_are_read(tmp_path: Path, text: str, servers: tuple[str, ...], notes: int) -> None:
    """A loopback stub stays: it is asked from the executor's own network."""
    path = tmp_path / "resolv.conf"
    path.write_text(text, encoding="latin-1")
    found = host_resolvers(str(path))
    assert (found.servers, len(found.notes), found.problem) == (servers, notes, "")


@pytest.mark.parametrize("case", ["absent", "dangling", "empty", "directory", "only unusable", "search alone"])
def test_a_host_without_servers_says_so(tmp_path: Path, case: str) -> None:
    """No server is made up."""
    path = tmp_path / "resolv.conf"
    if case == "dangling":
        path.symlink_to("/run/nowhere/stub-resolv.conf")
    elif case == "directory":
        path.mkdir()
    elif case != "absent":
        path.write_text({"empty": "", "only unusable": "nameserver fe80::1\n", "search alone": "search a.b\n"}[case])
    found = host_resolvers(str(path))
    assert found.servers == ()
    assert found.problem.startswith("this host has no usable name server")
    assert ("/run/nowhere/stub-resolv.conf" in found.problem) is (case == "dangling")


@pytest.fixture(scope="module")
def musl(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A static program that looks a name up as musl does."""
    if shutil.which("musl-gcc") is None:
        pytest.skip("musl-gcc is not installed")
    made = tmp_path_factory.mktemp("musl")
    (made / "lookup.c").write_text(LOOKUP)
    subprocess.run(["musl-gcc", "-static", "-o", made / "lookup", made / "lookup.c"], check=True)
    return made / "lookup"


@pytest.fixture
def member(tmp_path: Path) -> Iterator[Topology]:
    """A network with a job and a service in it."""
    blocks = Blocks(parse_range("10.213.0.0/16"), str(tmp_path / "locks"))
    topology = Topology.make(blocks.acquire())
    topology.add_member()
    yield topology
    topology.close()
    blocks.close()


async def look_up(namespace: NetNamespace, etc: Path, *command: str) -> tuple[int, str, float]:
    """Run `command` in a namespace with generated files over /etc; status, output, seconds."""
    binds = " && ".join(f"mount --bind {etc}/{name} /etc/{name}" for name in ("hosts", "resolv.conf", "nsswitch.conf"))
    inner = ["unshare", "-m", "sh", "-c", f'{binds} && exec "$@"', "sh", *command]
    loop = asyncio.get_running_loop()
    start = loop.time()
    process = await asyncio.create_subprocess_exec(
        "nsenter", f"--net={namespace.path}", *inner, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    async with asyncio.timeout(30):
        output, _ = await process.communicate()
    return process.returncode or 0, output.decode(), loop.time() - start


def write_etc(etc: Path, hosts: str, resolv: str) -> Path:
    """The files of a member."""
    etc.mkdir()
    (etc / "hosts").write_text(hosts)
    (etc / "resolv.conf").write_text(resolv)
    (etc / "nsswitch.conf").write_text("hosts: files dns\n")
    return etc


@pytest.mark.kernel
@pytest.mark.parametrize("library", ["glibc", "musl"])
def test_lookups_fail_fast_where_nobody_answers(tmp_path: Path, library: str, musl: Path) -> None:
    """Network deny: loopback alone. The own names are found, the rest fails at once."""
    etc = write_etc(tmp_path / "etc", hosts_text(OWN), resolv_text(None))
    command = ("getent", "ahosts") if library == "glibc" else (str(musl),)

    async def check() -> None:
        namespace = new_namespace()
        status, output, took = await look_up(namespace, etc, *command, "www.example.org")
        assert (status, took < 2) == (2, True), output
        status, output, _ = await look_up(namespace, etc, *command, "sandbox-1")
        assert status == 0
        assert "10.213.0.2" in output
        namespace.close()

    asyncio.run(check())


@pytest.mark.kernel
@pytest.mark.parametrize("library", ["glibc", "musl"])
def test_c_libraries_resolve_through_the_resolver(tmp_path: Path, member: Topology, library: str, musl: Path) -> None:
    """Members by /etc/hosts and by DNS alone, an allowed name through the upstream, a refused one at once."""
    gateway = member.block.gateway
    own = MemberNames("job", member.block.member(0), hostname="sandbox-1")
    names = (own, MemberNames("db", member.block.member(1), ("postgres",)))
    whole = write_etc(tmp_path / "etc", hosts_text(own, names), resolv_text(gateway))
    bare = write_etc(tmp_path / "bare", "127.0.0.1 localhost\n", resolv_text(gateway))
    command = ("getent", "ahosts") if library == "glibc" else (str(musl),)
    opened: list[tuple[int, str]] = []

    async def note(index: int, address: IPv4Address, seconds: int) -> None:
        opened.append((index, str(address)))

    async def check() -> None:
        zone = Zone()
        zone.add("www.example.org", "60 IN CNAME edge.example.net.", "edge.example.net. 60 IN A 203.0.113.5")
        server = await fake_dns.start(zone)
        resolver = await Resolver.serve(
            udp_socket(member.router.fd, str(gateway), 53),
            tcp_listener(member.router.fd, str(gateway), 53),
            names=name_table(names),
            policy=ResolverPolicy(
                NetworkMode.RESTRICTED, Allowlist.from_destinations((NetworkDestination("*.example.org"),))
            ),
            upstream=Upstream(("127.0.0.1",), port=server.port),
            open_addresses=note,
        )
        try:
            for etc in (whole, bare):
                for name in ("db", "postgres"):
                    status, output, _ = await look_up(member.members[0], etc, *command, name)
                    assert status == 0, output
                    assert str(member.block.member(1)) in output
            status, output, _ = await look_up(member.members[0], bare, *command, "www.example.org")
            assert (status, "203.0.113.5" in output) == (0, True), output
            assert opened == [(0, "203.0.113.5")]
            status, output, took = await look_up(member.members[0], bare, *command, "www.evil.net")
            assert (status, took < 2) == (2, True), output
            assert server.asked("www.evil.net") == 0
            assert any(record.name == "www.evil.net" for record in resolver.records())
        finally:
            await resolver.close()
            server.close()
            await asyncio.sleep(0)

    asyncio.run(check())


@pytest.mark.kernel
def test_nothing_loads_the_dns_library_for_members_names(tmp_path: Path) -> None:
    """It takes longer to load than a job takes to start."""
    script = """
import asyncio, socket, sys
from forgeyard_host.netns import new_namespace, tcp_listener, udp_socket
from forgeyard_networks.names import MemberNames, name_table
from forgeyard_networks.resolver import Resolver
from forgeyard_networks.resolver_policy import ResolverPolicy
from forgeyard_networks.resolver_upstream import Upstream
from forgeyard_model.policy import NetworkMode
from ipaddress import IPv4Address
async def main():
    ns = new_namespace()
    async def open_(*a): pass
    names = name_table((MemberNames("db", IPv4Address("10.0.0.3")),))
    r = await Resolver.serve(udp_socket(ns.fd, "127.0.0.1", 53), tcp_listener(ns.fd, "127.0.0.1", 53), names=names,
        policy=ResolverPolicy(NetworkMode.ALLOW), upstream=Upstream(("127.0.0.1",)), open_addresses=open_)
    c = udp_socket(ns.fd, "127.0.0.1", 0); c.connect(("127.0.0.1", 53))
    c.send(bytes.fromhex("000701000001000000000000") + b"\\x02db\\x00\\x00\\x01\\x00\\x01")
    found = await asyncio.get_running_loop().sock_recv(c, 512)
    assert found.endswith(bytes((10, 0, 0, 3))), found
    await r.close(); c.close()
asyncio.run(main())
print([name for name in sys.modules if name == "dns" or name.startswith("dns.")])
"""
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=tmp_path, env=os.environ
    )
    assert found.stdout == "[]\n"
