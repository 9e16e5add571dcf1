"""The spec that Docker's runtime has, in the terms of the bundle it was made of.

Each declared difference is taken back only where it is seen to be exactly that; anything else stays as it was found,
and a comparison with the bundle names it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forgeyard_host.hostnames import hostname_of
from forgeyard_runtimes.docker.differences import KERNEL_SYSCTLS, hidden_in_sys
from forgeyard_runtimes.docker.staging import HOSTNAME, Staged

_FLAGS: Final = ("ro", "nosuid", "nodev", "noexec")


def in_bundle_terms(effective: Mapping[str, Any], bundle: Mapping[str, Any], staged: Staged) -> dict[str, Any]:
    """`effective` with staged sources named by what they are of, and the root put together again.

    :param bundle: the compiled bundle's config.json.
    """
    linux = {**effective["linux"], "sysctl": _own_sysctls(effective["linux"].get("sysctl") or {})}
    mounts, complete = _root_folded(effective["mounts"], bundle, staged)
    mounts = _sources_named(mounts, bundle, staged)
    masked = list(linux.get("maskedPaths") or ())
    mounts, linux["maskedPaths"] = _sys_as_in_bundle(mounts, masked, bundle)
    return {**effective, "mounts": mounts, "linux": linux, "root": _root(effective, bundle, complete=complete)}


def sharing_in_bundle_terms(effective: Mapping[str, Any], pid: int, other: int) -> dict[str, Any]:
    """`effective` of a container that was to share the network of process `other`'s, as one that does.

    :raises SandboxError: NAMESPACE_FAILED, when its host name can't be read.
    """
    there = [
        {"type": "network"} if entry == {"type": "network", "path": f"/proc/{other}/ns/net"} else entry
        for entry in effective["linux"]["namespaces"]
    ]
    # Docker's spec has the other one's name, which was changed since.
    return {**effective, "hostname": hostname_of(pid), "linux": {**effective["linux"], "namespaces": there}}


def _own_sysctls(found: Mapping[str, str]) -> dict[str, str]:
    """Without those that say what a new namespace has anyway."""
    return {name: value for name, value in found.items() if KERNEL_SYSCTLS.get(name) != value}


def _root_folded(
    mounts: Sequence[Mapping[str, Any]], bundle: Mapping[str, Any], staged: Staged
) -> tuple[list[dict[str, Any]], bool]:
    """The mounts without the binds of the root's top; whether all of those are there, with the root's flags."""
    own = {mount["destination"] for mount in bundle["mounts"]}
    wanted = {bind.destination: bind for bind in staged.binds if bind.destination not in own}
    read_only = bool(bundle["root"].get("readonly"))
    rest: list[dict[str, Any]] = []
    folded: set[str] = set()
    for mount in mounts:
        bind = wanted.get(mount["destination"])
        needs = {"nosuid", "nodev", *(["ro"] if read_only or (bind is not None and bind.single) else [])}
        if bind is not None and mount["source"] == bind.source and needs <= set(mount["options"]):
            folded.add(bind.destination)
        elif not _is_dockers_hostname(mount, own):
            rest.append(dict(mount))
    return rest, folded == set(wanted)


def _is_dockers_hostname(mount: Mapping[str, Any], own: set[str]) -> bool:
    """The one file that Docker puts in: the container's own name, read-only."""
    return (
        mount["destination"] == HOSTNAME
        and HOSTNAME not in own
        and "ro" in mount["options"]
        and str(mount["source"]).endswith("/hostname")
    )


def _root(effective: Mapping[str, Any], bundle: Mapping[str, Any], *, complete: bool) -> dict[str, Any]:
    found = dict(effective["root"])
    if complete and found.get("readonly"):
        # Docker's own root has nothing but places and links; what is bound on them is the bundle's root.
        return dict(bundle["root"])
    return found


def _sources_named(mounts: Sequence[dict[str, Any]], bundle: Mapping[str, Any], staged: Staged) -> list[dict[str, Any]]:
    own = {mount["destination"]: mount for mount in bundle["mounts"] if mount["type"] == "bind"}
    sources = {bind.destination: bind.source for bind in staged.binds}
    return [
        _as_staged(mount, own[mount["destination"]])
        if mount["destination"] in own and sources.get(mount["destination"]) == mount["source"]
        else mount
        for mount in mounts
    ]


def _as_staged(mount: dict[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """A staged source is one mount with none below, so that each flag of it holds recursively as well."""
    flags = [flag for flag in mount["options"] if flag in _FLAGS]
    recursive = [f"r{flag}" for flag in flags if f"r{flag}" in wanted["options"]]
    kept = [option for option in mount["options"] if option not in ("bind", "rbind")]
    return {**mount, "source": wanted["source"], "options": ["rbind", *kept, *recursive]}


def _sys_as_in_bundle(
    mounts: Sequence[dict[str, Any]], masked: list[str], bundle: Mapping[str, Any]
) -> tuple[list[dict[str, Any]], list[str]]:
    """sysfs of which everything is masked but what the bundle shows is no more than the bundle's small tmpfs."""
    wanted = next((mount for mount in bundle["mounts"] if mount["destination"] == "/sys"), None)
    more = set(hidden_in_sys(bundle["linux"]["maskedPaths"]))
    if wanted is None or wanted["type"] != "tmpfs" or not more <= set(masked):
        return list(mounts), masked
    changed = [
        dict(wanted)
        if mount["destination"] == "/sys" and mount["type"] == "sysfs" and set(_FLAGS) <= set(mount["options"])
        else mount
        for mount in mounts
    ]
    return changed, [path for path in masked if path not in more]
