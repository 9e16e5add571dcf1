"""Copies a tree into a bundle's id range: what an ID-mapped mount does for a job, done to the files themselves."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

from forgeyard_executor.planning import UID_COUNT


def copy_path(source: Path, target: Path, base: int) -> None:
    """Copy a file or a tree, with owners moved into the range that starts at `base`."""
    if source.is_dir():
        copy_tree(source, target, base)
        return
    info = source.stat()
    shutil.copyfile(source, target)
    os.chown(target, base + _swapped(info.st_uid, (0, 0)), base + _swapped(info.st_gid, (0, 0)))
    target.chmod(stat.S_IMODE(info.st_mode))


def copy_tree(
    source: Path, target: Path, base: int, *, swap: tuple[tuple[int, int], tuple[int, int]] = ((0, 0), (0, 0))
) -> None:
    """Copy with owners moved into the bundle's range; each pair of `swap` changes places, as an OWNER map has it."""

    def owner(info: os.stat_result) -> tuple[int, int]:
        return base + _swapped(info.st_uid, swap[0]), base + _swapped(info.st_gid, swap[1])

    def copy(origin: str, destination: str) -> str:
        info = os.lstat(origin)
        if stat.S_ISREG(info.st_mode):
            shutil.copyfile(origin, destination)
            os.chown(destination, *owner(info))
            Path(destination).chmod(stat.S_IMODE(info.st_mode))
        return destination

    shutil.copytree(source, target, symlinks=True, copy_function=copy, ignore=_special)
    for path, directories, files in os.walk(source):
        there = target / Path(path).relative_to(source)
        for name in (*directories, *files):
            if (Path(path) / name).is_symlink():
                os.lchown(there / name, *owner(os.lstat(Path(path) / name)))
        info = os.lstat(path)
        os.chown(there, *owner(info))
        there.chmod(stat.S_IMODE(info.st_mode))


def _special(directory: str, names: list[str]) -> list[str]:
    """Devices, FIFOs and sockets: none of them belongs into a bundle."""
    return [name for name in names if not _ordinary(os.lstat(Path(directory) / name).st_mode)]


def _ordinary(mode: int) -> bool:
    return stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode)


def _swapped(number: int, pair: tuple[int, int]) -> int:
    first, second = pair
    moved = second if number == first else first if number == second else number
    return moved if moved < UID_COUNT else UID_COUNT - 1
