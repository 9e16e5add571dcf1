"""A configuration on a real host: what it demands of jobs is what they get, and plan says what run then does."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import collect, sh

from forgeyard_executor import (
    ApprovedHostPath,
    ExecutionResult,
    Executor,
    ExecutorError,
    InvalidRequest,
    Job,
    Limits,
    Outcome,
    Profile,
)
from forgeyard_model.config import ExecutorConfig, PatternRule, UidBlock
from forgeyard_model.enforcement import Enforcement, PlanReport
from forgeyard_model.policy import IsolationLevel

pytestmark = pytest.mark.kernel

BASE = 2_800_000_000


@pytest.fixture
def config(shared_state: Path) -> ExecutorConfig:
    """Nothing but a state directory."""
    return ExecutorConfig(state_dir=str(shared_state))


def run(config: ExecutorConfig, job: Job) -> tuple[ExecutionResult, str]:
    """Run a job under `config`; its result and stdout."""

    async def main() -> tuple[ExecutionResult, str]:
        async with Executor.open(config=config) as executor, executor.run(job) as execution:
            out, _ = await collect(execution)
            return await execution.wait(), out.decode()

    return asyncio.run(main())


def plan(config: ExecutorConfig, job: Job, source: Path | None = None) -> PlanReport:
    """Plan a job under `config`."""

    async def main() -> PlanReport:
        async with Executor.open(config=config) as executor:
            return await executor.plan(job, source=source)

    return asyncio.run(main())


def both_refuse(config: ExecutorConfig, job: Job, field: str) -> Exception:
    """The error of run; plan has refused the same job, by `field`."""
    assert [row.field for row in plan(config, job).rows if row.refused] == [field]
    with pytest.raises((ExecutorError, InvalidRequest)) as caught:
        run(config, job)
    return caught.value


def test_defaults_maximums_and_the_uid_block_hold(config: ExecutorConfig) -> None:
    """The kernel has the configured limit, the result says what was cut, and ids come from the configured block."""
    config = replace(
        config,
        default_limits=Limits(memory="48MiB"),
        maximum_limits=Limits(pids=40, memory="64MiB"),
        uid_block=UidBlock(BASE, 65536 * 4),
    )
    result, _ = run(config, Job(rootfs="host", steps=(sh("exit 0"),)))
    assert result.outcome is Outcome.SUCCEEDED
    assert (result.evidence.memory.limit, result.evidence.pids.limit) == (48 << 20, 40)
    assert [note for note in result.notes if note.startswith("resources.pids: 40 instead of the default")]
    assert result.provenance.uid_base in range(BASE, BASE + 65536 * 4)


def test_more_than_the_maximum_is_refused(config: ExecutorConfig) -> None:
    """By plan and by run, by the limit's name."""
    config = replace(config, maximum_limits=Limits(memory="64MiB"))
    job = Job(rootfs="host", steps=(sh("exit 0"),), limits=Limits(memory="65MiB"))
    assert str(both_refuse(config, job, "resources.memory")).startswith("resources.memory '65 MiB': the maximum here")


def test_the_minimum_can_not_be_lowered_by_a_job(config: ExecutorConfig, busybox_image: str) -> None:
    """Development asks for less than the organisation: its host-rootfs job is refused, the one in an image runs."""
    config = replace(config, minimum_isolation=IsolationLevel.CONTAINER)
    job = Job(rootfs="host", steps=(sh("exit 0"),), profile=Profile.DEVELOPMENT)
    error = both_refuse(config, job, "isolation")
    assert "isolation namespace is below container" in str(error)
    result, _ = run(config, replace(job, rootfs=None, image=busybox_image))
    assert result.provenance.isolation is IsolationLevel.CONTAINER


def test_high_assurance_is_refused_and_nothing_is_left(config: ExecutorConfig, busybox_image: str) -> None:
    """Without a VM backend (section 303), each candidate named."""
    job = Job(image=busybox_image, steps=(sh("exit 0"),), profile=Profile.HIGH_ASSURANCE)
    error = both_refuse(config, job, "isolation")
    assert isinstance(error, ExecutorError)
    assert error.sandbox is not None
    assert "runc" in error.details
    assert list(Path(config.state_dir, "sandboxes").iterdir()) == []


