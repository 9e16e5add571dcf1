"""The bundle compiler: what it writes, what it refuses, and that it is pure."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.job import Step
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import ContainerPlan, JobUser, MountKind, Placement, PlanMount, Rlimit
from forgeyard_model.policy import ROOT_IN_USERNS_CAPABILITIES, NetworkMode
from forgeyard_oci import spec
from forgeyard_oci.spec import base_mounts, compile_bundle, compile_exec, compose, plan_digest

SCHEMA = json.loads(Path(__file__).with_name("runtime-spec-subset.schema.json").read_text())
VALIDATOR = jsonschema.Draft202012Validator(SCHEMA)
PROCESS_VALIDATOR = jsonschema.Draft202012Validator(SCHEMA["properties"]["process"])

PLAN = ContainerPlan(
    kind=ExecutorKind.PROCESS,
    rootfs_identity="sha256:" + "0" * 64,
    root_read_only=True,
    mounts=(
        PlanMount("/usr", MountKind.BIND, slot="usr"),
        PlanMount("/work/tmp", MountKind.BIND, slot="tmp", read_only=False),
        PlanMount("/data", MountKind.BIND, slot="data", executable=False),
        PlanMount("/ram", MountKind.TMPFS, read_only=False, size=1 << 20, mode=0o700),
    ),
    user=JobUser(1000, 1000, (7,)),
    user_namespace=True,
    network=NetworkMode.DENY,
    capabilities=(),
    seccomp="general-build",
    limits=ResourceLimits(cpus=1.5, memory=256 << 20, pids=64, shm=32 << 20),
    rlimits=(Rlimit("RLIMIT_NOFILE", 1024, 2048),),
    umask=0o027,
    env={"PATH": "/usr/bin", "A": "1"},
    workdir="/work",
    steps=(Step("true"),),
)
PLACEMENT = Placement(
    sandbox=SandboxId("01jfzq3v5m8r2t4w6x8y0z1a2b"),
    rootfs="/state/mnt/root",
    sources={"usr": "/usr", "tmp": "/state/scratch/tmp", "data": "/srv/data"},
    uid_base=2_000_000,
    uid_count=65536,
    cgroup="/forgeyard/01jfzq3v5m8r2t4w6x8y0z1a2b",
    netns=None,
    argv=("/.forgeyard/init", "run"),
)


def config(plan: ContainerPlan = PLAN, placement: Placement = PLACEMENT) -> dict[str, Any]:
    """The compiled bundle, read back and checked against the schema."""
    value = json.loads(compile_bundle(plan, placement).config)
    VALIDATOR.validate(value)
    return value


def mount(value: dict[str, Any], destination: str) -> dict[str, Any]:
    """The one mount at `destination`."""
    (found,) = [entry for entry in value["mounts"] if entry["destination"] == destination]
    return found


def namespaces(value: dict[str, Any]) -> dict[str, str | None]:
    """Kinds of namespace, with the path of those that are joined."""
    return {entry["type"]: entry.get("path") for entry in value["linux"]["namespaces"]}


def refusal(plan: ContainerPlan = PLAN, placement: Placement = PLACEMENT) -> SandboxError:
    """The error with which compiling ends."""
    with pytest.raises(SandboxError) as caught:
        compile_bundle(plan, placement)
    return caught.value


def test_top_level_fields() -> None:
    """Version, root, host name and annotations come from plan and placement."""
    value = config()
    assert value["ociVersion"] == "1.0.2"
    assert value["root"] == {"path": "/state/mnt/root", "readonly": True}
    assert value["hostname"] == PLACEMENT.sandbox.hostname
    assert value["annotations"] == {
        "dev.forgeyard.sandbox": PLACEMENT.sandbox.value,
        "dev.forgeyard.plan": plan_digest(PLAN),
        "dev.forgeyard.seccomp": "general-build/2",
    }


def test_process_is_the_shim_without_rights() -> None:
    """Init is the placement's argv, as the job's user, with no capability and no_new_privs."""
    assert config()["process"] == {
        "args": ["/.forgeyard/init", "run"],
        "cwd": "/",
        "env": ["A=1", "PATH=/usr/bin"],
        "terminal": False,
        "noNewPrivileges": True,
        "user": {"uid": 1000, "gid": 1000, "additionalGids": [7], "umask": 0o027},
        "capabilities": {key: [] for key in ("bounding", "effective", "permitted", "inheritable", "ambient")},
        "rlimits": [
            {"type": "RLIMIT_CORE", "soft": 0, "hard": 0},
            {"type": "RLIMIT_NOFILE", "soft": 1024, "hard": 2048},
        ],
    }


def test_base_mounts_come_first_and_in_order() -> None:
    """The fixed mounts precede the plan's, and each mountpoint follows what it lies in."""
    destinations = [entry["destination"] for entry in config()["mounts"]]
    assert destinations[:7] == ["/proc", "/dev", "/dev/pts", "/dev/shm", "/dev/mqueue", "/sys", "/sys/fs/cgroup"]
    assert destinations[7:] == [entry.destination for entry in PLAN.mounts]


