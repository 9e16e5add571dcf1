"""The general-build filter: its data file, and what the kernel does under it."""

from __future__ import annotations

import errno
import json
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.plan import ContainerPlan, JobUser, MountKind, Placement, PlanMount
from forgeyard_model.policy import NetworkMode
from forgeyard_oci.spec import compile_bundle, load_profile

PROFILE = load_profile("general-build")
OCI = PROFILE.render("x86_64")
UID_BASE = 1_800_000_000


def test_shape_is_an_allowlist_that_answers_enosys() -> None:
    """An unknown call looks unimplemented, so that programs fall back, and only the native architecture is filtered."""
    assert (OCI["defaultAction"], OCI["defaultErrnoRet"]) == ("SCMP_ACT_ERRNO", errno.ENOSYS)
    assert OCI["architectures"] == ["SCMP_ARCH_X86_64"]


def test_unconditional_rules_are_two_groups() -> None:
    """One entry allows, one refuses: each further entry would cost time at every start."""
    plain = [rule for rule in OCI["syscalls"] if "args" not in rule]
    assert [(rule["action"], rule.get("errnoRet")) for rule in plain] == [
        ("SCMP_ACT_ALLOW", None),
        ("SCMP_ACT_ERRNO", errno.EPERM),
    ]


def test_no_call_is_decided_twice() -> None:
    """A call stands in one group, or has rules by argument, never both."""
    decided = [*PROFILE.allow, *PROFILE.refuse, *{rule.syscall for rule in PROFILE.rules}]
    decided += [name for names in PROFILE.allow_on.values() for name in names]
    assert len(decided) == len(set(decided))


def test_dangerous_calls_are_in_no_allow_list() -> None:
    """Kernel code, mounts, namespaces, keyrings and io_uring are not there for a job."""
    kept_out = {"bpf", "mount", "setns", "unshare", "keyctl", "clone3", "io_uring_setup", "userfaultfd", "init_module"}
    assert not kept_out & set(PROFILE.allow)


def test_calls_with_a_fallback_are_left_unknown() -> None:
    """clone3 and io_uring answer ENOSYS, for libraries the cue to try the older call; EPERM they take as an end."""
    assert not {"clone3", "io_uring_setup", "io_uring_enter", "io_uring_register"} & set(PROFILE.refuse)


@pytest.mark.parametrize("argument", [*range(64), 1 << 40 | 38, 0xFFFFFFFF])
def test_socket_rules_decide_every_family_once(argument: int) -> None:
    """Rules by argument never overlap with different answers, and none is left to the default."""
    matching = [rule for rule in PROFILE.rules if rule.syscall == "socket" and _matches(rule, argument)]
    allowed = argument in (1, 2, 10, 16)
    assert {rule.errno for rule in matching} == ({None} if allowed else {"EAFNOSUPPORT"})


@pytest.mark.parametrize("flag", [0x20000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000])
def test_clone_rules_refuse_each_new_namespace(flag: int) -> None:
    """A flag for a new namespace is EPERM, alone or among those of a thread, which are allowed."""
    thread = 0x3D0F00
    for flags, answer in ((flag, "EPERM"), (flag | thread, "EPERM"), (thread, None), (17, None)):
        answers = {rule.errno for rule in PROFILE.rules if rule.syscall == "clone" and _matches(rule, flags)}
        assert answers == {answer}


def _matches(rule: Any, argument: int) -> bool:
    """As the kernel compares: 64 bits, unsigned."""
    tests = {
        "eq": lambda test: argument == test.value,
        "ne": lambda test: argument != test.value,
        "gt": lambda test: argument > test.value,
        "masked_eq": lambda test: argument & test.mask == test.value,
    }
    return all(tests[test.op](test) for test in rule.tests)


def test_the_file_carries_its_name_and_version() -> None:
    """File name, content and provenance agree, and groups are sorted for the reader."""
    data = json.loads(files("forgeyard_oci").joinpath("data/seccomp/general-build-2.json").read_bytes())
    assert PROFILE.identity == f"{data['name']}/{data['version']}" == "general-build/2"
    assert all(names == sorted(names) for names in [*data["allow"].values(), *data["refuse"].values()])


def test_another_machine_gets_its_own_architecture() -> None:
    """arm64 hosts filter arm64 and know no arch_prctl."""
    other = PROFILE.render("aarch64")
    assert other["architectures"] == ["SCMP_ARCH_AARCH64"]
    assert "arch_prctl" in OCI["syscalls"][0]["names"]
    assert "arch_prctl" not in other["syscalls"][0]["names"]


def test_unknown_profile_or_machine_is_refused() -> None:
    """A filter we do not have is no reason to run without one."""
    for attempt in (lambda: load_profile("none"), lambda: PROFILE.render("riscv64")):
        with pytest.raises(SandboxError) as caught:
            attempt()
        assert caught.value.kind is SandboxErrorKind.UNSUPPORTED_ISOLATION


