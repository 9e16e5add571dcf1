"""How tests attack: a static program of ours tries things inside, and the host is looked at before and after."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path

from jobs import run

from forgeyard_executor import Job, Outcome, Step
from forgeyard_model.policy import ApprovedHostPath

SOURCE = Path(__file__).parents[1] / "attacks/attacker.c"
TOOL = "/toolchains/attack"


def build_attacker(directory: Path) -> Path:
    """Compile the attacker, static, so that it runs in any root; the directory a job gets as a toolchain."""
    directory.mkdir(exist_ok=True)
    directory.chmod(0o755)
    compiler = shutil.which("gcc") or "gcc"
    subprocess.run([compiler, "-static", "-O1", "-std=gnu11", "-o", directory / "attacker", SOURCE], check=True)
    (directory / "data").write_text("a toolchain's file\n")
    (directory / "data").chmod(0o666)
    return directory


def toolchain(attacker: Path) -> tuple[ApprovedHostPath, ...]:
    """The attacker as a toolchain."""
    return (ApprovedHostPath(str(attacker), TOOL),)


def attack_step(attacks: Sequence[str], **options: object) -> Step:
    """A step that tries `attacks`."""
    return Step(f"{TOOL}/attacker", *attacks, **options)  # type: ignore[arg-type]  # passed on by name


def parse_answers(out: bytes) -> dict[str, str]:
    """What came of each attack: an errno's name, ``done N``, or a signal's name."""
    return dict(_answer(line) for line in out.decode().splitlines())


def _answer(line: str) -> tuple[str, str]:
    attack, _, answer = line.rpartition("\t")
    kind, _, number = answer.partition(" ")
    if kind == "errno":
        return attack, errno.errorcode.get(int(number), number)
    return attack, signal.Signals(int(number)).name if kind == "signal" else answer


def run_attacks(state: Path, attacker: Path, attacks: Sequence[str], **job: object) -> dict[str, str]:
    """Run `attacks` in one sandbox; the answer to each."""
    steps = (attack_step(attacks),)
    result, out, err = run(state, Job(steps=steps, toolchains=toolchain(attacker), **job))  # type: ignore[arg-type]  # passed on by name
    assert result.outcome is Outcome.SUCCEEDED, (result.message, out, err)
    answers = parse_answers(out)
    assert list(answers) == list(attacks)
    return answers


@dataclass(frozen=True)
class HostFacts:
    """What an escape would change on the host: values of the kernel that no test of ours changes."""

    hostname: str
    sysctls: Mapping[str, str]
    mounts: frozenset[str]
    swaps: str
    modules: frozenset[str]
    cgroup_files: Mapping[str, str]
    interfaces: frozenset[str]
    clock: int
    own_namespaces: Mapping[str, int]

    @classmethod
    def look(cls) -> HostFacts:
        """The host as it is now."""
        return cls(
            hostname=os.uname().nodename,
            sysctls={name: _text(f"/proc/sys/{name}") for name in _SYSCTLS},
            mounts=frozenset(_stable_mounts()),
            swaps=_text("/proc/swaps"),
            modules=frozenset(line.split()[0] for line in _text("/proc/modules").splitlines()),
            cgroup_files={str(path): _text(str(path)) for path in _cgroup_files()},
            interfaces=frozenset(_text("/proc/net/fib_trie").split("\n")),
            # Seconds between the wall clock and the one that cannot be set.
            clock=round(time.time() - time.clock_gettime(time.CLOCK_MONOTONIC_RAW)),
            own_namespaces={kind: os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("mnt", "net", "uts", "user")},
        )

    def assert_unchanged(self, now: HostFacts) -> None:
        """Name the first thing that differs from `now`. The clock may be slewed by a second."""
        for name in (field.name for field in fields(self) if field.name != "clock"):
            assert getattr(self, name) == getattr(now, name), name
        assert abs(self.clock - now.clock) <= 1


_SYSCTLS = (
    "kernel/core_pattern",
    "kernel/domainname",
    "kernel/hostname",
    "kernel/modprobe",
    "kernel/sysrq",
    "kernel/ctrl-alt-del",
    "kernel/acct",
    "kernel/panic",
    "kernel/shmmax",
    "kernel/yama/ptrace_scope",
    "net/ipv4/ip_forward",
    "user/max_inotify_instances",
    "user/max_user_namespaces",
    "vm/overcommit_memory",
    "vm/panic_on_oom",
)


def _text(path: str) -> str:
    try:
        return Path(path).read_text()
    except OSError as error:
        return type(error).__name__


def _stable_mounts() -> Iterator[str]:
    """Mount point and options of what is not a sandbox's or a test's: those come and go."""
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        words = line.split()
        if not words[4].startswith(("/var/tmp/", "/tmp/", "/run/", "/var/lib/")):
            yield f"{words[3]} {words[4]} {words[5]}"


def _cgroup_files() -> Iterator[Path]:
    for name in ("release_agent", "notify_on_release", "devices.list", "cgroup.subtree_control", "pids.max"):
        yield from Path("/sys/fs/cgroup").glob(f"*/{name}")
        yield from Path("/sys/fs/cgroup").glob(name)
