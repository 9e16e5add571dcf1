"""Ways to make a config.json weaker, each of one kind. Imports nothing: a runtime's wrapper runs it each time."""

from __future__ import annotations

ELSEWHERE = "/fy-weak"
"""A control group that is nobody's."""


def capability_added(spec):
    for kind in ("bounding", "effective", "permitted"):
        spec["process"]["capabilities"].setdefault(kind, []).append("CAP_SYS_ADMIN")


def no_new_privileges_off(spec):
    spec["process"]["noNewPrivileges"] = False


def namespace_missing(spec):
    linux = spec["linux"]
    linux["namespaces"] = [entry for entry in linux["namespaces"] if entry["type"] != "uts"]
    spec.pop("hostname", None)


def mask_missing(spec):
    spec["linux"]["maskedPaths"].remove("/proc/kcore")


def readonly_path_missing(spec):
    spec["linux"]["readonlyPaths"].remove("/proc/sys")


def _without_limit(name):
    def change(spec):
        del spec["linux"]["resources"][name]

    return change


def seccomp_rule_dropped(spec):
    """The first call that a rule refuses for some arguments is let through for all."""
    rules = spec["linux"]["seccomp"]["syscalls"]
    rule = next(rule for rule in rules if rule.get("args") and rule["action"] == "SCMP_ACT_ALLOW")
    rules.append({"names": rule["names"][:1], "action": "SCMP_ACT_ALLOW"})


def seccomp_call_allowed(spec):
    spec["linux"]["seccomp"]["syscalls"].append({"names": ["mount", "umount2"], "action": "SCMP_ACT_ALLOW"})


def seccomp_unconfined(spec):
    del spec["linux"]["seccomp"]


def mount_writable(spec):
    mount = next(mount for mount in spec["mounts"] if mount["destination"] == "/sys/fs/cgroup")
    mount["options"] = [option for option in mount["options"] if option not in ("ro", "rro")]


def mount_added(spec):
    options = ["bind", "ro", "nosuid", "nodev"]
    spec["mounts"].append({"destination": "/tmp/extra", "type": "bind", "source": "/etc", "options": options})


def device_added(spec):
    device = {"path": "/dev/kmsg", "type": "c", "major": 1, "minor": 11, "fileMode": 0o666, "uid": 0, "gid": 0}
    spec["linux"].setdefault("devices", []).append(device)


def ids_of_the_host(spec):
    linux = spec["linux"]
    for entry in linux["namespaces"]:
        if entry["type"] == "user":
            entry.pop("path", None)
    for name in ("uidMappings", "gidMappings"):
        linux[name].append({"containerID": 70000, "hostID": 0, "size": 1})


def other_cgroup(spec):
    spec["linux"]["cgroupsPath"] = f"{ELSEWHERE}{spec['linux']['cgroupsPath']}"


WEAKENINGS = {
    change.__name__: change
    for change in (
        capability_added, no_new_privileges_off, namespace_missing, mask_missing, readonly_path_missing,
        seccomp_rule_dropped, seccomp_call_allowed, seccomp_unconfined, mount_writable, mount_added, device_added,
        ids_of_the_host, other_cgroup,
    )
} | {f"{name}_unlimited": _without_limit(name) for name in ("memory", "pids", "cpu")}  # fmt: skip
