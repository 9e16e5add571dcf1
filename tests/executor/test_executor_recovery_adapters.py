"""Recovery at every engine that a state directory was ever used with: what goes, what stays, and what is told."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from adapter_jobs import ADDRESS_VARIABLES, config_for
from adapters import DAEMON_FIXTURES, DAEMON_NAMES, parameter
from daemons import Containerd, Daemon, Dockerd, PodmanService
from jobs import collect, sh
from leftovers import Leftovers, containers_of, label_of, leftovers, say, unremovable

from forgeyard_api import main
from forgeyard_executor import Executor, ExecutorConfig, Job, Outcome
from forgeyard_executor.engines import Engine, remember, remembered
from forgeyard_executor.state import StatePaths

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("warm_rootfs")]

ON_DAEMONS = pytest.mark.parametrize("name", list(map(parameter, DAEMON_FIXTURES)))


@pytest.fixture
def config() -> ExecutorConfig:
    """The defaults, whatever this machine's files say."""
    return ExecutorConfig()


def daemon_at(request: pytest.FixtureRequest, patch: pytest.MonkeyPatch, name: str) -> Daemon:
    """The daemon of this run, where the adapter called `name` looks for one."""
    daemon: Daemon = request.getfixturevalue(DAEMON_FIXTURES[name])
    patch.setenv(ADDRESS_VARIABLES[name], daemon.address)
    return daemon


def records(state: Path) -> set[str]:
    """Names of the engines on record."""
    return {engine.runtime for engine in remembered(StatePaths(state)).engines}


async def succeeds(executor: Executor) -> None:
    """A normal job."""
    async with executor.run(Job(rootfs="host", steps=(sh("echo fine"),))) as execution:
        out, _ = await collect(execution)
        result = await execution.wait()
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"fine\n"), result.message


@ON_DAEMONS
def test_executors_that_were_killed_in_mid_job_hold_nothing(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, state_dir: Path
) -> None:
    """C14: containers of ten of them, running, ended, never started, with what they pin; then a normal job starts."""
    daemon = daemon_at(request, monkeypatch, name)

    async def body() -> None:
        async with leftovers(name, daemon, state_dir) as made:
            stages = ("running", "exited", "created", "exited", "running")
            left = {await made.make(stage) for _ in range(2) for stage in stages}
            pinned = pin_a_volume(daemon, made, state_dir)
            async with Executor.open(state_dir, runtime=name, config=config_for(name)) as executor:
                (engine,) = executor.recovered.engines
                assert executor.recovered.errors == ()
                assert set(engine.report.removed) == {f"container {each}" for each in left} | pinned
                assert containers_of(daemon, state_dir) == set()
                await succeeds(executor)
                assert (await executor.recover()).swept == ()
            assert containers_of(daemon, state_dir) == set()

    asyncio.run(body())


def pin_a_volume(daemon: Daemon, made: Leftovers, state: Path) -> set[str]:
    """What was made, as a report has it: a volume, and a container that holds it without having run."""
    if not isinstance(daemon, PodmanService):
        return set()
    names, label = [f"fy-{what}-{state.name}" for what in ("volume", "holder")], ("--label", label_of(state))
    say(daemon, "volume", "create", *label, names[0])
    options = ("--name", names[1], "--volume", f"{names[0]}:/data", *label, "--rootfs", str(made.rootfs))
    say(daemon, "create", *options, "/bin/true")
    return {f"volume {names[0]}", f"container {names[1]}"}


@pytest.mark.daemon("containerd")
@pytest.mark.daemon("dockerd")
@pytest.mark.daemon("podman")
def test_every_engine_on_record_is_asked(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, state_dir: Path, config: ExecutorConfig
) -> None:
    """An executor with no daemon at all cleans at each that the state directory was used with before."""
    daemons = {name: daemon_at(request, monkeypatch, name) for name in DAEMON_FIXTURES}

    async def opened(name: str) -> None:
        async with Executor.open(state_dir, runtime=name, config=config_for(name)):
            # Before any container is made there.
            assert name in records(state_dir)

    async def body() -> None:
        for name in daemons:
            await opened(name)
            monkeypatch.delenv(ADDRESS_VARIABLES[name])
        async with (
            leftovers("containerd", daemons["containerd"], state_dir) as first,
            leftovers("podman", daemons["podman"], state_dir) as second,
            leftovers("docker", daemons["docker"], state_dir) as third,
        ):
            made = {"containerd": first, "podman": second, "docker": third}
            left = {name: await made[name].make("exited") for name in made}
            async with Executor.open(state_dir, runtime="runc", config=config) as executor:
                # Nobody died, as far as the state directory knows: an executor is not held up by engines of others.
                assert executor.recovered.engines == ()
                report = await executor.recover()
            assert report.errors == ()
            assert {
                each.engine.runtime: [what for what in each.report.removed if what.startswith("container")]
                for each in report.engines
            } == {name: [f"container {what}"] for name, what in left.items()}
            assert {each.engine.address for each in report.engines} == {each.address for each in daemons.values()}
            assert not any(containers_of(daemon, state_dir) for daemon in daemons.values())

    asyncio.run(body())


