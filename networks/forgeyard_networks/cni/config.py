"""Network configurations: what an operator wrote, checked, and what each plugin is told of it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Self

from forgeyard_model.errors import InvalidRequest
from forgeyard_networks.cni.attachment import check_name

SPOKEN: Final = ("0.3.0", "0.3.1", "0.4.0", "1.0.0", "1.1.0")
"""Versions of the specification that we speak, oldest first."""
_SHOWN: Final = 80


@dataclass(frozen=True, slots=True)
class PluginConfig:
    """One plugin of a chain. `raw`: all of it as written, unknown keys too."""

    kind: str
    raw: Mapping[str, Any]
    capabilities: frozenset[str]

    @property
    def ipam(self) -> Mapping[str, Any]:
        """Its section on addresses; empty when it has none."""
        found = self.raw.get("ipam")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, slots=True)
class Conflist:
    """One network: a chain of plugins.

    :ivar version: the one spoken to the plugins, out of `versions` (oldest first), which are those both sides know.
    :ivar raw: the whole document as written, of one plugin or of a list.
    :ivar source: the file it is from, for messages.
    """

    name: str
    version: str
    versions: tuple[str, ...]
    plugins: tuple[PluginConfig, ...]
    disable_check: bool
    disable_gc: bool
    raw: Mapping[str, Any]
    source: str

    @property
    def capabilities(self) -> frozenset[str]:
        """What a `runtimeConfig` can hold for this network."""
        return frozenset().union(*(plugin.capabilities for plugin in self.plugins))

    @property
    def programs(self) -> tuple[str, ...]:
        """The plugins that get executed, those for addresses too; each once."""
        named = [name for plugin in self.plugins for name in (plugin.kind, plugin.ipam.get("type"))]
        return tuple(dict.fromkeys(name for name in named if isinstance(name, str) and name))

    def speaks(self, version: str) -> bool:
        """Whether the version in use is `version` or newer."""
        return SPOKEN.index(self.version) >= SPOKEN.index(version)

    def at(self, version: str) -> Self:
        """The same, spoken in `version`."""
        return replace(self, version=version)

    def document(self, plugin: PluginConfig, runtime_config: Mapping[str, Any], **more: Any) -> dict[str, Any]:
        """What `plugin` gets on its stdin (specification, "Deriving execution configuration").

        :param runtime_config: by capability; only those that the plugin declares are passed on.
        :param more: further keys; None leaves one out.
        """
        made = {key: value for key, value in plugin.raw.items() if key != "capabilities"}
        made |= {"name": self.name, "cniVersion": self.version}
        granted = {key: value for key, value in runtime_config.items() if key in plugin.capabilities}
        if granted:
            made["runtimeConfig"] = granted
        return made | {key: value for key, value in more.items() if value is not None}


def parse_conflist(text: str | bytes, source: str) -> Conflist:
    """Read a configuration, of a list or of one plugin.

    :param source: the file, for messages.
    :raises InvalidRequest: one line with file, key, value and cure.
    """
    try:
        raw = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(_field(source, "JSON"), str(error), "correct the file") from error
    return conflist_of(raw, source)


def conflist_of(raw: object, source: str) -> Conflist:
    """A configuration that is JSON already.

    :raises InvalidRequest: as `parse_conflist`.
    """
    from pydantic import ValidationError

    from forgeyard_networks.cni.wire import ListModel

    if not isinstance(raw, dict):
        raise InvalidRequest(_field(source, "JSON"), type(raw).__name__, "write one object in braces")
    listed = raw if "plugins" in raw else {**raw, "plugins": [raw]}
    try:
        model = ListModel.model_validate(listed)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(str(part) for part in first["loc"])
        shown = "nothing" if first["type"] == "missing" else first["input"]
        raise InvalidRequest(_field(source, key), shown, first["msg"][0].lower() + first["msg"][1:]) from error
    check_name(_field(source, "name"), model.name)
    versions = _versions(model.cniVersion, model.cniVersions, source)
    plugins = tuple(
        PluginConfig(plugin.type, entry, frozenset(name for name, on in (plugin.capabilities or {}).items() if on))
        for plugin, entry in zip(model.plugins, listed["plugins"], strict=True)
    )
    return Conflist(model.name, versions[-1], versions, plugins, model.disableCheck, model.disableGC, raw, source)


def _versions(one: str, several: Sequence[str] | None, source: str) -> tuple[str, ...]:
    offered = {*([one] if one else []), *(several or ())}
    common = tuple(version for version in SPOKEN if version in offered)
    if not common:
        cure = f"write one of {', '.join(SPOKEN)}"
        raise InvalidRequest(_field(source, "cniVersion"), ", ".join(sorted(offered)), cure)
    return common


def _field(source: str, key: str) -> str:
    """File and key; of a long path its end, which is what tells files apart."""
    where = source if len(source) <= _SHOWN else f"...{source[-_SHOWN:]}"
    return f"{where}: {key}"
