"""What a tree holds, down to the last bit: for comparing one unpacker's result with another's.

Run as a program it prints the facts of the directory named, as JSON.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

Facts = dict[str, dict[str, object]]
_HIDDEN = ("trusted.overlay.", "security.selinux")
"""Attributes that say how a tree is kept, not what the image's author put there."""


def tree_facts(root: str) -> Facts:
    """Path -> type, mode, owner, link count, attributes, time and contents, for everything below `root` and itself.

    Directories have no link count: overlayfs does not tell it.
    """
    found = {".": _facts(root)}
    # A layer need not name the root, and unpackers differ in what time they give it then.
    del found["."]["mtime"]
    for folder, directories, files in os.walk(root):
        for name in [*directories, *files]:
            path = os.path.join(folder, name)
            found[os.path.relpath(path, root)] = _facts(path)
    return found


def _facts(path: str) -> dict[str, object]:
    status = os.lstat(path)
    names = sorted(name for name in os.listxattr(path, follow_symlinks=False) if not name.startswith(_HIDDEN))
    facts: dict[str, object] = {
        "type": stat.S_IFMT(status.st_mode),
        "mode": stat.S_IMODE(status.st_mode),
        "owner": [status.st_uid, status.st_gid],
        "xattrs": {name: os.getxattr(path, name, follow_symlinks=False).hex() for name in names},
        "mtime": int(status.st_mtime),
    }
    if stat.S_ISLNK(status.st_mode):
        facts["target"] = os.readlink(path)
    elif stat.S_ISREG(status.st_mode):
        with open(path, "rb") as file:
            facts["content"] = hashlib.file_digest(file, "sha256").hexdigest()
    if not stat.S_ISDIR(status.st_mode):
        facts["links"] = status.st_nlink
    return facts


def overlay_facts(lowers: Sequence[str], scratch: Path) -> Facts:
    """The facts of what a read-only overlay of `lowers` shows, topmost first, as a job's root would be mounted."""
    merged, bottom = scratch / "merged", scratch / "bottom"
    for folder in (merged, bottom):
        folder.mkdir()
    # An overlay without an upper directory wants two lowers; the mounts end with their namespace.
    options = "ro,lowerdir=" + ":".join([*lowers, *([str(bottom)] if len(lowers) == 1 else [])])
    script = 'mount -t overlay overlay -o "$1" "$2" && exec "$3" "$4" "$2"'
    command = ["unshare", "--mount", "sh", "-c", script, "sh", options, str(merged), sys.executable, __file__]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout))


if __name__ == "__main__":
    print(json.dumps(tree_facts(sys.argv[1])))
