"""Caches of whole jobs: from one to the next, through the sandbox and back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from jobs import run, sh

from forgeyard_executor import Job, Limits
from forgeyard_model.cache import CacheMode, CacheRequest
from forgeyard_model.job import Timeouts

pytestmark = pytest.mark.kernel
MIB = 1 << 20
RO = CacheMode.RO


def job(script: str, *caches: CacheRequest, **options: Any) -> Job:
    """A job on the host's programs with `caches`."""
    return Job([sh(script)], rootfs="host", caches=caches, **options)


PIP = CacheRequest("pip", "/home/forgeyard/.cache/pip")


@pytest.mark.parametrize("path", ["/home/forgeyard/.cache/pip", "/var/cache/tool", "/opt/deep/er", "/work/build/x"])
@pytest.mark.usefixtures("warm_rootfs")
def test_a_job_finds_what_the_last_one_left(state_dir: Path, leaks: Any, path: str) -> None:
    """Miss, save, hit; it belongs to the job, whoever that is in its sandbox; the result says impure."""
    cache = CacheRequest("k", path)
    first, out, err = run(state_dir, job(f"cd {path}; ls; mkdir d; echo 1 > d/f; stat -c %u . d d/f", cache))
    assert (first.exit_code, out, err) == (0, b"1000\n1000\n1000\n", b"")
    assert [(one.hit, one.saved, one.why) for one in first.caches] == [(False, True, "")]
    assert "cache k rw" in first.provenance.impure
    second, out, _ = run(
        state_dir, job(f"cd {path}; cat d/f; stat -c %u . d d/f; rm d/f; mv d e; echo 2 > g", cache, user="4711")
    )
    assert (second.exit_code, out) == (0, b"1\n4711\n4711\n4711\n")
    assert [(one.hit, one.saved) for one in second.caches] == [(True, True)]
    third, out, _ = run(state_dir, job(f"cd {path}; find . | sort; cat g; touch x", CacheRequest("k", path, RO)))
    assert (third.exit_code, out) == (1, b".\n./e\n./g\n2\n")  # touch: a read-only file system
    assert [(one.hit, one.saved, one.why) for one in third.caches] == [(True, False, "")]
    leaks.assert_none()


@pytest.mark.usefixtures("warm_rootfs")
def test_what_lies_beside_a_cache_is_the_jobs(state_dir: Path) -> None:
    """Directories on the way are made as the job's own."""
    result, out, _ = run(state_dir, job("cd ~/.cache; touch other; stat -c %u . pip; ls", PIP))
    assert (result.exit_code, out) == (0, b"1000\n1000\nother\npip\n")


@pytest.mark.usefixtures("warm_rootfs")
def test_only_a_job_that_succeeded_is_saved(state_dir: Path) -> None:
    """Neither a failure nor a time-out; what was there stays."""
    run(state_dir, job("echo good > ~/.cache/pip/f", PIP))
    failed, _, _ = run(state_dir, job("echo bad > ~/.cache/pip/f; exit 3", PIP))
    assert [(one.saved, one.why) for one in failed.caches] == [(False, "the job did not succeed")]
    late, _, _ = run(
        state_dir,
        job("echo bad > ~/.cache/pip/f; sleep 100", PIP, limits=Limits(wall_time="300ms"), timeouts=Timeouts(grace=0)),
    )
    assert [(one.hit, one.saved) for one in late.caches] == [(True, False)]
    assert run(state_dir, job("cat ~/.cache/pip/f", PIP))[1] == b"good\n"


@pytest.mark.usefixtures("warm_rootfs")
def test_an_untrusted_attempt(state_dir: Path) -> None:
    """The caller says who is trusted; the job can't tell the difference, nor change what others read."""
    run(state_dir, job("echo main > ~/.cache/pip/f", PIP))
    fork, out, _ = run(state_dir, job("cat ~/.cache/pip/f; echo evil > ~/.cache/pip/f", PIP), trusted=False)
    assert (fork.exit_code, out) == (0, b"main\n")
    assert [(one.hit, one.saved) for one in fork.caches] == [(True, False)]
    assert run(state_dir, job("cat ~/.cache/pip/f", PIP))[1] == b"main\n"
    assert run(state_dir, job("ls ~/.cache/pip", PIP), tenant="other")[1] == b""


@pytest.mark.usefixtures("warm_rootfs")
def test_what_a_job_writes_to_a_cache_is_its_disk(state_dir: Path) -> None:
    """The snapshot below costs it nothing; more than the limit ends as for any other file."""
    filled = "dd if=/dev/urandom of=$HOME/.cache/pip/{} bs=1M count={} status=none"
    limits = Limits(disk="24MiB")
    first, _, _ = run(state_dir, job(filled.format("a", 16), PIP, limits=limits))
    assert [one.saved for one in first.caches] == [True]
    second, _, _ = run(state_dir, job(filled.format("b", 160), PIP, limits=limits))
    assert second.exit_code != 0
    third, _, _ = run(state_dir, job(filled.format("b", 16), PIP, limits=limits))
    assert (third.exit_code, [one.saved for one in third.caches]) == (0, [True])
    assert third.caches[0].bytes == 32 * MIB


@pytest.mark.usefixtures("warm_rootfs")
def test_links_out_of_a_cache_lead_into_the_sandbox(state_dir: Path) -> None:
    """An absolute link of an earlier job means the next one's own file, and a hard link to one of the host can't be."""
    run(state_dir, job("ln -s /etc/hostname ~/.cache/pip/l; ln -s ../../../../../../etc/shadow ~/.cache/pip/u", PIP))
    result, out, _ = run(state_dir, job("readlink ~/.cache/pip/l; cat ~/.cache/pip/u", PIP))
    assert (result.exit_code, out) == (1, b"/etc/hostname\n")
    assert all(note for one in result.caches for note in one.notes)


@pytest.mark.usefixtures("warm_rootfs")
def test_two_caches_and_an_end_to_end_key(state_dir: Path) -> None:
    """Each by its own key, one read and one written in the same job."""
    run(
        state_dir,
        job("echo a > /opt/a/f; echo b > /opt/b/f", CacheRequest("a/x", "/opt/a"), CacheRequest("b x", "/opt/b")),
    )
    result, out, _ = run(
        state_dir,
        job("cat /opt/*/f; echo c > /opt/c/f", CacheRequest("a/x", "/opt/b", RO), CacheRequest("b x", "/opt/c")),
    )
    assert (result.exit_code, out) == (0, b"a\nb\n")
    assert [one.saved for one in result.caches] == [False, True]


@pytest.mark.parametrize("user", ["root", "33:44"])
def test_a_cache_in_an_image(shared_state: Path, busybox_image: str, user: str) -> None:
    """Its place is made in the image's own tree, which nobody else sees; any user of the image owns it."""
    cache = CacheRequest(f"image-{user}", "/root/.m2/repository")
    script = "cd /root/.m2/repository && cat f; stat -c %u:%g .; echo 1 > f"
    for expected in (b"", b"1\n"):
        result, out, err = run(shared_state, Job([sh(script)], image=busybox_image, user=user, caches=(cache,)))
        owner = b"0:0\n" if user == "root" else b"33:44\n"
        assert (result.exit_code, out) == (0, expected + owner), err
        assert [one.hit for one in result.caches] == [bool(expected)]
