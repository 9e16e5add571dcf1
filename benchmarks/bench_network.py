"""Jobs with networks and services against docker and podman. Prints medians and ratios; asserts nothing.

    python benchmarks/bench_network.py [--samples 20] [--without docker] [--without podman]

Run as root on a machine that is otherwise quiet. Everything happens in a network namespace made for it, which plays the
host: our executor's rules, docker's bridges and podman's are set there, and the machine's own network is left alone.
All sides take their turns, on the same images. docker and podman are private daemons with a state of their own.

A service is waited for by the quickest means that each side has. Ours is the declared health check. For docker and
podman it is a loop of `exec redis-cli ping`, for their own health checks begin after an interval: what
`docker compose up --wait` does is written out as its commands, without the time that compose itself takes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from network_peers import PING, Docker, Podman, image, peers
from turns import Measured, in_turns, ratio

from forgeyard_executor import Executor, ExecutorConfig, Job, Network, Step
from forgeyard_model.config import NetworkConfig
from forgeyard_model.services import ExecProbe, HealthCheck, ServiceSpec
from forgeyard_networks.attempt_network import NetworkMember, NetworkRequest
from forgeyard_networks.manager import NetworkManager
from forgeyard_networks.settings import NetworkSettings

POOL = 8
AT_ONCE = (1, 10, 50, 100, 200)
INSIDE = "FORGEYARD_BENCH_NETWORK"
HOST = """
ip link set lo up; ip link add out0 type veth peer name out1; ip link set out0 up; ip link set out1 up
ip address add 203.0.113.1/24 dev out0; ip route add default via 203.0.113.2
"""

# Ours


@dataclass(frozen=True)
class Ours:
    """Jobs of an executor."""

    executor: Executor
    busybox: str
    redis: str

    async def plain(self) -> None:
        """A job without a network."""
        await self._run(Job(image=self.busybox, steps=(Step("true"),)))

    async def network(self) -> None:
        """A job with a network of its own."""
        await self._run(Job(image=self.busybox, steps=(Step("true"),), network=Network.allow()))

    async def service(self) -> None:
        """A job with a network and a Redis that is ready."""
        redis = ServiceSpec("redis", image=self.redis, health=HealthCheck(ExecProbe(("redis-cli", "ping"))))
        step = Step.shell(PING.format("redis"))
        await self._run(Job(image=self.busybox, steps=(step,), network=Network.allow(), services=(redis,)))

    async def _run(self, job: Job) -> None:
        async with self.executor.run(job) as execution:
            result = await execution.wait()
        if result.exit_code != 0:
            raise SystemExit(f"our job failed: {result.message}")


# The measurements


async def bench_network(pooled: Ours, unpooled: Ours, others: Sequence[Docker | Podman], samples: int) -> None:
    """A job with a network against one without, and against the same elsewhere."""
    print("a job with a network")
    plain, made = Measured("ours, no network", pooled.plain), Measured("ours, a network made for it", unpooled.network)
    ready = Measured(f"ours, a network from a pool of {POOL}", pooled.network)
    theirs = [Measured(f"{peer.name}, its own network or pod", peer.network) for peer in others]
    await in_turns([plain, made, ready, *theirs], samples)
    ratio("from the pool / without a network", ready, plain, "<= 1.25")
    ratio("made for it / without a network", made, plain, "<= 1.25")
    for way in theirs:
        ratio(f"{way.name.partition(',')[0]} / from the pool", way, ready, "more than 1")


async def bench_service(pooled: Ours, others: Sequence[Docker | Podman], samples: int) -> None:
    """A job with a network and one Redis that is ready."""
    print("a job with a network and a Redis")
    ours = Measured("ours", pooled.service)
    theirs = [Measured(peer.name, peer.service) for peer in others]
    await in_turns([ours, *theirs], samples)
    for way in theirs:
        ratio(f"{way.name} / ours", way, ours, ">= 3")


async def bench_many(directory: Path) -> None:
    """What one network of many costs, made at once: the same for any number, if set-up grows linearly."""
    print("set-up of many networks at once; ms for each")
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(4) as threads:
        settings = NetworkSettings.of(NetworkConfig(), str(directory))
        manager = NetworkManager(settings, in_pool=lambda call: loop.run_in_executor(threads, call))
        await manager.open()
        try:
            await _many(manager, 1)  # rules are loaded and modules imported once
            for count in AT_ONCE:
                rounds = [await _many(manager, count) for _ in range(max(3, 20 // count))]
                attach, close = (statistics.median(values) * 1000 / count for values in zip(*rounds, strict=True))
                print(f"  {count:4} at once {'attach':>18} {attach:9.2f} ms   close {close:9.2f} ms", flush=True)
        finally:
            await manager.close()


async def _many(manager: NetworkManager, count: int) -> tuple[float, float]:
    """Seconds to make so many, and to let go of them."""
    members = (NetworkMember("job"),)
    requests = [NetworkRequest(f"bench{number}", Network.allow(), members) for number in range(count)]
    clock = time.perf_counter()
    made = await asyncio.gather(*map(manager.attach, requests))
    attached = time.perf_counter()
    await asyncio.gather(*(network.close() for network in made))
    return attached - clock, time.perf_counter() - attached


async def measure(directory: Path, options: argparse.Namespace) -> None:
    """All of it, in the namespace that plays the host."""
    references = [f"oci:{path}@{digest}" for path, digest in map(image, ("busybox", "redis"))]
    plain = ExecutorConfig(state_dir=str(directory / "unpooled"))
    pool = ExecutorConfig(state_dir=str(directory / "pooled"), network=NetworkConfig(pool=POOL))
    with ExitStack() as stack:
        others = peers(stack, directory, options.without)
        async with Executor.open(config=plain) as first, Executor.open(config=pool) as second:
            unpooled, pooled = Ours(first, *references), Ours(second, *references)
            await bench_network(pooled, unpooled, others, options.samples)
            await bench_service(pooled, others, max(3, options.samples // 2))
        await bench_many(directory)


def main() -> None:
    """Enter a network namespace, and measure there."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--without", action="append", default=[], choices=("docker", "podman"))
    options = parser.parse_args()
    if INSIDE not in os.environ:
        os.environ[INSIDE] = "1"
        os.execvp("unshare", ["unshare", "--net", "--", sys.executable, __file__, *sys.argv[1:]])
    subprocess.run(["sh", "-ec", HOST], check=True)
    directory = Path(tempfile.mkdtemp(prefix="fy-bench-", dir="/var/tmp"))
    directory.chmod(0o711)
    try:
        asyncio.run(measure(directory, options))
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
