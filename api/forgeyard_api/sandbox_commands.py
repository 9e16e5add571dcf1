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
        typer.echo(json.dumps(_swept_json(report)))
    else:
        _show_swept(report)
    for error in report.errors:
        say(one_line(error))
    return REFUSED if report.errors else 0


async def _sweep(config: ExecutorConfig) -> RecoveryReport:
    """Opening an executor sweeps in most places already; engines that it does not use are asked in any case here."""
    from forgeyard_executor import Executor

    async with Executor.open(config=config) as executor:
        report = executor.recovered.then(await executor.recover())
        errors = await executor.retain()
        return replace(report, errors=(*report.errors, *errors))


def _swept_json(report: RecoveryReport) -> dict[str, object]:
    engines = [
        {
            "runtime": each.engine.runtime,
            "address": each.engine.address,
            "removed": each.report.removed,
            "kept": each.report.kept,
            "failed": [{"what": what, "reason": why} for what, why in each.report.failed],
            "error": each.error or None,
        }
        for each in report.engines
    ]
    return {"removed": report.removed, "alive": report.alive, "engines": engines, "errors": report.errors}


def _show_swept(report: RecoveryReport) -> None:
    """What is not removed is among the errors, which every form of output has on stderr."""
    for sandbox in report.removed:
        typer.echo(f"removed {sandbox}")
    for each in report.engines:
        for verb, names in (("removed", each.report.removed), ("kept", each.report.kept)):
            for what in names:
                typer.echo(f"{verb} {one_line(what)} at {each.engine.runtime}")
    kept = sum(len(each.report.kept) for each in report.engines)
    removed = len(report.removed) + len(report.swept)
    typer.echo(f"{removed} removed, {report.alive} running, {kept} kept at engines, {len(report.errors)} errors")


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
