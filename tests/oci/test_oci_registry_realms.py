"""Which token services are asked, over what, and what they and others get to see of credentials."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from fake_token_registry import Reply, as_json, challenged
from token_puller import BASIC, Puller, Scripted, Serve, denied, serving

from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.registry.settings import Endpoint
from forgeyard_oci.registry.tokens import checked_realm


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


PLAIN = Endpoint("127.0.0.1:5000", "team/app", http=True)
SECURE = Endpoint("r.example.org", "team/app")
OPEN = Endpoint("r.example.org", "team/app", http=True)


@pytest.mark.parametrize(
    ("endpoint", "realm", "taken"),
    [
        (SECURE, "https://r.example.org/token", True),
        (SECURE, "https://auth.example.net:8443/token?a=b", True),
        (SECURE, "http://r.example.org/token", False),
        (SECURE, "http://127.0.0.1/token", False),
        (PLAIN, "http://127.0.0.1:5001/token", True),
        (PLAIN, "http://localhost:5001/token", True),
        (PLAIN, "https://auth.example.net/token", True),
        (PLAIN, "http://auth.example.net/token", False),
        (PLAIN, "http://192.0.2.1/latest/meta-data", False),
        (OPEN, "http://r.example.org:5001/token", True),
        (OPEN, "http://other.example.org/token", False),
        (OPEN, "http://127.0.0.1/token", False),
        (SECURE, "https://me:pw@auth.example.net/token", False),
        (SECURE, "https://r.example.org@auth.example.net/token", False),
        (SECURE, "ftp://auth.example.net/token", False),
        (SECURE, "file:///etc/passwd", False),
        (SECURE, "/token", False),
        (SECURE, "//auth.example.net/token", False),
        (SECURE, "https:///token", False),
        (SECURE, "https://auth.example.net:99999/token", False),
        (SECURE, "https://[::1/token", False),
        (SECURE, "https://auth.example.net/to ken", False),
        (SECURE, "https://auth.example.net/\r\nX: y", False),
        (SECURE, "https://auth.example.net/" + "x" * 3000, False),
    ],
)
def test_which_realms_are_asked(endpoint: Endpoint, realm: str, taken: bool) -> None:
    """TLS on any host; plain HTTP on the host of an endpoint that is plain HTTP itself; nothing else."""
    if taken:
        assert checked_realm(endpoint, realm) == realm
        return
    with pytest.raises(SandboxError) as caught:
        checked_realm(endpoint, realm)
    assert caught.value.reason == "unsafe_realm"
    assert endpoint.host in str(caught.value)


def test_a_hostile_realm_gets_no_credentials_of_another_registry(serve: Serve, puller: Puller) -> None:
    """A registry that names another's token service is asked with its own credentials, which it has none of."""
    victim = serve(Scripted())
    puller.login(victim.host)
    hostile = serve(Scripted(f'Bearer realm="{victim.url}/token",service="reg"'))
    assert puller.pull(hostile) == 401
    assert [seen.authorization for seen in victim.asked("/token")] == [None]
    assert "account" not in victim.asked("/token")[0].query


def test_a_redirected_token_request_leaves_the_credentials_behind(serve: Serve, puller: Puller) -> None:
    """Another port is another origin; the same one keeps them."""
    other = serve(lambda _: as_json({"token": "t1"}))
    scripted = Scripted(tokens=(Reply(307, b"", [("Location", f"{other.url}/token")]),))
    server = serve(scripted)
    puller.login(server.host)
    assert puller.pull(server) == 401
    assert [seen.authorization for seen in other.seen] == [None]
    scripted.tokens = [Reply(307, b"", [("Location", "/token?again")]), {"token": "t2"}]
    assert puller.pull(server) == 200
    assert server.asked("/token")[-1].authorization == BASIC
    scripted.valid.clear()
    scripted.tokens = [Reply(307, b"", [("Location", "/token?again")])]
    with pytest.raises(SandboxError, match="circle"):
        puller.pull(server)


def test_a_redirected_exchange_does_not_carry_the_identity_token(serve: Serve, puller: Puller) -> None:
    """Neither to another origin nor turned into a GET."""
    other = serve(lambda _: as_json({"token": "t1"}))
    for reply in (Reply(307, b"", [("Location", f"{other.url}/token")]), Reply(302, b"", [("Location", "/token?x")])):
        server = serve(Scripted(tokens=(reply,)))
        puller.login(server.host, identitytoken="canary")
        denied(puller, server)
    assert other.seen == []


def tls_server(authority: trustme.CA, tmp_path: Path) -> ssl.SSLContext:
    """A context for 127.0.0.1 and localhost."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1", "localhost").configure_cert(context)
    return context


def test_over_tls_with_an_authority_of_certs_d(serve: Serve, puller: Puller, tmp_path: Path) -> None:
    """The registry's and the token service's certificates are each checked by their own host's entry."""
    authority = trustme.CA()
    service = serve(lambda _: as_json({"token": "t1"}), tls=tls_server(authority, tmp_path))
    realm = f"https://localhost:{service.port}/token"
    server = serve(
        lambda seen: Reply() if seen.authorization == "Bearer t1" else challenged(f'Bearer realm="{realm}"'),
        tls=tls_server(authority, tmp_path),
    )
    trust(puller, authority, server.host)
    puller.login(server.host)
    with pytest.raises(ExecutorError, match="certificate") as caught:
        puller.pull(server)
    assert caught.value.reason == "registry_tls"
    assert service.seen == []
    other = Puller(puller.root)
    trust(other, authority, f"localhost:{service.port}")
    assert other.pull(server) == 200
    assert [seen.authorization for seen in service.seen] == [BASIC]
    other.session.close()


def trust(puller: Puller, authority: trustme.CA, host: str) -> None:
    """Put the authority into the host's certs.d."""
    folder = puller.root / "etc/containers/certs.d" / host
    folder.mkdir(parents=True)
    (folder / "ca.crt").write_bytes(authority.cert_pem.bytes())


def test_netrc_and_the_environment_are_not_asked(
    serve: Serve, puller: Puller, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What requests would take from ~/.netrc or a proxy variable of this process does not come in."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password canary\n")
    netrc.chmod(0o600)
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    server = serve(Scripted())
    puller.authenticator(server)
    assert puller.pull(server) == 200
    assert [seen.authorization for seen in server.asked("/token")] == [None]
