"""What a host can do is looked at again and again: who asked hears of a change, and what was lost is refused."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import sh
from probed import found
from served import socket_over, until, within

from forgeyard_api.client import RemoteExecutor
from forgeyard_api.observe import audit
from forgeyard_api.observe.audit_writer import auditing
from forgeyard_executor import Executor, Job, Outcome, capability_cache
from forgeyard_executor.capabilities import reason_of
from forgeyard_executor.capability_cache import CapabilityCache, changed
from forgeyard_executor.interface import JobExecutor
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_host import disks
from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.limits import Limits

DISK = Feature.DISK_LIMIT


class Host:
    """A host whose probes say what they are told to. `asked`: how often."""

    def __init__(self, answer: ExecutorCapabilities | Exception) -> None:
        self.answer = answer
        self.asked = 0

    async def probe(self) -> ExecutorCapabilities:
        """What it is like now."""
        self.asked += 1
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def test_renewed_by_the_timer_alone() -> None:
    """Once something is known it is kept good, though nobody watches and no job comes; not after the end."""

    async def body() -> None:
        host = Host(found())
        cache = CapabilityCache(host.probe, ttl=0.05)
        async with cache.kept_fresh():
            await cache.get()
            await until(lambda: host.asked >= 4)
            host.answer = found(DISK)
            await until(lambda: (known := cache.known()) is not None and not known.has(DISK))
        await cache.close()
        asked = host.asked
        await asyncio.sleep(0.2)  # nothing comes that could be waited for
        assert host.asked == asked

    within(body())


def test_an_executor_of_one_job_never_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timer begins with the first result, or when the executor has been there for long."""

    async def body() -> None:
        host = Host(found())
        cache = CapabilityCache(host.probe, ttl=0.02)
        async with cache.kept_fresh():
            await asyncio.sleep(0.2)  # ten times as long as a result is good for
            assert host.asked == 0
        monkeypatch.setattr(capability_cache, "LONG_LIVED", 0.0)
        async with cache.kept_fresh():
            await until(lambda: host.asked >= 2)
        await cache.close()

    within(body())


def test_a_watcher_sees_changes_and_nothing_else() -> None:
    """Not that the probes used other words; each change once, the latest where it was slow."""

    async def body() -> None:
        host = Host(found())
        cache = CapabilityCache(host.probe, ttl=0.05)
        async with cache.kept_fresh(), aclosing(cache.changes()) as changes:
            assert (await anext(changes)).has(DISK)
            waiting = asyncio.ensure_future(anext(changes))
            wordy = tuple(replace(probe, details="other words") for probe in found().probes)
            host.answer = replace(found(), probes=wordy)
            asked = host.asked
            await until(lambda: host.asked >= asked + 3)
            assert not waiting.done()
            host.answer = found(DISK)
            assert not (await waiting).has(DISK)
            for answer in (found(), found(Feature.SECCOMP)):  # while nobody asks
                host.answer = answer
                asked = host.asked
                await until(lambda asked=asked: host.asked >= asked + 2)  # type: ignore[misc]  # bound here
            latest = await anext(changes)
            assert latest.has(DISK)
            assert not latest.has(Feature.SECCOMP)
        await cache.close()

    within(body())


def test_a_watch_outlives_probes_that_fail(caplog: pytest.LogCaptureFixture) -> None:
    """An error of the probing is told once, not at every turn, and ends no stream; what was known goes stale."""

    async def body() -> None:
        host = Host(found())
        cache = CapabilityCache(host.probe, ttl=0.05)
        async with cache.kept_fresh(), aclosing(cache.changes()) as changes:
            await anext(changes)
            waiting = asyncio.ensure_future(anext(changes))
            host.answer = ExecutorError(ExecutorErrorKind.IO_FAILED, "probes", "no room for probes")
            asked = host.asked
            await until(lambda: host.asked >= asked + 4)
            await until(lambda: cache.known() is None)
            host.answer = found(DISK)
            assert not (await waiting).has(DISK)
        await cache.close()

    with caplog.at_level(logging.WARNING, "forgeyard.executor"):
        within(body())
    assert [record.message for record in caplog.records if "no room for probes" in record.message] == [
        "probing what this host can do failed: no room for probes"
    ]


def test_changes_are_written_down(caplog: pytest.LogCaptureFixture) -> None:
    """A loss is a warning and a security event, its return an event; a probe that could not be made is neither."""

    async def body() -> None:
        host = Host(found())
        cache = CapabilityCache(host.probe)
        for answer in (found(), found(DISK), found(DISK), found(DISK, unseen=(Feature.SECCOMP,)), found()):
            host.answer = answer
            await cache.get(renew=True)

    with caplog.at_level(logging.INFO, "forgeyard"):
        within(body())
    audited = [record for record in caplog.records if record.name == "forgeyard.audit"]
    assert [record.audit for record in audited] == [  # type: ignore[attr-defined]  # the audit's own field
        {"event": event, "feature": "disk_limit", "runtime": "runc"} for event in ("capability_lost", "capability_back")
    ]
    told = [record.getMessage() for record in caplog.records if record.name == "forgeyard.executor"]
    assert told == [
        "this host no longer provides disk_limit, and jobs that need it are refused: d",
        "this host provides disk_limit again",
    ]


