"""Manifests, redirects, mirrors, credentials and certificates, against a registry that can misbehave."""

from __future__ import annotations

import json
import ssl
from base64 import b64encode
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme
from bad_registry import (
    OCI_MANIFEST,
    BadRegistry,
    Behaviour,
    Call,
    chunked,
    cut_at,
    flip,
    redirect,
    reply,
    sha256,
    with_body,
    with_headers,
)
from registry_clients import Counting, client, image, pull_blob

from forgeyard_model.errors import ExecutorError, SandboxError
from forgeyard_oci.image_manifest import DOCKER_LIST, DOCKER_MANIFEST, MAX_MANIFEST, OCI_INDEX
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.client import RegistryClient
from forgeyard_oci.registry.redirects import MOST_HOPS, same_origin

MANIFEST = b'{"schemaVersion":2}'
BLOB = bytes(range(256)) * 40
SECRET = "c2lnbmVk"


@pytest.fixture
def registry() -> Iterator[BadRegistry]:
    """A registry with one manifest, tagged 1, and one blob."""
    with BadRegistry() as server:
        server.add_manifest(MANIFEST, "1")
        server.add_blob(BLOB)
        yield server


@pytest.fixture
def storage() -> Iterator[BadRegistry]:
    """Another origin, where the registry sends for blobs."""
    with BadRegistry() as server:
        server.add_blob(BLOB)
        yield server


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[RegistryClient]:
    """A client with no patience."""
    made = client(tmp_path)
    yield made
    made.close()


def logged_in(root: Path, *registries: BadRegistry) -> RegistryClient:
    """A client with a password for each of `registries`."""
    auths = {registry.host: {"auth": b64encode(b"me:pw").decode()} for registry in registries}
    return client(root, DOCKER_AUTH_CONFIG=json.dumps({"auths": auths}))


def refusal(puller: RegistryClient, registry: BadRegistry, which: str = "1") -> SandboxError:
    """What asking for the manifest is refused with."""
    with pytest.raises(SandboxError) as caught:
        puller.manifest(image(registry.host), which, Counting())
    return caught.value


def get_blob(puller: RegistryClient, registry: BadRegistry, budget: Budget | None = None) -> bytes:
    """BLOB, as it comes."""
    return pull_blob(puller, image(registry.host), sha256(BLOB), len(BLOB), budget=budget)


# Manifests


def test_a_manifest_by_tag_and_by_digest(registry: BadRegistry, puller: RegistryClient) -> None:
    """The bytes, their digest and the declared type; all four kinds are asked for, and never with HEAD."""
    for which in ("1", sha256(MANIFEST)):
        got = puller.manifest(image(registry.host), which, Counting())
        assert (got.data, got.media_type, got.digest) == (MANIFEST, OCI_MANIFEST, sha256(MANIFEST))
    for seen in registry.requests:
        assert seen.method == "GET"
        assert set(seen.headers["accept"].split(", ")) == {OCI_MANIFEST, OCI_INDEX, DOCKER_LIST, DOCKER_MANIFEST}


@pytest.mark.parametrize(
    ("header", "told"),
    [
        ("application/octet-stream", ""),
        ("text/plain; charset=utf-8", ""),
        ("", ""),
        (f"{OCI_MANIFEST}; charset=utf-8", OCI_MANIFEST),
        (OCI_MANIFEST.upper(), OCI_MANIFEST),
        (
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
            "application/vnd.docker.distribution.manifest.v1+prettyjws",
        ),
    ],
)
def test_content_types(registry: BadRegistry, puller: RegistryClient, header: str, told: str) -> None:
    """A type that says nothing is handed on as none, parameters are cut off, the rest is the reader's to judge."""
    registry.on("/manifests/", with_headers(Content_Type=header))
    assert puller.manifest(image(registry.host), "1", Counting()).media_type == told


