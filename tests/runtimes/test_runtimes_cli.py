"""The adapter for runtime command lines keeps its contract, with a real runc; what a runtime does badly is named."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import stat
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from jobs import sh

from forgeyard_executor import Executor, ExecutorError, ExecutorErrorKind, Job, SandboxErrorKind
from forgeyard_runtimes.cli_runtime import CliRuntime
from forgeyard_runtimes.cli_traits import TRAITS
from forgeyard_runtimes.contract import ContainerRef, ContainerStatus

pytestmark = pytest.mark.kernel


def with_container(state: Path, body: Callable[[CliRuntime, ContainerRef], Coroutine[Any, Any, None]]) -> None:
    """Run `body` beside a container that waits for steps."""

    async def main() -> None:
        runtime = await CliRuntime.find("runc")
        async with Executor.open(state) as executor, executor.run(Job(rootfs="host", steps=())) as execution:
            files = state / "sandboxes" / execution.sandbox_id / "mnt/files"
            await body(runtime, ContainerRef(f"fy-{execution.sandbox_id}", files))
            execution.finish()
            result = await execution.wait()
            assert result.exit_code == 0, result.message

    asyncio.run(main())


def test_state_list_and_effective_spec(shared_state: Path) -> None:
    """The runtime knows the container as running, with PID 1's pid, and runs the very bundle that was compiled."""

    async def body(runtime: CliRuntime, ref: ContainerRef) -> None:
        state = await runtime.state(ref)
        assert state.status is ContainerStatus.RUNNING
        assert state.pid == int((ref.directory / "pid").read_text())
        assert await runtime.list((ref.directory,)) == (state,)
        spec = runtime.effective_spec(ref)
        assert spec["process"]["args"] == ["/.forgeyard/init", "fifo"]
        assert spec["process"]["noNewPrivileges"] is True
        absent = await runtime.state(ContainerRef("nosuch", ref.directory))
        assert (absent.status, absent.pid) == (ContainerStatus.ABSENT, 0)

    with_container(shared_state, body)


def test_exec_has_the_processs_code_and_never_more_rights(shared_state: Path) -> None:
    """exec runs a compiled process; its code is returned, the runtime's own failure is another thing."""

    async def body(runtime: CliRuntime, ref: ContainerRef) -> None:
        process = dict(runtime.effective_spec(ref)["process"])

        async def run(*argv: str) -> int:
            document = json.dumps({**process, "args": list(argv), "env": ["PATH=/usr/bin:/bin"]})
            return await runtime.exec(ref, document.encode(), deadline=20)

        assert await run("/bin/sh", "-c", "exit 7") == 7
        assert await run("/bin/sh", "-c", "grep -q 'NoNewPrivs:.1' /proc/self/status") == 0
        with pytest.raises(ExecutorError, match="nosuch") as caught:
            await run("/nosuch")
        assert caught.value.kind is ExecutorErrorKind.SPAWN_FAILED
        assert not list(ref.directory.glob("exec-*"))

    with_container(shared_state, body)


def test_exec_that_outlives_its_time_is_killed(shared_state: Path) -> None:
    """Not the command alone that waits for it: the process in the container too."""

    async def body(runtime: CliRuntime, ref: ContainerRef) -> None:
        process = dict(runtime.effective_spec(ref)["process"])
        document = json.dumps({**process, "args": ["/bin/sleep", "98765"], "env": ["PATH=/usr/bin:/bin"]})
        with pytest.raises(ExecutorError) as caught:
            await runtime.exec(ref, document.encode(), deadline=3)
        assert caught.value.kind is ExecutorErrorKind.TIMEOUT
        with pytest.raises(ExecutorError):
            await runtime.exec(ref, document.encode(), deadline=0)
        # A killed process goes when its parent, by now PID 1 of the container, has reaped it.
        look = "i=0; while grep -qs 98765 /proc/[0-9]*/cmdline; do i=$((i+1)); [ $i -lt 100000 ] || exit 1; done"
        again = json.dumps({**process, "args": ["/bin/sh", "-c", look], "env": ["PATH=/usr/bin:/bin"]})
        assert await runtime.exec(ref, again.encode().replace(b"98765 ", b"9876[5] "), deadline=20) == 0

    with_container(shared_state, body)


@pytest.mark.parametrize(("name", "reason"), [("nosuch", "runtime_unknown"), ("runsc", "runtime_unverified")])
def test_runtimes_that_cannot_serve_are_refused(state_dir: Path, name: str, reason: str) -> None:
    """An unknown runtime, and one whose isolation can't be verified, are typed refusals at open."""

    async def main() -> None:
        async with Executor.open(state_dir, runtime=name):
            pass

    with pytest.raises(ExecutorError) as caught:
        asyncio.run(main())
    assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.UNSUPPORTED, reason)
    assert caught.value.resolution


