"""`forgeyard bundle diff --runtime X JOB`: what a runtime really applies of a job's bundle, before anybody runs it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import typer

from forgeyard_api.main import REFUSED, one_line, say

if TYPE_CHECKING:
    from pathlib import Path

    from forgeyard_api.cli_flags import JobArguments
    from forgeyard_api.job_from_flags import PlannedRun
    from forgeyard_executor.images import ImageOptions
    from forgeyard_executor.inspection import InspectedContainer, Inspection
    from forgeyard_model.config import ExecutorConfig
    from forgeyard_runtimes.applied import AppliedRow

WEAKER = 1
MOST = 100
"""Characters of a cell."""


def effective_diff(arguments: JobArguments, runtime: str | None, state_dir: Path | None, *, as_json: bool) -> int:
    """Print the rows. 0 when nothing is weaker than the bundle but what is declared, 1 otherwise.

    :raises ForgeyardError: as `forgeyard run`.
    """
    import asyncio

    from forgeyard_api.configured import configured
    from forgeyard_api.image_flags import image_options
    from forgeyard_api.job_from_flags import plan_run
    from forgeyard_api.pull_progress import pull_progress

    planned = plan_run(arguments)
    with closing(pull_progress()) as progress:
        images = image_options(arguments, progress)
        config = configured(state_dir, runtime)
        found = asyncio.run(_inspected(planned, config, images))
    typer.echo(_json(found) if as_json else _text(found))
    for error in found.left:
        say(one_line(error))
    if found.left:
        return REFUSED
    return WEAKER if found.weaker else 0


async def _inspected(planned: PlannedRun, config: ExecutorConfig, images: ImageOptions) -> Inspection:
    from forgeyard_executor import Executor

    async with Executor.open(config=config) as executor:
        return await executor.inspect_applied(planned.job, source=planned.source, images=images)


def _json(found: Inspection) -> str:
    containers = [
        {"name": item.name, "bundle_digest": item.bundle_digest, "rows": [_fields(row) for row in item.rows]}
        for item in found.containers
    ]
    return json.dumps({"runtime": found.runtime, "weaker": found.weaker, "containers": containers})


def _fields(row: AppliedRow) -> dict[str, object]:
    return {
        "field": row.field,
        "applied": row.applied.value,
        "by": row.by.value,
        "what": row.what,
        "declared": row.declared,
    }


def _text(found: Inspection) -> str:
    parts = [_container(item, alone=len(found.containers) == 1) for item in found.containers]
    verdict = "applies less than the bundle says" if found.weaker else "applies no less than the bundle says"
    return "\n\n".join((*parts, f"{one_line(found.runtime)} {verdict}"))


def _container(item: InspectedContainer, *, alone: bool) -> str:
    from forgeyard_api.sandbox_commands import table

    rows = [(_applied(row), row.field, row.by.value, row.what) for row in item.rows]
    shown = table(("APPLIED", "FIELD", "BY", "WHAT"), rows, most=MOST)
    return f"{shown}\n\n{_counted(item.rows)}" if alone else f"{one_line(item.name)}:\n{shown}\n\n{_counted(item.rows)}"


def _applied(row: AppliedRow) -> str:
    return f"{row.applied.value}, declared" if row.declared else row.applied.value


def _counted(rows: Sequence[AppliedRow]) -> str:
    counts: dict[str, int] = {}
    for row in rows:
        counts[_applied(row)] = counts.get(_applied(row), 0) + 1
    return ", ".join(f"{count} {applied}" for applied, count in counts.items())
