"""Parts of a job's network that fail in the middle of it: the job ends as an infrastructure failure, nothing opens."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from egress_host import EgressHost, as_user, attack, names, service, topology
from jobs import collect, sh
from net_host import SERVER

from forgeyard_executor import ExecutionResult, Executor, ExecutorConfig, Job, Network, Outcome, Timeouts
from forgeyard_host.links import Delete
from forgeyard_model.config import NetworkConfig
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.policy import NetworkDestination
from forgeyard_model.result import EndCause

pytestmark = pytest.mark.kernel

NAMED = NetworkDestination(host="www.example.org", ports=(80,))
CONFIG = ExecutorConfig(network=NetworkConfig(fetch=(NAMED,)))
Sabotage = Callable[[Any], None]
WHY = "the test said so"


@pytest.fixture
def host(tmp_path: Path) -> Iterator[EgressHost]:
    """A host with an outside."""
    with closing(EgressHost(tmp_path)) as made:
        yield made
        made.wait_clean()


async def broken(state: Path, job: Job, sabotage: Sabotage) -> tuple[ExecutionResult, bytes]:
    """Run `job`, and break its network once its first step says something."""
    async with (
        names({NAMED.host: [f"60 IN A {SERVER}"]}),
        Executor.open(state, config=CONFIG) as executor,
        executor.run(job) as execution,
    ):
        reading = asyncio.ensure_future(collect(execution))
        async for _ in execution.output():
            network: Any = execution._attempt.network
            sabotage(network.network)
            break
        result = await execution.wait()
        out, _ = await reading
    return result, out


def raising(error: Exception) -> Callable[..., Any]:
    """In the place of a method."""

    def fail(*_: object, **__: object) -> Any:
        raise error

    return fail


def resolver_fails(network: Any) -> None:
    """A bug that the next question meets."""
    network._resolver._answers.known = raising(RuntimeError(WHY))


def firewall_fails(network: Any) -> None:
    """The kernel takes no address into a set any more."""
    error = SandboxError(SandboxErrorKind.NETWORK_SETUP_FAILED, "set_not_changed", WHY)
    network._parts.sets.add = raising(error)


def proxy_fails(network: Any) -> None:
    """Its listening socket can't accept any more."""
    network._proxy._listener.shutdown(socket.SHUT_RDWR)


def watch_fails(network: Any) -> None:
    """The log of connections can't be read any more."""
    network._watch._packets.read = raising(OSError(errno.EBADF, WHY))


ASK = "echo on; while :; do nslookup www.example.org; done >/dev/null 2>&1"
KNOCK = f"echo on; while :; do nc -w 1 {SERVER} 81 </dev/null; done"
FAULTS: dict[str, tuple[Network, str, Sabotage]] = {
    "resolver": (Network.restricted(NAMED), ASK, resolver_fails),
    "resolver-deny": (Network.deny(), ASK, resolver_fails),
    "firewall": (Network.restricted(NAMED), ASK, firewall_fails),
    "proxy": (Network.fetch_only(), "echo on; sleep 600", proxy_fails),
    "watch": (Network.restricted(NAMED), KNOCK, watch_fails),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_part_that_dies_ends_the_job(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str, fault: str
) -> None:
    """Infrastructure, 125, with what died; the job does not go on without it, services end too, nothing is left."""
    network, script, sabotage = FAULTS[fault]
    job = Job(
        image=busybox_image,
        steps=(sh(script), sh("echo second")),
        network=network,
        services=(service(busybox_image),),
        timeouts=Timeouts(grace=0.1),
    )
    result, out = host.play(lambda: broken(state_dir, job, sabotage))
    assert (result.outcome, result.exit_code) == (Outcome.INFRASTRUCTURE_FAILURE, 125), result.message
    assert result.end_cause is EndCause.INFRASTRUCTURE
    assert fault == "proxy" or WHY in result.message
    assert b"second" not in out


def test_names_shut_when_the_resolver_dies(shared_state: Path, host: EgressHost) -> None:
    """What a name would have opened stays shut: a job sees a refusal, and no answer that leads nowhere."""
    tools = as_user(host.directory / "attack")
    attacks = [["lookup", NAMED.host], ["tcp", SERVER, 80]]
    said: list[Any] = []

    async def main() -> ExecutionResult:
        job = Job(steps=(), network=Network.restricted(NAMED), timeouts=Timeouts(grace=0.1), **tools)
        async with (
            host.serving() as outside,
            names({NAMED.host: [f"60 IN A {SERVER}"]}),
            Executor.open(shared_state, config=CONFIG) as executor,
            executor.run(job) as execution,
        ):
            network: Any = execution._attempt.network
            resolver_fails(network.network)
            await execution.exec(attack(tools, attacks))
            said.extend(outside.seen)
            return await execution.wait()

    result = host.play(main)
    assert result.outcome is Outcome.INFRASTRUCTURE_FAILURE
    assert said == []


def test_the_hosts_own_link_goes_in_the_middle(
    state_dir: Path, leaks: object, host: EgressHost, busybox_image: str
) -> None:
    """An operator deletes the attempt's link: no way out any more, no other way instead, and nothing to clean fails."""

    async def main() -> tuple[ExecutionResult, bytes]:
        job = Job(image=busybox_image, steps=(), network=Network.allow(), services=(service(busybox_image),))
        async with (
            host.serving(),
            Executor.open(state_dir, config=CONFIG) as executor,
            executor.run(job) as execution,
        ):
            reach = sh(f"nc -w 2 {SERVER} 80 -e true && echo out || echo shut")
            await execution.exec(reach)
            where = topology(execution)
            host.links.run(Delete(where.uplink))
            await execution.exec(reach)
            await execution.exec(sh("wget -q -O - http://web/"))
            execution.finish()
            out, _ = await collect(execution)
            return await execution.wait(), out

    result, out = host.play(main)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"out\nshut\nweb\n"), result.message
