"""The operator's commands against a running server, from a process of their own."""

from __future__ import annotations

import asyncio
import json
import os
import pty
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pytest
from commands import Command, Ran, begin
from served import JOB, ROOT, prepare, socket_over, until, within

from forgeyard_api.main import REFUSED
from forgeyard_api.serve.attempt_types import AttemptState, Wanted
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_executor import config_load
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.services import ServiceSpec

USAGE = 2
HOLDS = FakeRun(holds=True, output=b"one\ntwo\nthree\n", error_output=b"oh\n")


class Bed(NamedTuple):
    """A server, and its command line."""

    table: AttemptTable
    executor: FakeExecutor
    socket: Path

    async def forgeyard(self, *arguments: str) -> Ran:
        """Run a command to its end."""
        return await (await self.begin(*arguments)).ended()

    async def begin(self, *arguments: str, terminal: str = "") -> Command:
        """Start a command."""
        return await begin(self.socket.parent, *arguments, "--socket", str(self.socket), terminal=terminal)

    async def running(self, name: str, **changes: object) -> None:
        """An attempt that holds."""
        wanted = Wanted(name, replace(JOB, **changes), start=True)  # type: ignore[arg-type]  # fields of a job
        await prepare(self.table, ROOT, wanted)
        await self.table.wait(ROOT, name, AttemptState.RUNNING)


def served(tmp_path: Path, body: Callable[[Bed], Awaitable[None]], fake: FakeRun = HOLDS) -> None:
    """Await `body` with a server whose jobs all go as `fake` says."""

    async def main() -> None:
        executor = FakeExecutor(lambda _: fake)
        async with socket_over(tmp_path, executor) as (target, table):
            await body(Bed(table, executor, Path(target.removeprefix("unix:"))))

    within(main())


def test_ps(tmp_path: Path) -> None:
    """Attempts with their services, on one line each; those that ended only when asked for."""

    async def body(bed: Bed) -> None:
        await bed.running("a", services=(ServiceSpec("db", argv=("true",)),))
        await bed.running("b")
        await bed.table.cancel(ROOT, "b")
        await bed.table.wait(ROOT, "b", AttemptState.ENDED)
        now, all_of_them = await asyncio.gather(bed.forgeyard("ps"), bed.forgeyard("ps", "-a", "--json"))
        assert now.out.startswith(b"ATTEMPT")
        assert b"+db" in now.out
        assert b"running" in now.out
        assert now.out.count(b"\n") == 2
        a, b = json.loads(all_of_them.out)
        assert (a["attempt_id"], a["state"], a["services"]) == ("a", "running", [{"name": "db"}])
        assert (b["attempt_id"], b["state"], b["result"]["outcome"]) == ("b", "ended", "cancelled")

    served(tmp_path, body)


def test_logs(tmp_path: Path) -> None:
    """Both streams on their own, all of them or the last lines, also of a service."""

    async def body(bed: Bed) -> None:
        await bed.running("a", services=(ServiceSpec("db", argv=("true",)),))
        whole, tail, service, none = await asyncio.gather(
            bed.forgeyard("logs", "a"),
            bed.forgeyard("logs", "a", "--tail", "2"),
            bed.forgeyard("logs", "a", "--service", "db"),
            bed.forgeyard("logs", "b"),
        )
        assert (whole.code, whole.out, whole.err) == (0, b"one\ntwo\nthree\n", b"oh\n")
        assert (tail.out, tail.err) == (b"three\n", b"oh\n")
        assert service.out == b"ready\n"
        assert none.code == REFUSED
        assert none.err.count(b"\n") == 1
        assert b"forgeyard ps" in none.err

    served(tmp_path, body, replace(HOLDS, service_output={"db": b"ready\n"}))


def test_logs_followed(tmp_path: Path) -> None:
    """To the end of the attempt, and no further."""

    async def body(bed: Bed) -> None:
        await bed.running("a")
        following = await bed.begin("logs", "-f", "a")
        assert await following.lines(3) == [b"one", b"two", b"three"]
        bed.executor.attempts[0].release()
        ran = await following.ended()
        assert (ran.code, ran.out, ran.err) == (0, b"one\ntwo\nthree\n", b"oh\n")

    served(tmp_path, body)


def test_logs_on_a_terminal(tmp_path: Path) -> None:
    """What would steer the terminal is taken out, unless it is asked for."""

    async def on_terminal(bed: Bed, *arguments: str) -> bytes:
        ours, theirs = pty.openpty()
        try:
            await (await bed.begin(*arguments, terminal=os.ttyname(theirs))).ended()
            return os.read(ours, 4096)
        finally:
            os.close(theirs)
            os.close(ours)

    async def body(bed: Bed) -> None:
        await bed.running("a")
        assert await on_terminal(bed, "logs", "a") == b"red\r\n"
        assert await on_terminal(bed, "logs", "a", "--raw") == b"\x1b[31mred\x1b]0;x\x07\r\n"

    served(tmp_path, body, FakeRun(holds=True, output=b"\x1b[31mred\x1b]0;x\x07\n"))


