"""Which daemon is meant: a setting, DOCKER_HOST, a context, or the usual socket, in that order."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.endpoints import local_socket, refused_address

DEFAULT_HOST: Final = "unix:///var/run/docker.sock"
_LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True)
class Tls:
    """Files of a client's certificate, as Docker's own client names them."""

    directory: Path
    verify: bool = True

    def file(self, name: str) -> str | None:
        """Path of ``ca``, ``cert`` or ``key``; None when there is none."""
        path = self.directory / f"{name}.pem"
        return str(path) if path.is_file() else None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where the daemon listens. `origin` says what named it, for messages."""

    host: str
    origin: str
    tls: Tls | None = None

    @property
    def socket(self) -> str:
        """Path of its Unix socket; empty for TCP."""
        return self.host.removeprefix("unix://") if self.host.startswith("unix://") else ""


def find_endpoint(host: str, context: str, environ: Mapping[str, str]) -> Endpoint:
    """The daemon that `host`, `context` or the environment names.

    Only one on this machine can serve: its containers open FIFOs and mounts of ours, and are held by pidfd.

    :raises ExecutorError: UNSUPPORTED for a daemon elsewhere, and for a configuration that names none.
    """
    endpoint = _named(host, context, environ)
    scheme, _, _ = endpoint.host.partition("://")
    if scheme == "tcp":
        _check_tcp(endpoint)
        return endpoint
    if scheme in ("ssh", "http", "https", "npipe", "fd"):
        raise _not_local(endpoint)
    return replace(endpoint, host=f"unix://{local_socket('docker', endpoint.host, endpoint.origin)}")


def _check_tcp(endpoint: Endpoint) -> None:
    """A loopback address with a port, and certificates that are there if any are named."""
    try:
        address = urlsplit(endpoint.host)
        name, port = address.hostname, address.port
    except ValueError:
        name, port = "", None
    if name and name not in _LOOPBACK:
        raise _not_local(endpoint)
    if not name or not port or address.path.strip("/"):
        brief = f"docker address {endpoint.host!r} is no tcp://127.0.0.1:PORT"
        raise refused_address("docker", brief, "give that, or unix:///PATH", endpoint.origin)
    if endpoint.tls is not None and not endpoint.tls.directory.is_dir():
        raise _unsupported(
            "docker_certificates",
            f"there is no directory {endpoint.tls.directory} with certificates for {endpoint.host}",
            "set DOCKER_CERT_PATH to the directory of ca.pem, cert.pem and key.pem",
        )


def _not_local(endpoint: Endpoint) -> ExecutorError:
    return _unsupported(
        "docker_not_local",
        f"the Docker daemon at {endpoint.host} is not on this machine",
        f"{endpoint.origin} names it; give a unix:// address",
    )


def _named(host: str, context: str, environ: Mapping[str, str]) -> Endpoint:
    if host:
        return Endpoint(host, "the configuration", _environment_tls(environ) if host.startswith("tcp:") else None)
    config = Path(environ.get("DOCKER_CONFIG") or Path(environ.get("HOME", "/root")) / ".docker")
    if context:
        return _from_context(context, config, "the configuration")
    if environ.get("DOCKER_HOST"):
        return Endpoint(environ["DOCKER_HOST"], "DOCKER_HOST", _environment_tls(environ))
    if environ.get("DOCKER_CONTEXT"):
        return _from_context(environ["DOCKER_CONTEXT"], config, "DOCKER_CONTEXT")
    current = _read(config / "config.json").get("currentContext")
    if isinstance(current, str) and current:
        return _from_context(current, config, str(config / "config.json"))
    return Endpoint(DEFAULT_HOST, "Docker's default")


def _environment_tls(environ: Mapping[str, str]) -> Tls | None:
    verify = bool(environ.get("DOCKER_TLS_VERIFY"))
    path = environ.get("DOCKER_CERT_PATH", "")
    if not path and not verify:
        return None
    return Tls(Path(path) if path else Path(environ.get("HOME", "/root")) / ".docker", verify)


def _from_context(name: str, config: Path, origin: str) -> Endpoint:
    if name == "default":
        return Endpoint(DEFAULT_HOST, "the context default")
    # Its directory is named by a digest, so that a context may have any name.
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = _read(config / "contexts/meta" / digest / "meta.json")
    endpoint = meta.get("Endpoints", {}).get("docker", {}) if isinstance(meta.get("Endpoints"), dict) else {}
    host = endpoint.get("Host") if isinstance(endpoint, dict) else None
    if not isinstance(host, str) or not host:
        raise _unsupported(
            "docker_context",
            f"there is no Docker context {name!r} in {config}",
            f"{origin} names it; `docker context ls`",
        )
    certificates = config / "contexts/tls" / digest / "docker"
    tls = Tls(certificates, not endpoint.get("SkipTLSVerify", False)) if certificates.is_dir() else None
    return Endpoint(host, f"the context {name}", tls)


def _read(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unreadable(path, str(error)) from error
    if not isinstance(found, dict):
        raise _unreadable(path, "it holds no JSON object")
    return found


def _unreadable(path: Path, details: str) -> ExecutorError:
    return _unsupported("docker_config", f"{path} can't be read", "repair it, or set DOCKER_HOST", details=details)


def _unsupported(reason: str, brief: str, resolution: str, *, details: str = "") -> ExecutorError:
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, details=details, resolution=resolution)


def environment() -> Mapping[str, str]:
    """The environment that names a daemon: this process's own."""
    return os.environ
