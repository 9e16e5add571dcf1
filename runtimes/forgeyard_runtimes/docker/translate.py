"""A bundle as Docker's create request; what has no place in one is named, never dropped.

Fields: Docker Engine API 1.41, ContainerCreate and HostConfig. A test compares what Docker's runtime is really given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from forgeyard_runtimes.docker.differences import KERNEL_SYSCTLS, hidden_in_sys, seccomp_for_docker
from forgeyard_runtimes.docker.staging import Staged

LEAST_MEMORY: Final = 6 << 20
"""Bytes; Docker refuses less."""
UMASK: Final = 0o022
"""What runc gives a process whose spec has none, and Docker's never has one."""
_MOUNT_TYPES: Final = ("bind", "tmpfs", "proc", "devpts", "mqueue", "cgroup")
_OWN_MOUNTS: Final = ("/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/sys/fs/cgroup")  # noqa: S108  the sandbox's
_NAMESPACES: Final = frozenset({"cgroup", "ipc", "mount", "network", "pid", "uts"})
_RLIMITS: Final = frozenset(
    f"RLIMIT_{name}"
    for name in (
        *("CORE", "CPU", "DATA", "FSIZE", "LOCKS", "MEMLOCK", "MSGQUEUE", "NICE", "NOFILE", "NPROC"),
        *("RSS", "RTPRIO", "RTTIME", "SIGPENDING", "STACK"),
    )
)
_SPEC: Final = {
    "": {"ociVersion", "process", "root", "hostname", "mounts", "linux", "annotations"},
    "process": {"args", "capabilities", "cwd", "env", "noNewPrivileges", "rlimits", "terminal", "user"},
    "process.user": {"uid", "gid", "additionalGids", "umask"},
    "linux": {"cgroupsPath", "maskedPaths", "namespaces", "readonlyPaths", "resources", "rootfsPropagation", "seccomp"},
    "linux.resources": {"cpu", "devices", "memory", "pids"},
    "linux.resources.cpu": {"period", "quota", "shares"},
    "linux.resources.memory": {"limit", "swap"},
    "linux.resources.pids": {"limit"},
}
"""Every field that is carried, by the object it is in. Another one is one that nobody thought about."""


def carries(spec: Mapping[str, Any]) -> tuple[str, ...]:
    """Names of the fields of `spec` that Docker can't carry as they stand; empty when it can carry all."""
    return (*_unknown_fields(spec), *_process(spec["process"]), *_linux(spec["linux"]), *_mounts(spec["mounts"]))


def _unknown_fields(spec: Mapping[str, Any]) -> Iterator[str]:
    for path, known in _SPEC.items():
        value: Any = spec
        for key in path.split(".") if path else ():
            value = value.get(key, {})
        yield from (f"{path}.{name}".lstrip(".") for name in value if name not in known)


def _process(process: Mapping[str, Any]) -> Iterator[str]:
    if process["user"].get("umask", UMASK) != UMASK:
        yield "process.user.umask"
    if not process.get("noNewPrivileges"):
        yield "process.noNewPrivileges"
    if process.get("terminal"):
        yield "process.terminal"
    held = process["capabilities"]
    if held.get("ambient") or held.get("inheritable"):
        yield "process.capabilities.ambient"
    bounding = held.get("bounding", [])
    if any(sorted(held.get(name, [])) != sorted(bounding) for name in ("effective", "permitted")):
        yield "process.capabilities"
    yield from (f"process.rlimits.{limit['type']}" for limit in process["rlimits"] if limit["type"] not in _RLIMITS)


def _linux(linux: Mapping[str, Any]) -> Iterator[str]:
    for namespace in linux["namespaces"]:
        name = f"linux.namespaces.{namespace['type']}"
        if namespace["type"] not in _NAMESPACES:
            yield name
        elif "path" in namespace:
            yield f"{name}.path"
    there = {namespace["type"] for namespace in linux["namespaces"]}
    yield from (f"linux.namespaces.{name}" for name in sorted(_NAMESPACES - {"network"} - there))
    if not linux.get("cgroupsPath", "").startswith("/"):
        yield "linux.cgroupsPath"
    if linux.get("rootfsPropagation", "private") not in ("private", "rprivate"):
        yield "linux.rootfsPropagation"
    if linux["resources"].get("devices") != [{"allow": False, "access": "rwm"}]:
        yield "linux.resources.devices"
    if 0 < linux["resources"].get("memory", {}).get("limit", 0) < LEAST_MEMORY:
        yield "linux.resources.memory.limit"
    if not linux.get("seccomp"):
        yield "linux.seccomp"


