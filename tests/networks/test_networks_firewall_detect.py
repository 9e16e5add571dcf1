"""Which backend is chosen, on hosts as they come: one program, the other, both, or rules that can't be listed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeyard_host.netns import NetNamespace, in_namespace, new_namespace
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_networks.firewall.detect import detect, host_backend, router_backend
from forgeyard_networks.firewall.iptables_host import IptablesHost
from forgeyard_networks.firewall.nft_host import NftHost

pytestmark = pytest.mark.kernel

LEGACY = ("iptables-legacy", "iptables-legacy-restore", "ip6tables-legacy-restore", "iptables-legacy-save")
THROUGH_NFT = ("iptables-nft", "iptables-nft-restore", "ip6tables-nft-restore", "iptables-nft-save")


@pytest.fixture
def host() -> Iterator[NetNamespace]:
    made = new_namespace()
    yield made
    made.close()


def programs(directory: Path, *names: str) -> str:
    """A PATH with these programs alone."""
    for name in names:
        found = shutil.which(name, path="/usr/sbin:/sbin:/usr/bin")
        assert found is not None
        (directory / name).symlink_to(found)
    return str(directory)


def test_this_host_is_detected_by_use(host: NetNamespace) -> None:
    """A router's rules were loaded and read back, NFLOG and sets used; capabilities say with what."""
    found = detect(host.fd)
    assert found.nflog
    assert found.routers.version
    assert found.routers.name in found.summary
    assert f"host: {found.host.name}" in found.summary


def test_a_host_with_one_program_uses_that(tmp_path: Path) -> None:
    """Only iptables-legacy, only iptables-nft, only nft: each is enough, for the host and for routers."""
    for number, (names, host_type, router) in enumerate(
        (
            (LEGACY, IptablesHost, "iptables-legacy"),
            (THROUGH_NFT, IptablesHost, "iptables-nft"),
            (("nft",), NftHost, "nft"),
            ((*THROUGH_NFT, "nft"), NftHost, "nft"),
        )
    ):
        directory = tmp_path / str(number)
        directory.mkdir()
        path = programs(directory, *names)
        host = host_backend(path)
        assert type(host) is host_type
        assert host.name == (router if host_type is IptablesHost else "nft")
        assert router_backend(path)[0].name == router


def test_a_host_without_any_program_is_refused(tmp_path: Path) -> None:
    """No program, no network with rules: a typed error that says what to install."""
    for attempt in (host_backend, router_backend):
        with pytest.raises(SandboxError) as caught:
            attempt(str(tmp_path))
        assert (caught.value.kind, caught.value.reason) == (
            SandboxErrorKind.NETWORK_SETUP_FAILED,
            "no_firewall_program",
        )
        assert "nftables" in caught.value.resolution


def test_a_native_table_that_iptables_can_not_list(host: NetNamespace, tmp_path: Path) -> None:
    """A VPN's own `table ip nat`: with nft it is no obstacle; with iptables-nft alone the error names that backend."""
    table = "table ip nat {\nchain x {\nct state new accept\n}\n}\n"
    in_namespace(host.fd, lambda: subprocess.run(["nft", "-f", "-"], input=table.encode(), check=True))
    assert detect(host.fd).host.name == "nft"
    with pytest.raises(SandboxError) as caught:
        detect(host.fd, path=programs(tmp_path, *THROUGH_NFT))
    assert (caught.value.kind, caught.value.reason) == (
        SandboxErrorKind.NETWORK_SETUP_FAILED,
        "backend_incompatible",
    )
    assert caught.value.brief.startswith("iptables-nft: ")
    assert "nft" in caught.value.resolution


def test_python_iptables_is_not_imported_before_a_table_has_to_be_changed(host: NetNamespace) -> None:
    """Its import takes longer than a job: detection, routers and a look at the rules do without."""
    script = (
        "import sys\n"
        "from ipaddress import IPv4Network\n"
        "import forgeyard_networks.firewall.probe\n"
        "from forgeyard_networks.firewall.detect import detect\n"
        "from forgeyard_networks.firewall.host import host_rules\n"
        "from forgeyard_networks.firewall.iptables_host import IptablesHost\n"
        "detect()\n"
        "IptablesHost('legacy').problems(host_rules([IPv4Network('10.213.0.0/16')]))\n"
        "sys.exit('iptc' in sys.modules)\n"
    )
    done = in_namespace(host.fd, lambda: subprocess.run([sys.executable, "-c", script], check=False))
    assert done.returncode == 0
