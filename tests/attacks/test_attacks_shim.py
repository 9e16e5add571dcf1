"""A job against its own PID 1, its channel, its verdict, and the steps beside it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from attacks import TOOL, HostFacts, attack_step, build_attacker, parse_answers, toolchain
from jobs import run, sh

from forgeyard_executor import Executor, Job, Outcome, Step

pytestmark = pytest.mark.kernel

WORD = "hush-4f1c"


@pytest.fixture(scope="module", params=["host", "image"])
def mode(request: pytest.FixtureRequest, busybox_image: str) -> dict[str, str]:
    """The two modes, as arguments of Job."""
    return {"rootfs": "host"} if request.param == "host" else {"image": busybox_image, "user": "app"}


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attacker, as a toolchain."""
    return build_attacker(tmp_path_factory.mktemp("attacker"))


@pytest.mark.parametrize("number", ["KILL", "STOP", "TERM", "HUP", "INT", "SEGV", "TSTP"])
def test_signal_to_pid_1(shared_state: Path, mode: dict[str, str], number: str) -> None:
    """No signal from inside ends or stops PID 1: the step's own status is reported, and the next step runs."""
    before = HostFacts.look()
    steps = (sh(f"kill -{number} 1; exit 7", continue_on_error=True), sh("echo next"))
    result, out, _ = run(shared_state, Job(**mode, steps=steps))  # type: ignore[arg-type]  # rootfs or image by name
    assert result.steps[0].exit is not None
    assert (result.steps[0].exit.code, out) == (7, b"next\n")
    assert result.outcome is Outcome.SUCCEEDED
    before.assert_unchanged(HostFacts.look())


def test_channel_of_the_shim(shared_state: Path, mode: dict[str, str]) -> None:
    """A step holds no descriptor but its own three, and the FIFOs have no name any more."""
    script = (
        "for fd in /proc/self/fd/*; do echo ${fd##*/}; done; "
        "for f in control report stdout stderr; do test -e /.forgeyard/$f && echo found $f; done; "
        "cat /proc/1/cmdline | tr '\\0' ' '"
    )
    before = HostFacts.look()
    result, out, _ = run(shared_state, Job(**mode, steps=(sh(script),)))  # type: ignore[arg-type]  # as above
    assert result.outcome is Outcome.SUCCEEDED
    words = out.split()
    assert set(words[: words.index(b"/.forgeyard/init")]) - {b"3"} == {b"0", b"1", b"2"}
    assert words[words.index(b"/.forgeyard/init") :] == [b"/.forgeyard/init", b"fifo"]
    before.assert_unchanged(HostFacts.look())


def test_forged_report(shared_state: Path, mode: dict[str, str]) -> None:
    """Bytes that look like the shim's reports, on every descriptor a step has, are output and no report."""
    # A report frame of EXITED: length, type, then eight numbers; status 0 for a step that fails.
    frame = "\\101\\0\\0\\0\\203" + "\\1\\0\\0\\0\\0\\0\\0\\0" + "\\0" * 56
    script = f"printf '{frame}'; printf '{frame}' >&2; for fd in 3 4 5 6 7 8 9; do printf '{frame}' >&$fd; done; exit 9"
    before = HostFacts.look()
    result, out, err = run(shared_state, Job(**mode, steps=(sh(script),)))  # type: ignore[arg-type]  # as above
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 9)
    assert out[:5] == err[:5] == b"A\0\0\0\x83"
    before.assert_unchanged(HostFacts.look())


@pytest.mark.parametrize(
    ("script", "code"),
    [("kill -SYS $$", 159), ("exit 159", 159), ("kill -KILL $$", 137), ("exit 137", 137), ("exit 124", 124)],
)
def test_forged_verdict(shared_state: Path, mode: dict[str, str], script: str, code: int) -> None:
    """A status alone is no evidence: no violation, no OOM, no time-out, just a failed job."""
    result, _, _ = run(shared_state, Job(**mode, steps=(sh(script),)))  # type: ignore[arg-type]  # as above
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, code)
    assert not result.evidence.memory.oom_kills


def test_prlimit_on_pid_1(shared_state: Path, mode: dict[str, str], attacker: Path) -> None:
    """Refused, else RLIMIT_CPU would be a way to end the sandbox: the statuses that follow are the steps' own."""
    before = HostFacts.look()
    steps = (attack_step(["call:weaken_init"]), sh("exit 5"))
    job = Job(steps=steps, toolchains=toolchain(attacker), **mode)  # type: ignore[arg-type]  # as above
    result, out, _ = run(shared_state, job)
    assert parse_answers(out) == {"call:weaken_init": "ENOSYS"}
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 5)
    before.assert_unchanged(HostFacts.look())


