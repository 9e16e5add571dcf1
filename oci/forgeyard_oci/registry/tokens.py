"""Bearer tokens: how one is asked for at the realm that a registry names (distribution spec, token authentication).

A registry may name any realm. It gets the credentials for that registry and no others, over TLS; a realm in plain HTTP
is taken only on the host of an endpoint that is itself plain HTTP.
"""

from __future__ import annotations

import base64
import json
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, urlencode, urlsplit, urlunsplit

from forgeyard_model.errors import SandboxError
from forgeyard_oci.image_errors import refused
from forgeyard_oci.registry import exchange, faults
from forgeyard_oci.registry.answers import answered
from forgeyard_oci.registry.proxies import is_loopback
from forgeyard_oci.registry.redirects import STATUSES, Hops, same_origin
from forgeyard_oci.registry.retry import Timings, Transient, attempt, retry_after

if TYPE_CHECKING:
    from requests import Response, Session

    from forgeyard_oci.registry.budget import Budget
    from forgeyard_oci.registry.challenge import Challenge
    from forgeyard_oci.registry.credential_helpers import Credentials
    from forgeyard_oci.registry.settings import Endpoint, RegistrySettings

DEFAULT_LIFE: Final = 60.0
"""Seconds a token lasts that does not say, by the specification."""
_LONGEST_LIFE: Final = 86400.0
_MAX_ANSWER: Final = 256 << 10
_MAX_REALM: Final = 2048
_TOKEN: Final = re.compile(r"[!-~]+\Z")
_CLIENT: Final = "forgeyard"
# What servers say that do not know the OAuth2 form of the request.
_NO_OAUTH: Final = frozenset({404, 405})


@dataclass(frozen=True, slots=True)
class Token:
    """A bearer token and how many seconds it is good for."""

    value: str = field(repr=False)
    life: float = DEFAULT_LIFE


