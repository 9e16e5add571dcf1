"""The set of a job's services: order, the bound on their start, failures and whose they are, deaths, the end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_services import FakeLauncher, Script, exits
from virtual_clock import run_virtually

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.result import ProcessExit, ServiceResult, ServiceState
from forgeyard_model.services import Condition, ExecProbe, HealthCheck, OnExit, ServiceSpec, checked_services
from forgeyard_services.contract import ServiceEnd
from forgeyard_services.supervisor import ServiceFailure, ServiceSet

HEALTH = HealthCheck(ExecProbe(("ok",)))
OOM = ServiceEnd(ProcessExit(9, signal=9), oom=True)


def spec(name: str, **more: Any) -> ServiceSpec:
    """A service of an image."""
    return ServiceSpec(name, image="x", **{"health": None if more.get("oneshot") else HEALTH, **more})


def after(*names: str, condition: Condition = Condition.HEALTHY) -> dict[str, Condition]:
    """A depends_on."""
    return dict.fromkeys(names, condition)


class Run:
    """One set, started."""

    def __init__(self, services: tuple[ServiceSpec, ...], launcher: FakeLauncher) -> None:
        self.launcher = launcher
        self.set = ServiceSet(checked_services(services), launcher)
        self.failure: ServiceFailure | None = None
        self.took = 0.0
        self.results: dict[str, ServiceResult] = {}

    async def start(self, timeout: float) -> None:
        """Start it, and note how long that took."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        self.failure = await self.set.start(timeout=timeout)
        self.took = loop.time() - began

    async def finish(self) -> None:
        """Stop it and take the results."""
        await self.set.stop()
        self.results = {item.name: item for item in await self.set.results()}

    def states(self) -> dict[str, str]:
        """State by name."""
        return {name: item.state.value for name, item in self.results.items()}


def run(
    *services: ServiceSpec,
    timeout: float = 120.0,
    then: Callable[[Run], Awaitable[None]] | None = None,
    **scripts: Script,
) -> Run:
    """Start services on the virtual clock, do something, stop them."""

    async def all_of_it() -> Run:
        made = Run(services, FakeLauncher(**scripts))
        try:
            await made.start(timeout)
            if then is not None:
                await then(made)
        finally:
            await made.finish()
        assert asyncio.all_tasks() == {asyncio.current_task()}
        return made

    return run_virtually(all_of_it())


def test_all_start_at_once_and_the_start_waits_for_the_slowest() -> None:
    """Three services of 1, 2 and 3 seconds take 3."""
    scripts = {name: Script(healthy_at=at, launch_takes=0.5) for name, at in (("a", 1), ("b", 2), ("c", 3))}
    made = run(spec("a"), spec("b"), spec("c"), **scripts)
    assert made.failure is None
    assert 3.5 <= made.took < 5
    assert made.states() == {"a": "ready", "b": "ready", "c": "ready"}
    result = made.results["c"]
    assert result.ready_after is not None
    assert 3 <= result.ready_after < 4.5
    assert (result.readiness, result.last_probe, result.identity) == ("health: ok", "exit 0: ready", "sha256:fake")
    assert (result.exit, result.message, result.evidence.memory.peak) == (None, "", 42)


def test_no_services_are_ready() -> None:
    """A job without any waits for nothing."""
    made = run()
    assert (made.failure, made.results) == (None, {})


def test_dependencies_start_first_and_stop_last() -> None:
    """Containers are made at once; programs start in order, once what they need is ready, and end in reverse."""
    made = run(
        spec("web", depends_on=after("db", "cache")),
        spec("db"),
        spec("cache", depends_on=after("db", condition=Condition.STARTED)),
        db=Script(healthy_at=5),
        web=Script(healthy_at=0),
        cache=Script(healthy_at=1),
    )
    assert made.failure is None
    assert {text: when for when, text in made.launcher.journal if text.startswith("launch")} == dict.fromkeys(
        ("launch web", "launch db", "launch cache"), 0.0
    )
    assert made.launcher.did("start") == ["start db", "start cache", "start web"]
    times = {text: when for when, text in made.launcher.journal}
    assert times["start cache"] == times["start db"]
    assert times["start web"] >= times["start db"] + 5
    assert made.launcher.did("kill") == ["kill web", "kill cache", "kill db"]


