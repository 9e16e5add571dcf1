"""Many small jobs from many clients at a real `forgeyard serve`: none lost, how long calls take, whether memory stays.

    python benchmarks/bench_serve.py [--jobs 500] [--clients 32] [--slots 8] [--runtime runc]

Run as root on a machine that is otherwise quiet. Every client has a connection of its own; all of them are one process
beside the server's two, on the same cores. A client takes its next job when its last one is over, and looks at it once
while it runs. Wait and Output last as long as the job does, so that they are not measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forgeyard_api.client import RemoteExecutor
from forgeyard_api.client.calls import Calls
from forgeyard_api.serve.attempt_types import Wanted
from forgeyard_api.serve.requests import request_from
from forgeyard_api.wire.messages import executor as wire
from forgeyard_api.wire.messages import result
from forgeyard_executor import Job, Step

TARGET_MS = 250.0
"""The 99th percentile of calls other than Wait and Output."""
READY, END = 120.0, 120.0
PARTS = 5
"""How often memory is shown on the way."""


@dataclass
class Seen:
    """What the clients saw."""

    calls: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    good: int = 0
    bad: list[str] = field(default_factory=list)

    @property
    def over(self) -> int:
        """Jobs that have ended, however."""
        return self.good + len(self.bad)


@dataclass
class Client:
    """One connection."""

    calls: Calls
    seen: Seen
    fresh: bool = True

    async def _timed(self, name: str, request: Any) -> Any:
        clock = time.perf_counter()
        answer = await self.calls.call(name, request, seconds=60)
        # The first one of a client also connects, all of them at the same moment.
        named = f"{name}, connecting" if self.fresh else name
        self.fresh = False
        self.seen.calls[named].append((time.perf_counter() - clock) * 1000)
        return answer

    async def run(self, number: int) -> None:
        """One job, from Prepare to Cleanup; what came of it is counted."""
        name = f"bench-{number}"
        said = f"line of {number}\n"
        job = Job(rootfs="host", steps=(Step("/bin/sh", "-c", f"echo 'line of {number}'"),))
        await self._timed("Prepare", request_from(Wanted(attempt_id=name, job=job)))
        await self._timed("Start", wire.StartRequest(attempt_id=name))
        output, attempt = await asyncio.gather(self._output(name), self._ended(name))
        await self._timed("Cleanup", wire.CleanupRequest(attempt_id=name))
        if attempt.result.outcome != result.EXECUTION_OUTCOME_SUCCEEDED:
            fault = f"{name}: {attempt.error.brief or attempt.result.message}"
        else:
            fault = "" if output == said.encode() else f"{name}: said {output!r}"
        if fault:
            self.seen.bad.append(fault)
        else:
            self.seen.good += 1

    async def _output(self, name: str) -> bytes:
        request = wire.OutputRequest(attempt_id=name)
        return b"".join([answer.data async for answer in self.calls.stream("Output", request)])

    async def _ended(self, name: str) -> wire.Attempt:
        until = wire.ATTEMPT_STATE_RUNNING
        while True:
            request = wire.WaitRequest(attempt_id=name, until=until)
            attempt: wire.Attempt = (await self.calls.call("Wait", request, seconds=90)).attempt
            if attempt.state == wire.ATTEMPT_STATE_ENDED:
                return attempt
            if attempt.state == wire.ATTEMPT_STATE_RUNNING and until == wire.ATTEMPT_STATE_RUNNING:
                until = wire.ATTEMPT_STATE_ENDED
                await self._timed("ListSandboxes", wire.ListSandboxesRequest())


@dataclass
class Server:
    """The server's process, and the keeper's, which has the containers."""

    process: subprocess.Popen[bytes]
    run_dir: Path

    @property
    def target(self) -> str:
        """Where it listens."""
        return f"unix:{self.run_dir}/executor.sock"

    def memory(self) -> dict[str, float]:
        """MiB of each process that are its own or shared with nobody it does not know of (VmRSS)."""
        pids = {"server": self.process.pid}
        for about in self.run_dir.glob("keepers/*/keeper.json"):
            pids["keeper"] = json.loads(about.read_text())["pid"]
        return {name: _rss(pid) for name, pid in pids.items()}


def _rss(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


@contextmanager
def served(directory: Path, options: argparse.Namespace) -> Iterator[Server]:
    """A server with directories of its own."""
    run_dir = directory / "run"
    run_dir.mkdir(mode=0o700)
    lines = (f'state_dir = "{directory / "state"}"', "[serve]", f'socket = "{run_dir / "executor.sock"}"')
    more = (f'runtimes = ["{options.runtime}"]', f"slots = {options.slots}", 'keeper_linger = "1s"')
    config = directory / "config.toml"
    config.write_text("\n".join((*lines, *more)) + "\n")
    config.chmod(0o600)
    with (directory / "server.log").open("wb") as log, closing(_notified(directory / "notify")) as notified:
        process = subprocess.Popen(
            [sys.executable, "-m", "forgeyard_api", "serve", "--config", str(config)],
            env={**os.environ, "NOTIFY_SOCKET": str(directory / "notify")},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
        )
        try:
            _until_ready(process, notified, directory / "server.log")
            yield Server(process, run_dir)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(END)
            _end_keepers(run_dir)


def _notified(path: Path) -> socket.socket:
    found = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    found.bind(str(path))
    found.settimeout(1)
    return found


def _until_ready(process: subprocess.Popen[bytes], notified: socket.socket, log: Path) -> None:
    deadline = time.monotonic() + READY
    while process.poll() is None and time.monotonic() < deadline:
        with suppress(TimeoutError):
            if b"READY=1" in notified.recv(4096):
                return
    raise SystemExit(f"the server did not start: {log.read_text()}")


def _end_keepers(run_dir: Path) -> None:
    """They would wait for the next server; what they keep is gone when they are."""
    for about in run_dir.glob("keepers/*/keeper.json"):
        with suppress(ProcessLookupError):
            os.kill(json.loads(about.read_text())["pid"], signal.SIGTERM)
    deadline = time.monotonic() + END
    while any(run_dir.glob("keepers/*/keeper.json")) and time.monotonic() < deadline:
        time.sleep(0.1)


async def load(server: Server, options: argparse.Namespace) -> tuple[Seen, list[dict[str, float]], float]:
    """All jobs: what was seen, memory on the way, and how many seconds it took."""
    seen, memory = Seen(), []
    numbers = iter(range(options.jobs))

    async def client() -> None:
        async with RemoteExecutor.connect(server.target) as executor:
            one = Client(executor.calls, seen)
            for number in numbers:
                await one.run(number)

    async def watch() -> None:
        for part in range(1, PARTS + 1):
            while seen.over < options.jobs * part // PARTS:
                await asyncio.sleep(0.1)
            memory.append(server.memory())
            print(f"  {seen.over:5} jobs   {_mib(memory[-1])}", flush=True)

    clock = time.monotonic()
    async with asyncio.TaskGroup() as group:
        group.create_task(watch())
        for _ in range(options.clients):
            group.create_task(client())
    return seen, memory, time.monotonic() - clock


def _mib(memory: dict[str, float]) -> str:
    return ", ".join(f"{name} {size:.1f} MiB" for name, size in memory.items())


def show(seen: Seen, memory: list[dict[str, float]], seconds: float, options: argparse.Namespace) -> None:
    """The figures, and which of them miss their mark."""
    print(f"{options.jobs} jobs, {options.clients} clients, {options.slots} slots, {options.runtime}: {seconds:.1f} s")
    print(f"  {options.jobs / seconds:.1f} jobs a second, load of the machine {os.getloadavg()[0]:.1f}")
    everything = [value for values in seen.calls.values() for value in values]
    for name, values in (*sorted(seen.calls.items()), ("all of these", everything)):
        cuts = statistics.quantiles(values, n=100)
        shown = f"p50 {cuts[49]:7.1f} ms   p99 {cuts[98]:7.1f} ms   max {max(values):7.1f} ms"
        print(f"  {name:20} {len(values):5} calls   {shown}")
    settled = [value for name, values in seen.calls.items() if "," not in name for value in values]
    after = statistics.quantiles(settled, n=100)[98]
    p99 = statistics.quantiles(everything, n=100)[98]
    print(f"  lost or wrong {len(seen.bad)} (to reach: 0)")
    print(f"  p99 {p99:.1f} ms (to reach: < {TARGET_MS:.0f}), once connected {after:.1f} ms")
    # From the second mark on everything that is needed once has been loaded.
    for name in memory[-1]:
        grown = memory[-1][name] - memory[1][name]
        print(f"  {name} grew by {grown:+.1f} MiB since {2 * options.jobs // PARTS} jobs")
    for fault in seen.bad[:10]:
        print(f"  {fault}")


def main() -> None:
    """Measure in a directory of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--runtime", default="runc")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fy-bench-", dir="/var/tmp"))
    directory.chmod(0o711)
    try:
        with served(directory, options) as server:
            seen, memory, seconds = asyncio.run(load(server, options))
        show(seen, memory, seconds, options)
    finally:
        shutil.rmtree(directory)
    sys.exit(1 if seen.bad else 0)


if __name__ == "__main__":
    main()
