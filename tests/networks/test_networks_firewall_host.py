"""The host's shared rules, kept by several executors beside other people's. A namespace of the test plays the host."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Network
from pathlib import Path

import pytest
from router_peers import RANGE, SERVER, Peers, ask_udp, connect, ping

from forgeyard_host.netns import in_namespace, read_sysctls
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_networks.firewall.backend import HostBackend
from forgeyard_networks.firewall.host import HostFirewall
from forgeyard_networks.firewall.hub import HubDestination, HubMode, HubPolicy, install_hub
from forgeyard_networks.firewall.iptables import IptablesBackend
from forgeyard_networks.firewall.iptables_host import IptablesHost
from forgeyard_networks.firewall.nft_host import NftHost
from forgeyard_networks.firewall.probe import forwarding_probe

pytestmark = pytest.mark.kernel

HUB = IptablesBackend("legacy")
HOOK = "type filter hook forward priority 10;"
KINDS: dict[str, Callable[[str], HostBackend]] = {
    "legacy": lambda lock: IptablesHost("legacy", lock=lock),
    "nft": lambda lock: NftHost(compat=IptablesHost("nft", lock=lock)),
    "nft alone": lambda lock: NftHost(),
    "iptables-nft": lambda lock: IptablesHost("nft", lock=lock),
}


class Playground:
    """A host, an outside, and the means to be an executor there."""

    def __init__(self, directory: Path) -> None:
        self.peers = Peers(directory, forwards=False)
        self.lock = str(directory / "xtables.lock")
        self._locks = str(directory / "net")

    def firewall(self, kind: str, network: IPv4Network = RANGE, wait: float = 10) -> HostFirewall:
        return HostFirewall(KINDS[kind](self.lock), network, ns_fd=self.peers.host.fd, lock_dir=self._locks, wait=wait)

    def run(self, *words: str, text: str = "") -> str:
        """A command on the host."""

        environment = {**os.environ, "XTABLES_LOCKFILE": self.lock}

        def act() -> str:
            done = subprocess.run(words, input=text, check=True, capture_output=True, text=True, env=environment)
            return done.stdout

        return in_namespace(self.peers.host.fd, act)

    def rules(self) -> str:
        """Everything that any program sees."""
        programs = [f"ip{six}tables-{kind}-save" for six in ("", "6") for kind in ("legacy", "nft")]
        return "".join(self.run(program) for program in programs) + self.run("nft", "list", "ruleset")

    def forwarding(self, link: str = "out0") -> str:
        name = f"net.ipv4.conf.{link}.forwarding"
        return in_namespace(self.peers.host.fd, lambda: read_sysctls((name, "net.ipv4.ip_forward")))[name]


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Playground]:
    made = Playground(tmp_path)
    yield made
    made.peers.close()


@pytest.fixture(params=KINDS)
def kind(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


def test_traffic_of_attempts_gets_out_and_nowhere_else(ground: Playground, kind: str) -> None:
    """Outside by the host's address; not to the host itself, not to another attempt, and not in from outside."""
    firewall = ground.firewall(kind)
    firewall.acquire()
    one, other = ground.peers.attempt(), ground.peers.attempt()
    # Even a router that lets everything out, also what is private, leads no further than the host's rules.
    named = HubDestination(0, (IPv4Network("0.0.0.0/0"),), protocols=("tcp", "udp", "icmp"))
    for attempt in (one, other):
        install_hub(HUB, attempt.router.fd, HubPolicy(HubMode.RESTRICTED, (named,), blocked=()), attempt.block)
    ground.peers.tcp(ground.peers.outside, SERVER, 443)
    ground.peers.tcp(ground.peers.host, "0.0.0.0", 22)
    ground.peers.tcp(other.members[0], "0.0.0.0", 5432)
    server = ground.peers.udp(ground.peers.outside, SERVER, 53)
    job = one.members[0]

    assert connect(job, SERVER, 443) == "ok"  # the outside has no route to us, so it was translated
    assert ask_udp(job, SERVER, 53, server) == "ok"
    for host in ("203.0.113.1", str(one.block.uplink[1]), str(other.block.uplink[1])):
        assert connect(job, host, 22) == "ECONNREFUSED"
    assert ping(job, "203.0.113.1") == "prohibited"
    assert connect(job, str(other.block.member(0)), 5432) == "ECONNREFUSED"
    _route_in(ground)
    assert connect(ground.peers.outside, str(other.block.member(0)), 5432) == "ECONNREFUSED"
    firewall.release()


