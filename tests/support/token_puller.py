"""A client that pulls with the project's own authentication, and a scripted registry for it to meet."""

from __future__ import annotations

import base64
import json
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import requests
from fake_token_registry import FakeRegistry, Reply, Seen, as_json, challenged

from forgeyard_model.errors import FailureClass, SandboxError
from forgeyard_oci.registry.auth import Authenticator
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.retry import Timings
from forgeyard_oci.registry.settings import Endpoint, RegistrySettings

Serve = Callable[..., FakeRegistry]

SCOPE = "repository:team/app:pull"
FAST = Timings(connect=3.0, idle=3.0, tick=0.02, tries=2, first_wait=0.01, most_wait=0.02)
BASIC = "Basic " + base64.b64encode(b"me:canary").decode()


class Puller:
    """A client as the project's own: it sends what header() gives, and renews once after a 401."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.session = requests.Session()
        self._authenticators: dict[int, Authenticator] = {}

    def login(self, host: str, **parts: str) -> None:
        """Store credentials for a host, the user "me" unless said otherwise."""
        path = self.home / ".docker/config.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        auths = json.loads(path.read_text())["auths"] if path.exists() else {}
        auths[host] = parts or {"auth": BASIC.removeprefix("Basic ")}
        path.write_text(json.dumps({"auths": auths}))

    @cached_property
    def settings(self) -> RegistrySettings:
        """What this client goes by."""
        return RegistrySettings.load({}, home=self.home, root=self.root)

    def authenticator(self, server: FakeRegistry) -> Authenticator:
        """The one for a server, with its tokens."""
        return self._authenticators.setdefault(server.port, Authenticator(self.settings, self.session, FAST))

    def pull(self, server: FakeRegistry, path: str = "/v2/team/app/x", *, scope: str = SCOPE, **endpoint: Any) -> int:
        """The status of a request, authenticated as asked."""
        authenticator = self.authenticator(server)
        where = Endpoint(server.host, "team/app", **{"http": server.url.startswith("http:"), **endpoint})
        header = authenticator.header(where, scope)
        reply = self._get(server, path, header)
        if reply.status_code == 401:
            challenges = reply.raw.headers.getlist("WWW-Authenticate")
            header = authenticator.renew(where, scope, challenges, Budget.within(20))
            reply = self._get(server, path, header)
        return reply.status_code

    def _get(self, server: FakeRegistry, path: str, header: str | None) -> requests.Response:
        verify = self.settings.tls(server.host).ca or True
        headers = {"Authorization": header} if header else {}
        return self.session.get(server.url + path, headers=headers, verify=verify, timeout=5)


class Scripted:
    """A registry that wants a bearer token, and its token service, on one server.

    `tokens`: the documents the service answers with, in turn, the last one again and again.
    """

    def __init__(
        self, challenge: str = 'Bearer realm="{url}/token",service="reg"', tokens: tuple[Any, ...] = ()
    ) -> None:
        self.challenge = challenge
        self.tokens = list(tokens or ({"token": "t1"},))
        self.valid: set[str] = set()
        self.lock = threading.Lock()
        self.url = ""

    def __call__(self, seen: Seen) -> Reply:
        with self.lock:
            if seen.path == "/token":
                document = self.tokens.pop(0) if len(self.tokens) > 1 else self.tokens[0]
                if isinstance(document, Reply):
                    return document
                self.valid.add(str(document.get("token") or document.get("access_token")))
                return as_json(document)
            allowed = {f"Bearer {token}" for token in self.valid}
            return Reply() if seen.authorization in allowed else challenged(self.challenge.format(url=self.url))


@contextmanager
def serving() -> Iterator[Serve]:
    """Gives a function that starts servers; all of them end with the block."""
    with ExitStack() as stack:

        def start(answer: Callable[[Seen], Reply], **options: Any) -> FakeRegistry:
            server = stack.enter_context(FakeRegistry(answer, **options))
            if isinstance(answer, Scripted):
                answer.url = server.url
            return server

        yield start


def denied(puller: Puller, server: FakeRegistry) -> SandboxError:
    """The error of a pull that is turned away, which has no secret in it anywhere."""
    with pytest.raises(SandboxError) as caught:
        puller.pull(server)
    assert caught.value.reason == "auth_denied"
    assert caught.value.failure_class is FailureClass.CONFIGURATION
    assert_no_secret(caught.value)
    return caught.value


def assert_no_secret(error: BaseException) -> None:
    """Neither the message nor the traceback with all causes has what is secret."""
    text = "".join(traceback.format_exception(error))
    for line in text.splitlines():
        assert "canary" not in line or line.strip().startswith(("File ", "puller.", "assert", "with "))
