"""When a service counts as ready, and when as broken, on a clock that the test owns."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
from fake_services import FakeLauncher, FakeService, Script, exits
from virtual_clock import run_virtually

from forgeyard_model.plan import ImageHealthcheck
from forgeyard_model.result import ProcessExit
from forgeyard_model.services import (
    ExecProbe,
    HealthCheck,
    HttpProbe,
    LogProbe,
    ServiceSpec,
    TcpProbe,
)
from forgeyard_services.contract import ServiceEnd
from forgeyard_services.line_matcher import SearchError, line_matcher
from forgeyard_services.readiness import Readiness, tcp_ports

CMD = ExecProbe(("pg_isready", "-h", "db"))


async def wait(health: HealthCheck | None, script: Script) -> tuple[str, float, Readiness, FakeService]:
    """Start one service and wait for it: what was said, after how long, and both objects."""
    launcher = FakeLauncher(db=script)
    await launcher.launch(ServiceSpec("db", image="x"))
    service = launcher.running["db"]
    await service.start_main()
    readiness = Readiness(ServiceSpec("db", image="x", health=health), service)  # type: ignore[arg-type]  a fake
    message = await readiness.wait()
    return message, service.age(), readiness, service


def test_the_first_success_is_ready() -> None:
    """A service that answers at once is ready with its first probe, however long the interval."""
    message, age, readiness, service = run_virtually(wait(HealthCheck(CMD, interval=30), Script(healthy_at=0)))
    assert (message, len(service.probes)) == ("", 1)
    assert age < 0.1
    assert readiness.proven
    assert readiness.words == "health: pg_isready -h db"
    assert readiness.last is not None
    assert readiness.last.said == "exit 0: ready"


def test_a_service_is_found_ready_well_within_its_first_interval() -> None:
    """With an image's interval of 30 seconds, one that is ready after 2 does not cost 30."""
    message, age, _, _ = run_virtually(wait(HealthCheck(CMD, interval=30), Script(healthy_at=2)))
    assert message == ""
    assert 2 <= age < 3.5


def test_hanging_probes_are_failures_that_never_pile_up() -> None:
    """Field case: a probe that sleeps, interval 1s, timeout 2s, 3 retries: 3 times 2 and 1 seconds, never two."""
    check = HealthCheck(ExecProbe(("sleep", "60")), interval=1, timeout=2, retries=3)
    message, age, readiness, service = run_virtually(wait(check, Script(probe_takes=60)))
    assert message == "its health check failed 3 times in a row"
    assert 6 <= age <= 9
    assert all(end - begin == pytest.approx(2) for begin, end in service.probes)
    begins = [begin for begin, _ in service.probes]
    assert [later - earlier for earlier, later in pairwise(begins)] == pytest.approx([3, 3])
    assert readiness.last is not None
    assert readiness.last.said == "killed after 2s"


def test_retries_are_counted_from_the_first_interval_on() -> None:
    """Quick probes at the start do not use retries up: docker would not have made them."""
    check = HealthCheck(CMD, interval=5, retries=3)
    message, age, readiness, _ = run_virtually(wait(check, Script()))
    assert message == "its health check failed 3 times in a row"
    assert 15 <= age < 16.5
    assert readiness.last is not None
    assert readiness.last.said == "exit 2: not yet"


def test_failures_of_the_start_period_do_not_count() -> None:
    """They do after it; a success inside it is ready at once."""
    check = HealthCheck(CMD, interval=1, retries=2, start_period=20)
    message, age, _, _ = run_virtually(wait(check, Script()))
    assert message == "its health check failed 2 times in a row"
    assert 21 <= age < 23.5
    message, age, _, _ = run_virtually(wait(check, Script(healthy_at=10)))
    assert message == ""
    assert 10 <= age < 11.5


def test_quick_probes_leave_a_slow_service_time_of_its_own() -> None:
    """A probe of half a second is not repeated without a pause of as much."""
    check = HealthCheck(CMD, interval=10)
    _, _, _, service = run_virtually(wait(check, Script(healthy_at=9, probe_takes=0.5)))
    assert max(end for _, end in service.probes) / len(service.probes) > 0.95


