"""What this executor knows of its host: from probes, kept for a while, renewed on a timer and when something fails."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Final

from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe

log: Final = logging.getLogger("forgeyard.executor")
audit: Final = logging.getLogger("forgeyard.audit")

TTL: Final = 45.0
"""Seconds that a result is good for: with the probing itself well below the minute in which a loss must be noticed."""

RENEW_AT: Final = 0.8
"""Part of the TTL after which the timer probes again, so that there is always a result that is good."""

SETTLED: Final = 5.0
"""Seconds an executor has to be open before it probes unasked: one that runs a single job never pays for it."""

LONG_LIVED: Final = 60.0
"""Seconds after which an executor that nobody has asked yet begins to probe by the timer.

A probing takes 0.2 s of one CPU, and 0.7 s in all: half a percent of one CPU in the long run.
"""

DOUBT_PAUSE: Final = 2.0
"""Seconds between two probings that failed attempts have asked for."""


class CapabilityCache:
    """The latest result of `probe`, and the one task that may be getting the next."""

    def __init__(self, probe: Callable[[], Awaitable[ExecutorCapabilities]], *, ttl: float = TTL) -> None:
        self._probe = probe
        self._ttl = ttl
        self._opened = time.monotonic()
        self._asked = -DOUBT_PAUSE
        self._found: ExecutorCapabilities | None = None
        self._at = 0.0
        self._tried = 0.0
        self._failure = ""
        self._task: asyncio.Task[ExecutorCapabilities] | None = None
        self._news = asyncio.Condition()

    async def get(self, *, renew: bool = False) -> ExecutorCapabilities:
        """A result that is not older than the TTL, or is `renew`-ed; waits for the probes when there is none.

        :raises ForgeyardError: when probing itself is not possible.
        """
        if renew or self._found is None or self._age() > self._ttl:
            return await asyncio.shield(self._refresh())
        return self._found

    async def changes(self) -> AsyncGenerator[ExecutorCapabilities, None]:
        """A result, and each one that differs from the one before: looked for by the TTL, and when somebody doubts.

        :raises ForgeyardError: when probing itself is not possible.
        """
        seen = await self.get()
        yield seen
        while True:
            latest = self._found
            if latest is not None and _differ(latest, seen):
                seen = latest
                yield seen
                continue
            try:
                async with asyncio.timeout(self._ttl), self._news:
                    await self._news.wait_for(lambda latest=latest: self._found is not latest)  # type: ignore[misc]  # bound here
            except TimeoutError:  # nobody else has looked
                await asyncio.wait((self._refresh(),))

    @asynccontextmanager
    async def kept_fresh(self) -> AsyncIterator[None]:
        """Renew the result by a timer for the block, once there is one, or the executor has been open for long."""
        timer = asyncio.get_running_loop().create_task(self._keep_fresh(), name="forgeyard probes by time")
        try:
            yield
        finally:
            timer.cancel()
            await asyncio.wait((timer,))

    async def _keep_fresh(self) -> None:
        while True:
            if (seconds := self._due()) <= 0:
                await asyncio.wait((self._refresh(),))  # a failure is told by the probing itself
                continue
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds), self._news:
                    await self._news.wait()

    def _due(self) -> float:
        """Seconds until the timer probes."""
        last = max(self._at, self._tried)
        due = last + self._ttl * RENEW_AT if last else self._opened + LONG_LIVED
        return due - time.monotonic()

    def known(self) -> ExecutorCapabilities | None:
        """A result that is still good, at once; None otherwise. An old one is renewed in the background."""
        if self._found is not None and self._age() <= self._ttl:
            return self._found
        if self._settled():
            self._refresh()
        return None

    def doubt(self) -> None:
        """An attempt failed or was refused, so that something may have changed: probe again in the background."""
        if self._settled() and time.monotonic() - max(self._asked, self._at) >= DOUBT_PAUSE:
            self._asked = time.monotonic()
            self._refresh()

    async def close(self) -> None:
        """Wait for the probes that run: they clean up after themselves."""
        if self._task is not None:
            await asyncio.wait((self._task,))

    def _settled(self) -> bool:
        return self._found is not None or time.monotonic() - self._opened >= SETTLED

    def _age(self) -> float:
        return time.monotonic() - self._at

    def _refresh(self) -> asyncio.Task[ExecutorCapabilities]:
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._renew(), name="forgeyard probes")
            self._task.add_done_callback(self._note_failure)
        return self._task

    async def _renew(self) -> ExecutorCapabilities:
        try:
            found = await self._probe()
        finally:
            self._tried = time.monotonic()
        if self._found is not None:
            _tell(self._found, found)
        self._found, self._at, self._failure = found, self._tried, ""
        async with self._news:
            self._news.notify_all()
        return found

    def _note_failure(self, task: asyncio.Task[ExecutorCapabilities]) -> None:
        """Loud when it is news: the timer tries again and again."""
        if task.cancelled() or (error := task.exception()) is None:
            return
        level = logging.DEBUG if str(error) == self._failure else logging.WARNING
        self._failure = str(error)
        log.log(level, "probing what this host can do failed: %s", error)


def _differ(one: ExecutorCapabilities, other: ExecutorCapabilities) -> bool:
    """Whether more has changed than the moment of the probes, and the words and numbers that they saw."""

    def claims(found: ExecutorCapabilities) -> ExecutorCapabilities:
        plain = tuple(replace(probe, details="", cure="") for probe in found.probes)
        return replace(found, probes=plain, probed_at=None)

    return claims(one) != claims(other)


def _tell(before: ExecutorCapabilities, now: ExecutorCapabilities) -> None:
    """Write down what this host no longer provides, and what it provides again."""
    for feature, lost, probe in changed(before, now):
        gone = f"no longer provides {feature.value}, and jobs that need it are refused: {probe.details}"
        message = f"this host {gone if lost else f'provides {feature.value} again'}"
        facts = {"event": f"capability_{'lost' if lost else 'back'}", "feature": feature.value, "runtime": now.runtime}
        level = logging.WARNING if lost else logging.INFO
        log.log(level, "%s", message)
        audit.log(level, "%s", message, extra={"audit": facts})


def changed(before: ExecutorCapabilities, now: ExecutorCapabilities) -> tuple[tuple[Feature, bool, Probe], ...]:
    """Features that were seen to work in one and not to work in the other: whether it was lost, and the latest probe.

    A probe that could not be carried out says nothing either way.
    """
    earlier = {probe.feature: probe.works for probe in before.probes if probe.seen}
    return tuple(
        (probe.feature, not probe.works, probe)
        for probe in now.probes
        if probe.seen and earlier.get(probe.feature, probe.works) is not probe.works
    )
