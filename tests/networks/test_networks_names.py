"""Names of members, destinations of a policy, and what the allowlist makes of them."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.jobfile import JobFile
from forgeyard_model.jobfile_convert import _network
from forgeyard_model.policy import NetworkDestination, NetworkPolicy
from forgeyard_networks.allowlist import Allowlist
from forgeyard_networks.names import MemberNames, check_name, name_table, normal_name

ONE, TWO = IPv4Address("10.213.0.2"), IPv4Address("10.213.0.3")


def allow(*destinations: NetworkDestination) -> Allowlist:
    """As a policy has it."""
    return Allowlist.from_destinations(destinations)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("example.org", (0,)),
        ("EXAMPLE.org.", (0,)),
        ("www.example.org", (1,)),
        ("a.b.c.example.org", (1,)),
        ("evil-example.org", ()),
        ("example.org.evil.net", ()),
        ("org", ()),
        ("", ()),
        ("a..example.org", ()),
        ("exam ple.example.org", ()),
        ("*.example.org", ()),
        ("a\x00.example.org", ()),
        ("ex\u00e4mple.example.org", ()),
        (f"{'a' * 64}.example.org", ()),
        (f"{'a.' * 125}example.org", ()),
    ],
)
def test_a_name_is_covered_exactly_or_below_a_wildcard(name: str, found: tuple[int, ...]) -> None:
    """A wildcard is every name below, at any depth, and not the name itself; lookalikes and non-names are nothing."""
    assert allow(NetworkDestination("example.org"), NetworkDestination("*.Example.org")).host_allowed(name) == found


def test_all_destinations_of_a_name_are_found() -> None:
    """Each has ports of its own, so each counts."""
    found = allow(
        NetworkDestination("db.example.org", ports=(5432,)),
        NetworkDestination("db.example.org", ports=(443,), protocols=("udp",)),
        NetworkDestination("*.example.org", protocols=("tcp",)),
    )
    assert found.host_allowed("db.example.org") == (0, 1, 2)
    assert found.name_allowed("db.example.org", 5432) == (0, 2)
    assert found.name_allowed("db.example.org", 443, "udp") == (1,)
    assert found.name_allowed("db.example.org", 443, "icmp") == ()


def test_addresses_are_covered_by_cidr_and_port() -> None:
    """A host destination says nothing about addresses."""
    found = allow(NetworkDestination("example.org"), NetworkDestination(cidr="203.0.113.0/24", ports=(443,)))
    assert found.address_allowed(IPv4Address("203.0.113.9"), 443) == (1,)
    assert found.address_allowed(IPv4Address("203.0.113.9"), 80) == ()
    assert found.address_allowed(IPv4Address("198.51.100.1"), 443) == ()


@pytest.mark.parametrize(
    ("cidr", "address", "admitted"),
    [
        ("203.0.113.0/24", "8.8.8.8", True),
        ("203.0.113.0/24", "10.0.0.1", False),
        ("10.0.0.0/8", "10.0.0.1", True),
        ("10.1.0.0/16", "10.1.2.3", True),
        ("10.1.0.0/16", "10.2.2.3", False),
        ("0.0.0.0/0", "169.254.169.254", False),
        ("0.0.0.0/0", "100.64.0.1", False),
        ("0.0.0.0/0", "127.0.0.1", False),
        ("0.0.0.0/0", "224.0.0.1", False),
        ("10.0.0.0/8", "10.213.4.5", False),
        ("0.0.0.0/0", "198.51.100.7", False),
    ],
)
def test_no_name_leads_inside_unless_a_cidr_says_so(cidr: str, address: str, *, admitted: bool) -> None:
    """What says most about an address counts, as in the router's rules: other jobs' range and the host stay closed."""
    closed = (IPv4Network("10.213.0.0/16"), IPv4Network("198.51.100.7/32"))
    assert allow(NetworkDestination(cidr=cidr)).admits(IPv4Address(address), closed) is admitted


@pytest.mark.parametrize(
    ("destination", "field"),
    [
        (NetworkDestination(), "network.restricted.allow[0]"),
        (NetworkDestination("a.example", "10.0.0.0/8"), "network.restricted.allow[0]"),
        (NetworkDestination("10.0.0.1"), "network.restricted.allow[0].host"),
        (NetworkDestination("*"), "network.restricted.allow[0].host"),
        (NetworkDestination("*.*.example.org"), "network.restricted.allow[0].host"),
        (NetworkDestination("a.*.example.org"), "network.restricted.allow[0].host"),
        (NetworkDestination("example.org\n"), "network.restricted.allow[0].host"),
        (NetworkDestination("https://example.org"), "network.restricted.allow[0].host"),
        (NetworkDestination("example.org:443"), "network.restricted.allow[0].host"),
        (NetworkDestination(cidr="10.0.0.1/8"), "network.restricted.allow[0].cidr"),
        (NetworkDestination(cidr="fd00::/8"), "network.restricted.allow[0].cidr"),
        (NetworkDestination("a.example", ports=(0,)), "network.restricted.allow[0].ports"),
        (NetworkDestination("a.example", ports=(65536,)), "network.restricted.allow[0].ports"),
        (NetworkDestination("a.example", protocols=("sctp",)), "network.restricted.allow[0].protocols"),
    ],
)
def test_a_destination_that_cannot_be_enforced_is_refused_by_field(destination: NetworkDestination, field: str) -> None:
    """Before anything is made of it."""
    with pytest.raises(InvalidRequest) as caught:
        allow(destination)
    assert caught.value.field == field


def test_an_ipv6_network_is_refused_with_the_reason() -> None:
    """The network of a job has none."""
    with pytest.raises(InvalidRequest, match="no IPv6"):
        NetworkDestination(cidr="2001:db8::/32").check()


def test_protocols_come_from_the_job_file() -> None:
    """And nothing but the protocols that can be enforced."""
    destination = {"host": "a.example.org", "ports": [53], "protocols": ["udp"]}
    text = {
        "version": 1,
        "steps": [{"run": "true"}],
        "source": {"path": "."},
        "profile": "development",
        "rootfs": "host",
    }
    file = JobFile.model_validate({**text, "network": {"restricted": {"allow": [destination]}}})
    assert file.network is not None
    assert _network(file.network) == NetworkPolicy.restricted(
        NetworkDestination("a.example.org", ports=(53,), protocols=("udp",))
    )
    bad = {**destination, "protocols": ["sctp"]}
    with pytest.raises(ValueError, match="protocols"):
        JobFile.model_validate({**text, "network": {"restricted": {"allow": [bad]}}})


@given(text=st.text(max_size=300))
def test_a_normal_name_is_ascii_and_stays_the_same(text: str) -> None:
    """Whatever comes in, what comes out is a name, and its own normal form."""
    name = normal_name(text)
    if name is not None:
        assert name.isascii()
        assert len(name) <= 253
        assert name == normal_name(name) == normal_name(name.upper() + ".")


@pytest.mark.parametrize("name", ["", ".", "a..b", "-a", "a-", "a b", "a" * 64, "bj\u00f6rn", "a\n", "..", "localhost"])
def test_a_bad_member_name_is_named(name: str) -> None:
    """The error shows it."""
    with pytest.raises(InvalidRequest) as caught:
        check_name(name, "services.db.aliases")
    assert caught.value.field == "services.db.aliases"


@pytest.mark.parametrize("name", ["10.0.0.1", "1234", "a.1", "x.localhost", "ip6-loopback"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    """Addresses, and the machine itself."""
    with pytest.raises(InvalidRequest):
        check_name(name)


def test_the_table_has_every_name_of_every_member() -> None:
    """Host name, name and aliases; in lower case, since look-ups are."""
    members = (MemberNames("job", ONE, hostname="Sandbox-7"), MemberNames("db", TWO, ("Postgres", "a__b")))
    assert name_table(members) == {"sandbox-7": ONE, "job": ONE, "db": TWO, "postgres": TWO, "a__b": TWO}


@pytest.mark.parametrize(
    "second",
    [
        MemberNames("cache", TWO, ("db",)),
        MemberNames("cache", TWO, ("DB",)),
        MemberNames("cache", TWO, hostname="db"),
        MemberNames("db", TWO),
        MemberNames("cache", ONE, ("db",)),
    ],
)
def test_two_members_with_one_name_are_an_error(second: MemberNames) -> None:
    """Also when they have the same address: readiness and logs go by name."""
    with pytest.raises(InvalidRequest, match="db"):
        name_table((MemberNames("db", ONE), second))


def test_a_member_may_repeat_its_own_names() -> None:
    """People do."""
    assert name_table((MemberNames("db", ONE, ("db", "DB"), hostname="db"),)) == {"db": ONE}
