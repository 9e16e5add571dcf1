"""Each target of fuzz_targets.py for a few seconds, from the seeds beside it, or FORGEYARD_FUZZ_SECONDS each."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SECONDS = int(os.environ.get("FORGEYARD_FUZZ_SECONDS", "5"))
TARGETS = ("reference", "challenges", "manifest", "config", "gzip", "zstd", "messages", "layer")


@pytest.mark.kernel
@pytest.mark.timeout(SECONDS + 55)
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_errors_of_ours(target: str, tmp_path: Path) -> None:
    """Whatever a target is given it answers, or refuses with an error of ours; nothing outside its tree changes."""
    pytest.importorskip("atheris")
    found, seeds = tmp_path / "found", HERE / "corpus" / target
    found.mkdir()
    assert any(seeds.iterdir())
    command = [sys.executable, str(HERE / "fuzz_targets.py"), target, str(found), str(seeds)]
    options = [f"-max_total_time={SECONDS}", "-max_len=16384", "-timeout=20", "-rss_limit_mb=2048"]
    run = subprocess.run(
        [*command, *options, f"-artifact_prefix={tmp_path}/"],
        capture_output=True,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(tmp_path)},
        timeout=SECONDS + 50,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    done = re.search(r"Done (\d+) runs", run.stderr)
    assert done, run.stderr[-2000:]
    assert int(done[1]) > 50
