"""`forgeyard serve`: the executor as a service, for an agent in any language."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from forgeyard_api.main import as_usage
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind

if TYPE_CHECKING:
    from forgeyard_model.config import ExecutorConfig


def serve(
    *,
    state_dir: Annotated[str | None, typer.Option(help="Where the executor keeps its state.")] = None,
    socket: Annotated[Path | None, typer.Option(help="Where agents connect.")] = None,
    cri: Annotated[Path | None, typer.Option(help="Where crictl connects.")] = None,
    runtime: Annotated[list[str] | None, typer.Option(help="Who runs containers; may be repeated.")] = None,
    slots: Annotated[int | None, typer.Option(min=1, help="Attempts at once.")] = None,
    metrics: Annotated[str | None, typer.Option(help="Unix socket or 127.0.0.1:PORT of /metrics.")] = None,
    config_file: Annotated[
        Path | None, typer.Option("--config", help="In the place of /etc/forgeyard/config.toml.", exists=True)
    ] = None,
) -> int:
    """Run jobs for agents that connect to a socket; see docs/serve.md. The rest is in config.toml, table `serve`."""
    flags = {
        "socket": None if socket is None else str(socket.absolute()),
        "cri_socket": None if cri is None else str(cri.absolute()),
        "runtimes": tuple(runtime) if runtime else None,
        "slots": slots,
        "metrics": metrics,
    }
    given = {name: value for name, value in flags.items() if value is not None}

    system = None if config_file is None else config_file.absolute()

    def load() -> ExecutorConfig:
        from forgeyard_executor.config_load import load_config

        config = load_config(system=system, flags={} if state_dir is None else {"state_dir": state_dir}).config
        return replace(config, serve=replace(config.serve, **given))  # type: ignore[arg-type]  # fields by name

    with as_usage():
        config = load()
    try:
        from forgeyard_api.serve.server import serve_until_told
    except ModuleNotFoundError as error:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "not_installed",
            f"serve needs the package {error.name}",
            resolution='pip install "forgeyard-executor[serve]"',
        ) from error
    serve_until_told(config, load, system)
    return 0
