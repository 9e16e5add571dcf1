"""Our own network, written as plugins that every distribution has can make it."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any, Final

from forgeyard_networks.cni.attachment import check_name

_VERSION: Final = "1.0.0"  # what the plugins of stable distributions speak


def default_conflist(
    name: str, bridge: str, subnet: IPv4Network, *, masquerade: bool = False, data_dir: str = ""
) -> dict[str, Any]:
    """A conflist for the plugins bridge and host-local.

    It gives what our own path gives a member: an address of `subnet`, its first one as gateway on the bridge, a default
    route. Not what is not in a CNI network: our resolver, proxy and policies. Give each job a subnet and a bridge of
    its own, since whoever shares a bridge can talk.

    :param masquerade: let the subnet out under the host's address.
    :param data_dir: where leases are kept; "" is host-local's own place.
    :raises InvalidRequest: a name that CNI does not allow.
    """
    check_name("cni network", name)
    gateway = str(subnet.network_address + 1)
    ipam: dict[str, Any] = {
        "type": "host-local",
        "ranges": [[{"subnet": str(subnet), "gateway": gateway}]],
        "routes": [{"dst": "0.0.0.0/0"}],
    }
    if data_dir:
        ipam["dataDir"] = data_dir
    plugin = {"type": "bridge", "bridge": bridge, "isGateway": True, "ipMasq": masquerade, "ipam": ipam}
    return {"cniVersion": _VERSION, "name": name, "plugins": [plugin]}
