"""Caches between jobs: what a job asks for, and what came of it. How they are kept is the executor's business."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from posixpath import normpath
from typing import Final

from forgeyard_model.errors import InvalidRequest

MOST_KEY: Final = 512
"""Characters."""
_MOST_PATH: Final = 4000
_MOST_CACHES: Final = 64
# What the sandbox itself has its place in: a cache there would cover it, or be covered. The last holds the outputs.
_RESERVED: Final = ("/proc", "/sys", "/dev", "/.forgeyard", "/etc", "/work/source", "/work/output")
_MOUNTED: Final = ("/work/build", "/work/tmp", "/home/forgeyard", "/tmp", "/toolchains")  # noqa: S108  in the sandbox


class CacheMode(StrEnum):
    """ro: the job reads what is there. rw: what it leaves is kept for the next job when it succeeds."""

    RO = "ro"
    RW = "rw"


@dataclass(frozen=True, slots=True)
class CacheRequest:
    """One cache of a job: the directory kept under `key`, shown at `path` in the sandbox.

    The key says which of a tenant's caches; it never says whose, and is never part of a path on the host.
    """

    key: str
    path: str
    mode: CacheMode = CacheMode.RW


@dataclass(frozen=True, slots=True)
class CacheReport:
    """What became of one cache.

    :param hit: there was something under the key.
    :param saved: what the job left was kept. `why`: why not, or empty.
    :param bytes: size of what was shown, or saved.
    :param notes: entries that were left out, or kept without what they may not have.
    """

    key: str
    path: str
    mode: CacheMode
    hit: bool
    saved: bool = False
    why: str = ""
    bytes: int = 0
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """``cache pip: hit, saved``."""
        kept = ", saved" if self.saved else (f", not saved: {self.why}" if self.mode is CacheMode.RW else "")
        return f"cache {self.key}: {'hit' if self.hit else 'miss'}{kept}"


def key_cure(key: str) -> str:
    """What is wrong with `key`; empty when nothing is."""
    if not key or len(key) > MOST_KEY or key != key.strip() or not key.isprintable():
        return f"write 1 to {MOST_KEY} printable characters, with no space at either end"
    return ""


def path_cure(path: str) -> str:
    """What is wrong with `path` as the place of a cache; empty when nothing is."""
    if not path.startswith("/") or ".." in path.split("/"):
        return "write an absolute path inside the sandbox, without '..'"
    if not path.isprintable() or len(path) > _MOST_PATH or any(len(part.encode()) > 255 for part in path.split("/")):
        return "write a path of printable characters, no longer than Linux takes"
    where = "/" + normpath(path).lstrip("/")
    if any(_within(where, taken) or _within(taken, where) for taken in _RESERVED):
        return "belongs to the sandbox itself: choose another path"
    if any(_within(taken, where) for taken in _MOUNTED):
        return "would hide directories of the sandbox: choose a path further down"
    return ""


def _within(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def parse_cache(text: str, *, field: str = "--cache") -> CacheRequest:
    """Read ``KEY=PATH[:ro|rw]``. The path starts after the last ``=/``, so that a key may hold ``=``.

    :raises InvalidRequest: naming `field`.
    """
    key, found, rest = text.rpartition("=/")
    if not found:
        raise InvalidRequest(field, text, "write KEY=PATH, KEY=PATH:ro or KEY=PATH:rw, with an absolute PATH")
    path, colon, mode = rest.rpartition(":")
    if colon and mode in tuple(CacheMode):
        return _checked(CacheRequest(key, f"/{path}", CacheMode(mode)), field)
    return _checked(CacheRequest(key, f"/{rest}"), field)


def _checked(cache: CacheRequest, field: str) -> CacheRequest:
    for value, cure in ((cache.key, key_cure(cache.key)), (cache.path, path_cure(cache.path))):
        if cure:
            raise InvalidRequest(field, value, cure)
    return cache


def checked_caches(
    caches: Iterable[CacheRequest], *, taken: Iterable[str] = (), field: str = "caches"
) -> tuple[CacheRequest, ...]:
    """`caches` with their paths in normal form.

    :param taken: other places that a request mounts something at.
    :raises InvalidRequest: for a key or a path that can't be used, a key that stands twice, or paths that overlap.
    """
    found: list[CacheRequest] = []
    places = list(taken)
    for index, cache in enumerate(caches):
        where = f"{field}[{index}]"
        for name, value, cure in (("key", cache.key, key_cure(cache.key)), ("path", cache.path, path_cure(cache.path))):
            if cure:
                raise InvalidRequest(f"{where}.{name}", value, cure)
        path = "/" + normpath(cache.path).lstrip("/")
        if any(cache.key == other.key for other in found):
            raise InvalidRequest(f"{where}.key", cache.key, "stands twice in caches: keep one")
        other = next((place for place in places if _within(place, path) or _within(path, place)), None)
        if other is not None:
            raise InvalidRequest(f"{where}.path", cache.path, f"overlaps {other}: choose a path apart from it")
        places.append(path)
        found.append(CacheRequest(cache.key, path, CacheMode(cache.mode)))
    if len(found) > _MOST_CACHES:
        raise InvalidRequest(field, len(found), f"a job takes {_MOST_CACHES} caches at the most")
    return tuple(found)
