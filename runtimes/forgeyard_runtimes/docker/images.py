"""Images of our store in Docker's: loaded once, pinned by their config's digest, and unpacked by its storage driver.

A repository digest is lost in a load; the digest of the config is the image's id, and names every layer. A container is
made of that id, so that Docker keeps the image as long as the job. Its root is a mount of the executor's on Docker's
own layers, bound over the image's entries: Docker bounds nothing that is written to a layer of its own.
"""

from __future__ import annotations

import asyncio
import posixpath
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from docker import APIClient
from docker.errors import NotFound

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind
from forgeyard_model.plan import EngineImage, RootfsPlan
from forgeyard_runtimes.docker.capabilities import maps_ids
from forgeyard_runtimes.docker.client import DockerClient, create_container, load_image
from forgeyard_runtimes.docker.errors import NotThere
from forgeyard_runtimes.engine_layers import HeldLayers, image_removed, known_images, layer_directories, other_image
from forgeyard_runtimes.image_archive import docker_archive, store_tag, tag_prefix
from forgeyard_runtimes.image_layout import LaidImage, read_image
from forgeyard_runtimes.sweep import Leftover

_TRANSFER: Final = 600.0
"""Seconds for one image to be loaded and unpacked."""
_ZSTD: Final = 23
"""The first release of Docker that reads layers compressed with zstd."""


class DockerImages:
    """Images at one daemon.

    :param version: of the daemon.
    """

    def __init__(self, client: DockerClient, version: str) -> None:
        self._client = client
        self._version = version
        self._loading = asyncio.Lock()
        self._held: dict[str, HeldLayers] = {}

    async def unpacked(self, plan: RootfsPlan, hold: str, layout: Path) -> RootfsPlan:
        """`plan` on Docker's layers. See EngineImages.

        :raises ExecutorError: UNSUPPORTED for an image that this Docker can't read; what Docker says; LOST, when it is
            removed meanwhile.
        """
        image = await asyncio.to_thread(read_image, layout, plan.identity)
        if not image.layers:
            return plan
        self._refuse_compression(image)
        async with self._loading:
            found = await self._client.change(
                partial(_present, image=image, tag=store_tag(self._client.settings.state, plan.identity)),
                "load an image",
                deadline=_TRANSFER,
            )
        identity = image.config.digest
        if (found["Id"], tuple(found["RootFS"]["Layers"])) != (identity, image.diff_ids):
            raise other_image("docker", identity, found["Id"])
        lowers = layer_directories(found["GraphDriver"], "docker")
        try:
            self._held[hold] = await asyncio.to_thread(HeldLayers.open, lowers)
        except OSError as error:
            raise image_removed("docker", identity) from error
        return replace(plan, lowers=lowers, engine=EngineImage(identity, hold, _volumes(image)))

    async def release(self, hold: str) -> None:
        """See EngineImages. Between the load and the container nothing at Docker is held; see HeldLayers."""
        held = self._held.pop(hold, None)
        if held is not None:
            held.close()

    def create(self, api: APIClient, request: Mapping[str, Any], name: str, image: EngineImage) -> dict[str, Any]:
        """Make a container of `image`, and be sure that it is one of it. Blocking.

        :raises ExecutorError: LOST: the image is gone, or is another one. The container may be there then.
        """
        try:
            answer = create_container(api, {**request, "Healthcheck": {"Test": ["NONE"]}}, name)
            found = api.inspect_container(answer["Id"])
        except NotFound as error:
            raise image_removed("docker", image.identity) from error
        if found["Image"] != image.identity:
            raise other_image("docker", image.identity, str(found["Image"]))
        # From here on the container keeps the image. Its layers may have been others before.
        held = self._held.get(image.hold)
        if held is None or not held.same():
            raise image_removed("docker", image.identity)
        return answer

    def _refuse_compression(self, image: LaidImage) -> None:
        release = self._version.partition(".")[0]
        if any(layer.media_type.endswith("zstd") for layer in image.layers) and int(release) < _ZSTD:
            raise ExecutorError(
                ExecutorErrorKind.UNSUPPORTED,
                "docker_zstd",
                f"Docker {self._version} can't read the image's layers (mediaType +zstd)",
                resolution=f'use Docker {_ZSTD} or later, or rootfs = "own" for docker',
            )


def _present(api: Any, image: LaidImage, tag: str) -> dict[str, Any]:
    """What Docker has of the image, which is loaded if it lacks it. Blocking."""
    identity = image.config.digest
    found = load_image(api, identity, docker_archive(image, tag))
    try:
        return found or dict(api.inspect_image(identity))
    except NotFound as error:
        raise image_removed("docker", identity) from error


def _volumes(image: LaidImage) -> tuple[str, ...]:
    return tuple(sorted({posixpath.normpath(f"/{path.strip('/')}") for path in image.volumes}))


def volumes_to_cover(spec: Mapping[str, Any], image: EngineImage | None) -> tuple[str, ...]:
    """Places where Docker would put an unbounded volume of its own, unless something is mounted exactly there.

    :raises SandboxError: UNSUPPORTED_ISOLATION, for one that lies in a directory of the sandbox's own.
    """
    taken = [str(mount["destination"]) for mount in spec["mounts"]]
    wanted = [path for path in (image.volumes if image is not None else ()) if path not in taken]
    inside = [path for path in wanted if path == "/" or any(path.startswith(f"{where}/") for where in taken)]
    if inside:
        raise SandboxError(
            SandboxErrorKind.UNSUPPORTED_ISOLATION,
            "docker_cannot_carry",
            f"Docker can't carry {', '.join(f'image.Volumes.{path}' for path in inside)}",
            details="it would mount a volume of its own there, which nothing bounds",
            resolution='use rootfs = "own" for docker, another runtime, or an image without that volume',
        )
    return tuple(wanted)


def refuse_storage(info: Mapping[str, Any]) -> None:
    """Whether jobs can be put on this daemon's own images.

    :raises ExecutorError: UNSUPPORTED, naming what is in the way.
    """
    if info.get("Driver") != "overlay2":
        what = f"Docker keeps its images with {info.get('Driver')}, whose layers are no directories"
    elif maps_ids(info):
        what = "Docker moves the owners of its images into a range of ids (userns-remap)"
    else:
        return
    raise ExecutorError(ExecutorErrorKind.UNSUPPORTED, "docker_rootfs", what, resolution='write rootfs.docker = "own"')


async def sweep_images(client: DockerClient) -> list[Leftover]:
    """Images that were loaded for this state directory, and that its own store has forgotten since.

    :raises ForgeyardError: the daemon can't be asked.
    """
    settings = client.settings
    if not settings.images:
        return []
    prefix = tag_prefix(settings.state)
    entries = await client.ask(lambda api: api.images(name=prefix.partition(":")[0]), "list the images")
    tags = [tag for entry in entries for tag in entry.get("RepoTags") or () if tag.startswith(prefix)]
    known = await asyncio.to_thread(known_images, settings.images) if tags else frozenset()
    stale = [tag for tag in tags if f"sha256:{tag.removeprefix(prefix)}" not in known]
    return [Leftover(tag, {}, partial(_remove, client, tag)) for tag in stale]


async def _remove(client: DockerClient, tag: str) -> None:
    """The name, and the image with its last one."""
    try:
        await client.change(lambda api: api.remove_image(tag), f"remove {tag}")
    except NotThere:
        return
