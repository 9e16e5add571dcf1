"""Pages of docs/ that are made from the code: profiles, the job file's JSON Schema, errors, and both APIs.

``python -m forgeyard_api.reference_docs docs`` writes them; a test compares them with what is there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Final

from forgeyard_api.job_commands import schema_text
from forgeyard_api.reference_errors import reasons_page
from forgeyard_api.reference_proto import api_page
from forgeyard_api.reference_python import python_page
from forgeyard_model.profile import PROFILES, ExecutionProfile, ProfileRules
from forgeyard_model.units import format_duration, format_size

_INTRO: Final = """\
# Execution profiles

<!-- Made by `python -m forgeyard_api.reference_docs docs` from forgeyard_model.profile: do not edit. -->

A profile is a set of defaults and bounds. Command line, job file and Python API all default to `standard-ci` with
network `deny`, on a terminal or not. A job may ask for less than its profile allows, never for more; an organisation's
configuration may raise a minimum, never lower it.

"""
_NOTES: Final = """
The limits are what a job gets that names none; a job may name others. A limit of *none* is bounded by the host alone.
One that is *watched* is held by no filesystem: the executor counts what the job writes, and kills it past that. A disk
limit that the job or the configuration names is held by a filesystem of that size, with its room set aside.
*Digest* means that `image` has to end in `@sha256:…`. Where a user namespace is *required* and the host can't make
one, the job is refused; where it is *preferred*, the job runs and the result says which it got. *`unlimited` allowed*
is the profile's word; this version enforces every limit but disk, and refuses the rest.
"""


def profiles_page() -> str:
    """docs/profiles.md."""
    profiles = list(ExecutionProfile)
    head = ["", *(f"`{profile.value}`" for profile in profiles)]
    rows = [[name, *(cell(PROFILES[profile]) for profile in profiles)] for name, cell in _ROWS]
    lines = [head, ["---"] * len(head), *rows]
    return _INTRO + "".join("| " + " | ".join(line) + " |\n" for line in lines) + _NOTES


def _networks(rules: ProfileRules) -> str:
    others = [mode.value for mode in rules.networks if mode is not rules.default_network]
    return f"{rules.default_network.value} ({', '.join(others)} on request)" if others else rules.default_network.value


def _source(rules: ProfileRules) -> str:
    others = [mode.value for mode in rules.source_modes if mode is not rules.source_mode]
    return f"{rules.source_mode.value} ({', '.join(others)} on request)" if others else rules.source_mode.value


def _isolation(rules: ProfileRules) -> str:
    return rules.isolation.minimum.value.replace("_", " ")


def _limit(value: float | None, shown: Callable[[int], str] | None = None) -> str:
    if value is None:
        return "none"
    return shown(int(value)) if shown is not None else f"{value:g}"


def _disk(rules: ProfileRules) -> str:
    if rules.limits.disk is None and rules.disk_watched is not None:
        return f"{format_size(rules.disk_watched)}, watched"
    return _limit(rules.limits.disk, format_size)


_ROWS: Final[tuple[tuple[str, Callable[[ProfileRules], str]], ...]] = (
    ("image", lambda rules: "digest" if rules.digest_required else "tag or digest"),
    ("network", _networks),
    ("`/work/source`", _source),
    ("root filesystem of an image", lambda rules: "read-only" if rules.root_read_only else "writable, discarded"),
    ("capabilities", lambda rules: ", ".join(grant.value for grant in rules.capabilities)),
    ("user namespace of its own", lambda rules: rules.isolation.user_namespace.value),
    ("weakest isolation", _isolation),
    ("[caches](caches.md) between jobs", lambda rules: "allowed" if rules.caches else "refused"),
    ("`unlimited`", lambda rules: "allowed" if rules.unlimited_allowed else "refused"),
    ("cpus", lambda rules: _limit(rules.limits.cpus)),
    ("memory", lambda rules: _limit(rules.limits.memory, format_size)),
    ("processes", lambda rules: _limit(rules.limits.pids)),
    ("disk", _disk),
    ("open files", lambda rules: _limit(rules.limits.nofile)),
    ("`/dev/shm`", lambda rules: _limit(rules.limits.shm, format_size)),
    ("timeout", lambda rules: _limit(rules.limits.wall_time, format_duration)),
)


PAGES: Final[dict[str, Callable[[], str]]] = {
    "profiles.md": profiles_page,
    "job.schema.json": schema_text,
    "error-reasons.md": reasons_page,
    "api-reference.md": api_page,
    "python-reference.md": python_page,
}
"""What makes each generated page, by its file name."""


if __name__ == "__main__":
    for file_name, make in PAGES.items():
        Path(sys.argv[1], file_name).write_text(make(), encoding="utf-8")
