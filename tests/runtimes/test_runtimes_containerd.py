"""The adapter for containerd keeps its contract, at a real private containerd."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from containerd_jobs import (
    ROOTFS,
    Bare,
    assert_empty,
    bare,
    bare_place,
    ctr,
    executor_at,
    own_daemon,
    ref_of,
    result_of,
    runtime_at,
    shims,
)
from daemons import Containerd
from jobs import sh
from shim_sandbox import UID_BASE

from forgeyard_executor import Job, Limits, Outcome
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind
from forgeyard_model.plan import NetworkAttachment
from forgeyard_model.policy import NetworkMode
from forgeyard_runtimes.comparison import compare
from forgeyard_runtimes.containerd.client import Client
from forgeyard_runtimes.containerd.errors import DaemonError
from forgeyard_runtimes.containerd.runtime import ContainerdRuntime
from forgeyard_runtimes.containerd.settings import ContainerdSettings
from forgeyard_runtimes.contract import ContainerRef, ContainerStatus, Stdio

pytestmark = [pytest.mark.kernel, pytest.mark.daemon("containerd")]

daemon = pytest.fixture(scope="module")(own_daemon)
place = pytest.fixture(bare_place)


def test_a_job_has_its_own_result_and_leaves_nothing(
    daemon: Containerd,
    state_dir: Path,
    leaks: object,
    warm_rootfs: None,
    root: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Output, exit code and user namespace as with any runtime; record, task and shim are gone afterwards."""

    async def main() -> None:
        async with executor_at(daemon, state_dir, monkeypatch) as (executor, _):
            script = "echo here; cat /proc/self/uid_map; exit 7"
            result, out = await result_of(executor, Job(**root, steps=(sh(script),)))
            assert (result.outcome, result.exit_code) == (Outcome.FAILED, 7)
            lines = out.decode().split()
            assert (lines[0], lines[1], lines[3]) == ("here", "0", "65536")
            assert int(lines[2]) > 65536
            assert result.provenance.runtime.startswith("containerd ")

    asyncio.run(main())
    assert_empty(daemon)


