"""The bounded disk of an attempt."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeyard_host.host import Host
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import SandboxPlaced, SandboxSetup, ScratchDir
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.result import DiskEvidence

pytestmark = pytest.mark.kernel

MIB = 1 << 20


@pytest.fixture
def host(state_dir: Path) -> Iterator[Host]:
    """A Host on a state directory of its own."""
    made = Host(str(state_dir))
    yield made
    made.close()


def set_up(host: Host, limit: int | None) -> tuple[SandboxPlaced, str]:
    """An attempt with one scratch directory; and its directory."""
    sandbox = SandboxId.mint()
    ledger = Ledger.open(host.state_root, sandbox, "test")
    directory = host.directory_of(sandbox)
    scratch = (ScratchDir("w", "w", 0o777, 0, 0),)
    try:
        return host.setup(SandboxSetup(sandbox, directory, None, 1, 0, 0, scratch=scratch, disk_limit=limit), ledger), (
            directory
        )
    finally:
        ledger.close_and_remove()


def fill(path: str) -> int:
    """Write until ENOSPC; bytes written."""
    with open(path, "wb", buffering=0) as file:
        while True:
            try:
                file.write(bytes(MIB))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
                return file.tell()


@pytest.mark.parametrize("limit", [16 * MIB, 200 * MIB])
def test_the_disk_ends_at_its_limit(host: Host, limit: int) -> None:
    """A writer meets ENOSPC within a few percent of the limit, and the evidence says full."""
    placed, directory = set_up(host, limit)
    try:
        before = host.disk_usage(directory)
        written = fill(placed.sources["w"] + "/big")
        after = host.disk_usage(directory)
    finally:
        host.teardown(directory)

    assert 0.93 * limit <= written <= 1.05 * limit
    assert not before.full
    assert after.full
    assert after.limit is not None
    assert after.peak is not None
    assert 0.93 * limit <= after.limit <= 1.07 * limit
    assert after.peak >= written


def test_many_small_files_fit(host: Host) -> None:
    """There are inodes enough for a package manager's tree: one per 8 KiB."""
    placed, directory = set_up(host, 64 * MIB)
    try:
        facts = os.statvfs(placed.scratch)
    finally:
        host.teardown(directory)

    assert facts.f_favail >= 64 * MIB // 8192 * 0.9


def test_teardown_frees_the_loop_device(host: Host, state_dir: Path) -> None:
    """Nothing of the disk is left: no mount, no image, no loop device with it behind."""
    placed, directory = set_up(host, 32 * MIB)
    Path(placed.sources["w"], "data").write_bytes(os.urandom(4 * MIB))

    host.teardown(directory)
    host.teardown(directory)

    assert not os.path.exists(directory)
    backing = [path.read_text() for path in Path("/sys/block").glob("loop*/loop/backing_file")]
    assert not [path for path in backing if str(state_dir) in path]


def test_the_host_survives_the_teardown_of_a_disk_that_was_never_mounted(host: Host) -> None:
    """An image without a mount (a crash in between) never makes teardown give up the host's own filesystem."""
    sandbox = SandboxId.mint()
    ledger = Ledger.open(host.state_root, sandbox, "test")
    directory = host.create_directory(sandbox, ledger)
    Path(directory, "disk.img").write_bytes(b"")

    host.teardown(directory)
    ledger.close_and_remove()

    probe = Path(host.state_root, "probe")
    probe.write_text("still writable")
    assert probe.read_text() == "still writable"


def test_without_a_limit_there_is_no_disk_evidence(host: Host) -> None:
    """The host's own disk says nothing about one attempt, so nothing is claimed."""
    _, directory = set_up(host, None)
    try:
        assert host.disk_usage(directory) == DiskEvidence()
    finally:
        host.teardown(directory)


def test_setid_and_devices_do_nothing_on_the_disk(host: Host) -> None:
    """The disk is nosuid and nodev."""
    placed, directory = set_up(host, 32 * MIB)
    try:
        options = subprocess.run(
            ["findmnt", "-no", "OPTIONS", placed.scratch], capture_output=True, text=True, check=True
        ).stdout
    finally:
        host.teardown(directory)

    assert {"nosuid", "nodev"} <= set(options.strip().split(","))


def test_a_host_without_mkfs_says_so(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing tool is a typed error with a cure, and what was begun can be taken down."""
    monkeypatch.setattr("forgeyard_host.disks.MKFS", "mkfs.no-such-filesystem")

    with pytest.raises(SandboxError) as caught:
        set_up(host, 48 * MIB)

    assert caught.value.kind is SandboxErrorKind.RESOURCE_LIMIT_FAILED
    assert "e2fsprogs" in caught.value.resolution
    for name in os.listdir(f"{host.state_root}/sandboxes"):
        host.teardown(f"{host.state_root}/sandboxes/{name}")


def test_the_room_is_set_aside(host: Host) -> None:
    """All of the disk's blocks are the attempt's before it starts: what others write can't take them."""
    _, directory = set_up(host, 64 * MIB)
    try:
        info = os.stat(f"{directory}/disk.img")
    finally:
        host.teardown(directory)

    assert info.st_blocks * 512 >= 64 * MIB


@pytest.fixture
def small_filesystem(state_dir: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A filesystem of 48 MiB made by the given program."""
    image, mountpoint = state_dir / "small.img", state_dir / "small"
    with image.open("wb") as file:
        file.truncate(48 * MIB)
    subprocess.run([request.param, "-q", image], check=True)
    mountpoint.mkdir(mode=0o711)
    subprocess.run(["mount", "-o", "loop", image, mountpoint], check=True)
    yield mountpoint
    subprocess.run(["umount", mountpoint], check=True)


@pytest.mark.parametrize("small_filesystem", ["mkfs.ext4"], indirect=True)
def test_a_host_without_room_says_so_before_the_job(small_filesystem: Path) -> None:
    """A typed error with the cure, where a sparse file would have failed the job half-way."""
    host = Host(str(small_filesystem))
    try:
        with pytest.raises(SandboxError) as caught:
            set_up(host, 64 * MIB)
        for name in os.listdir(f"{host.state_root}/sandboxes"):
            host.teardown(f"{host.state_root}/sandboxes/{name}")
    finally:
        host.close()

    assert (caught.value.kind, caught.value.reason) == (SandboxErrorKind.RESOURCE_LIMIT_FAILED, "no_space")
    assert "64 MiB" in caught.value.brief
    assert str(small_filesystem) in caught.value.resolution


@pytest.mark.parametrize("small_filesystem", ["mkfs.ext2"], indirect=True)
def test_a_filesystem_that_cannot_set_room_aside_is_noted(small_filesystem: Path) -> None:
    """The limit still holds; that a full host would fail the job is said."""
    host = Host(str(small_filesystem))
    try:
        placed, directory = set_up(host, 16 * MIB)
        host.teardown(directory)
    finally:
        host.close()

    assert "can't set the disk's room aside" in "".join(placed.notes)


def test_the_filesystems_own_numbers(host: Host) -> None:
    """What is written and made shows in what is in use on the filesystem of the layer."""
    placed, directory = set_up(host, 64 * MIB)
    try:
        before = host.filesystem_usage(directory)
        with open(placed.sources["w"] + "/big", "wb") as file:
            file.write(bytes(16 * MIB))
            os.fsync(file.fileno())
        after = host.filesystem_usage(directory)
    finally:
        host.teardown(directory)

    assert after.bytes - before.bytes >= 16 * MIB
    assert after.files - before.files == 1
