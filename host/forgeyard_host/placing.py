"""Placing the parts of one attempt: its writable directories, binds and overlays."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass, field
from typing import Final, Self

from forgeyard_host import mounts
from forgeyard_host.failures import bad_plan
from forgeyard_host.files import open_beneath
from forgeyard_host.idmaps import IdMap, NamespaceCache, make_idmap
from forgeyard_host.operations import BindRequest, IdMapKind, OverlayRequest, SandboxPlaced, SandboxSetup, ScratchDir
from forgeyard_host.rootdirs import make_in_root
from forgeyard_host.spares import Layout

_NOBODY: Final = 65534
_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY


@dataclass(slots=True)
class Placing:
    """One setup under way: the fds it needs, and what it found. A context manager, for the fds.

    `directory`: fd of the attempt's directory. `layout`: what a spare directory already has in its scratch.
    """

    request: SandboxSetup
    namespaces: NamespaceCache
    directory: int
    layout: Layout
    mnt: int = -1
    scratch: int = -1
    sources: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.mnt = open_beneath(self.directory, "mnt", _DIRECTORY)
        self.scratch = open_beneath(self.directory, "scratch", _DIRECTORY)
        return self

    def __exit__(self, *_: object) -> None:
        for fd in (self.mnt, self.scratch):
            if fd >= 0:
                os.close(fd)

    def place(self) -> SandboxPlaced:
        """Make everything the request names.

        :raises SandboxError: as Host.setup.
        """
        for scratch in self.request.scratch:
            self._scratch_dir(scratch)
        for bind in self.request.binds:
            self._bind(bind)
        for number, overlay in enumerate(self.request.overlays):
            self._overlay(number, overlay)
        directory = self.request.directory
        files = f"{directory}/mnt/{mounts.FILES}"
        return SandboxPlaced(self.sources, tuple(self.notes), f"{directory}/scratch", files)

    def _host_id(self, inside: int) -> int:
        base = self.request.uid_base
        if base is not None and not 0 <= inside < self.request.uid_count:
            raise bad_plan("owner_outside_range", f"id {inside} is not below {self.request.uid_count}")
        return inside if base is None else base + inside

    def _scratch_dir(self, wanted: ScratchDir) -> None:
        owner = self._host_id(wanted.uid), self._host_id(wanted.gid)
        _owned_directory(self.scratch, wanted.name, wanted.mode, owner, there=wanted.name in self.layout.plain)
        self.sources[wanted.slot] = f"{self.request.directory}/scratch/{wanted.name}"

    def _bind(self, wanted: BindRequest) -> None:
        source, info = mounts.open_source(wanted.source, directory=wanted.required_directory)
        try:
            self._attach(
                source,
                info,
                wanted.source,
                wanted.slot,
                wanted.idmap,
                read_only=wanted.read_only,
                executable=wanted.executable,
            )
        finally:
            os.close(source)
        self.sources[wanted.slot] = f"{self.request.directory}/mnt/{wanted.slot}"

    def _overlay(self, number: int, wanted: OverlayRequest) -> None:
        if not wanted.lowers:
            raise bad_plan("no_layers", f"overlay {wanted.slot} has no layers")
        names: list[str] = []
        for index, lower in enumerate(wanted.lowers):
            source, info = mounts.open_source(lower, directory=True)
            name = f".{number}.{index}"  # no slot begins with a dot
            try:
                idmap = self._attach(source, info, lower, name, wanted.idmap)
            finally:
                os.close(source)
            names.append(name)
            if index == 0:
                self._upper(wanted.upper, info, idmap)
        mounts.attach_overlay(self.mnt, wanted.slot, names, self.scratch, wanted.upper)
        self.sources[wanted.slot] = f"{self.request.directory}/mnt/{wanted.slot}"
        if wanted.directories:
            self._root_directories(wanted)

    def _root_directories(self, overlay: OverlayRequest) -> None:
        root = os.open(overlay.slot, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=self.mnt)
        try:
            for wanted in overlay.directories:
                found = make_in_root(root, wanted, (self._host_id(0), self._host_id(0)))
                try:
                    if wanted.slot:
                        # A bind of the overlay's own directory: its content, its owners, and the same bounded disk.
                        info = os.fstat(found)
                        self._attach(found, info, wanted.path, wanted.slot, IdMapKind.NONE, read_only=False)
                        self.sources[wanted.slot] = f"{self.request.directory}/mnt/{wanted.slot}"
                finally:
                    os.close(found)
        finally:
            os.close(root)

    def _upper(self, name: str, lower: os.stat_result, idmap: IdMap | None) -> None:
        """The merged root shows the upper's owner and mode: make them what the lower's would be."""
        there = name in self.layout.uppers
        _owned_directory(self.scratch, name, 0o711, (0, 0), there=there)
        owner = lower.st_uid, lower.st_gid
        if idmap is not None:
            nobody = self._host_id(min(_NOBODY, self.request.uid_count - 1))
            uid, gid = idmap.host_uid(lower.st_uid), idmap.host_gid(lower.st_gid)
            owner = nobody if uid is None else uid, nobody if gid is None else gid
        _owned_directory(self.scratch, f"{name}/upper", stat.S_IMODE(lower.st_mode), owner, there=there)
        _owned_directory(self.scratch, f"{name}/work", 0o700, (0, 0), there=there)

    def _attach(
        self,
        source: int,
        info: os.stat_result,
        shown: str,
        name: str,
        kind: IdMapKind,
        *,
        read_only: bool = True,
        executable: bool = True,
    ) -> IdMap | None:
        """Bind `source`; returns the map that was asked for, whether or not its filesystem takes it."""
        idmap = self._idmap(kind, info)
        mapped = mounts.attach_bind(
            source,
            shown,
            self.mnt,
            name,
            directory=stat.S_ISDIR(info.st_mode),
            read_only=read_only,
            executable=executable,
            idmap=None if idmap is None else self.namespaces.get(idmap),
        )
        if not mapped:
            self.notes.append(f"files of {shown} appear owned by nobody: its filesystem can't be ID-mapped")
        return idmap

    def _idmap(self, kind: IdMapKind, info: os.stat_result) -> IdMap | None:
        request = self.request
        if kind is IdMapKind.NONE or (request.uid_base is None and kind is IdMapKind.SHIFT):
            return None
        job, owner = (request.job_uid, request.job_gid), (info.st_uid, info.st_gid)
        if request.uid_base is None and job == owner:
            return None
        # Without a user namespace ids inside are ids outside, and only the owner and the job change places.
        return make_idmap(kind, request.uid_base or 0, request.uid_count, job, owner)


def _owned_directory(parent: int, name: str, mode: int, owner: tuple[int, int], *, there: bool) -> None:
    """Make a directory, or make it over: one that is `there` is an empty one of an earlier attempt."""
    if not there:
        os.mkdir(name, 0o700, dir_fd=parent)
    os.chown(name, *owner, dir_fd=parent, follow_symlinks=False)
    os.chmod(name, mode, dir_fd=parent)
