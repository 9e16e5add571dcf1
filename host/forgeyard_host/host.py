"""Host: sets an attempt's directory and mounts up from a typed request, and takes them down again."""

# ruff: noqa: PTH101, PTH102, PTH112  # plain os calls: they take dir_fd and run many times per job

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Final

from forgeyard_host import disks, mounts
from forgeyard_host.checks import check_searchable, check_setup
from forgeyard_host.failures import bad_plan, cleanup_failed, describe, mount_failed
from forgeyard_host.files import open_beneath, open_canonical, remove_tree
from forgeyard_host.idmaps import IdMap, NamespaceCache
from forgeyard_host.ledger import Ledger
from forgeyard_host.operations import SandboxPlaced, SandboxSetup
from forgeyard_host.placing import Placing
from forgeyard_host.spares import FIXED, Layout, Spares, fitted
from forgeyard_host.tree_usage import FilesystemUsage, TreeUsage, filesystem_usage, tree_usage
from forgeyard_host.uids import DEFAULT_BASE, DEFAULT_SIZE
from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.identity import SandboxId
from forgeyard_model.result import DiskEvidence

_DIRECTORY: Final = os.O_RDONLY | os.O_DIRECTORY
_SEARCHABLE: Final = 0o711
_UNRESERVED: Final = "the state directory's file system can't set the disk's room aside: a full host would fail the job"
_UNBOUNDED: Final = "this host can't limit the inotify instances of a user namespace: the job may use up all of root's"


