"""What a bundle says, field by field, by the names that a comparison has for them: the rows where nothing differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from forgeyard_runtimes.comparison.findings import Spec, listed, part
from forgeyard_runtimes.comparison.process import CAPABILITY_SETS


def intended_fields(spec: Spec) -> Iterator[tuple[str, str]]:
    """Each field of a compiled config.json that `compare` looks at, and its value in words."""
    yield from _process(part(spec, "process") or {})
    yield "root.path", str(part(spec, "root", "path"))
    yield "root.readonly", _switch(part(spec, "root", "readonly"))
    yield "hostname", str(part(spec, "hostname"))
    for mount in part(spec, "mounts") or ():
        yield f"mounts.{mount['destination']}", f"{mount['type']} {','.join(mount.get('options') or ())}".rstrip()
    yield "hooks", listed(part(spec, "hooks") or ()) or "none"
    yield from _isolation(part(spec, "linux") or {})
    yield from _resources(part(spec, "linux", "resources") or {})
    yield from _seccomp(part(spec, "linux", "seccomp"))


def _process(process: Spec) -> Iterator[tuple[str, str]]:
    for name in CAPABILITY_SETS:
        yield f"process.capabilities.{name}", listed(part(process, "capabilities", name) or ()) or "none"
    yield "process.noNewPrivileges", _switch(part(process, "noNewPrivileges"))
    yield "process.user", ", ".join(f"{name} {value}" for name, value in (part(process, "user") or {}).items())
    for limit in part(process, "rlimits") or ():
        yield f"process.rlimits.{limit['type']}", f"{limit['soft']} soft, {limit['hard']} hard"
    yield "process.args", " ".join(part(process, "args") or ())
    yield "process.cwd", str(part(process, "cwd"))
    if (score := part(process, "oomScoreAdj")) is not None:
        yield "process.oomScoreAdj", str(score)


def _isolation(linux: Spec) -> Iterator[tuple[str, str]]:
    for entry in part(linux, "namespaces") or ():
        yield f"linux.namespaces.{entry['type']}", entry.get("path") or "one of its own"
    for name in ("uidMappings", "gidMappings"):
        if mappings := part(linux, name):
            yield f"linux.{name}", ", ".join(map(_mapping, mappings))
    for name in ("maskedPaths", "readonlyPaths"):
        yield f"linux.{name}", f"{len(part(linux, name) or ())} paths"
    yield "linux.rootfsPropagation", part(linux, "rootfsPropagation") or "the runtime's"
    yield "linux.devices", listed(device["path"] for device in part(linux, "devices") or ()) or "no others"
    for name, value in (part(linux, "sysctl") or {}).items():
        yield f"linux.sysctl.{name}", value
    yield "linux.cgroupsPath", str(part(linux, "cgroupsPath"))


def _mapping(entry: Spec) -> str:
    return f"{entry['containerID']} is {entry['hostID']}, {entry['size']} ids"


def _resources(resources: Spec) -> Iterator[tuple[str, str]]:
    for group, name in (
        ("memory", "limit"),
        ("memory", "swap"),
        ("pids", "limit"),
        ("cpu", "quota"),
        ("cpu", "shares"),
    ):
        if (value := part(resources, group, name)) is not None:
            yield f"linux.resources.{group}.{name}", str(value)
    yield "linux.resources.devices", f"{len(part(resources, 'devices') or ())} rules"


def _seccomp(profile: Any) -> Iterator[tuple[str, str]]:
    if not profile:
        yield "linux.seccomp", "no filter"
        return
    yield "linux.seccomp.defaultAction", profile["defaultAction"]
    yield "linux.seccomp.defaultErrnoRet", str(profile.get("defaultErrnoRet"))
    calls = {name for rule in part(profile, "syscalls") or () for name in rule["names"]}
    yield "linux.seccomp.syscalls", f"rules for {len(calls)} calls"


def _switch(value: Any) -> str:
    return "on" if value else "off"
