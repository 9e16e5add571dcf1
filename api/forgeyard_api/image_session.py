"""How a command works on the image store: with no executor and no runtime, and ended by a signal."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import typer

from forgeyard_api.configured import configured
from forgeyard_api.interrupts import SIGNALS
from forgeyard_api.main import say
from forgeyard_executor.images import Images
from forgeyard_executor.state import StatePaths

if TYPE_CHECKING:
    from forgeyard_model.config import ExecutorConfig
    from forgeyard_oci.registry.budget import Budget

T = TypeVar("T")
Work = Callable[[Images, "Budget"], T]


def in_store(state_dir: Path | None, work: Work[T]) -> T:
    """What `work` returns, given the store of `state_dir` and a budget that a signal ends.

    :raises typer.Exit: with 128 and the signal's number.
    :raises ForgeyardError: what the store, a registry or the host refuse.
    """
    return asyncio.run(_work(configured(state_dir), work))


async def _work(config: ExecutorConfig, work: Work[T]) -> T:
    paths = StatePaths.at(config.state_dir)
    paths.make()
    images = Images(paths, config)
    task = asyncio.ensure_future(images.work(lambda budget: work(images, budget)))
    received: list[signal.Signals] = []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        task.cancel()

    for number in SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop, number)
    try:
        return await task
    except asyncio.CancelledError:
        if not received:
            raise
        say(f"{received[0].name}: stopped")
        raise typer.Exit(128 + received[0]) from None
    finally:
        images.close()
