"""`forgeyard kept ls` and `rm`: workspaces of failed attempts that are kept for debugging."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

from forgeyard_api.cli_flags import StateDir
from forgeyard_api.configured import configured
from forgeyard_api.main import as_usage
from forgeyard_api.operate.server import Json
from forgeyard_api.sandbox_commands import table
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest

if TYPE_CHECKING:
    from pathlib import Path

    from forgeyard_model.config import ExecutorConfig


def ls(state_dir: StateDir = None, as_json: Json = False) -> int:
    """List kept workspaces, the first to go first."""
    from forgeyard_executor.kept_failures import list_kept

    found = list_kept(_directory(state_dir))
    if as_json:
        names = ("sandbox_id", "attempt_id", "name", "outcome")
        rows = [
            {**{name: getattr(kept, name) for name in names}, "until": kept.until.isoformat(), "path": str(kept.path)}
            for kept in found
        ]
        typer.echo(json.dumps(rows))
        return 0
    shown = [
        (kept.sandbox_id, kept.outcome, kept.name, kept.until.isoformat(timespec="seconds"), str(kept.path))
        for kept in found
    ]
    typer.echo(table(("SANDBOX", "OUTCOME", "NAME", "UNTIL", "PATH"), shown, most=256))
    return 0


def rm(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Sandboxes, or attempts.")] = None,
    *,
    everything: Annotated[bool, typer.Option("--all", help="All of them.")] = False,
    state_dir: StateDir = None,
) -> int:
    """Remove kept workspaces before their time."""
    from forgeyard_executor.kept_failures import list_kept, remove_kept

    with as_usage():
        if bool(names) == everything:
            raise InvalidRequest("NAME", " ".join(names or ()), "name what is to go, or give --all")
    directory = _directory(state_dir)
    chosen = [kept.sandbox_id for kept in list_kept(directory)] if everything else names or []
    for removed in remove_kept(directory, chosen):
        typer.echo(f"removed {removed}")
    return 0


def refuse_unless_allowed(config: ExecutorConfig) -> None:
    """:raises ExecutorError: the operator has no workspace of a failed job kept."""
    if config.serve.keep_failed is None:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "keep_failed_off",
            "--keep-on-failure: this host keeps nothing of failed jobs",
            resolution='an operator allows it in /etc/forgeyard/config.toml, table [serve]: keep_failed = "24h"',
        )


def _directory(state_dir: Path | None) -> Path:
    from forgeyard_executor.state import StatePaths

    return StatePaths.at(configured(state_dir).state_dir).kept
