"""`runtime.v1.ImageService` over the executor's image store: to look. Jobs bring their images themselves."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Final

from forgeyard_api.cri.messages import cri
from forgeyard_api.serve.attempt_types import Caller
from forgeyard_executor.images import Images, full_reference
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest

if TYPE_CHECKING:
    from forgeyard_oci.image_info import ImageInfo

FRESH_SECONDS: Final = 2.0
"""For which a list of the store is used again: `crictl ps` alone asks three times."""
_ANSWER_SECONDS: Final = 1.2

_Listing = tuple["ImageInfo", ...]


class ImageService:
    """The calls, as those of RuntimeService.

    :param root: directory of the store.
    """

    def __init__(self, images: Images, root: Path) -> None:
        self._images = images
        self._root = root
        self._listing: asyncio.Task[_Listing] | None = None
        self._listed_at = 0.0

    async def list_images(self, request: cri.ListImagesRequest, caller: Caller) -> cri.ListImagesResponse:
        """Those of the store, or the one that is named."""
        name = request.filter.image.image
        found = [image for image in await self._all() if not name or _is_called(image, name)]
        return cri.ListImagesResponse(images=[_message(image) for image in found])

    async def image_status(self, request: cri.ImageStatusRequest, caller: Caller) -> cri.ImageStatusResponse:
        """One image; an answer without one when it is not here, which is no error."""
        name = request.image.image
        image = next((image for image in await self._all() if name and _is_called(image, name)), None)
        if image is None:
            return cri.ImageStatusResponse()
        info = {"info": _details(image)} if request.verbose else {}
        return cri.ImageStatusResponse(image=_message(image), info=info)

    async def image_fs_info(self, request: cri.ImageFsInfoRequest, caller: Caller) -> cri.ImageFsInfoResponse:
        """What the store takes. Clients ask it of every endpoint before anything else, so it never fails for that."""
        usage = cri.FilesystemUsage(
            timestamp=time.time_ns(), fs_id=cri.FilesystemIdentifier(mountpoint=str(self._root))
        )
        try:
            usage.used_bytes.value = sum(image.size + image.unpacked for image in await self._all())
        except ExecutorError as error:
            if error.reason != "store_slow":
                raise
        return cri.ImageFsInfoResponse(image_filesystems=[usage])

    async def close(self) -> None:
        """Wait for a look at the store that is under way."""
        if self._listing is not None and not self._listing.done():
            self._listing.cancel()
            await asyncio.wait((self._listing,))

    async def _all(self) -> _Listing:
        """The store's images.

        :raises ExecutorError: TIMEOUT, store_slow. The next call has what this one waited for.
        """
        old = self._listing is None or (self._listing.done() and time.monotonic() - self._listed_at > FRESH_SECONDS)
        if self._listing is None or old:
            self._listing = asyncio.get_running_loop().create_task(self._list())
        done, _ = await asyncio.wait((self._listing,), timeout=_ANSWER_SECONDS)
        if not done:
            raise ExecutorError(
                ExecutorErrorKind.TIMEOUT,
                "store_slow",
                "the image store takes long to be read",
                resolution="try again in a moment",
            )
        return self._listing.result()

    async def _list(self) -> _Listing:
        try:
            return await self._images.work(lambda _: self._images.store.ls())
        finally:
            self._listed_at = time.monotonic()


def _message(image: ImageInfo) -> cri.Image:
    tags = [name for name in image.names if "@" not in name]
    pinned = [name for name in image.names if "@" in name]
    pinned += [f"{name.rpartition(':')[0]}@{image.digest}" for name in tags]
    return cri.Image(
        id=image.digest,
        repo_tags=tags,
        repo_digests=list(dict.fromkeys(pinned)),
        # A client takes 0 for a broken answer; an image without blobs here is as large as its trees.
        size=image.size or image.unpacked or 1,
        spec=cri.ImageSpec(image=image.digest),
        pinned=image.held,
    )


def _is_called(image: ImageInfo, name: str) -> bool:
    """By a full or short reference, by its digest, or by a prefix of that, with or without the algorithm."""
    digests = (image.digest, *image.indexes)
    if name in image.names or name in digests:
        return True
    if len(name) >= len("sha256:") and any(
        digest.startswith(name) or digest.removeprefix("sha256:").startswith(name) for digest in digests
    ):
        return True
    try:
        full = full_reference(name)
    except InvalidRequest:
        return False
    return full in image.names or full.rpartition("@")[2] in digests


def _details(image: ImageInfo) -> str:
    return json.dumps(
        {
            "platform": image.platform,
            "indexes": image.indexes,
            "blobBytes": image.size,
            "unpackedBytes": image.unpacked,
            "lastUsed": image.last_used.isoformat(),
            "inUse": image.held,
        },
        separators=(",", ":"),
    )
