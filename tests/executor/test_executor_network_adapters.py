"""Networks that containers share, and an operator's own, on every runtime: the same for a job, and nothing left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import pytest
from adapter_jobs import ADDRESS_VARIABLES, config_for
from adapters import DAEMON_FIXTURES, parameter
from cni_plugins import STOCK
from jobs import cleaned, collect, sh
from killed import undone
from router_peers import SERVER, Peers

from forgeyard_executor import (
    ExecutionResult,
    Executor,
    ExecutorConfig,
    ForgeyardError,
    Job,
    Network,
    Outcome,
)
from forgeyard_executor.inspection import Inspection
from forgeyard_host.netns import in_namespace
from forgeyard_model.config import NetworkConfig
from forgeyard_model.policy import NetworkDestination
from forgeyard_model.services import HealthCheck, LogProbe, ServiceNetwork, ServiceSpec, TcpProbe
from forgeyard_networks.settings import NetworkSettings
from forgeyard_runtimes.cells import Behaviour, exception
from forgeyard_runtimes.docker.runtime import DockerRuntime
from forgeyard_runtimes.find import state_name

pytestmark = pytest.mark.kernel

T = TypeVar("T")


def on(*behaviours: Behaviour, names: Iterable[str] = ("runc", *DAEMON_FIXTURES)) -> pytest.MarkDecorator:
    """The runtimes of `names` on which all of `behaviours` apply, by the table of cells."""
    able = [name for name in names if not any(exception(name, each) for each in behaviours)]
    return pytest.mark.parametrize("host", list(map(parameter, able)), indirect=True)


SHARED, OPERATORS = Behaviour.SHARED_NETWORK, Behaviour.OPERATOR_NETWORK
NS = "readlink /proc/self/ns/net"
CONFLIST = """{{"cniVersion": "1.0.0", "name": "corp", "plugins": [{{"type": "bridge", "bridge": "corp0",
  "isGateway": true, "ipam": {{"type": "host-local", "dataDir": "{leases}", "ranges": [[{{"subnet": "{subnet}"}}]]}},
  "dns": {{"nameservers": ["10.77.0.1"], "search": ["corp.example"]}}}}]}}"""


@dataclass
class Host:
    """A runtime, and a host network of the test's own for its executor."""

    name: str
    state: Path
    image: str
    peers: Peers
    request: pytest.FixtureRequest
    leases_dir: Path
    pids: list[int] = field(default_factory=lambda: [os.getpid()])

    def config(self, subnet: str = "10.77.0.0/24") -> ExecutorConfig:
        """With the operator's network `corp`."""
        conflists = self.leases_dir.parent / "net.d"
        conflists.mkdir(exist_ok=True)
        (conflists / "corp.conflist").write_text(CONFLIST.format(leases=self.leases_dir, subnet=subnet))
        corp = NetworkConfig(conflists=("corp",), conflist_dirs=(str(conflists),), plugin_dirs=(STOCK,))
        return ExecutorConfig(user_namespace=config_for(self.name).user_namespace, network=corp)

    def run(self, job: Job, **config: str) -> tuple[ExecutionResult, str]:
        """Run `job` to its end; its result and its output."""

        async def main() -> tuple[ExecutionResult, str]:
            opening = Executor.open(self.state, runtime=self.name, config=self.config(**config))
            async with opening as executor, executor.run(job) as execution:
                out, err = await collect(execution)
                return cleaned(await execution.wait()), (out + err).decode()

        return self.play(lambda: asyncio.run(main()))

    def failure_of(self, job: Job, **config: str) -> str:
        """Why `job` never ran, which is no failure of its own."""
        try:
            result, out = self.run(job, **config)
        except ForgeyardError as error:
            return str(error)
        assert (result.outcome, out) == (Outcome.INFRASTRUCTURE_FAILURE, ""), result
        return result.message

    def play(self, act: Callable[[], T]) -> T:
        """`act` with the host's network; threads and processes that it starts have it too."""
        return in_namespace(self.peers.host.fd, act)

    def job(self, *scripts: str, services: tuple[ServiceSpec, ...], network: Network | None = None) -> Job:
        """Of steps in the image, beside `services`."""
        steps = tuple(map(sh, scripts))
        return Job(
            image=self.image, steps=steps, services=services, network=network or Network.deny(), user="1000:1000"
        )

    def service(self, name: str, script: str, **more: Any) -> ServiceSpec:
        """One that is ready when it says so, or as `more` has it."""
        more.setdefault("health", HealthCheck(LogProbe("ready"), interval=0.1))
        return ServiceSpec(
            name, image=self.image, entrypoint=(), command=("/bin/sh", "-c", script), user="1000", **more
        )

    def left(self) -> list[str]:
        """What is left of ours: containers and pods at the daemon, leases, and pinned namespaces."""
        pins = Path(NetworkSettings.of(NetworkConfig(), str(self.state)).run_dir, "netns")
        pinned = sorted(os.listdir(pins)) if pins.is_dir() else []
        ours = [f"pin {name}" for name in pinned if self._made_here(name)]
        found = self.leases_dir / "corp"
        leases = sorted(found.iterdir()) if found.is_dir() else []
        ours += [f"lease {path.name}" for path in leases if path.name[0].isdigit()]
        results = self.state / "cni" / "results"
        ours += [f"result {path.name}" for path in results.iterdir()] if results.is_dir() else []
        return ours + [f"container {name}" for name in self.containers()] + [f"pod {name}" for name in self.pods()]

    def _made_here(self, pin: str) -> bool:
        return any(f"@{pid}." in pin for pid in self.pids)

    def containers(self) -> list[str]:
        """Of this state directory, at the daemon."""
        own = state_name(str(self.state))
        if self.name == "runc":
            return []
        if self.name == "containerd":
            return self.tool("ctr", "containers", "ls", "-q", f'labels."forgeyard.state"=={own}')
        return self.tool(self.name, "ps", "-a", "--filter", f"label=forgeyard.state={own}", "--format", "{{.Names}}")

    def pods(self) -> list[str]:
        """Of this state directory."""
        own = f"label=forgeyard.state={state_name(str(self.state))}"
        return (
            self.tool("podman", "pod", "ps", "--filter", own, "--format", "{{.Name}}") if self.name == "podman" else []
        )

    def tool(self, program: str, *words: str) -> list[str]:
        """What the daemon's own command line says."""
        daemon = self.request.getfixturevalue(DAEMON_FIXTURES[self.name])
        argv = getattr(daemon, program)(*words)
        done = subprocess.run(argv, env=daemon.environment(), stdout=subprocess.PIPE, check=True, timeout=60)
        return done.stdout.decode().split()


