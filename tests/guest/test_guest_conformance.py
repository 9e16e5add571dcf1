"""The conformance suite under cgroup v2: crun, which works nowhere else, and a daemon, in a guest of their own.

The contract and the view from inside are crun's whole; of containerd there is what control groups decide.
``FORGEYARD_TEST_GUEST=all`` runs everything on both of them and on runc, for half an hour.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Callable
from typing import Any

import pytest
from guest_report import ROOT, TOOLS, Report, run_in_guest

ALL = os.environ.get("FORGEYARD_TEST_GUEST", "") == "all"
DEADLINE = 2700 if ALL else 400
"""Seconds for the guest, boot included."""
ADAPTERS = ("crun", "containerd", "runc") if ALL else ("crun", "containerd")
OOM_COUNT = os.environ.get("FORGEYARD_TEST_OOM", "50") if ALL else "2"
WHOLE = ("contract", "exec", "view")
"""Modules of which crun runs everything. Elsewhere the tests are of whole jobs, which take seconds each there."""
PARTS = {
    ("contract", "containerd"): {"test_gate_holds"},
    ("exec", "containerd"): {"test_what_is_applied_is_what_was_intended"},
    ("view", "containerd"): {
        *("test_limits_are_in_force", "test_memory_kill_is_seen_from_outside"),
        "test_process_limit_is_seen_from_outside",
    },
    ("oom", "crun"): {"test_every_memory_kill_is_told"},
}
MODULES = (*WHOLE, "jobs", "oom")


def path_of(module: str) -> str:
    """A module of the suite, below the root of the project."""
    return f"tests/conformance/test_conformance_{module}.py"


def applicable(module: str, adapter: str) -> set[str]:
    """The tests of a module that run on an adapter by the table of cells. crun's cells are runc's."""
    # crun is not in the table's list on a host without v2, such as the one that boots the guest.
    cell = "runc" if adapter == "crun" else adapter
    found = runpy.run_path(str(ROOT / path_of(module)))
    return {name for name, value in found.items() if name.startswith("test_") and cell in _adapters(value)}


def _adapters(function: Any) -> set[str]:
    marks = [mark for mark in getattr(function, "pytestmark", ()) if mark.name == "parametrize"]
    return {str(one.id) for mark in marks if mark.args[0] == "adapter" for one in mark.args[1]}


def wanted() -> dict[tuple[str, str], set[str]]:
    """What the guest is to run: functions by module and adapter."""
    if ALL:
        return {(module, adapter): applicable(module, adapter) for module in MODULES for adapter in ADAPTERS}
    return {(module, "crun"): applicable(module, "crun") for module in WHOLE} | PARTS


def selected() -> list[str]:
    """The same as pytest takes it: in full everything marked in whole files; else test by test."""
    if ALL:
        return [path_of(module) for module in MODULES]
    return [
        f"{path_of(one)}::{name}[{adapter}]" for (one, adapter), names in wanted().items() for name in sorted(names)
    ]


GROUPS = [(module, adapter) for module in MODULES for adapter in ADAPTERS] if ALL else sorted(wanted())

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.guest,
    pytest.mark.timeout(DEADLINE + 30),
]


@pytest.fixture(scope="module")
def guest(tmp_path_factory: pytest.TempPathFactory, require_tool: Callable[[str], str]) -> Report:
    """Boot, run, and read the report."""
    for tool in (*TOOLS, "containerd"):
        require_tool(tool)
    environment = {"FORGEYARD_GUEST_ADAPTERS": ",".join(ADAPTERS), "FORGEYARD_TEST_OOM": OOM_COUNT}
    log = tmp_path_factory.mktemp("guest") / "log"
    return run_in_guest(selected(), log, deadline=DEADLINE, environment=environment)


@pytest.mark.parametrize(("module", "adapter"), GROUPS)
def test_conforms_under_v2(guest: Report, module: str, adapter: str) -> None:
    """Every test of the module that is wanted of the adapter ran under cgroup v2, and passed."""
    results = {
        name: problem
        for (found, name), problem in guest.tests.items()
        if found == f"test_conformance_{module}" and name.rpartition("-")[2].rpartition("[")[2] == f"{adapter}]"
    }
    assert {name.partition("[")[0] for name in results} == wanted()[module, adapter], guest.log[-4000:]
    assert {name: problem for name, problem in results.items() if problem} == {}


def test_nothing_else_ran(guest: Report) -> None:
    """The guest ended by itself with tests passed, of no other adapter and no other module than those above."""
    assert guest.status == 0, guest.log[-4000:]
    modules = {f"test_conformance_{module}" for module, _ in wanted()}
    assert {module for module, _ in guest.tests} == modules
    assert {name.rpartition("-")[2].rpartition("[")[2].rstrip("]") for _, name in guest.tests} == set(ADAPTERS)
