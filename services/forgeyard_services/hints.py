"""What to say to a job that looks for a container engine. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_SAID: Final = re.compile(
    rb"/(?:var/)?run/docker\.sock|/podman/podman\.sock|cannot connect to the docker daemon|is the docker daemon running"
    rb"|failed to connect to the docker api|error while fetching server api version"
    rb"|could not find a valid docker environment|error during connect: .{0,80}docker"
    rb"|(?:docker|podman|docker-compose): (?:command )?not found|testcontainers",
    re.IGNORECASE,
)
_ASKED: Final = re.compile(r"(?<![\w./-])(?:/usr/(?:local/)?bin/)?(docker|docker-compose|podman|nerdctl)(?![\w./-])")
_HINT: Final = (
    "looks for a container engine, and a sandbox has none: declare what it would start under `services:`, "
    "and connect to it by its name"
)


def engine_hint(output_tail: bytes, words: Sequence[str]) -> str | None:
    """For a step that failed: a hint when its output, or its own words, are about a container engine; else None.

    :param output_tail: the end of what it wrote.
    :param words: its argument vector, or its script as one word.
    """
    if match := _SAID.search(output_tail):
        return f"it {_HINT} (it said {match[0].decode('utf-8', 'replace')!r})"
    text = re.sub(r"(?:^|\s)#.*$", "", "\n".join(words), flags=re.MULTILINE)
    if asked := _ASKED.search(text):
        return f"it {_HINT} (it runs {asked[1]})"
    return None
