"""What the image store asks of registries: manifests and blobs, in either direction.

Mirrors are asked first, in their order. Whatever goes wrong with one, the next is asked; what they send is held to the
same digests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, BinaryIO, Final, TypeVar

from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.image_errors import refused
from forgeyard_oci.reference import sha256
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.exchange import Wire
from forgeyard_oci.registry.manifests import Fetched, fetch_manifest
from forgeyard_oci.registry.push import Push
from forgeyard_oci.registry.retry import Timings
from forgeyard_oci.registry.transfer import BlobTransfer

if TYPE_CHECKING:
    from forgeyard_oci.reference import RegistryReference
    from forgeyard_oci.registry.settings import Endpoint, RegistrySettings

__all__ = ["Fetched", "RegistryClient", "Timings"]

_Result = TypeVar("_Result")
# Trouble of this host: no other registry mends it.
_OURS: Final = frozenset({"no_space", "image_io"})
_AWAY: Final = frozenset({"registry_unreachable", "registry_tls"})
_AWAY_FOR: Final = 60.0
"""Seconds for which an endpoint that could not be reached is passed over, where there is another."""


class RegistryClient:
    """A client for every registry that `settings` knows. Blocking; any number of threads may use it at once."""

    def __init__(self, settings: RegistrySettings, *, timings: Timings | None = None) -> None:
        self._settings = settings
        self._wire = Wire(settings, timings or Timings())
        self._unreachable: dict[str, float] = {}

    def close(self) -> None:
        """Close idle connections. Requests under way end by themselves."""
        self._wire.close()

    def manifest(self, ref: RegistryReference, which: str, budget: Budget) -> Fetched:
        """The manifest or index of `ref` named `which`, a tag or a digest; at most 4 MiB.

        :raises SandboxError: reason not_found, auth_denied, manifest_too_large, digest_mismatch, content_encoding or
            unsafe_redirect.
        :raises ExecutorError: reason rate_limited, registry_unreachable, registry_tls, registry_error, truncated or
            stalled; image_timeout or cancelled by the budget.
        """
        image = _named(ref, which)

        def fetch(endpoint: Endpoint, last: bool) -> Fetched:
            return fetch_manifest(self._wire, endpoint, image, which, last=last, budget=budget)

        return self._first(self._settings.endpoints(ref), fetch, budget)

    def blob(  # noqa: PLR0917  positional for the callers' sake; the order is the agreed one
        self,
        ref: RegistryReference,
        digest: str,
        size: int,
        target: int,
        budget: Budget,
        received: Callable[[int], None],
    ) -> None:
        """Stream a blob into the regular file `target` is open on, read-write; on success it holds exactly the blob.

        What the file holds already is taken for the blob's beginning. After a failure it may hold a beginning, for
        the next call to go on with.

        :param received: called with the bytes there so far, from this thread.
        :raises SandboxError: as manifest(); digest_mismatch and size_mismatch when it is not what was asked for.
        :raises ExecutorError: as manifest(); no_space or image_io when the file can't be written.
        """
        transfer = BlobTransfer(self._wire, digest, size, target=target, budget=budget, received=received)
        if not transfer.complete():
            endpoints = self._settings.endpoints(ref)
            self._first(endpoints, lambda endpoint, last: transfer.fetch_from(endpoint, last=last), budget)

    def push_blob(  # noqa: PLR0917  as above
        self,
        ref: RegistryReference,
        digest: str,
        size: int,
        open_source: Callable[[], BinaryIO],
        budget: Budget,
        sent: Callable[[int], None],
        *,
        mount_from: str | None = None,
    ) -> bool:
        """Upload a blob, never to a mirror; False when the registry had it, or took it from `mount_from`.

        :param open_source: opens the blob's file; once for each try.
        :param mount_from: another repository of the same registry that may have it.
        :raises SandboxError, ExecutorError: as manifest().
        """

        def send(endpoint: Endpoint, last: bool) -> bool:
            push = Push(self._wire, endpoint, budget, last=last)
            if push.has_blob(digest) or (mount_from is not None and push.mount_blob(digest, mount_from)):
                return False
            push.blob(digest, size, open_source, sent)
            return True

        return self._first(self._own(ref), send, budget, only=_AWAY)

    def push_manifest(self, ref: RegistryReference, which: str, data: bytes, media_type: str, budget: Budget) -> None:
        """Store a manifest or index, byte for byte, under a tag or under its digest; never in a mirror.

        :raises SandboxError, ExecutorError: as manifest().
        """
        if which.startswith("sha256:") and which != sha256(data):
            raise refused("digest_mismatch", f"the manifest to push is {sha256(data)}, not {which}")
        image = _named(ref, which)

        def send(endpoint: Endpoint, last: bool) -> None:
            Push(self._wire, endpoint, budget, last=last).manifest(image, which, data, media_type)

        self._first(self._own(ref), send, budget, only=_AWAY)

    def _own(self, ref: RegistryReference) -> tuple[Endpoint, ...]:
        return tuple(endpoint for endpoint in self._settings.endpoints(ref) if not endpoint.mirror)

    def _first(
        self,
        endpoints: tuple[Endpoint, ...],
        act: Callable[[Endpoint, bool], _Result],
        budget: Budget,
        only: frozenset[str] | None = None,
    ) -> _Result:
        """What the first endpoint gives that can; the last one's error, with the others' beside it.

        :param only: reasons for which the next is asked, None for all.
        """
        tried: list[str] = []
        for endpoint in endpoints[:-1]:
            if self._away(endpoint):
                tried.append(f"{endpoint.base_url}: could not be reached a moment ago")
                continue
            try:
                return act(endpoint, False)
            except (SandboxError, ExecutorError) as error:
                budget.check()
                if error.reason in _OURS or (only is not None and error.reason not in only):
                    raise
                tried.append(f"{endpoint.base_url}: {error.brief}")
                self._note(endpoint, error.reason)
        try:
            return act(endpoints[-1], True)
        except (SandboxError, ExecutorError) as error:
            if tried:
                error.details = "; ".join(filter(None, (error.details, f"asked before: {', '.join(tried)}")))
            raise

    def _note(self, endpoint: Endpoint, reason: str) -> None:
        # A dead mirror would otherwise cost its time-out again for each blob of an image.
        if reason in _AWAY:
            self._unreachable[endpoint.base_url] = time.monotonic()

    def _away(self, endpoint: Endpoint) -> bool:
        return time.monotonic() - self._unreachable.get(endpoint.base_url, -_AWAY_FOR) < _AWAY_FOR


def _named(ref: RegistryReference, which: str) -> str:
    return ref.pinned(which) if which.startswith("sha256:") else f"{ref.name}:{which}"
