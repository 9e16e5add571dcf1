"""`forgeyard runner sandbox doctor | capabilities | test`: what this host really does for a job."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

import typer

from forgeyard_api.cli_flags import Runtime, StateDir
from forgeyard_api.configured import configured
from forgeyard_api.sandbox_commands import Json, json_value, table

if TYPE_CHECKING:
    from forgeyard_executor.doctor import DoctorReport
    from forgeyard_model.capabilities import ExecutorCapabilities, Probe
    from forgeyard_model.config import ExecutorConfig

FAILED: Final = 1
_WHOLE: Final = 1000
"""Characters of a cell: a cure that is cut off cures nothing."""
_CONDITION_HEAD: Final = ("CONDITION", "STATUS", "DETAILS", "CURE")

runner = typer.Typer(help="Look after this machine as a runner.", no_args_is_help=True, rich_markup_mode=None)
sandbox = typer.Typer(help="What this host does for a job.", no_args_is_help=True, rich_markup_mode=None)
runner.add_typer(sandbox, name="sandbox")


@sandbox.command("doctor")
def doctor(runtime: Runtime = None, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Probe each feature, look at what breaks jobs, and say what to do about it.

    Exit 1 when something is missing that a job of the profile standard-ci needs.
    """
    import asyncio

    from forgeyard_executor.doctor import examine

    report = asyncio.run(examine(configured(state_dir, runtime)))
    typer.echo(json.dumps(_report_data(report), default=json_value) if as_json else _report_text(report))
    return 0 if report.healthy else FAILED


@sandbox.command("capabilities")
def capabilities(runtime: Runtime = None, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Show what an executor claims on this host; each claim was probed just now."""
    import asyncio

    found = asyncio.run(_capabilities(configured(state_dir, runtime)))
    typer.echo(json.dumps(_plain(found), default=json_value) if as_json else _claims_text(found))
    return 0


@sandbox.command("test")
def try_isolation(runtime: Runtime = None, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Try, harmlessly, what a sandbox has to prevent, and print what held. Exit 1 when something did not."""
    import asyncio

    from forgeyard_executor.doctor import check_isolation_of

    checks = asyncio.run(check_isolation_of(configured(state_dir, runtime)))
    held = sum(check.held for check in checks)
    if as_json:
        typer.echo(json.dumps([asdict(check) for check in checks]))
    else:
        rows = [("held" if check.held else "FAILED", check.name, check.seen) for check in checks]
        typer.echo(table(("RESULT", "CHECK", "SEEN"), rows, most=_WHOLE))
        typer.echo(f"{held} of {len(checks)} held")
    return 0 if held == len(checks) else FAILED


async def _capabilities(config: ExecutorConfig) -> ExecutorCapabilities:
    from forgeyard_executor import Executor

    async with Executor.open(config=config) as executor:
        return await executor.capabilities(renew=True)


def _report_text(report: DoctorReport) -> str:
    parts = []
    if report.capabilities is not None:
        rows = [
            (probe.feature.value, _works(probe), probe.by, probe.details, probe.cure)
            for probe in report.capabilities.probes
        ]
        parts.append(table(("FEATURE", "WORKS", "BY", "DETAILS", "CURE"), rows, most=_WHOLE))
    conditions = [(item.name, item.status.value, item.details, item.cure) for item in report.conditions]
    parts.append(table(_CONDITION_HEAD, conditions, most=_WHOLE))
    missing = ", ".join(feature.value for feature in report.missing)
    parts.append("this host can run jobs" if report.healthy else f"jobs can't run here; missing: {missing or 'none'}")
    return "\n\n".join(parts)


def _works(probe: Probe) -> str:
    from forgeyard_executor.capabilities import STANDARD_CI

    if probe.works:
        return "yes"
    if not probe.seen:
        return "unseen"
    return "NO" if probe.feature in STANDARD_CI else "no (optional)"


def _claims_text(found: ExecutorCapabilities) -> str:
    controls = asdict(found.resource_controls)
    rows = [
        ("runtime", found.runtime),
        ("isolation", ", ".join(level.value for level in sorted(found.isolation_levels))),
        ("networks", ", ".join(sorted(found.network_modes))),
        ("limits", ", ".join(name for name, works in controls.items() if works)),
        ("cgroup", f"{found.cgroup}: {', '.join(found.controllers)}"),
        ("features", ", ".join(sorted(probe.feature for probe in found.probes if probe.works))),
        ("missing", ", ".join(sorted(probe.feature for probe in found.probes if not probe.works))),
    ]
    return table(("CLAIM", "VALUE"), rows, most=_WHOLE)


def _report_data(report: DoctorReport) -> dict[str, Any]:
    return {
        "healthy": report.healthy,
        "missing": report.missing,
        "capabilities": None if report.capabilities is None else _plain(report.capabilities),
        "conditions": [asdict(item) for item in report.conditions],
    }


def _plain(found: ExecutorCapabilities) -> dict[str, Any]:
    """Sets in a fixed order, so that two reports can be compared."""
    values = asdict(found)
    values["isolation_levels"] = [level.value for level in sorted(found.isolation_levels)]
    for name in ("network_modes", "kinds"):
        values[name] = sorted(values[name])
    return values
