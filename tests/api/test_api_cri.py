"""The CRI endpoint: attempts as pods and containers, whatever their state, their names and their backend."""

from __future__ import annotations

import asyncio
import json
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from cri_bed import Endpoint, cri_over
from served import ALICE, BOB, JOB, ROOT, prepare, table_over, until, within

from forgeyard_api.cri import build_protos
from forgeyard_api.cri.ends import course_of
from forgeyard_api.cri.ids import JOB as JOB_CONTAINER
from forgeyard_api.cri.ids import container_id, pod_id
from forgeyard_api.cri.log_file import LineSplitter, LogFile
from forgeyard_api.cri.messages import cri
from forgeyard_api.cri.pods import Pod, ShownContainer
from forgeyard_api.cri.views import stats_message
from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Caller, Wanted
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_executor import Job
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.limits import ResourceReservation
from forgeyard_model.live import LiveContainer, LiveUsage
from forgeyard_model.plan import Bundle
from forgeyard_model.result import EndCause, Outcome, ProcessExit, ServiceResult, ServiceState
from forgeyard_model.services import ServiceSpec
from forgeyard_runtimes.spool_format import OutputChunk

HOLDS = FakeRun(output=b"one\ntwo\nthr", error_output=b"bad\n", holds=True)
WITH_SERVICE = Job(rootfs="host", name="job", steps=JOB.steps, services=(ServiceSpec("db", argv=("x",)),))
WHEN = datetime(2026, 1, 2, 3, 4, 5, 6, tzinfo=UTC)


@asynccontextmanager
async def bed(
    state: Path, executor: FakeExecutor | None = None, **serve: Any
) -> AsyncIterator[tuple[AttemptTable, Endpoint]]:
    """A table over pretended jobs that hold, and an endpoint over that."""
    async with (
        table_over(state, executor or FakeExecutor(lambda _: HOLDS)) as table,
        cri_over(table, state, **serve) as endpoint,
    ):
        try:
            yield table, endpoint
        finally:
            for view in table.list(ROOT):
                await table.cancel(Caller(view.owner_uid, 0, 0), view.attempt_id, kill=True)
            await table.until_idle()


