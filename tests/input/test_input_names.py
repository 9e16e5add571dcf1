"""Ids and names of the caller's own, in any script and of any length: data, never part of a host path (C71)."""

from __future__ import annotations

import asyncio
import os
import re
from pathlib import Path

import pytest
from jobs import run

from forgeyard_api.sandbox_commands import MAX_CELL, ps
from forgeyard_api.summary import summary_lines
from forgeyard_executor import ExecutionResult, Executor, Job, Outcome, Step
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.request import PreparedWorkspace, request_from_job

pytestmark = pytest.mark.kernel

NAMES = [
    "a" * 64,
    "a" * 65,
    "a" * 255,
    "a" * 63 + "b",
    "a" * 63 + "c",
    "A" * 64,
    "a/b:c d",
    "a-b-c-d",
    "../x",
    "../../../../etc/passwd",
    "/etc/passwd",
    ".",
    "..",
    "-rf",
    ".hidden",
    "日本",
    "\N{PILE OF POO}",
    "\u202egnp.exe",
    "trailing\n",
    "trailing",
    "\x1b[31mred\x07",
    "nul\0nul",
    "\udcff",
    chr(0xD800),
    "$(reboot)`reboot`",
    "%s%n{0}",
    "x" * 100_000,
]
# What stands on the host for an attempt: ids of ours, slots, and the fixed names of our layout.
OURS = re.compile(r"[a-z0-9][a-z0-9_.-]{0,63}\Z|\.[a-z0-9.-]{1,15}\Z")


def names_on_host(state: Path, sandbox: str) -> set[str]:
    """Every name that the executor gave to something of its attempts."""
    places = ["sandboxes", f"sandboxes/{sandbox}", f"sandboxes/{sandbox}/mnt", f"sandboxes/{sandbox}/mnt/files"]
    places += [f"sandboxes/{sandbox}/mnt/files/{name}" for name in ("ctl", "bundle", "runtime")]
    places += [f"sandboxes/{sandbox}/scratch", "ledger", "spool", "executors"]
    places += [f"spool/{name}" for name in os.listdir(state / "spool")]
    found = {name for place in places if (state / place).is_dir() for name in os.listdir(state / place)}
    for root, directories, _ in os.walk("/sys/fs/cgroup"):
        found |= {name for name in directories if "/forgeyard/" in f"{root}/{name}"}
    return found


def test_names_are_data(shared_state: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """None stands in a path of an attempt that was made with it, none meets another, each is listed as given."""

    async def main() -> None:
        async with Executor.open(shared_state) as executor:
            sandboxes: set[str] = set()
            for name in NAMES:
                job = Job(rootfs="host", name=name, steps=(Step("/bin/true", name=name),))
                request = request_from_job(job, context=AttemptContext(name), workspace=PreparedWorkspace())
                prepared = await executor.prepare(request)
                sandbox = prepared.sandbox_id.value
                for found in names_on_host(shared_state, sandbox):
                    assert OURS.match(found), found
                (info,) = (item for item in executor.list_sandboxes() if item.sandbox_id == sandbox)
                assert (info.attempt_id, info.name) == (name, name)
                assert ps(shared_state) == 0
                assert_readable(capsys.readouterr().out)
                await executor.discard(prepared)
                sandboxes.add(sandbox)
            assert len(sandboxes) == len(NAMES)

    asyncio.run(main())


@pytest.mark.parametrize("name", ["../x", "日本", "nul\0nul", chr(0xD800), "trailing\n", "x" * 100_000], ids=repr)
def test_a_job_with_such_names_runs(shared_state: Path, name: str) -> None:
    """The names come back in the result exactly; the summary shows them on one line."""
    assert_named(run(shared_state, Job(rootfs="host", name=name, steps=(Step("/bin/true", name=name),)))[0], name)
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(Step("/bin/true"),)), attempt_id=name)
    assert result.attempt_id == name


def assert_named(result: ExecutionResult, name: str) -> None:
    """`name` in every place of a result that has it, and in none that steers a terminal."""
    assert (result.outcome, result.name, result.steps[0].name) == (Outcome.SUCCEEDED, name, name)
    for _, line in summary_lines(result):
        assert line.isprintable()


def assert_readable(table: str) -> None:
    """One line per row, bounded, with nothing that steers a terminal."""
    for line in table.splitlines():
        assert line.isprintable()
        assert len(line) < 3 * MAX_CELL + 80
        line.encode()


@pytest.mark.parametrize("name", ["two\nlines", "日本\x1b]0;x\x07"])
def test_step_names_in_a_failure(shared_state: Path, name: str) -> None:
    """The message that names a failed step stays one line in the summary, whatever the step is called."""
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(Step("/bin/false", name=name),)))
    assert result.outcome is Outcome.FAILED
    for _, line in summary_lines(result):
        assert line.isprintable()


def test_one_id_twice_is_two_attempts(shared_state: Path) -> None:
    """The same id, running at the same time: nothing of one is the other's."""

    async def main() -> None:
        async with Executor.open(shared_state) as executor:
            job = Job(rootfs="host", steps=())
            async with executor.run(job, attempt_id="same") as one, executor.run(job, attempt_id="same") as two:
                assert one.sandbox_id != two.sandbox_id
                for execution in (one, two):
                    await execution.exec(Step("/bin/sh", "-c", "echo $$ > /work/build/mark; ! test -e /work/build/x"))
                    execution.finish()
                for execution in (one, two):
                    assert (await execution.wait()).outcome is Outcome.SUCCEEDED

    asyncio.run(main())


def test_the_host_name_is_a_label() -> None:
    """At most 63 characters, no hyphen at an end, and another one for another attempt."""
    names = {SandboxId.mint().hostname for _ in range(200)}
    assert len(names) == 200
    assert all(re.fullmatch(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?", name) for name in names)
