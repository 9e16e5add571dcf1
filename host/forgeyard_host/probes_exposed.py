"""What process mode shows of the host: a walk through /usr for what should not be there."""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from forgeyard_host.probes_conditions import HostCondition, judge

_PATIENCE: Final = 2.0
"""Seconds. What has not been looked at by then is said to be so."""
_SHOWN: Final = 3
_SECRET_NAME: Final = re.compile(
    r"(?:id_(?:rsa|dsa|ecdsa|ed25519)|\.netrc|\.npmrc|\.pypirc|\.pgpass|\.git-credentials|\.env|credentials(?:\.json)?"
    r"|.*\.(?:pem|key|p12|pfx|jks|kdbx|keytab))\Z"
)
_TEXT_KEY: Final = (".pem", ".key")
_PRIVATE: Final = b"PRIVATE KEY-----"
_EXAMPLES: Final = frozenset({"doc", "man", "test", "tests", "testing", "examples", "locale", "zoneinfo"})


def exposed_files(
    top: str = "/usr", *, shows: Callable[[str], bool] = lambda _: True, patience: float = _PATIENCE
) -> tuple[HostCondition, ...]:
    """Files below `top` that look like secrets a job could read, that anybody may change, or that are not root's.

    :param shows: whether jobs see a directory at all.
    """
    secret: list[str] = []
    loose: list[str] = []
    foreign: list[str] = []
    deadline = time.monotonic() + patience
    complete = True
    for count, entry in enumerate(_entries(top, shows)):
        if count % 1024 == 0 and time.monotonic() > deadline:
            complete = False
            break
        try:
            info = entry.stat(follow_symlinks=False)
        except OSError:
            continue  # removed since
        if info.st_mode & stat.S_IWOTH and not info.st_mode & stat.S_ISVTX:
            loose.append(entry.path)
        if info.st_uid != 0:
            foreign.append(entry.path)
        if info.st_mode & stat.S_IROTH and _looks_secret(entry):
            secret.append(entry.path)
    rest = "" if complete else f"; not all of {top} could be looked at in {patience:g}s"
    return (
        _condition("secrets in view", secret, rest, "move them out of reach, or chmod o-r: jobs can read them"),
        _condition("files for all to write", loose, rest, "chmod o-w: whoever can write them runs code in jobs"),
        _condition("files of others", foreign, rest, "chown root: their owner runs code in jobs"),
    )


def _entries(top: str, shows: Callable[[str], bool]) -> Iterator[os.DirEntry[str]]:
    """Everything but links, whose own mode and owner mean nothing."""
    waiting = [top]
    while waiting:
        try:
            entries = os.scandir(waiting.pop())
        except OSError:
            continue  # closed to us, so to a job
        with entries:
            for entry in entries:
                if entry.is_symlink():
                    continue
                if entry.is_dir(follow_symlinks=False):
                    if not shows(entry.path):
                        continue
                    waiting.append(entry.path)
                yield entry


def _looks_secret(entry: os.DirEntry[str]) -> bool:
    if not _SECRET_NAME.match(entry.name) or not entry.is_file(follow_symlinks=False):
        return False
    if _EXAMPLES & set(entry.path.split("/")):
        return False
    if not entry.name.endswith(_TEXT_KEY):
        return True
    try:
        with Path(entry.path).open("rb") as file:
            return _PRIVATE in file.read(4096)
    except OSError:
        return False


def _condition(name: str, found: list[str], rest: str, cure: str) -> HostCondition:
    if not found:
        return judge(name, f"none{rest}")
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return judge(name, f"{', '.join(sorted(found)[:_SHOWN])}{more}{rest}", warning=cure)
