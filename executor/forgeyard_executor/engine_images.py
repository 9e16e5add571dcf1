"""Images of jobs at the runtime's engine, where the operator's configuration has the engine unpack them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from forgeyard_executor.images import ReadyImage
from forgeyard_model.identity import SandboxId
from forgeyard_runtimes.contract import EngineImages
from forgeyard_runtimes.shielding import shielded


async def at_engine(images: Sequence[ReadyImage], engine: EngineImages) -> tuple[ReadyImage, ...]:
    """`images` on the engine's layers, in order. After a failure or a cancel none is held, there or here.

    :raises ForgeyardError: what the engine could not take.
    """
    makings = [asyncio.ensure_future(_put(image, engine)) for image in images]
    try:
        return tuple(await asyncio.gather(*makings))
    except BaseException:
        for making in makings:
            making.cancel()
        for ended in await shielded(asyncio.gather(*makings, return_exceptions=True)):
            if isinstance(ended, ReadyImage):
                await shielded(ended.let_go())
        for image in images:
            image.close()
        raise


async def _put(image: ReadyImage, engine: EngineImages) -> ReadyImage:
    hold = SandboxId.mint().value
    rootfs = await engine.unpacked(image.rootfs, hold, image.layout)
    if rootfs.engine is None:  # it has no layer
        return image
    return replace(image, rootfs=rootfs, release=partial(engine.release, hold))
