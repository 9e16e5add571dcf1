"""Host paths of any bytes, and words at the kernel's limits: real jobs for a handful of each."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_executor import Executor, ExecutorError, InvalidRequest, Job, Limits, Outcome, Output, Step
from forgeyard_executor.environment import STRING_LIMIT, TOTAL_LIMIT, step_environment
from forgeyard_model.policy import ApprovedHostPath

pytestmark = pytest.mark.kernel

ODD = [
    b"a b,c:d=\xc3\xbc",
    b"back\\slash",
    b"quo\"te's",
    b"new\nline",
    b"\xff\xfe",
    b"tab\t$HOME;*?",
    b"-lead",
    b"upperdir=,lowerdir+",
    b"n" * 255,
]


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """A directory that a job's user may pass through."""
    path = tempfile.mkdtemp(prefix="fy-odd-", dir="/var/tmp")
    Path(path).chmod(0o755)
    yield path
    shutil.rmtree(os.fsencode(path))


def make_tree(parent: Path) -> Path:
    """A source and a toolchain below `parent`."""
    (parent / "src").mkdir(parents=True)
    (parent / "src" / "f").write_text("source\n")
    (parent / "tools" / "bin").mkdir(parents=True)
    program = parent / "tools" / "bin" / "our-tool"
    program.write_text("#!/bin/sh\necho tool\n")
    program.chmod(0o755)
    return parent


def odd_job(where: Path) -> Job:
    """Reads its source, runs its toolchain, leaves an output."""
    return Job(
        rootfs="host",
        steps=(sh("cat f; our-tool; echo out > /work/output/r"),),
        toolchains=(ApprovedHostPath(str(where / "tools"), "/toolchains/t"),),
        outputs=(Output("r"),),
    )


@pytest.mark.parametrize("name", ODD, ids=repr)
def test_source_toolchain_and_output_of_any_name(shared_state: Path, base: str, name: bytes) -> None:
    """Spaces, commas, colons, quotes, newlines, and bytes that are no text: mounts are passed by descriptor."""
    where = make_tree(Path(base, os.fsdecode(name)))
    result, out, err = run(shared_state, odd_job(where), source=where / "src", output=where / "out")
    assert (result.outcome, out, err) == (Outcome.SUCCEEDED, b"source\ntool\n", b"")
    assert (where / "out" / "r").read_text() == "out\n"


@pytest.mark.parametrize("name", [ODD[0], ODD[3]], ids=repr)
def test_a_state_directory_of_any_text(base: str, name: bytes) -> None:
    """All of an attempt's own mounts, links and bundle paths go through a name like that."""
    where = make_tree(Path(base, "state", os.fsdecode(name)))
    result, out, _ = run(where / "state", odd_job(where), source=where / "src", output=where / "out")
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"source\ntool\n")
    disk = Job(rootfs="host", steps=(sh("echo x > /work/build/x"),), limits=Limits(disk="32MiB"))
    assert run(where / "state", disk)[0].outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("name", ["\udcff", chr(0xD800), "nul\0", ""], ids=repr)
def test_a_state_directory_that_no_bundle_can_name(base: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Refused at open, before anything is made."""
    monkeypatch.chdir(base)
    before = sorted(os.listdir(base))

    async def main() -> None:
        async with Executor.open(name and f"{base}/{name}/state"):
            pass

    with pytest.raises(InvalidRequest, match="state_dir"):
        asyncio.run(main())
    assert sorted(os.listdir(base)) == before


def test_an_unknown_runtime_makes_nothing(base: str) -> None:
    """The runtime is looked for before the state directory is made."""

    async def main() -> None:
        async with Executor.open(f"{base}/never", runtime="no-such-runtime"):
            pass

    with pytest.raises(ExecutorError, match="no runtime is called"):
        asyncio.run(main())
    assert not Path(base, "never").exists()


def test_symlinked_parents_are_resolved_once(shared_state: Path, base: str) -> None:
    """A source, a toolchain and an output below a symlink are what the symlink leads to."""
    where = make_tree(Path(base, "real"))
    link = Path(base, "link")
    link.symlink_to(where)
    result, out, _ = run(shared_state, odd_job(link), source=link / "src", output=link / "out")
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"source\ntool\n")
    assert (where / "out" / "r").read_text() == "out\n"


def test_outputs_inside_one_another(shared_state: Path, base: str) -> None:
    """`reports` and `reports/junit.xml` are both promised: collected once, both present, in either order."""
    script = "mkdir -p /work/output/reports/deep; echo 1 > /work/output/reports/deep/junit.xml"
    paths = ("reports", "./reports/deep/junit.xml", "reports/deep/")
    for number, order in enumerate((paths, paths[::-1])):
        target = Path(base, f"nested-{number}")
        job = Job(rootfs="host", steps=(sh(script),), outputs=tuple(Output(path) for path in order))
        result, _, _ = run(shared_state, job, output=target)
        assert result.outcome is Outcome.SUCCEEDED, result.message
        assert (target / "reports" / "deep" / "junit.xml").read_text() == "1\n"
        assert sum(output.files for output in result.outputs) == 1
    job = Job(rootfs="host", steps=(sh("mkdir /work/output/reports"),), outputs=tuple(Output(path) for path in paths))
    result, _, _ = run(shared_state, job, output=Path(base, "nested-missing"))
    assert (result.outcome, [output.missing for output in result.outputs]) == (Outcome.FAILED, [False, True, True])


def test_words_at_the_kernels_limits_run(shared_state: Path) -> None:
    """What is let through by our counting is let through by execve: one word, and all of them together."""
    word = "x" * (STRING_LIMIT - 1)
    result, out, _ = run(shared_state, Job(rootfs="host", steps=(Step("/usr/bin/printf", "%s", word),)))
    assert (result.outcome, len(out)) == (Outcome.SUCCEEDED, len(word))

    argv = ("/bin/sh", "-c", "true")
    fixed = step_environment({}, {}, {}, user="forgeyard", toolchains=())
    room = TOTAL_LIMIT - sum(len(w) + 9 for w in argv) - sum(len(f"{k}={v}") + 9 for k, v in fixed.items())
    env: dict[str, str] = {}
    while room > 120_000:
        name = f"V{len(env):03}"
        env[name] = "x" * 100_000
        room -= len(name) + 1 + 100_000 + 9
    env["LAST"] = "x" * (room - len("LAST=") - 9)
    result, _, err = run(shared_state, Job(rootfs="host", steps=(Step(*argv, env=env),)))
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    env["LAST"] += "x"
    with pytest.raises(InvalidRequest, match=r"arguments and environment together.*env\.V000"):
        run(shared_state, Job(rootfs="host", steps=(Step(*argv, env=env),)))


def test_a_disk_larger_than_the_host_can_hold_is_a_refusal(shared_state: Path) -> None:
    """4 EiB is a number the types allow and no file system takes: the cure says so, and nothing stays."""
    with pytest.raises(ExecutorError, match="smaller disk"):
        run(shared_state, Job(rootfs="host", steps=(sh("true"),), limits=Limits(disk="4096PiB")))
    assert [name for name in os.listdir(shared_state / "sandboxes") if not name.startswith(".")] == []