def test_rules_are_there_once_however_often_they_are_asked_for_and_gone_after_the_last(
    ground: Playground, kind: str
) -> None:
    """Two executors share the chains; the first to leave leaves them, the last takes them and all else stays."""
    ground.run("iptables-legacy", "-A", "FORWARD", "-s", "192.0.2.9", "-j", "ACCEPT")
    ground.run("nft", "-f", "-", text="table inet theirs {\nchain c {\ncounter accept\n}\n}\n")
    before = ground.rules()
    first, second = ground.firewall(kind), ground.firewall(kind)
    first.acquire()
    once = ground.rules()
    first.acquire()
    second.acquire()
    assert _plain(ground.rules()) == _plain(once)
    assert "FORGEYARD-FORWARD" in once
    assert first.problems() == second.problems() == ()
    first.release()
    assert _plain(ground.rules()) == _plain(once)
    second.release()
    assert "FORGEYARD" not in ground.rules()
    assert set(_plain(before)) <= set(_plain(ground.rules()))
    second.release()


def test_executors_with_different_ranges_each_have_theirs(ground: Playground, kind: str) -> None:
    """The chains hold the ranges of those that live, and lose one when its executor leaves."""
    first, second = ground.firewall(kind), ground.firewall(kind, IPv4Network("10.99.0.0/16"))
    first.acquire()
    second.acquire()
    assert "10.213.0.0/16" in ground.rules()
    assert "10.99.0.0/16" in ground.rules()
    first.release()
    assert "10.213.0.0/16" not in ground.rules()
    assert second.problems() == ()
    second.release()


def test_rules_that_somebody_removed_are_found_and_put_back(ground: Playground, kind: str) -> None:
    """check() names the lack with a typed error; acquire() repairs it without a double."""
    firewall = ground.firewall(kind)
    firewall.acquire()
    whole = _plain(ground.rules())
    if kind in ("legacy", "iptables-nft"):
        program = "iptables-legacy" if kind == "legacy" else "iptables-nft"
        ground.run(program, "-D", "FORWARD", "1")
        ground.run(program, "-A", "FORGEYARD-INPUT", "-j", "ACCEPT")
    else:
        ground.run("nft", "flush", "chain", "ip", "forgeyard", "FORGEYARD-FORWARD")
    with pytest.raises(SandboxError) as caught:
        firewall.check()
    assert (caught.value.kind, caught.value.reason) == (SandboxErrorKind.NETWORK_SETUP_FAILED, "host_rules_changed")
    assert "FORGEYARD-FORWARD" in caught.value.details
    firewall.acquire()
    firewall.check()
    assert sorted(_plain(ground.rules())) == sorted(whole)
    firewall.release()


def test_a_doubled_jump_is_made_one_again(ground: Playground) -> None:
    """Jumps are counted by exact match: a surplus one goes, one that only resembles ours stays."""
    firewall = ground.firewall("legacy")
    firewall.acquire()
    comment = ("-m", "comment", "--comment", "forgeyard: job networks")
    ground.run("iptables-legacy", "-A", "FORWARD", *comment, "-j", "FORGEYARD-FORWARD")
    ground.run("iptables-legacy", "-A", "FORWARD", "-s", "192.0.2.1", *comment, "-j", "FORGEYARD-FORWARD")
    assert len(firewall.problems()) == 1
    firewall.acquire()
    assert ground.run("iptables-legacy-save").count("-j FORGEYARD-FORWARD") == 2
    ground.run("iptables-legacy", "-D", "FORWARD", "-s", "192.0.2.1", *comment, "-j", "FORGEYARD-FORWARD")
    firewall.release()


