"""Services in a job: what the job file's forms become, what is refused, and where the request counts them."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job, Step, Timeouts
from forgeyard_model.jobfile import JobFile, job_schema
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import NetworkPolicy
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job
from forgeyard_model.services import (
    DEFAULT_LIMITS,
    Condition,
    ExecProbe,
    HealthCheck,
    HttpProbe,
    LogProbe,
    OnExit,
    ServiceFile,
    ServiceNetwork,
    ServiceSpec,
    TcpProbe,
    Tmpfs,
    checked_services,
    find_cycle,
)
from forgeyard_services.graph import start_levels

SCHEMA = jsonschema.Draft202012Validator(job_schema())
DIGEST = "sha256:" + "a" * 64
IMAGE = f"registry.example.org/pg@{DIGEST}"
FULL: dict[str, Any] = {
    "image": f"oci:layouts/pg@{DIGEST}",
    "platform": "linux/amd64",
    "entrypoint": ["docker-entrypoint.sh"],
    "command": "postgres -c 'shared_buffers=1MB'",
    "env": {"POSTGRES_PASSWORD": "test"},
    "user": 999,
    "workdir": "/srv",
    "aliases": ["postgres"],
    "files": [{"from": "db/init.sql", "to": "/docker-entrypoint-initdb.d/init.sql"}],
    "tmpfs": ["/run", "/tmp:size=64m", {"path": "/scratch", "size": "1MiB"}],
    "volumes": ["/data", "pgdata:/var/lib/postgresql"],
    "health": {"cmd": ["pg_isready"], "interval": "2s", "timeout": "3s", "retries": 4, "start_period": "5s"},
    "resources": {"cpus": 0.5, "memory": "1GiB", "pids": 99, "nofile": 1024, "shm": "128MiB"},
    "depends_on": {"cache": {"condition": "service_started"}},
    "on_exit": "ignore",
    "network": "localhost",
}


def job_of(services: dict[str, Any], **more: Any) -> Job:
    """A job with services, from a job file."""
    data = {"version": 1, "rootfs": "host", "steps": [{"argv": ["true"]}], "services": services, **more}
    assert SCHEMA.is_valid(data)
    return JobFile.model_validate(data).to_job(base="/jobs")


def service(**fields: Any) -> ServiceSpec:
    """One service of an image, from its fields in a job file."""
    return job_of({"db": {"image": IMAGE, **fields}, "cache": {"image": IMAGE}}).services[0]


def request(*services: ServiceSpec, **more: Any) -> ExecutionRequest:
    """The request of a job with services."""
    job = Job(rootfs="host", steps=(Step("true"),), services=services, **more)
    return request_from_job(job, context=AttemptContext("a"), workspace=PreparedWorkspace())


def test_every_field_arrives() -> None:
    """Nothing that a file says of a service is lost."""
    db = job_of({"db": FULL, "cache": {"image": IMAGE}}, services_timeout="3m").services[0]
    assert db == ServiceSpec(
        name="db",
        image=f"oci:/jobs/layouts/pg@{DIGEST}",
        aliases=("postgres",),
        platform="linux/amd64",
        entrypoint=("docker-entrypoint.sh",),
        command=("postgres", "-c", "shared_buffers=1MB"),
        env={"POSTGRES_PASSWORD": "test"},
        user="999",
        workdir="/srv",
        files=(ServiceFile("db/init.sql", "/docker-entrypoint-initdb.d/init.sql"),),
        tmpfs=(Tmpfs("/run"), Tmpfs("/tmp", 64 << 20), Tmpfs("/scratch", 1 << 20)),
        volumes=("/data", "/var/lib/postgresql"),
        limits=ResourceLimits(cpus=0.5, memory=1 << 30, pids=99, nofile=1024, shm=128 << 20),
        health=HealthCheck(ExecProbe(("pg_isready",)), 2.0, 3.0, 4, 5.0),
        depends_on={"cache": Condition.STARTED},
        on_exit=OnExit.IGNORE,
        network=ServiceNetwork.LOCALHOST,
    )


def test_a_minimal_service_has_the_defaults() -> None:
    """An image is enough; 2 minutes for all of them, half a GiB and one cpu for each."""
    job = job_of({"db": {"image": IMAGE}})
    assert job.timeouts == Timeouts(services=120.0)
    (db,) = checked_services(job.services)
    assert db == ServiceSpec("db", image=IMAGE)
    assert (db.limits, db.rootfs, db.names) == (DEFAULT_LIMITS, None, ("db",))
    assert (DEFAULT_LIMITS.memory, DEFAULT_LIMITS.cpus) == (512 << 20, 1.0)


def test_a_service_can_be_a_program_of_the_host() -> None:
    """Process mode: rootfs: host and argv."""
    (db,) = job_of({"db": {"rootfs": "host", "argv": ["redis-server", "--port", "0"]}}).services
    assert (db.rootfs, db.image, db.argv) == ("host", None, ("redis-server", "--port", "0"))


@pytest.mark.parametrize(
    ("health", "probe"),
    [
        ({"cmd": ["pg_isready", "-h", "db"]}, ExecProbe(("pg_isready", "-h", "db"))),
        ({"cmd": "pg_isready || exit 1"}, ExecProbe(("/bin/sh", "-c", "pg_isready || exit 1"))),
        ({"cmd": ["CMD", "pg_isready"]}, ExecProbe(("pg_isready",))),
        ({"cmd": ["CMD-SHELL", "a | b"]}, ExecProbe(("/bin/sh", "-c", "a | b"))),
        ({"tcp": 6379}, TcpProbe(6379)),
        ({"http": {"port": 80}}, HttpProbe(80)),
        ({"http": {"port": 80, "path": "/ok?x=1", "status": 204}}, HttpProbe(80, "/ok?x=1", (204,))),
        ({"http": {"port": 80, "status": [200, 401]}}, HttpProbe(80, "/", (200, 401))),
        ({"log": "ready to accept"}, LogProbe("ready to accept")),
        ({"log": {"regex": "port [0-9]+"}}, LogProbe("port [0-9]+", regex=True)),
        ({"log": {"text": "x"}}, LogProbe("x")),
        ("none", None),
        ({"disable": True}, None),
    ],
)
def test_forms_of_health(health: Any, probe: Any) -> None:
    """Those of compose, and tcp, http and a line of output."""
    found = service(health=health).health
    assert found is not None
    assert (found.probe, found.interval, found.timeout, found.retries) == (probe, 1.0, 5.0, 30)


def test_forms_of_the_rest() -> None:
    """One string for a list, as compose has it; a list of dependencies means started."""
    assert service(entrypoint="sh -c").entrypoint == ("sh", "-c")
    assert service(entrypoint="").entrypoint == ()
    assert service(tmpfs="/run").tmpfs == (Tmpfs("/run"),)
    assert service(depends_on=["cache"]).depends_on == {"cache": Condition.STARTED}
    assert service(depends_on={"cache": {}}).depends_on == {"cache": Condition.HEALTHY}
    assert service().command is None


@pytest.mark.parametrize(
    ("fields", "loc", "cure"),
    [
        ({"rootfs": "host"}, (), "exactly one of image and rootfs"),
        ({"image": None}, (), "exactly one of image and rootfs"),
        ({"argv": ["x"]}, (), "go together"),
        ({"image": None, "rootfs": "host"}, (), "go together"),
        ({"image": None, "rootfs": "host", "argv": ["x"], "command": "y"}, (), "go with an image"),
        ({"health": {}}, ("health",), "exactly one of cmd, tcp, http and log"),
        ({"health": {"cmd": "a", "tcp": 1}}, ("health",), "exactly one of"),
        ({"health": {"log": "a", "interval": "1s"}}, ("health",), "interval goes with cmd, tcp and http"),
        ({"health": {"log": {"regex": "("}}}, ("health", "log"), "no regular expression"),
        ({"health": {"log": {"regex": "(" * 200 + ")" * 200}}}, ("health", "log"), "most 256"),
        ({"health": {"log": {"text": "a", "regex": "b"}}}, ("health", "log"), "exactly one of text and regex"),
        ({"health": {"http": {"port": 80, "path": "a b"}}}, ("health", "http", "path"), "pattern"),
        ({"health": {"cmd": ["CMD"]}}, ("health", "cmd"), "at least 1"),
        ({"command": "a 'b"}, ("command",), "is no command"),
        ({"tmpfs": ["/run:uid=5"]}, ("tmpfs", 0), "uid is no option"),
        ({"volumes": ["./data:/data"]}, ("volumes", 0), "a directory of the host"),
        ({"volumes": ["data"]}, ("volumes", 0), "an absolute path"),
        ({"network": "host"}, ("network",), "'own' or 'localhost'"),
        ({"ports": ["80:80"]}, ("ports",), "not permitted"),
        ({"environment": {}}, ("environment",), "not permitted"),
        ({"depends_on": {"cache": {"required": False}}}, ("depends_on", "cache", "required"), "not permitted"),
    ],
)
def test_what_a_service_can_not_say(fields: dict[str, Any], loc: tuple[str | int, ...], cure: str) -> None:
    """Each mistake where it stands, with the cure."""
    entry = {key: value for key, value in ({"image": IMAGE} | fields).items() if value is not None}
    data = {"version": 1, "rootfs": "host", "steps": [{"argv": ["true"]}], "services": {"db": entry}}
    with pytest.raises(ValidationError) as caught:
        JobFile.model_validate(data)
    found = {tuple(error["loc"]): error["msg"] for error in caught.value.errors()}
    assert cure in found[("services", "db", *loc)]


def test_cycles_are_printed() -> None:
    """One error, at one place, with the whole way round."""
    entries = {
        "a": {"image": IMAGE, "depends_on": ["b"]},
        "b": {"image": IMAGE, "depends_on": {"c": {}}},
        "c": {"image": IMAGE, "depends_on": ["a", "d"]},
        "d": {"image": IMAGE},
    }
    with pytest.raises(ValidationError) as caught:
        job_of(entries)
    (error,) = caught.value.errors()
    assert error["loc"] == ("services", "a", "depends_on", "b")
    assert error["msg"] == "goes round: a -> b -> c -> a; take one of these out"


def test_find_cycle() -> None:
    """None in a diamond; one that can't be reached from the first name is found as well."""
    assert find_cycle({"a": ["b", "c"], "b": ["d"], "c": ["d"], "d": []}) == ()
    assert find_cycle({"a": ["b"], "b": [], "x": ["y"], "y": ["x"]}) == ("x", "y", "x")
    assert find_cycle({"a": ["a"]}) == ("a", "a")
    assert find_cycle({str(number): [str(number + 1)] for number in range(5000)}) == ()


