"""Taking more than the limits: processes, memory, disk, descriptors, output. Every attack is bounded by itself too."""

from __future__ import annotations

import asyncio
import ctypes
import os
import subprocess
from pathlib import Path

import pytest
from attacks import attack_step, build_attacker, parse_answers, run_attacks, toolchain
from jobs import collect, run, sh

from forgeyard_executor import ExecutionResult, Executor, Job, Limits, Outcome

pytestmark = pytest.mark.kernel

MIB = 1 << 20
_LIBC = ctypes.CDLL(None, use_errno=True)


@pytest.fixture(scope="module", params=["host", "image"])
def mode(request: pytest.FixtureRequest, busybox_image: str) -> dict[str, str]:
    """The two modes, as arguments of Job."""
    return {"rootfs": "host"} if request.param == "host" else {"image": busybox_image, "user": "app"}


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attacker, as a toolchain."""
    return build_attacker(tmp_path_factory.mktemp("attacker"))


def exhaust(
    state: Path, attacker: Path, mode: dict[str, str], attack: str, limits: Limits
) -> tuple[ExecutionResult, str | None]:
    """One attack under `limits`: the result, and the attack's answer if it lived to give one."""
    job = Job(steps=(attack_step([attack]),), toolchains=toolchain(attacker), limits=limits, **mode)  # type: ignore[arg-type]  # rootfs or image by name
    result, out, _ = run(state, job)
    return result, parse_answers(out).get(attack)


