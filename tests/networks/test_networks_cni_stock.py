"""The plugins that distributions ship, in a namespace that plays the host: what they make and what they leave."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any, TypeVar

import pytest
from cni_plugins import STOCK, PluginBox, error

from forgeyard_host.links import Delete, Links, NetState
from forgeyard_host.netns import (
    NetNamespace,
    in_namespace,
    new_namespace,
    open_pinned,
    pin,
    stream_socket,
    tcp_listener,
    unpin,
)
from forgeyard_model.errors import SandboxError
from forgeyard_networks.cni.config import Conflist, conflist_of
from forgeyard_networks.cni.default import default_conflist
from forgeyard_networks.cni.network import CniNetwork
from forgeyard_networks.cni.reconcile import Reconciled, reconcile
from forgeyard_networks.ipam import Block, Blocks
from forgeyard_networks.topology import Topology

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.skipif(not os.path.exists(f"{STOCK}/bridge"), reason="needs the stock CNI plugins"),
]
T = TypeVar("T")
SMALL = IPv4Network("10.99.0.0/29")


@dataclass(frozen=True)
class Counts:
    """What an attachment leaves traces in."""

    links: int
    rules: tuple[str, ...]
    leases: tuple[str, ...]
    entries: tuple[str, ...]


class Host:
    """A network namespace that plays the host, with directories of its own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.ns = new_namespace()
        self.box = PluginBox(root)

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` as an executor on that host would."""
        return in_namespace(self.ns.fd, lambda: asyncio.run(work))

    def network(self, config: Conflist) -> CniNetwork:
        """`config`, opened; plugins of the test come first."""
        cache, claims = str(self.root / "state"), str(self.root / "claims")
        return CniNetwork(config, [str(self.box.dir), STOCK], cache, claims_dir=claims)

    def reconcile(self, *networks: Conflist, valid: tuple[str, ...] = ()) -> Reconciled:
        """As an executor does at its start."""
        dirs = [str(self.box.dir), STOCK]
        state, claims = str(self.root / "state"), str(self.root / "claims")
        return self.run(reconcile(valid, networks=networks, dirs=dirs, cache_dir=state, claims_dir=claims))

    def config(self, *behind: dict[str, Any], subnet: IPv4Network = SMALL, **bridge: Any) -> Conflist:
        """Our conflist, with masquerading, more keys for the bridge plugin and more plugins behind it."""
        raw = default_conflist("jobs", "fybr0", subnet, masquerade=True, data_dir=str(self.root / "leases"))
        return conflist_of(raw | {"plugins": [raw["plugins"][0] | bridge, *behind]}, "jobs.conflist")

    def program(self, name: str, first: str) -> None:
        """A stock plugin with some shell that is run first."""
        path = self.box.dir / name
        path.write_text(f"#!/bin/sh\n{first}\nexec {STOCK}/{name}\n")
        path.chmod(0o755)

    def state(self) -> NetState:
        """Links and routes of the host."""
        return look(self.ns)

    def rules(self) -> tuple[str, ...]:
        """Chains and rules of the nat and filter tables that plugins added."""
        found: list[str] = []
        for table in ("nat", "filter"):
            run = lambda name=table: subprocess.run(["iptables-save", "-t", name], capture_output=True, text=True)  # noqa: E731  one line
            found += in_namespace(self.ns.fd, run).stdout.splitlines()
        return tuple(line.split(" [")[0] for line in found if line[:3] in (":CN", "-A "))

    def leases(self) -> tuple[str, ...]:
        """Addresses that host-local has given out."""
        return tuple(sorted(path.name for path in (self.root / "leases").glob("*/*.*.*.*")))

    def counts(self) -> Counts:
        """Everything."""
        entries = os.listdir(self.root / "state") + os.listdir(self.root / "claims")
        return Counts(len(self.state().links), self.rules(), self.leases(), tuple(entries))

    def warm(self, config: Conflist) -> Counts:
        """Counts after a first job: what plugins share between jobs, such as the bridge, is there then."""
        with contextlib.closing(new_namespace()) as job:
            network = self.network(config)
            self.run(network.add("fy-warm", job.path))
            self.run(network.delete("fy-warm"))
        return self.counts()


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host of the test."""
    made = Host(tmp_path)
    yield made
    made.ns.close()


def look(namespace: NetNamespace) -> NetState:
    """What a namespace holds."""
    with contextlib.closing(Links.at(namespace.fd)) as links:
        return links.dump()


@dataclass(frozen=True)
class Place:
    """A job's namespace, and what plays its router."""

    job: NetNamespace
    router: NetNamespace
    block: Block


@pytest.fixture(params=["ours", "cni"])
def place(request: pytest.FixtureRequest, host: Host) -> Iterator[Place]:
    """The same network by our own path, and by the stock plugins from the conflist that we write."""
    blocks = Blocks(IPv4Network("10.213.0.0/24"), str(host.root / "blocks"))
    block = blocks.acquire()
    if request.param == "ours":
        with contextlib.closing(Topology.make(block)) as topology:
            yield Place(topology.members[0], topology.router, block)
    else:
        raw = default_conflist("jobs", "br0", block.inside, data_dir=str(host.root / "leases"))
        network = host.network(conflist_of(json.loads(json.dumps(raw)), "jobs.conflist"))
        with contextlib.closing(new_namespace()) as job:
            host.run(network.add("fy-1", job.path))
            yield Place(job, host.ns, block)
            host.run(network.delete("fy-1"))
    blocks.close()


def test_both_paths_give_a_job_the_same_network(place: Place) -> None:
    """Address, prefix, default route, loopback; the gateway answers."""
    inside = look(place.job)
    eth0 = inside.link("eth0")
    assert eth0 is not None
    assert (eth0.up, eth0.kind) == (True, "veth")
    assert inside.link("lo") is not None
    assert f"{eth0.index}: {place.block.member(0)}/28" in inside.addresses
    main = [
        route.replace(f"dev {eth0.index}", "dev eth0")
        for route in inside.routes
        if "table 254" in route and "::" not in route
    ]
    assert main == [
        f"table 254 type 1 {place.block.inside} dev eth0",
        f"table 254 type 1 default via {place.block.gateway} dev eth0",
    ]
    with (
        tcp_listener(place.router.fd, str(place.block.gateway), 8080) as listener,
        stream_socket(place.job.fd) as client,
    ):
        client.settimeout(10)
        client.connect((str(place.block.gateway), 8080))
        listener.settimeout(10)
        accepted, peer = listener.accept()
        accepted.close()
        assert peer[0] == str(place.block.member(0))


@pytest.mark.parametrize(
    "kind",
    [
        {"type": "bridge", "bridge": "br1", "isGateway": True, "ipMasq": True},
        {"type": "ptp", "ipMasq": True},
    ],
    ids=["bridge", "ptp"],
)
def test_an_operators_chain_works_whole_and_leaves_nothing(host: Host, kind: dict[str, Any]) -> None:
    """bridge or ptp, then loopback, portmap and firewall: added and taken off."""
    ipam = {"type": "host-local", "dataDir": str(host.root / "leases"), "ranges": [[{"subnet": str(SMALL)}]]}
    plugins = [
        kind | {"ipam": ipam | {"routes": [{"dst": "0.0.0.0/0"}]}},
        {"type": "loopback"},
        {"type": "portmap", "capabilities": {"portMappings": True}, "snat": False},
        {"type": "firewall", "backend": "iptables"},
    ]
    config = conflist_of({"cniVersion": "1.0.0", "name": "operator", "plugins": plugins}, "operator.conflist")
    network = host.network(config)
    ports = {"portMappings": [{"hostPort": 18080, "containerPort": 80, "protocol": "tcp"}]}

    async def round_trip(job: NetNamespace, name: str) -> tuple[str, ...]:
        result = await network.add(name, job.path, runtime_config=ports)
        assert result.ipv4[0].ip in SMALL
        during = host.rules()
        await network.delete(name)
        return during

    with contextlib.closing(new_namespace()) as first, contextlib.closing(new_namespace()) as second:
        host.run(round_trip(first, "fy-first"))
        before = host.counts()
        during = host.run(round_trip(second, "fy-second"))
    assert any("--dport 18080" in rule for rule in during)
    assert any("MASQUERADE" in rule for rule in during)
    assert host.counts() == before
    assert before.leases == before.entries == ()


def test_a_check_finds_what_was_taken_away(host: Host) -> None:
    """Right after ADD all is well; without its interface the job's network is not."""
    network = host.network(host.config({"type": "loopback"}, {"type": "firewall", "backend": "iptables"}))
    with contextlib.closing(new_namespace()) as job:
        host.run(network.add("fy-1", job.path))
        assert host.run(network.check("fy-1"))
        with contextlib.closing(Links.at(job.fd)) as links:
            links.run(Delete("eth0"))
        with pytest.raises(SandboxError, match=r"CNI plugin bridge \(CHECK of network jobs\) failed"):
            host.run(network.check("fy-1"))
        host.run(network.delete("fy-1"))
    assert host.leases() == ()


def test_leases_survive_neither_a_reboot_nor_a_killed_executor(host: Host) -> None:
    """C06: a range of six, one job of a killed executor; afterwards five more find an address, and a sixth none."""
    config = host.config()
    before = host.warm(config)
    assert killed_executor(host, config, jobs=5) == -9
    assert len(host.leases()) == 5
    found = host.reconcile(config)
    assert (len(found.deleted), found.problems) == (5, ())
    settle(lambda: host.counts() == before)
    network = host.network(config)
    jobs = [new_namespace() for _ in range(6)]
    for number, job in enumerate(jobs[:5]):
        host.run(network.add(f"fy-later{number}", job.path))
    with pytest.raises(SandboxError, match=r"host-local|no IP addresses"):
        host.run(network.add("fy-one-too-many", jobs[5].path))
    assert len(host.leases()) == 5
    for number, job in enumerate(jobs[:5]):
        host.run(network.delete(f"fy-later{number}"))
        job.close()
    jobs[5].close()
    assert host.leases() == ()


@pytest.mark.parametrize("inside", [False, True], ids=["between", "inside"])
def test_a_crash_in_the_middle_of_a_chain_leaves_nothing(host: Host, inside: bool) -> None:
    """The bridge plugin had done its work, and said so or not: its lease and its rules are found."""
    before = host.warm(host.config())
    host.box.write("kills", ADD="kill -9 $PPID")
    if inside:
        host.program("bridge", f"[ $CNI_COMMAND != ADD ] || {{ {STOCK}/bridge; kill -9 $PPID; exit; }}")
    config = host.config({"type": "kills"})
    assert killed_executor(host, config, jobs=1) == -9
    assert len(host.leases()) == 1
    assert [attachment.container for attachment in host.network(config).pending()] == ["fy-0"]
    assert host.reconcile(config).problems == ()
    settle(lambda: host.counts() == before)


def killed_executor(host: Host, config: Conflist, jobs: int) -> int:
    """How a process ended that attached `jobs` namespaces, held by nothing but itself, and killed itself."""
    script = f"""
import asyncio, os, signal
from forgeyard_host.netns import new_namespace
from forgeyard_networks.cni.config import conflist_of
from forgeyard_networks.cni.network import CniNetwork
network = CniNetwork(conflist_of({dict(config.raw)!r}, "f"), [{str(host.box.dir)!r}, {STOCK!r}],
    {str(host.root / "state")!r}, claims_dir={str(host.root / "claims")!r})
namespaces = [new_namespace() for _ in range({jobs})]
for number, namespace in enumerate(namespaces):
    asyncio.run(network.add(f"fy-{{number}}", namespace.path))
os.kill(os.getpid(), signal.SIGKILL)
"""
    return in_namespace(host.ns.fd, lambda: subprocess.run([sys.executable, "-c", script])).returncode


def settle(done: Callable[[], bool]) -> None:
    """Wait until the kernel has taken down what died with a process."""
    deadline = time.monotonic() + 10
    while not done():
        assert time.monotonic() < deadline


def test_leases_without_any_entry_are_given_back_and_only_ours(host: Host) -> None:
    """C06, after a power failure that took the cache: by the ids in host-local's own files."""
    config = host.config()
    host.warm(config)
    directory = host.root / "leases" / "jobs"
    held = {"10.99.0.2": "fy-dead", "10.99.0.3": "fy-valid", "10.99.0.4": "podman-1", "10.99.0.5": "fy-old-format"}
    for address, container in held.items():
        (directory / address).write_text(container + ("" if "old" in container else "\r\neth0"))
    found = host.reconcile(config, valid=("fy-valid",))
    assert sorted(found.leases) == ["10.99.0.2", "10.99.0.5"]
    assert host.leases() == ("10.99.0.3", "10.99.0.4")


def test_a_lease_of_another_living_executor_stays(host: Host) -> None:
    """It has a state directory of its own, and only its claim tells of it."""
    config = host.config()
    host.warm(config)
    elsewhere = CniNetwork(config, [STOCK], str(host.root / "other"), claims_dir=str(host.root / "claims"))
    with contextlib.closing(new_namespace()) as job:
        host.run(elsewhere.add("fy-theirs", job.path))
        assert host.reconcile(config) == Reconciled((), (), ())
        assert len(host.leases()) == 1
        host.run(elsewhere.delete("fy-theirs"))


def gone(path: Path) -> None:
    """As `umount` and `rm` leave it."""
    unpin(path)


def empty(path: Path) -> None:
    """As a reboot leaves it: a plain file."""
    unpin(path)
    path.touch()


def not_even_a_directory(path: Path) -> None:
    """Its directory is a file by now."""
    unpin(path)
    path.parent.rmdir()
    path.parent.touch()


@pytest.mark.parametrize("damage", [gone, empty, not_even_a_directory])
def test_a_namespace_that_is_gone_or_none_is_taken_off(host: Host, damage: Callable[[Path], None]) -> None:
    """C07: no error, no lease, no rule; the second call is a success that does nothing."""
    config = host.config({"type": "firewall", "backend": "iptables"})
    before = host.warm(config)
    network = host.network(config)
    path = host.root / "netns" / "job"
    with contextlib.closing(new_namespace()) as made:
        pin(made, path)
    with contextlib.closing(open_pinned(path)):
        host.run(network.add("fy-1", str(path)))
    damage(path)
    host.run(network.delete("fy-1"))
    settle(lambda: host.counts() == before)
    host.run(network.delete("fy-1"))
    assert host.counts() == before


def test_a_plugin_that_skips_its_release_is_not_believed(host: Host) -> None:
    """C07: exit 0 and the lease still there; it is removed, and nobody else's with it."""
    host.program("bridge", "[ $CNI_COMMAND != DEL ] || exit 0")
    network = host.network(host.config(ipMasq=False))
    with contextlib.closing(new_namespace()) as one, contextlib.closing(new_namespace()) as two:
        host.run(network.add("fy-1", one.path))
        host.run(network.add("fy-12", two.path))
        host.run(network.delete("fy-1"))
        assert host.leases() == ("10.99.0.3",)
        host.run(network.delete("fy-12"))
    assert host.leases() == ()


def test_a_chain_that_fails_in_its_middle_leaves_nothing(host: Host) -> None:
    """C09: again and again, in a namespace that stays; the error is the plugin's own."""
    firewall = {"type": "firewall", "backend": "iptables"}
    before = host.warm(host.config(firewall))
    host.box.write("breaks", ADD=error(100, "the second plugin says no"))
    network = host.network(host.config(firewall, {"type": "breaks"}))
    with contextlib.closing(new_namespace()) as job:
        path = host.root / "netns" / "job"
        pin(job, path)
        clean = look(job)

        async def attempts() -> None:
            for number in range(25):
                with pytest.raises(SandboxError, match="code 100: the second plugin says no") as caught:
                    await network.add(f"fy-{number}", str(path))
                assert not hasattr(caught.value, "__notes__")

        host.run(attempts())
        assert [link.name for link in look(job).links] == [link.name for link in clean.links] == ["lo"]
        unpin(path)
    assert host.counts() == before
    assert not path.exists()


def test_many_at_once_get_different_addresses_and_leave_nothing(host: Host) -> None:
    """Sixteen attachments in parallel."""
    config = host.config(subnet=IPv4Network("10.99.0.0/24"), ipMasq=False)
    before = host.warm(config)
    network = host.network(config)
    jobs = [new_namespace() for _ in range(16)]

    async def together() -> list[str]:
        added = (network.add(f"fy-{number}", job.path) for number, job in enumerate(jobs))
        results = await asyncio.gather(*added)
        await asyncio.gather(*(network.delete(f"fy-{number}") for number in range(16)))
        return [str(result.ipv4[0]) for result in results]

    assert len(set(host.run(together()))) == 16
    for job in jobs:
        job.close()
    assert host.counts() == before