def lying_runtime(directory: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """Put a program called runc in front of the real one: what a broken or hostile runtime would do."""
    path = directory / "runc"
    path.write_text(script.replace("@RUNC@", shutil.which("runc", path="/usr/sbin:/usr/bin:/usr/local/sbin") or "runc"))
    path.chmod(path.stat().st_mode | stat.S_IXUSR)

    def which(name: str, **_: object) -> str:
        return str(directory / name)

    monkeypatch.setattr("forgeyard_runtimes.cli_runtime.shutil.which", which)


EDITS_BUNDLE = """#!/usr/bin/python3
import json, os, sys
if "--bundle" in sys.argv:
    path = sys.argv[sys.argv.index("--bundle") + 1] + "/config.json"
    spec = json.load(open(path))
    linux, process = spec["linux"], spec["process"]
    @EDIT@
    json.dump(spec, open(path, "w"))
os.execv("@RUNC@", ["runc", *sys.argv[1:]])
"""


@pytest.mark.parametrize(
    ("edit", "reason"),
    [
        ('process["noNewPrivileges"] = False', "gate_no_new_privs"),
        ('del linux["seccomp"]', "gate_seccomp"),
        ('process["capabilities"]["bounding"] = ["CAP_SYS_ADMIN"]', "gate_capabilities"),
        (
            'linux["namespaces"] = [n for n in linux["namespaces"] if n["type"] != "ipc"]; '
            'spec["mounts"] = [m for m in spec["mounts"] if m["type"] != "mqueue"]',
            "gate_namespace_ipc",
        ),
        ('linux["namespaces"] = [n for n in linux["namespaces"] if n["type"] != "network"]', "gate_namespace_net"),
        ('linux["namespaces"] = [n for n in linux["namespaces"] if n["type"] != "user"]', "gate_"),
    ],
)
def test_what_a_runtime_did_not_apply_is_refused_at_the_gate(
    state_dir: Path,
    leaks: object,
    warm_rootfs: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    edit: str,
    reason: str,
) -> None:
    """A runtime that drops part of the bundle starts no job: no claim rests on the bundle alone."""
    lying_runtime(tmp_path, monkeypatch, EDITS_BUNDLE.replace("@EDIT@", edit))
    error = refused(state_dir, Job(rootfs="host", steps=(sh("echo ran"),)))
    assert error.kind in (ExecutorErrorKind.PREPARE, ExecutorErrorKind.SPAWN_FAILED)
    if error.sandbox is not None:
        assert error.reason.startswith(reason)
    assert os.listdir(state_dir / "sandboxes") == []


def refused(state: Path, job: Job) -> ExecutorError:
    """The error that `job` meets at start."""

    async def main() -> None:
        async with Executor.open(state) as executor, executor.run(job):
            pass

    with pytest.raises(ExecutorError) as caught:
        asyncio.run(main())
    return caught.value


FAILS = """#!/bin/sh
case "$*" in *--version*) exec @RUNC@ --version;; esac
echo "cannot clone the whatever" >&2
exit 1
"""
DIES_AFTER_START = """#!/bin/sh
case "$*" in *--version*) exec @RUNC@ --version;; esac
@RUNC@ "$@" || exit
kill -9 "$(cat "$(echo "$*" | sed 's/.*--pid-file \\([^ ]*\\).*/\\1/')")"
"""


@pytest.mark.parametrize(("script", "words"), [(FAILS, "cannot clone the whatever")])
def test_a_failing_runtime_is_infrastructure_and_leaves_nothing(
    state_dir: Path,
    leaks: object,
    warm_rootfs: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    script: str,
    words: str,
) -> None:
    """What the runtime said is in the error, and everything made for the attempt is gone."""
    lying_runtime(tmp_path, monkeypatch, script)
    error = refused(state_dir, Job(rootfs="host", steps=(sh("true"),)))
    assert words in str(error)
    assert error.sandbox is not None
    assert error.sandbox.kind is SandboxErrorKind.NAMESPACE_FAILED
    assert os.listdir(state_dir / "ledger") == []


def test_a_container_that_dies_at_once_is_a_failed_start(
    state_dir: Path, leaks: object, warm_rootfs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PID 1 killed right after its start: a typed error within moments or the job's failure, never a hang."""
    lying_runtime(tmp_path, monkeypatch, DIES_AFTER_START)

    async def main() -> str:
        async with Executor.open(state_dir) as executor:
            try:
                async with executor.run(Job(rootfs="host", steps=())) as execution:
                    return (await execution.wait()).outcome.value
            except ExecutorError as error:
                return error.kind.value

    assert asyncio.run(main()) in ("infrastructure_failure", "spawn_failed", "lost")


def test_a_runtime_that_hangs_is_killed(
    state_dir: Path, leaks: object, warm_rootfs: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that never answers is ended with its group, and named."""
    monkeypatch.setattr("forgeyard_runtimes.cli_runtime.START_DEADLINE", 0.3)
    script = '#!/bin/sh\ncase "$*" in *--version*) exec @RUNC@ --version;; esac\nsleep 600 & wait\n'
    lying_runtime(tmp_path, monkeypatch, script)
    error = refused(state_dir, Job(rootfs="host", steps=(sh("true"),)))
    assert error.kind is ExecutorErrorKind.TIMEOUT


def test_crun_goes_through_the_same_adapter(
    state_dir: Path, leaks: object, warm_rootfs: None, require_tool: Callable[[str], str]
) -> None:
    """crun runs the job, or says by itself what it lacks on this host (it refuses hybrid cgroups); nothing is left."""
    require_tool("crun")

    async def main() -> str:
        async with Executor.open(state_dir, runtime="crun") as executor:
            try:
                async with executor.run(Job(rootfs="host", steps=(sh("echo from crun"),))) as execution:
                    result = await execution.wait()
            except ExecutorError as error:
                return str(error)
            assert result.provenance.runtime.startswith("crun ")
            return result.message

    message = asyncio.run(main())
    assert message == "succeeded" or "cgroup" in message


def test_the_table_of_runtimes_is_what_the_readme_names() -> None:
    """Adding a runtime means saying so."""
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in TRAITS)