def test_state_list_and_both_specs(daemon: Containerd, shared_state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon knows the job's container as running, and runs the very bundle that was compiled."""

    async def main() -> None:
        async with executor_at(daemon, shared_state, monkeypatch) as (executor, runtime):
            async with executor.run(Job(rootfs="host", steps=())) as execution:
                ref = ref_of(shared_state, execution)
                state = await runtime.state(ref)
                assert state.status is ContainerStatus.RUNNING
                assert await runtime.list((ref.directory,)) == (state,)
                assert await runtime.list((shared_state,)) == ()
                intended = json.loads(runtime._live[ref.container_id].bundle.config)
                assert Path(f"/proc/{state.pid}").exists()
                both = await runtime.read_back(ref)
                assert both.stored == intended
                assert both.written == intended
                assert runtime.effective_spec(ref) == intended
                assert compare(intended, both.written).weaker == ()
                usage = await runtime.usage(ref)
                assert 0 < usage.memory <= usage.memory_limit
                assert usage.pids >= 1
                assert ref.container_id in ctr(
                    daemon, "containers", "list", f"labels.forgeyard.sandbox=={execution.sandbox_id}"
                )
                execution.finish()
                assert (await execution.wait()).exit_code == 0
            absent = ContainerRef("fy-nosuch", shared_state)
            assert (await runtime.state(absent)).status is ContainerStatus.ABSENT
            await runtime.remove(absent)

    asyncio.run(main())
    assert_empty(daemon)


def test_an_oom_kill_is_evidence_of_ours_and_heard_of(
    daemon: Containerd, shared_state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The verdict rests on the kernel's counter; the daemon's event says the same (C28)."""

    async def main() -> None:
        async with executor_at(daemon, shared_state, monkeypatch) as (executor, runtime):
            job = Job(rootfs="host", limits=Limits(memory="64MiB"), steps=(sh("tail /dev/zero"),))
            async with executor.run(job) as execution:
                ref = ref_of(shared_state, execution)
                heard = asyncio.ensure_future(runtime._events.exited(ref.container_id))
                result = await execution.wait()
                assert result.outcome is Outcome.OUT_OF_MEMORY
                async with asyncio.timeout(60):
                    assert (await heard).oom

    asyncio.run(main())


def test_exec_has_the_processs_code(daemon: Containerd, place: Path) -> None:
    """exec runs a compiled process; its code is returned, a process that can't start is another thing."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            await made.run(runtime)
            process = made.spec["process"]

            async def run(*argv: str, deadline: float = 20) -> int:
                return await runtime.exec(made.ref, json.dumps({**process, "args": argv}).encode(), deadline=deadline)

            try:
                assert await run("/bin/sh", "-c", "exit 7") == 7
                assert await run("/bin/sh", "-c", "kill -9 $$") == 137
                assert await run("/bin/sh", "-c", "grep -q 'NoNewPrivs:.1' /proc/self/status") == 0
                with pytest.raises(ExecutorError, match="nosuch") as caught:
                    await run("/nosuch")
                assert caught.value.kind is ExecutorErrorKind.SPAWN_FAILED
                with pytest.raises(ExecutorError, match=r"0\.2s") as caught:
                    await run("/bin/sleep", "600", deadline=0.2)
                assert caught.value.kind is ExecutorErrorKind.TIMEOUT
                assert await run("/bin/sh", "-c", "! grep -l sleep /proc/[2-9]*/comm /proc/1[0-9]*/comm") == 0
            finally:
                await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_kill_and_remove_are_safe_to_repeat(daemon: Containerd, place: Path) -> None:
    """PID 1 dies by its pidfd, the record goes, and doing both again is no error; so is removing what still runs."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            pid = await made.run(runtime)
            pidfd = os.pidfd_open(pid)
            try:
                waiting = asyncio.ensure_future(runtime.wait(pidfd))
                await runtime.kill(made.ref, pidfd)
                await asyncio.wait_for(waiting, 60)
                await runtime.kill(made.ref, pidfd)
            finally:
                os.close(pidfd)
            await runtime.remove(made.ref)
            await runtime.remove(made.ref)
            assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT
            await made.run(runtime)
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_a_start_that_fails_leaves_nothing(daemon: Containerd, place: Path) -> None:
    """What runc said is in the error; no record, no task, no shim."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            for broken in (bare(place, "/nosuch"), no_root(bare(place))):
                with pytest.raises(DaemonError) as caught:
                    await broken.run(runtime)
                assert caught.value.kind is ExecutorErrorKind.SPAWN_FAILED
                assert "nosuch" in caught.value.details
                assert (await runtime.state(broken.ref)).status is ContainerStatus.ABSENT

    asyncio.run(main())
    assert_empty(daemon)


def no_root(made: Bare) -> Bare:
    """With a root that is not there."""
    return replace(made, spec={**made.spec, "root": {"path": "/nosuch", "readonly": True}})


def test_a_cancelled_start_leaves_nothing(daemon: Containerd, place: Path) -> None:
    """Whoever gives up in the middle finds no container afterwards."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            for steps in range(0, 12, 3):
                made = bare(place)
                await made.lay_down(runtime)
                starting = asyncio.ensure_future(runtime.start(made.ref))
                for _ in range(steps):
                    await asyncio.sleep(0)
                starting.cancel()
                await asyncio.wait((starting,))
                assert starting.cancelled()
                await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_a_name_that_is_taken_is_left_alone(daemon: Containerd, place: Path) -> None:
    """A second container of the same name is refused, and the first lives."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            pid = await made.run(runtime)
            with pytest.raises(DaemonError, match="exists"):
                await made.lay_down(runtime)
            assert (await runtime.state(made.ref)).pid == pid
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


@pytest.mark.parametrize(
    ("field", "edit"),
    [
        ("process.terminal", lambda spec: spec["process"].update(terminal=True)),
        ("root.path", lambda spec: spec["root"].update(path="rootfs")),
        ("linux.namespaces.network.path", lambda spec: both_by_path(spec)),
        ("linux.cgroupsPath", lambda spec: spec["linux"].update(cgroupsPath="a.slice:b:c")),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(daemon: Containerd, place: Path, field: str, edit: object) -> None:
    """A field that would be dropped or would fail is named before anything exists."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            assert runtime.carries(made.bundle) == ()
            edit(made.spec)  # type: ignore[operator]  # parametrised
            assert [name.partition(" ")[0] for name in runtime.carries(made.bundle)] == [field]
            with pytest.raises(SandboxError, match=field) as caught:
                await made.lay_down(runtime)
            assert caught.value.kind is SandboxErrorKind.UNSUPPORTED_ISOLATION

    asyncio.run(main())
    assert_empty(daemon)


def network(spec: dict[str, object], **entry: str) -> None:
    """Replace the network's entry among the namespaces, or leave it out."""
    linux: dict[str, list[dict[str, str]]] = spec["linux"]  # type: ignore[assignment]  # as JSON has it
    linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "network"]
    if entry:
        linux["namespaces"].append({"type": "network", **entry})


def test_the_daemons_own_network_is_never_inherited(daemon: Containerd, place: Path) -> None:
    """A bundle that names no network would get the host's: refused, unless the host's was asked for."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            network(made.spec)
            with pytest.raises(SandboxError, match="daemon") as caught:
                await made.lay_down(runtime)
            assert caught.value.kind is SandboxErrorKind.NETWORK_SETUP_FAILED
            await runtime.create(made.ref, made.bundle, ROOTFS, NetworkAttachment(NetworkMode.HOST), Stdio())
            with pytest.raises(ExecutorError, match="network namespace"):
                await runtime.start(made.ref, netns="/proc/self/ns/net")
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def both_by_path(spec: dict[str, object], pid: int = 1) -> None:
    """Join the user namespace and the network of processes by path."""
    network(spec, path=f"/proc/{os.getpid()}/ns/net")
    linux: dict[str, list[dict[str, str]]] = spec["linux"]  # type: ignore[assignment]  # as JSON has it
    linux["namespaces"] = [each for each in linux["namespaces"] if each["type"] != "user"]
    linux["namespaces"].append({"type": "user", "path": f"/proc/{pid}/ns/user"})


def test_why_networks_are_plumbed_here(daemon: Containerd, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shim's runc joins a network beside a user namespace of its own making, and not beside one by path."""
    monkeypatch.setattr("forgeyard_runtimes.containerd.runtime.refuse_uncarried", lambda *_: None)

    async def main(pid: int) -> None:
        async with runtime_at(daemon) as runtime:
            assert runtime.network_join == "plumbed"
            made = bare(place)
            network(made.spec, path=f"/proc/{os.getpid()}/ns/net")
            joined = Path(f"/proc/{await made.run(runtime)}/ns/net").stat().st_ino
            assert joined == Path("/proc/self/ns/net").stat().st_ino
            await runtime.remove(made.ref)
            made = bare(place)
            both_by_path(made.spec, pid)
            with pytest.raises(DaemonError, match="runc create failed"):
                await made.run(runtime)

    with user_namespace() as pid:
        asyncio.run(main(pid))
    assert_empty(daemon)


@contextlib.contextmanager
def user_namespace() -> Iterator[int]:
    """A process in a user namespace with the usual map."""
    holder = subprocess.Popen(["unshare", "--user", "sleep", "60"])
    own = os.readlink("/proc/self/ns/user")
    try:
        while os.readlink(f"/proc/{holder.pid}/ns/user") == own:
            assert holder.poll() is None
        for name in ("uid_map", "gid_map"):
            Path(f"/proc/{holder.pid}/{name}").write_text(f"0 {UID_BASE} 65536")
        yield holder.pid
    finally:
        holder.kill()
        holder.wait()


def test_a_user_namespace_may_be_joined_by_path(daemon: Containerd, place: Path) -> None:
    """The shim resolves a path below /proc as we do, and the container is in that namespace."""

    async def main(holder: int) -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            both_by_path(made.spec, holder)
            network(made.spec)
            made.spec["linux"]["namespaces"].append({"type": "network"})
            pid = await made.run(runtime)
            assert os.readlink(f"/proc/{pid}/ns/user") == os.readlink(f"/proc/{holder}/ns/user")
            assert Path(f"/proc/{pid}/uid_map").read_text().split() == ["0", str(UID_BASE), "65536"]
            await runtime.remove(made.ref)

    with user_namespace() as holder:
        asyncio.run(main(holder))
    assert_empty(daemon)


def test_several_event_loops_use_one_adapter(daemon: Containerd, place: Path) -> None:
    """Threads with loops of their own ask at the same time; each has its own connection."""
    answers: list[ContainerStatus] = []

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            await made.run(runtime)

            async def ask() -> None:
                answers.extend([(await runtime.state(made.ref)).status for _ in range(20)])
                await runtime.client.close()

            threads = [threading.Thread(target=lambda: asyncio.run(ask())) for _ in range(3)]
            for thread in threads:
                thread.start()
            await ask()
            await asyncio.to_thread(lambda: [thread.join() for thread in threads])
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert answers == [ContainerStatus.RUNNING] * 80


def test_answers_may_be_large(daemon: Containerd, place: Path) -> None:
    """A list of more than gRPC's own 4 MiB is read."""

    async def main() -> None:
        async with runtime_at(daemon, state="large") as runtime:
            wanted = [bare(place, name=f"fy-large-{number}") for number in range(3)]
            for made in wanted:
                made.spec["annotations"] = {"padding": "x" * (2 << 20)}
                await made.lay_down(runtime)
            found = await runtime.list((place,))
            assert [state.status for state in found] == [ContainerStatus.CREATING] * 3
            for made in wanted:
                await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_the_handler_may_run_crun(daemon: Containerd, place: Path) -> None:
    """Another program with runc's command line runs the container, or says by itself what it lacks on this host."""

    async def main() -> None:
        async with runtime_at(daemon, binary="crun") as runtime:
            made = bare(place)
            said = "cgroup"
            try:
                await made.run(runtime)
            except DaemonError as error:
                said = error.details
            assert "cgroup" in said
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_a_signal_to_the_shim_is_named(daemon: Containerd, place: Path) -> None:
    """When the shim is killed the container goes too: that is the runtime's loss, not the job's end (C31b)."""

    async def main() -> None:
        async with runtime_at(daemon) as runtime:
            made = bare(place)
            pid = await made.run(runtime)
            pidfd = os.pidfd_open(pid)
            assert await runtime.loss(made.ref) is None
            (shim,) = shims(daemon)
            os.kill(shim, signal.SIGKILL)
            async with asyncio.timeout(60):
                await runtime.wait(pidfd)
            os.close(pidfd)
            lost = await runtime.loss(made.ref)
            assert lost is not None
            assert (lost.kind, lost.reason) == (ExecutorErrorKind.LOST, "runtime_lost")
            await runtime.remove(made.ref)

    asyncio.run(main())
    assert_empty(daemon)


def test_find_needs_a_known_handler(daemon: Containerd) -> None:
    """gVisor and Kata open no FIFO of ours and are refused; an unknown one is named with those that are known."""

    async def find(handler: str) -> None:
        async with runtime_at(daemon, handler=handler):
            pass

    for handler, words in (("io.containerd.runsc.v1", "FIFO"), ("io.containerd.kata.v2", "FIFO"), ("x", "runc.v2")):
        with pytest.raises(ExecutorError, match=words) as caught:
            asyncio.run(find(handler))
        assert caught.value.kind is ExecutorErrorKind.UNSUPPORTED


def test_the_adapter_is_a_runtime() -> None:
    """It has all that the contract names."""
    from forgeyard_runtimes.contract import ContainerRuntime

    wanted = {name for name in vars(ContainerRuntime) if not name.startswith("_")}
    made = ContainerdRuntime(Client("/nosuch.sock", "test"), ContainerdSettings(), "1.6.0")
    assert wanted | {"find"} <= set(dir(made))
