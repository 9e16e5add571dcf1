"""GitLab's `services:` as services of ours."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.services import HealthCheck, ServiceSpec, TcpProbe, checked_services
from forgeyard_services.ci_files import read_services

DIGEST = "sha256:" + "a" * 64


def read(text: str, job: str | None = None) -> tuple[tuple[ServiceSpec, ...], tuple[str, ...]]:
    """Services of a file's text; what comes out has to pass our own checks."""
    specs, notes = read_services(yaml.safe_load(text), job)
    checked_services(specs)
    return specs, notes


def test_every_form_of_an_entry() -> None:
    """A bare image, and a mapping with all its keys."""
    specs, notes = read(
        """
        services:
          - redis:7
          - name: registry.example.org:5000/team/pg:16@DIGEST
            alias: db, postgres primary
            entrypoint: [/usr/local/bin/docker-entrypoint.sh]
            command: postgres -c 'max_connections=10'
            variables: {POSTGRES_PASSWORD: test, PORT: 5432, DEBUG: true}
            docker: {platform: linux/amd64, user: "999"}
            pull_policy: always
        """.replace("DIGEST", DIGEST)
    )
    redis, pg = specs
    assert (redis.name, redis.aliases, redis.image) == ("redis", (), "redis:7")
    assert pg.names == ("db", "postgres", "primary", "registry.example.org-team-pg", "registry.example.org__team__pg")
    assert pg.image == f"registry.example.org:5000/team/pg:16@{DIGEST}"
    assert pg.entrypoint == ("/usr/local/bin/docker-entrypoint.sh",)
    assert pg.command == ("postgres", "-c", "max_connections=10")
    assert dict(pg.env) == {"POSTGRES_PASSWORD": "test", "PORT": "5432", "DEBUG": "true"}
    assert (pg.platform, pg.user) == ("linux/amd64", "999")
    assert notes == ("services[1].pull_policy: images are kept by digest, so that a pull policy has no meaning here",)


@pytest.mark.parametrize(
    ("image", "names"),
    [
        ("postgres", ("postgres",)),
        ("postgres:16.1-alpine", ("postgres",)),
        ("tutum/wordpress:latest", ("tutum-wordpress", "tutum__wordpress")),
        ("reg.example/a/b/pg@" + DIGEST, ("reg.example-a-b-pg", "reg.example__a__b__pg")),
        ("localhost:5000/x/Redis:7", ("localhost-x-redis", "localhost__x__redis")),
    ],
)
def test_names_made_from_images(image: str, names: tuple[str, ...]) -> None:
    """Tag, digest and port dropped, slashes as one dash or two underscores."""
    (spec,), _ = read(f"services: ['{image}']")
    assert spec.names == names


def test_two_copies_of_one_image_do_not_collide() -> None:
    """Field case: each is found by its alias, and neither by the image's name; that is noted."""
    text = "services: [{name: reg.example/a/b/pg, alias: db1}, {name: reg.example/a/b/pg, alias: db2}]"
    specs, notes = read(text)
    assert [spec.names for spec in specs] == [("db1",), ("db2",)]
    assert len(notes) == 2
    specs, _ = read("services: [pg, {name: pg, alias: db2}]")
    assert [spec.names for spec in specs] == [("pg",), ("db2",)]
    with pytest.raises(InvalidRequest, match="another service has the name pg: give each an alias"):
        read("services: [pg:1, pg:2]")
    with pytest.raises(InvalidRequest, match="another service has the name pg"):
        read("services: [pg, {name: redis, alias: pg}]")
    with pytest.raises(InvalidRequest, match="choose another name"):
        read("services: [{name: a, alias: x}, {name: b, alias: x}]")


JOBS = """
default: {services: [redis:7]}
variables: {GLOBAL: g, PASSWORD: {value: secret, description: what it is}, LITERAL: {value: $GLOBAL, expand: false}}
.base: {services: ["postgres:16"], variables: {FROM: base, GLOBAL: base}}
plain: {script: [x]}
none: {services: [], script: [x]}
child: {extends: [.other, .base], variables: {FROM: child}}
.other: {variables: {OTHER: o}}
grandchild: {extends: child}
lone: {inherit: {default: false, variables: [PASSWORD]}, services: [mysql]}
cut: {inherit: {default: [image]}}
loop: {extends: pool}
pool: {extends: loop}
include: [other.yml]
"""


