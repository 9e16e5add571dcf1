"""Links, renames and writes that would reach beyond the source, the toolchain or the output."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
from jobs import run, sh

from forgeyard_executor import ApprovedHostPath, Job, Outcome, SourceMode

pytestmark = pytest.mark.kernel

SECRET = "a secret of the host\n"

# Each a command that must fail; {canary} is a file of the host's outside every tree.
IN_TOOLCHAIN = {
    "write": "echo x > /toolchains/t/data",
    "append through a link": "ln -s /toolchains/t/data /tmp/l1 && echo x >> /tmp/l1",
    "truncate": ": > /toolchains/t/data",
    "create": "touch /toolchains/t/new",
    "make a directory": "mkdir /toolchains/t/newdir",
    "unlink": "rm -f /toolchains/t/data",
    "rename within": "mv /toolchains/t/data /toolchains/t/moved",
    "rename over": "touch /tmp/mine && mv -f /tmp/mine /toolchains/t/data",
    "hard link out": "ln /toolchains/t/data /work/output/hard",
    "hard link in": "touch /work/output/h2 && ln /work/output/h2 /toolchains/t/h2",
    "symlink in": "ln -s /etc /toolchains/t/sym",
    "change mode": "chmod 777 /toolchains/t/data",
    "change owner": "chown 1000 /toolchains/t/data",
    "change times": "touch -t 200001010000 /toolchains/t/data",
    "write in place": "dd if=/dev/zero of=/toolchains/t/data bs=1 count=1 conv=notrunc",
    "read by a link of the tree": "cat /toolchains/t/escape",
    "read by dots of a link": "cat /toolchains/t/up/canary",
    "execute with its set-user-id bit": 'x=$(/toolchains/t/id -u); test -z "$x" -o "$x" = 0',
}
IN_SOURCE = {
    "read by a link of the tree": "cat escape",
    "read by dots of a link": "cat up/canary",
    "write by a link of the tree": "echo x > escape",
    "climb out": "cat ../../{canary}",
    "climb out of the mount": "cd /work/source/../../../..{directory} && cat canary",
    "hard link out of the host": "ln {canary} stolen",
    "hard link into the output": "ln f /work/output/hard2 && echo x > /work/output/hard2 && grep -q x f",
    "rename out of the host": "mv {canary} stolen",
    "device node": "mknod disk b 8 0 && test -e disk",
    "owner to root": "chown 0:0 f",
    "execute with its set-user-id bit": 'x=$(./id -u); test -z "$x" -o "$x" = 0',
}
READ_ONLY_SOURCE = {
    "write": "echo x > f",
    "unlink": "rm -f f",
    "rename": "mv f g",
    "create": "touch new",
    "hard link within": "ln f g",
    "rename a directory over the mount": "mv /work/tmp /work/source",
    "remove the mount": "rmdir /work/source",
    "change mode": "chmod 777 f",
}


class Trees:
    """A tree, with links that lead out of it, beside a canary; and what it was."""

    def __init__(self, path: Path) -> None:
        self.base, self.tree = path, path / "tree"
        self.tree.mkdir()
        (path / "canary").write_text(SECRET)
        for name in ("f", "data"):
            (self.tree / name).write_text("original\n")
        (self.tree / "escape").symlink_to(path / "canary")
        (self.tree / "up").symlink_to("..")
        shutil.copy("/bin/busybox", self.tree / "id")
        for part in (path, self.tree, path / "canary", *(self.tree / name for name in ("f", "data", "id"))):
            part.chmod(0o777)
        os.chmod(self.tree / "id", 0o4755)
        self.before = self.look()

    def look(self) -> list[tuple[object, ...]]:
        """Every file: name, inode, mode, owner, links, size, times, bytes."""
        facts: list[tuple[object, ...]] = []
        for root, directories, files in os.walk(self.base):
            for name in sorted((*directories, *files)):
                path = Path(root, name)
                info = path.lstat()
                content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
                facts.append((str(path), info.st_ino, info.st_mode, info.st_uid, info.st_nlink, info.st_mtime, content))
        return sorted(facts, key=str)


def attempt_all(state: Path, trees: Trees, commands: dict[str, str], **job: object) -> dict[str, str]:
    """Try `commands` in one sandbox, each in a shell of its own."""
    texts = {
        name: text.format(canary=trees.base / "canary", directory=trees.base)
        if "{canary}" in text or "{dir" in text
        else text
        for name, text in commands.items()
    }
    script = "\n".join(
        f"(\n{text}\n) >/dev/null 2>&1 && echo '{name}|done' || echo '{name}|refused'" for name, text in texts.items()
    )
    result, out, err = run(
        state,
        Job(steps=(sh(script),), toolchains=(ApprovedHostPath(str(trees.tree), "/toolchains/t"),), **job),  # type: ignore[arg-type]  # passed on by name
        source=trees.tree,
    )
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    return dict(line.split("|") for line in out.decode().splitlines())  # type: ignore[misc]  # two parts each


class Tried:
    """The answers of one mode, and the trees."""

    def __init__(self, state: Path, trees: Trees, job: dict[str, object]) -> None:
        self.trees = trees
        self.strict = attempt_all(state, trees, IN_TOOLCHAIN | READ_ONLY_SOURCE_NAMED, source_mode=SourceMode.RO, **job)
        self.copied = attempt_all(state, trees, IN_SOURCE, source_mode=SourceMode.COW, **job)


READ_ONLY_SOURCE_NAMED = {f"ro {name}": text for name, text in READ_ONLY_SOURCE.items()}


@pytest.fixture(scope="module")
def sandboxes(shared_state: Path, busybox_image: str) -> Iterator[Callable[[str], Tried]]:
    """One sandbox per mode, made when first asked for: tests in random order would make a parametrised one anew."""
    jobs = {"host": {"rootfs": "host"}, "image": {"image": busybox_image, "user": "app"}}
    path = Path(tempfile.mkdtemp(prefix="fy-trees-", dir="/var/tmp"))
    path.chmod(0o755)

    def attempt(mode: str) -> Tried:
        (path / mode).mkdir()
        return Tried(shared_state, Trees(path / mode), dict(jobs[mode]))

    yield cache(attempt)
    shutil.rmtree(path)


@pytest.fixture(params=["host", "image"])
def tried(request: pytest.FixtureRequest, sandboxes: Callable[[str], Tried]) -> Tried:
    """All attacks on trees, in a sandbox with a read-only source and in one with a copied one."""
    return sandboxes(request.param)


@pytest.mark.acceptance("Toolchain store is read-only.")
@pytest.mark.parametrize("name", IN_TOOLCHAIN)
def test_toolchain(tried: Tried, name: str) -> None:
    """The store can't be changed by any name of it, nor read through to what is beside it."""
    assert tried.strict[name] == "refused"
    assert tried.trees.look() == tried.trees.before


