"""`forgeyard image`: the image store by hand. What scripts need is on stdout, everything else on stderr."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import closing
from dataclasses import fields, is_dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from forgeyard_api.cli_flags import StateDir
from forgeyard_api.main import REFUSED, as_usage, one_line, say
from forgeyard_api.sandbox_commands import Json, age, table
from forgeyard_model.errors import ForgeyardError, InvalidRequest
from forgeyard_model.units import format_size, parse_duration, parse_size

if TYPE_CHECKING:
    from forgeyard_executor.images import Images
    from forgeyard_oci.image_info import ImageInfo, VerifyReport
    from forgeyard_oci.registry.budget import Budget

PROBLEMS: Final = 1
WIDE: Final = 1000
"""Characters of a cell where digests and whole values are what one looks for."""
_DAYS: Final = re.compile(r"([0-9]{1,5})d\Z")

Reference = Annotated[str, typer.Argument(metavar="REF", help="NAME:TAG or NAME@sha256:DIGEST, or oci:PATH….")]
Platform = Annotated[str | None, typer.Option("--platform", metavar="OS/ARCH", help="Else this host's.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]


def pull(reference: Reference, platform: Platform = None, quiet: Quiet = False, state_dir: StateDir = None) -> int:
    """Fetch and unpack an image, so that jobs start at once. Prints its pinned form."""
    from forgeyard_api.image_session import in_store
    from forgeyard_api.pull_progress import pull_progress

    with closing(pull_progress(quiet=quiet)) as progress:

        def work(images: Images, budget: Budget) -> str:
            images.check_allowed(reference)
            images.store.pull(reference, platform, budget=budget, progress=progress)
            return images.store.known_pin(reference, Path.cwd()) or reference

        pinned = in_store(state_dir, work)
    typer.echo(pinned)
    return 0


def push(
    source: Annotated[str, typer.Argument(metavar="SOURCE", help="An image of the store, or oci:PATH….")],
    destination: Annotated[str, typer.Argument(metavar="DEST", help="Where to: REGISTRY/NAME:TAG.")],
    quiet: Quiet = False,
    state_dir: StateDir = None,
) -> int:
    """Copy an image to a registry. Prints the pinned form it has there."""
    from forgeyard_api.image_session import in_store
    from forgeyard_api.pull_progress import pull_progress

    with closing(pull_progress(quiet=quiet, verb="push")) as progress:

        def work(images: Images, budget: Budget) -> str:
            images.check_allowed(destination)
            return images.store.push(source, destination, budget=budget, progress=progress)

        pinned = in_store(state_dir, work)
    typer.echo(pinned)
    return 0


def resolve(reference: Reference, platform: Platform = None, state_dir: StateDir = None) -> int:
    """Print the pinned form of a reference: what its tag names now. Nothing is fetched but that."""
    from forgeyard_api.image_session import in_store

    typer.echo(in_store(state_dir, lambda images, budget: images.resolve(reference, platform, budget)))
    return 0


def ls(state_dir: StateDir = None, as_json: Json = False) -> int:
    """List the images of the store, the latest used first."""
    from forgeyard_api.image_session import in_store

    found = in_store(state_dir, lambda images, _: images.store.ls())
    if as_json:
        typer.echo(_json(found))
        return 0
    head = ("NAME", "DIGEST", "PLATFORM", "SIZE", "UNPACKED", "USED", "HELD")
    typer.echo(table(head, [row for info in found for row in _rows(info)], most=WIDE))
    return 0


def inspect(reference: Reference, platform: Platform = None, state_dir: StateDir = None, as_json: Json = False) -> int:
    """Show what the store knows of one image: its layers, and what its config asks for."""
    from forgeyard_api.image_session import in_store

    found = in_store(state_dir, lambda images, _: images.store.inspect(reference, platform))
    if as_json:
        typer.echo(_json(found))
        return 0
    typer.echo(table(("FIELD", "VALUE"), list(_fields(_data(found))), most=WIDE))
    return 0


def rm(
    references: Annotated[list[str], typer.Argument(metavar="REF...", help="Images of the store.")],
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Remove images. One that a job uses is refused; layers that other images share stay."""
    from forgeyard_api.image_session import in_store

    def work(images: Images, _: Budget) -> tuple[list[Any], list[ForgeyardError]]:
        reports, errors = [], []
        for reference in references:
            try:
                reports.append(images.store.rm(reference))
            except ForgeyardError as error:
                errors.append(error)
        return reports, errors

    reports, errors = in_store(state_dir, work)
    _show_reports(reports, as_json=as_json)
    for error in errors:
        say(one_line(str(error)))
    return REFUSED if errors else 0


