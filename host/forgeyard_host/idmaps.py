"""ID maps for mounts: which extents, and a user namespace that carries them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from forgeyard_host.failures import describe
from forgeyard_host.operations import IdMapKind
from forgeyard_model.errors import SandboxError, SandboxErrorKind

Extent = tuple[int, int, int]
"""First id on disk, first id on the host, how many."""

_KEPT: Final = 512
"""Namespaces kept open, each one fd: more than the attempts that run at once, times the maps of each."""


@dataclass(frozen=True, slots=True)
class IdMap:
    """Extents for users and for groups."""

    uids: tuple[Extent, ...]
    gids: tuple[Extent, ...]

    def host_uid(self, on_disk: int) -> int | None:
        """The host uid that `on_disk` appears as; None when it is not mapped."""
        return _mapped(self.uids, on_disk)

    def host_gid(self, on_disk: int) -> int | None:
        """As `host_uid`, for groups."""
        return _mapped(self.gids, on_disk)


def _mapped(extents: tuple[Extent, ...], on_disk: int) -> int | None:
    for first, host, count in extents:
        if first <= on_disk < first + count:
            return host + on_disk - first
    return None


def make_idmap(kind: IdMapKind, base: int, count: int, job: tuple[int, int], owner: tuple[int, int]) -> IdMap:
    """The map of SHIFT or OWNER. `job` and `owner`: uid and gid in the sandbox, and on disk."""
    if kind is IdMapKind.SHIFT:
        whole = ((0, base, count),)
        return IdMap(whole, whole)
    return IdMap(_swapped(base, count, job[0], owner[0]), _swapped(base, count, job[1], owner[1]))


def _swapped(base: int, count: int, job: int, owner: int) -> tuple[Extent, ...]:
    """A shift by `base` in which `owner` and `job` have changed places: no two ids on disk become one."""
    if job == owner:
        return ((0, base, count),)
    # An owner beyond the range has no place to give back, so the job's own id on disk stays unmapped then.
    places = {owner: job, job: owner} if owner < count else {owner: job}
    extents: list[Extent] = []
    start = 0
    for special in sorted((job, owner)):
        if start < min(special, count):
            extents.append((start, base + start, min(special, count) - start))
        if special in places:
            extents.append((special, base + places[special], 1))
        start = special + 1
    if start < count:
        extents.append((start, base + start, count - start))
    return tuple(extents)


class UserNamespace:
    """An open user namespace; closed with its last user, so eviction never pulls an fd from under a mount call."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class NamespaceCache:
    """User namespaces by map. Making one costs a process; the same uid range asks for the same few again."""

    def __init__(self, kept: int = _KEPT) -> None:
        self._kept = kept
        self._lock = threading.Lock()
        self._known: OrderedDict[IdMap, UserNamespace] = OrderedDict()

    def get(self, idmap: IdMap) -> UserNamespace:
        """The namespace of `idmap`.

        :raises SandboxError: NAMESPACE_FAILED, when the host lets us make none.
        """
        with self._lock:
            found = self._known.get(idmap)
            if found is not None:
                self._known.move_to_end(idmap)
                return found
        made = UserNamespace(_make_namespace(idmap))
        with self._lock:
            self._known[idmap] = made
            while len(self._known) > self._kept:
                self._known.popitem(last=False)
        return made

    def clear(self) -> None:
        """Let go of every namespace."""
        with self._lock:
            self._known.clear()


def _make_namespace(idmap: IdMap) -> int:
    """An fd of a new user namespace.

    Only a process can make one, and forking or cloning this one from a thread is unsafe: a tiny program is spawned
    instead. `cat` echoes one byte once it runs inside, which is the sign that the namespace exists.
    """
    try:
        with subprocess.Popen(
            ["unshare", "--user", "--", "cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"},
            bufsize=0,
        ) as child:
            try:
                return _map_and_open(child, idmap)
            finally:
                child.kill()
    except OSError as error:
        raise SandboxError(
            SandboxErrorKind.NAMESPACE_FAILED,
            "no_user_namespace",
            "cannot make a user namespace for ID-mapped mounts",
            details=describe(error),
            resolution="install util-linux and check the sysctls user.max_user_namespaces and "
            "kernel.unprivileged_userns_clone",
        ) from error


def _map_and_open(child: subprocess.Popen[bytes], idmap: IdMap) -> int:
    if child.stdin is None or child.stdout is None:
        raise OSError(22, "the helper has no pipes")  # EINVAL; never with the PIPEs above
    child.stdin.write(b"\n")
    if child.stdout.read(1) != b"\n":
        raise OSError(1, "unshare --user ended without a namespace")  # EPERM
    for name, extents in (("uid_map", idmap.uids), ("gid_map", idmap.gids)):
        lines = "".join(f"{first} {host} {count}\n" for first, host, count in extents)
        # One write: the kernel takes a map whole and only once.
        fd = os.open(f"/proc/{child.pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(fd, lines.encode())
        finally:
            os.close(fd)
    return os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
