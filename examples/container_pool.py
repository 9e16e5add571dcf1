"""A runner that works off a queue: fifty jobs on four slots, each with a web server of its own beside it.

    python examples/container_pool.py REFERENCE      an image with sh, wget and httpd: busybox@sha256:…

Run it as root. Interrupted, it cancels what runs, and cleans up before it ends.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from contextlib import aclosing
from dataclasses import dataclass

from forgeyard_executor import (
    Execution,
    ExecutionResult,
    Executor,
    ExecutorConfig,
    FailureClass,
    ForgeyardError,
    Job,
    Limits,
    Step,
)
from forgeyard_model.config import NetworkConfig
from forgeyard_model.services import HealthCheck, HttpProbe, ServiceSpec

SLOTS = 4
SERVER = "mkdir /www && hostname > /www/index.html && exec httpd -f -p 80 -h /www"


@dataclass(frozen=True)
class Done:
    """What became of one job. `problem` is empty when it passed."""

    name: str
    seconds: float
    problem: str = ""
    output: str = ""


def make_job(number: int, image: str) -> Job:
    """One job of the queue. All of them call their server `web`, and none can reach another's."""
    return Job(
        name=f"job-{number:02}",
        image=image,
        steps=[Step.shell(f'echo "{number} found $(wget -q -O - http://web/)"')],
        services=(ServiceSpec("web", image=image, command=("sh", "-c", SERVER), health=HealthCheck(HttpProbe(80))),),
        limits=Limits(cpus=1, memory="128MiB", wall_time="1m"),
    )


async def run_one(executor: Executor, job: Job) -> Done:
    """Run a job to its end. Whatever goes wrong is in `problem`: a bad job must not end the runner."""
    begun = time.monotonic()
    try:
        async with executor.run(job) as execution:
            output = await stdout_of(execution)
            problem = problem_of(await execution.wait())
    except ForgeyardError as error:
        # Refused, or it failed before its first step. Nothing of it is left.
        output, problem = "", str(error)
    return Done(job.name, time.monotonic() - begun, problem, output.strip())


async def stdout_of(execution: Execution) -> str:
    """Everything that the job writes to stdout, until it has ended."""
    async with aclosing(execution.output()) as chunks:
        return b"".join([chunk.data async for chunk in chunks if chunk.stream == "stdout"]).decode()


def problem_of(result: ExecutionResult) -> str:
    """Why a job did not pass. A runner may try again what is `infrastructure`, and never what is `workload`."""
    return "" if result.failure_class is FailureClass.NONE else f"{result.failure_class.value}: {result.message}"


async def work_off(executor: Executor, jobs: list[Job]) -> list[Done]:
    """Run all jobs, SLOTS at a time; a line for each as it ends."""
    waiting = iter(jobs)
    done: list[Done] = []

    async def slot() -> None:
        for job in waiting:  # one iterator for all slots: each takes the next job
            ended = await run_one(executor, job)
            print(f"{ended.name}  {ended.seconds:5.2f} s  {ended.problem or 'passed'}  {ended.output}", flush=True)
            done.append(ended)

    async with asyncio.TaskGroup() as group:
        for _ in range(SLOTS):
            group.create_task(slot())
    return done


async def main(image: str, count: int, state_dir: str) -> int:
    """The exit code: 0 when all jobs passed."""
    # A runner lives long: it keeps networks ready, so that no job waits for one to be made.
    config = ExecutorConfig(state_dir=state_dir, network=NetworkConfig(pool=SLOTS))
    begun = time.monotonic()
    async with Executor.open(config=config) as executor:
        done = await work_off(executor, [make_job(number, image) for number in range(1, count + 1)])
    failed = sum(bool(item.problem) for item in done)
    median = statistics.median(item.seconds for item in done)
    print(f"{count - failed} passed, {failed} failed in {time.monotonic() - begun:.1f} s, {median:.2f} s each (median)")
    return 1 if failed else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("image", metavar="REFERENCE", help="the image, by digest")
    parser.add_argument("--jobs", type=int, default=50)
    parser.add_argument("--state-dir", default="/var/lib/forgeyard")
    options = parser.parse_args()
    sys.exit(asyncio.run(main(options.image, options.jobs, options.state_dir)))