async def running(table: AttemptTable, name: str, caller: Caller = ALICE, **wanted: Any) -> AttemptView:
    """An attempt that runs."""
    await prepare(table, caller, replace(Wanted(name, JOB, start=True), **wanted))
    return await table.wait(caller, name, AttemptState.RUNNING)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    """How a call is refused."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value.code(), caught.value.details() or ""


# ---- the interface


def test_descriptors_are_those_of_the_proto_file() -> None:
    """What is checked in was made from api.proto."""
    made = build_protos.FOLDER.generate()
    assert made.differences(build_protos.FOLDER.kept) == ()


def test_an_empty_server_answers(state_dir: Path) -> None:
    """With no attempt at all every question has an answer, and none is an error."""

    async def body() -> None:
        async with bed(state_dir) as (_, endpoint):
            told = await endpoint.call("Version", version="v1")
            assert (told.version, told.runtime_name, told.runtime_api_version) == ("0.1.0", "forgeyard", "v1")
            assert told.runtime_version
            for name in ("ListPodSandbox", "ListContainers", "ListContainerStats", "ListImages"):
                assert not (await endpoint.call(name)).ListFields()
            assert not (await endpoint.call("ImageStatus", image=cri.ImageSpec(image="busybox"))).HasField("image")
            usage = (await endpoint.call("ImageFsInfo")).image_filesystems[0]
            assert usage.fs_id.mountpoint == str(state_dir / "images")

    within(body())


def test_status_says_whether_runtimes_answer(state_dir: Path) -> None:
    """Both conditions, each with a reason; a host that is drained is not ready."""

    async def body() -> None:
        async with bed(state_dir) as (table, endpoint):
            status = await endpoint.call("Status", verbose=True)
            ready, network = status.status.conditions
            assert (ready.type, ready.status, ready.reason) == ("RuntimeReady", True, "RuntimeAnswers")
            # The pretended executor has probed no namespace, so nothing is claimed.
            assert (network.type, network.status, network.reason) == ("NetworkReady", False, "NoNetworkNamespaces")
            assert json.loads(status.info["info"])["runtimes"] == {"fake": "ready"}
            table.drain()
            ready = (await endpoint.call("Status")).status.conditions[0]
            assert (ready.status, ready.reason) == (False, "Draining")

    within(body())


@pytest.mark.parametrize(
    ("call", "code", "text"),
    [
        ("RuntimeService/RunPodSandbox", "PERMISSION_DENIED", "the executor's own API"),
        ("RuntimeService/StopContainer", "PERMISSION_DENIED", "the executor's own API"),
        ("ImageService/PullImage", "PERMISSION_DENIED", "the executor's own API"),
        ("RuntimeService/Exec", "UNIMPLEMENTED", "use exec --sync"),
        ("RuntimeService/Attach", "UNIMPLEMENTED", "use exec --sync"),
        ("RuntimeService/ListPodSandboxStats", "UNIMPLEMENTED", "shows attempts and images"),
        ("RuntimeService/GetContainerEvents", "UNIMPLEMENTED", "shows attempts and images"),
        ("RuntimeService/Nonsense", "UNIMPLEMENTED", "shows attempts and images"),
    ],
)
def test_the_rest_is_refused_by_name(state_dir: Path, call: str, code: str, text: str) -> None:
    """Every other call gets a clear word, and the endpoint goes on."""

    async def body() -> None:
        async with bed(state_dir) as (_, endpoint):
            status, words = await refused(endpoint.raw(f"/runtime.v1.{call}"))
            assert status.name == code
            assert text in words
            assert call.rpartition("/")[2] in words
            assert (await endpoint.call("Version")).runtime_name

    within(body())


def test_only_operators_may_connect(state_dir: Path) -> None:
    """A uid that is no operator is turned away at the socket, whatever else it may do."""

    async def body() -> None:
        async with bed(state_dir, operators=(4242,)) as (_, endpoint):
            reader, writer = await asyncio.open_unix_connection(endpoint.socket)
            assert await reader.read() == b""
            writer.close()

    within(body())


# ---- attempts as pods


def test_an_attempt_is_a_pod_and_its_job_and_services_are_containers(state_dir: Path) -> None:
    """With the names that crictl shows, times in nanoseconds, and the labels of the request."""

    async def body() -> None:
        async with bed(state_dir) as (table, endpoint):
            view = await running(table, "build-1", job=WITH_SERVICE, tenant="team", labels={"ref": "main"})
            (pod,) = (await endpoint.call("ListPodSandbox")).items
            assert (pod.metadata.name, pod.metadata.namespace) == ("build-1", "team")
            assert (pod.state, pod.runtime_handler, pod.labels["ref"]) == (cri.SANDBOX_READY, "fake", "main")
            assert pod.created_at == round(view.created_at.timestamp() * 1e6) * 1000
            job, service = (await endpoint.call("ListContainers")).containers
            assert [job.metadata.name, service.metadata.name] == ["job", "db"]
            assert {job.pod_sandbox_id, service.pod_sandbox_id} == {pod.id}
            assert {job.state, service.state} == {cri.CONTAINER_RUNNING}
            assert job.labels["io.kubernetes.pod.name"] == "build-1"
            assert job.labels["io.kubernetes.pod.namespace"] == "team"
            assert job.image.image
            assert job.image_ref
            status = (await endpoint.call("ContainerStatus", container_id=service.id)).status
            assert (status.id, status.state, status.finished_at) == (service.id, cri.CONTAINER_RUNNING, 0)
            assert view.started_at is not None
            assert status.started_at == round(view.started_at.timestamp() * 1e6) * 1000

    within(body())


@pytest.mark.parametrize("name", ["../x", "a/b:c d", "-x", ".x", "日本", "🚀", "x\n", "\x1b[2Jx", "x" * 255])
def test_odd_names_are_data(state_dir: Path, name: str) -> None:
    """Such an attempt has a plain id and plain paths; its name is shown without what a terminal obeys (case C71)."""

    async def body() -> None:
        async with bed(state_dir) as (table, endpoint):
            view = await running(table, name)
            (pod,) = (await endpoint.call("ListPodSandbox")).items
            assert pod.metadata.name.isprintable()
            assert pod.annotations["dev.forgeyard.attempt"] == name
            assert set(pod.id) <= set("0123456789abcdef")
            (container,) = (await endpoint.call("ListContainers")).containers
            status = await logged(endpoint, container.id)
            assert Path(status.log_path) == state_dir / "cri-logs" / pod.id / container.id / "0.log"
            assert (await endpoint.call("PodSandboxStatus", pod_sandbox_id=pod.id)).status.id == pod_id(view)

    within(body())


def test_names_that_are_nearly_the_same_are_different_pods(state_dir: Path) -> None:
    """Equal in the first 63 characters, or but for case or one replaced character, or of two owners (case C71)."""

    async def body() -> None:
        async with bed(state_dir) as (table, endpoint):
            names = ["x" * 63 + "a", "x" * 63 + "b", "Build", "build", "a/b", "a_b"]
            for name in names:
                await running(table, name)
            await running(table, "build", BOB)
            pods = (await endpoint.call("ListPodSandbox")).items
            assert len({pod.id[:13] for pod in pods}) == len(pods) == len(names) + 1

    within(body())


def test_ids_may_be_cut_short(state_dir: Path) -> None:
    """A prefix that fits one thing names it; one that fits several, or none, is refused in words."""

    async def body() -> None:
        async with bed(state_dir) as (table, endpoint):
            view = await running(table, "one")
            for name in (pod_id(view)[:13], view.sandbox_id, "one"):
                found = await endpoint.call("PodSandboxStatus", pod_sandbox_id=name)
                assert found.status.id == pod_id(view)
            container = container_id(view)
            found = await endpoint.call("ContainerStatus", container_id=container[:13])
            assert found.status.id == container
            await running(table, "other")
            for call in (
                endpoint.call("PodSandboxStatus", pod_sandbox_id="nothing"),
                endpoint.call("ContainerStatus", container_id="nothing"),
                endpoint.call("PodSandboxStatus", pod_sandbox_id=""),
                endpoint.call("ContainerStats", container_id="\0"),
            ):
                assert (await refused(call))[0] is grpc.StatusCode.NOT_FOUND
            both = await refused(endpoint.call("PodSandboxStatus", pod_sandbox_id=view.sandbox_id[:2]))
            assert both == (
                grpc.StatusCode.INVALID_ARGUMENT,
                "id '" + view.sandbox_id[:2] + "': 2 of them begin so: give more of it",
            )

    within(body())


def test_lists_are_filtered(state_dir: Path) -> None:
    """By id, pod, state and labels, each and together."""

    async def body() -> None:
        async with bed(state_dir) as (table, endpoint):
            first = await running(table, "first", job=WITH_SERVICE, labels={"a": "1"})
            second = await running(table, "second", labels={"a": "2"})
            ready = cri.PodSandboxStateValue(state=cri.SANDBOX_READY)
            gone = cri.PodSandboxStateValue(state=cri.SANDBOX_NOTREADY)
            for wanted, expected in (
                (cri.PodSandboxFilter(id=pod_id(first)[:9]), {"first"}),
                (cri.PodSandboxFilter(label_selector={"a": "2"}), {"second"}),
                (cri.PodSandboxFilter(state=ready), {"first", "second"}),
                (cri.PodSandboxFilter(state=gone), set()),
                (cri.PodSandboxFilter(id=pod_id(first), label_selector={"a": "2"}), set()),
            ):
                pods = (await endpoint.call("ListPodSandbox", filter=wanted)).items
                assert {pod.metadata.name for pod in pods} == expected
            up = cri.ContainerStateValue(state=cri.CONTAINER_RUNNING)
            ended = cri.ContainerStateValue(state=cri.CONTAINER_EXITED)
            for only, many in (
                (cri.ContainerFilter(pod_sandbox_id=pod_id(first)), 2),
                (cri.ContainerFilter(id=container_id(first, "db")[:9]), 1),
                (cri.ContainerFilter(state=up), 3),
                (cri.ContainerFilter(state=ended), 0),
                (cri.ContainerFilter(label_selector={"a": "2"}, pod_sandbox_id=pod_id(second)), 1),
                (cri.ContainerFilter(label_selector={"dev.forgeyard.role": "service"}), 1),
            ):
                assert len((await endpoint.call("ListContainers", filter=only)).containers) == many
            stats = cri.ContainerStatsFilter(pod_sandbox_id=pod_id(first))
            assert len((await endpoint.call("ListContainerStats", filter=stats)).stats) == 2

    within(body())


def test_what_never_ran_is_a_pod_without_containers(state_dir: Path) -> None:
    """An attempt that could not be prepared is shown with its error, and no container that never was."""
    error = ExecutorError(ExecutorErrorKind.UNSUPPORTED, "no_x", "no x here", resolution="get x")

    async def body() -> None:
        async with bed(state_dir, FakeExecutor(lambda _: FakeRun(refused=error))) as (table, endpoint):
            await prepare(table, ALICE, Wanted("bad", JOB, start=True))
            view = await table.wait(ALICE, "bad")
            status = await endpoint.call("PodSandboxStatus", pod_sandbox_id=pod_id(view), verbose=True)
            assert status.status.state == cri.SANDBOX_NOTREADY
            told = json.loads(status.info["info"])["attempt"]["error"]
            assert (told["reason"], told["resolution"]) == ("no_x", "get x")
            assert not (await endpoint.call("ListContainers")).containers

    within(body())


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


async def logged(endpoint: Endpoint, container: str) -> cri.ContainerStatus:
    """The status of a container, once it has a log."""
    while True:
        status = (await endpoint.call("ContainerStatus", container_id=container)).status
        if status.log_path:
            return status
        await asyncio.sleep(0.01)


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
