"""Answering challenges: anonymous, basic, bearer; scopes, expiry, realms, and credentials that go nowhere else."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from fake_token_registry import FakeRegistry, Reply, Seen, challenged
from token_puller import BASIC, FAST, SCOPE, Puller, Scripted, Serve, assert_no_secret, denied, serving

from forgeyard_model.errors import ExecutorError, FailureClass, ForgeyardError
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.settings import Endpoint


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[Puller]:
    """A client without credentials."""
    puller = Puller(tmp_path)
    yield puller
    puller.session.close()


@pytest.fixture
def serve() -> Iterator[Serve]:
    """Start servers that end with the test."""
    with serving() as start:
        yield start


def test_nothing_is_sent_where_nothing_is_asked_for(serve: Serve, puller: Puller) -> None:
    """Anonymous access works without a header, with credentials stored as well."""
    server = serve(lambda _: Reply())
    puller.login(server.host)
    assert puller.pull(server) == 200
    assert [seen.authorization for seen in server.seen] == [None]


@pytest.mark.parametrize("name", ["token", "access_token"])
def test_an_anonymous_token(serve: Serve, puller: Puller, name: str) -> None:
    """Either name for the token; the service hears the scope and its own name, and no credentials."""
    server = serve(Scripted(tokens=({name: "t1"},)))
    assert puller.pull(server) == 200
    (asked,) = server.asked("/token")
    assert asked.query == {"service": ["reg"], "scope": [SCOPE]}
    assert asked.authorization is None
    assert server.seen[-1].authorization == "Bearer t1"


def test_a_token_is_used_again_for_its_scope_alone(serve: Serve, puller: Puller) -> None:
    """One token for each endpoint and scope, not one for all."""
    scripted = Scripted(tokens=({"token": "t1", "expires_in": 300}, {"token": "t2", "expires_in": 300}))
    server = serve(scripted)
    for scope in (SCOPE, SCOPE, "repository:team/app:pull,push", SCOPE):
        assert puller.pull(server, scope=scope) == 200
    assert [seen.query["scope"] for seen in server.asked("/token")] == [[SCOPE], ["repository:team/app:pull,push"]]
    assert [seen.authorization for seen in server.seen if seen.path != "/token"] == [
        *[None, "Bearer t1", "Bearer t1"],
        *[None, "Bearer t2", "Bearer t1"],
    ]


@pytest.mark.parametrize(
    ("named", "asked"),
    [
        ("", [SCOPE]),
        ("aws", ["aws"]),
        ("registry:catalog:*", ["registry:catalog:*"]),
        (
            "repository:other:pull repository:team/app:pull,push",
            ["repository:other:pull", "repository:team/app:pull,push"],
        ),
        ("repository(plugin):team/app:pull", ["repository(plugin):team/app:pull"]),
    ],
)
def test_the_scope_that_is_named_is_asked_for(serve: Serve, puller: Puller, named: str, asked: list[str]) -> None:
    """As it is, also one that means nothing to us, each part by itself; ours where none is named."""
    server = serve(Scripted(f'Bearer realm="{{url}}/token",scope="{named}"' if named else 'Bearer realm="{url}/token"'))
    assert puller.pull(server) == 200
    assert server.asked("/token")[0].query == {"scope": asked}


def test_a_push_token_is_not_narrowed(serve: Serve, puller: Puller) -> None:
    """A registry that names pull for the first request of a push is asked for the whole of what is to be done."""
    server = serve(Scripted(f'Bearer realm="{{url}}/token",scope="{SCOPE}"'))
    assert puller.pull(server, scope="repository:team/app:pull,push") == 200
    assert server.asked("/token")[0].query["scope"] == ["repository:team/app:pull,push"]


def test_a_realm_keeps_its_own_query(serve: Serve, puller: Puller) -> None:
    """What the realm has after its question mark is sent along."""
    server = serve(Scripted('Bearer realm="{url}/token?tenant=a%20b&x=",service="s, with a comma"'))
    assert puller.pull(server) == 200
    query = server.asked("/token")[0].query
    assert (query["tenant"], query["x"], query["service"]) == (["a b"], [""], ["s, with a comma"])


def test_user_and_password_go_to_the_token_service(serve: Serve, puller: Puller) -> None:
    """By basic authentication, with the account's name; the registry itself sees the token alone."""
    server = serve(Scripted())
    puller.login(server.host)
    assert puller.pull(server) == 200
    (asked,) = server.asked("/token")
    assert (asked.authorization, asked.query["account"]) == (BASIC, ["me"])
    assert "Basic" not in str([seen.authorization for seen in server.seen if seen.path != "/token"])


