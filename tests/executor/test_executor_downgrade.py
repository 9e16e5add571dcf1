"""Features really taken away from an executor: what needs them is refused, what runs goes on, nothing is left."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from adapters import DAEMON_FIXTURES, parameter
from daemon_remains import remove_groups
from jobs import sh
from weakened import WeakRuntime, weak_daemon
from weakenings import ELSEWHERE, WEAKENINGS

from forgeyard_executor import Executor, ExecutorConfig, ExecutorError, Job, Outcome
from forgeyard_model.config import Endpoints
from forgeyard_model.errors import FailureClass
from forgeyard_model.policy import ApprovedHostPath, Need
from forgeyard_process_shim.hostroot import HostRootfs

pytestmark = pytest.mark.kernel

# An attempt runs while the feature goes. Then: what a new job meets at once, what it meets once the probes have
# been renewed, that the attempt still runs steps, and, where the feature can be given back, that jobs run again.
CHILD = """
import asyncio, ctypes, json, os, struct, subprocess, sys
from forgeyard_executor import Executor, Job, Step
from forgeyard_model.errors import ExecutorError

state, what = sys.argv[1:]
MEMORY = "/sys/fs/cgroup/memory"

def hide():
    subprocess.run(["mount", "-t", "tmpfs", "none", MEMORY], check=True)

def give_back():
    subprocess.run(["umount", MEMORY], check=True)

