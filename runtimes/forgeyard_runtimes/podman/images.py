"""Images of our store in Podman's: loaded once, named by the id that is their config's digest, unpacked by its storage.

A container is made of that id, so that Podman keeps the image as long as the job. Its root is a mount of the
executor's on Podman's own layers, bound over the image's entries: Podman bounds nothing that is written to a layer of
its own.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from forgeyard_model.errors import ExecutorError
from forgeyard_model.plan import EngineImage, RootfsPlan
from forgeyard_runtimes.engine_layers import HeldLayers, image_removed, known_images, layer_directories, other_image
from forgeyard_runtimes.image_archive import REPOSITORY, oci_archive, store_tag, tag_prefix
from forgeyard_runtimes.image_layout import LaidImage, read_image
from forgeyard_runtimes.podman.client import PodmanClient
from forgeyard_runtimes.podman.errors import NotThere, not_understood, unsupported
from forgeyard_runtimes.podman.settings import PodmanSettings
from forgeyard_runtimes.root_parts import make_mount_points, open_root, parts_of
from forgeyard_runtimes.sweep import Leftover

_TRANSFER: Final = 600.0
"""Seconds for one image to be loaded and unpacked."""
_ROOT_FLAGS: Final = ("nosuid", "nodev")
_OWN_FILES: Final = ("/etc/hostname", "/etc/hosts", "/etc/resolv.conf", "/run/.containerenv")
"""What Podman mounts by itself, where nothing else is."""


class PodmanImages:
    """Images at one service."""

    def __init__(self, client: PodmanClient, settings: PodmanSettings) -> None:
        self._client = client
        self._settings = settings
        self._loading = asyncio.Lock()
        self._held: dict[str, HeldLayers] = {}

    async def unpacked(self, plan: RootfsPlan, hold: str, layout: Path) -> RootfsPlan:
        """`plan` on Podman's layers. See EngineImages.

        :raises ExecutorError: what Podman says; LOST, when the image is removed meanwhile.
        """
        image = await asyncio.to_thread(read_image, layout, plan.identity)
        if not image.layers:
            return plan
        async with self._loading:
            found = await self._present(image)
        identity = image.config.digest
        try:
            is_it = (f"sha256:{found['Id']}", tuple(found["RootFS"]["Layers"])) == (identity, image.diff_ids)
            lowers = layer_directories(found["GraphDriver"], "podman")
        except (KeyError, TypeError) as error:
            raise not_understood("image", found) from error
        if not is_it:
            raise other_image("podman", identity, str(found["Id"]))
        try:
            self._held[hold] = await asyncio.to_thread(HeldLayers.open, lowers)
        except OSError as error:
            raise image_removed("podman", identity) from error
        return replace(plan, lowers=lowers, engine=EngineImage(identity, hold))

    async def _present(self, image: LaidImage) -> Any:
        """What Podman has of the image, which is loaded if it lacks it."""
        what = f"images/{_hex(image.config.digest)}/json"
        try:
            return await self._client.call("GET", what)
        except NotThere:
            archive = oci_archive(image, store_tag(self._settings.state, image.manifest.digest))
            await self._client.run(lambda: self._client.upload_now("images/load", archive, _TRANSFER))
        try:
            return await self._client.call("GET", what)
        except NotThere as error:
            raise image_removed("podman", image.config.digest) from error

    async def release(self, hold: str) -> None:
        """See EngineImages. Between the load and the container nothing at Podman is held; see HeldLayers."""
        held = self._held.pop(hold, None)
        if held is not None:
            held.close()

    async def has(self, image: EngineImage) -> bool:
        """Whether Podman still has it."""
        try:
            await self._client.call("GET", f"images/{_hex(image.identity)}/json")
        except NotThere:
            return False
        return True

    async def check(self, name: str, image: EngineImage) -> None:
        """Whether a container is made of `image`, and of the layers that its root is mounted from.

        :raises ExecutorError: LOST; UNSUPPORTED, where Podman would copy the image for the container's range of ids.
        """
        found = await self._client.call("GET", f"containers/{name}/json")
        try:
            identity, graph = f"sha256:{found['Image']}", found["GraphDriver"]["Data"]
            below = str(graph["LowerDir"]).split(":")
        except (KeyError, TypeError) as error:
            raise not_understood("inspect", found) from error
        if identity != image.identity:
            raise other_image("podman", image.identity, identity)
        # From here on the container keeps the image. Its layers may have been others before.
        held = self._held.get(image.hold)
        if held is None or not held.same():
            raise image_removed("podman", image.identity)
        if tuple(await asyncio.to_thread(_real, below)) != held.paths:
            raise _copies(image.identity)


def on_image(body: Mapping[str, Any], image: EngineImage, spec: Mapping[str, Any]) -> dict[str, Any]:
    """A request for a container on our root as one for a container of `image`, with the parts of that root bound on it.

    Podman mounts ``/`` in no certain order among the other places at the top, so not the root as one. Blocking.

    :param spec: the bundle's config.json.
    :raises SandboxError: INVALID_FILESYSTEM_PLAN or MOUNT_FAILED.
    """
    path, access = str(body["rootfs"]), "ro" if spec["root"].get("readonly") else "rw"
    root = open_root(path)
    try:
        make_mount_points(root, spec, _OWN_FILES)
        parts = parts_of(root, spec)
    finally:
        os.close(root)
    options = ["bind", access, "private", *_ROOT_FLAGS]
    binds = [_bind(path, name, options) for name in parts]
    rest = {name: value for name, value in body.items() if not name.startswith("rootfs")}
    return {
        **rest,
        "image": _hex(image.identity),
        # Both, since the image's own stand in for what is left empty.
        "entrypoint": body["command"][:1],
        "command": body["command"][1:],
        # What is written at its top would go to a layer of Podman's.
        "read_only_filesystem": True,
        "mounts": [*binds, *body["mounts"]],
    }


def _bind(root: str, name: str, options: Sequence[str]) -> dict[str, Any]:
    return {"destination": f"/{name}", "type": "bind", "source": f"{root}/{name}", "options": list(options)}


def root_folded(effective: Mapping[str, Any], intended: Mapping[str, Any]) -> dict[str, Any]:
    """What Podman applied, with the parts of our root as that root, if all are there with its flags. Blocking.

    :param intended: the bundle's config.json.
    :raises SandboxError: the root can't be looked at.
    """
    path = str(intended["root"]["path"])
    if effective["root"].get("path") == path:
        return dict(effective)
    root = open_root(path)
    try:
        wanted = {f"{path}/{name}": f"/{name}" for name in parts_of(root, intended)}
    finally:
        os.close(root)
    needs = {*_ROOT_FLAGS, *(["ro"] if intended["root"].get("readonly") else [])}
    parts = [
        mount
        for mount in effective["mounts"]
        if wanted.get(mount.get("source", "")) == mount["destination"] and needs <= {*mount.get("options", ())}
    ]
    rest = [mount for mount in effective["mounts"] if mount not in parts]
    if len(parts) != len(wanted) or not effective["root"].get("readonly"):
        return dict(effective)
    return {**effective, "mounts": rest, "root": {**effective["root"], "path": path}}


async def refuse_storage(client: PodmanClient) -> None:
    """Whether jobs can be put on this service's own images.

    :raises ExecutorError: UNSUPPORTED, naming what is in the way.
    """
    answer = await client.call("GET", "info")
    try:
        driver = answer["store"]["graphDriverName"]
    except (KeyError, TypeError) as error:
        raise not_understood("info", answer) from error
    if driver != "overlay":
        what = f"Podman keeps its images with {driver}, whose layers are no directories"
        raise unsupported("podman_rootfs", what, 'write rootfs.podman = "own"')


def _real(paths: Sequence[str]) -> list[str]:
    return [os.path.realpath(path) for path in paths]


def _copies(identity: str) -> ExecutorError:
    return unsupported(
        "podman_rootfs",
        "Podman can't give the image the ids of a user namespace without a copy (linux.uidMappings)",
        'write rootfs.podman = "own", or use a storage of Podman\'s that has ID-mapped mounts',
        details=identity,
    )


async def sweep_images(client: PodmanClient, settings: PodmanSettings) -> list[Leftover]:
    """Images that were loaded for this state directory, and that its own store has forgotten since.

    :raises ForgeyardError: the service can't be asked.
    """
    if not settings.images:
        return []
    query = {"filters": json.dumps({"reference": [REPOSITORY]})}
    entries = await client.call("GET", "images/json", query=query) or ()
    prefix = tag_prefix(settings.state)
    try:
        tags = [tag for entry in entries for tag in entry.get("Names") or () if tag.startswith(prefix)]
    except (TypeError, AttributeError) as error:
        raise not_understood("images", entries) from error
    known = await asyncio.to_thread(known_images, settings.images) if tags else frozenset()
    stale = [tag for tag in tags if f"sha256:{tag.removeprefix(prefix)}" not in known]
    return [Leftover(tag, {}, partial(_remove, client, tag)) for tag in stale]


async def _remove(client: PodmanClient, tag: str) -> None:
    """The name, and the image with its last one."""
    try:
        await client.call("DELETE", f"images/{quote(tag, safe='')}")
    except NotThere:
        return


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
