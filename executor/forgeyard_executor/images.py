"""Images for attempts: pulled in a pool of their own, held while somebody uses them, pinned where a policy asks.

A pull may take minutes. It never runs in the pool of host work, where it would keep the clean-up of other jobs
waiting; an image that is all there is taken from the store without queueing behind one that is not.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeVar

from forgeyard_executor.capabilities import reason_of
from forgeyard_executor.config_apply import turned_down
from forgeyard_executor.image_progress import PullWatch
from forgeyard_executor.state import StatePaths
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import ForgeyardError, InvalidRequest
from forgeyard_model.plan import RootfsPlan
from forgeyard_model.result import ImageUsed
from forgeyard_runtimes.shielding import shielded

if TYPE_CHECKING:
    from forgeyard_oci.holds import ImageHold
    from forgeyard_oci.image_store import ImageStore
    from forgeyard_oci.registry.budget import Budget, Progress

T = TypeVar("T")
Quick = Callable[[Callable[[], "ReadyImage | None"]], "asyncio.Future[ReadyImage | None]"]

PULLS: Final = 16
"""Images that one executor prepares at a time. Each is one confined reader and a few connections."""

LAYOUT: Final = "oci:"
"""Images that are a layout on disk, which no registry is asked for."""

POLICIES: Final = ("missing", "always", "never")

NOT_PRESENT: Final = "not_present"
"""The store's word for an image that would have to be pulled."""

_LATE: Final = 0.5
"""Seconds after the caller's own clock at which a pull that was not told to stop ends by itself."""


@dataclass(frozen=True, slots=True)
class ImageOptions:
    """How a run comes by its images.

    :param pull: ``missing``, ``always`` or ``never``, as docker has them; a digest that is there is never asked for.
    :param progress: told of each layer that is fetched, from several threads.
    :param lock: file of pinned tags: read, and given what it lacks.
    :param frozen: a tag that the lock lacks is refused instead of being resolved.
    """

    pull: str = "missing"
    progress: Progress | None = None
    lock: Path | None = None
    frozen: bool = False


AS_USUAL: Final = ImageOptions()


@dataclass(frozen=True, slots=True)
class ImageRequest:
    """The image of one request.

    :param asked: the reference as its author wrote it, where a lock has put a pinned one in its place.
    :param seconds: what preparing may take.
    :param where: the part of the request that it belongs to, for errors; empty for the job itself.
    """

    reference: str
    platform: str | None = None
    user: str | None = None
    asked: str = ""
    seconds: float | None = None
    where: str = ""


@dataclass(frozen=True, slots=True)
class ReadyImage:
    """An image that is unpacked, and stays so until `hold` is closed.

    :param seconds: what fetching and unpacking took; 0 when it was there.
    :param layout: the OCI layout that has its blobs.
    :param release: ends what keeps it at the runtime's engine; None where it is not there.
    """

    rootfs: RootfsPlan
    hold: ImageHold
    used: ImageUsed
    seconds: float
    layout: Path
    release: Callable[[], Awaitable[None]] | None = None

    async def let_go(self) -> None:
        """Let the runtime's engine remove it. Repeating it is no error.

        :raises ForgeyardError: what the engine says.
        """
        if self.release is not None:
            await self.release()

    def close(self) -> None:
        """Let the image be pruned. Repeating it is no error."""
        self.hold.close()


