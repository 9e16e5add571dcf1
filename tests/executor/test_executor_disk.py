"""Disk limits of whole jobs: held by a filesystem, or watched, and which of the two is always said."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_executor import Enforcement, Executor, Job, Outcome, Profile, ResourceLimits
from forgeyard_executor import disk as disk_module
from forgeyard_model.profile import PROFILES

pytestmark = pytest.mark.kernel

MIB = 1 << 20


@pytest.fixture
def small_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What 10 GiB and a second are to a real job, in the size of a test."""
    rules = replace(PROFILES[Profile.STANDARD_CI], disk_watched=32 * MIB)
    monkeypatch.setitem(PROFILES, Profile.STANDARD_CI, rules)
    monkeypatch.setattr(disk_module, "FIRST_LOOK", 0.05)


WAIT = "; while :; do :; done"


@pytest.mark.usefixtures("small_watch")
@pytest.mark.parametrize("place", ["/work/build", "/tmp", "/home/forgeyard"])
def test_a_watched_limit_ends_the_job(shared_state: Path, root: dict[str, str], place: str) -> None:
    """What no filesystem holds is killed, and the result says that it was watched."""
    job = Job(steps=(sh(f"dd if=/dev/zero of={place}/big bs=1M count=80 2>/dev/null{WAIT}"),), **root)  # type: ignore[arg-type]  # passed on by name
    result, _, _ = run(shared_state, job)
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, result.message
    assert "watched, not held by a file system" in result.message
    assert "32 MiB" in result.message
    evidence = result.evidence.disk
    assert evidence.watched
    assert evidence.full
    assert evidence.limit == 32 * MIB
    assert (evidence.peak or 0) > 32 * MIB


@pytest.mark.usefixtures("small_watch")
def test_what_is_deleted_does_not_count(shared_state: Path) -> None:
    """A job may write more than the limit, as long as there is never more of it at once."""
    script = "for i in 1 2 3 4 5 6; do dd if=/dev/zero of=big bs=1M count=20 2>/dev/null; rm big; done"
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(sh(f"cd /work/build; {script}"),)))
    assert result.outcome is Outcome.SUCCEEDED, result.message


@pytest.mark.usefixtures("small_watch")
def test_too_many_files_are_a_verdict_too(shared_state: Path) -> None:
    """A watched layer may have as many files as a filesystem of its size would hold."""
    script = "cd /work/build; i=0; while [ $i -lt 9000 ]; do : > f$i; i=$((i+1)); done" + WAIT
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, result.message
    assert "too many files" in result.message


@pytest.mark.usefixtures("small_watch")
def test_a_hidden_tree_does_not_escape_the_watch(shared_state: Path) -> None:
    """Deeper than can be counted, what the host's filesystem took in stands in for the count."""
    script = (
        "cd /work/build; i=0; while [ $i -lt 260 ]; do mkdir d; cd d; i=$((i+1)); done;"
        " dd if=/dev/zero of=big bs=1M count=200 2>/dev/null" + WAIT
    )
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, result.message


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("dd if=/dev/zero of=/work/build/big bs=1M", "disk limit of"),
        ("cd /work/build; i=0; while : > f$i; do i=$((i+1)); done; exit 3", "no room for more files"),
    ],
    ids=["bytes", "files"],
)
def test_a_named_limit_is_held_by_a_filesystem(
    shared_state: Path, root: dict[str, str], script: str, words: str
) -> None:
    """The write fails inside, the verdict names the limit, and nothing of it was watched."""
    job = Job(steps=(sh(script),), limits=ResourceLimits(disk=16 * MIB), **root)  # type: ignore[arg-type]  # passed on by name
    result, _, err = run(shared_state, job)
    assert b"No space left on device" in err
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, result.message
    assert words in result.message
    assert not result.evidence.disk.watched


def test_plan_says_which_of_the_two_it_is(shared_state: Path) -> None:
    """The row of resources.disk says watched, or that a filesystem of that size holds it."""

    async def rows(**job: object) -> dict[str, tuple[Enforcement, str, str]]:
        async with Executor.open(shared_state) as executor:
            report = await executor.plan(Job(rootfs="host", steps=(sh("true"),), **job))  # type: ignore[arg-type]  # passed on by name
            return {row.field: (row.status, row.asked, row.by) for row in report.rows}

    status, asked, by = asyncio.run(rows())["resources.disk"]
    assert (status, asked) == (Enforcement.EMULATED, "10240 MiB")
    assert by.startswith("watched")
    assert "filesystem of that size" in asyncio.run(rows(limits=ResourceLimits(disk=64 * MIB)))["resources.disk"][2]
    assert asyncio.run(rows(profile=Profile.DEVELOPMENT))["resources.disk"][1:] == ("no limit", "the host's disk")
