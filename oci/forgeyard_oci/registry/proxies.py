"""Which proxy a request goes through: the executor's own variables, never a job's."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final
from urllib.parse import urlsplit

from forgeyard_model.errors import InvalidRequest

_PORTS: Final = {"http": 80, "https": 443}
_BETWEEN: Final = re.compile(r"[\s,]+")
_LOOPBACK_NAME: Final = "localhost"

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


def is_loopback(host: str) -> bool:
    """Whether `host`, without a port, is this machine: localhost, 127.0.0.0/8 or ::1."""
    name = host.strip("[]").rstrip(".").lower()
    if name == _LOOPBACK_NAME:
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True, slots=True)
class Proxies:
    """Proxies by the scheme of the request, "" for none. They may hold a password, so they are not shown."""

    https: str = field(default="", repr=False)
    http: str = field(default="", repr=False)
    no_proxy: tuple[str, ...] = ()

    @classmethod
    def load(cls, environ: Mapping[str, str]) -> Proxies:
        """Read HTTPS_PROXY, HTTP_PROXY and NO_PROXY; the lower-case names where those are not set.

        :raises InvalidRequest: for a proxy that is no http or https URL. Its value is not shown.
        """
        return cls(
            _proxy("HTTPS_PROXY", environ),
            _proxy("HTTP_PROXY", environ),
            tuple(word for word in _BETWEEN.split(_value("NO_PROXY", environ).lower()) if word),
        )

    def for_url(self, url: str) -> dict[str, str]:
        """What requests takes as `proxies` for `url`; empty when it is to be reached directly.

        :raises ValueError: for a URL that can't be read.
        """
        parts = urlsplit(url)
        proxy = self.https if parts.scheme == "https" else self.http
        host = (parts.hostname or "").rstrip(".")
        port = parts.port or _PORTS.get(parts.scheme, 0)
        if not proxy or is_loopback(host) or any(_spared(rule, host, port) for rule in self.no_proxy):
            return {}
        return {parts.scheme: proxy}


def _value(name: str, environ: Mapping[str, str]) -> str:
    return environ.get(name) or environ.get(name.lower()) or ""


def _proxy(name: str, environ: Mapping[str, str]) -> str:
    text = _value(name, environ).strip()
    if not text:
        return ""
    url = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(url)
        usable = parts.scheme in _PORTS and bool(parts.hostname) and parts.port != 0
    except ValueError:
        usable = False
    if not usable:
        raise InvalidRequest(name, "(not shown)", "write http://[USER:PASSWORD@]HOST:PORT, or unset it")
    return url


def _spared(rule: str, host: str, port: int) -> bool:
    """Whether one word of NO_PROXY covers a host: ``*``, an address, a network, or a name with those below it."""
    if rule == "*":
        return True
    if (network := _network(rule)) is not None:
        return _inside(host, network)
    name, wanted = _name_and_port(rule)
    if wanted is not None and wanted != port:
        return False
    if (network := _network(name.strip("[]"))) is not None:
        return _inside(host, network)
    suffix = name.removeprefix("*")
    if suffix.startswith("."):
        return host.endswith(suffix)
    return host == suffix or host.endswith(f".{suffix}")


def _network(text: str) -> Network | None:
    try:
        return ipaddress.ip_network(text, strict=False)
    except ValueError:
        return None


def _inside(host: str, network: Network) -> bool:
    try:
        return ipaddress.ip_address(host) in network
    except ValueError:
        return False


def _name_and_port(rule: str) -> tuple[str, int | None]:
    name, colon, port = rule.rpartition(":")
    if colon and port.isascii() and port.isdigit() and (":" not in name or name.endswith("]")):
        return name, int(port[:6])
    return rule, None