@pytest.mark.parametrize("which", ["1", sha256(MANIFEST)])
def test_a_manifest_of_another_digest(registry: BadRegistry, puller: RegistryClient, which: str) -> None:
    """Bytes that are not what was asked for by digest, or what the registry's own header says, are refused."""
    registry.on("/manifests/", with_body(flip))
    refused = refusal(puller, registry, which)
    assert refused.reason == "digest_mismatch"
    assert sha256(flip(MANIFEST)) in refused.details


def test_a_digest_header_that_can_be_checked(registry: BadRegistry, puller: RegistryClient) -> None:
    """A sha512 header is computed and compared; one that is no digest is not what we got."""
    registry.on("/manifests/", with_headers(Docker_Content_Digest=f"sha512:{'0' * 128}"), times=1)
    assert refusal(puller, registry).reason == "digest_mismatch"
    registry.on("/manifests/", with_headers(Docker_Content_Digest="nonsense"), times=1)
    assert refusal(puller, registry).reason == "digest_mismatch"
    registry.on("/manifests/", with_headers(Docker_Content_Digest=""), times=1)
    assert puller.manifest(image(registry.host), "1", Counting()).data == MANIFEST


@pytest.mark.parametrize("also", [None, chunked])
def test_a_manifest_too_large(registry: BadRegistry, puller: RegistryClient, also: Behaviour | None) -> None:
    """One byte over 4 MiB is refused, with a length or without; 4 MiB are not."""

    def large(call: Call) -> bool:
        call.answer.headers.pop("Docker-Content-Digest")
        call.answer.body = bytes(MAX_MANIFEST + len(registry.requests) % 2)
        call.answer.length = None if also else len(call.answer.body)
        return False

    registry.on("/manifests/", large)
    assert refusal(puller, registry).reason == "manifest_too_large"
    assert len(puller.manifest(image(registry.host), "1", Counting()).data) == MAX_MANIFEST


def test_a_manifest_cut_short(registry: BadRegistry, puller: RegistryClient) -> None:
    """A truncated manifest is fetched again; one that always is, is called truncated."""
    registry.on("/manifests/", cut_at(5), times=6)
    with pytest.raises(ExecutorError) as caught:
        puller.manifest(image(registry.host), "1", Counting())
    assert caught.value.reason == "truncated"
    assert puller.manifest(image(registry.host), "1", Counting()).data == MANIFEST


def test_a_manifest_in_an_encoding(registry: BadRegistry, puller: RegistryClient) -> None:
    """A body in a Content-Encoding nobody asked for is refused."""
    registry.on("/manifests/", with_headers(Content_Encoding="br"))
    assert refusal(puller, registry).reason == "content_encoding"


def test_an_image_that_is_not_there(registry: BadRegistry, puller: RegistryClient) -> None:
    """404 names the image and the registry."""
    refused = refusal(puller, registry, "none")
    assert refused.reason == "not_found"
    assert f"{registry.host}/team/app:none" in refused.brief


@pytest.mark.parametrize("status", [401, 403])
def test_access_denied(registry: BadRegistry, puller: RegistryClient, status: int) -> None:
    """Denied is told as that, with the cure, and not tried again."""
    registry.on("/manifests/", reply(status, b'{"errors":[{"code":"DENIED"}]}', WWW_Authenticate='Basic realm="x"'))
    refused = refusal(puller, registry)
    assert refused.reason == "auth_denied"
    assert "log in" in refused.resolution
    assert len(registry.requests) == 1


# Credentials and redirects


def test_a_token_that_ends_mid_pull(registry: BadRegistry, tmp_path: Path) -> None:
    """A token that is refused is replaced once, with the stored credentials, and the request goes on."""
    registry.tokens, registry.basic = {"first"}, "me:pw"
    puller = logged_in(tmp_path, registry)
    puller.manifest(image(registry.host), "1", Counting())
    registry.tokens = {"second"}
    assert get_blob(puller, registry) == BLOB
    puller.close()
    assert [seen.headers.get("authorization") for seen in registry.seen("/blobs/")] == ["Bearer first", "Bearer second"]


