"""Unpacked layers, shared by every job: one directory per layer, made once, trusted because of how it came to be.

::

    <root>/layers/<diff id>/        a layer that needs nothing below it; chain-<chain id>/ for one that does
        tree/                       its files
        layer.json                  what was counted
    <root>/partial/<diff id>/       being unpacked; renamed into layers/ when every digest agreed
    <root>/locks/<diff id>          flock'ed while unpacking, so that two processes do the work once

The root is 0700: trees hold setuid programs that no user of this host may reach.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.plan import JobUser, RootfsPlan
from forgeyard_oci.image_config import ImageConfig
from forgeyard_oci.image_errors import host_failure, unsupported
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.image_resolve import ImageLayer, ResolvedImage, resolve_image
from forgeyard_oci.image_signal import parse_stop_signal
from forgeyard_oci.image_user import resolve_user
from forgeyard_oci.layout import ImageLayout
from forgeyard_oci.reference import ImageReference
from forgeyard_oci.unpack import UnpackReport, unpack_layer
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import MergedTree
from forgeyard_oci.unpack_stream import LayerStream, layer_compression

_TREE: Final = "tree"
_RECORD: Final = "layer.json"
_MAX_CACHED: Final = 256


@dataclass(frozen=True, slots=True)
class _Ready:
    """An image whose layers are all there. `users`: identities looked up so far, by their text."""

    plan: RootfsPlan
    default_user: str
    users: dict[str, JobUser]


class ImageStore:
    """Prepares images as root filesystems. Blocking; safe to call from several threads and processes.

    :param root: directory of the store, made when missing.
    :param host: what this machine runs; given by tests.
    """

    def __init__(self, root: Path, *, limits: UnpackLimits | None = None, host: Platform | None = None) -> None:
        self.root = root
        self.limits = limits or UnpackLimits()
        self.host = host or Platform.host()
        self._ready: dict[tuple[str, str, str], _Ready] = {}
        for folder in (root, root / "layers", root / "partial", root / "locks"):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        root.chmod(0o700)

    def prepare(self, reference: str, platform: str | None, base_dir: Path, *, user: str | None = None) -> RootfsPlan:
        """The root filesystem of an image, unpacked if it isn't yet.

        :param platform: as OS/ARCH; None is this host's.
        :param base_dir: what a relative layout path is relative to.
        :param user: the job's `user:`, which beats the image's USER.
        :raises InvalidRequest: a malformed reference, or a user the image does not know.
        :raises SandboxError: an image that is damaged or breaks a rule.
        :raises ExecutorError: UNSUPPORTED (source, architecture, media type) or IO_FAILED (such as a full disk).
        """
        image = ImageReference.parse(reference)
        key = (str(image.layout_path(base_dir)), image.digest or "", platform or "")
        ready = self._ready.get(key) if image.digest else None
        if ready is None or not all(map(os.path.isdir, ready.plan.lowers)):
            ready = self._prepare(image, self._platform(platform), base_dir)
            self._remember(key, ready)
        return replace(ready.plan, user=_user(ready, user))

    def sweep(self) -> int:
        """Remove what killed processes left half unpacked; how many there were. Those in use are left alone."""
        removed = 0
        for folder in (self.root / "partial").iterdir():
            with self._lock(folder.name, wait=False) as held:
                if held and folder.exists():
                    shutil.rmtree(folder)
                    removed += 1
        return removed

    def _platform(self, text: str | None) -> Platform:
        wanted = Platform.parse(text) if text else self.host
        if not self.host.runs(wanted):
            raise unsupported(
                "wrong_architecture",
                f"platform {wanted} was asked for, host is {self.host}, no binfmt handler is used",
                resolution=f"leave platform out, or run on a {wanted.architecture} host",
            )
        return wanted

    def _remember(self, key: tuple[str, str, str], ready: _Ready) -> None:
        if len(self._ready) >= _MAX_CACHED:
            self._ready.pop(next(iter(self._ready)), None)
        if key[1]:
            self._ready[key] = ready

    def _prepare(self, image: ImageReference, platform: Platform, base_dir: Path) -> _Ready:
        layout = ImageLayout(image.layout_path(base_dir))
        resolved = resolve_image(layout, image, platform)
        config = ImageConfig.read(resolved.config)
        plan = RootfsPlan(
            kind=ExecutorKind.CONTAINER,
            lowers=self._unpack_all(layout, resolved),
            identity=resolved.digest,
            writable=True,
            env=config.env,
            entrypoint=config.entrypoint,
            cmd=config.cmd,
            workdir=config.workdir,
            stop_signal=parse_stop_signal(config.stop_signal) or signal.SIGTERM,
            notes=_signal_notes(config.stop_signal),
        )
        return _Ready(plan, config.user, {})

    def _unpack_all(self, layout: ImageLayout, image: ResolvedImage) -> tuple[str, ...]:
        """Every layer's tree, topmost first."""
        for layer in image.layers:
            layer_compression(layer.blob.media_type)  # refuse before the first byte is unpacked
        lowers: tuple[str, ...] = ()
        chain = ""
        for layer in image.layers:
            chain = _chain_id(chain, layer.diff_id)
            folder = self._find(layer, chain) or self._unpack(layout, layer, chain, lowers)
            tree = str(folder / _TREE)
            # An overlay refuses a directory twice. The upper one of two says all that the lower one says.
            below = () if _record(folder).opaque_root else (lower for lower in lowers if lower != tree)
            lowers = (tree, *below)
        # An image of no layers is legal, an overlay of none is not.
        return lowers or (str(self._empty()),)

    def _find(self, layer: ImageLayer, chain: str) -> Path | None:
        layers = self.root / "layers"
        names = (_hex(layer.diff_id), f"chain-{_hex(chain)}")
        return next((layers / name for name in names if (layers / name).is_dir()), None)

    def _unpack(self, layout: ImageLayout, layer: ImageLayer, chain: str, lowers: tuple[str, ...]) -> Path:
        name = _hex(layer.diff_id)
        partial = self.root / "partial" / name
        with self._lock(name):
            if (folder := self._find(layer, chain)) is not None:
                return folder
            try:
                shutil.rmtree(partial, ignore_errors=True)  # of a process that was killed: we hold its lock
                report = self._unpack_into(partial, layout, layer, lowers)
                folder = self.root / "layers" / (f"chain-{_hex(chain)}" if report.used_lowers else name)
                partial.rename(folder)
            except OSError as error:
                raise host_failure(error, "unpacking an image", str(self.root)) from error
            finally:
                shutil.rmtree(partial, ignore_errors=True)
            return folder

    def _unpack_into(
        self, partial: Path, layout: ImageLayout, layer: ImageLayer, lowers: tuple[str, ...]
    ) -> UnpackReport:
        (partial / _TREE).mkdir(parents=True)
        fd = layout.open_blob(layer.blob)
        try:
            stream = LayerStream(
                fd,
                media_type=layer.blob.media_type,
                digest=layer.blob.digest,
                size=layer.blob.size,
                diff_id=layer.diff_id,
                limits=self.limits,
            )
            report = unpack_layer(stream, str(partial / _TREE), MergedTree(lowers), self.limits)
        finally:
            os.close(fd)
        (partial / _RECORD).write_text(json.dumps({"diff_id": layer.diff_id, "report": asdict(report)}))
        return report

    def _empty(self) -> Path:
        folder = self.root / "empty"
        folder.mkdir(mode=0o755, exist_ok=True)
        return folder

    @contextmanager
    def _lock(self, name: str, *, wait: bool = True) -> Iterator[bool]:
        """Hold the lock of one layer across processes; the kernel drops it when its holder dies."""
        fd = os.open(self.root / "locks" / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            yield _flock(fd, wait=wait)
        finally:
            os.close(fd)


def _flock(fd: int, *, wait: bool) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _record(folder: Path) -> UnpackReport:
    report = json.loads((folder / _RECORD).read_text())["report"]
    return UnpackReport(**{**report, "skipped": tuple(report["skipped"])})


def _signal_notes(text: str) -> tuple[str, ...]:
    if not text or parse_stop_signal(text) is not None:
        return ()
    return (f"the image's StopSignal {text[:40]!r} is no signal: SIGTERM is sent instead",)


def _user(ready: _Ready, override: str | None) -> JobUser:
    if override == "":
        raise InvalidRequest("user", override, "write a name or a uid, or leave it out for the image's USER")
    text = ready.default_user if override is None else override
    if (known := ready.users.get(text)) is None:
        field = "user" if override is not None else "image USER"
        known = ready.users[text] = resolve_user(text, MergedTree(ready.plan.lowers), field=field)
    return known


def _chain_id(parent: str, diff_id: str) -> str:
    """Image spec, layer ChainID: names a layer together with everything below it."""
    return f"sha256:{hashlib.sha256(f'{parent} {diff_id}'.encode()).hexdigest()}" if parent else diff_id


def _hex(digest: str) -> str:
    return digest.removeprefix("sha256:")
