"""prepare, start, discard, and what goes wrong around them: typed, and nothing left."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_executor import (
    CancellationReason,
    ExecutionResult,
    Executor,
    ExecutorError,
    ExecutorErrorKind,
    InvalidRequest,
    Job,
    Limits,
    Outcome,
    Timeouts,
)
from forgeyard_model.identity import AttemptContext
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job

pytestmark = pytest.mark.kernel


def request(job: Job, output: str | None = None) -> ExecutionRequest:
    """A request as an agent makes it."""
    return request_from_job(job, context=AttemptContext("a/b:c d"), workspace=PreparedWorkspace(output=output))


def test_prepare_start_wait(state_dir: Path, leaks: object, warm_rootfs: None) -> None:
    """The parts that run() composes; the caller's attempt id is data, in no path."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            prepared = await executor.prepare(request(Job(rootfs="host", steps=(sh("echo x"),))))
            assert b'"args":["/.forgeyard/init","fifo"]' in prepared.bundle.config
            assert b"a/b:c d" not in prepared.bundle.config
            assert [info.state for info in executor.list_sandboxes()] == ["preparing"]
            execution = await executor.start(prepared)
            with pytest.raises(ExecutorError, match="not waiting"):
                await executor.start(prepared)
            result = await execution.wait()
            assert (result.outcome, result.attempt_id) == (Outcome.SUCCEEDED, "a/b:c d")
            await executor.close_execution(execution)

    asyncio.run(main())


def test_discard_undoes_a_prepared_attempt(state_dir: Path, leaks: object, warm_rootfs: None) -> None:
    """An attempt that is never started is undone when told, or with its executor."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            prepared = await executor.prepare(request(Job(rootfs="host", steps=(sh("true"),))))
            await executor.discard(prepared)
            await executor.discard(prepared)
            assert os.listdir(state_dir / "sandboxes") == []
            await executor.prepare(request(Job(rootfs="host", steps=(sh("true"),))))

    asyncio.run(main())
    assert os.listdir(state_dir / "sandboxes") == []


@pytest.fixture
def small_disk(state_dir: Path) -> Iterator[Path]:
    """A file system of 24 MiB."""
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m,mode=711", "small", str(state_dir)], check=True)
    yield state_dir
    subprocess.run(["umount", str(state_dir)], check=True)


def test_a_full_disk_is_named_and_passes(small_disk: Path) -> None:
    """No room for the attempt's own files: a typed error that says where; with room again, jobs run (C64)."""

    async def main() -> None:
        job = Job(rootfs="host", steps=(sh("echo x"),))
        async with Executor.open(small_disk) as executor:
            async with executor.run(job) as execution:
                assert (await execution.wait()).outcome is Outcome.SUCCEEDED
            filler = small_disk / "filler"
            with pytest.raises(OSError, match="No space"):
                filler.write_bytes(bytes(64 << 20))
            with pytest.raises(ExecutorError) as caught:
                async with executor.run(job):
                    pass
            assert caught.value.failure_class.value == "infrastructure"
            assert "space" in str(caught.value)
            filler.unlink()
            async with executor.run(job) as execution:
                assert (await execution.wait()).outcome is Outcome.SUCCEEDED
        assert os.listdir(small_disk / "sandboxes") == []

    asyncio.run(main())


def test_an_output_directory_with_files_is_refused(shared_state: Path, tmp_path: Path) -> None:
    """A job's files are not mixed with others; nothing is started."""
    (tmp_path / "mine").write_text("x")
    with pytest.raises(InvalidRequest, match="not empty"):
        run(shared_state, Job(rootfs="host", steps=(sh("true"),)), output=tmp_path)
    assert os.listdir(tmp_path) == ["mine"]


def test_clamped_open_files_are_a_note(shared_state: Path) -> None:
    """More open files than this executor may grant: fewer, and the result says so (C67)."""
    job = Job(rootfs="host", steps=(sh("ulimit -n; ulimit -c"),), limits=Limits(nofile=3_000_000))
    result, out, _ = run(shared_state, job)
    got, core = (int(line) for line in out.split())
    assert core == 0
    if got < 3_000_000:
        assert any(f"clamped from 3000000 to {got}" in note for note in result.notes)


