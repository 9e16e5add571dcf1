"""`forgeyard bundle diff`: where two bundles differ, by JSON path; with a job and a runtime, see bundle_effective."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from forgeyard_api.cli_flags import JobArguments, JobFlags, Runtime, StateDir, with_job_flags
from forgeyard_api.main import UnusableInput, as_usage, one_line
from forgeyard_model.errors import InvalidRequest

DIFFERENT: Final = 1
MAX_BYTES: Final = 64 << 20
_ABSENT: Final = object()


@dataclass(frozen=True, slots=True)
class Difference:
    """One place. A side that has nothing there is None."""

    path: str
    a: str | None
    b: str | None


@with_job_flags
def diff(
    arguments: JobArguments,
    *,
    b: Annotated[Path | None, typer.Argument(metavar="[B]", help="The second of two bundles.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of text.")] = False,
    runtime: Runtime = None,
    state_dir: StateDir = None,
) -> int:
    """Compare two bundles, A and B, by path of their config.json; or a job's bundle with what --runtime NAME applies.

    A bundle is its directory or its config.json. Exit 0 same, 1 different.

    With --runtime and a job, as `forgeyard run` takes it, its containers are started as far as the gate in front of
    their first program, looked at and removed. Exit 0 when nothing is weaker than the bundle, 1 when something is.
    """
    a = arguments.flags.job_file
    if b is None:
        with as_usage():
            _check_job(a, runtime)
        from forgeyard_api.bundle_effective import effective_diff

        return effective_diff(arguments, runtime, state_dir, as_json=as_json)
    with as_usage():
        _check_bundles(arguments, b, runtime)
    return _diff_bundles(a or b, b, as_json=as_json)


def _check_job(a: Path | None, runtime: str | None) -> None:
    if runtime is None:
        raise InvalidRequest("B", "", "name a second bundle to compare with, or a job and --runtime NAME")
    if a is not None and (a.is_dir() or a.name == "config.json"):
        raise InvalidRequest("JOBFILE", a, "is a bundle: name a second one to compare with, or a job file")


def _check_bundles(arguments: JobArguments, b: Path, runtime: str | None) -> None:
    if arguments.command is not None or arguments.flags != JobFlags(**_defaults(arguments.flags)):
        raise InvalidRequest("B", b, "two bundles are compared as they are: leave out B, or what describes a job")
    # From the environment it is a habit, and no part of this command line.
    if runtime is not None and runtime != os.environ.get("FORGEYARD_RUNTIME"):
        raise InvalidRequest("--runtime", runtime, "goes with a job: two bundles are compared without any runtime")


def _defaults(flags: JobFlags) -> dict[str, Any]:
    """What JobFlags has for a command line with nothing but that job file."""
    lists: dict[str, list[object]] = {item.name: [] for item in fields(flags) if item.default == ()}
    return {"job_file": flags.job_file, **lists}


def _diff_bundles(a: Path, b: Path, *, as_json: bool) -> int:
    found = differences(_read("A", a), _read("B", b))
    if as_json:
        shown = [{"path": item.path, "a": _value(item.a), "b": _value(item.b)} for item in found]
        typer.echo(json.dumps(shown))
    else:
        for item in found:
            typer.echo(f"{one_line(item.path)}\n- {_side(item.a)}\n+ {_side(item.b)}")
    return DIFFERENT if found else 0


def differences(a: Any, b: Any) -> list[Difference]:
    """Where two JSON values differ, sorted by path. Lists are compared item by item: their order means something."""
    return sorted(_walk("", a, b), key=lambda item: _order(item.path))


def _order(path: str) -> list[tuple[int, str]]:
    """Item 10 of a list comes after item 9."""
    return [
        (int(part), "") if part.isdecimal() and part.isascii() and len(part) < 9 else (-1, part)
        for part in path.split("/")
    ]


def _walk(path: str, a: Any, b: Any) -> Iterator[Difference]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in a.keys() | b.keys():
            yield from _walk(f"{path}/{_escaped(key)}", a.get(key, _ABSENT), b.get(key, _ABSENT))
    elif isinstance(a, list) and isinstance(b, list):
        for index in range(max(len(a), len(b))):
            left, right = (side[index] if index < len(side) else _ABSENT for side in (a, b))
            yield from _walk(f"{path}/{index}", left, right)
    elif _text(a) != _text(b):
        # As text, since True equals 1 in Python and not in JSON.
        yield Difference(path or "/", _text(a), _text(b))


def _escaped(key: str) -> str:
    """A key as a JSON pointer has it (RFC 6901)."""
    return key.replace("~", "~0").replace("/", "~1")


def _text(value: Any) -> str | None:
    return None if value is _ABSENT else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _side(text: str | None) -> str:
    return "(absent)" if text is None else one_line(text)


def _value(text: str | None) -> Any:
    return {"absent": True} if text is None else {"value": json.loads(text)}


def _read(name: str, path: Path) -> Any:
    """:raises UnusableInput: when it is no bundle."""
    file = path / "config.json" if path.is_dir() else path
    try:
        with file.open("rb") as opened:
            data = opened.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise _unreadable(name, file, "is larger than any bundle")
        return json.loads(data)
    except OSError as error:
        raise _unreadable(name, file, f"can't be read: {error.strerror}") from error
    except RecursionError as error:
        raise _unreadable(name, file, "is nested too deeply") from error
    except ValueError as error:
        raise _unreadable(name, file, f"is no JSON: {error}") from error


def _unreadable(name: str, file: Path, cure: str) -> UnusableInput:
    return UnusableInput(InvalidRequest(name, file, cure))
