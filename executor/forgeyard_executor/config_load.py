"""The effective configuration: flag > environment > user's file > system's file > default.

Demands of the system's file only ever get stricter: a minimum, a maximum, a list of what is allowed. A layer above
that asks for less is refused by name, since a value that is passed over in silence is how such demands get lost.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from forgeyard_executor.config_toml import ConfigProblem, InvalidConfig, Key, TomlFile, read_toml
from forgeyard_model.config import ExecutorConfig, PatternRule, UidBlock
from forgeyard_model.policy import ApprovedHostPath, IsolationLevel

if TYPE_CHECKING:
    from forgeyard_model.config_file import ConfigFile

SYSTEM_FILE = Path("/etc/forgeyard/config.toml")
PREFIX: Final = "FORGEYARD_"
_LIMITS: Final = ("cpus", "memory", "pids", "disk", "nofile", "shm", "timeout")
LIMIT_FIELDS: Final = {name: "wall_time" if name == "timeout" else name for name in _LIMITS}
_NUMBERS: Final = ("pids", "nofile")
_LISTS: Final = ("allowed_registries", "allowed_images")
_FLAGS: Final = ("exact_limits",)
_TABLES: Final = ("endpoints", "rootfs", "retention", "watermarks", "caches")
_TRUTH: Final = {"true": True, "1": True, "false": False, "0": False}
_PLAIN: Final = ("state_dir", "runtime")
"""Keys that are checked where they are used: a run with one of them in the environment need not load the schema."""
ENVIRONMENT: Final[Mapping[str, Key]] = {
    **{PREFIX + name.upper(): (name,) for name in (*_PLAIN, "minimum_isolation", *_FLAGS, *_LISTS)},
    **{
        f"{PREFIX}LIMITS_{table}_{name}".upper(): ("limits", table, name)
        for table in ("default", "maximum")
        for name in _LIMITS
    },
}
"""Variables that set a key. Lists are separated by commas."""


@dataclass(frozen=True, slots=True)
class Layer:
    """One source of values. `toml` None: the environment or flags, whose names stand in `names`."""

    file: ConfigFile
    toml: TomlFile | None = None
    names: Mapping[Key, str] | None = None

    def origin(self, key: Key) -> str:
        """Where `key` was set, as people read it."""
        if self.toml is not None:
            return f"{self.toml.shown}:{self.toml.line(key)}"
        return (self.names or {}).get(key, "")

    def problem(self, key: Key, value: str, cure: str) -> ConfigProblem:
        """A finding about `key`."""
        if self.toml is not None:
            return _problem_in(self.toml, key, value, cure)
        return ConfigProblem(self.origin(key), 0, "", value, cure)


@dataclass(frozen=True, slots=True)
class LoadedConfig:
    """The effective configuration, and what its reader should know: names that look wrong."""

    config: ExecutorConfig
    notes: tuple[str, ...] = ()


def user_file(env: Mapping[str, str]) -> Path | None:
    """The user's own file; None without a home."""
    base = env.get("XDG_CONFIG_HOME") or (f"{env['HOME']}/.config" if env.get("HOME") else "")
    # As the base directory specification has it: a relative one is no place.
    return Path(base, "forgeyard", "config.toml") if base.startswith("/") else None


def load_config(
    *,
    flags: Mapping[str, str] | None = None,
    env: Mapping[str, str] | None = None,
    system: Path | None = None,
    user: Path | None = None,
) -> LoadedConfig:
    """Read all layers. Without a file and a variable this imports no schema.

    :param flags: values of state_dir and runtime that a command line or a program gave.
    :param env: None is this process's environment.
    :param system, user: other files than the usual two.
    :raises InvalidConfig: with every problem of the first layer that has one, or of the layers together.
    """
    env = os.environ if env is None else env
    own = user_file(env) if user is None else user
    layers = [
        _file_layer(read_toml(SYSTEM_FILE if system is None else system, trusted=True), system=True),
        None if own is None else _file_layer(read_toml(own, trusted=False), system=False),
        _value_layer(_from_environment(env), {key: f"env {name}" for name, key in ENVIRONMENT.items()}),
    ]
    config = _with_plain(merge([layer for layer in layers if layer is not None]), env, flags or {})
    return LoadedConfig(config, tuple(_unknown_variables(env)))


def check_file(path: Path, *, system: bool) -> LoadedConfig:
    """One file by itself.

    :raises InvalidConfig: with every problem in it, or when it is not there.
    """
    toml = read_toml(path, trusted=system)
    layer = _file_layer(toml, system=system)
    if layer is None:
        raise InvalidConfig([ConfigProblem(str(path), 0, "", "", "does not exist")])
    return LoadedConfig(merge([layer]))


