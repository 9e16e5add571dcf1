"""Our own clients against the services of compose-test.yaml. Run by its `suite`, not by `./dev test`."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from forgeyard_oci.image_manifest import OCI_MANIFEST
from forgeyard_oci.reference import RegistryReference
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.client import RegistryClient
from forgeyard_oci.registry.settings import RegistrySettings
from forgeyard_runtimes.containerd.connect import connect
from forgeyard_runtimes.containerd.settings import ContainerdSettings

IMAGE = RegistryReference(os.environ["REGISTRY"], "compose/checked", "1")


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[RegistryClient]:
    """A client that sees nothing of the container's own settings."""
    client = RegistryClient(RegistrySettings.load({}, home=tmp_path, insecure=(), root=tmp_path))
    yield client
    client.close()


def described(data: bytes, kind: str) -> dict[str, object]:
    """A blob as a manifest names it."""
    return {"mediaType": kind, "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def test_the_registry_keeps_an_image(registry: RegistryClient) -> None:
    """Blobs and a manifest are pushed, and its tag then names that manifest."""
    config, layer = b"{}", b"a layer, for all that a registry knows"
    parts = {
        "config": described(config, "application/vnd.oci.image.config.v1+json"),
        "layers": [described(layer, "application/vnd.oci.image.layer.v1.tar")],
    }
    for data in (config, layer):
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        registry.push_blob(IMAGE, digest, len(data), lambda data=data: io.BytesIO(data), Budget(), lambda sent: None)
    manifest = json.dumps({"schemaVersion": 2, "mediaType": OCI_MANIFEST, **parts}).encode()
    registry.push_manifest(IMAGE, "1", manifest, OCI_MANIFEST, Budget())
    assert registry.manifest(IMAGE, "1", Budget()).data == manifest


def test_containerd_answers() -> None:
    """Our client finds it new enough, and makes its namespace there."""

    async def version() -> str:
        client, number = await connect(ContainerdSettings(address=os.environ["CONTAINERD_ADDRESS"]))
        await client.close()
        return number

    assert asyncio.run(version()).startswith("1.6")