def test_environment_of_a_later_step(shared_state: Path, mode: dict[str, str]) -> None:
    """A thief that one step leaves behind is dead before the next step's variables exist."""
    thief = "while :; do cat /proc/[0-9]*/environ >> /work/tmp/stolen; done"
    steps = (
        sh(f"setsid sh -c '{thief}' 2>/dev/null & while ! test -s /work/tmp/stolen; do :; done"),
        sh("echo started > /work/tmp/used", env={"SECRET": WORD}),
        sh(f"grep -c {WORD} /work/tmp/stolen; test -s /work/tmp/stolen"),
    )
    result, out, _ = run(shared_state, Job(**mode, steps=steps))  # type: ignore[arg-type]  # as above
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"0\n")
    assert result.steps[0].leftovers >= 1


def test_background_step_reads_later_ones(shared_state: Path, mode: dict[str, str]) -> None:
    """The known limit, so that SECURITY.md stays true: a background step has the same uid and can read them."""
    spy = f"until grep -q {WORD} /proc/[0-9]*/environ; do :; done 2>/dev/null; : > /work/tmp/seen"
    steps = (
        sh(spy, background=True),
        sh("while ! test -e /work/tmp/seen; do :; done; echo seen", env={"SECRET": WORD}),
    )
    _, out, _ = run(shared_state, Job(**mode, steps=steps))  # type: ignore[arg-type]  # as above
    assert out == b"seen\n"


def test_zombies_and_orphans(shared_state: Path, mode: dict[str, str]) -> None:
    """Children that are never waited for are reaped or killed with their step, and none is on the host afterwards."""
    script = "for i in 1 2 3 4 5 6 7 8; do (sleep 600 & exec sleep 600) & done; exec sleep 0.1"
    result, _, _ = run(shared_state, Job(**mode, steps=(sh(script), sh("ls -d /proc/[0-9]* | wc -l"))))  # type: ignore[arg-type]  # as above
    assert result.outcome is Outcome.SUCCEEDED
    assert result.steps[0].leftovers == 16
    assert all(b"sleep\x00600" not in command or state for command, state in _commands(uid_from=2_000_000_000))


def _commands(uid_from: int) -> list[tuple[bytes, bool]]:
    """Command lines of processes with a uid of our ranges; whether each belongs to an attempt that still runs."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if os.stat(f"/proc/{pid}").st_uid >= uid_from:
                found.append((Path(f"/proc/{pid}/cmdline").read_bytes(), "/forgeyard/" in _cgroup(pid)))
        except OSError:
            continue
    return found


def _cgroup(pid: str) -> str:
    return Path(f"/proc/{pid}/cgroup").read_text()


def _hits(word: bytes, name: str) -> set[str]:
    """Pids whose /proc file `name` holds `word`, this test's process apart."""
    found = set()
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if int(pid) != os.getpid() and word in Path(f"/proc/{pid}/{name}").read_bytes():
                found.add(pid)
        except OSError:
            continue
    return found


def test_words_of_steps_on_the_host(shared_state: Path, mode: dict[str, str]) -> None:
    """What users of the host see in /proc: a step's words stand in its own process, in none of ours."""

    async def main() -> None:
        script = Step.shell(f"echo up; # {WORD}-script\nsleep 600", env={"SECRET": f"{WORD}-env"})
        job = Job(steps=(script, Step("/bin/true", f"{WORD}-argument")), **mode)  # type: ignore[arg-type]  # as above
        async with Executor.open(shared_state) as executor, executor.run(job) as execution:
            async for chunk in execution.output():
                assert chunk.data == b"up\n"
                break
            word = WORD.encode()
            assert _hits(word, "cmdline") == set()
            owners = _hits(word, "environ")
            assert owners
            assert all(os.stat(f"/proc/{pid}").st_uid > 65536 for pid in owners)

    asyncio.run(main())


def test_step_can_not_change_the_shim(shared_state: Path, mode: dict[str, str]) -> None:
    """The shim's file, as seen from inside, can't be opened to write or replaced, and on the host it has its bytes."""
    shim = next((Path(__file__).parents[2] / "process_shim/forgeyard_process_shim/bin").glob("init"))
    before = (shim.stat().st_mtime_ns, shim.read_bytes())
    script = (
        "echo x > /.forgeyard/init && echo wrote; rm -f /.forgeyard/init && echo removed; "
        f"mv /tmp /.forgeyard && echo moved; ln -s x /.forgeyard/y && echo linked; exit 0; : {TOOL}"
    )
    result, out, _ = run(shared_state, Job(**mode, steps=(sh(script),)))  # type: ignore[arg-type]  # as above
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"")
    assert (shim.stat().st_mtime_ns, shim.read_bytes()) == before
