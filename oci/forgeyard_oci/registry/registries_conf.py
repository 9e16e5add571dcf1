"""registries.conf, version 2 (containers-registries.conf(5)): where a repository's bytes really come from.

Read are ``[[registry]]`` with its mirrors, ``unqualified-search-registries`` and ``credential-helpers``. Other keys at
the top of a file are other tools' affair; an unknown key in a ``[[registry]]`` is an error, since a misspelt
``blocked`` would go unnoticed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_errors import host_failure
from forgeyard_oci.reference import RegistryReference, canonical_registry, is_registry_host, is_repository

AUTH_FILES: Final = "containers-auth.json"
"""The word in ``credential-helpers`` that stands for the credential files."""

_PULLS: Final = ("all", "digest-only", "tag-only")
_REGISTRY_KEYS: Final = frozenset({"prefix", "location", "insecure", "blocked", "mirror", "mirror-by-digest-only"})
_MIRROR_KEYS: Final = frozenset({"location", "insecure", "pull-from-mirror"})
_MAX_FILE: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Mirror:
    """One mirror: ``HOST[/PATH]`` in the place of the prefix. `pull`: all, digest-only or tag-only."""

    location: str
    insecure: bool = False
    pull: str = "all"

    def serves(self, ref: RegistryReference) -> bool:
        """Whether this mirror may be asked for `ref`."""
        return self.pull == "all" or (self.pull == "digest-only") == (ref.digest is not None)


@dataclass(frozen=True, slots=True)
class RegistryRule:
    """One ``[[registry]]``. `location` is "" where nothing is rewritten; `origin` is the file."""

    prefix: str
    location: str = ""
    insecure: bool = False
    blocked: bool = False
    mirrors: tuple[Mirror, ...] = ()
    origin: str = ""

    def matched(self, name: str) -> int:
        """How many characters of `name` (``HOST/REPOSITORY``) the prefix covers; 0 when it does not match."""
        if self.prefix.startswith("*."):
            host = name.partition("/")[0]
            return len(host) if host.endswith(self.prefix[1:]) else 0
        whole = name == self.prefix or name.startswith(f"{self.prefix}/")
        return len(self.prefix) if whole else 0


@dataclass(frozen=True, slots=True)
class RegistriesConf:
    """All files together. `search`: unqualified-search-registries, and the file that says so."""

    rules: Mapping[str, RegistryRule] = field(default_factory=dict)
    search: tuple[str, ...] = ()
    search_origin: str = ""
    credential_helpers: tuple[str, ...] = (AUTH_FILES,)

    def rule(self, name: str) -> RegistryRule | None:
        """The rule with the longest prefix of `name`; one without a star beats one with."""
        fitting = [rule for rule in self.rules.values() if rule.matched(name)]
        return max(fitting, key=lambda rule: (rule.prefix[0] != "*", len(rule.prefix)), default=None)


def load_registries(environ: Mapping[str, str], home: Path, root: Path) -> RegistriesConf:
    """Read the user's file, else the system's, and the drop-ins that belong to it.

    ``CONTAINERS_REGISTRIES_CONF`` names the one main file instead; the drop-ins stay.

    :param root: where ``etc`` is; ``/`` but in tests.
    :raises InvalidRequest: for a file that is not well formed, named with the key.
    :raises ExecutorError: IO_FAILED, for a file that can't be read.
    """
    conf = RegistriesConf()
    for path in _files(environ, home, root):
        conf = _merged(conf, path)
    return conf


def _files(environ: Mapping[str, str], home: Path, root: Path) -> Iterator[Path]:
    users = Path(environ.get("XDG_CONFIG_HOME") or home / ".config", "containers")
    system = root / "etc/containers"
    if named := environ.get("CONTAINERS_REGISTRIES_CONF"):
        if not Path(named).is_file():
            raise InvalidRequest("CONTAINERS_REGISTRIES_CONF", named, "name a file that is there, or unset it")
        yield Path(named)
    elif (users / "registries.conf").is_file():
        yield users / "registries.conf"
        yield from _drop_ins(users)
        return
    else:
        yield system / "registries.conf"
    yield from _drop_ins(system)
    yield from _drop_ins(users)


def _drop_ins(folder: Path) -> list[Path]:
    try:
        return sorted(path for path in (folder / "registries.conf.d").iterdir() if path.suffix == ".conf")
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise host_failure(error, "reading registries.conf.d", str(folder)) from error


def _merged(conf: RegistriesConf, path: Path) -> RegistriesConf:
    document = _document(path)
    rules = dict(conf.rules)
    rules.update(_File(str(path)).rules(document.get("registry", [])))
    conf = replace(conf, rules=rules)
    if (search := document.get("unqualified-search-registries")) is not None:
        hosts = _File(str(path)).words("unqualified-search-registries", search)
        conf = replace(conf, search=hosts, search_origin=str(path))
    if helpers := document.get("credential-helpers"):
        conf = replace(conf, credential_helpers=_File(str(path)).words("credential-helpers", helpers))
    return conf


def _document(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise host_failure(error, "reading registries.conf", str(path)) from error
    if len(data) > _MAX_FILE:
        raise InvalidRequest(str(path), f"over {_MAX_FILE} bytes", "make the file smaller")
    try:
        document = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(str(path), error, "write TOML, as containers-registries.conf(5) has it") from error
    if "registries" in document:
        raise InvalidRequest(f"{path}: registries", "version 1", "write version 2: [[registry]] with prefix = …")
    return document


@dataclass(frozen=True, slots=True)
class _File:
    """Reads the tables of one file; `path` for messages."""

    path: str

    def bad(self, key: str, value: object, cure: str) -> InvalidRequest:
        return InvalidRequest(f"{self.path}: {key}", value, cure)

    def words(self, key: str, value: object) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(isinstance(item, str) and item for item in value):
            raise self.bad(key, value, "write a list of strings")
        return tuple(value)

    def rules(self, tables: object) -> dict[str, RegistryRule]:
        found: dict[str, RegistryRule] = {}
        for key, table in self._tables("registry", tables):
            rule = self._rule(key, table)
            if rule.prefix in found:
                raise self.bad(f"{key}.prefix", rule.prefix, "write each prefix once in a file")
            found[rule.prefix] = rule
        return found

    def _tables(self, key: str, tables: object) -> Iterator[tuple[str, dict[str, Any]]]:
        if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
            raise self.bad(key, tables, f"write [[{key}]] tables")
        return ((f"{key}[{number}]", table) for number, table in enumerate(tables))

    def _rule(self, key: str, table: dict[str, Any]) -> RegistryRule:
        self._known(key, table, _REGISTRY_KEYS)
        location = self._place(f"{key}.location", table.get("location", ""))
        prefix = self._prefix(f"{key}.prefix", table.get("prefix", "") or location)
        return RegistryRule(
            prefix=prefix,
            location="" if location == prefix else location,
            insecure=self._flag(f"{key}.insecure", table.get("insecure", False)),
            blocked=self._flag(f"{key}.blocked", table.get("blocked", False)),
            mirrors=tuple(self._mirrors(key, table)),
            origin=self.path,
        )

    def _mirrors(self, key: str, table: dict[str, Any]) -> Iterator[Mirror]:
        pinned = self._flag(f"{key}.mirror-by-digest-only", table.get("mirror-by-digest-only", False))
        for name, mirror in self._tables(f"{key}.mirror", table.get("mirror", [])):
            self._known(name, mirror, _MIRROR_KEYS)
            pull = mirror.get("pull-from-mirror") or "all"
            if pull not in _PULLS:
                raise self.bad(f"{name}.pull-from-mirror", pull, f"write one of {', '.join(_PULLS)}")
            if pinned and "pull-from-mirror" in mirror:
                raise self.bad(f"{name}.pull-from-mirror", pull, "leave it out beside mirror-by-digest-only")
            location = self._place(f"{name}.location", mirror.get("location"))
            insecure = self._flag(f"{name}.insecure", mirror.get("insecure", False))
            if not location:
                raise self.bad(f"{name}.location", location, "write HOST[:PORT][/PATH]")
            yield Mirror(location, insecure, "digest-only" if pinned else pull)

    def _known(self, key: str, table: dict[str, Any], known: frozenset[str]) -> None:
        for name, value in table.items():
            if name not in known:
                raise self.bad(f"{key}.{name}", value, f"no such key: {', '.join(sorted(known))}")

    def _flag(self, key: str, value: object) -> bool:
        if not isinstance(value, bool):
            raise self.bad(key, value, "write true or false")
        return value

    def _place(self, key: str, value: object) -> str:
        """``HOST[:PORT][/PATH]`` or "", without a slash at its end."""
        text = value.rstrip("/") if isinstance(value, str) else None
        if text is None:
            raise self.bad(key, value, "write HOST[:PORT][/PATH]")
        host, slash, rest = text.partition("/")
        if text and not (is_registry_host(host) and (not slash or is_repository(rest))):
            raise self.bad(key, value, "write HOST[:PORT][/PATH], without https:// and without tag or digest")
        return canonical_registry(host) + slash + rest

    def _prefix(self, key: str, value: object) -> str:
        if isinstance(value, str) and value.startswith("*."):
            host = self._place(key, value[2:])
            if not host or "/" in host or ":" in host:
                raise self.bad(key, value, "after *. write a domain alone, such as *.example.com")
            return f"*.{host}"
        prefix = self._place(key, value)
        if not prefix:
            raise self.bad(key, value, "write HOST[:PORT][/PATH] or *.DOMAIN, or give location")
        return prefix
