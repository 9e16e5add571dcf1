"""How the executor's own files and environment say where registries are and how to reach them."""

from __future__ import annotations

import ssl
from pathlib import Path

import pytest
import trustme

from forgeyard_model.errors import ForgeyardError, InvalidRequest, SandboxError
from forgeyard_oci.reference import RegistryReference, parse_reference
from forgeyard_oci.registry.settings import Endpoint, RegistrySettings

DIGEST = "sha256:" + "0123456789abcdef" * 4


class Host:
    """A host's files in a directory of the test's own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home/user"

    def write(self, name: str, text: str) -> Path:
        """A file below the root."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def conf(self, text: str) -> Path:
        """The system's registries.conf."""
        return self.write("etc/containers/registries.conf", text)

    def load(self, *insecure: str, **environ: str) -> RegistrySettings:
        """The settings with these files and this environment alone."""
        return RegistrySettings.load(environ, home=self.home, root=self.root, insecure=insecure)

    def urls(self, text: str, *insecure: str) -> list[str]:
        """The endpoints of a reference as URLs; a mirror's with a star, one without verification with a mark."""
        return [
            f"{'*' if item.mirror else ''}{item.base_url}/{item.repository}{'' if item.verify else '?'}"
            for item in self.load(*insecure).endpoints(registry(text))
        ]


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A host without any configuration."""
    return Host(tmp_path)


def registry(text: str) -> RegistryReference:
    """A reference, which has to be a registry's."""
    reference = parse_reference(text)
    assert isinstance(reference, RegistryReference)
    return reference


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        ("busybox", ["https://registry-1.docker.io/library/busybox"]),
        ("registry.example.org/a/b", ["https://registry.example.org/a/b"]),
        ("registry.example.org:8443/a", ["https://registry.example.org:8443/a"]),
        ("localhost/a", ["http://localhost/a"]),
        ("localhost:5000/a", ["http://localhost:5000/a"]),
        ("127.9.8.7:5000/a", ["http://127.9.8.7:5000/a"]),
        ("[::1]:5000/a", ["http://[::1]:5000/a"]),
        ("[2001:db8::1]:5000/a", ["https://[2001:db8::1]:5000/a"]),
        ("localhost.example.org/a", ["https://localhost.example.org/a"]),
        ("127.0.0.1.example.org/a", ["https://127.0.0.1.example.org/a"]),
    ],
)
def test_endpoints_without_configuration(host: Host, text: str, urls: list[str]) -> None:
    """TLS everywhere, plain HTTP on loopback alone; Docker Hub's API has its own name."""
    assert host.urls(text) == urls


def test_docker_hub_keeps_its_name_for_credentials(host: Host) -> None:
    """Credentials and certificates go by docker.io, requests to its API host."""
    (endpoint,) = host.load().endpoints(registry("busybox"))
    assert endpoint == Endpoint("docker.io", "library/busybox")


def test_loopback_speaks_tls_where_it_has_certificates(host: Host) -> None:
    """An entry in certs.d says that there is TLS; then plain HTTP is not tried."""
    (host.root / "etc/containers/certs.d/localhost:5000").mkdir(parents=True)
    assert host.urls("localhost:5000/a") == ["https://localhost:5000/a"]
    assert host.urls("localhost:5001/a") == ["http://localhost:5001/a"]


CONF = """
unqualified-search-registries = ["docker.io", "registry.example.org"]
short-name-mode = "enforcing"

[[registry]]
prefix = "registry.example.org/team"
location = "inner.example.org:5000/mirror/team"

[[registry.mirror]]
location = "m1.example.org/x"

[[registry.mirror]]
location = "m2.example.org"
insecure = true
pull-from-mirror = "digest-only"

[[registry.mirror]]
location = "m3.example.org"
pull-from-mirror = "tag-only"

[[registry]]
location = "registry.example.org/team/open"
insecure = true

[[registry]]
prefix = "bad.example.org"
blocked = true

[[registry]]
prefix = "*.wild.example.org"
[[registry.mirror]]
location = "cache.example.org/wild"

[[registry]]
prefix = "docker.io"
mirror-by-digest-only = true
[[registry.mirror]]
location = "hub.example.org"

[[registry]]
prefix = "hub-user.example.org"
location = "docker.io"

[aliases]
"fedora" = "elsewhere.example.org/fedora"
"""