# What the kernel does. One sandbox per test that needs one; the host's /usr and /etc stand in for a rootfs.

PROBE = r"""
import ctypes, errno, json, os, platform
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *args):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *[ctypes.c_ulong(a) for a in args])
    return "ok" if result >= 0 else errno.errorcode[ctypes.get_errno()]
none = (ctypes.c_ulong * 2)(0, 0)
new_user, new_net, sigchld = 0x10000000, 0x40000000, 17
def child(flags):
    pid = libc.syscall(ctypes.c_long(56), ctypes.c_ulong(flags), None, None, None, None)
    if pid == 0: os._exit(0)
    if pid < 0: return errno.errorcode[ctypes.get_errno()]
    os.waitpid(pid, 0)
    return "ok"
answers = {
    "unknown": call(900), "clone3": call(435, 0, 0), "io_uring_setup": call(425, 1, 0),
    "modify_ldt": call(154, 0, 0, 0),
    "mount": call(165, 0, 0, 0, 0, 0), "umount2": call(166, 0, 0), "pivot_root": call(155, 0, 0),
    "bpf": call(321, 0, 0, 0),
    "unshare_user": call(272, new_user), "unshare_nothing": call(272, 0), "setns": call(308, 0, 0),
    "keyctl": call(250, 0, 0), "perf_event_open": call(298, 0, 0, 0, 0, 0), "userfaultfd": call(323, 0),
    "open_tree": call(428, 0, 0, 0), "init_module": call(175, 0, 0, 0), "kexec_load": call(246, 0, 0, 0, 0),
    "open_by_handle_at": call(304, 0, 0, 0), "syslog": call(103, 10, 0, 0), "settimeofday": call(164, 0, 0),
    "fanotify_init": call(300, 0, 0), "iopl": call(172, 0), "reboot": call(169, 0, 0, 0, 0),
    "fork": child(sigchld), "fork_user": child(sigchld | new_user),
    "fork_user_net": child(sigchld | new_user | new_net),
    "fork_net": child(sigchld | new_net),
    "persona_read": call(135, 0xFFFFFFFF), "persona_norandomize": call(135, 0x40000), "persona_linux": call(135, 0),
    "persona_svr4": call(135, 1), "persona_read_implies_exec": call(135, 0x400000),
    "af_unix": call(41, 1, 1, 0), "af_inet": call(41, 2, 1, 0), "af_inet6": call(41, 10, 1, 0),
    "af_netlink": call(41, 16, 3, 0), "af_alg": call(41, 38, 5, 0), "af_vsock": call(41, 40, 1, 0),
    "af_packet": call(41, 17, 3, 0), "af_ax25": call(41, 3, 5, 0), "af_key": call(41, 15, 3, 2),
    "af_alg_high": call(41, (1 << 32) | 38, 5, 0), "pair_ax25": call(53, 3, 5, 0, 0),
    "limits_own": call(302, 0, 4, ctypes.addressof(none), 0), "limits_read": call(302, 1, 4, 0, ctypes.addressof(none)),
    "limits_other": call(302, 1, 4, ctypes.addressof(none), 0),
    "limits_other_high": call(302, (1 << 32) | 1, 4, ctypes.addressof(none), 0),
}
print(json.dumps(answers))
"""

EXPECTED = {
    "ENOSYS": [
        *("unknown", "clone3", "io_uring_setup", "modify_ldt", "persona_svr4", "persona_read_implies_exec"),
        *("limits_other", "limits_other_high"),
    ],
    "EPERM": [
        *("mount", "umount2", "pivot_root", "bpf", "unshare_user", "unshare_nothing", "setns", "keyctl"),
        *("perf_event_open", "userfaultfd", "open_tree", "init_module", "kexec_load", "open_by_handle_at", "syslog"),
        *("settimeofday", "fanotify_init", "iopl", "reboot", "fork_user", "fork_user_net", "fork_net"),
    ],
    "EAFNOSUPPORT": ["af_alg", "af_vsock", "af_packet", "af_ax25", "af_key", "af_alg_high", "pair_ax25"],
    "ok": [
        *("fork", "persona_read", "persona_norandomize", "persona_linux"),
        *("af_unix", "af_inet", "af_inet6", "af_netlink", "limits_own", "limits_read"),
    ],
}

needs_x86 = pytest.mark.skipif(platform.machine() != "x86_64", reason="the probe has x86_64 call numbers")
needs_runc = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("runc") is None, reason="needs root and runc")


@pytest.fixture
def box() -> Iterator[Path]:
    """A root skeleton whose ancestors the container's root may pass."""
    # Not tmp_path: its parents are 0700, and runc with a user namespace has to walk through them.
    base = Path(tempfile.mkdtemp(prefix="fy-seccomp-", dir="/var/tmp"))
    base.chmod(0o711)
    root = base / "rootfs"
    for name in ("usr", "etc", "proc", "dev", "sys", "tmp"):
        (root / name).mkdir(parents=True)
    for name in ("bin", "sbin", "lib", "lib64"):
        (root / name).symlink_to(f"usr/{name}")
    (base / "tmp").mkdir()
    os.chown(base / "tmp", UID_BASE + 1000, UID_BASE + 1000)
    (base / "bundle").mkdir()
    yield base
    shutil.rmtree(base)


