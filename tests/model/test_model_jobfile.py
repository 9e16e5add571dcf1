"""The job file's model: what it takes, what it becomes, what it refuses to become."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from pydantic import ValidationError

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest
from forgeyard_model.job import Output, Shell, When
from forgeyard_model.jobfile import SCHEMA_ID, JobFile, job_schema
from forgeyard_model.policy import ApprovedHostPath, CapabilityGrant, NetworkMode, SourceMode
from forgeyard_model.profile import ExecutionProfile

MINIMAL: dict[str, Any] = {"version": 1, "rootfs": "host", "steps": [{"argv": ["true"]}]}
DIGEST = "sha256:" + "a" * 64
FULL: dict[str, Any] = {
    "version": 1,
    "name": "api-tests",
    "profile": "standard-ci",
    "image": f"oci:layout@{DIGEST}",
    "platform": "linux/amd64",
    "user": 1000,
    "env": {"PYTHONUNBUFFERED": "1"},
    "source": {"path": ".", "mode": "cow"},
    "toolchains": [{"path": "toolchains/python-3.11", "name": "python"}, {"path": "/opt/node", "name": "node"}],
    "resources": {"cpus": 2, "memory": "2GiB", "pids": 512, "disk": "4GiB", "nofile": 4096, "shm": "128MiB"},
    "timeout": "15m",
    "grace": "0s",
    "prepare_timeout": "2m",
    "finally_timeout": "5s",
    "network": "deny",
    "capabilities": "root-in-userns",
    "workdir": "sub",
    "steps": [
        {"name": "test", "run": "pytest -q", "shell": "bash", "env": {"A": "b"}, "when": "always"},
        {"name": "publish", "argv": ["./publish"], "continue_on_error": True, "workdir": "/work/build"},
        {"run": "sleep 1000 &", "background": True},
    ],
    "outputs": [{"path": "report.xml"}, {"path": "./coverage/", "optional": True}],
    "merge_output": True,
    "output_cap": "1MiB",
    "services": {
        "db": {
            "image": f"registry.example.org/postgres@{DIGEST}",
            "env": {"POSTGRES_PASSWORD": "test"},
            "files": [{"from": "db/init.sql", "to": "/docker-entrypoint-initdb.d/init.sql"}],
            "health": {"cmd": ["pg_isready", "-h", "db"], "interval": "1s", "timeout": "5s", "retries": 30},
            "resources": {"memory": "512MiB"},
            "aliases": ["postgres"],
        },
        "migrate": {"image": "x", "oneshot": True, "on_exit": "ignore", "depends_on": {"db": {}}},
    },
    "services_timeout": "1m",
    "caches": [{"key": "pip/main", "path": "/home/forgeyard/.cache/pip", "mode": "ro"}, {"key": "x", "path": "/x"}],
}
NOT_YET: dict[str, Any] = {
    "secrets": [
        {"name": "TOKEN", "as": "env", "steps": ["publish"]},
        {"name": "netrc", "as": "file", "path": "/run/secrets/netrc"},
    ],
    "devices": ["vendor.com/gpu=0"],
}


def test_a_minimal_file_is_the_default_job() -> None:
    """What is left out is the profile's: standard-ci, nothing else decided."""
    job = JobFile.model_validate(MINIMAL).to_job()
    assert (job.profile, job.network, job.rootfs, job.name) == (ExecutionProfile.STANDARD_CI, None, "host", "job")
    assert [step.argv for step in job.steps] == [("true",)]
    assert job.limits.memory is None
    assert job.output_cap == 512 << 20