def test_its_end_ends_the_wait_at_once() -> None:
    """Field case: 100 retries, 5 seconds apart, and a program that exits 3: nobody waits for those."""
    check = HealthCheck(CMD, interval=5, retries=100)
    message, age, _, service = run_virtually(wait(check, Script(ends=(7.5, exits(3)), probe_takes=2)))
    assert message == "it ended before it was ready: exit 3"
    assert age == pytest.approx(7.5)
    assert service.probing == 0


@pytest.mark.parametrize(
    ("end", "said"),
    [
        (exits(0), "exit 0"),
        (ServiceEnd(ProcessExit(9, signal=9), oom=True), "signal SIGKILL, out of memory"),
        (ServiceEnd(None, error="docker-entrypoint.sh: not found"), "docker-entrypoint.sh: not found"),
    ],
)
@pytest.mark.parametrize("health", [HealthCheck(CMD), HealthCheck(LogProbe("ready")), HealthCheck(None)])
def test_a_service_that_is_gone_is_never_ready(end: ServiceEnd, said: str, health: HealthCheck) -> None:
    """Whatever it had to show, exit 0 and an unproven start included; how it ended is told."""
    message, _, _, _ = run_virtually(wait(health, Script(ends=(0, end), healthy_at=0)))
    assert message == f"it ended before it was ready: {said}"


def test_a_cancelled_wait_leaves_no_probe() -> None:
    """When something else ends the start, the probe under way is cancelled with it."""

    async def check() -> None:
        launcher = FakeLauncher(db=Script(probe_takes=4))
        await launcher.launch(ServiceSpec("db", image="x"))
        service = launcher.running["db"]
        await service.start_main()
        spec = ServiceSpec("db", image="x", health=HealthCheck(CMD))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(1):
                await Readiness(spec, service).wait()  # type: ignore[arg-type]  a fake
        assert (service.probing, len(service.probes)) == (0, 1)
        assert not service.ended.cancelled()

    run_virtually(check())


def test_a_port_is_ready_when_it_accepts() -> None:
    """tcp: the declared port alone counts, and connections are closed."""
    check = HealthCheck(TcpProbe(6379), interval=1)
    message, age, readiness, service = run_virtually(wait(check, Script(opens={80: 0, 6379: 3})))
    assert message == ""
    assert 3 <= age < 4.5
    assert readiness.last is not None
    assert readiness.last.said == "port 6379: accepts connections"
    assert [writer.closed for writer in service.writers] == [True]


def test_exposed_ports_are_ready_when_any_accepts() -> None:
    """The others are listed as shut, and no number of failures is too many."""
    script = Script(exposed=("5672/tcp", "15672/tcp", "53/udp"), opens={5672: 90})
    message, age, readiness, _ = run_virtually(wait(None, script))
    assert message == ""
    assert 90 <= age < 91
    assert readiness.words == "one of its ports accepts connections: 5672, 15672"
    assert readiness.last is not None
    assert (readiness.last.ports_open, readiness.last.ports_shut) == ((5672,), (15672,))


def test_order_of_what_counts() -> None:
    """Declared health, then the image's HEALTHCHECK, then its ports, then nothing at all."""
    image = ImageHealthcheck(("/bin/sh", "-c", "true"))
    everything = Script(image_health=image, exposed=("80/tcp",), healthy_at=0, opens={80: 0, 81: 0})
    words = [
        run_virtually(wait(health, script))[2].words
        for health, script in (
            (HealthCheck(TcpProbe(81)), everything),
            (None, everything),
            (None, Script(exposed=("80/tcp",), opens={80: 0})),
            (HealthCheck(None), everything),
            (None, Script(exposed=("53/udp",))),
        )
    ]
    assert words == [
        "health: port 81 accepts connections",
        "health: /bin/sh -c true",
        "one of its ports accepts connections: 80",
        "started, unproven: no health check, no exposed port",
        "started, unproven: no health check, no exposed port",
    ]


