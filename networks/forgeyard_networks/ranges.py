"""Networks that no policy opens unless it names them."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Final

PRIVATE_NETWORKS: Final = tuple(
    IPv4Network(text)
    for text in (
        "0.0.0.0/8",
        "10.0.0.0/8",
        "100.64.0.0/10",
        "127.0.0.0/8",
        "169.254.0.0/16",
        "172.16.0.0/12",
        "192.0.0.0/24",
        "192.168.0.0/16",
        "198.18.0.0/15",
        "224.0.0.0/4",
        "240.0.0.0/4",
    )
)
"""Closed in every mode unless a policy names them: what is not the internet (RFC 6890), multicast and broadcast."""
