"""How CRI shows containers: their ends, backends that hang, bundles, logs, and what may be changed."""

from __future__ import annotations

import asyncio
import json
import stat
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_bed import cri_over
from cri_tables import HOLDS, WHEN, WITH_SERVICE, bed, logged, refused, running
from served import ALICE, BOB, JOB, prepare, table_over, until, within

from forgeyard_api.cri.ends import course_of
from forgeyard_api.cri.ids import JOB as JOB_CONTAINER
from forgeyard_api.cri.ids import container_id, pod_id
from forgeyard_api.cri.log_file import LineSplitter, LogFile
from forgeyard_api.cri.messages import cri
from forgeyard_api.cri.pods import Pod, ShownContainer
from forgeyard_api.cri.views import stats_message
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Wanted
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.live import LiveContainer, LiveUsage
from forgeyard_model.plan import Bundle
from forgeyard_model.result import EndCause, Outcome, ProcessExit, ServiceResult, ServiceState
from forgeyard_runtimes.spool_format import OutputChunk

# ---- how containers end


@pytest.mark.parametrize(
    ("run", "code", "reason"),
    [
        (FakeRun(), 0, "Completed"),
        (FakeRun(exit_code=3), 3, "Error"),
        (FakeRun(outcome=Outcome.OUT_OF_MEMORY), 137, "OOMKilled"),
        (FakeRun(outcome=Outcome.TIMED_OUT), 124, "TimedOut"),
        (FakeRun(lost=ExecutorError(ExecutorErrorKind.LOST, "keeper_lost", "gone")), 255, "Lost"),
    ],
)
def test_the_end_of_a_job(state_dir: Path, run: FakeRun, code: int, reason: str) -> None:
    """Its exit code, and why, in the words that crictl's users know."""

    async def body() -> None:
        async with bed(state_dir, FakeExecutor(lambda _: run)) as (table, endpoint):
            await prepare(table, ALICE, Wanted("a", JOB, start=True))
            view = await table.wait(ALICE, "a")
            status = (await endpoint.call("ContainerStatus", container_id=container_id(view))).status
            assert (status.state, status.exit_code, status.reason) == (cri.CONTAINER_EXITED, code, reason)
            assert view.finished_at is not None
            assert status.finished_at == round(view.finished_at.timestamp() * 1e6) * 1000
            assert status.image.image
            assert status.image_ref

    within(body())


SERVICES = [
    (ServiceResult("db", ServiceState.READY), 0, "Completed"),
    (ServiceResult("db", ServiceState.DIED, exit=ProcessExit(256, code=1)), 1, "Died"),
    (ServiceResult("db", ServiceState.DIED, exit=ProcessExit(9, signal=9), oom=True), 137, "OOMKilled"),
    (ServiceResult("db", ServiceState.FAILED), 255, "Failed"),
    (ServiceResult("db", ServiceState.NOT_STARTED), 255, "NotStarted"),
]


@pytest.mark.parametrize(("service", "code", "reason"), SERVICES)
def test_the_end_of_a_service(service: ServiceResult, code: int, reason: str) -> None:
    """As its result has it; one that we ended with the job has done its work."""
    result = replace(_result(), services=(service,))
    view = replace(_view(AttemptState.ENDED), result=result, services=("db",))
    container = ShownContainer("id", "db", "db", None, fresh=False)
    course = course_of(Pod("pod", view, (container,)), container)
    assert (course.state, course.exit_code, course.reason) == (cri.CONTAINER_EXITED, code, reason)


def test_a_container_that_ended_is_not_said_to_have_succeeded() -> None:
    """Until its attempt is judged nobody knows, and 0 would be a claim."""
    container = ShownContainer("id", JOB_CONTAINER, "job", _live("exited"), fresh=True)
    course = course_of(Pod("pod", _view(AttemptState.RUNNING), (container,)), container)
    assert (course.state, course.exit_code, course.reason) == (cri.CONTAINER_EXITED, 255, "Unknown")


# ---- backends that do not answer


class Hanging(FakeExecutor):
    """Does not answer what is asked of some attempts."""

    def __init__(self) -> None:
        super().__init__(lambda _: HOLDS)
        self.hangs: set[str] = set()
        self.vanished: set[str] = set()
        self.asked = 0

    async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
        """What is there, or no answer at all."""
        self.asked += 1
        if sandbox_id in self.hangs:
            await asyncio.Event().wait()
        if sandbox_id in self.vanished:
            raise ExecutorError(ExecutorErrorKind.LOST, "no_such_attempt", "gone")
        return await super().inspect_attempt(sandbox_id)


