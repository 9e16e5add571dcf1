"""Jobs with a network of their own, run by the executor: what they reach, are given, and what the result tells."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from jobs import collect, sh
from router_peers import SERVER, Peers

from forgeyard_executor import (
    Executor,
    ExecutorConfig,
    ExecutorError,
    ForgeyardError,
    InvalidRequest,
    Job,
    Limits,
    Network,
    Outcome,
    PlanReport,
)
from forgeyard_executor.networked import put_files
from forgeyard_host.netns import in_namespace
from forgeyard_model.config import NetworkConfig, PatternRule
from forgeyard_model.network import DestinationVerdict
from forgeyard_model.plan import JobUser
from forgeyard_model.policy import NetworkDestination
from forgeyard_model.result import ExecutionResult
from forgeyard_model.services import ServiceSpec
from forgeyard_runtimes.cli_runtime import CliRuntime
from forgeyard_runtimes.contract import ContainerRef

pytestmark = pytest.mark.kernel

T = TypeVar("T")
CONNECT = "for p in 80 81; do nc -w 3 {server} $p -e /bin/true 2>/dev/null && echo $p open || echo $p shut; done"
"""Port 81 is open on the server as well: what shuts it is the policy."""


@pytest.fixture
def peers(tmp_path: Path) -> Iterator[Peers]:
    """A host's network and an outside with a server on two ports."""
    made = Peers(tmp_path)
    for port in (80, 81):
        made.tcp(made.outside, SERVER, port)
    yield made
    made.close()


def run_in(
    peers: Peers, state: Path, job: Job, config: NetworkConfig | None = None, **more: Any
) -> tuple[ExecutionResult, str]:
    """Run a job by an executor whose host network is that of `peers`."""

    async def main() -> tuple[ExecutionResult, str]:
        config_ = ExecutorConfig(network=config or NetworkConfig())
        async with Executor.open(state, config=config_) as executor, executor.run(job, **more) as execution:
            out, err = await collect(execution)
            return await execution.wait(), (out + err).decode()

    return on_host(peers, lambda: asyncio.run(main()))


def on_host(peers: Peers, act: Callable[[], T]) -> T:
    """`act` with the host's network; threads that it starts have it too."""
    return in_namespace(peers.host.fd, act)


def test_restricted_reaches_what_it_names_and_the_result_tells(
    peers: Peers, state_dir: Path, busybox_image: str, leaks: object
) -> None:
    """One address and port is open, the next port is refused at once; both stand in the result."""
    network = Network.restricted(NetworkDestination(cidr=f"{SERVER}/32", ports=(80,)))
    job = Job(image=busybox_image, steps=(sh(CONNECT.format(server=SERVER)),), network=network)
    result, out = run_in(peers, state_dir, job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, "80 open\n81 shut\n"), result.message
    assert result.network is not None
    rows = {(row.port, row.verdict) for row in result.network.destinations if row.address == SERVER}
    assert rows == {(80, DestinationVerdict.ALLOWED), (81, DestinationVerdict.REFUSED)}
    assert result.provenance.impure[0] == "network restricted"


def test_allow_reaches_the_outside_and_deny_with_services_does_not(
    peers: Peers, state_dir: Path, busybox_image: str, leaks: object
) -> None:
    """A service has no more network than its job."""
    service = ServiceSpec(
        "s", image=busybox_image, entrypoint=(), command=("/bin/sh", "-c", CONNECT.format(server=SERVER))
    )
    for network, word in ((Network.allow(), "open"), (Network.deny(), "shut")):
        oneshot = ServiceSpec("s", image=service.image, entrypoint=(), command=service.command, oneshot=True)
        job = Job(image=busybox_image, steps=(sh(CONNECT.format(server=SERVER)),), network=network, services=(oneshot,))
        result, out = run_in(peers, state_dir, job)
        assert (result.outcome, out) == (Outcome.SUCCEEDED, f"80 {word}\n81 {word}\n"), result.message
        assert result.services[0].log_tail == (f"80 {word}", f"81 {word}")


def test_fetch_only_gives_the_proxy_to_every_step(
    peers: Peers, state_dir: Path, busybox_image: str, leaks: object
) -> None:
    """Variables, unless the job sets one itself, and files in HOME that are the job's own; nothing else is reached."""
    config = NetworkConfig(fetch=(NetworkDestination(host="packages.example.org", ports=(443,)),))
    script = (
        "echo $HTTPS_PROXY $no_proxy; stat -c %u $HOME/.gradle/gradle.properties; id -u;"
        "nc -w 3 ${HTTPS_PROXY#http://} </dev/null; " + CONNECT.format(server=SERVER)
    ).replace("${HTTPS_PROXY#http://}", "$(echo ${HTTPS_PROXY#http://} | tr : ' ')")
    job = Job(
        image=busybox_image, steps=(sh(script),), network=Network.fetch_only(), env={"no_proxy": "mine"}, user="1000"
    )
    result, out = run_in(peers, state_dir, job, config)
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out)
    first, owner, user, *ports = out.splitlines()
    assert first.startswith("http://10.213.")
    assert first.endswith(" mine")
    assert (owner, user) == ("1000", "1000")
    assert ports == ["80 shut", "81 shut"]


