"""Which daemon is meant, for each engine: setting, environment, context, default; and what is no usable daemon."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from daemons import Containerd
from rootless_podman import USER, RootlessPodman

from forgeyard_executor import Executor
from forgeyard_executor.config_load import load_config
from forgeyard_executor.config_toml import InvalidConfig
from forgeyard_executor.doctor import examine
from forgeyard_model.config import Endpoints, ExecutorConfig
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass
from forgeyard_runtimes.containerd import endpoint as containerd
from forgeyard_runtimes.docker import endpoint as docker
from forgeyard_runtimes.docker.capabilities import refuse_unfit
from forgeyard_runtimes.find import RuntimeSettings, open_runtime
from forgeyard_runtimes.podman import endpoint as podman
from forgeyard_runtimes.podman.capabilities import may_be_rootless, refuse_rootless
from forgeyard_runtimes.podman.client import Peer

ENGINES = ("containerd", "podman", "docker")
VARIABLES = {"containerd": "CONTAINERD_ADDRESS", "podman": "CONTAINER_HOST", "docker": "DOCKER_HOST"}
DEFAULTS = {
    "containerd": "/run/containerd/containerd.sock",
    "podman": "/run/podman/podman.sock",
    "docker": "/var/run/docker.sock",
}


def found(engine: str, setting: str, environ: Mapping[str, str], uid: int = 0) -> tuple[str, str]:
    """Path of the socket that is meant, and what named it."""
    environ = {"HOME": "/nosuch", **environ}
    if engine == "containerd":
        there = containerd.find_endpoint(setting, environ)
        return there.path, there.origin
    if engine == "podman":
        service = podman.find_endpoint(setting or None, environ, uid)
        return str(service.path), service.origin
    daemon = docker.find_endpoint(setting, "", environ)
    return daemon.socket, daemon.origin


def refusal(engine: str, setting: str, environ: Mapping[str, str]) -> ExecutorError:
    """The error for a mistake: one line, for good, with a cure."""
    with pytest.raises(ExecutorError) as caught:
        found(engine, setting, environ)
    error = caught.value
    assert (error.kind, error.failure_class) == (ExecutorErrorKind.UNSUPPORTED, FailureClass.CONFIGURATION)
    assert error.resolution
    assert "\n" not in str(error)
    return error


@pytest.mark.parametrize("engine", ENGINES)
def test_setting_environment_default(engine: str) -> None:
    """The first of these that names a daemon decides; an empty variable names none."""
    named = {VARIABLES[engine]: "unix:///run/env.sock"}
    assert found(engine, "unix:///run/set.sock", named) == ("/run/set.sock", "the configuration")
    assert found(engine, "", named) == ("/run/env.sock", VARIABLES[engine])
    assert found(engine, "", {VARIABLES[engine]: ""})[0] == DEFAULTS[engine]
    assert found(engine, "", {}) == found(engine, "", dict.fromkeys(set(VARIABLES.values()) - set(named), "unix:///x"))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    "address",
    ["ssh://core@build/run/podman.sock", "tcp://192.0.2.1:2375", "unix://run/x.sock", "unix:x.sock", "unix://",
     "nosuch", "tcp://", f"unix:///{'x' * 120}", "unix:///a\0b", "npipe:////./pipe/x", "tcp://[::1", "\n"],
)  # fmt: skip
def test_each_mistake_is_one_line(engine: str, address: str) -> None:
    """Another machine, no absolute path, too long a path: refused by name of what named it, never the default."""
    for setting, environ, origin in (
        (address, {}, "the configuration"),
        ("", {VARIABLES[engine]: address}, VARIABLES[engine]),
    ):
        error = refusal(engine, setting, environ)
        assert error.reason in (f"{engine}_address", f"{engine}_not_local")
        assert origin in error.resolution


def test_a_path_without_a_scheme() -> None:
    """containerd's own tools take one; the others' do not, and the cure is the path written right."""
    assert found("containerd", "/run/x.sock", {})[0] == "/run/x.sock"
    for engine in ("podman", "docker"):
        assert "write unix:///run/x.sock" in refusal(engine, "/run/x.sock", {}).resolution


def test_podmans_user_decides_the_default() -> None:
    """Root's socket, or that below XDG_RUNTIME_DIR; a relative one is no place."""
    assert found("podman", "", {"XDG_RUNTIME_DIR": "/run/user/7"}, 7)[0] == "/run/user/7/podman/podman.sock"
    assert found("podman", "", {"XDG_RUNTIME_DIR": "/run/user/0"}, 0)[0] == DEFAULTS["podman"]
    for own in ({}, {"XDG_RUNTIME_DIR": ""}, {"XDG_RUNTIME_DIR": "run"}):
        assert found("podman", "", own, 7)[0] == "/run/user/7/podman/podman.sock"


def test_containerds_namespace_is_not_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable of its tools does not make us live, or sweep, among other users' containers."""
    from forgeyard_runtimes.containerd.settings import ContainerdSettings

    monkeypatch.setenv("CONTAINERD_NAMESPACE", "k8s.io")
    assert ContainerdSettings().namespace == "forgeyard"


