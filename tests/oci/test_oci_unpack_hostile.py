"""Layers made to get out of their root, or to never end."""

from __future__ import annotations

import contextlib
import gzip
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import build
import pytest
import trees
from build import Entry, folder, hardlink, symlink, whiteout
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from forgeyard_model.errors import ForgeyardError, SandboxError
from forgeyard_oci.unpack_limits import UnpackLimits

pytestmark = pytest.mark.kernel


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A tree beside the one that is unpacked into; it must be the same afterwards."""
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    (outside / "inner").mkdir()
    before = trees.describe(outside), os.stat(outside).st_mtime_ns, os.stat(outside / "secret").st_nlink
    yield outside
    assert (trees.describe(outside), os.stat(outside).st_mtime_ns, os.stat(outside / "secret").st_nlink) == before


def refused(entries: list[Any], target: Path, reason: str, name: str) -> None:
    """Unpacking `entries` is refused for `reason`, and the error names the entry."""
    with pytest.raises(SandboxError) as caught:
        trees.unpack(entries, target)
    assert caught.value.reason == reason
    assert repr(name) in str(caught.value)


@pytest.mark.parametrize("name", ["../f", "a/../../f", "a/b/../../../f", "..", "/../f", "a/.."])
def test_dot_dot_is_refused(tmp_path: Path, canary: Path, name: str) -> None:
    """No name with `..` is taken, wherever it would lead."""
    refused([folder("a"), Entry(name, b"x")], tmp_path / "t", "escape", name)


def test_absolute_names_are_inside(tmp_path: Path, canary: Path) -> None:
    """A leading slash means the image's root."""
    trees.unpack([Entry(f"{canary}/secret", b"x"), Entry("//etc/passwd", b"y")], tmp_path / "t")
    assert (tmp_path / "t/etc/passwd").read_bytes() == b"y"


def test_parents_that_are_absolute_links_resolve_inside(tmp_path: Path, canary: Path) -> None:
    """`pwn -> /outside` then `pwn/f` writes to outside/ within the image."""
    trees.unpack([symlink("pwn", str(canary)), Entry("pwn/f", b"x"), whiteout("pwn/secret")], tmp_path / "t")
    inside = tmp_path / "t" / str(canary)[1:]
    assert (inside / "f").read_bytes() == b"x"
    assert not (inside / "secret").exists()


@pytest.mark.parametrize(
    "target", ["../outside", "../../../../../../../../tmp", "d/../../outside", "/../outside", "/.."]
)
def test_parents_that_lead_out_are_refused(tmp_path: Path, canary: Path, target: str) -> None:
    """A link that climbs above the root is refused when something is to be written through it."""
    refused([folder("d"), symlink("pwn", target), Entry("pwn/f", b"x")], tmp_path / "t", "escape", "pwn/f")


def test_links_that_lead_out_are_legal_themselves(tmp_path: Path, canary: Path) -> None:
    """Only writing through them is not: at run time they are resolved inside the sandbox."""
    trees.unpack([symlink("up", "../../x"), symlink("etc", "/etc")], tmp_path / "t")
    assert trees.describe(tmp_path / "t") == {"up": "link ../../x", "etc": "link /etc"}


@pytest.mark.parametrize("link", ["/outside/secret", "../outside/secret", "pwn/secret", "/etc/shadow"])
def test_hard_links_to_the_host_are_refused(tmp_path: Path, canary: Path, link: str) -> None:
    """A hard link's target is a name in the image; the host's file of that name is never linked."""
    with pytest.raises(SandboxError) as caught:
        trees.unpack(
            [symlink("pwn", str(canary)), hardlink("x", link.replace("/outside", str(canary)))], tmp_path / "t"
        )
    assert caught.value.reason in ("escape", "dangling_link")
    assert not os.path.lexists(tmp_path / "t/x")


def test_writing_over_a_link_replaces_it(tmp_path: Path, canary: Path) -> None:
    """A file, a directory or a whiteout in a link's place never reaches what the link points to."""
    secret = str(canary / "secret")
    trees.unpack(
        [
            symlink("a", secret),
            Entry("a", b"new"),
            symlink("b", str(canary)),
            folder("b", mode=0o777),
            symlink("c", secret),
            hardlink("d", "c"),
            Entry("d", b"z"),
        ],
        tmp_path / "t",
    )
    assert trees.describe(tmp_path / "t")["a"] == "file 644 0:0 b'new'"
    assert trees.describe(tmp_path / "t")["d"] == "file 644 0:0 b'z'"


@pytest.mark.parametrize("name", [".", "/.", "./."])
@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.REGTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE])
def test_the_root_stays_a_directory(tmp_path: Path, canary: Path, name: str, kind: bytes) -> None:
    """An entry for the root that is no directory is refused."""
    refused([Entry(name, type=kind, link=str(canary)), Entry("f")], tmp_path / "t", "bad_entry", name)


