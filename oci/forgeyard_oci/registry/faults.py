"""How trouble with a registry becomes one of our errors. Queries of URLs, which may be signed, are never shown."""

from __future__ import annotations

import json
import re
import socket
import ssl
from collections.abc import Iterator
from typing import Final
from urllib.parse import urlsplit

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError
from forgeyard_oci.image_errors import refused

_CODE: Final = re.compile(r"[A-Z][A-Z0-9_]{1,39}\Z")


def shown(url: str) -> str:
    """A URL for messages: without user, query or fragment, and not endless."""
    try:
        parts = urlsplit(url)
        where = (parts.hostname or "") + (f":{parts.port}" if parts.port else "")
    except ValueError:
        return "an address that can't be read"
    return ascii(f"{parts.scheme}://{where}{parts.path}"[:200])[1:-1]


def failure(reason: str, brief: str, *, details: str = "", resolution: str = "") -> ExecutorError:
    """What the registry or the way to it did; the same request may work later."""
    return ExecutorError(ExecutorErrorKind.IO_FAILED, reason, brief, details=details, resolution=resolution)


def denied(host: str, what: str, status: int, code: str) -> SandboxError:
    """The registry knows who asks, or that nobody said, and won't give it."""
    return refused(
        "auth_denied",
        f"registry {host} denies access to {what}",
        details=_status(status, code),
        resolution="log in to that registry, and check the name: many registries deny what does not exist",
    )


def not_found(host: str, what: str, code: str) -> SandboxError:
    """The registry has no such image, tag or blob."""
    return refused(
        "not_found", f"registry {host} has no {what}", details=_status(404, code), resolution="check name and tag"
    )


def rate_limited(host: str, told: float | None, code: str) -> ExecutorError:
    """Too many requests: of this host, this account or this address."""
    wait = "it names no wait" if told is None else f"it asks to wait {told:.0f} s"
    return failure(
        "rate_limited",
        f"registry {host} limits requests",
        details=f"{_status(429, code)}; {wait}",
        resolution="try again later, log in to that registry, or configure a mirror",
    )


def broken(host: str, what: str, status: int, code: str) -> ExecutorError:
    """An answer that makes no sense here: a server error, or a status nobody expects."""
    return failure("registry_error", f"registry {host} failed on {what}", details=_status(status, code))


def unreachable(host: str, error: BaseException) -> ExecutorError:
    """No connection, or one that broke before there was an answer."""
    return failure("registry_unreachable", f"registry {host} can't be reached", details=why(error))


def bad_certificate(host: str, error: ssl.SSLCertVerificationError) -> ExecutorError:
    """The registry's certificate is not one we trust for that name."""
    return failure(
        "registry_tls",
        f"registry {host} has a certificate that can't be verified",
        details=error.verify_message or "verification failed",
        resolution=f"put the certificate of its authority into certs.d/{host}/ca.crt",
    )


def no_tls(host: str) -> ExecutorError:
    """Something answers there, but not with TLS."""
    return failure(
        "registry_tls",
        f"registry {host} does not speak TLS",
        resolution="if it is meant to be plain HTTP, configure it as insecure",
    )


def why(error: BaseException) -> str:
    """The cause in the system's own words; never the text of a library, which may hold an address with secrets."""
    for cause in causes(error):
        if isinstance(cause, TimeoutError):
            return "timed out"
        if isinstance(cause, socket.gaierror):
            return "the name can't be resolved"
        if isinstance(cause, OSError) and cause.strerror and not isinstance(cause, ssl.SSLError):
            return cause.strerror
    for cause in causes(error):
        if type(cause).__name__ in ("ReadTimeoutError", "ConnectTimeoutError"):
            return "timed out"
        if isinstance(cause, ssl.SSLError):
            return f"TLS: {cause.reason or 'connection closed'}"
    return "the connection was closed"


def causes(error: BaseException) -> Iterator[BaseException]:
    """An exception and what lies behind it; libraries keep the cause in arguments, attributes or the chain."""
    seen: list[BaseException] = []
    waiting: list[object] = [error]
    while waiting:
        item = waiting.pop(0)
        if not isinstance(item, BaseException) or any(item is other for other in seen):
            continue
        seen.append(item)
        yield item
        waiting += [*item.args, getattr(item, "reason", None), item.__cause__, item.__context__]


def error_code(body: bytes) -> str:
    """The first code of a registry's error document (distribution spec, error codes), "" without a plain one.

    Its message is text from outside and stays out of ours.
    """
    try:
        code = json.loads(body)["errors"][0]["code"]
    except (ValueError, KeyError, IndexError, TypeError, RecursionError):
        return ""
    return code if isinstance(code, str) and _CODE.match(code) else ""


def _status(status: int, code: str) -> str:
    return f"HTTP {status}" + (f" {code}" if code else "")
