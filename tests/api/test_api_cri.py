"""The CRI endpoint: attempts as pods and containers, whatever their state, their names and their backend."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import grpc
import pytest
from cri_tables import WITH_SERVICE, bed, logged, refused, running
from served import ALICE, BOB, JOB, prepare, within

from forgeyard_api.cri import build_protos
from forgeyard_api.cri.ids import container_id, pod_id
from forgeyard_api.cri.messages import cri
from forgeyard_api.serve.attempt_types import Wanted
from forgeyard_executor.testing import FakeExecutor, FakeRun
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

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
