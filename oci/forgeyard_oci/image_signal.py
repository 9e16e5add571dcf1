"""The signal an image wants to be stopped with (image-spec config, StopSignal)."""

from __future__ import annotations

import re
import signal
from typing import Final

_REAL_TIME: Final = re.compile(r"RTM(IN|AX)(?:([+-])(\d{1,2}))?\Z")
_LAST: Final = 64


def parse_stop_signal(text: str) -> int | None:
    """Number of a signal written as SIGQUIT, QUIT, 3 or SIGRTMIN+3; None for what is none."""
    name = text.strip().upper().removeprefix("SIG")
    if name.isascii() and name.isdigit():
        number = int(name[:3])
    elif match := _REAL_TIME.match(name):
        offset = int(match[3] or 0) * (-1 if match[2] == "-" else 1)
        number = (signal.SIGRTMIN if match[1] == "IN" else signal.SIGRTMAX) + offset
    else:
        number = getattr(signal, f"SIG{name}", 0) if name.isalnum() else 0
    return int(number) if 1 <= number <= _LAST else None
