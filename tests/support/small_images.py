"""Images of busybox with a config or layers of a test's own."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import build


@cache
def busybox_layer() -> bytes:
    """The lowest layer of the busybox image: programs, and accounts root, app and nobody."""
    assert build.BUSYBOX is not None, "busybox is not installed"
    return build.busybox_layers(build.BUSYBOX)[0]


def image(path: Path, config: Mapping[str, Any] | None = None, layers: Sequence[bytes] = (), **more: Any) -> str:
    """A pinned reference to busybox below `layers`, with `config`, in a layout made at `path`."""
    writer = build.LayoutWriter(path)
    words = {"amd64": "x86_64", "arm64": "aarch64"}
    more.setdefault("architecture", next((name for name, kind in words.items() if kind == os.uname().machine), "amd64"))
    settings = {"Env": ["PATH=/bin"], **(config or {})}
    made = writer.image([busybox_layer(), *layers], settings, compress=False, **more)
    writer.finish(made)
    return f"oci:{path}@{made['digest']}"
