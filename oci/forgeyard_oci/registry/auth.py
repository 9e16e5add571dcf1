"""Who we say we are to a registry: nobody, a user, or the bearer of a token for one scope.

Tokens are kept per endpoint and scope, in memory, until shortly before they expire. Nothing is sent before a registry
asks for it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import refused
from forgeyard_oci.registry.challenge import Challenge, parse_challenges
from forgeyard_oci.registry.retry import Timings
from forgeyard_oci.registry.tokens import Refusal, TokenService, basic

if TYPE_CHECKING:
    from requests import Session

    from forgeyard_oci.registry.budget import Budget
    from forgeyard_oci.registry.credential_helpers import Credentials
    from forgeyard_oci.registry.settings import Endpoint, RegistrySettings

_MARGIN: Final = 10.0
"""Seconds before its end at which a token is no longer used, so that it does not expire on the way."""
_MAX_KEPT: Final = 4096

_Key = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Header:
    """The value of an Authorization header. `until`: on time.monotonic's clock; None for as long as it works."""

    value: str = field(repr=False)
    until: float | None = None

    def usable(self) -> bool:
        return self.until is None or time.monotonic() < self.until


class Authenticator:
    """Answers the challenges of registries. Safe for any number of threads at once.

    :param session: the client's own; it must not keep cookies.
    """

    def __init__(self, settings: RegistrySettings, session: Session, timings: Timings | None = None) -> None:
        session.trust_env = False  # or ~/.netrc would speak where settings are to
        self._settings = settings
        self._timings = timings or Timings()
        self._tokens = TokenService(settings, session, self._timings)
        self._headers: dict[_Key, _Header] = {}
        self._guard = threading.Lock()
        self._busy: dict[_Key, threading.Lock] = {}
        self._sent = threading.local()

    def header(self, endpoint: Endpoint, scope: str) -> str | None:
        """The Authorization header for a request, None to send none."""
        key = _key(endpoint, scope)
        with self._guard:
            kept = self._headers.get(key)
            if kept is not None and not kept.usable():
                del self._headers[key]
                kept = None
        return self._hand_out(key, kept)

    def renew(self, endpoint: Endpoint, scope: str, challenge_headers: Sequence[str], budget: Budget) -> str | None:
        """The header to try again with, after a 401 to what header() gave this thread.

        What was refused is forgotten; credentials are looked up afresh. Threads that were refused the same token get
        one new one between them.

        :param challenge_headers: the values of WWW-Authenticate, one for each time the header was there.
        :raises SandboxError: auth_denied, naming registry and repository; unsafe_realm.
        :raises InvalidRequest: for credentials that are stored in a way that can't be read.
        :raises ExecutorError: rate_limited, registry_unreachable, registry_tls, registry_error, credential_helper, or
            by the budget.
        """
        key = _key(endpoint, scope)
        refused_one = getattr(self._sent, "headers", {}).get(key)
        with self._only_one(key, budget):
            with self._guard:
                kept = self._headers.get(key)
            if kept is not None and kept.usable() and kept.value != refused_one:
                return self._hand_out(key, kept)
            made = self._answer(endpoint, scope, challenge_headers, refused_one, budget)
            with self._guard:
                if len(self._headers) >= _MAX_KEPT:
                    self._headers.pop(next(iter(self._headers)))
                self._headers[key] = made
        return self._hand_out(key, made)

    def _hand_out(self, key: _Key, header: _Header | None) -> str | None:
        value = None if header is None else header.value
        # Which one a thread used last says in renew() whether a newer one is there already.
        sent: dict[_Key, str | None] = self._sent.__dict__.setdefault("headers", {})
        if len(sent) >= _MAX_KEPT:
            sent.clear()
        sent[key] = value
        return value

    def _only_one(self, key: _Key, budget: Budget) -> _Turn:
        with self._guard:
            if len(self._busy) >= _MAX_KEPT:
                self._busy.clear()
            return _Turn(self._busy.setdefault(key, threading.Lock()), budget, self._timings.tick)

    def _answer(
        self, endpoint: Endpoint, scope: str, lines: Sequence[str], refused_one: str | None, budget: Budget
    ) -> _Header:
        challenges = parse_challenges(lines) or self._asked_again(endpoint, budget)
        credentials = self._settings.credentials(endpoint.host, endpoint.repository)
        bearer = next((item for item in challenges if item.scheme == "bearer" and item.get("realm")), None)
        if bearer is not None:
            if credentials is not None and credentials.registry_token:
                return self._registry_token(endpoint, credentials, refused_one)
            return self._bearer(endpoint, _scopes(scope, bearer.get("scope")), bearer, credentials, budget)
        if any(item.scheme == "basic" for item in challenges):
            return self._basic(endpoint, credentials, refused_one)
        names = ", ".join(sorted({item.scheme[:20] for item in challenges})) or "nothing it names"
        raise self._denied(endpoint, credentials, f"it asks for {ascii(names)[1:-1]}; basic and bearer can be answered")

    def _registry_token(self, endpoint: Endpoint, credentials: Credentials, refused_one: str | None) -> _Header:
        header = _Header(f"Bearer {credentials.registry_token}")
        if header.value == refused_one:
            raise self._denied(endpoint, credentials, "the stored registry token is not accepted")
        return header

    def _bearer(
        self,
        endpoint: Endpoint,
        scopes: tuple[str, ...],
        challenge: Challenge,
        credentials: Credentials | None,
        budget: Budget,
    ) -> _Header:
        try:
            token = self._tokens.fetch(endpoint, challenge, scopes, credentials, budget)
        except Refusal as refusal:
            raise self._denied(endpoint, credentials, refusal.why) from refusal
        # A margin of seconds would leave nothing of a token that lives for seconds.
        life = token.life - min(_MARGIN, token.life / 4)
        return _Header(f"Bearer {token.value}", time.monotonic() + life)

    def _basic(self, endpoint: Endpoint, credentials: Credentials | None, refused_one: str | None) -> _Header:
        if credentials is None or not credentials.username:
            raise self._denied(endpoint, credentials, "it wants a user and a password")
        header = _Header(basic(credentials))
        if header.value == refused_one:
            raise self._denied(endpoint, credentials, "user or password is wrong")
        return header

    def _asked_again(self, endpoint: Endpoint, budget: Budget) -> tuple[Challenge, ...]:
        """The challenge of the API's root, for registries that give none with the thing itself."""
        return parse_challenges(self._tokens.root_challenges(endpoint, budget))

    def _denied(self, endpoint: Endpoint, credentials: Credentials | None, why: str) -> SandboxError:
        login = f"log in to {endpoint.host}: {self._settings.login_file()}"
        return refused(
            "auth_denied",
            f"registry {endpoint.host} denies access to {endpoint.repository}",
            details=f"{why}; {'credentials are stored for it' if credentials else 'no credentials are stored for it'}",
            resolution=f"{login}, and check the name: many registries deny what does not exist",
        )


class _Turn:
    """A lock that is waited for no longer than there is time."""

    def __init__(self, lock: threading.Lock, budget: Budget, tick: float) -> None:
        self._lock, self._budget, self._tick = lock, budget, tick

    def __enter__(self) -> None:
        while not self._lock.acquire(timeout=self._tick):
            self._budget.check()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _key(endpoint: Endpoint, scope: str) -> _Key:
    return endpoint.base_url, endpoint.repository, scope


def _scopes(wanted: str, named: str) -> tuple[str, ...]:
    """Scopes to ask for: those the challenge names, as they are; ours where it names none, or less of the same."""
    ours, theirs = wanted.split(), named.split()
    if not theirs or all(any(_covers(own, other) for own in ours) for other in theirs):
        return tuple(ours)
    return tuple(theirs)


def _covers(own: str, other: str) -> bool:
    resource, _, actions = own.rpartition(":")
    named, _, fewer = other.rpartition(":")
    return bool(resource) and resource == named and set(fewer.split(",")) <= set(actions.split(","))
