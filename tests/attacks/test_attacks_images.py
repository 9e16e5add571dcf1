"""The unpacked layers of an image, which every job shares: no job changes them, whatever it may do in its own view."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path

import build
import pytest
from attacks import attack_step, build_attacker, parse_answers, toolchain
from jobs import run, sh
from small_images import image

from forgeyard_executor import Job, Outcome, Profile
from forgeyard_model.policy import CapabilityGrant

pytestmark = pytest.mark.kernel

LAYERS = [
    build.tar(
        [
            build.folder("srv/", mode=0o777),
            build.folder("srv/d/", mode=0o777),
            build.Entry("srv/d/inner", b"lower\n", mode=0o666),
            build.Entry("srv/f", b"lower\n", mode=0o666, uid=1000, gid=1000),
            build.Entry("srv/root", b"lower\n", mode=0o666),
            build.Entry("srv/linked", b"lower\n", mode=0o666),
            build.hardlink("srv/again", "srv/linked"),
            build.Entry("srv/suid", b"#!/bin/sh\n", mode=0o4755),
            build.Entry("srv/attributes", b"lower\n", mode=0o666, pax={"SCHILY.xattr.user.note": "lower"}),
        ]
    ),
    build.tar([build.whiteout("srv/gone"), build.Entry("srv/over", b"upper\n", mode=0o666)]),
]

# What changes the job's own view, or fails: both are fine, and both have to leave the layers alone.
IN_ITS_VIEW = {
    "write": "echo x > /srv/f",
    "append": "echo x >> /srv/root",
    "write in place": "dd if=/dev/zero of=/srv/f bs=1 count=1 conv=notrunc",
    "truncate": ": > /srv/root",
    "write by /proc/self/root": "echo x > /proc/self/root/srv/f",
    "write by /proc/self/cwd": "cd /srv && echo x > /proc/self/cwd/root",
    "write by a descriptor of a reader": "exec 9< /srv/root && echo x > /proc/self/fd/9",
    "write through a hard link": "ln /srv/linked /srv/mine && echo x > /srv/mine",
    "hard link into the output": "ln /srv/linked /work/output/mine && echo x > /work/output/mine",
    "hard link into tmp": "ln /srv/f /tmp/f && echo x > /tmp/f",
    "write through a link": "ln -s /srv/root /tmp/l && echo x > /tmp/l",
    "rename": "mv /srv/f /srv/moved && echo x > /srv/moved",
    "rename over": "echo x > /srv/new && mv -f /srv/new /srv/root",
    "rename a directory": "mv /srv/d /srv/e && echo x > /srv/e/inner && rm -rf /srv/e",
    "exchange directories": "mkdir /srv/n && mv /srv/d /srv/n/d && mv /srv/n /srv/d",
    "unlink": "rm -f /srv/f /srv/again",
    "make what was deleted": "echo x > /srv/gone",
    "change mode": "chmod 777 /srv/f /srv/root /srv/d",
    "change owner": "chown 5:5 /srv/f /srv/root /srv",
    "change times": "touch -t 200001010000 /srv/f /srv/d /srv/root",
    "run a set-user-id program": "/srv/suid",
    "remount": "mount -o remount,rw /",
    "mount a bind of the root": "mkdir /tmp/m; mount --bind / /tmp/m && echo x > /tmp/m/srv/f",
    "own mount namespace": "unshare -m sh -c 'mount -o remount,rw / && echo x > /srv/f'",
    "own user namespace": "unshare -Urm sh -c 'mount -o remount,rw / && echo x > /srv/f'",
    "overlay of the root": "mkdir /tmp/u /tmp/w; mount -t overlay o -olowerdir=/,upperdir=/tmp/u,workdir=/tmp/w /tmp/u",
    "whole tree": "chmod -R 777 /srv; chown -R 7:7 /srv; rm -rf /srv; rm -rf /bin/ls /etc; mkdir /srv; echo x > /srv/f",
}
# What has to be refused outright.
CALLS = {
    **dict.fromkeys(("call:remount_rw", "call:mount_bind", "call:open_tree", "call:mount_setattr"), ("EPERM",)),
    "call:open_by_handle": ("EPERM",),
    "call:handle_of_file=/srv/f": ("EPERM", "ENOTSUP", "EOPNOTSUPP"),
    "call:immutable_flag=/srv/f": ("EPERM", "EROFS"),
    "call:immutable_flag=/srv/root": ("EPERM", "EROFS", "EACCES"),
    "call:mapping_made_writable=/srv/root": ("EACCES",),
    "call:trusted_redirect=/srv/d": ("EPERM", "EROFS"),
}


def facts(store: Path) -> dict[str, tuple[object, ...]]:
    """Everything about every file of every layer: bytes, mode, owner, links, times of change, attributes."""
    found = {}
    for tree in sorted(store.rglob("tree")):
        for folder, directories, files in os.walk(tree):
            for name in (".", *directories, *files):
                path = os.path.join(folder, name)
                found[path] = _facts(path)
    return found


def _facts(path: str) -> tuple[object, ...]:
    info = os.lstat(path)
    regular = os.path.isfile(path) and not os.path.islink(path)
    content = hashlib.sha256(Path(path).read_bytes()).hexdigest() if regular else ""
    target = os.readlink(path) if os.path.islink(path) else ""
    names = os.listxattr(path, follow_symlinks=False)
    attributes = {name: os.getxattr(path, name, follow_symlinks=False) for name in names}
    numbers = info.st_ino, info.st_mode, info.st_uid, info.st_gid, info.st_nlink, info.st_rdev, info.st_size
    return (*numbers, info.st_mtime_ns, info.st_ctime_ns, content, target, tuple(sorted(attributes.items())))


KINDS: dict[str, dict[str, object]] = {
    "plain": {"user": "app"},
    "root": {"user": "root", "capabilities": CapabilityGrant.ROOT_IN_USERNS},
    "read-only": {"user": "app", "profile": Profile.RELEASE},
}


class Attacked:
    """The layers before and after one job that tried everything, and the answers to its calls."""

    def __init__(self, state: Path, reference: str, attacker: Path, job: dict[str, object]) -> None:
        run(state, Job(image=reference, steps=(sh("true"),)))
        self.before = facts(state / "images")
        calls = attack_step([*CALLS, "call:user_redirect=/srv/d"])
        # Several sandboxes: what one attack does to the view must not keep all others from what they try.
        scripts = [_script(list(IN_ITS_VIEW.values())[start::_SANDBOXES]) for start in range(_SANDBOXES)]
        out = b""
        for step in (calls, *map(sh, scripts)):
            result, said, err = run(state, Job(image=reference, steps=(step,), toolchains=toolchain(attacker), **job))  # type: ignore[arg-type]  # passed on by name
            assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
            out += said
        self.answers = parse_answers(out)
        after = facts(state / "images")
        self.after = {path: after.get(path) for path in self.before}  # other tests' images may have come since


_SANDBOXES = 3


def _script(commands: Sequence[str]) -> str:
    return "\n".join(f"(\n{text}\n) >/dev/null 2>&1" for text in commands) + "\nexit 0"


@pytest.fixture(scope="module")
def jobs(shared_state: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Attacked]]:
    """The attacks of one kind of user, tried when first asked for."""
    path = Path(tempfile.mkdtemp(prefix="fy-images-", dir="/var/tmp"))
    path.chmod(0o755)
    attacker = build_attacker(path / "attacker")
    reference = image(tmp_path_factory.mktemp("image") / "i", {"User": "app"}, LAYERS)
    yield cache(lambda kind: Attacked(shared_state, reference, attacker, KINDS[kind]))
    shutil.rmtree(path)


@pytest.mark.parametrize("kind", KINDS)
def test_no_job_changes_a_layer(jobs: Callable[[str], Attacked], kind: str) -> None:
    """Not a byte, not a time of change, in none of the layers."""
    attacked = jobs(kind)
    assert sum(path.endswith(("/srv/f", "/srv/over", "/bin/busybox")) for path in attacked.before) >= 3
    assert attacked.after == attacked.before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_calls_that_would(jobs: Callable[[str], Attacked], kind: str, call: str) -> None:
    """Mount calls, handles, inode flags and overlayfs's own attributes are refused."""
    assert jobs(kind).answers[call] in CALLS[call]


@pytest.mark.parametrize("kind", ["plain", "root"])
def test_a_job_does_change_its_own_view(shared_state: Path, tmp_path: Path, kind: str) -> None:
    """So that the attacks above are known to have been carried out: copies are made, and thrown away."""
    job = Job(
        image=image(tmp_path / "i", {"User": "app"}, LAYERS),
        steps=(sh("echo x > /srv/f; mv /srv/d /srv/e; cat /srv/f /srv/e/inner; ls /srv/d"),),
        **KINDS[kind],  # type: ignore[arg-type]  # passed on by name
    )
    for _ in range(2):
        _, out, _ = run(shared_state, job)
        assert out == b"x\nlower\n"
