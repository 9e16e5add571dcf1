"""The main job against bare runc, measured in the same run, interleaved. Prints medians and ratios; asserts nothing.

    python benchmarks/bench_job.py [--samples 30] [--runtime runc]

Run as root on a machine that is otherwise quiet. Every peer runs the very bundle that `forgeyard bundle generate`
writes, so both sides make the same namespaces, mounts and seccomp filter.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from forgeyard_executor import Execution, Executor, Job, Limits, Step

TRUE = Step("/bin/true")
MIB = 1 << 20


def show(name: str, ours: float, peer: float, unit: str, target: str) -> None:
    """One line of the report."""
    print(f"{name:34} {ours:9.2f} {peer:9.2f} {unit:7} ratio {ours / peer:5.2f}   (to reach: {target})", flush=True)


async def timed(work: Callable[[], Awaitable[object]]) -> float:
    """Milliseconds that `work` takes."""
    clock = time.perf_counter()
    await work()
    return (time.perf_counter() - clock) * 1000


class Bare:
    """Bare runc on a generated bundle."""

    def __init__(self, bundle: Path, root: Path, runtime: str) -> None:
        self._argv = [shutil.which(runtime) or runtime, "--root", str(root)]
        self._bundle = bundle
        self._serial = 0

    def spawn(self, *command: str) -> list[str]:
        """The argument vector of one runc command."""
        return [*self._argv, *command]

    async def run(self) -> None:
        """One foreground `run`."""
        self._serial += 1
        name = f"bare-{os.getpid()}-{self._serial}"
        process = await asyncio.create_subprocess_exec(
            *self.spawn("run", "--bundle", str(self._bundle), name), stdin=subprocess.DEVNULL
        )
        if await process.wait() != 0:
            raise SystemExit("bare runc failed")


async def one_job(executor: Executor) -> None:
    """A whole job: prepared, run, cleaned."""
    async with executor.run(Job(rootfs="host", steps=(TRUE,))) as execution:
        result = await execution.wait()
    if result.exit_code != 0:
        raise SystemExit(result.message)


async def bench_job(executor: Executor, bare: Bare, samples: int) -> None:
    """A warm one-step job against `runc run`."""
    ours, peer = [], []
    for _ in range(3):
        await one_job(executor)
        await bare.run()
    for _ in range(samples):
        peer.append(await timed(bare.run))
        ours.append(await timed(lambda: one_job(executor)))
    show("one-step job / runc run", statistics.median(ours), statistics.median(peer), "ms", "<= 1.3")


async def bench_step(executor: Executor, bundle: Path, root: Path, samples: int, runtime: str) -> None:
    """One more step in a running sandbox against `runc exec` in a running container."""
    config = bundle / "config.json"
    peer_bundle = bundle.parent / "sleeper"
    shutil.copytree(bundle, peer_bundle, symlinks=True)
    text = config.read_text().replace(str(bundle), str(peer_bundle))
    text = text.replace('"/.forgeyard/init","replay","/.forgeyard/steps"', '"/bin/sleep","600"')
    (peer_bundle / "config.json").write_text(text)
    runc = [shutil.which(runtime) or runtime, "--root", str(root)]
    name = f"bare-{os.getpid()}-exec"
    subprocess.run(
        [*runc, "run", "-d", "--bundle", str(peer_bundle), name],
        check=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )

    async def runc_exec() -> None:
        process = await asyncio.create_subprocess_exec(*runc, "exec", name, "/bin/true", stdin=subprocess.DEVNULL)
        await process.wait()

    try:
        async with executor.run(Job(rootfs="host", steps=())) as execution:
            await execution.exec(TRUE)
            ours, peer = [], []
            for _ in range(samples):
                peer.append(await timed(runc_exec))
                ours.append(await timed(lambda: execution.exec(TRUE)))
            execution.finish()
        show("further step / runc exec", statistics.median(ours), statistics.median(peer), "ms", "<= 0.2")
    finally:
        subprocess.run([*runc, "delete", "--force", name], check=True)


async def throughput(work: Callable[[], Awaitable[object]], jobs: int, at_once: int) -> float:
    """Jobs per second."""
    gate = asyncio.Semaphore(at_once)

    async def one() -> None:
        async with gate:
            await work()

    clock = time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(jobs):
            group.create_task(one())
    return jobs / (time.perf_counter() - clock)


async def bench_parallel(executor: Executor, bare: Bare, samples: int) -> None:
    """Jobs per second at several concurrencies, in five interleaved rounds each."""
    for at_once in (1, 2, 8, 32):
        jobs = max(samples, 2 * at_once)
        ours, peer = [], []
        for _ in range(5):
            peer.append(await throughput(bare.run, jobs, at_once))
            ours.append(await throughput(lambda: one_job(executor), jobs, at_once))
        show(f"jobs/s, {at_once} at once", statistics.median(ours), statistics.median(peer), "jobs/s", ">= 0.7")


async def drain(execution: Execution) -> int:
    """Read all output; the number of bytes."""
    return sum([len(chunk.data) async for chunk in execution.output()])


async def bench_output(executor: Executor, directory: Path) -> None:
    """200 MB from a step through the spool, against the same file through `cat | cat > file`."""
    size = 200 * 1000 * 1000
    tree = directory / "tree"
    tree.mkdir(mode=0o755)
    (tree / "data").write_bytes(os.urandom(MIB) * (size // MIB + 1))
    os.truncate(tree / "data", size)
    peer, ours = [], []
    for _ in range(5):
        clock = time.perf_counter()
        subprocess.run(f"cat {tree}/data | cat > {directory}/copy", shell=True, check=True)
        peer.append(size / (time.perf_counter() - clock) / 1e6)
        async with executor.run(Job(rootfs="host", steps=(Step("cat", "data"),)), source=tree) as execution:
            result = await execution.wait()
            if result.output.stdout_bytes != size:
                raise SystemExit(f"lost output: {result.output}")
            ours.append(size / (result.steps[0].duration or 1) / 1e6)
    show("200 MB of output / cat", statistics.median(ours), statistics.median(peer), "MB/s", ">= 0.6")


def pss(pid: int | str) -> int:
    """Bytes of memory that are this process's share."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise SystemExit("no Pss")


