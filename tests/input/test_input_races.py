"""Directories and symlinks that change places while a job is set up: the tree that was named, or a refusal."""

from __future__ import annotations

import asyncio
import ctypes
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from forgeyard_executor import Executor, Job, Step
from forgeyard_executor.attempt import Attempt
from forgeyard_executor.outputs import collect
from forgeyard_executor.sources import canonical_request
from forgeyard_model.errors import ExecutorError, ForgeyardError
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Output
from forgeyard_model.plan import NetworkAttachment
from forgeyard_model.policy import ApprovedHostPath, IsolationLevel, SourceMode
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.request import PreparedWorkspace, request_from_job

pytestmark = pytest.mark.kernel

SECONDS = 0.7
"""How long each race runs: some hundred set-ups, some ten thousand swaps."""
_LIBC = ctypes.CDLL(None, use_errno=True)
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@pytest.fixture
def base() -> Iterator[Path]:
    """`spot`, a tree; `lure`, a symlink to a canary; both in a directory a job's user may pass through."""
    path = Path(tempfile.mkdtemp(prefix="fy-race-", dir="/var/tmp"))
    path.chmod(0o755)
    for name, text in (("spot", "original"), ("canary", "canary")):
        (path / name / "inner").mkdir(parents=True)
        (path / name / "f").write_text(text)
        (path / name / "inner" / "f").write_text(text)
    (path / "lure").symlink_to(path / "canary")
    yield path
    shutil.rmtree(path)


@contextmanager
def swapping(one: Path, other: Path) -> Iterator[Callable[[], int]]:
    """`one` and `other` change places over and over; the value tells how often they did."""
    stop, count = threading.Event(), 0

    def swap() -> None:
        nonlocal count
        while not stop.is_set():
            if _LIBC.renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
                count += 1

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        yield lambda: count
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("inner", ["", "inner"], ids=["the directory itself", "a parent of it"])
@pytest.mark.parametrize("kind", ["cow", "ro", "toolchain"])
def test_a_tree_swapped_while_prepare_runs(shared_state: Path, base: Path, kind: str, inner: str) -> None:
    """What is mounted for the job is the tree that the request was checked with, or the attempt is refused."""
    named = str(base / "spot" / inner)
    job = Job(
        rootfs="host",
        steps=(Step("/bin/true"),),
        source_mode=None if kind == "toolchain" else SourceMode(kind),
        profile=ExecutionProfile.STANDARD_CI,
        toolchains=(ApprovedHostPath(named, "/toolchains/t"),) if kind == "toolchain" else (),
    )
    slot = "path-0" if kind == "toolchain" else "source"
    workspace = PreparedWorkspace(None if kind == "toolchain" else named)
    seen, refused = set(), set()

    async def main() -> int:
        async with Executor.open(shared_state) as executor:
            request = request_from_job(job, context=AttemptContext("race"), workspace=workspace)
            # Paths are resolved here, once; the race is with everything that follows.
            request = canonical_request(request, shared_state)
            plan = partial(executor._planner.plan, request, IsolationLevel.NAMESPACE, None)
            plan()  # puts the rootfs together, which takes its time
            with swapping(base / "spot", base / "lure") as swaps:
                end = time.monotonic() + SECONDS
                while time.monotonic() < end:
                    attempt = Attempt(executor._services, request, NetworkAttachment(request.network.mode))
                    try:
                        await attempt.prepare(plan)
                    except ForgeyardError as error:
                        refused.add(getattr(error, "reason", ""))
                    else:
                        seen.add(Path(attempt.prepared.placement.sources[slot], "f").read_text())
                        await attempt.discard()
                return swaps()

    assert asyncio.run(main()) > 100
    assert seen | refused
    assert seen <= {"original"}
    assert refused <= {"symlink_in_path", "source_missing"}


@pytest.mark.parametrize("inner", ["", "inner/new"], ids=["the directory itself", "a parent of it"])
def test_an_output_directory_swapped_while_the_job_runs(base: Path, inner: str) -> None:
    """A job's files never arrive in the tree that a symlink leads to, whenever it came."""
    source = base / "work"
    source.mkdir()
    (source / "result").write_text("result")
    collected = refused = 0
    with swapping(base / "spot", base / "lure") as swaps:
        end = time.monotonic() + SECONDS
        while time.monotonic() < end or not collected:
            try:
                collect(source, (Output("result"),), str(base / "spot" / inner))
                collected += 1
            except ExecutorError:
                refused += 1
            # Wherever the original is by now; only there may the file be.
            for name in ("spot", "lure"):
                if not (base / name).is_symlink():
                    (base / name / inner / "result").unlink(missing_ok=True)
            assert not (base / "canary" / inner / "result").exists()
        assert swaps() > 100
    assert sorted(os.listdir(base / "canary")) == ["f", "inner"]
    assert os.listdir(base / "canary" / "inner") == ["f"]
