"""Sweeps: the order, what is kept and what stops nothing; at each daemon ours and only ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from adapters import DAEMON_FIXTURES, parameter
from daemons import Containerd, Daemon, PodmanService
from leftovers import Leftovers, containers_of, label_of, leftovers, say, unremovable

from forgeyard_host.processes import boot_id
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.identity import SandboxId
from forgeyard_runtimes.contract import SweepReport
from forgeyard_runtimes.find import DAEMONS
from forgeyard_runtimes.labels import BOOT, DIRECTORY, EXECUTOR, SANDBOX, STATE, owner_labels, sandbox_of
from forgeyard_runtimes.sweep import Kind, Leftover, sweep_kinds

ON_DAEMONS = pytest.mark.parametrize("name", list(map(parameter, DAEMON_FIXTURES)))
Body = Callable[[Leftovers], Awaitable[None]]


class Engine:
    """A fake of what an engine lists: removals are noted in order, and fail or wait on demand."""

    def __init__(self, **stuck: str) -> None:
        self.removed: list[str] = []
        self._stuck = stuck

    def leftover(self, name: str, sandbox: str = "", *, running: bool = False, **labels: str) -> Leftover:
        async def remove() -> None:
            if reason := self._stuck.get(name):
                raise refusal(reason)
            self.removed.append(name)

        return Leftover(name, {BOOT: boot_id(), SANDBOX: sandbox, **labels}, remove, running=running)


def refusal(words: str) -> ExecutorError:
    """What an adapter raises."""
    return ExecutorError(ExecutorErrorKind.INTERNAL, "test", words)


def kind(name: str, *found: Leftover) -> Kind:
    """Objects of a kind that an engine lists."""

    async def listing() -> tuple[Leftover, ...]:
        return found

    return Kind(name, listing)


def broken(name: str) -> Kind:
    """A kind that an engine can't list."""

    async def listing() -> tuple[Leftover, ...]:
        raise refusal("no list")

    return Kind(name, listing)


def swept(*kinds: Kind, alive: Callable[[str], bool] = lambda _: False) -> SweepReport:
    """The report of a sweep."""
    return asyncio.run(sweep_kinds(kinds, alive))


def test_what_has_ended_goes_before_what_runs_and_kind_after_kind() -> None:
    """What runs may hold what others of its kind wait for, and containers hold all other kinds."""
    engine = Engine()
    runs, ended = engine.leftover("runs", running=True), engine.leftover("ended")
    report = swept(kind("container", runs, ended), kind("network", engine.leftover("net")))
    assert engine.removed == ["ended", "runs", "net"]
    assert report.removed == ("container ended", "container runs", "network net")


def test_one_stuck_object_stops_nothing() -> None:
    """It is reported with its reason, and all others are removed, of its kind and after it."""
    engine = Engine(stuck="somebody holds it")
    some = [engine.leftover(name) for name in ("first", "stuck", "last")]
    report = swept(kind("container", *some), kind("volume", engine.leftover("free")))
    assert report.removed == ("container first", "container last", "volume free")
    assert report.failed == (("container stuck", "somebody holds it"),)


def test_one_that_hangs_holds_up_nothing_of_its_kind() -> None:
    """The others are removed while it still waits."""

    async def main() -> None:
        engine, free = Engine(), asyncio.Event()

        async def hang() -> None:
            async with asyncio.timeout(20):
                await free.wait()

        async def last() -> None:
            free.set()

        stuck = Leftover("hangs", {}, hang)
        many = [engine.leftover(str(number)) for number in range(9)]
        report = await sweep_kinds([kind("container", stuck, *many, Leftover("last", {}, last))], lambda _: False)
        assert len(report.removed) == 11
        assert engine.removed == [str(number) for number in range(9)]

    asyncio.run(main())


def test_who_is_asked_whether_it_lives() -> None:
    """The sandbox of an object; the executor of one that belongs to no sandbox; nobody over a boot of the host."""
    engine = Engine()
    found = (
        engine.leftover("its-sandbox-lives", "sandbox"),
        engine.leftover("only-its-executor-lives", "over", **{EXECUTOR: "executor"}),
        engine.leftover("of-the-executor", **{EXECUTOR: "executor"}),
        engine.leftover("of-nobody"),
        engine.leftover("of-another-boot", "sandbox", **{BOOT: "an-earlier-boot"}),
        Leftover("without-labels", {}, engine.leftover("x").remove),
    )
    report = swept(kind("container", *found), alive=lambda name: name in ("sandbox", "executor"))
    assert report.kept == ("container its-sandbox-lives", "container of-the-executor")
    assert [what.removeprefix("container ") for what in report.removed] == [
        "only-its-executor-lives",
        "of-nobody",
        "of-another-boot",
        "without-labels",
    ]


def test_a_kind_that_can_not_be_listed() -> None:
    """The first says that the engine can't be asked at all; a later one is reported beside what came before."""
    with pytest.raises(ExecutorError, match="no list"):
        swept(broken("container"), kind("network"))
    engine = Engine()
    report = swept(kind("container", engine.leftover("a")), broken("network"), kind("volume", engine.leftover("b")))
    assert report.removed == ("container a", "volume b")
    assert report.failed == (("every network", "no list"),)


def test_labels_say_whose_it_is() -> None:
    """The same for every adapter; a container's also where its files are."""

    class Owner:
        executor, state = "e", "s"

    labels = {SANDBOX: "x", EXECUTOR: "e", STATE: "s", BOOT: boot_id()}
    assert owner_labels(Owner(), sandbox_of("fy-x")) == labels
    assert owner_labels(Owner(), "x", Path("/d")) == {**labels, DIRECTORY: "/d"}