@pytest.mark.parametrize(
    ("text", "urls"),
    [
        (
            "registry.example.org/team/app:v1",
            [
                "*https://m1.example.org/x/app",
                "*https://m3.example.org/app",
                "https://inner.example.org:5000/mirror/team/app",
            ],
        ),
        (
            f"registry.example.org/team/app:v1@{DIGEST}",
            [
                "*https://m1.example.org/x/app",
                "*https://m2.example.org/app?",
                "*http://m2.example.org/app",
                "https://inner.example.org:5000/mirror/team/app",
            ],
        ),
        (
            "registry.example.org/team/open/app",
            ["https://registry.example.org/team/open/app?", "http://registry.example.org/team/open/app"],
        ),
        (
            "registry.example.org/team/open",
            ["https://registry.example.org/team/open?", "http://registry.example.org/team/open"],
        ),
        ("registry.example.org/team/opener", ["*https://m1.example.org/x/opener"]),
        ("registry.example.org/teams/app", ["https://registry.example.org/teams/app"]),
        ("registry.example.org:5000/team/app", ["https://registry.example.org:5000/team/app"]),
        (
            "a.b.wild.example.org/app",
            ["*https://cache.example.org/wild/app", "https://a.b.wild.example.org/app"],
        ),
        ("wild.example.org/app", ["https://wild.example.org/app"]),
        ("notwild.example.org/app", ["https://notwild.example.org/app"]),
        ("busybox", ["https://registry-1.docker.io/library/busybox"]),
        (
            f"busybox@{DIGEST}",
            ["*https://hub.example.org/library/busybox", "https://registry-1.docker.io/library/busybox"],
        ),
        ("hub-user.example.org/busybox", ["https://registry-1.docker.io/library/busybox"]),
        ("fedora", ["https://registry-1.docker.io/library/fedora"]),
    ],
)
def test_prefixes_locations_and_mirrors(host: Host, text: str, urls: list[str]) -> None:
    """The longest prefix wins; mirrors come first where they serve a tag or a digest; aliases are not read."""
    host.conf(CONF)
    assert host.urls(text)[: len(urls)] == urls


@pytest.mark.parametrize("text", ["bad.example.org/a", f"bad.example.org/a/b@{DIGEST}"])
def test_blocked_registries_are_refused_with_the_file(host: Host, text: str) -> None:
    """What registries.conf forbids is a typed error that says where it is forbidden."""
    path = host.conf(CONF)
    with pytest.raises(SandboxError, match=str(path)) as caught:
        host.load().endpoints(registry(text))
    assert caught.value.reason == "registry_blocked"


def test_a_short_name_never_goes_to_a_registry_it_was_not_written_for(host: Host) -> None:
    """Where only others than docker.io are listed, a name without a registry is refused with both full names."""
    host.conf('unqualified-search-registries = ["registry.example.org"]')
    settings = host.load()
    with pytest.raises(InvalidRequest, match=r"registry\.example\.org/busybox or docker\.io/library/busybox"):
        settings.endpoints(registry("busybox:1"))
    assert settings.endpoints(registry("docker.io/busybox"))


def test_hosts_named_insecure(host: Host) -> None:
    """TLS without verification first, then plain HTTP; other hosts and ports stay as they are."""
    assert host.urls("a.example.org:80/x", "A.example.org:80") == [
        "https://a.example.org:80/x?",
        "http://a.example.org:80/x",
    ]
    assert host.urls("a.example.org/x", "a.example.org:80") == ["https://a.example.org/x"]
    with pytest.raises(InvalidRequest, match="insecure"):
        host.load("http://a.example.org")


def test_the_users_file_replaces_the_systems(host: Host) -> None:
    """The user's files alone, or the system's with both drop-in directories, the later over the earlier."""
    host.conf('[[registry]]\nprefix = "a.example.org"\nlocation = "system.example.org"')
    host.write(
        "etc/containers/registries.conf.d/10.conf", '[[registry]]\nprefix="b.example.org"\nlocation="b1.example.org"'
    )
    host.write(
        "etc/containers/registries.conf.d/20.conf", '[[registry]]\nprefix="b.example.org"\nlocation="b2.example.org"'
    )
    host.write("etc/containers/registries.conf.d/30.conf.off", "not TOML")
    host.write(
        "home/user/.config/containers/registries.conf.d/u.conf",
        '[[registry]]\nprefix="c.example.org"\nlocation="c1.example.org"',
    )
    assert [host.urls(f"{name}.example.org/x")[0] for name in "abc"] == [
        "https://system.example.org/x",
        "https://b2.example.org/x",
        "https://c1.example.org/x",
    ]
    host.write("home/user/.config/containers/registries.conf", '[[registry]]\nprefix="a.example.org"\nblocked=true')
    assert host.urls("b.example.org/x") == ["https://b.example.org/x"]
    assert host.urls("c.example.org/x") == ["https://c1.example.org/x"]
    with pytest.raises(SandboxError, match="blocked"):
        host.urls("a.example.org/x")