def test_an_images_healthcheck_has_the_images_times() -> None:
    """Interval, timeout, start period and retries come from there."""
    image = ImageHealthcheck(("false",), interval=10, timeout=3, start_period=0, retries=2)
    message, age, _, service = run_virtually(wait(None, Script(image_health=image, probe_takes=60)))
    assert message == "its health check failed 2 times in a row"
    assert service.probes[-1][1] - service.probes[-1][0] == pytest.approx(3)
    assert 20 <= age <= 30


@pytest.mark.parametrize(
    ("answer", "statuses", "ready"),
    [
        (b"HTTP/1.1 204 No Content\r\n\r\n", (), True),
        (b"HTTP/1.0 302 Found\r\n\r\n", (), True),
        (b"HTTP/1.1 503 Busy\r\n\r\n", (), False),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", (404,), True),
        (b"HTTP/1.1 200 OK\r\n\r\n", (204,), False),
        (b"SSH-2.0-OpenSSH_9\r\n", (), False),
        (b"HTTP/1.1 2xx\r\n", (), False),
        (b"HTTP/1.1 200 OK", (), False),
        (b"", (), False),
        (b"x" * 200_000, (), False),
    ],
)
def test_http_answers(answer: bytes, statuses: tuple[int, ...], ready: bool) -> None:
    """A status that is wanted; everything else, whatever a port sends, is a failure."""
    check = HealthCheck(HttpProbe(8080, "/healthz?x=1", statuses), retries=1, interval=0.01)
    script = Script(opens={8080: 0}, answer=lambda _: answer)
    message, _, readiness, service = run_virtually(wait(check, script))
    assert (message == "") is ready
    assert service.writers[0].sent == b"GET /healthz?x=1 HTTP/1.0\r\nHost: 10.213.0.3:8080\r\nConnection: close\r\n\r\n"
    assert all(writer.closed for writer in service.writers)
    assert readiness.last is not None
    assert len(readiness.last.said) < 200


def test_a_line_of_the_output_is_ready() -> None:
    """Text in one line, however the bytes come, also when it was said before anybody looked."""
    script = Script(says=[(0, b"booting\ndatabase system is re"), (3, b"ady to accept\n")])
    message, age, _, _ = run_virtually(wait(HealthCheck(LogProbe("is ready to")), script))
    assert (message, age) == ("", pytest.approx(3))
    message, age, _, _ = run_virtually(wait(HealthCheck(LogProbe("booting")), script))
    assert (message, age) == ("", pytest.approx(0))


def test_a_line_is_matched_by_a_regular_expression() -> None:
    """In a process of its own, so on the real clock."""
    script = Script(says=[(0, b"port 80\nport \xff\nport 5432 ready\n")])
    message, _, readiness, _ = asyncio.run(wait(HealthCheck(LogProbe(r"port (\d{4,}) r", regex=True)), script))
    assert message == ""
    assert readiness.last is not None
    assert readiness.last.said == "last line: port 5432 ready"


def test_a_regular_expression_that_never_ends_is_given_up() -> None:
    """It is bounded by processor time, and holds up nothing of ours meanwhile."""

    async def check() -> None:
        matcher = line_matcher(LogProbe("(a+)+$", regex=True), most_cpu=1)
        search = asyncio.ensure_future(matcher.matches("a" * 64 + "!"))
        await asyncio.sleep(0)  # ours goes on
        with pytest.raises(SearchError, match="more than 1s of processor time"):
            await search
        await matcher.close()
        await matcher.close()

    asyncio.run(check())


def test_tcp_ports_of_an_image() -> None:
    """Ranges are written out, UDP and nonsense left out, and thousands are not probed."""
    assert tcp_ports(("5432/tcp", "80", "53/udp", "x/tcp", "7000-7002/tcp", "80/TCP")) == (5432, 80, 7000, 7001, 7002)
    assert len(tcp_ports(("1-65535/tcp",))) == 16
    assert tcp_ports(()) == ()
