"""Images, ready to run from: pulled once, verified, unpacked once, shared by every job. store_paths.py has the folders.

An image that was prepared before costs a job one small file in a new process, and a look at its directories in the
same one; no manifest is parsed and no registry is asked.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.plan import RootfsPlan
from forgeyard_oci.holds import ImageHold
from forgeyard_oci.image_errors import host_failure, refused, unsupported
from forgeyard_oci.image_platform import Platform
from forgeyard_oci.locks import locked
from forgeyard_oci.ready import ReadyImage, ReadyImages
from forgeyard_oci.reference import LayoutReference, Reference, RegistryReference, parse_reference
from forgeyard_oci.registry.budget import Budget, NoProgress, Progress
from forgeyard_oci.store_parts import StoredImage, StoreParts
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.wish import PullPolicy, Wish

if TYPE_CHECKING:
    from forgeyard_oci.image_info import ImageDetails, ImageInfo, PruneReport, RemoveReport, VerifyReport
    from forgeyard_oci.reader import ImageReader
    from forgeyard_oci.registry.client import RegistryClient
    from forgeyard_oci.registry.settings import RegistrySettings


__all__ = ["ImageStore", "PullPolicy"]


class ImageStore:
    """Prepares images as root filesystems. Blocking; safe to call from several threads and processes.

    :param root: directory of the store, made when missing.
    :param host: what this machine runs; given by tests.
    :param settings: how registries are reached; called at the first contact with one.
    """

    def __init__(
        self,
        root: Path,
        *,
        limits: UnpackLimits | None = None,
        host: Platform | None = None,
        settings: Callable[[], RegistrySettings] | None = None,
    ) -> None:
        self.root = root
        self.limits = limits or UnpackLimits()
        self.host = host or Platform.host()
        self._settings = settings
        try:
            self._parts = StoreParts(root)
        except OSError as error:
            raise host_failure(error, "opening the image store", str(root)) from error
        self._ready = ReadyImages(self._parts)
        self._guard = threading.Lock()
        self._client: RegistryClient | None = None
        self._syncing: list[threading.Thread] = []

    def prepare(
        self,
        reference: str,
        platform: str | None,
        base_dir: Path,
        *,
        user: str | None = None,
        policy: PullPolicy = PullPolicy.MISSING,
        budget: Budget | None = None,
        progress: Progress | None = None,
        whole: bool = False,
    ) -> RootfsPlan:
        """The root filesystem of an image, pulled and unpacked if it isn't yet. Call hold() for as long as it is used.

        :param platform: as OS/ARCH; None is this host's.
        :param base_dir: what a relative layout path is relative to.
        :param whole: with its blobs in the store, where it comes from a registry.
        :param user: the job's `user:`, which beats the image's USER.
        :raises InvalidRequest: a malformed reference, or a user the image does not know.
        :raises SandboxError: an image that is damaged or breaks a rule, or is not there.
        :raises ExecutorError: UNSUPPORTED (source, architecture, media type), IO_FAILED (such as a full disk, or the
            registry), TIMEOUT, or cancelled.
        """
        image = parse_reference(reference)
        wanted, budget, progress = self._platform(platform), budget or Budget(), progress or NoProgress()
        ready = self._get(Wish(image, wanted, base_dir, policy, budget, progress, whole=whole))
        plan = ready.plan
        if not image.digest:
            note = f"image {reference} resolved to {image.pinned(ready.record.requested)}"
            plan = replace(plan, notes=(*plan.notes, note))
        try:
            return replace(plan, user=ready.user(user))
        except BaseException:
            self._parts.holds.drop(ready.record.digest)
            raise

    def pull(
        self,
        reference: str,
        platform: str | None = None,
        *,
        policy: PullPolicy = PullPolicy.ALWAYS,
        budget: Budget | None = None,
        progress: Progress | None = None,
    ) -> ImageInfo:
        """Bring an image here; returns when it is on the disk for good. Raises as prepare() does."""
        from forgeyard_oci.image_info import image_info

        image = parse_reference(reference)
        wanted, budget, progress = self._platform(platform), budget or Budget(), progress or NoProgress()
        ready = self._get(Wish(image, wanted, Path.cwd(), policy, budget, progress, whole=True))
        try:
            self.wait_synced()
            return image_info(self._parts, self._find(ready.record.digest, reference), self._parts.names.all())
        finally:
            self._parts.holds.drop(ready.record.digest)

    def resolve(self, reference: str, platform: str | None, base_dir: Path, *, budget: Budget | None = None) -> str:
        """The pinned form of a reference: with the digest of what its tag names now, of an index where it is one.

        :raises SandboxError: nothing has that name. :raises ExecutorError: IO_FAILED, TIMEOUT, cancelled.
        """
        image = parse_reference(reference)
        self._platform(platform)
        if image.digest:
            return image.pinned(image.digest)
        if isinstance(image, LayoutReference):
            return image.pinned(_tagged(image, base_dir))
        return image.pinned(self._registry().manifest(image, image.tag or "", budget or Budget()).digest)

    def known_pin(self, reference: str, base_dir: Path) -> str | None:
        """The pinned form of a reference by what is here, no registry asked; None for a tag that was never pulled."""
        image = parse_reference(reference)
        if isinstance(image, LayoutReference):
            return image.pinned(image.digest or _tagged(image, base_dir))
        digest = image.digest or self._parts.names.all().get(str(image))
        return image.pinned(digest) if digest else None

    def layout_of(self, reference: str, base_dir: Path) -> Path:
        """The layout that has the blobs of an image which was prepared whole: its own, or the store's."""
        image = parse_reference(reference)
        return image.layout_path(base_dir) if isinstance(image, LayoutReference) else self._parts.paths.layout

    def hold(self, plan: RootfsPlan) -> ImageHold:
        """Keep a prepared image from being removed, until the hold is closed or this process ends.

        :raises ExecutorError: PREPARE, image_gone: it was removed since, which takes a minute without a hold.
        """
        try:
            hold = self._parts.holds.hold(plan.identity)
        except FileNotFoundError as error:
            raise _gone(plan) from error
        if not all(map(os.path.isdir, plan.lowers)):
            hold.close()
            raise _gone(plan)
        return hold

    def push(
        self, source: str, destination: str, *, budget: Budget | None = None, progress: Progress | None = None
    ) -> str:
        """Copy an image of this store, or of an ``oci:`` layout, into a registry; the pinned destination.

        :raises InvalidRequest: a destination that is no place in a registry.
        :raises SandboxError: the image is not here in full. :raises ExecutorError: IO_FAILED, TIMEOUT, cancelled.
        """
        from forgeyard_oci.image_push import ImagePush
        from forgeyard_oci.layout import ImageLayout

        image, target = parse_reference(source), parse_reference(destination)
        if not isinstance(target, RegistryReference):
            raise InvalidRequest("destination", destination, "write [HOST[:PORT]/]NAME[:TAG]")
        if isinstance(image, LayoutReference):
            layout = ImageLayout(image.layout_path(Path.cwd()))
            layout.check()
            start = image.digest or layout.tagged(image.tag or "")
        else:
            layout = ImageLayout(self._parts.paths.layout)
            start = self._local_digest(image, source)
        with self._reader() as reader:
            push = ImagePush(layout, reader, self._registry(), budget or Budget(), progress or NoProgress())
            return push.run(start, target)

    def ls(self) -> tuple[ImageInfo, ...]:
        """Every image of the store, the last used first."""
        from forgeyard_oci.image_info import image_info

        names = self._parts.names.all()
        found = sorted(self._parts.images(), key=lambda image: -image.used)
        return tuple(image_info(self._parts, image, names) for image in found)

    def inspect(self, reference: str, platform: str | None = None) -> ImageDetails:
        """One image of the store in full.

        :raises SandboxError: it is not there.
        """
        from forgeyard_oci.image_info import image_details

        image = parse_reference(reference)
        wanted = str(self._platform(platform)) if platform else ""
        return image_details(self._parts, self._find(self._local_digest(image, reference), reference, wanted))

    def rm(self, reference: str) -> RemoveReport:
        """Take away a name of an image; with its last name, or by digest, the image and what only it needed.

        :raises SandboxError: it is not there. :raises ExecutorError: image_in_use, naming the processes.
        """
        from forgeyard_oci.prune import Collector

        image = parse_reference(reference)
        return Collector(self._parts).rm(image, self._local_digest(image, reference))

    def prune(self, *, unused_for: float | None, keep_bytes: int | None, free_bytes: int | None = None) -> PruneReport:
        """Remove images, the least recently used first, and leftovers; never what is held.

        :param unused_for: all that nobody used for so many seconds. :param keep_bytes: until the rest (blobs and
            trees) takes no more than this. :param free_bytes: until this much is freed.
        """
        from forgeyard_oci.prune import Collector

        return Collector(self._parts).prune(unused_for, keep_bytes, free_bytes)

    def verify(self, *, repair: bool = False) -> VerifyReport:
        """Hash every blob and compare every tree with its recorded files.

        :param repair: remove what is bad, so that the next pull makes it again; never what is held.
        """
        from forgeyard_oci.verify import Verifier

        return Verifier(self._parts).run(repair=repair)

    def sweep(self, *, everything: bool = False) -> int:
        """Remove what killed processes left; how many things there were. Those in use are left alone.

        :param everything: also look for what no image needs, which otherwise happens once an hour: it reads every
            record, and an executor sweeps before its first job.
        """
        from forgeyard_oci.prune import Collector

        return Collector(self._parts).sweep(everything=everything)

    def wait_synced(self) -> None:
        """Wait until all that this store unpacked is on the disk."""
        with self._guard:
            threads = tuple(self._syncing)
        for thread in threads:
            thread.join()

    def close(self) -> None:
        """End connections, and what prepares without a hold left behind."""
        with self._guard:
            client, self._client = self._client, None
        if client is not None:
            client.close()
        self._parts.holds.close()

    def _platform(self, text: str | None) -> Platform:
        wanted = Platform.parse(text) if text else self.host
        if not self.host.runs(wanted):
            raise unsupported(
                "wrong_architecture",
                f"platform {wanted} was asked for, host is {self.host}, no binfmt handler is used",
                resolution=f"leave platform out, or run on a {wanted.architecture} host",
            )
        return wanted

    def _get(self, wish: Wish) -> ReadyImage:
        """The image, held until hold() or a minute from now."""
        if (ready := self._warm(wish)) is not None:
            return ready
        # Whoever wants the same at the same time waits here, and then finds it.
        with self._one_at_a_time(f"{wish.image} {wish.platform}", wish.budget):
            return self._warm(wish) or self._pull(wish)

    def _warm(self, wish: Wish) -> ReadyImage | None:
        digest = self._known(wish)
        ready = self._ready.get(digest, str(wish.platform)) if digest else None
        if ready is not None and wish.wants_blobs and not self._ready.is_whole(ready):
            self._parts.holds.drop(ready.record.digest)
            return None
        return ready

    def _known(self, wish: Wish) -> str:
        """The digest of an image, or what its tag is known to name; "" when its registry has to be asked."""
        image = wish.image
        if image.digest:
            return image.digest
        if isinstance(image, LayoutReference):
            return _tagged(image, wish.base_dir)
        return "" if wish.policy is PullPolicy.ALWAYS else self._parts.names.all().get(str(image), "")

    @contextmanager
    def _one_at_a_time(self, what: str, budget: Budget) -> Iterator[None]:
        name = f"image-{hashlib.sha256(what.encode()).hexdigest()}"
        try:
            with locked(self._parts.paths.locks / name, budget):
                yield
        except OSError as error:
            raise self._parts.blobs.failure(error, "preparing an image") from error

    def _pull(self, wish: Wish) -> ReadyImage:
        from forgeyard_oci.pull import pull_image

        client = None if wish.policy is PullPolicy.NEVER else self._registry
        with self._reader() as reader:
            record = pull_image(self._parts, wish, self._known(wish), client, reader)
        syncing = self._parts.layers.sync_later(record.folders())
        with self._guard:
            self._syncing = [thread for thread in (*self._syncing, syncing) if thread.is_alive()]
        return self._ready.add(record)

    def _reader(self) -> ImageReader:
        from forgeyard_oci.reader import ImageReader

        return ImageReader(limits=self.limits)

    def _registry(self) -> RegistryClient:
        """The one client of this store, made at the first contact."""
        from forgeyard_oci.registry.client import RegistryClient
        from forgeyard_oci.registry.settings import RegistrySettings

        with self._guard:
            if self._client is None:
                self._client = RegistryClient((self._settings or RegistrySettings.load)())
            return self._client

    def _local_digest(self, image: Reference, shown: str) -> str:
        """What a reference names in this store.

        :raises SandboxError: nothing.
        """
        if isinstance(image, LayoutReference) and not image.digest:
            return _tagged(image, Path.cwd())
        digest = image.digest or self._parts.names.all().get(str(image))
        if digest is None:
            raise _not_present(shown)
        return digest

    def _find(self, digest: str, shown: str, platform: str = "") -> StoredImage:
        for image in self._parts.images():
            if image.is_called(digest) and platform in ("", image.records[0].record.platform):
                return image
        raise _not_present(shown)


def _gone(plan: RootfsPlan) -> ExecutorError:
    return ExecutorError(
        ExecutorErrorKind.PREPARE,
        "image_gone",
        f"image {plan.identity} was removed before it was used",
        resolution="run again",
    )


def _not_present(shown: str) -> Exception:
    return refused("not_present", f"image {shown} is not in the store", resolution="pull it first")


def _tagged(image: LayoutReference, base_dir: Path) -> str:
    from forgeyard_oci.layout import ImageLayout

    layout = ImageLayout(image.layout_path(base_dir))
    layout.check()
    return layout.tagged(image.tag or "").digest
