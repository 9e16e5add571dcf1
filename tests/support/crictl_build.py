"""The real crictl, compiled once by Go and kept in .cache: `python tests/support/crictl_build.py` makes it."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

VERSION = "v1.34.0"
MODULE = "sigs.k8s.io/cri-tools/cmd/crictl"
CACHE = Path(__file__).resolve().parents[2] / ".cache"
BUILD_SECONDS = 900
"""A minute on a machine with nothing else to do."""


class NoCrictlError(Exception):
    """It is not here and can't be made; the message says why."""


def go() -> str | None:
    """Path of the Go command."""
    return shutil.which("go", path=os.environ.get("PATH", "") + ":/usr/local/go/bin:/usr/lib/go/bin")


def kept() -> Path:
    """Where it is once it is built."""
    return CACHE / f"crictl-{VERSION}" / "crictl"


def crictl() -> Path:
    """The program, compiled when it isn't there yet.

    :raises NoCrictlError: no Go, or the module can't be had or compiled.
    """
    program = kept()
    if program.exists():
        return program
    command = go()
    if command is None:
        raise NoCrictlError("crictl is not built and there is no Go to build it with")
    CACHE.mkdir(exist_ok=True)
    with (CACHE / "crictl.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not program.exists():
            _install(command, program)
    return program


def _install(command: str, program: Path) -> None:
    with tempfile.TemporaryDirectory(dir=CACHE) as made:
        environment = {**os.environ, "GOBIN": made, "GOTOOLCHAIN": "local", "GOFLAGS": "-mod=mod -buildvcs=false"}
        try:
            subprocess.run(
                [command, "install", f"{MODULE}@{VERSION}"],
                env=environment,
                cwd=made,
                check=True,
                capture_output=True,
                text=True,
                timeout=BUILD_SECONDS,
            )
        except subprocess.CalledProcessError as error:
            raise NoCrictlError(f"crictl {VERSION} can't be built: {error.stderr.strip()[-500:]}") from error
        except subprocess.TimeoutExpired as error:
            raise NoCrictlError(f"crictl {VERSION} was not built in {BUILD_SECONDS} s") from error
        program.parent.mkdir(exist_ok=True)
        Path(made, "crictl").rename(program)


if __name__ == "__main__":
    try:
        print(crictl())
    except NoCrictlError as problem:
        sys.exit(str(problem))