class Images:
    """The image store of one state directory, as jobs and commands use it.

    :param config: whose allowed_registries and allowed_images are asked before a registry is.
    :param whole: blobs are kept beside what was unpacked of them, for an engine that unpacks them too.
    """

    def __init__(self, paths: StatePaths, config: ExecutorConfig, *, whole: bool = False) -> None:
        self._root = paths.images
        self._whole = whole
        self._config = config
        self._store: ImageStore | None = None
        self._opening = threading.Lock()
        self._pool = ThreadPoolExecutor(PULLS, thread_name_prefix="forgeyard-pull")

    @property
    def store(self) -> ImageStore:
        """Opened by the first job with an image, since its models are slow to import. Blocking.

        :raises ForgeyardError: when the directory can't be made.
        """
        with self._opening:
            if self._store is None:
                self._store = self._open()
            return self._store

    def _open(self) -> ImageStore:
        from forgeyard_oci.image_errors import host_failure
        from forgeyard_oci.image_store import ImageStore

        try:
            store = ImageStore(self._root)
            store.sweep()
        except OSError as error:
            raise host_failure(error, "opening the image store", str(self._root)) from error
        return store

    def close(self) -> None:
        """Wait for what runs in the pool (pulls that were cancelled end soon), and end the store's connections."""
        self._pool.shutdown(cancel_futures=True)
        if self._store is not None:
            self._store.close()

    # ---- the pool

    async def work(
        self, call: Callable[[Budget], T], *, seconds: float | None = None, undo: Callable[[T], None] | None = None
    ) -> T:
        """Run a blocking call of the store in the pool of pulls.

        Cancelled, it tells the call's budget and waits for the call to notice, so that nothing goes on behind a
        caller's back.

        :param seconds: what the call has, from now on.
        :param undo: for a result that comes after the cancel.
        """
        from forgeyard_oci.registry.budget import Budget

        budget = Budget.within(None if seconds is None else seconds + _LATE)
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: call(budget))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            budget.cancelled.set()
            await shielded(_ended(future))
            # Its error is asked for too, or asyncio would report it as lost: the cancel is the answer.
            if not future.cancelled() and future.exception() is None and undo is not None:
                undo(future.result())
            raise

    async def ready(self, request: ImageRequest, options: ImageOptions, quick: Quick) -> ReadyImage:
        """The image, held. What is there is taken by `quick`, a pool whose work is short; the rest is pulled.

        :raises ForgeyardError: what the image, its registry or this host refuse.
        """
        policy = pull_policy(options.pull)
        if policy == "missing" and not request.reference.startswith(LAYOUT):
            there = await self._present(request, quick)
            if there is not None:
                return there
        return await self.work(
            lambda budget: self.take(request, options, budget), seconds=request.seconds, undo=ReadyImage.close
        )

    async def all_ready(
        self, requests: Sequence[ImageRequest], options: ImageOptions, quick: Quick
    ) -> tuple[ReadyImage, ...]:
        """The images of `requests`, in order, fetched beside one another. After a failure or a cancel none is held."""
        if len(requests) < 2:
            return tuple([await self.ready(request, options, quick) for request in requests])
        makings = [asyncio.ensure_future(self.ready(request, options, quick)) for request in requests]
        try:
            return tuple(await asyncio.gather(*makings))
        except BaseException:
            for making in makings:
                making.cancel()
            for ended in await shielded(asyncio.gather(*makings, return_exceptions=True)):
                if isinstance(ended, ReadyImage):
                    ended.close()
            raise

    async def _present(self, request: ImageRequest, quick: Quick) -> ReadyImage | None:
        future = quick(lambda: self.present(request))
        try:
            return await shielded(future)
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None and (late := future.result()):
                late.close()
            raise

    # ---- blocking, in one of the pools

    def present(self, request: ImageRequest) -> ReadyImage | None:
        """The image, if it takes no registry; None when it is not all there."""
        try:
            return self.take(request, replace(AS_USUAL, pull="never"), None)
        except ForgeyardError as error:
            if reason_of(error) == NOT_PRESENT:
                return None
            raise

    def take(self, request: ImageRequest, options: ImageOptions, budget: Budget | None) -> ReadyImage:
        """The image, fetched if `options` say so."""
        from forgeyard_oci.image_store import PullPolicy

        policy = PullPolicy(pull_policy(options.pull))
        clock, watch, store = time.monotonic(), PullWatch(options.progress), self.store
        try:
            rootfs = store.prepare(
                request.reference,
                request.platform,
                Path.cwd(),
                user=request.user,
                policy=policy,
                budget=budget,
                progress=watch,
                whole=self._whole,
            )
        except InvalidRequest as error:
            if not request.where:
                raise
            raise InvalidRequest(f"{request.where}.{error.field}", error.value, error.cure) from error
        # `prepare` keeps the image for the hold that follows, so that nobody prunes it in between.
        hold = store.hold(rootfs)
        seconds = time.monotonic() - clock if watch.worked else 0.0
        layout = store.layout_of(request.reference, Path.cwd())
        return ReadyImage(rootfs, hold, self._used(request, rootfs, watch.source), seconds, layout)

    def _used(self, request: ImageRequest, rootfs: RootfsPlan, source: str) -> ImageUsed:
        from forgeyard_oci.reference import parse_reference

        reference = request.reference
        pinned = reference if parse_reference(reference).digest else self.store.known_pin(reference, Path.cwd())
        return ImageUsed(
            asked=request.asked or reference,
            pinned=pinned or reference,
            platform=request.platform or str(self.store.host),
            source=source,
        )

    def check_allowed(self, reference: str) -> None:
        """Ask the organisation's rules, before any registry.

        :raises InvalidRequest: names the rule.
        """
        refused = turned_down(full_reference(reference), self._config)
        if refused is not None:
            key, rule = refused
            allowed = ", ".join(rule.patterns) or "none"
            raise InvalidRequest(
                "image", reference, f"is not in {key} ({rule.origin}): use an image that it lets pass: {allowed}"
            )

    def resolve(self, reference: str, platform: str | None, budget: Budget) -> str:
        """The pinned form of `reference`.

        :raises ForgeyardError: when it is not allowed, or its registry can't say.
        """
        self.check_allowed(reference)
        return self.store.resolve(reference, platform, Path.cwd(), budget=budget)


async def _ended(future: asyncio.Future[T]) -> None:
    """Wait for `future`, whatever comes of it."""
    await asyncio.wait((future,))


def pull_policy(text: str) -> str:
    """`text`, if it is a policy.

    :raises InvalidRequest: names those there are.
    """
    if text not in POLICIES:
        raise InvalidRequest("pull", text, f"write {', '.join(POLICIES)}")
    return text


def full_reference(text: str) -> str:
    """A reference with everything that was left out: ``busybox`` is ``docker.io/library/busybox:latest``.

    :raises InvalidRequest: for one that is not well formed.
    """
    from forgeyard_oci.reference import parse_reference

    return str(parse_reference(text))
