"""Our tar reader against real writers: GNU tar in every format it has, and Python's own."""

from __future__ import annotations

import io
import os
import random
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import build
import pytest
import trees
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import SandboxError
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_tar import number, pax_records

pytestmark = pytest.mark.kernel


def seen(root: Path) -> dict[str, tuple[Any, ...]]:
    """What unpacking must keep of every path: type and mode, owner, links, time, contents or target."""
    found = {}
    for folder, directories, files in os.walk(root):
        for name in [".", *directories, *files] if folder == str(root) else [*directories, *files]:
            path = os.path.join(folder, name)
            status = os.lstat(path)
            content: Any = os.readlink(path) if os.path.islink(path) else None
            content = Path(path).read_bytes() if os.path.isfile(path) and content is None else content
            links = status.st_nlink if content is not None else 0
            owner = (status.st_uid, status.st_gid)
            found[os.path.relpath(path, root)] = (status.st_mode, *owner, links, int(status.st_mtime), content)
    return found


@pytest.fixture
def sample(tmp_path: Path) -> Path:
    """A tree with long names, links, odd modes and sparse files."""
    root = tmp_path / "sample"
    (root / "sub").mkdir(parents=True)
    (root / "sub/plain").write_bytes(random.Random(7).randbytes(70_000))
    (root / ("long" * 30) / ("name" * 40)).mkdir(parents=True)
    (root / ("long" * 30) / ("name" * 40) / ("file" * 50)).write_text("deep")
    (root / "link").symlink_to("t" * 300)
    os.link(root / "sub/plain", root / "hard")
    (root / "caf\u00e9").write_text("utf-8")
    (root / "suid").write_text("x")
    os.chown(root / "suid", 1234, 4321)
    os.chmod(root / "suid", 0o6755)
    with (root / "sparse").open("wb") as file:
        for position in range(0, 60 << 16, 3 << 16):  # more pieces than one header holds
            file.seek(position)
            file.write(os.urandom(4096))
        file.truncate(70 << 16)
    with (root / "hole").open("wb") as file:
        file.truncate(5 << 20)
    for number_, (folder, directories, files) in enumerate(os.walk(root, topdown=False)):
        for name in [*files, *directories, "."]:
            os.utime(Path(folder) / name, (1_600_000_000 + number_,) * 2, follow_symlinks=False)
    return root


@pytest.mark.parametrize(
    "options",
    [
        ["--format=gnu"],
        ["--format=gnu", "--sparse"],
        ["--format=pax"],
        ["--format=pax", "--sparse", "--sparse-version=0.0"],
        ["--format=pax", "--sparse", "--sparse-version=0.1"],
        ["--format=pax", "--sparse", "--sparse-version=1.0"],
        ["--format=oldgnu", "--sparse", "--label=volume"],
    ],
    ids=" ".join,
)
def test_gnu_tar(sample: Path, tmp_path: Path, options: list[str], require_tool: Callable[[str], str]) -> None:
    """What GNU tar packs comes out the same, holes included."""
    command = [require_tool("tar"), "--numeric-owner", *options, "-C", str(sample), "-cf", "-", "."]
    layer = subprocess.run(command, check=True, capture_output=True).stdout
    trees.unpack_bytes(layer, tmp_path / "t")
    assert seen(tmp_path / "t") == seen(sample)
    if "--sparse" in options:
        assert os.stat(tmp_path / "t/hole").st_blocks * 512 < 1 << 20


@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_python_tarfile(sample: Path, tmp_path: Path, form: int) -> None:
    """What Python's tarfile packs comes out the same."""
    if form == tarfile.USTAR_FORMAT:  # which holds none of these
        shutil.rmtree(sample / ("long" * 30))
        (sample / "link").unlink()
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=form) as archive:
        archive.add(sample, ".")
    trees.unpack_bytes(buffer.getvalue(), tmp_path / "t")
    assert seen(tmp_path / "t") == seen(sample)


def test_large_numbers(tmp_path: Path) -> None:
    """Ids and times that octal can't hold are read from base 256."""
    assert number(b"\x80" + b"\0" * 6 + b"\x07") == 7
    assert number(b"\xff" * 12) == -1
    assert number(b"0000644\0") == number(b"   644 \0") == 0o644
    assert number(b"\0" * 8) == 0


@pytest.mark.parametrize("text", [b"-1", b"0o7", b"1_0", b"8", b"7 7", b"+7", b"abc"])
def test_numbers_that_are_none(text: bytes) -> None:
    """Nothing but octal digits is a number."""
    with pytest.raises(SandboxError):
        number(text)


