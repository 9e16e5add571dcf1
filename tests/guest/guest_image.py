"""What the guest boots: the kernel's files as ``./dev setup`` unpacked them, and an initrd made here."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

HERE: Final = Path(__file__).resolve().parent
KERNELS: Final = HERE.parents[1] / ".cache" / "guest-kernel"
BUSYBOX: Final = Path("/bin/busybox")
MODULES: Final = (
    *("virtio_ring", "virtio", "virtio_mmio", "virtio_blk", "virtio_console"),
    *("fuse", "virtiofs", "overlay", "loop"),
)
"""Each after those it needs: the package has no modules.dep, which is made when a kernel is installed."""
_APPLETS: Final = ("sh", "cat", "cp", "insmod", "mkdir", "mount", "switch_root")
_DIRECTORIES: Final = ("bin", "dev", "lower", "modules", "newroot", "proc", "sys", "upper")


class GuestUnavailable(Exception):  # noqa: N818  it names a state of this machine, not a fault
    """Something the guest needs is not here; the text says what, and what to do."""


@dataclass(frozen=True, slots=True)
class GuestKernel:
    """A kernel image and its modules by name."""

    image: Path
    modules: Mapping[str, Path]

    @classmethod
    def find(cls, directory: Path = KERNELS) -> Self:
        """The unpacked kernel in `directory`.

        :raises GuestUnavailable: when there is none, or a module is missing.
        """
        images = sorted(directory.glob("boot/vmlinuz-*"))
        if not images:
            raise GuestUnavailable(f"no guest kernel in {directory} (./dev setup gets it)")
        version = images[-1].name.removeprefix("vmlinuz-")
        found = {path.stem: path for path in (directory / "lib/modules" / version).rglob("*.ko")}
        missing = [name for name in MODULES if name not in found]
        if missing:
            raise GuestUnavailable(
                f"{version} lacks the modules {', '.join(missing)} (remove {directory}, ./dev setup)"
            )
        return cls(images[-1], {name: found[name] for name in MODULES})


def command_script(argv: Sequence[str], directory: str, environment: Mapping[str, str]) -> bytes:
    """What the guest's init runs: `argv` in `directory`, with `environment` and nothing of the host's."""
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in environment.items())
    return f"cd {shlex.quote(directory)}\n{exports}exec {shlex.join(argv)}\n".encode()


def initrd(kernel: GuestKernel, command: bytes) -> bytes:
    """A cpio archive in the kernel's format, uncompressed: busybox, the modules, our init and the command."""
    if not BUSYBOX.exists():
        raise GuestUnavailable(f"{BUSYBOX} is not installed (./dev setup gets it)")
    return b"".join(_records(kernel, command))


def _records(kernel: GuestKernel, command: bytes) -> Iterator[bytes]:
    for name in _DIRECTORIES:
        yield _record(name, stat.S_IFDIR | 0o755, b"")
    # The kernel opens it before any script of ours has mounted /dev.
    yield _record("dev/console", stat.S_IFCHR | 0o600, b"", device=(5, 1))
    yield _record("bin/busybox", stat.S_IFREG | 0o755, BUSYBOX.read_bytes())
    for name in _APPLETS:
        yield _record(f"bin/{name}", stat.S_IFLNK | 0o777, b"busybox")
    for name, path in kernel.modules.items():
        yield _record(f"modules/{name}.ko", stat.S_IFREG | 0o644, path.read_bytes())
    order = "".join(f"{name}.ko\n" for name in kernel.modules)
    yield _record("modules/order", stat.S_IFREG | 0o644, order.encode())
    yield _record("init", stat.S_IFREG | 0o755, (HERE / "init.sh").read_bytes())
    yield _record("command", stat.S_IFREG | 0o644, command)
    yield _record("TRAILER!!!", 0, b"")


def _record(name: str, mode: int, data: bytes, device: tuple[int, int] = (0, 0)) -> bytes:
    """One member in "newc" form (Linux, Documentation/driver-api/early-userspace/buffer-format.rst)."""
    path = os.fsencode(name) + b"\0"
    # inode, mode, uid, gid, links, mtime, size, device of the file (2), device it stands for (2), name, checksum
    fields = (0, mode, 0, 0, 1, 0, len(data), 0, 0, *device, len(path), 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + path
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