def prune(
    older_than: Annotated[
        str | None, typer.Option("--older-than", metavar="TIME", help="Those not used for so long, such as 7d or 12h.")
    ] = None,
    keep_size: Annotated[
        str | None, typer.Option("--keep-size", metavar="SIZE", help="The longest unused, until the rest fits in this.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All that no job uses.")] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Remove images that are not needed, the longest unused first. Those that jobs use stay."""
    from forgeyard_api.image_session import in_store

    with as_usage():
        if not everything and older_than is None and keep_size is None:
            raise InvalidRequest("--older-than", "", "say what to remove: --older-than TIME, --keep-size SIZE or --all")
        unused_for = 0.0 if everything else _age(older_than)
        keep = None if keep_size is None else parse_size(keep_size, field="--keep-size")
    report = in_store(state_dir, lambda images, _: images.store.prune(unused_for=unused_for, keep_bytes=keep))
    _show_reports([report], as_json=as_json)
    return 0


def verify(
    repair: Annotated[
        bool, typer.Option("--repair", help="Remove what is damaged, so that it is fetched again.")
    ] = False,
    state_dir: StateDir = None,
    as_json: Json = False,
) -> int:
    """Check every blob against its digest and every unpacked file against its record. Exit 1 when something differs."""
    from forgeyard_api.image_session import in_store

    report: VerifyReport = in_store(state_dir, lambda images, _: images.store.verify(repair=repair))
    _show_reports([report], as_json=as_json)
    return PROBLEMS if report.problems else 0


def _age(text: str | None) -> float | None:
    """Seconds; days too, which a time limit of a job has no use for."""
    if text is None:
        return None
    days = _DAYS.match(text)
    return float(days[1]) * 86400 if days else parse_duration(text, field="--older-than")


def _rows(info: ImageInfo) -> list[tuple[str, ...]]:
    """A row for each name, or one for an image that has none any more."""
    size, unpacked = format_size(info.size), format_size(info.unpacked)
    rest = (info.digest[:19], info.platform, size, unpacked, age(info.last_used), "yes" if info.held else "")
    return [(name, *rest) for name in info.names or ("-",)]


def _show_reports(reports: list[Any], *, as_json: bool) -> None:
    """What was done: JSON for programs, a line for each thing and each sum else."""
    if as_json:
        typer.echo(_json(reports[0] if len(reports) == 1 else reports))
        return
    for report in reports:
        for line in _lines(_data(report)):
            typer.echo(line)


def _lines(data: dict[str, Any]) -> list[str]:
    lines = []
    for field, value in data.items():
        label = field.replace("_", " ")
        if isinstance(value, list):
            lines += [f"{label}: {one_line(_text(item))}" for item in value]
        elif field.endswith("bytes") or field in ("size", "freed", "unpacked"):
            lines.append(f"{label.removesuffix(' bytes')}: {format_size(value or 0)}")
        else:
            lines.append(f"{label}: {one_line(_text(value))}")
    return lines


def _fields(data: Any, prefix: str = "") -> list[tuple[str, str]]:
    """Rows of a nested value, by dotted key."""
    if isinstance(data, dict) and data:
        return [row for key, value in data.items() for row in _fields(value, f"{prefix}.{key}" if prefix else key)]
    if isinstance(data, list) and data and all(isinstance(item, dict) for item in data):
        return [row for index, item in enumerate(data) for row in _fields(item, f"{prefix}[{index}]")]
    return [(prefix, _text(data))]


def _text(value: Any) -> str:
    if value is None or value in ([], {}):
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _json(found: Any) -> str:
    return json.dumps(_data(found), ensure_ascii=False)


def _data(found: Any) -> Any:
    """Dataclasses as JSON has them."""
    if is_dataclass(found) and not isinstance(found, type):
        return {item.name: _data(getattr(found, item.name)) for item in fields(found)}
    if isinstance(found, Mapping):
        return {str(key): _data(value) for key, value in found.items()}
    if isinstance(found, (list, tuple, set, frozenset)):
        return [_data(item) for item in found]
    if isinstance(found, datetime):
        return found.isoformat()
    return found if isinstance(found, (str, int, float, bool, type(None))) else str(found)
