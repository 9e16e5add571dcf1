"""Credential helpers: programs named ``docker-credential-NAME`` that keep passwords elsewhere.

The protocol: ``get`` as the argument, the server's name on stdin, a JSON object on stdout. Nothing a helper writes is
ever shown: it may be the secret.
"""

from __future__ import annotations

import json
import os
import re
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest

HELPER_SECONDS: Final = 20.0
_MAX_OUTPUT: Final = 64 << 10
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")
_PREFIX: Final = "docker-credential-"
_TOKEN_USER: Final = "<token>"  # noqa: S105  the protocol's word in the place of a user name
_NONE: Final = b"credentials not found"


@dataclass(frozen=True, slots=True)
class Credentials:
    """What a registry is shown. Any part may be ""; none is part of the repr.

    :param identity_token: exchanged for bearer tokens (OAuth2 refresh token).
    :param registry_token: a bearer token for the registry itself.
    """

    username: str = field(default="", repr=False)
    password: str = field(default="", repr=False)
    identity_token: str = field(default="", repr=False)
    registry_token: str = field(default="", repr=False)

    def __bool__(self) -> bool:
        return bool(self.username or self.password or self.identity_token or self.registry_token)


def ask_helper(
    name: str, server: str, environ: Mapping[str, str], *, origin: str, seconds: float = HELPER_SECONDS
) -> Credentials | None:
    """Ask ``docker-credential-NAME`` for the credentials of `server`; None when it has none.

    :param environ: its environment, PATH included.
    :param origin: where the helper is named, for messages.
    :param seconds: how long it may take.
    :raises InvalidRequest: for a name that is none, or a helper that is not installed.
    :raises ExecutorError: IO_FAILED, for a helper that fails, hangs or answers nonsense.
    """
    if not _NAME.match(name):
        raise InvalidRequest(f"{origin}: credential helper", name, "write what follows docker-credential-, no path")
    program = shutil.which(_PREFIX + name, path=environ.get("PATH") or os.defpath)
    if program is None:
        raise InvalidRequest(f"{origin}: credential helper", name, f"install {_PREFIX}{name}, or remove its name there")
    failure = _Failure(name, server, origin)
    status, output = _run(program, server, environ, failure, seconds)
    if status != 0 and _NONE in output:
        return None
    if status != 0:
        raise failure.because(f"ended with {_ending(status)}")
    return _answer(output, failure)


@dataclass(frozen=True, slots=True)
class _Failure:
    """One helper's call, for messages."""

    name: str
    server: str
    origin: str

    def because(self, why: str) -> ExecutorError:
        return ExecutorError(
            ExecutorErrorKind.IO_FAILED,
            "credential_helper",
            f"credential helper {_PREFIX}{self.name} {why}",
            details=f"asked for {self.server[:200]!r}, named in {self.origin}",
            resolution=f"echo {self.server[:200]} | {_PREFIX}{self.name} get shows what it says",
        )


def _run(program: str, server: str, environ: Mapping[str, str], failure: _Failure, seconds: float) -> tuple[int, bytes]:
    try:
        process = subprocess.Popen(
            [program, "get"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
            env=dict(environ),
            start_new_session=True,
        )
    except OSError as error:
        raise failure.because(f"can't be started: {error.strerror}") from error
    with process:
        try:
            output = _talk(process, server, time.monotonic() + seconds)
            if output is None:
                raise failure.because(f"wrote more than {_MAX_OUTPUT} bytes")
            return process.wait(1.0), output
        except (TimeoutError, subprocess.TimeoutExpired) as error:
            raise failure.because(f"gave no answer within {seconds:g} s") from error
        finally:
            if process.returncode is None:
                os.killpg(process.pid, signal.SIGKILL)


def _talk(process: subprocess.Popen[bytes], server: str, deadline: float) -> bytes | None:
    """What it writes until it closes stdout; None for too much."""
    if process.stdin is None or process.stdout is None:
        raise TimeoutError  # both were asked for
    try:
        process.stdin.write(server.encode())  # shorter than a pipe's buffer: this never blocks
        process.stdin.close()
    except BrokenPipeError:
        pass  # it did not care to read; its answer says whether that is an error
    output = b""
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ)
        while len(output) <= _MAX_OUTPUT:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                raise TimeoutError
            chunk = os.read(process.stdout.fileno(), 8192)
            if not chunk:
                return output
            output += chunk
    return None


def _ending(status: int) -> str:
    return f"status {status}" if status > 0 else f"signal {-status}"


def _answer(output: bytes, failure: _Failure) -> Credentials | None:
    try:
        document = json.loads(output)
        user, secret = document["Username"], document["Secret"]
    except (ValueError, KeyError, TypeError, RecursionError):
        # Not chained: the error of the JSON parser holds the text.
        raise failure.because("answered something that is not what the protocol asks for") from None
    if not isinstance(user, str) or not isinstance(secret, str):
        raise failure.because("answered something that is not what the protocol asks for")
    if user == _TOKEN_USER:
        return Credentials(identity_token=secret) or None
    return Credentials(username=user, password=secret) or None
