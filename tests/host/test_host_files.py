"""Opening, removing and collecting what a hostile job may have left."""

from __future__ import annotations

import os
import shutil
import socket
import stat
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_host.collect import CopyReport, copy_tree_beneath, stays_beneath
from forgeyard_host.files import open_beneath, remove_tree


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Path]:
    """A directory `box` beside a file `outside`."""
    (tmp_path / "outside").write_text("secret")
    box = tmp_path / "box"
    box.mkdir()
    yield box
    assert (tmp_path / "outside").read_text() == "secret"


def collect(box: Path, relative: str, destination: Path) -> CopyReport:
    """copy_tree_beneath from a directory given by path."""
    fd = os.open(box, os.O_PATH)
    try:
        return copy_tree_beneath(fd, relative, str(destination))
    finally:
        os.close(fd)


@pytest.mark.parametrize("path", ["link/f", "last", "../outside", "a/../../outside", "/etc/passwd", "proc"])
def test_nothing_leads_out(tree: Path, path: str) -> None:
    """Neither a symlink nor '..' nor an absolute path opens anything."""
    (tree / "link").symlink_to(tree)
    (tree / "last").symlink_to("f")
    (tree / "proc").symlink_to("/proc/self/cwd")
    (tree / "f").write_text("")
    (tree / "a").mkdir()
    fd = os.open(tree, os.O_PATH)
    try:
        with pytest.raises(OSError, match=r"Too many levels|cross-device"):
            open_beneath(fd, path, os.O_RDONLY)
    finally:
        os.close(fd)


def test_open_beneath_opens_what_is_there(tree: Path) -> None:
    """A plain path works and the fd is not inherited."""
    (tree / "a").mkdir()
    (tree / "a/f").write_text("x")
    fd = os.open(tree, os.O_PATH)
    inner = open_beneath(fd, "a/f", os.O_RDONLY)
    try:
        assert os.read(inner, 10) == b"x"
        assert not os.get_inheritable(inner)
    finally:
        os.close(inner)
        os.close(fd)


def test_remove_does_not_follow(tree: Path, tmp_path: Path) -> None:
    """Symlinks are removed, what they point at is not; sockets, FIFOs and locked directories go as well."""
    (tree / "out").symlink_to(tmp_path / "outside")
    (tree / "up").symlink_to("..")
    os.mkfifo(tree / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree / "socket"))
    (tree / "locked/in").mkdir(parents=True)
    (tree / "locked/in/f").write_text("")
    (tree / "locked/in").chmod(0)
    (tree / "locked").chmod(0)

    remove_tree(str(tree))
    remove_tree(str(tree))

    assert not tree.exists()


