"""Our job on each daemon against the same work by that daemon's own command line. Prints medians and ratios.

    python benchmarks/bench_adapters.py [--samples 20] [--only containerd|podman|docker]... [--phases]

Run as root on a machine that is otherwise quiet: only ratios mean something elsewhere. The daemons are private ones.
All sides take their turns on the same image, without a network. Ours adds to what the others do a user namespace of the
job's own (not on docker), limits with evidence, and the reading back of what the daemon applied.

`--phases` says where the time until our step can run goes, as the results have it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from adapter_peers import IMAGE, busybox, peer_of
from network_peers import archives
from turns import Measured, in_turns, ratio

# isort: split
from daemons import DAEMONS, Daemon, installed  # found by what network_peers did to sys.path

from forgeyard_executor import Executor, ExecutorConfig, Job, Step
from forgeyard_model.policy import Need

ADAPTERS = {
    "containerd": ("containerd", "CONTAINERD_ADDRESS"),
    "podman": ("podman", "CONTAINER_HOST"),
    "docker": ("dockerd", "DOCKER_HOST"),
}
"""The daemon of each adapter, and the variable by which its tools and we find it."""


@dataclass(frozen=True)
class Ours:
    """Jobs of an executor."""

    executor: Executor
    job: Job
    phases: dict[str, list[float]] = field(default_factory=dict)

    async def run(self) -> None:
        """One job, from its preparation to the last trace of it."""
        async with self.executor.run(self.job) as execution:
            result = await execution.wait()
        if result.exit_code != 0:
            raise SystemExit(f"our job failed: {result.message}")
        for name, seconds in result.startup.items():
            self.phases.setdefault(name, []).append(seconds * 1000)

    def show(self) -> None:
        """The median of each phase of the start, without what only the first job has: its image is pulled."""
        always = {name: values for name, values in self.phases.items() if len(values) > 1}
        parts = (f"{name} {statistics.median(values):.1f}" for name, values in always.items())
        print(f"  phases of our start, ms: {', '.join(parts)}", flush=True)


async def bench_adapter(name: str, daemon: Daemon, directory: Path, options: argparse.Namespace) -> None:
    """One daemon: ours, its own steps, and its own `run --rm`."""
    print(name)
    peer = peer_of(daemon)
    peer.load([directory / f"{IMAGE}.tar"])
    # Docker has no user namespace for one container: its job is somebody else than root, and the operator says so.
    docker = name == "docker"
    config = ExecutorConfig(user_namespace=Need.PREFERRED if docker else Need.REQUIRED)
    job = Job(image=busybox(), steps=(Step("true"),), user="1000:1000" if docker else None)
    async with Executor.open(directory / name, runtime=name, config=config) as executor:
        ours = Ours(executor, job)
        ways = [
            Measured("ours", ours.run),
            Measured(f"{peer.name} create, start, exec, wait, rm", peer.steps),
            Measured(f"{peer.name} run --rm", peer.run),
        ]
        await in_turns(ways, options.samples)
    ratio(f"ours / {ways[1].name}", ways[0], ways[1], "<= 1.0")
    ratio(f"ours / {ways[2].name}", ways[0], ways[2], "<= 1.25")
    if options.phases:
        ours.show()


def bench(names: Sequence[str], directory: Path, options: argparse.Namespace) -> None:
    """All that are installed, one after the other."""
    archives(directory, [IMAGE])
    for name in names:
        daemon, variable = ADAPTERS[name]
        if not installed(daemon):
            print(f"without {name}: it is not installed", flush=True)
            continue
        with ExitStack() as stack:
            started = stack.enter_context(DAEMONS[daemon]())
            os.environ[variable] = started.address
            asyncio.run(bench_adapter(name, started, directory, options))


def main() -> None:
    """Measure in a directory of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--only", action="append", choices=tuple(ADAPTERS))
    parser.add_argument("--phases", action="store_true")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fy-bench-", dir="/var/tmp"))
    directory.chmod(0o711)
    try:
        bench(options.only or tuple(ADAPTERS), directory, options)
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
