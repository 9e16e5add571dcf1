"""A lock file of images: which digest each tag named when it was resolved, so that every run after means the same.

::

    # comment
    version: 1
    images:
      - reference: "docker.io/library/busybox:latest"
        pinned: "docker.io/library/busybox@sha256:…"

An entry is for one reference and, where the job names one, one platform. A pin to an index serves every platform that
is in it, so an entry without `platform` is the usual one. References that carry a digest need no entry and get none.
"""

from __future__ import annotations

import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest

MAX_BYTES: Final = 1 << 20
_VERSION: Final = 1
_MOST_TEXT: Final = 4096
_HEADER: Final = """\
# Image tags, each with the digest that it named when it was resolved. `--lock` reads this file and adds what it lacks;
# remove an entry to have its tag resolved again. Keep the file with the job file.
"""

Key = tuple[str, str]
"""A reference in its full form, and the platform that was asked for; empty for none."""


@dataclass(frozen=True, slots=True)
class ImageLock:
    """What one file pins."""

    path: Path
    pins: Mapping[Key, str] = field(default_factory=lambda: MappingProxyType({}))

    @classmethod
    def read(cls, path: Path) -> ImageLock:
        """The lock at `path`; one of no entries when there is no file.

        :raises InvalidRequest: for a file that is no lock: in one line, with the place where it is broken.
        """
        try:
            with path.open("rb") as file:
                data = file.read(MAX_BYTES + 1)
        except FileNotFoundError:
            return cls(path)
        except OSError as error:
            raise InvalidRequest("lock", path, f"can't be read: {error.strerror}") from error
        if len(data) > MAX_BYTES:
            raise _damaged(path, f"is larger than {MAX_BYTES >> 20} MiB")
        return cls(path, MappingProxyType(_pins(path, _document(path, data))))

    def find(self, reference: str, platform: str) -> str | None:
        """The pinned form of `reference`; None when the lock does not have it."""
        return self.pins.get((reference, platform))

    def add(self, pins: Mapping[Key, str]) -> ImageLock:
        """Write `pins` into the file, which appears whole or stays as it was. What it pins already stands.

        Two runs that add at once both get in: the file is read again under a lock on its directory.

        :raises ExecutorError: IO_FAILED, when it can't be written.
        :raises InvalidRequest: when the file was damaged meanwhile.
        """
        try:
            # Through a link, so that a lock kept elsewhere stays there.
            target = Path(os.path.realpath(self.path))
            with _locked(target.parent):
                merged = ImageLock(self.path, MappingProxyType({**pins, **ImageLock.read(self.path).pins}))
                _write(target, merged.text())
        except OSError as error:
            raise ExecutorError(
                ExecutorErrorKind.IO_FAILED,
                "lock_file",
                f"the lock of images {self.path} can't be written",
                details=error.strerror or str(error),
                resolution="name a file in a directory that can be written to",
            ) from error
        return merged

    def text(self) -> str:
        """The file's text: the same for the same pins, in whatever order they came."""
        lines = [_HEADER, f"version: {_VERSION}\n", "images:\n" if self.pins else "images: []\n"]
        for (reference, platform), pinned in sorted(self.pins.items()):
            # A JSON string is a YAML string; names of layouts may hold anything.
            lines.append(f"  - reference: {json.dumps(reference)}\n")
            if platform:
                lines.append(f"    platform: {json.dumps(platform)}\n")
            lines.append(f"    pinned: {json.dumps(pinned)}\n")
        return "".join(lines)


def _write(target: Path, text: str) -> None:
    mode = target.stat().st_mode & 0o777 if target.exists() else 0o644
    handle, name = tempfile.mkstemp(prefix=f".{target.name[:64]}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            os.fchmod(file.fileno(), mode)
        Path(name).replace(target)
    except BaseException:
        with suppress(FileNotFoundError):
            Path(name).unlink()
        raise


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _document(path: Path, data: bytes) -> Any:
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        return yaml.load(data.decode(), Loader=loader)  # noqa: S506  a safe loader, the quick one where it exists
    except UnicodeDecodeError as error:
        raise _damaged(path, "is no UTF-8 text") from error
    except RecursionError as error:
        raise _damaged(path, "is nested too deeply") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise _damaged(path, f"{where}{' '.join(str(error.problem or error.context).split())}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise _damaged(path, " ".join(str(error).split())[:200]) from error


def _pins(path: Path, document: Any) -> dict[Key, str]:
    if not isinstance(document, dict) or document.get("version") != _VERSION:
        raise _damaged(path, f"has no `version: {_VERSION}`")
    entries = document.get("images")
    if not isinstance(entries, list) or set(document) != {"version", "images"}:
        raise _damaged(path, "holds something else than `version` and the list `images`")
    pins: dict[Key, str] = {}
    for number, entry in enumerate(entries, start=1):
        key, pinned = _entry(path, number, entry)
        if pins.setdefault(key, pinned) != pinned:
            raise _damaged(path, f"entry {number} pins {key[0]!r} a second time, to another digest")
    return pins


def _entry(path: Path, number: int, entry: Any) -> tuple[Key, str]:
    known = {"reference", "pinned", "platform"}
    if not isinstance(entry, dict) or not {"reference", "pinned"} <= set(entry) <= known:
        raise _damaged(path, f"entry {number} needs `reference` and `pinned`, and may have `platform`")
    texts = [entry.get(name, "") for name in ("reference", "platform", "pinned")]
    if not all(isinstance(text, str) and len(text) <= _MOST_TEXT for text in texts):
        raise _damaged(path, f"entry {number} holds a value that is no text")
    reference, platform, pinned = texts
    _check_pin(path, number, reference, pinned)
    return (reference, platform), pinned


def _check_pin(path: Path, number: int, reference: str, pinned: str) -> None:
    """A pin is a digest of the same image: a lock must not send a job to another repository."""
    from forgeyard_oci.reference import parse_reference

    try:
        asked, given = parse_reference(reference), parse_reference(pinned)
    except (InvalidRequest, ExecutorError) as error:
        raise _damaged(path, f"entry {number}: {error.brief}") from error
    if given.digest is None or asked.pinned(given.digest) != given.pinned(given.digest):
        raise _damaged(path, f"entry {number}: {pinned!r} is no digest of {reference!r}")


def _damaged(path: Path, why: str) -> InvalidRequest:
    return InvalidRequest("lock", path, f"{why}; repair it, or remove it to have its tags resolved again")
