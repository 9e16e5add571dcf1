"""Confinement, tried from inside by a process that then attempts what it must no longer be able to do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from forgeyard_host.confine import detached_copy
from forgeyard_model.errors import SandboxError

pytestmark = pytest.mark.kernel

SCRIPT = """
import ctypes, errno, json, os, resource, socket, sys, threading
from forgeyard_host.confine import Capability, Confinement, confine, detached_copy
libc = ctypes.CDLL(None, use_errno=True)
folder = os.open(sys.argv[1], os.O_RDONLY | os.O_DIRECTORY)
tree = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=detached_copy(folder, "tree", read_only=False))
fixed = os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=detached_copy(folder, "fixed", read_only=True))
os.close(folder)
status = os.open("/proc/self/status", os.O_RDONLY)
keep = tuple(Capability) if sys.argv[2] == "all" else ()
os.umask(0)
confine(Confinement(memory=512 << 20, file_size=1 << 20, descriptors=64, capabilities=keep))
answers = {}

def attempt(name, act):
    try:
        value = act()
        answers[name] = value if isinstance(value, (str, int, list)) else "done"
    except OSError as error:
        answers[name] = errno.errorcode[error.errno]
    except MemoryError:
        answers[name] = "MemoryError"
    except ValueError as error:  # how Python's setrlimit says EPERM
        answers[name] = str(error)

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), name)

def make(name, mode=0o644, dir_fd=tree):
    fd = os.open(name, os.O_CREAT | os.O_WRONLY | os.O_EXCL, mode, dir_fd=dir_fd)
    return fd

def threads():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()

def setuid_file():
    fd = make("setuid")
    os.fchown(fd, 5, 6)
    os.fchmod(fd, 0o4755)
    os.setxattr(fd, "user.k", b"v")
    os.setxattr(fd, "security.capability", bytes.fromhex("0100000200200000000000000000000000000000"))

attempt("root", lambda: os.listdir("/"))
attempt("up", lambda: sorted(os.listdir(os.open("..", os.O_RDONLY, dir_fd=tree))))
attempt("write at root", lambda: make("/x", dir_fd=None))
attempt("make", lambda: os.fstat(make("made")).st_uid)
attempt("give away", setuid_file)
attempt("whiteout", lambda: os.mknod("wh", 0o020000, os.makedev(0, 0), dir_fd=tree))
attempt("device", lambda: os.mknod("dev", 0o020666, os.makedev(1, 3), dir_fd=tree))
attempt("trusted", lambda: os.setxattr(tree, "trusted.overlay.opaque", b"y"))
attempt("read-only write", lambda: make("y", dir_fd=fixed))
attempt("read-only owner", lambda: os.fchown(fixed, 1, 1))
attempt("locked directory", lambda: os.listdir(os.open("locked", os.O_RDONLY, dir_fd=tree)))
attempt("fork", os.fork)
attempt("exec", lambda: os.execv("/bin/true", ["true"]))
attempt("socket", lambda: socket.socket())
attempt("kill", lambda: os.kill(1, 0))
attempt("ptrace", lambda: call("ptrace", 16, 1, 0, 0))
attempt("mount", lambda: call("mount", b"x", b"/", b"tmpfs", 0, None))
attempt("unshare", lambda: call("unshare", 0x10000000))
attempt("setuid", lambda: os.setuid(0))
attempt("chroot", lambda: os.chroot("/"))
attempt("limit", lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 40, 1 << 40)))
attempt("bpf", lambda: call("syscall", 321, 0, 0, 0))
attempt("keyctl", lambda: call("syscall", 250, 0, 0, 0))
attempt("threads", threads)
attempt("memory", lambda: bytearray(1 << 30))
attempt("descriptors", lambda: [os.dup(tree) for _ in range(100)])
answers["status"] = os.read(status, 9000).decode()
os.write(1, json.dumps(answers).encode())
"""


def run(tree: Path, keep: str) -> dict[str, Any]:
    """What a confined process answers."""
    command = [sys.executable, "-I", "-c", SCRIPT, str(tree), keep]
    done = subprocess.run(command, capture_output=True, text=True, env={"MALLOC_ARENA_MAX": "1"}, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A directory with one inside that only its owner may enter."""
    made = tmp_path / "tree"
    (made / "locked").mkdir(parents=True)
    (made / "locked/inside").touch()
    os.chown(made / "locked", 1000, 1000)
    os.chmod(made / "locked", 0o700)
    return made


def test_what_is_left_is_enough_to_unpack(tree: Path) -> None:
    """Files of any owner, setuid bits, capabilities and whiteouts can be made in the tree; it belongs to root."""
    answers = run(tree, "all")
    assert answers["make"] == 0
    assert answers["give away"] == answers["whiteout"] == answers["threads"] == "done"
    assert answers["locked directory"] == ["inside"]
    status = os.stat(tree / "setuid")
    assert (status.st_uid, status.st_gid, status.st_mode & 0o7777) == (5, 6, 0o4755)
    assert set(os.listxattr(tree / "setuid")) == {"user.k", "security.capability"}


def test_nothing_else_is_left(tree: Path) -> None:
    """No host path, process, network, mount, device, privilege or memory beyond what was given."""
    answers = run(tree, "all")
    assert answers["root"] == []
    assert "locked" in answers["up"], "'..' ends at the tree's own root"
    assert answers["read-only write"] == answers["read-only owner"] == "EROFS"
    assert answers["write at root"] == "EROFS"
    for act in ("device", "trusted", "fork", "exec", "socket", "kill", "ptrace", "mount", "unshare", "setuid"):
        assert answers[act] == "EPERM", act
    assert answers["chroot"] == "EPERM"
    assert answers["limit"] == "not allowed to raise maximum limit"
    if os.uname().machine == "x86_64":
        assert answers["bpf"] == answers["keyctl"] == "EPERM"
    assert answers["memory"] == "MemoryError"
    assert answers["descriptors"] == "EMFILE"
    status = dict(line.split(":\t", 1) for line in answers["status"].splitlines() if ":\t" in line)
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"
    assert status["CapBnd"] == status["CapPrm"] == "000000008000001b"


def test_without_capabilities(tree: Path) -> None:
    """None are kept unless asked for."""
    answers = run(tree, "none")
    assert answers["make"] == 0
    assert answers["give away"] == "EPERM"
    assert answers["locked directory"] == "EACCES"
    assert "CapPrm:\t0000000000000000" in answers["status"]


def test_a_copy_of_what_is_gone_is_refused(tmp_path: Path) -> None:
    """A descriptor that no mount can be made of is a typed error."""
    read, write = os.pipe()
    try:
        with pytest.raises(SandboxError) as caught:
            detached_copy(read, "a pipe", read_only=True)
    finally:
        os.close(read)
        os.close(write)
    assert caught.value.reason == "mount_refused"