@pytest.mark.parametrize(
    ("job", "images"),
    [
        (None, ["redis:7"]),
        ("plain", ["redis:7"]),
        ("none", []),
        ("child", ["postgres:16"]),
        ("grandchild", ["postgres:16"]),
        ("lone", ["mysql"]),
        ("cut", []),
    ],
)
def test_whose_services_a_job_has(job: str | None, images: list[str]) -> None:
    """Its own, also none; else those of what it extends; else the default ones, unless it inherits none."""
    specs, _ = read(JOBS, job)
    assert [spec.image for spec in specs] == images


def test_services_have_the_jobs_variables() -> None:
    """As in GitLab: those of the file, of what is extended, and of the job, later wins."""
    (spec,), _ = read(JOBS, "grandchild")
    assert dict(spec.env) == {
        "GLOBAL": "base",
        "PASSWORD": "secret",
        "LITERAL": "$GLOBAL",
        "FROM": "child",
        "OTHER": "o",
    }
    (spec,), _ = read(JOBS, "lone")
    assert dict(spec.env) == {"PASSWORD": "secret"}


def test_variables_are_filled_in() -> None:
    """In images, names and other variables; what is not known is empty and noted, or refused where it matters."""
    (spec,), notes = read(
        """
        variables: {TAG: "16", IMAGE: "postgres:$TAG", URL: "pg://${USER_NAME}@db/$$x", NAME: db, A: $B, B: $A}
        services: [{name: $IMAGE, alias: "$NAME"}]
        """
    )
    assert (spec.image, spec.name) == ("postgres:16", "db")
    assert spec.env["URL"] == "pg://@db/$x"
    assert notes == ("services[0].variables: values of USER_NAME are not in the file, and are empty",)
    with pytest.raises(InvalidRequest, match="the value of CI_REGISTRY_IMAGE is not in the file"):
        read("services: [$CI_REGISTRY_IMAGE/db]")


def test_variables_can_not_grow_without_bound() -> None:
    """Each of the references doubles the last: refused, quickly."""
    lines: dict[str, Any] = {f"V{number}": f"$V{number + 1}" * 50 for number in range(12)} | {"V12": "x" * 50}
    with pytest.raises(InvalidRequest, match="grows past 64 KiB"):
        read_services({"variables": lines, "services": ["redis"]})


def test_the_port_that_gitlab_would_probe() -> None:
    """HEALTHCHECK_TCP_PORT chooses it."""
    (spec,), _ = read("services: [{name: x, variables: {HEALTHCHECK_TCP_PORT: 8080}}]")
    assert spec.health == HealthCheck(TcpProbe(8080))


@pytest.mark.parametrize(
    ("text", "job", "message"),
    [
        ("services: [{name: x, kubernetes: {}}]", None, r"services\[0\].kubernetes .*not supported"),
        ("services: [{name: x, docker: {privileged: true}}]", None, r"services\[0\].docker.privileged"),
        ("services: [{alias: x}]", None, r"services\[0\].name"),
        ("services: [5]", None, r"services\[0\]"),
        ("services: {a: b}", None, "write a list of services"),
        ("services: [{name: x, command: [1]}]", None, "write a list of words"),
        ('services: [{name: x, command: "a \'b"}]', None, "is no command"),
        ("services: [{name: x, variables: {A: [1]}}]", None, r"variables.A"),
        ("services: [{name: x, variables: {HEALTHCHECK_TCP_PORT: no}}]", None, "write a port"),
        ("services: ['docker:27-dind']", None, "a container engine can't run in a sandbox"),
        ("services: ['reg.example/mirror/docker:dind']", None, "a container engine can't run"),
        ("image: x", None, "the file has none for every job: name a job"),
        (JOBS, "missing", "no job of the file has this name; included files are not followed"),
        (JOBS, "loop", "extends too deep, or in a circle"),
        ("[]", None, "is no CI file"),
    ],
)
def test_what_can_not_be_taken_over_is_refused_by_name(text: str, job: str | None, message: str) -> None:
    """With the place in the file."""
    with pytest.raises(InvalidRequest, match=message):
        read(text, job)
