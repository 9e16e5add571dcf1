"""Whose credentials a registry gets: files in order, keys by length, helpers, and nothing of them in any message."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from forgeyard_model.errors import ExecutorError, ForgeyardError, InvalidRequest
from forgeyard_oci.registry.credential_helpers import Credentials, ask_helper
from forgeyard_oci.registry.settings import RegistrySettings

HUB = "https://index.docker.io/v1/"


def entry(user: str, password: str = "canary") -> dict[str, str]:
    """An entry as a login writes it."""
    return {"auth": base64.b64encode(f"{user}:{password}".encode()).decode()}


class Files:
    """Credential files of a host of the test's own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.home = root / "home"
        self.bin = root / "bin"
        self.bin.mkdir()

    def write(self, name: str, document: Any) -> Path:
        """A JSON file below the root; text is written as it is."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document if isinstance(document, str) else json.dumps(document))
        return path

    def helper(self, name: str, script: str) -> Path:
        """An installed credential helper."""
        path = self.bin / f"docker-credential-{name}"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return path

    def settings(self, **environ: str) -> RegistrySettings:
        """The settings with these files and this environment."""
        return RegistrySettings.load({"PATH": f"{self.bin}:/usr/bin:/bin", **environ}, home=self.home, root=self.root)

    def find(self, host: str, repository: str = "team/app", **environ: str) -> Credentials | None:
        """The credentials for a repository."""
        return self.settings(**environ).credentials(host, repository)

    def user(self, host: str, repository: str = "team/app", **environ: str) -> str | None:
        """The user they are of."""
        found = self.find(host, repository, **environ)
        return found.username if found else None


@pytest.fixture
def files(tmp_path: Path) -> Files:
    """A host without credentials."""
    return Files(tmp_path)


def test_no_file_is_no_credentials(files: Files) -> None:
    """Nobody is logged in anywhere."""
    assert files.find("r.example.org") is None


def test_the_order_of_the_files(files: Files) -> None:
    """REGISTRY_AUTH_FILE alone; else DOCKER_AUTH_CONFIG, the runtime's file, the user's, docker's two."""
    inline = {"DOCKER_AUTH_CONFIG": json.dumps({"auths": {"r.example.org": entry("inline")}})}
    only = {"REGISTRY_AUTH_FILE": str(files.write("only.json", {"auths": {"s.example.org": entry("only")}}))}
    order: list[tuple[str, Any]] = [
        ("home/.dockercfg", "dockercfg"),
        ("home/.docker/config.json", "docker"),
        ("home/.config/containers/auth.json", "config"),
        (f"run/containers/{os.getuid()}/auth.json", "runtime"),
    ]
    for name, user in order:
        files.write(
            name, {"r.example.org": entry(user)} if user == "dockercfg" else {"auths": {"r.example.org": entry(user)}}
        )
        assert files.user("r.example.org") == user
    assert files.user("r.example.org", **inline) == "inline"
    assert files.user("s.example.org", **only, **inline) == "only"
    assert files.user("r.example.org", **only, **inline) is None


def test_the_variables_that_move_the_files(files: Files) -> None:
    """XDG_RUNTIME_DIR, XDG_CONFIG_HOME and DOCKER_CONFIG say where the files are instead."""
    for variable, name in (
        ("DOCKER_CONFIG", "config.json"),
        ("XDG_CONFIG_HOME", "containers/auth.json"),
        ("XDG_RUNTIME_DIR", "containers/auth.json"),
    ):
        files.write(f"{variable}/{name}", {"auths": {"r.example.org": entry(variable)}})
        assert files.user("r.example.org", **{variable: str(files.root / variable)}) == variable
    assert files.user("r.example.org") is None