def test_a_oneshot_has_to_exit_0_before_what_waits_for_it() -> None:
    """Marked, or waited for with completed_successfully: done is its way to be ready."""
    made = run(
        spec("web", depends_on=after("migrate", condition=Condition.COMPLETED_SUCCESSFULLY)),
        ServiceSpec("migrate", image="x", depends_on=after("db")),
        spec("db"),
        spec("seed", oneshot=True),
        db=Script(healthy_at=1),
        migrate=Script(ends=(4, exits(0))),
        web=Script(healthy_at=0),
        seed=Script(ends=(2, exits(0))),
    )
    assert made.failure is None
    assert made.states() == {"web": "ready", "migrate": "completed", "db": "ready", "seed": "completed"}
    assert made.launcher.did("start") == ["start db", "start seed", "start migrate", "start web"]
    assert made.results["migrate"].exit == ProcessExit(0, code=0)
    assert made.results["seed"].readiness == "exit 0"


def test_a_oneshot_that_fails_is_named() -> None:
    """What waits for it is never started; what runs is stopped."""
    made = run(
        spec("web", depends_on=after("migrate")),
        spec("migrate", oneshot=True),
        spec("db"),
        migrate=Script(ends=(4, exits(3)), says=[(1, b"relation missing\n")]),
        db=Script(healthy_at=0),
    )
    assert made.failure == ServiceFailure(
        "migrate", "service migrate: it had to exit 0: exit 3; last output: relation missing"
    )
    assert made.states() == {"web": "not_started", "migrate": "failed", "db": "ready"}
    assert made.launcher.did("start") == ["start migrate", "start db"]


def test_an_exit_before_ready_fails_the_start_with_all_that_is_known() -> None:
    """Field case: exit 3 and `boom` in the log, at once, whatever the retries; other services are stopped."""
    made = run(
        spec("db", health=HealthCheck(ExecProbe(("ok",)), interval=5, retries=100)),
        spec("slow"),
        db=Script(ends=(2, exits(3)), says=[(0, b"starting\nboom\n")]),
    )
    assert made.failure is not None
    assert (made.failure.name, made.failure.timed_out) == ("db", False)
    assert made.failure.message == (
        "service db: it ended before it was ready: exit 3; last probe: exit 2: not yet; last output: starting | boom"
    )
    assert made.took == pytest.approx(2)
    assert made.states() == {"db": "failed", "slow": "stopped"}
    db = made.results["db"]
    assert (db.log_tail, db.message) == (("starting", "boom"), "it ended before it was ready: exit 3")
    assert db.exit == ProcessExit(0x300, code=3)


def test_exit_0_and_on_exit_ignore_do_not_save_the_start() -> None:
    """Only a oneshot may end before the steps; `on_exit` is about the time after."""
    made = run(spec("db", on_exit=OnExit.IGNORE), db=Script(ends=(1, exits(0))))
    assert made.failure is not None
    assert "it ended before it was ready: exit 0" in made.failure.message
    made = run(spec("db", on_exit=OnExit.IGNORE), spec("slow"), db=Script(ends=(1, exits(0)), healthy_at=0))
    assert made.failure is not None
    assert made.failure.message.startswith("service db: it died after it was ready: exit 0")


def test_out_of_memory_is_told() -> None:
    """A service that its limit killed."""
    made = run(spec("db"), db=Script(ends=(1, OOM)))
    assert made.failure is not None
    assert "signal SIGKILL, out of memory" in made.failure.message
    assert made.results["db"].oom


def test_spent_retries_fail_the_start() -> None:
    """A health check that never passes is not waited for until the bound."""
    made = run(spec("db", health=HealthCheck(ExecProbe(("ok",)), retries=3)))
    assert made.failure is not None
    assert made.failure.message == ("service db: its health check failed 3 times in a row; last probe: exit 2: not yet")
    assert made.took < 5
    assert made.results["db"].exit is None


def test_the_bound_is_for_all_and_blames_the_one_that_runs() -> None:
    """Not the one that waits for it."""
    made = run(
        spec("web", depends_on=after("db")),
        spec("db", health=HealthCheck(ExecProbe(("ok",)), retries=1000)),
        spec("cache"),
        timeout=30,
        cache=Script(healthy_at=0),
    )
    assert made.failure is not None
    assert (made.failure.name, made.failure.timed_out) == ("db", True)
    assert made.failure.message == "service db: was not ready within 30s; last probe: exit 2: not yet"
    assert made.took == pytest.approx(30)
    assert made.states() == {"web": "not_started", "db": "failed", "cache": "ready"}