@pytest.mark.parametrize(
    ("destination", "options"),
    [
        ("/proc", {"nosuid", "nodev", "noexec"}),
        ("/dev", {"nosuid", "mode=755", f"size={64 << 20}"}),
        ("/dev/pts", {"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620", "gid=5"}),
        ("/dev/shm", {"nosuid", "nodev", "noexec", "mode=1777", f"size={32 << 20}"}),
        ("/dev/mqueue", {"nosuid", "nodev", "noexec"}),
        ("/sys", {"nosuid", "nodev", "noexec", "ro", "mode=755", f"size={1 << 20}"}),
        ("/sys/fs/cgroup", {"nosuid", "nodev", "noexec", "ro"}),
        ("/usr", {"rbind", "rprivate", "nosuid", "nodev", "ro", "rnosuid", "rnodev", "rro"}),
        ("/work/tmp", {"rbind", "rprivate", "nosuid", "nodev", "rnosuid", "rnodev"}),
        (
            "/data",
            {"rbind", "rprivate", "nosuid", "nodev", "noexec", "ro", "rnosuid", "rnodev", "rnoexec", "rro"},
        ),
        ("/ram", {"nosuid", "nodev", "mode=700", f"size={1 << 20}"}),
    ],
)
def test_mount_options(destination: str, options: set[str]) -> None:
    """Every mount is nosuid; binds keep what is mounted below them under the same rules."""
    assert set(mount(config(), destination)["options"]) == options


def test_binds_take_their_source_from_the_placement() -> None:
    """The plan names slots, the placement says where they are on this host."""
    assert mount(config(), "/work/tmp")["source"] == "/state/scratch/tmp"


def test_tty_group_only_where_it_is_mapped() -> None:
    """gid 5 in devpts would fail the mount in a namespace that has no gid 5."""
    small = replace(PLAN, user=JobUser(3, 3))
    assert "gid=5" not in mount(config(small, replace(PLACEMENT, uid_count=5)), "/dev/pts")["options"]


def test_all_namespaces_but_time() -> None:
    """With the network denied every namespace is new."""
    assert namespaces(config()) == dict.fromkeys(("cgroup", "ipc", "mount", "pid", "uts", "user", "network"))


def test_network_namespace_is_joined_by_path() -> None:
    """A namespace made for the attempt is joined; the host's network is the absence of one."""
    joined = config(replace(PLAN, network=NetworkMode.RESTRICTED), replace(PLACEMENT, netns="/run/netns/a"))
    assert namespaces(joined)["network"] == "/run/netns/a"
    # runc 1.1 could not join it from the user namespace that it joins first: it is started in it instead.
    inherited = replace(PLACEMENT, netns="/run/netns/a", userns="/run/userns/a")
    assert "network" not in namespaces(config(replace(PLAN, network=NetworkMode.RESTRICTED), inherited))
    assert "network" not in namespaces(config(replace(PLAN, network=NetworkMode.HOST)))


def test_id_mappings() -> None:
    """The container's ids are the placement's range, for users and groups."""
    mapping = [{"containerID": 0, "hostID": 2_000_000, "size": 65536}]
    linux = config()["linux"]
    assert linux["uidMappings"] == linux["gidMappings"] == mapping


def test_without_user_namespace() -> None:
    """No namespace, no mapping, and the group of terminals is the host's."""
    value = config(replace(PLAN, user_namespace=False), replace(PLACEMENT, uid_base=None))
    assert "user" not in namespaces(value)
    assert "uidMappings" not in value["linux"]
    assert "gid=5" in mount(value, "/dev/pts")["options"]


def test_resources() -> None:
    """Swap is off, cpu has a cap and a weight, devices are denied."""
    assert config()["linux"]["resources"] == {
        "devices": [{"allow": False, "access": "rwm"}],
        "memory": {"limit": 256 << 20, "swap": 256 << 20},
        "cpu": {"period": 100_000, "quota": 150_000, "shares": 1536},
        "pids": {"limit": 64},
    }


