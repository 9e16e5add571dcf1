"""Unpacks one layer into a directory by the OCI layer rules, for use as a lower layer of an overlay.

Whiteouts become overlay whiteouts (character device 0:0) where a lower layer has something to hide, and opaque
directories get ``trusted.overlay.opaque``. Both count for lower layers only, wherever in the layer they stand.
Owners stay the image's numbers: they are ID-mapped when an attempt mounts the tree. Devices and FIFOs are not made.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

from forgeyard_host.files import open_beneath
from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import entry_failure, refused, refused_entry
from forgeyard_oci.tree_records import TreeRecorder, keeps_xattr, write_all
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import DIR_FLAGS, OPAQUE, Found, MergedTree
from forgeyard_oci.unpack_stream import LayerStream
from forgeyard_oci.unpack_tar import EntryKind, TarEntry, TarReader
from forgeyard_oci.unpack_tree import LayerTree, Parts, Place, copy_metadata

_WHITEOUT: Final = ".wh."
_META: Final = ".wh..wh."
_OPAQUE: Final = ".wh..wh..opq"
_CREATE: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_BLOCK: Final = 1 << 20
_NO_XATTRS: Final = (errno.ENOTSUP, errno.EPERM)
_ZEROS: Final = memoryview(bytes(_BLOCK))
_SHOWN_XATTRS: Final = 20
_LONGEST_XATTR: Final = 255


class Digest(Protocol):
    """A running hash."""

    def update(self, data: bytes | memoryview, /) -> None:
        """Take more bytes in."""


@dataclass(slots=True)
class UnpackReport:
    """What came of a layer. skipped: devices and FIFOs not made, the first 100 by name. dropped_xattrs: a count.

    dropped_names: the names of dropped xattrs, at most 20. nodes: files, directories and links in the tree.
    """

    entries: int = 0
    bytes: int = 0
    devices_skipped: int = 0
    skipped: tuple[str, ...] = ()
    dropped_xattrs: int = 0
    used_lowers: bool = False
    opaque_root: bool = False
    dropped_names: tuple[str, ...] = ()
    nodes: int = 0


def unpack_layer(
    stream: LayerStream, destination: str, lowers: MergedTree, limits: UnpackLimits, records: int | None = None
) -> UnpackReport:
    """Unpack `stream` into the empty directory `destination`, then hold it to its digests.

    On any error the tree is rubbish and the caller removes it. Hostile layers are read by `ImageReader`, which does
    this in a process of its own.

    :param lowers: the layers below, for parents and hard link targets that the layer leaves out.
    :param records: descriptor of a file for the tree's records.
    :raises SandboxError: an entry that breaks a rule (named), a broken tar, a wrong digest.
    :raises ExecutorError: IO_FAILED when the host can't write, such as a full disk.
    """
    root = os.open(destination, DIR_FLAGS)
    try:
        report, opaque = unpack_into(stream, root, destination, lowers, limits, records=records)
        for parts in opaque:
            mark_opaque(root, "/".join(parts))
        return report
    finally:
        os.close(root)


def unpack_into(
    stream: LayerStream,
    root: int,
    shown: str,
    lowers: MergedTree,
    limits: UnpackLimits,
    *,
    records: int | None = None,
    beat: Callable[[], None] = lambda: None,
) -> tuple[UnpackReport, list[Parts]]:
    """As `unpack_layer`, by descriptor, and without the marks of opaque directories: their paths are returned.

    :param beat: called several times a second while there is progress.
    """
    os.fchmod(root, 0o755)
    unpacker = _Unpacker(stream, LayerTree(root, lowers, beat), limits, shown, beat)
    try:
        try:
            opaque = unpacker.run()
        except SandboxError:
            stream.check_blob()
            raise
        stream.finish()
    finally:
        unpacker.tree.close()
        stream.close()
    unpacker.verify(root, opaque, records)
    return unpacker.report, opaque


def mark_opaque(root: int, path: str) -> None:
    """Mark the directory `path` below `root` as hiding those of lower layers.

    :raises OSError: also when the path leads over a link or out of `root`.
    """
    fd = open_beneath(root, path or ".", DIR_FLAGS)
    try:
        os.setxattr(fd, OPAQUE, b"y")
    finally:
        os.close(fd)


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
    def __init__(
        self, stream: LayerStream, tree: LayerTree, limits: UnpackLimits, destination: str, beat: Callable[[], None]
    ) -> None:
        self.tree, self._limits, self._destination, self._beat = tree, limits, destination, beat
        self._reader = TarReader(stream, limits)
        self._recorder = TreeRecorder()
        self.report = UnpackReport()
        self._written = 0

    def run(self) -> list[Parts]:
        for number, entry in enumerate(self._reader):
            try:
                self._entry(entry)
            except OSError as error:
                raise entry_failure(error, entry.name, self._destination) from error
            if number % 64 == 0:
                self._beat()
        opaque = self.tree.finish()
        self.report.entries = self._reader.headers_seen
        self.report.bytes = self._written
        self.report.used_lowers = self.tree.used_lowers
        self.report.opaque_root = self.tree.opaque_root
        self.report.nodes = self.tree.nodes
        return opaque

    def verify(self, root: int, opaque: list[Parts], records: int | None) -> None:
        self._recorder.write(root, self.tree.nodes, frozenset(opaque), records, self._beat)

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
        digest = hashlib.sha256()
        fd = self._create(place, name, entry.mode & 0o777)
        try:
            self._fill(entry, fd, digest)
            status = os.fstat(fd)
            # In this order: a change of owner clears setuid bits and file capabilities.
            if (status.st_uid, status.st_gid) != (entry.uid, entry.gid):
                os.fchown(fd, entry.uid, entry.gid)
            if status.st_mode & 0o7777 != entry.mode:
                os.fchmod(fd, entry.mode)
            self._recorder.digests[status.st_ino] = (digest.digest(), entry.size)
            if entry.xattrs and self._set_xattrs(fd, entry.xattrs):
                self._recorder.with_xattrs.add(status.st_ino)
            os.utime(fd, ns=(entry.mtime, entry.mtime))
        finally:
            os.close(fd)

    def _count(self, size: int, name: str) -> None:
        self._written += size
        if self._written > self._limits.expanded:
            raise refused_entry(name, "layer_too_large", f"takes the layer beyond {self._limits.expanded} bytes")

    def _create(self, place: Place, name: str, mode: int) -> int:
        try:
            fd = os.open(name, _CREATE, mode, dir_fd=place.fd)
        except FileExistsError:
            self.tree.remove(place, name)
            fd = os.open(name, _CREATE, mode, dir_fd=place.fd)
        self.tree.nodes += 1
        return fd

    def _fill(self, entry: TarEntry, fd: int, digest: Digest) -> None:
        if entry.sparse is None:
            self._copy(fd, entry.stored, digest)
            return
        end = 0
        for offset, length in (*entry.sparse, (entry.size, 0)):
            self._hash_hole(offset - end, digest)
            os.lseek(fd, offset, os.SEEK_SET)
            self._copy(fd, length, digest)
            end = offset + length
        os.ftruncate(fd, entry.size)

    def _hash_hole(self, count: int, digest: Digest) -> None:
        for done in range(0, count, _BLOCK):
            digest.update(_ZEROS[: min(_BLOCK, count - done)])
            self._beat()

    def _copy(self, fd: int, count: int, digest: Digest) -> None:
        while count:
            piece = self._reader.data(count)
            if not piece:
                raise refused("bad_tar", "the layer is not a well-formed tar", details="a sparse file lacks data")
            count -= len(piece)
            digest.update(piece)
            write_all(fd, piece)
            if count:
                self._beat()

    def _apply(self, entry: TarEntry, fd: int) -> None:
        os.fchown(fd, entry.uid, entry.gid)
        os.fchmod(fd, entry.mode)
        if entry.xattrs:
            self._set_xattrs(fd, entry.xattrs)

    def _set_xattrs(self, fd: int, xattrs: Mapping[str, bytes]) -> bool:
        """Whether any was set."""
        kept = False
        for name, value in xattrs.items():
            if not keeps_xattr(name) or "\0" in name:
                self._drop(name)
                continue
            try:
                os.setxattr(fd, name, value)
                kept = True
            except OSError as error:
                if error.errno not in _NO_XATTRS:
                    raise
                self._drop(name)
        return kept

    def _drop(self, xattr: str) -> None:
        self.report.dropped_xattrs += 1
        if xattr not in self.report.dropped_names and len(self.report.dropped_names) < _SHOWN_XATTRS:
            self.report.dropped_names += (xattr[:_LONGEST_XATTR],)

    def _symlink(self, entry: TarEntry, place: Place, name: str) -> None:
        if not entry.link or "\0" in entry.link:
            raise refused_entry(entry.name, "bad_entry", "is a symbolic link to nowhere")
        self.tree.remove(place, name)
        os.symlink(entry.link, name, dir_fd=place.fd)
        self.tree.nodes += 1
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
            self.tree.nodes += 1
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
                self.tree.nodes += 1
                owner = (found.status.st_uid, found.status.st_gid)
                os.chown(name, *owner, dir_fd=source.fd, follow_symlinks=False)
            elif stat.S_ISREG(found.status.st_mode):
                self._count(found.status.st_size, entry.name)
                self._copy_file(found, source, name)
            else:
                raise refused_entry(entry.name, "bad_entry", f"is a hard link to a directory: {entry.link!r}")

    def _copy_file(self, found: Found, place: Place, name: str) -> None:
        digest = hashlib.sha256()
        source = found.open()
        try:
            target = self._create(place, name, 0o600)
            try:
                while piece := os.read(source, _BLOCK):
                    digest.update(piece)
                    write_all(target, piece)
                    self._beat()
                status = os.fstat(target)
                self._recorder.digests[status.st_ino] = (digest.digest(), status.st_size)
                if copy_metadata(source, target, found.status):
                    self._recorder.with_xattrs.add(status.st_ino)
            finally:
                os.close(target)
        finally:
            os.close(source)

    def _skip(self, entry: TarEntry, place: Place, name: str) -> None:
        self.tree.remove(place, name)
        self.report.devices_skipped += 1
        if len(self.report.skipped) < 100:
            self.report.skipped += (entry.name[:200],)


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