def run(box: Path, *argv: str) -> subprocess.CompletedProcess[str]:
    """Run `argv` in a sandbox with the filter, as uid 1000 of a user namespace."""
    plan = ContainerPlan(
        kind=ExecutorKind.PROCESS,
        rootfs_identity="test",
        root_read_only=True,
        mounts=(
            PlanMount("/usr", MountKind.BIND, slot="usr"),
            PlanMount("/etc", MountKind.BIND, slot="etc"),
            PlanMount("/tmp", MountKind.BIND, slot="tmp", read_only=False),
        ),
        user=JobUser(1000, 1000),
        user_namespace=True,
        network=NetworkMode.DENY,
        capabilities=(),
        seccomp="general-build",
        limits=ResourceLimits(memory=1 << 30, pids=256),
        rlimits=(),
        umask=0o022,
        env={"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"},
        workdir="/tmp",
        steps=(),
    )
    sandbox = SandboxId.mint()
    placement = Placement(
        sandbox=sandbox,
        rootfs=str(box / "rootfs"),
        sources={"usr": "/usr", "etc": "/etc", "tmp": str(box / "tmp")},
        uid_base=UID_BASE,
        uid_count=65536,
        cgroup=f"/forgeyard-test-{sandbox}",
        netns=None,
        argv=argv,
    )
    (box / "bundle" / "config.json").write_bytes(compile_bundle(plan, placement, machine=platform.machine()).config)
    runtime = ["runc", "--root", str(box / "runtime")]
    return subprocess.run(
        [*runtime, "run", "-b", str(box / "bundle"), sandbox.container],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.kernel
@needs_runc
@needs_x86
def test_answers_of_the_kernel(box: Path) -> None:
    """Unknown calls are ENOSYS, known ones out of bounds EPERM, other families unsupported, the rest works."""
    done = run(box, "/usr/bin/python3", "-c", PROBE)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    wanted = {name: answer for answer, names in EXPECTED.items() for name in names}
    assert {name: answers[name] for name in wanted} == wanted


TOOLS = {
    "threads": (
        "python3",
        'python3 -c "import concurrent.futures as f; print(sum(f.ThreadPoolExecutor(8).map(abs, range(99))))"',
    ),
    "processes": (
        "python3",
        """python3 -c "import multiprocessing as m
if __name__=='__main__': print(m.get_context('fork').Pool(2).map(abs, [1, 2]))\"""",
    ),
    "asyncio": ("python3", "python3 -c \"import asyncio; asyncio.run(asyncio.create_subprocess_exec('true'))\""),
    "gcc": ("gcc", "echo 'int main(){return 0;}' > a.c && gcc -O2 -pthread -o a a.c && ./a"),
    "git": (
        "git",
        "git init -q r && cd r && git -c user.name=a -c user.email=a@b commit -q --allow-empty -m x && git gc -q",
    ),
    "tar": ("tar", "mkdir d && mkfifo d/f && ln -s x d/l && tar cf a.tar d && tar xf a.tar -C /tmp"),
    "make": ("make", "printf 'all: a b\na b:\n\tsleep 0\n' > Makefile && make -j4"),
    "java": ("java", "java -Xmx64m -version"),
    "node": (
        "node",
        "node -e \"require('fs').promises.readFile('/etc/hostname').catch(()=>0).then(()=>process.exit(0))\"",
    ),
    "strace": ("strace", "strace -f -o t sh -c 'true & wait' && grep -q exit_group t"),
    "setarch": ("setarch", "setarch -R true && setarch linux32 uname -m"),
}


@pytest.mark.kernel
@needs_runc
@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_real_tools_work(box: Path, tool: str) -> None:
    """Compilers, version control, archives, interpreters, tracers and virtual machines run under the filter."""
    program, script = TOOLS[tool]
    if not Path("/usr/bin", program).exists():
        pytest.skip(f"{program} is not installed")
    done = run(box, "/bin/sh", "-ec", f"cd /tmp\n{script}")
    assert done.returncode == 0, done.stderr


@pytest.mark.kernel
@needs_runc
def test_program_of_another_architecture_dies_by_sigsys(box: Path) -> None:
    """A 32-bit call ends in SIGSYS, as the documentation says: only the native architecture is filtered."""
    if platform.machine() != "x86_64" or shutil.which("gcc") is None:
        pytest.skip("needs gcc on x86_64")
    source = 'int main(void){int r; __asm__ volatile("int $0x80" : "=a"(r) : "a"(20)); return 0;}'
    done = run(box, "/bin/sh", "-c", f"cd /tmp && echo '{source}' > a.c && gcc -o a a.c && ./a; echo $?")
    assert done.stdout.strip() == "159"
