"""Adapters for tests that run on every one of them."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest
from contract_box import Box, open_box, opened

from forgeyard_host.cgroups import CgroupHost, CgroupMode
from forgeyard_runtimes.cells import RUNTIMES, V2_ONLY, Behaviour, exception
from forgeyard_runtimes.cli_runtime import CliRuntime
from forgeyard_runtimes.contract import ContainerRuntime
from forgeyard_runtimes.find import CONTRACT_ONLY, RuntimeSettings, open_runtime

DAEMON_FIXTURES = {"containerd": "containerd", "podman": "podman_service", "docker": "dockerd"}
DAEMON_NAMES = {"containerd": "containerd", "podman": "podman", "docker": "dockerd"}
GUEST_NAMES = tuple(os.environ.get("FORGEYARD_GUEST_ADAPTERS", "crun").split(","))
"""Adapters whose tests also run under cgroup v2, in the guest of tests/guest, which sets this."""


class Adapter:
    """One adapter of this run, connected once, and one container that tests which change nothing share."""

    def __init__(self, name: str, address: str | None, program: str | None = None) -> None:
        self.name = name
        self.address = address
        self.program = program
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
            if self.name in CONTRACT_ONLY:
                self._runtime = await CliRuntime.find(self.name, self.program)
            else:
                self._runtime = await self._stack.enter_async_context(open_runtime(self.name, self.settings()))
        return self._runtime

    async def _close_box(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await box.close()


def on(*behaviours: Behaviour, names: tuple[str, ...] = RUNTIMES, pretended: bool = False) -> pytest.MarkDecorator:
    """Parametrise a test over the adapters on which all of `behaviours` apply, by the table of cells.

    :param pretended: and over the testkit's runtime, for what needs no inside of a container.
    """
    able = [name for name in names if _has_host(name) and not any(exception(name, each) for each in behaviours)]
    return pytest.mark.parametrize(
        "adapter", list(map(parameter, (*able, *(("fake",) if pretended else ())))), indirect=True
    )


def _has_host(name: str) -> bool:
    """Whether this host is one that the runtime works on at all."""
    return name not in V2_ONLY or CgroupHost.detect().mode is CgroupMode.V2


def parameter(name: str) -> Any:
    """The parameter for one adapter, with the mark of its daemon, and of the guest where it also runs there."""
    marks = [pytest.mark.guest] if name in GUEST_NAMES else []
    if name in DAEMON_NAMES:
        marks.append(pytest.mark.daemon(DAEMON_NAMES[name]))
    return pytest.param(name, marks=marks, id=name)


def adapter_of(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    """For the `adapter` fixture of a test module: the adapter that the parameter names, its daemon running."""
    name: str = request.param
    if name == "fake":
        from fake_box import FakeAdapter

        pretended = FakeAdapter()
        yield pretended
        pretended.close()
        return
    fixture = DAEMON_FIXTURES.get(name)
    program = None
    if name in CONTRACT_ONLY:
        program = _optional(name)
    elif fixture is None:
        request.getfixturevalue("require_tool")(name)
    adapter = Adapter(name, request.getfixturevalue(fixture).address if fixture else None, program)
    yield adapter
    adapter.close()


def _optional(name: str) -> str:
    """The program of a runtime that is built from source; a skip where that was not done, in CI too."""
    program = os.environ.get(f"FORGEYARD_TEST_{name.upper()}") or shutil.which(name)
    if program is None:
        pytest.skip(f"{name} is NOT TESTED here: tests/conformance/get_{name}.sh builds it, as the nightly run does")
    return program
