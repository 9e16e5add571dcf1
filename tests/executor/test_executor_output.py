"""Bytes in and out: exact, in order, capped."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_executor import (
    Executor,
    Job,
    Outcome,
    Step,
)

pytestmark = pytest.mark.kernel


def test_binary_output_is_exact(shared_state: Path) -> None:
    """Bytes that are no text, NULs and long lines come out as they went in (C35, C36)."""
    script = r"printf '\376\377\000'; head -c 3000000 /dev/zero; printf '\303' >&2; printf '\244' >&2"
    _, out, err = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    assert out == b"\xfe\xff\0" + bytes(3000000)
    assert err == "ä".encode()


def test_order_and_merge(shared_state: Path) -> None:
    """Within a stream order is exact; merged output is one exact stream (C33)."""
    script = "awk 'BEGIN { for (i = 0; i < 1000; i++) { print i; fflush(); print i > \"/dev/stderr\" } }'"
    _, out, err = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    assert out == err == b"".join(b"%d\n" % i for i in range(1000))
    _, out, err = run(shared_state, Job(rootfs="host", steps=(sh(script),), merge_output=True))
    assert err == b""
    assert out == b"".join(b"%d\n%d\n" % (i, i) for i in range(1000))


@pytest.mark.parametrize(("stdin", "out"), [(None, b""), (b"", b""), (b"a", b"a"), (bytes(200000), bytes(200000))])
def test_stdin(shared_state: Path, stdin: bytes | None, out: bytes) -> None:
    """No stdin is an immediate end of file; given bytes arrive whole (C37)."""
    result, got, _ = run(shared_state, Job(rootfs="host", steps=(Step("cat", stdin=stdin),)))
    assert got == out
    assert result.outcome is Outcome.SUCCEEDED


def test_output_cap_keeps_head_and_tail(shared_state: Path) -> None:
    """Above the cap the middle is dropped, counted, and the job goes on. A reader that came late sees the gap."""

    async def main() -> None:
        job = Job(rootfs="host", steps=(sh("echo first; head -c 5000000 /dev/zero; echo last"),), output_cap=1 << 20)
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            result = await execution.wait()
            chunks = [chunk async for chunk in execution.output()]
        out = b"".join(chunk.data for chunk in chunks)
        assert result.outcome is Outcome.SUCCEEDED
        assert result.output.log_truncated
        assert result.output.stdout_bytes == 5000011
        assert len(out) <= 1 << 20
        assert len(out) + result.output.dropped_bytes == 5000011
        assert sum(chunk.dropped_before for chunk in chunks) == result.output.dropped_bytes
        assert out.startswith(b"first\n")
        assert out.endswith(b"last\n")

    asyncio.run(main())
