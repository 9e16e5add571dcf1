"""Looking at a job while it runs: its bundle for podman, a shell in its sandbox."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from forgeyard_api.main import REFUSED, run
from forgeyard_api.operate.bundle_export import write_bundle
from forgeyard_api.operate.podman_command import podman_command
from forgeyard_api.operate.shell import compiled
from forgeyard_executor import Executor, Job, Step
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.live import LiveContainer

SECONDS = 100
LOOK = "id -u; cat /work/build/x; grep -E 'NoNewPrivs|CapBnd|^Seccomp:' /proc/self/status; cat /proc/self/uid_map"
CONFIG = {"root": {"path": "/nowhere"}, "linux": {}, "process": {"user": {"uid": 1, "gid": 2}}, "mounts": []}


def while_it_runs(state: Path, body: Callable[[LiveContainer], Awaitable[None]]) -> None:
    """Await `body` with the container of a job that has written /work/build/x."""

    async def main() -> None:
        async with asyncio.timeout(SECONDS), Executor.open(state, runtime="runc") as executor:
            job = Job(rootfs="host", steps=(Step("sh", "-c", "echo hi > /work/build/x; echo ready; exec sleep 300"),))
            async with executor.run(job, attempt_id="looked-at") as execution:
                await anext(execution.output())
                (container,) = await executor.inspect_attempt(execution.sandbox_id)
                await body(container)
                await execution.cancel(kill=True)

    asyncio.run(main())


@pytest.fixture
def short() -> Iterator[Path]:
    """A directory whose path is short enough to be Podman's run root."""
    path = Path(tempfile.mkdtemp(prefix="fy-p-", dir="/var/tmp"))
    yield path
    shutil.rmtree(path)


@pytest.mark.kernel
@pytest.mark.timeout(SECONDS + 20)
def test_podman_runs_what_is_exported(
    state_dir: Path, tmp_path: Path, short: Path, require_tool: Callable[[str], str], leaks: object
) -> None:
    """A second container on the job's files, with its user, its ids, its filter and none of its processes."""
    podman = require_tool("podman")

    async def body(container: LiveContainer) -> None:
        directory = tmp_path / "bundle"
        config = write_bundle(container.bundle.config, directory)
        assert (directory / "config.json").read_bytes() == container.bundle.config
        assert (directory / "rootfs" / "usr").is_dir()
        _, *rest = podman_command(config, str(directory), ("/bin/sh", "-c", LOOK))
        kept = ("--root", str(short / "root"), "--runroot", str(short / "run"), "--runtime", "runc")
        command = (podman, *kept, "--cgroup-manager", "cgroupfs", *(word for word in rest if word != "--tty"))
        process = await asyncio.create_subprocess_exec(*command, stdin=-3, stdout=-1, stderr=-1)
        out, err = await process.communicate()
        lines = [line.split() for line in out.decode().splitlines()]
        assert process.returncode == 0, err
        base = config["linux"]["uidMappings"][0]["hostID"]
        assert lines[:2] == [["1000"], ["hi"]]
        assert lines[2:] == [
            ["CapBnd:", "0" * 16],
            ["NoNewPrivs:", "1"],
            ["Seccomp:", "2"],
            ["0", str(base), "65536"],
        ]

    while_it_runs(state_dir, body)


