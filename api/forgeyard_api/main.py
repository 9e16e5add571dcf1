"""Entry point of the `forgeyard` command: runs it, and turns every error into one line and an exit code.

Exit codes of our own (CONTRACT.md): 2 for a command line or job file that can't be used as written, 125 for what was
refused or what failed around the job. A job's own end gives all others.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Final, NoReturn

from forgeyard_model.errors import ForgeyardError, InvalidRequest

USAGE: Final = 2
REFUSED: Final = 125
INTERRUPTED: Final = 130
DEBUG_VARIABLE: Final = "FORGEYARD_DEBUG"


class UnusableInput(Exception):  # noqa: N818  the name says what it is: text the user has to write differently
    """A flag or a job file that can't be used as written; `error` says why. Exit 2."""

    def __init__(self, error: InvalidRequest) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def as_usage() -> Iterator[None]:
    """While reading what the user wrote: an InvalidRequest is a usage error (2), not a refusal (125)."""
    try:
        yield
    except InvalidRequest as error:
        raise UnusableInput(error) from error


def version() -> str:
    """The installed version."""
    from importlib.metadata import PackageNotFoundError
    from importlib.metadata import version as installed

    try:
        return installed("forgeyard-executor")
    except PackageNotFoundError:
        return "of a source tree that is not installed"


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code; errors have been shown on stderr."""
    try:
        from forgeyard_api.cli import command

        code = command()(args=list(arguments), prog_name="forgeyard", standalone_mode=False)
    except UnusableInput as error:
        return _say(error.error, USAGE)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseExceptionGroup as group:
        return _say_group(group)
    except Exception as error:  # noqa: BLE001  the edge of the program: no traceback reaches a user
        return _say_any(error)
    return code if isinstance(code, int) else 0


def main() -> NoReturn:
    """Console script."""
    _open_standard_descriptors()
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A file's name may hold bytes that are no text, or text that the terminal's encoding lacks: shown escaped.
        sys.stdout.reconfigure(errors="backslashreplace")
    code = run(sys.argv[1:])
    with suppress(OSError, ValueError):
        # A reader of ours that went away (`forgeyard job schema | head`) is not an error of this program.
        sys.stdout.flush()
    if code != 0:
        _drop_stdout_if_broken()
    sys.exit(code)


def say(text: str) -> None:
    """Lines on stderr, each under our name; a broken stderr is nobody's to read and no reason to stop."""
    lines = "".join(f"forgeyard: {line}\n" for line in text.splitlines())
    with suppress(OSError, ValueError):
        sys.stderr.write(lines)
        sys.stderr.flush()


def _say(error: ForgeyardError, code: int) -> int:
    if isinstance(error, InvalidRequest) and hasattr(error, "problems"):
        # file:line:col comes first in a line, or editors and people's habits do not find it.
        with suppress(OSError, ValueError):
            sys.stderr.write(f"{error}\n")
        return code
    say(one_line(str(error)))
    return code


def _say_group(group: BaseExceptionGroup[BaseException]) -> int:
    ours, other = group.split(ForgeyardError)
    if other is not None:
        return _say_any(other)
    for error in _leaves(ours):
        say(one_line(str(error)))
    return REFUSED


def _leaves(error: BaseException | None) -> Iterator[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    elif error is not None:
        yield error


def _say_any(error: BaseException) -> int:
    if isinstance(error, ForgeyardError):
        return _say(error, REFUSED)
    shown = getattr(error, "format_message", None)
    if shown is not None:
        # The command-line library's own usage errors; its classes live in a module it keeps private.
        context = getattr(error, "ctx", None)
        help_hint = f" (see {context.command_path} --help)" if context is not None else ""
        text = shown()
        if "\n" in text:
            sys.stderr.write(f"{text}\n")
        else:
            say(f"{text.removesuffix('.')}{help_hint}")
        return int(getattr(error, "exit_code", USAGE))
    if type(error).__name__ == "Abort":
        return INTERRUPTED
    if os.environ.get(DEBUG_VARIABLE):
        import traceback

        traceback.print_exception(error)
    say(one_line(f"internal error: {type(error).__name__}: {error} (set {DEBUG_VARIABLE}=1 to see where)"))
    return REFUSED


def one_line(text: str) -> str:
    """`text` without line breaks and control characters: what a job or a tool said must not steer a terminal."""
    return "".join(char if char.isprintable() else " " for char in text).strip()


def _open_standard_descriptors() -> None:
    """With stdin, stdout or stderr closed, a FIFO opened later would become fd 1 and get what was meant for nobody."""
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


def _drop_stdout_if_broken() -> None:
    try:
        sys.stdout.flush()
    except (OSError, ValueError):
        # Python would try again at exit and complain.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