def test_a_keeper_records_what_its_host_loses(tmp_path: Path) -> None:
    """It is the one that knows, so of all that servers record it records this too."""

    async def body() -> None:
        host = Host(found())
        cache = CapabilityCache(host.probe)
        await cache.get()
        host.answer = found(DISK)
        await cache.get(renew=True)

    with auditing(str(tmp_path / "audit"), gate_only=True):
        audit.record(audit.Event.DRAIN, "the server's to record")
        within(body())
    (line,) = (tmp_path / "audit").read_text().splitlines()
    told = json.loads(line)
    assert (told["event"], told["severity"], told["feature"]) == ("capability_lost", "warning", "disk_limit")


def test_what_has_changed() -> None:
    """Only what two probes saw differently."""
    assert changed(found(), found()) == ()
    assert [(feature, lost) for feature, lost, _ in changed(found(DISK), found(Feature.SECCOMP))] == [
        (Feature.SECCOMP, True),
        (DISK, False),
    ]
    assert changed(found(), found(unseen=(DISK,))) == ()
    assert changed(replace(found(), probes=()), found(DISK)) == ()


def test_the_fake_refuses_what_it_has_lost() -> None:
    """For those who test schedulers: told on the stream, refused with the cure, while running jobs go on."""

    async def body() -> None:
        async with FakeExecutor.open(lambda _: FakeRun(holds=True)) as executor:
            limited = Job(rootfs="host", steps=[sh("true")], limits=Limits(disk="16MiB"))
            running = await executor.start(await executor.prepare_job(limited))
            async with aclosing(executor.watch_capabilities()) as changes:
                await anext(changes)
                await executor.lose_feature(DISK, details="mkfs.ext4 is gone", cure="install e2fsprogs")
                assert (
                    Probe(DISK, works=False, details="mkfs.ext4 is gone", cure="install e2fsprogs")
                    in (await anext(changes)).probes
                )
            await _refused(executor, limited, "install e2fsprogs")
            await executor.discard(await executor.prepare_job(replace(limited, limits=Limits())))
            running.release()
            assert (await running.wait()).outcome is Outcome.SUCCEEDED

    within(body())


async def _refused(executor: JobExecutor, job: Job, cure: str) -> None:
    with pytest.raises(ExecutorError, match="disk_limit") as caught:
        await executor.prepare_job(job)
    assert caught.value.kind is ExecutorErrorKind.PREPARE
    assert reason_of(caught.value) == "no_disk_limit"
    assert cure in str(caught.value)


@pytest.mark.kernel
@pytest.mark.timeout(180)
@pytest.mark.usefixtures("warm_rootfs", "leaks")
def test_a_feature_is_taken_away_and_comes_back(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program that makes disks is gone: the agent hears of it, new jobs that need it are refused, one runs on.

    All of it behind a socket, found by the timer alone.
    """
    monkeypatch.setattr(capability_cache, "RENEW_AT", 0.02)

    async def main() -> None:
        async with (
            Executor.open(state_dir, config=ExecutorConfig()) as host,
            socket_over(tmp_path, host) as (target, _),
            RemoteExecutor.connect(target) as executor,
        ):
            await _lost_and_found(executor, monkeypatch)

    asyncio.run(asyncio.wait_for(main(), 150))


async def _lost_and_found(executor: JobExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(rootfs="host", steps=[sh("true")], limits=Limits(disk="16MiB"))
    async with (
        aclosing(executor.watch_capabilities()) as changes,
        executor.run(replace(job, steps=())) as running,
    ):
        await _until_disks(changes, there=True)
        with monkeypatch.context() as patch:
            patch.setattr(disks, "MKFS", "mkfs.ext4-was-removed")
            await _until_disks(changes, there=False)
            await _refused(executor, job, "mkfs")
            # What was there before goes on, disk limit and all, and jobs without such a limit run as ever.
            assert (await running.exec(sh("echo on > /work/build/f"))).exit is not None
            async with executor.run(replace(job, limits=Limits())) as other:
                assert (await other.wait()).outcome is Outcome.SUCCEEDED
            running.finish()
            assert (await running.wait()).outcome is Outcome.SUCCEEDED
        await _until_disks(changes, there=True)
        async with executor.run(job) as again:
            assert (await again.wait()).outcome is Outcome.SUCCEEDED


async def _until_disks(changes: AsyncIterator[ExecutorCapabilities], *, there: bool) -> None:
    async for known in changes:
        if known.has(DISK) is there:
            return