# --- Docker's contexts and certificates ----------------------------------------------------------------------------


@pytest.fixture
def contexts(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with the contexts `current`, which is in use, and `named`."""
    for name in ("current", "named"):
        meta = tmp_path / "contexts/meta" / hashlib.sha256(name.encode()).hexdigest()
        meta.mkdir(parents=True)
        endpoint = {"Host": f"unix:///run/{name}.sock"}
        (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "current"}))
    return {"DOCKER_CONFIG": str(tmp_path)}


def test_docker_setting_host_context(contexts: dict[str, str]) -> None:
    """Setting, DOCKER_HOST, DOCKER_CONTEXT, the context in use, the default: each beats all after it."""
    named, host = {"DOCKER_CONTEXT": "named"}, {"DOCKER_HOST": "unix:///run/env.sock"}
    assert found("docker", "unix:///run/set.sock", {**contexts, **named, **host})[0] == "/run/set.sock"
    assert found("docker", "", {**contexts, **named, **host}) == ("/run/env.sock", "DOCKER_HOST")
    assert found("docker", "", {**contexts, **named}) == ("/run/named.sock", "the context named")
    assert found("docker", "", contexts) == ("/run/current.sock", "the context current")
    assert found("docker", "", {**contexts, "DOCKER_CONTEXT": "default"})[0] == DEFAULTS["docker"]


@pytest.mark.parametrize("text", ["{", "[]", '"x"', "\0"])
def test_docker_configuration_that_says_nothing(contexts: dict[str, str], text: str) -> None:
    """A file that can't be read is no reason to take another daemon than the one that it names."""
    file = Path(contexts["DOCKER_CONFIG"], "config.json")
    file.write_text(text)
    error = refusal("docker", "", contexts)
    assert (error.reason, str(file) in error.brief) == ("docker_config", True)
    assert found("docker", "unix:///run/set.sock", contexts)[0] == "/run/set.sock"


@pytest.mark.parametrize("host", [7, "", "ssh://core@build", "tcp://10.0.0.1:2376"])
def test_docker_context_without_a_daemon_here(contexts: dict[str, str], host: Any) -> None:
    """A context without an address, or with another machine's, is named."""
    meta = Path(contexts["DOCKER_CONFIG"], "contexts/meta", hashlib.sha256(b"named").hexdigest(), "meta.json")
    meta.write_text(json.dumps({"Endpoints": {"docker": {"Host": host}}}))
    error = refusal("docker", "", {**contexts, "DOCKER_CONTEXT": "named"})
    assert error.reason in ("docker_context", "docker_not_local")
    assert "named" in str(error)
    assert refusal("docker", "", {**contexts, "DOCKER_CONTEXT": "nosuch"}).reason == "docker_context"


@pytest.mark.parametrize("address", ["tcp://127.0.0.1", "tcp://127.0.0.1:x", "tcp://localhost:0", "tcp://[::1]:1/a"])
def test_docker_tcp_needs_a_port(address: str) -> None:
    """On this machine TCP will do, with a port and nothing behind it."""
    assert docker.find_endpoint("tcp://[::1]:2376", "", {}).host == "tcp://[::1]:2376"
    assert refusal("docker", address, {}).reason == "docker_address"


def test_docker_certificates_that_are_not_there(tmp_path: Path) -> None:
    """Named, but no directory: not an error of some library's on the way."""
    named = {"DOCKER_HOST": "tcp://127.0.0.1:2376", "DOCKER_TLS_VERIFY": "1"}
    error = refusal("docker", "", {**named, "DOCKER_CERT_PATH": str(tmp_path / "nosuch")})
    assert (error.reason, str(tmp_path / "nosuch") in error.brief) == ("docker_certificates", True)
    assert docker.find_endpoint("", "", {**named, "DOCKER_CERT_PATH": str(tmp_path)}).tls is not None


# --- the configuration ---------------------------------------------------------------------------------------------


def configured(tmp_path: Path, text: str) -> ExecutorConfig:
    """The configuration with `text` as the user's file."""
    file = tmp_path / "config.toml"
    file.write_text(text)
    return load_config(env={}, system=tmp_path / "none.toml", user=file).config


def test_addresses_in_the_configuration(tmp_path: Path) -> None:
    """A table of addresses by engine, each with its origin; what is no address is an error in its line."""
    config = configured(tmp_path, '[endpoints]\npodman = "unix:///run/p.sock"\n')
    assert config.endpoints == Endpoints(podman="unix:///run/p.sock")
    assert config.origin("endpoints.podman").endswith("config.toml:2")
    for text in ('podman = "here"', 'docker = "unix:///a b"', "podman = 1", 'runc = "unix:///x"'):
        with pytest.raises(InvalidConfig, match=r"config\.toml:2"):
            configured(tmp_path, f"[endpoints]\n{text}\n")


@pytest.mark.kernel
@pytest.mark.parametrize("engine", ENGINES)
def test_the_configuration_beats_the_environment(engine: str, state_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An executor asks where its configuration says, and says that nobody is there."""
    monkeypatch.setenv(VARIABLES[engine], "unix:///nosuch/env.sock")
    there = f"unix://{state_dir}/nosuch.sock"

    async def main(config: ExecutorConfig) -> None:
        async with Executor.open(state_dir, runtime=engine, config=config):
            pass

    for config, where in (
        (ExecutorConfig(endpoints=Endpoints(**{engine: there})), str(state_dir)),
        (ExecutorConfig(), "/nosuch/env.sock"),
    ):
        with pytest.raises(ExecutorError) as caught:
            asyncio.run(main(config))
        assert where in str(caught.value)
        assert caught.value.resolution
    assert not list(state_dir.iterdir())


# --- rootless engines ----------------------------------------------------------------------------------------------


def test_who_has_to_be_asked(tmp_path: Path) -> None:
    """A service of root's, seen from the first user namespace, is rootful; any other is asked."""
    first, other = tmp_path / "first", tmp_path / "other"
    first.write_text("         0          0 4294967295\n")
    other.write_text("         0       1000          1\n")
    assert not may_be_rootless(Peer(1, 0), str(first))
    assert may_be_rootless(Peer(1, 1000), str(first))
    assert may_be_rootless(Peer(1, 0), str(other))


def test_what_an_engine_says_of_itself() -> None:
    """Podman's and Docker's own words decide; an answer without them is an error of its own."""
    where = podman.Endpoint(Path("/run/x.sock"), "CONTAINER_HOST")
    refuse_rootless({"host": {"security": {"rootless": False}}}, Peer(1, 1000), where)
    with pytest.raises(ExecutorError, match="not usable by this executor") as caught:
        refuse_rootless({"host": {"security": {"rootless": True}}}, Peer(1, 1000), where)
    assert caught.value.reason == "podman_rootless"
    assert "/run/x.sock, named by CONTAINER_HOST, is Podman's of uid 1000" in caught.value.details
    with pytest.raises(ExecutorError) as caught:
        refuse_rootless({"host": {}}, Peer(1, 1000), where)
    assert caught.value.reason == "podman_answer"
    with pytest.raises(ExecutorError, match="rootless engine: not usable by this executor") as caught:
        refuse_unfit({"OSType": "linux", "SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]})
    assert caught.value.reason == "docker_rootless"


@pytest.fixture(scope="module")
def rootless() -> Iterator[RootlessPodman]:
    """A service of an ordinary user's."""
    with RootlessPodman() as service:
        yield service


@pytest.mark.kernel
@pytest.mark.daemon("podman")
def test_another_users_rootless_podman(rootless: RootlessPodman, state_dir: Path, monkeypatch: Any) -> None:
    """Root with the socket of somebody's own Podman gets no executor, and the doctor says why; nothing is made."""
    assert rootless.socket.stat().st_uid == USER
    monkeypatch.setenv("CONTAINER_HOST", rootless.address)

    async def main() -> None:
        with pytest.raises(ExecutorError, match="rootless engine: not usable by this executor") as caught:
            async with Executor.open(state_dir, runtime="podman"):
                pass
        assert (caught.value.reason, caught.value.kind) == ("podman_rootless", ExecutorErrorKind.UNSUPPORTED)
        assert f"uid {USER}" in caught.value.details
        assert "/run/podman/podman.sock" in caught.value.resolution
        report = await examine(ExecutorConfig(state_dir=str(state_dir), runtime="podman"))
        assert report.capabilities is None
        condition = next(item for item in report.conditions if item.name == "executor")
        assert "rootless engine: not usable by this executor" in condition.details
        assert not report.healthy

    asyncio.run(main())
    assert not list(state_dir.iterdir())


@pytest.mark.kernel
@pytest.mark.daemon("podman")
def test_a_job_on_a_rootless_podman_is_refused(rootless: RootlessPodman, state_dir: Path) -> None:
    """On the command line it is one line with the cure, and exit 125."""
    argv = [sys.executable, "-m", "forgeyard_api", "run", "--runtime", "podman", "--state-dir", str(state_dir)]
    environment = {**os.environ, "CONTAINER_HOST": rootless.address}
    done = subprocess.run([*argv, "--", "true"], env=environment, capture_output=True, text=True, timeout=50)
    assert done.returncode == 125, done.stderr
    assert "rootless engine: not usable by this executor" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.kernel
@pytest.mark.daemon("containerd")
def test_a_containerd_that_is_not_roots(containerd: Containerd, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who listens at its socket is the kernel's word; root's own is taken."""

    async def main() -> None:
        async with open_runtime("containerd", RuntimeSettings(address=containerd.address)):
            pass

    asyncio.run(main())
    asked = socket.socket.getsockopt

    def somebody(self: socket.socket, level: int, name: int, *more: int) -> Any:
        peer = asked(self, level, name, *more)
        return peer[:4] + (1000).to_bytes(4, "little") + peer[8:] if name == socket.SO_PEERCRED else peer

    monkeypatch.setattr(socket.socket, "getsockopt", somebody, raising=False)
    with pytest.raises(ExecutorError, match="rootless engine") as caught:
        asyncio.run(main())
    assert caught.value.reason == "containerd_rootless"
