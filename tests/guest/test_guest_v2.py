"""The cgroup part of the suite under cgroup v2: a guest is booted once, and what each test did in it is asserted here.

The guest costs a minute of one core, nearly all of it Python under emulation.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
DEADLINE = 170
"""Seconds for the guest, boot included: the whole has to fit into three minutes of CI."""
PYTEST = (
    # Plugins cost seconds each here. --assert=plain: rewriting the tests' modules does, too.
    *("-m", "pytest", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--assert=plain", "--tb=short"),
    *("-o", "timeout=100", "-v", "-m", "guest", "--durations=12", "--junitxml=/run/report.xml"),
)
# Stdout is the report's alone; what pytest prints goes to stderr, as it comes.
SCRIPT = 'export PYTEST_DISABLE_PLUGIN_AUTOLOAD=1; "$@" >&2; status=$?; cat /run/report.xml; exit $status'

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
    # In the pass of one process, so that there is one guest with a core to itself; and with time for it, since the
    # first test waits for all that it does.
    pytest.mark.exclusive,
    pytest.mark.timeout(DEADLINE + 20),
]


@dataclass(frozen=True)
class Report:
    """What the guest said. `tests`: module and name, with "" for passed or else what went wrong."""

    status: int
    seconds: float
    tests: dict[tuple[str, str], str]
    log: str


@pytest.fixture(scope="session")
def guest(tmp_path_factory: pytest.TempPathFactory) -> Report:
    """Boot, run, and read the report; the whole log is shown with a failure."""
    log = tmp_path_factory.mktemp("guest") / "log"
    runner = [sys.executable, str(HERE / "run_guest.py"), "--deadline", str(DEADLINE), "--"]
    inside = ["sh", "-c", SCRIPT, "sh", sys.executable, *PYTEST, *FILES]
    began = time.monotonic()
    with log.open("wb") as errors:
        run = subprocess.run([*runner, *inside], cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, check=False)
    text = log.read_text(errors="replace")
    seconds = time.monotonic() - began
    print(text[-20_000:], f"guest: {seconds:.0f} s in all, boot included", sep="\n")
    return Report(run.returncode, seconds, parse(run.stdout), text)


def parse(xml: bytes) -> dict[tuple[str, str], str]:
    """Results of a JUnit report; none when the guest did not come that far."""
    if not xml.strip():
        return {}
    results = {}
    for case in ElementTree.fromstring(xml).iter("testcase"):
        bad = [child for child in case if child.tag in ("failure", "error", "skipped")]
        module = case.get("classname", "").rpartition(".")[2]
        results[module, case.get("name", "")] = "\n".join(child.text or child.get("message", "") for child in bad)
    return results


@pytest.fixture(autouse=True)
def tools(require_tool: Callable[[str], str]) -> None:
    """All that the guest needs: a skip here, a failure in CI."""
    for name in ("qemu-system-x86_64", "mke2fs", "runc", "crun", "busybox"):
        require_tool(name)


def test_the_guest_ran_every_test_that_is_marked(guest: Report) -> None:
    """Nothing marked `guest` is missing here, nothing here was left out there, and it took less than three minutes."""
    assert guest.tests, f"status {guest.status}:\n{guest.log[-4000:]}"
    assert set(guest.tests) == set(BEHAVIOURS)
    assert guest.seconds < 180


@pytest.mark.parametrize(("module", "name"), BEHAVIOURS, ids=[name for _, name in BEHAVIOURS])
def test_under_v2(guest: Report, module: str, name: str) -> None:
    """This test of the suite holds under cgroup v2 as well."""
    assert guest.tests.get((module, name), f"did not run; status {guest.status}") == ""


def test_the_guest_cannot_write_to_this_host(require_tool: Callable[[str], str], tmp_path: Path) -> None:
    """Root in the guest changes nothing here: neither through its own root nor through the share below it."""
    require_tool("mke2fs")
    mark = ROOT / "tests" / "guest" / f"written-{tmp_path.name}"
    script = (
        f"echo x > {mark} && test -s {mark} && mkdir /mnt/x && mount -t virtiofs host /mnt/x && echo x > /mnt/x{mark}"
    )
    argv = [sys.executable, str(HERE / "run_guest.py"), "--deadline", "60", "--", "sh", "-c", script]
    run = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert run.returncode not in (0, 124, 125), run.stderr
    assert "Read-only file system" in run.stderr or "busy" in run.stderr
    assert not mark.exists()
