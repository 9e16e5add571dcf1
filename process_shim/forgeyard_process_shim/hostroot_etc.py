"""Copy the wanted part of a configuration directory of the host into a tree, and say what was left out."""

from __future__ import annotations

import fnmatch
import os
import stat
from collections.abc import Iterable
from pathlib import Path

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_process_shim.hostroot_layout import Layout
from forgeyard_process_shim.hostroot_rules import (
    LOCAL_TRUST,
    MAX_FILE,
    MAX_TOTAL,
    Refusal,
    Skipped,
    refusal,
    smells_of_secret,
)
from forgeyard_process_shim.hostroot_tree import Entry, Kind, Tree, directory, link


class ConfigCopy:
    """Copies below one directory, such as /etc. Links pull in what they point to, within the same directory.

    :param host: root of the host's tree.
    :param base: the directory, as the job sees it.
    :param layout: decides which links lead somewhere in the job.
    """

    def __init__(self, host: Path, base: str, layout: Layout) -> None:
        self.tree: Tree = {}
        self.skipped: list[Skipped] = []
        self.inputs: list[str] = []
        """Host paths whose change may change the copy."""
        self._prefix = "" if host == Path("/") else os.fspath(host)
        self._base = base
        self._layout = layout
        self._seen: set[str] = set()
        self._waiting: list[str] = []
        self._total = 0

    def collect(self, globs: Iterable[str], paths: Iterable[str] = ()) -> None:
        """Copy what matches `globs` and what stands in `paths`, both relative to the base.

        :raises SandboxError: when it all comes to more than MAX_TOTAL bytes.
        """
        self._waiting = [*paths, *(path for glob in globs for path in self._matches(glob))]
        while self._waiting:
            self._visit(self._waiting.pop())
        self._drop_dead_links()

    def _matches(self, glob: str) -> list[str]:
        if not set(glob) & set("*?["):
            return [glob]
        return [name for name in self._names("") if fnmatch.fnmatchcase(name, glob)]

    def _names(self, relative: str) -> list[str]:
        try:
            return sorted(os.listdir(self._on_host(relative)))  # noqa: PTH208  names are what is wanted
        except OSError:
            return []

    def _on_host(self, relative: str) -> str:
        return f"{self._prefix}{self._base}/{relative}".rstrip("/")

    def _visit(self, relative: str) -> None:
        if relative in self._seen:
            return
        self._seen.add(relative)
        reason = refusal(relative)
        if reason is None:
            try:
                reason = self._through_parents(relative)
            except OSError:
                return  # not every host has everything that is wanted
        if reason is not None:
            self.skipped.append(Skipped(f"{self._base}/{relative}", reason))

    def _through_parents(self, relative: str) -> Refusal | None:
        """Take a path if each of its parents is open to all. A parent that is a link is taken, then followed.

        :raises FileNotFoundError: when there is nothing.
        """
        for end in (index for index, letter in enumerate(relative) if letter == "/"):
            parent = relative[:end]
            mode = os.lstat(self._on_host(parent)).st_mode
            if stat.S_ISLNK(mode):
                target = self._target(f"{self._base}/{parent}", os.readlink(self._on_host(parent)))  # noqa: PTH115  keeps the text as it is
                self._waiting.append(parent)
                return self._follow(target + relative[end:])
            if not mode & 0o001:
                return Refusal.NOT_WORLD_READABLE
        return self._take(relative)

    def _follow(self, target: str) -> Refusal | None:
        """Take what a link points to, when it is ours to take; say whether the job has it."""
        if target.startswith(self._base + "/"):
            self._waiting.append(target[len(self._base) + 1 :])
            return None
        shown = self._layout.shows(target) and os.path.lexists(self._prefix + target)
        return None if shown else Refusal.LEADS_OUT

    def _take(self, relative: str) -> Refusal | None:
        path = self._on_host(relative)
        mode = os.lstat(path).st_mode
        self.inputs.append(path)
        if stat.S_ISLNK(mode):
            return self._take_link(relative, path)
        if not mode & 0o004:
            return Refusal.NOT_WORLD_READABLE
        if stat.S_ISDIR(mode):
            self.tree[f"{self._base}/{relative}"] = directory()
            self._waiting += [f"{relative}/{name}" for name in self._names(relative)]
            return None
        return self._take_file(relative, path) if stat.S_ISREG(mode) else Refusal.SPECIAL_FILE

    def _take_link(self, relative: str, path: str) -> Refusal | None:
        raw = os.readlink(path)  # noqa: PTH115  keeps the text as it is
        inside = f"{self._base}/{relative}"
        target = self._target(inside, raw)
        if reason := self._follow(target):
            return self._take_local_ca(relative, target) if target.startswith(LOCAL_TRUST) else reason
        self.tree[inside] = link(raw)
        return None

    def _take_local_ca(self, relative: str, target: str) -> Refusal | None:
        """An organisation's own CA has to work in jobs, though the place it comes from is not shown."""
        self.inputs.append(self._prefix + target)
        return self._take_file(relative, self._prefix + target)

    def _target(self, inside: str, raw: str) -> str:
        return self._layout.canonical(raw if raw.startswith("/") else f"{inside.rpartition('/')[0]}/{raw}")

    def _take_file(self, relative: str, path: str) -> Refusal | None:
        try:
            # NONBLOCK: what was a file a moment ago may be a FIFO now
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError:
            return Refusal.UNREADABLE
        with os.fdopen(fd, "rb") as file:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or not status.st_mode & 0o004:
                return Refusal.NOT_WORLD_READABLE
            content = file.read(MAX_FILE + 1)
        if len(content) > MAX_FILE:
            return Refusal.TOO_LARGE
        if smells_of_secret(content):
            return Refusal.LOOKS_SECRET
        self._account(len(content))
        mode = 0o755 if status.st_mode & 0o111 else 0o644
        self.tree[f"{self._base}/{relative}"] = Entry(Kind.FILE, mode, content)
        return None

    def _account(self, size: int) -> None:
        self._total += size
        if self._total > MAX_TOTAL:
            raise SandboxError(
                SandboxErrorKind.INVALID_FILESYSTEM_PLAN,
                "host_config_too_large",
                f"what jobs need of {self._base} is more than {MAX_TOTAL >> 20} MiB",
                resolution="find out what grew there, or run the job in an image",
            )

    def _drop_dead_links(self) -> None:
        """Remove links to what was refused or is not there, and then links to those."""
        while dead := [path for path, entry in self.tree.items() if self._is_dead(path, entry)]:
            for path in dead:
                del self.tree[path]
                self.skipped.append(Skipped(path, Refusal.LEADS_OUT))

    def _is_dead(self, path: str, entry: Entry) -> bool:
        target = self._target(path, entry.target) if entry.kind is Kind.LINK else ""
        if not target.startswith(self._base + "/") or target in self.tree:
            return False
        # a link on the way: then the path itself is in no tree, but what it means may be
        for end in (index for index, letter in enumerate(target) if letter == "/" and index > len(self._base)):
            parent = self.tree.get(target[:end])
            if parent is not None and parent.kind is Kind.LINK:
                return self._is_dead(path, link(self._target(target[:end], parent.target) + target[end:]))
        return True
