"""The fixtures that other tests rest on: a check for leaks that can't see one would prove nothing."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def test_state_dir_can_be_walked_through(state_dir: Path) -> None:
    """Somebody else can pass through the state directory and all above it, and list nothing of it."""
    assert stat.S_IMODE(state_dir.stat().st_mode) == 0o711
    assert all(parent.stat().st_mode & stat.S_IXOTH for parent in state_dir.parents)
    assert len(str(state_dir)) < 32  # a Unix socket's path below it has 108 bytes in all


def test_leaks_sees_a_process(leaks: Any) -> None:
    """A child that still runs is named."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert leaks.look().beyond(leaks.before) == {"processes": [f"{child.pid} sleep 60"]}
        with pytest.raises(AssertionError, match="left behind"):
            leaks.assert_none(0)
    finally:
        child.kill()
        child.wait()


def test_leaks_sees_a_descriptor(leaks: Any) -> None:
    """An open descriptor is named by what it leads to."""
    fd = os.open("/usr", os.O_RDONLY | os.O_DIRECTORY)
    try:
        assert leaks.look().beyond(leaks.before) == {"fds": ["/usr"]}
    finally:
        os.close(fd)


@pytest.mark.kernel
def test_leaks_sees_a_mount(leaks: Any, state_dir: Path) -> None:
    """A mount below the state directory is named."""
    target = state_dir / "m"
    target.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", target], check=True)
    try:
        assert leaks.look().beyond(leaks.before) == {"mounts": [str(target)]}
    finally:
        subprocess.run(["umount", target], check=True)


@pytest.mark.kernel
def test_leaks_sees_what_lives_in_a_sandbox(leaks: Any, state_dir: Path) -> None:
    """A process that is nobody's child here, in a mount namespace of its own, is known by its mounts."""
    script = f"mount --bind {state_dir} /mnt && echo && exec sleep 60"
    # The middle shell ends at once, so that the process is adopted by another than this one.
    adopted = ["sh", "-c", 'setsid unshare -m sh -c "$0" & echo $!', script]
    with subprocess.Popen(adopted, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        lines = sorted(parent.stdout.readline().strip() for _ in range(2))
        pid = int(lines[1])
        os.kill(pid, 0)
        found = leaks.look().beyond(leaks.before).get("processes", [])
        os.kill(pid, 9)
    assert [entry.partition(" ")[0] for entry in found] == [str(pid)]


def test_a_missing_tool_is_loud(require_tool: Callable[[str], str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A tool that is there has a path; one that is not skips here and fails in CI, with the cure."""
    assert Path(require_tool("sh")).is_file()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="CI must have it"):
        require_tool("no-such-tool")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception, match=r"\./dev setup"):
        require_tool("no-such-tool")
