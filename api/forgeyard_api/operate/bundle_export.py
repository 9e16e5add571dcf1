"""`forgeyard bundle export`: the bundle of a running attempt, its root by reference."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from forgeyard_api.main import as_usage, say
from forgeyard_api.operate.inspecting import container_of, inspected
from forgeyard_api.operate.server import Name, Socket, ask
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, InvalidRequest


def export(
    name: Name,
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Absent or empty directory.")],
    *,
    service: Annotated[str, typer.Option("--service", metavar="NAME", help="Of a service of its.")] = "",
    podman: Annotated[
        bool, typer.Option("--podman", help="Print a command line of podman's for a shell on the same files.")
    ] = False,
    socket: Socket = None,
) -> int:
    """Write the bundle of a running attempt: config.json as it is, rootfs as a link to the attempt's own.

    It is good as long as the attempt runs. `forgeyard bundle generate` makes one that stands by itself.
    """
    from forgeyard_api.result_file import check_absent_or_empty

    with as_usage():
        check_absent_or_empty("DIR", directory)
    container = container_of(ask(socket, lambda calls: inspected(calls, name)), service)
    config = write_bundle(container.bundle, directory)
    if podman:
        from forgeyard_api.operate.podman_command import DIFFERENCES, podman_command

        for difference in DIFFERENCES:
            say(f"note: {difference}")
        typer.echo(shlex.join(podman_command(config, str(directory.absolute()))))
    return 0


def write_bundle(data: bytes, directory: Path) -> dict[str, Any]:
    """Put config.json `data`, its seccomp profile by itself and a link to its root into `directory`.

    :returns: what is in config.json.
    :raises InvalidRequest: the directory can't be written.
    :raises ExecutorError: the bundle is another backend's, which has no directory as its root.
    """
    config: dict[str, Any] = json.loads(data)
    root = Path(config["root"]["path"])
    if not root.is_dir():
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "no_root_here",
            "the attempt's root is no directory of this host",
            details=str(root),
            resolution="export it on the server's host, while it runs; where an engine unpacks images, ask the engine",
        )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "config.json").write_bytes(data)
        (directory / "rootfs").symlink_to(root)
        seccomp = config["linux"].get("seccomp")
        if seccomp:
            (directory / "seccomp.json").write_text(json.dumps(seccomp))
    except OSError as error:
        raise InvalidRequest("DIR", directory, f"can't be written: {error.strerror}") from error
    return config
