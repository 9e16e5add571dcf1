"""Daemons whose OCI runtime can be told, before each container, in which of `weakenings` it does less than its bundle.

What is weakened next stands in a file beside the runtime, so that one daemon serves a whole module.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from daemons import SBIN
from weakened import WeakRuntime

# Stands in for runc: edits config.json before the container is made, and runs the real one.
_PROGRAM = """#!{python} -IS
import json, os, sys

sys.path.insert(0, {support!r})
from weakenings import WEAKENINGS

there, real = {directory!r}, {real!r}
words = sys.argv[1:]
with open(there + "/kind") as file:
    kind = file.read()
if kind and "create" in words and "--bundle" in words:
    path = words[words.index("--bundle") + 1] + "/config.json"
    with open(path) as file:
        spec = json.load(file)
    WEAKENINGS[kind](spec)
    with open(path, "w") as file:
        json.dump(spec, file)
    with open(there + "/applied", "w") as file:
        file.write(kind)
os.execv(real, [real, *words])
"""


class Weakener(WeakRuntime):
    """The runtime, in `directory`, which is made."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        directory.mkdir()
        real = shutil.which("runc", path=os.environ.get("PATH", "") + SBIN) or ""
        super().__init__(directory, real)
        support = str(Path(__file__).parent)
        self.program.write_text(
            _PROGRAM.format(python=sys.executable, support=support, directory=str(directory), real=real)
        )

    def leave_out(self, what: str) -> None:
        """From the next container on: one of `weakenings.WEAKENINGS`, or nothing."""
        new = self._directory / "kind.new"
        new.write_text(what)
        new.replace(self._directory / "kind")

    @contextmanager
    def weakening(self, kind: str) -> Iterator[None]:
        """Containers that are made within the block are weakened, and one of them has to be made."""
        applied = self._directory / "applied"
        applied.unlink(missing_ok=True)
        self.leave_out(kind)
        try:
            yield
        finally:
            self.leave_out("")
        assert applied.read_text() == kind
