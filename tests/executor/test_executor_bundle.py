"""`bundle generate`: what it writes, plain runc runs, with the same verdict and none of our processes."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forgeyard_executor import Executor, InvalidRequest, Job, Step

pytestmark = pytest.mark.kernel


def generate(state: Path, job: Job, directory: Path, source: Path | None = None) -> bytes:
    """Write a bundle; its config.json."""

    async def main() -> bytes:
        async with Executor.open(state) as executor:
            return (await executor.generate_bundle(job, directory, source=source)).config

    return asyncio.run(main())


def runc_run(runc: str, bundle: Path, root: Path) -> subprocess.CompletedProcess[bytes]:
    """What a person types to try a bundle."""
    name = f"fy-bundle-{os.getpid()}-{bundle.name}"
    command = [runc, "--root", str(root), "run", "--bundle", str(bundle), name]
    return subprocess.run(command, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=30)


@pytest.mark.parametrize("mode", ["host", "image"])
def test_plain_runc_runs_it(
    shared_state: Path,
    state_dir: Path,
    tree: Path,
    mode: str,
    request: pytest.FixtureRequest,
    require_tool: Callable[[str], str],
) -> None:
    """Steps run in order, the source is there, the exit code is the first unmasked failure's."""
    steps = (
        Step("/bin/sh", "-c", "id -u; cat f; echo changed > f; cat", stdin=b"stdin\n"),
        Step.shell("echo two >&2; exit 7", continue_on_error=True),
        Step.shell("cat /work/source/f; grep -E 'Seccomp:|NoNewPrivs|CapBnd' /proc/self/status; exit 5"),
        Step("echo", "never"),
    )
    root = {"rootfs": "host"} if mode == "host" else {"image": request.getfixturevalue("busybox_image")}
    job = Job(**root, steps=steps, user="1000")
    config = json.loads(generate(shared_state, job, state_dir / "bundle", tree))
    assert config["process"]["args"][1] == "replay"
    assert str(shared_state) not in json.dumps(config)
    done = runc_run(require_tool("runc"), state_dir / "bundle", state_dir / "runc")
    assert done.returncode == 5, done.stderr
    lines = done.stdout.decode().split("\n")
    assert lines[:4] == ["1000", "original", "stdin", "changed"]
    assert {"NoNewPrivs:\t1", "Seccomp:\t2", "CapBnd:\t0000000000000000"} <= set(lines)
    assert "never" not in lines
    assert (tree / "f").read_text() == "original\n"


def test_a_directory_in_use_is_refused(shared_state: Path, state_dir: Path) -> None:
    """Nothing of the user's is mixed with a bundle or overwritten."""
    (state_dir / "kept").write_text("mine")
    with pytest.raises(InvalidRequest, match="empty"):
        generate(shared_state, Job(rootfs="host", steps=(Step("true"),)), state_dir)
    assert [path.name for path in state_dir.iterdir()] == ["kept"]


def test_plan_digest_names_what_is_run(shared_state: Path, state_dir: Path) -> None:
    """Two bundles of one job have one plan digest; another step is another plan."""

    async def main() -> list[str]:
        async with Executor.open(shared_state) as executor:
            jobs = [Job(rootfs="host", steps=(Step("echo", word),)) for word in ("a", "a", "b")]
            bundles = [await executor.generate_bundle(job, state_dir / str(n)) for n, job in enumerate(jobs)]
        assert bundles[0].bundle_digest != bundles[1].bundle_digest
        return [bundle.plan_digest for bundle in bundles]

    first, second, other = asyncio.run(main())
    assert first == second != other
