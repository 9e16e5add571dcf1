"""What a job sees and leaves: identity, source, network, approvals, outputs."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_executor import (
    ApprovedHostPath,
    InvalidRequest,
    Job,
    Network,
    Outcome,
    Output,
    Profile,
    SourceMode,
    Step,
)

pytestmark = pytest.mark.kernel


def test_identity_and_filesystem(shared_state: Path) -> None:
    """The job is forgeyard (1000) with the contract's directories and variables; the root is read-only."""
    script = """
    id -u; id -un; echo $HOME $TZ $LANG $CI; pwd
    for d in /work/build /work/output /work/tmp /tmp $HOME; do echo x > $d/f || echo ro $d; done
    touch /etc/f 2>/dev/null && echo writable || echo read-only
    cat /etc/shadow 2>/dev/null && echo shadow
    ls /root /home 2>/dev/null
    hostname
    """
    result, out, _ = run(shared_state, Job(rootfs="host", steps=(sh(script),)))
    lines = out.decode().split("\n")
    assert lines[:4] == ["1000", "forgeyard", "/home/forgeyard UTC C.UTF-8 true", "/work/build"]
    assert "read-only" in lines
    assert "shadow" not in lines
    assert not any(line.startswith("ro ") for line in lines)
    assert result.outcome is Outcome.SUCCEEDED


@pytest.mark.parametrize("mode", [SourceMode.RO, SourceMode.COW])
def test_source(shared_state: Path, root: dict[str, str], tree: Path, mode: SourceMode) -> None:
    """The source is the job's own by owner; ro refuses writes, cow takes them and forgets them."""
    script = "stat -c %u f; cat f; echo changed > f && cat f; pwd"
    job = Job(**root, steps=(sh(script),), source_mode=mode, user="1000" if "image" in root else None)
    _result, out, _ = run(shared_state, job, source=tree)
    assert out.startswith(b"1000\noriginal\n")
    assert (b"changed" in out) == (mode is SourceMode.COW)
    assert (tree / "f").read_text() == "original\n"


def test_source_rw_is_for_development(shared_state: Path, tree: Path) -> None:
    """rw writes through to the tree, owned by the tree's owner, in the development profile alone."""
    steps = (sh("echo changed > f; echo new > g"),)
    with pytest.raises(InvalidRequest, match="standard-ci"):
        run(shared_state, Job(rootfs="host", steps=steps, source_mode=SourceMode.RW), source=tree)
    job = Job(rootfs="host", steps=steps, source_mode=SourceMode.RW, profile=Profile.DEVELOPMENT)
    result, _, _ = run(shared_state, job, source=tree)
    assert result.outcome is Outcome.SUCCEEDED
    assert (tree / "g").stat().st_uid == tree.stat().st_uid
    assert "source written in place" in result.provenance.impure


def test_network_is_denied(shared_state: Path, root: dict[str, str]) -> None:
    """Loopback alone."""
    result, out, _ = run(shared_state, Job(**root, steps=(sh("cat /proc/net/dev | tail -n +3 | cut -d: -f1"),)))
    assert out.split() == [b"lo"]
    assert not result.provenance.impure or result.provenance.impure == ("host rootfs",)


def test_host_network_is_impure(shared_state: Path) -> None:
    """Development may share the host's network; the result says so."""
    job = Job(rootfs="host", steps=(sh("cat /proc/net/dev"),), network=Network.host(), profile=Profile.DEVELOPMENT)
    result, out, _ = run(shared_state, job)
    assert out.decode().count(":") == Path("/proc/net/dev").read_text().count(":")
    assert "host network" in result.provenance.impure


def test_outputs(shared_state: Path, root: dict[str, str], tmp_path: Path) -> None:
    """Declared outputs are collected after the end, also of a failed job; a missing required one fails it."""
    steps = (sh("echo data > /work/output/r.xml; mkdir /work/output/d; echo x > /work/output/d/x; exit 3"),)
    outputs = (Output("r.xml"), Output("d"), Output("none", optional=True))
    result, _, _ = run(shared_state, Job(**root, steps=steps, outputs=outputs), output=tmp_path / "o")
    assert result.exit_code == 3
    assert (tmp_path / "o/r.xml").read_text() == "data\n"
    assert (tmp_path / "o/d/x").read_text() == "x\n"
    missing = Job(**root, steps=(sh("true"),), outputs=(Output("r.xml"),))
    result, _, _ = run(shared_state, missing, output=tmp_path / "p")
    assert (result.outcome, result.exit_code) == (Outcome.FAILED, 1)
    assert "r.xml" in result.message


