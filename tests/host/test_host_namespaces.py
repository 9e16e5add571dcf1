"""The user namespace that a sandbox joins, and the limits in it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from forgeyard_host import idmaps
from forgeyard_host.idmaps import IdMap, NamespaceCache, bound_user_namespace
from forgeyard_model.errors import SandboxError, SandboxErrorKind

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


def test_a_namespace_that_others_made_gets_the_limits() -> None:
    """From outside, while a process waits in it; the host's own stay."""
    before = Path("/proc/sys/user/max_inotify_instances").read_text()
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", "echo in; read go"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdin is not None
        assert waiting.stdout.readline() == b"in\n"
        bound_user_namespace(waiting.pid)
        path = f"/proc/{waiting.pid}/ns/user"
        most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())
        assert (limit(path, "max_inotify_instances"), limit(path, "max_user_namespaces")) == (max(16, most // 4), 0)
        waiting.stdin.close()
    assert Path("/proc/sys/user/max_inotify_instances").read_text() == before


def test_a_namespace_that_can_not_be_bounded_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process's own namespace is none of a container's, and a limit that no kernel has is not passed over."""
    with pytest.raises(SandboxError) as refused:
        bound_user_namespace(os.getpid())
    assert (refused.value.kind, refused.value.reason) == (SandboxErrorKind.NAMESPACE_FAILED, "user_namespace_limits")
    monkeypatch.setattr(idmaps, "_limits", lambda: ("max_nothing_of_the_kind=1",))
    words = ["unshare", "--user", "--map-root-user", "sh", "-c", "echo in; read go"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        assert waiting.stdout is not None
        assert waiting.stdin is not None
        assert waiting.stdout.readline() == b"in\n"
        with pytest.raises(SandboxError, match="limits of a container's user namespace"):
            bound_user_namespace(waiting.pid)
        waiting.stdin.close()