def test_one_new_token_for_each_request(registry: BadRegistry, puller: RegistryClient) -> None:
    """A registry that refuses the token it has just given is asked twice, not for ever."""
    registry.tokens = {"given"}
    registry.on("/manifests/", reply(401, WWW_Authenticate=f'Bearer realm="{registry.url}/token"'))
    assert refusal(puller, registry).reason == "auth_denied"
    assert len(registry.seen("/manifests/")) == 2


def test_a_redirect_elsewhere_carries_no_credentials(
    registry: BadRegistry, storage: BadRegistry, tmp_path: Path
) -> None:
    """A blob's other origin sees no Authorization, though it has credentials here too; the digest still counts."""
    registry.basic = "me:pw"
    puller = logged_in(tmp_path, registry, storage)

    def signed(call: Call) -> str:
        return f"{storage.url}/storage/{sha256(BLOB)}?signature={SECRET}"

    registry.on("/blobs/", redirect_if_authorized(signed))
    assert get_blob(puller, registry) == BLOB
    assert [seen.headers.get("authorization") for seen in storage.requests] == [None]
    assert storage.requests[0].query == f"signature={SECRET}"
    storage.on("/storage/", with_body(flip))
    with pytest.raises(SandboxError) as caught:
        get_blob(puller, registry)
    puller.close()
    assert caught.value.reason == "digest_mismatch"


def redirect_if_authorized(to: object) -> Behaviour:
    """The good 401 first, the redirect afterwards."""

    def behave(call: Call) -> bool:
        if call.answer.status == 401:
            return False
        return redirect(to)(call)  # type: ignore[arg-type]  # what redirect takes

    return behave


def test_a_redirect_at_home_keeps_them(registry: BadRegistry, tmp_path: Path) -> None:
    """The same origin, by a relative location, still gets the credentials."""
    registry.basic = "me:pw"
    puller = logged_in(tmp_path, registry)
    registry.on("/v2/team/app/blobs/", redirect_if_authorized(f"../moved/blobs/{sha256(BLOB)}"), times=2)
    assert get_blob(puller, registry) == BLOB
    puller.close()
    assert registry.requests[-1].path == f"/v2/team/app/moved/blobs/{sha256(BLOB)}"
    assert registry.requests[-1].headers["authorization"].startswith("Basic ")


def test_origins() -> None:
    """Scheme, host and port make an origin; case and default ports make no difference."""
    assert same_origin("https://A.example/x", "https://a.example:443/y?z")
    for other in ("http://a.example/x", "https://a.example:444/x", "https://b.example/x", "https://a.example.org/x"):
        assert not same_origin("https://a.example/x", other)


def test_a_signature_that_expired_is_asked_for_again(
    registry: BadRegistry, storage: BadRegistry, puller: RegistryClient
) -> None:
    """403 from the storage is no "access denied" by the registry: a new redirect may work. No query is shown."""
    registry.on("/blobs/", redirect(f"{storage.url}/storage/{sha256(BLOB)}?signature={SECRET}"))
    storage.on("/storage/", reply(403), times=1)
    assert get_blob(puller, registry) == BLOB
    storage.on("/storage/", reply(403))
    with pytest.raises(ExecutorError) as caught:
        get_blob(puller, registry)
    assert caught.value.reason == "registry_error"
    assert SECRET not in str(caught.value)


@pytest.mark.parametrize(
    ("to", "why"),
    [
        ("http://[::1", "nowhere"),
        ("ftp://files.example/x", "nowhere"),
        ("http://me:pw@localhost:9/x", "user name"),
        ("/v2/team/app/blobs/" + sha256(BLOB), "circle"),
    ],
)
def test_redirects_that_lead_nowhere_good(registry: BadRegistry, puller: RegistryClient, to: str, why: str) -> None:
    """What can't be read, is no HTTP, carries a user or goes round is refused."""
    registry.on("/blobs/", redirect(to))
    with pytest.raises(SandboxError, match=why) as caught:
        get_blob(puller, registry)
    assert caught.value.reason == "unsafe_redirect"
    assert "pw" not in str(caught.value)