def test_a_source_without_the_registry_leaves_it_to_the_next(files: Files) -> None:
    """A file that knows other registries, an empty entry and an empty file say nothing."""
    files.write(
        f"run/containers/{os.getuid()}/auth.json", {"auths": {"r.example.org": {}, "s.example.org": entry("s")}}
    )
    files.write("home/.config/containers/auth.json", "")
    files.write("home/.docker/config.json", {"auths": {"r.example.org": entry("docker")}})
    assert files.user("r.example.org") == "docker"


@pytest.mark.parametrize(
    ("repository", "user"),
    [("team/app", "app"), ("team/other", "team"), ("team", "team"), ("teams/app", "all"), ("app", "all")],
)
def test_the_most_specific_key_wins(files: Files, repository: str, user: str) -> None:
    """host/ns/repo before host/ns before host, by whole parts."""
    auths = {"r.example.org/team/app": entry("app"), "r.example.org": entry("all"), "r.example.org/team": entry("team")}
    files.write("home/.docker/config.json", {"auths": auths})
    assert files.user("r.example.org", repository) == user
    assert files.user("r.example.org:5000", repository) is None
    assert files.user("x.r.example.org", repository) is None


@pytest.mark.parametrize(
    "key", [HUB, "docker.io", "index.docker.io", "https://registry-1.docker.io/v2/", "index.docker.io/v1/"]
)
def test_docker_hub_by_any_of_its_names(files: Files, key: str) -> None:
    """What docker and podman write for Docker Hub is found for docker.io."""
    files.write("home/.docker/config.json", {"auths": {key: entry("hub")}})
    assert files.user("docker.io", "library/busybox") == "hub"


@pytest.mark.parametrize(
    "key", ["https://r.example.org", "http://r.example.org/v2/", "r.example.org/", "R.example.org"]
)
def test_old_keys_are_hosts(files: Files, key: str) -> None:
    """A URL as a key names its host; an exact key beats it."""
    files.write("home/.docker/config.json", {"auths": {key: entry("old")}})
    assert files.user("r.example.org") == "old"
    files.write(
        "home/.docker/config.json",
        {"auths": {"https://r.example.org/v1/": entry("old"), "r.example.org": entry("new")}},
    )
    assert files.user("r.example.org") == "new"


def test_tokens_of_an_entry(files: Files) -> None:
    """identitytoken and registrytoken are read, alone or beside a user; a password may hold colons."""
    auths = {
        "a.example.org": {"identitytoken": "canary-id", **entry("00000000-0000", "")},
        "b.example.org": {"registrytoken": "canary-reg"},
        "c.example.org": {"username": "me", "password": "pw"},
        "d.example.org": entry("me", "p:w:"),
    }
    files.write("home/.docker/config.json", {"auths": auths})
    assert files.find("a.example.org") == Credentials("00000000-0000", "", "canary-id")
    assert files.find("b.example.org") == Credentials(registry_token="canary-reg")
    assert files.find("c.example.org") == Credentials("me", "pw")
    assert files.find("d.example.org") == Credentials("me", "p:w:")


def test_a_login_counts_from_the_next_request_on(files: Files) -> None:
    """Settings that live long do not hold on to a password that has changed."""
    settings = files.settings()
    for user in ("first", "second"):
        files.write("home/.docker/config.json", {"auths": {"r.example.org": entry(user)}})
        found = settings.credentials("r.example.org", "x")
        assert found is not None
        assert found.username == user