@pytest.mark.kernel
@pytest.mark.timeout(SECONDS + 20)
def test_a_shell_has_no_more_than_the_job(state_dir: Path, require_tool: Callable[[str], str], leaks: object) -> None:
    """The same namespaces, user, capabilities and filter; its exit code is the command's."""
    require_tool("runc")

    async def body(container: LiveContainer) -> None:
        script = f"{LOOK}; readlink /proc/self/ns/user /proc/self/ns/net /proc/self/ns/mnt; exit 3"
        words = ("shell", "looked-at", "--state-dir", str(state_dir), "--", "/bin/sh", "-c", script)
        # No fork server's, which stays: this test looks for what is left behind.
        shell = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "forgeyard_api", *words), stdin=-3, stdout=-1, stderr=-1
        )
        out, err = await shell.communicate()
        lines = out.decode().splitlines()
        assert shell.returncode == 3, err
        assert lines[:2] == ["1000", "hi"]
        assert [line.split()[1] for line in lines[2:5]] == ["0" * 16, "1", "2"]
        names = [os.readlink(f"/proc/{container.pid}/ns/{kind}") for kind in ("user", "net", "mnt")]
        assert lines[6:9] == names
        assert b"recorded nowhere" in err

    while_it_runs(state_dir, body)


def test_nothing_of_its_rights_is_changed() -> None:
    """A shell's process.json is the container's own but for what it runs, and where."""
    config = {
        "mounts": [{"destination": "/work/build"}],
        "process": {"user": {"uid": 1000}, "capabilities": {"bounding": []}, "noNewPrivileges": True, "args": ["x"]},
    }
    made = compiled(config, ("sh",), terminal=True)
    assert (made["args"], made["cwd"], made["terminal"]) == (["sh"], "/work/build", True)
    same = ("user", "capabilities", "noNewPrivileges")
    assert [made[key] for key in same] == [config["process"][key] for key in same]  # type: ignore[index]  # a mapping


def test_a_command_of_podmans_has_what_the_bundle_has() -> None:
    """Every limit and right that podman knows by a flag; our own directory is left out."""
    config = {
        "root": {"path": "/r", "readonly": True},
        "hostname": "h",
        "process": {
            "user": {"uid": 1, "gid": 2},
            "cwd": "/x",
            "noNewPrivileges": True,
            "capabilities": {"bounding": ["CAP_CHOWN"]},
            "rlimits": [{"type": "RLIMIT_NOFILE", "soft": 1, "hard": 2}],
        },
        "mounts": [
            {"type": "bind", "source": "/a", "destination": "/work/source", "options": ["rbind", "ro", "nosuid"]},
            {"type": "bind", "source": "/c", "destination": "/.forgeyard", "options": []},
            {"type": "tmpfs", "source": "tmpfs", "destination": "/dev", "options": []},
        ],
        "linux": {"seccomp": {"x": 1}, "resources": {"memory": {"limit": 5}, "cpu": {"quota": 1, "period": 2}}},
    }
    command = podman_command(config, "/d")
    assert {
        "--read-only",
        "--user=1:2",
        "--workdir=/work/source",
        "--cap-drop=all",
        "--cap-add=CAP_CHOWN",
        "--security-opt=no-new-privileges",
        "--security-opt=seccomp=/d/seccomp.json",
        "--memory=5",
        "--cpus=0.5",
        "--ulimit=nofile=1:2",
        "--volume=/a:/work/source:rbind,rprivate,ro,nosuid",
    } <= set(command)
    assert sum(word.startswith("--volume") for word in command) == 1
    assert command[-3:] == ("--rootfs", "/r", "/bin/sh")


def test_what_can_not_be_exported(tmp_path: Path) -> None:
    """A root that is not here, and a place that can't be written."""
    with pytest.raises(ExecutorError, match="no directory of this host"):
        write_bundle(json.dumps(CONFIG).encode(), tmp_path / "a")
    (tmp_path / "file").touch()
    here = {**CONFIG, "root": {"path": str(tmp_path)}}
    with pytest.raises(InvalidRequest, match="can't be written"):
        write_bundle(json.dumps(here).encode(), tmp_path / "file" / "b")


@pytest.mark.kernel
def test_a_shell_in_nothing(state_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line, with where to look."""
    assert run(["shell", "nobody", "--state-dir", str(state_dir)]) == REFUSED
    err = capsys.readouterr().err
    assert "forgeyard ps" in err
    assert err.count("\n") == 1
