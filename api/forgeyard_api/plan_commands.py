"""`forgeyard plan`: what this host makes of a job, field by field, before anything runs."""

from __future__ import annotations

import json
from contextlib import closing
from typing import TYPE_CHECKING, Annotated, Final

import typer

from forgeyard_api.cli_flags import JobArguments, Runtime, StateDir, with_job_flags
from forgeyard_api.configured import configured
from forgeyard_api.main import REFUSED
from forgeyard_api.sandbox_commands import table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from forgeyard_api.job_from_flags import PlannedRun
    from forgeyard_executor.images import ImageOptions
    from forgeyard_model.config import ExecutorConfig
    from forgeyard_model.enforcement import PlanReport, PlanRow
    from forgeyard_model.errors import ExecutorError


MOST: Final = 1000
"""Characters of a cell."""


@with_job_flags
def plan(
    arguments: JobArguments,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table.")] = False,
    runtime: Runtime = None,
    state_dir: StateDir = None,
) -> int:
    """Say of each part of a job's policy whether this host enforces it, by what, and what to do where it does not.

    An image is pulled as `run` pulls it; with --pull never, one that is not there is refused as `run` refuses it.
    Exit 0 when the job could run here, 125 when it would be refused, 2 for input that can't be used.
    """
    import asyncio

    from forgeyard_api.image_flags import image_options
    from forgeyard_api.job_from_flags import plan_run
    from forgeyard_api.pull_progress import pull_progress

    refused: list[ExecutorError] = []
    planned = plan_run(arguments, refused=refused)
    with closing(pull_progress()) as progress:
        images = image_options(arguments, progress)
        config = configured(state_dir, runtime)
        report = with_refusals(asyncio.run(_report(planned, config, images)), refused)
    typer.echo(_json(report) if as_json else _text(report))
    return 0 if report.runnable else REFUSED


async def _report(planned: PlannedRun, config: ExecutorConfig, images: ImageOptions) -> PlanReport:
    from forgeyard_executor import Executor

    async with Executor.open(config=config) as executor:
        return await executor.plan(planned.job, source=planned.source, images=images)


def with_refusals(report: PlanReport, refused: Sequence[ExecutorError]) -> PlanReport:
    """`report` with a row for each part of the format that this version can't run."""
    from forgeyard_model.enforcement import Enforcement, PlanReport, PlanRow

    told = {row.field for row in report.rows if row.refused}
    rows = []
    for error in refused:
        field, _, what = error.brief.partition(": ")
        if field.removeprefix("--") not in told:
            rows.append(PlanRow(field, "", Enforcement.REFUSED, "this version", what, error.resolution, error))
    return PlanReport((*report.rows, *rows))


def _json(report: PlanReport) -> str:
    return json.dumps({"runnable": report.runnable, "fields": [row.as_dict() for row in report.rows]})


def _text(report: PlanReport) -> str:
    rows = [(row.field, row.asked, row.status.value, row.by) for row in report.rows]
    # Digests and places in files are what one looks for here: nothing of them is cut.
    lines = [table(("FIELD", "ASKED", "STATUS", "BY"), rows, most=MOST), *_remarks(report.rows)]
    verdict = "this host can run the job" if report.runnable else "this host refuses the job"
    return "\n".join((*lines, "", verdict))


def _remarks(rows: Sequence[PlanRow]) -> list[str]:
    """Below the table, since a cure is a sentence."""
    lines = []
    for row in rows:
        if not row.note and not row.cure:
            continue
        text = "; ".join(part for part in (row.note, row.cure if row.cure != row.note else "") if part)
        lines.append(f"{row.field}: {row.status.value}: {text}")
    return ["", *lines] if lines else []
