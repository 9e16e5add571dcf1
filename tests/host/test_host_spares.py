"""Directories that serve one attempt after another: nothing of the last one may be in or on them."""

from __future__ import annotations

import fcntl
import os
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from forgeyard_host.cgroups import CgroupHost
from forgeyard_host.host import Host
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import IdMapKind, OverlayRequest, SandboxPlaced, SandboxSetup, ScratchDir
from forgeyard_host.recovery import undo
from forgeyard_model.identity import SandboxId

pytestmark = pytest.mark.kernel

BASE = 2_000_000_000 + 65536 * 1700
Attempt = tuple[SandboxPlaced, Callable[[], None]]
Begin = Callable[..., Attempt]


@pytest.fixture
def host(state_dir: Path) -> Iterator[Host]:
    """A Host that leaves nothing behind when closed."""
    made = Host(str(state_dir))
    yield made
    made.close()
    assert not (state_dir / "spare").exists()


@pytest.fixture
def begin(host: Host, state_dir: Path) -> Begin:
    """Sets an attempt up with one scratch directory and one overlay; returns it and how to end it in the usual way."""
    (state_dir / "lower").mkdir()
    cgroups = CgroupHost.detect()

    def call(base: int = BASE, name: str = "w", upper: str = "up", mode: int = 0o755, **more: int) -> Attempt:
        sandbox = SandboxId.mint()
        ledger = Ledger.open(str(state_dir), sandbox, "me")
        directory = host.create_directory(sandbox, ledger)
        scratch = (ScratchDir("w", name, mode, 1000, 1000),)
        overlays = (OverlayRequest("o", (str(state_dir / "lower"),), IdMapKind.SHIFT, upper),)
        request = SandboxSetup(sandbox, directory, base, 65536, 1000, 1000, (), overlays, scratch, **more)  # type: ignore[arg-type]  # disk_limit alone
        placed = host.setup(request, ledger)

        def end() -> None:
            undo(ledger.record(), host, cgroups, orphans=False)
            ledger.close()

        return placed, end

    return call


def inode(placed: SandboxPlaced) -> int:
    """Which directory the slot `w` is."""
    return os.stat(placed.sources["w"]).st_ino


def test_a_clean_directory_serves_again(begin: Begin, state_dir: Path) -> None:
    """The next attempt gets the emptied directories, with its own owner and mode, and sees no file of the last."""
    first, end = begin(mode=0o1777)
    Path(first.sources["w"], "deep/er").mkdir(parents=True)
    Path(first.sources["w"], "deep/er/file").write_text("of the first")
    Path(first.sources["o"], "file").write_text("of the first")
    Path(os.path.dirname(first.scratch), "token").write_text("of the first")
    Path(os.path.dirname(first.scratch), "hosts").write_text("of the first")
    was = inode(first)
    end()
    assert os.listdir(state_dir / "sandboxes") == []

    second, end = begin(base=BASE + 65536, mode=0o700)
    info = os.stat(second.sources["w"])

    assert info.st_ino == was
    assert (info.st_uid, info.st_gid, stat.S_IMODE(info.st_mode)) == (BASE + 66536, BASE + 66536, 0o700)
    assert os.stat(second.sources["o"]).st_uid == BASE + 65536
    walk = os.walk(os.path.dirname(second.scratch))
    # The kernel keeps a mark of its own in the work directory of a mounted overlay.
    assert [name for path, _, files in walk if "/up/work" not in path for name in files] == []
    assert os.listdir(second.sources["w"]) == os.listdir(second.sources["o"]) == []
    end()


def give_attribute(path: str) -> None:
    """What a job can do to a directory it owns."""
    os.setxattr(path, "user.note", b"from the last job")


def give_acl(path: str) -> None:
    """A default ACL for uid 7: version 2, then tag, permissions and id per entry."""
    entries = ((1, 7, 0xFFFFFFFF), (2, 7, 7), (4, 7, 0xFFFFFFFF), (16, 7, 0xFFFFFFFF), (32, 7, 0xFFFFFFFF))
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)
    os.setxattr(path, "system.posix_acl_default", packed)