@pytest.fixture
def host(
    request: pytest.FixtureRequest, state_dir: Path, busybox_image: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Host]:
    """The runtime that the parameter names."""
    name: str = request.param
    if name in DAEMON_FIXTURES:
        monkeypatch.setenv(ADDRESS_VARIABLES[name], request.getfixturevalue(DAEMON_FIXTURES[name]).address)
    else:
        request.getfixturevalue("require_tool")(name)
    if not Path(STOCK, "bridge").exists():
        pytest.skip("containernetworking-plugins are not installed")
    peers = Peers(tmp_path)
    peers.tcp(peers.outside, SERVER, 80)
    yield Host(name, state_dir, busybox_image, peers, request, tmp_path / "leases")
    peers.close()


@on(SHARED, Behaviour.USER_NAMESPACE)
def test_their_user_namespaces_are_bounded(host: Host) -> None:
    """What is charged to root as well has a limit of their own, whoever made their user namespaces."""
    script = "cat /proc/sys/user/max_inotify_instances /proc/sys/user/max_user_namespaces; head -1 /proc/self/uid_map"
    side = host.service("side", f"{script}; echo ready; exec sleep 600", network=ServiceNetwork.LOCALHOST)
    result, out = host.run(host.job(script, services=(side,)))
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out)
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    own, others = out.splitlines(), result.services[0].log_tail
    assert own[:2] == list(others[:2]) == [str(max(16, most // 4)), "0"]
    assert own[2].split()[1] != others[2].split()[1]  # each has ids of its own


SIDE = f"mkdir -p /tmp/w; {NS} > /tmp/w/ns; hostname > /tmp/w/name; exec httpd -f -p 127.0.0.1:80 -h /tmp/w"


@on(SHARED)
def test_a_service_at_localhost(host: Host) -> None:
    """The job finds it at 127.0.0.1, in one namespace with it, each with its own host name; others have addresses."""
    side = host.service("side", SIDE, network=ServiceNetwork.LOCALHOST, health=HealthCheck(TcpProbe(80), interval=0.1))
    other = host.service("other", f"{NS}; echo ready; exec sleep 600")
    fetch = "wget -q -O - http://127.0.0.1/"
    job = host.job(f"{NS}; {fetch}/ns; {fetch}/name; hostname; grep -cw side /etc/hosts", services=(side, other))
    result, out = host.run(job)
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out)
    own, shared, name, jobs_name, listed = out.split()
    assert (own, name, listed) == (shared, "side", "1")
    assert jobs_name != "side"
    assert result.services[0].address == "127.0.0.1"
    assert result.services[1].address not in ("", "127.0.0.1")
    assert result.services[1].log_tail[0] != own
    assert host.left() == []


@on(Behaviour.NETWORKS, SHARED, names=DAEMON_FIXTURES)
def test_the_policy_holds_for_both(host: Host) -> None:
    """What the job may not reach, a service in its namespace may not reach either; the evidence names both ways."""
    policy = Network.restricted(NetworkDestination(cidr=f"{SERVER}/32", ports=(80,)))
    look = f"for p in 80 81; do nc -w 3 {SERVER} $p -e /bin/true 2>/dev/null && echo $p open || echo $p shut; done"
    side = host.service("side", f"{look}; echo ready; exec sleep 600", network=ServiceNetwork.LOCALHOST)
    result, out = host.run(host.job(look, services=(side,), network=policy))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, "80 open\n81 shut\n"), result.message
    assert result.services[0].log_tail == ("80 open", "81 shut", "ready")
    assert result.network is not None
    assert {(row.port, row.verdict.value) for row in result.network.destinations} == {(80, "allowed"), (81, "refused")}


LOOK = "cat /etc/hosts /etc/resolv.conf; ip -o -4 addr show eth0"


@on(OPERATORS)
def test_an_operators_network(host: Host) -> None:
    """Its plugins give addresses and names before any program runs, to services as to the job; all is given back."""
    # Each looks in its first instruction, though nothing says which of the two comes first.
    services = [host.service(name, f"{LOOK}; echo ready; exec sleep 600") for name in ("one", "two")]
    result, out = host.run(host.job(LOOK, services=tuple(services), network=Network.operator("corp")))
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out)
    addresses = {item.name: item.address for item in result.services}
    said = {item.name: "\n".join(item.log_tail) for item in result.services}
    for text in (out, *said.values()):
        assert all(f"{address}\t{name}" in text for name, address in addresses.items()), text
        assert "nameserver 10.77.0.1\nsearch corp.example\n" in text
        assert " 10.77.0." in text
    assert all(f" {addresses[name]}/24 " in text for name, text in said.items())
    assert result.network is not None
    assert (result.network.mode.value, result.network.conflist) == ("conflist", "corp")
    assert host.left() == []