class Host:
    """The executor's hands on the kernel. Every call is synchronous and safe in several threads at once."""

    def __init__(self, state_root: str, *, uid_block: range = range(DEFAULT_BASE, DEFAULT_BASE + DEFAULT_SIZE)) -> None:
        """
        :param state_root: the executor's state directory, absolute and without symlinks; made when missing.
        :param uid_block: host ids that an attempt's range may lie in (see UidRanges.block).
        :raises SandboxError: INVALID_FILESYSTEM_PLAN when it can't be used.
        """
        self.state_root = state_root.rstrip("/")
        self._uid_block = uid_block
        self._namespaces = NamespaceCache()
        self._disks = disks.DiskMaker()
        self._searchable = False
        self._layouts: dict[str, Layout] = {}
        try:
            Path(self.state_root).mkdir(mode=0o711, parents=True, exist_ok=True)
            self._root = open_canonical(self.state_root, _DIRECTORY)
        except OSError as error:
            raise _bad_state_root(self.state_root, error) from error
        info = os.fstat(self._root)
        if info.st_mode & 0o022 or info.st_uid != os.geteuid():
            os.close(self._root)
            raise bad_plan(
                "state_directory_writable",
                f"{state_root} is writable for others",
                resolution=f"chown {os.geteuid()} {state_root}; chmod go-w {state_root}",
            )
        self._spares = Spares(self.state_root)
        self._spares.sweep()

    def close(self) -> None:
        """Let go of the directory, the cached namespaces and the spare directories."""
        root, self._root = self._root, -1
        if root >= 0:
            os.close(root)
        self._namespaces.clear()
        self._spares.close()

    def directory_of(self, sandbox: SandboxId) -> str:
        """<state>/sandboxes/<ulid>."""
        return f"{self.state_root}/sandboxes/{sandbox}"

    def create_directory(self, sandbox: SandboxId, ledger: Ledger) -> str:
        """Make the attempt's directory with mnt and scratch in it; returns its path.

        :raises SandboxError: MOUNT_FAILED, reason no_directory.
        """
        directory = self.directory_of(sandbox)
        ledger.intend("directory", path=directory)
        try:
            layout = self._spares.take(directory)
            if layout is None:
                self._make_directory(directory)
            self._layouts[directory] = layout or Layout()
        except OSError as error:
            raise SandboxError(
                SandboxErrorKind.MOUNT_FAILED,
                "no_directory",
                "cannot make the attempt's directory",
                details=describe(error),
            ) from error
        return directory

    def _make_directory(self, directory: str) -> None:
        try:
            _mkdir(directory, _SEARCHABLE)
        except FileNotFoundError:
            _mkdir(f"{self.state_root}/sandboxes", _SEARCHABLE)
            _mkdir(directory, _SEARCHABLE)
        for name in FIXED:
            _mkdir(f"{directory}/{name}", _SEARCHABLE)

    def setup(self, request: SandboxSetup, ledger: Ledger) -> SandboxPlaced:
        """Make the mounts and writable directories of `request`; intents go to `ledger` first.

        After a failure, undo the ledger: what was made so far is left for that.

        :raises SandboxError: INVALID_FILESYSTEM_PLAN, MOUNT_FAILED, NAMESPACE_FAILED, RESOURCE_LIMIT_FAILED.
        """
        self._check(request)
        if not os.path.isdir(f"{request.directory}/mnt"):
            self.create_directory(request.sandbox, ledger)
        ledger.intend("mounts", directory=request.directory)
        directory = self._open_attempt(request.directory)
        try:
            notes: tuple[str, ...] = ()
            if request.disk_limit is None:
                layout = self._fit(request)
            else:
                layout = Layout()  # the disk hides what a spare directory came with
                notes = self._mount_disk(request.directory, request.disk_limit)
                os.chmod("scratch", _SEARCHABLE, dir_fd=directory)
            mounts.make_mount_root(f"{request.directory}/mnt", request.files_size)
            with Placing(request, self._namespaces, directory, layout) as placing:
                placed = placing.place()
            return self._with_namespace(request, replace(placed, notes=(*notes, *placed.notes)) if notes else placed)
        except OSError as error:
            raise mount_failed("set up the attempt's directories", error) from error
        finally:
            os.close(directory)

    def _mount_disk(self, directory: str, limit: int) -> tuple[str, ...]:
        reserved = self._disks.mount(f"{directory}/disk.img", f"{directory}/scratch", limit)
        return () if reserved else (_UNRESERVED,)

    def _with_namespace(self, request: SandboxSetup, placed: SandboxPlaced) -> SandboxPlaced:
        """`placed`, with the user namespace for the container. The mounts have needed one of the same map already."""
        if request.uid_base is None:
            return placed
        whole = ((0, request.uid_base, request.uid_count),)
        namespace = self._namespaces.get(IdMap(whole, whole))
        if namespace.bounded:
            return replace(placed, user_namespace=namespace)
        return replace(placed, notes=(*placed.notes, _UNBOUNDED))

    def _fit(self, request: SandboxSetup) -> Layout:
        """The part of a spare directory's scratch that `request` can use; what scratch will hold is noted down."""
        directory = request.directory
        plain = {part.name for part in request.scratch}
        uppers = {overlay.upper for overlay in request.overlays}
        layout = fitted(directory, self._layouts.get(directory, Layout()), plain, uppers)
        self._layouts[directory] = Layout(layout.plain | plain, layout.uppers | uppers)
        return layout

    def teardown(self, directory: str) -> None:
        """Drop all mounts of the attempt at `directory` and remove it. Goes on past errors; again is fine.

        :raises SandboxError: CLEANUP_FAILED with everything that is left.
        """
        problems = [*self.unmount(directory), *self.remove_directory(directory)]
        if problems:
            raise cleanup_failed(f"parts of {directory} are left", problems)

    def unmount(self, directory: str) -> list[str]:
        """The first half of `teardown`; returns what failed."""
        self._inside(directory)
        problems: list[str] = []
        _attempt(problems, lambda: mounts.unmount_all(f"{directory}/mnt"))
        if os.path.lexists(f"{directory}/disk.img"):
            _attempt(problems, lambda: disks.abandon(f"{directory}/scratch"))
        _attempt(problems, lambda: mounts.unmount_all(f"{directory}/scratch"))
        return problems

    def remove_directory(self, directory: str, *, keep_spare: bool = False) -> list[str]:
        """The second half of `teardown`; returns what failed.

        :param keep_spare: the emptied directories may serve another attempt of this Host. Only for an attempt whose
            processes are known to be gone.
        """
        self._inside(directory)
        layout = self._layouts.pop(directory, None)
        if keep_spare and layout is not None and self._spares.keep(directory, layout):
            return []
        try:
            remove_tree(directory)
        except ExceptionGroup as group:
            return [describe(error) for error in group.exceptions if isinstance(error, OSError)]
        except OSError as error:
            return [describe(error)]
        return []

    def disk_usage(self, directory: str) -> DiskEvidence:
        """See disks.disk_usage."""
        return disks.disk_usage(directory)

    def filesystem_usage(self, directory: str) -> FilesystemUsage:
        """What is in use on the filesystem that the attempt at `directory` writes to."""
        return filesystem_usage(f"{directory}/scratch")

    def tree_usage(self, directory: str, *, most_bytes: int, most_files: int, seconds: float) -> TreeUsage:
        """What the attempt at `directory` has written. See tree_usage.tree_usage."""
        return tree_usage(f"{directory}/scratch", most_bytes=most_bytes, most_files=most_files, seconds=seconds)

    def _check(self, request: SandboxSetup) -> None:
        check_setup(request, self.directory_of(request.sandbox), self._uid_block)
        if request.uid_base is not None and not self._searchable:
            check_searchable(self.state_root)
            self._searchable = True

    def _open_attempt(self, directory: str) -> int:
        return open_beneath(self._root, directory.removeprefix(f"{self.state_root}/"), _DIRECTORY)

    def _inside(self, directory: str) -> None:
        parent, _, name = directory.rpartition("/")
        try:
            SandboxId.parse(name)
        except InvalidRequest as error:
            raise bad_plan("directory_outside_state", f"{directory} is no attempt's directory") from error
        if parent != f"{self.state_root}/sandboxes":
            raise bad_plan("directory_outside_state", f"{directory} is not below {self.state_root}/sandboxes")


def _mkdir(path: str, mode: int) -> None:
    try:
        os.mkdir(path, mode)
    except FileExistsError:
        return
    os.chmod(path, mode)  # whatever the umask is


def _attempt(problems: list[str], act: Callable[[], None]) -> None:
    try:
        act()
    except OSError as error:
        problems.append(describe(error))


def _bad_state_root(path: str, error: OSError) -> SandboxError:
    return bad_plan(
        "state_directory_unusable",
        f"cannot use {path} as the state directory",
        details=describe(error),
        resolution="name an absolute path without symlinks that the executor may write",
    )
