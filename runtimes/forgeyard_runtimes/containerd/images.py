"""Images of our store put into containerd and unpacked by its snapshotter, for those who want one copy on a host.

What comes back is the unpacked layers, as paths. The root itself is put together from them as from our own store's:
containerd 1.6 can't give a snapshot the ids of a user namespace without a copy, nor bound what a job writes.

A lease per sandbox keeps what it uses from the daemon's garbage collector, also when somebody deletes the image.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.plan import RootfsPlan
from forgeyard_oci.layers import chain_id
from forgeyard_runtimes.containerd import calls
from forgeyard_runtimes.containerd.client import Client
from forgeyard_runtimes.containerd.errors import Code, expecting, unsupported
from forgeyard_runtimes.containerd.messages import content, diff, images, leases, snapshots, types
from forgeyard_runtimes.containerd.settings import ContainerdSettings, owner_labels
from forgeyard_runtimes.containerd.sweep import remove_lease, remove_snapshot

_FRAME: Final = 1 << 20
_TRANSFER: Final = 600.0
"""Seconds for one blob to be written, or one layer to be unpacked."""


@dataclass(frozen=True, slots=True)
class _Image:
    """One image of a layout. `chain`: the chain id of each layer, lowest first."""

    layout: Path
    manifest: types.Descriptor
    config: types.Descriptor
    layers: tuple[types.Descriptor, ...]
    diff_ids: tuple[str, ...]
    chain: tuple[str, ...]


class ContainerdImages:
    """Images at one daemon."""

    def __init__(self, client: Client, settings: ContainerdSettings) -> None:
        self._client = client
        self._settings = settings

    async def unpacked(self, plan: RootfsPlan, sandbox: str, layout: Path, manifest: str) -> RootfsPlan:
        """`plan` with the daemon's layers in the place of our own. Held for `sandbox` until `release`.

        :param layout: an OCI layout with the image, whose blobs were verified.
        :param manifest: digest of the image's manifest.
        :raises DaemonError: the daemon could not take or unpack it.
        :raises ExecutorError: UNSUPPORTED, for a snapshotter whose layers are no directories.
        """
        image = await asyncio.to_thread(_read_image, layout, manifest)
        if not image.chain:
            return plan
        await self._hold(sandbox)
        mounts = await self._view(sandbox, image)
        if mounts is None:
            await self._put(sandbox, image)
            mounts = await self._view(sandbox, image)
        if mounts is None:
            brief = "containerd lost an image while it was unpacked"
            raise ExecutorError(ExecutorErrorKind.LOST, "containerd_image_lost", brief, details=manifest)
        return replace(plan, lowers=lowers_of(mounts, self._settings.snapshotter))

    async def release(self, sandbox: str) -> None:
        """Hold nothing for a sandbox any more. Repeating it is no error. The image stays, for the next."""
        await remove_snapshot(self._client, self._settings.snapshotter, _view_key(sandbox))
        await remove_lease(self._client, _lease(sandbox))

    async def remove(self, manifest: str) -> None:
        """Delete an image at the daemon, whose collector takes what nobody holds. Not there is fine."""
        with expecting(Code.NOT_FOUND):
            request = images.DeleteImageRequest(name=image_name(manifest), sync=True)
            await self._client.call(calls.IMAGE_DELETE, request, deadline=_TRANSFER)

    async def _hold(self, sandbox: str) -> None:
        """Without an expiry: whoever sweeps for dead executors ends it."""
        request = leases.CreateRequest(id=_lease(sandbox), labels=owner_labels(self._settings, sandbox))
        with expecting(Code.ALREADY_EXISTS):
            await self._client.call(calls.LEASE_CREATE, request)

    async def _view(self, sandbox: str, image: _Image) -> Sequence[types.Mount] | None:
        """Mounts of a read-only view of the top layer; None when that is not there."""
        request = snapshots.PrepareSnapshotRequest(
            snapshotter=self._settings.snapshotter,
            key=_view_key(sandbox),
            parent=image.chain[-1],
            labels=owner_labels(self._settings, sandbox),
        )
        with expecting(Code.NOT_FOUND):
            answer = await self._client.call(calls.SNAPSHOT_VIEW, request, lease=_lease(sandbox))
            return tuple(answer.mounts)
        return None

    # ---- from our store to theirs

    async def _put(self, sandbox: str, image: _Image) -> None:
        """Blobs first, children before those that refer to them; then snapshots; then a name."""
        for layer, diff_id in zip(image.layers, image.diff_ids, strict=True):
            await self._write(sandbox, image, layer, {"containerd.io/uncompressed": diff_id})
        top = {f"containerd.io/gc.ref.snapshot.{self._settings.snapshotter}": image.chain[-1]}
        await self._write(sandbox, image, image.config, top)
        references = {f"containerd.io/gc.ref.content.l.{n}": layer.digest for n, layer in enumerate(image.layers)}
        references["containerd.io/gc.ref.content.config"] = image.config.digest
        await self._write(sandbox, image, image.manifest, references)
        for number in range(len(image.layers)):
            await self._unpack(sandbox, image, number)
        named = images.Image(name=image_name(image.manifest.digest), target=image.manifest)
        with expecting(Code.ALREADY_EXISTS):
            request = images.CreateImageRequest(image=named)
            await self._client.call(calls.IMAGE_CREATE, request, lease=_lease(sandbox))

    async def _write(self, sandbox: str, image: _Image, blob: types.Descriptor, labels: dict[str, str]) -> None:
        """A blob that is there is taken into the lease and not sent again."""
        frames = _frames(f"{sandbox}-{blob.digest}", _blob(image.layout, blob.digest), blob, labels)
        with expecting(Code.ALREADY_EXISTS):
            await self._client.exchange(calls.CONTENT_WRITE, frames, deadline=_TRANSFER, lease=_lease(sandbox))

    async def _unpack(self, sandbox: str, image: _Image, number: int) -> None:
        """One layer on top of those below it; one that is there is not unpacked again.

        :raises ExecutorError: INTERNAL, when what came out is not what the image says.
        """
        name, lease = image.chain[number], _lease(sandbox)
        snapshotter, key = self._settings.snapshotter, f"extract-{os.urandom(8).hex()} {name}"
        prepare = snapshots.PrepareSnapshotRequest(
            snapshotter=snapshotter,
            key=key,
            parent=image.chain[number - 1] if number else "",
            labels={**owner_labels(self._settings, sandbox), "containerd.io/snapshot.ref": name},
        )
        with expecting(Code.ALREADY_EXISTS):
            prepared = await self._client.call(calls.SNAPSHOT_PREPARE, prepare, lease=lease)
            apply = diff.ApplyRequest(diff=image.layers[number], mounts=prepared.mounts)
            applied = await self._client.call(calls.DIFF_APPLY, apply, deadline=_TRANSFER, lease=lease)
            if applied.applied.digest != image.diff_ids[number]:
                details = f"layer {number} is {applied.applied.digest}, the image says {image.diff_ids[number]}"
                brief = "containerd unpacked something else than the image"
                raise ExecutorError(ExecutorErrorKind.INTERNAL, "containerd_layer", brief, details=details)
            commit = snapshots.CommitSnapshotRequest(snapshotter=snapshotter, key=key, name=name)
            await self._client.call(calls.SNAPSHOT_COMMIT, commit, deadline=_TRANSFER, lease=lease)


def image_name(manifest: str) -> str:
    """What an image of ours is called at the daemon: a reference by digest, which nobody would pull by chance."""
    return f"forgeyard.invalid/store@{manifest}"


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


def _lease(sandbox: str) -> str:
    return f"forgeyard-{sandbox}"


def _view_key(sandbox: str) -> str:
    return f"forgeyard-view-{sandbox}"


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _read_image(layout: Path, digest: str) -> _Image:
    raw = _blob(layout, digest).read_bytes()
    manifest: dict[str, Any] = json.loads(raw)
    config = json.loads(_blob(layout, manifest["config"]["digest"]).read_bytes())
    diff_ids = tuple(config["rootfs"]["diff_ids"])
    chain: list[str] = []
    for diff_id in diff_ids:
        chain.append(chain_id(chain[-1] if chain else "", diff_id))
    media_type = manifest.get("mediaType", "application/vnd.oci.image.manifest.v1+json")
    return _Image(
        layout=layout,
        manifest=types.Descriptor(media_type=media_type, digest=digest, size=len(raw)),
        config=_descriptor(manifest["config"]),
        layers=tuple(_descriptor(layer) for layer in manifest["layers"]),
        diff_ids=diff_ids,
        chain=tuple(chain),
    )


def _descriptor(words: dict[str, Any]) -> types.Descriptor:
    return types.Descriptor(media_type=words["mediaType"], digest=words["digest"], size=words["size"])


async def _frames(
    ref: str, path: Path, blob: types.Descriptor, labels: dict[str, str]
) -> AsyncIterator[content.WriteContentRequest]:
    """A blob in pieces, and the order to keep it."""
    about = partial(content.WriteContentRequest, ref=ref, total=blob.size, expected=blob.digest)
    file = await asyncio.to_thread(path.open, "rb")
    offset = 0
    try:
        while data := await asyncio.to_thread(file.read, _FRAME):
            yield about(action=content.WRITE, offset=offset, data=data)
            offset += len(data)
    finally:
        file.close()
    yield about(action=content.COMMIT, offset=offset, labels=labels)
