"""A bundle as the SpecGenerator of libpod's API. Pure but for two looks at the host: mounts, and limits.

What Podman adds by itself is switched off where it has a switch. What it has none for is in NOTES: it adds, and
never takes away from the isolation. What of a bundle it can't say is named by `uncarried`, and refused at create.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from forgeyard_runtimes.podman.mounts import HostMounts, translate_mounts, uncarried_mounts

DECLARED: Final = frozenset(
    {"mounts./run/.containerenv", "mounts./etc/hostname", "mounts./sys/fs/cgroup.type"}
    | {"process.rlimits.RLIMIT_NOFILE"}
)
"""What a comparison with the bundle may find, by its names of fields.

Two read-only files of Podman's own; an empty directory in place of cgroups for the container's root (see mounts.py);
and where the bundle limits no open files, the service's own limit. Beside it PID 1 has HOSTNAME in its environment,
which no step sees.
"""
DECLARED_STRICTER: Final[Mapping[str, str]] = {
    "linux.readonlyPaths": "/proc/asound is read-only as well",
    "mounts./sys/fs/cgroup": "where the container's root sees an empty directory in place of its cgroup, that is small",
}
"""Fields that a comparison with the bundle finds stricter, in every job, and what that means."""
_MASKED_BY_ITSELF: Final = frozenset(
    {"/proc/acpi", "/proc/kcore", "/proc/keys", "/proc/latency_stats", "/proc/timer_list", "/proc/timer_stats"}
    | {"/proc/sched_debug", "/proc/scsi", "/sys/firmware", "/sys/fs/selinux", "/sys/dev/block"}
)
_READONLY_BY_ITSELF: Final = frozenset(
    {"/proc/asound", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
)
_NAMESPACES: Final = {
    "pid": "pidns",
    "ipc": "ipcns",
    "uts": "utsns",
    "cgroup": "cgroupns",
    "user": "userns",
    "network": "netns",
}
_TOP: Final = frozenset(("ociVersion", "process", "root", "hostname", "mounts", "linux", "annotations"))
_PROCESS: Final = frozenset(
    ("args", "capabilities", "cwd", "env", "noNewPrivileges", "rlimits", "terminal", "user", "oomScoreAdj")
)
_LINUX: Final = frozenset(
    {"cgroupsPath", "gidMappings", "maskedPaths", "namespaces", "readonlyPaths", "resources"}
    | {"rootfsPropagation", "seccomp", "sysctl", "uidMappings"}
)


@dataclass(frozen=True, slots=True)
class Around:
    """What a container needs beside its bundle.

    :param seccomp: path of a file with the bundle's filter, which the service reads.
    :param labels: by which a person or a sweep finds it.
    :param pod: the pod it belongs to, if any.
    :param inherited: what PID 1 would inherit from the service, by kernel name: Podman would set others.
    """

    name: str
    seccomp: str
    labels: Mapping[str, str]
    pod: str | None
    inherited: Mapping[str, int]
    hybrid_cgroups: bool


def uncarried(spec: Mapping[str, Any], mounts: HostMounts) -> tuple[str, ...]:
    """The fields of a bundle that a container of Podman's would not have, by their names in config.json."""
    process, linux = spec["process"], spec["linux"]
    found = [*_unknown("", spec, _TOP), *_unknown("process.", process, _PROCESS), *_unknown("linux.", linux, _LINUX)]
    found += _uncarried_namespaces(linux)
    if process.get("terminal"):
        found.append("process.terminal")
    if not process.get("noNewPrivileges"):
        found.append("process.noNewPrivileges")
    if linux.get("rootfsPropagation", "private") not in ("private", "rprivate"):
        found.append("linux.rootfsPropagation")
    if linux.get("uidMappings") and not linux.get("gidMappings"):
        found.append("linux.gidMappings")
    found += _uncarried_capabilities(process)
    written = frozenset(linux.get("readonlyPaths", ())) - _READONLY_BY_ITSELF - _read_only_mounts(spec)
    found += [f"linux.readonlyPaths[{path}]" for path in sorted(written)]
    return (*found, *uncarried_mounts(spec["mounts"], mounts))


def _unknown(prefix: str, part: Mapping[str, Any], known: frozenset[str]) -> list[str]:
    return [prefix + name for name in sorted(part) if name not in known and part[name]]


def _uncarried_namespaces(linux: Mapping[str, Any]) -> list[str]:
    found = []
    kinds = {entry["type"]: entry.get("path") for entry in linux["namespaces"]}
    for kind, path in kinds.items():
        if kind not in (*_NAMESPACES, "mount"):
            found.append(f"linux.namespaces[{kind}]")
        elif path is not None and kind != "network":
            # A user namespace joined by path comes without its maps, and runc 1.1 then finds every id unmapped.
            found.append(f"linux.namespaces[{kind}].path")
    # Podman has no container without these.
    found += [f"linux.namespaces[{kind}]" for kind in ("mount", "pid", "ipc", "uts", "cgroup") if kind not in kinds]
    return found


def _uncarried_capabilities(process: Mapping[str, Any]) -> list[str]:
    """Podman has one list. For uid 0 it becomes the bounding, effective and permitted sets; for others none."""
    sets = process.get("capabilities", {})
    held = set(sets.get("bounding", ()))
    found = [f"process.capabilities.{name}" for name in ("inheritable", "ambient") if sets.get(name)]
    found += [f"process.capabilities.{name}" for name in ("effective", "permitted") if set(sets.get(name, ())) != held]
    if held and process["user"]["uid"] != 0:
        found.append("process.capabilities.bounding")
    return found


