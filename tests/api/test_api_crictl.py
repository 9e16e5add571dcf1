"""The real crictl against real jobs: whatever it is asked, it shows what is there."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from adapter_jobs import ADDRESS_VARIABLES, config_for
from adapters import DAEMON_FIXTURES
from cri_bed import Endpoint, cri_over
from crictl_build import BUILD_SECONDS, NoCrictlError, crictl, go
from jobs import sh
from served import ROOT, prepare, table_over

from forgeyard_api.serve.attempt_types import AttemptState, AttemptView, Wanted
from forgeyard_api.serve.attempts import AttemptTable
from forgeyard_api.serve.server import serving
from forgeyard_executor import Executor, Job, Limits
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.config_serve import DESTROY, ServeConfig

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(BUILD_SECONDS + 120)]

BODY_SECONDS = 300.0
"""For one test's commands on a busy machine."""
HOLDS = "echo out; echo err >&2; printf part; exec sleep 600"


@pytest.fixture(scope="session")
def program() -> Path:
    """The real crictl. A skip without Go, which in CI is a failure only where there is Go to build it with."""
    try:
        return crictl()
    except NoCrictlError as error:
        if go() is not None and os.environ.get("CI", "").lower() in ("true", "1"):
            pytest.fail(str(error), pytrace=False)
        pytest.skip(f"{error} (./dev setup builds it)")


@pytest.fixture(params=["runc", pytest.param("podman", marks=pytest.mark.daemon("podman"))])
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A command line and a daemon."""
    name: str = request.param
    if name in DAEMON_FIXTURES:
        monkeypatch.setenv(ADDRESS_VARIABLES[name], request.getfixturevalue(DAEMON_FIXTURES[name]).address)
    return name


def driven(body: Any) -> None:
    """Run a test's body; nothing of it takes for ever."""

    async def bounded() -> None:
        async with asyncio.timeout(BODY_SECONDS):
            await body

    asyncio.run(bounded())


@asynccontextmanager
async def bed(
    state: Path, program: Path, runtime: str = "runc", **serve: Any
) -> AsyncIterator[tuple[AttemptTable, Endpoint]]:
    """A table over a real executor, and an endpoint that crictl knows."""
    async with (
        Executor.open(state, runtime=runtime, config=config_for(runtime)) as executor,
        table_over(state, executor, runtime=runtime) as table,
        cri_over(table, state, program=program, **serve) as endpoint,
    ):
        try:
            yield table, endpoint
        finally:
            for view in table.list(ROOT):
                await table.cleanup(ROOT, view.attempt_id)


async def started(table: AttemptTable, name: str, script: str = HOLDS, **job: Any) -> AttemptView:
    """An attempt of a script that runs."""
    steps = (sh(script),) if script else ()
    await prepare(table, ROOT, Wanted(name, Job(rootfs="host", name="job", steps=steps, **job), start=True))
    view = await table.wait(ROOT, name, AttemptState.RUNNING)
    assert view.error is None, view.error
    return view


async def container_of(endpoint: Endpoint, name: str) -> str:
    """The id of the one container of an attempt, as crictl prints it."""
    label = f"io.kubernetes.pod.name={name}"
    return (await endpoint.crictl("ps", "-a", "-q", "--label", label)).out.strip()


async def log_holds(endpoint: Endpoint, container: str, text: str) -> None:
    """Once the log of a container has `text`."""
    while text not in (await endpoint.crictl("logs", container, ok=False)).out:
        await asyncio.sleep(0.1)


def test_a_server_without_jobs(state_dir: Path, program: Path) -> None:
    """Version, info and empty tables from a server as `forgeyard serve` puts it together; the rest refused in words."""
    socket = state_dir / "cri.sock"
    config = ExecutorConfig(
        state_dir=str(state_dir),
        serve=ServeConfig(socket=str(state_dir / "api.sock"), cri_socket=str(socket), on_restart=DESTROY),
    )

    async def body() -> None:
        async with serving(config):
            endpoint = Endpoint(socket, program)
            assert "RuntimeName:  forgeyard" in (await endpoint.crictl("version")).out
            conditions = (await endpoint.json("info"))["status"]["conditions"]
            assert {item["type"] for item in conditions} == {"RuntimeReady", "NetworkReady"}
            assert all(item["reason"] for item in conditions)
            for command in (("pods",), ("ps", "-a"), ("images",), ("stats",), ("imagefsinfo",)):
                await endpoint.crictl(*command)
            for command in (("inspect", "x"), ("inspectp", "x"), ("logs", "x")):
                said = await endpoint.crictl(*command, ok=False)
                assert said.code == 1
                assert "nothing here is called 'x'" in said.err
            for command, word in ((("pull", "busybox"), "executor's own API"), (("statsp",), "not offered")):
                said = await endpoint.crictl(*command, ok=False)
                assert said.code == 1
                assert word in said.err

    driven(body())


def test_a_running_job(state_dir: Path, warm_rootfs: None, program: Path, runtime: str) -> None:
    """Whichever adapter runs it: listed, inspected with its bundle, its log read and followed, its use measured."""

    async def body() -> None:
        async with bed(state_dir, program, runtime) as (table, endpoint):
            view = await started(table, "odd/日本 name", limits=Limits(memory="64MiB", pids=32))
            await running_is_shown(endpoint, view, runtime)
            container = await container_of(endpoint, "odd/日本 name")
            await log_holds(endpoint, container, "part")
            said = await endpoint.crictl("logs", container[:13])
            assert said.out == "out\npart"
            assert said.err.endswith("err\n")
            await stats_are_shown(endpoint, container)
            following = await endpoint.started("logs", "-f", container)
            await table.cancel(ROOT, view.attempt_id, kill=True)
            out, _ = await following.communicate()
            assert out == b"out\npart"

    driven(body())


