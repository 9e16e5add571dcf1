"""`forgeyard run --keep-on-failure` and `forgeyard kept`, with real jobs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from forgeyard_api.main import REFUSED, run
from forgeyard_executor import config_load

pytestmark = pytest.mark.kernel

Say = Callable[..., tuple[int, str, str]]


@pytest.fixture
def configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a text into the host's configuration."""

    def write(text: str) -> None:
        path = tmp_path / "config.toml"
        path.write_text(text)
        monkeypatch.setattr(config_load, "SYSTEM_FILE", path)
        monkeypatch.setenv("HOME", str(tmp_path))

    return write


@pytest.fixture
def forgeyard(state_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Say:
    """A command line, its exit code and its two streams."""
    monkeypatch.setenv("FORGEYARD_STATE_DIR", str(state_dir))
    capfd.readouterr()

    def call(*arguments: str) -> tuple[int, str, str]:
        code = run(arguments)
        out, err = capfd.readouterr()
        return code, out, err

    return call


def test_a_failed_workspace(configured: Callable[[str], None], forgeyard: Say, require_tool: object) -> None:
    """What the job wrote and said is there without its secrets, `ls` shows it, `rm` removes it."""
    configured('[serve]\nkeep_failed = "1h"\n')
    script = "echo $API_TOKEN | tee /work/build/log; echo kept > /work/build/plain; exit 3"
    code, _, err = forgeyard(*("run", "--keep-on-failure", "-e", "API_TOKEN=s3cret-value", "--", "sh", "-c", script))
    assert code == 3
    (found,) = json.loads(forgeyard("kept", "ls", "--json")[1])
    path = Path(found["path"])
    assert f"kept in {path}" in err
    assert (path / "layers/build/plain").read_text() == "kept\n"
    assert (path / "layers/build/log").read_text() == (path / "stdout").read_text() == "************\n"
    assert json.loads((path / "result.json").read_bytes())["exit_code"] == 3
    assert found["sandbox_id"] in forgeyard("kept", "ls")[1]
    assert forgeyard("kept", "rm", found["sandbox_id"])[:2] == (0, f"removed {found['sandbox_id']}\n")
    assert forgeyard("kept", "ls", "--json")[1] == "[]\n"


def test_only_what_failed_and_was_asked_for(configured: Callable[[str], None], forgeyard: Say) -> None:
    """Nothing is kept of a job that succeeded, or of one that was run without the flag."""
    configured('[serve]\nkeep_failed = "1h"\n')
    assert forgeyard("run", "--keep-on-failure", "--", "true")[0] == 0
    assert forgeyard("run", "--", "false")[0] == 1
    assert forgeyard("kept", "ls", "--json")[1] == "[]\n"


def test_the_operator_has_to_allow_it(configured: Callable[[str], None], forgeyard: Say) -> None:
    """Else the job is refused before it starts, with the setting's name."""
    configured("")
    code, out, err = forgeyard("run", "--keep-on-failure", "--", "echo", "ran")
    assert (code, out) == (REFUSED, "")
    assert "keep_failed" in err
    assert err.count("\n") == 1
    assert forgeyard("kept", "rm")[0] == 2
    assert forgeyard("kept", "rm", "nothing")[0] == REFUSED
