"""The recorded files of an unpacked tree: one line per node, written after unpacking, compared by `check_tree`.

A first line with the format's version, then a line of tab-separated fields per node, and a last line with their count.
Directories stand before what they hold, names in the order of their characters. Fields:

=======  =============================================================================================
kind     f file, d directory, D opaque directory, l symbolic link, w whiteout
mode     permission bits, octal
uid gid  decimal, as in the image
mtime    nanoseconds
size     bytes of a file
links    hard links of a file or link; 0 for directories
group    0, or a number shared by the names of one file
content  SHA-256 of a file's contents; where a link points
xattrs   SHA-256 over those that images may set; - for none
path     from the root, which is "."
=======  =============================================================================================

Backslash, tab and newline are written as ``\\\\``, ``\\t`` and ``\\n``; bytes that are no UTF-8 stay as they are.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_oci.image_errors import refused
from forgeyard_oci.unpack_merged import DIR_FLAGS, is_opaque, is_whiteout

Parts = tuple[str, ...]

HEADER: Final = "forgeyard tree 1\n"
_FIELDS: Final = 11
_MOST_PROBLEMS: Final = 100
_LONGEST: Final = 64 << 10  # bytes of a line: two paths, each of whose bytes may be escaped
_FLUSH: Final = 256 << 10
_BLOCK: Final = 1 << 20
_ODD: Final = re.compile(r"[\\\t\n]")
_ESCAPES: Final = {"\\": "\\\\", "\t": "\\t", "\n": "\\n"}
_ESCAPED: Final = re.compile(r"\\(.)")
_PLAIN: Final = {"\\": "\\", "t": "\t", "n": "\n"}
_FILE_FLAGS: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class _Node:
    """A node of a tree that is walked. `fd`: of the directory it lies in, or of itself if it is a directory."""

    parts: Parts
    name: str
    status: os.stat_result
    fd: int


@dataclass(frozen=True, slots=True)
class _Record:
    parts: Parts
    kind: str
    mode: int
    uid: int
    gid: int
    mtime: int
    size: int
    links: int
    group: int
    content: str
    xattrs: str


def keeps_xattr(name: str) -> bool:
    """user.* and file capabilities. Labels, and overlayfs's own marks, never come from an image."""
    return name == "security.capability" or (name.startswith("user.") and not name.startswith("user.overlay."))


def walk(root: int) -> Iterator[_Node]:
    """Every node below a directory, and it first. Descriptors are good until the next node is asked for."""
    yield _Node((), ".", os.fstat(root), root)
    # One open directory per level; the first one is the caller's.
    levels: list[tuple[int, Iterator[str], Parts]] = [(root, _names(root), ())]
    try:
        while levels:
            fd, names, above = levels[-1]
            name = next(names, None)
            if name is None:
                levels.pop()
                if levels:
                    os.close(fd)
                continue
            status = os.stat(name, dir_fd=fd, follow_symlinks=False)
            parts = (*above, name)
            if not stat.S_ISDIR(status.st_mode):
                yield _Node(parts, name, status, fd)
                continue
            inner = os.open(name, DIR_FLAGS, dir_fd=fd)
            levels.append((inner, iter(()), parts))  # so that it is closed whatever happens
            levels[-1] = (inner, _names(inner), parts)
            yield _Node(parts, name, status, inner)
    finally:
        for fd, _, _ in levels[1:]:
            os.close(fd)


def _names(fd: int) -> Iterator[str]:
    return iter(sorted(os.listdir(fd)))


