"""Build hook: compiles the init of job containers into the wheel, so that an installed wheel needs no compiler."""

from __future__ import annotations

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PACKAGE = "process_shim/forgeyard_process_shim"


class ShimBuildHook(BuildHookInterface):  # type: ignore[type-arg]  # its parameter is hatchling's own config class
    """Compiles init.c for wheels and for editable installs."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, add the binary to the wheel and tag the wheel for this platform.

        :raises RuntimeError: init.c can't be compiled; the message says what to install.
        """
        shim = _load(Path(self.root) / _PACKAGE / "build.py")
        shim.build()
        build_data["pure_python"] = False
        # Static and without a Python ABI: any Python 3 of this platform can use it.
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        if version != "editable":
            build_data["force_include"][str(shim.BINARY)] = "forgeyard_process_shim/bin/init"


def _load(path: Path) -> ModuleType:
    # By path: the build runs in an environment where the project itself is not installed.
    spec = importlib.util.spec_from_file_location("forgeyard_shim_build", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"{path} is missing from the source tree")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