def give_flag(path: str) -> None:
    """chattr +d, which any owner may do."""
    fd = os.open(path, os.O_RDONLY)
    try:
        (flags,) = struct.unpack("=Q", fcntl.ioctl(fd, 0x80086601, bytes(8)))
        fcntl.ioctl(fd, 0x40086602, struct.pack("=Q", flags | 0x40))
    finally:
        os.close(fd)


def make_it_grow(path: str) -> None:
    """A directory that held many names stays large after they are gone."""
    for number in range(300):
        Path(path, f"{number}-{'x' * 100}").touch()


@pytest.mark.parametrize("slot", ["w", "o"])
@pytest.mark.parametrize("mark", [give_attribute, give_acl, give_flag, make_it_grow])
def test_a_marked_directory_does_not(begin: Begin, slot: str, mark: Callable[[str], None]) -> None:
    """A directory on which a job left a mark of any kind is removed, and the next attempt gets a new one."""
    first, end = begin()
    upper = f"{first.scratch}/up/upper" if slot == "o" else first.sources["w"]
    mark(upper)
    kept = os.open(upper, os.O_PATH)  # as long as it is open its inode number is not given out again
    try:
        end()
        second, end = begin()
        now = f"{second.scratch}/up/upper" if slot == "o" else second.sources["w"]
        assert os.stat(now).st_ino != os.fstat(kept).st_ino
        assert [name for name in os.listxattr(now) if not name.startswith("trusted.overlay.")] == []
        end()
    finally:
        os.close(kept)


def test_names_may_change_their_use(begin: Begin) -> None:
    """What was a scratch directory can hold the next attempt's overlay, and the other way round."""
    _, end = begin(name="a", upper="b")
    end()

    second, end = begin(name="b", upper="a")
    Path(second.sources["o"], "file").write_text("x")

    assert os.listdir(second.sources["w"]) == []
    end()
    third, end = begin(name="c", upper="d")
    assert os.listdir(third.sources["o"]) == []
    end()


def test_a_disk_of_its_own_over_a_spare(begin: Begin) -> None:
    """With a disk limit the attempt writes to its disk, over a spare directory as over a new one."""
    first, end = begin()
    end()
    second, end = begin(disk_limit=32 << 20)
    assert os.stat(second.scratch).st_dev != os.stat(os.path.dirname(second.scratch)).st_dev
    Path(second.sources["w"], "file").write_text("x")
    end()

    third, end = begin()
    assert os.listdir(third.sources["w"]) == []
    assert first.sources["w"] != third.sources["w"]
    end()


def test_nothing_is_kept_while_processes_may_live(host: Host, state_dir: Path, begin: Begin) -> None:
    """Recovery and a plain teardown remove; only an attempt known to be dead leaves its directories to another."""
    placed, _ = begin()

    host.teardown(os.path.dirname(placed.scratch))

    assert not (state_dir / "spare").exists()
    for name in os.listdir(state_dir / "ledger"):
        os.unlink(state_dir / "ledger" / name)


def test_spares_of_a_killed_executor_are_swept(state_dir: Path) -> None:
    """The next Host removes what a killed one had kept, and leaves a living one's alone."""
    program = "import os, sys\nfrom forgeyard_host.spares import Layout, Spares\nfrom forgeyard_host.host import Host\n"
    program += "spares = Host(sys.argv[1])._spares\nos.makedirs(spares._home + '/1')\n"
    program += "print('kept', flush=True)\nsys.stdin.read()"
    argv = [sys.executable, "-c", program, str(state_dir)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        Host(str(state_dir)).close()
        assert len(os.listdir(state_dir / "spare")) == 1
        process.kill()
    Host(str(state_dir)).close()

    assert not (state_dir / "spare").exists()