class TreeRecorder:
    """Goes over a tree that was just unpacked: checks that it holds what was made, and writes its records.

    :ivar digests: SHA-256 and size of what was written, by inode number.
    :ivar with_xattrs: inode numbers of files that were given any.
    """

    def __init__(self) -> None:
        self.digests: dict[int, tuple[bytes, int]] = {}
        self.with_xattrs: set[int] = set()

    def write(
        self, root: int, expected: int, opaque: Container[Parts], out: int | None, beat: Callable[[], None]
    ) -> None:
        """Walk `root`, which should hold `expected` nodes, and write to the descriptor `out` unless it is None.

        :raises SandboxError: unpacked_wrong, when the tree is not what was made.
        """
        lines: list[str] = [HEADER]
        groups: dict[int, int] = {}
        count = size = 0
        for count, node in enumerate(walk(root)):
            line = self._line(node, opaque, groups)
            lines.append(line)
            size += len(line)
            if size > _FLUSH:
                _write(out, lines)
                size = 0
            if count % 1024 == 0:
                beat()
        if count != expected:
            raise _wrong(f"it holds {count} files instead of {expected}")
        _write(out, [*lines, f"end\t{count}\n"])

    def _line(self, node: _Node, opaque: Container[Parts], groups: dict[int, int]) -> str:
        status = node.status
        mode = status.st_mode
        path = _escape("/".join(node.parts)) or "."
        head = f"{stat.S_IMODE(mode):o}\t{status.st_uid}\t{status.st_gid}\t{status.st_mtime_ns}"
        if stat.S_ISREG(mode):
            digest, size = self.digests.get(status.st_ino, (b"", -1))
            if size != status.st_size:
                raise _wrong(f"{path[:200]!r} holds {status.st_size} bytes instead of {size}")
            xattrs = self._file_xattrs(node) if status.st_ino in self.with_xattrs else "-"
            group = _group(status, groups)
            return f"f\t{head}\t{size}\t{status.st_nlink}\t{group}\t{digest.hex()}\t{xattrs}\t{path}\n"
        if stat.S_ISDIR(mode):
            kind = "D" if node.parts in opaque else "d"
            return f"{kind}\t{head}\t0\t0\t0\t-\t{_xattrs(node.fd)}\t{path}\n"
        if stat.S_ISLNK(mode):
            target = _escape(os.readlink(node.name, dir_fd=node.fd))
            return f"l\t{head}\t0\t{status.st_nlink}\t{_group(status, groups)}\t{target}\t-\t{path}\n"
        if is_whiteout(status):
            return f"w\t0\t0\t0\t0\t0\t0\t0\t-\t-\t{path}\n"
        raise _wrong(f"{path[:200]!r} is of no kind that is unpacked")

    @staticmethod
    def _file_xattrs(node: _Node) -> str:
        fd = os.open(node.name, _FILE_FLAGS, dir_fd=node.fd)
        try:
            return _xattrs(fd)
        finally:
            os.close(fd)


def check_tree(tree: Path, records: Path) -> list[str]:
    """Compare a tree with its records, both ways, contents included: what differs, at most 100 lines.

    Reads by descriptor and follows no link, so the tree may hold anything. Blocking: it reads all files.

    :raises OSError: when the tree can't be read at all.
    """
    problems: list[str] = []
    root = os.open(tree, DIR_FLAGS)
    try:
        with records.open("rb") as file:
            comparison = _Comparison(problems)
            try:
                comparison.run(walk(root), _read_records(iter(lambda: file.readline(_LONGEST), b"")))
            except ValueError as error:
                problems.append(f"the records can't be read: {error}")
    except FileNotFoundError:
        problems.append("the records are missing")
    finally:
        os.close(root)
    return problems[:_MOST_PROBLEMS]


