"""The table of what applies where is whole, and README shows it as the code has it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.plan import Bundle
from forgeyard_runtimes.cells import EXCEPTIONS, RUNTIMES, STRICTER, Behaviour, exception, markdown, stricter_markdown
from forgeyard_runtimes.cli_runtime import CliRuntime
from forgeyard_runtimes.cli_traits import TRAITS
from forgeyard_runtimes.containerd.runtime import ContainerdRuntime
from forgeyard_runtimes.contract import SweepReport
from forgeyard_runtimes.docker.runtime import DockerRuntime
from forgeyard_runtimes.find import COMMAND_LINES, CONTRACT_ONLY, DAEMONS, RuntimeSettings, find_runtime, state_name
from forgeyard_runtimes.podman.runtime import PodmanRuntime

README = Path(__file__).parents[2] / "README.md"


def test_every_runtime_has_a_column() -> None:
    """Whatever can be chosen is in the table, and nothing else."""
    assert set(RUNTIMES) == {*COMMAND_LINES, *DAEMONS}
    assert {name for name, _ in EXCEPTIONS} <= set(RUNTIMES)
    with pytest.raises(KeyError):
        exception("nosuch", Behaviour.STEPS)


def test_every_cell_is_said() -> None:
    """Each row has a cell for each runtime, and each exception a footnote."""
    rows = [line for line in markdown().splitlines() if line.startswith("|")]
    assert len(rows) == 2 + len(Behaviour)
    assert {row.count("|") for row in rows} == {len(RUNTIMES) + 2}
    assert all(f" {why}" in markdown() for why in EXCEPTIONS.values())


def test_what_is_refused_for_jobs_claims_nothing() -> None:
    """A runtime that only keeps the contract has no plain yes in the table, claims no isolation, and runs no job."""
    for name in CONTRACT_ONLY:
        column = [row.split("|")[2 + RUNTIMES.index(name)].strip() for row in markdown().splitlines() if row[:1] == "|"]
        assert all(cell.startswith(("no (", "contract (")) for cell in column[2:])
        claims = CliRuntime(Path("/bin/false"), TRAITS[name], "1").capabilities()
        assert not claims.isolation_levels
        assert not claims.network_modes
        assert not claims.resource_controls.memory
        with pytest.raises(ExecutorError) as caught:
            asyncio.run(find_runtime(name))
        assert caught.value.reason == "runtime_unverified"


def test_readme_shows_the_table() -> None:
    """README has the table exactly as the code makes it."""
    assert markdown() in README.read_text()


def test_docs_show_what_is_always_stricter() -> None:
    """docs/runtimes.md has that table exactly as the adapters declare it."""
    assert stricter_markdown() in (README.parent / "docs/runtimes.md").read_text()
    declared = {"docker": DockerRuntime.declared_stricter, "podman": PodmanRuntime.declared_stricter}
    assert declared == {name: frozenset(fields) for name, fields in STRICTER.items()}
    assert CliRuntime.declared_stricter == ContainerdRuntime.declared_stricter == frozenset()


@pytest.mark.parametrize("name", ["", "nosuch", "Docker"])
def test_unknown_names_are_refused(name: str) -> None:
    """A name that nothing has is a typed refusal that lists the names."""
    with pytest.raises(ExecutorError, match="runc") as caught:
        asyncio.run(find_runtime(name))
    assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.UNSUPPORTED, "runtime_unknown")


@pytest.mark.parametrize("name", DAEMONS)
def test_a_daemon_that_is_not_there(name: str, tmp_path: Path) -> None:
    """A daemon without a socket is a typed error with a cure, at once."""
    address = f"unix://{tmp_path}/nosuch.sock"
    with pytest.raises(ExecutorError) as caught:
        asyncio.run(find_runtime(name, RuntimeSettings(address=address)))
    assert caught.value.resolution


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its library a daemon's adapter is refused with the extra to install."""
    monkeypatch.setitem(sys.modules, "forgeyard_runtimes.docker.runtime", None)
    with pytest.raises(ExecutorError, match=r"forgeyard-executor\[docker\]") as caught:
        asyncio.run(find_runtime("docker"))
    assert caught.value.reason == "runtime_library"


def test_command_lines_leave_nothing_to_sweep() -> None:
    """A command line is no daemon: nothing of it has to be swept, and a bundle is carried whole."""
    runtime = CliRuntime(Path("/bin/runc"), TRAITS["runc"], "1")
    assert asyncio.run(runtime.sweep(lambda _: False)) == SweepReport()
    assert runtime.carries(Bundle(b"{}", "", "")) == ()


def test_state_names() -> None:
    """A state directory has one name, however its path is written."""
    assert state_name("/var/lib/x") == state_name("/var/lib/./x/") != state_name("/var/lib/y")
