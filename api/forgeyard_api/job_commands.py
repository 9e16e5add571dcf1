"""`forgeyard job`: an example, a check, and the schema for editors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forgeyard_api.main import as_usage, say
from forgeyard_model.errors import InvalidRequest

if TYPE_CHECKING:
    from forgeyard_api.jobfile_reader import LoadedJobFile

EXAMPLE: Final = """\
# A Forgeyard job. `forgeyard job validate` checks it, `forgeyard run` runs it.
version: 1
name: example

# Where it runs: on the host's own programs, read-only, or in an image pinned by its digest.
rootfs: host
# image: oci:./layout@sha256:DIGEST

# Set of defaults and bounds: development, standard-ci, release, high-assurance.
profile: standard-ci

# The tree that appears at /work/source. cow: the job may write, its writes are discarded.
source: {path: ., mode: cow}

# Hard limits. What is left out takes the profile's default.
resources: {cpus: 1, memory: 512MiB, pids: 128}
timeout: 10m
network: deny

# Values are strings: put numbers in quotes.
env: {GREETING: hello, LEVEL: "1"}

steps:
  # A script, run by /bin/sh -e.
  - name: greet
    run: |
      echo "$GREETING from $(pwd)"
      date > /work/output/when.txt
  # A program and its arguments, no shell.
  - name: look
    argv: [ls, -l, /work/output]
  # Runs whatever happened before.
  - name: tidy
    run: echo done
    when: always

# What the job promises to leave in /work/output; `forgeyard run --output DIR` collects it.
outputs:
  - path: when.txt
"""

JobFileArgument = Annotated[Path, typer.Argument(metavar="[FILE]", help="Job file; - is stdout for init.")]


def init(file: JobFileArgument = Path("job.yaml")) -> int:
    """Write a commented example."""
    if str(file) == "-":
        sys.stdout.write(EXAMPLE)
        return 0
    with as_usage():
        try:
            with file.open("x", encoding="utf-8") as out:
                out.write(EXAMPLE)
        except FileExistsError as error:
            raise InvalidRequest("FILE", file, "is there already: name another file") from error
        except OSError as error:
            raise InvalidRequest("FILE", file, f"can't be written: {error.strerror}") from error
    typer.echo(f"{file}: written; run it with `forgeyard run {file}`")
    return 0


def validate(file: JobFileArgument = Path("job.yaml")) -> int:
    """Check a job file: prints ok, or every error as file:line:col field: value: cure (exit 2)."""
    from forgeyard_api.jobfile_reader import load_job_file

    with as_usage():
        loaded = load_job_file(file)
        _check_profile(loaded)
    typer.echo(f"{file}: ok")
    return 0


def schema() -> int:
    """Print the JSON Schema of job files, for editors."""
    typer.echo(schema_text(), nl=False)
    return 0


def schema_text() -> str:
    """The schema as docs/job.schema.json holds it."""
    from forgeyard_model.jobfile import job_schema

    return json.dumps(job_schema(), indent=2, ensure_ascii=False) + "\n"


def _check_profile(loaded: LoadedJobFile) -> None:
    """What the file's profile does not allow is an error in the file; what this version can't run is only said."""
    from forgeyard_model.identity import AttemptContext
    from forgeyard_model.jobfile_convert import describe_job, not_supported
    from forgeyard_model.request import PreparedWorkspace, request_from_job

    try:
        job = describe_job(loaded.file, base=loaded.base)
        request_from_job(job, context=AttemptContext("validate"), workspace=PreparedWorkspace())
    except InvalidRequest as error:
        raise loaded.refuse(error) from error
    for refused in not_supported(loaded.file):
        say(f"note: {refused.brief}")
