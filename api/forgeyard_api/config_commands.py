"""`forgeyard config check | show`: whether the configuration can be used, and what it comes to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from forgeyard_api.main import as_usage, one_line, say
from forgeyard_api.sandbox_commands import table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from forgeyard_executor.config_load import LoadedConfig
    from forgeyard_model.config import ExecutorConfig


def check(
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Check this file, as the system's, instead.")
    ] = None,
) -> int:
    """Check the configuration: prints ok, or every error as file:line key: value: cure (exit 2)."""
    loaded = _load(file)
    for note in loaded.notes:
        say(f"note: {one_line(note)}")
    typer.echo("ok" if file is None else f"{file}: ok")
    return 0


def show(
    origin: Annotated[bool, typer.Option("--origin", help="Say where each value was set.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
) -> int:
    """Print the effective configuration: environment over user's file over system's file over default."""
    loaded = _load(None)
    rows = list(settings(loaded.config))
    if as_json:
        shown: Any = {key: value for key, value, _ in rows}
        if origin:
            shown = {key: {"value": value, "origin": where} for key, value, where in rows}
        typer.echo(json.dumps(shown))
    else:
        cells = [(key, _text(value), where) if origin else (key, _text(value)) for key, value, where in rows]
        typer.echo(table(("KEY", "VALUE", "ORIGIN") if origin else ("KEY", "VALUE"), cells))
    for note in loaded.notes:
        say(f"note: {one_line(note)}")
    return 0


def settings(config: ExecutorConfig) -> Iterator[tuple[str, Any, str]]:
    """Each key, its effective value (None: not set), and where it was set."""
    from forgeyard_executor.config_load import LIMIT_FIELDS, shown_limit

    yield "state_dir", config.state_dir, config.origin("state_dir")
    yield "runtime", config.runtime, config.origin("runtime")
    for item in fields(config.endpoints):
        key = f"endpoints.{item.name}"
        yield key, getattr(config.endpoints, item.name) or None, config.origin(key)
    for item in fields(config.rootfs):
        key = f"rootfs.{item.name}"
        yield key, getattr(config.rootfs, item.name), config.origin(key)
    yield "minimum_isolation", config.minimum_isolation.value, config.origin("minimum_isolation")
    yield "user_namespace", config.user_namespace.value, config.origin("user_namespace")
    yield "exact_limits", config.exact_limits, config.origin("exact_limits")
    for key in ("allowed_registries", "allowed_images"):
        rules = getattr(config, key)
        # Each file's list stands by itself: an image has to pass them all.
        yield key, [list(rule.patterns) for rule in rules] or None, config.origin(key)
    for table_name, limits in (("default", config.default_limits), ("maximum", config.maximum_limits)):
        for name, field in LIMIT_FIELDS.items():
            key, value = f"limits.{table_name}.{name}", getattr(limits, field)
            yield key, None if value is None else shown_limit(name, value), config.origin(key)
    for table_name in ("retention", "watermarks", "caches"):
        for item in fields(getattr(config, table_name)):
            key, value = f"{table_name}.{item.name}", getattr(getattr(config, table_name), item.name)
            yield key, _kept(item.name, value), config.origin(key)
    for item in fields(config.network):
        key, value = f"network.{item.name}", getattr(config.network, item.name)
        yield key, _network(value), config.origin(key)
    for item in fields(config.serve):
        key, value = f"serve.{item.name}", getattr(config.serve, item.name)
        yield key, _serve(item.name, value), config.origin(key)
    block = config.uid_block
    shown = None if block is None else {"base": block.base, "size": block.size}
    yield "uid_block", shown, config.origin("uid_block")
    paths = [
        {"source": path.source, "destination": path.destination, "read_only": path.read_only}
        for path in config.approved_host_paths
    ]
    yield "approved_host_paths", paths or None, config.origin("approved_host_paths")


def _kept(name: str, value: Any) -> Any:
    """A bound of what is kept, as the configuration writes it."""
    from forgeyard_model.units import format_duration, format_size

    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, float):
        return format_duration(value)
    return format_size(value) if name.endswith("_size") else str(value)


def _serve(name: str, value: Any) -> Any:
    """A value of the serve table, as the configuration writes it."""
    if isinstance(value, Mapping):
        return {str(key): _serve(name, part) for key, part in value.items()} or None
    if is_dataclass(value) and not isinstance(value, type):
        found = {item.name: _serve(item.name, getattr(value, item.name)) for item in fields(value)}
        return {key: part for key, part in found.items() if part is not None} or None
    if name in ("memory", "disk") and value is not None:
        return _kept("_size", value)
    if name in ("aging", "drain", "result_ttl", "keep_failed"):
        return _kept(name, value)
    return _network(value)


def _network(value: Any) -> Any:
    """A value of the network table, as the configuration writes it; of tables, the keys that say something."""
    if isinstance(value, tuple):
        return [asdict(item) if is_dataclass(item) and not isinstance(item, type) else item for item in value] or None
    return None if value == "" else value


def _load(file: Path | None) -> LoadedConfig:
    from forgeyard_executor.config_load import check_file, load_config

    with as_usage():
        return load_config() if file is None else check_file(file, system=True)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return value if isinstance(value, str) else json.dumps(value)
