"""From a network policy to what enforces it, and what a plan says of it."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network
from pathlib import Path

import pytest

from forgeyard_model.config import FetchCredential, NetworkConfig
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job, Step
from forgeyard_model.jobfile import JobFile
from forgeyard_model.policy import NetworkDestination, NetworkMode, NetworkPolicy, PublishedPort
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.request import PreparedWorkspace, impurities, request_from_job
from forgeyard_networks.firewall.hub import PRIVATE_NETWORKS, HubMode
from forgeyard_networks.policy import FETCH_PORT, MOST_DESTINATIONS, check_policy, compile_policy, emulated
from forgeyard_networks.settings import NetworkSettings, read_secret

CONFIG = NetworkConfig(fetch=(NetworkDestination(host="pypi.example.org", ports=(443,)),))
RANGE = IPv4Network("10.213.0.0/16")
OWN = IPv4Network("203.0.113.1/32")
MINIMAL = {"version": 1, "rootfs": "host", "steps": [{"run": "true"}]}


def test_deny_has_names_and_nothing_else() -> None:
    """The resolver listens, for members' names; no proxy, no way out."""
    made = compile_policy(NetworkPolicy.deny(), CONFIG)
    assert (made.hub.mode, made.hub.dns, made.hub.proxy_port) == (HubMode.DENY, True, None)
    assert not made.uplink
    assert made.fetch is None
    assert not made.resolver.forwards


def test_fetch_only_has_the_proxy_with_the_configured_hosts() -> None:
    """What may be fetched is the operator's choice, not the job's."""
    made = compile_policy(NetworkPolicy.fetch_only(), CONFIG, [RANGE, OWN])
    assert made.hub.proxy_port == FETCH_PORT
    assert not made.uplink
    assert made.fetch is not None
    assert made.fetch.allow.host_allowed("pypi.example.org") == (0,)
    assert made.fetch.closed == (RANGE, OWN)
    assert not made.resolver.forwards


def test_fetch_only_without_hosts_is_refused_with_its_key() -> None:
    """The error says where to write them."""
    with pytest.raises(ExecutorError) as caught:
        check_policy(NetworkPolicy.fetch_only(), NetworkConfig())
    assert caught.value.reason == "nothing_to_fetch_from"
    assert "network.fetch" in caught.value.resolution


def test_restricted_names_open_sets_and_networks_are_rules() -> None:
    """A destination keeps its place, so that logs and sets name it; the host's own addresses are closed."""
    policy = NetworkPolicy.restricted(
        NetworkDestination(host="*.example.org", ports=(443,)),
        NetworkDestination(cidr="10.20.0.0/16", ports=(5432,), protocols=("tcp",)),
    )
    made = compile_policy(policy, CONFIG, [RANGE, OWN])
    first, second = made.hub.destinations
    assert (first.index, first.set_name, first.protocols) == (0, "h0", ("tcp", "udp"))
    assert (second.index, second.set_name, second.networks) == (1, "", (IPv4Network("10.20.0.0/16"),))
    assert made.hub.sets == ("h0",)
    assert set(made.hub.blocked) == {*PRIVATE_NETWORKS, RANGE, OWN}
    assert made.uplink
    assert made.resolver.opens
    assert not made.resolver.admits(IPv4Address("203.0.113.1"))


def test_allow_keeps_what_is_private_closed_unless_named() -> None:
    """The names of an audited policy open nothing by themselves: all names are looked up anyway."""
    made = compile_policy(
        NetworkPolicy.audited(NetworkDestination(cidr="10.20.0.0/16"), NetworkDestination(host="a.example")), CONFIG
    )
    assert made.hub.mode is HubMode.ALLOW
    assert made.hub.audit
    assert [item.index for item in made.hub.destinations] == [0]
    assert made.hub.sets == ()
    assert made.resolver.admits(IPv4Address("10.20.1.1"))
    assert not made.resolver.admits(IPv4Address("10.21.1.1"))


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (NetworkPolicy.restricted(NetworkDestination(cidr="2001:db8::/32")), "network.restricted.allow[0].cidr"),
        (
            NetworkPolicy.restricted(NetworkDestination(host="a.example", cidr="1.2.3.0/24")),
            "network.restricted.allow[0]",
        ),
        (NetworkPolicy.restricted(), "network"),
        (
            NetworkPolicy.restricted(*[NetworkDestination(host="a.example")] * (MOST_DESTINATIONS + 1)),
            "network.restricted.allow",
        ),
        (NetworkPolicy.operator("corp"), "network.conflist"),
    ],
)
def test_what_no_network_can_enforce_is_refused_by_name(policy: NetworkPolicy, field: str) -> None:
    """Nothing weaker is put in its place."""
    with pytest.raises(InvalidRequest) as caught:
        check_policy(policy, CONFIG)
    assert caught.value.field == field


