"""Limits as the job and the host see them, and names of limits that are clamped or refused (C67, C68)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_api import main
from forgeyard_executor import Executor, Job, Limits, Outcome, Step
from forgeyard_executor.services import nofile_ceiling
from forgeyard_host.cgroups import AppliedLimits, AttemptCgroup, CgroupHost
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.profile import ExecutionProfile

pytestmark = pytest.mark.kernel

# v1 has a directory per controller, v2 one for all: whichever is there.
LOOK = """
cd /sys/fs/cgroup
cat memory/memory.limit_in_bytes memory.max 2>/dev/null
cat pids/pids.max pids.max 2>/dev/null
if [ -e cpu.max ]; then cat cpu.max; else echo $(cat cpu/cpu.cfs_quota_us cpu/cpu.cfs_period_us); fi
"""


@pytest.mark.parametrize(
    "limits",
    [
        Limits(memory="64MiB", cpus=0.5, pids=77),
        Limits(memory="1GiB", cpus=3, pids=4096),
        Limits(memory=67108865, cpus=0.01, pids=16),
    ],
    ids=["small", "more cpus than there are", "no whole page, least cpu"],
)
def test_limits_are_those_that_were_asked_for(shared_state: Path, root: dict[str, str], limits: ResourceLimits) -> None:
    """Read inside, from the job's own /sys/fs/cgroup, and outside, from the leaf that its PID 1 is in."""

    async def job() -> tuple[str, AppliedLimits]:
        plain = Job(**root, steps=(), limits=limits)
        async with Executor.open(shared_state) as executor, executor.run(plain) as execution:
            await execution.exec(sh(LOOK))
            (info,) = (item for item in executor.list_sandboxes() if item.sandbox_id == execution.sandbox_id)
            group = AttemptCgroup.at(CgroupHost.detect(), f"/forgeyard/{info.owner}/{info.sandbox_id}")
            applied = group.applied("job")
            execution.finish()
            out = b"".join([chunk.data async for chunk in execution.output()])
            return out.decode(), applied

    text, applied = asyncio.run(job())
    memory, pids, quota, period = text.split()
    assert (int(memory), int(pids)) == (applied.memory, applied.pids)
    assert int(quota) / int(period) == applied.cpus
    assert limits.memory is not None
    assert applied.memory is not None
    assert 0 <= limits.memory - applied.memory < 4096  # the kernel counts in pages
    assert (applied.pids, applied.cpus) == (limits.pids, limits.cpus)
    assert applied.swap in (0, None)


def test_open_files_above_the_hard_limit_are_clamped_with_a_note(shared_state: Path, root: dict[str, str]) -> None:
    """More than this executor may set becomes the most it may: soft and hard alike, said in the result's notes."""
    ceiling = nofile_ceiling()
    job = Job(**root, steps=(sh("ulimit -Sn; ulimit -Hn; ulimit -c"),), limits=Limits(nofile=ceiling + 1))
    result, out, _ = run(shared_state, job)
    assert (result.outcome, out.decode().split()) == (Outcome.SUCCEEDED, [str(ceiling), str(ceiling), "0"])
    assert f"nofile clamped from {ceiling + 1} to {ceiling}, the most this executor may set" in result.notes


def test_open_files_below_it_are_exact_and_without_a_note(shared_state: Path) -> None:
    """Nothing is said where nothing was changed."""
    job = Job(rootfs="host", steps=(sh("ulimit -Sn; ulimit -Hn"),), limits=Limits(nofile=77))
    result, out, _ = run(shared_state, job)
    assert out.decode().split() == ["77", "77"]
    assert result.notes == ()


def test_a_clamped_value_is_a_note_of_the_summary(
    shared_state: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On the command line: exit 0, and the note stands in the summary and in --result."""
    ceiling = nofile_ceiling()
    job = {"version": 1, "rootfs": "host", "resources": {"nofile": ceiling + 1}, "steps": [{"run": "true"}]}
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    result = tmp_path / "result.json"
    args = ("run", str(tmp_path / "job.yaml"), "--state-dir", str(shared_state), "--result", str(result))
    assert main.run(args) == 0
    note = f"nofile clamped from {ceiling + 1} to {ceiling}, the most this executor may set"
    assert [line.split(None, 1)[1] for line in capsys.readouterr().err.splitlines() if "note" in line] == [note]
    assert json.loads(result.read_bytes())["notes"] == [note]


@pytest.mark.parametrize("nofile", [-1, 0, 15, 4_000_001, True, 1.5])
def test_open_files_that_are_no_number_of_them(nofile: int) -> None:
    """A soft limit above the hard one can't be said at all: there is one number for both."""
    with pytest.raises(InvalidRequest, match="nofile"):
        Limits(nofile=nofile)


def test_a_job_can_not_raise_its_own_limits(shared_state: Path, root: dict[str, str]) -> None:
    """Neither by rlimit nor by writing to its group."""
    script = """
    ulimit -n 78 2>/dev/null && echo raised
    for f in memory/memory.limit_in_bytes memory.max pids/pids.max pids.max cpu/cpu.cfs_quota_us cpu.max; do
        [ -e /sys/fs/cgroup/$f ] || continue
        (echo 123456789 > /sys/fs/cgroup/$f) 2>/dev/null && echo wrote $f
    done
    true
    """
    result, out, _ = run(shared_state, Job(**root, steps=(sh(script),), limits=Limits(nofile=77)))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"")


def test_nested_groups_can_not_be_made(shared_state: Path, busybox_image: str) -> None:
    """Not by a user, nor by root in the job's user namespace: the view is read-only, and stays it (C32)."""
    script = """
    for d in /sys/fs/cgroup /sys/fs/cgroup/memory /sys/fs/cgroup/pids; do
        [ -d $d ] || continue
        mkdir $d/nested 2>/dev/null && echo made $d
    done
    mount -o remount,rw /sys/fs/cgroup 2>/dev/null && echo remounted
    mount -t cgroup2 none /work/build 2>/dev/null && echo mounted
    true
    """
    users: tuple[dict[str, object], ...] = (
        {"rootfs": "host"},
        {"image": busybox_image},
        {"image": busybox_image, "user": "root", "profile": "development"},
    )
    for options in users:
        profile = ExecutionProfile(str(options.pop("profile", "standard-ci")))
        job = Job(steps=(Step("/bin/sh", "-c", script),), profile=profile, **options)  # type: ignore[arg-type]  # by name
        result, out, _ = run(shared_state, job)
        assert (result.outcome, out) == (Outcome.SUCCEEDED, b"")