@pytest.mark.parametrize(
    "entries",
    [
        [symlink("a", "a"), Entry("a/f")],
        [symlink("a", "b"), symlink("b", "a"), Entry("a/f")],
        [folder("d"), symlink("d/l", "../d/l/x"), Entry("d/l/f")],
        [symlink("a", "./" * 2000 + "a"), Entry("a/f")],
    ],
)
def test_loops_end(tmp_path: Path, canary: Path, entries: list[Any]) -> None:
    """A loop of links is found and named."""
    refused(entries, tmp_path / "t", "link_loop", entries[-1].name)


def test_links_can_not_make_trees_too_deep(tmp_path: Path) -> None:
    """Depth is bounded where the directories really are, however short the names that lead there."""
    long = "/".join("d" * 1 for _ in range(200))
    entries = [symlink("a", long), symlink("a/b", long), Entry("a/b/f")]
    refused(entries, tmp_path / "t", "bad_entry", "a/b/f")


@pytest.mark.parametrize("name", [".wh.", ".wh...", ".wh..", "d/.wh.", ".wh.x/f", "d/.wh.x/y"])
def test_whiteouts_of_nothing_are_refused(tmp_path: Path, canary: Path, name: str) -> None:
    """A whiteout of the directory itself, its parent, or used as a directory is no whiteout."""
    refused([Entry(name)], tmp_path / "t", "bad_entry", name)


@pytest.mark.parametrize("pax", [{"path": "a\0b"}, {"linkpath": "x\0y"}])
def test_nul_bytes_are_refused(tmp_path: Path, pax: dict[str, str]) -> None:
    """A NUL in a pax name would end it early for the kernel."""
    with pytest.raises(SandboxError, match=r"NUL|nowhere") as caught:
        trees.unpack([symlink("l", "x", pax=pax)], tmp_path / "t")
    assert caught.value.reason == "bad_entry"


def test_files_as_parents_are_refused(tmp_path: Path) -> None:
    """`f/x` where f is a file of this layer, or of one below."""
    refused([Entry("f"), Entry("f/x")], tmp_path / "t", "bad_entry", "f/x")
    trees.unpack([Entry("f")], tmp_path / "low")
    with pytest.raises(SandboxError, match="not a directory"):
        trees.unpack([Entry("f/x")], tmp_path / "up", [tmp_path / "low"])


def test_gzip_bombs_end_early(tmp_path: Path) -> None:
    """Expansion is bounded by a ratio, and by a size, long before a disk is full."""
    layer = build.tar([Entry("zeros", bytes(16 << 20))])
    with pytest.raises(SandboxError, match="expands more than 200 times") as caught:
        trees.unpack_bytes(layer, tmp_path / "a", compress=True, limits=UnpackLimits(ratio_from=1 << 20))
    assert caught.value.reason == "layer_bomb"
    with pytest.raises(SandboxError, match="beyond 1048576 bytes") as caught:
        trees.unpack_bytes(layer, tmp_path / "b", compress=True, limits=UnpackLimits(expanded=1 << 20))
    assert caught.value.reason == "layer_too_large"


def test_bombs_after_the_end_of_the_tar_end_too(tmp_path: Path) -> None:
    """What follows the archive is read for its digest under the same bounds."""
    layer = build.tar([Entry("f")]) + bytes(8 << 20)
    with pytest.raises(SandboxError):
        trees.unpack_bytes(layer, tmp_path / "a", compress=True, limits=UnpackLimits(expanded=1 << 20))


def test_sparse_holes_count(tmp_path: Path) -> None:
    """A file of one exbibyte that takes no room is still refused: whoever copies it would fill a disk."""
    pax = {
        "GNU.sparse.major": "1",
        "GNU.sparse.minor": "0",
        "GNU.sparse.realsize": str(1 << 60),
        "GNU.sparse.name": "huge",
    }
    with pytest.raises(SandboxError, match="huge") as caught:
        trees.unpack([Entry("f", b"0\n".ljust(512, b"\0"), pax=pax)], tmp_path / "t")
    assert caught.value.reason == "layer_too_large"


@pytest.mark.parametrize(
    ("blob", "why"),
    [
        (lambda layer: gzip.compress(layer)[:-100], "ends in the middle"),
        (lambda layer: gzip.compress(layer)[:-8] + b"\0" * 8, "is not whole gzip data"),
        (lambda layer: gzip.compress(layer) + b"garbage", "is not whole gzip data"),
        (lambda layer: layer, "labelled gzip but is a plain tar"),
        (lambda layer: b"\x28\xb5\x2f\xfd" + layer, "labelled gzip but is zstd"),
        (lambda layer: b"", "ends in the middle"),
    ],
)
def test_damaged_compression_is_refused(tmp_path: Path, blob: Any, why: str) -> None:
    """Truncated, corrupt or mislabelled blobs, each by its own words."""
    layer = build.tar([Entry("f", os.urandom(5000))])
    with pytest.raises(SandboxError, match=why):
        trees.unpack_bytes(layer, tmp_path / "t", blob=blob(layer))


