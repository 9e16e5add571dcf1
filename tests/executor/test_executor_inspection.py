"""What a runtime really applies, seen before any job: on every adapter, weakened ones too, and nothing stays."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from adapter_jobs import ADDRESS_VARIABLES, Jobs, config_for, jobs_on
from adapters import DAEMON_NAMES, parameter
from daemon_objects import assert_as_before, groups_of, seen
from weakened import WeakRuntime, weak_daemon

from forgeyard_executor import Executor, ExecutorError, Job, Outcome, Step
from forgeyard_executor.inspection import Inspection
from forgeyard_model.policy import SourceMode
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.services import ServiceSpec
from forgeyard_runtimes.applied import Applied, AppliedRow
from forgeyard_runtimes.cells import STRICTER

pytestmark = pytest.mark.kernel

ADAPTERS = ("runc", *ADDRESS_VARIABLES)
ON_ALL = pytest.mark.parametrize("adapter", list(map(parameter, ADAPTERS)), indirect=True)
ON_RUNC = pytest.mark.parametrize("adapter", [parameter("runc")], indirect=True)
ON_DAEMONS = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.daemon(DAEMON_NAMES[name])) for name in ADDRESS_VARIABLES]
)


WEAKNESSES = {
    "capability_added": {("process.capabilities.bounding", "spec"), ("process.capabilities.bounding", "kernel")},
    "no_new_privileges_off": {("process.noNewPrivileges", "spec"), ("process.noNewPrivileges", "kernel")},
    "seccomp_unconfined": {("linux.seccomp", "spec"), ("linux.seccomp", "kernel")},
    "memory_unlimited": {("linux.resources.memory.limit", "spec"), ("linux.resources.memory.limit", "kernel")},
    "namespace_missing": {("linux.namespaces.uts", "spec"), ("linux.namespaces.uts", "kernel")},
    "mask_missing": {("linux.maskedPaths", "spec")},
    "mount_writable": {("mounts./sys/fs/cgroup.ro", "spec"), ("mounts./sys/fs/cgroup", "kernel")},
    "mount_added": {("mounts./tmp/extra", "spec")},
}
"""Some of the ways to weaken a runtime, and the rows that have to tell of each: field, and by whom."""


@pytest.fixture
def adapter(request: pytest.FixtureRequest, state_dir: Path, warm_rootfs: None) -> Iterator[Jobs]:
    """Jobs on the adapter that the parameter names, in a state directory of the test's own."""
    with jobs_on(request, state_dir) as jobs:
        yield jobs


def inspected(jobs: Jobs, job: Job, source: Path | None = None) -> Inspection:
    """What the adapter applies of a job."""
    found: list[Inspection] = []

    async def body(executor: Executor) -> None:
        found.append(await executor.inspect_applied(jobs.fitted(job), source=source))
        assert executor.list_sandboxes() == ()

    jobs.drive(body)
    return found[0]


def rows(found: Inspection, applied: Applied) -> list[AppliedRow]:
    """Of all its containers."""
    return [row for container in found.containers for row in container.rows if row.applied is applied]


def assert_nothing_left(state: Path) -> None:
    """No attempt, no ledger, no group of an executor that worked here."""
    for name in ("sandboxes", "ledger"):
        assert list((state / name).iterdir()) == []
    executors = {path.name for path in (state / "spool").iterdir()}
    assert executors
    assert [path for group in groups_of(executors) for path in Path(group).iterdir() if path.is_dir()] == []
    assert [path for name in executors for path in (state / "spool" / name).iterdir()] == []


@ON_ALL
@pytest.mark.parametrize("mode", ["host", "image"])
def test_no_runtime_is_weaker(adapter: Jobs, mode: str, busybox_image: str) -> None:
    """Nothing is weaker, and nothing stricter, but what the adapter declares; each field is told by both sides."""
    root = {"rootfs": "host"} if mode == "host" else {"image": busybox_image, "user": "1000:1000"}
    found = inspected(adapter, Job(**root, steps=(Step("/bin/true"),)))  # type: ignore[arg-type]  # by name
    assert found.runtime.startswith(adapter.name)
    assert (found.weaker, found.left) == (False, ())
    assert all(row.declared for row in rows(found, Applied.WEAKER))
    assert {row.field for row in rows(found, Applied.STRICTER) if not row.declared} == set()
    assert {row.field for row in rows(found, Applied.STRICTER)} <= set(STRICTER.get(adapter.name, ()))
    equal = {(row.field, row.by.value) for row in rows(found, Applied.EQUAL)}
    for what, fields in WEAKNESSES.items():
        if what == "mount_added":
            continue
        # A field with a finding below it is shown by that; here there is none.
        assert {(field.removesuffix(".ro"), by) for field, by in fields if field != "linux.seccomp"} <= equal
    assert ("linux.seccomp", "kernel") in equal
    assert_nothing_left(adapter.state)