@pytest.mark.daemon("podman")
def test_after_a_death_opening_asks_every_engine(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, state_dir: Path, config: ExecutorConfig
) -> None:
    """The lock of an executor that died says so, until its engine has been cleaned."""
    daemon = daemon_at(request, monkeypatch, "podman")
    lock = state_dir / "executors/dead.lock"

    async def body() -> None:
        async with Executor.open(state_dir, runtime="podman", config=config_for("podman")):
            lock.touch()
        async with leftovers("podman", daemon, state_dir) as made:
            stuck = await made.make("exited")
            with unremovable(daemon, made, stuck):
                async with Executor.open(state_dir, runtime="runc", config=config) as executor:
                    assert len(executor.recovered.errors) == 1
                assert lock.exists()
            async with Executor.open(state_dir, runtime="runc", config=config) as executor:
                assert executor.recovered.swept == (f"container {stuck}",)
            assert not lock.exists()

    asyncio.run(body())


@ON_DAEMONS
def test_living_jobs_and_other_state_directories_are_left_alone(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, state_dir: Path, tmp_path: Path
) -> None:
    """What a living executor runs is kept; what it could not remove of an attempt that is over goes all the same."""
    daemon = daemon_at(request, monkeypatch, name)

    async def body() -> None:
        async with (
            leftovers(name, daemon, tmp_path) as foreign,
            Executor.open(state_dir, runtime=name, config=config_for(name)) as executor,
        ):
            theirs = await foreign.make("running")
            async with executor.run(Job(rootfs="host", steps=(sh("echo up; exec sleep 600"),))) as execution:
                async for _ in execution.output():
                    break
                own = f"fy-{execution.sandbox_id}"
                async with leftovers(name, daemon, state_dir) as made:
                    over = await made.make("exited")
                    async with Executor.open(state_dir, runtime="runc", config=ExecutorConfig()) as other:
                        (engine,) = (await other.recover()).engines
                assert f"container {over}" in engine.report.removed
                assert f"container {own}" in engine.report.kept
                assert containers_of(daemon, state_dir) == {own}
                await execution.cancel()
                assert (await execution.wait()).outcome is Outcome.CANCELLED
            assert containers_of(daemon, tmp_path) == {theirs}

    asyncio.run(body())


def gc(state: Path, *more: str) -> int:
    """The command."""
    return main.run(("gc", "--runtime", "runc", "--state-dir", str(state), *more))


@pytest.mark.parametrize("name", DAEMON_FIXTURES)
def test_a_daemon_that_does_not_answer(
    name: str, state_dir: Path, capsys: pytest.CaptureFixture[str], config: ExecutorConfig
) -> None:
    """It is an error with a cure, and neither an executor nor a job depends on it."""
    paths = StatePaths(state_dir)
    engine = Engine(name, f"unix://{state_dir}/nosuch.sock")
    remember(paths, engine)

    async def body() -> None:
        async with Executor.open(state_dir, runtime="runc", config=config) as executor:
            (error,) = (await executor.recover()).errors
            assert error.startswith(f"{name}: {engine.address}: ")
            await succeeds(executor)

    asyncio.run(body())
    capsys.readouterr()
    assert gc(state_dir, "--json") == main.REFUSED
    found = json.loads(capsys.readouterr().out)
    (told,) = found["engines"]
    assert (told["runtime"], told["address"], told["removed"]) == (name, engine.address, [])
    (path,) = paths.engines.iterdir()
    assert str(path) in told["error"], "what to remove when it is gone for good"
    path.unlink()
    assert gc(state_dir) == 0


def test_a_damaged_record_is_an_error_of_its_own(
    state_dir: Path, capsys: pytest.CaptureFixture[str], config: ExecutorConfig
) -> None:
    """It is named with its cure, and stops nothing."""
    paths = StatePaths(state_dir)
    remember(paths, Engine("docker", "unix:///x"))
    remember(paths, Engine("docker", "unix:///x"))
    (path,) = paths.engines.iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert remembered(paths).engines == (Engine("docker", "unix:///x"),)
    for damaged in (b"", b"[]", b'{"runtime": "docker"}', b"\xff"):
        path.write_bytes(damaged)
        (error,) = remembered(paths).errors
        assert str(path) in error
        assert "remove it" in error
    path.write_text('{"runtime": "nosuch", "address": "unix:///x"}')
    assert gc(state_dir) == main.REFUSED
    assert "nosuch" in capsys.readouterr().err


@pytest.mark.daemon("dockerd")
def test_gc_tells_what_went_what_stayed_and_why(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    state_dir: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """As text and as JSON; the exit code says whether something is left."""
    name = "docker"
    daemon = daemon_at(request, monkeypatch, name)
    remember(StatePaths(state_dir), Engine(name, daemon.address))

    async def body() -> None:
        async with leftovers(name, daemon, state_dir) as made:
            stuck, free = [await made.make("exited") for _ in range(2)]
            with unremovable(daemon, made, stuck):
                assert await asyncio.to_thread(gc, state_dir) == main.REFUSED
                told = capsys.readouterr()
                assert f"removed container {free} at {name}\n" in told.out
                assert f"forgeyard: {name}: container {stuck} is left: " in told.err
                assert await asyncio.to_thread(gc, state_dir, "--json") == main.REFUSED
                ((engine,), errors) = map(json.loads(capsys.readouterr().out).get, ("engines", "errors"))
                assert engine["failed"][0]["what"] == f"container {stuck}"
                assert engine["failed"][0]["reason"] in errors[0]
            assert await asyncio.to_thread(gc, state_dir) == 0
            assert f"removed container {stuck} at {name}\n" in capsys.readouterr().out

    asyncio.run(body())


def test_every_daemon_has_a_command_line() -> None:
    """What these tests look at a daemon with."""
    assert set(DAEMON_NAMES) == set(ADDRESS_VARIABLES)
    assert {Containerd.name, Dockerd.name, PodmanService.name} == set(DAEMON_NAMES.values())
