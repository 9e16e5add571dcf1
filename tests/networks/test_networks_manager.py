"""The networks of one executor: made whole or not at all, shared with nobody, gone at the end, whatever the end was."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from net_host import OTHER, SERVER, Host, OrderError, Process
from router_peers import connect

from forgeyard_host.links import Links, Route
from forgeyard_host.netns import in_namespace

pytestmark = pytest.mark.kernel

NAMED = [{"cidr": f"{SERVER}/32", "ports": [80]}, {"host": "*.example.org", "ports": [443]}]
TIME = 120.0
"""Seconds for 300 networks: far above what they take on a busy machine, and far below what a leak of time would."""


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host and an outside."""
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def executor(host: Host) -> Process:
    """An executor there."""
    return host.process()


def forgeyard_rules(host: Host) -> list[str]:
    return [line.strip() for line in host.rules().splitlines() if "forgeyard" in line.lower()]


def test_three_hundred_in_a_row_leave_nothing(host: Host, executor: Process) -> None:
    """No lease, link, rule, descriptor or task; and what is shared goes with the executor."""
    executor.order("many", mode="restricted", allow=NAMED, count=2, at_once=1)
    before = executor.order("resources")
    took = executor.order("many", mode="restricted", allow=NAMED, count=300, at_once=1, members=[["job"], ["db"]])
    assert executor.order("resources") == before
    assert before["blocks"] == 0
    assert took["seconds"] < TIME
    assert executor.end() == 0
    host.wait_clean()
    assert forgeyard_rules(host) == []


def test_sixty_four_at_once_leave_nothing(host: Host, executor: Process) -> None:
    """All of them open at the same time, each with addresses of its own."""
    executor.order("many", mode="allow", count=1, at_once=1)
    before = executor.order("resources")
    executor.order("many", mode="allow", count=64, at_once=64, together=True)
    assert executor.order("resources") == before
    assert executor.end() == 0
    host.wait_clean()
    assert forgeyard_rules(host) == []


def test_an_attach_that_is_cancelled_leaves_nothing(host: Host, executor: Process) -> None:
    """However far it had come."""
    executor.order("many", mode="allow", count=1, at_once=1)
    before = executor.order("resources")
    for turns in (0, 1, 2, 3, 5, 8, 13, 40):
        if executor.order("cancelled", name="a", mode="allow", turns=turns) == "attached":
            executor.order("close", name="a")
        assert executor.order("resources") == before
    assert executor.end() == 0
    host.wait_clean()


def test_a_killed_executor_leaves_nothing_that_carries_traffic(host: Host, executor: Process) -> None:
    """Links, addresses and routes go with it; its chains are taken over by the next one, and go with that."""
    attached = executor.attach("a", "allow", members=[["job"], ["db"]])
    attached.let_go()
    assert len(host.state().links) == 3
    executor.kill()
    host.wait_clean()
    assert forgeyard_rules(host)
    second = host.process()
    second.attach("b", "allow").let_go()
    assert second.end() == 0
    host.wait_clean()
    assert forgeyard_rules(host) == []


def test_two_executors_share_the_hosts_rules(host: Host) -> None:
    """Blocks of one are not the other's; the first to leave takes nothing of the second's; the last takes all."""
    one, two = host.process(), host.process()
    first, second = one.attach("a", "allow"), two.attach("a", "allow")
    assert first.gateway != second.gateway
    assert one.end() == 0
    first.let_go()
    assert forgeyard_rules(host)
    assert connect(second.job, SERVER, 80) == "ECONNREFUSED"  # by the server: nobody listens there
    assert two.order("evidence", name="a")["destinations"][0]["verdict"] == "allowed"
    second.let_go()
    assert two.end() == 0
    host.wait_clean()
    assert forgeyard_rules(host) == []


def test_deny_touches_nothing_of_the_host(host: Host, executor: Process) -> None:
    """No link, no rule, no forwarding: a network without a way out is its own business."""
    attached = executor.attach("a", members=[["job"], ["db"]])
    assert len(host.state().links) == len(host.before.links)
    assert forgeyard_rules(host) == []
    attached.let_go()