def test_remove_a_tree_deeper_than_paths_can_be() -> None:
    """Three thousand levels take no recursion and few descriptors."""
    tree = Path(tempfile.mkdtemp(prefix="fy-deep-", dir="/dev/shm"))
    fd = os.open(tree, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 10, dir_fd=fd)
        deeper = os.open("d" * 10, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(os.open("leaf", os.O_CREAT | os.O_WRONLY, dir_fd=fd))
    os.close(fd)

    remove_tree(str(tree))

    assert not tree.exists()


@pytest.mark.kernel
def test_remove_stays_on_its_mount(tree: Path, tmp_path: Path) -> None:
    """A mount below the tree is left alone and reported; all else goes."""
    (tree / "mounted").mkdir()
    (tree / "gone").write_text("")
    (tmp_path / "data").mkdir()
    (tmp_path / "data/f").write_text("kept")
    subprocess.run(["mount", "--bind", tmp_path / "data", tree / "mounted"], check=True)
    try:
        with pytest.raises(ExceptionGroup) as caught:
            remove_tree(str(tree))
    finally:
        subprocess.run(["umount", tree / "mounted"], check=True)

    assert [error.filename for error in caught.value.exceptions if isinstance(error, OSError)] == ["mounted"]
    assert (tmp_path / "data/f").read_text() == "kept"
    assert not (tree / "gone").exists()


def test_collect_copies_files_directories_and_inner_links(tree: Path, tmp_path: Path) -> None:
    """Contents and modes arrive, set-id bits do not, and the copies are the caller's."""
    source = tree / "out"
    (source / "a/b").mkdir(parents=True)
    (source / "a/b/run").write_text("#!/bin/sh\n")
    (source / "a/b/run").chmod(0o6755)
    (source / "a/link").symlink_to("b/run")
    (source / "a/up").symlink_to("../a/b")
    (source / "secret").write_text("s")
    (source / "secret").chmod(0o600)
    if os.geteuid() == 0:
        os.chown(source / "secret", 12345, 12345)

    report = collect(tree, "out", tmp_path / "got")

    got = tmp_path / "got"
    assert (report.files, report.directories, report.symlinks, report.skipped) == (2, 3, 2, ())
    assert report.bytes == 11
    assert stat.S_IMODE((got / "a/b/run").stat().st_mode) == 0o755
    assert stat.S_IMODE((got / "secret").stat().st_mode) == 0o600
    assert (got / "secret").stat().st_uid == os.geteuid()
    assert (got / "a/up/run").read_text() == "#!/bin/sh\n"


def test_collect_skips_and_names_what_is_not_data(tree: Path, tmp_path: Path) -> None:
    """FIFOs, sockets and links that lead out are named, never opened, and the rest is copied."""
    source = tree / "out"
    source.mkdir()
    os.mkfifo(source / "fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(source / "socket"))
    (source / "absolute").symlink_to("/etc/passwd")
    (source / "climbs").symlink_to("../outside")
    (source / "sub").mkdir()
    (source / "sub/twice").symlink_to("..")
    (source / "through").symlink_to("sub/twice/../../outside")
    (source / "file").write_text("x")

    report = collect(tree, "out", tmp_path / "got")

    assert {text.split(": ")[0] for text in report.skipped} == {
        "out/fifo",
        "out/socket",
        "out/absolute",
        "out/climbs",
        "out/through",
    }
    assert sorted(os.listdir(tmp_path / "got")) == ["file", "sub"]


@pytest.mark.kernel
def test_collect_skips_devices(tree: Path, tmp_path: Path) -> None:
    """A device node is not opened: doing so may act."""
    (tree / "out").mkdir()
    os.mknod(tree / "out/null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))

    assert collect(tree, "out", tmp_path / "got").skipped == ("out/null: a character device",)


def test_collect_a_single_file(tree: Path, tmp_path: Path) -> None:
    """A file is copied to the very path that is given."""
    (tree / "sub").mkdir()
    (tree / "sub/report.xml").write_text("<x/>")

    report = collect(tree, "sub/report.xml", tmp_path / "report.xml")

    assert (report.files, report.bytes) == (1, 4)
    assert (tmp_path / "report.xml").read_text() == "<x/>"


@pytest.mark.parametrize("relative", ["link", "link/f", "../outside", "missing"])
def test_collect_starts_nowhere_else(tree: Path, tmp_path: Path, relative: str) -> None:
    """An output whose own path is a symlink, leads out or is missing gives nothing."""
    (tree / "link").symlink_to("..")
    if relative == "link":
        assert collect(tree, relative, tmp_path / "got").skipped == ("link: a symlink that leads out",)
    else:
        with pytest.raises(OSError, match=r"Too many levels|cross-device|No such file"):
            collect(tree, relative, tmp_path / "got")
    assert not (tmp_path / "got").exists()


def test_collect_keeps_holes_and_links(tree: Path, tmp_path: Path) -> None:
    """A sparse file stays sparse, and many links to one file take its space once."""
    source = tree / "out"
    source.mkdir()
    with (source / "sparse").open("wb") as file:
        file.write(b"head")
        file.seek(1 << 30)
        file.write(b"tail")
    for number in range(50):
        (source / f"link{number}").hardlink_to(source / "sparse")

    report = collect(tree, "out", tmp_path / "got")

    got = (tmp_path / "got/sparse").stat()
    assert report.files == 51
    assert got.st_size == (1 << 30) + 4
    assert got.st_blocks * 512 < 1 << 20
    assert got.st_nlink == 51
    with (tmp_path / "got/sparse").open("rb") as file:
        file.seek(1 << 30)
        assert file.read() == b"tail"


def test_collect_survives_odd_names_and_depth(tree: Path, tmp_path: Path) -> None:
    """Names that are no text are copied byte for byte; a tree too deep for paths is cut and named."""
    source = os.fsencode(tree / "out")
    os.mkdir(source)
    for name in (b"new\nline", b"\xff\xfe", b"-rf", b" "):
        with open(source + b"/" + name, "wb"):
            pass
    fd = os.open(source, os.O_RDONLY)
    for _ in range(60):
        os.mkdir("d" * 100, dir_fd=fd)
        deeper = os.open("d" * 100, os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = deeper
    os.close(fd)

    report = collect(tree, "out", tmp_path / "got")

    assert report.files == 4
    assert set(os.listdir(os.fsencode(tmp_path / "got"))) >= {b"new\nline", b"\xff\xfe", b"-rf", b" "}
    assert len(report.skipped) == 1
    assert report.skipped[0].endswith("too deep")
    remove_tree(str(tmp_path / "got"))
    remove_tree(str(tree))
    tree.mkdir()


def test_collect_names_a_hundred_only(tree: Path, tmp_path: Path) -> None:
    """The list of what was skipped has an end, and says how much more there was."""
    (tree / "out").mkdir()
    for number in range(130):
        os.mkfifo(tree / f"out/{number}")

    skipped = collect(tree, "out", tmp_path / "got").skipped

    assert len(skipped) == 101
    assert skipped[-1] == "and 30 more"


PARTS = st.lists(st.sampled_from(["..", ".", "a", "b", "", "c"]), min_size=1, max_size=6)


@given(st.dictionaries(st.sampled_from(["a", "b", "c", "a/x", "b/y"]), PARTS, min_size=1))
def test_links_that_are_kept_never_lead_out(links: dict[str, list[str]]) -> None:
    """Whatever links a job makes beside each other, the kept ones together never resolve to something outside."""
    top = Path("/dev/shm", f"fy-links-{os.getpid()}")
    shutil.rmtree(top, ignore_errors=True)
    (top / "box").mkdir(parents=True)
    try:
        for name, parts in sorted(links.items()):
            target = "/".join(parts)
            path = top / "box" / name
            if "/" in name:
                if path.parent.is_symlink():
                    continue
                path.parent.mkdir(exist_ok=True)
            if stays_beneath(target, name.count("/")) and not os.path.lexists(path):
                path.symlink_to(target)
        for path in (top / "box").rglob("*"):
            try:
                resolved = path.resolve(strict=True)
            except (OSError, RuntimeError):  # nothing there, or a loop: it leads nowhere
                continue
            assert resolved.is_relative_to(top / "box")
    finally:
        shutil.rmtree(top)
