"""`forgeyard policy`: from what a job did to the policy that it needs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Final

import typer

from forgeyard_api.main import as_usage
from forgeyard_model.errors import InvalidRequest

_LARGEST: Final = 64 << 20


def from_audit(
    result: Annotated[
        Path,
        typer.Argument(metavar="RESULT", help="Result of a run with network audit, as --result wrote it; - is stdin."),
    ],
) -> int:
    """Print the restricted network that would have sufficed for a job, as YAML for its job file."""
    from forgeyard_model.result_json import read_result
    from forgeyard_networks.from_audit import sufficient_policy

    with as_usage():
        try:
            found = read_result(_read(result))
        except ValueError as error:
            raise InvalidRequest("RESULT", result, "is no result of a job: write one with run --result FILE") from error
        if found.network is None:
            raise InvalidRequest("RESULT", result, "this job had no network: run it with network: {audit: true}")
        text = sufficient_policy(found.network).document()
    typer.echo(text, nl=False)
    return 0


def _read(path: Path) -> bytes:
    if str(path) == "-":
        return sys.stdin.buffer.read(_LARGEST)
    try:
        with path.open("rb") as file:
            return file.read(_LARGEST)
    except OSError as error:
        raise InvalidRequest("RESULT", path, f"can't be read: {error.strerror}") from error
