"""What CNI names things by, and which names it allows (CNI specification, "Parameters")."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Self

from forgeyard_model.errors import InvalidRequest

OURS: Final = "fy-"
"""How the ids of our containers begin."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_IFNAME: Final = re.compile(r"[^\s/:\x00]{1,15}")
_LONGEST: Final = 100  # three of them make one file name


@dataclass(frozen=True, slots=True)
class Attachment:
    """One interface of one container on one network: the key of everything that CNI keeps."""

    network: str
    container: str
    ifname: str

    @classmethod
    def checked(cls, network: str, container: str, ifname: str) -> Self:
        """With names that CNI allows.

        :raises InvalidRequest: names the one that it does not.
        """
        check_name("cni network", network)
        check_name("cni container id", container)
        if not _IFNAME.fullmatch(ifname) or ifname in (".", ".."):
            cure = "write 1 to 15 characters without spaces, slashes or colons, such as eth0"
            raise InvalidRequest("cni interface", ifname, cure)
        return cls(network, container, ifname)

    @property
    def key(self) -> str:
        """As a file name. A colon is in none of its parts, so that two attachments never share one."""
        return f"{self.network}:{self.container}:{self.ifname}"

    @classmethod
    def from_key(cls, key: str) -> Self | None:
        """Read `key` back; None when it is none."""
        parts = key.split(":")
        if len(parts) != 3:
            return None
        try:
            return cls.checked(*parts)
        except InvalidRequest:
            return None


def check_name(field: str, value: str) -> None:
    """Refuse what is no name of a network or a container.

    :raises InvalidRequest: it names `field`.
    """
    if not _NAME.fullmatch(value) or len(value) > _LONGEST:
        raise InvalidRequest(field, value, f"begin with a letter or digit, then up to {_LONGEST} letters, digits, ._-")


def cni_args(values: Mapping[str, str]) -> str:
    """`values` as CNI_ARGS: pairs between semicolons, with no way to write a semicolon in one.

    :raises InvalidRequest: for a pair that would be read as something else.
    """
    for name, value in values.items():
        if not name or set(name) & set("=;\0") or set(value) & set(";\0"):
            raise InvalidRequest("cni args", f"{name}={value}", "leave out semicolons, and equal signs in names")
    return ";".join(f"{name}={value}" for name, value in values.items())