def _mounts(mounts: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for mount in mounts:
        where, kind = mount["destination"], mount["type"]
        # Docker makes those itself; everything else can only be bound.
        if kind not in _MOUNT_TYPES or (where in _OWN_MOUNTS) == (kind == "bind"):
            yield f"mounts.{where}"
        elif kind == "bind" and not {"nosuid", "nodev"} <= set(mount["options"]):
            yield f"mounts.{where}.options"


def create_request(
    spec: Mapping[str, Any],
    staged: Staged,
    image: str,
    labels: Mapping[str, str],
    *,
    userns_host: bool,
    network_of: str | None = None,
) -> dict[str, Any]:
    """The body of POST /containers/create.

    :param image: id of the skeleton's image.
    :param userns_host: the daemon maps ids of its containers by default; ours are told not to.
    :param network_of: id of a running container whose network namespace it is to share.
    """
    process = spec["process"]
    user = process["user"]
    request = {
        "Image": image,
        # Both, since an empty Cmd with the image's own entrypoint would be another command.
        "Entrypoint": process["args"][:1],
        "Cmd": process["args"][1:],
        "Env": process["env"],
        "WorkingDir": process["cwd"],
        "User": f"{user['uid']}:{user['gid']}",
        # A daemon that is stopped stops its containers. The shim passes other signals on to the step, whose end would
        # then look like the job's own doing; a killed one is a lost sandbox.
        "StopSignal": "SIGKILL",
        "StopTimeout": 0,
        "Labels": dict(labels),
        "AttachStdin": False,
        "AttachStdout": False,
        "AttachStderr": False,
        "OpenStdin": False,
        "Tty": False,
        "HostConfig": _host_config(spec, staged),
    }
    if network_of is not None:
        # Docker refuses a host name beside it. System settings of the namespace are the other one's.
        request["HostConfig"] |= {"NetworkMode": f"container:{network_of}", "Sysctls": {}}
    else:
        request["Hostname"] = spec["hostname"]
        # No libnetwork: no hook that Docker runs, no resolver file, a plain new namespace as the bundle has it.
        request["NetworkDisabled"] = _has_network(spec)
    if userns_host:
        request["HostConfig"]["UsernsMode"] = "host"
    return request


def _has_network(spec: Mapping[str, Any]) -> bool:
    """A network namespace of its own, not the host's."""
    return any(namespace["type"] == "network" for namespace in spec["linux"]["namespaces"])


def _host_config(spec: Mapping[str, Any], staged: Staged) -> dict[str, Any]:
    linux, own = spec["linux"], _has_network(spec)
    return {
        **_limits(linux["resources"], spec["process"]["rlimits"]),
        **_privileges(spec),
        "NetworkMode": "none" if own else "host",
        "Sysctls": dict(KERNEL_SYSCTLS) if own else {},
        "PidMode": "",
        "UTSMode": "",
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "CgroupParent": linux["cgroupsPath"],
        "ShmSize": _size(_mount(spec, "/dev/shm")),  # noqa: S108  the sandbox's
        "ReadonlyRootfs": True,
        "Mounts": [_bind(bind.source, bind.destination) for bind in staged.binds],
        "Init": False,
        "AutoRemove": False,
        "RestartPolicy": {"Name": "no"},
        "LogConfig": {"Type": "none"},
        "OomScoreAdj": 0,
        "Devices": [],
        "DeviceRequests": [],
        "DeviceCgroupRules": [],
    }


def _privileges(spec: Mapping[str, Any]) -> dict[str, Any]:
    linux, process = spec["linux"], spec["process"]
    seccomp = json.dumps(seccomp_for_docker(linux["seccomp"]), separators=(",", ":"))
    return {
        "Privileged": False,
        "CapDrop": ["ALL"],
        "CapAdd": list(process["capabilities"].get("bounding", [])),
        "SecurityOpt": ["no-new-privileges", f"seccomp={seccomp}", "apparmor=unconfined"],
        "MaskedPaths": [*linux["maskedPaths"], *hidden_in_sys(linux["maskedPaths"])],
        "ReadonlyPaths": list(linux["readonlyPaths"]),
        "GroupAdd": [str(gid) for gid in process["user"].get("additionalGids", [])],
    }


def _limits(resources: Mapping[str, Any], rlimits: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    memory, cpu = resources.get("memory", {}), resources.get("cpu", {})
    return {
        "Memory": memory.get("limit", 0),
        "MemorySwap": memory.get("swap", 0),
        "CpuPeriod": cpu.get("period", 0),
        "CpuQuota": cpu.get("quota", 0),
        "CpuShares": cpu.get("shares", 0),
        "PidsLimit": resources.get("pids", {}).get("limit"),
        "Ulimits": [
            {"Name": limit["type"].removeprefix("RLIMIT_").lower(), "Soft": limit["soft"], "Hard": limit["hard"]}
            for limit in rlimits
        ],
    }


def _bind(source: str, destination: str) -> dict[str, Any]:
    # Not ReadOnly: the source is mounted with all its flags, of which Docker's remount would drop some.
    return {
        "Type": "bind",
        "Source": source,
        "Target": destination,
        "ReadOnly": False,
        "BindOptions": {"Propagation": "rprivate", "NonRecursive": True},
    }


def _mount(spec: Mapping[str, Any], destination: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = next(mount for mount in spec["mounts"] if mount["destination"] == destination)
    return found


def _size(mount: Mapping[str, Any]) -> int:
    return int(next(option for option in mount["options"] if option.startswith("size=")).removeprefix("size="))