@pytest.mark.parametrize("kind", ["legacy", "iptables-nft", "nft"])
def test_docker_user_gets_the_jump_where_it_exists(ground: Playground, kind: str) -> None:
    """On a host with Docker, whose FORWARD drops by policy, packets of ours pass through the chain meant for that."""
    program = "iptables-legacy" if kind == "legacy" else "iptables-nft"
    for words in ("-P FORWARD DROP", "-N DOCKER-USER", "-A FORWARD -j DOCKER-USER", "-A DOCKER-USER -j RETURN"):
        ground.run(program, *words.split())
    before = ground.run(program, "-S")
    assert not _passes(ground)
    firewall = ground.firewall(kind)
    firewall.acquire()
    listed = ground.run(program, "-S").splitlines()
    assert '-A DOCKER-USER -m comment --comment "forgeyard: job networks" -j FORGEYARD-FORWARD' in listed
    assert not any(line.startswith("-A FORWARD") and "FORGEYARD" in line for line in listed)
    assert _passes(ground)
    firewall.release()
    assert ground.run(program, "-S") == before


def test_the_probe_sees_a_drop_in_somebody_elses_table(ground: Playground, kind: str) -> None:
    """Rules of ours may all be there, and packets be dropped all the same: only a packet shows it."""
    firewall = ground.firewall(kind)
    firewall.acquire()
    report = forwarding_probe(HUB, ground.peers.blocks, ns_fd=ground.peers.host.fd)
    assert report.passes
    assert "arrived outside as" in report.details
    drop = "table inet theirs {\nchain f {\ntype filter hook forward priority 10; policy drop;\n}\n}\n"
    ground.run("nft", "-f", "-", text=drop)
    assert firewall.problems() == ()
    report = forwarding_probe(HUB, ground.peers.blocks, ns_fd=ground.peers.host.fd, timeout=0.3)
    assert not report.passes
    assert report.cure
    ground.run("nft", "delete", "table", "inet", "theirs")
    assert not [link for link in ground.peers.host_links.dump().links if link.name.startswith("fyp")]
    firewall.release()


def test_a_packet_that_is_lost_is_no_drop(ground: Playground) -> None:
    """The host's first packet of a connection may get lost once; the probe's answer stays the same."""
    firewall = ground.firewall("nft alone")
    firewall.acquire()
    once = "tcp flags & (syn | ack) == syn numgen inc mod 1000000 0 counter drop"
    ground.run("nft", "-f", "-", text=f"table inet theirs {{\nchain f {{\n{HOOK}\n{once}\n}}\n}}\n")
    assert forwarding_probe(HUB, ground.peers.blocks, ns_fd=ground.peers.host.fd).passes
    assert "counter packets 1 " in ground.run("nft", "list", "table", "inet", "theirs")
    firewall.release()


def test_a_connection_whose_last_packet_is_lost(ground: Playground) -> None:
    """To the member it is answered, and it never arrives outside: no answer, and no error of the probe's own."""
    firewall = ground.firewall("nft alone")
    firewall.acquire()
    last = "tcp flags & (syn | ack) == ack drop"
    ground.run("nft", "-f", "-", text=f"table inet theirs {{\nchain f {{\n{HOOK}\n{last}\n}}\n}}\n")
    report = forwarding_probe(HUB, ground.peers.blocks, ns_fd=ground.peers.host.fd, timeout=0.5)
    assert (report.passes, report.details) == (False, "no answer within 0.5 s")
    firewall.release()