def test_small_cpu_and_no_limits() -> None:
    """The kernel's smallest quota is kept to; a limit that is not set is not written."""
    tiny = config(replace(PLAN, limits=ResourceLimits(cpus=0.001)))["linux"]["resources"]
    assert tiny["cpu"] == {"period": 100_000, "quota": 1000, "shares": 2}
    assert set(config(replace(PLAN, limits=ResourceLimits()))["linux"]["resources"]) == {"devices"}


def test_shm_has_a_size_without_being_asked() -> None:
    """A /dev/shm without a size would be half of the machine's memory."""
    assert f"size={64 << 20}" in mount(config(replace(PLAN, limits=ResourceLimits())), "/dev/shm")["options"]


def test_cgroup_path_is_optional() -> None:
    """None leaves the choice to the runtime."""
    assert config()["linux"]["cgroupsPath"] == PLACEMENT.cgroup
    assert "cgroupsPath" not in config(placement=replace(PLACEMENT, cgroup=None))["linux"]


def test_masked_paths_cover_what_engines_hide() -> None:
    """Kernel memory, keys and firmware can't be read, kernel switches can't be written."""
    linux = config()["linux"]
    assert {"/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/scsi", "/sys/firmware"} <= set(linux["maskedPaths"])
    in_proc = {"/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger"}
    assert set(linux["readonlyPaths"]) == {*in_proc, "/sys/fs/cgroup"}


def test_granted_root_has_no_inheritable_or_ambient_capability() -> None:
    """root-in-userns fills bounding, effective and permitted, nothing that would follow a change of uid."""
    caps = config(replace(PLAN, user=JobUser(0, 0), capabilities=ROOT_IN_USERNS_CAPABILITIES))["process"][
        "capabilities"
    ]
    assert caps["bounding"] == caps["effective"] == caps["permitted"] == sorted(ROOT_IN_USERNS_CAPABILITIES)
    assert caps["inheritable"] == caps["ambient"] == []


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"capabilities": ("CAP_SYS_ADMIN",), "user": JobUser(0, 0)}, "capability_not_grantable"),
        ({"capabilities": ("CAP_CHOWN",)}, "capabilities_need_root"),
        (
            {"capabilities": ("CAP_CHOWN",), "user": JobUser(0, 0), "user_namespace": False},
            "capabilities_need_user_namespace",
        ),
        ({"seccomp": "unconfined"}, "seccomp_profile"),
    ],
)
def test_a_grant_that_could_not_hold_is_refused(change: dict[str, Any], reason: str) -> None:
    """No single capabilities, none without a user namespace, none that execve would drop; no sandbox without filter."""
    error = refusal(
        replace(PLAN, **change), replace(PLACEMENT, uid_base=None if "user_namespace" in change else 2_000_000)
    )
    assert (error.kind, error.reason) == (SandboxErrorKind.UNSUPPORTED_ISOLATION, reason)


@pytest.mark.parametrize(
    ("mounts", "reason"),
    [
        ((PlanMount("/a", MountKind.BIND, slot="gone"),), "slot_without_source"),
        ((PlanMount("a", MountKind.TMPFS),), "bad_destination"),
        ((PlanMount("/", MountKind.TMPFS),), "bad_destination"),
        ((PlanMount("//a", MountKind.TMPFS),), "bad_destination"),
        ((PlanMount("/a/../b", MountKind.TMPFS),), "bad_destination"),
        ((PlanMount("/a/", MountKind.TMPFS),), "bad_destination"),
        ((PlanMount("/proc/sys", MountKind.TMPFS),), "mount_in_proc"),
        ((PlanMount("/dev/shm", MountKind.TMPFS),), "mounted_twice"),
        ((PlanMount("/sys/fs", MountKind.TMPFS),), "mount_hidden"),
        ((PlanMount("/a/b", MountKind.TMPFS), PlanMount("/a", MountKind.TMPFS)), "mount_hidden"),
    ],
)
def test_a_mount_that_would_not_be_what_it_says_is_refused(mounts: tuple[PlanMount, ...], reason: str) -> None:
    """Unknown slots, odd paths, and mounts that hide others end in a typed error."""
    error = refusal(replace(PLAN, mounts=mounts))
    assert (error.kind, error.reason) == (SandboxErrorKind.INVALID_FILESYSTEM_PLAN, reason)


