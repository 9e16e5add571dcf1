"""ID maps for mounts: which extents, and a user namespace that carries them."""

from __future__ import annotations

import os
import subprocess
import threading
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_host.failures import describe
from forgeyard_host.operations import IdMapKind
from forgeyard_model.errors import SandboxError, SandboxErrorKind

Extent = tuple[int, int, int]
"""First id on disk, first id on the host, how many."""

_SHARE: Final = 4
_LEAST_INSTANCES: Final = 16
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
    """An open user namespace; closed with its last user, so eviction never pulls an fd from under a mount call.

    :param bounded: its `user.max_*` are set (see `_limits`). What is made inside is charged to the maker of the
        namespace as well, which is root, and nothing else would keep one job from using up what root may have.
    """

    __slots__ = ("bounded", "fd")

    def __init__(self, fd: int, *, bounded: bool = False) -> None:
        self.fd = fd
        self.bounded = bounded

    @property
    def path(self) -> str:
        """Where others can open it while this object lives."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

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
        made = _make_namespace(idmap)
        with self._lock:
            self._known[idmap] = made
            while len(self._known) > self._kept:
                self._known.popitem(last=False)
        return made

    def clear(self) -> None:
        """Let go of every namespace."""
        with self._lock:
            self._known.clear()


_ENVIRONMENT: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C"}
_PATIENCE: Final = 10.0
"""Seconds for a program of milliseconds."""
_BOUND: Final = "for pair; do echo ${pair#*=} > /proc/sys/user/${pair%%=*} || exit; done"
_HELPER: Final = """
read go && echo && read go || exit
for pair; do echo ${pair#*=} > /proc/sys/user/${pair%%=*} || exit; done 2>/dev/null
echo ok
read go
"""


def _limits() -> tuple[str, ...]:
    """What a sandbox may have of what is charged to root: a quarter of root's own, and no user namespace below it."""
    instances, watches = (
        int(Path(f"/proc/sys/fs/inotify/max_user_{kind}").read_bytes()) // _SHARE for kind in ("instances", "watches")
    )
    most = max(_LEAST_INSTANCES, instances)
    return f"max_inotify_instances={most}", f"max_inotify_watches={watches}", "max_user_namespaces=0"


def bound_user_namespace(pid: int) -> None:
    """Set the same limits in the user namespace of process `pid`, one that a runtime made. Blocking.

    Nothing may run in it yet; the caller holds the process by a pidfd. A tiny program again: a thread can't enter one.

    :raises SandboxError: NAMESPACE_FAILED; what the namespace holds would be charged to root without a bound.
    """
    try:
        done = subprocess.run(
            ["nsenter", f"--user=/proc/{pid}/ns/user", "--", "sh", "-c", _BOUND, "sh", *_limits()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
            timeout=_PATIENCE,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise _unbounded(str(error)) from error
    if done.returncode != 0:
        raise _unbounded(done.stderr.decode(errors="replace").strip() or f"exit {done.returncode}")


def _unbounded(details: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NAMESPACE_FAILED,
        "user_namespace_limits",
        "cannot set the limits of a container's user namespace",
        details=details,
        resolution="install util-linux; the sysctls user.max_* need Linux 4.9",
    )


def _make_namespace(idmap: IdMap) -> UserNamespace:
    """A new user namespace, with limits of its own where the host can set them.

    Only a process can make one, and forking or cloning this one from a thread is unsafe: a tiny program is spawned
    instead. It echoes one byte once it runs inside, which is the sign that the namespace exists.
    """
    try:
        with subprocess.Popen(
            # Capabilities in the new namespace, without which the limits can't be set, would not survive the exec.
            ["unshare", "--user", "--keep-caps", "--", "sh", "-c", _HELPER, "sh", *_limits()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_ENVIRONMENT,
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


def _map_and_open(child: subprocess.Popen[bytes], idmap: IdMap) -> UserNamespace:
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
    fd = os.open(f"/proc/{child.pid}/ns/user", os.O_RDONLY | os.O_CLOEXEC)
    child.stdin.write(b"\n")
    return UserNamespace(fd, bounded=child.stdout.read(3) == b"ok\n")
