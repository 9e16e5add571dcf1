"""Log files for `crictl logs`, which reads them itself: one for each container, written while its attempt runs."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

from forgeyard_api.cri.ids import JOB, container_id, owner, pod_id
from forgeyard_api.cri.log_file import LineSplitter, LogFile
from forgeyard_api.cri.pods import Pods
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_runtimes.spool_format import START, OutputChunk, SpoolMark

log: Final = logging.getLogger("forgeyard.serve")

NAME: Final = "0.log"
"""The number counts the starts of a container, of which ours has one."""

_LINE_WAITS: Final = 0.2
"""Seconds that the start of a line waits for its end, before a reader gets it as it is."""
_LOOK_AGAIN: Final = 5.0
_NOT_OFTENER: Final = 0.1
_AGAIN: Final = 1.0


@dataclass(frozen=True, slots=True)
class LogSettings:
    """Where log files are, and how much of each is kept: `size` bytes in each of `files`."""

    root: Path
    size: int
    files: int


class Logs:
    """Follows every container. Made by `open`."""

    def __init__(self, table: AttemptTable, pods: Pods, settings: LogSettings) -> None:
        self._table = table
        self._pods = pods
        self._settings = settings
        self._since = datetime.now(UTC)
        self._wake = asyncio.Event()
        self._followed: dict[str, dict[str, asyncio.Task[None]]] = {}

    @classmethod
    @asynccontextmanager
    async def open(cls, table: AttemptTable, pods: Pods, settings: LogSettings) -> AsyncIterator[Logs]:
        """Follow what runs and what starts, for the block. Files stay after it: a later server goes on with them.

        :raises ExecutorError: IO_FAILED, where the files can't be.
        """
        try:
            await asyncio.to_thread(settings.root.mkdir, mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ExecutorError(
                ExecutorErrorKind.IO_FAILED,
                "cri_logs",
                f"can't write logs to {settings.root}",
                details=error.strerror or str(error),
                resolution="mend the state directory, or serve without cri_socket",
            ) from error
        logs = cls(table, pods, settings)
        tasks = [asyncio.ensure_future(logs._listen()), asyncio.ensure_future(logs._keep_up())]
        try:
            yield logs
        finally:
            tasks += [task for followers in logs._followed.values() for task in followers.values()]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def path(self, view: AttemptView, service: str = JOB) -> Path:
        """Of the file of a container."""
        return self._settings.root / pod_id(view) / container_id(view, service) / NAME

    async def shown_path(self, view: AttemptView, service: str) -> str:
        """The same, absolute; empty where there is no file."""
        path = self.path(view, service)
        return str(path) if await asyncio.to_thread(path.is_file) else ""

    async def settle(self, view: AttemptView, service: str, seconds: float) -> None:
        """Once the log of an attempt that has ended is whole, or after a while: a reader goes by its state."""
        self._follow_new((view,))
        task = self._followed.get(pod_id(view), {}).get(service)
        if task is not None:
            await asyncio.wait((task,), timeout=seconds)

    # ---- which containers there are

    async def _listen(self) -> None:
        while True:
            with contextlib.suppress(ExecutorError):  # fell behind: everything is looked at anyway
                async with aclosing(self._pods.events()) as events:
                    async for _ in events:
                        self._wake.set()

    async def _keep_up(self) -> None:
        while True:
            self._wake.clear()
            views = self._pods.views()
            self._follow_new(views)
            await self._remove_forgotten({pod_id(view) for view in views})
            await asyncio.sleep(_NOT_OFTENER)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_LOOK_AGAIN):
                    await self._wake.wait()

    def _follow_new(self, views: tuple[AttemptView, ...]) -> None:
        for view in views:
            key = pod_id(view)
            if key in self._followed or not self._is_ours(view):
                continue
            self._followed[key] = {
                service: asyncio.get_running_loop().create_task(self._follow(view, service))
                for service in (JOB, *view.services)
            }

    def _is_ours(self, view: AttemptView) -> bool:
        """Whether it runs, or has run since this began: what an earlier server wrote to the end stays as it is."""
        if view.state is AttemptState.ENDED:
            return bool(view.started_at and view.finished_at and view.finished_at >= self._since)
        return view.state is AttemptState.RUNNING

    async def _remove_forgotten(self, known: set[str]) -> None:
        for key in self._followed.keys() - known:
            for task in self._followed.pop(key).values():
                task.cancel()
        try:
            await asyncio.to_thread(_remove_others, self._settings.root, known)
        except OSError as error:
            log.warning("logs of attempts that are gone: %s", error)

    # ---- one container

    async def _follow(self, view: AttemptView, service: str) -> None:
        if not service:
            await self._pods.look((view,))  # so that its bundle can be shown after its end
        settings = self._settings
        try:
            file = await asyncio.to_thread(LogFile, self.path(view, service), size=settings.size, files=settings.files)
            try:
                await self._write(view, service, file)
            finally:
                file.close()
        except OSError as error:
            log.warning("the log of %s in %r ends here: %s", service or "the job", view.attempt_id, error)

    async def _write(self, view: AttemptView, service: str, file: LogFile) -> None:
        splitter, mark = LineSplitter(), START
        while True:
            try:
                chunks = self._table.output(owner(view), view.attempt_id, service, after=mark)
                async for chunk in _or_pauses(chunks, splitter):
                    lines = splitter.flush() if chunk is None else splitter.lines(chunk)
                    if chunk is not None:
                        mark = after(mark, chunk)
                    if lines:
                        await asyncio.to_thread(file.write, lines)
            except ForgeyardError as error:
                log.info("output of %r, which is asked for again: %s", view.attempt_id, error)
                if not self._runs(view):
                    break
                await asyncio.sleep(_AGAIN)
            else:
                break
        await asyncio.to_thread(file.write, splitter.flush())

    def _runs(self, view: AttemptView) -> bool:
        return any(pod_id(item) == pod_id(view) and item.state is not AttemptState.ENDED for item in self._pods.views())


def after(mark: SpoolMark, chunk: OutputChunk) -> SpoolMark:
    """The place behind `chunk`."""
    passed = len(chunk.data) + chunk.dropped_before
    if chunk.stream == "stdout":
        return SpoolMark(mark.stdout + passed, mark.stderr)
    return SpoolMark(mark.stdout, mark.stderr + passed)


async def _or_pauses(
    chunks: AsyncGenerator[OutputChunk, None], splitter: LineSplitter
) -> AsyncGenerator[OutputChunk | None, None]:
    """Chunks, and None where the end of a line that has begun does not come."""
    async with aclosing(chunks):
        while True:
            coming = asyncio.ensure_future(anext(chunks, None))
            try:
                done, _ = await asyncio.wait((coming,), timeout=_LINE_WAITS if splitter.waiting else None)
                if not done:
                    yield None
                chunk = await coming
            finally:
                if not coming.done():
                    coming.cancel()
                    await asyncio.wait((coming,))
            if chunk is None:
                return
            yield chunk


def _remove_others(root: Path, known: set[str]) -> None:
    for entry in root.iterdir():
        if entry.name not in known:
            shutil.rmtree(entry)