@pytest.mark.parametrize(
    ("plan", "placement", "reason"),
    [
        ({}, {"uid_base": None}, "no_uid_range"),
        ({}, {"uid_base": 0}, "range_holds_root"),
        ({"user_namespace": False}, {}, "range_without_namespace"),
        ({"user": JobUser(70000, 1)}, {}, "id_outside_range"),
        ({"user": JobUser(1, 1, (65536,))}, {}, "id_outside_range"),
        ({"network": NetworkMode.HOST}, {"netns": "/run/netns/a"}, "host_network_with_namespace"),
        ({"network": NetworkMode.ALLOW}, {}, "no_network_namespace"),
        ({}, {"netns": "a"}, "relative_netns"),
        ({}, {"cgroup": "forgeyard/a"}, "bad_cgroup_path"),
        ({}, {"cgroup": "/forgeyard/../b"}, "bad_cgroup_path"),
        ({}, {"rootfs": "root"}, "relative_rootfs"),
        ({}, {"sources": {"usr": "usr", "tmp": "/t", "data": "/d"}}, "relative_source"),
        ({"rlimits": (Rlimit("RLIMIT_CORE", 0, 0), Rlimit("RLIMIT_CORE", 1, 1))}, {}, "rlimit_twice"),
    ],
)
def test_plan_and_placement_that_disagree_are_refused(
    plan: dict[str, Any], placement: dict[str, Any], reason: str
) -> None:
    """A contradiction never becomes a weaker sandbox."""
    assert refusal(replace(PLAN, **plan), replace(PLACEMENT, **placement)).reason == reason


@pytest.mark.parametrize(
    ("plan", "placement", "field"),
    [
        ({"env": {"A": "x\0y"}}, {}, "process.env[0]"),
        ({}, {"argv": ("/init", "\udcff")}, "process.args[1]"),
        ({}, {"argv": ()}, "argv"),
        ({"env": {"A=B": "x"}}, {}, "env"),
        ({"env": {"": "x"}}, {}, "env"),
    ],
)
def test_a_string_no_runtime_can_take_is_refused(plan: dict[str, Any], placement: dict[str, Any], field: str) -> None:
    """NUL bytes and text that is not Unicode are named by field."""
    with pytest.raises(InvalidRequest) as caught:
        compile_bundle(replace(PLAN, **plan), replace(PLACEMENT, **placement))
    assert caught.value.field == field


def test_an_escape_spelled_out_is_only_text() -> None:
    """A backslash, u and four zeros in a value are six characters, not a NUL."""
    assert "A=\\u0000" in config(replace(PLAN, env={"A": "\\u0000"}))["process"]["env"]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("hostname", "hostname"),
        ("linux/resources", "linux/resources/pids"),
        ("linux/resources/pids", "linux/resources"),
    ],
)
def test_two_options_writing_one_field_is_an_error(first: str, second: str) -> None:
    """The same field, a field above and a field below another's are all refused, in either order."""
    with pytest.raises(SandboxError) as caught:
        compose([{first: {}}, {second: {}}])
    assert (caught.value.kind, caught.value.reason) == (SandboxErrorKind.INTERNAL, "field_written_twice")


def test_options_side_by_side_are_put_together() -> None:
    """Two options may write next to each other."""
    assert compose([{"a/b": 1}, {"a/c": 2, "d": 3}]) == {"a": {"b": 1, "c": 2}, "d": 3}


def test_exec_is_never_above_init() -> None:
    """A process.json differs from init in argv, env and cwd alone."""
    plan = replace(PLAN, user=JobUser(0, 0), capabilities=ROOT_IN_USERNS_CAPABILITIES)
    process = json.loads(compile_exec(plan, PLACEMENT, ("sh", "-c", "id"), {"B": "2"}, "/work"))
    PROCESS_VALIDATOR.validate(process)
    assert (process["args"], process["env"], process["cwd"]) == (["sh", "-c", "id"], ["B=2"], "/work")
    own = {"args", "env", "cwd"}
    init = config(plan)["process"]
    assert {key: process[key] for key in process.keys() - own} == {key: init[key] for key in init.keys() - own}


def test_exec_needs_an_absolute_directory() -> None:
    """A relative working directory would depend on the runtime's own."""
    with pytest.raises(InvalidRequest, match="workdir"):
        compile_exec(PLAN, PLACEMENT, ("true",), {}, "work")


