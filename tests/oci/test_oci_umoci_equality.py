"""Our trees against umoci's: the same names, types, modes, owners, link counts, attributes, times and contents."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from build import LayoutWriter, machine
from crafted_images import busybox_tree
from tree_facts import Facts, overlay_facts, tree_facts

from forgeyard_oci.image_store import ImageStore

pytestmark = pytest.mark.kernel

REAL = ("busybox", "debian", "postgres", "redis", "rabbitmq", "nginx", "python")
CRAFTED = ("zstd", "opaque", "hardlinks", "xattrs", "sparse", "names")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ImageStore]:
    """A store that these tests share: the Debian layer below most of the images is unpacked once."""
    return ImageStore(tmp_path_factory.mktemp("equality") / "store")


@pytest.fixture
def umoci(tmp_path: Path, require_tool: Callable[[str], str]) -> Callable[[Path, str], Facts]:
    """``umoci(layout, digest)``: the facts of the tree that umoci makes of a manifest."""
    program = require_tool("umoci")

    def unpack(layout: Path, digest: str) -> Facts:
        # It knows tags alone, and no index: a layout of its own names the manifest.
        named = tmp_path / "named"
        named.mkdir()
        (named / "oci-layout").write_text('{"imageLayoutVersion":"1.0.0"}')
        (named / "blobs").symlink_to(layout / "blobs")
        data = (layout / "blobs/sha256" / digest.removeprefix("sha256:")).read_bytes()
        entry = {
            "mediaType": json.loads(data)["mediaType"],
            "digest": digest,
            "size": len(data),
            "annotations": {"org.opencontainers.image.ref.name": "it"},
        }
        (named / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [entry]}))
        command = [program, "unpack", "--image", f"{named}:it", str(tmp_path / "bundle")]
        run = subprocess.run(command, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        return tree_facts(str(tmp_path / "bundle/rootfs"))

    return unpack


def differences(ours: Facts, theirs: Facts) -> dict[str, Any]:
    """Path -> ours and theirs, where they differ."""
    paths = sorted(ours.keys() | theirs.keys())
    return {path: (ours.get(path), theirs.get(path)) for path in paths if ours.get(path) != theirs.get(path)}


@pytest.mark.parametrize("name", [*REAL, *CRAFTED])
def test_our_tree_is_umocis(
    name: str, store: ImageStore, images: Any, umoci: Callable[[Path, str], Facts], tmp_path: Path
) -> None:
    """An overlay of the layer trees that the store made shows what umoci unpacked."""
    plan = store.prepare(images.local(name), None, tmp_path)
    layout, digest = images.layout(name), str(plan.identity)
    if name == "zstd":  # which this umoci can't read: the same layers, compressed with gzip
        layout = tmp_path / "gzip"
        writer = LayoutWriter(layout)
        digest = writer.image(busybox_tree(), architecture=machine())["digest"]
    theirs = umoci(layout, digest)
    ours = overlay_facts(plan.lowers, tmp_path)
    assert len(theirs) > 3
    assert differences(ours, theirs) == {}
