"""The command tree. Each command's work, and its heavy imports, start only when it runs."""

from __future__ import annotations

from typing import Any

import typer

from forgeyard_api import (
    bundle_commands,
    bundle_diff,
    config_commands,
    image_commands,
    job_commands,
    plan_commands,
    policy_commands,
    run_command,
    sandbox_commands,
    sandbox_doctor,
    serve_command,
)
from forgeyard_api.cli_flags import CommandAfterDashes
from forgeyard_api.operate import bundle_export, control, events, inspecting, kept, listing, logs, reproduce, shell, top
from forgeyard_api.plain_parameters import use_plain_readers

# Plain help: a table drawn by rich costs 130 ms before the first line of `forgeyard run --help`.
app = typer.Typer(
    name="forgeyard",
    help="Run CI jobs in sandboxes, each from one generated OCI bundle.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bundle = typer.Typer(help="See the bundle that a job would run from.", no_args_is_help=True, rich_markup_mode=None)
config = typer.Typer(help="See and check the configuration.", no_args_is_help=True, rich_markup_mode=None)
image = typer.Typer(help="Pull, list and remove images.", no_args_is_help=True, rich_markup_mode=None)
policy = typer.Typer(help="Network policies from what jobs did.", no_args_is_help=True, rich_markup_mode=None)
kept_failures = typer.Typer(
    help="What failed jobs left, kept for debugging.", no_args_is_help=True, rich_markup_mode=None
)
job = typer.Typer(help="Write and check job files.", no_args_is_help=True, rich_markup_mode=None)

app.command("run", cls=CommandAfterDashes)(run_command.run)
bundle.command("generate", cls=CommandAfterDashes)(bundle_commands.generate)
app.command("plan", cls=CommandAfterDashes)(plan_commands.plan)
bundle.command("diff", cls=CommandAfterDashes)(bundle_diff.diff)
bundle.command("export")(bundle_export.export)
bundle.command("show", cls=CommandAfterDashes)(bundle_commands.show)
job.command("init")(job_commands.init)
job.command("validate")(job_commands.validate)
job.command("schema")(job_commands.schema)
image.command("pull")(image_commands.pull)
image.command("push")(image_commands.push)
image.command("resolve")(image_commands.resolve)
image.command("ls")(image_commands.ls)
image.command("inspect")(image_commands.inspect)
image.command("rm")(image_commands.rm)
image.command("prune")(image_commands.prune)
image.command("verify")(image_commands.verify)
policy.command("from-audit")(policy_commands.from_audit)
app.command("ps")(listing.ps)
app.command("reproduce")(reproduce.reproduce)
app.command("shell")(shell.shell)
app.command("top")(top.top)
app.command("logs")(logs.logs)
app.command("inspect")(inspecting.inspect)
app.command("stop")(control.stop)
app.command("wait")(control.wait)
app.command("events")(events.events)
app.command("drain")(control.drain)
app.command("gc")(sandbox_commands.gc)
kept_failures.command("ls")(kept.ls)
kept_failures.command("rm")(kept.rm)
app.command("serve")(serve_command.serve)
config.command("check")(config_commands.check)
config.command("show")(config_commands.show)
app.add_typer(bundle, name="bundle")
app.add_typer(image, name="image")
app.add_typer(job, name="job")
app.add_typer(policy, name="policy")
app.add_typer(kept_failures, name="kept")
app.add_typer(config, name="config")
app.add_typer(sandbox_doctor.runner, name="runner")


def _print_version(wanted: bool) -> None:
    if wanted:
        from forgeyard_api.main import version

        typer.echo(f"forgeyard {version()}")
        raise typer.Exit


@app.callback()
def _root(
    show_version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
    ),
) -> None:
    """Run CI jobs in sandboxes, each from one generated OCI bundle."""


def command() -> Any:
    """The command tree, ready to be called with arguments."""
    found = typer.main.get_command(app)
    use_plain_readers(found)
    return found