def refuse_user_namespaces():
    "A system call filter on this process and all its children: no unshare or clone with CLONE_NEWUSER, no clone3."
    def op(code, k, jt=0, jf=0):
        return struct.pack("=HBBI", code, jt, jf, k)
    errno = 0x00050000
    program = b"".join((
        op(0x20, 0), op(0x15, 435, 5, 0), op(0x15, 272, 1, 0), op(0x15, 56, 0, 4),
        op(0x20, 16), op(0x54, 0x10000000), op(0x15, 0, 1, 0),
        op(0x06, errno | 1), op(0x06, 0x7FFF0000),
    ))
    # A jump to the end of clone3 lands on EPERM too: libraries fall back to clone only on ENOSYS.
    program = program[:8] + op(0x15, 435, 6, 0) + program[16:-8] + op(0x06, 0x7FFF0000) + op(0x06, errno | 38)
    buffer = ctypes.create_string_buffer(program)
    class Program(ctypes.Structure):
        _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))
    filter = Program(len(program) // 8, ctypes.addressof(buffer))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(317, 1, 1, ctypes.byref(filter)) != 0:  # seccomp(SET_MODE_FILTER, TSYNC)
        raise OSError(ctypes.get_errno(), "seccomp")

async def attempt(executor):
    try:
        async with executor.run(Job(rootfs="host", steps=[Step("true")])) as execution:
            return {"outcome": (await execution.wait()).outcome}
    except ExecutorError as error:
        sandbox = error.sandbox
        return {"kind": sandbox and sandbox.kind, "reason": error.reason, "cure": error.resolution, "brief": str(error)}

async def main():
    report = {}
    async with Executor.open(state) as executor:
        before = await executor.capabilities()
        report["before"] = sorted(probe.feature for probe in before.probes if probe.works)
        async with executor.run(Job(rootfs="host", steps=[])) as running:
            await running.exec(Step("true"))
            {"memory": hide, "userns": refuse_user_namespaces}[what]()
            report["at_once"] = await attempt(executor)
            after = await executor.capabilities(renew=True)
            report["after"] = sorted(probe.feature for probe in after.probes if probe.works)
            report["levels"] = sorted(level.value for level in after.isolation_levels)
            report["refused"] = await attempt(executor)
            report["step"] = (await running.exec(Step("true"))).exit.code
            if what == "memory":
                give_back()
                await executor.capabilities(renew=True)
                report["given_back"] = await attempt(executor)
            running.finish()
            report["running"] = (await running.wait()).outcome
    print(json.dumps(report))

asyncio.run(main())
"""

# Stands in for runc: edits the bundle, and runs the real one.
RUNTIME = """#!{python} -IS
import json, os, sys
real, what = {real!r}, {what!r}
if "--bundle" in sys.argv:
    path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        spec = json.load(file)
    linux, resources = spec["linux"], spec["linux"]["resources"]
    if what == "seccomp":
        del linux["seccomp"]
    elif what == "no_new_privs":
        spec["process"]["noNewPrivileges"] = False
    else:
        del resources[what]
    with open(path, "w") as file:
        json.dump(spec, file)
os.execv(real, [real, *sys.argv[1:]])
"""

ONCE = """
import asyncio, json, sys
from forgeyard_executor import Executor, Job, Step
from forgeyard_model.errors import ExecutorError

async def attempt(executor):
    try:
        async with executor.run(Job(rootfs="host", steps=[Step("true")])) as execution:
            return {"outcome": (await execution.wait()).outcome}
    except ExecutorError as error:
        return {"kind": error.sandbox and error.sandbox.kind, "reason": error.reason, "brief": str(error)}

async def main():
    async with Executor.open(sys.argv[1]) as executor:
        report = {"gate": await attempt(executor)}
        found = await executor.capabilities()
        report["works"] = sorted(probe.feature for probe in found.probes if probe.works)
        report["levels"] = len(found.isolation_levels)
        report["refused"] = await attempt(executor)
    print(json.dumps(report))

asyncio.run(main())
"""


def in_private_mounts(*command: str) -> dict[str, Any]:
    """Run `command` in a mount namespace of its own, and read the JSON it prints."""
    run = subprocess.run(
        ["unshare", "--mount", "--propagation", "private", *command],
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        env=os.environ | {"PYTHONWARNINGS": "default"},
    )
    assert run.returncode == 0, run.stderr
    report: dict[str, Any] = json.loads(run.stdout)
    return report


@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_hidden_memory_controller(state_dir: Path) -> None:
    """Without its memory controller an executor refuses jobs with a memory limit; with it again, it runs them."""
    report = in_private_mounts(sys.executable, "-c", CHILD, str(state_dir), "memory")
    lost = set(report["before"]) - set(report["after"])
    assert lost >= {"memory_limit", "swap_limit", "oom_evidence"}
    assert "kind" in report["at_once"]
    assert report["refused"]["kind"] == "resource_limit_failed"
    assert report["refused"]["reason"] == "no_memory_limit"
    assert "memory_limit" in report["refused"]["brief"]
    assert "memory controller" in report["refused"]["cure"]
    assert (report["step"], report["running"]) == (0, "succeeded")
    assert report["given_back"] == {"outcome": "succeeded"}
    assert nothing_left(state_dir)


@pytest.mark.usefixtures("warm_rootfs", "leaks")
@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the filter has x86_64 system call numbers")
def test_refused_user_namespaces(state_dir: Path) -> None:
    """Where the kernel makes no user namespaces any more, new jobs are refused and the running one goes on."""
    report = in_private_mounts(sys.executable, "-c", CHILD, str(state_dir), "userns")
    assert "user_namespace" in report["before"]
    assert "user_namespace" not in report["after"]
    assert "namespace" not in report["levels"]
    assert report["at_once"]["kind"] == "namespace_failed"
    assert report["refused"]["kind"] in ("unsupported_isolation", "namespace_failed")
    assert "user namespace" in report["refused"]["brief"] or "idmapped_mount" in report["refused"]["brief"]
    assert "max_user_namespaces" in report["refused"]["cure"]
    assert (report["step"], report["running"]) == (0, "succeeded")
    assert nothing_left(state_dir)


GATE = {
    "seccomp": ("privilege_drop_failed", "gate_seccomp", "no_seccomp"),
    "no_new_privs": ("privilege_drop_failed", "gate_no_new_privs", "no_no_new_privs"),
    "memory": ("resource_limit_failed", "gate_limit_memory", "gate_limit_memory"),
    "pids": ("resource_limit_failed", "gate_limit_pids", "gate_limit_pids"),
}


@pytest.mark.usefixtures("warm_rootfs", "leaks")
@pytest.mark.parametrize("what", GATE)
def test_runtime_that_leaves_something_out(what: str, state_dir: Path, require_tool: Callable[[str], str]) -> None:
    """A runtime that drops a part of the bundle gets no job: the gate sees it, and so do the probes."""
    runc = os.path.realpath(require_tool("runc"))
    real, wrapper = state_dir / "real-runc", state_dir / "runc"
    shutil.copy(runc, real)
    wrapper.write_text(RUNTIME.format(python=sys.executable, real=str(real), what=what))
    wrapper.chmod(0o755)
    script = 'mount --bind "$1" "$2"; shift 2; exec "$@"'
    shell = ("sh", "-ec", script, "sh", str(wrapper), runc)
    report = in_private_mounts(*shell, sys.executable, "-c", ONCE, str(state_dir))
    kind, at_gate, later = GATE[what]
    assert (report["gate"]["kind"], report["gate"]["reason"]) == (kind, at_gate)
    assert report["levels"] == 0
    assert what not in report["works"]
    assert report["refused"]["reason"] == later
    for path in (real, wrapper):
        path.unlink()
    assert nothing_left(state_dir)


def nothing_left(state_dir: Path) -> bool:
    """No attempt, ledger or probe's directory is in the state directory."""
    for name in ("sandboxes", "ledger", "spare"):
        assert not list((state_dir / name).glob("*")), name
    return True


# --- daemons ---------------------------------------------------------------------------------------------------------

FIELDS = {
    "capability_added": ("gate_capabilities", "bounding 0x200000"),
    "no_new_privileges_off": ("gate_no_new_privs", "no_new_privs"),
    "namespace_missing": ("gate_namespace_uts", "uts namespace"),
    "mask_missing": ("runtime_weaker", "linux.maskedPaths: /proc/kcore"),
    "readonly_path_missing": ("runtime_weaker", "linux.readonlyPaths: /proc/sys"),
    "memory_unlimited": ("gate_limit_memory", "memory limit"),
    "pids_unlimited": ("gate_limit_pids", "pids limit"),
    "cpu_unlimited": ("gate_limit_cpu", "cpu limit"),
    "seccomp_rule_dropped": ("runtime_weaker", "linux.seccomp.syscalls: "),
    "seccomp_call_allowed": ("runtime_weaker", "linux.seccomp.syscalls: mount, umount2"),
    "seccomp_unconfined": ("gate_seccomp", "seccomp filter"),
    "mount_writable": ("runtime_weaker", "mounts./sys/fs/cgroup"),
    "mount_added": ("runtime_weaker", "mounts./tmp/extra: read-only bind of /etc"),
    "device_added": ("runtime_weaker", "linux.devices: /dev/kmsg"),
    "ids_of_the_host": ("gate_id_map", "(70000, 0, 1)"),
    "other_cgroup": ("gate_cgroup", ELSEWHERE),
}
"""By kind of weakening: the error's reason, and how it names the field."""
NO_USER_NAMESPACE = ("docker", "ids_of_the_host")
CASES = [(name, kind) for name in DAEMON_FIXTURES for kind in FIELDS if (name, kind) != NO_USER_NAMESPACE]


@dataclass(frozen=True, slots=True)
class Weak:
    """A daemon with a runtime that can be told to do less, and what an executor needs to use it.

    :param mark: a directory that jobs see as /mark.
    """

    name: str
    runtime: WeakRuntime
    config: ExecutorConfig
    state: Path
    mark: Path

    async def attempt(self) -> Outcome:
        """Run a job that leaves a file in /mark, by an executor that has not probed anything yet."""
        async with Executor.open(self.state, runtime=self.name, config=self.config) as executor:
            assert executor.recovered.swept == (), "an earlier container was left at the daemon"
            async with executor.run(Job(rootfs="host", steps=(sh("echo ran >/mark/ran"),))) as execution:
                return (await execution.wait()).outcome


def start_weak(name: str, shared: Path, stack: ExitStack) -> Weak:
    """A daemon, until `stack` ends, with a state directory of its own: executors remember every engine they had."""
    here = Path(tempfile.mkdtemp(prefix="fy-weak-", dir="/var/tmp"))
    stack.callback(shutil.rmtree, here)
    stack.callback(remove_groups, ELSEWHERE)
    here.chmod(0o711)
    mark, state, directory = here / "mark", here / "state", here / "runtime"
    directory.mkdir()
    runtime = WeakRuntime(directory)
    mark.mkdir()
    mark.chmod(0o777)
    HostRootfs(shared / "rootfs").plan()
    shutil.copytree(shared / "rootfs", state / "rootfs", symlinks=True)
    daemon = stack.enter_context(weak_daemon(name, runtime))
    config = ExecutorConfig(
        endpoints=Endpoints(**{name: daemon.address}),
        user_namespace=Need.PREFERRED if name == "docker" else Need.REQUIRED,
        approved_host_paths=(ApprovedHostPath(str(mark), "/mark", read_only=False),),
    )
    return Weak(name, runtime, config, state, mark)


@pytest.fixture(scope="module")
def weak_daemons(shared_state: Path) -> Iterator[Callable[[str], Weak]]:
    """Each daemon once for the module, in whatever order the tests run."""
    with ExitStack() as stack:
        yield cache(lambda name: start_weak(name, shared_state, stack))


@pytest.fixture
def weak(request: pytest.FixtureRequest, weak_daemons: Callable[[str], Weak]) -> Weak:
    """The daemon that the parameter names, with a runtime that can be told to do less."""
    return weak_daemons(request.param)


def on_weak(*cases: tuple[str, ...]) -> pytest.MarkDecorator:
    """Parametrise a test over daemons, and what more each case has."""
    found = [pytest.param(*case, marks=parameter(case[0]).marks, id="-".join(case)) for case in cases]
    return pytest.mark.parametrize(("weak", "kind")[: len(cases[0])], found, indirect=["weak"])


@on_weak(*((name,) for name in DAEMON_FIXTURES))
def test_a_runtime_that_does_as_it_is_told(weak: Weak) -> None:
    """The wrapper alone changes nothing: the job runs."""
    assert asyncio.run(weak.attempt()) is Outcome.SUCCEEDED
    ran = weak.mark / "ran"
    assert ran.read_text() == "ran\n"
    ran.unlink()


@on_weak(*CASES)
def test_a_daemon_that_is_weaker_than_its_bundle(weak: Weak, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """An infrastructure failure that names the field, and an audit event; no byte of the job ran, nothing is left."""
    reason, words = FIELDS[kind]
    with (
        weak.runtime.weakening(kind),
        caplog.at_level(logging.ERROR, "forgeyard.audit"),
        pytest.raises(ExecutorError) as caught,
    ):
        asyncio.run(weak.attempt())
    error = caught.value
    assert (error.reason, error.failure_class) == (reason, FailureClass.INFRASTRUCTURE), error
    assert words in str(error)
    events = [record for record in caplog.records if record.name == "forgeyard.audit"]
    # On a slow machine the probes have been at it as well.
    assert events
    assert words in events[0].getMessage()
    assert not (weak.mark / "ran").exists()
    assert nothing_left(weak.state)


def test_every_kind_is_tried() -> None:
    """A new way to weaken a bundle gets its case on every daemon."""
    assert set(FIELDS) == set(WEAKENINGS)