def test_every_field_arrives() -> None:
    """Nothing that a file says is lost on its way into a Job."""
    job = JobFile.model_validate(FULL).to_job(base="/jobs")
    assert (job.name, job.user, job.platform) == ("api-tests", "1000", "linux/amd64")
    assert job.image == f"oci:/jobs/layout@{DIGEST}"
    assert dict(job.env) == {"PYTHONUNBUFFERED": "1"}
    assert (job.source_mode, job.workdir) == (SourceMode.COW, "/work/source/sub")
    assert job.toolchains == (
        ApprovedHostPath("/jobs/toolchains/python-3.11", "/toolchains/python"),
        ApprovedHostPath("/opt/node", "/toolchains/node"),
    )
    limits = job.limits
    assert (limits.cpus, limits.memory, limits.pids, limits.disk) == (2.0, 2 << 30, 512, 4 << 30)
    assert (limits.nofile, limits.shm, limits.wall_time) == (4096, 128 << 20, 900.0)
    assert (job.timeouts.grace, job.timeouts.prepare, job.timeouts.finally_) == (0.0, 120.0, 5.0)
    assert job.network is not None
    assert job.network.mode is NetworkMode.DENY
    assert job.capabilities is CapabilityGrant.ROOT_IN_USERNS
    assert job.outputs == (Output("report.xml"), Output("coverage", optional=True))
    assert (job.merge_output, job.output_cap) == (True, 1 << 20)
    test, publish, background = job.steps
    assert (test.name, test.script, test.interpreter, test.when) == ("test", "pytest -q", Shell.BASH, When.ALWAYS)
    assert dict(test.env) == {"A": "b"}
    assert (publish.argv, publish.continue_on_error, publish.workdir) == (("./publish",), True, "/work/build")
    assert (background.name, background.background, background.entrypoint) == ("step 3", True, False)


@pytest.mark.parametrize("field", NOT_YET)
def test_what_is_not_supported_parses_and_is_refused_by_name(field: str) -> None:
    """No silent drop: the field's name stands in the refusal."""
    parsed = JobFile.model_validate(FULL | {field: NOT_YET[field]})
    with pytest.raises(ExecutorError) as caught:
        parsed.to_job()
    assert caught.value.kind is ExecutorErrorKind.UNSUPPORTED
    assert caught.value.reason == f"{field}_unsupported"
    assert caught.value.brief.startswith(f"{field}: ")


def test_the_whole_format_parses_at_once() -> None:
    """Everything the contract shows, in one file."""
    parsed = JobFile.model_validate(FULL | NOT_YET)
    health = parsed.services["db"].health
    assert health is not None
    assert (health.cmd, health.interval) == (("pg_isready", "-h", "db"), 1.0)
    assert parsed.secrets[0].as_ == "env"
    assert parsed.services["migrate"].depends_on["db"].condition == "service_healthy"


@pytest.mark.parametrize("mode", [NetworkMode.FETCH_ONLY, NetworkMode.ALLOW, NetworkMode.DENY])
def test_networks_by_name(mode: NetworkMode) -> None:
    """A name stands for the mode, and for nothing else."""
    job = JobFile.model_validate(MINIMAL | {"network": mode.value}).to_job()
    assert job.network is not None
    assert (job.network.mode, job.network.egress) == (mode, None)


def test_host_network_is_the_profiles_to_refuse() -> None:
    """The file may say host; whether it may have it is not decided here."""
    job = JobFile.model_validate(MINIMAL | {"network": "host"}).to_job()
    assert job.network is not None
    assert job.network.mode is NetworkMode.HOST


@pytest.mark.parametrize("field", ["cpus", "memory", "pids"])
def test_unlimited_is_for_profiles_that_allow_it(field: str) -> None:
    """Refused by standard-ci; unsupported, and said so, in development."""
    unlimited = MINIMAL | {"resources": {field: "unlimited"}}
    with pytest.raises(InvalidRequest, match="profile standard-ci needs a limit"):
        JobFile.model_validate(unlimited).to_job()
    with pytest.raises(ExecutorError, match=rf"resources.{field}: unlimited"):
        JobFile.model_validate(unlimited | {"profile": "development"}).to_job()


def test_unlimited_disk_is_what_development_has_anyway() -> None:
    """No profile sets a default for disk, so no limit is honoured."""
    parsed = JobFile.model_validate(MINIMAL | {"profile": "development", "resources": {"disk": "unlimited"}})
    assert parsed.to_job().limits.disk is None


def change(**changes: Any) -> dict[str, Any]:
    """The minimal file with `changes`; None takes a field out."""
    return {key: value for key, value in (MINIMAL | changes).items() if value is not None}


