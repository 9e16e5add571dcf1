"""Whoever listens to events hears what a host can do no more, and what it can do again."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from served import ALICE, table_over, until, within

from forgeyard_api.serve.attempt_types import EventKind
from forgeyard_api.serve.capability_news import tell_of_changes, words
from forgeyard_executor.testing import FakeExecutor
from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe


def with_disk(found: ExecutorCapabilities, *, works: bool) -> ExecutorCapabilities:
    """`found`, with a probe of disk limits that saw that."""
    return replace(found, probes=(Probe(Feature.DISK_LIMIT, works),), probed_at=None)


def test_changes_are_events(tmp_path: Path) -> None:
    """Each with what went or came back; what there was from the beginning is none."""

    async def body() -> None:
        executor = FakeExecutor()
        known = await executor.capabilities()
        await executor.become_capable_of(with_disk(known, works=True))
        async with table_over(tmp_path, executor) as table:
            heard = table.events(ALICE)
            first = asyncio.ensure_future(anext(heard))
            await until(lambda: table.events_hub.listened)
            telling = asyncio.ensure_future(tell_of_changes(table, "fake"))
            works = True
            while not first.done():  # until the watch has begun there is no change to tell of
                works = not works
                await executor.become_capable_of(with_disk(known, works=works))
                await asyncio.wait((first,), timeout=0.1)
            event = await first
            assert event.kind is EventKind.CAPABILITIES
            assert event.message in ("fake: no more disk_limit", "fake: now disk_limit")
            telling.cancel()
            await asyncio.wait((telling,))
            await heard.aclose()

    within(body())


def test_only_what_works_counts() -> None:
    """Other words of a probe are no change, nor is the first thing that is known."""

    async def known() -> ExecutorCapabilities:
        return await FakeExecutor().capabilities()

    found = within(known())
    works = with_disk(found, works=True)
    other = replace(works, probes=(replace(works.probes[0], details="elsewhere"),))
    assert words(None, works) == words(works, other) == ""
    assert words(works, with_disk(found, works=False)) == "no more disk_limit"