def test_a_redirect_with_an_endless_body(registry: BadRegistry, storage: BadRegistry, puller: RegistryClient) -> None:
    """The body of a redirect is not waited for beyond a few kilobytes."""

    def endless(call: Call) -> bool:
        call.answer.status, call.answer.length = 307, None
        call.answer.headers = {"Location": f"{storage.url}/storage/{sha256(BLOB)}"}
        call.head()
        for _ in range(10_000):  # 640 MiB, unless the client hangs up
            call.write(bytes(64 << 10))
        endured.append(True)
        return True

    endured: list[bool] = []
    registry.on("/blobs/", endless)
    assert get_blob(puller, registry) == BLOB
    assert endured == []


def test_five_hops_and_no_more(registry: BadRegistry, puller: RegistryClient) -> None:
    """Five redirects are followed, the sixth is not."""

    def onwards(call: Call) -> str:
        return f"/hop/{len(registry.requests)}/blobs/{sha256(BLOB)}?key={SECRET}"

    registry.on("/blobs/", redirect(onwards, 302), times=MOST_HOPS)
    assert get_blob(puller, registry) == BLOB
    registry.on("/blobs/", redirect(onwards, 302))
    with pytest.raises(SandboxError, match="more than 5") as caught:
        get_blob(puller, registry)
    assert SECRET not in str(caught.value)


# What the environment must not decide


