"""Images of our store put into containerd and unpacked by its snapshotter, for those who want one copy on a host.

What comes back is the unpacked layers, as paths. The root itself is put together from them as from our own store's:
containerd 1.6 can't give a snapshot the ids of a user namespace without a copy, nor bound what a job writes.

A lease and a view per hold keep what a job uses from the daemon's garbage collector, also when somebody deletes the
image. The container's record names both the image and the view, and what the daemon has of them is read back.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.plan import EngineImage, RootfsPlan
from forgeyard_oci.layers import chain_id
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import QUERY_DEADLINE, Client
from forgeyard_runtimes.containerd.errors import Code, DaemonError, expecting, unsupported
from forgeyard_runtimes.containerd.messages import containers, content, diff, images, leases, snapshots, types
from forgeyard_runtimes.containerd.settings import ContainerdSettings, owned_by
from forgeyard_runtimes.containerd.sweep import remove_lease, remove_snapshot
from forgeyard_runtimes.engine_layers import image_removed, known_images, other_image
from forgeyard_runtimes.image_layout import Blob, LaidImage, read_image
from forgeyard_runtimes.labels import owner_labels
from forgeyard_runtimes.shielding import shielded
from forgeyard_runtimes.sweep import Leftover

_TRANSFER: Final = 600.0
"""Seconds for one blob to be written, or one layer to be unpacked."""
_NAMES: Final = "forgeyard.invalid/store@"


@dataclass(frozen=True, slots=True)
class _Image:
    """One image of a layout. `chain`: the chain id of each layer, lowest first."""

    laid: LaidImage
    chain: tuple[str, ...]


class ContainerdImages:
    """Images at one daemon."""

    def __init__(self, client: Client, settings: ContainerdSettings) -> None:
        self._client = client
        self._settings = settings
        # A hold comes before its attempt has a ledger, so it is alive as its executor is.
        self._labels = owner_labels(settings, settings.executor)
        self._tops: dict[str, str] = {}

    async def unpacked(self, plan: RootfsPlan, hold: str, layout: Path) -> RootfsPlan:
        """`plan` with the daemon's layers in the place of our own, kept until `release`. See EngineImages.

        :raises DaemonError: the daemon could not take or unpack it.
        :raises ExecutorError: PREPARE, for an image whose blobs are not there; UNSUPPORTED, for a snapshotter whose
            layers are no directories.
        """
        image = _with_chain(await asyncio.to_thread(read_image, layout, plan.identity))
        if not image.chain:
            return plan
        try:
            lowers = await self._lowers(image, hold)
        except BaseException:
            await shielded(self.release(hold))
            raise
        self._tops[hold] = image.chain[-1]
        return replace(plan, lowers=lowers, engine=EngineImage(image_name(plan.identity), hold))

    async def _lowers(self, image: _Image, hold: str) -> tuple[str, ...]:
        await self._hold(hold)
        mounts = await self._view(hold, image)
        if mounts is None:
            await self._put(hold, image)
            mounts = await self._view(hold, image)
        if mounts is None:
            raise image_removed("containerd", image_name(image.laid.manifest.digest))
        return lowers_of(mounts, self._settings.snapshotter)

    async def release(self, hold: str) -> None:
        """Hold nothing by that name any more. Repeating it is no error. The image stays, for the next."""
        await remove_snapshot(self._client, self._settings.snapshotter, _view_key(hold))
        await remove_lease(self._client, _lease(hold))
        self._tops.pop(hold, None)

    async def remove(self, manifest: str) -> None:
        """Delete an image at the daemon, whose collector takes what nobody holds. Not there is fine."""
        with expecting(Code.NOT_FOUND):
            request = images.DeleteImageRequest(name=image_name(manifest), sync=True)
            await self._client.call(calls.IMAGE_DELETE, request, deadline=_TRANSFER)

    # ---- the container made of it

    def describe(self, record: containers.Container, image: EngineImage) -> None:
        """Have a container's record say what its root is made of; the daemon's collector then spares that as well."""
        record.image = image.identity
        record.snapshotter = self._settings.snapshotter
        record.snapshot_key = _view_key(image.hold)

    async def check(self, record: containers.Container, image: EngineImage) -> None:
        """Whether the daemon has of a container what it was told, and still has the layers.

        :param record: the daemon's own account of it.
        :raises ExecutorError: LOST.
        """
        if (record.image, record.snapshot_key) != (image.identity, _view_key(image.hold)):
            raise other_image("containerd", image.identity, f"{record.image} at {record.snapshot_key}")
        request = snapshots.ListSnapshotsRequest(
            snapshotter=self._settings.snapshotter, filters=[f"name=={record.snapshot_key}"]
        )
        found = [
            info
            async for answer in self._client.stream(calls.SNAPSHOT_LIST, request, deadline=QUERY_DEADLINE)
            for info in answer.info
        ]
        if not found:
            raise image_removed("containerd", image.identity)
        if found[0].parent != (top := self._tops.get(image.hold, "")):
            raise other_image("containerd", top, found[0].parent)

    async def _hold(self, hold: str) -> None:
        """Without an expiry: whoever sweeps for dead executors ends it."""
        request = leases.CreateRequest(id=_lease(hold), labels=self._labels)
        with expecting(Code.ALREADY_EXISTS):
            await self._client.call(calls.LEASE_CREATE, request)

    async def _view(self, hold: str, image: _Image) -> Sequence[types.Mount] | None:
        """Mounts of a read-only view of the top layer; None when that is not there."""
        request = snapshots.PrepareSnapshotRequest(
            snapshotter=self._settings.snapshotter,
            key=_view_key(hold),
            parent=image.chain[-1],
            labels=self._labels,
        )
        with expecting(Code.NOT_FOUND):
            answer = await self._client.call(calls.SNAPSHOT_VIEW, request, lease=_lease(hold))
            return tuple(answer.mounts)
        return None

    # ---- from our store to theirs

    async def _put(self, hold: str, image: _Image) -> None:
        """Blobs first, children before those that refer to them; then snapshots; then a name."""
        laid = image.laid
        for layer, diff_id in zip(laid.layers, laid.diff_ids, strict=True):
            await self._write(hold, laid, layer, {"containerd.io/uncompressed": diff_id})
        top = {f"containerd.io/gc.ref.snapshot.{self._settings.snapshotter}": image.chain[-1]}
        await self._write(hold, laid, laid.config, top)
        references = {f"containerd.io/gc.ref.content.l.{n}": layer.digest for n, layer in enumerate(laid.layers)}
        references["containerd.io/gc.ref.content.config"] = laid.config.digest
        await self._write(hold, laid, laid.manifest, references)
        for number in range(len(laid.layers)):
            await self._unpack(hold, image, number)
        # By these labels a sweep knows it, when our store has forgotten the image.
        named = images.Image(
            name=image_name(laid.manifest.digest), target=_descriptor(laid.manifest), labels=self._labels
        )
        with expecting(Code.ALREADY_EXISTS):
            request = images.CreateImageRequest(image=named)
            await self._client.call(calls.IMAGE_CREATE, request, lease=_lease(hold))

    async def _write(self, hold: str, image: LaidImage, blob: Blob, labels: dict[str, str]) -> None:
        """A blob that is there is taken into the lease and not sent again."""
        if await self._is_there(hold, blob):
            return
        frames = _frames(_ingest(hold, blob), image, blob, labels)
        try:
            with expecting(Code.ALREADY_EXISTS):
                await self._client.exchange(calls.CONTENT_WRITE, frames, deadline=_TRANSFER, lease=_lease(hold))
        except DaemonError:
            # Another job may have brought it meanwhile. A daemon that ends the call for that while we still send is
            # an error of gRPC's own, in which what the daemon said is lost.
            if not await self._is_there(hold, blob):
                raise

    async def _is_there(self, hold: str, blob: Blob) -> bool:
        """Whether the daemon has a blob, which is then in the lease."""

        async def question() -> AsyncIterator[content.WriteContentRequest]:
            yield content.WriteContentRequest(
                action=content.STAT, ref=_ingest(hold, blob), total=blob.size, expected=blob.digest
            )

        try:
            await self._client.exchange(calls.CONTENT_WRITE, question(), deadline=_TRANSFER, lease=_lease(hold))
        except DaemonError as error:
            if error.code is not Code.ALREADY_EXISTS:
                raise
            return True
        return False

    async def _unpack(self, hold: str, image: _Image, number: int) -> None:
        """One layer on top of those below it; one that is there is not unpacked again.

        :raises ExecutorError: INTERNAL, when what came out is not what the image says.
        """
        name, lease, diff_id = image.chain[number], _lease(hold), image.laid.diff_ids[number]
        snapshotter, key = self._settings.snapshotter, f"extract-{os.urandom(8).hex()} {name}"
        prepare = snapshots.PrepareSnapshotRequest(
            snapshotter=snapshotter,
            key=key,
            parent=image.chain[number - 1] if number else "",
            labels={**self._labels, "containerd.io/snapshot.ref": name},
        )
        with expecting(Code.ALREADY_EXISTS):
            prepared = await self._client.call(calls.SNAPSHOT_PREPARE, prepare, lease=lease)
            apply = diff.ApplyRequest(diff=_descriptor(image.laid.layers[number]), mounts=prepared.mounts)
            applied = await self._client.call(calls.DIFF_APPLY, apply, deadline=_TRANSFER, lease=lease)
            if applied.applied.digest != diff_id:
                details = f"layer {number} is {applied.applied.digest}, the image says {diff_id}"
                brief = "containerd unpacked something else than the image"
                raise ExecutorError(ExecutorErrorKind.INTERNAL, "containerd_layer", brief, details=details)
            commit = snapshots.CommitSnapshotRequest(snapshotter=snapshotter, key=key, name=name)
            await self._client.call(calls.SNAPSHOT_COMMIT, commit, deadline=_TRANSFER, lease=lease)


async def sweep_images(client: Client, settings: ContainerdSettings) -> list[Leftover]:
    """Images that were put there for this state directory, and that its own store has forgotten since.

    :raises DaemonError: the daemon can't be asked.
    """
    if not settings.images:
        return []
    request = images.ListImagesRequest(filters=[owned_by(settings)])
    found = (await client.call(calls.IMAGE_LIST, request, patient=True)).images
    known = await asyncio.to_thread(known_images, settings.images) if found else frozenset()
    remove = ContainerdImages(client, settings).remove
    stale = [image.name.removeprefix(_NAMES) for image in found if image.name.startswith(_NAMES)]
    return [Leftover(digest, {}, partial(remove, digest)) for digest in stale if digest not in known]


def image_name(manifest: str) -> str:
    """What an image of ours is called at the daemon: a reference by digest, which nobody would pull by chance."""
    return f"{_NAMES}{manifest}"


def lowers_of(mounts: Sequence[types.Mount], snapshotter: str) -> tuple[str, ...]:
    """The directories behind a read-only view, topmost first.

    :raises ExecutorError: UNSUPPORTED.
    """
    (mount,) = mounts
    if mount.type == "bind":
        return (mount.source,)
    for option in mount.options:
        if mount.type == "overlay" and option.startswith("lowerdir="):
            return tuple(option.removeprefix("lowerdir=").split(":"))
    raise unsupported(
        "containerd_snapshotter", f"snapshots of {snapshotter} are no directories", "use overlayfs, or our own store"
    )


def _ingest(hold: str, blob: Blob) -> str:
    """What a blob is called while it is sent."""
    return f"{hold}-{blob.digest}"


def _lease(hold: str) -> str:
    return f"forgeyard-{hold}"


def _view_key(hold: str) -> str:
    return f"forgeyard-view-{hold}"


def _with_chain(laid: LaidImage) -> _Image:
    chain: list[str] = []
    for diff_id in laid.diff_ids:
        chain.append(chain_id(chain[-1] if chain else "", diff_id))
    return _Image(laid, tuple(chain))


def _descriptor(blob: Blob) -> types.Descriptor:
    return types.Descriptor(media_type=blob.media_type, digest=blob.digest, size=blob.size)


async def _frames(
    ref: str, image: LaidImage, blob: Blob, labels: dict[str, str]
) -> AsyncIterator[content.WriteContentRequest]:
    """A blob in pieces, and the order to keep it."""
    about = partial(content.WriteContentRequest, ref=ref, total=blob.size, expected=blob.digest)
    pieces, offset = image.pieces(blob), 0
    while data := await asyncio.to_thread(next, pieces, b""):
        yield about(action=content.WRITE, offset=offset, data=data)
        offset += len(data)
    yield about(action=content.COMMIT, offset=offset, labels=labels)
