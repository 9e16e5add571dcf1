"""Adapters for tests that run on every one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from contract_box import Box, open_box, opened

from forgeyard_host.cgroups import CgroupHost, CgroupMode
from forgeyard_runtimes.cells import RUNTIMES, V2_ONLY, Behaviour, exception
from forgeyard_runtimes.contract import ContainerRuntime
from forgeyard_runtimes.find import RuntimeSettings, open_runtime

DAEMON_FIXTURES = {"containerd": "containerd", "podman": "podman_service", "docker": "dockerd"}
DAEMON_NAMES = {"containerd": "containerd", "podman": "podman", "docker": "dockerd"}


class Adapter:
    """One adapter of this run, connected once, and one container that tests which change nothing share."""

    def __init__(self, name: str, address: str | None) -> None:
        self.name = name
        self.address = address
        self._runner = asyncio.Runner()
        self._stack = AsyncExitStack()
        self._runtime: ContainerRuntime | None = None
        self._box: Box | None = None

    def settings(self, **more: Any) -> RuntimeSettings:
        """How it is reached."""
        return RuntimeSettings(**{"executor": "test", "state": "conformance", "address": self.address, **more})

    def run(self, body: Callable[[ContainerRuntime], Awaitable[None]]) -> None:
        """Await `body` with the adapter."""

        async def main() -> None:
            await body(await self._connected())

        self._runner.run(main())

    def inside(self, body: Callable[[Box], Awaitable[None]]) -> None:
        """Await `body` with the shared container, whose gate is open. A failure ends it: the next one is new."""

        async def main() -> None:
            if self._box is None:
                self._box = await opened(await self._connected())
            try:
                await body(self._box)
            except BaseException:
                await self._close_box()
                raise

        self._runner.run(main())

    def apart(self, body: Callable[[Box], Awaitable[None]]) -> None:
        """Await `body` with a container of its own, whose gate is open."""

        async def main(runtime: ContainerRuntime) -> None:
            async with open_box(runtime) as made:
                await body(made)

        self.run(main)

    def close(self) -> None:
        """End the shared container and disconnect."""

        async def main() -> None:
            await self._close_box()
            await self._stack.aclose()

        with self._runner:
            self._runner.run(main())

    async def _connected(self) -> ContainerRuntime:
        if self._runtime is None:
            self._runtime = await self._stack.enter_async_context(open_runtime(self.name, self.settings()))
        return self._runtime

    async def _close_box(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()


def on(*behaviours: Behaviour, names: tuple[str, ...] = RUNTIMES) -> pytest.MarkDecorator:
    """Parametrise a test over the adapters on which all of `behaviours` apply, by the table of cells."""
    able = [name for name in names if _has_host(name) and not any(exception(name, each) for each in behaviours)]
    return pytest.mark.parametrize("adapter", list(map(parameter, able)), indirect=True)


def _has_host(name: str) -> bool:
    """Whether this host is one that the runtime works on at all."""
    return name not in V2_ONLY or CgroupHost.detect().mode is CgroupMode.V2


def parameter(name: str) -> Any:
    """The parameter for one adapter, with the mark of its daemon."""
    daemon = DAEMON_NAMES.get(name)
    return pytest.param(name, marks=[pytest.mark.daemon(daemon)] if daemon else [], id=name)


def adapter_of(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    """For the `adapter` fixture of a test module: the adapter that the parameter names, its daemon running."""
    name: str = request.param
    fixture = DAEMON_FIXTURES.get(name)
    if fixture is None:
        request.getfixturevalue("require_tool")(name)
    adapter = Adapter(name, request.getfixturevalue(fixture).address if fixture else None)
    yield adapter
    adapter.close()
