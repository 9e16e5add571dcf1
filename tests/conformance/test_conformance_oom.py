"""A memory kill is told as one every time, on every runtime (C28): as often as an environment variable says."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from adapter_jobs import Jobs, jobs_on
from adapters import on
from jobs import sh

from forgeyard_executor import Job, Limits, Outcome
from forgeyard_runtimes.cells import Behaviour

COUNT = int(os.environ.get("FORGEYARD_TEST_OOM", "5"))
MEMORY = 64 << 20

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180 + 10 * COUNT)]


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest, shared_state: Path) -> Iterator[Jobs]:
    """Jobs on the runtime of this test's parameter."""
    with jobs_on(request, shared_state) as jobs:
        yield jobs


@on(Behaviour.LIMITS)
def test_every_memory_kill_is_told(adapter: Jobs) -> None:
    """Each job that eats memory without end is OutOfMemory, with the kill counted in its own group and its limit."""
    job = Job(rootfs="host", steps=(sh("exec tail /dev/zero"),), limits=Limits(memory=MEMORY))
    for _ in range(COUNT):
        result, _, _ = adapter.run(job)
        assert (result.outcome, result.exit_code) == (Outcome.OUT_OF_MEMORY, 137), result
        assert result.evidence.memory.oom_kills
        assert result.evidence.memory.limit == MEMORY
