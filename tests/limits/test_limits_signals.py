"""The end of a job that does not want to end: one soft signal, the grace, then KILL (C26)."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import build
import pytest
from jobs import collect

from forgeyard_executor import CancellationReason, ExecutionResult, Executor, Job, Limits, Outcome, Step, Timeouts

pytestmark = pytest.mark.kernel

# Counts what it gets. The read never ends: nothing but a signal wakes it, and its own group gets them all.
COUNT = """
n=0
for s in TERM INT HUP QUIT USR1 USR2 CONT; do trap "n=\\$((n+1)); echo $s \\$n" $s; done
mkfifo /work/build/never
exec 3<>/work/build/never
echo up
while :; do read x <&3; done
"""


async def ended(
    state: Path, job: Job, *, cancel: bool, kill_after: bool = False
) -> tuple[ExecutionResult, list[str], float]:
    """Run `job`; with `cancel` stop it once it is up. Returns also its lines and the seconds from then on."""
    async with Executor.open(state) as executor, executor.run(job) as execution:
        async for _ in execution.output():
            break
        clock = time.monotonic()
        if cancel:
            await execution.cancel(CancellationReason.USER)
        if kill_after:
            await execution.cancel(CancellationReason.USER, kill=True)
        out, _ = await collect(execution)
        return await execution.wait(), out.decode().splitlines(), time.monotonic() - clock


@pytest.mark.parametrize("cause", ["cancel", "timeout"])
def test_one_term_then_kill_at_the_grace(shared_state: Path, root: dict[str, str], cause: str) -> None:
    """Exactly one TERM and nothing else soft; KILL comes when the grace is over, not before and not much later."""
    job = Job(
        **root,
        steps=(Step("/bin/sh", "-c", COUNT),),
        limits=Limits(wall_time="1s" if cause == "timeout" else "1h"),
        timeouts=Timeouts(grace=0.7),
    )
    result, lines, seconds = asyncio.run(ended(shared_state, job, cancel=cause == "cancel"))
    assert lines == ["up", "TERM 1"]
    assert result.outcome is (Outcome.CANCELLED if cause == "cancel" else Outcome.TIMED_OUT)
    (step,) = result.steps
    assert step.exit is None or step.exit.signal == signal.SIGKILL
    if cause == "cancel":
        assert seconds >= 0.7


def test_without_grace_it_is_killed_at_once(shared_state: Path) -> None:
    """A second, hard cancel does not wait for the grace of the first, however long that is."""
    job = Job(rootfs="host", steps=(Step("/bin/sh", "-c", COUNT),), timeouts=Timeouts(grace=100_000.0))
    result, lines, seconds = asyncio.run(ended(shared_state, job, cancel=True, kill_after=True))
    assert result.outcome is Outcome.CANCELLED
    assert lines in (["up"], ["up", "TERM 1"])
    assert seconds < 100_000


def test_a_grace_of_400_seconds_is_not_waited_for_in_vain(shared_state: Path) -> None:
    """Longer than many a client's own time-out: accepted, and over as soon as the job is."""
    script = "trap 'echo bye; exit 3' TERM; echo up; while :; do sleep 0.05; done"
    job = Job(rootfs="host", steps=(Step("/bin/sh", "-c", script),), timeouts=Timeouts(grace=400.0))
    result, lines, seconds = asyncio.run(ended(shared_state, job, cancel=True))
    assert lines == ["up", "bye"]
    assert result.exit is not None
    assert (result.outcome, result.exit.code) == (Outcome.CANCELLED, 3)
    assert seconds < 400


def test_an_images_stop_signal_is_sent_to_its_entrypoint(shared_state: Path, tmp_path: Path) -> None:
    """One SIGQUIT for what the image starts, no TERM beside it; a step of the job's own gets TERM (C26)."""
    writer = build.LayoutWriter(tmp_path / "layout")
    image = writer.image(build.busybox_layers(build.BUSYBOX), {"StopSignal": "SIGQUIT"})
    writer.finish(image)
    script = "trap 'echo QUIT; exit 0' QUIT; trap 'echo TERM; exit 0' TERM; echo up; while :; do sleep 0.05; done"
    for entrypoint, expected in ((True, "QUIT"), (False, "TERM")):
        job = Job(
            image=f"oci:{tmp_path}/layout@{image['digest']}",
            steps=(Step("/bin/sh", "-c", script, entrypoint=entrypoint),),
            user="1000",
            timeouts=Timeouts(grace=60.0),
        )
        result, lines, _ = asyncio.run(ended(shared_state, job, cancel=True))
        assert (lines, result.outcome) == (["up", expected], Outcome.CANCELLED)
