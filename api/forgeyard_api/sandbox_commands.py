"""`forgeyard ps` and `forgeyard gc`: what is there, and what dead executors left."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forgeyard_api.cli_flags import Runtime, StateDir
from forgeyard_api.configured import configured
from forgeyard_api.main import REFUSED, one_line, say

if TYPE_CHECKING:
    from forgeyard_executor import RecoveryReport, SandboxInfo
    from forgeyard_model.config import ExecutorConfig

MAX_CELL: Final = 64
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]


def ps(state_dir: StateDir = None, as_json: Json = False) -> int:
    """List the attempts of a state directory."""
    from forgeyard_executor import list_sandboxes

    found = list_sandboxes(configured(state_dir).state_dir)
    if as_json:
        typer.echo(json.dumps([asdict(item) for item in found], default=json_value))
        return 0
    rows = [
        (item.sandbox_id, item.state, _named(item), item.attempt_id, age(item.started_at), str(item.pid or "-"))
        for item in found
    ]
    typer.echo(table(("SANDBOX", "STATE", "NAME", "ATTEMPT", "AGE", "PID"), rows))
    return 0


def _named(item: SandboxInfo) -> str:
    """The job's name, and those of its services."""
    return " ".join([item.name, *(f"+{service.name}" for service in item.services)])


def gc(runtime: Runtime = None, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Remove what dead executors left, and what was kept unused for too long. Running jobs are left alone."""
    import asyncio

    report = asyncio.run(_sweep(configured(state_dir, runtime)))
    if as_json:
        found = {
            "removed": report.removed,
            "swept": report.swept,
            "alive": report.alive,
            "errors": report.errors,
        }
        typer.echo(json.dumps(found))
    else:
        for sandbox in report.removed:
            typer.echo(f"removed {sandbox}")
        for what in report.swept:
            typer.echo(f"removed {one_line(what)} at the runtime")
        typer.echo(f"{len(report.removed)} removed, {report.alive} running")
    for error in report.errors:
        say(one_line(error))
    return REFUSED if report.errors else 0


async def _sweep(config: ExecutorConfig) -> RecoveryReport:
    """Opening an executor is the sweep; what was kept for too long goes as well."""
    from forgeyard_executor import Executor

    async with Executor.open(config=config) as executor:
        errors = await executor.retain()
        return replace(executor.recovered, errors=(*executor.recovered.errors, *errors))


def table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, most: int | None = None) -> str:
    """Columns as wide as their longest cell; cells lose control characters.

    :param most: characters of a cell; None is MAX_CELL.
    """
    cells = [head, *(tuple(_cell(cell, most or MAX_CELL) for cell in row) for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells
    )


def _cell(text: str, most: int) -> str:
    """On one line and bounded: an attempt's own id may be of any length, and --json has all of it."""
    shown = one_line(text) or "-"
    return shown if len(shown) <= most else f"{shown[: most - 3]}..."


def age(started: Any) -> str:
    """How long ago `started`, a time with a zone, was: for people."""
    from datetime import UTC, datetime

    from forgeyard_model.units import format_duration

    return format_duration(max((datetime.now(UTC) - started).total_seconds(), 0.0))


def json_value(value: Any) -> str:
    """A time, as JSON has it."""
    return str(value.isoformat())
