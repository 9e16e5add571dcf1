"""Unpacks test layers and describes trees, for the tests of images."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import build

from forgeyard_oci.unpack import UnpackReport, unpack_layer
from forgeyard_oci.unpack_limits import UnpackLimits
from forgeyard_oci.unpack_merged import MergedTree
from forgeyard_oci.unpack_stream import LayerStream


def unpack_bytes(
    layer: bytes,
    target: Path,
    lowers: Sequence[Path] = (),
    *,
    limits: UnpackLimits | None = None,
    compress: bool = False,
    blob: bytes | None = None,
) -> UnpackReport:
    """Unpack an uncompressed layer into `target`, made here; `blob` replaces the bytes that are stored for it."""
    target.mkdir(parents=True)
    data = blob if blob is not None else gzip.compress(layer, mtime=0) if compress else layer
    file = target.parent / f"{target.name}.blob"
    file.write_bytes(data)
    fd = os.open(file, os.O_RDONLY)
    try:
        stream = LayerStream(
            fd,
            media_type="application/vnd.oci.image.layer.v1.tar" + ("+gzip" if compress or blob is not None else ""),
            digest=build.sha256(data),
            size=len(data),
            diff_id=build.sha256(layer),
            limits=limits or UnpackLimits(),
        )
        return unpack_layer(stream, str(target), MergedTree([str(lower) for lower in lowers]), limits or UnpackLimits())
    finally:
        os.close(fd)


def unpack(entries: Iterable[Any], target: Path, lowers: Sequence[Path] = (), **rest: Any) -> UnpackReport:
    """Unpack a layer made of `entries`."""
    return unpack_bytes(build.tar(entries), target, lowers, **rest)


def describe(root: Path) -> dict[str, str]:
    """Every path below `root` with its type, mode, owner and contents in one word each. Whiteouts show as such."""
    lines = {}
    for folder, directories, files in os.walk(root):
        for name in [*directories, *files]:
            path = os.path.join(folder, name)
            lines[os.path.relpath(path, root)] = _describe(path)
    return lines


def _describe(path: str) -> str:
    status = os.lstat(path)
    owner = f"{stat.S_IMODE(status.st_mode):o} {status.st_uid}:{status.st_gid}"
    if stat.S_ISDIR(status.st_mode):
        mark = " opaque" if "trusted.overlay.opaque" in os.listxattr(path) else ""
        return f"dir {owner}{mark}"
    if stat.S_ISLNK(status.st_mode):
        return f"link {os.readlink(path)}"
    if stat.S_ISCHR(status.st_mode):
        return "whiteout" if status.st_rdev == 0 else "device"
    if stat.S_ISREG(status.st_mode):
        return f"file {owner} {Path(path).read_bytes()[:80]!r}"
    return "other"


def names(root: Path) -> set[str]:
    """The paths below `root`, without directories."""
    return {path for path, line in describe(root).items() if not line.startswith("dir")}


def overlay_names(lowers: Sequence[Path], scratch: Path) -> dict[str, str]:
    """What a real overlay of `lowers`, topmost first, shows: path -> first bytes, link target or "dir"."""
    merged = scratch / "merged"
    merged.mkdir()
    options = "lowerdir=" + ":".join(map(str, [*lowers, scratch / "bottom"]))
    (scratch / "bottom").mkdir()  # an overlay without an upper directory wants two lowers
    # The mount namespace of a process that ends takes the mount with it.
    script = f"mount -t overlay none -o {options} {merged} && cd {merged} && exec {sys.executable} -c '{_LISTING}'"
    run = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


_LISTING = """
import json, os
found = {}
for folder, directories, files in os.walk("."):
    for name in directories + files:
        path = os.path.join(folder, name)
        what = "dir" if os.path.isdir(path) else ""
        if os.path.islink(path):
            what = "-> " + os.readlink(path)
        elif not what:
            what = open(path, errors="replace").read(80)
        found[path[2:]] = what
print(json.dumps(found))
"""