@pytest.mark.parametrize(
    ("document", "named"),
    [
        ('{"auths": {"r.example.org": {"auth": "canary"', ""),
        ('["canary"]', ""),
        ({"auths": ["canary"]}, "auths"),
        ({"auths": {"r.example.org": "canary"}}, "auths.r.example.org"),
        ({"auths": {"r.example.org": {"auth": "canary"}}}, "auths.r.example.org.auth"),
        ({"auths": {"r.example.org": {"auth": "Y2FuYXJ5"}}}, "auths.r.example.org.auth"),
        ({"auths": {"r.example.org": {"auth": 7}}}, "auths.r.example.org.auth"),
        ({"auths": {"r.example.org": {"identitytoken": ["canary"]}}}, "auths.r.example.org.identitytoken"),
        ({"credHelpers": "canary"}, "credHelpers"),
        ({"credHelpers": {"r.example.org": ["canary"]}}, "credHelpers.r.example.org"),
        ({"credsStore": {"x": "canary"}}, "credsStore"),
    ],
)
def test_a_malformed_file_is_named_without_its_values(files: Files, document: Any, named: str) -> None:
    """The message has file and key; what may be a secret is in neither the message nor the chain of causes."""
    path = files.write("home/.docker/config.json", document)
    with pytest.raises(InvalidRequest, match=f"{path}.*{named}") as caught:
        files.find("r.example.org")
    error: BaseException | None = caught.value
    while error is not None:
        assert "canary" not in f"{error} {error!r} {vars(error)}"
        error = error.__cause__


def test_docker_auth_config_is_named_when_it_is_malformed(files: Files) -> None:
    """The variable, not a file; its text is not shown."""
    with pytest.raises(InvalidRequest, match="DOCKER_AUTH_CONFIG") as caught:
        files.find("r.example.org", DOCKER_AUTH_CONFIG='{"canary')
    assert "canary" not in str(caught.value)


def test_registry_auth_file_has_to_be_there(files: Files) -> None:
    """A name that leads nowhere is not the same as nobody being logged in."""
    with pytest.raises(InvalidRequest, match="REGISTRY_AUTH_FILE"):
        files.find("r.example.org", REGISTRY_AUTH_FILE=str(files.root / "nothing.json"))


def test_nothing_secret_in_a_repr(files: Files) -> None:
    """Credentials, settings and their sources hide what they hold."""
    auth = json.dumps({"auths": {"r.example.org": {"identitytoken": "canary", **entry("me")}}})
    settings = files.settings(DOCKER_AUTH_CONFIG=auth)
    assert "canary" not in repr(settings)
    found = settings.credentials("r.example.org", "x")
    assert found
    assert "canary" not in repr(found)
    assert "me" not in repr(found).replace("username", "")


ANSWER = 'read server; echo "{\\"ServerURL\\": \\"$server\\", \\"Username\\": \\"%s\\", \\"Secret\\": \\"canary\\"}"'


def test_the_helper_of_a_registry(files: Files) -> None:
    """credHelpers names one for a registry; what the file holds for that registry is not used then."""
    files.helper("some", ANSWER % "helped")
    config = {
        "credHelpers": {"r.example.org": "some"},
        "auths": {"r.example.org": entry("file"), "s.example.org": entry("s")},
    }
    files.write("home/.docker/config.json", config)
    assert files.find("r.example.org") == Credentials("helped", "canary")
    assert files.user("s.example.org") == "s"
    files.helper("some", 'echo "credentials not found in native keychain"; exit 1')
    assert files.find("r.example.org") is None


def test_the_store_of_a_file(files: Files) -> None:
    """credsStore is asked for every registry; what it does not have may stand in the file."""
    files.helper(
        "store",
        f'read s; if [ "$s" = r.example.org ]; then echo "$s" | ({ANSWER % "stored"}); '
        'else echo "credentials not found"; exit 1; fi',
    )
    files.write(
        "home/.docker/config.json", {"credsStore": "store", "auths": {"r.example.org": {}, "s.example.org": entry("s")}}
    )
    assert files.user("r.example.org") == "stored"
    assert files.user("s.example.org") == "s"
    assert files.user("t.example.org") is None


def test_a_helper_is_asked_for_docker_hub_by_its_old_name(files: Files) -> None:
    """Docker stores Docker Hub's credentials under a URL."""
    files.helper("hub", f'read s; echo "$s" >> {files.root}/asked; echo "$s" | ({ANSWER % "hub"})')
    files.write("home/.docker/config.json", {"credHelpers": {"docker.io": "hub"}})
    assert files.user("docker.io", "library/busybox") == "hub"
    assert (files.root / "asked").read_text() == f"{HUB}\n"


