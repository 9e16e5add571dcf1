"""What an executor shares between its attempts."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from forgeyard_executor.state import StatePaths
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.processes import process_facts
from forgeyard_host.uids import UidRanges
from forgeyard_runtimes.contract import ContainerRuntime
from forgeyard_runtimes.spool import OutputPump

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class HostServices:
    """Long-lived parts; the executor opens and closes them."""

    executor_id: str
    paths: StatePaths
    host: Host
    cgroups: CgroupHost
    uids: UidRanges
    pump: OutputPump
    runtime: ContainerRuntime
    pool: ThreadPoolExecutor
    shim: Path
    own_namespaces: Mapping[str, int]
    nofile_ceiling: int

    def in_pool(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run a blocking call in the bounded pool."""
        return asyncio.get_running_loop().run_in_executor(self.pool, call)


_CAP_SYS_RESOURCE = 1 << 24


def nofile_ceiling() -> int:
    """The highest open-files limit that this process may give to a job."""
    if process_facts(os.getpid()).capabilities["effective"] & _CAP_SYS_RESOURCE:
        return int(Path("/proc/sys/fs/nr_open").read_text())
    return resource.getrlimit(resource.RLIMIT_NOFILE)[1]
