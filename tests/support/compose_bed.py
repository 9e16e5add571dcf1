"""compose-test.yaml at a daemon of our own, by testcontainers: Debian 12 has no `docker compose` for the file."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import yaml
from testcontainers.core.config import testcontainers_config
from testcontainers.core.container import DockerContainer
from testcontainers.core.wait_strategies import HealthcheckWaitStrategy

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = ROOT / "compose-test.yaml"
HEALTHY: Final = 120
"""Seconds that a service may take, on a machine that is busy with tests."""
_VARIABLE: Final = re.compile(r"\$\{(\w+):-([^}]*)\}")
_NANOSECONDS: Final = {"s": 1_000_000_000}


def services(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The services of the file, with ``${NAME:-default}`` filled in as compose does it."""
    text = _VARIABLE.sub(lambda found: environ.get(found[1]) or found[2], FILE.read_text())
    found: dict[str, dict[str, Any]] = yaml.safe_load(text)["services"]
    return found


def image_name(service: Mapping[str, Any]) -> str:
    """The name in the catalog of images."""
    return str(service["image"]).removeprefix("localhost/forgeyard-test/").removesuffix(":latest")


def load_image(layout: Path, reference: str, address: str) -> None:
    """Put an image layout into a daemon, as the head of the file says."""
    command = [
        "skopeo",
        "copy",
        "--quiet",
        "--dest-daemon-host",
        address,
        f"oci:{layout}",
        f"docker-daemon:{reference}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=HEALTHY, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{reference}: {done.stderr}")


class Bed:
    """The services at the daemon that DOCKER_HOST names.

    :param project: first part of the names of volumes, as compose has it.
    """

    def __init__(self, project: str, environ: Mapping[str, str]) -> None:
        self.environ = environ
        self.services = services(environ)
        self._project = project

    @contextmanager
    def up(self, *names: str) -> Iterator[dict[str, DockerContainer]]:
        """Start services, in this order, each healthy before the next; the last goes first at the end."""
        with ExitStack() as stack:
            yield {name: stack.enter_context(self.container(name)) for name in names}

    def container(self, name: str) -> DockerContainer:
        """One service, not started."""
        service = self.services[name]
        known = {"image", "pull_policy", "network_mode", "command", "environment", "tmpfs", "volumes", "healthcheck"}
        if unknown := service.keys() - known - {"depends_on"}:
            raise ValueError(f"{FILE.name}: {name}: {sorted(unknown)} is not read here")
        # Its reaper would be a container from a registry, that is given the daemon's socket.
        testcontainers_config.ryuk_disabled = True
        made = DockerContainer(service["image"])
        options: dict[str, Any] = {"network_mode": service["network_mode"]}
        for key, value in service.get("environment", {}).items():
            made.with_env(key, str(value))
        for volume in service.get("volumes", ()):
            self._mount(made, volume)
        if "command" in service:
            made.with_command(service["command"])
        made.tmpfs = dict.fromkeys(service.get("tmpfs", ()), "")
        if "healthcheck" in service:
            options["healthcheck"] = _health(service["healthcheck"])
            made.waiting_for(HealthcheckWaitStrategy().with_startup_timeout(HEALTHY).with_poll_interval(0.1))
        return made.with_kwargs(**options)

    def _mount(self, made: DockerContainer, volume: str) -> None:
        source, target, mode = f"{volume}:rw".split(":")[:3]
        host = os.path.normpath(ROOT / source) if source.startswith(".") else f"{self._project}_{source}"
        made.with_volume_mapping(host, target, mode)


def _health(check: Mapping[str, Any]) -> dict[str, Any]:
    interval = re.fullmatch(r"(\d+)(s)", check["interval"])
    if interval is None:
        raise ValueError(f"{FILE.name}: interval {check['interval']} is not in seconds")
    return {
        "test": check["test"],
        "interval": int(interval[1]) * _NANOSECONDS[interval[2]],
        "retries": check["retries"],
    }