def test_an_operators_network_has_to_be_listed() -> None:
    """That a file of that name lies on the host is not enough."""
    check_policy(NetworkPolicy.operator("corp"), NetworkConfig(conflists=("corp",)))
    with pytest.raises(InvalidRequest, match=r"choose corp"):
        check_policy(NetworkPolicy.operator("other"), NetworkConfig(conflists=("corp",)))


def test_a_plan_says_where_enforcement_is_wider_than_the_words() -> None:
    """Names open addresses; a wildcard lets names carry data."""
    named = NetworkPolicy.restricted(NetworkDestination(host="a.example"), NetworkDestination(cidr="1.2.3.0/24"))
    assert len(emulated(named)) == 1
    assert "a.example" in emulated(named)[0]
    wild = NetworkPolicy.restricted(NetworkDestination(host="*.example.org"))
    assert len(emulated(wild)) == 2
    assert emulated(NetworkPolicy.restricted(NetworkDestination(cidr="1.2.3.0/24"))) == ()
    assert emulated(NetworkPolicy.allow()) == ()


def _network(text: object) -> NetworkPolicy:
    job = JobFile.model_validate(MINIMAL | {"network": text})
    from forgeyard_model.jobfile_convert import describe_job

    found = describe_job(job, base="/").network
    assert found is not None
    return found


def test_a_job_file_can_ask_for_an_audit_an_operators_network_and_ports() -> None:
    """Each becomes the policy that it says."""
    assert _network({"audit": True}) == NetworkPolicy.audited()
    destination = NetworkDestination(cidr="10.1.0.0/16", ports=(80,))
    assert _network({"audit": True, "restricted": {"allow": [{"cidr": "10.1.0.0/16", "ports": [80]}]}}) == (
        NetworkPolicy.audited(destination)
    )
    assert _network({"conflist": "corp"}) == NetworkPolicy.operator("corp")
    published = {"publish": [{"service": "db", "port": 5432, "host_port": 15432}]}
    assert _network(published) == NetworkPolicy(NetworkMode.DENY, publish=(PublishedPort("db", 5432, 15432),))
    assert _network(published | {"mode": "allow"}).mode is NetworkMode.ALLOW


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"audit": False},
        {"conflist": "corp", "audit": True},
        {"mode": "allow", "restricted": {"allow": [{"host": "a.example"}]}},
        {"conflist": "corp", "mode": "deny"},
        "conflist",
    ],
)
def test_a_network_that_is_two_or_none_is_refused(wrong: object) -> None:
    """A job has one network."""
    with pytest.raises(ValueError, match=r"network|mode|write"):
        JobFile.model_validate(MINIMAL | {"network": wrong})


def _request(network: NetworkPolicy, profile: ExecutionProfile = ExecutionProfile.DEVELOPMENT) -> tuple[str, ...]:
    job = Job(steps=(Step("true"),), rootfs="host", network=network, profile=profile)
    return impurities(request_from_job(job, context=AttemptContext("x"), workspace=PreparedWorkspace()))


def test_provenance_names_the_operators_network_and_the_audit() -> None:
    """Neither is the network that a policy of ours enforces."""
    assert "network conflist corp" in _request(NetworkPolicy.operator("corp"))
    assert "network audit" in _request(NetworkPolicy.audited())