def test_start_levels() -> None:
    """What can start at once does, in the order declared."""
    specs = [
        ServiceSpec("web", image="x", depends_on={"db": Condition.HEALTHY, "cache": Condition.STARTED}),
        ServiceSpec("db", image="x"),
        ServiceSpec("cache", image="x", depends_on={"db": Condition.STARTED}),
        ServiceSpec("mail", image="x"),
    ]
    assert start_levels(specs) == (("db", "mail"), ("cache",), ("web",))
    assert start_levels([]) == ()


def named(name: str, **more: Any) -> ServiceSpec:
    """A service of an image."""
    return ServiceSpec(name, image=IMAGE, **more)


@pytest.mark.parametrize(
    ("services", "message"),
    [
        ([named("a"), named("a")], "services.a 'a': choose another name: service a has this one"),
        ([named("a"), named("b", aliases=("a",))], "service a has this one"),
        ([named("a", aliases=("x",)), named("b", aliases=("x",))], "service a has this one"),
        ([named("")], r"services\[0\]"),
        ([named("UPPER")], "write a host name"),
        ([named("localhost")], "does not lead to a service"),
        ([named("a", aliases=("10.0.0.1",))], "does not lead to a service"),
        ([named("a" * 64)], "at most 63"),
        ([named("a", depends_on={"b": Condition.STARTED})], "services.a.depends_on 'b': no service has this name"),
        ([named("a", depends_on={"a": Condition.STARTED})], "goes round: a -> a"),
        ([ServiceSpec("a")], "exactly one of image"),
        ([ServiceSpec("a", image="x", argv=("y",))], "exactly one of image"),
        ([ServiceSpec("a", argv=("y",), command=("z",))], "use argv"),
        ([named("a", volumes=("/proc/x",))], "belongs to the sandbox"),
        ([named("a", volumes=("/",))], "belongs to the sandbox"),
        ([named("a", volumes=("/a", "/a/"))], "has this place"),
        ([named("a", tmpfs=(Tmpfs("relative"),))], "write an absolute path"),
        ([named("a", files=(ServiceFile("x", "/a/../b"),))], "write an absolute path"),
        ([named("a", limits=ResourceLimits(memory=1))], "memory"),
        ([named("a", health=HealthCheck(TcpProbe(0)))], "write a port"),
        ([named("a", health=HealthCheck(TcpProbe(1), retries=0))], "more than 0"),
        ([named("a", health=HealthCheck(HttpProbe(1, "x")))], "write a path"),
        ([named("a", health=HealthCheck(HttpProbe(1, "/a\r\nX: y")))], "write a path"),
        ([named("a", health=HealthCheck(LogProbe("(", regex=True)))], "no regular expression"),
        ([named("a", health=HealthCheck(ExecProbe(())))], "write a program"),
        ([named("a", oneshot=True, health=HealthCheck(TcpProbe(1)))], "take health out"),
        ([named(f"s{number}") for number in range(13)], "12 services at the most"),
    ],
)
def test_what_no_request_can_have(services: list[ServiceSpec], message: str) -> None:
    """However the services came to be, from a file or from a program."""
    with pytest.raises(InvalidRequest, match=message):
        request(*services)


def test_a_request_counts_its_services() -> None:
    """The scheduler sets aside what the job and its services may use together; the job's own limits are its own."""
    found = request(
        named("a", limits=ResourceLimits(cpus=0.5)), named("b"), limits=ResourceLimits(cpus=2, memory=1 << 30)
    )
    assert [item.limits.memory for item in found.spec.services] == [512 << 20, 512 << 20]
    assert (found.resources.cpus, found.resources.memory) == (3.5, 2 << 30)
    assert (found.limits.cpus, found.limits.memory) == (2, 1 << 30)


def test_profiles_and_networks_bind_services_too() -> None:
    """No image by tag where the profile wants digests; none on the host network, which is nobody's own."""
    with pytest.raises(InvalidRequest, match=r"services.a.image 'x': .*pinned"):
        request(ServiceSpec("a", image="x"))
    with pytest.raises(InvalidRequest, match="services need a network of the job's own"):
        request(named("a"), profile=ExecutionProfile.DEVELOPMENT, network=NetworkPolicy.host())


def test_a_service_is_always_bounded() -> None:
    """`unlimited` is refused by name."""
    with pytest.raises(ExecutorError, match=r"services.db.resources.memory: unlimited"):
        service(resources={"memory": "unlimited"})
