"""Programs of today under our filter, on each runtime: what they try and fall back from has to work (C65)."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from jobs import collect, sh

from forgeyard_executor import ExecutionResult, Executor, Job, Outcome, Step

pytestmark = pytest.mark.kernel

# 435 clone3, 439 faccessat2: the same on every machine. 9999: a call of a kernel yet to come.
PROBE = """
import ctypes, errno, os, threading
libc = ctypes.CDLL(None, use_errno=True)
def number(nr, *args):
    ctypes.set_errno(0)
    libc.syscall(nr, *args)
    return errno.errorcode.get(ctypes.get_errno(), "0")
print(number(435, 0, 0), number(9999), number(439, -100, b"/", 0, 0))
print("EPERM" if libc.mount(b"none", b"/tmp", b"tmpfs", 0, None) and ctypes.get_errno() == errno.EPERM else "?")
seen = []
threads = [threading.Thread(target=seen.append, args=(n,)) for n in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
print(sorted(seen), os.confstr("CS_GNU_LIBC_VERSION"))
"""
ACCESS = """
[ -w /work/build ] || echo not writable
[ -w /usr/bin ] && echo writable
[ -r /etc/passwd ] || echo not readable
[ -x /bin/sh ] || echo not executable
cd /work/build && touch f && [ -w f ] && chmod 400 f && [ ! -w f ] && echo right
"""


@pytest.fixture(params=["runc", "crun"])
def runtime(request: pytest.FixtureRequest, require_tool: Callable[[str], str]) -> str:
    """Each runtime that compiles our filter, where it runs at all."""
    require_tool(request.param)
    if request.param == "crun" and Path("/sys/fs/cgroup/unified/cgroup.controllers").exists():
        pytest.skip("crun refuses every container on a host with hybrid cgroups")
    return str(request.param)


def run_with(runtime: str, state: Path, job: Job) -> tuple[ExecutionResult, str, str]:
    """Run `job` with that runtime."""

    async def main() -> tuple[ExecutionResult, str, str]:
        async with Executor.open(state, runtime=runtime) as executor, executor.run(job) as execution:
            out, err = await collect(execution)
            return await execution.wait(), out.decode(), err.decode()

    return asyncio.run(main())


def test_threads_and_unknown_calls(shared_state: Path, runtime: str, require_tool: Callable[[str], str]) -> None:
    """clone3 and a call nobody knows answer ENOSYS, so that glibc falls back; a known refusal is EPERM."""
    require_tool("/usr/bin/python3")
    job = Job(rootfs="host", steps=(Step("/usr/bin/python3", "-c", PROBE),))
    result, out, err = run_with(runtime, shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED, err
    calls, mount, threads = out.splitlines()
    assert calls.split() == ["ENOSYS", "ENOSYS", "0"]
    assert mount == "EPERM"
    assert threads.startswith("[0, 1, 2, 3] glibc 2.")
    assert int(threads.rpartition(".")[2]) >= 34


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
def test_access_of_a_shell(shared_state: Path, runtime: str, shell: str) -> None:
    """`[ -w file ]` asks through faccessat2, and believes an EPERM: it gets the truth."""
    result, out, err = run_with(runtime, shared_state, Job(rootfs="host", steps=(Step(shell, "-c", ACCESS),)))
    assert (result.outcome, out, err) == (Outcome.SUCCEEDED, "right\n", "")


def test_access_in_an_image(shared_state: Path, runtime: str, busybox_image: str) -> None:
    """The same in an image, whose root is the job's to write to where the modes say so."""
    script = "touch /tmp/f && [ -w /tmp/f ] && [ ! -w /bin/busybox ] && echo right"
    result, out, _ = run_with(runtime, shared_state, Job(image=busybox_image, user="1000", steps=(sh(script),)))
    assert (result.outcome, out) == (Outcome.SUCCEEDED, "right\n")


def test_a_profile_may_name_a_call_that_libseccomp_does_not_know(
    shared_state: Path, state_dir: Path, runtime: str, require_tool: Callable[[str], str]
) -> None:
    """A filter newer than the host's library is loaded without that call, not refused, and the rest holds."""

    async def generate() -> None:
        job = Job(rootfs="host", steps=(sh("mkdir /x 2>&1; chroot / 2>&1; echo ran"),))
        async with Executor.open(shared_state, runtime=runtime) as executor:
            await executor.generate_bundle(job, state_dir / "bundle")

    asyncio.run(generate())
    config = json.loads((state_dir / "bundle" / "config.json").read_bytes())
    for rule in config["linux"]["seccomp"]["syscalls"][:2]:
        rule["names"].append(f"no_such_call_{rule['action'].lower()}")
    (state_dir / "bundle" / "config.json").write_text(json.dumps(config))
    name = f"fy-unknown-call-{runtime}-{os.getpid()}"
    command = [require_tool(runtime), "--root", str(state_dir / "root"), "run", "--bundle", str(state_dir / "bundle")]
    done = subprocess.run([*command, name], capture_output=True, stdin=subprocess.DEVNULL, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == b"ran"
    assert os.strerror(errno.EPERM).encode() in done.stdout
