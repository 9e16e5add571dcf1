"""Writes below one directory by descriptor: no path is ever handed to the kernel with more than one component.

Parents that a layer leaves out are taken from the layers below it: a directory with its owner and mode, as an overlay
would copy it up; a symbolic link is followed, so that ``bin/x`` over ``bin -> usr/bin`` lands in usr/bin. Links are
followed beneath the root only: an absolute one starts at the layer's root, and ``..`` above it is refused.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from forgeyard_oci.image_errors import refused_entry
from forgeyard_oci.tree_records import keeps_xattr
from forgeyard_oci.unpack_merged import DIR_FLAGS, MAX_LINKS, MergedTree

Parts = tuple[str, ...]

_MAX_OPEN: Final = 512
_MAX_STEPS: Final = 1024
_DEFAULT_MODE: Final = 0o755
MAX_DEPTH: Final = 255
"""Directories below the root. Bounds the recursion of removal, also for paths that links made longer."""


@dataclass(frozen=True, slots=True)
class Place:
    """An open directory of the layer, and where it really is (links resolved)."""

    fd: int
    parts: Parts


class LayerTree:
    """The tree of one layer while it is written.

    :param root: descriptor of its empty root directory; stays the caller's.
    :param lowers: the layers below it, merged.
    :ivar used_lowers: something depended on the layers below, so the tree fits this chain alone.
    :ivar times: mtimes of directories in nanoseconds; set last, since filling a directory changes its own.
    :ivar nodes: how many files, directories and links there should be now, without the root.
    :param beat: called now and then during long work.
    """

    def __init__(self, root: int, lowers: MergedTree, beat: Callable[[], None] = lambda: None) -> None:
        self.root = Place(root, ())
        self.nodes = 0
        self._beat = beat
        self.lowers = lowers
        self.used_lowers = False
        self.times: dict[Parts, int] = {(): 0}
        self._open: dict[Parts, Place] = {}
        self._hidden: set[Parts] = set()
        self._implied: set[Parts] = set()
        self._last: tuple[Parts, Place] = ((), self.root)
        self._stale = False

    def close(self) -> None:
        """Close every descriptor of ours."""
        for place in self._open.values():
            os.close(place.fd)
        self._open.clear()
        self._last = ((), self.root)
        self._stale = False

    @property
    def opaque_root(self) -> bool:
        """The layer hides every layer below it. An overlay does not look for this mark on a lower's root."""
        return () in self._hidden

    def finish(self) -> list[Parts]:
        """Make the whiteouts, set the times of directories, close.

        :returns: the directories that hide those of lower layers. Their mark takes a privilege that the process that
            reads a layer does not have, so it is the caller's to set.
        """
        self.close()
        opaque = [parts for parts in sorted(self._hidden) if self._is_opaque(parts)]
        for count, (parts, nanoseconds) in enumerate(self.times.items()):
            try:
                os.utime(self._known(parts).fd, ns=(nanoseconds, nanoseconds))
            except (FileNotFoundError, NotADirectoryError):
                continue  # made, then replaced by a later entry
            self._bound_open()
            if count % 1024 == 0:
                self._beat()
        self.close()
        return opaque

    def _bound_open(self) -> None:
        if len(self._open) > _MAX_OPEN:
            self.close()

    def _is_opaque(self, parts: Parts) -> bool:
        """Hide `parts` of the lower layers: True when a directory stands there and has to be marked.

        Where nothing stands, a whiteout is made if a lower layer has something there. Not otherwise: in a directory
        that merges with none below, an overlay lists the whiteout as a broken name.
        """
        self._beat()
        if not parts:
            return True
        self._bound_open()
        try:
            place = self._known(parts[:-1])
        except (FileNotFoundError, NotADirectoryError):
            return False  # a later entry put something else in its parent's place
        status = _lstat(place.fd, parts[-1])
        if status is not None:
            return stat.S_ISDIR(status.st_mode)
        if self.hides(parts[:-1]):
            return False
        self.used_lowers = True
        if (found := self.lowers.lookup(parts)) is not None:
            found.close()
            os.mknod(parts[-1], stat.S_IFCHR, os.makedev(0, 0), dir_fd=place.fd)
            self.nodes += 1
        return False

    def parent(self, parts: Parts, name: str) -> Place:
        """The directory that holds `parts`, made if the layer has left it out. Call once, first, for each entry.

        :param name: the entry's, for errors.
        :raises SandboxError: when a parent is no directory, or leads out of the root.
        """
        if self._stale or len(self._open) > _MAX_OPEN:
            self.close()
        above = parts[:-1]
        # Open directories are kept by where they really are, so no component of such a path is a link.
        if (known := self._open.get(above)) is not None:
            return known
        if self._last[0] != above:
            self._last = (above, self.resolve(above, name))
        return self._last[1]

    def resolve(self, parts: Iterable[str], name: str) -> Place:
        """Walk down from the root, following links beneath it."""
        pending = list(parts)[::-1]
        place, links, steps = self.root, 0, 0
        while pending:
            step = pending.pop()
            steps += 1
            if steps > _MAX_STEPS:
                raise refused_entry(name, "link_loop", "has a parent that is a loop of symbolic links")
            if step in ("", "."):
                continue
            if step == "..":
                if not place.parts:
                    raise refused_entry(name, "escape", "has a parent that leads out of the image's root")
                place = self._known(place.parts[:-1])
                continue
            below = self._enter(place, step, name)
            if isinstance(below, Place):
                place = below
                continue
            links += 1
            if links > MAX_LINKS:
                raise refused_entry(name, "link_loop", "has a parent that is a loop of symbolic links")
            place = self.root if below.startswith("/") else place
            pending.extend(below.split("/")[::-1])
        return place

    def whiteout(self, place: Place, name: str) -> None:
        """Hide `name` of the layers below. What this layer itself puts there stays, in whatever order they come."""
        parts = (*place.parts, name)
        self._hidden.add(parts)
        status = _lstat(place.fd, name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            self.hide_below(self._known(parts))
            self._reset_implied(parts)

    def hide_below(self, place: Place) -> None:
        """Make a directory opaque: the layers below show nothing in it."""
        self._hidden.add(place.parts)
        for parts in [p for p in self._implied if len(p) > len(place.parts) and p[: len(place.parts)] == place.parts]:
            self._reset_implied(parts)

    def make_directory(self, place: Place, name: str) -> tuple[Place, bool]:
        """The directory `name`, and whether it is new; replaces whatever else stands there."""
        status = _lstat(place.fd, name)
        parts = (*place.parts, name)
        self._implied.discard(parts)
        if status is not None and stat.S_ISDIR(status.st_mode):
            return self._known(parts), False
        if status is not None:
            self.remove(place, name)
        return self._mkdir(place, name), True

    def remove(self, place: Place, name: str) -> None:
        """Remove `name` and all below it; nothing outside, since no link is followed."""
        status = _lstat(place.fd, name)
        if status is None:
            return
        # Descriptors and paths of what goes away must not be used for the next entry.
        self._stale = True
        if stat.S_ISDIR(status.st_mode):
            self.nodes -= remove_tree(place.fd, name)
        else:
            os.unlink(name, dir_fd=place.fd)
            self.nodes -= 1

    def hides(self, parts: Parts) -> bool:
        """Whether the layer cut `parts` off from the layers below."""
        return any(parts[:length] in self._hidden for length in range(len(parts) + 1))

    def _known(self, parts: Parts) -> Place:
        """A directory of the layer by its real path."""
        if not parts:
            return self.root
        if (place := self._open.get(parts)) is None:
            place = self._opened(self._known(parts[:-1]), parts[-1])
        return place

    def _opened(self, place: Place, name: str) -> Place:
        below = Place(os.open(name, DIR_FLAGS, dir_fd=place.fd), (*place.parts, name))
        self._open[below.parts] = below
        return below

    def _enter(self, place: Place, step: str, name: str) -> Place | str:
        """The directory `step`, or the text of the link that it is."""
        parts = (*place.parts, step)
        if (known := self._open.get(parts)) is not None:
            return known
        status = _lstat(place.fd, step)
        if status is None:
            return self._enter_lower(place, step, name)
        if stat.S_ISLNK(status.st_mode):
            return os.readlink(step, dir_fd=place.fd)
        if not stat.S_ISDIR(status.st_mode):
            raise refused_entry(name, "bad_entry", f"has a parent {step!r} that is not a directory")
        return self._opened(place, step)

    def _enter_lower(self, place: Place, step: str, name: str) -> Place | str:
        parts = (*place.parts, step)
        self._implied.add(parts)
        self.used_lowers = self.used_lowers or not self.hides(parts)
        found = None if self.hides(parts) else self.lowers.lookup(parts)
        if len(parts) > MAX_DEPTH:
            raise refused_entry(name, "bad_entry", f"lies deeper than {MAX_DEPTH} directories")
        if found is None:
            return self._mkdir(place, step)
        with found:
            if stat.S_ISLNK(found.status.st_mode):
                return found.link_target()
            if not stat.S_ISDIR(found.status.st_mode):
                raise refused_entry(name, "bad_entry", f"has a parent {step!r} that is not a directory")
            below = self._mkdir(place, step)
            source = found.open()
        self.times[below.parts] = found.status.st_mtime_ns
        try:
            copy_metadata(source, below.fd, found.status)
        finally:
            os.close(source)
        return below

    def _mkdir(self, place: Place, name: str) -> Place:
        os.mkdir(name, 0o700, dir_fd=place.fd)
        self.nodes += 1
        below = self._opened(place, name)
        os.fchown(below.fd, 0, 0)
        os.fchmod(below.fd, _DEFAULT_MODE)
        self.times[below.parts] = 0
        return below

    def _reset_implied(self, parts: Parts) -> None:
        """A directory taken over from below, before a later entry said that nothing below counts."""
        if parts not in self._implied:
            return
        try:
            place = self._known(parts)
        except (FileNotFoundError, NotADirectoryError):
            return
        os.fchown(place.fd, 0, 0)
        os.fchmod(place.fd, _DEFAULT_MODE)
        self.times[parts] = 0


def copy_metadata(source: int, target: int, status: os.stat_result) -> bool:
    """Owner, mode, kept xattrs and times, in the order in which none undoes another. Whether there were xattrs."""
    os.fchown(target, status.st_uid, status.st_gid)
    os.fchmod(target, stat.S_IMODE(status.st_mode))
    kept = [name for name in os.listxattr(source) if keeps_xattr(name)]
    for name in kept:
        os.setxattr(target, name, os.getxattr(source, name))
    os.utime(target, ns=(status.st_mtime_ns, status.st_mtime_ns))
    return bool(kept)


def remove_tree(parent: int, name: str) -> int:
    """Remove a directory by descriptor, depth first; each level is open while it is emptied, and depth is bounded.

    :returns: how many nodes went, the directory among them.
    """
    gone = 1
    fd = os.open(name, DIR_FLAGS, dir_fd=parent)
    try:
        with os.scandir(fd) as children:
            names = [child.name for child in children]
        for child in names:
            try:
                os.unlink(child, dir_fd=fd)
                gone += 1
            except IsADirectoryError:
                gone += remove_tree(fd, child)
    finally:
        os.close(fd)
    os.rmdir(name, dir_fd=parent)
    return gone


def _lstat(fd: int, name: str) -> os.stat_result | None:
    try:
        return os.stat(name, dir_fd=fd, follow_symlinks=False)
    except OSError as error:
        if error.errno == errno.ENOENT:
            return None
        raise
