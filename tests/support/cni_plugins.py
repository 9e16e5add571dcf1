"""CNI plugins that do what a test tells them, and write down how they were called."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

STOCK = "/usr/lib/cni"
RESULT = (
    '{"cniVersion":"1.0.0","interfaces":[{"name":"eth0","mac":"02:00:00:00:00:01","sandbox":"x"}],'
    '"ips":[{"address":"10.1.2.3/24","gateway":"10.1.2.1","interface":0}],"routes":[{"dst":"0.0.0.0/0"}],"dns":{}}'
)


@dataclass(frozen=True)
class Called:
    """One run of a plugin: its environment and what it was given."""

    plugin: str
    command: str
    env: Mapping[str, str]
    stdin: Any


class PluginBox:
    """A directory of plugins, each a few lines of shell."""

    def __init__(self, root: Path) -> None:
        self.dir = root / "plugins"
        self._log = root / "calls"
        for path in (self.dir, self._log):
            path.mkdir()

    def write(self, name: str, *, versions: tuple[str, ...] = ("1.0.0",), **commands: str) -> str:
        """A plugin `name` that runs the shell of its command (ADD=..., DEL=...). ADD prints RESULT by default."""
        listed = ",".join(f'"{version}"' for version in versions)
        known = {"ADD": f"echo '{RESULT}'", "VERSION": f"echo '{{\"supportedVersions\":[{listed}]}}'"} | commands
        cases = "\n".join(f"{command}) {body} ;;" for command, body in known.items())
        path = self.dir / name
        # The number of a call comes from a counter: two runs may share a clock tick.
        path.write_text(
            f"#!/bin/sh\nn=$(ls {self._log} | wc -l); n=$((n + 1000))\n"
            f"{{ echo {name}; env | tr '\\n' ';'; echo; cat; }} > {self._log}/$n\n"
            f"case $CNI_COMMAND in\n{cases}\nesac\n"
        )
        path.chmod(0o755)
        return str(self.dir)

    def calls(self) -> list[Called]:
        """Every run so far, in order."""
        return [self._read(path) for path in sorted(self._log.iterdir())]

    def commands(self) -> list[str]:
        """As "ADD name"."""
        return [f"{call.command} {call.plugin}" for call in self.calls()]

    @staticmethod
    def _read(path: Path) -> Called:
        name, env, stdin = path.read_text().split("\n", 2)
        # CNI_ARGS holds semicolons; no test gives it one with a name that is also looked at.
        pairs = dict(pair.split("=", 1) for pair in env.split(";") if "=" in pair)
        return Called(name, pairs["CNI_COMMAND"], pairs, json.loads(stdin))


def error(code: int, message: str) -> str:
    """Shell that fails as the specification says."""
    return f'echo \'{{"cniVersion":"1.0.0","code":{code},"msg":"{message}","details":"more"}}\'; exit 1'
