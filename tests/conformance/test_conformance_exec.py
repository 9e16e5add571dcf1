"""Every adapter keeps the contract: one more process in a container, what is read back, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from adapters import Adapter, adapter_of, on, parameter
from contract_box import PLAN, RAM_PLAN, UMASK_PLAN, Box, box

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, ForgeyardError
from forgeyard_model.plan import ContainerPlan
from forgeyard_runtimes.cells import Behaviour, exception
from forgeyard_runtimes.comparison import compare, undeclared
from forgeyard_runtimes.contract import ContainerRuntime, ContainerStatus

pytestmark = pytest.mark.kernel


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    """The adapter of this test's parameter."""
    yield from adapter_of(request)


@on(Behaviour.EXEC)
def test_exec_has_the_rights_of_pid_1(adapter: Adapter) -> None:
    """exec's exit code is the process's, and its rights are those of the job exactly."""

    async def body(made: Box) -> None:
        async def run(script: str) -> int:
            return await made.runtime.exec(made.ref, made.process("/bin/sh", "-c", script), deadline=30)

        assert await run("exit 7") == 7
        assert await run("kill -9 $$") == 137
        checks = (
            "grep -q 'NoNewPrivs:.1' /proc/self/status",
            "grep -q 'Seccomp:.2' /proc/self/status",
            "grep -q 'CapBnd:.0000000000000000' /proc/self/status",
            'test "$(id -u):$(id -g)" = 1000:1000',
            'test "$(ulimit -Hn)" = 2048',
        )
        for script in checks:
            assert await run(script) == 0, script
        # The process is in the job's group, where it counts and from which it goes with the job.
        assert await run('test "$(cat /proc/self/cgroup)" = "$(cat /proc/1/cgroup)"') == 0

    adapter.inside(body)


@on(Behaviour.EXEC)
def test_exec_that_cannot_run(adapter: Adapter) -> None:
    """A program that is not there is a failure of exec, not an exit code; one that hangs is ended in time."""

    async def body(made: Box) -> None:
        with pytest.raises(ExecutorError) as caught:
            await made.runtime.exec(made.ref, made.process("/nosuch"), deadline=30)
        assert caught.value.kind is ExecutorErrorKind.SPAWN_FAILED
        with pytest.raises(ExecutorError) as caught:
            await made.runtime.exec(made.ref, made.process("/bin/sleep", "1000"), deadline=3)
        assert caught.value.kind is ExecutorErrorKind.TIMEOUT

    adapter.inside(body)


@on(Behaviour.READ_BACK)
def test_what_is_applied_is_what_was_intended(adapter: Adapter) -> None:
    """The effective spec is no weaker than the bundle but where the adapter says so by name."""

    async def body(made: Box) -> None:
        found = compare(made.intended, made.runtime.effective_spec(made.ref))
        assert undeclared(found.weaker, declared_by(adapter.name)) == ()

    adapter.inside(body)


def declared_by(name: str) -> frozenset[str]:
    """What an adapter declares to be weaker, and why is said there."""
    if name == "podman":
        from forgeyard_runtimes.podman.translate import DECLARED

        return DECLARED
    if name == "docker":
        from forgeyard_runtimes.docker.differences import DECLARED_WEAKER

        return DECLARED_WEAKER
    return frozenset()


@on(Behaviour.READ_BACK)
def test_names_and_claims(adapter: Adapter) -> None:
    """An adapter says who it is with its version, and claims no more than the table says."""

    async def main(runtime: ContainerRuntime) -> None:
        name, _, version = runtime.name.partition(" ")
        assert name == adapter.name
        assert version[0].isdigit()
        claims = runtime.capabilities()
        assert runtime.name.startswith(claims.runtime)
        assert claims.user_namespace is not bool(exception(name, Behaviour.USER_NAMESPACE))

    adapter.run(main)


@pytest.mark.daemon("dockerd")
@pytest.mark.parametrize("adapter", [parameter("docker")], indirect=True)
@pytest.mark.parametrize(("plan", "field"), [(RAM_PLAN, "mounts./ram"), (UMASK_PLAN, "process.user.umask")])
def test_what_does_not_apply_is_refused(adapter: Adapter, plan: ContainerPlan, field: str) -> None:
    """A cell that the table leaves out is refused at create, by the field's name, and leaves nothing."""

    async def main(runtime: ContainerRuntime) -> None:
        async with box(runtime, plan) as made:
            with pytest.raises(ForgeyardError, match=field):
                await made.create()
            assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT

    adapter.run(main)


def test_plan_of_these_tests_has_every_limit() -> None:
    """The plan that all adapters run leaves nothing unlimited."""
    assert None not in (PLAN.limits.cpus, PLAN.limits.memory, PLAN.limits.pids, PLAN.limits.shm)
