"""`forgeyard bundle`: the bundle of a job, to read or to run with a runtime by hand."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgeyard_api.cli_flags import DEFAULT_STATE_DIR, JobArguments, Runtime, StateDir, with_job_flags
from forgeyard_api.main import as_usage
from forgeyard_model.errors import ForgeyardError, InvalidRequest

if TYPE_CHECKING:
    from forgeyard_model.plan import Bundle


@with_job_flags
def generate(
    arguments: JobArguments,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Absent or empty directory for the bundle.")],
    runtime: Runtime = "runc",
    state_dir: StateDir = Path(DEFAULT_STATE_DIR),
) -> int:
    """Write the bundle of a job: `runc run -b DIR NAME` runs it."""
    with as_usage():
        if to.exists() and (not to.is_dir() or any(to.iterdir())):
            raise InvalidRequest("--to", to, "is not an empty directory: name an absent or empty one")
    bundle = _generate(arguments, to.absolute(), runtime, state_dir)
    typer.echo(f"{to}: {bundle.bundle_digest}")
    return 0


@with_job_flags
def show(
    arguments: JobArguments,
    runtime: Runtime = "runc",
    state_dir: StateDir = Path(DEFAULT_STATE_DIR),
) -> int:
    """Print the config.json of a job's bundle: its exact bytes, or indented on a terminal."""
    import json
    import tempfile

    directory = Path(tempfile.mkdtemp(prefix="forgeyard-bundle-"))
    try:
        config = _generate(arguments, directory, runtime, state_dir).config
    finally:
        _remove(directory)
    if sys.stdout.isatty():
        config = json.dumps(json.loads(config), indent=2).encode() + b"\n"
    sys.stdout.buffer.write(config)
    return 0


def _generate(arguments: JobArguments, directory: Path, runtime: str, state_dir: Path) -> Bundle:
    import asyncio

    from forgeyard_api.job_from_flags import plan_run

    planned = plan_run(arguments)
    state = state_dir.absolute()

    async def work() -> Bundle:
        from forgeyard_executor import Executor

        async with Executor.open(state_dir=state, runtime=runtime) as executor:
            return await executor.generate_bundle(planned.job, directory, source=planned.source)

    return asyncio.run(work())


def _remove(directory: Path) -> None:
    """Remove a bundle of ours, but never through a mount: below one lie the host's own files.

    :raises ForgeyardError: when something is mounted there.
    """
    import shutil

    table = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    if any(line.split()[4].startswith(f"{directory}/") for line in table.splitlines()):
        raise ForgeyardError(f"{directory} still holds a mount", resolution="unmount it, then remove the directory")
    shutil.rmtree(directory)