@pytest.mark.parametrize(
    ("network", "profile"),
    [
        (NetworkPolicy(NetworkMode.RESTRICTED, audit=True), ExecutionProfile.DEVELOPMENT),
        (NetworkPolicy(NetworkMode.CONFLIST), ExecutionProfile.DEVELOPMENT),
        (NetworkPolicy(NetworkMode.ALLOW, conflist="corp"), ExecutionProfile.DEVELOPMENT),
        (NetworkPolicy(NetworkMode.DENY, publish=(PublishedPort("db", 1, 2),)), ExecutionProfile.DEVELOPMENT),
        (NetworkPolicy(NetworkMode.DENY, publish=(PublishedPort("db", 1, 2),)), ExecutionProfile.STANDARD_CI),
        (NetworkPolicy.audited(), ExecutionProfile.RELEASE),
        (NetworkPolicy.operator("corp"), ExecutionProfile.RELEASE),
    ],
)
def test_a_profile_refuses_what_it_does_not_allow(network: NetworkPolicy, profile: ExecutionProfile) -> None:
    """An audit is as open as allow; ports are for development, and need their service."""
    with pytest.raises(InvalidRequest):
        _request(network, profile)


def test_a_secret_that_others_may_read_is_refused(tmp_path: Path) -> None:
    """The error names the file and never its text."""
    path = tmp_path / "token"
    path.write_text("s3cret\n")
    path.chmod(0o600)
    credential = FetchCredential("pypi.example.org", str(path))
    assert read_secret(credential) == "s3cret"
    path.chmod(0o644)
    with pytest.raises(InvalidRequest, match="others may read it") as caught:
        read_secret(credential)
    assert "s3cret" not in str(caught.value)
    path.unlink()
    with pytest.raises(InvalidRequest, match="can't be read"):
        read_secret(credential)


def test_settings_come_from_the_configuration() -> None:
    """Attachments to operators' networks are kept below the state directory."""
    made = NetworkSettings.of(NetworkConfig(range="10.99.0.0/16", pool=3), "/state")
    assert (made.network, made.pool, made.cni_cache) == (IPv4Network("10.99.0.0/16"), 3, "/state/cni/results")
    with pytest.raises(InvalidRequest):
        _ = NetworkSettings(NetworkConfig(range="8.8.8.0/24")).network


def test_the_network_table_of_the_configuration_is_read(tmp_path: Path) -> None:
    """All keys; and only the system's file may have them."""
    from forgeyard_executor.config_load import InvalidConfig, load_config

    path = tmp_path / "config.toml"
    path.write_text(
        """
[network]
range = "10.99.0.0/16"
pool = 4
conflists = ["corp"]
proxy = "http://proxy.example.org:3128"
[[network.fetch]]
host = "*.example.org"
ports = [443]
[[network.credentials]]
host = "pypi.example.org"
file = "/etc/forgeyard/pypi.token"
user = "ci"
"""
    )
    path.chmod(0o644)
    found = load_config(system=path, user=tmp_path / "none", env={}).config
    assert found.network == NetworkConfig(
        range="10.99.0.0/16",
        fetch=(NetworkDestination("*.example.org", "", (443,), ("tcp",)),),
        proxy="http://proxy.example.org:3128",
        credentials=(FetchCredential("pypi.example.org", "/etc/forgeyard/pypi.token", "ci"),),
        conflists=("corp",),
        pool=4,
    )
    assert found.origin("network.pool") == f"{path}:4"
    with pytest.raises(InvalidConfig, match="for everybody"):
        load_config(system=tmp_path / "none", user=path, env={})


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ('range = "10.0.0.0/30"', "private network"),
        ('range = "8.0.0.0/8"', "private network"),
        ("pool = -1", "greater than or equal to 0"),
        ('proxy = "socks5://x:1"', "http://HOST:PORT"),
        ("fetch = [{ports = [1]}]", "exactly one of host and cidr"),
        ('fetch = [{cidr = "2001:db8::/32"}]', "no IPv6"),
        ('credentials = [{host = "*.a.example", file = "/x"}]', "one host"),
        ('credentials = [{host = "a.example", file = "/x", user = "u", header = "X"}]', "one of user and header"),
        ("pol = 1", "did you mean pool"),
    ],
)
def test_a_wrong_network_table_is_refused_at_its_line(tmp_path: Path, text: str, cure: str) -> None:
    """With the cure, before anything runs."""
    from forgeyard_executor.config_load import InvalidConfig, load_config

    path = tmp_path / "config.toml"
    path.write_text(f"[network]\n{text}\n")
    path.chmod(0o644)
    with pytest.raises(InvalidConfig) as caught:
        load_config(system=path, user=tmp_path / "none", env={})
    assert cure in str(caught.value)
    assert f"{path}:2" in str(caught.value)