def test_inotify_instances(shared_state: Path, attacker: Path, mode: dict[str, str]) -> None:
    """They are charged to host root as well: a job that holds all it can get leaves root most of them."""

    most = int(Path("/proc/sys/fs/inotify/max_user_instances").read_text())

    async def main() -> None:
        job = Job(steps=(attack_step(["call:hold_inotify"]),), toolchains=toolchain(attacker), **mode)  # type: ignore[arg-type]  # as above
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            async for chunk in execution.output():
                assert 16 <= int(chunk.data) <= max(16, most // 4)
                break
            mine = [_LIBC.inotify_init1(os.O_CLOEXEC) for _ in range(16)]
            for fd in mine:
                assert fd >= 0, os.strerror(ctypes.get_errno())
                os.close(fd)

    asyncio.run(main())


@pytest.mark.acceptance("Fork bomb hits PID limit.")
def test_fork_bomb(shared_state: Path, attacker: Path, mode: dict[str, str]) -> None:
    """It ends at the job's own limit; the host can fork, and no process of the bomb is left."""
    result, answer = exhaust(shared_state, attacker, mode, "call:fork_bomb", Limits(pids=32))
    assert answer == "EAGAIN"
    assert result.evidence.pids.limit == 32
    assert (result.evidence.pids.refused or 0) > 0
    assert (result.evidence.pids.peak or 32) <= 32
    assert subprocess.run(["true"], check=True).returncode == 0
    assert not any(b"fork_bomb" in _command(pid) for pid in os.listdir("/proc") if pid.isdigit())


def _command(pid: str) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.acceptance("Memory limit produces OOM result.")
@pytest.mark.parametrize("attack", ["call:eat_memory", "call:fill_memfd", "call:fill=/dev/shm/x"])
def test_memory_bomb(shared_state: Path, attacker: Path, mode: dict[str, str], attack: str) -> None:
    """Anonymous memory, a memfd and /dev/shm all count: the job is killed at its limit, on evidence, and alone."""
    before = _host_oom_kills()
    result, answer = exhaust(shared_state, attacker, mode, attack, Limits(memory="16MiB", shm="128MiB"))
    assert answer in (None, "SIGKILL")
    assert (result.evidence.memory.oom_kills or 0) > 0
    assert (result.evidence.memory.peak or 0) <= 16 * MIB
    assert not os.path.exists("/dev/shm/x")
    # The machine as a whole had enough: no kill of its own, beyond those in the limit of some job.
    assert _host_oom_kills() == before


def _host_oom_kills() -> int:
    """Kills counted at the root of the memory hierarchy: the machine's own, not those of a limit."""
    for path in ("/sys/fs/cgroup/memory/memory.oom_control", "/sys/fs/cgroup/memory.events"):
        if os.path.exists(path):
            return int(dict(line.split() for line in Path(path).read_text().splitlines()).get("oom_kill", 0))
    return 0


def test_shared_memory_has_a_size(shared_state: Path, attacker: Path, mode: dict[str, str]) -> None:
    """/dev/shm is full at the job's shm limit, before memory is."""
    _, answer = exhaust(shared_state, attacker, mode, "call:fill=/dev/shm/x", Limits(memory="256MiB", shm="8MiB"))
    assert answer == "ENOSPC"
    assert not os.path.exists("/dev/shm/x")


@pytest.mark.parametrize("place", ["/tmp", "/work/output", "/work/build", "/home/forgeyard", "/var/tmp"])
def test_disk_fill(shared_state: Path, attacker: Path, mode: dict[str, str], place: str) -> None:
    """Every writable place of a job with a disk limit ends at it; the host's disk loses no more."""
    before = os.statvfs(shared_state)
    result, answer = exhaust(shared_state, attacker, mode, f"call:fill={place}/x", Limits(disk="16MiB"))
    if answer in ("ENOENT", "EROFS", "EACCES"):
        assert place == "/var/tmp" or place == "/home/forgeyard"
        return
    assert answer == "ENOSPC"
    assert result.evidence.disk.limit == 16 * MIB
    assert (result.evidence.disk.peak or 0) <= 17 * MIB
    after = os.statvfs(shared_state)
    assert (before.f_bavail - after.f_bavail) * before.f_frsize < 64 * MIB


def test_inode_fill(shared_state: Path, attacker: Path, mode: dict[str, str]) -> None:
    """Files without bytes end at the limit too, and take no inodes of the host."""
    before = os.statvfs(shared_state).f_ffree
    _, answer = exhaust(shared_state, attacker, mode, "call:eat_inodes=/tmp", Limits(disk="16MiB"))
    assert answer == "ENOSPC"
    assert before - os.statvfs(shared_state).f_ffree < 2000


def test_descriptors(shared_state: Path, attacker: Path, mode: dict[str, str]) -> None:
    """They end at nofile; the host opens on."""
    _, answer = exhaust(shared_state, attacker, mode, "call:eat_descriptors", Limits(nofile=64))
    assert answer == "EMFILE"
    os.close(os.open("/dev/null", os.O_RDONLY))


def test_output_flood(shared_state: Path, mode: dict[str, str]) -> None:
    """Beyond the cap, head and tail are kept and the middle is dropped; the job ends as it would have."""
    job = Job(steps=(sh("echo head; head -c 33554432 /dev/zero; echo tail; exit 3"),), output_cap=MIB, **mode)  # type: ignore[arg-type]  # as above
    result, out, spooled = asyncio.run(_flood(shared_state, job))
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 3)
    assert out.startswith(b"head\n")
    assert out.endswith(b"tail\n")
    assert len(out) <= MIB + 65536
    assert result.output.log_truncated
    assert result.output.stdout_bytes == 33554432 + 10
    assert spooled < 4 * MIB


async def _flood(state: Path, job: Job) -> tuple[ExecutionResult, bytes, int]:
    """Run `job` without reading: its result, the output that was kept, and the bytes it took on the host's disk."""
    async with Executor.open(state) as executor, executor.run(job) as execution:
        result = await execution.wait()
        spooled = sum(path.stat().st_size for path in (state / "spool").rglob("*") if path.is_file())
        out, _ = await collect(execution)
    return result, out, spooled


def test_argument_of_the_limits_is_no_way_round(shared_state: Path, attacker: Path, mode: dict[str, str]) -> None:
    """A job can't write its own limits, whoever it is in its namespace."""
    attacks = [
        "echo:max>/sys/fs/cgroup/pids/pids.max",
        "echo:-1>/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "echo:-1>/sys/fs/cgroup/cpu/cpu.cfs_quota_us",
        "echo:a *:* rwm>/sys/fs/cgroup/devices/devices.allow",
        "echo:max>/sys/fs/cgroup/memory.max",
    ]
    answers = run_attacks(shared_state, attacker, attacks, limits=Limits(pids=32), **mode)
    assert set(answers.values()) <= {"EROFS", "ENOENT", "EACCES"}
