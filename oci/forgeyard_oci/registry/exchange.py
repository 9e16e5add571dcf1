"""One request and its answer: session, credentials, redirects, time limits.

The session is that of oras (`oras.provider.Registry`), which keeps no cookies. Nothing else of oras is on our path:
its requests retry blindly, check no digest, hold blobs in memory and use one token for everything.
"""

from __future__ import annotations

import logging
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import wait as wait_for
from contextlib import suppress
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import TYPE_CHECKING, Final, Protocol
from urllib.parse import urlsplit

from forgeyard_oci.registry import faults
from forgeyard_oci.registry.answers import finish
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.redirects import STATUSES, Hops, same_origin
from forgeyard_oci.registry.retry import Timings, Transient, retry_after

if TYPE_CHECKING:
    from requests import PreparedRequest, Response, Session

    from forgeyard_oci.registry.auth import Authenticator
    from forgeyard_oci.registry.certs import TlsFiles
    from forgeyard_oci.registry.settings import Endpoint, RegistrySettings

_POOL: Final = 16
_RETRIED: Final = frozenset({408, 425, 429})


class Body(Protocol):
    """What a request sends. `requests` asks for its length, and reads it."""

    last_read: float
    """On time.monotonic's clock."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[bytes]: ...
    def read(self, size: int = -1) -> bytes:
        """The next bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One request.

    :param url: where to; credentials go along only while it has the endpoint's own origin.
    :param scope: of the token it needs, "repository:NAME:pull" or "…:pull,push".
    :param what: names the thing for messages ("image NAME", "blob sha256:…").
    :param body: makes what is sent; called again when the same has to be sent again.
    :param answer_within: seconds without a byte before the answer's first, once everything is sent; None for idle.
    """

    method: str
    url: str
    endpoint: Endpoint
    scope: str
    what: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: Callable[[], Body | bytes] | None = None
    answer_within: float | None = None

    @property
    def host(self) -> str:
        """The registry, as messages name it."""
        return self.endpoint.host

    @property
    def where(self) -> str:
        """The thing and the registry, as messages name them."""
        return f"{self.what} from registry {self.host}"


class Wire:
    """Sends requests. Safe for any number of threads at once."""

    def __init__(self, settings: RegistrySettings, timings: Timings) -> None:
        # Late: the token service in there sends by means of this module.
        from forgeyard_oci.registry.auth import Authenticator

        self.timings = timings
        self.brisk = replace(timings, tries=min(2, timings.tries))
        """For a place that others stand behind."""
        self._settings = settings
        self._session = _session()
        self._authenticator: Authenticator = Authenticator(settings, self._session, timings)

    def close(self) -> None:
        """Close idle connections."""
        self._session.close()

    def ask(self, ask: Ask, budget: Budget) -> Response:
        """Send, follow redirects, and authenticate once if asked to.

        The answer's status is one below 400, 404, 405, 416 or another that only the caller can judge; its body is
        still to be read; `answers.answered` or `answers.finish` closes it.

        :raises Transient: no connection, a broken one, or a status that another try may mend.
        :raises SandboxError: access denied, or a redirect that is refused.
        """
        url, hops, renewed = ask.url, Hops(ask.url), False
        authorization = self._authenticator.header(ask.endpoint, ask.scope)
        while True:
            at_home = same_origin(url, ask.endpoint.base_url)
            response = self._send(ask, url, authorization if at_home else None, budget)
            if response.status_code == 401 and at_home and not renewed:
                renewed = True
                challenges = response.raw.headers.getlist("WWW-Authenticate")
                finish(response, ask.host, budget, self.timings)
                authorization = self._authenticator.renew(ask.endpoint, ask.scope, challenges, budget)
                url, hops = ask.url, Hops(ask.url)
            elif response.status_code in STATUSES and "Location" in response.headers:
                finish(response, ask.host, budget, self.timings)
                url = hops.follow(response.headers["Location"])
            else:
                return self._judged(ask, response, budget, at_home)

    def _judged(self, ask: Ask, response: Response, budget: Budget, at_home: bool) -> Response:
        status = response.status_code
        if status not in _RETRIED and status not in (401, 403) and status < 500:
            return response
        code = finish(response, ask.host, budget, self.timings)
        if status in (401, 403) and at_home:
            raise faults.denied(ask.host, ask.what, status, code)
        # Elsewhere it is about a signed address that has expired: the registry gives a new one.
        told = retry_after(response.headers.get("Retry-After"))
        if status == 429:
            raise Transient(faults.rate_limited(ask.host, told, code), told)
        raise Transient(faults.broken(ask.host, ask.what, status, code), told)

    def _send(self, ask: Ask, url: str, authorization: str | None, budget: Budget) -> Response:
        """Send one request, without following anything."""
        import requests

        budget.check()
        body = ask.body() if ask.body else None
        headers = {"Accept": "*/*", **ask.headers, "Accept-Encoding": "identity"}
        if authorization:
            headers["Authorization"] = authorization
        try:
            prepared = self._session.prepare_request(requests.Request(ask.method, url, headers, data=body))
            return self._watched(ask, prepared, body, budget)
        except (requests.RequestException, OSError) as error:
            budget.check()
            raise trouble(urlsplit(url).netloc.rpartition("@")[2], error) from error

    def _watched(self, ask: Ask, prepared: PreparedRequest, body: Body | bytes | None, budget: Budget) -> Response:
        timings, url = self.timings, prepared.url or ""
        at_home = same_origin(url, ask.endpoint.base_url)
        # Certificates go by the registry's name, which need not be the host that serves it.
        tls = self._settings.tls(ask.host if at_home else urlsplit(url).netloc)
        proxies = self._settings.proxies.for_url(url)
        answer = ask.answer_within or timings.idle
        checked = ask.endpoint.verify or not at_home
        if not checked:
            _silence_insecure()

        def send() -> Response:
            timeout = (timings.connect, answer)
            return transmit(self._session, prepared, tls, proxies, checked=checked, timeout=timeout)

        started = time.monotonic()

        def quiet() -> float:
            last = started if body is None or isinstance(body, bytes) else max(started, body.last_read)
            return time.monotonic() - last

        return supervised(send, budget, timings.tick, lambda: quiet() > timings.connect + answer)


def transmit(
    session: Session,
    prepared: PreparedRequest,
    tls: TlsFiles,
    proxies: dict[str, str],
    *,
    checked: bool,
    timeout: tuple[float, float],
) -> Response:
    """Send one request as every request of ours is sent: redirects not followed, the body left to be read.

    :param checked: whether the certificate is verified.
    :param timeout: seconds for the connection, and without a byte.
    """
    return session.send(
        prepared,
        stream=True,
        allow_redirects=False,
        timeout=timeout,
        verify=(tls.ca or True) if checked else False,
        cert=(tls.cert, tls.key) if tls.cert and tls.key else None,
        proxies=proxies,
    )


def supervised(send: Callable[[], Response], budget: Budget, tick: float, late: Callable[[], bool]) -> Response:
    """`send` in a thread of its own, given up when the budget is over or it is late.

    A name lookup or a connection in the making can't be interrupted; what is given up ends by its socket's time-outs.
    """
    future: Future[Response] = Future()
    Thread(target=_deliver, args=(send, future), name="registry-request", daemon=True).start()
    while not wait_for([future], tick).done:
        if (budget.over() or late()) and future.cancel():
            budget.check()
            raise TimeoutError
    return future.result()


def _deliver(send: Callable[[], Response], future: Future[Response]) -> None:
    try:
        response = send()
    except BaseException as error:  # noqa: BLE001  handed on to the thread that waits
        with suppress(InvalidStateError):
            future.set_exception(error)
        return
    try:
        future.set_result(response)
    except InvalidStateError:  # nobody waits any more
        response.close()


def trouble(host: str, error: Exception) -> Exception:
    """What to raise for a request to `host` that got no answer."""
    for cause in faults.causes(error):
        if isinstance(cause, ssl.SSLCertVerificationError):
            return faults.bad_certificate(host, cause)
        if isinstance(cause, ssl.SSLError) and cause.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST"):
            return faults.no_tls(host)
    return Transient(faults.unreachable(host, error))


def _session() -> Session:
    # oras has no type information, and its other entry points import more than this one.
    from oras.provider import Registry  # type: ignore[import-untyped]  # see above
    from requests.adapters import HTTPAdapter

    session: Session = Registry().session
    # No proxies, certificates or ~/.netrc from the environment: settings decide about all three.
    session.trust_env = False
    session.headers["User-Agent"] = "forgeyard"
    # Even when told not to follow a redirect, requests reads its whole body and parses where it leads.
    session.get_redirect_target = lambda resp: None  # type: ignore[method-assign]  # the one hook there is
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(pool_connections=_POOL, pool_maxsize=_POOL, max_retries=0))
    # At DEBUG, urllib3 writes whole URLs, and those of redirected blobs carry signatures.
    log = logging.getLogger("urllib3.connectionpool")
    if log.level == logging.NOTSET:
        log.setLevel(logging.INFO)
    return session


def _silence_insecure() -> None:
    # The user configured this host as insecure; a warning for each request would say nothing new.
    from urllib3 import disable_warnings
    from urllib3.exceptions import InsecureRequestWarning

    disable_warnings(InsecureRequestWarning)