@pytest.mark.parametrize(
    "blob",
    [
        lambda layer: gzip.compress(layer[:700]) + gzip.compress(layer[700:]),
        lambda layer: gzip.compress(layer) + gzip.compress(b"") * 3,
        lambda layer: gzip.compress(layer) + bytes(700_000),
    ],
    ids=["members", "empty members", "padding"],
)
def test_legal_gzip_of_other_shapes(tmp_path: Path, blob: Any) -> None:
    """Several members, empty ones, and zero padding are what gzip itself takes."""
    layer = build.tar([Entry("f", b"data" * 100)])
    trees.unpack_bytes(layer, tmp_path / "t", blob=blob(layer))
    assert (tmp_path / "t/f").read_bytes() == b"data" * 100


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """No space is the host's failure, and says so."""
    script = (
        "import sys, pathlib\n"
        f"sys.path.insert(0, {str(Path(trees.__file__).parent)!r})\n"
        "import trees\n"
        "try:\n"
        "    trees.unpack([trees.build.Entry('big', bytes(8 << 20))], pathlib.Path(sys.argv[1]) / 't')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, error.reason, error)\n"
    )
    small = tmp_path / "small"
    small.mkdir()
    mount = 'mount -t tmpfs -o size=10m none "$1" && exec "$2" -c "$3" "$1"'
    command = ["unshare", "-m", "sh", "-c", mount, "sh", str(small), sys.executable, script]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.stdout.startswith("ExecutorError no_space no space left"), run.stderr


_NAMES = st.sampled_from(
    (
        *("a", "b", "a/b", "a/b/c", "b/a", "./a", "/a", "a/", "..", "../outside", "a/../..", ".", "/", "", "a//b"),
        *(".wh.a", "a/.wh.b", ".wh..wh..opq", "a/.wh..wh..opq", ".wh..", ".wh..wh.x", "outside/secret", "c" * 300),
    )
)
_LINKS = _NAMES | st.sampled_from(["/outside", "../outside", "../../outside/secret", "/", "a/../b", "/outside/secret"])
_TYPES = st.sampled_from(
    [tarfile.REGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
)
_ENTRIES = st.lists(
    st.builds(
        Entry,
        name=_NAMES,
        data=st.just(b""),
        type=_TYPES,
        link=_LINKS,
        mode=st.sampled_from([0, 0o644, 0o7777]),
        uid=st.sampled_from([0, 1000, 65536]),
    ),
    max_size=8,
)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lower=_ENTRIES, upper=_ENTRIES)
@example(lower=[symlink("a", "/outside")], upper=[hardlink("b", "a/secret")])
@example(lower=[symlink("a", "../outside")], upper=[Entry("a/secret", b"")])
def test_no_layer_reaches_outside(tmp_path_factory: pytest.TempPathFactory, lower: list[Any], upper: list[Any]) -> None:
    """Whatever two layers hold, they unpack or end in an error of ours, and nothing beside their trees changes."""
    work = tmp_path_factory.mktemp("fuzz")
    outside = work / "outside"
    outside.mkdir()
    (outside / "secret").write_text("secret")
    before = trees.describe(work), os.stat(outside).st_mtime_ns, os.stat(outside / "secret").st_nlink
    try:
        trees.unpack(lower, work / "low")
        trees.unpack(upper, work / "up", [work / "low"])
    except ForgeyardError:
        pass
    after = {path: line for path, line in trees.describe(work).items() if path.partition("/")[0] == "outside"}
    assert (after, os.stat(outside).st_mtime_ns, os.stat(outside / "secret").st_nlink) == before
    descriptors = [
        os.readlink(f"/proc/self/fd/{fd}")
        for fd in os.listdir("/proc/self/fd")
        if os.path.lexists(f"/proc/self/fd/{fd}")
    ]
    assert not [path for path in descriptors if str(work) in path], "descriptors were left open"


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=600), st.integers(0, 2559), st.binary(min_size=1, max_size=16))
def test_damaged_tars_end_in_our_errors(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes, at: int, patch: bytes
) -> None:
    """A tar with bytes changed anywhere unpacks or is refused; no other error, no endless loop."""
    entries = [Entry("f" * 120, b"data", pax={"SCHILY.xattr.user.a": "b"}), folder("d"), symlink("l", "f")]
    layer = bytearray(build.tar(entries))
    layer[at : at + len(patch)] = patch
    with contextlib.suppress(ForgeyardError):
        trees.unpack_bytes(bytes(layer) + tail, tmp_path_factory.mktemp("fuzz") / "t")
