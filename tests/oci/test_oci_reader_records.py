"""The recorded files of an unpacked tree, and what comparing them with the tree finds."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import build
import pytest
from build import Entry, folder, hardlink, opaque, symlink, whiteout

from forgeyard_oci.tree_records import check_tree
from forgeyard_oci.unpack import unpack_layer
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import MergedTree
from forgeyard_oci.unpack_stream import LayerStream

pytestmark = pytest.mark.kernel

CAPABILITY = bytes.fromhex("0100000200200000000000000000000000000000").decode("latin-1")
ENTRIES = [
    folder("d", mode=0o750, uid=3, gid=4),
    Entry("d/a", b"contents", mode=0o4755, uid=5),
    hardlink("d/z", "d/a"),
    Entry("d/cap", b"x", pax={"SCHILY.xattr.security.capability": CAPABILITY, "SCHILY.xattr.user.k": "v"}),
    symlink("d/l", "../odd\ttarget\nname\\"),
    hardlink("d/l2", "d/l"),
    folder("hidden"),
    opaque("hidden"),
    Entry("hidden/new"),
    whiteout("gone"),
    Entry("new\nline\ttab\\n", b"odd"),
    Entry("empty"),
    folder("d-"),
    Entry("d-/before", b"sorts between d and d/a by its bytes, not by its parts"),
]


def recorded(tmp_path: Path, entries: list[Entry], lowers: tuple[str, ...] = ()) -> tuple[Path, Path]:
    """A tree and its records."""
    tree, records, blob = tmp_path / "tree", tmp_path / "records", tmp_path / "blob"
    tree.mkdir()
    layer = build.tar(entries)
    blob.write_bytes(layer)
    with blob.open("rb") as source, records.open("wb") as out:
        limits, digest = UnpackLimits(), build.sha256(layer)
        media_type = "application/vnd.oci.image.layer.v1.tar"
        stream = LayerStream(
            source.fileno(), media_type=media_type, digest=digest, size=len(layer), diff_id=digest, limits=limits
        )
        unpack_layer(stream, str(tree), MergedTree(lowers), limits, out.fileno())
    return tree, records


@pytest.fixture
def sample(tmp_path: Path) -> tuple[Path, Path]:
    """A tree that holds one of everything, over a layer with something to hide."""
    (tmp_path / "low").mkdir()
    (tmp_path / "low/gone").write_text("x")
    return recorded(tmp_path, ENTRIES, (str(tmp_path / "low"),))


def test_a_fresh_tree_is_as_recorded(sample: tuple[Path, Path]) -> None:
    """Nothing differs right after unpacking, odd names included, and the records hold every node."""
    tree, records = sample
    assert check_tree(tree, records) == []
    count = sum(len(folders) + len(files) for _, folders, files in os.walk(tree))
    assert records.read_bytes().endswith(f"end\t{count}\n".encode())
    assert "w" in {line.partition("\t")[0] for line in records.read_text().splitlines()}


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    """Names that are no UTF-8 are recorded and found."""
    tree, records = recorded(tmp_path, [Entry("a\udcff\udcfe", b"x"), symlink("l", "\udc80")])
    assert check_tree(tree, records) == []
    os.unlink(os.fsencode(tree) + b"/a\xff\xfe")
    assert repr("a\udcff\udcfe") + " is missing" in check_tree(tree, records)


def _relink(tree: Path) -> None:
    status = os.stat(tree / "d/z")
    data = (tree / "d/z").read_bytes()
    (tree / "d/z").unlink()
    (tree / "d/z").write_bytes(data)
    os.chown(tree / "d/z", status.st_uid, status.st_gid)
    os.chmod(tree / "d/z", status.st_mode)
    os.utime(tree / "d/z", ns=(status.st_mtime_ns, status.st_mtime_ns))


def _contents(tree: Path) -> None:
    status = os.stat(tree / "d/a")
    (tree / "d/a").write_bytes(b"CONTENTS")
    os.chmod(tree / "d/a", 0o4755)
    os.utime(tree / "d/a", ns=(status.st_mtime_ns, status.st_mtime_ns))


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (_contents, "'d/a' has other contents"),
        (_contents, "'d/z' has other contents"),
        (lambda tree: os.chmod(tree / "d/a", 0o755), "'d/a' has mode 755 instead of 4755"),
        (lambda tree: os.chown(tree / "empty", 9, -1), "'empty' has uid 9 instead of 0"),
        (lambda tree: os.chown(tree / "hidden", -1, 9), "'hidden' has gid 9 instead of 0"),
        (lambda tree: os.utime(tree / "d", (5, 5)), "'d' has mtime 5000000000 instead of"),
        (lambda tree: (tree / "d/cap").unlink(), "'d/cap' is missing"),
        (lambda tree: (tree / "d/more").write_text(""), "'d/more' is not in the records"),
        (_relink, "'d/a' has links 1 instead of 2"),
        (_relink, "'d/z' is no longer one file with its other names"),
        (lambda tree: os.setxattr(tree / "d/cap", "user.k", b"w"), "'d/cap' has other extended attributes"),
        (lambda tree: os.setxattr(tree / "empty", "user.k", b"w"), "'empty' has other extended attributes"),
        (lambda tree: os.setxattr(tree / "d", "trusted.overlay.opaque", b"y"), "'d' is of kind D instead of d"),
        (lambda tree: os.removexattr(tree / "hidden", "trusted.overlay.opaque"), "'hidden' is of kind d instead of D"),
        (lambda tree: ((tree / "gone").unlink(), (tree / "gone").write_text("")), "'gone' is of kind f instead of w"),
        (lambda tree: ((tree / "d/l").unlink(), (tree / "d/l").symlink_to("/etc")), "'d/l' points elsewhere"),
        (lambda tree: ((tree / "empty").unlink(), os.mkfifo(tree / "empty")), "'empty' is of kind ? instead of f"),
    ],
)
def test_every_change_is_found(sample: tuple[Path, Path], change: Callable[[Path], object], found: str) -> None:
    """Contents, attributes, links, marks; files that went and files that came."""
    tree, records = sample
    change(tree)
    assert any(problem.startswith(found) for problem in check_tree(tree, records)), check_tree(tree, records)


def test_problems_are_bounded(tmp_path: Path) -> None:
    """A tree that is wrong throughout gives a hundred lines."""
    tree, records = recorded(tmp_path, [Entry("f")])
    for number in range(300):
        (tree / f"x{number}").touch()
    assert len(check_tree(tree, records)) == 100


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-8],
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: data.replace(b"tree 1", b"tree 9"),
        lambda data: data.replace(b"end\t", b"end\t1"),
        lambda data: data.replace(b"\t4755\t", b"\tx\t"),
    ],
)
def test_damaged_records_are_named(sample: tuple[Path, Path], damage: Callable[[bytes], bytes]) -> None:
    """Records that end early, or are no records, are a finding, never a pass or a crash."""
    tree, records = sample
    records.write_bytes(damage(records.read_bytes()))
    assert any("records can't be read" in problem for problem in check_tree(tree, records))


def test_missing_records_are_named(sample: tuple[Path, Path]) -> None:
    """No records are a finding too."""
    tree, records = sample
    records.unlink()
    assert check_tree(tree, records) == ["the records are missing"]
