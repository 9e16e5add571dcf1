"""Process facts from /proc and pidfds."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from forgeyard_host.processes import (
    boot_id,
    own_start_time,
    parent_of,
    pidfd_open,
    process_facts,
    send_signal,
    start_time,
    wait_ended,
)


def test_facts_of_this_process() -> None:
    """Facts agree with what this process knows of itself."""
    facts = process_facts(os.getpid())

    assert facts.uids == (os.getuid(), os.geteuid(), os.getuid(), os.geteuid())
    assert facts.namespaces["net"] == os.stat("/proc/self/ns/net").st_ino
    assert facts.namespace_pids[0] == os.getpid()
    assert set(facts.capabilities) == {"inheritable", "permitted", "effective", "bounding", "ambient"}
    assert facts.uid_map[0][0] == 0
    assert facts.cgroups


@pytest.mark.kernel
def test_facts_of_a_confined_process() -> None:
    """A process in namespaces of its own, without capabilities and with no_new_privs, shows as such."""
    argv = ["unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child", "--net"]
    argv += ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "sh", "-c", "echo $$; exec cat"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "1\n"
        with open(f"/proc/{process.pid}/task/{process.pid}/children") as children:
            inner = int(children.read())
        facts, own = process_facts(inner), process_facts(os.getpid())
        process.kill()

    assert facts.uid_map == ((0, 0, 1),)
    assert facts.no_new_privileges
    assert facts.capabilities["bounding"] == 0
    assert facts.namespace_pids == (inner, 1)
    assert facts.namespaces["user"] != own.namespaces["user"]
    assert facts.namespaces["net"] != own.namespaces["net"]
    assert facts.namespaces["mnt"] == own.namespaces["mnt"]


def test_facts_of_the_dead() -> None:
    """A process that is gone, or a zombie, is a lookup error and never half a set of facts."""
    with subprocess.Popen(["true"]) as process:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            process_facts(process.pid)
        process.wait()
        with pytest.raises(ProcessLookupError):
            process_facts(process.pid)
        with pytest.raises(ProcessLookupError):
            start_time(process.pid)


def test_parents(tmp_path: Path) -> None:
    """Whatever a process calls itself, its parent is read; a process that is gone has none."""
    program = tmp_path / "x) R 1 (y"
    program.symlink_to("/bin/cat")
    with subprocess.Popen([program], stdin=subprocess.PIPE) as process:
        assert parent_of(process.pid) == os.getpid()
        process.kill()
        process.wait()
        with pytest.raises(ProcessLookupError):
            parent_of(process.pid)


def test_signals_through_a_pidfd() -> None:
    """A pidfd tells the end, and a signal to the dead is False, whoever has the number by then."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as process:
        pidfd = pidfd_open(process.pid)
        try:
            assert not wait_ended(pidfd, 0)
            assert send_signal(pidfd, signal.SIGKILL)
            assert wait_ended(pidfd, 10)
            assert process.wait() == -9
            assert not send_signal(pidfd, signal.SIGKILL)
        finally:
            os.close(pidfd)


def test_start_time_and_boot_id() -> None:
    """A start time stays, and a later process has a later (or the same) one, whatever its name looks like."""
    assert start_time(os.getpid()) == own_start_time()
    with subprocess.Popen(["bash", "-c", "exec -a ') 1 2 (' cat"], stdin=subprocess.PIPE) as process:
        assert start_time(process.pid) >= own_start_time()
        process.kill()
    assert len(boot_id()) == 36


def test_facts_from_threads() -> None:
    """Threads may read facts at once."""
    seen: list[int] = []
    threads = [threading.Thread(target=lambda: seen.append(process_facts(os.getpid()).pid)) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert seen == [os.getpid()] * 8
