"""Namespaces, id maps, hidden paths, devices, sysctls: what lies between the container and the host."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any, Final

from forgeyard_runtimes.comparison.findings import Findings, Spec, listed, part

_PROPAGATION: Final = {"private": 0, "unbindable": 0, "slave": 1, "": 1, "shared": 2}
"""How much of later mounts passes; where nothing is said, runtimes make it a slave."""
# What every OCI runtime gives on its own, whatever the spec says (runtime spec, default devices).
DEFAULT_DEVICES: Final = frozenset(
    {
        ("/dev/null", "c", 1, 3),
        ("/dev/zero", "c", 1, 5),
        ("/dev/full", "c", 1, 7),
        ("/dev/random", "c", 1, 8),
        ("/dev/urandom", "c", 1, 9),
        ("/dev/tty", "c", 5, 0),
        ("/dev/console", "c", 5, 1),
        ("/dev/ptmx", "c", 5, 2),
    }
)
_PTS_MAJOR: Final = 136


def compare_isolation(findings: Findings, intended: Spec, effective: Spec) -> None:
    """`linux` without resources and seccomp."""
    _compare_namespaces(findings, intended, effective)
    for name in ("uidMappings", "gidMappings"):
        _compare_mappings(findings, f"linux.{name}", part(intended, name), part(effective, name))
    _compare_paths(findings, intended, effective)
    _compare_propagation(findings, intended, effective)
    _compare_devices(findings, part(intended, "devices") or (), part(effective, "devices") or ())
    _compare_sysctl(findings, part(intended, "sysctl") or {}, part(effective, "sysctl") or {})
    _compare_cgroup(findings, part(intended, "cgroupsPath"), part(effective, "cgroupsPath"))


def _compare_namespaces(findings: Findings, intended: Spec, effective: Spec) -> None:
    wanted, found = (
        {entry["type"]: entry.get("path") or "" for entry in part(spec, "namespaces") or ()}
        for spec in (intended, effective)
    )
    for kind in sorted(wanted.keys() | found.keys()):
        field = f"linux.namespaces.{kind}"
        if kind not in found:
            findings.weaker(field, "shared with the runtime")
        elif kind not in wanted:
            findings.stricter(field, found[kind] or "one of its own")
        elif found[kind] and found[kind] != wanted[kind]:
            findings.weaker(field, f"joins {found[kind]}, intended {wanted[kind] or 'one of its own'}")
        elif wanted[kind] and not found[kind]:
            findings.stricter(field, f"one of its own, intended {wanted[kind]}")


def _compare_mappings(findings: Findings, field: str, intended: Any, effective: Any) -> None:
    wanted, found = _mappings(intended), _mappings(effective)
    if wanted == found:
        return
    if not wanted:
        findings.stricter(field, "ids are mapped")
    elif not found:
        findings.weaker(field, "ids are not mapped")
    elif all(any(_within(inner, outer) for outer in wanted) for inner in found):
        findings.stricter(field, "fewer ids are mapped")
    else:
        findings.weaker(field, f"{sorted(found)}, intended {sorted(wanted)}")


def _mappings(entries: Any) -> set[tuple[int, int, int]]:
    return {(entry.get("containerID", 0), entry.get("hostID", 0), entry.get("size", 0)) for entry in entries or ()}


def _within(inner: tuple[int, int, int], outer: tuple[int, int, int]) -> bool:
    """Whether `inner` maps nothing that `outer` does not map to the same id."""
    shift = inner[0] - outer[0]
    return shift == inner[1] - outer[1] and shift >= 0 and shift + inner[2] <= outer[2]


def _compare_paths(findings: Findings, intended: Spec, effective: Spec) -> None:
    masked = set(part(effective, "maskedPaths") or ())
    readonly = set(part(effective, "readonlyPaths") or ())
    wanted_masked = set(part(intended, "maskedPaths") or ())
    wanted_readonly = set(part(intended, "readonlyPaths") or ())
    _compare_hidden(findings, "linux.maskedPaths", wanted_masked, masked, masked)
    _compare_hidden(findings, "linux.readonlyPaths", wanted_readonly, readonly, masked | readonly)


def _compare_hidden(findings: Findings, field: str, wanted: set[str], found: set[str], covering: set[str]) -> None:
    if wanted == found:
        return
    # A path below one that is hidden as a whole is hidden as well.
    if open_ := {path for path in wanted if not _covered(path, covering)}:
        findings.weaker(field, f"{listed(open_)} not there")
    if more := found - wanted:
        findings.stricter(field, listed(more))


def _covered(path: str, covering: Iterable[str]) -> bool:
    return any(path == above or path.startswith(f"{above.rstrip('/')}/") for above in covering)


def _compare_propagation(findings: Findings, intended: Spec, effective: Spec) -> None:
    wanted, found = (part(spec, "rootfsPropagation") or "" for spec in (intended, effective))
    compare_propagation(findings, "linux.rootfsPropagation", wanted, found)


def compare_propagation(findings: Findings, field: str, wanted: str, found: str) -> None:
    """Compare two words for how mounts propagate; a recursive form counts as the other."""
    ranks = [_PROPAGATION.get(word.removeprefix("r"), 2) for word in (wanted, found)]
    if ranks[1] > ranks[0]:
        findings.weaker(field, f"{found or 'not set'}, intended {wanted or 'not set'}")
    elif ranks[1] < ranks[0]:
        findings.stricter(field, f"{found or 'not set'}, intended {wanted or 'not set'}")


def _compare_devices(findings: Findings, intended: Iterable[Spec], effective: Iterable[Spec]) -> None:
    wanted, found = (
        {(entry["path"], entry["type"], entry.get("major", 0), entry.get("minor", 0)): entry for entry in devices}
        for devices in (intended, effective)
    )
    if more := found.keys() - wanted.keys() - DEFAULT_DEVICES:
        findings.weaker("linux.devices", f"{listed(key[0] for key in more)} not intended")
    if less := wanted.keys() - found.keys():
        findings.stricter("linux.devices", f"{listed(key[0] for key in less)} intended")
    for key in sorted(wanted.keys() & found.keys()):
        _compare_device(findings, f"linux.devices.{key[0]}", wanted[key], found[key])


def _compare_device(findings: Findings, field: str, wanted: Spec, found: Spec) -> None:
    modes = [int(0o666 if (mode := part(device, "fileMode")) is None else mode) for device in (wanted, found)]
    if modes[1] & ~modes[0]:
        findings.weaker(field, f"mode {modes[1]:o}, intended {modes[0]:o}")
    elif modes[0] & ~modes[1]:
        findings.stricter(field, f"mode {modes[1]:o}, intended {modes[0]:o}")
    for name in ("uid", "gid"):
        findings.same(f"{field}.{name}", part(wanted, name) or 0, part(found, name) or 0)


def compare_device_rules(findings: Findings, intended: Iterable[Spec], effective: Iterable[Spec]) -> None:
    """Which devices the control group lets pass: rules in order, later ones win."""
    intended, effective = tuple(intended), tuple(effective)
    wanted, wanted_open = _allowed_devices(intended)
    found, found_open = _allowed_devices(effective)
    field = "linux.resources.devices"
    if found_open and not wanted_open:
        findings.weaker(field, "nothing forbids all devices first")
    elif wanted_open and not found_open:
        findings.stricter(field, "all devices are forbidden first")
    if less_refused := _refused_devices(intended) - _refused_devices(effective):
        findings.weaker(field, f"{listed(map(_device, less_refused))} not refused")
    for key in sorted(found, key=str):
        if more := found[key] - wanted.get(key, frozenset()) - _harmless_access(*key):
            findings.weaker(field, f"{_device(key)} {''.join(sorted(more))} not intended")
    for key in sorted(wanted, key=str):
        if less := wanted[key] - found.get(key, frozenset()):
            findings.stricter(field, f"{_device(key)} {''.join(sorted(less))} intended")


_DeviceKey = tuple[str, int | None, int | None]


def _allowed_devices(rules: Iterable[Spec]) -> tuple[dict[_DeviceKey, frozenset[str]], bool]:
    """Accesses allowed by device, and whether a device without a rule is allowed."""
    allowed: dict[_DeviceKey, frozenset[str]] = {}
    rest = True
    for rule in rules:
        key, access = _device_key(rule), frozenset(rule.get("access") or "rwm")
        if key == ("a", None, None) and access == frozenset("rwm"):
            allowed, rest = {}, bool(rule.get("allow"))
        elif rule.get("allow"):
            allowed[key] = allowed.get(key, frozenset()) | access
        elif key in allowed:
            # A refusal of only a part of what a rule allows leaves the rule as wide as it was.
            allowed[key] -= access
    return allowed, rest


def _refused_devices(rules: Iterable[Spec]) -> set[_DeviceKey]:
    """Devices that a rule of their own refuses."""
    return {key for rule in rules if not rule.get("allow") and (key := _device_key(rule)) != ("a", None, None)}


def _device_key(rule: Spec) -> _DeviceKey:
    return rule.get("type") or "a", _number(rule.get("major")), _number(rule.get("minor"))


def _number(value: int | None) -> int | None:
    """-1 is any number, as is none at all."""
    return None if value is None or value == -1 else value


def _harmless_access(kind: str, major: int | None, minor: int | None) -> frozenset[str]:
    """What runtimes allow everybody: the devices above, terminals, and making nodes, which then can't be opened."""
    if kind == "c" and major == _PTS_MAJOR:
        return frozenset("rwm")
    known = any((kind, major, minor) == device[1:] for device in DEFAULT_DEVICES)
    return frozenset("rwm") if known else frozenset("m") if kind in ("b", "c") else frozenset()


def _device(key: _DeviceKey) -> str:
    return f"{key[0]} {'*' if key[1] is None else key[1]}:{'*' if key[2] is None else key[2]}"


def _compare_sysctl(findings: Findings, intended: Mapping[str, str], effective: Mapping[str, str]) -> None:
    for name in sorted(intended.keys() | effective.keys()):
        findings.same(f"linux.sysctl.{name}", intended.get(name), effective.get(name))


def _compare_cgroup(findings: Findings, intended: str | None, effective: str | None) -> None:
    """An engine's group may lie below the one that was intended: its limits bind there as well."""
    if intended is None or effective is None:
        findings.same("linux.cgroupsPath", intended, effective)
        return
    found = posixpath.normpath(effective)
    if found != intended and not found.startswith(f"{intended.rstrip('/')}/"):
        findings.weaker("linux.cgroupsPath", f"{effective}, intended {intended}")
