"""Output as a weapon against the one who reads it: bytes stay exact in the spool, and steer no terminal of ours."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_api.sandbox_commands import table
from forgeyard_api.summary import summary_lines
from forgeyard_executor import Executor, Job, Outcome, Step

pytestmark = pytest.mark.kernel

# Title, clear screen, clipboard, hyperlink, answerback, C1, reverse text, a mark of a log format, NUL, broken UTF-8.
ESCAPES = {
    "title": b"\x1b]0;owned\x07",
    "clear": b"\x1b[2J\x1b[H",
    "clipboard": b"\x1b]52;c;cm0gLXJmIC8=\x07",
    "link": b"\x1b]8;;http://192.0.2.1/\x1b\\click\x1b]8;;\x1b\\",
    "answerback": b"\x05\x1b[c\x1b[6n",
    "c1": b"\x9b31m\xc2\x9b31m",
    "right to left": "\u202egpj.exe\u2066".encode(),
    "workflow command": b"\n::set-env name=PATH::/tmp\n##[error]\n",
    "nul": b"\0\0\0",
    "broken": b"\xff\xfe\xf0\x28\x8c\x28",
    "carriage return": b"real\rfake",
}


@pytest.mark.parametrize("name", ESCAPES)
def test_bytes_reach_the_reader_exactly(shared_state: Path, name: str) -> None:
    """Nothing is added to, taken from or understood in a job's bytes, on either stream."""
    step = Step("/bin/sh", "-c", "cat > /work/tmp/x; cat /work/tmp/x; cat /work/tmp/x >&2", stdin=ESCAPES[name])
    result, out, err = run(shared_state, Job(rootfs="host", steps=(step,)))
    assert result.outcome is Outcome.SUCCEEDED
    assert out == err == ESCAPES[name]


@pytest.mark.parametrize(
    "name", [name for name, data in ESCAPES.items() if data.decode(errors="replace").isascii() and b"\0" not in data]
)
def test_names_do_not_steer_a_terminal(shared_state: Path, name: str) -> None:
    """A step, a job and an attempt named with escapes: the summary and the table of attempts show none."""
    word = ESCAPES[name].decode()

    async def main() -> None:
        job = Job(rootfs="host", name=word, steps=(sh("echo up; exit 3", name=word),))
        async with Executor.open(shared_state) as executor, executor.run(job, attempt_id=word) as execution:
            listed = table(("A", "B"), [(item.name, item.attempt_id) for item in executor.list_sandboxes()])
            result = await execution.wait()
        for text in (*listed.splitlines(), *(line for _, line in summary_lines(result))):
            assert text.isprintable(), text

    asyncio.run(main())


def test_message_of_a_program_that_is_missing(shared_state: Path) -> None:
    """A program's name with escapes is quoted in the message without them."""
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(Step("/nosuch\x1b[2J\x07"),)))
    assert result.exit_code == 127
    for _, text in summary_lines(result):
        assert text.isprintable(), text
