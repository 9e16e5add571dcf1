"""Hundreds of jobs on each adapter, with every ending, four at a time: nothing is left, here or at the daemon."""

from __future__ import annotations

import gc
import os
import random
import stat
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from adapter_jobs import ADDRESS_VARIABLES, config_for
from adapters import DAEMON_NAMES, parameter
from daemon_objects import assert_as_before, groups_of, seen
from daemons import DAEMONS, Daemon
from egress_host import EgressHost
from mixed_jobs import Mixed, mixed, run_all

from forgeyard_executor import Executor

JOBS = int(os.environ.get("FORGEYARD_TEST_JOBS", "0"))
"""For every adapter, in the nightly script; otherwise as many as an ordinary run has the time for."""
USUAL = {"runc": 300, "containerd": 60, "podman": 60, "docker": 60}
AT_ONCE = 4
WARM = 10
"""Jobs after which an executor has made what it makes once: threads, connections, caches."""
FDS, MEMORY = 24, 16 << 20
"""Descriptors and bytes that it may have more at the end than after those."""
SECONDS = 120 + 3 * max(JOBS, 100)

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(SECONDS)]


@pytest.fixture
def daemon(adapter: str) -> Iterator[Daemon | None]:
    """A daemon of the test's own, of which everything can be counted; None for runc."""
    if adapter not in DAEMON_NAMES:
        yield None
        return
    with DAEMONS[DAEMON_NAMES[adapter]]() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLES[adapter], started.address)
        yield started


@pytest.fixture
def host(tmp_path: Path, daemon: Daemon | None) -> Iterator[EgressHost]:
    """A network namespace that plays the host: its links, routes, rules and leases are this test's alone."""
    with closing(EgressHost(tmp_path)) as made:
        yield made
        made.wait_clean()


@pytest.mark.parametrize("adapter", list(map(parameter, USUAL)))
def test_many_jobs_leave_nothing(
    adapter: str, daemon: Daemon | None, host: EgressHost, state_dir: Path, leaks: Any, busybox_image: str
) -> None:
    """Successes, failures, cancels, time-outs and memory kills, with services and networks among them."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    jobs = list(mixed(JOBS or USUAL[adapter], busybox_image, random.Random(seed)))
    host.play(lambda: warmed(state_dir, adapter, jobs, busybox_image))
    files, rules, at_daemon = files_of(state_dir), host.rules(), daemon and seen(daemon)
    leaks.before = leaks.look()  # what libraries make once a process is theirs
    names = host.play(lambda: played(state_dir, adapter, jobs, busybox_image))
    assert files_of(state_dir) == files
    assert groups_of(names) == []
    assert host.rules() == rules
    if daemon is not None and at_daemon is not None:
        assert_as_before(daemon, at_daemon)


async def warmed(state: Path, adapter: str, jobs: list[Mixed], image: str) -> None:
    """An executor that has been there before: images, the host's root, and libraries that load at first use."""
    async with Executor.open(state, runtime=adapter, config=config_for(adapter)) as executor:
        await run_all(executor, jobs[:WARM], image, AT_ONCE)


async def played(state: Path, adapter: str, jobs: list[Mixed], image: str) -> set[str]:
    """All jobs by one executor, which grows no more once it is warm; names that only theirs had."""
    async with Executor.open(state, runtime=adapter, config=config_for(adapter)) as executor:
        names = {path.stem for path in (state / "executors").iterdir()}
        names |= set(await run_all(executor, jobs[:WARM], image, AT_ONCE))
        fds, memory = own_size()
        names |= set(await run_all(executor, jobs[WARM:], image, AT_ONCE))
        fds_now, memory_now = own_size()
        # An executor looks at its host from time to time, in sandboxes that are none of these.
        assert names.isdisjoint(info.sandbox_id for info in executor.list_sandboxes())
    assert fds_now <= fds + FDS, f"{fds} descriptors became {fds_now}"
    assert memory_now <= memory + MEMORY, f"{memory >> 20} MiB became {memory_now >> 20} MiB"
    return names


def own_size() -> tuple[int, int]:
    """Descriptors of this process, and bytes that are resident."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGE_SIZE")


def files_of(state: Path) -> set[str]:
    """All that is below a state directory; a closed executor's empty place for output stays until the next opens."""
    found = {path.relative_to(state) for path in state.rglob("*")}
    assert not [path for path in found if stat.S_ISFIFO((state / path).lstat().st_mode)]
    return {str(path) for path in found if path.parts[0] != "spool" or len(path.parts) > 2}
