"""A process that plays the executor's host: a NetworkManager in a network namespace of the test's own.

Run as a program it obeys lines of JSON on stdin and answers each on stdout. As a module it is the test's end of that:
`Host` has the namespace, an outside beside it, and the process.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from ipaddress import IPv4Address, IPv4Interface
from pathlib import Path
from typing import Any

from forgeyard_host.links import Address, Links, NetState, Route, Up, Veth
from forgeyard_host.netns import NetNamespace, in_namespace, new_namespace, tcp_listener
from forgeyard_model.config import FetchCredential, NetworkConfig
from forgeyard_model.errors import ForgeyardError, SandboxError, SandboxErrorKind
from forgeyard_model.policy import EgressPolicy, NetworkDestination, NetworkMode, NetworkPolicy, PublishedPort
from forgeyard_networks.attempt_network import AttemptNetwork, NetworkMember, NetworkRequest
from forgeyard_networks.manager import NetworkManager
from forgeyard_networks.settings import NetworkSettings

SERVER = "203.0.113.2"
OTHER = "198.51.100.5"
PRIVATE = "10.9.0.2"
METADATA = "169.254.169.254"
NEAR = "203.0.113.1"
_WAIT = 30.0


# The process


class Served:
    """What the program does for each order."""

    def __init__(self, manager: NetworkManager) -> None:
        self.manager = manager
        self.networks: dict[str, AttemptNetwork] = {}
        self.lines: dict[str, list[dict[str, Any]]] = {}
        self.dns: Any = None

    async def attach(self, order: dict[str, Any]) -> dict[str, Any]:
        """One network; its members, and seconds that it took."""
        name = order["name"]
        members = tuple(NetworkMember(*item) for item in order.get("members", [["job"]]))
        seen = self.lines.setdefault(name, [])
        request = NetworkRequest(
            order.get("sandbox", name), policy_of(order), members, lines=lambda line: seen.append(dict(line))
        )
        begun = time.perf_counter()
        network = await self.manager.attach(request)
        self.networks[name] = network
        members_shown = {key: _plain(asdict_member(value)) for key, value in network.members.items()}
        return {"members": members_shown, "notes": network.notes, "seconds": time.perf_counter() - begun}

    async def close(self, order: dict[str, Any]) -> dict[str, Any]:
        """Close a network; seconds that it took."""
        begun = time.perf_counter()
        await self.networks.pop(order["name"]).close()
        return {"seconds": time.perf_counter() - begun}

    async def evidence(self, order: dict[str, Any]) -> dict[str, Any]:
        """What a network has seen."""
        return asdict(await self.networks[order["name"]].evidence())

    async def seen(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """The lines so far."""
        return self.lines[order["name"]]

    async def connect(self, order: dict[str, Any]) -> str:
        """What a service says first when the network connects."""
        network = self.networks[order["name"]]
        reader, writer = await network.connect(order["address"], order["port"], 5.0)
        try:
            return (await reader.readline()).decode()
        finally:
            writer.close()
            await writer.wait_closed()

    async def failed(self, order: dict[str, Any]) -> str:
        """Wait until a part of the network has died; why."""
        try:
            await asyncio.wait_for(asyncio.shield(self.networks[order["name"]].failed), _WAIT)
        except ForgeyardError as error:
            return error.reason if hasattr(error, "reason") else str(error)
        return ""

    async def many(self, order: dict[str, Any]) -> dict[str, Any]:
        """Attach and close `count` networks, `at_once` of them at a time; seconds of each."""
        slots = asyncio.Semaphore(order["at_once"])
        attached: list[float] = []
        closed: list[float] = []
        policy = policy_of(order)
        members = tuple(NetworkMember(*item) for item in order.get("members", [["job"]]))
        together = asyncio.Barrier(order["at_once"]) if order.get("together") else None

        async def one(number: int) -> None:
            async with slots:
                begun = time.perf_counter()
                network = await self.manager.attach(NetworkRequest(f"many{number}", policy, members))
                attached.append(time.perf_counter() - begun)
                if together is not None:
                    await together.wait()
                begun = time.perf_counter()
                await network.close()
                closed.append(time.perf_counter() - begun)

        begun = time.perf_counter()
        await asyncio.gather(*(one(number) for number in range(order["count"])))
        return {"attach": attached, "close": closed, "seconds": time.perf_counter() - begun}

    async def cancelled(self, order: dict[str, Any]) -> str:
        """Cancel an attach after so many turns of the loop."""
        task = asyncio.ensure_future(self.attach(order))
        for _ in range(order["turns"]):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        return "cancelled" if task.cancelled() else "attached"

    async def resources(self, order: dict[str, Any]) -> dict[str, Any]:
        """What this process holds."""
        del order
        fds = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if _there(fd)]
        return {
            "fds": len(fds),
            "tasks": sorted(str(task.get_coro()) for task in asyncio.all_tasks() if task is not asyncio.current_task()),
            "blocks": 0 if (blocks := self.manager._routers._blocks.made) is None else blocks.held,
            "namespaces": sum(target.startswith(("net:[", "/proc/")) and "ns/net" in target for target in fds),
        }

    async def metrics(self, order: dict[str, Any]) -> dict[str, Any]:
        """Of the pool."""
        if order.get("full"):
            await asyncio.to_thread(self.manager._routers._pool.wait_full, _WAIT)
        found = self.manager.metrics()
        return {**asdict(found), "hit_rate": found.hit_rate}

    async def capabilities(self, order: dict[str, Any]) -> dict[str, Any]:
        """What this host can do."""
        del order
        found = await self.manager.capabilities()
        return {"modes": sorted(mode.value for mode in found.modes), "backend": found.backend, "problem": found.problem}

    async def names(self, order: dict[str, Any]) -> None:
        """Be the host's name server at 127.0.0.1, with these records."""
        from fake_dns import Zone, start

        zone = Zone()
        for name, records in order["zone"].items():
            zone.add(name, *records)
        self.dns = await start(zone, port=53)

    async def kill_resolver(self, order: dict[str, Any]) -> None:
        """Fail the resolver, as a bug in it would."""
        network: Any = self.networks[order["name"]]
        network._resolver._die(RuntimeError("the test said so"))

    async def break_rules(self, order: dict[str, Any]) -> None:
        """From now on no rules can be loaded into a router: what a kernel without a module does."""
        del order
        firewall: Any = self.manager._routers.firewall.made
        object.__setattr__(firewall, "routers", BrokenBackend(firewall.routers.name))

    async def mend(self, order: dict[str, Any]) -> None:
        """What the upkeep does every half minute."""
        del order
        await asyncio.to_thread(self.manager._routers.mend_host)

    async def recover(self, order: dict[str, Any]) -> tuple[str, ...]:
        """What dead executors left."""
        return await self.manager.recover(order.get("valid", ()))


