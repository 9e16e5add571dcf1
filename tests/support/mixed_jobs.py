"""Jobs that end in every way, with networks and services among them, several at a time."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

from jobs import cleaned, collect, sh

from forgeyard_executor import Executor, Job, Limits, Network, Outcome, Timeouts
from forgeyard_model.services import HealthCheck, ServiceSpec, TcpProbe

EVERY_SERVICE, EVERY_NETWORK = 10, 5
USER = "1000:1000"
_LEAVES_A_CHILD = "setsid sleep 600 & echo out"
_IGNORES_TERM = "trap '' TERM; setsid sleep 600 & echo out; sleep 600"
_HTTPD = "mkdir -p /tmp/www; echo web > /tmp/www/index.html; exec httpd -f -p 80 -h /tmp/www"


class Ending(Enum):
    """How a job is to end: the script of its step, and the outcome."""

    SUCCESS = (_LEAVES_A_CHILD, Outcome.SUCCEEDED)
    FAILURE = (f"{_LEAVES_A_CHILD}; exit 3", Outcome.FAILED)
    CANCEL = (_IGNORES_TERM, Outcome.CANCELLED)
    TIMEOUT = (_IGNORES_TERM, Outcome.TIMED_OUT)
    OOM = ("setsid sleep 600 & tail /dev/zero", Outcome.OUT_OF_MEMORY)

    @property
    def script(self) -> str:
        """For sh."""
        return self.value[0]

    @property
    def outcome(self) -> Outcome:
        """What its result has to say."""
        return self.value[1]


@dataclass(frozen=True, slots=True)
class Mixed:
    """One of them.

    :param moment: seconds after which it is cancelled; None: once it has said something.
    """

    number: int
    ending: Ending
    root: dict[str, str]
    service: bool
    network: bool
    moment: float | None

    def job(self, image: str) -> Job:
        """As a request."""
        health = HealthCheck(TcpProbe(80), interval=0.05, retries=10_000)
        web = ServiceSpec(
            "web", image=image, entrypoint=(), command=("/bin/sh", "-c", _HTTPD), user="1000", health=health
        )
        return Job(
            **self.root,
            steps=(sh(self.ending.script),),
            user=USER if "image" in self.root else None,
            services=(web,) if self.service else (),
            network=Network.allow() if self.network else Network.deny(),
            limits=Limits(memory="32MiB", pids=64, wall_time="200ms" if self.ending is Ending.TIMEOUT else None),
            timeouts=Timeouts(grace=0.1),
        )


def mixed(count: int, image: str, dice: random.Random) -> Iterator[Mixed]:
    """`count` jobs: every ending as often as the others, in another order each time."""
    endings: list[Ending] = []
    for number in range(count):
        endings = endings or dice.sample(list(Ending), len(Ending))
        yield Mixed(
            number,
            endings.pop(),
            {"rootfs": "host"} if number % 2 else {"image": image},
            service=number % EVERY_SERVICE == 3,
            network=number % EVERY_NETWORK == 0,
            moment=dice.random() * 0.3 if dice.random() < 0.5 else None,
        )


async def run_all(executor: Executor, jobs: list[Mixed], image: str, at_once: int) -> list[str]:
    """Run all of them, each to the end that it is to have; the sandboxes that they had."""
    gate, sandboxes = asyncio.Semaphore(at_once), list[str]()

    async def one(mixed: Mixed) -> None:
        async with gate:
            sandboxes.append(await _run(executor, mixed, image))

    async with asyncio.TaskGroup() as group:
        for mixed in jobs:
            group.create_task(one(mixed))
    return sandboxes


async def _run(executor: Executor, mixed: Mixed, image: str) -> str:
    async with executor.run(mixed.job(image)) as execution:
        # Whose output nobody reads is a third of them.
        reading = asyncio.ensure_future(collect(execution)) if mixed.number % 3 else None
        if mixed.ending is Ending.CANCEL:
            await _moment_of(execution, mixed)
            await execution.cancel(kill=mixed.number % 4 < 2)
        result = cleaned(await execution.wait())
        if reading is not None:
            await reading
    assert result.outcome is mixed.ending.outcome, (mixed, result)
    return str(execution.sandbox_id)


async def _moment_of(execution: Any, mixed: Mixed) -> None:
    if mixed.moment is not None:
        await asyncio.sleep(mixed.moment)
        return
    async for _ in execution.output():
        return
