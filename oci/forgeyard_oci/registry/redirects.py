"""Redirects, followed by hand: where they may lead, and what may go along."""

from __future__ import annotations

from typing import Final
from urllib.parse import urljoin, urlsplit

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import refused
from forgeyard_oci.registry.faults import shown

STATUSES: Final = frozenset({301, 302, 303, 307, 308})
MOST_HOPS: Final = 5
_PORTS: Final = {"http": 80, "https": 443}


def origin(url: str) -> tuple[str, str, int]:
    """Scheme, host and port: what credentials belong to (RFC 6454).

    :raises ValueError: for a URL that can't be read, or that is neither http nor https.
    """
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError(url)
    return parts.scheme, parts.hostname.lower().rstrip("."), parts.port or _PORTS[parts.scheme]


def same_origin(one: str, other: str) -> bool:
    """Whether what is meant for `one` may be sent to `other`."""
    return origin(one) == origin(other)


def target(url: str, location: str) -> str:
    """Where a Location header of an answer from `url` leads.

    :raises SandboxError: for one that can't be read, carries a user, or goes from https to http.
    """
    try:
        # Header bytes arrive as Latin-1; those of a URL that is not ASCII are UTF-8.
        joined = urljoin(url, location.encode("latin-1").decode("utf-8"))
        scheme, _, _ = origin(joined)
        was, _, _ = origin(url)
    except ValueError as error:
        raise _refused(url, "leads nowhere") from error
    parts = urlsplit(joined)
    if parts.username is not None or parts.password is not None:
        raise _refused(url, "carries a user name")
    if was == "https" and scheme == "http":
        raise _refused(url, f"leads from https to plain http, {shown(joined)}")
    return joined


class Hops:
    """The redirects of one request."""

    def __init__(self, url: str) -> None:
        self._seen = [url]

    def follow(self, location: str) -> str:
        """The next URL.

        :raises SandboxError: as `target`, and for a loop or one hop too many.
        """
        url = self._seen[-1]
        following = target(url, location)
        if following in self._seen:
            raise _refused(url, "leads in a circle")
        if len(self._seen) > MOST_HOPS:
            raise _refused(url, f"is one of more than {MOST_HOPS}")
        self._seen.append(following)
        return following


def _refused(url: str, why: str) -> SandboxError:
    return refused("unsafe_redirect", f"a redirect of {shown(url)} {why}")
