"""The confined process that reads images: what it does, what it can't, and what becomes of a call when it fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import build
import pytest
import trees
from build import Entry, folder, hardlink, opaque, symlink, whiteout

from forgeyard_host.processes import process_facts
from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.image_manifest import Index, Manifest
from forgeyard_oci.reader import ImageReader
from forgeyard_oci.reader_channel import Channel, ChannelError
from forgeyard_oci.reader_errors import unpack_error
from forgeyard_oci.tree_records import check_tree
from forgeyard_oci.unpack import UnpackReport
from forgeyard_oci.unpack_limits import UnpackLimits

pytestmark = pytest.mark.kernel

MEDIA_TYPE = "application/vnd.oci.image.layer.v1.tar"
DIGEST = "sha256:" + "0" * 64


@pytest.fixture
def reader() -> Iterator[ImageReader]:
    """A reader; its process ends with the test."""
    with ImageReader(limits=UnpackLimits()) as made:
        yield made


def unpack(
    reader: ImageReader, entries: Sequence[Any] | bytes, target: Path, lowers: Sequence[Path] = (), **more: Any
) -> UnpackReport:
    """Unpack a plain layer into `target`; its records lie beside it."""
    layer = entries if isinstance(entries, bytes) else build.tar(entries)
    target.mkdir()
    blob = target.parent / f"{target.name}.blob"
    blob.write_bytes(layer)
    fd = os.open(blob, os.O_RDONLY)
    try:
        return reader.unpack(
            fd,
            media_type=MEDIA_TYPE,
            digest=build.sha256(layer),
            size=len(layer),
            diff_id=build.sha256(layer),
            tree=target,
            lowers=tuple(str(lower) for lower in lowers),
            records=target.parent / f"{target.name}.records",
            **more,
        )
    finally:
        os.close(fd)


def test_it_unpacks_as_the_library_does(reader: ImageReader, tmp_path: Path) -> None:
    """Trees, reports and records are those that unpacking without a process gives, opaque marks included."""
    lower = [
        folder("d"),
        Entry("d/old"),
        folder("e", mode=0o700, uid=7),
        Entry("e/x", b"low"),
        folder("w"),
        Entry("w/y"),
    ]
    upper = [
        Entry("d/new", uid=1000, gid=100, mode=0o6755),
        opaque("d"),
        whiteout("e/x"),
        whiteout("w"),
        hardlink("link", "w2"),
        symlink("s", "/etc"),
    ]
    middle = [folder("w"), opaque("w"), Entry("w2", b"linked")]
    for name, layer, below in (("low", lower, []), ("mid", middle, ["low"]), ("up", upper, ["mid", "low"])):
        mine = unpack(reader, layer, tmp_path / name, [tmp_path / part for part in below])
        theirs = trees.unpack(layer, tmp_path / f"{name}2", [tmp_path / f"{part}2" for part in below])
        assert mine == theirs
        assert trees.describe(tmp_path / name) == trees.describe(tmp_path / f"{name}2")
        assert check_tree(tmp_path / name, tmp_path / f"{name}.records") == []
    assert trees.describe(tmp_path / "up")["d"] == "dir 755 0:0 opaque"


def test_marks_below_are_respected(reader: ImageReader, tmp_path: Path) -> None:
    """The process can't read a lower layer's opaque mark itself; it asks, and a hidden file stays hidden."""
    unpack(reader, [folder("d"), Entry("d/old", b"secret of the lowest")], tmp_path / "low")
    unpack(reader, [folder("d"), opaque("d"), folder("d/in")], tmp_path / "mid", [tmp_path / "low"])
    with pytest.raises(SandboxError) as caught:
        unpack(reader, [hardlink("x", "d/old")], tmp_path / "up", [tmp_path / "mid", tmp_path / "low"])
    assert caught.value.reason == "dangling_link"


def test_what_the_process_is_left(reader: ImageReader) -> None:
    """Five capabilities over files, an empty root, no network, a filter, no descriptor but its socket."""
    reader.document(b'{"manifests": []}', "", DIGEST)
    assert reader.pid is not None
    facts, own = process_facts(reader.pid), process_facts(os.getpid())
    files = sum(1 << number for number in (0, 1, 3, 4, 31))
    assert dict(facts.capabilities) == {
        "inheritable": 0,
        "permitted": files,
        "effective": files,
        "bounding": files,
        "ambient": 0,
    }
    assert facts.no_new_privileges
    assert facts.seccomp == 2
    assert facts.uids[:3] == facts.gids[:3] == (0x7FFF_FFF0,) * 3
    for kind in ("mnt", "net", "ipc", "uts"):
        assert facts.namespaces[kind] != own.namespaces[kind], kind
    assert os.listdir(f"/proc/{reader.pid}/root/") == []
    assert len(Path(f"/proc/{reader.pid}/mountinfo").read_text(errors="surrogateescape").splitlines()) == 1
    limits = Path(f"/proc/{reader.pid}/limits").read_text()
    assert f"Max address space         {1 << 30} " in limits
    assert "Max core file size        0 " in limits
    held = {os.readlink(f"/proc/{reader.pid}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{reader.pid}/fd")}
    assert held == {"/dev/null", "socket"}


def test_errors_come_across_whole(reader: ImageReader, tmp_path: Path) -> None:
    """A refusal has the same type, reason and words as without the process, and the process lives on."""
    for number, entries in enumerate(([Entry("../f")], [hardlink("x", "no")], [Entry("x", uid=70_000)])):
        with pytest.raises(SandboxError) as theirs:
            trees.unpack(entries, tmp_path / f"a{number}")
        with pytest.raises(SandboxError) as mine:
            unpack(reader, entries, tmp_path / f"b{number}")
        assert (mine.value.kind, mine.value.reason, str(mine.value)) == (
            theirs.value.kind,
            theirs.value.reason,
            str(theirs.value),
        )
    pid = reader.pid
    assert unpack(reader, [Entry("fine")], tmp_path / "c").nodes == 1
    assert reader.pid == pid


def test_documents(reader: ImageReader) -> None:
    """Manifests, indexes and configs are read as parse_manifest reads them; fields nobody needs are left out."""
    layer = {"mediaType": f"{build.OCI}.layer.v1.tar", "digest": DIGEST, "size": 3}
    index = reader.document(b'{"manifests": [], "annotations": {"a": "b"}}', "", DIGEST)
    assert isinstance(index, Index)
    text = f'{{"schemaVersion": 2, "config": {build.json.dumps(layer)}, "layers": [{build.json.dumps(layer)}]}}'
    manifest = reader.document(text.encode(), f"{build.OCI}.manifest.v1+json", DIGEST)
    assert isinstance(manifest, Manifest)
    assert manifest.layers[0].size == 3
    config = reader.config(b'{"architecture": "amd64", "history": [1, 2], "config": {"User": "caf\xc3\xa9"}}', DIGEST)
    assert config.config is not None
    assert (config.architecture, config.config.user) == ("amd64", "caf\u00e9")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{",
        b"null",
        b'{"config": NaN}',
        b"\xff\xfe{\0}\0",
        b'{"config": "\xff"}',
        b'{"manifests": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"layers": ' + b"[" * 50 + b"]" * 50 + b"}",
        b'{"manifests": [' + b"1," * 300_000 + b"1]}",
        b'{"config": ' + b"9" * 5000 + b"}",
        b'{"manifests": [{"digest": "\\ud800", "size": 1}]}',
        b'{"manifests": [], "config": {}}',
        b'{"manifests": [{"digest": "x", "size": 1}]}',
    ],
)
def test_bad_documents(reader: ImageReader, data: bytes) -> None:
    """What is no document, or an absurd one, is refused by name."""
    with pytest.raises(SandboxError) as caught:
        reader.document(data, "", DIGEST)
    assert caught.value.reason == "bad_manifest"
    assert DIGEST in caught.value.brief


def test_documents_are_bounded(reader: ImageReader) -> None:
    """Over 4 MiB nothing is read at all."""
    with pytest.raises(SandboxError) as caught:
        reader.config(b" " * (4 << 20) + b"{}", DIGEST)
    assert caught.value.reason == "manifest_too_large"
    assert reader.pid is None


def test_memory_is_bounded(tmp_path: Path) -> None:
    """A document that takes too much memory fails that call, by name; the next call is answered."""
    with ImageReader(limits=UnpackLimits(), memory=192 << 20) as reader:
        reader.start()
        with pytest.raises(SandboxError) as caught:
            reader.document(b'{"manifests": [' + b"[[]]," * 800_000 + b"1]}", "", DIGEST)
        assert caught.value.reason == "image_reader_memory"
        assert "192 MiB" in caught.value.brief
        assert unpack(reader, [Entry("f")], tmp_path / "t").nodes == 1


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL, signal.SIGBUS])
def test_a_crash_is_that_calls_failure_only(tmp_path: Path, number: signal.Signals) -> None:
    """When the process dies half way the call says so, and the next one works."""
    with ImageReader(limits=UnpackLimits()) as reader:
        reader.document(b'{"manifests": []}', "", DIGEST)
        assert reader.pid is not None
        os.kill(reader.pid, signal.SIGSTOP)  # so that what follows surely meets a process at work

        def crash() -> None:
            assert reader.pid is not None
            os.kill(reader.pid, number)
            os.kill(reader.pid, signal.SIGCONT)

        with pytest.raises(SandboxError) as caught:
            unpack(reader, [Entry("f")], tmp_path / "t", check=crash)
        assert caught.value.reason == "image_reader_died"
        if number != signal.SIGKILL:
            assert number.name in str(caught.value)
        assert unpack(reader, [Entry("f")], tmp_path / "u").nodes == 1


def test_a_hang_ends(tmp_path: Path) -> None:
    """A process that makes no progress is ended after a while, and the next call gets a new one."""
    with ImageReader(limits=UnpackLimits(), idle=0.5) as reader:
        reader.document(b'{"manifests": []}', "", DIGEST)
        first = reader.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        with pytest.raises(SandboxError) as caught:
            unpack(reader, [Entry("f")], tmp_path / "t")
        assert caught.value.reason == "image_reader_hung"
        assert not Path(f"/proc/{first}").exists()
        assert unpack(reader, [Entry("f")], tmp_path / "u").nodes == 1


def test_a_caller_can_end_it(tmp_path: Path) -> None:
    """What `check` raises ends the unpacking at once, with the process."""
    with ImageReader(limits=UnpackLimits()) as reader:
        reader.document(b'{"manifests": []}', "", DIGEST)
        first = reader.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)

        def cancelled() -> None:
            raise ExecutorError.prepare(unpack_error(_PACKED))  # type: ignore[arg-type]  # a SandboxError, see below

        with pytest.raises(ExecutorError):
            unpack(reader, [Entry("f")], tmp_path / "t", check=cancelled)
        assert not Path(f"/proc/{first}").exists()


_PACKED = {
    "class": "sandbox",
    "kind": "invalid_filesystem_plan",
    "reason": "x",
    "brief": "b\x1b[2J\n" + "y" * 9000,
    "details": 5,
    "resolution": None,
}


def test_no_descriptor_or_process_is_left(tmp_path: Path) -> None:
    """After good and bad calls, and after the end, the executor holds what it held before."""
    before = sorted(os.listdir("/proc/self/fd"))
    with ImageReader(limits=UnpackLimits()) as reader:
        unpack(reader, [folder("d"), Entry("d/f")], tmp_path / "low")
        during = len(os.listdir("/proc/self/fd"))
        for number in range(5):
            unpack(reader, [Entry("d/g"), whiteout("d/f")], tmp_path / f"t{number}", [tmp_path / "low"])
            with pytest.raises(SandboxError):
                unpack(reader, [Entry("..")], tmp_path / f"u{number}", [tmp_path / "low"])
        assert len(os.listdir("/proc/self/fd")) <= during
        pid = reader.pid
        # It answers, closes what it was given, and only then takes the next request.
        reader.config(b"{}", DIGEST)
        held = len(os.listdir(f"/proc/{pid}/fd"))
        unpack(reader, [Entry("d/g")], tmp_path / "again", [tmp_path / "low"])
        reader.config(b"{}", DIGEST)
        assert len(os.listdir(f"/proc/{pid}/fd")) == held
    assert len(os.listdir("/proc/self/fd")) <= len(before)
    assert not Path(f"/proc/{pid}").exists()


def test_many_lowers(reader: ImageReader, tmp_path: Path) -> None:
    """More layers below than descriptors fit in one message."""
    lowers = []
    for number in range(300):
        lowers.append(tmp_path / f"l{number}")
        lowers[-1].mkdir()
        (lowers[-1] / f"f{number}").write_text("x")
    unpack(reader, [hardlink("a", "f0"), hardlink("b", "f299")], tmp_path / "t", lowers)
    assert trees.names(tmp_path / "t") == {"a", "b", "f0", "f299"}


@pytest.fixture
def taken_over(tmp_path: Path) -> Iterator[tuple[ImageReader, Channel]]:
    """A reader whose process says what the test wants it to."""
    ours, theirs = socket.socketpair()
    reader = ImageReader(limits=UnpackLimits(entries=10), idle=5)
    reader._process = subprocess.Popen(["sleep", "60"])
    reader._channel, reader._ready = Channel(ours), True
    with reader:
        yield reader, Channel(theirs, descriptors=4)
    theirs.close()


REPORT = {
    **{"entries": 1, "bytes": 1, "devices_skipped": 0, "skipped": [], "dropped_xattrs": 0, "used_lowers": False},
    **{"opaque_root": False, "dropped_names": [], "nodes": 1},
}


@pytest.mark.parametrize(
    "answer",
    [
        {},
        {"done": True},
        {"done": True, "report": {}},
        {"done": True, "report": {**REPORT, "entries": -1}},
        {"done": True, "report": {**REPORT, "entries": True}},
        {"done": True, "report": {**REPORT, "used_lowers": 1}},
        {"done": True, "report": {**REPORT, "skipped": ["x"] * 101}},
        {"done": True, "report": {**REPORT, "skipped": [1]}},
        {"done": True, "report": {**REPORT, "more": 1}},
        {"opaque": ["../outside"]},
        {"opaque": ["link"]},
        {"opaque": ["link/in"]},
        {"opaque": ["/etc"]},
        {"opaque": ["file"]},
        {"opaque": ["a\0b"]},
        {"opaque": ["d"] * 12},
        {"opaque": "d"},
        {"opaque": [7]},
        {"ask": 0, "path": "../outside"},
        {"ask": 0, "path": "link"},
        {"ask": 5, "path": "d"},
        {"ask": "0", "path": "d"},
        {"ask": 0},
        {"error": {"class": "sandbox", "kind": "security_violation", "reason": "x", "brief": "y"}},
        {"error": {"class": "sandbox", "kind": "invalid_filesystem_plan", "reason": "A B", "brief": "y"}},
        {"error": "x"},
    ],
    ids=str,
)
def test_a_process_that_was_taken_over(
    taken_over: tuple[ImageReader, Channel], tmp_path: Path, answer: dict[str, Any]
) -> None:
    """Whatever it answers, nothing outside the tree is touched, and the call fails as if it had died."""
    reader, other = taken_over
    outside = tmp_path / "outside"
    (outside / "in").mkdir(parents=True)
    for place in (tmp_path / "low", tmp_path / "t2"):
        (place / "d").mkdir(parents=True)
        (place / "link").symlink_to(outside)
        (place / "file").touch()

    def talk() -> None:
        other.receive()
        for fd in other.receive().descriptors:
            os.close(fd)
        (tmp_path / "t2").rename(tmp_path / "t/x")
        for child in (tmp_path / "t/x").iterdir():
            child.rename(tmp_path / "t" / child.name)
        other.send(answer)

    thread = threading.Thread(target=talk)
    thread.start()
    try:
        with pytest.raises(SandboxError) as caught:
            unpack(reader, [Entry("f")], tmp_path / "t", [tmp_path / "low"])
    finally:
        thread.join()
    assert caught.value.reason == "image_reader_died"
    assert os.listxattr(outside) == os.listxattr(outside / "in") == os.listxattr(tmp_path / "low/d") == []
    assert reader.pid is None


def test_messages_that_are_none() -> None:
    """Lengths are bounded before anything is read for them; broken JSON and descriptors are no harm."""
    for raw in (b"\xff" * 8, b"\0\0\0\2\xff\0\0\0{}", b"\0\0\0\1\0\0\0\0{", b"\0\0\0\2\0\0\0\0[]", b"\0\0", b""):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            theirs.sendall(raw)
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(ChannelError):
                Channel(ours).receive(idle=5)
    ours, theirs = socket.socketpair()
    before = len(os.listdir("/proc/self/fd"))
    with ours, theirs:
        Channel(theirs).send({"a": 1}, descriptors=[0, 1])
        message = Channel(ours).receive(idle=5)
        assert (message.body, message.descriptors) == ({"a": 1}, ())
        assert len(os.listdir("/proc/self/fd")) <= before


def test_error_messages_are_cleaned() -> None:
    """Text from there is short, and holds nothing a terminal would obey."""
    error = unpack_error(_PACKED)
    assert isinstance(error, SandboxError)
    assert error.brief.startswith("b?[2J?yyy")
    assert len(error.brief) == 2000
    assert (error.details, error.resolution) == ("", "")
