"""Which engines can be used at all: those with a socket on this machine, run by its root. Anything else has a cure."""

from __future__ import annotations

from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

LONGEST: Final = 107
"""Bytes of a path that the kernel connects to (sun_path without its end, unix(7))."""


def local_socket(engine: str, address: str, origin: str) -> str:
    """The path in ``unix:///PATH`` or ``unix:/PATH``.

    A job's root, FIFOs, pids and control groups are this machine's, so no engine elsewhere can be used.

    :param engine: name of the adapter, as in ``podman``.
    :param origin: what named the address.
    :raises ExecutorError: UNSUPPORTED, ``<engine>_address``: elsewhere, no absolute path, or longer than the kernel
        takes.
    """
    if address.startswith("/"):
        raise refused_address(engine, f"{engine} address {address!r} has no scheme", f"write unix://{address}", origin)
    scheme, _, rest = address.partition(":")
    path = rest.removeprefix("//")
    if scheme != "unix":
        brief = f"{engine} address {address!r} is no socket of this host, where its jobs have to run"
        raise refused_address(engine, brief, "give unix:///PATH", origin)
    if not path.startswith("/"):
        brief = f"{engine} address {address!r} has no absolute path"
        raise refused_address(engine, brief, "give unix:///PATH", origin)
    size = len(path.encode("utf-8", "surrogateescape"))
    if size > LONGEST or "\0" in path:
        brief = f"{engine} address {address[:120]!r} can't be a socket"
        raise refused_address(engine, brief, f"give a path of at most {LONGEST} bytes", origin)
    return path


def refused_address(engine: str, brief: str, cure: str, origin: str) -> ExecutorError:
    """An address that can't be used."""
    return ExecutorError(
        ExecutorErrorKind.UNSUPPORTED, f"{engine}_address", brief, resolution=f"{origin} names it: {cure}"
    )


def rootless_engine(engine: str, shown: str, cure: str) -> ExecutorError:
    """An engine of an ordinary user's.

    Rootless, nobody makes ID-mapped mounts of the host's file systems (mount_setattr(2) wants CAP_SYS_ADMIN where the
    file system was mounted), control groups outside of a delegated one, or several ranges of ids: what isolates each
    attempt, proves that its tree is dead, and is undone after a crash.

    :param shown: which one, and whose.
    """
    return ExecutorError(
        ExecutorErrorKind.UNSUPPORTED,
        f"{engine}_rootless",
        "rootless engine: not usable by this executor",
        details=f"{shown}; it can't enter the control groups, ID-mapped mounts and uid ranges that jobs are made of",
        resolution=cure,
    )