def test_netrc_proxies_and_cookies_are_not_ours(
    registry: BadRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither ~/.netrc nor proxy variables that the settings were not given have a say, and no cookie is kept."""
    netrc = tmp_path / "netrc"
    netrc.write_text("machine localhost login me password pw\n")
    monkeypatch.setenv("NETRC", str(netrc))
    monkeypatch.setenv("HTTP_PROXY", "http://localhost:1")
    monkeypatch.setenv("http_proxy", "http://localhost:1")
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", "/nonexistent")
    registry.on("/", with_headers(Set_Cookie="id=1; Path=/"))
    puller = client(tmp_path)
    for _ in range(2):
        puller.manifest(image(registry.host), "1", Counting())
    puller.close()
    assert [(seen.headers.get("authorization"), seen.headers.get("cookie")) for seen in registry.requests] == [
        (None, None)
    ] * 2


# Mirrors


def mirrored(root: Path, registry: BadRegistry, *mirrors: str) -> RegistryClient:
    """A client whose registries.conf has mirrors for `registry`."""
    tables = "".join(f'[[registry.mirror]]\nlocation = "{mirror}"\n' for mirror in mirrors)
    conf = root / "registries.conf"
    conf.write_text(f'[[registry]]\nlocation = "{registry.host}"\n{tables}')
    return client(root, CONTAINERS_REGISTRIES_CONF=str(conf))


@pytest.mark.parametrize("behaviour", [reply(404), reply(500), reply(403), reply(401), cut_at(3), with_body(flip)])
def test_a_mirror_that_fails_is_passed_over(
    registry: BadRegistry, storage: BadRegistry, tmp_path: Path, behaviour: Behaviour
) -> None:
    """Whatever a mirror does wrong, the place itself is asked next, and gives what is right."""
    storage.add_manifest(MANIFEST, "1")
    storage.on("/v2/", behaviour)
    puller = mirrored(tmp_path, registry, storage.host)
    assert puller.manifest(image(registry.host), "1", Counting()).data == MANIFEST
    assert get_blob(puller, registry) == BLOB
    puller.close()
    assert len(storage.seen("/blobs/")) <= 2


def test_a_mirror_that_works_is_enough(registry: BadRegistry, storage: BadRegistry, tmp_path: Path) -> None:
    """What a mirror has is not asked for elsewhere."""
    puller = mirrored(tmp_path, registry, storage.host)
    assert get_blob(puller, registry) == BLOB
    puller.close()
    assert registry.requests == []


def test_mirrors_that_can_not_be_reached_cost_once(registry: BadRegistry, tmp_path: Path) -> None:
    """A dead mirror is noted: later requests pass it over. When all fail, the error names what was asked."""
    puller, budget = mirrored(tmp_path, registry, "localhost:1"), Counting()
    for _ in range(3):
        puller.manifest(image(registry.host), "1", budget)
    assert len(budget.waits) == 1
    with pytest.raises(SandboxError) as caught:
        puller.manifest(image(registry.host), "none", budget)
    puller.close()
    assert caught.value.reason == "not_found"
    assert "asked before: http://localhost:1" in caught.value.details


# TLS


@pytest.fixture
def authority() -> trustme.CA:
    """A certificate authority nobody knows."""
    return trustme.CA()


@pytest.fixture
def secure(authority: trustme.CA) -> Iterator[BadRegistry]:
    """The registry, over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("localhost").configure_cert(context)
    with BadRegistry(tls=context) as server:
        server.add_manifest(MANIFEST, "1")
        server.add_blob(BLOB)
        yield server


def trusting(root: Path, host: str, authority: trustme.CA) -> RegistryClient:
    """A client that has `authority` in certs.d for `host`."""
    directory = root / "etc/containers/certs.d" / host
    directory.mkdir(parents=True)
    authority.cert_pem.write_to_path(str(directory / "ca.crt"))
    return client(root)


def test_a_certificate_that_is_known(secure: BadRegistry, authority: trustme.CA, tmp_path: Path) -> None:
    """An authority in certs.d is believed for that host."""
    puller = trusting(tmp_path, secure.host, authority)
    assert puller.manifest(image(secure.host), "1", Counting()).data == MANIFEST
    assert get_blob(puller, secure) == BLOB
    puller.close()


def test_a_certificate_that_is_not_known(secure: BadRegistry, tmp_path: Path) -> None:
    """One line that names the host and the cure, after one connection."""
    puller, budget = trusting(tmp_path, secure.host, trustme.CA()), Counting()
    with pytest.raises(ExecutorError) as caught:
        puller.manifest(image(secure.host), "1", budget)
    puller.close()
    assert caught.value.reason == "registry_tls"
    assert secure.host in caught.value.brief
    assert f"certs.d/{secure.host}/ca.crt" in caught.value.resolution
    assert "\n" not in str(caught.value)
    assert budget.waits == []


def test_no_way_from_https_to_http(
    secure: BadRegistry, registry: BadRegistry, authority: trustme.CA, tmp_path: Path
) -> None:
    """A redirect from TLS to plain HTTP is refused."""
    puller = trusting(tmp_path, secure.host, authority)
    secure.on("/blobs/", redirect(f"{registry.url}/storage/{sha256(BLOB)}"))
    with pytest.raises(SandboxError, match="plain http") as caught:
        get_blob(puller, secure)
    puller.close()
    assert caught.value.reason == "unsafe_redirect"
    assert registry.requests == []


def test_plain_http_where_tls_is_expected(registry: BadRegistry, authority: trustme.CA, tmp_path: Path) -> None:
    """A registry that answers in plain HTTP is told apart from one that can't be reached."""
    puller = trusting(tmp_path, registry.host, authority)
    with pytest.raises(ExecutorError, match="does not speak TLS"):
        puller.manifest(image(registry.host), "1", Counting())
    puller.close()


def test_insecure_registries(secure: BadRegistry, registry: BadRegistry, tmp_path: Path) -> None:
    """Where the user says so, unknown certificates are taken, and plain HTTP where there is no TLS at all."""
    # 127.1 is loopback to the kernel and any other name to us.
    for server in (secure, registry):
        host = server.host.replace("localhost", "127.1")
        puller = client(tmp_path, insecure=(host,))
        assert puller.manifest(image(host), "1", Counting()).data == MANIFEST
        puller.close()
