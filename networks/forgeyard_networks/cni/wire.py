"""What configurations and plugins may say, as pydantic sees it. Imported only where something is parsed."""

# ruff: noqa: N815  the names are the specification's

from __future__ import annotations

from ipaddress import (
    IPv4Address,
    IPv4Interface,
    IPv4Network,
    IPv6Address,
    IPv6Interface,
    IPv6Network,
    ip_network,
)
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, Field, StringConstraints

Version = Annotated[str, StringConstraints(pattern=r"^\d{1,4}\.\d{1,4}\.\d{1,4}$")]
Short = Annotated[str, StringConstraints(max_length=255)]
Kind = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,99}$")]
_MANY = 1000


def _or_empty(value: object) -> object:
    """Go writes null for a list with nothing in it."""
    return [] if value is None else value


def _or_none(value: object) -> object:
    return None if value == "" else value


def _network(value: object) -> object:
    return ip_network(value, strict=False) if isinstance(value, str) else value


class PluginModel(BaseModel):
    """One plugin of a list."""

    type: Kind
    capabilities: dict[str, bool] | None = None
    ipam: dict[str, Any] | None = None


class ListModel(BaseModel):
    """A network configuration list."""

    name: str
    cniVersion: str = ""
    cniVersions: list[str] | None = Field(default=None, max_length=_MANY)
    disableCheck: bool = False  # bool also reads the strings "true" and "false", as files have them
    disableGC: bool = False
    plugins: list[PluginModel] = Field(min_length=1, max_length=64)


class ErrorModel(BaseModel):
    """What a plugin prints when it fails."""

    code: int = Field(ge=0, le=1 << 32)
    msg: str = ""
    details: str | None = ""


class VersionModel(BaseModel):
    """What VERSION prints."""

    supportedVersions: list[Version] = Field(max_length=_MANY)


class InterfaceModel(BaseModel):
    """An interface of a result."""

    name: Short
    mac: Short = ""
    sandbox: Annotated[str, StringConstraints(max_length=4096)] = ""
    mtu: int = 0


class AddressModel(BaseModel):
    """An address of a result."""

    address: IPv4Interface | IPv6Interface
    gateway: Annotated[IPv4Address | IPv6Address | None, BeforeValidator(_or_none)] = None
    interface: int | None = Field(default=None, ge=0)


class RouteModel(BaseModel):
    """A route of a result."""

    dst: Annotated[IPv4Network | IPv6Network, BeforeValidator(_network)]
    gw: Annotated[IPv4Address | IPv6Address | None, BeforeValidator(_or_none)] = None


_Texts = Annotated[list[Short], BeforeValidator(_or_empty), Field(max_length=_MANY)]


class DnsModel(BaseModel):
    """What a network knows about names."""

    nameservers: _Texts = []
    domain: Short = ""
    search: _Texts = []
    options: _Texts = []


class ResultModel(BaseModel):
    """What ADD prints."""

    interfaces: Annotated[list[InterfaceModel], BeforeValidator(_or_empty), Field(max_length=_MANY)] = []
    ips: Annotated[list[AddressModel], BeforeValidator(_or_empty), Field(max_length=_MANY)] = []
    routes: Annotated[list[RouteModel], BeforeValidator(_or_empty), Field(max_length=_MANY)] = []
    dns: Annotated[DnsModel, BeforeValidator(lambda value: {} if value is None else value)] = DnsModel()