def _with_plain(config: ExecutorConfig, env: Mapping[str, str], flags: Mapping[str, str]) -> ExecutorConfig:
    """`config` with the plain keys of the environment, then of the flags."""
    origins, plain = dict(config.origins), {"state_dir": config.state_dir, "runtime": config.runtime}
    for name in _PLAIN:
        variable = PREFIX + name.upper()
        value, origin = flags.get(name), f"--{name.replace('_', '-')}"
        if value is None:
            value, origin = env.get(variable), f"env {variable}"
        if value:
            plain[name] = str(Path(value).absolute()) if name == "state_dir" else value
            origins[name] = origin
    return replace(config, state_dir=plain["state_dir"], runtime=plain["runtime"], origins=tuple(origins.items()))


def dotted(key: Key) -> str:
    """``limits.maximum.memory``, ``approved_host_paths[0].source``."""
    text = ""
    for part in key:
        name = f"[{part}]" if isinstance(part, int) else (f".{_plain(part)}" if text else _plain(part))
        text += name
    return text


def _plain(part: str) -> str:
    shown = part if part and all(char.isalnum() or char in "-_" for char in part) else repr(part)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _problem_in(toml: TomlFile, key: Key, value: str, cure: str) -> ConfigProblem:
    return ConfigProblem(toml.shown, toml.line(key), dotted(key), value, cure)


def _file_layer(toml: TomlFile | None, *, system: bool) -> Layer | None:
    if toml is None:
        return None
    from forgeyard_executor.config_check import check_values
    from forgeyard_model.config_file import SYSTEM_ONLY

    problem = partial(_problem_in, toml)
    file = check_values(toml.values, problem)
    if not system:
        named = [key for key in SYSTEM_ONLY if getattr(file, key) is not None]
        if named:
            cure = f"decides for everybody on this host: write it into {SYSTEM_FILE}"
            raise InvalidConfig([problem((key,), "", cure) for key in named])
    return Layer(file, toml)


def _from_environment(env: Mapping[str, str]) -> dict[Key, Any]:
    found: dict[Key, Any] = {}
    for name, key in ENVIRONMENT.items():
        text = env.get(name)
        if not text or key[-1] in _PLAIN:
            continue
        value: Any = text
        if key[-1] in _LISTS:
            value = [part.strip() for part in text.split(",") if part.strip()]
        elif key[-1] in _FLAGS:
            value = _TRUTH.get(text.lower(), text)
        elif key[-1] in _NUMBERS and text.isascii() and text.isdigit() and len(text) < 20:
            value = int(text)
        found[key] = value
    return found


def _value_layer(values: Mapping[Key, Any], names: Mapping[Key, str]) -> Layer | None:
    if not values:
        return None
    from forgeyard_executor.config_check import check_values

    tree: dict[str, Any] = {}
    for key, value in values.items():
        node = tree
        for part in key[:-1]:
            node = node.setdefault(str(part), {})
        node[str(key[-1])] = value

    def problem(key: Key, value: str, cure: str) -> ConfigProblem:
        # A pattern of a list is at (key, 0): the variable is the list's.
        return ConfigProblem(names.get(key if key in values else key[:-1], ""), 0, "", value, cure)

    return Layer(check_values(tree, problem), names=names)


def merge(layers: list[Layer]) -> ExecutorConfig:
    """`layers`, weakest first, as one.

    :raises InvalidConfig: for a layer that asks for less than one below it demands, or a default above a maximum.
    """
    merging = _Merging()
    for layer in layers:
        merging.add(layer)
    merging.check_defaults()
    if merging.problems:
        raise InvalidConfig(merging.problems)
    return replace(merging.config, origins=tuple((dotted(key), text) for key, text in merging.origins.items()))


