"""Unpacks one layer into a directory by the OCI layer rules, for use as a lower layer of an overlay.

Whiteouts become overlay whiteouts (character device 0:0) where a lower layer has something to hide, and opaque
directories get ``trusted.overlay.opaque``. Both count for lower layers only, wherever in the layer they stand.
Owners stay the image's numbers: they are ID-mapped when an attempt mounts the tree. Devices and FIFOs are not made.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import entry_failure, refused, refused_entry
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import DIR_FLAGS, Found, MergedTree
from forgeyard_oci.unpack_stream import LayerStream
from forgeyard_oci.unpack_tar import EntryKind, TarEntry, TarReader
from forgeyard_oci.unpack_tree import LayerTree, Parts, Place, copy_metadata, keeps_xattr

_WHITEOUT: Final = ".wh."
_META: Final = ".wh..wh."
_OPAQUE: Final = ".wh..wh..opq"
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK: Final = 1 << 20
_NO_XATTRS: Final = (errno.ENOTSUP, errno.EPERM)


@dataclass(slots=True)
class UnpackReport:
    """What came of a layer. skipped: devices and FIFOs not made, the first 100 by name. dropped_xattrs: a count."""

    entries: int = 0
    bytes: int = 0
    devices_skipped: int = 0
    skipped: tuple[str, ...] = ()
    dropped_xattrs: int = 0
    used_lowers: bool = False
    opaque_root: bool = False


def unpack_layer(stream: LayerStream, destination: str, lowers: MergedTree, limits: UnpackLimits) -> UnpackReport:
    """Unpack `stream` into the empty directory `destination`, then hold it to its digests.

    On any error the tree is rubbish and the caller removes it.

    :param lowers: the layers below, for parents and hard link targets that the layer leaves out.
    :raises SandboxError: an entry that breaks a rule (named), a broken tar, a wrong digest.
    :raises ExecutorError: IO_FAILED when the host can't write, such as a full disk.
    """
    root = os.open(destination, DIR_FLAGS)
    try:
        os.fchmod(root, 0o755)
        unpacker = _Unpacker(stream, LayerTree(root, lowers), limits, destination)
        try:
            report = unpacker.run()
        except SandboxError:
            stream.check_blob()
            raise
        finally:
            unpacker.tree.close()
        stream.finish()
        return report
    finally:
        os.close(root)


def entry_parts(name: str, limits: UnpackLimits) -> Parts:
    """The components of an entry's name; a leading slash means the image's root, as in every reader.

    :raises SandboxError: for ``..``, NUL, and names that are too long or too deep.
    """
    if "\0" in name:
        raise refused_entry(name, "bad_entry", "has a NUL byte in its name")
    parts = tuple([part for part in name.split("/") if part not in ("", ".")])
    if ".." in parts:
        raise refused_entry(name, "escape", "has '..' in its name")
    if len(name) > limits.name or len(parts) > limits.depth:
        raise refused_entry(name, "bad_entry", f"is longer than {limits.name} bytes or {limits.depth} directories")
    return parts


class _Unpacker:
    def __init__(self, stream: LayerStream, tree: LayerTree, limits: UnpackLimits, destination: str) -> None:
        self.tree, self._limits, self._destination = tree, limits, destination
        self._reader = TarReader(stream, limits)
        self._report = UnpackReport()
        self._written = 0

    def run(self) -> UnpackReport:
        for entry in self._reader:
            try:
                self._entry(entry)
            except OSError as error:
                raise entry_failure(error, entry.name, self._destination) from error
        self.tree.finish()
        self._report.entries = self._reader.headers_seen
        self._report.bytes = self._written
        self._report.used_lowers = self.tree.used_lowers
        self._report.opaque_root = self.tree.opaque_root
        return self._report

    def _entry(self, entry: TarEntry) -> None:
        parts = entry_parts(entry.name, self._limits)
        if not parts:
            self._root(entry)
            return
        if any(part.startswith(_WHITEOUT) for part in parts):
            self._whiteout(entry, parts)
            return
        if not (0 <= entry.uid < self._limits.ids and 0 <= entry.gid < self._limits.ids):
            raise refused_entry(
                entry.name,
                "unmapped_owner",
                f"is owned by {entry.uid}:{entry.gid}, outside the ids 0 to {self._limits.ids - 1} of a sandbox",
                resolution="rebuild the image with lower uids and gids",
            )
        place = self.tree.parent(parts, entry.name)
        _MAKERS[entry.kind](self, entry, place, parts[-1])

    def _root(self, entry: TarEntry) -> None:
        if entry.kind is not EntryKind.DIRECTORY:
            raise refused_entry(entry.name, "bad_entry", f"would replace the root by a {entry.kind.value}")
        self._apply(entry, self.tree.root.fd)
        self.tree.times[()] = entry.mtime

    def _whiteout(self, entry: TarEntry, parts: Parts) -> None:
        name = parts[-1]
        if any(part.startswith(_META) for part in parts) and name != _OPAQUE:
            return  # bookkeeping of a union filesystem, for its own use
        hidden = name.removeprefix(_WHITEOUT)
        bad_parent = any(part.startswith(_WHITEOUT) for part in parts[:-1])
        if bad_parent or hidden in ("", ".", ".."):
            raise refused_entry(entry.name, "bad_entry", "is no whiteout of anything")
        place = self.tree.parent(parts, entry.name)
        if name == _OPAQUE:
            self.tree.hide_below(place)
        else:
            self.tree.whiteout(place, hidden)

    def _directory(self, entry: TarEntry, place: Place, name: str) -> None:
        below, _ = self.tree.make_directory(place, name)
        self._apply(entry, below.fd)
        self.tree.times[below.parts] = entry.mtime

    def _file(self, entry: TarEntry, place: Place, name: str) -> None:
        self._count(entry.size, entry.name)
        fd = self._create(place, name)
        try:
            self._fill(entry, fd)
            self._apply(entry, fd)
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        finally:
            os.close(fd)

    def _count(self, size: int, name: str) -> None:
        self._written += size
        if self._written > self._limits.expanded:
            raise refused_entry(name, "layer_too_large", f"takes the layer beyond {self._limits.expanded} bytes")

    def _create(self, place: Place, name: str) -> int:
        try:
            return os.open(name, _CREATE, 0o600, dir_fd=place.fd)
        except FileExistsError:
            self.tree.remove(place, name)
            return os.open(name, _CREATE, 0o600, dir_fd=place.fd)

    def _fill(self, entry: TarEntry, fd: int) -> None:
        if entry.sparse is None:
            self._copy(fd, entry.stored)
            return
        for offset, length in entry.sparse:
            os.lseek(fd, offset, os.SEEK_SET)
            self._copy(fd, length)
        os.ftruncate(fd, entry.size)

    def _copy(self, fd: int, count: int) -> None:
        while count:
            piece = self._reader.data(min(count, _BLOCK))
            if not piece:
                raise refused("bad_tar", "the layer is not a well-formed tar", details="a sparse file lacks data")
            count -= len(piece)
            while piece:
                piece = piece[os.write(fd, piece) :]

    def _apply(self, entry: TarEntry, fd: int) -> None:
        # In this order: a change of owner clears setuid bits and file capabilities.
        os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        if entry.xattrs:
            self._set_xattrs(fd, entry.xattrs)

    def _set_xattrs(self, fd: int, xattrs: Mapping[str, bytes]) -> None:
        for name, value in xattrs.items():
            if not keeps_xattr(name) or "\0" in name:
                self._report.dropped_xattrs += 1
                continue
            try:
                os.setxattr(fd, name, value)
            except OSError as error:
                if error.errno not in _NO_XATTRS:
                    raise
                self._report.dropped_xattrs += 1

    def _symlink(self, entry: TarEntry, place: Place, name: str) -> None:
        if not entry.link or "\0" in entry.link:
            raise refused_entry(entry.name, "bad_entry", "is a symbolic link to nowhere")
        self.tree.remove(place, name)
        os.symlink(entry.link, name, dir_fd=place.fd)
        os.chown(name, entry.uid, entry.gid, dir_fd=place.fd, follow_symlinks=False)
        os.utime(name, ns=(entry.mtime, entry.mtime), dir_fd=place.fd, follow_symlinks=False)

    def _hardlink(self, entry: TarEntry, place: Place, name: str) -> None:
        target = entry_parts(entry.link, self._limits)
        if not target:
            raise self._dangling(entry)
        source = self.tree.resolve(target[:-1], entry.name)
        if (source.parts, target[-1]) == (place.parts, name):
            raise self._dangling(entry)
        if not _exists(source, target[-1]):
            self._copy_up(entry, source, target[-1])
        self.tree.remove(place, name)
        try:
            os.link(target[-1], name, src_dir_fd=source.fd, dst_dir_fd=place.fd, follow_symlinks=False)
        except FileNotFoundError as error:  # it lay below what the link replaces
            raise self._dangling(entry) from error
        except PermissionError as error:
            raise refused_entry(entry.name, "bad_entry", f"is a hard link to a directory: {entry.link!r}") from error

    def _dangling(self, entry: TarEntry) -> Exception:
        return refused_entry(entry.name, "dangling_link", f"is a hard link to {entry.link[:200]!r}, which is not there")

    def _copy_up(self, entry: TarEntry, source: Place, name: str) -> None:
        """Bring a lower layer's file into this one, so that both names are one file, as on the builder's machine."""
        parts = (*source.parts, name)
        found = None if self.tree.hides(parts) else self.tree.lowers.lookup(parts)
        if found is None:
            raise self._dangling(entry)
        self.tree.used_lowers = True
        with found:
            if stat.S_ISLNK(found.status.st_mode):
                os.symlink(found.link_target(), name, dir_fd=source.fd)
                owner = (found.status.st_uid, found.status.st_gid)
                os.chown(name, *owner, dir_fd=source.fd, follow_symlinks=False)
            elif stat.S_ISREG(found.status.st_mode):
                self._count(found.status.st_size, entry.name)
                _copy_file(found, source, name)
            else:
                raise refused_entry(entry.name, "bad_entry", f"is a hard link to a directory: {entry.link!r}")

    def _skip(self, entry: TarEntry, place: Place, name: str) -> None:
        self.tree.remove(place, name)
        self._report.devices_skipped += 1
        if len(self._report.skipped) < 100:
            self._report.skipped += (entry.name[:200],)


_MAKERS: Final = {
    EntryKind.FILE: _Unpacker._file,
    EntryKind.DIRECTORY: _Unpacker._directory,
    EntryKind.SYMLINK: _Unpacker._symlink,
    EntryKind.HARDLINK: _Unpacker._hardlink,
    EntryKind.DEVICE: _Unpacker._skip,
    EntryKind.FIFO: _Unpacker._skip,
}


def _exists(place: Place, name: str) -> bool:
    try:
        os.stat(name, dir_fd=place.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _copy_file(found: Found, place: Place, name: str) -> None:
    source = found.open()
    try:
        target = os.open(name, _CREATE, 0o600, dir_fd=place.fd)
        try:
            left = found.status.st_size
            while left and (sent := os.sendfile(target, source, None, left)):
                left -= sent
            copy_metadata(source, target, found.status)
        finally:
            os.close(target)
    finally:
        os.close(source)
