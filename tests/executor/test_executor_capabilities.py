"""What an executor claims: proven, cached, renewed in the background, and never waited for by a job."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import run, sh
from killed import undone
from probed import ADAPTER, found

from forgeyard_executor import Executor, Job, Outcome, Step
from forgeyard_executor.capabilities import STANDARD_CI, conclusive, needed, refuse_missing
from forgeyard_executor.capabilities_probe import claims
from forgeyard_executor.capability_cache import CapabilityCache
from forgeyard_model.capabilities import ExecutorCapabilities, Feature
from forgeyard_model.errors import FailureClass, SandboxError, SandboxErrorKind
from forgeyard_model.identity import AttemptContext
from forgeyard_model.limits import Limits
from forgeyard_model.policy import IsolationLevel, NetworkMode, NetworkPolicy
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job


def request(source: str | None = None, **options: object) -> ExecutionRequest:
    """A request for a small job on the host rootfs."""
    job = Job(rootfs="host", steps=[Step("true")], **options)  # type: ignore[arg-type]  # passed on by name
    return request_from_job(job, context=AttemptContext("a"), workspace=PreparedWorkspace(source))


@pytest.mark.kernel
@pytest.mark.exclusive
@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_this_host_does_what_standard_ci_needs(state_dir: Path) -> None:
    """All probes work here, and leave nothing: no process, mount, group, namespace, file."""

    async def main() -> ExecutorCapabilities:
        async with Executor.open(state_dir) as executor:
            result = await executor.capabilities()
            assert await executor.capabilities() is result
            assert executor.list_sandboxes() == ()
            return result

    result = asyncio.run(main())
    assert {
        probe.feature: probe.details for probe in result.probes if probe.feature in STANDARD_CI and not probe.works
    } == {}
    assert sorted(probe.feature for probe in result.probes) == sorted(Feature)
    assert max(result.isolation_levels) is IsolationLevel.CONTAINER
    assert result.controllers
    assert result.probed_at is not None
    for name in ("sandboxes", "ledger", "spare"):
        assert not list((state_dir / name).glob("*"))


@pytest.mark.kernel
@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_killed_while_probing(state_dir: Path) -> None:
    """kill -9 in the middle of the probes: the next executor ends what still runs and removes what is left."""
    child = (
        "import asyncio, os, sys\n"
        "from forgeyard_executor import Executor\n"
        "from forgeyard_host import probes_cgroups\n"
        "probes_cgroups._until = lambda count: os.kill(os.getpid(), 9)\n"
        "async def main():\n"
        "    async with Executor.open(sys.argv[1]) as executor:\n"
        "        await executor.capabilities()\n"
        "asyncio.run(main())\n"
    )
    with undone(state_dir):
        killed = subprocess.run([sys.executable, "-c", child, str(state_dir)], timeout=30)
        assert killed.returncode == -signal.SIGKILL
        assert list((state_dir / "ledger").glob("*"))
        result, _, _ = run(state_dir, Job(rootfs="host", steps=[sh("true")]))
    assert result.outcome is Outcome.SUCCEEDED
    for name in ("sandboxes", "ledger", "spare"):
        assert not list((state_dir / name).glob("*")), name
    assert not [path for path in Path("/sys/fs/cgroup").glob("*/forgeyard/*/*") if _dead_owner(path)]


def _dead_owner(group: Path) -> bool:
    """Whether a group holds processes that no executor is a parent of; an empty one is another test's business."""
    if not group.is_dir():  # a file of a group, where the hierarchy's depth differs
        return False
    pids = (group / "cgroup.procs").read_text().split()
    return any(os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "tail" for pid in pids)


def test_a_job_never_waits_for_probes() -> None:
    """Before the first result, and beside a slow renewal, what is known is told at once."""

    async def main() -> None:
        go = asyncio.Event()
        asked = 0

        async def slow() -> ExecutorCapabilities:
            nonlocal asked
            asked += 1
            await go.wait()
            return found()

        cache = CapabilityCache(slow, ttl=600)
        assert cache.known() is None
        assert asked == 0, "an executor that was just opened does not probe unasked"
        first, second = asyncio.ensure_future(cache.get()), asyncio.ensure_future(cache.get())
        await asyncio.sleep(0)
        assert cache.known() is None
        go.set()
        assert await first is await second
        assert asked == 1, "two that ask share one probing"
        assert cache.known() is not None
        cache._at -= 601
        assert cache.known() is None, "a result that is too old says nothing"
        await cache.close()
        assert asked == 2, "and is renewed in the background"

    asyncio.run(main())