def test_what_can_not_be_made_is_refused_and_leaves_nothing(executor: Process) -> None:
    """Typed, with the cure."""
    for words, reason, text in (
        ({"mode": "restricted", "allow": [{"cidr": "2001:db8::/32"}]}, "", "no IPv6"),
        ({"mode": "fetch-only"}, "nothing_to_fetch_from", "network.fetch"),
        ({"mode": "conflist", "conflist": "corp"}, "", "network.conflists"),
        ({"mode": "deny", "members": [[f"m{number}"] for number in range(14)]}, "", "room for 12"),
        ({"mode": "deny", "members": [["job"], ["db"], ["db2", "db2", ["db"]]]}, "", "has this one"),
        ({"mode": "deny", "members": [["job"], ["localhost"]]}, "", "machine itself"),
    ):
        with pytest.raises(OrderError, match=text) as caught:
            executor.order("attach", name="a", **words)
        assert caught.value.reason == reason
        found = executor.order("resources")
        assert (found["blocks"], found["tasks"]) == (0, [])


def test_a_rule_that_can_not_be_set_ends_the_attempt(executor: Process) -> None:
    """The first error is told, everything is undone, nothing weaker is put in its place."""
    executor.order("many", mode="allow", count=1, at_once=1)
    before = executor.order("resources")
    executor.order("break_rules")
    for mode in ("deny", "allow"):
        with pytest.raises(OrderError, match="the test said so") as caught:
            executor.attach("b", mode)
        assert caught.value.reason == "rule_not_set"
    found = executor.order("resources")
    assert (found["fds"], found["blocks"]) == (before["fds"], before["blocks"])


def test_a_range_that_the_host_reaches_otherwise_is_refused_for_a_way_out(host: Host, executor: Process) -> None:
    """A route of the operator's would be hidden; without a way out the addresses meet nobody."""
    from ipaddress import IPv4Address, IPv4Network

    links = Links.at(host.namespace.fd)
    links.run(Route(IPv4Network("10.0.0.0/8"), IPv4Address(SERVER), links.index("out0")))
    links.close()
    executor.attach("a").let_go()
    with pytest.raises(OrderError, match=r"route to 10\.0\.0\.0/8") as caught:
        executor.attach("b", "allow")
    assert caught.value.reason == "range_in_use"


def test_jobs_find_ready_networks_in_the_pool(host: Host) -> None:
    """Also those with services and a way out; hits and misses are counted; none is left at the end."""
    executor = host.process(config={"pool": 2})
    assert executor.order("metrics", full=True)["ready"] == 2
    attached = executor.attach("a", "restricted", allow=NAMED, members=[["job"], ["db"]])
    assert connect(attached.job, OTHER, 80) == "ECONNREFUSED"
    metrics = executor.order("metrics", full=True)
    assert (metrics["hits"], metrics["misses"], metrics["ready"], metrics["hit_rate"]) == (1, 0, 2, 1.0)
    attached.let_go()
    assert executor.end() == 0
    host.wait_clean()


def test_capabilities_come_from_trying(host: Host, executor: Process) -> None:
    """Rules were loaded and a connection was made through them; nothing of that is left."""
    found = executor.order("capabilities")
    assert found["modes"] == ["allow", "deny", "restricted"]
    assert found["backend"]
    assert found["problem"] == ""
    with_all = host.process(config={"fetch": [{"host": "a.example"}], "conflists": ["corp"]})
    assert with_all.order("capabilities")["modes"] == ["allow", "conflist", "deny", "fetch-only", "restricted"]


def test_a_host_that_drops_what_is_forwarded_is_found_out(host: Host, executor: Process) -> None:
    """An accept of ours does not beat a drop in another table: the modes that need it are not claimed, and refused."""
    drop = "table inet other {\nchain f {\ntype filter hook forward priority 10; policy drop;\n}\n}\n"
    in_namespace(host.namespace.fd, lambda: subprocess.run(["nft", "-f", "-"], input=drop, text=True, check=True))
    found = executor.order("capabilities")
    assert found["modes"] == ["deny"]
    assert "does not get out" in found["problem"]
    with pytest.raises(OrderError) as caught:
        executor.attach("a", "allow")
    assert caught.value.reason == "forwarding_dropped"
    executor.attach("b").let_go()