def test_forwarding_is_on_where_routes_lead_and_put_back_after_the_last(ground: Playground) -> None:
    """Only interfaces with routes forward, the host's own switch stays as it is, and the end is as the beginning."""
    ground.run("ip", "link", "add", "idle0", "type", "veth", "peer", "name", "idle1")
    first, second = ground.firewall("nft alone"), ground.firewall("nft alone")
    first.acquire()
    second.acquire()
    assert (ground.forwarding("out0"), ground.forwarding("idle0")) == ("1", "0")
    ground.run("sysctl", "-qw", "net.ipv4.conf.out0.forwarding=0")
    assert first.problems() == ("out0 does not forward",)
    first.acquire()
    assert ground.forwarding() == "1"
    assert ground.run("cat", "/proc/sys/net/ipv4/ip_forward").strip() == "0"
    first.release()
    assert ground.forwarding() == "1"
    second.release()
    assert ground.forwarding() == "0"


def test_forwarding_that_was_on_stays_on(ground: Playground) -> None:
    """What we did not turn on we do not turn off."""
    ground.run("sysctl", "-qw", "net.ipv4.ip_forward=1")
    firewall = ground.firewall("nft alone")
    firewall.acquire()
    firewall.release()
    assert ground.forwarding() == "1"


def test_a_host_that_forbids_forwarding_is_refused(ground: Playground, tmp_path: Path) -> None:
    """With /proc/sys read-only and forwarding off no job would get out: a typed error, and no rules left."""
    script = (
        "import sys\n"
        "from ipaddress import IPv4Network\n"
        "from forgeyard_model.errors import SandboxError\n"
        "from forgeyard_networks.firewall.host import HostFirewall\n"
        "from forgeyard_networks.firewall.nft_host import NftHost\n"
        "try:\n"
        "    HostFirewall(NftHost(), IPv4Network('10.77.0.0/16'), lock_dir=sys.argv[1]).acquire()\n"
        "except SandboxError as error:\n"
        "    print(error.reason)\n"
    )
    sealed = 'mount --bind /proc/sys /proc/sys && mount -o remount,ro,bind /proc/sys && exec "$@"'
    command = ("unshare", "-m", "sh", "-c", sealed, "sh", sys.executable, "-c", script, str(tmp_path / "net"))
    assert ground.run(*command) == "forwarding_forbidden\n"
    assert "FORGEYARD" not in ground.rules()


def killed_executor(ground: Playground, kind: str, locks: Path) -> None:
    """An executor that acquires and is killed."""
    script = (
        "import os, sys\n"
        "from ipaddress import IPv4Network\n"
        "from forgeyard_networks.firewall.host import HostFirewall\n"
        "from forgeyard_networks.firewall.iptables_host import IptablesHost\n"
        "from forgeyard_networks.firewall.nft_host import NftHost\n"
        "kind, lock, locks = sys.argv[1:]\n"
        "backends = {'legacy': IptablesHost('legacy', lock=lock), 'iptables-nft': IptablesHost('nft', lock=lock)}\n"
        "backend = backends.get(kind, NftHost(compat=None if kind == 'nft alone' else IptablesHost('nft')))\n"
        "HostFirewall(backend, IPv4Network('10.77.0.0/16'), lock_dir=locks).acquire()\n"
        "os.kill(os.getpid(), 9)\n"
    )
    command = [sys.executable, "-c", script, kind, ground.lock, str(locks)]
    done = in_namespace(ground.peers.host.fd, partial(subprocess.run, command, check=False))
    assert done.returncode == -9
    assert "10.77.0.0/16" in ground.rules()


def test_a_dead_executor_has_no_part_in_the_rules(ground: Playground, tmp_path: Path, kind: str) -> None:
    """One that is killed leaves its rules behind; the next finds them, makes no second set, and takes them along."""
    killed_executor(ground, kind, tmp_path / "net")
    firewall = ground.firewall(kind)
    firewall.acquire()
    assert "10.77.0.0/16" not in ground.rules()
    assert firewall.problems() == ()
    firewall.release()
    assert "FORGEYARD" not in ground.rules()
    assert ground.forwarding() == "0"


