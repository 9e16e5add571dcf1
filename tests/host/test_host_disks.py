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
