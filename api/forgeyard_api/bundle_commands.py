"""`forgeyard bundle`: the bundle of a job, to read or to run with a runtime by hand."""

from __future__ import annotations

import sys
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgeyard_api.cli_flags import JobArguments, Runtime, StateDir, with_job_flags
from forgeyard_api.configured import configured
from forgeyard_api.main import as_usage
from forgeyard_api.result_file import check_absent_or_empty
from forgeyard_model.errors import ForgeyardError

if TYPE_CHECKING:
    from forgeyard_model.plan import Bundle


@with_job_flags
def generate(
    arguments: JobArguments,
    to: Annotated[Path, typer.Option("--to", metavar="DIR", help="Absent or empty directory for the bundle.")],
    runtime: Runtime = None,
    state_dir: StateDir = None,
) -> int:
    """Write the bundle of a job: `runc run -b DIR NAME` runs it."""
    with as_usage():
        check_absent_or_empty("--to", to)
    bundle = _generate(arguments, to.absolute(), runtime, state_dir)
    typer.echo(f"{to}: {bundle.bundle_digest}")
    return 0


@with_job_flags
def show(
    arguments: JobArguments,
    runtime: Runtime = None,
    state_dir: StateDir = None,
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


def _generate(arguments: JobArguments, directory: Path, runtime: str | None, state_dir: Path | None) -> Bundle:
    import asyncio

    from forgeyard_api.image_flags import image_options
    from forgeyard_api.job_from_flags import plan_run
    from forgeyard_api.pull_progress import pull_progress

    planned = plan_run(arguments)
    with closing(pull_progress()) as progress:
        images = image_options(arguments, progress)
        config = configured(state_dir, runtime)

        async def work() -> Bundle:
            from forgeyard_executor import Executor

            async with Executor.open(config=config) as executor:
                return await executor.generate_bundle(planned.job, directory, source=planned.source, images=images)

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