async def bench_memory(executor: Executor, state: Path) -> None:
    """What a running job costs in memory of ours: the shim, its files in memory, and what the executor grew by."""
    count = 16
    before = pss("self")
    contexts = [executor.run(Job(rootfs="host", steps=(Step("sleep", "600"),), limits=Limits())) for _ in range(count)]
    executions = [await context.__aenter__() for context in contexts]
    files = [state / "sandboxes" / e.sandbox_id / "mnt/files" for e in executions]
    shims = sum(pss((path / "pid").read_text()) for path in files)
    in_memory = sum(
        os.statvfs(path).f_frsize * (os.statvfs(path).f_blocks - os.statvfs(path).f_bfree) for path in files
    )
    grown = pss("self") - before + in_memory
    for execution, context in zip(executions, contexts, strict=True):
        await execution.cancel(kill=True)
        await context.__aexit__(None, None, None)
    each = (shims + grown) / count / MIB
    print(f"{'memory of ours per running job':34} {each:9.2f} {'':9} MiB      (to reach: <= 2)", flush=True)


async def main() -> None:
    """Run every benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--runtime", default="runc")
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fy-bench-", dir="/var/tmp"))
    directory.chmod(0o711)
    try:
        async with Executor.open(directory / "state", runtime=options.runtime) as executor:
            bundle = directory / "bundle"
            await executor.generate_bundle(Job(rootfs="host", steps=(TRUE,)), bundle)
            bare = Bare(bundle, directory / "runc", options.runtime)
            print(f"{'':34} {'ours':>9} {'peer':>9}")
            await bench_job(executor, bare, options.samples)
            await bench_step(executor, bundle, directory / "runc", options.samples, options.runtime)
            await bench_parallel(executor, bare, options.samples)
            await bench_output(executor, directory)
            await bench_memory(executor, directory / "state")
    finally:
        shutil.rmtree(directory)


if __name__ == "__main__":
    asyncio.run(main())
