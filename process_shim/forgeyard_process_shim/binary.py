"""Where the compiled init is."""

from __future__ import annotations

import os
from pathlib import Path

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_process_shim.build import BINARY


def shim_binary(binary: Path = BINARY) -> Path:
    """The static init that was built with the wheel or by the set-up command.

    :raises SandboxError: INTERNAL, reason ``shim_missing``; its resolution is the command that builds it.
    """
    if not os.access(binary, os.X_OK):
        raise SandboxError(
            SandboxErrorKind.INTERNAL,
            "shim_missing",
            "the init of job containers has not been built",
            details=str(binary),
            resolution="run: python -m forgeyard_process_shim.build",
        )
    return binary