class BrokenBackend:
    """A firewall that refuses; a real one can't be made to without breaking the machine's own."""

    version = ""

    def __init__(self, name: str) -> None:
        self.name = name

    def load_in(self, ns_fd: int | None, rulesets: object) -> None:
        """Refuse."""
        raise SandboxError(SandboxErrorKind.NETWORK_SETUP_FAILED, "rule_not_set", "the test said so")


def policy_of(order: dict[str, Any]) -> NetworkPolicy:
    """The policy of an order."""
    destinations = tuple(
        NetworkDestination(
            item.get("host", ""), item.get("cidr", ""), tuple(item.get("ports", ())), tuple(item.get("protocols", ()))
        )
        for item in order.get("allow", ())
    )
    return NetworkPolicy(
        NetworkMode(order["mode"]),
        EgressPolicy(destinations) if destinations else None,
        audit=order.get("audit", False),
        conflist=order.get("conflist", ""),
        publish=tuple(PublishedPort(*item) for item in order.get("publish", ())),
    )


def asdict_member(member: Any) -> dict[str, Any]:
    """A MemberNetwork as plain data: its mappings can't be copied deeply."""
    return {name: getattr(member, name) for name in type(member).__slots__}


def _plain(value: dict[str, Any]) -> dict[str, Any]:
    return {key: dict(item) if hasattr(item, "keys") else item for key, item in value.items()}


def _there(fd: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{fd}")


async def serve(settings: NetworkSettings) -> None:
    """Obey until stdin ends. Each order is a task of its own; its answer carries its number."""
    loop = asyncio.get_running_loop()
    pool = ThreadPoolExecutor(4)
    manager = NetworkManager(settings, in_pool=lambda call: loop.run_in_executor(pool, call))
    await manager.open()
    served = Served(manager)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)

    async def obey(order: dict[str, Any]) -> None:
        answer: dict[str, Any] = {"number": order["number"]}
        try:
            answer["value"] = await getattr(served, order["do"])(order)
        except (ForgeyardError, OSError) as error:
            answer["error"] = {
                "type": type(error).__name__,
                "reason": getattr(error, "reason", ""),
                "text": str(error),
            }
        sys.stdout.write(json.dumps(answer, default=str) + "\n")
        sys.stdout.flush()

    while line := await reader.readline():
        await obey(json.loads(line))
    if served.dns is not None:
        served.dns.close()
    await manager.close()
    pool.shutdown()


def settings_of(text: str) -> NetworkSettings:
    """Settings as the test's end wrote them."""
    data = json.loads(text)
    config = dict(data.pop("config", {}))
    fetch = tuple(
        NetworkDestination(item.get("host", ""), item.get("cidr", ""), tuple(item.get("ports", ())))
        for item in config.pop("fetch", ())
    )
    credentials = tuple(FetchCredential(**item) for item in config.pop("credentials", ()))
    lists = {key: tuple(value) if isinstance(value, list) else value for key, value in config.items()}
    return NetworkSettings(NetworkConfig(fetch=fetch, credentials=credentials, **lists), **data)


# The test's end