class _Comparison:
    """Two sequences in the same order, merged: memory does not grow with the tree, hard links aside."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems
        self._groups: dict[int, int] = {}
        self._hashed: dict[int, str] = {}

    def run(self, nodes: Iterator[_Node], records: Iterator[_Record]) -> None:
        node, record = next(nodes, None), next(records, None)
        while (node is not None or record is not None) and len(self._problems) < _MOST_PROBLEMS:
            if record is None or (node is not None and node.parts < record.parts):
                self._tell(node.parts if node else (), "is not in the records")
                node = next(nodes, None)
            elif node is None or record.parts < node.parts:
                self._tell(record.parts, "is missing")
                record = next(records, None)
            else:
                for what in self._differences(node, record):
                    self._tell(node.parts, what)
                node, record = next(nodes, None), next(records, None)

    def _tell(self, parts: Parts, what: str) -> None:
        self._problems.append(f"{('/'.join(parts) or '.')[:400]!r} {what}")

    def _differences(self, node: _Node, record: _Record) -> Iterator[str]:
        kind = _kind(node)
        if kind != record.kind:
            yield f"is of kind {kind} instead of {record.kind}"
            return
        if kind == "w":
            return
        status = node.status
        for name, now, then in (
            ("mode", f"{stat.S_IMODE(status.st_mode):o}", f"{record.mode:o}"),
            ("uid", status.st_uid, record.uid),
            ("gid", status.st_gid, record.gid),
            ("mtime", status.st_mtime_ns, record.mtime),
            ("size", status.st_size if kind == "f" else 0, record.size),
            ("links", status.st_nlink if kind in "fl" else 0, record.links),
        ):
            if now != then:
                yield f"has {name} {now} instead of {then}"
        if record.group and self._groups.setdefault(record.group, status.st_ino) != status.st_ino:
            yield "is no longer one file with its other names"
        yield from self._contents(node, record, kind)

    def _contents(self, node: _Node, record: _Record, kind: str) -> Iterator[str]:
        if kind == "l":
            if os.readlink(node.name, dir_fd=node.fd) != record.content:
                yield "points elsewhere"
            return
        if kind == "f":
            fd = os.open(node.name, _FILE_FLAGS, dir_fd=node.fd)
            try:
                content, xattrs = self._digest(fd, node.status), _xattrs(fd)
            finally:
                os.close(fd)
            if content != record.content:
                yield "has other contents"
        else:
            xattrs = _xattrs(node.fd)
        if xattrs != record.xattrs:
            yield "has other extended attributes"

    def _digest(self, fd: int, status: os.stat_result) -> str:
        if (known := self._hashed.get(status.st_ino)) is not None:
            return known
        digest = hash_file(fd).hex()
        if status.st_nlink > 1:
            self._hashed[status.st_ino] = digest
        return digest


def write_all(fd: int, data: bytes | memoryview) -> None:
    """Write all of `data`, however many calls it takes."""
    done = os.write(fd, data)
    while done < len(data):
        done += os.write(fd, memoryview(data)[done:])


def hash_file(fd: int) -> bytes:
    """SHA-256 of what is left to read."""
    digest = hashlib.sha256()
    while piece := os.read(fd, _BLOCK):
        digest.update(piece)
    return digest.digest()


def _read_records(lines: Iterator[bytes]) -> Iterator[_Record]:
    """:raises ValueError: for anything that is not whole and well-formed."""
    if next(lines, b"") != HEADER.encode():
        raise ValueError("not records of this version")
    for count, line in enumerate(lines):
        fields = line.decode("utf-8", "surrogateescape").removesuffix("\n").split("\t")
        if fields[0] == "end":
            if fields != ["end", str(count - 1)]:
                raise ValueError("they hold another number of files than they say")
            return
        if len(fields) != _FIELDS or not line.endswith(b"\n"):
            raise ValueError(f"line {count + 2} is broken")
        uid, gid, mtime, size, links, group = (int(field) for field in fields[2:8])
        parts = () if fields[10] == "." else tuple(_unescape(fields[10]).split("/"))
        content, mode = _unescape(fields[8]), int(fields[1], 8)
        yield _Record(parts, fields[0], mode, uid, gid, mtime, size, links, group, content, fields[9])
    raise ValueError("they end early")


def _kind(node: _Node) -> str:
    mode = node.status.st_mode
    if stat.S_ISDIR(mode):
        return "D" if is_opaque(node.fd) else "d"
    if is_whiteout(node.status):
        return "w"
    return {stat.S_IFREG: "f", stat.S_IFLNK: "l"}.get(stat.S_IFMT(mode), "?")


def _xattrs(fd: int) -> str:
    names = sorted(name for name in os.listxattr(fd) if keeps_xattr(name))
    if not names:
        return "-"
    digest = hashlib.sha256()
    for name in names:
        value = os.getxattr(fd, name)
        digest.update(f"{len(os.fsencode(name))} {len(value)} ".encode() + os.fsencode(name) + value)
    return digest.hexdigest()


def _group(status: os.stat_result, groups: dict[int, int]) -> int:
    return groups.setdefault(status.st_ino, len(groups) + 1) if status.st_nlink > 1 else 0


def _escape(text: str) -> str:
    return _ODD.sub(lambda match: _ESCAPES[match[0]], text) if _ODD.search(text) else text


def _unescape(text: str) -> str:
    return _ESCAPED.sub(lambda match: _PLAIN.get(match[1], match[0]), text) if "\\" in text else text


def _write(out: int | None, lines: list[str]) -> None:
    data = "".join(lines).encode("utf-8", "surrogateescape")
    lines.clear()
    if out is not None:
        write_all(out, data)


def _wrong(why: str) -> Exception:
    return refused("unpacked_wrong", "the unpacked tree is not what the layer holds", details=why)