@on(OPERATORS, SHARED)
def test_an_operators_network_with_a_service_at_localhost(host: Host) -> None:
    """Both are behind one address of the plugins'; ports below 1024 are free for any user, as everywhere."""
    side = host.service("side", SIDE, network=ServiceNetwork.LOCALHOST, health=HealthCheck(TcpProbe(80), interval=0.1))
    other = host.service("other", f"{LOOK}; echo ready; exec sleep 600")
    script = f"{NS}; wget -q -O - http://127.0.0.1/ns; {LOOK}"
    result, out = host.run(host.job(script, services=(side, other), network=Network.operator("corp")))
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out)
    own, shared, *_ = out.split()
    assert own == shared
    assert f"{result.services[1].address}\tother" in out
    assert "\tside" in "\n".join(result.services[1].log_tail) or "side" in out
    assert host.left() == []


@on(OPERATORS, names=DAEMON_FIXTURES)
def test_a_plugin_that_fails(host: Host) -> None:
    """A network without room for all is the plugin's own error, and nothing of the attempt is left."""
    services = tuple(host.service(f"s{number}", "echo ready; exec sleep 600") for number in range(2))
    job = host.job("echo ran", services=services, network=Network.operator("corp"))
    assert "no IP addresses available" in host.failure_of(job, subnet="10.77.0.0/30")
    assert host.left() == []
    assert list((host.state / "sandboxes").iterdir()) == []


