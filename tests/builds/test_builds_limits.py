"""Programs that size themselves by their cgroup see the job's limits, not the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest
from builds import build, host_tool

from forgeyard_executor import Limits

pytestmark = pytest.mark.kernel

HALF = Limits(cpus=1, memory="512MiB")

# As the JVM and Go look: which hierarchy holds the controller and where, then the file below its mount.
LOOK = r"""python3 - <<'X'
mounts = [line.split(" - ") for line in open("/proc/self/mountinfo")]
own = {line.split(":")[1]: line.rstrip().split(":", 2)[2] for line in open("/proc/self/cgroup")}
def where(controller):
    for left, right in mounts:
        kind, _, options = right.split()
        if kind == "cgroup" and controller in options.split(","):
            key = next(k for k in own if controller in k.split(","))
        elif kind == "cgroup2" and "" in own and not any(controller in k.split(",") for k in own):
            key = ""
        else:
            continue
        return kind, left.split()[4] + own[key].rstrip("/")
kind, memory = where("memory")
print(open(memory + ("/memory.max" if kind == "cgroup2" else "/memory.limit_in_bytes")).read().strip())
kind, cpu = where("cpu")
if kind == "cgroup2":
    print(*open(cpu + "/cpu.max").read().split())
else:
    print(*(open(f"{cpu}/cpu.cfs_{name}_us").read().strip() for name in ("quota", "period")))
X"""


def test_cgroup_files(shared_state: Path) -> None:
    """By /proc/self/cgroup and mountinfo a program finds files that hold its own limits."""
    host_tool("python3")
    memory, cpu = build(shared_state, LOOK, limits=HALF).splitlines()
    quota, period = map(int, cpu.split())
    assert (int(memory), quota / period) == (512 << 20, 1.0)


def test_java(shared_state: Path) -> None:
    """The JVM starts its threads, sees one processor, and takes a quarter of the limit as its heap."""
    host_tool("java")
    script = r"""
cat > M.java <<'X'
public class M {
    public static void main(String[] a) throws Exception {
        Thread[] t = new Thread[20];
        for (int i = 0; i < t.length; i++) { t[i] = new Thread(() -> {}); t[i].start(); }
        for (Thread x : t) x.join();
        Runtime r = Runtime.getRuntime();
        System.out.println(r.availableProcessors() + " " + (r.maxMemory() >> 20));
    }
}
X
java M.java"""
    processors, heap = build(shared_state, script, at="/work/build", limits=HALF).split()
    assert processors == "1"
    assert 100 <= int(heap) <= 140


def test_node(shared_state: Path) -> None:
    """node knows the memory limit."""
    host_tool("node")
    out = build(shared_state, "node -p 'process.constrainedMemory()'", limits=HALF)
    assert int(out) == 512 << 20
