"""A directory tree as data: its digest, and how it is written out. Knows nothing of what the tree is for."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path, PurePosixPath
from typing import Final

FIXED_TIME: Final = 631152000
"""Seconds, 1990-01-01 UTC: every file of a skeleton has it. After 1980, since zip writers refuse older times."""


class Kind(StrEnum):
    """File types that a skeleton may hold."""

    DIRECTORY = "d"
    FILE = "f"
    LINK = "l"


@dataclass(frozen=True, slots=True)
class Entry:
    """One file. `data`: contents of a FILE, target of a LINK. Owner and group are always root."""

    kind: Kind
    mode: int
    data: bytes = b""

    @property
    def target(self) -> str:
        """Where a LINK points."""
        return os.fsdecode(self.data)


Tree = dict[str, Entry]
"""Entries by absolute path inside the root, such as /etc/hosts."""


def directory(mode: int = 0o755) -> Entry:
    """A directory, empty until the tree holds a path below it."""
    return Entry(Kind.DIRECTORY, mode)


def text(content: str) -> Entry:
    """A file that anyone may read."""
    return Entry(Kind.FILE, 0o644, content.encode())


def link(target: str) -> Entry:
    """A symbolic link."""
    return Entry(Kind.LINK, 0o777, os.fsencode(target))


def with_parents(tree: Mapping[str, Entry]) -> Tree:
    """The same tree with every missing parent added as a 0755 directory."""
    whole = dict(tree)
    for path in tree:
        for parent in PurePosixPath(path).parents:
            if str(parent) != "/":
                whole.setdefault(str(parent), directory())
    return whole


def digest(tree: Mapping[str, Entry], extra: Iterable[str] = ()) -> str:
    """SHA-256, in hex, over names, types, modes, contents and link targets, and the `extra` words."""
    total = hashlib.sha256()
    for path in sorted(tree):
        entry = tree[path]
        content = hashlib.sha256(entry.data).hexdigest()
        total.update(b"%s %o %s %s\0" % (entry.kind.encode(), entry.mode, content.encode(), os.fsencode(path)))
    for word in extra:
        total.update(b"+ %s\0" % os.fsencode(word))
    return total.hexdigest()


def write(tree: Mapping[str, Entry], root: Path) -> None:
    """Write `tree` into the empty directory `root`, with modes and times exact whatever the umask is.

    Files reach the disk before this returns, so that a rename afterwards never names a truncated one.

    :raises OSError: when the directory is not empty or the disk is full.
    """
    base = os.fspath(root)
    for path in sorted(tree):  # a parent sorts before what is below it
        _create(base + path, tree[path])
    for path in sorted(tree, reverse=True):  # children first: each one made touches its parent's time
        os.utime(base + path, (FIXED_TIME, FIXED_TIME), follow_symlinks=False)
    root.chmod(0o755)
    os.utime(root, (FIXED_TIME, FIXED_TIME))


def _create(path: str, entry: Entry) -> None:
    if entry.kind is Kind.LINK:
        os.symlink(entry.data, os.fsencode(path))  # noqa: PTH211  bytes, since a name need not be UTF-8
    elif entry.kind is Kind.DIRECTORY:
        os.mkdir(path)  # noqa: PTH102  a Path per file doubles the time of a build
        os.chmod(path, entry.mode)  # noqa: PTH101  as above
    else:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, entry.data)
            os.fchmod(fd, entry.mode)
            os.fsync(fd)
        finally:
            os.close(fd)


def _write_all(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def read(root: Path) -> Iterator[tuple[str, Entry]]:
    """The entries of a tree on disk, in no order: what `write` took, for checks and tests.

    :raises OSError: when something cannot be read.
    """
    for top, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(top, name)
            inside = "/" + str(path.relative_to(root))
            mode = stat.S_IMODE(path.lstat().st_mode)
            if path.is_symlink():
                yield inside, link(str(path.readlink()))
            elif path.is_dir():
                yield inside, directory(mode)
            else:
                yield inside, Entry(Kind.FILE, mode, path.read_bytes())
