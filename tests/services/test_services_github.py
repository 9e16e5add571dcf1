"""GitHub's `services:` as services of ours."""

from __future__ import annotations

import pytest
import yaml

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.services import (
    DEFAULT_LIMITS,
    ExecProbe,
    HealthCheck,
    ServiceNetwork,
    ServiceSpec,
    checked_services,
)
from forgeyard_services.ci_files import read_services

WORKFLOW = """
on: push
jobs:
  lint: {runs-on: x, steps: []}
  test:
    runs-on: ubuntu-latest
    container: python:3
    services:
      db:
        image: postgres:16
        env: {POSTGRES_PASSWORD: test, PORT: 5432}
        ports: ["15432:5432"]
        volumes: ["pgdata:/var/lib/postgresql/data", /scratch]
        options: >-
          --health-cmd "pg_isready -U postgres" --health-interval=10s --health-timeout 5s
          --health-retries 5 --health-start-period 1m30s
          -e LANG=C --env=X="a b" --shm-size 128m --ulimit nofile=1024:2048 -m 1g --cpus 0.5
"""


def read(text: str, job: str | None = None) -> tuple[tuple[ServiceSpec, ...], tuple[str, ...]]:
    """Services of a file's text; what comes out has to pass our own checks."""
    specs, notes = read_services(yaml.safe_load(text), job)
    checked_services(specs)
    return specs, notes


def service(text: str, *, container: bool = True) -> tuple[ServiceSpec, tuple[str, ...]]:
    """The only service of a job, from the YAML of its fields."""
    head = "container: x, " if container else ""
    (spec,), notes = read(f"jobs: {{test: {{{head}services: {{db: {{image: pg, {text}}}}}}}}}")
    return spec, notes


def test_everything_a_service_can_say() -> None:
    """All fields, all options that are supported, in both spellings."""
    (db,), notes = read(WORKFLOW)
    assert (db.name, db.image, db.network) == ("db", "postgres:16", ServiceNetwork.OWN)
    assert dict(db.env) == {"POSTGRES_PASSWORD": "test", "PORT": "5432", "LANG": "C", "X": "a b"}
    assert db.volumes == ("/var/lib/postgresql/data", "/scratch")
    command = ExecProbe(("/bin/sh", "-c", "pg_isready -U postgres"))
    assert db.health == HealthCheck(command, interval=10, timeout=5, retries=5, start_period=90)
    limits = db.limits
    assert (limits.memory, limits.cpus, limits.shm, limits.nofile) == (1 << 30, 0.5, 128 << 20, 2048)
    assert limits.pids == DEFAULT_LIMITS.pids
    assert notes == ()


def test_health_options_default_as_dockers() -> None:
    """30 seconds, 30 seconds, 3 times; 0 is the default as well."""
    spec, _ = service('options: "--health-cmd x --health-interval 0s"')
    assert spec.health == HealthCheck(ExecProbe(("/bin/sh", "-c", "x")), 30, 30, 3, 0)
    assert service("options: --no-healthcheck")[0].health == HealthCheck(None)
    assert service("ports: [80]")[0].health is None


def test_a_job_without_a_container_has_its_services_at_localhost() -> None:
    """Its steps say localhost:5432; only a port of the same number can be there."""
    assert service('ports: ["5432:5432", 80, 53/udp]', container=False)[0].network is ServiceNetwork.LOCALHOST
    spec, notes = service("env: {}", container=False)
    assert spec.network is ServiceNetwork.OWN
    assert notes == ("jobs.test.services.db: without ports nothing of it is at localhost; it is found as db",)
    with pytest.raises(InvalidRequest, match="ports can't be renumbered: use 5432"):
        service('ports: ["15432:5432"]', container=False)


def test_which_job() -> None:
    """The only one with services, or the one that is named."""
    assert len(read(WORKFLOW)[0]) == 1
    assert read(WORKFLOW, "lint") == ((), ())
    with pytest.raises(InvalidRequest, match="no job of the file has this name: it has lint, test"):
        read(WORKFLOW, "deploy")
    two = "jobs: {a: {services: {x: {image: i}}}, b: {services: {x: {image: i}}}}"
    with pytest.raises(InvalidRequest, match="name one job, as FILE:JOB; jobs with services: a, b"):
        read(two)
    with pytest.raises(InvalidRequest, match="jobs with services: none"):
        read("jobs: {a: {}}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("credentials: {username: u, password: p}", r"services.db.credentials .*own credentials"),
        ("env: {A: '${{ secrets.A }}'}", r"services.db.env.A .*expressions are not worked out"),
        ("restart: always", r"services.db.restart"),
        ("ports: [a]", "write PORT or PORT:PORT"),
        ("ports: ['127.0.0.1:80:80']", "write PORT or PORT:PORT"),
        ("ports: 80", "write a list"),
        ("volumes: ['/srv:/data']", "is a directory of the host"),
        ("volumes: ['./x:/data']", "is a directory of the host"),
        ("volumes: ['a:/b:ro']", "is a directory of the host"),
        ("volumes: [relative]", "write an absolute path"),
        ("options: --privileged", r"services.db.options '--privileged': is not supported; these are: .*health-cmd"),
        ("options: --network host", "'--network'"),
        ("options: -v /:/host", "'-v'"),
        ("options: --health-cmd", "needs a value"),
        ("options: --health-interval 5s", "goes with --health-cmd"),
        ("options: --health-cmd x --health-retries many", "write a whole number"),
        ("options: --health-cmd x --health-interval 5", "write 5s"),
        ("options: --no-healthcheck --health-cmd x", "does not go with"),
        ("options: -e HOME", "write --env NAME=VALUE"),
        ("options: --ulimit memlock=-1", "only nofile=NUMBER"),
        ("options: --memory lots", "memory"),
        ('options: "--env \'A"', "can't be split"),
        ("options: postgres", "is not supported"),
    ],
)
def test_what_can_not_be_taken_over_is_refused_by_name(text: str, message: str) -> None:
    """With the place in the file and the cure; secrets do not show in it."""
    with pytest.raises(InvalidRequest, match=message) as caught:
        service(text)
    assert "password" not in str(caught.value)


def test_engines_and_expressions_in_images_are_refused() -> None:
    """No sandbox runs a container engine; no expression is worked out."""
    with pytest.raises(InvalidRequest, match="a container engine can't run"):
        read("jobs: {t: {services: {d: {image: 'docker:dind'}}}}")
    with pytest.raises(InvalidRequest, match="expressions are not worked out"):
        read("jobs: {t: {services: {d: {image: 'pg:${{ matrix.pg }}'}}}}")
