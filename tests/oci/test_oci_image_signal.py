"""An image's StopSignal: every way to write one, and what is none (C26)."""

from __future__ import annotations

import signal
from pathlib import Path

import build
import pytest

from forgeyard_oci.image_signal import parse_stop_signal
from forgeyard_oci.image_store import ImageStore


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("SIGQUIT", signal.SIGQUIT),
        ("quit", signal.SIGQUIT),
        ("3", 3),
        ("SIGRTMIN+3", signal.SIGRTMIN + 3),
        ("RTMAX-1", signal.SIGRTMAX - 1),
        *((text, None) for text in ("", "0", "65", "999999999999", "NOPE", "SIG", "_DFL", "RTMIN+90", "-3", "٣", "\0")),
    ],
)
def test_stop_signals(text: str, number: int | None) -> None:
    """Names with and without SIG, numbers, real-time signals; garbage is none."""
    assert parse_stop_signal(text) == number


@pytest.mark.kernel
@pytest.mark.parametrize(("text", "number", "noted"), [("SIGQUIT", 3, False), ("garbage", 15, True)])
def test_plan_carries_it(tmp_path: Path, text: str, number: int, noted: bool) -> None:
    """The plan of an image has its signal; garbage falls back to TERM, with a note."""
    writer = build.LayoutWriter(tmp_path / "layout")
    image = writer.image([build.tar([build.folder("etc")])], {"StopSignal": text})
    writer.finish(image)
    plan = ImageStore(tmp_path / "store").prepare(f"oci:{tmp_path}/layout@{image['digest']}", None, tmp_path)
    assert plan.stop_signal == number
    assert bool(plan.notes) == noted
