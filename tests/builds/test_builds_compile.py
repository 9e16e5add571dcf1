"""Compilers, make and programs that use threads or make code at run time."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from builds import build, host_tool

from forgeyard_executor import Limits

pytestmark = pytest.mark.kernel

BUILD = "/work/build"


def test_threads_of_python(shared_state: Path) -> None:
    """glibc 2.34 and newer start threads by clone3, which the filter answers with ENOSYS: they fall back to clone."""
    host_tool("python3")
    script = """python3 - <<'X'
import threading
done = []
threads = [threading.Thread(target=done.append, args=(n,)) for n in range(50)]
[t.start() for t in threads]; [t.join() for t in threads]
print(len(done))
X"""
    assert build(shared_state, script) == "50\n"


def test_threads_of_c(shared_state: Path) -> None:
    """gcc compiles with its temporary files in /tmp, and the program's threads start."""
    host_tool("gcc")
    script = r"""
cat > t.c <<'X'
#include <pthread.h>
#include <stdio.h>
static void *f(void *a) { return a; }
int main(void) {
    pthread_t t[32]; long sum = 0; void *r;
    for (long i = 0; i < 32; i++) if (pthread_create(t + i, 0, f, (void *)i)) return 1;
    for (int i = 0; i < 32; i++) { pthread_join(t[i], &r); sum += (long)r; }
    printf("%ld\n", sum);
}
X
gcc -pthread -save-temps=obj t.c -o t; ./t; ls /tmp | wc -l"""
    assert build(shared_state, script, at=BUILD) == "496\n0\n"


def test_cplusplus_with_sanitizer(shared_state: Path) -> None:
    """g++ links, and a sanitizer maps its huge shadow and finds the fault: no limit of address space is in the way."""
    host_tool("g++")
    script = r"""
cat > a.cc <<'X'
#include <memory>
int main(int n, char **) { auto p = std::make_unique<int[]>(n); return p.get()[n]; }
X
g++ -fsanitize=address -g a.cc -o a
./a 2> report && exit 1; grep -o heap-buffer-overflow report | head -1"""
    assert build(shared_state, script, at=BUILD) == "heap-buffer-overflow\n"


def test_make_in_parallel(shared_state: Path) -> None:
    """make -j8 with its job server, sub-makes included, builds every target."""
    host_tool("make")
    script = r"""
printf 'all: $(shell seq 1 40)\n\t$(MAKE) last\n%%:\n\techo $@ > out.$@\nlast:\n\techo sub\n' > Makefile
make -s -j8; ls out.* | wc -l"""
    assert build(shared_state, script, at=BUILD) == "sub\n40\n"


def test_job_shell_sees_the_machines_processors(shared_state: Path) -> None:
    """nproc counts the machine's: a cpu limit is time, not a set of cpus (docs/builds.md says what to do)."""
    out = build(shared_state, "nproc; grep -c ^processor /proc/cpuinfo", limits=Limits(cpus=0.5))
    assert out.split() == [str(len(os.sched_getaffinity(0))), str(os.cpu_count())]


def test_just_in_time_compilers(shared_state: Path) -> None:
    """node makes its code executable and uses its thread pool."""
    host_tool("node")
    script = """node -e '
let n = 0; for (let i = 0; i < 3e6; i++) n = (n * 31 + i) | 0;
const c = require("crypto"); let left = 8;
const end = e => { if (e) throw e; if (!--left) console.log("pool"); };
for (let i = 0; i < 8; i++) c.pbkdf2("p", "s", 1000, 32, "sha256", end);
console.log(typeof n)'"""
    assert build(shared_state, script) == "number\npool\n"


def test_executable_mappings(shared_state: Path) -> None:
    """Anonymous memory, a memfd and files in /tmp, HOME and /work can be executed; /dev/shm can't, as in Docker."""
    host_tool("python3")
    script = """
for d in /tmp /work/build /work/tmp "$HOME"; do cp /bin/true $d/t; $d/t; done
cp /bin/true /dev/shm/t; if /dev/shm/t 2>/dev/null; then exit 1; fi
python3 -c '
import mmap, os
mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
fd = os.memfd_create("x"); os.ftruncate(fd, 4096)
mmap.mmap(fd, 4096, prot=mmap.PROT_READ | mmap.PROT_EXEC)
print("mapped")'"""
    assert build(shared_state, script) == "mapped\n"


def test_strace(shared_state: Path) -> None:
    """A job may trace what it starts, and a process of its own that already runs."""
    host_tool("strace")
    script = """
strace -f -o started sh -c /bin/true; grep -c execve started
while :; do sleep 0.01; done & p=$!
strace -qq -o attached -p $p & until test -s attached; do kill -0 $!; done; kill -9 $p; wait"""
    assert int(build(shared_state, script, at=BUILD)) >= 2


def test_gdb(shared_state: Path) -> None:
    """A debugger turns off address randomisation for what it starts, and attaches to a process that runs."""
    host_tool("gdb")
    script = """
sleep 60 & p=$!
gdb -nx -batch -ex 'p "attached"' -p $p 2>&1 | grep -o attached; kill $p
gdb -nx -batch -ex run --args /bin/true 2>&1 | grep -o -e 'exited normally' -e 'Error disabling address'"""
    assert build(shared_state, script, at=BUILD) == "attached\nexited normally\n"
