"""A host with an outside, and executors on it whose jobs attack: all in network namespaces of the test's own.

The outside has servers on many ports and addresses. Each remembers who came, so that a test can say not only that an
attack was refused, but that nothing of it arrived.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import subprocess
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from ipaddress import IPv4Interface
from pathlib import Path
from typing import Any, TypeVar

import fake_dns
import net_attacker
import pytest
from jobs import collect
from net_host import METADATA, OTHER, PRIVATE, SERVER, Host

from forgeyard_executor import Execution, ExecutionResult, Executor, ExecutorConfig, Job, Network, Outcome, Step
from forgeyard_host.links import Address, Links
from forgeyard_host.netns import NetNamespace, in_namespace, tcp_listener, udp_socket
from forgeyard_model.config import NetworkConfig
from forgeyard_model.network import DestinationRecord, DestinationVerdict, NetworkEvidence
from forgeyard_model.policy import ApprovedHostPath, CapabilityGrant
from forgeyard_model.services import HealthCheck, LogProbe, ServiceSpec, TcpProbe
from forgeyard_networks.settings import NetworkSettings
from forgeyard_networks.topology import Topology

RESOLVER = "8.8.8.8"
"""An address that programs have written into them. Here it is a peer of the test's."""
TCP_PORTS = (22, 53, 80, 443, 8080)
UDP_PORTS = (53, 9999)
ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\nConnection: close\r\n\r\nhello\n"
_DNS = 53
T = TypeVar("T")
TOOL = "/toolchains/attack"
HOST = "/toolchains/host"