@pytest.mark.parametrize(
    ("data", "loc", "cure"),
    [
        (change(version=None), ("version",), "required"),
        (change(version=2), ("version",), "1"),
        (change(version="1"), ("version",), "1"),
        (change(rootfs=None), (), "exactly one of image and rootfs"),
        (change(image="a"), (), "exactly one of image and rootfs"),
        (change(rootfs="/"), ("rootfs",), "host"),
        (change(steps=None), ("steps",), "required"),
        (change(steps=[]), ("steps",), "at least 1"),
        (change(steps=[{}]), ("steps", 0), "exactly one of run and argv"),
        (change(steps=[{"argv": ["a"], "shell": "sh"}]), ("steps", 0), "shell goes with run"),
        (change(steps=[{"argv": [""]}]), ("steps", 0), "can't be empty"),
        (change(steps=[{"run": ""}]), ("steps", 0, "run"), "at least 1"),
        (change(steps=[{"run": "a\0"}]), ("steps", 0, "run"), "NUL"),
        (change(steps=[{"run": "\ud800"}]), ("steps", 0, "run"), "surrogate"),
        (change(steps=[{"argv": ["x" * (128 << 10)]}]), ("steps", 0, "argv", 0), "128 KiB"),
        (change(steps=[{"run": "a", "name": "a\tb"}]), ("steps", 0, "name"), "control character"),
        (change(steps=[{"run": "a", "name": "x" * 129}]), ("steps", 0, "name"), "128"),
        (change(steps=[{"run": "a", "name": " "}]), ("steps", 0, "name"), "control character"),
        (change(env={"A": 1}), ("env", "A"), "string"),
        (change(env={"": "a"}), ("env", "", "[key]"), "variable's name"),
        (change(env={"A=B": "a"}), ("env", "A=B", "[key]"), "variable's name"),
        (change(env={"A": "b\0"}), ("env", "A"), "NUL"),
        (change(user="a b"), ("user",), "UID:GID"),
        (change(user=-1), ("user",), "UID:GID"),
        (change(user=True), ("user",), "string"),
        (change(platform="windows/amd64"), ("platform",), "linux/ARCHITECTURE"),
        (change(rootfs=None, image="a b"), ("image",), "image reference"),
        (change(rootfs=None, image="a@sha256:12"), ("image",), "64 hexadecimal"),
        (change(workdir="../up"), ("workdir",), "without '..'"),
        (change(source={"path": ""}), ("source", "path"), "write a path"),
        (change(source={"path": ".", "mode": "copy"}), ("source", "mode"), "ro"),
        (change(toolchains=[{"path": "/a", "name": "../x"}]), ("toolchains", 0, "name"), "lower-case"),
        (change(toolchains=[{"path": "/a", "name": "a"}] * 2), ("toolchains", 1, "name"), "twice"),
        (change(resources={"memory": "0"}), ("resources", "memory"), "more than 0"),
        (change(resources={"memory": True}), ("resources", "memory"), "write a size"),
        (change(resources={"memory": ["1"]}), ("resources", "memory"), "write a value"),
        (change(resources={"cpus": "many"}), ("resources", "cpus"), "number of cpus"),
        (change(resources={"pids": 1.5}), ("resources", "pids"), "whole number"),
        (change(resources={"shm": "unlimited"}), ("resources", "shm"), ""),
        (change(timeout=90), ("timeout",), "write 90s"),
        (change(timeout={"a": 1}), ("timeout",), "write a"),
        (change(grace="unlimited"), ("grace",), "write a duration"),
        (change(network="internet"), ("network", "name"), "write deny"),
        (change(network="restricted"), ("network", "name"), "name its destinations"),
        (change(network=[]), ("network", "name"), "write deny"),
        (change(network={"restricted": {"allow": []}}), ("network", "mapping", "restricted", "allow"), "at least 1"),
        (change(secrets=[{"name": "A", "path": "/a"}]), ("secrets", 0), "as: file"),
        (change(secrets=[{"name": "A", "steps": ["x"]}]), ("secrets", 0, "steps", 0), "no step"),
        (change(secrets=[{"name": "A", "value": "x"}]), ("secrets", 0, "value"), "not permitted"),
        (change(devices=["/dev/kvm"]), ("devices", 0), "CDI name"),
        (change(caches=[{"key": "a", "path": "x"}]), ("caches", 0, "path"), "absolute"),
        (change(caches=[{"key": "a", "path": "/work/source/x"}]), ("caches", 0, "path"), "belongs to the sandbox"),
        (change(caches=[{"key": "a", "path": "/home"}]), ("caches", 0, "path"), "would hide"),
        (change(caches=[{"key": "a\n", "path": "/x"}]), ("caches", 0, "key"), "printable"),
        (change(caches=[{"key": "a", "path": "/x"}, {"key": "a", "path": "/y"}]), ("caches", 1, "key"), "twice"),
        (change(caches=[{"key": "a", "path": "/x"}, {"key": "b", "path": "/x"}]), ("caches", 1, "path"), "twice"),
        (change(outputs=[{"path": "/work/output/x"}]), ("outputs", 0, "path"), "relative to /work/output"),
        (change(outputs=[{"path": "a/../../b"}]), ("outputs", 0, "path"), "without '..'"),
        (change(outputs=[{"path": "."}]), ("outputs", 0, "path"), "relative"),
        (change(outputs=[{"path": "a"}, {"path": "./a/"}]), ("outputs", 1, "path"), "twice"),
        (change(services={"UPPER": {"image": "x"}}), ("services", "UPPER", "[key]"), "host name"),
        (change(services={"localhost": {"image": "x"}}), ("services", "localhost", "[key]"), "host name"),
        (change(services={"a": {"image": "x", "aliases": ["a"]}}), ("services", "a", "aliases", 0), "taken"),
        (
            change(services={"a": {"image": "x", "depends_on": {"b": {}}}}),
            ("services", "a", "depends_on", "b"),
            "no other service",
        ),
        (change(services={"a": {"image": "x", "health": {"cmd": []}}}), ("services", "a", "health", "cmd"), "at least"),
        (change(merge_output="yes"), ("merge_output",), "boolean"),
        (change(unknown=1), ("unknown",), "not permitted"),
    ],
)
def test_what_a_job_file_can_not_say(data: dict[str, Any], loc: tuple[str | int, ...], cure: str) -> None:
    """Each mistake is found where it stands, with what to write instead."""
    with pytest.raises(ValidationError) as caught:
        JobFile.model_validate(data)
    found = {tuple(error["loc"]): error["msg"] for error in caught.value.errors()}
    assert loc in found
    assert cure in found[loc]


