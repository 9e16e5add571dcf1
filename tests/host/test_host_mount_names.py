"""Mount points of others whose names are no text."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel


def test_hierarchies_are_found_beside_a_mount_point_that_is_no_text(tmp_path: Path) -> None:
    """A name of bytes in /proc/self/mountinfo is somebody else's, and no reason to fail."""
    target = bytes(tmp_path) + b"/\xff"
    script = "import sys; from forgeyard_host.cgroups import CgroupHost; print(CgroupHost.detect().mode.value)"
    shell = 'mkdir "$1" && mount -t tmpfs none "$1" && exec "$2" -c "$3"'
    argv = ["unshare", "--mount", "sh", "-c", shell, "sh", target, sys.executable, script]
    done = subprocess.run(argv, capture_output=True, timeout=30, check=False)
    assert done.stdout in (b"v1\n", b"v2\n"), done.stderr