def test_plan_digest_ignores_the_attempt_and_sees_the_plan() -> None:
    """Two attempts share a plan digest and differ in the bundle's."""
    other = replace(PLACEMENT, sandbox=SandboxId.mint(), uid_base=3_000_000, rootfs="/elsewhere")
    one, two = compile_bundle(PLAN, PLACEMENT), compile_bundle(PLAN, other)
    assert one.plan_digest == two.plan_digest == plan_digest(PLAN)
    assert one.bundle_digest != two.bundle_digest


@pytest.mark.parametrize(
    "change",
    [
        {"umask": 0o022},
        {"steps": (Step("true", stdin=b"x"),)},
        {"steps": (Step("true", env={"A": "1"}),)},
        {"limits": ResourceLimits(cpus=2)},
        {"env": {"PATH": "/usr/bin", "A": "2"}},
    ],
)
def test_any_change_of_plan_changes_its_digest(change: dict[str, Any]) -> None:
    """Steps, their input, environment and limits are all part of what is run."""
    assert plan_digest(replace(PLAN, **change)) != plan_digest(PLAN)


def test_equal_plans_have_equal_digests() -> None:
    """2 and 2.0 cpus are equal, and so is an environment in another order."""
    one = replace(PLAN, limits=ResourceLimits(cpus=2.0), env={"A": "1", "B": "2"})
    two = replace(PLAN, limits=ResourceLimits(cpus=2), env={"B": "2", "A": "1"})
    assert one == two
    assert plan_digest(one) == plan_digest(two)
    assert compile_bundle(one, PLACEMENT) == compile_bundle(two, PLACEMENT)


def test_a_steps_input_is_hashed_not_written() -> None:
    """Nothing of a step stands in the bundle, so `bundle show` leaks no input."""
    bundle = compile_bundle(replace(PLAN, steps=(Step("cat", stdin=b"hunter2"),)), PLACEMENT)
    assert b"hunter2" not in bundle.config


def test_config_is_canonical_json() -> None:
    """Sorted keys, no blanks, one newline: the bytes are those of the value and nothing else."""
    config_bytes = compile_bundle(PLAN, PLACEMENT).config
    value = json.loads(config_bytes)
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    assert config_bytes == text.encode() + b"\n"


def test_compiling_leaves_no_trace_in_the_next_bundle() -> None:
    """The compiler keeps no state: the same input gives the same bytes after other input."""
    first = compile_bundle(PLAN, PLACEMENT)
    compile_bundle(replace(PLAN, env={}, mounts=(), network=NetworkMode.HOST), PLACEMENT)
    assert compile_bundle(PLAN, PLACEMENT) == first


def test_the_compiler_imports_the_model_alone() -> None:
    """No module of the compiler imports the host, the system or anything of ours but the model."""
    package = Path(str(spec.__file__)).parent
    imported = {name for file in package.glob("*.py") for name in _imports(ast.parse(file.read_text()))}
    ours = {name for name in imported if name.startswith("forgeyard_")}
    assert {name.split(".")[0] for name in ours} == {"forgeyard_model", "forgeyard_oci"}
    assert all(name.startswith("forgeyard_oci.spec") for name in ours if name.startswith("forgeyard_oci"))
    assert not imported & {"os", "subprocess", "asyncio", "pathlib", "socket", "time", "random", "shutil"}


def _imports(tree: ast.Module) -> list[str]:
    names = [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return names + [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]


def test_base_mounts_are_offered_to_planners() -> None:
    """Whoever makes a plan can see which destinations are taken."""
    assert {entry.destination for entry in base_mounts()} >= {"/proc", "/dev", "/dev/shm", "/sys/fs/cgroup"}


_Change = Callable[[dict[str, Any]], Any]


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value["linux"].update(sysctl={"net.ipv4.ip_forward": "1"}),
        lambda value: value["mounts"][0].update(uidMappings=[]),
        lambda value: value["linux"]["namespaces"].append({"type": "time"}),
        lambda value: value["process"]["capabilities"]["ambient"].append("CAP_CHOWN"),
        lambda value: value.update(hooks={}),
        lambda value: value["process"].update(noNewPrivileges=False),
    ],
)
def test_the_schema_is_closed(change: _Change) -> None:
    """The schema of these tests refuses what no runtime of ours honours, so passing it means something."""
    value = config()
    change(value)
    with pytest.raises(jsonschema.ValidationError):
        VALIDATOR.validate(value)
