"""The summary on stderr: what came of the job, why, and what to do about it. Words first, numbers from evidence."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Final

from forgeyard_api.main import one_line
from forgeyard_model.network import NetworkEvidence
from forgeyard_model.result import ExecutionOutcome, ExecutionResult, ServiceResult, ServiceState, StepResult
from forgeyard_model.units import format_duration, format_size

_GOOD: Final = (ExecutionOutcome.SUCCEEDED,)
_LABEL_WIDTH: Final = 9
MAX_STEPS: Final = 20
MAX_NOTES: Final = 20
MAX_LOG: Final = 10
MAX_REFUSED: Final = 10

Line = tuple[str, str]
"""A style's name and the text."""


def show_summary(result: ExecutionResult) -> None:
    """Write the summary of `result` to stderr; in colour on a terminal that has it."""
    lines = list(summary_lines(result))
    if not _is_terminal():
        sys.stderr.write("".join(f"{text}\n" for _, text in lines))
        sys.stderr.flush()
        return
    from rich.console import Console
    from rich.text import Text

    # rich itself leaves colour out for NO_COLOR; Text, so that a name like [red] stays a name.
    console = Console(stderr=True, highlight=False, soft_wrap=True)
    for style, text in lines:
        console.print(Text(text, style=style))


def summary_lines(result: ExecutionResult) -> Iterator[Line]:
    """The summary without any terminal in mind."""
    style = "green" if result.outcome in _GOOD else "bold red"
    yield style, f"forgeyard: {one_line(_headline(result))}"
    if len(result.steps) > 1 or result.outcome not in _GOOD:
        yield from (("", line) for line in _steps(result))
    if result.startup:
        yield "dim", _labelled("time", _times(result))
    for label, text in _evidence(result):
        yield "dim", _labelled(label, text)
    for service in result.services:
        yield from _service(service, failed=result.outcome not in _GOOD)
    if result.network is not None:
        yield from _network(result.network)
    for output in result.outputs:
        if output.missing and not output.optional:
            yield "red", _labelled("output", f"{output.path} is missing")
    for cache in result.caches:
        yield "dim", _labelled("cache", str(cache).removeprefix("cache "))
        for note in cache.notes:
            yield "dim", _labelled("cache", note)
    for note in _notes(result):
        yield "yellow", _labelled("note", note)
    cure = cure_of(result)
    if cure:
        yield "bold", _labelled("cure", cure)


def cure_of(result: ExecutionResult) -> str:
    """What the user can change, when the evidence says so."""
    evidence = result.evidence
    if result.outcome is ExecutionOutcome.OUT_OF_MEMORY:
        peak = _of(evidence.memory.peak, evidence.memory.limit)
        tmpfs = evidence.memory.tmpfs
        share = f", {format_size(tmpfs)} of it in tmpfs" if tmpfs else ""
        return f"peak {peak}{share}: ask for more with resources.memory or --memory"
    if result.outcome is ExecutionOutcome.RESOURCE_EXCEEDED:
        if evidence.pids.refused:
            return f"the limit of {evidence.pids.limit} processes was met: ask for more with resources.pids or --pids"
        if evidence.disk.full:
            return f"the disk was full ({_of(evidence.disk.peak, evidence.disk.limit)}): resources.disk or --disk"
    if result.outcome is ExecutionOutcome.TIMED_OUT:
        return "give it more time with timeout or --timeout, or find what hangs"
    return ""


def _headline(result: ExecutionResult) -> str:
    words = result.outcome.value.replace("_", " ")
    elapsed = (result.finished_at - result.started_at).total_seconds()
    text = f"{words} in {format_duration(max(elapsed, 0.0))}"
    if result.message and result.message != words:
        text += f": {result.message}"
    # The message often ends with the deciding step's exit, which is then the whole program's.
    told = not result.exit_code or text.endswith(f"exit {result.exit_code}")
    return text if told else f"{text} (exit {result.exit_code})"


def _steps(result: ExecutionResult) -> Iterator[str]:
    shown = result.steps
    if len(shown) > MAX_STEPS:
        # The steps that went wrong are what a reader looks for.
        shown = tuple(step for step in shown if not step.skipped and (step.exit is None or not step.exit.ok))
        shown = shown[:MAX_STEPS]
    for step in shown:
        yield _labelled("step", f"{one_line(step.name)}  {_step_end(step)}")
    if len(shown) < len(result.steps):
        yield _labelled("step", f"{len(result.steps) - len(shown)} more")


