"""Whose credentials go to a registry: containers-auth.json(5), docker's config.json, DOCKER_AUTH_CONFIG.

Files are read when they are asked, not once: a login or a rotated password counts from the next request on.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_errors import host_failure
from forgeyard_oci.reference import DEFAULT_REGISTRY
from forgeyard_oci.registry.credential_helpers import Credentials, ask_helper
from forgeyard_oci.registry.registries_conf import AUTH_FILES

HUB_KEY: Final = f"https://index.{DEFAULT_REGISTRY}/v1/"
"""What docker calls Docker Hub in its configuration."""

_HUB_KEYS: Final = (DEFAULT_REGISTRY, f"index.{DEFAULT_REGISTRY}", f"registry-1.{DEFAULT_REGISTRY}")
_MAX_FILE: Final = 1 << 20
_URL: Final = re.compile(r"https?://([^/]+)(?:/.*)?\Z")
_OLD_END: Final = re.compile(r"(/v[12])?/?\Z")


@dataclass(frozen=True, slots=True)
class CredentialSources:
    """Where credentials are looked for, in order.

    :param helpers: ``credential-helpers`` of registries.conf; the word of AUTH_FILES stands for the files.
    """

    environ: Mapping[str, str] = field(repr=False)
    home: Path
    root: Path
    helpers: tuple[str, ...] = (AUTH_FILES,)

    def find(self, host: str, repository: str) -> Credentials | None:
        """The credentials for a repository: the first source that knows it, its most specific key.

        :raises InvalidRequest: for a file that is not well formed, named with the key.
        :raises ExecutorError: IO_FAILED, for a file that can't be read or a helper that fails.
        """
        for helper in self.helpers:
            found = (
                self._in_files(host, repository)
                if helper == AUTH_FILES
                else self._from_helper(helper, host, "registries.conf: credential-helpers")
            )
            if found:
                return found
        return None

    def login_file(self) -> str:
        """The file to edit for a login, for messages."""
        named = self.environ.get("REGISTRY_AUTH_FILE")
        return named or str(self._runtime_file())

    def _in_files(self, host: str, repository: str) -> Credentials | None:
        for source in self._sources():
            if found := self._in_source(source, host, repository):
                return found
        return None

    def _in_source(self, source: _Source, host: str, repository: str) -> Credentials | None:
        hosts = _HUB_KEYS if host in _HUB_KEYS else (host,)
        helpers = source.table("credHelpers")
        for key in (HUB_KEY, *hosts) if host in _HUB_KEYS else hosts:
            if name := helpers.get(key):
                # With a helper of its own, what the file holds for that registry is not used.
                return self._from_helper(source.text(f"credHelpers.{key}", name), host, source.origin)
        if (store := source.document.get("credsStore")) and not source.legacy:
            found = self._from_helper(source.text("credsStore", store), host, source.origin)
            if found:
                return found
        entries = source.entries()
        for key in _keys(hosts, repository):
            if key in entries and (found := source.credentials(*entries[key])):
                return found
        return None

    def _from_helper(self, name: str, host: str, origin: str) -> Credentials | None:
        for server in (HUB_KEY, DEFAULT_REGISTRY) if host in _HUB_KEYS else (host,):
            if found := ask_helper(name, server, self.environ, origin=origin):
                return found
        return None

    def _sources(self) -> Iterator[_Source]:
        if named := self.environ.get("REGISTRY_AUTH_FILE"):
            source = _file(Path(named))
            if source is None:
                raise InvalidRequest("REGISTRY_AUTH_FILE", named, "name a file that is there, or unset it")
            yield source
            return
        if text := self.environ.get("DOCKER_AUTH_CONFIG"):
            yield _Source("DOCKER_AUTH_CONFIG", _parsed("DOCKER_AUTH_CONFIG", text.encode("utf-8", "surrogateescape")))
        for path in self._files():
            if (source := _file(path)) is not None:
                yield source
        if (source := _file(self.home / ".dockercfg", legacy=True)) is not None:
            yield source

    def _files(self) -> Iterator[Path]:
        yield self._runtime_file()
        yield Path(self.environ.get("XDG_CONFIG_HOME") or self.home / ".config", "containers/auth.json")
        yield Path(self.environ.get("DOCKER_CONFIG") or self.home / ".docker", "config.json")

    def _runtime_file(self) -> Path:
        runtime = self.environ.get("XDG_RUNTIME_DIR")
        if runtime:
            return Path(runtime, "containers/auth.json")
        return self.root / f"run/containers/{os.getuid()}/auth.json"


@dataclass(frozen=True, slots=True)
class _Source:
    """One file, or DOCKER_AUTH_CONFIG. `legacy`: a .dockercfg, whose entries stand at the top."""

    origin: str
    document: dict[str, Any] = field(repr=False)
    legacy: bool = False

    def table(self, key: str) -> dict[str, Any]:
        if self.legacy:
            return {}
        value = self.document.get(key) or {}
        if not isinstance(value, dict):
            raise InvalidRequest(f"{self.origin}: {key}", f"a {type(value).__name__}", "write a JSON object")
        return value

    def text(self, key: str, value: object) -> str:
        if not isinstance(value, str):
            raise InvalidRequest(f"{self.origin}: {key}", f"a {type(value).__name__}", "write a helper's name")
        return value

    def entries(self) -> dict[str, tuple[str, Any]]:
        """Entries and their keys as written, by canonical key; a key without a scheme beats one with."""
        found: dict[str, tuple[str, Any]] = {}
        written = self.document if self.legacy else self.table("auths")
        for key, value in sorted(written.items(), key=lambda item: "://" not in item[0]):
            found[_canonical(key)] = (key, value)
        return found

    def credentials(self, key: str, entry: object) -> Credentials | None:
        """What one entry says; None when it says nothing. No value of it gets into a message."""
        where = f"{self.origin}: {'' if self.legacy else 'auths.'}{key}"
        if not isinstance(entry, dict):
            raise InvalidRequest(where, f"a {type(entry).__name__}", "write a JSON object")
        for name in ("auth", "username", "password", "identitytoken", "registrytoken"):
            if not isinstance(entry.get(name) or "", str):
                raise InvalidRequest(f"{where}.{name}", "(not shown)", "write a string")
        user, password = entry.get("username") or "", entry.get("password") or ""
        if entry.get("auth"):
            user, password = _decoded(where, entry["auth"])
        tokens = (entry.get("identitytoken") or "", entry.get("registrytoken") or "")
        return Credentials(user, password, *tokens) or None


def _decoded(where: str, auth: str) -> tuple[str, str]:
    try:
        user, colon, password = base64.b64decode(auth, validate=True).decode().partition(":")
    except (binascii.Error, ValueError):
        user = colon = password = ""
    if not colon:
        raise InvalidRequest(f"{where}.auth", "(not shown)", "write base64 of USER:PASSWORD, as a login writes it")
    return user, password.strip("\0")


def _keys(hosts: tuple[str, ...], repository: str) -> Iterator[str]:
    """Keys for a repository, the most specific first: host/a/b, host/a, host."""
    parts = repository.split("/") if repository else []
    for count in range(len(parts), -1, -1):
        for host in hosts:
            yield "/".join((host, *parts[:count]))


def _canonical(key: str) -> str:
    """A key as it is looked up. Old ones are URLs, which name a host whatever their path."""
    if url := _URL.match(key):
        return url[1].lower()
    host, slash, path = _OLD_END.sub("", key).partition("/")
    return host.lower() + slash + path


def _file(path: Path, *, legacy: bool = False) -> _Source | None:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise host_failure(error, "reading credentials", str(path)) from error
    if len(data) > _MAX_FILE:
        raise InvalidRequest(str(path), f"over {_MAX_FILE} bytes", "keep credentials alone in this file")
    return _Source(str(path), _parsed(str(path), data), legacy)


def _parsed(origin: str, data: bytes) -> dict[str, Any]:
    if not data.strip():
        return {}  # some tools make the file before they have anything to write
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        # Not chained: the error of the JSON parser holds the whole text.
        raise InvalidRequest(origin, "(not shown)", "write JSON, as containers-auth.json(5) has it") from None
    if not isinstance(document, dict):
        raise InvalidRequest(origin, f"a {type(document).__name__}", "write a JSON object with auths")
    return document
