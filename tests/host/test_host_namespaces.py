"""The user namespace that a sandbox joins, and the limits in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from forgeyard_host import idmaps
from forgeyard_host.idmaps import IdMap, NamespaceCache

pytestmark = pytest.mark.kernel

WHOLE = ((0, 1_800_000_000, 65536),)


def limit(path: str, name: str) -> int:
    """A limit of user.max_* as a process inside the namespace reads it."""
    command = ["nsenter", f"--user={path}", "--", "cat", f"/proc/sys/user/{name}"]
    return int(subprocess.run(command, check=True, capture_output=True, pass_fds=[]).stdout)


def test_namespace_has_limits_of_its_own() -> None:
    """What is charged to root is limited inside, the host's own limits stay, and the map is the one asked for."""
    before = Path("/proc/sys/user/max_inotify_instances").read_text()
    namespace = NamespaceCache().get(IdMap(WHOLE, WHOLE))
    assert namespace.bounded
    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
    assert limit(namespace.path, "max_inotify_instances") == max(16, most // 4)
    assert limit(namespace.path, "max_user_namespaces") == 0
    shown = subprocess.run(
        ["nsenter", f"--user={namespace.path}", "--", "cat", "/proc/self/uid_map"], check=True, capture_output=True
    )
    assert shown.stdout.split() == [b"0", b"1800000000", b"65536"]
    assert Path("/proc/sys/user/max_inotify_instances").read_text() == before


def test_namespace_whose_limits_the_host_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves for mounts and says that it is not bounded. A limit that no kernel has stands for an old kernel's."""
    monkeypatch.setattr(idmaps, "_limits", lambda: ("max_nothing_of_the_kind=1",))
    namespace = NamespaceCache().get(IdMap(WHOLE, WHOLE))
    assert not namespace.bounded
    assert os.stat(namespace.path).st_ino == os.fstat(namespace.fd).st_ino