def test_inspect(tmp_path: Path) -> None:
    """By a beginning of its name; its containers, and their bundles as they are."""

    async def body(bed: Bed) -> None:
        await bed.running("attempt-1")
        found, bundle, wrong = await asyncio.gather(
            bed.forgeyard("inspect", "attempt"),
            bed.forgeyard("inspect", "attempt", "--bundle"),
            bed.forgeyard("inspect", "attempt", "--bundle", "--service", "db"),
        )
        (container,) = json.loads(found.out)["containers"]
        (live,) = await bed.executor.inspect_attempt(container["sandbox_id"])
        assert container["state"] == live.state
        assert container["container_id"] == live.container_id
        assert bundle.out == live.bundle.config
        assert wrong.code == REFUSED
        assert b"--service" in wrong.err

    served(tmp_path, body)


def test_top(tmp_path: Path) -> None:
    """What the containers use, once where there is no terminal."""

    async def body(bed: Bed) -> None:
        await bed.running("a")
        shown, read = await asyncio.gather(
            bed.forgeyard("top", "--interval", "1ms"), bed.forgeyard("top", "--interval", "1ms", "--json")
        )
        assert shown.out.startswith(b"ATTEMPT")
        (usage,) = json.loads(read.out)
        (live,) = await bed.executor.inspect_attempt(bed.executor.attempts[0].sandbox_id)
        assert live.usage is not None
        assert usage["attempt_id"] == "a"
        assert usage["memory"] == live.usage.memory_bytes

    served(tmp_path, body)


def test_stop_and_wait(tmp_path: Path) -> None:
    """The attempt ends for the reason given, and who waits for it exits as its job did."""

    async def body(bed: Bed) -> None:
        await bed.running("a")
        waiting = await bed.begin("wait", "a", "--json")
        stopped = await bed.forgeyard("stop", "a", "--reason", "superseded")
        assert (stopped.code, stopped.err) == (0, b"")
        ran = await waiting.ended()
        result = json.loads(ran.out)["result"]
        assert result["cancellation"] == "superseded"
        assert ran.code == result["exit_code"] != 0

    served(tmp_path, body)


def test_wait_for_what_has_no_result(tmp_path: Path) -> None:
    """The error in one line, and 125."""

    async def body(bed: Bed) -> None:
        await prepare(bed.table, ROOT, Wanted("a", JOB, start=True))
        ran = await bed.forgeyard("wait", "a")
        assert (ran.code, ran.out) == (REFUSED, b"a error\n")
        assert b"no room" in ran.err
        assert ran.err.count(b"\n") == 1

    served(tmp_path, body, FakeRun(refused=ExecutorError(ExecutorErrorKind.PREPARE, "no_room", "no room")))


def test_events(tmp_path: Path) -> None:
    """What was, then what comes; each once."""

    async def body(bed: Bed) -> None:
        await bed.running("a")
        following = await bed.begin("events", "-f", "--json")
        await following.lines(2)
        past = await bed.forgeyard("events")
        assert past.out.count(b"\n") == 2
        bed.table.drain()
        await following.lines(3)
        bed.executor.attempts[0].release()
        kinds = [json.loads(line)["kind"] for line in await following.lines(4)]
        assert kinds == ["queued", "running", "drain", "ended"]
        following.terminate()
        await following.ended()

    served(tmp_path, body)


def test_drain(tmp_path: Path) -> None:
    """Nothing is taken in until it is taken back; `--wait` returns when none is left."""

    async def body(bed: Bed) -> None:
        await bed.running("a")
        waiting = await bed.begin("drain", "--wait", "--json")
        await until(lambda: bed.table.draining)
        bed.executor.attempts[0].release()
        assert json.loads((await waiting.ended()).out) == {"draining": True, "running": 0, "queued": 0}
        assert (await bed.forgeyard("drain", "--undrain")).out == b"takes attempts in; 0 running, 0 queued\n"
        assert not bed.table.draining

    served(tmp_path, body)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (("stop", "a"), REFUSED, "forgeyard serve"),
        (("ps",), REFUSED, "forgeyard serve"),
        (("stop", "a", "--reason", "because"), USAGE, "run_cancelled"),
        (("wait", "a", "--until", "dawn"), USAGE, "prepared"),
        (("top", "--interval", "2"), USAGE, "write 2s"),
        (("drain", "--wait", "--undrain"), USAGE, "keep one"),
        (("ps", "--state-dir", "/x"), USAGE, "keep one"),
    ],
)
def test_what_can_not_be_done(
    arguments: tuple[str, ...], code: int, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line with the cure."""
    from forgeyard_api.main import run

    assert run([*arguments, "--socket", str(tmp_path / "none.sock")]) == code
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_ps_where_no_server_listens(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state directory's attempts, and a line that says so."""
    from forgeyard_api.main import run

    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\n[serve]\nsocket = "{tmp_path}/none.sock"\n')
    monkeypatch.setattr(config_load, "SYSTEM_FILE", config)
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("FORGEYARD_STATE_DIR", "FORGEYARD_SOCKET"):
        monkeypatch.delenv(name, raising=False)
    assert run(["ps"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("SANDBOX")
    assert (
        err == f"forgeyard: no server listens at {tmp_path}/none.sock; these are the attempts of the state directory\n"
    )
