"""examples/postgres-redis-tests: the suite passes in a job, and two such jobs know nothing of each other."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from forgeyard_api.jobfile_reader import load_job_file
from forgeyard_executor import Execution, Executor, Job, Step

if TYPE_CHECKING:
    from conftest import Images

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(600), pytest.mark.xdist_group("service images")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "postgres-redis-tests"
PLACEHOLDER = "registry.example.org"
NAMES = ("python", "postgres", "redis")
# Leaves its argument in both servers, and says where they are.
MARK = """
import os, sys, psycopg, redis
from socket import gethostbyname
with psycopg.connect(os.environ["DATABASE_URL"]) as database, redis.Redis.from_url(os.environ["REDIS_URL"]) as cache:
    database.execute("insert into products (name, stock) values (%s, 1)", [sys.argv[1]])
    cache.set("owner", sys.argv[1])
print(gethostbyname("db"), gethostbyname("cache"), flush=True)
"""
# What is in the servers of its own, and what comes of a connection to those at the addresses given.
LOOK = """
import os, sys, psycopg, redis, socket
with psycopg.connect(os.environ["DATABASE_URL"]) as database, redis.Redis.from_url(os.environ["REDIS_URL"]) as cache:
    print([name for (name,) in database.execute("select name from products where id > 3")], cache.get("owner"))
for address, port in zip(sys.argv[1:], (5432, 6379)):
    try:
        socket.create_connection((address, port), timeout=20)
    except ConnectionRefusedError:
        print(port, "refused")
"""


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    """One for both tests: the images are unpacked once."""
    path = Path(tempfile.mkdtemp(prefix="fy-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    assert f" {path}/" not in Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    shutil.rmtree(path)


def example(target: Path, host: str) -> Path:
    """A copy that names images of the registry at `host`."""
    shutil.copytree(EXAMPLE, target, ignore=shutil.ignore_patterns("__pycache__"))
    job = target / "job.yaml"
    job.write_text(job.read_text().replace(PLACEHOLDER, host))
    return target


def registry_host(images: Images) -> str:
    """Of the registry, which has all three images."""
    (host,) = {images.reference(name).partition("/")[0] for name in NAMES}
    return host


def test_the_suite_passes(images: Images, state_dir: Path, tmp_path: Path, leaks: object) -> None:
    """As the README says: tags are pinned in the lock file, the report comes out, each service has its log."""
    work = example(tmp_path / "example", registry_host(images))
    words = ["--lock", "images.lock", "--output", "out", "--service-logs", "logs", "--result", "result.json"]
    done = subprocess.run(
        [sys.executable, "-m", "forgeyard_api", "run", "--state-dir", str(state_dir), *words, "job.yaml"],
        cwd=work,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    suite = ET.parse(work / "out" / "report.xml").getroot()[0]
    counts = [suite.get(name) for name in ("tests", "failures", "errors", "skipped")]
    assert counts == ["7", "0", "0", "0"]
    result = json.loads((work / "result.json").read_text())
    assert [(item["name"], item["state"]) for item in result["services"]] == [("db", "ready"), ("cache", "ready")]
    lock = (work / "images.lock").read_text()
    assert [images.digest(name) in lock for name in NAMES] == [True] * 3
    assert "products_stock_check" in (work / "logs" / "db.log").read_text()
    assert (work / "logs" / "cache.log").stat().st_size > 0


def test_two_at_once_do_not_see_each_other(images: Images, state_dir: Path, tmp_path: Path, leaks: object) -> None:
    """Both have a `db` and a `cache`; each finds what it wrote itself, and no way to the other's servers."""
    loaded = load_job_file(example(tmp_path / "example", registry_host(images)) / "job.yaml")
    by_tag = {f"{registry_host(images)}/{name}:latest": images.reference(name) for name in NAMES}
    job = loaded.file.to_job(base=str(tmp_path / "example"))
    services = tuple(replace(item, image=by_tag[item.image or ""]) for item in job.services)
    job = replace(job, image=by_tag[job.image or ""], services=services, steps=(), outputs=())

    async def main() -> tuple[str, str]:
        async with Executor.open(state_dir) as executor:
            return await two_at_once(executor, job, tmp_path / "example")

    left, right = asyncio.run(main())
    assert left.splitlines() == ["['left'] b'left'", "5432 refused", "6379 refused"]
    assert right.splitlines() == ["['right'] b'right'", "5432 refused", "6379 refused"]


async def two_at_once(executor: Executor, job: Job, source: Path) -> tuple[str, str]:
    """What two jobs see, each while the other runs too."""
    together = asyncio.Barrier(2)
    places: dict[str, list[str]] = {}

    async def one(name: str, other: str) -> str:
        async with executor.run(job, source=source) as execution, aclosing(execution.output()) as output:
            await passed(execution, MARK, name)
            places[name] = (await anext(output)).data.decode().split()
            await together.wait()
            await passed(execution, LOOK, *places[other])
            await together.wait()
            execution.finish()
            return b"".join([chunk.data async for chunk in output]).decode()

    async with asyncio.timeout(300), asyncio.TaskGroup() as group:
        left, right = group.create_task(one("left", "right")), group.create_task(one("right", "left"))
    return left.result(), right.result()


async def passed(execution: Execution, program: str, *words: str) -> None:
    """Run a Python program in the job; it has to exit 0."""
    step = await execution.exec(Step("python3", "-c", program, *words))
    assert step.exit is not None
    assert step.exit.ok, step
