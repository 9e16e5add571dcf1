"""The bounded disk of an attempt: an ext4 in a file, so that its writable layer ends where the limit says.

The file's blocks are set aside before the job starts: a host whose disk fills up meanwhile fails nobody's job.
"""

# ruff: noqa: PTH116, PTH120  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import struct
import subprocess
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Final

from forgeyard_host import syscalls
from forgeyard_host.failures import describe
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.result import DiskEvidence
from forgeyard_model.units import format_size

MKFS: Final = "mkfs.ext4"
_LOOP_CTL_GET_FREE: Final = 0x4C82
_LOOP_CONFIGURE: Final = 0x4C0A
_LO_FLAGS_AUTOCLEAR: Final = 4
_LOOP_CONFIG_SIZE: Final = 304  # struct loop_config: fd, block size, struct loop_info64 (232), 8 reserved u64
_LO_FLAGS_OFFSET: Final = 8 + 52
_EXT4_IOC_SHUTDOWN: Final = 0x8004587D  # _IOR('X', 125, __u32)
_NO_LOG_FLUSH: Final = 2
_LOOP_MAJOR: Final = 7
_FEATURES: Final = (
    # Spelled out, so that no distribution's mke2fs.conf adds a journal or what an older kernel cannot mount.
    "none,extent,flex_bg,metadata_csum,64bit,filetype,dir_index,sparse_super,large_file,huge_file,dir_nlink,extra_isize"
)
_FULL: Final = 2 << 20
"""Bytes left at which a disk counts as full: the kernel allocates up to 2 MiB at once and fails with less."""
_TEMPLATES: Final = 16

Extents = tuple[tuple[int, bytes], ...]