def basic_only(seen: Seen) -> Reply:
    """A registry that knows one user."""
    return Reply() if seen.authorization == BASIC else challenged('Basic realm="registry, of sorts"')


def test_basic_authentication(serve: Serve, puller: Puller) -> None:
    """Sent when asked for, and from then on at once."""
    server = serve(basic_only)
    puller.login(server.host)
    assert [puller.pull(server), puller.pull(server)] == [200, 200]
    assert [seen.authorization for seen in server.seen] == [None, BASIC, BASIC]


@pytest.mark.parametrize(
    ("parts", "why"),
    [({}, "no credentials are stored"), ({"identitytoken": "canary"}, "wants a user and a password")],
)
def test_basic_without_a_user_is_denied(serve: Serve, puller: Puller, parts: dict[str, str], why: str) -> None:
    """A typed error with registry, repository, and the file in which a login would stand."""
    server = serve(basic_only)
    if parts:
        puller.login(server.host, **parts)
    error = denied(puller, server)
    assert why in error.details
    assert server.host in error.brief
    assert "team/app" in error.brief
    assert "auth.json" in error.resolution


def test_a_wrong_password_is_denied_after_one_try(serve: Serve, puller: Puller) -> None:
    """Basic: the same header is not sent a third time."""
    server = serve(lambda _: challenged('Basic realm="r"'))
    puller.login(server.host)
    assert puller.pull(server) == 401
    assert "wrong" in denied(puller, server).details
    assert [seen.authorization for seen in server.seen] == [None, BASIC, BASIC]


@pytest.mark.parametrize(
    "challenges",
    [
        ['Basic realm="r"', 'Bearer realm="{url}/token"'],
        ['Basic realm="r", Bearer realm="{url}/token"'],
        ['Bearer realm="{url}/token", Basic realm="r"'],
        ["Negotiate", 'bearer realm="{url}/token"'],
    ],
)
def test_bearer_comes_before_basic(serve: Serve, puller: Puller, challenges: list[str]) -> None:
    """Of two ways, the one that does not show the password to the registry."""
    scripted = Scripted()

    def answer(seen: Seen) -> Reply:
        reply = scripted(seen)
        return challenged(*(text.format(url=scripted.url) for text in challenges)) if reply.status == 401 else reply

    server = serve(answer)
    scripted.url = server.url
    puller.login(server.host)
    assert puller.pull(server) == 200
    assert server.seen[-1].authorization == "Bearer t1"


def test_basic_where_bearer_names_no_realm(serve: Serve, puller: Puller) -> None:
    """A bearer challenge that can't be answered does not hide one that can."""
    server = serve(lambda seen: Reply() if seen.authorization == BASIC else challenged("Bearer", 'Basic realm="r"'))
    puller.login(server.host)
    assert puller.pull(server) == 200


def test_other_schemes_are_named(serve: Serve, puller: Puller) -> None:
    """A way to log in that we don't have is said to be that."""
    assert "negotiate" in denied(puller, serve(lambda _: challenged("Negotiate"))).details


def test_a_challenge_that_got_lost_is_asked_for_at_the_root(serve: Serve, puller: Puller) -> None:
    """Some registries challenge at /v2/ alone."""
    scripted = Scripted()

    def answer(seen: Seen) -> Reply:
        reply = scripted(seen)
        return Reply(401) if reply.status == 401 and seen.path != "/v2/" else reply

    server = serve(answer)
    scripted.url = server.url
    assert puller.pull(server) == 200
    assert "nothing it names" in denied(puller, serve(lambda _: Reply(401))).details


