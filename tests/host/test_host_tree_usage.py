"""Counting what a job has written, while it writes on and would rather not be counted."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from forgeyard_host.files import remove_tree
from forgeyard_host.tree_usage import TreeUsage, tree_usage

pytestmark = pytest.mark.kernel

MIB = 1 << 20


def count(path: Path, *, most_bytes: int = 1 << 40, most_files: int = 1 << 40, seconds: float = 60.0) -> TreeUsage:
    """As the executor counts, with no bounds but those given."""
    return tree_usage(str(path), most_bytes=most_bytes, most_files=most_files, seconds=seconds)


def test_blocks_are_counted_not_sizes(tmp_path: Path) -> None:
    """A sparse file has used what it has written; a full one all of it."""
    (tmp_path / "d").mkdir()
    (tmp_path / "d/full").write_bytes(bytes(MIB))
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    found = count(tmp_path)
    assert MIB <= found.bytes < MIB + (1 << 16)
    assert (found.files, found.whole) == (3, True)


def test_a_file_with_several_names_counts_once(tmp_path: Path) -> None:
    """However many links there are, and in whatever directory."""
    (tmp_path / "f").write_bytes(bytes(MIB))
    (tmp_path / "d").mkdir()
    for number in range(9):
        os.link(tmp_path / "f", tmp_path / f"d/{number}")
    assert MIB <= count(tmp_path).bytes < MIB + (1 << 16)


def test_links_lead_nowhere(tmp_path: Path) -> None:
    """Neither to a file nor to a directory."""
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/big").write_bytes(bytes(MIB))
    (tmp_path / "tree").mkdir()
    for name, target in {"a": "../outside", "b": "../outside/big", "c": "/", "d": "d"}.items():
        (tmp_path / "tree" / name).symlink_to(target)
    found = count(tmp_path / "tree")
    assert (found.files, found.whole) == (4, True)
    assert found.bytes < 1 << 16


def test_it_stops_at_its_bounds() -> None:
    """More than enough is enough: of bytes, of files, of time."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:  # so many files are slow on a disk
        path = Path(directory)
        for number in range(3000):
            (path / str(number)).write_bytes(b"x")
        assert count(path, most_files=100).files == 101
        assert count(path, most_bytes=40960).bytes == 45056
        late = count(path, seconds=0.0)
    assert late.files < 3000
    assert not late.whole


def test_a_tree_deeper_than_any_path(tmp_path: Path) -> None:
    """It is entered as far as descriptors are given to it, and said to be counted in part."""
    top = os.open(tmp_path, os.O_RDONLY)
    here = os.dup(top)
    for _ in range(400):
        os.mkdir("d" * 100, dir_fd=here)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(here)
    before = len(os.listdir("/proc/self/fd"))
    found = count(tmp_path)
    assert found.files == 200
    assert not found.whole
    assert len(os.listdir("/proc/self/fd")) == before
    os.close(top)
    remove_tree(str(tmp_path))  # deeper than Python's own way of removing goes
