"""Whose connection it is, is the kernel's word; who may not connect gets nowhere."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from served import ALICE, JOB, prepare, socket_over, within

from forgeyard_api.client import RemoteExecutor
from forgeyard_api.serve.attempt_types import Caller, Wanted
from forgeyard_api.serve.checks import Checks
from forgeyard_api.serve.peers import Allowed, Peers
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.job import Job, Step
from forgeyard_model.policy import ApprovedHostPath

pytestmark = pytest.mark.kernel

BOTH = Allowed(frozenset({0, 1000}), frozenset({0}))

AS_ALICE = """
import asyncio, json, os, sys
from forgeyard_api.client import RemoteExecutor
from forgeyard_api.wire.messages import executor as wire
os.setgid(1000), os.setuid(1000)  # all is imported by now: she could not read this tree
async def main():
    async with RemoteExecutor.connect(sys.argv[1], reconnect=0.0) as remote:
        try:
            found = await remote.calls.call("ListSandboxes", wire.ListSandboxesRequest())
            print(json.dumps([attempt.attempt_id for attempt in found.attempts]))
            await remote.calls.call("Drain", wire.DrainRequest(drain=True))
        except Exception as error:
            print(json.dumps(str(error)))
asyncio.run(main())
"""


async def as_alice(target: str) -> list[object]:
    """What a process of uid 1000 is told: its attempts, then what becomes of a Drain."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", AS_ALICE, target, stdout=asyncio.subprocess.PIPE
    )
    out, _ = await process.communicate()
    return [json.loads(line) for line in out.splitlines()]


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A directory that other users can walk into."""
    path = Path(tempfile.mkdtemp(prefix="fy-open-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


def test_another_user_sees_its_own_alone(open_path: Path) -> None:
    """And is no operator, whatever it asks."""

    async def body() -> None:
        async with socket_over(open_path, FakeExecutor(lambda _: FakeRun(holds=True)), allowed=BOTH) as (target, table):
            await prepare(table, ALICE, Wanted("hers", JOB))
            await prepare(table, Caller(0, 0, 1), Wanted("roots", JOB))
            listed, refused = await as_alice(target)
            assert listed == ["hers"]
            assert "uid 1000 is no operator" in str(refused)
            assert not table.draining

    within(body())


def test_who_is_not_allowed_gets_nowhere(open_path: Path) -> None:
    """Not even to an answer; the socket of root alone is not even to be opened."""

    async def body() -> None:
        nobody_else = Allowed(frozenset({0}), frozenset({0}))
        async with socket_over(open_path, FakeExecutor(), allowed=nobody_else) as (target, _):
            path = Path(target.removeprefix("unix:"))
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
            path.parent.chmod(0o711)
            path.chmod(0o666)  # only the kernel's word is left to go by
            (refused,) = await as_alice(target)
            assert "failed" in str(refused)

    within(body())


def test_the_server_behind_is_reached_through_the_socket_alone(tmp_path: Path) -> None:
    """Whoever comes to gRPC's own socket by another way is nobody."""

    async def body() -> None:
        async with Peers.open(tmp_path / "run" / "x.sock", BOTH) as peers:
            inner = Path(peers.target.removeprefix("unix:"))
            assert stat.S_IMODE(inner.parent.stat().st_mode) == 0o700

            class Context:
                """A call from an address that nobody was passed on from."""

                def peer(self) -> str:
                    return "unix:"

            with pytest.raises(ExecutorError) as caught:
                peers.caller_of(Context())
            assert caught.value.reason == "not_allowed"
        assert not inner.parent.exists()
        assert not (tmp_path / "run" / "x.sock").exists()

    within(body())


def test_a_second_server_is_refused(tmp_path: Path) -> None:
    """One that died leaves a socket that the next one takes."""

    async def body() -> None:
        path = tmp_path / "run" / "x.sock"
        async with Peers.open(path, BOTH):
            with pytest.raises(ExecutorError, match="another server listens"):
                async with Peers.open(path, BOTH):
                    pass
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(path))
        async with Peers.open(path, BOTH):
            pass

    within(body())


def test_a_path_that_can_not_be_used_is_named(tmp_path: Path) -> None:
    """In one line, with the cure."""
    (tmp_path / "file").write_text("")

    async def body() -> None:
        with pytest.raises(ExecutorError, match=r"file/x\.sock.*serve\.socket"):
            async with Peers.open(tmp_path / "file" / "x.sock", BOTH):
                pass

    within(body())


def test_a_directory_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    """It may be everybody's; one that callers can't pass through is named, with the cure."""
    run = tmp_path / "run"
    run.mkdir(mode=0o700)

    async def body() -> None:
        with pytest.raises(ExecutorError, match=r"can pass through .*/run.*chmod o\+x"):
            async with Peers.open(run / "x.sock", BOTH):
                pass
        run.chmod(0o755)
        async with Peers.open(run / "x.sock", BOTH):
            assert stat.S_IMODE(run.stat().st_mode) == 0o755
        assert list(run.iterdir()) == []

    within(body())


def test_connections_that_break_leave_nothing(tmp_path: Path) -> None:
    """Neither a descriptor nor an address, however they break."""

    async def body() -> None:
        async with socket_over(tmp_path, FakeExecutor()) as (target, _):
            async with RemoteExecutor.connect(target) as remote:
                await remote.capabilities()
            path = target.removeprefix("unix:")
            for junk in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 100_000):
                reader, writer = await asyncio.open_unix_connection(path)
                writer.write(junk)
                writer.close()
                await reader.read()
            async with RemoteExecutor.connect(target) as remote:
                await remote.capabilities()

    within(body())


def test_host_paths_stay_below_the_callers_roots(tmp_path: Path) -> None:
    """By their real place, by field; another caller's roots are not one's own."""
    for name in ("hers", "his"):
        (tmp_path / name).mkdir()
    (tmp_path / "hers" / "out").symlink_to(tmp_path / "his")
    checks = Checks({1000: (str(tmp_path / "hers"),)}, ())

    def wanted(**changes: object) -> Wanted:
        return Wanted("a", **{"job": JOB, **changes})  # type: ignore[arg-type]  # fields by name

    checks.check(ALICE, wanted(source=str(tmp_path / "hers"), output=str(tmp_path / "hers" / "new")))
    path = (ApprovedHostPath("/etc", "/etc"),)
    for field, bad in (
        ("source", wanted(source=str(tmp_path / "his"))),
        ("source", wanted(source=str(tmp_path / "hers" / ".." / "his"))),
        ("output", wanted(output=str(tmp_path / "hers" / "out" / "new"))),
        ("source", wanted(source=f"{tmp_path / 'hers'}x")),
        ("source", wanted(source="relative")),
        (r"job\.host_paths", wanted(job=Job(rootfs="host", steps=(Step("x"),), host_paths=path))),
        (r"job\.toolchains", wanted(job=Job(rootfs="host", steps=(Step("x"),), toolchains=path))),
        (r"job\.image", wanted(job=Job(image=f"oci:{tmp_path}/his@sha256:{'0' * 64}", steps=(Step("x"),)))),
    ):
        with pytest.raises(InvalidRequest, match=f"^{field} "):
            checks.check(ALICE, bad)
    with pytest.raises(InvalidRequest, match="allows you: none"):
        checks.check(Caller(1001, 1001, 1), wanted(source=str(tmp_path / "hers")))
