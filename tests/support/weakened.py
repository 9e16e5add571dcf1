"""An OCI runtime that applies less than it was told, for daemons that are weakened on purpose."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any, Final

from daemons import Containerd, Dockerd, PodmanService

# Stands in for runc: edits the bundle as the file `what` beside it says, and runs the real one.
_PROGRAM: Final = """#!{python} -IS
import json, os, sys
with open({what!r}) as file:
    what = file.read()
if what and "--bundle" in sys.argv:
    path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        spec = json.load(file)
    process, linux = spec["process"], spec["linux"]
    if what == "capability":
        process.setdefault("capabilities", {{}}).setdefault("bounding", []).append("CAP_NET_RAW")
    elif what == "no_new_privs":
        process["noNewPrivileges"] = False
    elif what == "seccomp":
        del linux["seccomp"]
    elif what == "memory":
        del linux["resources"]["memory"]
    elif what == "namespace":
        linux["namespaces"] = [entry for entry in linux["namespaces"] if entry["type"] != "cgroup"]
    elif what == "mask":
        linux["maskedPaths"] = []
    elif what == "mount":
        for mount in spec["mounts"]:
            if mount["destination"] == "/etc/hosts":
                mount["options"] = [option for option in mount["options"] if option not in ("ro", "rro")]
    elif what == "added_mount":
        more = {{"destination": "/dev/extra", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}}
        spec["mounts"].append(more)
    else:
        sys.exit("no such weakness: " + what)
    with open(path, "w") as file:
        json.dump(spec, file)
os.execv({real!r}, [{real!r}, *sys.argv[1:]])
"""

WEAKNESSES: Final = {
    "capability": {("process.capabilities.bounding", "spec"), ("process.capabilities.bounding", "kernel")},
    "no_new_privs": {("process.noNewPrivileges", "spec"), ("process.noNewPrivileges", "kernel")},
    "seccomp": {("linux.seccomp", "spec"), ("linux.seccomp", "kernel")},
    "memory": {("linux.resources.memory.limit", "spec"), ("linux.resources.memory.limit", "kernel")},
    "namespace": {("linux.namespaces.cgroup", "spec"), ("linux.namespaces.cgroup", "kernel")},
    "mask": {("linux.maskedPaths", "spec")},
    "mount": {("mounts./etc/hosts.ro", "spec"), ("mounts./etc/hosts", "kernel")},
    "added_mount": {("mounts./dev/extra", "spec")},
}
"""What can be left out, and the rows that have to tell of it: field, and by whom."""


class WeakRuntime:
    """The program, in a directory of its own that goes first in a PATH. `leave_out` chooses; empty is nothing."""

    def __init__(self, directory: Path, real: str) -> None:
        self.program = directory / "runc"
        self._what = directory / "what"
        self.leave_out("")
        self.program.write_text(_PROGRAM.format(python=sys.executable, real=real, what=str(self._what)))
        self.program.chmod(0o755)

    def leave_out(self, what: str) -> None:
        """From the next container on."""
        self._what.write_text(what)

    def first(self, environment: dict[str, str]) -> dict[str, str]:
        """`environment` with the program's directory first in PATH."""
        return {**environment, "PATH": f"{self.program.parent}:{environment.get('PATH', os.defpath)}"}


class WeakContainerd(Containerd):
    """containerd whose shims find the weak runtime."""

    weak: WeakRuntime

    def environment(self) -> dict[str, str]:
        """With the runtime first."""
        return self.weak.first(super().environment())


class WeakDockerd(Dockerd):
    """dockerd whose containerd's shims find the weak runtime."""

    def __init__(self, weak: WeakRuntime) -> None:
        super().__init__()
        self.containerd = WeakContainerd(self.containerd.directory)
        self.containerd.weak = weak


class WeakPodman(PodmanService):
    """Podman whose runc is the weak one."""

    def __init__(self, weak: WeakRuntime) -> None:
        super().__init__()
        runtimes = f'[engine.runtimes]\nrunc = ["{weak.program}"]\n'
        self.containers_conf.write_text(f"{self.containers_conf.read_text()}{runtimes}")


def weak_daemon(name: str, weak: WeakRuntime) -> Any:
    """A private daemon, not started, that the adapter `name` talks to."""
    if name == "docker":
        return WeakDockerd(weak)
    if name == "podman":
        return WeakPodman(weak)
    daemon = WeakContainerd()
    daemon.weak = weak
    return daemon