def test_prepare_timeout_is_its_own_error(state_dir: Path, leaks: object) -> None:
    """The clock of prepare says that it was prepare; here the host rootfs is still to be built."""

    async def main() -> None:
        job = Job(rootfs="host", steps=(sh("true"),), timeouts=Timeouts(prepare=0.001))
        async with Executor.open(state_dir) as executor, executor.run(job):
            pass

    with pytest.raises(ExecutorError, match="prepare_timeout") as caught:
        asyncio.run(main())
    assert caught.value.kind is ExecutorErrorKind.TIMEOUT
    assert os.listdir(state_dir / "sandboxes") == []


def test_cancel_racing_with_exit(shared_state: Path) -> None:
    """Whichever came first decides, and the exit code agrees with the outcome, however close the race."""

    async def one(executor: Executor, delay: float) -> ExecutionResult:
        async with executor.run(Job(rootfs="host", steps=(sh("exit 0"),), timeouts=Timeouts(grace=1))) as execution:
            await asyncio.sleep(delay)
            await execution.cancel(CancellationReason.FAIL_FAST)
            return await execution.wait()

    async def main() -> list[ExecutionResult]:
        async with Executor.open(shared_state) as executor:
            return [await one(executor, n * 0.0004) for n in range(20)]

    for result in asyncio.run(main()):
        assert (result.outcome, result.exit_code) in ((Outcome.SUCCEEDED, 0), (Outcome.CANCELLED, 143))


def test_lost_stdin_room_is_no_traceback(shared_state: Path) -> None:
    """An agent's step with more stdin than the attempt's memory holds is a typed error, and the attempt goes on."""

    async def main() -> None:
        async with Executor.open(shared_state) as executor, executor.run(Job(rootfs="host", steps=())) as execution:
            step = sh("wc -c", stdin=bytes(64 << 20))
            with pytest.raises(ExecutorError) as caught:
                await execution.exec(step)
            assert caught.value.kind is ExecutorErrorKind.IO_FAILED
            again = await execution.exec(sh("exit 3"))
            assert again.exit is not None
            assert again.exit.code == 3
            execution.finish()

    asyncio.run(main())


def test_request_with_a_bad_image_is_refused_before_anything(state_dir: Path) -> None:
    """A reference that no registry could have: a typed refusal by name, nothing made."""
    job = Job(image="registry.example.org/APP@sha256:" + "0" * 64, steps=(sh("true"),))
    with pytest.raises(InvalidRequest, match="image"):
        run(state_dir, job)
    assert os.listdir(state_dir / "sandboxes") == []


def test_replaced_request_fields_are_checked_again(state_dir: Path) -> None:
    """prepare trusts no earlier check of a path: an absent source is refused there."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            asked = request(Job(rootfs="host", steps=(sh("true"),)))
            await executor.prepare(replace(asked, workspace=PreparedWorkspace(source="/nosuch")))

    with pytest.raises(InvalidRequest, match="source"):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("change", "field"), [({"tmp_size": 1 << 20}, "tmp_size"), ({"writable_paths": ("/work/build",)}, "writable_paths")]
)
def test_a_policy_that_this_version_can_not_keep_is_refused(
    state_dir: Path, change: dict[str, object], field: str
) -> None:
    """A part of a filesystem policy that nothing would enforce is named, not passed over."""

    async def main() -> None:
        async with Executor.open(state_dir) as executor:
            asked = request(Job(rootfs="host", steps=(sh("true"),)))
            filesystem = replace(asked.sandbox.filesystem, **change)  # type: ignore[arg-type]  # a table of changes
            await executor.prepare(replace(asked, sandbox=replace(asked.sandbox, filesystem=filesystem)))

    with pytest.raises(InvalidRequest, match=field):
        asyncio.run(main())
    assert os.listdir(state_dir / "sandboxes") == []