def test_a_backend_that_hangs_holds_up_nobody(state_dir: Path) -> None:
    """Its containers are shown with state unknown, the others as they are; so in every call."""

    async def body() -> None:
        executor = Hanging()
        async with bed(state_dir, executor) as (table, endpoint):
            stuck = await running(table, "stuck")
            fine = await running(table, "fine")
            executor.hangs.add(stuck.sandbox_id)
            shown = {item.id: item.state for item in (await endpoint.call("ListContainers")).containers}
            assert shown[container_id(stuck)] == cri.CONTAINER_UNKNOWN
            assert shown[container_id(fine)] == cri.CONTAINER_RUNNING
            status = (await endpoint.call("ContainerStatus", container_id=container_id(stuck), verbose=True)).status
            assert (status.state, status.message) == (cri.CONTAINER_UNKNOWN, "its runtime does not answer")
            await endpoint.call("PodSandboxStatus", pod_sandbox_id=pod_id(stuck))
            stats = {item.attributes.id: item for item in (await endpoint.call("ListContainerStats")).stats}
            assert not stats[container_id(stuck)].HasField("cpu")
            assert stats[container_id(fine)].HasField("cpu")

    within(body())


def test_an_attempt_that_vanishes_while_it_is_listed(state_dir: Path) -> None:
    """It is shown as it was known, and the rest of the list is whole."""

    async def body() -> None:
        executor = Hanging()
        async with bed(state_dir, executor) as (table, endpoint):
            views = [await running(table, name) for name in ("a", "b")]
            executor.vanished.add(views[0].sandbox_id)
            shown = {item.id: item.state for item in (await endpoint.call("ListContainers")).containers}
            assert shown == {
                container_id(views[0]): cri.CONTAINER_UNKNOWN,
                container_id(views[1]): cri.CONTAINER_RUNNING,
            }

    within(body())


# ---- what is shown of a container


def test_inspect_shows_the_bundle_also_after_the_end(state_dir: Path) -> None:
    """What was seen while it ran is kept: spec, digests, limits, mounts and policy."""
    config = json.dumps(SPEC).encode()

    class Real(FakeExecutor):
        async def inspect_attempt(self, sandbox_id: str) -> tuple[LiveContainer, ...]:
            found = await super().inspect_attempt(sandbox_id)
            bundle = Bundle(config, "sha256:plan", "sha256:bundle")
            return tuple(replace(item, bundle=bundle, rootfs="sha256:root", image="busybox") for item in found)

    async def body() -> None:
        async with bed(state_dir, Real(lambda _: HOLDS)) as (table, endpoint):
            view = await running(table, "a")
            for ended in (False, True):
                if ended:
                    await table.cancel(ALICE, "a")
                    await table.wait(ALICE, "a")
                answer = await endpoint.call("ContainerStatus", container_id=container_id(view), verbose=True)
                info = json.loads(answer.info["info"])
                assert info["runtimeSpec"] == SPEC
                assert info["digests"]["bundle"] == "sha256:bundle"
                assert info["limits"]["memory"] == {"limit": 1 << 20, "swap": 1 << 20}
                assert info["policy"]["userNamespace"]
                assert info["policy"]["seccomp"] == "general-build-2"
                (mount,) = answer.status.mounts
                assert (mount.container_path, mount.host_path, mount.readonly) == ("/src", "/host/src", True)
                assert answer.status.resources.linux.memory_limit_in_bytes == 1 << 20
                assert answer.status.resources.linux.unified["pids.max"] == "64"
                assert answer.status.image_ref == "sha256:root"
            assert "info" not in (await endpoint.call("ContainerStatus", container_id=container_id(view))).info

    within(body())


SPEC = {
    "ociVersion": "1.0.2",
    "annotations": {"dev.forgeyard.seccomp": "general-build-2"},
    "process": {"noNewPrivileges": True, "user": {"uid": 1000, "gid": 1000}},
    "root": {"path": "/r", "readonly": True},
    "mounts": [
        {"destination": "/src", "source": "/host/src", "type": "bind", "options": ["rbind", "ro"]},
        {"destination": "/proc", "source": "proc", "type": "proc"},
    ],
    "linux": {
        "namespaces": [{"type": "user"}, {"type": "pid"}, {"type": "network", "path": "/n"}],
        "resources": {"memory": {"limit": 1 << 20, "swap": 1 << 20}, "pids": {"limit": 64}},
    },
}


