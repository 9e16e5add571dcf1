"""Brings one image into the store: documents, then layers, several downloaded at once and each unpacked in its turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Final

from forgeyard_model.errors import ExecutorError, InvalidRequest, SandboxError
from forgeyard_model.plan import JobUser
from forgeyard_oci.claims import Claim
from forgeyard_oci.durable import filesystem_of
from forgeyard_oci.image_config import ImageConfig
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.image_resolve import ImageLayer, ResolvedImage, resolve_image
from forgeyard_oci.image_user import resolve_user
from forgeyard_oci.layers import LayerStore, UnpackedLayer, chain_id
from forgeyard_oci.records import ImageRecord, LayerRecord
from forgeyard_oci.reference import LayoutReference, RegistryReference
from forgeyard_oci.registry.budget import Budget, Progress
from forgeyard_oci.sources import LayoutSource, RegistrySource, Source, Transfer
from forgeyard_oci.store_parts import StoreParts
from forgeyard_oci.unpack_decode import layer_compression
from forgeyard_oci.unpack_merged import MergedTree
from forgeyard_oci.wish import Wish

if TYPE_CHECKING:
    from forgeyard_oci.reader import ImageReader
    from forgeyard_oci.registry.client import RegistryClient
    from forgeyard_oci.unpack import UnpackReport

_DOWNLOADS: Final = 4
_SPOILED: Final = frozenset({"digest_mismatch", "truncated", "size_mismatch", "bad_compression"})
"""Reasons for which a blob that an earlier pull left here is fetched again, once."""


def pull_image(
    parts: StoreParts, wish: Wish, digest: str, client: Callable[[], RegistryClient] | None, reader: ImageReader
) -> ImageRecord:
    """Pull one image and record it. It is kept (see Holds) for whoever asked.

    :param digest: what is wanted, "" to ask what the tag names.
    :param client: how to come by a client, None when no registry may be asked.
    :raises SandboxError, ExecutorError: as ImageStore.prepare() has it.
    """
    stopped = Event()
    progress = StoppableProgress(wish.progress, stopped)
    image = wish.image
    with _own_errors(parts), Claim(parts.paths.claims, parts.paths.store_lock) as claim:
        source: Source
        if isinstance(image, LayoutReference):
            source = LayoutSource(image, wish.base_dir)
        else:
            transfer = Transfer(client, wish.budget, progress)
            source = RegistrySource(image, digest, parts.blobs, claim, transfer)
        pull = ImagePull(parts.layers, source, reader, claim, wish.budget)
        try:
            record = pull.run(wish.platform, progress)
        except BaseException:
            stopped.set()
            raise
        finally:
            pull.close()
        _record(parts, wish, record)
    return record


def _record(parts: StoreParts, wish: Wish, record: ImageRecord) -> None:
    """Make an image known, kept from the moment on in which it is."""
    parts.holds.keep(record.digest)
    try:
        parts.records.save(record)
        if isinstance(wish.image, RegistryReference):
            name = wish.image.pinned(wish.image.digest) if wish.image.digest else str(wish.image)
            parts.names.set(name, record.documents[0])
    except BaseException:
        parts.holds.drop(record.digest)
        raise


@contextmanager
def _own_errors(parts: StoreParts) -> Iterator[None]:
    """Failed system calls as our own; a full disk always with its file system."""
    try:
        yield
    except OSError as error:
        raise parts.blobs.failure(error, "pulling an image") from error
    except ExecutorError as error:
        place = filesystem_of(parts.paths.root)
        if error.reason == "no_space" and place not in error.details:
            error.details = "; ".join(filter(None, (error.details, f"file system {place}")))
        raise


class StoppableProgress:
    """A Progress through which a failed pull stops its other downloads: their next news raises."""

    def __init__(self, progress: Progress, stopped: Event) -> None:
        self._progress, self._stopped = progress, stopped
        self.begin, self.done = progress.begin, progress.done

    def advance(self, digest: str, total_received: int) -> None:
        """Pass it on.

        :raises PullStopped: when the pull has failed elsewhere.
        """
        if self._stopped.is_set():
            raise PullStopped
        self._progress.advance(digest, total_received)


class PullStopped(Exception):  # noqa: N818  a signal between our own threads, never seen outside
    """Another layer of the same pull failed."""


class ImagePull:
    """One pull. Blocking; close() it, which waits for the downloads that are under way."""

    def __init__(self, layers: LayerStore, source: Source, reader: ImageReader, claim: Claim, budget: Budget) -> None:
        self._layers, self._source, self._reader = layers, source, reader
        self._claim, self._budget = claim, budget
        self._pool = ThreadPoolExecutor(_DOWNLOADS, thread_name_prefix="image-pull")

    def close(self) -> None:
        """Start no more downloads."""
        self._pool.shutdown(cancel_futures=True)

    def run(self, wanted: Platform, progress: Progress) -> ImageRecord:
        """The image for `wanted`, all of it here and unpacked.

        :raises SandboxError: an image that is damaged or breaks a rule.
        :raises ExecutorError: UNSUPPORTED, IO_FAILED (such as a full disk, or the registry), TIMEOUT, cancelled.
        """
        self._reader.start()  # beside the first answer of the registry
        start, declared = self._source.start()
        image = resolve_image(self._source, self._reader, start, wanted, declared=declared)
        config = ImageConfig.read(image.config)
        for layer in image.layers:
            layer_compression(layer.blob.media_type)  # refuse before the first byte is downloaded
        layers = self._unpack_all(image, self._fetch_all(image), progress)
        lowers = _lowers(layers) or (self._layers.empty(),)
        trees = tuple(f"{self._layers.folder}/{lower}" for lower in lowers)
        return ImageRecord(
            platform=str(wanted),
            documents=image.documents,
            layers=tuple(_layer_record(layer, made) for layer, made in zip(image.layers, layers, strict=True)),
            lowers=lowers,
            plan=config.rootfs((), image.digest),
            user=config.user,
            default_user=_default_user(config.user, trees),
            stored=self._source.stored,
            boot=self._layers.boot,
        )

    def _fetch_all(self, image: ResolvedImage) -> dict[str, Future[bool]]:
        """Start to download each layer once, lowest first."""
        unique = {layer.blob.digest: layer.blob for layer in image.layers}
        self._claim.add(*unique, *_claims(image.layers))
        return {digest: self._pool.submit(self._source.fetch, blob) for digest, blob in unique.items()}

    def _unpack_all(
        self, image: ResolvedImage, arrivals: dict[str, Future[bool]], progress: Progress
    ) -> list[UnpackedLayer]:
        """Unpack each layer as soon as it and those below it are here, while others are still on their way."""
        made: list[UnpackedLayer] = []
        chain = ""
        for layer in image.layers:
            chain = chain_id(chain, layer.diff_id)
            downloaded = self._arrival(arrivals, layer.blob.digest)
            self._budget.check()
            known = self._layers.find(layer.diff_id, chain)
            made.append(known or self._unpack(layer, chain, _lowers(made), downloaded))
            progress.done(layer.blob.digest, "unpacked")
        return made

    @staticmethod
    def _arrival(arrivals: dict[str, Future[bool]], digest: str) -> bool:
        """Whether a layer was downloaded, once it is here; the first failure of any layer ends the pull."""
        while True:
            for future in arrivals.values():
                if future.done():
                    future.result()
            if arrivals[digest].done():
                return arrivals[digest].result()
            wait([future for future in arrivals.values() if not future.done()], return_when=FIRST_COMPLETED)

    def _unpack(self, layer: ImageLayer, chain: str, lowers: tuple[str, ...], downloaded: bool) -> UnpackedLayer:
        try:
            return self._unpack_once(layer, chain, lowers)
        except SandboxError as error:
            if downloaded or error.reason not in _SPOILED or not self._source.refetch(layer.blob):
                raise
        return self._unpack_once(layer, chain, lowers)

    def _unpack_once(self, layer: ImageLayer, chain: str, lowers: tuple[str, ...]) -> UnpackedLayer:
        blob = layer.blob

        def into(tree: Path, files: Path) -> UnpackReport:
            fd = self._source.open(blob)
            try:
                return self._reader.unpack(
                    fd,
                    media_type=blob.media_type,
                    digest=blob.digest,
                    size=blob.size,
                    diff_id=layer.diff_id,
                    tree=tree,
                    lowers=tuple(f"{self._layers.folder}/{lower}" for lower in lowers),
                    records=files,
                    check=self._budget.check,
                )
            finally:
                os.close(fd)

        return self._layers.unpack(layer.diff_id, chain, into, self._budget)


def _claims(layers: tuple[ImageLayer, ...]) -> Iterator[str]:
    chain = ""
    for layer in layers:
        chain = chain_id(chain, layer.diff_id)
        yield from (layer.diff_id, chain)


def _lowers(layers: list[UnpackedLayer]) -> tuple[str, ...]:
    """Trees for an overlay, topmost first."""
    lowers: tuple[str, ...] = ()
    for layer in layers:
        # An overlay refuses a directory twice. The upper one of two says all that the lower one says.
        below = () if layer.opaque_root else (lower for lower in lowers if lower != layer.lower)
        lowers = (layer.lower, *below)
    return lowers


def _layer_record(layer: ImageLayer, made: UnpackedLayer) -> LayerRecord:
    blob = layer.blob
    return LayerRecord(blob.digest, blob.size, blob.media_type, layer.diff_id, made.folder, made.unpacked)


def _default_user(text: str, trees: tuple[str, ...]) -> JobUser | None:
    """The image's USER; None for one it does not know, which is an error only where a job wants it."""
    try:
        return resolve_user(text, MergedTree(trees), field="image USER")
    except InvalidRequest:
        return None