def test_containers_registries_conf(host: Host) -> None:
    """The variable names the one main file, which has to be there."""
    host.conf('[[registry]]\nprefix = "a.example.org"\nblocked = true')
    other = host.write("other.conf", '[[registry]]\nprefix = "a.example.org"\nlocation = "o.example.org"')
    settings = host.load(CONTAINERS_REGISTRIES_CONF=str(other))
    assert settings.endpoints(registry("a.example.org/x")) == (Endpoint("o.example.org", "x"),)
    with pytest.raises(InvalidRequest, match="CONTAINERS_REGISTRIES_CONF"):
        host.load(CONTAINERS_REGISTRIES_CONF="/nowhere")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[[registry", ""),
        ("a = \x01", ""),
        ("[registries.search]\nregistries = []", "registries"),
        ("registry = 1", "registry"),
        ("[[registry]]", r"registry\[0\].prefix"),
        ('[[registry]]\nprefix = "a.example.org"\nblcoked = true', r"registry\[0\].blcoked"),
        ('[[registry]]\nprefix = "a.example.org"\nblocked = "yes"', r"registry\[0\].blocked"),
        ('[[registry]]\nprefix = "a.example.org"\ninsecure = 1', r"registry\[0\].insecure"),
        ('[[registry]]\nprefix = "https://a.example.org"', r"registry\[0\].prefix"),
        ('[[registry]]\nprefix = "a.example.org/x:tag"', r"registry\[0\].prefix"),
        ('[[registry]]\nprefix = "a.*.example.org"', r"registry\[0\].prefix"),
        ('[[registry]]\nprefix = "*.example.org/x"', r"registry\[0\].prefix"),
        ('[[registry]]\nprefix = "a.example.org"\nlocation = "B C"', r"registry\[0\].location"),
        ("[[registry]]\nprefix = 7", r"registry\[0\].prefix"),
        ('[[registry]]\nprefix = "a.b"\n[[registry]]\nlocation = "a.b"', r"registry\[1\].prefix"),
        ('[[registry]]\nprefix = "a.b"\nmirror = "x"', r"registry\[0\].mirror"),
        ('[[registry]]\nprefix = "a.b"\n[[registry.mirror]]\ninsecure = true', r"registry\[0\].mirror\[0\].location"),
        ('[[registry]]\nprefix = "a.b"\n[[registry.mirror]]\nlocation = "m.b"\nx = 1', r"registry\[0\].mirror\[0\].x"),
        (
            '[[registry]]\nprefix = "a.b"\n[[registry.mirror]]\nlocation = "m.b"\npull-from-mirror = "some"',
            r"pull-from-mirror",
        ),
        (
            '[[registry]]\nprefix = "a.b"\nmirror-by-digest-only = true\n'
            '[[registry.mirror]]\nlocation = "m.b"\npull-from-mirror = "all"',
            r"pull-from-mirror",
        ),
        ('unqualified-search-registries = "docker.io"', "unqualified-search-registries"),
        ("credential-helpers = [1]", "credential-helpers"),
    ],
)
def test_a_malformed_file_is_named_with_its_key(host: Host, text: str, named: str) -> None:
    """None of a configuration with a mistake is used; the message names file and key."""
    path = host.conf(text)
    with pytest.raises(InvalidRequest, match=f"{path}.*{named}"):
        host.load()


@pytest.mark.parametrize(
    ("no_proxy", "url", "proxied"),
    [
        ("", "https://a.example.org/x", True),
        ("", "https://localhost/x", False),
        ("", "https://127.3.2.1:5000/x", False),
        ("", "https://[::1]:5000/x", False),
        ("*", "https://a.example.org/x", False),
        ("example.org", "https://a.example.org/x", False),
        ("example.org", "https://example.org/x", False),
        ("example.org", "https://notexample.org/x", True),
        ("EXAMPLE.org", "https://A.Example.ORG/x", False),
        (".example.org", "https://a.example.org/x", False),
        (".example.org", "https://example.org/x", True),
        ("*.example.org", "https://a.example.org/x", False),
        ("a.example.org:8443", "https://a.example.org:8443/x", False),
        ("a.example.org:8443", "https://a.example.org/x", True),
        ("a.example.org:443", "https://a.example.org/x", False),
        ("192.0.2.0/24", "https://192.0.2.77/x", False),
        ("192.0.2.0/24", "https://192.0.3.77/x", True),
        ("192.0.2.7", "https://192.0.2.7:5000/x", False),
        ("2001:db8::/32", "https://[2001:db8::1]/x", False),
        ("[2001:db8::1]:443", "https://[2001:db8::1]/x", False),
        ("[2001:db8::1]:444", "https://[2001:db8::1]/x", True),
        ("x, , b.example.org  a.example.org", "https://a.example.org/x", False),
    ],
)
def test_no_proxy(host: Host, no_proxy: str, url: str, proxied: bool) -> None:
    """Names with those below them, ports, addresses, networks, a star; loopback never goes through a proxy."""
    proxies = host.load(HTTPS_PROXY="http://proxy.example:3128", NO_PROXY=no_proxy).proxies
    assert proxies.for_url(url) == ({"https": "http://proxy.example:3128"} if proxied else {})


