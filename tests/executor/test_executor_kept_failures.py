"""What is kept of failed attempts: no secret in it, nobody's but root's, and not for ever."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from jobs import sh
from results import RESULT

from forgeyard_executor.kept_failures import (
    FailureKeeper,
    Workspace,
    list_kept,
    remove_kept,
    remove_oldest,
    sweep_kept,
)
from forgeyard_executor.scrubbing import Scrubber
from forgeyard_model.errors import InvalidRequest, SandboxError
from forgeyard_model.identity import SandboxId
from forgeyard_model.job import Step
from forgeyard_model.sensitive import is_sensitive, sensitive_values
from forgeyard_model.services import ServiceSpec

SECRET = 'hunter2"of\nmine'
DAY = 86400.0


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    """A writable layer with something in it."""
    top = tmp_path / "scratch"
    (top / "build" / "deep").mkdir(parents=True)
    (top / "build" / "plain.txt").write_text("nothing special")
    return top


def workspace(scratch: Path, **changes: object) -> Workspace:
    """Of that layer."""
    made = Workspace(SandboxId.mint(), str(scratch), (("build", "build"),), (("TOKEN", SECRET),), 0)
    return replace(made, **changes)  # type: ignore[arg-type]  # its fields


def kept(directory: Path, wanted: Workspace, seconds: float = DAY) -> Path:
    """Keep it."""
    keeping = FailureKeeper(directory, seconds, lambda _: True).begin(wanted)
    keeping.finish(replace(RESULT, sandbox_id=wanted.sandbox.value, attempt_id="a", message=f"saw {SECRET}"))
    return keeping.path


def test_no_secret_is_left(tmp_path: Path, scratch: Path) -> None:
    """In contents over a buffer's edge, in names, in targets of links, in the result; the rest is as it was."""
    build = scratch / "build"
    edge = (1 << 20) - 5
    (build / "deep" / "log").write_bytes(b"x" * edge + SECRET.encode() + b"tail")
    (build / "env").write_text(json.dumps({"T": SECRET}))
    name = SECRET.replace("\n", "") if os.sep in SECRET else SECRET
    (build / name).write_text("by name")
    (build / "link").symlink_to(SECRET)
    with (build / "sparse").open("wb") as file:
        file.seek(1 << 40)
        file.write(SECRET.encode())
    path = kept(tmp_path / "kept", workspace(scratch))
    left = path / "layers" / "build"
    assert sorted(entry.name for entry in left.iterdir()) == ["deep", "env", "plain.txt", "sparse"]
    assert (left / "deep" / "log").read_bytes() == b"x" * edge + b"*" * len(SECRET) + b"tail"
    assert (left / "plain.txt").read_text() == "nothing special"
    assert json.loads((left / "env").read_text())["T"].strip("*") == ""
    assert json.loads((path / "result.json").read_bytes())["message"].startswith("saw *")
    assert Scrubber.of([SECRET]).found_in(path) is None
    assert len(json.loads((path / "kept.json").read_bytes())["left_out"]) == 2


def test_only_root_gets_in(tmp_path: Path, scratch: Path) -> None:
    """Whatever modes and owners the job gave its files."""
    (scratch / "build" / "tool").touch(0o777)
    (scratch / "build" / "tool").chmod(0o4777)
    path = kept(tmp_path / "kept", workspace(scratch))
    assert [(entry.stat().st_mode & 0o777, entry.stat().st_uid) for entry in (path.parent, path)] == [(0o700, 0)] * 2
    tool = (path / "layers" / "build" / "tool").stat()
    assert (tool.st_uid, tool.st_mode & 0o7000) == (os.geteuid(), 0)


@pytest.mark.parametrize(
    ("secrets", "room", "why"),
    [((("PIN", "123"),), True, "PIN"), ((("TOKEN", "****"),), True, "still found"), ((), False, "no room")],
)
def test_what_can_not_be_kept_is_not(
    secrets: tuple[tuple[str, str], ...], room: bool, why: str, tmp_path: Path, scratch: Path
) -> None:
    """A secret that can't be searched for, one that is found after all, a full disk: nothing is left."""
    (scratch / "build" / "log").write_text("**** 123")
    keeper = FailureKeeper(tmp_path / "kept", DAY, lambda _: room)
    with pytest.raises(SandboxError, match=why):
        keeper.begin(workspace(scratch, secrets=secrets)).finish(RESULT)
    assert not (tmp_path / "kept").exists() or not list((tmp_path / "kept").iterdir())


def test_it_goes_when_its_time_has_come(tmp_path: Path, scratch: Path) -> None:
    """Also what a dead executor left half made; what is not due stays."""
    directory = tmp_path / "kept"
    due, stays = kept(directory, workspace(scratch), 0.0), kept(directory, workspace(scratch))
    half, made = SandboxId.mint(), SandboxId.mint()
    for sandbox in (half, made):
        (directory / f".{sandbox}.partial").mkdir()
    assert sweep_kept(directory, lambda sandbox: sandbox == made.value) == (due.name,)
    assert {path.name for path in directory.iterdir()} == {stays.name, f".{made}.partial"}
    (found,) = list_kept(directory)
    assert (found.attempt_id, found.path) == ("a", stays)
    assert found.until > datetime.now(UTC) + timedelta(seconds=DAY / 2)


def test_removed_by_name_or_for_room(tmp_path: Path, scratch: Path) -> None:
    """Sandbox or attempt; a name that fits nothing removes nothing."""
    directory = tmp_path / "kept"
    first, second = kept(directory, workspace(scratch), DAY), kept(directory, workspace(scratch), 2 * DAY)
    with pytest.raises(InvalidRequest, match="kept ls"):
        remove_kept(directory, [first.name, "other"])
    assert remove_kept(directory, [first.name]) == (first.name,)
    assert remove_kept(directory, ["a"]) == (second.name,)
    kept(directory, workspace(scratch))
    remove_oldest(directory, 1 << 60)
    assert list_kept(directory) == ()
    assert list_kept(tmp_path / "nowhere") == ()


def test_which_variables_are_secret() -> None:
    """By their names, of the job, its steps and its services; empty ones hold nothing."""
    assert [name for name in ("API_TOKEN", "PgPassword", "PATH", "SSH_KEY", "HOME") if is_sensitive(name)] == [
        "API_TOKEN",
        "PgPassword",
        "SSH_KEY",
    ]
    steps = (Step("true", env={"STEP_KEY": "s"}), sh("true"))
    services = (ServiceSpec("db", argv=("x",), env={"DB_PASSWORD": "d"}),)
    found = sensitive_values({"A_TOKEN": "a", "B_TOKEN": "", "CI": "true"}, steps, services)
    assert found == (("A_TOKEN", "a"), ("DB_PASSWORD", "d"), ("STEP_KEY", "s"))