@pytest.mark.acceptance("Source tree is read-only in strict mode.")
@pytest.mark.parametrize("name", READ_ONLY_SOURCE)
def test_read_only_source(tried: Tried, name: str) -> None:
    """Neither the tree nor the mount that shows it can be changed."""
    assert tried.strict[f"ro {name}"] == "refused"
    assert tried.trees.look() == tried.trees.before


@pytest.mark.acceptance("Hardlink optimization cannot mutate CAS.")
@pytest.mark.parametrize("name", IN_SOURCE)
def test_copied_source(tried: Tried, name: str) -> None:
    """A copied source is no way to the host either: links resolve inside, and what is written is dropped."""
    assert tried.copied[name] == "refused"
    assert tried.trees.look() == tried.trees.before


PLANTED = {
    "symlink to a file": "ln -s {canary} o/x",
    "symlink to a directory": "ln -s {directory} o/x",
    "directory swapped for a link": "mkdir o/d; echo mine > o/d/canary; rm -r o/d; ln -s {directory} o/d",
    "link upwards": "ln -s ../../../../../.. o/x",
    "link to a descriptor": "ln -s /proc/self/fd/0 o/x; ln -s /proc/1/root/etc/shadow o/y",
    "fifo": "mkfifo o/x",
    "set-user-id": "cp /bin/cat o/x; chmod 6777 o/x",
    "hostile names": "touch \"o/$(printf 'a\\nb')\" \"o/$(printf '\\033[2J')\" 'o/..x' 'o/-rf'",
}


@pytest.mark.acceptance("Build/output dirs are writable only as intended.")
@pytest.mark.parametrize("name", PLANTED)
def test_planted_output(shared_state: Path, tmp_path: Path, name: str) -> None:
    """What a job leaves to be collected can't bring the host's files out, block the collection, or keep a privilege."""
    (tmp_path / "canary").write_text(SECRET)
    script = "mkdir o; " + PLANTED[name].format(canary=tmp_path / "canary", directory=tmp_path)
    out = tmp_path / "out"
    result, _, err = run(shared_state, Job(rootfs="host", steps=(sh(f"cd /work/output; {script}"),)), output=out)
    assert result.steps[0].exit is not None
    assert result.steps[0].exit.ok, err
    assert (tmp_path / "canary").read_text() == SECRET
    for path in out.rglob("*"):
        info = path.lstat()
        assert not info.st_mode & 0o6000, path
        # A link that is kept must stay inside what was collected.
        assert not path.is_symlink() or path.resolve().is_relative_to(out), path
        assert path.is_symlink() or path.is_dir() or path.is_file(), path
        assert not path.is_file() or SECRET not in path.read_text(errors="replace"), path