def test_stats_say_what_is_known_and_no_more() -> None:
    """Nanoseconds, bytes and the moment they were read at; what the host can't tell is left out."""
    view = _view(AttemptState.RUNNING)
    usage = LiveUsage(WHEN, cpu_nanoseconds=12, memory_bytes=34)
    container = ShownContainer("id", JOB_CONTAINER, "job", replace(_live("running"), usage=usage), fresh=True)
    stats = stats_message(Pod("pod", view, (container,)), container)
    assert (stats.cpu.timestamp, stats.cpu.usage_core_nano_seconds.value) == (1767323045000006000, 12)
    assert stats.memory.working_set_bytes.value == 34
    assert not stats.HasField("writable_layer")
    stale = replace(container, fresh=False)
    assert not stats_message(Pod("pod", view, (stale,)), stale).HasField("cpu")


# ---- logs


def test_logs_are_written_while_a_job_runs_and_go_with_it(state_dir: Path) -> None:
    """In CRI's format, for root alone, of services too, and removed with the attempt."""
    run = replace(HOLDS, service_output={"db": b"up\n"})

    async def body() -> None:
        async with bed(state_dir, FakeExecutor(lambda _: run)) as (table, endpoint):
            view = await running(table, "a", job=WITH_SERVICE)
            path = Path((await logged(endpoint, container_id(view))).log_path)
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert path.is_absolute()
            # The start of a line is given out when its end does not come.
            await until(lambda: b" stdout P thr\n" in path.read_bytes())
            lines = [line.split(b" ", 1)[1] for line in path.read_bytes().splitlines()]
            assert lines == [b"stdout F one", b"stdout F two", b"stderr F bad", b"stdout P thr"]
            service = Path((await logged(endpoint, container_id(view, "db"))).log_path)
            await until(lambda: service.read_bytes().endswith(b" stdout F up\n"))
            await table.cancel(ALICE, "a")
            await table.wait(ALICE, "a")
            assert (await logged(endpoint, container_id(view))).log_path == str(path)
            await table.cleanup(ALICE, "a")
            await until(lambda: not path.parent.parent.exists())

    within(body())


def test_a_job_that_ends_at_once_has_its_whole_log(state_dir: Path) -> None:
    """Whoever asks after its end gets the path of a log with everything in it."""
    run = FakeRun(output=b"".join(b"line %d\n" % number for number in range(5000)))

    async def body() -> None:
        async with bed(state_dir, FakeExecutor(lambda _: run)) as (table, endpoint):
            await prepare(table, ALICE, Wanted("a", JOB, start=True))
            view = await table.wait(ALICE, "a")
            path = Path((await logged(endpoint, container_id(view))).log_path)
            await until(lambda: path.read_bytes().count(b"\n") == 5000)
            assert b"".join(line.split(b" ", 3)[3] + b"\n" for line in path.read_bytes().splitlines()) == run.output

    within(body())


