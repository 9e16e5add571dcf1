"""What `host` is asked to do and what it answers: typed, so that a separate helper process can serve it later.

The requests carry names and numbers only. Whether they hold is checked by Host, whoever the caller is
(seed, sections 132-136).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from forgeyard_model.identity import SandboxId

if TYPE_CHECKING:
    from forgeyard_host.idmaps import UserNamespace  # which imports the kinds below

DEFAULT_FILES_SIZE: Final = 16 << 20


class IdMapKind(StrEnum):
    """How the owners of a source's files appear in the sandbox.

    NONE: as they are on disk, which is nobody inside a user namespace.
    SHIFT: id k on disk is id k in the sandbox, for 0 to 65535.
    OWNER: as SHIFT, with the source directory's own owner and group changing places with the job's, so that what
    belongs to the one who handed it in belongs to the job.
    """

    NONE = "none"
    SHIFT = "shift"
    OWNER = "owner"


@dataclass(frozen=True, slots=True)
class BindRequest:
    """Mount `source` for `slot`: an absolute path without a symlink in it. Always nosuid and nodev.

    Mounts below `source` do not come along.

    :param required_directory: True or False when the source has to be (or must not be) a directory.
    """

    slot: str
    source: str
    idmap: IdMapKind
    read_only: bool = True
    executable: bool = True
    required_directory: bool | None = None


@dataclass(frozen=True, slots=True)
class RootDirectory:
    """A directory that an overlay has to have: made where it is missing, owned by the sandbox's root, mode 0755.

    :param path: absolute, as the sandbox sees it; links in it are followed inside the overlay.
    :param field: what asked for it, for an error.
    :param slot: where the directory is bound as well, writable whatever the root is; empty for none.
    """

    path: str
    field: str
    slot: str = ""


@dataclass(frozen=True, slots=True)
class OverlayRequest:
    """A writable view of `lowers` (topmost first) for `slot`; what is written goes to scratch/<upper>."""

    slot: str
    lowers: tuple[str, ...]
    idmap: IdMapKind
    upper: str
    directories: tuple[RootDirectory, ...] = ()


@dataclass(frozen=True, slots=True)
class ScratchDir:
    """A writable directory scratch/<name> for `slot`. `uid` and `gid` as the sandbox sees them."""

    slot: str
    name: str
    mode: int
    uid: int
    gid: int


@dataclass(frozen=True, slots=True)
class SandboxSetup:
    """Everything one attempt needs on disk and as mounts.

    :param directory: <state>/sandboxes/<ulid>.
    :param uid_base: first host id of the attempt's range; None when the sandbox has no user namespace.
    :param disk_limit: bytes for all that is written under scratch; None: bounded by the host's disk alone.
    :param files_size: bytes that the attempt's own files may have in memory.
    """

    sandbox: SandboxId
    directory: str
    uid_base: int | None
    uid_count: int
    job_uid: int
    job_gid: int
    binds: tuple[BindRequest, ...] = ()
    overlays: tuple[OverlayRequest, ...] = ()
    scratch: tuple[ScratchDir, ...] = ()
    disk_limit: int | None = None
    files_size: int = DEFAULT_FILES_SIZE


@dataclass(frozen=True, slots=True)
class SandboxPlaced:
    """Host path of each slot, and facts worth telling the user.

    :param scratch: path of the writable layer.
    :param files: a directory in memory, with ctl, bundle and runtime in it, that goes with the attempt's mounts. Small
        files made and removed for each job are what a disk is slowest at.
    :param user_namespace: one with the attempt's map and limits of its own, for the container to join; None where the
        host can't set such limits, and then the runtime makes one.
    """

    sources: Mapping[str, str]
    notes: tuple[str, ...]
    scratch: str
    files: str
    user_namespace: UserNamespace | None = None
