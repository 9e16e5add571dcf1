"""certs.d: authorities and client certificates of single registries (containers-certs.d(5), and docker's)."""

from __future__ import annotations

import os
import ssl
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_errors import host_failure
from forgeyard_oci.reference import DEFAULT_REGISTRY, is_registry_host

_SYSTEM_BUNDLES: Final = (
    "etc/ssl/certs/ca-certificates.crt",
    "etc/pki/tls/certs/ca-bundle.crt",
    "etc/pki/ca-trust/extracted/pem/tls-ca-bundle.pem",
    "etc/ssl/ca-bundle.pem",
    "etc/ssl/cert.pem",
)
_HUB: Final = (DEFAULT_REGISTRY, f"registry-1.{DEFAULT_REGISTRY}")
_MAX_BUNDLE: Final = 16 << 20


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Paths of PEM files for one host. `ca`: all authorities that are trusted; None: the HTTP library's own."""

    ca: str | None = None
    cert: str | None = None
    key: str | None = field(default=None, repr=False)


class Certificates:
    """Finds what certs.d says of a host. A combined bundle lives in memory and goes with this object.

    :param root: where ``etc`` is; ``/`` but in tests.
    """

    def __init__(self, environ: Mapping[str, str], home: Path, root: Path) -> None:
        users = Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers/certs.d")
        self._folders = (users, root / "etc/containers/certs.d", root / "etc/docker/certs.d")
        self._system = _system_bundle(environ.get("SSL_CERT_FILE"), root)
        self._found: dict[str, TlsFiles] = {}
        self._lock = threading.Lock()

    def entry(self, host: str) -> Path | None:
        """The directory of `host` (``NAME[:PORT]``) in the first certs.d that has one."""
        if not is_registry_host(host):
            return None  # hosts of URLs that a registry named end up here: no path is made of those
        names = _HUB if host in _HUB else (host,)
        return next((path for folder in self._folders for name in names if (path := folder / name).is_dir()), None)

    def files(self, host: str) -> TlsFiles:
        """The files to verify `host` with, and to show it.

        :raises InvalidRequest: for certificates that can't be used, named by file.
        :raises ExecutorError: IO_FAILED, for files that can't be read.
        """
        with self._lock:
            found = self._found.get(host)
            if found is None:
                found = self._found[host] = self._read(host)
            return found

    def _read(self, host: str) -> TlsFiles:
        folder = self.entry(host)
        if folder is None:
            return TlsFiles(self._system)
        try:
            names = sorted(os.listdir(folder))  # noqa: PTH208  names are all that is wanted
        except OSError as error:
            raise host_failure(error, "reading certs.d", str(folder)) from error
        authorities = [folder / name for name in names if name.endswith(".crt")]
        cert, key = _pair(folder, names)
        return TlsFiles(self._combined(authorities) if authorities else self._system, cert, key)

    def _combined(self, authorities: list[Path]) -> str:
        parts = [_pem(path) for path in authorities]
        system = self._system or _library_bundle()
        if system:
            parts.append(_read_file(Path(system)))
        # Memory, not a file: nothing stays behind whatever ends this process.
        fd = os.memfd_create("forgeyard-ca", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, fd)
        with os.fdopen(os.dup(fd), "wb") as file:
            file.write(b"\n".join(parts))
        return f"/proc/self/fd/{fd}"


def _pair(folder: Path, names: list[str]) -> tuple[str | None, str | None]:
    for name in names:
        stem, _, kind = name.rpartition(".")
        if kind == "cert" and f"{stem}.key" not in names:
            raise InvalidRequest(str(folder / name), "no key", f"put its key beside it, as {stem}.key")
        if kind == "key" and f"{stem}.cert" not in names:
            raise InvalidRequest(str(folder / name), "no certificate", f"put its certificate beside it, as {stem}.cert")
    certs = [name for name in names if name.endswith(".cert")]
    if len(certs) > 1:
        raise InvalidRequest(str(folder), ", ".join(certs), "keep one client certificate for a registry")
    if not certs:
        return None, None
    cert, key = folder / certs[0], folder / f"{certs[0].removesuffix('.cert')}.key"
    _check_pair(cert, key)
    return str(cert), str(key)


def _check_pair(cert: Path, key: Path) -> None:
    def no_password() -> bytes:
        raise InvalidRequest(str(key), "encrypted", "store the key without a password")

    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_cert_chain(cert, key, no_password)
    except ssl.SSLError as error:
        cure = "put a PEM certificate and the key that belongs to it there"
        raise InvalidRequest(str(cert), error.reason or "unusable", cure) from error
    except OSError as error:
        raise host_failure(error, "reading a client certificate", str(cert)) from error


def _pem(path: Path) -> bytes:
    data = _read_file(path)
    try:
        # The library would skip what is no certificate, and the registry would then be refused without a reason.
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cadata=data.decode("ascii", "replace"))
    except (ssl.SSLError, ValueError) as error:
        raise InvalidRequest(str(path), "unusable", "put certificates in PEM form there") from error
    return data


def _read_file(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BUNDLE + 1)
    except OSError as error:
        raise host_failure(error, "reading certificates", str(path)) from error
    if len(data) > _MAX_BUNDLE:
        raise InvalidRequest(str(path), f"over {_MAX_BUNDLE} bytes", "keep certificates alone in this file")
    return data


def _system_bundle(named: str | None, root: Path) -> str | None:
    if named:
        if not Path(named).is_file():
            raise InvalidRequest("SSL_CERT_FILE", named, "name a file that is there, or unset it")
        return named
    return next((str(root / name) for name in _SYSTEM_BUNDLES if (root / name).is_file()), None)


def _library_bundle() -> str | None:
    from requests.utils import DEFAULT_CA_BUNDLE_PATH

    return DEFAULT_CA_BUNDLE_PATH if Path(DEFAULT_CA_BUNDLE_PATH).is_file() else None