def _read_only_mounts(spec: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(mount["destination"] for mount in spec["mounts"] if "ro" in mount.get("options", ()))


def translate(spec: Mapping[str, Any], around: Around) -> dict[str, Any]:
    """The body of ``POST /libpod/containers/create`` for a bundle that is carried whole."""
    return {
        "name": around.name,
        **({} if around.pod is None else {"pod": around.pod}),
        "labels": dict(around.labels),
        "annotations": dict(spec.get("annotations", {})),
        **_process(spec["process"], around.inherited),
        **_root(spec, hybrid_cgroups=around.hybrid_cgroups),
        **_namespaces(spec["linux"], spec["hostname"]),
        **_isolation(spec["linux"], around.seccomp),
        **_nothing_of_its_own(),
    }


def _process(process: Mapping[str, Any], inherited: Mapping[str, int]) -> dict[str, Any]:
    user = process["user"]
    return {
        "entrypoint": [],
        "command": list(process["args"]),
        "env": dict(entry.split("=", 1) for entry in process["env"]),
        "unsetenvall": True,
        "user": f"{user['uid']}:{user['gid']}",
        "groups": [str(group) for group in user.get("additionalGids", ())],
        "umask": f"{user.get('umask', 0o22):04o}",
        "work_dir": process["cwd"],
        "no_new_privileges": True,
        "cap_drop": ["ALL"],
        "cap_add": list(process.get("capabilities", {}).get("bounding", ())),
        "r_limits": _rlimits(process.get("rlimits", ()), inherited),
        **({"oom_score_adj": process["oomScoreAdj"]} if "oomScoreAdj" in process else {}),
    }


def _rlimits(wanted: Iterable[Mapping[str, Any]], inherited: Mapping[str, int]) -> list[dict[str, Any]]:
    """Podman writes them as ulimit has them, without the prefix."""
    limits = {name: (value, value) for name, value in inherited.items()}
    limits.update({limit["type"]: (limit["soft"], limit["hard"]) for limit in wanted})
    return [
        {"type": name.removeprefix("RLIMIT_").lower(), "soft": soft, "hard": hard}
        for name, (soft, hard) in sorted(limits.items())
    ]


def _root(spec: Mapping[str, Any], *, hybrid_cgroups: bool) -> dict[str, Any]:
    return {
        "rootfs": spec["root"]["path"],
        "rootfs_overlay": False,
        "read_only_filesystem": bool(spec["root"].get("readonly")),
        "image_volume_mode": "ignore",
        "mounts": translate_mounts(spec, hybrid_cgroups=hybrid_cgroups),
        "devices": [],
        "use_image_hosts": True,
        "use_image_resolve_conf": True,
        "manage_password": False,
    }


def _namespaces(linux: Mapping[str, Any], hostname: str) -> dict[str, Any]:
    kinds = {entry["type"]: entry.get("path") for entry in linux["namespaces"]}
    fields: dict[str, Any] = {
        field: {"nsmode": "private"} for kind, field in _NAMESPACES.items() if kind not in ("network", "user")
    }
    fields["netns"] = _network(kinds)
    fields["userns"] = {"nsmode": "private" if "user" in kinds else "host"}
    if "user" in kinds:
        fields["idmappings"] = {
            "HostUIDMapping": False,
            "HostGIDMapping": False,
            "AutoUserNs": False,
            "UIDMap": _map(linux["uidMappings"]),
            "GIDMap": _map(linux["gidMappings"]),
        }
    return {"hostname": hostname, **fields}


def _network(kinds: Mapping[str, str | None]) -> dict[str, str]:
    if "network" not in kinds:
        return {"nsmode": "host"}
    path = kinds["network"]
    return {"nsmode": "none"} if path is None else {"nsmode": "path", "value": path}


def _map(mappings: Sequence[Mapping[str, int]]) -> list[dict[str, int]]:
    return [
        {"container_id": entry["containerID"], "host_id": entry["hostID"], "size": entry["size"]} for entry in mappings
    ]


def _isolation(linux: Mapping[str, Any], seccomp: str) -> dict[str, Any]:
    cgroup = linux.get("cgroupsPath")
    return {
        "mask": sorted(frozenset(linux.get("maskedPaths", ())) - _MASKED_BY_ITSELF),
        "seccomp_profile_path": seccomp if "seccomp" in linux else "unconfined",
        "apparmor_profile": "unconfined",
        "selinux_opts": ["disable"],
        "resource_limits": dict(linux.get("resources", {})),
        "sysctl": dict(linux.get("sysctl", {})),
        # Its monitor stays where the service is: our group is the job's alone.
        "cgroups_mode": "no-conmon",
        **({} if cgroup is None else {"cgroup_parent": cgroup}),
    }


def _nothing_of_its_own() -> dict[str, Any]:
    return {
        "env_host": False,
        "httpproxy": False,
        "init": False,
        "systemd": "false",
        "sdnotifyMode": "ignore",
        "terminal": False,
        "stdin": False,
        "privileged": False,
        "restart_policy": "no",
        # The shim passes other signals on to the step, whose end would then look like the job's own doing.
        "stop_signal": 9,
        "log_configuration": {"driver": "none"},
        "healthconfig": {"Test": ["NONE"]},
        "volatile": True,
    }