class DiskMaker:
    """Makes and mounts disks. What mkfs writes for a size is kept in memory: some hundred KiB, most of it holes."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._templates: OrderedDict[int, Extents] = OrderedDict()

    def mount(self, image: str, mountpoint: str, limit: int) -> bool:
        """Make `image` and mount it at `mountpoint` with about `limit` bytes to write.

        :returns: whether its room was set aside; False on a filesystem that can't do that.
        :raises SandboxError: RESOURCE_LIMIT_FAILED when this host cannot bound a disk; reason no_space when it has
            no room for one of that size.
        """
        size = _image_size(limit)
        try:
            reserved = _write_image(image, size, self._template(size), reserve=True)
            _mount_loop(image, mountpoint)
        except (OSError, subprocess.CalledProcessError) as error:
            if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise _no_space(image, limit, error) from error
            cure = "install e2fsprogs and make /dev/loop-control available, or set no limit"
            if isinstance(error, OSError) and error.errno == errno.EFBIG:
                cure = "ask for a smaller disk, or put the state directory on a larger file system"
            raise SandboxError(
                SandboxErrorKind.RESOURCE_LIMIT_FAILED,
                "no_bounded_disk",
                "cannot make a disk of limited size",
                details=describe(error) if isinstance(error, OSError) else _last_line(error),
                resolution=cure,
            ) from error
        return reserved

    @contextlib.contextmanager
    def detached(self, image: str, limit: int) -> Iterator[int]:
        """A disk as `mount` makes it, but mounted nowhere: an fd of its root. Gone at the end, `image` included.

        :raises OSError, SandboxError: when this host cannot bound a disk.
        """
        size = _image_size(limit)
        try:
            template = self._template(size)
        except subprocess.CalledProcessError as error:
            raise OSError(errno.EIO, _last_line(error)) from error
        _write_image(image, size, template, reserve=False)
        with contextlib.ExitStack() as stack:
            stack.callback(os.unlink, image)
            tree = _fsmount_loop(image)
            stack.callback(os.close, tree)
            root = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=tree)
            stack.callback(os.close, root)
            yield root
            fcntl.ioctl(root, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))

    def _template(self, size: int) -> Extents:
        with self._lock:
            found = self._templates.get(size)
            if found is None:
                found = self._templates[size] = _format(size)
                if len(self._templates) > _TEMPLATES:
                    self._templates.popitem(last=False)
            self._templates.move_to_end(size)
            return found


def _image_size(limit: int) -> int:
    """Room for ext4's own tables on top: an inode of 256 bytes per 8 KiB, bitmaps, descriptors."""
    return (limit + limit // 32 + limit // 512 + (1 << 20)) & ~0xFFF


def _format(size: int) -> Extents:
    """What mkfs writes into an empty file of `size` bytes. No journal: the disk never outlives its attempt."""
    with tempfile.NamedTemporaryFile(prefix="forgeyard-disk-") as file:
        file.truncate(size)
        options = ["-q", "-F", "-m", "0", "-b", "4096", "-i", "8192", "-I", "256", "-O", _FEATURES]
        subprocess.run(
            [MKFS, *options, "-E", "lazy_itable_init=1,nodiscard", file.name],
            check=True,
            capture_output=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
            timeout=60,
        )
        return tuple(_data_of(file.fileno(), size))


def _data_of(fd: int, size: int) -> Iterator[tuple[int, bytes]]:
    position = 0
    while position < size:
        try:
            position = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            raise
        end = os.lseek(fd, position, os.SEEK_HOLE)
        data = os.pread(fd, end - position, position)
        if data.strip(b"\0"):
            yield position, data
        position = end


def _write_image(image: str, size: int, extents: Extents, *, reserve: bool) -> bool:
    """Whether its blocks were set aside, which was tried if `reserve`."""
    fd = os.open(image, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.ftruncate(fd, size)
        reserved = reserve and _reserved(fd, size, image)
        for position, data in extents:
            os.pwrite(fd, data, position)
        return reserved
    finally:
        os.close(fd)


def _reserved(fd: int, size: int, image: str) -> bool:
    try:
        syscalls.reserve(fd, size, image)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
            raise
        return False
    return True


def _no_space(image: str, limit: int, error: OSError) -> SandboxError:
    """Before the job starts: not its fault, and another host may have the room."""
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED,
        "no_space",
        f"the host has no room for a disk of {format_size(limit)}",
        details=describe(error),
        resolution=f"free space in the file system of {os.path.dirname(image)}, or ask for a smaller disk",
    )


def _mount_loop(image: str, mountpoint: str) -> None:
    """Attach and mount. The device frees itself (AUTOCLEAR) with its last user: the mount, or us on a failure."""
    backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
    try:
        loop, device = _attach(backing, image)
        try:
            flags = syscalls.MS_NOSUID | syscalls.MS_NODEV | syscalls.MS_NOATIME
            # The inode tables are zero already, being holes: without this the kernel would write them out.
            syscalls.mount(device, mountpoint, "ext4", flags, "noinit_itable,nobarrier,errors=continue")
        finally:
            os.close(loop)
    finally:
        os.close(backing)


def _fsmount_loop(image: str) -> int:
    """As `_mount_loop`, but detached: an fd of the mount."""
    with contextlib.ExitStack() as stack:
        backing = os.open(image, os.O_RDWR | os.O_CLOEXEC)
        stack.callback(os.close, backing)
        loop, device = _attach(backing, image)
        stack.callback(os.close, loop)
        context = syscalls.fsopen("ext4")
        stack.callback(os.close, context)
        syscalls.fsconfig_string(context, "source", device)
        for flag in ("noinit_itable", "nobarrier"):
            syscalls.fsconfig_flag(context, flag)
        return syscalls.fsmount(context, syscalls.MOUNT_ATTR_NOSUID | syscalls.MOUNT_ATTR_NODEV, device)


def _attach(backing: int, image: str) -> tuple[int, str]:
    """A loop device for `backing`: an fd of it, and its path."""
    control = os.open("/dev/loop-control", os.O_RDWR | os.O_CLOEXEC)
    try:
        for _ in range(64):
            device = f"/dev/loop{fcntl.ioctl(control, _LOOP_CTL_GET_FREE)}"
            loop = os.open(device, os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.ioctl(loop, _LOOP_CONFIGURE, _loop_config(backing))
            except OSError as error:
                os.close(loop)
                if error.errno != errno.EBUSY:  # another took it between the two calls
                    raise
            else:
                return loop, device
    finally:
        os.close(control)
    raise OSError(errno.EBUSY, "no free loop device", image)


def _loop_config(backing: int) -> bytes:
    config = bytearray(_LOOP_CONFIG_SIZE)
    struct.pack_into("=II", config, 0, backing, 4096)
    struct.pack_into("=I", config, _LO_FLAGS_OFFSET, _LO_FLAGS_AUTOCLEAR)
    return bytes(config)


def abandon(mountpoint: str) -> None:
    """Tell the disk at `mountpoint` to forget what it has not written yet, before it is unmounted and deleted.

    Writing it out would take the longer the more the job wrote. Nothing mounted there is fine.
    """
    try:
        fd = os.open(mountpoint, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        # Never the filesystem that the state directory is on: a scratch without its disk is a plain directory of it.
        device = os.fstat(fd).st_dev
        if os.major(device) == _LOOP_MAJOR and device != os.stat(os.path.dirname(mountpoint)).st_dev:
            fcntl.ioctl(fd, _EXT4_IOC_SHUTDOWN, struct.pack("=I", _NO_LOG_FLUSH))
    finally:
        os.close(fd)


def disk_usage(directory: str) -> DiskEvidence:
    """The writable layer of the attempt at `directory`: its size and use right now, in bytes.

    Without a disk of its own there is nothing to tell, and every field stays None.

    :raises OSError: when the directory is gone.
    """
    scratch = f"{directory}/scratch"
    if os.stat(scratch).st_dev == os.stat(directory).st_dev:  # sampled often
        return DiskEvidence()
    facts = os.statvfs(scratch)
    size = facts.f_blocks * facts.f_frsize
    left = facts.f_bavail * facts.f_frsize
    used = (facts.f_blocks - facts.f_bfree) * facts.f_frsize
    no_files = facts.f_favail == 0
    return DiskEvidence(size, used, full=left < min(_FULL, size // 8) or no_files, out_of_files=no_files)


def _last_line(error: subprocess.CalledProcessError) -> str:
    lines = error.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"mkfs.ext4 ended with {error.returncode}"
