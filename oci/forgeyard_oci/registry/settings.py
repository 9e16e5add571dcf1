"""How registries are reached: endpoints, certificates, proxies and credentials of this executor."""

from __future__ import annotations

import os
import pwd
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_errors import registry_blocked
from forgeyard_oci.reference import DEFAULT_REGISTRY, RegistryReference, canonical_registry, is_registry_host, official
from forgeyard_oci.registry.certs import Certificates, TlsFiles
from forgeyard_oci.registry.credential_helpers import Credentials
from forgeyard_oci.registry.credentials import CredentialSources
from forgeyard_oci.registry.proxies import Proxies, is_loopback
from forgeyard_oci.registry.registries_conf import RegistriesConf, load_registries

_HUB_API: Final = f"registry-1.{DEFAULT_REGISTRY}"
_ROOT: Final = Path("/")


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One place a repository can be had from.

    :param host: ``NAME[:PORT]``, by which credentials and certificates are found.
    :param repository: its name there, after mirror and location were applied.
    :param http: plain HTTP.
    :param verify: whether the certificate is checked; False only where configured insecure.
    :param mirror: not the place the reference names.
    """

    host: str
    repository: str
    http: bool = False
    verify: bool = True
    mirror: bool = False

    @property
    def base_url(self) -> str:
        """Scheme, host and port, without a slash at the end: ``https://registry.example.org``."""
        host = _HUB_API if self.host == DEFAULT_REGISTRY else self.host
        return f"{'http' if self.http else 'https'}://{host}"


@dataclass(frozen=True, slots=True)
class RegistrySettings:
    """Everything the executor's own environment and files say. Nothing of a job comes in here.

    :param insecure: hosts for which plain HTTP and unknown certificates are taken, beside those of registries.conf.
    """

    conf: RegistriesConf
    certificates: Certificates
    proxies: Proxies
    sources: CredentialSources
    insecure: frozenset[str] = frozenset()

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str] | None = None,
        *,
        home: Path | None = None,
        insecure: Sequence[str] = (),
        root: Path = _ROOT,
    ) -> RegistrySettings:
        """Read the settings of this process.

        :param environ: instead of this process's environment.
        :param home: instead of ``$HOME``.
        :param root: where ``etc`` and ``run`` are, for tests.
        :raises InvalidRequest: for a file or a variable that is not well formed.
        :raises ExecutorError: IO_FAILED, for a file that can't be read.
        """
        environ = dict(os.environ if environ is None else environ)
        home = home or _home(environ)
        conf = load_registries(environ, home, root)
        return cls(
            conf=conf,
            certificates=Certificates(environ, home, root),
            proxies=Proxies.load(environ),
            sources=CredentialSources(environ, home, root, conf.credential_helpers),
            insecure=frozenset(_host(host) for host in insecure),
        )

    def endpoints(self, ref: RegistryReference) -> tuple[Endpoint, ...]:
        """Where to ask for `ref`, in order: its mirrors, then its own place.

        An insecure host that is not loopback is there twice, with TLS first and then in plain HTTP.

        :raises SandboxError: for a registry or a namespace that registries.conf blocks.
        :raises InvalidRequest: for a name without a registry, where registries.conf lists others than docker.io.
        """
        self._check_short(ref)
        rule = self.conf.rule(ref.name)
        if rule is None:
            return self._places(ref.name, insecure=False, mirror=False)
        if rule.blocked:
            raise registry_blocked(ref.name, rule.prefix, rule.origin)
        covered = rule.matched(ref.name)
        found: list[Endpoint] = []
        for mirror in rule.mirrors:
            if mirror.serves(ref):
                place = mirror.location + ref.name[covered:]
                found += self._places(place, insecure=mirror.insecure, mirror=True)
        place = rule.location + ref.name[covered:] if rule.location else ref.name
        found += self._places(place, insecure=rule.insecure, mirror=False)
        return tuple(dict.fromkeys(found))

    def credentials(self, host: str, repository: str) -> Credentials | None:
        """The credentials for a repository of `host`, read afresh; None: none are known."""
        return self.sources.find(host, repository)

    def login_file(self) -> str:
        """The file in which a login would be written, for messages."""
        return self.sources.login_file()

    def tls(self, host: str) -> TlsFiles:
        """Certificates for ``NAME[:PORT]``."""
        return self.certificates.files(host)

    def _places(self, place: str, *, insecure: bool, mirror: bool) -> tuple[Endpoint, ...]:
        host, _, repository = place.partition("/")
        if host == DEFAULT_REGISTRY:
            repository = official(repository)
        if is_loopback(_name(host)):
            # Nothing leaves this machine. A certs.d entry says that there is TLS nonetheless.
            http = self.certificates.entry(host) is None
            return (Endpoint(host, repository, http=http, mirror=mirror),)
        secure = Endpoint(host, repository, verify=True, mirror=mirror)
        if not insecure and host not in self.insecure:
            return (secure,)
        return (
            Endpoint(host, repository, verify=False, mirror=mirror),
            Endpoint(host, repository, http=True, mirror=mirror),
        )

    def _check_short(self, ref: RegistryReference) -> None:
        search = [canonical_registry(host) for host in self.conf.search]
        if not ref.short or not search or DEFAULT_REGISTRY in search:
            return
        short = ref.repository.removeprefix("library/")
        raise InvalidRequest(
            "image",
            short,
            f"name the registry: {search[0]}/{short} or {ref.name}"
            f" ({self.conf.search_origin} does not list {DEFAULT_REGISTRY} in unqualified-search-registries)",
        )


def _name(host: str) -> str:
    """`host` without its port."""
    return host.partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _host(text: str) -> str:
    if not is_registry_host(text):
        raise InvalidRequest("insecure", text, "write HOST or HOST:PORT")
    return canonical_registry(text)


def _home(environ: Mapping[str, str]) -> Path:
    if home := environ.get("HOME"):
        return Path(home)
    try:
        return Path(pwd.getpwuid(os.getuid()).pw_dir)
    except KeyError:
        return Path("/nonexistent")  # a uid without an entry and without HOME has no files of its own