@pytest.mark.parametrize("host", ["example.org", "*.example.org", "a", "x-y.z9", "10.example.org"])
def test_host_patterns(host: str) -> None:
    """Names, and one star in front."""
    JobFile.model_validate(MINIMAL | {"network": {"restricted": {"allow": [{"host": host}]}}})


@pytest.mark.parametrize("host", ["", "10.0.0.1", "*", "*.*.a", "a..b", "-a.b", "http://a", "a:443", "a/b", "A.org"])
def test_what_is_no_host_pattern(host: str) -> None:
    """Addresses, URLs, ports and inner stars would match nothing, or too much."""
    with pytest.raises(ValidationError):
        JobFile.model_validate(MINIMAL | {"network": {"restricted": {"allow": [{"host": host}]}}})


def test_the_schema_agrees_with_the_model() -> None:
    """Editors accept what we accept; its id is stable."""
    schema = job_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    for good in (MINIMAL, FULL, FULL | NOT_YET, MINIMAL | {"network": "host", "output_cap": 5}):
        assert [error.message for error in validator.iter_errors(good)] == []
    assert schema["$id"] == SCHEMA_ID == "urn:forgeyard:schema:job:1"


@pytest.mark.parametrize(
    "bad",
    [
        change(version=2),
        change(unknown=1),
        change(image="a"),
        change(rootfs=None),
        change(steps=[{"run": "a", "argv": ["b"]}]),
        change(timeout="90"),
        change(resources={"memory": "lots"}),
        change(network="internet"),
        change(env={"A": 1}),
        change(network={"restricted": {"allow": [{"host": "a", "ports": [0]}]}}),
    ],
)
def test_the_schema_refuses_the_plain_mistakes(bad: dict[str, Any]) -> None:
    """What an editor should underline."""
    assert not jsonschema.Draft202012Validator(job_schema()).is_valid(bad)


def test_every_field_is_described() -> None:
    """An editor shows a description for each field at each level."""
    schema = job_schema()
    models = [schema, *(item for item in schema["$defs"].values() if "properties" in item)]
    bare = [name for model in models for name, field in model["properties"].items() if not field.get("description")]
    assert bare == []
