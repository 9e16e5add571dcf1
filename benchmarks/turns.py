"""Ways to do the same work, measured in turns, so that what else the machine does meets all of them alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

Work = Callable[[], Awaitable[None]]


@dataclass
class Measured:
    """Milliseconds of one way to do it."""

    name: str
    work: Work
    samples: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Of the samples."""
        return statistics.median(self.samples)

    @property
    def spread(self) -> str:
        """The middle half of the samples."""
        low, _, high = statistics.quantiles(self.samples, n=4) if len(self.samples) > 1 else self.samples * 3
        return f"{low:.1f}..{high:.1f}"


async def in_turns(ways: Sequence[Measured], samples: int) -> None:
    """One of each, again and again; two rounds to warm up."""
    for sample in range(-2, samples):
        for way in ways:
            clock = time.perf_counter()
            await way.work()
            if sample >= 0:
                way.samples.append((time.perf_counter() - clock) * 1000)
    for way in ways:
        print(f"  {way.name:44} {way.median:9.1f} ms   {way.spread}", flush=True)


def ratio(name: str, over: Measured, under: Measured, target: str) -> None:
    """One line of the verdict."""
    print(f"  {name:44} {over.median / under.median:9.2f}      (to reach: {target})", flush=True)
