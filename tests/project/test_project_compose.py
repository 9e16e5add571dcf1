"""compose-test.yaml: what it names can be built here, and is set up as the images want it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from image_catalog import IMAGES

ROOT = Path(__file__).resolve().parents[2]
SERVICES = yaml.safe_load((ROOT / "compose-test.yaml").read_text())["services"]


def name_of(service: dict[str, Any]) -> str:
    """The name in the catalog of images."""
    return str(service["image"]).removeprefix("localhost/forgeyard-test/").removesuffix(":latest")


def test_every_image_can_be_built() -> None:
    """Each service runs an image of the catalog, and nothing is pulled from anywhere else."""
    assert set(SERVICES) == {"registry", "postgres", "redis"}
    for service in SERVICES.values():
        assert name_of(service) in IMAGES
        assert service["pull_policy"] == "never"


def test_ports_are_of_the_loopback() -> None:
    """Nothing listens where others could reach it."""
    ports = [port for service in SERVICES.values() for port in service["ports"]]
    assert len(ports) == 3
    assert all(port.startswith("127.0.0.1:") for port in ports)


@pytest.mark.kernel
@pytest.mark.parametrize("name", sorted(SERVICES))
def test_ports_are_the_images(name: str, images: Any) -> None:
    """What a service publishes is what its image exposes."""
    layout = images.layout(name_of(SERVICES[name]))

    def document(digest: str) -> Any:
        return json.loads((layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_text())

    config = document(document(images.digest(name))["config"]["digest"])["config"]
    exposed = {port.partition("/")[0] for port in config["ExposedPorts"]}
    assert {port.rpartition(":")[2] for port in SERVICES[name]["ports"]} == exposed


def test_the_words_above_are_true() -> None:
    """The commands in its head name the builder, and every image that it uses."""
    text = (ROOT / "compose-test.yaml").read_text()
    assert (ROOT / "tests/images/build.py").is_file()
    assert "tests/images/build.py" in text
    (line,) = [line for line in text.splitlines() if "for name in" in line]
    assert set(line.partition(" in ")[2].partition(";")[0].split()) == set(SERVICES)
