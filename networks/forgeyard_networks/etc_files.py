"""Text of /etc/hosts, /etc/resolv.conf and /etc/hostname of a member: generated, whatever an image has there."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Final

from forgeyard_networks.names import MemberNames, check_name, name_table

_LOCAL: Final = "127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n"
# Nothing listens there, so a look-up fails at once; without any server both C libraries would ask there as well,
# and some programs would then bring a public one of their own.
_NO_SERVER: Final = "nameserver 127.0.0.1\noptions timeout:1 attempts:1\n"


def hosts_text(own: MemberNames, members: Sequence[MemberNames] = ()) -> str:
    """/etc/hosts of `own`: the machine itself, then every member; a program finds its own name and its neighbours.

    :param members: all of the network; whether `own` is among them makes no difference.
    :raises InvalidRequest: a name that is none, or one that two members have.
    """
    others = tuple(member for member in members if member.name != own.name)
    name_table((own, *others))
    lines = (f"{member.address}\t{' '.join(member.all())}\n" for member in (own, *others))
    return _LOCAL + "".join(lines)


def resolv_text(server: IPv4Address | None) -> str:
    """/etc/resolv.conf for the resolver at `server`; None: for a network in which nobody answers."""
    return _NO_SERVER if server is None else f"nameserver {server}\n"


def hostname_text(hostname: str) -> str:
    """/etc/hostname.

    :raises InvalidRequest: not a host name.
    """
    return f"{check_name(hostname, 'hostname')}\n"