def test_output_symlink_to_host_is_not_followed(shared_state: Path, tmp_path: Path) -> None:
    """A job that plants a link gets no file of the host's into its outputs."""
    steps = (sh("ln -s /etc/shadow /work/output/r.xml"),)
    result, _, _ = run(shared_state, Job(rootfs="host", steps=steps), output=tmp_path / "o")
    assert not (tmp_path / "o/r.xml").is_symlink()
    assert not (tmp_path / "o/r.xml").exists()
    assert any("r.xml" in name for output in result.outputs for name in output.skipped)


def test_high_assurance_is_refused(shared_state: Path) -> None:
    """Without a VM backend the profile can't be served, and nothing is started."""
    job = Job(rootfs="host", steps=(sh("true"),), profile=Profile.HIGH_ASSURANCE)
    with pytest.raises(Exception, match="virtual_machine"):
        run(shared_state, job)
    assert os.listdir(shared_state / "sandboxes") == []


@pytest.mark.parametrize(
    ("step", "field"),
    [
        (Step("echo", "a\0b"), "argv"),
        (Step("echo", "x" * 200_000), "argv"),
        (Step("true", env={"BIG": "x" * 200_000}), "BIG"),
        (Step("true", env={"A=B": "x"}), "A=B"),
        (Step("true", workdir="../../etc"), "workdir"),
    ],
)
def test_what_execve_would_refuse_is_refused_by_name(shared_state: Path, step: Step, field: str) -> None:
    """Bad arguments, variables and directories are named before anything starts, and leave nothing."""
    with pytest.raises(InvalidRequest, match=field):
        run(shared_state, Job(rootfs="host", steps=(step,)))
    assert os.listdir(shared_state / "sandboxes") == []


@pytest.mark.parametrize("source", ["/nosuch", "/etc/passwd", "/"])
def test_source_must_be_a_directory_apart_from_our_state(shared_state: Path, source: str) -> None:
    """An absent source, a file, or a tree that holds the executor's state is refused."""
    with pytest.raises(InvalidRequest, match="source"):
        run(shared_state, Job(rootfs="host", steps=(sh("true"),)), source=source)


def test_toolchains_and_approved_paths(shared_state: Path, tree: Path) -> None:
    """A toolchain is read-only, in front of PATH; an approved path is there; nothing else of the host is."""
    (tree / "bin").mkdir()
    (tree / "bin/greet").write_text("#!/bin/sh\necho hello from $0\n")
    (tree / "bin/greet").chmod(0o755)
    tree.chmod(0o755)
    job = Job(
        rootfs="host",
        steps=(sh("greet; touch /toolchains/t/x 2>/dev/null || echo ro; cat /data/f"),),
        toolchains=(ApprovedHostPath(str(tree), "/toolchains/t"),),
        host_paths=(ApprovedHostPath(str(tree), "/data"),),
    )
    result, out, err = run(shared_state, job)
    assert out == b"hello from /toolchains/t/bin/greet\nro\noriginal\n", err
    assert any(str(tree) in reason for reason in result.provenance.impure)


def test_usr_local_is_an_approval_of_its_own(shared_state: Path) -> None:
    """/usr/local is empty for a job until a policy names it."""
    if not os.listdir("/usr/local/bin"):
        pytest.skip("the host's /usr/local/bin is empty, so there is nothing to hide")
    step = sh("ls /usr/local/bin | wc -l")
    _, out, _ = run(shared_state, Job(rootfs="host", steps=(step,)))
    assert out.strip() == b"0"
    approved = (ApprovedHostPath("/usr/local", "/usr/local"),)
    _, out, _ = run(shared_state, Job(rootfs="host", steps=(step,), host_paths=approved))
    assert int(out) == len(os.listdir("/usr/local/bin"))


@pytest.mark.parametrize("mode", [SourceMode.RO, SourceMode.COW])
def test_a_file_system_below_the_source_is_named(shared_state: Path, tree: Path, mode: SourceMode) -> None:
    """What is mounted below the source does not come along; a note names it, blanks in its path included."""
    inner = tree / "a disk"
    inner.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "inner", str(inner)], check=True)
    try:
        (inner / "file").write_text("of the other file system")
        job = Job(rootfs="host", steps=(sh("ls 'a disk' | wc -l"),), source_mode=mode)
        result, out, _ = run(shared_state, job, source=tree)
    finally:
        subprocess.run(["umount", str(inner)], check=True)
    assert out.strip() == b"0"
    assert any(f"{inner} is a file system of its own" in note for note in result.notes)
    result, _, _ = run(shared_state, Job(rootfs="host", steps=(sh("true"),)), source=tree)
    assert not any("file system of its own" in note for note in result.notes)
