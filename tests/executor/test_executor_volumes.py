"""An image's VOLUMEs and WORKDIR: there, ephemeral, with the image's content, the same on every root (case C49)."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import build
import pytest
from jobs import run, sh
from small_images import image

from forgeyard_executor import Executor, ExecutorError, Job, Outcome, Profile, ResourceLimits, Step

pytestmark = pytest.mark.kernel

SEED = build.tar(
    [
        build.folder("var/lib/"),
        build.folder("var/lib/db/", mode=0o700, uid=1000, gid=1000),
        build.Entry("var/lib/db/seed", b"from the image\n", uid=1000, gid=1000),
        build.Entry("srv/open/seed", b"from the image\n"),
        build.symlink("data", "/srv/open"),
        build.symlink("gone", "/srv/elsewhere"),
        build.Entry("srv/file", b"x"),
    ]
)
PROFILES = [Profile.STANDARD_CI, Profile.RELEASE]


def volume_image(path: Path, *volumes: str, **config: object) -> str:
    """An image that declares `volumes`; its user is app."""
    return image(path, {"Volumes": {name: {} for name in volumes}, "User": "app", **config}, [SEED])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_volume_has_the_images_content_and_is_writable(shared_state: Path, tmp_path: Path, profile: Profile) -> None:
    """On a writable root and on a read-only one: seeded, owned as in the image, gone with the attempt."""
    job = Job(
        image=volume_image(tmp_path / "i", "/var/lib/db", "/var/lib/new"),
        profile=profile,
        steps=(
            sh("cat /var/lib/db/seed; stat -c '%a %u:%g' /var/lib/db /var/lib/new; test ! -e /var/lib/db/mine"),
            sh("echo mine > /var/lib/db/mine; rm /var/lib/db/seed; ls /var/lib/db"),
        ),
    )
    for _ in range(2):
        result, out, err = run(shared_state, job)
        assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
        assert out == b"from the image\n700 1000:1000\n755 0:0\nmine\n"
    assert not list((shared_state / "sandboxes").iterdir())


def test_the_rest_of_a_read_only_root_stays_read_only(shared_state: Path, tmp_path: Path) -> None:
    """Only the declared directories are writable, nested ones included."""
    script = "for d in /var/lib /var /srv / /etc; do touch $d/x 2>&1 && echo $d; done; touch /srv/open/x /srv/a/b/x"
    job = Job(
        image=volume_image(tmp_path / "i", "/srv/open", "/srv/a/b", "/srv/a", User="root"),
        profile=Profile.RELEASE,
        steps=(sh(script),),
    )
    result, out, err = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED, err
    assert all(b"Read-only file system" in line for line in out.splitlines())


@pytest.mark.parametrize("profile", PROFILES)
def test_a_volume_behind_a_link(shared_state: Path, tmp_path: Path, profile: Profile) -> None:
    """Links are resolved inside the image, and the target of a dangling one is made: nothing of the host changes."""
    job = Job(
        image=volume_image(tmp_path / "i", "/data", "/gone", User="root"),
        profile=profile,
        steps=(sh("cat /data/seed; echo x > /gone/x && ls /srv/elsewhere"),),
        user="root",
    )
    result, out, err = run(shared_state, job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"from the image\nx\n"), (result.message, err)
    assert not Path("/srv/elsewhere").exists()


@pytest.mark.parametrize("profile", PROFILES)
def test_volumes_that_mean_nothing_are_noted(shared_state: Path, tmp_path: Path, profile: Profile) -> None:
    """The root itself, and what lies in a mount of ours, are left out, and the result says so."""
    job = Job(
        image=volume_image(tmp_path / "i", "/", "/tmp/cache", "/work/source", "/proc/x", "/dev"),
        profile=profile,
        steps=(sh("echo x > /tmp/x"),),
    )
    result, _, err = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    notes = "\n".join(result.notes)
    assert "its root as a volume" in notes
    assert [name for name in ("/tmp/cache", "/proc/x", "/dev") if f"volume {name} " not in notes] == []


def test_a_volume_above_our_mounts_does_not_hide_them(shared_state: Path, tmp_path: Path) -> None:
    """A volume at /work or /home is below what the sandbox mounts there."""
    job = Job(
        image=volume_image(tmp_path / "i", "/work", "/home", "/etc"),
        profile=Profile.RELEASE,
        steps=(sh("touch /work/output/x /home/forgeyard/x && grep localhost /etc/hosts && cat /etc/group"),),
    )
    result, out, err = run(shared_state, job)
    assert result.outcome is Outcome.SUCCEEDED, err
    assert b"extra:x:2000" in out


def test_a_volume_that_is_a_file_is_refused(shared_state: Path, tmp_path: Path) -> None:
    """It names the volume, and nothing is started."""
    job = Job(image=volume_image(tmp_path / "i", "/srv/file"), steps=(Step("true"),))
    with pytest.raises(ExecutorError, match="volume '/srv/file'") as caught:
        run(shared_state, job)
    assert caught.value.reason == "not_a_directory"


@pytest.mark.parametrize("profile", PROFILES)
def test_a_missing_workdir_is_made(shared_state: Path, tmp_path: Path, profile: Profile) -> None:
    """As docker makes it: root's, 0755, with its parents."""
    job = Job(
        image=volume_image(tmp_path / "i", WorkingDir="opt/app/run"),
        profile=profile,
        steps=(sh("pwd; stat -c '%a %u:%g' . .."),),
    )
    result, out, err = run(shared_state, job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"/opt/app/run\n755 0:0\n755 0:0\n"), (result.message, err)


def test_a_workdir_that_is_a_file_is_refused(shared_state: Path, tmp_path: Path) -> None:
    """It names the image's field."""
    job = Job(image=volume_image(tmp_path / "i", WorkingDir="/srv/file/x"), steps=(Step("true"),))
    with pytest.raises(ExecutorError, match="WORKDIR '/srv/file/x'"):
        run(shared_state, job)


def test_a_volume_counts_against_the_disk_limit(shared_state: Path, tmp_path: Path) -> None:
    """It is part of the writable layer."""
    job = Job(
        image=volume_image(tmp_path / "i", "/var/lib/db"),
        profile=Profile.RELEASE,
        limits=ResourceLimits(disk=32 << 20),
        steps=(sh("dd if=/dev/zero of=/var/lib/db/big bs=1M count=64"),),
    )
    result, _, _ = run(shared_state, job)
    assert result.outcome is Outcome.RESOURCE_EXCEEDED, result.message


def test_an_exported_bundle_has_the_volumes(shared_state: Path, tmp_path: Path) -> None:
    """Plain runc shows the image's content in a volume over a read-only root, and lets it be written."""
    job = Job(
        image=volume_image(tmp_path / "i", "/var/lib/db", "/data", WorkingDir="/opt/run"),
        profile=Profile.RELEASE,
        steps=(sh("cat /var/lib/db/seed; echo x > /var/lib/db/x && pwd && cat /data/seed"),),
    )
    bundle = Path(tempfile.mkdtemp(prefix="fy-bundle-", dir="/var/tmp"))

    async def generate() -> None:
        async with Executor.open(shared_state) as executor:
            await executor.generate_bundle(job, bundle)

    asyncio.run(generate())
    name = f"fy-volumes-{os.getpid()}"
    command = ["runc", "run", "-b", str(bundle), name]
    done = subprocess.run(command, capture_output=True, check=False, stdin=subprocess.DEVNULL)
    shutil.rmtree(bundle)
    assert done.stdout == b"from the image\n/opt/run\nfrom the image\n", done.stderr