def test_process_mode_has_a_network_too(peers: Peers, state_dir: Path, warm_rootfs: None, leaks: object) -> None:
    """On the host rootfs as in an image; the resolver and the host name are the attempt's own."""
    look = f"import socket; socket.create_connection(('{SERVER}', 80), 5); print('open')"
    script = f'cat /etc/resolv.conf; hostname | cmp - /etc/hostname && /usr/bin/python3 -c "{look}"'
    result, out = run_in(peers, state_dir, Job(rootfs="host", steps=(sh(script),), network=Network.allow()))
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out)
    assert out.startswith("nameserver 10.213.")
    assert out.endswith("open\n")


def test_an_executor_with_a_pool_leaves_nothing(
    peers: Peers, state_dir: Path, busybox_image: str, leaks: object
) -> None:
    """Ready networks are there before the job and gone with the executor."""
    job = Job(image=busybox_image, steps=(sh(CONNECT.format(server=SERVER)),), network=Network.allow())
    result, out = run_in(peers, state_dir, job, NetworkConfig(pool=2))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, "80 open\n81 open\n"), result.message


@pytest.mark.parametrize(
    "network",
    [
        Network.restricted(),
        Network.restricted(NetworkDestination(cidr="fd00::/8")),
        Network.operator("nobody-configured"),
    ],
)
def test_what_no_network_can_be_is_refused_before_anything_is_made(
    state_dir: Path, busybox_image: str, network: Network
) -> None:
    """No destinations, IPv6, an operator's network that nobody configured: a typed refusal, and no image is fetched."""

    async def main() -> None:
        job = Job(image=busybox_image, steps=(sh("true"),), network=network)
        async with Executor.open(state_dir, config=ExecutorConfig()) as executor, executor.run(job):
            pytest.fail("it ran")

    with pytest.raises((InvalidRequest, ExecutorError)):
        asyncio.run(main())
    assert not (state_dir / "images" / "layers").exists()


def test_a_container_outside_its_network_never_runs(
    peers: Peers, state_dir: Path, busybox_image: str, leaks: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A runtime that would leave it in the executor's own network is found out at the gate, before any step."""
    start = CliRuntime.start

    async def elsewhere(self: CliRuntime, ref: ContainerRef, *, netns: str | None = None) -> int:
        return await start(self, ref)

    monkeypatch.setattr(CliRuntime, "start", elsewhere)
    with pytest.raises(ExecutorError) as refused:
        run_in(peers, state_dir, Job(image=busybox_image, steps=(sh("true"),), network=Network.allow()))
    assert refused.value.reason == "gate_network"


def plan_of(peers: Peers, state: Path, job: Job, config: ExecutorConfig) -> PlanReport:
    """What an executor on that host would make of `job`."""

    async def main() -> PlanReport:
        async with Executor.open(state, config=config) as executor:
            return await executor.plan(job)

    return on_host(peers, lambda: asyncio.run(main()))


def test_plan_shows_the_network_and_every_service(peers: Peers, state_dir: Path, busybox_image: str) -> None:
    """One row for the network, with what enforces it; one for each service, and one for their time."""
    network = Network.restricted(NetworkDestination(cidr=f"{SERVER}/32"))
    services = (ServiceSpec("db", image=busybox_image, entrypoint=(), command=("/bin/true",)),)
    job = Job(image=busybox_image, steps=(sh("true"),), network=network, services=services)
    report = plan_of(peers, state_dir, job, ExecutorConfig())
    rows = {row.field: row for row in report.rows}
    assert report.runnable, [row for row in report.rows if row.refused]
    assert "tables" in rows["network"].by
    assert SERVER in rows["network"].asked
    assert "512 MiB" in rows["services.db"].note
    assert "services_timeout" in rows


def test_plan_and_run_refuse_a_service_that_the_organisation_does_not_allow(
    peers: Peers, state_dir: Path, busybox_image: str
) -> None:
    """Rules on images and maximum limits hold for services as they do for the job."""
    rule = PatternRule(("registry.example.org/**",), "test")
    config = ExecutorConfig(allowed_images=(rule,), maximum_limits=Limits(memory="1GiB"))
    beside = ServiceSpec("db", image=busybox_image, limits=Limits(memory="2GiB"), argv=())
    job = Job(rootfs="host", steps=(sh("true"),), services=(beside,), limits=Limits(memory="64MiB"))
    refused = {row.field for row in plan_of(peers, state_dir, job, config).rows if row.refused}
    assert refused == {"services.db", "services.db.resources.memory"}

    async def main() -> None:
        async with Executor.open(state_dir, config=config) as executor, executor.run(job):
            pytest.fail("it ran")

    with pytest.raises(ForgeyardError, match=r"services\.db"):
        asyncio.run(main())


def test_files_in_home_follow_no_link(tmp_path: Path) -> None:
    """What is in the job's HOME already may be anything: nothing is made or changed where a link leads."""
    home, outside = tmp_path / "home", tmp_path / "outside"
    for directory in (home, outside, home / ".m2"):
        directory.mkdir()
    (home / ".gradle").symlink_to(outside)
    (home / ".m2" / "kept.xml").write_text("own")
    files = {".gradle/deep/x": "a", ".gradle/y": "b", ".m2/kept.xml": "c", ".m2/new/z.xml": "d", ".plain": "e"}
    put_files(home, files, JobUser(1000, 1000), 100_000)
    assert list(outside.iterdir()) == []
    assert (home / ".m2" / "kept.xml").read_text() == "own"
    assert (home / ".m2" / "new" / "z.xml").read_text() == "d"
    assert {path.stat().st_uid for path in (home / ".m2" / "new", home / ".m2" / "new" / "z.xml", home / ".plain")} == {
        101_000
    }