def test_a_token_that_expires_is_replaced_with_the_stored_credentials(serve: Serve, puller: Puller) -> None:
    """Early revoked or late: a 401 brings a new one, by user and password, not by the stale token."""
    scripted = Scripted(tokens=({"token": "t1", "expires_in": 300}, {"token": "t2", "expires_in": 300}))
    server = serve(scripted)
    puller.login(server.host)
    assert puller.pull(server) == 200
    scripted.valid.clear()
    assert puller.pull(server) == 200
    assert [seen.authorization for seen in server.asked("/token")] == [BASIC, BASIC]
    assert server.seen[-1].authorization == "Bearer t2"


@pytest.mark.parametrize(
    ("document", "life"),
    [
        ({}, 60.0),
        ({"expires_in": 0}, 60.0),
        ({"expires_in": -5}, 60.0),
        ({"expires_in": "soon"}, 60.0),
        ({"expires_in": None}, 60.0),
        ({"expires_in": 1e400}, 60.0),
        ({"expires_in": "300"}, 300.0),
        ({"expires_in": 300}, 300.0),
        ({"expires_in": 10**12}, 86400.0),
        ({"expires_in": 300, "issued_at": "nonsense"}, 300.0),
        ({"expires_in": 300, "issued_at": (datetime.now(UTC) - timedelta(days=2)).isoformat()}, 300.0),
        ({"expires_in": 300, "issued_at": (datetime.now(UTC) + timedelta(days=2)).isoformat()}, 300.0),
        ({"expires_in": 4000, "issued_at": timedelta(seconds=-1000)}, 3000.0),
    ],
)
def test_how_long_a_token_is_used(
    serve: Serve, puller: Puller, monkeypatch: pytest.MonkeyPatch, document: dict[str, Any], life: float
) -> None:
    """expires_in, 60 s without one, less what issued_at says plausibly; given up shortly before the end."""
    if isinstance(issued := document.get("issued_at"), timedelta):  # as of now, not of when the tests were collected
        document = {**document, "issued_at": (datetime.now(UTC) + issued).isoformat()}
    server = serve(Scripted(tokens=({"token": "t1", **document},)))
    endpoint = Endpoint(server.host, "team/app", http=True)
    assert puller.pull(server) == 200
    now = time.monotonic()
    for ahead, header in ((life - 90 if life > 200 else life - 15, "Bearer t1"), (life - 5, None)):
        monkeypatch.setattr(time, "monotonic", lambda ahead=ahead: now + ahead)
        assert puller.authenticator(server).header(endpoint, SCOPE) == header


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"token": ""},
        {"token": None},
        {"token": "None of\nthis"},
        {"token": ["canary"]},
        {"token": 7},
        ["canary"],
        Reply(200, b"canary"),
        Reply(200, b""),
        Reply(200, b'{"token": "' + b"x" * 300_000 + b'"}'),
        Reply(401, b'{"errors": "canary"}'),
        Reply(403),
        Reply(400, b'{"error": "invalid_grant canary"}'),
        Reply(404),
        Reply(204),
    ],
)
def test_no_token_is_an_error_and_never_a_header(serve: Serve, puller: Puller, document: Any) -> None:
    """What is no token is not sent as one, and what the service said is not repeated."""
    server = serve(
        Scripted(tokens=(Reply(200, json.dumps(document).encode()) if isinstance(document, list) else document,))
    )
    puller.login(server.host)
    denied(puller, server)
    assert [seen.authorization for seen in server.seen if seen.path != "/token"] == [None]


def test_threads_that_are_turned_away_together_share_one_token(serve: Serve, puller: Puller) -> None:
    """Four layers at once ask for one token, not for four."""
    scripted, barrier = Scripted(), threading.Barrier(4)

    def answer(seen: Seen) -> Reply:
        reply = scripted(seen)
        if reply.status == 401:
            barrier.wait(10)
        return reply

    server = serve(answer)
    scripted.url = server.url
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(lambda _: puller.pull(server), range(4))) == [200] * 4
    assert len(server.asked("/token")) == 1


