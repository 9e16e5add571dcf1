"""Processes of one job talk to each other: pipes, sockets, locks, shared memory, loopback."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builds import build, host_tool

pytestmark = pytest.mark.kernel

BUILD = "/work/build"


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("mkfifo p; echo through > p & cat p", "through"),
        ("seq 1 20 | xargs -P 4 -n 1 echo | sort -n | tail -n 1", "20"),
        ("echo 1 > f; tail -f f > seen & echo 2 >> f; until grep -q 2 seen; do :; done; kill $!; cat seen", "1 2"),
        ("echo x > /dev/shm/f; cat /dev/shm/f", "x"),
        ("(sleep 0.01; kill -USR1 $$) & trap 'echo signalled; exit' USR1; while :; do :; done", "signalled"),
    ],
    ids=["fifo", "xargs -P", "tail -f", "/dev/shm", "signal"],
)
def test_between_processes(shared_state: Path, root: dict[str, str], script: str, expected: str) -> None:
    """What shell scripts use between their processes works, in both modes."""
    assert build(shared_state, script, at=BUILD, **root).split() == expected.split()


def test_file_locks(shared_state: Path) -> None:
    """flock and POSIX locks hold between processes."""
    host_tool("flock")
    script = """
flock l sh -c 'if flock -n l true; then echo again; else echo held; fi'
python3 - <<'X'
import fcntl, os
file = open("l", "w"); fcntl.lockf(file, fcntl.LOCK_EX)
if not os.fork():
    try:
        fcntl.lockf(open("l", "w"), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        print("held", flush=True)
    os._exit(0)
os.wait()
X"""
    assert build(shared_state, script, at=BUILD) == "held\nheld\n"


def test_loopback(shared_state: Path) -> None:
    """Inside `deny`, a server and its client meet on 127.0.0.1, on ::1, by the name localhost and by the host name."""
    host_tool("python3")
    script = """python3 - <<'X'
import socket
for name, family in (("127.0.0.1", 2), ("::1", 10), ("localhost", 2), ("localhost", 10), (socket.gethostname(), 2)):
    with socket.create_server((name, 0), family=family) as server:
        client = socket.create_connection(server.getsockname()[:2], 5)
        peer, _ = server.accept()
        peer.sendall(b"ok")
        print(client.recv(2).decode())
        client.close(); peer.close()
X"""
    assert build(shared_state, script) == "ok\n" * 5


def test_unix_sockets(shared_state: Path) -> None:
    """Unix sockets work by path in every writable directory, by abstract name, as datagrams and with descriptors."""
    host_tool("python3")
    script = """python3 - <<'X'
import os, socket
for address in (*(d + "/s" for d in ("/tmp", "/work/build", "/work/tmp", os.environ["HOME"])), "\\0name"):
    for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM):
        with socket.socket(socket.AF_UNIX, kind) as s, socket.socket(socket.AF_UNIX, kind) as c:
            s.bind(address)
            if kind == socket.SOCK_STREAM:
                s.listen()
            c.connect(address)
        if address[0] == "/":
            os.unlink(address)
a, b = socket.socketpair()
read, write = os.pipe()
socket.send_fds(a, [b"x"], [write])
_, fds, _, _ = socket.recv_fds(b, 1, 1)
os.write(fds[0], b"passed")
print(os.read(read, 6).decode())
X"""
    assert build(shared_state, script) == "passed\n"


def test_multiprocessing(shared_state: Path) -> None:
    """Python's pools, queues, semaphores and shared memory, each start method, find what they need in /dev/shm."""
    host_tool("python3")
    script = """
cat > m.py <<'X'
import multiprocessing as mp
from multiprocessing import shared_memory
if __name__ == "__main__":
    for how in ("fork", "spawn", "forkserver"):
        context = mp.get_context(how)
        with context.Pool(2) as pool:
            assert pool.map(abs, [-1, -2]) == [1, 2]
    queue = mp.Queue(); queue.put(1); assert queue.get() == 1
    block = shared_memory.SharedMemory(create=True, size=1 << 20); block.buf[0] = 1; block.close(); block.unlink()
    print("shared")
X
python3 m.py"""
    assert build(shared_state, script, at=BUILD) == "shared\n"


def test_inotify(shared_state: Path) -> None:
    """A watcher is told of a change in each writable directory."""
    host_tool("python3")
    script = """python3 - <<'X'
import ctypes, os, select
libc = ctypes.CDLL(None, use_errno=True)
for place in ("/tmp", "/work/build", os.environ["HOME"]):
    fd = libc.inotify_init1(0)
    assert fd >= 0 and libc.inotify_add_watch(fd, place.encode(), 0x100) > 0, os.strerror(ctypes.get_errno())
    open(f"{place}/made", "w").close()
    assert select.select([fd], [], [], 5)[0], place
    print(os.read(fd, 4096)[16:20].decode())
X"""
    assert build(shared_state, script) == "made\n" * 3


def test_terminals(shared_state: Path) -> None:
    """A job has no terminal, and can make its own: `script` and what tests of command lines use."""
    host_tool("script")
    out = build(shared_state, "tty || :; script -qec tty /dev/null", at=BUILD)
    assert out.split("\n")[0] == "not a tty"
    assert "/dev/pts/" in out


def test_redis(shared_state: Path) -> None:
    """A server in the background of a step answers on a Unix socket and on loopback."""
    host_tool("redis-server")
    script = """
redis-server --save '' --port 7000 --bind 127.0.0.1 --unixsocket /work/tmp/s --logfile log &
until redis-cli -s /work/tmp/s ping 2>/dev/null; do kill -0 $!; done
redis-cli -p 7000 set k v; redis-cli -p 7000 shutdown nosave; wait"""
    assert build(shared_state, script, at=BUILD) == "PONG\nOK\n"


def test_postgres(shared_state: Path) -> None:
    """initdb, System V and POSIX shared memory, and a connection over a Unix socket."""
    programs = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb")) if os.path.isdir("/usr/lib/postgresql") else []
    if not programs:
        pytest.skip("the host's /usr has no PostgreSQL server")
    script = """
initdb -D data -A trust --no-sync > /dev/null
pg_ctl -D data -s -w -l log -o "-k /tmp -c listen_addresses='' -c fsync=off" start
psql -h /tmp -d postgres -Atc 'select 41 + 1'; pg_ctl -D data -s -m immediate stop"""
    env = {"PATH": f"{programs[-1].parent}:/usr/bin:/bin"}
    assert build(shared_state, script, at=BUILD, env=env) == "42\n"
