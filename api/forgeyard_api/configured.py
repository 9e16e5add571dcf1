"""The configuration as the commands use it: flags on top, mistakes in it as usage errors, unused keys said."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from forgeyard_api.main import as_usage, one_line, say

if TYPE_CHECKING:
    from forgeyard_model.config import ExecutorConfig


def configured(state_dir: Path | None, runtime: str | None = None) -> ExecutorConfig:
    """The effective configuration; what its reader should know goes to stderr.

    :param state_dir, runtime: what the flags say; None: not given.
    :raises UnusableInput: for a configuration that can't be used.
    """
    from forgeyard_executor.config_load import load_config

    flags = {"state_dir": None if state_dir is None else str(state_dir), "runtime": runtime}
    with as_usage():
        loaded = load_config(flags={key: value for key, value in flags.items() if value is not None})
    for note in loaded.notes:
        say(f"note: {one_line(note)}")
    return loaded.config