def test_a_registry_token_is_sent_as_it_is(serve: Serve, puller: Puller) -> None:
    """It needs no service; refused, it is not sent again."""
    server = serve(
        lambda seen: Reply() if seen.authorization == "Bearer canary" else challenged('Bearer realm="http://x"')
    )
    puller.login(server.host, registrytoken="canary")
    assert puller.pull(server) == 200
    other = serve(lambda _: challenged('Bearer realm="http://x"'))
    puller.login(other.host, registrytoken="canary")
    assert puller.pull(other) == 401
    assert "registry token" in denied(puller, other).details


def test_an_identity_token_is_exchanged(serve: Serve, puller: Puller) -> None:
    """By the OAuth2 form, in the body, never in an address or a header."""
    server = serve(Scripted(tokens=({"access_token": "t1"},)))
    puller.login(server.host, identitytoken="canary", username="00000000-0000")
    assert puller.pull(server) == 200
    (asked,) = server.asked("/token")
    assert (asked.method, asked.query, asked.authorization) == ("POST", {}, None)
    assert asked.form["refresh_token"] == ["canary"]
    assert asked.form["grant_type"] == ["refresh_token"]
    assert (asked.form["service"], asked.form["scope"]) == (["reg"], [SCOPE])


@pytest.mark.parametrize("status", [404, 405])
def test_a_service_that_knows_no_oauth_is_asked_the_plain_way(serve: Serve, puller: Puller, status: int) -> None:
    """With user and password, where the entry has them as well."""
    server = serve(Scripted(tokens=(Reply(status), {"token": "t1"})))
    puller.login(server.host, identitytoken="canary", username="me", password="canary")
    assert puller.pull(server) == 200
    assert [(seen.method, seen.authorization) for seen in server.asked("/token")] == [("POST", None), ("GET", BASIC)]
    other = serve(Scripted(tokens=(Reply(status), {"token": "t1"})))
    puller.login(other.host, identitytoken="canary")
    denied(puller, other)


def test_a_limited_token_service_is_rate_limiting(serve: Serve, puller: Puller) -> None:
    """429 there is rate_limited after the tries there are, not a denial; a moment's 429 or 503 passes."""
    server = serve(Scripted(tokens=(Reply(429),)))
    with pytest.raises(ExecutorError) as caught:
        puller.pull(server)
    assert caught.value.reason == "rate_limited"
    assert len(server.asked("/token")) == FAST.tries
    for status in (429, 503):
        assert puller.pull(serve(Scripted(tokens=(Reply(status), {"token": "t1"})))) == 200


def test_a_token_service_that_fails_or_is_gone(serve: Serve, puller: Puller) -> None:
    """Server errors and refused connections are the infrastructure's, and no denial."""
    with FakeRegistry(lambda _: Reply()) as gone:
        pass
    for server in (serve(Scripted(tokens=(Reply(500),))), serve(Scripted(f'Bearer realm="{gone.url}/token"'))):
        puller.login(server.host)
        with pytest.raises(ExecutorError) as caught:
            puller.pull(server)
        assert caught.value.reason in ("registry_error", "registry_unreachable")
        assert caught.value.failure_class is FailureClass.INFRASTRUCTURE
        assert_no_secret(caught.value)


def test_a_budget_ends_the_wait_for_a_token(serve: Serve, puller: Puller) -> None:
    """A service that hangs holds nobody up past the deadline."""
    release = threading.Event()

    def answer(seen: Seen) -> Reply:
        if seen.path == "/token":
            release.wait(20)
        return Reply()

    server = serve(answer)
    endpoint = Endpoint(server.host, "team/app", http=True)
    started = time.monotonic()
    try:
        with pytest.raises(ForgeyardError) as caught:
            puller.authenticator(server).renew(
                endpoint, SCOPE, [f'Bearer realm="{server.url}/token"'], Budget.within(0.3)
            )
    finally:
        release.set()
    assert time.monotonic() - started < 2
    assert caught.value.failure_class is FailureClass.TIMEOUT
