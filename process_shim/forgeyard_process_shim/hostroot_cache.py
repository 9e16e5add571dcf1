"""Keep a finished skeleton, and know without rebuilding it whether the host still looks the same."""

from __future__ import annotations

import array
import contextlib
import fcntl
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from forgeyard_process_shim.hostroot_rules import Refusal, Skipped
from forgeyard_process_shim.hostroot_tree import Entry, write

_BUILDING = ".building-"
_LOCK = ".lock"
_CLOCK_TICK = 20_000_000  # nanoseconds; the kernel stamps files with a clock that ticks every 1 to 10 ms


@dataclass(frozen=True, slots=True)
class Record:
    """What was built from which inputs.

    :param digest: of the skeleton, in hex; the name of its directory.
    :param inputs: host paths that were read.
    :param stamp: `stamp_of` them at that time.
    :param skipped: host configuration that was left out.
    :param dangling: links of /usr that lead nowhere in a job.
    """

    digest: str
    inputs: tuple[str, ...]
    stamp: str
    skipped: tuple[Skipped, ...]
    dangling: tuple[str, ...]


def stamp_of(inputs: Sequence[str], names: Sequence[str] = ()) -> str:
    """A digest over inode and change time of each path: about 1 µs a path.

    :param names: words that belong to it, such as the names in a directory that changes too often to be an input.
    """
    facts = array.array("Q")
    for path in inputs:
        try:
            status = os.lstat(path)
        except OSError:
            facts.extend((0, 0))
        else:
            facts.extend((status.st_ino & 0xFFFFFFFFFFFFFFFF, status.st_ctime_ns & 0xFFFFFFFFFFFFFFFF))
    total = hashlib.sha256(facts.tobytes())
    total.update("\0".join(names).encode(errors="surrogateescape"))
    return total.hexdigest()


def changed_since(inputs: Sequence[str], moment: int) -> bool:
    """Whether any of `inputs` changed at or after `moment` (nanoseconds), or just before: file times are coarse."""
    return any(_change_time(path) > moment - _CLOCK_TICK for path in inputs)


def _change_time(path: str) -> int:
    try:
        return os.lstat(path).st_ctime_ns
    except OSError:
        return 0  # not there: the stamp records that too


def load_record(file: Path) -> Record | None:
    """The record in `file`; None when there is none, or it is from another version or torn."""
    try:
        raw = json.loads(file.read_bytes())
        return Record(
            digest=str(raw["digest"]),
            inputs=tuple(raw["inputs"]),
            stamp=str(raw["stamp"]),
            skipped=tuple(Skipped(path, Refusal(reason)) for path, reason in raw["skipped"]),
            dangling=tuple(raw["dangling"]),
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a cache: the cure for whatever it is, is to build again


def save_record(file: Path, record: Record) -> None:
    """Replace the record in one step.

    :raises OSError: when the disk is full.
    """
    raw = {
        "digest": record.digest,
        "inputs": record.inputs,
        "stamp": record.stamp,
        "skipped": [(item.path, item.reason.value) for item in record.skipped],
        "dangling": record.dangling,
    }
    draft = file.with_name(f"{_BUILDING}{secrets.token_hex(8)}")
    draft.write_text(json.dumps(raw))
    draft.replace(file)


@contextlib.contextmanager
def building(cache: Path) -> Iterator[None]:
    """Hold the right to build, across processes, and clear away what a killed builder left.

    :raises OSError: when the cache cannot be made or locked.
    """
    if not cache.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        cache.chmod(0o711)  # a runtime in a user namespace has to pass through
    fd = os.open(cache / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        for leftover in cache.glob(f"{_BUILDING}*"):
            _remove(leftover)
        yield
    finally:
        os.close(fd)


def publish(tree: Mapping[str, Entry], cache: Path, digest: str) -> None:
    """Put the tree at its digest's name; nothing to do when it is there. Call while `building`.

    :raises OSError: when it cannot be written; nothing is left behind then.
    """
    if (cache / digest).is_dir():
        return
    draft = cache / f"{_BUILDING}{secrets.token_hex(8)}"
    draft.mkdir(0o700)
    try:
        write(tree, draft)
        draft.rename(cache / digest)
    except OSError:
        _remove(draft)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