def test_twenty_executors_start_and_stop_while_another_holds_the_lock(ground: Playground) -> None:
    """Nobody reads a held lock as an absent rule: no double appears while some wait, and nothing is left at the end."""
    holder = subprocess.Popen(
        ["flock", ground.lock, "-c", "echo held; read line"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == b"held\n"
    firewalls = [ground.firewall("legacy", wait=30) for _ in range(20)]
    with ThreadPoolExecutor(20) as pool:
        waiting = [pool.submit(firewall.acquire) for firewall in firewalls]
        # A router does not wait for the host's lock.
        attempt = ground.peers.attempt(uplink=False)
        install_hub(HUB, attempt.router.fd, HubPolicy(HubMode.DENY), attempt.block)
        assert not any(future.done() for future in waiting)
        holder.communicate(b"\n")
        for future in waiting:
            future.result()
        for target in ("FORWARD", "INPUT", "POSTROUTING"):
            assert ground.run("iptables-legacy-save").count(f"-j FORGEYARD-{target}") == 1
        list(pool.map(HostFirewall.release, firewalls))
    assert "FORGEYARD" not in ground.rules()


def test_a_lock_that_can_not_be_had_is_a_typed_error(ground: Playground, monkeypatch: pytest.MonkeyPatch) -> None:
    """After the bound the attempt fails with the lock's name, and nothing of ours is in force by half."""
    monkeypatch.setattr("forgeyard_networks.firewall.iptables.LOCK_WAIT", 1)
    fd = os.open(ground.lock, os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    firewall = ground.firewall("legacy")
    with pytest.raises(SandboxError) as caught:
        firewall.acquire()
    os.close(fd)
    assert (caught.value.kind, caught.value.reason) == (SandboxErrorKind.NETWORK_SETUP_FAILED, "firewall_locked")
    assert "iptables-legacy" in caught.value.brief
    assert "FORGEYARD" not in ground.rules()
    firewall.acquire()
    assert firewall.problems() == ()
    firewall.release()


def test_tables_of_one_namespace_are_not_taken_for_those_of_another(tmp_path: Path) -> None:
    """python-iptables keeps tables for a process; two hosts in one process must not get each other's."""
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    one, two = Playground(tmp_path / "a"), Playground(tmp_path / "b")
    one.run("iptables-legacy", "-A", "FORWARD", "-s", "192.0.2.1", "-j", "DROP")
    first, second = one.firewall("legacy"), two.firewall("legacy")
    first.acquire()
    second.acquire()
    assert "192.0.2.1" not in two.rules()
    first.release()
    assert "FORGEYARD" not in one.rules()
    assert second.problems() == ()
    second.release()
    one.peers.close()
    two.peers.close()


def _passes(ground: Playground) -> bool:
    """Whether the outside answers, when the host forwards and translates by other means than ours."""
    if "FORGEYARD" in ground.rules():
        return forwarding_probe(HUB, ground.peers.blocks, ns_fd=ground.peers.host.fd).passes
    return forwarding_probe(HUB, ground.peers.blocks, ns_fd=ground.peers.host.fd, timeout=0.2).passes


def _route_in(ground: Playground) -> None:
    command = ["ip", "route", "add", str(RANGE), "via", "203.0.113.1"]
    in_namespace(ground.peers.outside.fd, lambda: subprocess.run(command, check=True))


def _plain(listing: str) -> list[str]:
    """Without comments and counters."""
    return [line.split(" [")[0] for line in listing.splitlines() if not line.startswith("#")]


def test_a_sweep_takes_what_killed_executors_left_unless_one_lives(
    ground: Playground, tmp_path: Path, kind: str
) -> None:
    """Recovery needs no networked job for it; rules that a living executor needs stay."""
    killed_executor(ground, kind, tmp_path / "net")
    ground.firewall(kind).sweep()
    assert "FORGEYARD" not in ground.rules()
    assert ground.forwarding() == "0"
    killed_executor(ground, kind, tmp_path / "net")
    living = ground.firewall(kind)
    living.acquire()
    ground.firewall(kind).sweep()
    assert living.problems() == ()
    living.release()
    ground.firewall(kind).sweep()
    assert "FORGEYARD" not in ground.rules()