@ON_ALL
def test_nothing_of_the_workload_runs(adapter: Jobs, tree: Path) -> None:
    """What a job would write into a tree is not there after an inspection, and is after a run."""
    tree.chmod(0o777)
    job = Job(
        rootfs="host",
        profile=ExecutionProfile.DEVELOPMENT,
        source_mode=SourceMode.RW,
        steps=(Step("touch", "/work/source/ran"),),
    )
    inspected(adapter, job, tree)
    assert not (tree / "ran").exists()
    result, _, err = adapter.run(job, source=tree)
    assert result.outcome is Outcome.SUCCEEDED, err
    assert (tree / "ran").exists()


@ON_ALL
def test_services_are_looked_at_too(adapter: Jobs, busybox_image: str) -> None:
    """A job with a service has a block of rows for each, and neither is released."""
    service = ServiceSpec("web", image=busybox_image, entrypoint=(), command=("/bin/sleep", "600"), user="1000")
    found = inspected(adapter, Job(image=busybox_image, user="1000:1000", steps=(Step("true"),), services=(service,)))
    assert [container.name for container in found.containers] == ["job", "web"]
    assert len({container.bundle_digest for container in found.containers}) == 2
    assert (found.weaker, found.left) == (False, ())
    assert_nothing_left(adapter.state)


@ON_RUNC
@pytest.mark.usefixtures("leaks")
def test_a_result_tells_of_no_constant(adapter: Jobs) -> None:
    """A job's provenance has what is stricter and not declared, which is nothing."""
    result, _, _ = adapter.run(Job(rootfs="host", steps=(Step("true"),)))
    assert result.provenance.stricter == ()


@ON_RUNC
@pytest.mark.usefixtures("leaks")
def test_a_cancelled_inspection(adapter: Jobs) -> None:
    """Whenever it is cancelled, everything goes."""

    async def body(executor: Executor) -> None:
        for seconds in (0.0, 0.05, 0.1, 0.2):
            task = asyncio.ensure_future(executor.inspect_applied(Job(rootfs="host", steps=(Step("true"),))))
            # A moment of the start, whichever it is: all of them have to be alike.
            await asyncio.sleep(seconds)
            task.cancel()
            await asyncio.wait((task,))
            assert executor.list_sandboxes() == ()

    adapter.drive(body)
    assert_nothing_left(adapter.state)


@ON_RUNC
@pytest.mark.usefixtures("leaks")
def test_a_runtime_that_can_not_start_it(adapter: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error, as a run has it, and nothing stays."""
    monkeypatch.setattr("forgeyard_runtimes.cli_runtime.CliRuntime._argv", lambda *_, **__: ("/bin/false",))
    with pytest.raises(ExecutorError, match="could not start the container"):
        inspected(adapter, Job(rootfs="host", steps=(Step("true"),)))
    assert_nothing_left(adapter.state)


@ON_DAEMONS
@pytest.mark.usefixtures("warm_rootfs")
def test_a_weakened_daemon(
    name: str,
    state_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    require_tool: Callable[[str], str],
) -> None:
    """Each thing that a daemon's runtime leaves out is a row, by its spec and by the kernel; a job is not released."""
    weak = WeakRuntime(tmp_path, os.path.realpath(require_tool("runc")))

    job = Job(rootfs="host", steps=(Step("true"),))

    async def strong() -> None:
        async with Executor.open(state_dir, runtime=name, config=config_for(name)) as executor:
            assert not (await executor.inspect_applied(job)).weaker

    async def weakened() -> None:
        async with Executor.open(state_dir, runtime=name, config=config_for(name)) as executor:
            for what, fields in WEAKNESSES.items():
                weak.leave_out(what)
                found = await executor.inspect_applied(job)
                weaker = [row for row in rows(found, Applied.WEAKER) if not row.declared]
                if (name, what) == ("docker", "mount_writable"):
                    # Compared are the kernel's flags: of each hierarchy, and not of the place around them.
                    fields = {(field, by) for field, by in fields if by == "kernel"}
                assert fields <= {(row.field, row.by.value) for row in weaker}, (what, weaker)
                assert (found.weaker, found.left) == (bool(fields), ())
            with pytest.raises(ExecutorError):
                async with executor.run(job):
                    pass

    with weak_daemon(name, weak) as daemon:
        monkeypatch.setenv(ADDRESS_VARIABLES[name], daemon.address)
        asyncio.run(strong())
        before = seen(daemon)  # Docker keeps one image of ours for the next job
        asyncio.run(weakened())
        assert_as_before(daemon, before)
    assert_nothing_left(state_dir)
