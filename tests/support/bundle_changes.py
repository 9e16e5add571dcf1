"""Changes of a whole bundle, each of one thing: every one that weakens it, and some that make it stricter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st
from whole_bundle import whole_bundle

Spec = dict[str, Any]
Change = Callable[[Spec, st.DataObject], str]
"""Changes a spec and returns the field that a report has to name."""

INTENDED = whole_bundle()
SETS = ("bounding", "effective", "permitted", "inheritable", "ambient")
MOUNTS = [mount["destination"] for mount in INTENDED["mounts"]]
REFUSED = INTENDED["linux"]["seccomp"]["syscalls"][1]["names"]
TESTED = [index for index, rule in enumerate(INTENDED["linux"]["seccomp"]["syscalls"]) if "args" in rule]


def mount_of(spec: Spec, destination: str) -> Spec:
    """One mount of a spec."""
    found: Spec = next(mount for mount in spec["mounts"] if mount["destination"] == destination)
    return found


def a_mount_with(data: st.DataObject, spec: Spec, *options: str) -> Spec:
    """Some mount that has one of `options`."""
    able = [mount for mount in spec["mounts"] if set(options) & set(mount["options"])]
    found: Spec = data.draw(st.sampled_from(able))
    return found


# --- weaker --------------------------------------------------------------------------------------------------------


def capability_added(spec: Spec, data: st.DataObject) -> str:
    kind, name = data.draw(st.sampled_from(SETS)), data.draw(st.sampled_from(("CAP_SYS_ADMIN", "CAP_CHOWN")))
    spec["process"]["capabilities"][kind].append(name)
    return f"process.capabilities.{kind}"


def capabilities_left_out(spec: Spec, data: st.DataObject) -> str:
    del spec["process"]["capabilities"]
    return "process.capabilities"


def no_new_privileges_off(spec: Spec, data: st.DataObject) -> str:
    data.draw(st.sampled_from((lambda p: p.pop("noNewPrivileges"), lambda p: p.update(noNewPrivileges=False))))(
        spec["process"]
    )
    return "process.noNewPrivileges"


def other_user(spec: Spec, data: st.DataObject) -> str:
    name = data.draw(st.sampled_from(("uid", "gid")))
    spec["process"]["user"][name] = data.draw(st.integers(0, 65535).filter(lambda number: number != 1000))
    return f"process.user.{name}"


def group_added(spec: Spec, data: st.DataObject) -> str:
    spec["process"]["user"]["additionalGids"].append(data.draw(st.integers(0, 999)))
    return "process.user.additionalGids"


def umask_opened(spec: Spec, data: st.DataObject) -> str:
    spec["process"]["user"]["umask"] = data.draw(st.sampled_from((0, 0o002, 0o020)))
    return "process.user.umask"


def rlimit_raised(spec: Spec, data: st.DataObject) -> str:
    limit = data.draw(st.sampled_from(spec["process"]["rlimits"]))
    kind = data.draw(st.sampled_from(("soft", "hard")))
    limit[kind] += data.draw(st.integers(1, 1 << 40))
    return f"process.rlimits.{limit['type']}.{kind}"


def rlimit_left_out(spec: Spec, data: st.DataObject) -> str:
    limit = spec["process"]["rlimits"].pop(data.draw(st.integers(0, 1)))
    return f"process.rlimits.{limit['type']}"


def other_program(spec: Spec, data: st.DataObject) -> str:
    spec["process"]["args"].insert(0, "/sbin/docker-init")
    return "process.args"


def terminal_given(spec: Spec, data: st.DataObject) -> str:
    spec["process"]["terminal"] = True
    return "process.terminal"


def harder_to_kill(spec: Spec, data: st.DataObject) -> str:
    spec["process"]["oomScoreAdj"] = data.draw(st.integers(-1000, -1))
    return "process.oomScoreAdj"


def namespace_left_out(spec: Spec, data: st.DataObject) -> str:
    namespaces = spec["linux"]["namespaces"]
    gone = namespaces.pop(data.draw(st.integers(0, len(namespaces) - 1)))
    return f"linux.namespaces.{gone['type']}"


def namespace_joined(spec: Spec, data: st.DataObject) -> str:
    entry = data.draw(st.sampled_from(spec["linux"]["namespaces"]))
    entry["path"] = "/proc/1/ns/x"
    return f"linux.namespaces.{entry['type']}"


def other_map(spec: Spec, data: st.DataObject) -> str:
    field = data.draw(st.sampled_from(("uidMappings", "gidMappings")))
    key = data.draw(st.sampled_from(("hostID", "containerID", "size")))
    spec["linux"][field] = [{**spec["linux"][field][0]}]
    spec["linux"][field][0][key] += data.draw(st.integers(1, 1000))
    return f"linux.{field}"


def map_of_the_hosts_root(spec: Spec, data: st.DataObject) -> str:
    field = data.draw(st.sampled_from(("uidMappings", "gidMappings")))
    spec["linux"][field] = data.draw(st.sampled_from(([], [{"containerID": 0, "hostID": 0, "size": 65536}], None)))
    return f"linux.{field}"


def path_shown(spec: Spec, data: st.DataObject) -> str:
    field = data.draw(st.sampled_from(("maskedPaths", "readonlyPaths")))
    spec["linux"][field].remove(data.draw(st.sampled_from(spec["linux"][field])))
    return f"linux.{field}"


def paths_shown(spec: Spec, data: st.DataObject) -> str:
    field = data.draw(st.sampled_from(("maskedPaths", "readonlyPaths")))
    spec["linux"][field] = None
    return f"linux.{field}"


def mounts_pass_out(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["rootfsPropagation"] = data.draw(st.sampled_from(("shared", "rshared", "slave", "")))
    return "linux.rootfsPropagation"


def device_added(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["devices"] = [{"path": "/dev/kvm", "type": "c", "major": 10, "minor": 232}]
    return "linux.devices"


def device_allowed(spec: Spec, data: st.DataObject) -> str:
    rule = {"allow": True, "access": data.draw(st.sampled_from(("rwm", "r", "w")))}
    rule |= data.draw(
        st.sampled_from(({"type": "b", "major": 8}, {"type": "a"}, {"type": "c", "major": 1, "minor": 1}))
    )
    spec["linux"]["resources"]["devices"].append(rule)
    return "linux.resources.devices"


def devices_not_forbidden(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["resources"]["devices"] = data.draw(st.sampled_from(([], None, [{"allow": True, "access": "rwm"}])))
    return "linux.resources.devices"


def memory_raised(spec: Spec, data: st.DataObject) -> str:
    name = data.draw(st.sampled_from(("limit", "swap")))
    more = data.draw(st.integers(1, 1 << 40).map(lambda value: value + (2 << 30)) | st.sampled_from((-1, 0, None)))
    spec["linux"]["resources"]["memory"][name] = more
    return f"linux.resources.memory.{name}"


def oom_killer_off(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["resources"]["memory"]["disableOOMKiller"] = True
    return "linux.resources.memory.disableOOMKiller"


def pids_raised(spec: Spec, data: st.DataObject) -> str:
    more = data.draw(st.integers(513, 1 << 22) | st.sampled_from((-1, 0)))
    spec["linux"]["resources"]["pids"]["limit"] = more
    return "linux.resources.pids.limit"


def cpu_raised(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["resources"]["cpu"]["quota"] = data.draw(st.integers(200_001, 10_000_000) | st.sampled_from((-1, 0)))
    return "linux.resources.cpu.quota"


def period_shortened(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["resources"]["cpu"]["period"] = data.draw(st.integers(1000, 99_999))
    return "linux.resources.cpu.quota"


def shares_raised(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["resources"]["cpu"]["shares"] = data.draw(st.integers(2049, 262_144))
    return "linux.resources.cpu.shares"


def limits_left_out(spec: Spec, data: st.DataObject) -> str:
    group = data.draw(st.sampled_from(("memory", "pids")))
    spec["linux"]["resources"][group] = None
    return f"linux.resources.{group}.limit"


def sysctl_set(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["sysctl"] = {"net.ipv4.ping_group_range": "0 2147483647"}
    return "linux.sysctl.net.ipv4.ping_group_range"


def other_group(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["cgroupsPath"] = data.draw(
        st.sampled_from(("/docker/x", "/forgeyard/e/s2", "", None, "/forgeyard/e/s/../t", "forgeyard/e/s"))
    )
    return "linux.cgroupsPath"


def filter_gone(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["seccomp"] = None
    return "linux.seccomp"


def wider_default(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["seccomp"]["defaultAction"] = data.draw(
        st.sampled_from(("SCMP_ACT_ALLOW", "SCMP_ACT_LOG", "SCMP_ACT_TRACE", "SCMP_ACT_NOTIFY", "SCMP_ACT_NEW"))
    )
    return "linux.seccomp.defaultAction"


def call_allowed(spec: Spec, data: st.DataObject) -> str:
    name = data.draw(st.sampled_from([*REFUSED, "io_uring_setup", "clone3", "clone", "socket", "personality"]))
    spec["linux"]["seccomp"]["syscalls"].append({"names": [name], "action": "SCMP_ACT_ALLOW"})
    return "linux.seccomp.syscalls"


def refusals_become_allowed(spec: Spec, data: st.DataObject) -> str:
    rules = spec["linux"]["seccomp"]["syscalls"]
    refusing = [rule for rule in rules if rule["action"] == "SCMP_ACT_ERRNO"]
    data.draw(st.sampled_from(refusing))["action"] = data.draw(st.sampled_from(("SCMP_ACT_ALLOW", "SCMP_ACT_LOG")))
    return "linux.seccomp.syscalls"


def argument_test_dropped(spec: Spec, data: st.DataObject) -> str:
    rules = spec["linux"]["seccomp"]["syscalls"]
    able = [index for index in TESTED if rules[index]["action"] == "SCMP_ACT_ALLOW"]
    rules[data.draw(st.sampled_from(able))]["args"] = []
    return "linux.seccomp.syscalls"


def argument_test_changed(spec: Spec, data: st.DataObject) -> str:
    rules = spec["linux"]["seccomp"]["syscalls"]
    able = [index for index in TESTED if rules[index]["action"] == "SCMP_ACT_ALLOW"]
    argument = rules[data.draw(st.sampled_from(able))]["args"][0]
    key = data.draw(st.sampled_from(sorted(argument)))
    # Far enough to be no other value that is allowed.
    argument[key] = "SCMP_CMP_GE" if key == "op" else argument[key] + data.draw(st.integers(100, 109))
    return "linux.seccomp.syscalls"


def refusal_of_arguments_dropped(spec: Spec, data: st.DataObject) -> str:
    rules = spec["linux"]["seccomp"]["syscalls"]
    del rules[data.draw(st.sampled_from([index for index in TESTED if rules[index]["action"] == "SCMP_ACT_ERRNO"]))]
    return "linux.seccomp.syscalls"


def architecture_added(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["seccomp"]["architectures"].append("SCMP_ARCH_X86")
    return "linux.seccomp.architectures"


def speculation_allowed(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["seccomp"]["flags"] = ["SECCOMP_FILTER_FLAG_SPEC_ALLOW"]
    return "linux.seccomp.flags"


def flag_dropped(spec: Spec, data: st.DataObject) -> str:
    flags = ("ro", "nosuid", "nodev", "noexec", "rro", "rnosuid", "rnodev", "rnoexec")
    mount = a_mount_with(data, spec, *flags)
    flag = data.draw(st.sampled_from([option for option in mount["options"] if option in flags]))
    mount["options"].remove(flag)
    if not flag.startswith("rn") and flag != "rro" and f"r{flag}" in mount["options"]:
        # The form for what lies below holds for the top as well.
        mount["options"].remove(f"r{flag}")
    return f"mounts.{mount['destination']}.{flag}"


def flag_undone(spec: Spec, data: st.DataObject) -> str:
    mount = a_mount_with(data, spec, "ro")
    mount["options"].append("rw")
    return f"mounts.{mount['destination']}.ro"


def other_source(spec: Spec, data: st.DataObject) -> str:
    able = [mount for mount in spec["mounts"] if mount["type"] == "bind"]
    mount = data.draw(st.sampled_from(able))
    mount["source"] = data.draw(st.sampled_from(("/", "/etc", "/var/run/docker.sock")))
    return f"mounts.{mount['destination']}.source"


def mount_left_out(spec: Spec, data: st.DataObject) -> str:
    spec["mounts"] = [mount for mount in spec["mounts"] if mount["destination"] != (gone := data.draw(st.just("/usr")))]
    return f"mounts.{gone}"


def any_mount_left_out(spec: Spec, data: st.DataObject) -> str:
    gone = spec["mounts"].pop(data.draw(st.integers(0, len(MOUNTS) - 1)))
    return f"mounts.{gone['destination']}"


def mount_added(spec: Spec, data: st.DataObject) -> str:
    kind = data.draw(st.sampled_from(("bind", "tmpfs", "sysfs", "proc", "cgroup", "overlay")))
    options = data.draw(st.sampled_from(([], ["rw"]))) if kind == "tmpfs" else data.draw(st.sampled_from(([], ["ro"])))
    spec["mounts"].append({"destination": "/x", "type": kind, "source": "/var", "options": options})
    return "mounts./x"


def mount_over_another(spec: Spec, data: st.DataObject) -> str:
    mount = spec["mounts"].pop(MOUNTS.index("/usr"))
    spec["mounts"].append(mount)
    return "mounts./usr/local"


def mount_hides_another(spec: Spec, data: st.DataObject) -> str:
    spec["mounts"].append({"destination": "/work/", "type": "tmpfs", "source": "tmpfs", "options": ["ro"]})
    return "mounts./work/build"


def mounts_pass_in(spec: Spec, data: st.DataObject) -> str:
    mount = a_mount_with(data, spec, "rprivate")
    word = data.draw(st.sampled_from(("rshared", "rslave", "shared", "")))
    mount["options"] = [option for option in mount["options"] if option != "rprivate"] + [word] * bool(word)
    return f"mounts.{mount['destination']}.propagation"


def no_size(spec: Spec, data: st.DataObject) -> str:
    able = [mount for mount in spec["mounts"] if any("size=" in option for option in mount["options"])]
    mount = data.draw(st.sampled_from(able))
    other = data.draw(st.sampled_from(("", "size=100%", "size=1g", "size=65537k")))
    mount["options"] = [option for option in mount["options"] if "size=" not in option] + [other] * bool(other)
    return f"mounts.{mount['destination']}.size"


def wider_mode(spec: Spec, data: st.DataObject) -> str:
    mount = mount_of(spec, data.draw(st.sampled_from(("/dev", "/sys"))))
    other = data.draw(st.sampled_from(([], ["mode=777"], ["mode=1777"])))
    mount["options"] = [option for option in mount["options"] if "mode=" not in option] + other
    return f"mounts.{mount['destination']}.mode"


def other_type(spec: Spec, data: st.DataObject) -> str:
    mount_of(spec, "/sys")["type"] = "sysfs"
    return "mounts./sys.type"


def root_writable(spec: Spec, data: st.DataObject) -> str:
    data.draw(st.sampled_from((lambda r: r.pop("readonly"), lambda r: r.update(readonly=False))))(spec["root"])
    return "root.readonly"


def other_root(spec: Spec, data: st.DataObject) -> str:
    spec["root"]["path"] = data.draw(st.sampled_from(("/", "rootfs", "/state")))
    return "root.path"


def other_host_name(spec: Spec, data: st.DataObject) -> str:
    spec["hostname"] = data.draw(st.sampled_from((None, "", "host")))
    return "hostname"


def hook_added(spec: Spec, data: st.DataObject) -> str:
    kind = data.draw(st.sampled_from(("prestart", "createRuntime", "poststart", "poststop", "startContainer")))
    spec["hooks"] = {kind: [{"path": "/bin/sh"}]}
    return f"hooks.{kind}"


WEAKENINGS: tuple[Change, ...] = (
    capability_added, capabilities_left_out, no_new_privileges_off, other_user, group_added, umask_opened,
    rlimit_raised, rlimit_left_out, other_program, terminal_given, harder_to_kill, namespace_left_out,
    namespace_joined, other_map, map_of_the_hosts_root, path_shown, paths_shown, mounts_pass_out, device_added,
    device_allowed, devices_not_forbidden, memory_raised, oom_killer_off, pids_raised, cpu_raised, period_shortened,
    shares_raised, limits_left_out, sysctl_set, other_group, filter_gone, wider_default, call_allowed,
    refusals_become_allowed, argument_test_dropped, argument_test_changed, refusal_of_arguments_dropped,
    architecture_added, speculation_allowed, flag_dropped, flag_undone, other_source, mount_left_out,
    any_mount_left_out, mount_added, mount_over_another, mount_hides_another, mounts_pass_in, no_size, wider_mode,
    other_type, root_writable, other_root, other_host_name, hook_added,
)  # fmt: skip


# --- stricter ------------------------------------------------------------------------------------------------------


def more_masked(spec: Spec, data: st.DataObject) -> str:
    field = data.draw(st.sampled_from(("maskedPaths", "readonlyPaths")))
    spec["linux"][field].append("/proc/swaps")
    return f"linux.{field}"


def masked_as_a_whole(spec: Spec, data: st.DataObject) -> str:
    masked = spec["linux"]["maskedPaths"]
    spec["linux"]["maskedPaths"] = [path for path in masked if not path.startswith("/sys/")] + ["/sys"]
    return "linux.maskedPaths"


def lower_limit(spec: Spec, data: st.DataObject) -> str:
    group, name = data.draw(st.sampled_from((("memory", "limit"), ("memory", "swap"), ("pids", "limit"))))
    spec["linux"]["resources"][group][name] -= data.draw(st.integers(1, 500))
    return f"linux.resources.{group}.{name}"


def limited_cpus(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["resources"]["cpu"]["cpus"] = "0-1"
    return "linux.resources.cpu.cpus"


def lower_rlimit(spec: Spec, data: st.DataObject) -> str:
    spec["process"]["rlimits"][1]["soft"] -= data.draw(st.integers(1, 4000))
    return "process.rlimits.RLIMIT_NOFILE.soft"


def namespace_more(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["namespaces"].append({"type": "time"})
    return "linux.namespaces.time"


def fewer_ids(spec: Spec, data: st.DataObject) -> str:
    field = data.draw(st.sampled_from(("uidMappings", "gidMappings")))
    spec["linux"][field] = [{"containerID": 5, "hostID": 2_000_000_005, "size": data.draw(st.integers(1, 60000))}]
    return f"linux.{field}"


def confined(spec: Spec, data: st.DataObject) -> str:
    spec["process"]["apparmorProfile"] = "docker-default"
    return "process.apparmorProfile"


def flag_added(spec: Spec, data: st.DataObject) -> str:
    able = [mount for mount in spec["mounts"] if "noexec" not in mount["options"]]
    mount = data.draw(st.sampled_from(able))
    mount["options"].append("noexec")
    return f"mounts.{mount['destination']}.noexec"


def call_refused(spec: Spec, data: st.DataObject) -> str:
    names = spec["linux"]["seccomp"]["syscalls"][0]["names"]
    names.remove(data.draw(st.sampled_from(names)))
    return "linux.seccomp.syscalls"


def killed_for_it(spec: Spec, data: st.DataObject) -> str:
    spec["linux"]["seccomp"]["defaultAction"] = "SCMP_ACT_KILL_PROCESS"
    return "linux.seccomp.defaultAction"


def other_errno(spec: Spec, data: st.DataObject) -> str:
    del spec["linux"]["seccomp"]["defaultErrnoRet"]
    return "linux.seccomp.defaultErrnoRet"


def less_recursive(spec: Spec, data: st.DataObject) -> str:
    mount = mount_of(spec, "/usr")
    mount["options"] = ["bind", "rprivate", "nosuid", "nodev", "ro"]
    return "mounts./usr.rbind"


def empty_mount_added(spec: Spec, data: st.DataObject) -> str:
    spec["mounts"].append({"destination": "/x", "type": "tmpfs", "source": "tmpfs", "options": ["ro"]})
    return "mounts./x"


STRENGTHENINGS: tuple[Change, ...] = (
    more_masked, masked_as_a_whole, lower_limit, limited_cpus, lower_rlimit, namespace_more, fewer_ids, confined,
    flag_added, call_refused, killed_for_it, other_errno, less_recursive, empty_mount_added,
)  # fmt: skip
