"""Tags become digests: by a lock file, or in the message of the refusal that wants one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from forgeyard_executor.images import ImageOptions, Images, full_reference
from forgeyard_model.errors import ForgeyardError, InvalidRequest

if TYPE_CHECKING:
    from forgeyard_oci.registry.budget import Budget

RESOLVE_TIME: Final = 5.0
"""Seconds that a refusal may spend on asking a registry for the digest it would rather see."""

PIN: Final = "@sha256:"

Wanted = tuple[str, str | None]
"""A reference as written, and the platform asked for."""


def is_pinned(reference: str) -> bool:
    """Whether `reference` names a digest; the grammar is checked where it is used."""
    return PIN in reference


async def locked(
    images: Images, wanted: Sequence[Wanted], options: ImageOptions, *, seconds: float | None = None
) -> Mapping[Wanted, str]:
    """The pinned form of each of `wanted`, by the lock of `options`; tags it lacks are resolved and added to it.

    One question to a registry for each tag that the lock lacks, none for the others.

    :raises InvalidRequest: for a damaged lock, or a tag that a frozen one lacks.
    :raises ForgeyardError: when a tag can't be resolved; the lock then stays as it was.
    """
    return await images.work(lambda budget: _locked(images, wanted, options, budget), seconds=seconds)


def _locked(images: Images, wanted: Sequence[Wanted], options: ImageOptions, budget: Budget) -> dict[Wanted, str]:
    from forgeyard_executor.image_lock import ImageLock, Key

    pinned = {item: item[0] for item in wanted if is_pinned(item[0])}
    tags: dict[Wanted, Key] = {
        item: (full_reference(item[0]), item[1] or "") for item in wanted if not is_pinned(item[0])
    }
    if options.lock is None or not tags:
        return pinned
    lock = ImageLock.read(options.lock)
    new: dict[Key, str] = {}
    for (reference, platform), key in tags.items():
        if key in lock.pins or key in new:
            continue
        if options.frozen:
            raise InvalidRequest("image", reference, f"is not in {options.lock}: run without --locked to add it")
        new[key] = images.resolve(reference, platform, budget)
    if new:
        # Another run may have pinned the same tag meanwhile: what stands in the file counts.
        lock = lock.add(new)
    return pinned | {item: lock.pins[key] for item, key in tags.items()}


async def with_digest(images: Images, refusal: InvalidRequest, reference: str, platform: str | None) -> InvalidRequest:
    """The refusal of a bare tag, with the digest that the tag names now, if its registry says so soon."""
    try:
        async with asyncio.timeout(RESOLVE_TIME):
            pinned = await images.work(lambda budget: images.resolve(reference, platform, budget), seconds=RESOLVE_TIME)
    except TimeoutError:
        why = f"its registry did not answer in {RESOLVE_TIME:g}s"
    except ForgeyardError as error:
        why = error.brief
    else:
        return InvalidRequest("image", reference, f"{refusal.cure}: it is {pinned} now")
    ask = f"`forgeyard image resolve {reference}` prints the pinned form"
    return InvalidRequest("image", reference, f"{refusal.cure}; {ask} (asked just now: {why})")
