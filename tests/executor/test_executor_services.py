"""Jobs with services beside them, run by the executor: names, order, files, roots, logs, and what is left."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import small_images
from build import symlink, tar, whiteout
from jobs import run, sh

from forgeyard_executor import Executor, InvalidRequest, Job, Outcome, Step, Timeouts
from forgeyard_host.cgroups.evidence import read_limits
from forgeyard_model.result import ServiceState
from forgeyard_model.services import (
    Condition,
    ExecProbe,
    HealthCheck,
    HttpProbe,
    LogProbe,
    ServiceFile,
    ServiceNetwork,
    ServiceSpec,
    TcpProbe,
    Tmpfs,
)

if TYPE_CHECKING:
    from conftest import Images

pytestmark = pytest.mark.kernel

HTTPD = "mkdir -p /www; hostname > /www/index.html; exec httpd -f -p 80 -h /www"


ETC = {
    "absolute": [symlink("etc/resolv.conf", "/run/systemd/resolve/stub-resolv.conf")],
    "relative": [symlink("etc/resolv.conf", "../run/resolvconf/resolv.conf"), symlink("etc/hosts", "../nowhere/hosts")],
    "none": [whiteout("etc")],
}
"""Layers over busybox."""


def web(image: str, name: str = "web", script: str = HTTPD, **more: Any) -> ServiceSpec:
    """A service that answers on port 80 with its own host name."""
    more.setdefault("health", HealthCheck(HttpProbe(80)))
    return ServiceSpec(name, image=image, entrypoint=(), command=("/bin/sh", "-c", script), **more)


def fetch(name: str) -> str:
    """A script's words that print what `name` answers."""
    return f"wget -q -O - http://{name}/"


