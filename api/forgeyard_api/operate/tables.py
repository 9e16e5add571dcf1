"""A table that is drawn again and again on a terminal. Elsewhere tables are plain text, once."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from forgeyard_api.main import one_line

if TYPE_CHECKING:
    from rich.table import Table

Rows = Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class Shown:
    """A table's head and rows, and a line below it."""

    head: tuple[str, ...]
    rows: Rows
    below: str = ""


def on_terminal() -> bool:
    """Whether stdout can be drawn on."""
    return sys.stdout.isatty() and os.environ.get("TERM") != "dumb"


async def keep_drawing(look: Callable[[], Awaitable[Shown]], interval: float) -> None:
    """Draw what `look` finds, every `interval` seconds, until cancelled."""
    from rich.console import Console
    from rich.live import Live

    with Live(console=Console(), screen=True, auto_refresh=False) as live:
        while True:
            live.update(_drawn(await look()), refresh=True)
            await asyncio.sleep(interval)


def _drawn(shown: Shown) -> Table:
    from rich.table import Table
    from rich.text import Text

    # Text, never a plain string: square brackets in a job's name are no markup of ours.
    table = Table(*shown.head, box=None, expand=False, caption=Text(shown.below), caption_justify="left")
    for row in shown.rows:
        table.add_row(*(Text(one_line(cell) or "-", overflow="ellipsis", no_wrap=True) for cell in row))
    return table
