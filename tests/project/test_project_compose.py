"""compose-test.yaml: what it names can be built here, and stands, answers and goes at a private dockerd."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from compose_bed import FILE, ROOT, Bed, image_name, load_image, services
from image_catalog import IMAGES

if TYPE_CHECKING:
    from daemons import Dockerd
    from testcontainers.core.container import DockerContainer

SERVICES = services({})
PORTS = {"registry": 5000, "postgres": 5432, "redis": 6379}
NAMES = ("registry", "postgres", "redis", "containerd")


def variable(name: str) -> str:
    """Where a service's port can be changed."""
    return f"FORGEYARD_{name.upper()}_PORT"


def test_every_image_can_be_built() -> None:
    """Each service runs an image of the catalog, and nothing is pulled from anywhere else."""
    assert set(SERVICES) == {*NAMES, "suite"}
    for service in SERVICES.values():
        assert image_name(service) in IMAGES
        assert service["pull_policy"] == "never"


def test_ports_are_of_the_loopback() -> None:
    """Nothing listens where others could reach it, and every port can be moved."""
    assert all("ports" not in service for service in SERVICES.values())
    assert SERVICES["registry"]["environment"]["REGISTRY_HTTP_ADDR"] == "127.0.0.1:5000"
    assert "listen_addresses=127.0.0.1" in SERVICES["postgres"]["command"]
    assert SERVICES["redis"]["command"][1:3] == ["--bind", "127.0.0.1"]
    moved = json.dumps(services({variable(name): "1234" for name in PORTS}))
    assert not [port for port in PORTS.values() if str(port) in moved]


@pytest.mark.kernel
@pytest.mark.parametrize("name", sorted(PORTS))
def test_ports_are_the_images(name: str, images: Any) -> None:
    """Where a service listens by itself is what its image exposes."""
    layout = images.layout(image_name(SERVICES[name]))

    def document(digest: str) -> Any:
        return json.loads((layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_text())

    config = document(document(images.digest(name))["config"]["digest"])["config"]
    assert set(config["ExposedPorts"]) == {f"{PORTS[name]}/tcp"}


def test_the_words_above_are_true() -> None:
    """The commands in its head name the builder, and every image and service that it has."""
    text = FILE.read_text()
    assert (ROOT / "tests/images/build.py").is_file()
    assert "tests/images/build.py" in text
    (line,) = [line for line in text.splitlines() if "for name in" in line]
    assert set(line.partition(" in ")[2].partition(";")[0].split()) == set(SERVICES)
    (line,) = [line for line in text.splitlines() if "up --wait" in line]
    assert line.split()[-len(NAMES) :] == list(NAMES)
    assert list(yaml.safe_load(text)["services"]["suite"]["depends_on"]) == list(NAMES)


@pytest.fixture
def bed(dockerd: Dockerd, images: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bed]:
    """The services' images at the private dockerd, ports that nobody has, and at the end nothing of it."""
    monkeypatch.setenv("DOCKER_HOST", dockerd.address)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    project = f"forgeyard-test-{os.getpid()}"
    made = Bed(project, {variable(name): str(port) for name, port in zip(PORTS, free_ports(len(PORTS)), strict=True)})
    references = [service["image"] for service in made.services.values()]
    try:
        for service in made.services.values():
            load_image(images.layout(image_name(service)), service["image"], dockerd.address)
        yield made
        assert docker(dockerd, "ps", "--all", "--quiet", *ours(references)) == []
        volumes = docker(dockerd, "volume", "ls", "--quiet", "--filter", f"name={project}")
        assert volumes == [f"{project}_containerd"]
    finally:
        for container in docker(dockerd, "ps", "--all", "--quiet", *ours(references)):
            docker(dockerd, "rm", "--force", "--volumes", container)
        for volume in docker(dockerd, "volume", "ls", "--quiet", "--filter", f"name={project}"):
            docker(dockerd, "volume", "rm", volume)
        for reference in references:
            docker(dockerd, "image", "rm", reference)


def ours(references: list[str]) -> list[str]:
    """Filters of `docker ps` for containers of those images: the daemon has others'."""
    return [word for reference in references for word in ("--filter", f"ancestor={reference}")]


def docker(dockerd: Dockerd, *words: str) -> list[str]:
    """What Docker's command line says, by words."""
    command, environ = dockerd.docker(*words), dockerd.environment()
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, and that the kernel gives to nobody who does not ask for them."""
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    found: list[int] = []
    for port in range(first - 1 - 7 * (os.getpid() % 1500), 1024, -1):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no port is free")


@pytest.mark.kernel
@pytest.mark.daemon("dockerd")
@pytest.mark.timeout(900)
@pytest.mark.xdist_group("service images")
def test_the_bed_stands(bed: Bed) -> None:
    """Each service is healthy and answers a client of this test's; the suite passes against them; then all goes."""
    redis_cli = f"redis-cli -p {bed.environ[variable('redis')]}"
    with bed.up(*NAMES) as up:
        assert registry_status(int(bed.environ[variable("registry")])) == 200
        query = "PGPASSWORD=forgeyard psql -h 127.0.0.1 -U postgres -Atc 'select count(*) from products'"
        assert said(up["postgres"], query) == "3"
        assert said(up["redis"], f"{redis_cli} set a 1; {redis_cli} get a") == "OK\n1"
        assert said(up["containerd"], "ctr namespaces ls -q") == ""
        with bed.container("suite") as suite:
            code = suite.get_wrapped_container().wait(timeout=300)["StatusCode"]
            out = b"".join(suite.get_logs()).decode()
        assert code == 0, out
        assert len(re.findall(r"\d+ passed", out)) == 2, out
        assert said(up["containerd"], "ctr namespaces ls -q") == "forgeyard"


def said(container: DockerContainer, script: str) -> str:
    """The output of a script in a service's container."""
    code, output = container.exec(["sh", "-ec", script])
    assert code == 0, output
    return output.decode().strip()


def registry_status(port: int) -> int:
    """What the registry answers to the question whether it is one."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    try:
        connection.request("GET", "/v2/")
        return connection.getresponse().status
    finally:
        connection.close()