def test_proxies_by_scheme_and_in_either_case(host: Host) -> None:
    """Each scheme has its proxy; lower-case names count where the others are not set; a bare host is http."""
    proxies = host.load(https_proxy="p.example:1", HTTP_PROXY="https://q.example:2", http_proxy="http://r").proxies
    assert proxies.for_url("https://a.example.org") == {"https": "http://p.example:1"}
    assert proxies.for_url("http://a.example.org") == {"http": "https://q.example:2"}
    assert host.load(no_proxy="a.example.org").proxies.for_url("https://a.example.org") == {}


def test_a_proxys_password_is_not_shown(host: Host) -> None:
    """Neither in the repr nor in the error for a proxy that can't be used."""
    assert "canary" not in repr(host.load(HTTPS_PROXY="http://me:canary@p.example:1"))
    with pytest.raises(InvalidRequest, match="HTTPS_PROXY") as caught:
        host.load(HTTPS_PROXY="socks5://me:canary@p.example:1")
    assert "canary" not in str(caught.value)


def test_authorities_are_the_systems_and_those_of_the_host(host: Host) -> None:
    """The bundle for a host holds both, is a file that TLS libraries read, and is made once."""
    ours, system = trustme.CA(), trustme.CA()
    host.write("etc/ssl/certs/ca-certificates.crt", system.cert_pem.bytes().decode())
    host.write("etc/docker/certs.d/r.example.org:5000/ca.crt", ours.cert_pem.bytes().decode())
    settings = host.load()
    bundle = settings.tls("r.example.org:5000").ca
    assert bundle is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(bundle)
    assert len(context.get_ca_certs()) == 2
    assert settings.tls("r.example.org:5000").ca == bundle
    assert settings.tls("other.example.org").ca == str(host.root / "etc/ssl/certs/ca-certificates.crt")
    for odd in ("../r.example.org:5000", "..", "", "a/b"):
        assert settings.tls(odd).ca == settings.tls("other.example.org").ca


def test_client_certificates(host: Host) -> None:
    """A .cert and its .key are shown to that host; half a pair or a wrong key is an error that names the file."""
    issued = trustme.CA().issue_cert("client")
    folder = "etc/containers/certs.d/r.example.org"
    cert = host.write(f"{folder}/client.cert", issued.cert_chain_pems[0].bytes().decode())
    with pytest.raises(InvalidRequest, match=r"client\.cert.*client\.key"):
        host.load().tls("r.example.org")
    key = host.write(f"{folder}/client.key", issued.private_key_pem.bytes().decode())
    files = host.load().tls("r.example.org")
    assert (files.cert, files.key) == (str(cert), str(key))
    key.write_bytes(trustme.CA().issue_cert("client").private_key_pem.bytes())
    with pytest.raises(InvalidRequest, match=r"client\.cert"):
        host.load().tls("r.example.org")
    cert.unlink()
    with pytest.raises(InvalidRequest, match=r"client\.key"):
        host.load().tls("r.example.org")


def test_an_authority_that_is_none_is_named(host: Host) -> None:
    """A .crt without a certificate would leave the registry refused for no reason anybody sees."""
    path = host.write("etc/containers/certs.d/r.example.org/ca.crt", "nothing")
    with pytest.raises(InvalidRequest, match=str(path)):
        host.load().tls("r.example.org")


def test_the_users_certificates_come_first(host: Host) -> None:
    """The first certs.d that knows the host is the one that is read: user's, containers', docker's."""
    for place in ("etc/docker", "etc/containers", "home/user/.config/containers"):
        (host.root / place / "certs.d/r.example.org").mkdir(parents=True)
        found = host.load().certificates.entry("r.example.org")
        assert found == host.root / place / "certs.d/r.example.org"


def test_nothing_comes_from_the_environment_of_this_process(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    """An environment that is given is the only one that is read, then and later."""
    monkeypatch.setenv("HTTPS_PROXY", "http://other.example:1")
    monkeypatch.setenv("REGISTRY_AUTH_FILE", "/nowhere")
    monkeypatch.setenv("CONTAINERS_REGISTRIES_CONF", "/nowhere")
    settings = host.load()
    assert settings.proxies.https == ""
    assert settings.credentials("r.example.org", "x") is None


def test_the_settings_of_this_machine_can_be_read() -> None:
    """Whatever is configured here gives endpoints for a registry, or an error of ours."""
    try:
        assert RegistrySettings.load().endpoints(registry("registry.example.org/app"))
    except ForgeyardError:
        pytest.skip("this host's registry configuration is not usable")
