"""kill -9 of the executor at many points, then recover(): nothing is left, and nothing alive is touched."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from killed import undone

from forgeyard_executor import Executor, Job, Outcome, Step

pytestmark = pytest.mark.kernel

# Where the child dies: a method, and whether before or after its work. In the order in which a job meets them.
POINTS = [
    "forgeyard_host.ledger:Ledger.open:after",
    "forgeyard_host.uids:UidRanges.acquire:before",
    "forgeyard_host.uids:UidRanges.acquire:after",
    "forgeyard_host.cgroups.attempt:AttemptCgroup.create:after",
    "forgeyard_host.host:Host.setup:before",
    "forgeyard_host.host:Host.setup:after",
    "forgeyard_runtimes.cli_runtime:CliRuntime.create:after",
    "forgeyard_runtimes.cli_runtime:CliRuntime.start:after",
    "forgeyard_process_shim.channel:ShimChannel.unlink:after",
    "forgeyard_process_shim.channel:ShimChannel.run_step:before",
    "forgeyard_runtimes.container:JobContainer.kill:before",
    "forgeyard_runtimes.container:JobContainer.kill:after",
    "forgeyard_host.cgroups.attempt:AttemptCgroup.remove:before",
    "forgeyard_host.host:Host.unmount:before",
    "forgeyard_host.host:Host.unmount:after",
    "forgeyard_host.host:Host.remove_directory:before",
    "forgeyard_host.host:Host.remove_directory:after",
]

CHILD = """
import asyncio, functools, importlib, inspect, os, signal, sys
from forgeyard_executor import Executor, Job, Step

state, point = sys.argv[1:]
module, name, when = point.split(":")
owner, method = name.split(".")
owner = getattr(importlib.import_module(module), owner)
raw = inspect.getattr_static(owner, method)
inner = raw.__func__ if isinstance(raw, classmethod) else raw

def die():
    os.kill(os.getpid(), signal.SIGKILL)

@functools.wraps(inner)
def sync(*args, **options):
    if when == "before":
        die()
    inner(*args, **options)
    die()

@functools.wraps(inner)
async def coroutine(*args, **options):
    if when == "before":
        die()
    await inner(*args, **options)
    die()

replacement = coroutine if inspect.iscoroutinefunction(inner) else sync
setattr(owner, method, classmethod(replacement) if isinstance(raw, classmethod) else replacement)

async def main():
    async with Executor.open(state) as executor:
        job = Job(rootfs="host", steps=[Step("/bin/sh", "-c", "setsid sleep 600 & sleep 0.1")])
        async with executor.run(job) as execution:
            await execution.wait()

asyncio.run(main())
"""


async def recover(state: Path) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Open an executor, which recovers, and recover once more: the second finds nothing."""
    async with Executor.open(state) as executor:
        again = await executor.recover()
        return again.removed, again.errors


@pytest.mark.parametrize("point", POINTS)
def test_killed_executor_is_cleaned_up_after(state_dir: Path, leaks: object, warm_rootfs: None, point: str) -> None:
    """Whatever the executor was doing when it was killed, the next one undoes it."""
    with undone(state_dir):
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(state_dir), point], check=False, capture_output=True, timeout=50
        )
        assert child.returncode == -signal.SIGKILL, child.stderr.decode()
        assert asyncio.run(recover(state_dir)) == ((), ())
    assert os.listdir(state_dir / "sandboxes") == []
    assert os.listdir(state_dir / "ledger") == []
    assert os.listdir(state_dir / "spool") == []
    assert os.listdir(state_dir / "executors") == []


def test_another_executors_jobs_are_left_alone(state_dir: Path, leaks: object, warm_rootfs: None) -> None:
    """recover() of a second executor on the same state directory spares the first one's running job."""

    async def main() -> None:
        async with Executor.open(state_dir) as first:
            async with first.run(
                Job(rootfs="host", steps=(Step("cat", stdin=b"x"), Step("sleep", "0.5")))
            ) as execution:
                async with Executor.open(state_dir) as second:
                    report = await second.recover()
                    assert (report.removed, report.errors) == ((), ())
                    assert report.alive == 1
                    listed = second.list_sandboxes()
                    assert [info.sandbox_id for info in listed] == [execution.sandbox_id]
                result = await execution.wait()
            assert result.outcome is Outcome.SUCCEEDED, result.message

    asyncio.run(main())