class OrderError(Exception):
    """The process answered with an error."""

    def __init__(self, error: dict[str, str]) -> None:
        super().__init__(error["text"])
        self.type, self.reason = error["type"], error["reason"]


class Process:
    """One such process in `host`."""

    def __init__(self, host: NetNamespace, run_dir: Path, **settings: Any) -> None:
        data = {"run_dir": str(run_dir / "run"), "cni_cache": str(run_dir / "cni"), **settings}
        words = [sys.executable, __file__, json.dumps(data)]
        start = partial(subprocess.Popen, words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.process: subprocess.Popen[str] = in_namespace(host.fd, start)
        self._number = 0

    def order(self, do: str, **words: Any) -> Any:
        """Have it `do` something, and wait for what came of it."""
        self._number += 1
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": do, "number": self._number, **words}) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        assert line, f"the process that plays the host ended with {self.process.wait()}"
        answer = json.loads(line)
        if "error" in answer:
            raise OrderError(answer["error"])
        return answer["value"]

    def attach(self, name: str, mode: str = "deny", **words: Any) -> Attached:
        """A network."""
        return Attached(self.order("attach", name=name, mode=mode, **words))

    def end(self) -> int:
        """Let it close everything; its exit code."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        code = self.process.wait(_WAIT)
        self.process.stdout.close()
        return code

    def kill(self) -> None:
        """As a crash: nothing of it gets a chance to clean."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(_WAIT)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            pipe.close()


class Attached:
    """A network that the process made, with its namespaces opened for the test."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self.members: dict[str, dict[str, Any]] = answer["members"]
        self.notes: list[str] = answer["notes"]
        self.seconds: float = answer["seconds"]
        self.namespaces = {
            name: NetNamespace(os.open(member["netns"], os.O_RDONLY | os.O_CLOEXEC))
            for name, member in self.members.items()
        }

    @property
    def job(self) -> NetNamespace:
        """Where the job would be."""
        return next(iter(self.namespaces.values()))

    def address(self, name: str) -> str:
        """Of a member."""
        return str(self.members[name]["address"])

    @property
    def gateway(self) -> str:
        """The router inside."""
        return str(self.members[next(iter(self.members))]["resolv_conf"].split()[1])

    def let_go(self) -> None:
        """Close the test's descriptors."""
        for namespace in self.namespaces.values():
            namespace.close()


class Host:
    """A host and an outside with SERVER, OTHER, PRIVATE and METADATA, joined by a link."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.namespace = new_namespace()
        self.outside = new_namespace()
        self.links, far = Links.at(self.namespace.fd), Links.at(self.outside.fd)
        self.links.run(Veth("out0", "eth0", self.outside.fd), Up("out0"))
        index, outer = self.links.index("out0"), far.index("eth0")
        self.links.run(Address(index, IPv4Interface(f"{NEAR}/24")), Route(None, IPv4Address(SERVER), index))
        far.run(*(Address(outer, IPv4Interface(f"{address}/32")) for address in (OTHER, PRIVATE, METADATA)))
        far.run(Address(outer, IPv4Interface(f"{SERVER}/24")), Up("eth0"))
        far.close()
        self.processes: list[Process] = []
        self._listeners: list[socket.socket] = []
        self.before = self.state()

    def listen(self, where: NetNamespace, port: int, address: str = "0.0.0.0") -> socket.socket:
        """A listener that is closed with the rest."""
        made = tcp_listener(where.fd, address, port)
        made.setblocking(True)
        self._listeners.append(made)
        return made

    def process(self, **settings: Any) -> Process:
        """One more executor on this host."""
        made = Process(self.namespace, self.directory, **settings)
        self.processes.append(made)
        return made

    def state(self) -> NetState:
        """Links, addresses, routes of the host."""
        return self.links.dump()

    def rules(self) -> str:
        """All rules of the host."""
        return in_namespace(
            self.namespace.fd,
            lambda: subprocess.run(["nft", "list", "ruleset"], capture_output=True, text=True, check=True).stdout,
        )

    def wait_clean(self, wait: float = 10.0) -> None:
        """Until the host has the links, addresses and routes it began with; the kernel takes its own time for that."""
        end = time.monotonic() + wait
        while _still(self.state()) != _still(self.before):
            assert time.monotonic() < end, f"left: {[link.name for link in self.state().links]}"
            time.sleep(0.01)  # nothing announces that the kernel has finished with a namespace

    def close(self) -> None:
        """End everything."""
        for process in self.processes:
            if process.process.poll() is None:
                process.kill()
        for listener in self._listeners:
            listener.close()
        self.links.close()
        self.outside.close()
        self.namespace.close()


def _still(state: NetState) -> tuple[object, ...]:
    """Without IPv6, which the kernel gives to the link outside in its own time."""
    addresses = [text for text in state.addresses if ":" not in text.partition(": ")[2]]
    routes = [text for text in state.routes if "::" not in text and "fe80" not in text and "ff00" not in text]
    return [link.name for link in state.links], addresses, routes


if __name__ == "__main__":
    asyncio.run(serve(settings_of(sys.argv[1])))