def test_chains_that_somebody_removed_come_back(host: Host, executor: Process) -> None:
    """The upkeep puts right what a reload of the host's firewall took away."""
    attached = executor.attach("a", "allow")
    before = forgeyard_rules(host)
    in_namespace(host.namespace.fd, lambda: subprocess.run(["nft", "flush", "ruleset"], check=True))
    assert forgeyard_rules(host) == []
    executor.order("mend")
    assert forgeyard_rules(host) == before
    attached.let_go()


@pytest.fixture
def corp(tmp_path: Path) -> dict[str, object]:
    """An operator's own network: stock bridge and host-local."""
    plugins = next((path for path in ("/usr/lib/cni", "/opt/cni/bin") if os.path.exists(f"{path}/bridge")), "")
    if not plugins or shutil.which("ip") is None:
        pytest.skip("containernetworking-plugins are not installed")
    conflists = tmp_path / "net.d"
    conflists.mkdir()
    (conflists / "corp.conflist").write_text(
        '{"cniVersion": "1.0.0", "name": "corp", "plugins": [{"type": "bridge", "bridge": "corp0", "isGateway": true,'
        f'"ipam": {{"type": "host-local", "dataDir": "{tmp_path}/leases",'
        '"ranges": [[{"subnet": "10.77.0.0/24"}]]}, '
        '"dns": {"nameservers": ["10.77.0.1"], "search": ["corp.example"]}}]}'
    )
    return {"conflists": ["corp"], "conflist_dirs": [str(conflists)], "plugin_dirs": [plugins]}


def leases(tmp_path: Path) -> list[str]:
    directory = tmp_path / "leases" / "corp"
    return sorted(name for name in os.listdir(directory) if name[0].isdigit()) if directory.is_dir() else []


def test_an_operators_network_is_made_by_its_plugins(host: Host, corp: dict[str, object], tmp_path: Path) -> None:
    """Addresses and names come from them; no rule of ours is claimed; all is given back."""
    executor = host.process(config=corp)
    attached = executor.attach("a", "conflist", conflist="corp", members=[["job"], ["db"]])
    assert attached.address("db").startswith("10.77.0.")
    assert attached.members["job"]["resolv_conf"] == "nameserver 10.77.0.1\nsearch corp.example\n"
    assert f"{attached.address('db')}\tdb" in attached.members["job"]["hosts"]
    assert connect(attached.job, attached.address("db"), 80) == "ECONNREFUSED"
    seen = executor.order("evidence", name="a")
    assert (seen["mode"], seen["conflist"], seen["backend"]) == ("conflist", "corp", "")
    assert len(leases(tmp_path)) == 2
    attached.let_go()
    executor.order("close", name="a")
    assert leases(tmp_path) == []
    assert os.listdir(tmp_path / "run" / "netns") == []
    assert executor.end() == 0


def test_a_plugin_that_fails_fails_the_attempt_and_leaves_nothing(
    host: Host, corp: dict[str, object], tmp_path: Path
) -> None:
    """The plugin's own words are told."""
    path = tmp_path / "net.d" / "corp.conflist"
    path.write_text(path.read_text().replace("10.77.0.0/24", "10.77.0.0/30"))
    executor = host.process(config=corp)
    with pytest.raises(OrderError, match="no IP addresses available"):
        executor.attach("a", "conflist", conflist="corp", members=[["job"], ["db"], ["mq"]])
    assert leases(tmp_path) == []
    assert os.listdir(tmp_path / "run" / "netns") == []


def test_what_a_killed_executor_attached_is_taken_off_by_the_next(
    host: Host, corp: dict[str, object], tmp_path: Path
) -> None:
    """Leases, pinned namespaces and links; those of an executor that lives are left alone."""
    dead, alive = host.process(config=corp), host.process(config=corp)
    dead.attach("dead", "conflist", conflist="corp").let_go()
    living = alive.attach("alive", "conflist", conflist="corp")
    assert len(leases(tmp_path)) == 2
    dead.kill()
    third = host.process(config=corp)
    assert third.order("recover") == []
    assert leases(tmp_path) == [living.address("job")]
    assert len(os.listdir(tmp_path / "run" / "netns")) == 1
    alive.order("close", name="alive")
    living.let_go()
    assert os.listdir(tmp_path / "run" / "netns") == []
