"""Mounts: what of the host can be seen, what can be written, and what on it can be executed."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from forgeyard_runtimes.comparison.findings import Findings, Spec
from forgeyard_runtimes.comparison.isolation import compare_propagation

_FLAGS: Final = ("ro", "nosuid", "nodev", "noexec")
_OPPOSITES: Final = {"rw": "ro", "suid": "nosuid", "dev": "nodev", "exec": "noexec"}
# The forms with an r in front reach what is mounted below as well.
_SETS: Final = {flag: (flag,) for flag in _FLAGS} | {f"r{flag}": (flag, f"r{flag}") for flag in _FLAGS}
_CLEARS: Final = {word: (flag,) for word, flag in _OPPOSITES.items()} | {
    f"r{word}": (flag, f"r{flag}") for word, flag in _OPPOSITES.items()
}
_PROPAGATION: Final = frozenset(
    prefix + word for prefix in ("", "r") for word in ("private", "slave", "shared", "unbindable")
)
_UNITS: Final = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30}
_TMPFS_MODE: Final = 0o1777
_HARMLESS_TMPFS: Final = frozenset({"tmpfs", "ramfs"})


@dataclass(frozen=True, slots=True)
class _Mount:
    """One mount, its options sorted by what they are.

    :param flags: of _FLAGS, for a bind also with an r in front, for what is mounted below it.
    :param size: bytes; None where it says nothing.
    """

    destination: str
    kind: str
    source: str
    flags: frozenset[str]
    propagation: str
    recursive: bool
    size: int | None
    mode: int | None
    inodes: str | None


def compare_mounts(findings: Findings, intended: Sequence[Spec], effective: Sequence[Spec]) -> None:
    """All mounts, by destination. Order counts only where one could hide another."""
    if list(intended) == list(effective):
        return
    found_in_order = [_parsed(mount) for mount in effective]
    wanted, found = _by_destination(map(_parsed, intended)), _by_destination(found_in_order)
    for destination in sorted(wanted.keys() | found.keys()):
        if destination not in found:
            findings.weaker(f"mounts.{destination}", "not there")
        elif destination not in wanted:
            _judge_extra(findings, found[destination])
        else:
            _compare_mount(findings, wanted[destination], found[destination])
    _find_hidden(findings, wanted, found_in_order)


def is_bind(kind: str, options: Iterable[str]) -> bool:
    """Whether a mount is a bind, however it is written."""
    return kind in ("bind", "rbind") or not {"bind", "rbind"}.isdisjoint(options)


def _by_destination(mounts: Iterable[_Mount]) -> dict[str, _Mount]:
    """The last at each place, which is the one that shows."""
    return {mount.destination: mount for mount in mounts}


def _judge_extra(findings: Findings, mount: _Mount) -> None:
    field = f"mounts.{mount.destination}"
    if mount.kind in _HARMLESS_TMPFS and "ro" in mount.flags:
        findings.stricter(field, "an empty, read-only file system")
    else:
        how = "read-only" if "ro" in mount.flags else "writable"
        findings.weaker(field, f"{how} {mount.kind} of {mount.source or 'nothing'}, not intended")


def _compare_mount(findings: Findings, wanted: _Mount, found: _Mount) -> None:
    if wanted == found:
        return
    field = f"mounts.{wanted.destination}"
    findings.same(f"{field}.type", wanted.kind, found.kind)
    if wanted.kind == "bind":
        findings.same(f"{field}.source", wanted.source, found.source)
        _compare_recursion(findings, field, wanted, found)
    for flag in sorted(wanted.flags - found.flags):
        findings.weaker(f"{field}.{flag}", "not set")
    for flag in sorted(found.flags - wanted.flags):
        findings.stricter(f"{field}.{flag}", "set")
    compare_propagation(findings, f"{field}.propagation", wanted.propagation, found.propagation)
    _compare_data(findings, field, wanted, found)


def _compare_recursion(findings: Findings, field: str, wanted: _Mount, found: _Mount) -> None:
    if found.recursive and not wanted.recursive:
        findings.weaker(f"{field}.rbind", "what is mounted below the source comes along")
    elif wanted.recursive and not found.recursive:
        findings.stricter(f"{field}.rbind", "what is mounted below the source does not come along")


def _compare_data(findings: Findings, field: str, wanted: _Mount, found: _Mount) -> None:
    findings.at_most(f"{field}.size", wanted.size, found.size)
    modes = [_TMPFS_MODE if mount.mode is None else mount.mode for mount in (wanted, found)]
    if modes[1] & ~modes[0]:
        findings.weaker(f"{field}.mode", f"{modes[1]:o}, intended {modes[0]:o}")
    elif modes[0] & ~modes[1]:
        findings.stricter(f"{field}.mode", f"{modes[1]:o}, intended {modes[0]:o}")
    if wanted.inodes is not None:
        findings.same(f"{field}.nr_inodes", wanted.inodes, found.inodes)


def _find_hidden(findings: Findings, wanted: dict[str, _Mount], found: Sequence[_Mount]) -> None:
    """A mount made after one below it covers that: a cover over a part of a directory would be off again."""
    for position, mount in enumerate(found):
        below = mount.destination.rstrip("/") + "/"
        for earlier in found[:position]:
            if earlier.destination.startswith(below) and earlier.destination in wanted:
                findings.weaker(f"mounts.{earlier.destination}", f"hidden by {mount.destination}")


def _parsed(mount: Spec) -> _Mount:
    options: list[str] = list(mount.get("options") or ())
    bind = is_bind(mount.get("type") or "", options)
    kind = "bind" if bind else mount.get("type") or ""
    recursive = "rbind" in options or mount.get("type") == "rbind"
    values = dict(option.split("=", 1) for option in options if "=" in option)
    propagation = [option for option in options if option in _PROPAGATION]
    return _Mount(
        destination=posixpath.normpath(mount["destination"]),
        kind=kind,
        source=posixpath.normpath(mount.get("source") or "/") if bind else "",
        flags=_flags(options, bind=bind, recursive=recursive),
        propagation=propagation[-1] if propagation else ("" if bind else "private"),
        recursive=recursive,
        size=_size(values.get("size")),
        mode=int(values["mode"], 8) if "mode" in values else None,
        inodes=values.get("nr_inodes"),
    )


def _flags(options: Iterable[str], *, bind: bool, recursive: bool) -> frozenset[str]:
    """Flags that hold in the end, each word undoing its opposite; for a bind also as they hold below its top."""
    held: set[str] = set()
    for option in options:
        if option in _SETS:
            held.update(_SETS[option])
        elif option in _CLEARS:
            held.difference_update(_CLEARS[option])
    if not bind:
        return frozenset(held & set(_FLAGS))
    # Nothing comes along below, so nothing there lacks a flag.
    return frozenset(held if recursive else {*held, *(f"r{flag}" for flag in held & set(_FLAGS))})


def _size(text: str | None) -> int | None:
    """Bytes of a size option; a part of the memory (``50%``) counts as no limit of its own."""
    if text is None or text.endswith("%"):
        return None
    unit = text[-1].lower() if text[-1].isalpha() else ""
    return int(text.removesuffix(text[-1]) if unit else text) * _UNITS[unit] or None
