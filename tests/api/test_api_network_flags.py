"""--network, --allow and --services-from, from words to policies."""

from __future__ import annotations

from pathlib import Path

import pytest

from forgeyard_api.network_flags import network_policy, parse_destination, services_from
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.policy import NetworkDestination, NetworkMode, NetworkPolicy


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("pypi.example.org", NetworkDestination(host="pypi.example.org")),
        ("*.example.org:443", NetworkDestination(host="*.example.org", ports=(443,))),
        ("10.20.0.0/16:5432", NetworkDestination(cidr="10.20.0.0/16", ports=(5432,))),
        ("192.0.2.7", NetworkDestination(cidr="192.0.2.7/32")),
    ],
)
def test_destinations(text: str, found: NetworkDestination) -> None:
    """A name or a network, with a port or without."""
    assert parse_destination(text) == found


@pytest.mark.parametrize(
    "text", ["", ":443", "a b", "example.org:http", "10.20.0.1/16", "::1", "example.org:0", "*.*.x"]
)
def test_what_is_no_destination(text: str) -> None:
    """Refused with the flag's name."""
    with pytest.raises(InvalidRequest) as refused:
        parse_destination(text)
    assert refused.value.field == "--allow"


def test_policies_of_flags() -> None:
    """--allow alone is restricted; restricted alone says too little; other modes take no destinations."""
    assert network_policy(None, ()) is None
    assert network_policy("allow", ()) == NetworkPolicy.allow()
    named = network_policy(None, ("a.example:1", "b.example"))
    assert named is not None
    assert named.mode is NetworkMode.RESTRICTED
    assert named == network_policy("restricted", ("a.example:1", "b.example"))
    for name, allow in (("restricted", ()), ("deny", ("a.example",)), ("conflist", ()), ("open", ())):
        with pytest.raises(InvalidRequest):
            network_policy(name, allow)


def test_services_of_another_file(tmp_path: Path) -> None:
    """A GitLab file's services for one job, by FILE:JOB; what can't be read is named with the file."""
    file = tmp_path / "ci.yml"
    file.write_text("test:\n  services: [{name: 'redis:7', alias: cache}]\n  script: [x]\n")
    (service,), _ = services_from(f"{file}:test")
    assert (service.image, "cache" in service.names) == ("redis:7", True)
    with pytest.raises(InvalidRequest, match="absent"):
        services_from(f"{tmp_path}/absent.yml")
    with pytest.raises(InvalidRequest, match="--services-from"):
        services_from(f"{file}:no-such-job")