def test_pax_records_keep_bytes() -> None:
    """Values may hold newlines, equals signs and bytes that are no text."""
    assert pax_records(b"10 a=\n=\xff\0\n6 b=c\n") == [("a", b"\n=\xff\0"), ("b", b"c")]


@pytest.mark.parametrize(
    "data", [b"x", b"5 a=b", b"99 a=b\n", b"6 ab=\n\n", b"3 \n", b"0 a=b\n", b"-6 a=b\n", b"5 ab\n"]
)
def test_broken_pax_records(data: bytes) -> None:
    """Lengths that don't add up are refused."""
    with pytest.raises(SandboxError):
        pax_records(data)


@given(st.binary(max_size=200))
def test_any_pax_header_is_read_or_refused(data: bytes) -> None:
    """No bytes make the parser fail in another way, or run on."""
    try:
        records = pax_records(data)
    except SandboxError:
        return
    assert len(records) <= len(data)


def test_headers_are_bounded(tmp_path: Path) -> None:
    """A long-name header of any size does not go into memory."""
    limits = UnpackLimits(header=4096)
    with pytest.raises(SandboxError, match="a header of"):
        trees.unpack([build.Entry("x", pax={"comment": "y" * 5000})], tmp_path / "t", limits=limits)


@pytest.mark.parametrize("cut", [100, 512, 700, 1024])
def test_cut_off_tars(tmp_path: Path, cut: int) -> None:
    """A stream that ends within a header or a file is refused; one without end marks is taken, as everywhere."""
    layer = build.tar([build.Entry("f", b"x" * 600)])
    if cut == 512 + 1024 - 512:
        cut = 512 + 100
    with pytest.raises(SandboxError, match="it ends within"):
        trees.unpack_bytes(layer[:cut], tmp_path / "t")
    trees.unpack_bytes(layer[: 512 + 600], tmp_path / "u")
    assert (tmp_path / "u/f").read_bytes() == b"x" * 600


def test_data_after_the_end_mark(tmp_path: Path) -> None:
    """One zero block followed by more entries is read differently by different tools, so it is refused."""
    layer = build.tar([build.Entry("f")])[:512] + bytes(512) + build.tar([build.Entry("hidden")])
    with pytest.raises(SandboxError, match="goes on after its end mark"):
        trees.unpack_bytes(layer, tmp_path / "t")


def test_unknown_types(tmp_path: Path) -> None:
    """A type that no rule covers is refused with the entry's name."""
    with pytest.raises(SandboxError, match="'odd' has the unknown type b'Z'"):
        trees.unpack([build.Entry("odd", type=b"Z")], tmp_path / "t")


def test_an_empty_layer(tmp_path: Path) -> None:
    """Nothing but end marks, or no byte at all, is an empty layer."""
    trees.unpack_bytes(bytes(1024), tmp_path / "a")
    trees.unpack_bytes(b"", tmp_path / "b")
    assert trees.describe(tmp_path / "a") == trees.describe(tmp_path / "b") == {}


def _sized(name: str, size: int) -> bytes:
    """A header of a file of `size` bytes, in base 256 where octal can't hold it, without the data."""
    info = tarfile.TarInfo(name)
    info.size = size
    return info.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("size", [(2 << 30) + 1, (8 << 30) - 1, 8 << 30, (8 << 30) + 1, 1 << 62])
def test_large_sizes(tmp_path: Path, size: int) -> None:
    """Sizes beyond 2 and 8 GiB are read as what they are: missing data is noticed, and bounds count them."""
    with pytest.raises(SandboxError) as caught:
        trees.unpack_bytes(_sized("big", size), tmp_path / "t", limits=UnpackLimits(expanded=1 << 63))
    assert (caught.value.reason, caught.value.details) == ("bad_tar", "it ends within a file")
    with pytest.raises(SandboxError, match="'big' takes the layer beyond") as caught:
        trees.unpack_bytes(_sized("big", size), tmp_path / "u", limits=UnpackLimits(expanded=size - 1))
    assert caught.value.reason == "layer_too_large"


def test_negative_sizes_are_refused(tmp_path: Path) -> None:
    """A size below zero would move the reader backwards."""
    header = bytearray(_sized("x", 8 << 30))
    header[124:136] = b"\xff" * 12
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    with pytest.raises(SandboxError, match="negative size"):
        trees.unpack_bytes(bytes(header), tmp_path / "t")


def test_one_entry_and_none_of_length(tmp_path: Path) -> None:
    """A layer of one empty file."""
    report = trees.unpack([build.Entry("only")], tmp_path / "t")
    assert (report.entries, report.nodes, report.bytes) == (1, 1, 0)
    assert trees.describe(tmp_path / "t") == {"only": "file 644 0:0 b''"}
