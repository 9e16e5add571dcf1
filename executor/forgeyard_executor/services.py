"""What an executor shares between its attempts."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from forgeyard_executor.engines import engine_of, remember
from forgeyard_executor.state import StatePaths
from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.ledger import ExecutorLock
from forgeyard_host.processes import process_facts
from forgeyard_host.uids import DEFAULT_BASE, DEFAULT_SIZE, UidRanges
from forgeyard_model.config import ExecutorConfig, UidBlock
from forgeyard_model.identity import SandboxId
from forgeyard_process_shim.binary import shim_binary
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


_POOL_SIZE: Final = 4


async def open_services(
    stack: AsyncExitStack,
    paths: StatePaths,
    connect: Callable[[str], AbstractAsyncContextManager[ContainerRuntime]],
    config: ExecutorConfig,
) -> HostServices:
    """Everything that lives as long as the executor; `stack` closes it in reverse.

    :param connect: the runtime's adapter, for the executor of that id. Before anything is made: it may not be there.
    """
    executor_id = SandboxId.mint().value
    runtime = await stack.enter_async_context(connect(executor_id))
    paths.make()
    if (engine := engine_of(runtime)) is not None:
        await asyncio.to_thread(remember, paths, engine)
    lock = ExecutorLock(str(paths.root), executor_id)
    stack.callback(lock.release)
    cgroups = CgroupHost.detect()
    stack.callback(cgroups.remove_empty, f"/forgeyard/{lock.executor_id}")
    pool = stack.enter_context(ThreadPoolExecutor(_POOL_SIZE, thread_name_prefix="forgeyard"))
    block = config.uid_block or UidBlock(DEFAULT_BASE, DEFAULT_SIZE)
    uids = UidRanges(block.base, block.size, cgroup_host=cgroups)
    stack.callback(uids.close)
    host = Host(str(paths.root), uid_block=uids.block)
    stack.callback(host.close)
    pump = OutputPump()
    stack.callback(pump.close)
    return HostServices(
        executor_id=lock.executor_id,
        paths=paths,
        host=host,
        cgroups=cgroups,
        uids=uids,
        pump=pump,
        runtime=runtime,
        pool=pool,
        own_namespaces=process_facts(os.getpid()).namespaces,
        nofile_ceiling=nofile_ceiling(),
        shim=shim_binary(),
    )
