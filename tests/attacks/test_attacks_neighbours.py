"""One attempt against another that runs beside it in the same state directory, its real paths known to the attacker."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from attacks import attack_step, build_attacker, parse_answers, toolchain
from jobs import collect, sh

from forgeyard_executor import Executor, Job, Outcome
from forgeyard_model.policy import CapabilityGrant

pytestmark = pytest.mark.kernel

SECRET = "another-jobs-secret"
NOT_THERE = {"ENOENT", "EACCES", "EPERM"}
VICTIM = (
    f"for d in output tmp build; do echo {SECRET} > /work/$d/s; chmod 666 /work/$d/s; chmod 777 /work/$d; done; "
    f"echo {SECRET}; while ! test -e /work/tmp/over; do sleep 0.02; done; cat /work/output/s"
)


@pytest.fixture(scope="module")
def attacker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The attacker, as a toolchain."""
    return build_attacker(tmp_path_factory.mktemp("attacker"))


def victims_files(state: Path, sandbox: str) -> list[Path]:
    """Where the victim's data lies on the host: its writable layer, its output, its ledger, its shim's directory."""
    scratch = [path for path in (state / "sandboxes" / sandbox / "scratch").rglob("s") if path.is_file()]
    spool = [path for path in (state / "spool").rglob("*") if path.is_file() and sandbox in str(path)]
    assert len(scratch) >= 3
    assert spool
    return [*scratch, *spool, state / "ledger" / f"{sandbox}.jsonl"]


@pytest.mark.acceptance("Workload cannot read another job workspace.")
@pytest.mark.parametrize("grant", [False, True], ids=["user", "root-in-userns"])
def test_other_attempt(shared_state: Path, attacker: Path, busybox_image: str, grant: bool) -> None:
    """Its files, its output and its processes can't be read, changed or signalled, and it ends as if it were alone."""
    mode: dict[str, object] = {"rootfs": "host"}
    if grant:
        mode = {"image": busybox_image, "user": "root", "capabilities": CapabilityGrant.ROOT_IN_USERNS}

    async def main() -> None:
        other = Job(rootfs="host", steps=(sh(VICTIM),))
        async with Executor.open(shared_state) as executor, executor.run(other) as victim:
            async for chunk in victim.output():
                assert SECRET in chunk.data.decode()
                break
            files = victims_files(shared_state, victim.sandbox_id)
            before = {path: path.read_bytes() for path in files}
            attacks = [f"{way}:{path}" for path in files for way in ("read", "put", "unlink")]
            greedy = sh(f"kill -9 -1 2>/dev/null; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline | grep -c {SECRET}")
            steps = (attack_step(attacks), greedy)
            job = Job(steps=steps, toolchains=toolchain(attacker), **mode)  # type: ignore[arg-type]  # by name
            async with executor.run(job) as attack:
                out, _ = await collect(attack)
                await attack.wait()
            answers = parse_answers(b"".join(line for line in out.splitlines(keepends=True) if b"\t" in line))
            assert set(answers) == set(attacks)
            assert set(answers.values()) <= NOT_THERE
            assert {path: path.read_bytes() for path in files} == before
            for path in files:
                if path.name == "s":
                    path.with_name("over").touch()
            result = await victim.wait()
        assert result.outcome is Outcome.SUCCEEDED

    asyncio.run(main())
