"""What a pretended job leaves in /work/output."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from posixpath import normpath

from forgeyard_model.job import Output
from forgeyard_model.result import CollectedOutput


def collect_fake(
    files: Mapping[str, bytes] | None, declared: tuple[Output, ...], destination: str | None
) -> tuple[CollectedOutput, ...]:
    """As the executor collects: what was promised, or all there is; into `destination` where there is one.

    :param files: None: all that was promised, empty.
    """
    if not declared and destination is None:
        return ()
    there = {normpath(output.path): b"" for output in declared} if files is None else files
    wanted = declared or tuple(Output(name, optional=True) for name in sorted({path.split("/")[0] for path in there}))
    collected = []
    for output in wanted:
        found = _below(there, normpath(output.path))
        if destination is not None:
            _write(Path(destination), found)
        size = sum(map(len, found.values()))
        collected.append(CollectedOutput(output.path, len(found), size, missing=not found, optional=output.optional))
    return tuple(collected)


def _below(files: Mapping[str, bytes], path: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if path in (".", name) or name.startswith(f"{path}/")}


def _write(destination: Path, files: Mapping[str, bytes]) -> None:
    for name, data in files.items():
        (destination / name).parent.mkdir(parents=True, exist_ok=True)
        (destination / name).write_bytes(data)
