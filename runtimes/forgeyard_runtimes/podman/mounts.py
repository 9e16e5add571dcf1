"""A bundle's mounts as Podman takes them.

Podman knows no r-forms of options (``rro``): a mount below a bound directory would keep what it has. So they are
left out where nothing is mounted below the source, or what is there has those flags already; else it is refused.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from forgeyard_runtimes.mount_table import parse_mountinfo

_RECURSIVE: Final = {"rro": "ro", "rnosuid": "nosuid", "rnodev": "nodev", "rnoexec": "noexec"}
_ALWAYS_DEFAULT: Final = {"nosuid": "suid", "nodev": "dev", "noexec": "exec"}
"""Options that Podman adds to a tmpfs which has neither of the pair."""
_KINDS: Final = ("bind", "tmpfs", "proc", "devpts", "mqueue", "cgroup")
_PLAIN: Final = frozenset(
    {"bind", "rbind", "private", "rprivate", "ro", "rw", "nosuid", "suid", "nodev", "dev", "noexec", "exec"}
    | {"newinstance"}
)
_WITH_VALUE: Final = ("mode=", "size=", "gid=", "ptmxmode=")
CGROUP: Final = "/sys/fs/cgroup"


@dataclass(frozen=True, slots=True)
class HostMounts:
    """Mount points by path, each with the flags of its mount.

    :param spreading: those where mounts made elsewhere later may appear.
    """

    flags: Mapping[str, frozenset[str]]
    spreading: frozenset[str] = frozenset()

    @classmethod
    def read(cls, pid: int | str = "self") -> HostMounts:
        """Those that process `pid` sees. Of several at one path the last counts: it hides the others.

        :raises OSError: when there is no such process.
        """
        seen = parse_mountinfo(Path(f"/proc/{pid}/mountinfo").read_bytes().decode("utf-8", "surrogateescape"))
        spreading = frozenset(point for point, mount in seen.items() if mount.spreads & {"shared", "master"})
        return cls({point: mount.flags for point, mount in seen.items()}, spreading)

    def lacking(self, top: str, flags: frozenset[str], *, but: frozenset[str] = frozenset()) -> list[str]:
        """Mount points below `top` without one of `flags`; those in `but`, and what is below them, don't count."""
        start = top.rstrip("/") + "/"
        return [
            point
            for point, has in self.flags.items()
            if point.startswith(start) and flags - has and not any(_within(point, other) for other in but)
        ]


def _within(point: str, top: str) -> bool:
    return point == top or point.startswith(top + "/")


def recursive_flags(mount: Mapping[str, Any]) -> frozenset[str]:
    """What a mount's r-forms ask of all mounts below it."""
    return frozenset(_RECURSIVE[option] for option in mount.get("options", ()) if option in _RECURSIVE)


def uncarried_mounts(mounts: Sequence[Mapping[str, Any]], host: HostMounts) -> tuple[str, ...]:
    """Mounts and options that Podman can't make, by their names in config.json."""
    found = []
    for mount in mounts:
        name = f"mounts[{mount['destination']}]"
        if mount["type"] not in _KINDS:
            found.append(f"{name}.type={mount['type']}")
        flags = recursive_flags(mount)
        if flags and (open_below := host.lacking(mount["source"], flags)):
            found.append(f"{name}.options: r-forms, for {open_below[0]}")
        found += [f"{name}.options={option}" for option in mount.get("options", ()) if not _known(option)]
    return tuple(found)


def _known(option: str) -> bool:
    return option in _PLAIN or option in _RECURSIVE or option.startswith(_WITH_VALUE)


def translate_mounts(spec: Mapping[str, Any], *, hybrid_cgroups: bool) -> list[dict[str, Any]]:
    """The mounts of a SpecGenerator, each in place of Podman's own at that destination."""
    root = spec["process"]["user"]["uid"] == 0
    return [
        _hidden_cgroup(mount) if root and hybrid_cgroups and mount["type"] == "cgroup" else _translated(mount)
        for mount in spec["mounts"]
    ]


def _translated(mount: Mapping[str, Any]) -> dict[str, Any]:
    options = [option for option in mount.get("options", ()) if option not in _RECURSIVE]
    # /dev goes to the OCI runtime as it is.
    if mount["type"] == "tmpfs" and mount["destination"] != "/dev":
        # Not its own: content of the image below it copied up, and flags that nobody asked for.
        options += [its for ours, its in _ALWAYS_DEFAULT.items() if ours not in options and its not in options]
        options.append("notmpcopyup")
    return {
        "destination": mount["destination"],
        "type": mount["type"],
        "source": mount["source"],
        "options": options,
    }


def _hidden_cgroup(mount: Mapping[str, Any]) -> dict[str, Any]:
    """On cgroup v1 the directory that holds the hierarchies stays writable for the container's root.

    Podman has no list of read-only paths to cover it with, so that such a container sees an empty one instead.
    """
    return {
        "destination": mount["destination"],
        "type": "tmpfs",
        "source": "tmpfs",
        "options": ["nosuid", "nodev", "noexec", "ro", "mode=755", "size=4096", "notmpcopyup"],
    }
