"""Whole jobs on one adapter: an executor that is opened once, with that adapter as its runtime."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapters import DAEMON_FIXTURES
from jobs import cleaned, collect

from forgeyard_executor import ExecutionResult, Executor, Job, Outcome, Step
from forgeyard_model.config import OWN_ROOTFS, ExecutorConfig, RootfsRules
from forgeyard_model.policy import Need

ADDRESS_VARIABLES = {"containerd": "CONTAINERD_ADDRESS", "podman": "CONTAINER_HOST", "docker": "DOCKER_HOST"}
"""By which each adapter finds its daemon, as that daemon's own tools do."""


class Jobs:
    """Runs jobs on one adapter."""

    def __init__(self, name: str, state: Path, *, rootfs: str = OWN_ROOTFS) -> None:
        self.name = name
        self.state = state
        self.rootfs = rootfs
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._executor: Executor | None = None

    def drive(self, body: Callable[[Executor], Awaitable[None]]) -> None:
        """Await `body` with the executor."""

        async def main() -> None:
            await body(await self._opened())

        self._runner.run(main())

    def run(self, job: Job, **options: object) -> tuple[ExecutionResult, bytes, bytes]:
        """Run a job to its end: its result and its output, per stream."""

        async def main() -> tuple[ExecutionResult, bytes, bytes]:
            executor = await self._opened()
            async with executor.run(self.fitted(job), **options) as execution:  # type: ignore[arg-type]  # passed on by name
                out, err = await collect(execution)
                return cleaned(await execution.wait()), out, err

        return self._runner.run(main())

    def fitted(self, job: Job) -> Job:
        """`job`, as somebody else than the host's own root where root inside would be that."""
        if self.name != "docker" or job.image is None or job.user is not None or _image_user(job.image):
            return job
        return replace(job, user="1000:1000")

    def says(self, script: str, **job: object) -> str:
        """The output of a script whose job succeeds, without the last newline."""
        job.setdefault("rootfs", None if "image" in job else "host")
        result, out, err = self.run(Job(steps=(Step("/bin/sh", "-c", script),), **job))  # type: ignore[arg-type]  # as above
        assert result.outcome is Outcome.SUCCEEDED, (result.message, out, err)
        return out.decode().rstrip("\n")

    def close(self) -> None:
        """Close the executor."""
        with self._runner:
            self._runner.run(self._stack.aclose())

    async def _opened(self) -> Executor:
        if self._executor is None:
            opening = Executor.open(self.state, runtime=self.name, config=config_for(self.name, self.rootfs))
            self._executor = await self._stack.enter_async_context(opening)
        return self._executor


def _image_user(reference: str) -> str:
    """USER of an image in a layout on disk."""
    path, _, digest = reference.removeprefix("oci:").partition("@")
    blobs = Path(path, "blobs", "sha256")

    def blob(named: str) -> Any:
        return json.loads((blobs / named.removeprefix("sha256:")).read_bytes())

    found = blob(digest)
    manifest = blob(found["manifests"][0]["digest"]) if "manifests" in found else found
    return str(blob(manifest["config"]["digest"]).get("config", {}).get("User", ""))


def config_for(name: str, rootfs: str = OWN_ROOTFS) -> ExecutorConfig:
    """An operator's configuration with which jobs of every profile's defaults run on that adapter.

    :param rootfs: who unpacks its images.
    """
    rules = RootfsRules() if rootfs == OWN_ROOTFS else RootfsRules(**{name: rootfs})
    return ExecutorConfig(user_namespace=Need.PREFERRED if name == "docker" else Need.REQUIRED, rootfs=rules)


@contextmanager
def jobs_on(request: pytest.FixtureRequest, state: Path) -> Iterator[Jobs]:
    """Jobs on the adapter that a test's parameter names, its daemon running."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        if name in DAEMON_FIXTURES:
            patch.setenv(ADDRESS_VARIABLES[name], request.getfixturevalue(DAEMON_FIXTURES[name]).address)
        else:
            request.getfixturevalue("require_tool")(name)
        jobs = Jobs(name, state)
        try:
            yield jobs
        finally:
            jobs.close()


def owner(pid: str) -> int:
    """Uid of a living process; -1 otherwise."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return -1
    fields = dict(line.split(":", 1) for line in status.splitlines())
    return -1 if fields["State"].split()[0] in "ZX" else int(fields["Uid"].split()[1])


def processes_of(base: int) -> list[str]:
    """Living processes whose uid is in an attempt's range."""
    return [pid for pid in os.listdir("/proc") if pid.isdecimal() and base <= owner(pid) < base + 65536]
