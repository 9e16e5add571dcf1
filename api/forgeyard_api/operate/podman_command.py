"""A running attempt's container as a command line of podman's: another container on the same files, to look around in.

Pure. What podman can't be told, or does otherwise, is in `DIFFERENCES`; it is a help for debugging, not the sandbox.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

DIFFERENCES: Final = (
    "it is a second container: the job's processes are not in it, nor is its PID 1",
    "variables and arguments of the steps are not in a bundle: it starts a shell, and the environment is podman's",
    "it has no network: the attempt's own, and its policy, are not podman's to join",
    "its control group is podman's, with the same limits counted apart; no limit of the disk is added to the job's",
    "what it writes is written into the job's own directories",
    "/dev, /proc and /sys are made by podman, with what podman hides",
    "it lasts no longer than the attempt does: its root and its mounts are the attempt's",
)
SHELL: Final = ("/bin/sh",)
_OURS: Final = "/.forgeyard"
_SOURCE: Final = "/work/source"
_LIMITS: Final = {"RLIMIT_CORE": "core", "RLIMIT_NOFILE": "nofile"}


def podman_command(config: Mapping[str, Any], directory: str, command: Sequence[str] = SHELL) -> tuple[str, ...]:
    """`podman run` for the bundle in `directory`, whose config.json is `config`.

    :param command: what runs in it.
    """
    return (
        *("podman", "run", "--rm", "--interactive", "--tty"),
        *_root(config),
        *_identity(config),
        *_security(config, directory),
        *_resources(config),
        *_volumes(config),
        *("--rootfs", config["root"]["path"]),  # runc takes no link to it
        *command,
    )


def _root(config: Mapping[str, Any]) -> Iterator[str]:
    yield from ("--network=none", "--no-hosts", f"--hostname={config.get('hostname', '')}")
    if config["root"].get("readonly"):
        yield from ("--read-only", "--read-only-tmpfs=false")


def _identity(config: Mapping[str, Any]) -> Iterator[str]:
    user = config["process"]["user"]
    yield f"--user={user['uid']}:{user['gid']}"
    yield f"--umask={user.get('umask', 0o22):04o}"
    places = {mount["destination"] for mount in config.get("mounts", ())}
    yield f"--workdir={_SOURCE if _SOURCE in places else config['process'].get('cwd', '/')}"
    for flag, key in (("uidmap", "uidMappings"), ("gidmap", "gidMappings")):
        for part in config["linux"].get(key, ()):
            yield f"--{flag}={part['containerID']}:{part['hostID']}:{part['size']}"


def _security(config: Mapping[str, Any], directory: str) -> Iterator[str]:
    yield "--cap-drop=all"
    for name in config["process"].get("capabilities", {}).get("bounding", ()):
        yield f"--cap-add={name}"
    if config["process"].get("noNewPrivileges"):
        yield "--security-opt=no-new-privileges"
    if config["linux"].get("seccomp"):
        yield f"--security-opt=seccomp={directory}/seccomp.json"


def _resources(config: Mapping[str, Any]) -> Iterator[str]:
    found = config["linux"].get("resources", {})
    memory, cpu, pids = found.get("memory", {}), found.get("cpu", {}), found.get("pids", {})
    if memory.get("limit"):
        yield f"--memory={memory['limit']}"
        yield f"--memory-swap={memory.get('swap', memory['limit'])}"
    if cpu.get("quota"):
        yield f"--cpus={cpu['quota'] / cpu['period']:g}"
    if pids.get("limit"):
        yield f"--pids-limit={pids['limit']}"
        # podman's own default is more than a runtime inside of a user namespace may set.
        yield f"--ulimit=nproc={pids['limit']}:{pids['limit']}"
    for limit in config["process"].get("rlimits", ()):
        if limit["type"] in _LIMITS:
            yield f"--ulimit={_LIMITS[limit['type']]}={limit['soft']}:{limit['hard']}"


def _volumes(config: Mapping[str, Any]) -> Iterator[str]:
    for mount in config.get("mounts", ()):
        if mount["type"] == "bind" and mount["destination"] != _OURS:
            options = [word for word in ("ro", "nosuid", "nodev", "noexec") if word in mount["options"]]
            yield f"--volume={mount['source']}:{mount['destination']}:{','.join(['rbind', 'rprivate', *options])}"