def test_a_helpers_token_user_is_an_identity_token(files: Files) -> None:
    """The user <token> says that the secret is one."""
    files.helper("t", ANSWER % "<token>")
    assert ask("t", files) == Credentials(identity_token="canary")


def test_helpers_of_registries_conf(files: Files) -> None:
    """credential-helpers gives the order; its reserved word stands for the files."""
    files.helper("first", ANSWER % "first")
    files.write("home/.docker/config.json", {"auths": {"r.example.org": entry("file")}})
    files.write("etc/containers/registries.conf", 'credential-helpers = ["containers-auth.json", "first"]')
    assert files.user("r.example.org") == "file"
    assert files.user("s.example.org") == "first"


def ask(name: str, files: Files, seconds: float = 10.0, environ: Mapping[str, str] | None = None) -> Credentials | None:
    """Ask a helper for r.example.org."""
    environ = {"PATH": f"{files.bin}:/usr/bin:/bin"} if environ is None else environ
    return ask_helper(name, "r.example.org", environ, origin="config.json", seconds=seconds)


@pytest.mark.parametrize(
    "script",
    [
        "echo canary; exit 3",
        "echo canary >&2; exit 1",
        "kill -SEGV $$",
        "echo canary",
        "echo '[\"canary\"]'",
        'echo \'{"Username": "canary"}\'',
        'echo \'{"Username": 1, "Secret": "canary"}\'',
        "exec 0<&-; exit 1",
        "while echo canarycanarycanarycanarycanarycanarycanarycanary; do :; done",
    ],
)
def test_a_helper_that_fails_is_named_and_not_quoted(files: Files, script: str) -> None:
    """Crash, nonsense, a flood: an error with the helper's name, the registry, and nothing it wrote."""
    files.helper("bad", script)
    with pytest.raises(ExecutorError, match="docker-credential-bad") as caught:
        ask("bad", files)
    assert caught.value.reason == "credential_helper"
    assert "r.example.org" in str(caught.value)
    assert "canary" not in f"{caught.value} {caught.value.__cause__}"


def test_a_helper_that_hangs_is_killed_with_what_it_started(files: Files) -> None:
    """Its time is bounded, and no process of it stays."""
    files.helper("slow", f"sleep 1000 & echo $! > {files.root}/pid; wait")
    started = time.monotonic()
    with pytest.raises(ExecutorError, match=r"within 0\.5 s"):
        ask("slow", files, 0.5)
    assert time.monotonic() - started < 5
    child = int((files.root / "pid").read_text())
    deadline = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]:
        assert time.monotonic() < deadline, "the helper's child lives on"


@pytest.mark.parametrize("name", ["../bin/sh", "/bin/sh", "", "a b", "-x", "x" * 100, "missing"])
def test_names_that_are_no_helpers(files: Files, name: str) -> None:
    """A path is refused, whatever it leads to; so is one that is not installed."""
    with pytest.raises(InvalidRequest, match="credential helper"):
        ask(name, files)


def test_a_helper_gets_the_settings_environment(files: Files, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not that of this process, nor the secret on its command line."""
    monkeypatch.setenv("OTHER", "seen")
    files.helper("env", f"env > {files.root}/env; echo $# $1 > {files.root}/args; {ANSWER % 'x'}")
    assert ask("env", files, environ={"PATH": f"{files.bin}:/usr/bin:/bin", "MINE": "yes"})
    variables = (files.root / "env").read_text()
    assert "MINE=yes" in variables
    assert "OTHER" not in variables
    assert (files.root / "args").read_text() == "1 get\n"


def test_a_file_that_cannot_be_read_is_an_error(files: Files) -> None:
    """A directory in its place, here; not the same as nobody being logged in."""
    (files.home / ".docker/config.json").mkdir(parents=True)
    with pytest.raises(ForgeyardError, match=r"config\.json"):
        files.find("r.example.org")
