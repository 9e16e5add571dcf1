"""The cgroup part of the suite under cgroup v2: a guest is booted once, and what each test did in it is asserted here.

The guest costs a minute of one core, nearly all of it Python under emulation.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from guest_report import GUEST, ROOT, TOOLS, Report, run_in_guest

DEADLINE = 400
"""Seconds for the guest, boot included: the whole has to fit into three minutes of CI."""

FILES = {
    "tests/host/test_host_cgroups.py": (
        "test_an_out_of_memory_kill_is_counted",
        "test_a_kill_by_hand_is_no_out_of_memory",
        "test_a_refused_fork_is_counted",
        "test_usage_counts_what_was_used",
        "test_applied_limits_are_read_back",
        "test_nothing_is_claimed_of_a_missing_leaf",
        "test_a_forking_tree_is_killed[True]",
        "test_a_forking_tree_is_killed[False]",
        "test_a_paused_container_is_killed",
        "test_a_process_in_one_hierarchy_only_is_killed",
        "test_the_neighbour_lives",
        "test_remove_takes_nested_groups_along",
        "test_remove_waits_for_the_dying",
        "test_create_twice_and_remove_empty",
        "test_making_beside_executors_that_end",
    ),
    "tests/executor/test_executor_limits.py": (
        "test_timeout[host]",
        "test_timeout[image]",
        "test_out_of_memory[host]",
        "test_out_of_memory[image]",
        "test_oom_killed_child_of_a_job_that_goes_on",
        "test_pid_limit[host]",
        "test_pid_limit[image]",
    ),
    "tests/guest/inside_guest.py": (
        "test_the_host_is_v2",
        "test_limits_are_seen_from_inside[runc]",
        "test_limits_are_seen_from_inside[crun]",
        "test_crun_counts_an_out_of_memory_kill",
        "test_a_job_cannot_write_to_its_group",
        "test_the_limits_of_a_running_job_are_the_kernels",
        "test_kills_are_known_after_the_leaf_is_gone",
        "test_refused_forks_in_nested_groups_are_counted_once",
        "test_a_delegated_group_is_used",
        "test_a_group_with_processes_cannot_pass_controllers_on",
    ),
}
BEHAVIOURS = [(Path(file).stem, name) for file, names in FILES.items() for name in names]

pytestmark = [
    pytest.mark.kernel,
    pytest.mark.guest,
    # The first test waits for all that the guest does.
    pytest.mark.timeout(DEADLINE + 20),
]


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Boot, run, and read the report; the whole log is shown with a failure."""
    return run_in_guest(list(FILES), tmp_path_factory.mktemp("guest") / "log", deadline=DEADLINE)


@pytest.fixture(autouse=True)
def tools(require_tool: Callable[[str], str]) -> None:
    """All that the guest needs: a skip here, a failure in CI."""
    for name in TOOLS:
        require_tool(name)


def test_the_guest_ran_every_test_that_is_marked(guest: Report) -> None:
    """Nothing marked `guest` is missing here, nothing here was left out there, and it took less than three minutes."""
    assert guest.tests, f"status {guest.status}:\n{guest.log[-4000:]}"
    assert set(guest.tests) == set(BEHAVIOURS)
    assert guest.seconds < 180


@pytest.mark.parametrize(("module", "name"), BEHAVIOURS, ids=[name for _, name in BEHAVIOURS])
def test_under_v2(guest: Report, module: str, name: str) -> None:
    """This test of the suite holds under cgroup v2 as well."""
    assert guest.problem(module, name) == ""


def test_the_guest_cannot_write_to_this_host(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """Root in the guest changes nothing here: neither through its own root nor through the share below it."""
    require_tool("mke2fs")
    mark = ROOT / "tests" / "guest" / f"written-{tmp_path.name}"
    script = (
        f"echo x > {mark} && test -s {mark} && mkdir /mnt/x && mount -t virtiofs host /mnt/x && echo x > /mnt/x{mark}"
    )
    argv = [sys.executable, str(GUEST / "run_guest.py"), "--deadline", "60", "--", "sh", "-c", script]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode not in (0, 124, 125), run.stderr
    assert "Read-only file system" in run.stderr or "busy" in run.stderr
    assert not mark.exists()
