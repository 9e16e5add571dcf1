"""Jobs that look for a container engine are told what to do instead."""

from __future__ import annotations

import pytest

from forgeyard_services.hints import engine_hint


@pytest.mark.parametrize(
    "output",
    [
        b"Cannot connect to the Docker daemon at unix:///var/run/docker.sock. Is the docker daemon running?",
        b"dial unix /run/docker.sock: connect: no such file or directory",
        b"java.lang.IllegalStateException: Could not find a valid Docker environment. Please see logs",
        b"docker.errors.DockerException: Error while fetching server API version: ('Connection aborted.',)",
        b"/bin/sh: 1: docker: not found",
        b"stat /run/user/1000/podman/podman.sock: no such file",
        b"\xff\xfe org.testcontainers.dockerclient \xff",
    ],
)
def test_output_of_what_misses_an_engine(output: bytes) -> None:
    """What docker's client, its libraries and testcontainers say."""
    hint = engine_hint(b"x" * 1000 + output, ("make", "test"))
    assert hint is not None
    assert "declare what it would start under `services:`" in hint


@pytest.mark.parametrize(
    "words", [("docker", "run", "postgres"), ("set -e\n/usr/bin/docker-compose up -d\n",), ("podman", "ps")]
)
def test_steps_that_run_an_engines_client(words: tuple[str, ...]) -> None:
    """By their own words, when the output says nothing."""
    hint = engine_hint(b"", words)
    assert hint is not None
    assert "it runs " in hint


@pytest.mark.parametrize(
    ("output", "words"),
    [
        (b"1 failed, 3 passed", ("pytest",)),
        (b"", ("cat", "docker/Dockerfile", "my-docker", "dockerised", "./docker")),
        (b"", ("# docker run postgres\nmake\n",)),
        (b"", ()),
    ],
)
def test_others_get_no_hint(output: bytes, words: tuple[str, ...]) -> None:
    """A path or a comment is no use of an engine."""
    assert engine_hint(output, words) is None