def test_logs_outlive_a_server_as_long_as_their_attempts(state_dir: Path) -> None:
    """A later server leaves the log of an ended attempt as it is, and removes those of attempts nobody knows."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: FakeRun(output=b"said\n"))
        async with table_over(state_dir, executor) as table:
            async with cri_over(table, state_dir) as endpoint:
                await prepare(table, ALICE, Wanted("a", JOB, start=True))
                view = await table.wait(ALICE, "a")
                path = Path((await logged(endpoint, container_id(view))).log_path)
                await until(lambda: b"said" in path.read_bytes())
            stray = state_dir / "cri-logs" / "stray"
            stray.mkdir()
            before = path.read_bytes()
            async with cri_over(table, state_dir) as endpoint:
                await until(lambda: not stray.exists())
                assert (await logged(endpoint, container_id(view))).log_path == str(path)
                assert path.read_bytes() == before

    within(body())


def chunk(data: bytes, stream: Any = "stdout", *, dropped: int = 0, later: int = 0) -> OutputChunk:
    """A chunk that came `later` seconds after the first."""
    return OutputChunk(stream, WHEN + timedelta(seconds=later), data, dropped)


def test_lines_are_put_together_and_cut() -> None:
    """A line in two chunks is one; a long one is pieces that add up; streams do not mix; losses are told."""
    splitter = LineSplitter()
    stamp = b"2026-01-02T03:04:05.000006000Z "
    assert splitter.lines(chunk(b"a\n\nb")) == stamp + b"stdout F a\n" + stamp + b"stdout F \n"
    assert splitter.lines(chunk(b"x\n", "stderr")) == stamp + b"stderr F x\n"
    assert splitter.waiting
    assert splitter.lines(chunk(b"c\n", later=1)) == stamp + b"stdout F bc\n"
    assert splitter.lines(chunk(b"d", later=1)) == b""
    lost = splitter.lines(chunk(b"e\n", dropped=7, later=2)).split(b"\n")
    assert [line[31:] for line in lost] == [
        b"stdout P d",
        b"stderr F [7 bytes of stdout were not kept]",
        b"stdout F e",
        b"",
    ]
    text = bytes(range(11, 256)) * 300
    pieces = (splitter.lines(chunk(text)) + splitter.lines(chunk(b"end")) + splitter.flush()).split(b"\n")[:-1]
    assert b"".join(piece.split(b" ", 3)[3] for piece in pieces) == text + b"end"
    assert max(map(len, pieces)) < (16 << 10) + 64
    assert not splitter.waiting


def test_a_log_is_rotated(tmp_path: Path) -> None:
    """So many files of so many bytes, the newest without a number."""
    file = LogFile(tmp_path / "a" / "0.log", size=10, files=3)
    for number in range(5):
        file.write(b"line %d\n" % number)
    file.close()
    names = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}
    assert names == {"0.log": b"line 4\n", "0.log.1": b"line 3\n", "0.log.2": b"line 2\n"}


# ---- what may be changed


def test_stop_and_exec_are_for_those_who_configured_them(state_dir: Path) -> None:
    """Otherwise they are refused, naming the setting; nothing happens to the attempt."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: HOLDS)
        async with bed(state_dir, executor) as (table, endpoint):
            view = await running(table, "a")
            for call in (
                endpoint.call("StopPodSandbox", pod_sandbox_id=pod_id(view)),
                endpoint.call("ExecSync", container_id=container_id(view), cmd=["true"]),
            ):
                code, words = await refused(call)
                assert code is grpc.StatusCode.PERMISSION_DENIED
                assert "serve.cri_writes" in words
            assert table.find(ALICE, "a").state is AttemptState.RUNNING
            assert executor.attempts[0].steps_run == list(JOB.steps)

    within(body())


def test_stop_asks_the_attempt_to_end(state_dir: Path) -> None:
    """And says that it did; whose attempt it is makes no difference to an operator."""

    async def body() -> None:
        async with bed(state_dir, cri_writes=True) as (table, endpoint):
            view = await running(table, "same")
            await running(table, "same", BOB)
            await endpoint.call("StopPodSandbox", pod_sandbox_id=pod_id(view)[:12])
            ended = await table.wait(ALICE, "same")
            assert ended.result is not None
            assert (ended.result.outcome, ended.result.end_cause) == (Outcome.CANCELLED, EndCause.CANCELLED)
            assert table.find(BOB, "same").state is AttemptState.RUNNING
            code, _ = await refused(endpoint.call("StopPodSandbox", pod_sandbox_id="nothing"))
            assert code is grpc.StatusCode.NOT_FOUND

    within(body())


def test_exec_runs_where_commands_are_taken(state_dir: Path) -> None:
    """In the job's container of a running attempt; elsewhere it is refused in words."""

    async def body() -> None:
        executor = FakeExecutor(lambda _: replace(HOLDS, exit_code=4))
        async with bed(state_dir, executor, cri_writes=True) as (table, endpoint):
            view = await running(table, "a", job=replace(WITH_SERVICE, steps=()))
            ran = await endpoint.call("ExecSync", container_id=container_id(view), cmd=["sh", "-c", "exit 4"])
            assert ran.exit_code == 4
            (step,) = executor.attempts[0].steps_run
            assert (step.argv, step.continue_on_error) == (("sh", "-c", "exit 4"), True)
            code, words = await refused(endpoint.call("ExecSync", container_id=container_id(view, "db"), cmd=["x"]))
            assert (code, "not a service's" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)
            await table.cancel(ALICE, "a")
            await table.wait(ALICE, "a")
            code, words = await refused(endpoint.call("ExecSync", container_id=container_id(view), cmd=["x"]))
            assert (code, "ended" in words) == (grpc.StatusCode.FAILED_PRECONDITION, True)

    within(body())


# ---- parts


def _view(state: AttemptState) -> AttemptView:
    return AttemptView("a", "", "job", state, 1000, WHEN, ResourceReservation(1, 1), sandbox_id="s", started_at=WHEN)


def _live(state: str) -> LiveContainer:
    return LiveContainer("job", "fy-s", "s", state, 1, Bundle(b"{}", "", ""), "sha256:r")


def _result() -> Any:
    async def body() -> Any:
        async with FakeExecutor().run(JOB) as attempt:
            return await attempt.wait()

    return within(body())
