"""Compile init.c: ``python -m forgeyard_process_shim.build``.

Standard library only, since the wheel's build hook loads this file before the project is installed.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

SOURCE: Final = Path(__file__).with_name("init.c")
BINARY: Final = Path(__file__).with_name("bin") / "init"
FLAGS: Final = (
    *(
        "-static",
        "-Os",
        "-std=gnu11",
        "-s",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-Wshadow",
        "-Wconversion",
        "-Wno-sign-conversion",
    ),
    *("-fstack-protector-strong", "-fno-asynchronous-unwind-tables", "-ffunction-sections"),
    *("-Wl,--gc-sections", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-Wl,-z,relro", "-Wl,-z,now"),
)
COMPILERS: Final = ("musl-gcc", "gcc", "cc")
"""In order of preference: musl gives a binary of a tenth the size."""


class ShimBuildError(RuntimeError):
    """init.c could not be compiled; the message says why and what to install."""


def build(binary: Path = BINARY, *, compiler: str | None = None) -> bool:
    """Compile init.c to `binary` unless it is already there from the same source, flags and compiler.

    :return: whether it was compiled.
    :raises ShimBuildError: no compiler, no static libc, or the compiler refused the source.
    """
    command = _compiler(compiler)
    stamp = binary.with_name(f"{binary.name}.sha256")
    digest = _digest(command)
    if binary.is_file() and stamp.is_file() and stamp.read_text() == digest:
        return False
    binary.parent.mkdir(parents=True, exist_ok=True)
    # Built beside its place and renamed over it: a running build never shows half a file to another process.
    with tempfile.TemporaryDirectory(dir=binary.parent, prefix=".build-") as scratch:
        made = Path(scratch) / "init"
        _compile(command, made)
        made.chmod(0o555)
        made.replace(binary)
    stamp.write_text(digest)
    return True


def _compiler(wanted: str | None) -> str:
    wanted = wanted or os.environ.get("FORGEYARD_SHIM_CC")
    for name in (wanted,) if wanted else COMPILERS:
        if found := shutil.which(name):
            return found
    raise ShimBuildError("no C compiler: install gcc and a static libc (Debian: apt-get install gcc libc6-dev)")


def _digest(command: str) -> str:
    return hashlib.sha256("\0".join((command, *FLAGS, SOURCE.read_text(encoding="utf-8"))).encode()).hexdigest()


def _compile(command: str, target: Path) -> None:
    done = subprocess.run(
        [command, *FLAGS, "-o", str(target), str(SOURCE)], capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        raise ShimBuildError(f"{command} could not compile {SOURCE.name}: {done.stderr.strip()[:2000]}")


if __name__ == "__main__":
    try:
        sys.stdout.write(f"{'built' if build() else 'up to date'}: {BINARY}\n")
    except ShimBuildError as error:
        sys.exit(f"forgeyard_process_shim.build: {error}")
