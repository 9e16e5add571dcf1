"""The CRI endpoint over a table of attempts, for tests: a client of its calls, and the real crictl."""

from __future__ import annotations

import asyncio
import json
import shutil
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from forgeyard_api.cri.messages import methods
from forgeyard_api.cri.server import cri_served
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.config_serve import ServeConfig

CALL_SECONDS = 60.0
"""For an answer on a busy machine. Whatever waits for a backend that hangs would wait longer."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a command wrote, and what it exited with."""

    code: int
    out: str
    err: str


class Endpoint:
    """One endpoint, and those who ask it."""

    def __init__(self, socket: Path, program: Path | None = None) -> None:
        self.socket = socket
        self.program = program

    async def call(self, name: str, *, seconds: float = CALL_SECONDS, **fields: Any) -> Any:
        """One call by its name, with the fields of its message.

        :raises grpc.aio.AioRpcError: the endpoint's refusal.
        """
        method = next(item for service in SERVICES for item in methods(service) if item.name == name)
        async with grpc.aio.insecure_channel(f"unix:{self.socket}") as channel:
            ask = channel.unary_unary(
                method.path,
                request_serializer=method.question.SerializeToString,
                response_deserializer=method.answer.FromString,
            )
            return await ask(method.question(**fields), timeout=seconds, wait_for_ready=True)

    async def raw(self, path: str) -> Any:
        """A call that we may not know, with an empty message."""
        async with grpc.aio.insecure_channel(f"unix:{self.socket}") as channel:
            return await channel.unary_unary(path)(b"", timeout=CALL_SECONDS, wait_for_ready=True)

    async def crictl(self, *arguments: str, ok: bool = True) -> Said:
        """The real crictl's answer; with `ok` it has to be a good one."""
        process = await self.started(*arguments)
        out, err = await process.communicate()
        said = Said(process.returncode or 0, out.decode(), err.decode())
        assert said.code == 0 or not ok, (arguments, said)
        return said

    async def started(self, *arguments: str) -> asyncio.subprocess.Process:
        """The real crictl, running. Its own deadline is wide: a busy machine is no fault of the endpoint's."""
        assert self.program is not None
        return await asyncio.create_subprocess_exec(
            self.program,
            f"--runtime-endpoint=unix://{self.socket}",
            "--timeout=50s",
            *arguments,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )

    async def json(self, *arguments: str) -> Any:  # flags go before ids
        """What crictl prints as JSON."""
        return json.loads((await self.crictl(arguments[0], "-o", "json", *arguments[1:])).out)


SERVICES = ("RuntimeService", "ImageService")


@asynccontextmanager
async def cri_over(
    table: AttemptTable, state: Path, *, program: Path | None = None, **serve: Any
) -> AsyncIterator[Endpoint]:
    """An endpoint over `table`, whose logs and images are below `state`."""
    folder = Path(tempfile.mkdtemp(prefix="fy-cri-"))
    folder.chmod(0o711)  # a socket for others than root has to be reachable for them
    try:
        socket = folder / "cri.sock"
        config = ExecutorConfig(state_dir=str(state), serve=ServeConfig(cri_socket=str(socket), **serve))
        async with cri_served(table, config):
            yield Endpoint(socket, program)
    finally:
        shutil.rmtree(folder)