@dataclass
class Outside:
    """Who came to the servers outside and to the host's own. `seen`: (protocol, address, port) of each contact."""

    seen: list[tuple[str, str, int]] = field(default_factory=list)
    heads: list[str] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: a head is answered; what a name server would get is sent back."""
        own = writer.get_extra_info("sockname")
        self.seen.append(("tcp", *own))
        try:
            if own[1] == _DNS:
                writer.write(await reader.read(2000))
                return
            while line := await reader.readline():
                self.heads.append(line.decode("latin-1").rstrip())
                if line in (b"\r\n", b"\n"):
                    writer.write(ANSWER)
                    break
        except ConnectionError:
            pass
        finally:
            writer.close()

    def datagram(self, server: socket.socket, address: str) -> None:
        """Send it back."""
        data, peer = server.recvfrom(2000)
        self.seen.append(("udp", address, server.getsockname()[1]))
        server.sendto(data, peer)


class EgressHost(Host):
    """A host whose resolv.conf the test writes; RESOLVER is outside as well."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        far = Links.at(self.outside.fd)
        far.run(Address(far.index("eth0"), IPv4Interface(f"{RESOLVER}/32")))
        far.close()
        self.resolv_conf = directory / "resolv.conf"
        self.resolv_conf.write_text("nameserver 127.0.0.1\n")

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[Outside]:
        """The servers, while the block runs."""
        found = Outside()
        loop = asyncio.get_running_loop()
        where = [(self.outside, address, port) for address in OUTSIDE for port in TCP_PORTS]
        where += [(self.namespace, "0.0.0.0", 8080), (self.namespace, "127.0.0.1", 8081)]
        servers = [
            await asyncio.start_server(found.serve, sock=tcp_listener(namespace.fd, address, port))
            for namespace, address, port in where
        ]
        datagrams = [(udp_socket(self.outside.fd, address, port), address) for address in OUTSIDE for port in UDP_PORTS]
        for server, address in datagrams:
            loop.add_reader(server, found.datagram, server, address)
        try:
            yield found
        finally:
            for server, _ in datagrams:
                loop.remove_reader(server)
                server.close()
            for made in servers:
                made.close()
                await made.wait_closed()

    def echoes(self) -> int:
        """ICMP echo requests that came to the outside."""
        text = in_namespace(self.outside.fd, lambda: Path("/proc/thread-self/net/snmp").read_text())
        names, numbers = (line.split() for line in text.splitlines() if line.startswith("Icmp:"))
        return int(numbers[names.index("InEchos")])

    @contextmanager
    def settings(self) -> Iterator[None]:
        """Executors have this host's resolv.conf and locks of their own."""

        def of(config: NetworkConfig, state_dir: str) -> NetworkSettings:
            return NetworkSettings(
                config,
                run_dir=str(self.directory / "run"),
                cni_cache=f"{state_dir}/cni/results",
                resolv_conf=str(self.resolv_conf),
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(NetworkSettings, "of", of)
            yield

    def play(self, main: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `main` with this host's network; threads and processes that it starts have it too."""
        with self.settings():
            return in_namespace(self.namespace.fd, lambda: asyncio.run(main()))


OUTSIDE = (SERVER, OTHER, PRIVATE, METADATA, RESOLVER)


@asynccontextmanager
async def names(zone: Mapping[str, Sequence[str]]) -> AsyncIterator[fake_dns.FakeDns]:
    """The host's name server at 127.0.0.1, in the namespace of the caller."""
    made = fake_dns.Zone()
    for name, records in zone.items():
        made.add(name, *records)
    server = await fake_dns.start(made, port=53)
    try:
        yield server
    finally:
        server.close()


# ---- jobs that attack


def tools(directory: Path) -> tuple[ApprovedHostPath, ...]:
    """The attacker as a toolchain."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    (directory / "net_attacker.py").write_text(Path(net_attacker.__file__).read_text())
    return (ApprovedHostPath(str(directory), TOOL),)


def as_user(directory: Path) -> dict[str, Any]:
    """Of a Job: a user without privileges, on the host's programs."""
    return {"rootfs": "host", "toolchains": tools(directory)}


def as_root(directory: Path, image: str) -> dict[str, Any]:
    """Of a Job: root of its own user namespace in an image, with the host's programs beside it."""
    loader = next(Path("/usr/lib").glob("*-linux-gnu/ld-linux*.so*"))
    libraries = f"{HOST}/lib/{loader.parent.name}:{HOST}/lib"
    words = [f"{HOST}/lib/{loader.parent.name}/{loader.name}", "--library-path", libraries]
    return {
        "image": image,
        "user": "root",
        "capabilities": CapabilityGrant.ROOT_IN_USERNS,
        "toolchains": (*tools(directory), ApprovedHostPath("/usr", HOST)),
        "env": {"ATTACK_LOADER": json.dumps(words), "PYTHONHOME": HOST, "PYTHONDONTWRITEBYTECODE": "1"},
    }


def attack(job: Mapping[str, Any], attacks: Sequence[Sequence[object]]) -> Step:
    """A step that tries `attacks`, for a job made by `as_user` or `as_root`."""
    loader = json.loads(job.get("env", {}).get("ATTACK_LOADER", "[]"))
    python = f"{HOST}/bin/python3" if loader else "/usr/bin/python3"
    return Step(*loader, python, f"{TOOL}/net_attacker.py", json.dumps(attacks))


async def finished(execution: Execution) -> tuple[ExecutionResult, list[Any]]:
    """The end of an attempt whose steps all attack, and what came of each attack."""
    execution.finish()
    out, err = await collect(execution)
    result = await execution.wait()
    assert not err, err.decode()
    return result, [json.loads(line) for line in out.splitlines()]


class Attacked:
    """A job of a user without privileges that attacks, and all that was seen of it.

    :param attacks: see net_attacker; the word GATEWAY stands for the router's address inside.
    :param zone: of the host's name server.
    """

    result: ExecutionResult
    answers: list[Any]
    outside: Outside
    dns: fake_dns.FakeDns

    def __init__(
        self,
        host: EgressHost,
        state: Path,
        network: Network,
        attacks: Sequence[Sequence[object]],
        *,
        zone: Mapping[str, Sequence[str]],
        config: ExecutorConfig,
        **job: Any,
    ) -> None:
        own = as_user(host.directory / "attack")

        async def main() -> None:
            async with (
                Executor.open(state, config=config) as executor,
                host.serving() as self.outside,
                names(zone) as self.dns,
                executor.run(Job(steps=(), network=network, **own, **job)) as execution,
            ):
                self.gateway = str(topology(execution).block.gateway)
                filled = [[self.gateway if word == "GATEWAY" else word for word in words] for words in attacks]
                await execution.exec(attack(own, filled))
                self.result, self.answers = await finished(execution)

        host.play(main)
        assert self.result.outcome is Outcome.SUCCEEDED, self.result.message
        assert self.result.network is not None
        self.evidence: NetworkEvidence = self.result.network

    def rows(self, verdict: DestinationVerdict) -> dict[tuple[str, int], DestinationRecord]:
        """Destinations of the result, by address and port."""
        return {(row.address, row.port): row for row in self.evidence.destinations if row.verdict is verdict}

    def named(self, verdict: str) -> dict[tuple[str, str], int]:
        """Questions of the result by name and type, and how often each was asked."""
        return {(row.name, row.type): row.count for row in self.evidence.dns if row.verdict == verdict}


def topology(execution: Execution) -> Topology:
    """The attempt's router and members: for looking, from the host's side."""
    network: Any = execution._attempt.network
    return network.network._parts.topology


def advertise(namespace: NetNamespace, link: str) -> None:
    """Be an IPv6 router on `link`: one advertisement to all, with a prefix to make addresses of."""
    source, everybody = (socket.inet_pton(socket.AF_INET6, text) for text in ("fe80::1", "ff02::1"))
    prefix = struct.pack("!BBBBIII16s", 3, 4, 64, 0xC0, 600, 600, 0, socket.inet_pton(socket.AF_INET6, "fd00:1::"))
    body = struct.pack("!BBHBBHII", 134, 0, 0, 64, 0, 600, 0, 0) + prefix
    total = sum(
        struct.unpack(f"!{(40 + len(body)) // 2}H", source + everybody + struct.pack("!II", len(body), 58) + body)
    )
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    body = body[:2] + struct.pack("!H", ~total & 0xFFFF) + body[4:]
    head = bytes.fromhex("333300000001 02fe00000001 86dd 60000000") + struct.pack("!HBB", len(body), 58, 255)

    def send() -> None:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW) as raw:
            raw.bind((link, 0))
            raw.send(head + source + everybody + body)

    in_namespace(namespace.fd, send)


def rules(namespace: NetNamespace) -> str:
    """All rules in a namespace, of both kinds, without their counters."""
    commands = (["iptables-legacy", "-S"], ["ip6tables-legacy", "-S"], ["nft", "-s", "list", "ruleset"])
    return in_namespace(
        namespace.fd,
        lambda: "".join(
            subprocess.run(command, capture_output=True, text=True, check=False).stdout for command in commands
        ),
    )


def service(image: str, name: str = "web", script: str = "", **more: Any) -> ServiceSpec:
    """A service on port 80 that says its name; or `script`, which is ready when it has said "up"."""
    probe = LogProbe("up") if script else TcpProbe(80)
    script = script or f"mkdir -p /www; echo {name} > /www/index.html; exec httpd -f -p 80 -h /www"
    more.setdefault("health", HealthCheck(probe, interval=0.05, retries=10_000))
    return ServiceSpec(name, image=image, entrypoint=(), command=("/bin/sh", "-c", script), **more)


def namespaces() -> set[str]:
    """Inodes of the network namespaces that any process is in or holds open."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        places = [f"/proc/{pid}/ns/net"]
        try:
            places += [f"/proc/{pid}/fd/{fd}" for fd in os.listdir(f"/proc/{pid}/fd")]
            found |= {text for place in places if (text := os.readlink(place)).startswith("net:[")}
        except OSError:
            continue  # it ended meanwhile
    return found