CHILD = """
import asyncio, sys
from forgeyard_executor import Executor, ExecutorConfig, Job, Network, Step
from forgeyard_model.config import NetworkConfig
from forgeyard_model.policy import Need
from forgeyard_model.services import HealthCheck, LogProbe, ServiceNetwork, ServiceSpec

def service(name, network):
    command = ("/bin/sh", "-c", "echo ready; exec sleep 600")
    health = HealthCheck(LogProbe("ready"), interval=0.1)
    return ServiceSpec(
        name, image=sys.argv[3], entrypoint=(), command=command, user="1000", health=health, network=network
    )

async def main():
    network = NetworkConfig(conflists=("corp",), conflist_dirs=(sys.argv[4],), plugin_dirs=(sys.argv[5],))
    config = ExecutorConfig(user_namespace=Need.PREFERRED, network=network)
    async with Executor.open(sys.argv[1], runtime=sys.argv[2], config=config) as executor:
        services = (service("side", ServiceNetwork.LOCALHOST), service("other", ServiceNetwork.OWN))
        steps = [Step("/bin/sh", "-c", "echo up; sleep 600")]
        job = Job(
            image=sys.argv[3], user="1000:1000", steps=steps, services=services, network=Network.operator("corp")
        )
        async with executor.run(job) as execution:
            async for chunk in execution.output():
                print(chunk.data.decode(), end="", flush=True)

asyncio.run(main())
"""


@on(OPERATORS, SHARED, names=DAEMON_FIXTURES)
def test_a_killed_executor_leaves_nothing(host: Host) -> None:
    """kill -9 of the executor of a job on an operator's network, with services: the next one takes all of it back."""
    config = host.config()
    corp, plugins = config.network.conflist_dirs[0], config.network.plugin_dirs[0]
    words = [sys.executable, "-c", CHILD, str(host.state), host.name, host.image, corp, plugins]

    async def recover() -> None:
        async with Executor.open(host.state, runtime=host.name, config=config) as executor:
            assert executor.recovered.errors == ()
            kinds = [what.split()[0] for what in executor.recovered.swept]
            assert kinds[:3] == ["container"] * 3
            assert ("pod" in kinds[3:]) is (host.name == "podman")
            assert (await executor.recover()).swept == ()

    def killed() -> None:
        child = subprocess.Popen(words, stdout=subprocess.PIPE)
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"up\n"
        finally:
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            child.stdout.close()
        host.pids.append(child.pid)
        assert {item.split()[0] for item in host.left()} >= {"pin", "lease", "result", "container"}
        assert len(host.containers()) == 3
        asyncio.run(recover())

    with undone(host.state, runtime=host.name):
        host.play(killed)
        assert host.left() == []
        assert list((host.state / "sandboxes").iterdir()) == []


@on(SHARED, names=["docker"])
def test_a_service_elsewhere_never_runs(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container that Docker puts into another namespace than the job's is found out at its gate."""
    monkeypatch.setattr(DockerRuntime, "_shared", lambda *_: None)
    side = host.service("side", "echo ready; exec sleep 600", network=ServiceNetwork.LOCALHOST)
    assert "is not in the job's network namespace" in host.failure_of(host.job("echo ran", services=(side,)))
    assert host.left() == []


@on(SHARED, names=["docker"])
def test_what_is_applied_can_be_looked_at(host: Host) -> None:
    """Each container is started as far as its gate, one that shares the job's namespace too, and nothing is weaker."""
    side = host.service("side", "echo ran", network=ServiceNetwork.LOCALHOST)

    async def main() -> Inspection:
        async with Executor.open(host.state, runtime=host.name, config=host.config()) as executor:
            return await executor.inspect_applied(host.job("echo ran", services=(side,)))

    seen = host.play(lambda: asyncio.run(main()))
    assert [container.name for container in seen.containers] == ["job", "side"]
    weaker = [
        row for each in seen.containers for row in each.rows if row.applied.value == "weaker" and not row.declared
    ]
    assert (weaker, seen.left) == ([], ())
    assert host.left() == []