class _Merging:
    """The configuration so far, and what was wrong with a layer on its way into it."""

    def __init__(self) -> None:
        self.config = ExecutorConfig()
        self.origins: dict[Key, str] = {}
        self.problems: list[ConfigProblem] = []
        self._set_by: dict[Key, Layer] = {}

    def add(self, layer: Layer) -> None:
        file = layer.file
        for name in _PLAIN:
            self._replace(layer, name, getattr(file, name))
        self._isolation(layer, file.minimum_isolation)
        self._exactness(layer, file.exact_limits)
        for name in _LISTS:
            self._patterns(layer, name, getattr(file, name))
        self._defaults(layer)
        self._maximums(layer)
        self._replace(layer, "user_namespace", file.user_namespace)
        if file.uid_block is not None:
            self._replace(layer, "uid_block", UidBlock(file.uid_block.base, file.uid_block.size))
        if file.approved_host_paths is not None:
            paths = [
                ApprovedHostPath(path.source, path.destination or path.source, path.read_only)
                for path in file.approved_host_paths
            ]
            self._replace(layer, "approved_host_paths", tuple(paths))
        for name in _TABLES:
            self._table(layer, name, getattr(file, name))
        for name in ("network", "serve"):
            table = getattr(file, name)
            values = {} if table is None else table.values()
            self.config = replace(self.config, **{name: replace(getattr(self.config, name), **values)})
            for key in values:
                self._note(layer, (name, key))

    def check_defaults(self) -> None:
        """A default that no job could have is a mistake of whoever wrote it."""
        for name, field in LIMIT_FIELDS.items():
            default, maximum = getattr(self.config.default_limits, field), getattr(self.config.maximum_limits, field)
            key: Key = ("limits", "default", name)
            if default is not None and maximum is not None and default > maximum:
                where = self.origins[("limits", "maximum", name)]
                cure = f"is above the maximum of {shown_limit(name, maximum)} ({where}): write that or less"
                self.problems.append(self._set_by[key].problem(key, shown_limit(name, default), cure))

    def _replace(self, layer: Layer, name: str, value: Any) -> None:
        if value is not None:
            self.config = replace(self.config, **{name: value})
            self._note(layer, (name,))

    def _table(self, layer: Layer, name: str, table: Any) -> None:
        """A table in which each key that is set takes the place of the one before."""
        keys = () if table is None else type(table).model_fields
        values = {key: getattr(table, key) for key in keys if getattr(table, key) is not None}
        self.config = replace(self.config, **{name: replace(getattr(self.config, name), **values)})
        for key in values:
            self._note(layer, (name, key))

    def _isolation(self, layer: Layer, value: IsolationLevel | None) -> None:
        demanded = self.config.minimum_isolation
        if value is None:
            return
        if value < demanded:
            where = self.origins[("minimum_isolation",)]
            cure = f"{where} demands {demanded.value}, which can't be lowered: write that or more, or leave it out"
            self.problems.append(layer.problem(("minimum_isolation",), repr(value.value), cure))
            return
        self._replace(layer, "minimum_isolation", value)

    def _exactness(self, layer: Layer, value: bool | None) -> None:
        if value is False and self.config.exact_limits:
            cure = f"{self.origins[('exact_limits',)]} demands exact limits, which can't be lowered: leave it out"
            self.problems.append(layer.problem(("exact_limits",), "false", cure))
            return
        self._replace(layer, "exact_limits", value)

    def _patterns(self, layer: Layer, name: str, value: tuple[str, ...] | None) -> None:
        if value is not None:
            before = self.origins.get((name,))
            rules = (*getattr(self.config, name), PatternRule(value, layer.origin((name,))))
            self._replace(layer, name, rules)
            if before:
                self.origins[name,] = f"{before}, {self.origins[name,]}"

    def _defaults(self, layer: Layer) -> None:
        limits = layer.file.limits.default.limits()
        self.config = replace(self.config, default_limits=limits.or_default(self.config.default_limits))
        for name, field in LIMIT_FIELDS.items():
            if getattr(limits, field) is not None:
                self._note(layer, ("limits", "default", name))

    def _maximums(self, layer: Layer) -> None:
        limits, demanded = layer.file.limits.maximum.limits(), self.config.maximum_limits
        for name, field in LIMIT_FIELDS.items():
            value, bound = getattr(limits, field), getattr(demanded, field)
            key: Key = ("limits", "maximum", name)
            if value is None:
                continue
            if bound is not None and value > bound:
                cure = (
                    f"{self.origins[key]} allows {shown_limit(name, bound)}, which can't be raised: write that or less"
                )
                self.problems.append(layer.problem(key, shown_limit(name, value), cure))
                limits = replace(limits, **{field: None})
            else:
                self._note(layer, key)
        self.config = replace(self.config, maximum_limits=limits.or_default(demanded))

    def _note(self, layer: Layer, key: Key) -> None:
        self.origins[key] = layer.origin(key)
        self._set_by[key] = layer


def shown_limit(name: str, value: float) -> str:
    """A limit for people: MiB for sizes, as `plan` echoes them."""
    from forgeyard_model.units import format_duration

    if name in ("memory", "disk", "shm"):
        return f"{value / (1 << 20):.10g} MiB"
    return format_duration(value) if name in ("timeout", "wall_time") else f"{value:g}"


def _unknown_variables(env: Mapping[str, str]) -> list[str]:
    """Variables that look like a misspelled one of ours; others with the prefix belong to other programs."""
    import difflib

    notes = []
    for name in sorted(env):
        if name.startswith(PREFIX) and name not in ENVIRONMENT:
            near = difflib.get_close_matches(name, ENVIRONMENT, n=1, cutoff=0.85)
            if near:
                notes.append(f"env {name}: not known; did you mean {near[0]}?")
    return notes