def _step_end(step: StepResult) -> str:
    if step.skipped:
        return "skipped"
    parts = [str(step.exit) if step.exit is not None else one_line(step.error) or "no exit status"]
    if step.exit is not None and step.error:
        parts.append(one_line(step.error))
    if step.duration is not None:
        parts.append(format_duration(step.duration))
    if step.masked:
        parts.append("continued on error")
    if step.leftovers:
        parts.append(f"{step.leftovers} left-over processes killed")
    return "  ".join(parts)


def _times(result: ExecutionResult) -> str:
    phases = [f"{one_line(name)} {format_duration(seconds)}" for name, seconds in result.startup.items()]
    steps = sum(step.duration or 0.0 for step in result.steps)
    return ", ".join([*phases, f"steps {format_duration(steps)}"])


def _evidence(result: ExecutionResult) -> Iterator[Line]:
    memory, pids, disk = result.evidence.memory, result.evidence.pids, result.evidence.disk
    if memory.peak is not None:
        kills = f", {memory.oom_kills} killed for want of memory" if memory.oom_kills else ""
        yield "memory", f"peak {_of(memory.peak, memory.limit)}{kills}"
    if pids.refused:
        yield "pids", f"limit {pids.limit}, {pids.refused} refused"
    if disk.full:
        yield "disk", f"full: {_of(disk.peak, disk.limit)}"
    if result.output.log_truncated:
        yield "output", f"{format_size(result.output.dropped_bytes)} in the middle were not kept"


_FINE: Final = (ServiceState.READY, ServiceState.UNPROVEN, ServiceState.COMPLETED, ServiceState.STOPPED)


def _service(service: ServiceResult, *, failed: bool) -> Iterator[Line]:
    """One line, and the last lines of its output where it may be why the job failed."""
    bad = service.state not in _FINE
    parts = [service.state.value.replace("_", " ")]
    if service.ready_after is not None:
        parts[0] += f" after {format_duration(service.ready_after)}"
    if bad:
        parts.append(service.message or service.last_probe)
    elif service.evidence.memory.peak is not None:
        parts.append(f"memory peak {_of(service.evidence.memory.peak, service.evidence.memory.limit)}")
    style = "red" if bad and failed else "dim"
    yield style, _labelled("service", f"{service.name}  {'  '.join(part for part in parts if part)}")
    if bad and failed:
        yield from (("dim", _labelled("", line)) for line in service.log_tail[-MAX_LOG:])


def _network(network: NetworkEvidence) -> Iterator[Line]:
    """What was refused: the reason why a step could not reach something."""
    for row in network.refused[:MAX_REFUSED]:
        where = f"{row.name or row.address}:{row.port}" if row.port else row.name or row.address
        yield "yellow", _labelled("network", f"{where} {row.protocol} was refused {_times_of(row.count)}")
    refused = [row for row in network.dns if row.verdict != "answered"]
    for question in refused[:MAX_REFUSED]:
        yield "yellow", _labelled("network", f"name {question.name} {question.verdict} {_times_of(question.count)}")
    for fetch in [row for row in network.fetches if row.verdict != "allowed"][:MAX_REFUSED]:
        where = f"{fetch.host}:{fetch.port} {fetch.verdict} {_times_of(fetch.count)}"
        yield "yellow", _labelled("network", f"fetch {where}: {fetch.reason}")


def _times_of(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _notes(result: ExecutionResult) -> Iterator[str]:
    yield from result.notes[:MAX_NOTES]
    if len(result.notes) > MAX_NOTES:
        yield f"{len(result.notes) - MAX_NOTES} more notes stand in the result"
    if result.provenance.stricter:
        yield f"{result.provenance.runtime} is stricter than the bundle: see provenance.stricter in the result"
    if result.output.spool_error:
        yield f"output: {result.output.spool_error}"


def _of(peak: int | None, limit: int | None) -> str:
    shown = "unknown" if peak is None else format_size(peak)
    return shown if limit is None else f"{shown} of {format_size(limit)}"


def _labelled(label: str, text: str) -> str:
    return f"  {label:<{_LABEL_WIDTH}} {one_line(text)}"


def _is_terminal() -> bool:
    return sys.stderr.isatty() and os.environ.get("TERM") != "dumb"