# ---- at real daemons


def at(request: pytest.FixtureRequest, name: str) -> Daemon:
    """The daemon of this run."""
    daemon: Daemon = request.getfixturevalue(DAEMON_FIXTURES[name])
    return daemon


def test_every_daemon_is_swept_here() -> None:
    """A new adapter comes with these tests."""
    assert set(DAEMONS) == set(DAEMON_FIXTURES)


@pytest.mark.kernel
@ON_DAEMONS
def test_ours_and_only_ours(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead sandboxes and another boot's go, in whatever state they are; a living one and another directory's stay."""
    daemon, mine, others = at(request, name), tmp_path / "mine", tmp_path / "others"
    lives = SandboxId.mint()

    async def main() -> None:
        async with leftovers(name, daemon, mine) as made, leftovers(name, daemon, others) as foreign:
            running = await made.make("running")
            ended = {await made.make("exited"), await made.make("created")}
            kept = await made.make("running", lives)
            with monkeypatch.context() as patch:
                patch.setattr("forgeyard_runtimes.labels.boot_id", lambda: "an-earlier-boot")
                ended.add(await made.make("created"))
            theirs = await foreign.make("running")

            report = await made.runtime.sweep(lambda sandbox: sandbox == lives.value)
            assert report.failed == ()
            assert set(report.removed[:3]) == {f"container {each}" for each in ended}
            assert report.removed[3] == f"container {running}"
            assert [each for each in report.kept if each.startswith("container")] == [f"container {kept}"]
            assert containers_of(daemon, mine) == {kept}
            assert containers_of(daemon, others) == {theirs}

            again = await made.runtime.sweep(lambda _: False)
            assert again.removed[0] == f"container {kept}"
            assert (await made.runtime.sweep(lambda _: False)) == SweepReport()

    asyncio.run(main())


@pytest.mark.kernel
@ON_DAEMONS
def test_an_unremovable_container(
    name: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The daemon refuses one of them, or never answers: it is named with the reason, and the others are gone."""
    daemon = at(request, name)
    if name == "containerd":
        monkeypatch.setattr("forgeyard_runtimes.containerd.task.START_DEADLINE", 2.0)  # a minute in earnest

    async def main() -> None:
        async with leftovers(name, daemon, tmp_path) as made:
            stuck = await made.make("running" if name == "containerd" else "exited")
            free = {await made.make("exited"), await made.make("running")}
            with unremovable(daemon, made, stuck):
                report = await made.runtime.sweep(lambda _: False)
                assert {each for each in report.removed if each.startswith("container")} == {
                    f"container {each}" for each in free
                }
                ((what, reason),) = report.failed
                assert what == f"container {stuck}"
                assert reason
            again = await made.runtime.sweep(lambda _: False)
            assert again.failed == ()
            assert containers_of(daemon, tmp_path) == set()

    asyncio.run(main())


@pytest.mark.kernel
@pytest.mark.parametrize("name", [parameter("podman"), parameter("docker")])
def test_what_containers_hold_goes_after_them(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Ended containers pin a network and a volume, which go in the same sweep; those of others stay."""
    daemon, mark = at(request, name), tmp_path.name[-8:]
    names = {what: f"fy-{what}-{mark}" for what in ("network", "volume", "pod", "foreign")}

    async def main() -> None:
        async with leftovers(name, daemon, tmp_path) as made:
            label = ("--label", label_of(tmp_path))
            say(daemon, "volume", "create", *label, names["volume"])
            say(daemon, "volume", "create", names["foreign"])
            say(daemon, "network", "create", *label, *subnet(daemon), names["network"])
            if isinstance(daemon, PodmanService):
                say(daemon, "pod", "create", "--infra=false", *label, names["pod"])
            pinning = pin(daemon, made, await image(daemon, made), names, label)
            try:
                report = await made.runtime.sweep(lambda _: False)
                wanted = ["container", "network", "volume", *(["pod"] if name == "podman" else [])]
                assert [each.split()[0] for each in report.removed if not each.startswith("image")] == wanted
                assert set(report.removed) >= {f"{each} {names.get(each, pinning)}" for each in wanted}
                assert report.failed == ()
                assert names["foreign"] in say(daemon, "volume", "ls", "-q").split()
            finally:
                say(daemon, "volume", "rm", names["foreign"])

    asyncio.run(main())


def subnet(daemon: Daemon) -> tuple[str, ...]:
    """Where no daemon of ours may choose one by itself."""
    return () if isinstance(daemon, PodmanService) else ("--internal", "--subnet", "10.255.253.0/28")


async def image(daemon: Daemon, made: Leftovers) -> tuple[str, ...]:
    """What another container is made of: a root, or the image of one that was made before and is removed again."""
    if isinstance(daemon, PodmanService):
        return ("--rootfs", str(made.rootfs))
    name = await made.make("created")
    found = say(daemon, "inspect", "--type", "container", "--format", "{{.Image}}", name).strip()
    say(daemon, "rm", name)
    return (found,)


def pin(daemon: Daemon, made: Leftovers, root: tuple[str, ...], names: dict[str, str], label: tuple[str, ...]) -> str:
    """A container that never ran, on the network and with the volume."""
    assert not isinstance(daemon, Containerd)
    name = f"{names['network']}-pinned"
    options = ("--name", name, "--network", names["network"], "--volume", f"{names['volume']}:/data", *label)
    say(daemon, "create", *options, *root, "/bin/true")
    return name