async def running_is_shown(endpoint: Endpoint, view: AttemptView, runtime: str) -> None:
    """Pods, containers and their details."""
    table = (await endpoint.crictl("pods")).out
    assert all(word in table for word in ("odd/日本 name", "Ready", runtime))
    (pod,) = (await endpoint.json("pods"))["items"]
    shown = await endpoint.json("inspectp", pod["id"][:13])
    assert shown["status"]["metadata"]["uid"] == view.sandbox_id
    assert shown["status"]["network"]["ip"] == ""
    table = (await endpoint.crictl("ps")).out
    assert all(word in table for word in ("job", "Running", "odd/日本 name"))
    (container,) = (await endpoint.json("ps"))["containers"]
    shown = await endpoint.json("inspect", container["id"][:13])
    assert shown["status"]["resources"]["linux"]["memoryLimitInBytes"] == str(64 << 20)
    assert shown["info"]["digests"]["bundle"] == view.bundle_digest
    assert shown["info"]["runtimeSpec"]["linux"]["resources"]["pids"]["limit"] == 32
    assert shown["info"]["policy"]["noNewPrivileges"]
    assert shown["info"]["pid"] > 0
    template = ("-o", "go-template", "--template", "{{.info.runtimeSpec.ociVersion}}")
    assert (await endpoint.crictl("inspect", *template, container["id"])).out.strip() == "1.0.2"


async def stats_are_shown(endpoint: Endpoint, container: str) -> None:
    """Its row, and figures that are those of a moment."""
    assert container[:13] in (await endpoint.crictl("stats")).out
    (stats,) = (await endpoint.json("stats", container))["stats"]
    assert int(stats["cpu"]["timestamp"]) > 10**18
    assert int(stats["memory"]["workingSetBytes"]["value"]) > 0


def test_jobs_that_have_ended(state_dir: Path, warm_rootfs: None, program: Path) -> None:
    """Exit codes, an OOM kill by its name, times, the bundle that was seen, the whole log; and one that vanishes."""

    async def body() -> None:
        async with bed(state_dir, program) as (table, endpoint):
            await started(table, "fails", "echo said; exit 3")
            hungry = "head -c 200m /dev/zero | tail"
            await started(table, "hungry", hungry, limits=Limits(memory="32MiB"))
            for name in ("fails", "hungry"):
                await table.wait(ROOT, name)
            assert "Running" not in (await endpoint.crictl("ps", "-a")).out
            assert (await endpoint.crictl("ps", "-q")).out == ""
            for name, code, reason in (("fails", 3, "Error"), ("hungry", 137, "OOMKilled")):
                container = await container_of(endpoint, name)
                status = (await endpoint.json("inspect", container))["status"]
                assert (status["state"], status["exitCode"], status["reason"]) == ("CONTAINER_EXITED", code, reason)
                assert status["finishedAt"] > status["startedAt"] >= status["createdAt"]
            failed = await container_of(endpoint, "fails")
            assert (await endpoint.crictl("logs", failed)).out == "said\n"
            await table.cleanup(ROOT, "hungry")
            assert (await endpoint.json("ps", "-a"))["containers"][0]["id"] == failed
            said = await endpoint.crictl("inspect", container, ok=False)
            assert "nothing here is called" in said.err

    driven(body())


def test_commands_and_stops_are_for_those_who_allow_them(state_dir: Path, warm_rootfs: None, program: Path) -> None:
    """Refused as long as nothing says otherwise; then a command runs inside, and a pod is stopped."""

    async def body() -> None:
        async with bed(state_dir, program) as (table, endpoint):
            await started(table, "shell", "")
            container = await container_of(endpoint, "shell")
            (pod,) = (await endpoint.json("pods"))["items"]
            for command in (("exec", "--sync", container, "true"), ("stopp", pod["id"])):
                said = await endpoint.crictl(*command, ok=False)
                assert said.code == 1
                assert "serve.cri_writes" in said.err
            said = await endpoint.crictl("exec", container, "true", ok=False)
            assert "use exec --sync" in said.err
            async with cri_over(table, state_dir / "second", program=program, cri_writes=True) as open_to_all:
                said = await open_to_all.crictl("exec", "--sync", container, "sh", "-c", "echo in; echo bad >&2")
                assert said.out.split() == ["in", "bad"]  # this release prints both streams to its own stdout
                said = await open_to_all.crictl("exec", "--sync", container, "sh", "-c", "exit 7", ok=False)
                assert "exited with 7" in said.err
                await open_to_all.crictl("stopp", pod["id"][:13])
            ended = await table.wait(ROOT, "shell")
            assert ended.result is not None
            assert ended.result.outcome.value == "cancelled"

    driven(body())


def test_images_of_the_store(state_dir: Path, program: Path, busybox_image: str, images: Any) -> None:
    """Listed with their names, found by them, and measured."""

    async def body() -> None:
        reference = images.reference("busybox")
        async with bed(state_dir, program) as (_, endpoint):
            process = await asyncio.create_subprocess_exec(
                str(Path(sys.executable).with_name("forgeyard")),
                "image",
                "pull",
                reference,
                env={**os.environ, "FORGEYARD_STATE_DIR": str(state_dir)},
            )
            assert await process.wait() == 0
            while not (found := (await endpoint.json("images"))["images"]):
                await asyncio.sleep(0.1)
            assert any(reference.rpartition("@")[2] in name for name in found[0]["repoDigests"])
            shown = await endpoint.json("inspecti", found[0]["id"])
            assert int(shown["status"]["size"]) > 0
            usage = (await endpoint.json("imagefsinfo"))["status"]["imageFilesystems"][0]
            assert usage["fsId"]["mountpoint"] == str(state_dir / "images")

    driven(body())