class Refusal(Exception):  # noqa: N818  it becomes one of our errors where the endpoint's names are known
    """The realm gives no token. `why` is fit to be shown."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.why = why


@dataclass(frozen=True, slots=True)
class _Question:
    """One request to a realm."""

    method: str
    url: str
    headers: Mapping[str, str] = field(repr=False)
    form: Mapping[str, str] | None = field(default=None, repr=False)


class TokenService:
    """Asks realms for tokens.

    :param session: the client's own; nothing is kept in it.
    """

    def __init__(self, settings: RegistrySettings, session: Session, timings: Timings) -> None:
        self._settings = settings
        self._session = session
        self._timings = timings

    def fetch(
        self,
        endpoint: Endpoint,
        challenge: Challenge,
        scopes: tuple[str, ...],
        credentials: Credentials | None,
        budget: Budget,
    ) -> Token:
        """A token for `scopes`.

        :raises Refusal: when the realm refuses.
        :raises SandboxError: unsafe_realm, for one that must not be asked; unsafe_redirect.
        :raises ExecutorError: rate_limited, registry_unreachable, registry_tls, registry_error, or by the budget.
        """
        realm = checked_realm(endpoint, challenge.get("realm"))
        questions = _questions(realm, challenge.get("service"), scopes, credentials)
        for question in questions[:-1]:
            status, body = self._asked(endpoint, question, budget)
            if status not in _NO_OAUTH:
                return _token(status, body)
        return _token(*self._asked(endpoint, questions[-1], budget))

    def root_challenges(self, endpoint: Endpoint, budget: Budget) -> list[str]:
        """WWW-Authenticate of the API's root, empty when it does not ask for anything.

        :raises ExecutorError: as fetch().
        """
        question = _Question("GET", f"{endpoint.base_url}/v2/", {})

        def once() -> list[str]:
            response = self._send(endpoint, question, question.url, budget)
            with answered(response, f"the answer of {endpoint.host}", budget, self._timings):
                lines: list[str] = response.raw.headers.getlist("WWW-Authenticate")
                return lines if response.status_code == 401 else []

        return attempt(once, self._timings, budget)

    def _asked(self, endpoint: Endpoint, question: _Question, budget: Budget) -> tuple[int, bytes]:
        return attempt(lambda: self._once(endpoint, question, budget), self._timings, budget)

    def _once(self, endpoint: Endpoint, question: _Question, budget: Budget) -> tuple[int, bytes]:
        url, hops = question.url, Hops(question.url)
        while True:
            response = self._send(endpoint, question, url, budget)
            host = urlsplit(url).netloc
            with answered(response, f"the answer of {host}", budget, self._timings) as stream:
                status, location = response.status_code, response.headers.get("Location")
                body = b""
                for data in stream:
                    body += data
                    if len(body) > _MAX_ANSWER:
                        raise Refusal(f"{host} answers with more than {_MAX_ANSWER} bytes")
            if status == 429:
                told = retry_after(response.headers.get("Retry-After"))
                raise Transient(faults.rate_limited(host, told, ""), told)
            if status >= 500 or status == 408:
                raise Transient(faults.broken(host, "its token", status, ""))
            if status not in STATUSES or location is None:
                return status, body
            url = hops.follow(location)
            if question.form is not None and (status not in (307, 308) or not same_origin(url, question.url)):
                raise Refusal(f"{host} redirects a request that carries a refresh token")

    def _send(self, endpoint: Endpoint, question: _Question, url: str, budget: Budget) -> Response:
        import requests

        budget.check()
        at_home = same_origin(url, question.url)
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        if at_home:
            headers.update(question.headers)
        request = requests.Request(question.method, url, headers, data=question.form, auth=_unchanged)
        host, late = urlsplit(url).netloc, time.monotonic() + self._timings.connect + self._timings.idle
        try:
            prepared = self._session.prepare_request(request)
            tls, proxies = self._settings.tls(host), self._settings.proxies.for_url(url)
            timeout = (self._timings.connect, self._timings.idle)
            # A certificate goes unchecked only where the user said so, which is this endpoint's own host.
            checked = endpoint.verify or urlsplit(url).hostname != urlsplit(endpoint.base_url).hostname
            return exchange.supervised(
                lambda: exchange.transmit(self._session, prepared, tls, proxies, checked=checked, timeout=timeout),
                budget,
                self._timings.tick,
                lambda: time.monotonic() > late,
            )
        except (requests.RequestException, OSError) as error:
            budget.check()
            raise exchange.trouble(host, error) from error


def checked_realm(endpoint: Endpoint, realm: str) -> str:
    """`realm` as a URL that may be asked on behalf of `endpoint`.

    :raises SandboxError: unsafe_realm.
    """
    try:
        parts = urlsplit(realm)
        readable = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        readable = False
    if not readable or len(realm) > _MAX_REALM or not _TOKEN.match(realm):
        raise _unsafe(endpoint, "is not an absolute http or https URL")
    if parts.username is not None or parts.password is not None:
        raise _unsafe(endpoint, "carries a user name")
    if parts.scheme == "http" and not (endpoint.http and _same_host(endpoint, parts.hostname or "")):
        raise _unsafe(endpoint, f"is in plain HTTP: {faults.shown(realm)}")
    return urlunsplit(parts._replace(fragment=""))


def _same_host(endpoint: Endpoint, host: str) -> bool:
    own = urlsplit(endpoint.base_url).hostname or ""
    return own == host or (is_loopback(own) and is_loopback(host))


def _unsafe(endpoint: Endpoint, why: str) -> SandboxError:
    return refused(
        "unsafe_realm",
        f"registry {endpoint.host} names a token service that {why}",
        resolution="nothing was sent there; have the registry's configuration corrected",
    )


def _unchanged(request: Any) -> Any:
    # In the place of what requests would look up by itself.
    return request


def _questions(
    realm: str, service: str, scopes: tuple[str, ...], credentials: Credentials | None
) -> tuple[_Question, ...]:
    """What to ask, in order: the next only where the one before is not known to the server."""
    if credentials is None or not credentials.identity_token:
        return (_plain(realm, service, scopes, credentials),)
    form = {
        "grant_type": "refresh_token",
        "service": service,
        "client_id": _CLIENT,
        "scope": " ".join(scopes),
        "refresh_token": credentials.identity_token,
    }
    exchanged = _Question("POST", realm, {}, form)
    if credentials.username and credentials.password:
        return exchanged, _plain(realm, service, scopes, credentials)
    return (exchanged,)


def _plain(realm: str, service: str, scopes: tuple[str, ...], credentials: Credentials | None) -> _Question:
    parts = urlsplit(realm)
    query = parse_qsl(parts.query, keep_blank_values=True)
    query += [("service", service)] if service else []
    query += [("scope", scope) for scope in scopes]
    headers = {}
    if credentials is not None and credentials.username:
        query.append(("account", credentials.username))
        headers["Authorization"] = basic(credentials)
    return _Question("GET", urlunsplit(parts._replace(query=urlencode(query))), headers)


def basic(credentials: Credentials) -> str:
    """The Authorization header of user and password (RFC 7617)."""
    pair = f"{credentials.username}:{credentials.password}".encode()
    return f"Basic {base64.b64encode(pair).decode()}"


def _token(status: int, body: bytes) -> Token:
    if status != 200:
        raise Refusal(f"its token service answers HTTP {status}")
    try:
        document = json.loads(body)
        value = document.get("token") or document.get("access_token")
    except (ValueError, AttributeError, RecursionError):
        # Not chained: the parser's error holds the answer.
        raise Refusal("its token service answers something that is no JSON object") from None
    if not isinstance(value, str) or not _TOKEN.match(value):
        raise Refusal("its token service gives no token")
    return Token(value, _life(document))


def _life(document: dict[str, Any]) -> float:
    """Seconds left. issued_at counts only where it is plausible: clocks differ more than tokens are late."""
    life = _number(document.get("expires_in"))
    if life is None or not 0 < life < math.inf:
        return DEFAULT_LIFE
    life = min(life, _LONGEST_LIFE)
    age = _age(document.get("issued_at"))
    return life - age if 0 < age < life else life


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, int | float | str) else None
    except (ValueError, OverflowError):
        return None


def _age(issued: object) -> float:
    try:
        moment = datetime.fromisoformat(issued) if isinstance(issued, str) else None
        return time.time() - moment.timestamp() if moment is not None and moment.tzinfo is not None else 0.0
    except (ValueError, OverflowError, OSError):
        return 0.0