def test_only_images_that_are_allowed(config: ExecutorConfig, busybox_image: str, tmp_path: Path) -> None:
    """The path is matched free of links and '..', so that neither leads around the rule."""
    layout, _, digest = busybox_image.removeprefix("oci:").partition("@")
    rule = PatternRule((f"{Path(layout).parent}/**",), "config.toml:1")
    allowed = PatternRule((f"oci:{Path(layout).parent}/*",), "config.toml:1")
    job = Job(image=busybox_image, steps=(sh("exit 0"),))
    assert run(replace(config, allowed_images=(allowed,)), job)[0].outcome is Outcome.SUCCEEDED
    both_refuse(replace(config, allowed_images=(rule,)), job, "image")
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(layout, elsewhere)
    link = tmp_path / "allowed" / "link"
    link.parent.mkdir()
    link.symlink_to(elsewhere)
    narrow = replace(config, allowed_images=(PatternRule((f"oci:{link.parent}/*",), "config.toml:1"),))
    for path in (link, f"{link.parent}/../elsewhere"):
        both_refuse(narrow, replace(job, image=f"oci:{path}@{digest}"), "image")


def test_approved_paths_are_seen_and_impure(config: ExecutorConfig, tree: Path) -> None:
    """Every job sees them read-only, and its result says that it did."""
    tree.chmod(0o755)
    config = replace(config, approved_host_paths=(ApprovedHostPath(str(tree), "/models"),))
    result, out = run(
        config, Job(rootfs="host", steps=(sh("cat /models/f; touch /models/x && echo writable; exit 0"),))
    )
    assert out == "original\n"
    assert f"host path {tree}" in result.provenance.impure


def test_plan_looks_at_the_host_and_leaves_nothing(config: ExecutorConfig, tree: Path) -> None:
    """Digest of the root, the source's filesystem, the clamped limit; no sandbox is made."""
    job = Job(rootfs="host", steps=(sh("exit 0"),), limits=Limits(nofile=4_000_000))
    found = plan(config, job, tree)
    rows = {row.field: row for row in found.rows}
    assert found.runnable
    assert "sha256:" in rows["rootfs"].by
    assert rows["source.owner"].status is Enforcement.ENFORCED
    if rows["resources.nofile"].status is Enforcement.CLAMPED:
        result, _ = run(config, job)
        assert any("nofile" in note for note in result.notes)
    assert list(Path(config.state_dir, "sandboxes").iterdir()) == []


def test_plan_refuses_what_only_preparing_finds_out(config: ExecutorConfig, busybox_image: str) -> None:
    """A user that the image does not know, an image that is not there: rows of plan, errors of run."""
    job = Job(image=busybox_image, steps=(sh("exit 0"),), user="nosuchuser")
    assert [row.field for row in plan(config, job).rows if row.refused] == ["user"]
    layout = busybox_image.partition("@")[0]
    absent = replace(job, user=None, image=f"{layout}-absent@sha256:{'0' * 64}")
    assert [row.field for row in plan(config, absent).rows if row.refused] == ["image"]


def test_the_files_are_read_when_no_configuration_is_given(
    shared_state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that opens an executor is bound by the host's file as the command line is."""
    file = tmp_path / "config.toml"
    file.write_text(f'state_dir = "{shared_state}"\nminimum_isolation = "container"\n')
    monkeypatch.setattr("forgeyard_executor.config_load.SYSTEM_FILE", file)

    async def main() -> None:
        async with Executor.open() as executor:
            assert executor.list_sandboxes() == ()
            async with executor.run(Job(rootfs="host", steps=(sh("exit 0"),))):
                pass

    with pytest.raises(ExecutorError, match="the organisation's minimum needs isolation container"):
        asyncio.run(main())