def test_failed_attempts_make_it_probe_again() -> None:
    """A doubt renews the result in the background, and many at once renew it once."""

    async def main() -> None:
        asked = 0

        async def probe() -> ExecutorCapabilities:
            nonlocal asked
            asked += 1
            return found()

        cache = CapabilityCache(probe)
        cache.doubt()
        assert asked == 0, "nothing was known yet: the gate has said it all"
        await cache.get()
        cache._at -= 10
        for _ in range(5):
            cache.doubt()
        await cache.close()
        assert asked == 2

    asyncio.run(main())


def test_probing_that_fails_is_no_result(caplog: pytest.LogCaptureFixture) -> None:
    """An error while probing is logged and told to who asked; the next one tries again."""

    async def main() -> None:
        failures = [OSError(24, "too many open files")]

        async def probe() -> ExecutorCapabilities:
            if failures:
                raise failures.pop()
            return found()

        cache = CapabilityCache(probe)
        with pytest.raises(OSError, match="too many"):
            await cache.get()
        assert cache.known() is None
        assert (await cache.get()).has(Feature.SECCOMP)

    asyncio.run(main())
    assert "too many open files" in caplog.text


def test_needs_follow_the_request() -> None:
    """Only what a request asks for can be missing."""
    plain = set(needed(request()))
    assert Feature.DISK_LIMIT not in plain
    assert Feature.OVERLAY not in plain
    assert plain | {Feature.OVERLAY} == STANDARD_CI
    assert Feature.OVERLAY in set(needed(request(source="/src")))
    assert Feature.DISK_LIMIT in set(needed(request(limits=Limits(disk="64MiB"))))
    host = request(network=NetworkPolicy.host(), profile=ExecutionProfile.DEVELOPMENT)
    assert not {Feature.NETWORK_DENY, Feature.NETWORK_NAMESPACE} & set(needed(host))


@pytest.mark.parametrize("feature", sorted(STANDARD_CI - {Feature.OVERLAY}))
def test_what_is_missing_is_refused(feature: Feature) -> None:
    """Each missing feature refuses a job that needs it, typed, named and with the probe's cure."""
    with pytest.raises(SandboxError) as caught:
        refuse_missing(request(), found(feature))
    error = caught.value
    assert feature.value in error.brief
    assert (error.reason, error.resolution) == (f"no_{feature.value}", "c")
    limit = feature.value.endswith("_limit") or feature is Feature.OOM_EVIDENCE
    expected = SandboxErrorKind.RESOURCE_LIMIT_FAILED if limit else SandboxErrorKind.UNSUPPORTED_ISOLATION
    assert error.kind is expected
    assert error.failure_class in (FailureClass.INFRASTRUCTURE, FailureClass.CONFIGURATION)


def test_what_is_not_needed_or_not_known_is_not_refused() -> None:
    """Nothing known, an optional feature missing, a probe that could not be carried out: the gate decides."""
    refuse_missing(request(), None)
    refuse_missing(request(), found(Feature.REFLINK, Feature.QUOTA, Feature.DISK_LIMIT, Feature.OVERLAY))
    unseen = found(unseen=(Feature.SECCOMP, Feature.PID_NAMESPACE))
    refuse_missing(request(), unseen)
    assert conclusive(unseen) is None
    assert conclusive(found(Feature.SECCOMP)) is not None


def test_claims_follow_the_probes() -> None:
    """A level, a mode or a limit is claimed only when everything that it rests on was seen to work."""
    assert found().isolation_levels == ADAPTER.isolation_levels
    assert found(Feature.OVERLAY).isolation_levels == {IsolationLevel.PROCESS, IsolationLevel.NAMESPACE}
    assert found(Feature.SECCOMP).isolation_levels == {IsolationLevel.PROCESS}
    assert found(Feature.KILL_TREE).isolation_levels == frozenset()
    assert found(unseen=(Feature.USER_NAMESPACE,)).isolation_levels == {IsolationLevel.PROCESS}
    assert NetworkMode.DENY not in found(Feature.NETWORK_DENY).network_modes
    assert not found(Feature.SWAP_LIMIT).resource_controls.memory
    assert claims(replace(ADAPTER, isolation_levels=frozenset()), found().probes, None).isolation_levels == frozenset()
