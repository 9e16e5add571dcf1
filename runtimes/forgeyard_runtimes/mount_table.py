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
    """

    kind: str
    flags: frozenset[str]
    device: str


def parse_mountinfo(text: str) -> dict[str, Mounted]:
    """By mount point; the topmost of several at one point. See proc_pid_mountinfo(5)."""
    found = {}
    for line in text.splitlines():
        fields = line.split(" ")
        kind = fields[fields.index("-") + 1]
        point = _OCTAL.sub(lambda match: chr(int(match[1], 8)), fields[4])
        found[point] = Mounted(kind, frozenset(fields[5].split(",")), fields[2])
    return found
