"""Every test image by its name, and where built ones are kept between runs."""

from __future__ import annotations

import inspect
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import crafted_images
from build import BUSYBOX, busybox_layout, cached, sha256
from crafted_images import CRAFTED, HOSTILE
from debian_images import RECIPES, CannotBuildError, debian_layout, service_layout, variant_layout

Built = tuple[Path, str]
HEALTHCHECK = {
    # Docker writes times as nanoseconds.
    "Healthcheck": {"Test": ["CMD-SHELL", "pg_isready -q -h 127.0.0.1"], "Interval": 500_000_000, "Retries": 60}
}


def cache_dir() -> Path:
    """Where images are kept between runs."""
    fallback = Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or fallback) / "forgeyard-tests"


def _crafted_layout(cache: Path, name: str) -> Built:
    program = Path(BUSYBOX).read_bytes() if BUSYBOX else b""
    # The large one takes seconds: built anew when its own function changes, not when a neighbour does.
    own = (crafted_images.large, crafted_images._large_layer) if name == "large" else (crafted_images,)
    text = "".join(map(inspect.getsource, own)).encode()
    recipe = sha256(text + inspect.getsource(sys.modules[cached.__module__]).encode() + program)
    return cached(cache, name, recipe, lambda path: crafted_images.crafted(name, path))


IMAGES: dict[str, Callable[[Path], Built]] = {
    "busybox": busybox_layout,
    "debian": debian_layout,
    **{name: lambda cache, name=name: service_layout(cache, name) for name in RECIPES},
    "postgres-health": lambda cache: variant_layout(cache, "postgres-health", "postgres", HEALTHCHECK),
    **{name: lambda cache, name=name: _crafted_layout(cache, name) for name in (*CRAFTED, *HOSTILE)},
}
"""Name -> what builds it in a cache, or finds it there: its layout, and the digest to ask it for."""

SLOW = frozenset({"debian", "postgres-health", *RECIPES})
"""Images whose first build takes a mirror and up to a minute."""


def image(name: str, cache: Path | None = None) -> Built:
    """The layout of an image and its digest, built when it isn't there yet.

    :raises CannotBuildError: no root, no tool or no mirror.
    :raises FileNotFoundError: no busybox.
    """
    return IMAGES[name](cache or cache_dir())


def have(name: str) -> bool:
    """Whether some build of this image is in the cache. It may be of an older recipe: a hint, no promise."""
    return any(cache_dir().glob(f"{name}-{'?' * 16}/built-digest"))


def build_all() -> None:
    """Build every image that isn't there yet, two at a time, and say how long each took.

    :raises CannotBuildError: as `image`; the first one that failed.
    """
    image("debian")
    with ThreadPoolExecutor(2) as pool:
        # The longest first, so that none of them is left alone at the end.
        for line in pool.map(_timed, sorted(IMAGES, key=lambda name: name not in ("rabbitmq", "postgres"))):
            if line:
                print(line, flush=True)


def _timed(name: str) -> str:
    clock = time.monotonic()
    path, _ = image(name)
    took = time.monotonic() - clock
    return f"{name:18} {took:5.1f} s   {path}" if took > 1 else ""


def main(arguments: Sequence[str]) -> None:
    """The command line of build.py."""
    match arguments:
        case ["list"]:
            print("\n".join(IMAGES))
        case ["all"]:
            _or_exit(build_all)
        case [name, directory] if name in IMAGES:
            _or_exit(lambda: print(f"oci:{directory}@{_copy(name, Path(directory))}"))
        case _:
            raise SystemExit("usage: build.py NAME DIRECTORY | all | list   (list prints the names)")


def _copy(name: str, target: Path) -> str:
    path, digest = image(name)
    if target.exists():
        raise SystemExit(f"{target} exists already: name a directory that does not")
    shutil.copytree(path, target, ignore=shutil.ignore_patterns("built-digest"))
    return digest


def _or_exit(work: Callable[[], None]) -> None:
    try:
        work()
    except (CannotBuildError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from error
