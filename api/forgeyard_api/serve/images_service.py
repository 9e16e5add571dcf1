"""The image store for callers of the API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_api.serve.attempt_types import Caller
from forgeyard_api.serve.checks import Checks
from forgeyard_api.wire.messages import executor as wire
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_oci.wish import PullPolicy

if TYPE_CHECKING:
    from forgeyard_executor.images import Images
    from forgeyard_oci.image_info import ImageInfo
    from forgeyard_oci.registry.budget import Budget

PULL_SECONDS: Final = 3600.0
RESOLVE_SECONDS: Final = 60.0


class ImagesService:
    """`forgeyard.executor.v1.Images` over the store of this host.

    :param checks: which layouts on disk a caller may name.
    """

    def __init__(self, images: Images, checks: Checks) -> None:
        self._images = images
        self._checks = checks

    async def pull(self, request: wire.PullRequest, caller: Caller) -> AsyncIterator[wire.PullResponse]:
        """Fetch and unpack an image. Leaving the call stops it; what has been fetched stays for the next one."""
        if request.pull not in ("", "missing", "always"):
            raise InvalidRequest("pull", request.pull, "use missing or always")
        self._named(caller, request.reference)
        images, told = self._images, _Told(asyncio.get_running_loop())

        def work(budget: Budget) -> str:
            images.check_allowed(request.reference)
            policy = PullPolicy.ALWAYS if request.pull == "always" else PullPolicy.MISSING
            images.store.pull(request.reference, request.platform or None, policy=policy, budget=budget, progress=told)
            return images.store.known_pin(request.reference, Path("/")) or request.reference

        pulling = asyncio.ensure_future(images.work(work, seconds=PULL_SECONDS))
        pulling.add_done_callback(lambda _: told.end())
        try:
            while (update := await told.queue.get()) is not None:
                yield update
            pinned = await pulling
        finally:
            pulling.cancel()
            await asyncio.wait((pulling,))
        yield wire.PullResponse(image=wire.Image(pinned=pinned))

    async def resolve(self, request: wire.ResolveRequest, caller: Caller) -> wire.ResolveResponse:
        """What a tag names now."""
        self._named(caller, request.reference)
        images = self._images
        pinned = await images.work(
            lambda budget: images.resolve(request.reference, request.platform or None, budget), seconds=RESOLVE_SECONDS
        )
        return wire.ResolveResponse(pinned=pinned)

    async def list(self, request: wire.ListRequest, caller: Caller) -> wire.ListResponse:
        """What is in the store."""
        found = await self._images.work(lambda _: self._images.store.ls())
        shown = [_image(info) for info in found if not request.name or request.name in info.names]
        return wire.ListResponse(images=shown)

    async def prune(self, request: wire.PruneRequest, caller: Caller) -> wire.PruneResponse:
        """Remove what no job uses. For operators: the store is everybody's."""
        if not caller.operator:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "not_allowed",
                f"uid {caller.uid} is no operator of this server",
                resolution="ask one, or add the uid to serve.operators",
            )
        unused = request.unused_for.ToTimedelta().total_seconds() if request.HasField("unused_for") else 0.0
        keep = request.keep_bytes if request.HasField("keep_bytes") else None
        report = await self._images.work(lambda _: self._images.store.prune(unused_for=unused, keep_bytes=keep))
        return wire.PruneResponse(removed=[*report.names, *report.images], freed_bytes=report.freed)

    def _named(self, caller: Caller, reference: str) -> None:
        if not reference:
            raise InvalidRequest("reference", "", "give the image's reference")
        self._checks.check_image(caller, "reference", reference)


class _Told:
    """Progress of a pull, from its threads to the event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.queue: asyncio.Queue[wire.PullResponse | None] = asyncio.Queue()
        self._loop = loop
        self._sizes: dict[str, int] = {}

    def begin(self, digest: str, size: int, what: str) -> None:
        """A blob is about to be fetched."""
        self._sizes[digest] = size
        self._tell(wire.PullResponse(layer=digest, total_bytes=size, stage=what))

    def advance(self, digest: str, total_received: int) -> None:
        """So many bytes of it have come so far."""
        total = self._sizes.get(digest, 0)
        self._tell(wire.PullResponse(layer=digest, done_bytes=total_received, total_bytes=total, stage="pulling"))

    def done(self, digest: str, state: str) -> None:
        """It is there, or has failed."""
        total = self._sizes.get(digest, 0)
        self._tell(wire.PullResponse(layer=digest, done_bytes=total, total_bytes=total, stage=state))

    def end(self) -> None:
        """Nothing more comes."""
        self.queue.put_nowait(None)

    def _tell(self, update: wire.PullResponse) -> None:
        self._loop.call_soon_threadsafe(self.queue.put_nowait, update)


def _image(info: ImageInfo) -> wire.Image:
    return wire.Image(
        pinned=next((name for name in info.names if "@" in name), info.digest),
        names=info.names,
        id=info.digest,
        size_bytes=info.size,
        platform=info.platform,
        in_use=info.held,
    )
