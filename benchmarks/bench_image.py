"""Images against skopeo and umoci, image jobs against process-mode jobs. Prints medians and ratios; asserts nothing.

    python benchmarks/bench_image.py [--rounds 7] [--samples 40] [--in DIR]

Run as root on a machine that is otherwise quiet. The image has 200 MB in 10,000 files and four layers; it comes from a
docker-registry on the loopback. Both sides run as processes of their own, start of the interpreter included, in turns,
each with an empty store: ours prepares the image as a job does, theirs is `skopeo copy` into a layout, then
`umoci unpack`. Both leave a layout of verified blobs and the unpacked files, in the page cache.
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
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/images"))

from docker_registry import Registry, RegistryProcess  # noqa: E402  # it lies with the tests
from image_catalog import image  # noqa: E402  # as above

from forgeyard_executor import Executor, Job, Step  # noqa: E402  # stays below what it does not need

TRUE = Step("/bin/true")


def run(command: Sequence[str | Path], **environment: str) -> float:
    """Seconds that a command takes. Its output is shown when it fails."""
    clock = time.perf_counter()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | environment,
        check=False,
    )
    took = time.perf_counter() - clock
    if done.returncode != 0:
        raise SystemExit(f"{command[0]} failed:\n{done.stdout[-2000:]}")
    return took


def pull_ours(reference: str, work: Path) -> float:
    """Pull and unpack into an empty store, from the start of a process until a job could begin.

    The store then writes it all to the disk, beside the job, so that it still counts after a crash of the host; neither
    peer does that, and it is not part of the time.
    """
    program = "import sys; from pathlib import Path; from forgeyard_oci.image_store import ImageStore\n"
    program += "ImageStore(Path(sys.argv[1])).prepare(sys.argv[2], None, Path('/')); print('ready', flush=True)"
    clock = time.perf_counter()
    command = [sys.executable, "-c", program, f"{work}/images", reference]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
        if child.stdout is None or child.stdout.readline() != b"ready\n":
            raise SystemExit("the pull failed")
        return time.perf_counter() - clock


def pull_theirs(reference: str, work: Path) -> float:
    """Copy into an empty layout, then unpack that."""
    source = f"docker://{reference}"
    copied = run(["skopeo", "copy", "-q", "--src-tls-verify=false", source, f"oci:{work}/layout:it"])
    return copied + run(["umoci", "unpack", "--image", f"{work}/layout:it", f"{work}/bundle"])


def fresh(directory: Path) -> Path:
    """An empty directory, with nothing of the round before left to be written to the disk."""
    work = directory / "round"
    if work.exists():
        shutil.rmtree(work)
    work.mkdir(mode=0o711)
    os.sync()
    return work


def bench_pull(reference: str, directory: Path, rounds: int) -> None:
    """Pull and unpack, in turns."""
    ours, peer = [], []
    for _ in range(rounds):
        peer.append(pull_theirs(reference, fresh(directory)))
        ours.append(pull_ours(reference, fresh(directory)))
    mine, other = statistics.median(ours), statistics.median(peer)
    print(f"{'':34} {'ours':>9} {'peer':>9}")
    print(f"{'pull 200 MB, 10,000 files':34} {mine:9.2f} {other:9.2f} s       {_spread(ours)} {_spread(peer)}")
    print(f"{'':34} {other / mine:9.2f} times as fast   (to reach: >= 1.5)", flush=True)


async def one_job(executor: Executor, job: Job) -> float:
    """Milliseconds of a whole job: prepared, run, cleaned."""
    clock = time.perf_counter()
    async with executor.run(job) as execution:
        result = await execution.wait()
    if result.exit_code != 0:
        raise SystemExit(result.message)
    return (time.perf_counter() - clock) * 1000


async def bench_warm(directory: Path, reference: str, samples: int) -> None:
    """A job in an image that is there, against the same job in process mode, in turns."""
    image_job, process_job = Job(image=reference, steps=(TRUE,)), Job(rootfs="host", steps=(TRUE,))
    ours, peer = [], []
    async with Executor.open(directory / "state") as executor:
        for sample in range(-3, samples):
            process, in_image = await one_job(executor, process_job), await one_job(executor, image_job)
            if sample >= 0:  # the first ones warm up
                peer.append(process)
                ours.append(in_image)
    mine, other = statistics.median(ours), statistics.median(peer)
    print(f"{'warm image job / process mode':34} {mine:9.2f} {other:9.2f} ms      {_spread(ours)} {_spread(peer)}")
    print(f"{'':34} ratio {mine / other:5.2f}   (to reach: <= 1.10)", flush=True)


def _spread(values: Sequence[float]) -> str:
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return f"{low:.2f}..{high:.2f}"


def main() -> None:
    """Run both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--samples", type=int, default=40)
    parser.add_argument(
        "--in", dest="place", default="/var/tmp", help="file system to work on; /dev/shm leaves disks out"
    )
    options = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="fy-bench-", dir=options.place))
    directory.chmod(0o711)
    process = RegistryProcess()
    try:
        registry = Registry(process.directory)
        bench_pull(registry.push(image("large")[0], "latest", "large"), directory, options.rounds)
        reference = registry.push(image("debian")[0], "latest", "debian")
        asyncio.run(bench_warm(directory, reference, options.samples))
    finally:
        process.stop()
        shutil.rmtree(directory)


if __name__ == "__main__":
    main()
