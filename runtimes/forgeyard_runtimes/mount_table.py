"""The mounts that a process sees, as the kernel lists them."""

from __future__ import annotations

import re
from typing import Final, NamedTuple

_OCTAL: Final = re.compile(r"\\([0-7]{3})")
"""How the kernel writes a blank, a tab, a newline and a backslash in a path."""


class Mounted(NamedTuple):
    """One mount.

    :param flags: its own, such as ``ro`` and ``nosuid``; not its file system's.
    :param device: ``MAJOR:MINOR`` of its file system.
    :param spreads: ``shared``, ``master`` and the like: to and from which mounts what is mounted below goes.
    """

    kind: str
    flags: frozenset[str]
    device: str
    spreads: frozenset[str]


def parse_mountinfo(text: str) -> dict[str, Mounted]:
    """By mount point; the topmost of several at one point. See proc_pid_mountinfo(5)."""
    found = {}
    for line in text.splitlines():
        fields = line.split(" ")
        end = fields.index("-", 6)
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        spreads = frozenset(tag.partition(":")[0] for tag in fields[6:end])
        found[point] = Mounted(fields[end + 1], frozenset(fields[5].split(",")), fields[2], spreads)
    return found
