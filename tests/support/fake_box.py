"""What `contract_box` makes, for a runtime that pretends: a container's life, and nothing inside."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from adapters import Adapter
from contract_box import ROOTFS, Box

from forgeyard_executor.testing import FakeRuntime
from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import Bundle, NetworkAttachment
from forgeyard_model.policy import NetworkMode
from forgeyard_runtimes.contract import ContainerRef, ContainerRuntime, Stdio


class FakeBox(Box):
    """One container. It has no root, no group and no channel."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.sandbox = SandboxId.mint()
        self.directory = Path("/nonexistent") / self.sandbox.value
        self.ref = ContainerRef(self.sandbox.container, self.directory)
        self.pid, self.pidfd = 0, -1

    async def create(self, edit: Callable[[dict[str, Any]], None] | None = None) -> None:
        """Create it, from an edited bundle if need be."""
        spec = {"process": {"args": ["/.forgeyard/init"]}}
        if edit is not None:
            edit(spec)
        bundle = Bundle(json.dumps(spec).encode(), "", "")
        await self.runtime.create(self.ref, bundle, ROOTFS, NetworkAttachment(NetworkMode.DENY), Stdio())

    async def start(self) -> None:
        """Start it."""
        self.pid = self.pidfd = await self.runtime.start(self.ref)

    async def close(self) -> None:
        """End it, whatever state it is in."""
        if self.pid:
            await self.kill()
        await self.runtime.remove(self.ref)


class FakeAdapter(Adapter):
    """A new runtime for each test."""

    def __init__(self) -> None:
        super().__init__("fake", None)

    async def _connected(self) -> ContainerRuntime:
        return FakeRuntime()

    def apart(self, body: Callable[[Box], Awaitable[None]]) -> None:
        """Await `body` with a container that runs."""

        async def main(runtime: ContainerRuntime) -> None:
            assert isinstance(runtime, FakeRuntime)
            made = FakeBox(runtime)
            await made.create()
            await made.start()
            await body(made)
            await made.close()
            assert runtime.left == ()

        self.run(main)
