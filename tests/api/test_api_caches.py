"""Caches from the command line: flags over the job file, who is trusted, what the summary and the result say, gc."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.kernel
Run = Callable[..., "subprocess.CompletedProcess[str]"]
CACHE = "--cache=pip=/home/forgeyard/.cache/pip"


@pytest.fixture(scope="module")
def state() -> Iterator[Path]:
    """One state directory for all tests here."""
    path = Path(tempfile.mkdtemp(prefix="fy-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def forgeyard(state: Path, tmp_path: Path, require_tool: Callable[[str], str]) -> Run:
    """Run a command line in an empty directory, with the configuration in ``config.toml`` there as the user's."""
    require_tool("runc")
    shutil.rmtree(state / "caches", ignore_errors=True)
    (tmp_path / "forgeyard").mkdir()
    (tmp_path / "work").mkdir()
    environment = os.environ | {"FORGEYARD_STATE_DIR": str(state), "XDG_CONFIG_HOME": str(tmp_path)}

    def call(*args: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "forgeyard_api", *args],
            env=environment,
            cwd=tmp_path / "work",
            capture_output=True,
            timeout=50,
            check=False,
            text=True,
        )

    return call


def write(*flags: str) -> tuple[str, ...]:
    """A command line that fills the cache."""
    return ("run", CACHE, *flags, "--", "sh", "-c", "cat ~/.cache/pip/f; echo $$ > ~/.cache/pip/f; :")


def test_flags_summary_and_result(forgeyard: Run) -> None:
    """A cache by flag; hit, saved and impure are said to people and to programs."""
    first = forgeyard(*write("--result=r.json"))
    assert first.returncode == 0
    assert "  cache     pip: miss, saved\n" in first.stderr
    second = forgeyard(*write("--result=-", "-q"))
    found = json.loads(second.stdout.splitlines()[-1])
    (cache,) = found["caches"]
    assert (cache["key"], cache["mode"], cache["hit"], cache["saved"]) == ("pip", "rw", True, True)
    assert "cache pip rw" in found["provenance"]["impure"]


def test_an_untrusted_run_and_another_tenant(forgeyard: Run) -> None:
    """`--untrusted` reads and does not write; `--tenant` sees its own."""
    forgeyard(*write())
    fork = forgeyard(*write("--untrusted"))
    assert (fork.returncode, len(fork.stdout.splitlines())) == (0, 1)
    assert "hit, not saved: an untrusted job only reads what trusted jobs share" in fork.stderr
    assert forgeyard(*write("--tenant=b")).stdout == ""


def test_a_job_file_and_a_flag(forgeyard: Run, tmp_path: Path) -> None:
    """The flag takes the place of the file's cache of that key, and adds others."""
    (tmp_path / "work" / "job.yaml").write_text(
        "version: 1\nrootfs: host\ncaches: [{key: pip, path: /opt/a}, {key: b, path: /opt/b}]\n"
        "steps: [{run: 'ls -d /opt/a ~/.cache/pip /opt/b; :'}]\n"
    )
    ended = forgeyard("run", CACHE + ":ro", "job.yaml")
    assert ended.stdout.splitlines() == ["/home/forgeyard/.cache/pip", "/opt/b"]


@pytest.mark.parametrize("flag", ["--cache=x", "--cache=k=/proc", "--cache==/c", "--cache=k=/c:rx/../.."])
def test_a_flag_that_can_not_be_used(forgeyard: Run, flag: str) -> None:
    """Exit 2, one line, by the flag's name."""
    ended = forgeyard("run", flag, "--", "true")
    assert ended.returncode == 2
    assert ended.stderr.startswith("forgeyard: --cache ")


def test_a_profile_that_takes_none(forgeyard: Run) -> None:
    """125, before anything is made."""
    ended = forgeyard("run", "--profile=release", CACHE, "--", "true")
    assert ended.returncode in (2, 125)
    assert "profile release takes nothing from earlier jobs" in ended.stderr


def test_gc_takes_what_was_kept_for_too_long(forgeyard: Run, state: Path, tmp_path: Path) -> None:
    """By the configuration's retention; without one it stays."""
    forgeyard(*write())
    (entry,) = (state / "caches" / "entries").iterdir()
    os.utime(entry / "entry.json", (1, 1))
    assert forgeyard("gc").returncode == 0
    assert entry.exists()
    (tmp_path / "forgeyard" / "config.toml").write_text("[retention]\ncaches = '24h'\n")
    assert forgeyard("gc").returncode == 0
    assert not entry.exists()


def test_config_show_has_what_is_kept(forgeyard: Run, tmp_path: Path) -> None:
    """Each bound with its default."""
    (tmp_path / "forgeyard" / "config.toml").write_text("[watermarks]\ngc_below = '15%'\n")
    shown = json.loads(forgeyard("config", "show", "--json").stdout)
    assert shown["watermarks.gc_below"] == "15%"
    assert shown["watermarks.refuse_below"] == "512 MiB or 2%"
    assert (shown["retention.images"], shown["caches.key_size"]) == (None, "5 GiB")


def test_a_generated_bundle_has_no_caches(forgeyard: Run) -> None:
    """Refused, instead of a bundle that lacks what was asked for."""
    ended = forgeyard("bundle", "generate", "--to", "b", CACHE, "--", "true")
    assert ended.returncode in (2, 125)
    assert "take caches out" in ended.stderr