def test_a_launch_that_takes_too_long_is_within_the_bound() -> None:
    """Its container is not there, and that is what is said."""
    made = run(spec("db"), timeout=5, db=Script(launch_takes=100))
    assert made.failure is not None
    assert made.failure.message == "service db: was not ready within 5s"
    assert made.states() == {"db": "not_started"}


def test_a_container_that_can_not_be_made_is_our_error() -> None:
    """Not the service's: it is raised as it is, and the rest is stopped."""
    error = ExecutorError(ExecutorErrorKind.SPAWN_FAILED, "pid1_gone", "no container")

    async def check() -> None:
        made = Run((spec("db"), spec("cache")), FakeLauncher(db=Script(launch_takes=1, launch_error=error)))
        with pytest.raises(ExecutorError) as caught:
            await made.start(120)
        assert caught.value is error
        await made.finish()
        assert made.states() == {"db": "not_started", "cache": "stopped"}

    run_virtually(check())


def test_a_death_during_the_job_fires_once_and_names_the_service() -> None:
    """The executor is told what died, how, and what it said last."""

    async def steps(made: Run) -> None:
        assert await made.set.failed == ServiceFailure(
            "db", "service db: it died after it was ready: signal SIGKILL, out of memory; last output: PANIC"
        )

    scripts = {"db": Script(healthy_at=0, ends=(50, OOM), says=[(40, b"PANIC\n")]), "cache": Script(healthy_at=0)}
    made = run(spec("db"), spec("cache"), then=steps, **scripts)
    assert made.failure is None
    assert made.states() == {"db": "died", "cache": "ready"}
    db = made.results["db"]
    assert (db.oom, db.log_tail) == (True, ("PANIC",))
    assert db.message == "it died after it was ready: signal SIGKILL, out of memory"


def test_a_death_that_is_to_be_ignored_is_noted() -> None:
    """The job goes on; the result and a note tell of it."""

    async def steps(made: Run) -> None:
        await asyncio.sleep(100)
        assert not made.set.failed.done()

    script = Script(healthy_at=0, ends=(50, exits(1)))
    made = run(spec("db", on_exit=OnExit.IGNORE), then=steps, db=script)
    assert made.states() == {"db": "died"}
    assert made.set.notes == ("service db: it died after it was ready: exit 1",)


def test_a_service_that_can_not_prove_itself_is_labelled() -> None:
    """Started, and the result says that this is all that is known."""
    made = run(ServiceSpec("db", image="x"))
    assert made.failure is None
    assert made.states() == {"db": "unproven"}
    assert made.set.notes == ("service db was started, not proven ready: declare a health check",)


def test_stop_is_right_at_any_time() -> None:
    """In the middle of a start that was cancelled, and twice: what we killed did not die."""

    async def check() -> None:
        made = Run(
            (spec("db"), spec("cache"), spec("late")),
            FakeLauncher(cache=Script(healthy_at=0), late=Script(launch_takes=50)),
        )
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(10):
                await made.start(120)
        await made.finish()
        await made.finish()
        assert made.states() == {"db": "stopped", "cache": "ready", "late": "not_started"}
        assert made.results["cache"].exit is None
        assert not made.set.failed.done()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run_virtually(check())


def test_log_tails_are_bounded() -> None:
    """Twenty lines, each cut, bytes replaced: a service can't fill a result."""
    flood = b"".join(b"line %d \xff\r\n" % number for number in range(3000)) + b"x" * 100_000 + b"\nend"
    made = run(spec("db"), db=Script(healthy_at=0, says=[(0, flood)]))
    tail = made.results["db"].log_tail
    assert tail[-1] == "end"
    assert len(tail) <= 20
    assert max(map(len, tail)) <= 16 << 10
    made = run(spec("db"), db=Script(healthy_at=0, says=[(0, flood[:30_000])]))
    assert made.results["db"].log_tail[-2].endswith(" \N{REPLACEMENT CHARACTER}")
    assert made.results["db"].state is ServiceState.READY