def test_a_job_reaches_its_services_by_name_and_alias(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """C01, C02: two services of one image; each name and alias resolves in the first instruction of the first step."""
    services = (web(busybox_image, "db1", aliases=("primary.example",)), web(busybox_image, "db2"))
    job = Job(
        image=busybox_image, steps=(sh("; ".join(map(fetch, ("db1", "primary.example", "db2")))),), services=services
    )
    result, out, err = run(state_dir, job)
    assert (result.outcome, out.split()) == (Outcome.SUCCEEDED, [b"db1", b"db1", b"db2"]), (result.message, err)
    assert [item.state for item in result.services] == [ServiceState.READY] * 2
    assert len({item.address for item in result.services}) == 2
    assert result.network is not None


@pytest.mark.parametrize("attempt", range(3))
def test_a_name_resolves_in_the_first_instruction(state_dir: Path, busybox_image: str, attempt: int) -> None:
    """C02: names are there before the job's first process, in an image without nsswitch.conf as well."""
    job = Job(image=busybox_image, steps=(sh("cat /etc/hosts"), sh(fetch("web"))), services=(web(busybox_image),))
    result, out, _ = run(state_dir, job)
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert b"\tweb\n" in out


def test_process_mode_has_services_of_both_kinds(
    state_dir: Path, busybox_image: str, warm_rootfs: None, leaks: object
) -> None:
    """A job on the host rootfs reaches a service in an image, and one that is a program of the host."""
    program = (
        "import http.server as h; h.ThreadingHTTPServer(('0.0.0.0', 80), h.SimpleHTTPRequestHandler).serve_forever()"
    )
    host = ServiceSpec("host", argv=("/usr/bin/python3", "-c", program), health=HealthCheck(TcpProbe(80), interval=0.2))
    read = "import urllib.request as u, socket\nfor n in ('web', 'host'): print(n, u.urlopen(f'http://{n}/').status)"
    job = Job(rootfs="host", steps=(sh(f'/usr/bin/python3 -c "{read}"'),), services=(web(busybox_image), host))
    result, out, err = run(state_dir, job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"web 200\nhost 200\n"), (result.message, err)
    assert "host rootfs of service host" in result.provenance.impure


def test_localhost_shares_the_jobs_namespace(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """As in a pod: reached at 127.0.0.1 from the job, by its name too, and the job is reached by the service."""
    script = "mkdir -p /www; echo pod > /www/index.html; exec httpd -f -p 127.0.0.1:8080 -h /www"
    shared = web(busybox_image, "side", script, network=ServiceNetwork.LOCALHOST, health=HealthCheck(TcpProbe(8080)))
    job = Job(
        image=busybox_image, steps=(sh(fetch("127.0.0.1:8080") + "; grep -w side /etc/hosts"),), services=(shared,)
    )
    result, out, _ = run(state_dir, job)
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert out.startswith(b"pod\n")
    assert result.services[0].address == "127.0.0.1"


def test_a_service_is_ready_when_those_it_needs_are(state_dir: Path, busybox_image: str, leaks: object) -> None:
    """depends_on: the one-shot sees the ready service, the last one starts after the one-shot exited 0."""
    migrate = ServiceSpec(
        "migrate",
        image=busybox_image,
        entrypoint=(),
        command=("/bin/sh", "-c", fetch("web") + " && echo migrated"),
        depends_on={"web": Condition.HEALTHY},
        oneshot=True,
    )
    api = web(busybox_image, "api", depends_on={"migrate": Condition.COMPLETED_SUCCESSFULLY})
    job = Job(image=busybox_image, steps=(sh(fetch("api")),), services=(api, migrate, web(busybox_image)))
    result, out, _ = run(state_dir, job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"api\n"), result.message
    states = {item.name: item.state for item in result.services}
    assert states == {"api": ServiceState.READY, "migrate": ServiceState.COMPLETED, "web": ServiceState.READY}
    assert next(item for item in result.services if item.name == "migrate").log_tail == ("web", "migrated")


def test_files_of_the_source_are_put_in_read_only(state_dir: Path, busybox_image: str, tree: Path) -> None:
    """A file and a directory; links inside the source are followed, and nothing can be written."""
    (tree / "conf").mkdir()
    (tree / "conf" / "a").write_text("a\n")
    (tree / "link").symlink_to("conf/a")
    files = (ServiceFile("link", "/etc/service/one"), ServiceFile("conf", "/srv/conf"))
    script = "cat /etc/service/one /srv/conf/a; (echo x > /etc/service/one) 2>/dev/null || echo refused; exec sleep 600"
    service = web(busybox_image, "web", script, files=files, health=HealthCheck(LogProbe("refused")))
    result, _, _ = run(state_dir, Job(image=busybox_image, steps=(sh("true"),), services=(service,)), source=tree)
    assert result.outcome is Outcome.SUCCEEDED, result.message
    assert result.services[0].log_tail == ("a", "a", "refused")
    assert (tree / "conf" / "a").read_text() == "a\n"


@pytest.mark.parametrize(
    ("path", "words"),
    [("out", "can't be read"), ("absent", "can't be read"), ("../f", "can't be read"), ("/etc", "can't be read")],
)
def test_a_file_that_is_not_in_the_source_is_refused(
    state_dir: Path, busybox_image: str, tree: Path, leaks: object, path: str, words: str
) -> None:
    """A link out of the source, an absent file, a way up: refused by the service's name and the file's."""
    (tree / "out").symlink_to("/etc/hostname")
    service = web(busybox_image, files=(ServiceFile(path, "/x"),))
    with pytest.raises(InvalidRequest) as refused:
        run(state_dir, Job(image=busybox_image, steps=(sh("true"),), services=(service,)), source=tree)
    assert (refused.value.field, refused.value.value) == ("services.web.files", path)
    assert words in refused.value.cure


def test_a_service_has_a_root_and_limits_of_its_own(state_dir: Path, busybox_image: str) -> None:
    """tmpfs, volume, shm, memory limit, hostname, read-only network files, and the capabilities that a root needs."""
    script = (
        "touch /data/x /var/own/x && chown 70 /data/x; df /data | tail -1;"
        "hostname; cat /etc/hostname; (echo x >> /etc/hosts) 2>/dev/null || echo hosts-ro;"
        "grep -i capeff /proc/self/status; echo done; exec sleep 600"
    )
    service = web(
        busybox_image,
        "store",
        script,
        tmpfs=(Tmpfs("/data", 1 << 20),),
        volumes=("/var/own",),
        health=HealthCheck(LogProbe("done")),
    )
    result, _, _ = run(state_dir, Job(image=busybox_image, steps=(sh("true"),), services=(service,)))
    assert result.outcome is Outcome.SUCCEEDED, result.message
    log = "\n".join(result.services[0].log_tail)
    assert "tmpfs" in log
    assert "store\nstore\nhosts-ro\n" in log
    held = sum(1 << bit for bit in (0, 1, 3, 4, 5, 6, 7, 31))
    assert f"CapEff:\t{held:016x}" in log
    assert result.services[0].evidence.memory.limit == 512 << 20
    assert any("starts as root of a user namespace of its own" in note for note in result.notes)


def test_every_service_has_a_log_stream_of_its_own(state_dir: Path, busybox_image: str) -> None:
    """service_output() gives the bytes of one service, from the first on, until its end; a wrong name is refused."""

    async def main() -> tuple[bytes, bytes]:
        services = tuple(
            web(
                busybox_image, name, f"echo {name}; echo {name} >&2; exec sleep 600", health=HealthCheck(LogProbe(name))
            )
            for name in ("one", "two")
        )
        job = Job(image=busybox_image, steps=(sh("true"),), services=services)
        async with Executor.open(state_dir) as executor, executor.run(job) as execution:
            one, two = [
                b"".join([chunk.data async for chunk in execution.service_output(name)]) for name in ("one", "two")
            ]
            await execution.wait()
            with pytest.raises(InvalidRequest, match="it has one, two"):
                await anext(execution.service_output("three"))
            return one, two

    one, two = asyncio.run(main())
    assert sorted(one.split()) == [b"one", b"one"]
    assert sorted(two.split()) == [b"two", b"two"]


def test_ps_shows_services_with_their_job(state_dir: Path, busybox_image: str) -> None:
    """One line for each attempt, which names its services; all of it is in one limited control group."""

    async def main() -> None:
        job = Job(image=busybox_image, steps=(), services=(web(busybox_image),))
        async with Executor.open(state_dir) as executor, executor.run(job) as execution:
            assert (await execution.exec(sh("true"))).exit is not None
            (info,) = executor.list_sandboxes()
            assert (info.state, [item.name for item in info.services]) == ("running", ["web"])
            assert info.services[0].pid is not None
            group = execution._attempt.job.cgroup
            whole, request = read_limits(group.host, group.path), execution._attempt.request
            assert (whole.memory, whole.pids) == (request.resources.memory, request.resources.pids)
            assert whole.memory == (request.limits.memory or 0) + (512 << 20)
            execution.finish()
            await execution.wait()

    asyncio.run(main())


def test_two_jobs_with_the_same_names_do_not_meet(state_dir: Path, busybox_image: str) -> None:
    """Side by side: each job finds its own `web`, and has no way to the other's address."""

    async def main() -> list[tuple[bytes, str]]:
        async with Executor.open(state_dir) as executor:

            async def one(word: str, other: asyncio.Future[str], mine: asyncio.Future[str]) -> tuple[bytes, str]:
                script = f"mkdir -p /www; echo {word} > /www/index.html; exec httpd -f -p 80 -h /www"
                job = Job(image=busybox_image, steps=(), services=(web(busybox_image, "web", script),))
                async with executor.run(job) as execution:
                    await execution.exec(sh(fetch("web")))
                    mine.set_result(execution._attempt.services[0].address)
                    step = await execution.exec(sh(fetch(await other)))
                    execution.finish()
                    out = b"".join([chunk.data async for chunk in execution.output() if chunk.stream == "stdout"])
                    await execution.wait()
                    return out, str(step.exit)

            left, right = (asyncio.get_running_loop().create_future() for _ in range(2))
            return list(await asyncio.gather(one("left", right, left), one("right", left, right)))

    assert asyncio.run(main()) == [(b"left\n", "exit 1"), (b"right\n", "exit 1")]


def test_network_files_lie_over_whatever_an_image_has(state_dir: Path, tmp_path: Path, leaks: object) -> None:
    """/etc/resolv.conf as a dangling link, absolute or not, and an image without /etc: generated files, read-only."""
    for name, entries in ETC.items():
        image = small_images.image(tmp_path / name, layers=[tar(entries)])
        script = "cat /etc/resolv.conf /etc/hostname; (echo x >> /etc/resolv.conf) 2>/dev/null || echo read-only"
        job = Job(image=image, steps=(sh(script),), services=(web(image),))
        result, out, err = run(state_dir, job)
        assert result.outcome is Outcome.SUCCEEDED, (name, result.message, err)
        assert out.startswith(b"nameserver 10.213."), name
        assert out.endswith(b"read-only\n"), name


def test_a_postgres_with_a_redis(state_dir: Path, images: Images, tree: Path, leaks: object) -> None:
    """The stock entrypoint switches to its user, runs an init script of the source, and shows ready by pg_isready."""
    (tree / "init.sql").write_text("create table t (n int); insert into t values (42);\n")
    database = ServiceSpec(
        "db",
        image=images.local("postgres"),
        env={"POSTGRES_PASSWORD": "test"},
        files=(ServiceFile("init.sql", "/docker-entrypoint-initdb.d/init.sql"),),
        health=HealthCheck(ExecProbe(("pg_isready", "-h", "db"))),
    )
    cache = ServiceSpec("cache", image=images.local("redis"), health=HealthCheck(ExecProbe(("redis-cli", "ping"))))
    query = "psql -h db -U postgres -At -c 'select n from t'"
    ping = r"exec 3<>/dev/tcp/cache/6379; printf 'PING\r\n' >&3; head -c 5 <&3"
    job = Job(
        image=images.local("postgres"),
        steps=(sh(query), Step("bash", "-c", ping)),
        env={"PGPASSWORD": "test"},
        services=(database, cache),
    )
    result, out, err = run(state_dir, job, source=tree)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"42\n+PONG"), (result.message, err)
    assert [item.state for item in result.services] == [ServiceState.READY] * 2


@pytest.mark.timeout(170)
def test_a_rabbitmq_resolves_its_own_name(state_dir: Path, images: Images, busybox_image: str, leaks: object) -> None:
    """Its node is named after its host, which it looks up before it listens; ready by the port that it exposes."""
    queue = ServiceSpec("mq", image=images.local("rabbitmq"))
    job = Job(image=busybox_image, steps=(sh("nc -w 3 mq 5672 -e /bin/true"),), services=(queue,))
    result, _, _ = run(state_dir, job)
    assert (result.outcome, result.services[0].ports_open) == (Outcome.SUCCEEDED, (5672,)), result.message


def test_the_command_line_shows_services_and_writes_their_logs(
    state_dir: Path, busybox_image: str, tmp_path: Path
) -> None:
    """A job file with services: a line for each on stderr, DIR/NAME.log byte for byte, and both in the result."""
    job = {
        "version": 1,
        "image": busybox_image,
        "services": {
            "web": {
                "image": busybox_image,
                "entrypoint": [],
                "command": ["/bin/sh", "-c", f"echo up; {HTTPD}"],
                "health": {"http": {"port": 80}},
            }
        },
        "steps": [{"run": fetch("web")}],
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    command = [sys.executable, "-m", "forgeyard_api", "run", "job.yaml"]
    done = subprocess.run(
        [*command, "--state-dir", str(state_dir), "--service-logs", "logs", "--result", "r.json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    assert (done.returncode, done.stdout) == (0, "web\n"), done.stderr
    assert "service   web  ready after" in done.stderr
    assert (tmp_path / "logs" / "web.log").read_text() == "up\n"
    assert json.loads((tmp_path / "r.json").read_text())["services"][0]["state"] == "ready"


def test_services_wait_within_their_own_time(state_dir: Path, busybox_image: str) -> None:
    """services_timeout bounds readiness and not the steps."""
    job = Job(
        image=busybox_image,
        steps=(sh("sleep 1.2"),),
        services=(web(busybox_image),),
        timeouts=Timeouts(services=1.0),
    )
    result, _, _ = run(state_dir, job)
    assert result.outcome is Outcome.SUCCEEDED, result.message
