"""What a job sees inside is the same on every adapter: who it is, what it may do, and what is there."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from adapters import Adapter, adapter_of, on
from contract_box import CPUS, MEMORY, PIDS, RAM_PLAN, ROOT_PLAN, Box, open_box

from forgeyard_runtimes.cells import Behaviour
from forgeyard_runtimes.contract import ContainerRuntime

pytestmark = pytest.mark.kernel

STEPS, FILES, LIMITS = Behaviour.STEPS, Behaviour.FILES, Behaviour.LIMITS
PRIVILEGES, NAMESPACES = Behaviour.PRIVILEGES, Behaviour.NAMESPACES


@pytest.fixture(scope="module")
def adapter(request: pytest.FixtureRequest) -> Iterator[Adapter]:
    """The adapter of this test's parameter."""
    yield from adapter_of(request)


# --- what a job sees -----------------------------------------------------------------------------------------------


@on(PRIVILEGES)
def test_user_and_groups(adapter: Adapter) -> None:
    """The plan's uid, gid and groups, and no other."""

    async def body(made: Box) -> None:
        assert await made.says("id -u; id -g; id -G") == "1000\n1000\n1000 1234"

    adapter.inside(body)


@on(PRIVILEGES)
def test_no_privileges(adapter: Adapter) -> None:
    """No capability in any set, no_new_privs, and a filter."""

    async def body(made: Box) -> None:
        status = await made.says("grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | tr -d '\\t ' | sort")
        none = "0" * 16
        wanted = [f"Cap{name}:{none}" for name in ("Amb", "Bnd", "Eff", "Inh", "Prm")]
        assert status.split("\n") == [*wanted, "NoNewPrivs:1", "Seccomp:2"]

    adapter.inside(body)


@on(PRIVILEGES)
def test_refused_calls(adapter: Adapter) -> None:
    """mount, unshare, chroot and mknod of a device are refused."""

    async def body(made: Box) -> None:
        for script in ("mount -t tmpfs x /tmp", "unshare -m true", "chroot / true", "mknod /tmp/d c 1 3"):
            status, output = await made.sh(script)
            assert status != 0, script
            assert "not permitted" in output or "denied" in output, (script, output)

    adapter.inside(body)


@on(PRIVILEGES)
def test_rlimits(adapter: Adapter) -> None:
    """Open files as planned, soft and hard; no core dumps."""

    async def body(made: Box) -> None:
        assert await made.says("ulimit -Sn; ulimit -Hn; ulimit -c") == "1024\n2048\n0"

    adapter.inside(body)


@on(Behaviour.USER_NAMESPACE)
def test_user_namespace(adapter: Adapter) -> None:
    """Ids are mapped to the attempt's own range, which starts far from the host's root."""

    async def body(made: Box) -> None:
        for name in ("uid_map", "gid_map"):
            assert (await made.says(f"cat /proc/self/{name}")).split() == ["0", str(made.base), "65536"]
        assert os.stat(f"/proc/{made.pid}/ns/user").st_ino != os.stat("/proc/self/ns/user").st_ino

    adapter.inside(body)


@on(Behaviour.ROOT_IN_USERNS)
def test_root_of_its_user_namespace(adapter: Adapter) -> None:
    """A granted root may change owners within its range, and is nobody outside."""

    async def main(runtime: ContainerRuntime) -> None:
        async with open_box(runtime, ROOT_PLAN) as made:
            assert await made.says("id -u; touch /tmp/f; chown 7:7 /tmp/f; stat -c %u:%g /tmp/f") == "0\n7:7"
            assert (made.directory / "scratch/f").stat().st_uid == made.base + 7
            held = int((await made.says("grep CapEff /proc/self/status")).split()[1], 16)
            assert held == int((await made.says("grep CapBnd /proc/self/status")).split()[1], 16)
            assert bin(held).count("1") == len(made.plan.capabilities)
            assert (await made.sh("mount -t tmpfs x /tmp"))[0] != 0

    adapter.run(main)


@on(NAMESPACES)
def test_namespaces(adapter: Adapter) -> None:
    """Each namespace is another than the host's."""

    async def body(made: Box) -> None:
        for name in ("mnt", "pid", "ipc", "uts", "net", "cgroup"):
            own, host = (os.stat(f"/proc/{pid}/ns/{name}").st_ino for pid in (made.pid, "self"))
            assert own != host, name

    adapter.inside(body)


@on(NAMESPACES)
def test_processes_and_host_name(adapter: Adapter) -> None:
    """Only its own processes are there, the shim is the first, and the host name is the sandbox's."""

    async def body(made: Box) -> None:
        assert await made.says("cat /proc/1/comm") == "forgeyard-init"
        assert await made.says("hostname") == made.sandbox.hostname
        assert int(await made.says("ls -d /proc/[0-9]* | wc -l")) < 6

    adapter.inside(body)


@on(NAMESPACES)
def test_no_network(adapter: Adapter) -> None:
    """Denied network: a loopback and nothing else, no route."""

    async def body(made: Box) -> None:
        assert await made.says("tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo"
        assert await made.says("tail -n +2 /proc/net/route | wc -l") == "0"

    adapter.inside(body)


@on(FILES)
def test_root_is_read_only(adapter: Adapter) -> None:
    """Nothing of the root can be written."""

    async def body(made: Box) -> None:
        for path in ("/new", "/bin/new", "/etc/new", "/bin/busybox"):
            status, output = await made.sh(f"echo x >> {path}")
            assert status != 0, path
            assert "Read-only" in output or "denied" in output, (path, output)

    adapter.inside(body)


@on(FILES)
def test_mounts_are_as_planned(adapter: Adapter) -> None:
    """Writable, read-only and no-exec mounts are exactly that, and nosuid and nodev."""

    async def body(made: Box) -> None:
        assert await made.says("echo w > /tmp/w; cat /tmp/there") == "already"
        assert (made.directory / "scratch/w").read_text() == "w\n"
        assert (await made.sh("echo x > /data/x"))[0] != 0
        assert await made.says("cp /bin/busybox /tmp/true; /tmp/true; echo $?") == "0"
        assert (await made.sh("/noexec/true"))[0] != 0
        for point in ("/tmp", "/noexec", "/data", "/.forgeyard"):
            options = (await made.says(f"grep ' {point} ' /proc/self/mounts")).split()[3].split(",")
            assert {"nosuid", "nodev"} <= set(options), point
            assert ("ro" in options) == (point in ("/data", "/.forgeyard")), point
            assert ("noexec" in options) == (point == "/noexec"), point

    adapter.inside(body)


async def _check_memory_file_system(made: Box, point: str, blocks: int) -> None:
    assert await made.says(f"df -k {point} | tail -n 1 | tr -s ' ' | cut -d' ' -f2") == str(blocks)
    assert await made.says(f"stat -c %a {point}; echo x > {point}/f; cat {point}/f") == "1777\nx"
    assert (await made.sh(f"dd if=/dev/zero of={point}/f bs=1024 count={blocks + 1}"))[0] != 0


@on(FILES)
def test_shared_memory(adapter: Adapter) -> None:
    """/dev/shm has its planned size and mode, and can be written by the job."""

    async def body(made: Box) -> None:
        await _check_memory_file_system(made, "/dev/shm", 2048)

    adapter.inside(body)


@on(Behaviour.TMPFS)
def test_memory_file_systems(adapter: Adapter) -> None:
    """A tmpfs has its planned size and mode, and can be written by the job."""

    async def main(runtime: ContainerRuntime) -> None:
        async with open_box(runtime, RAM_PLAN) as made:
            await _check_memory_file_system(made, "/ram", 1024)
            options = (await made.says("grep ' /ram ' /proc/self/mounts")).split()[3].split(",")
            assert {"nosuid", "nodev", "rw"} <= set(options)

    adapter.run(main)


@on(FILES)
def test_masked_and_read_only_proc(adapter: Adapter) -> None:
    """What engines hide reads as empty, and what they protect can't be written."""

    async def body(made: Box) -> None:
        for path in ("/proc/kcore", "/proc/keys", "/proc/timer_list", "/proc/interrupts"):
            assert await made.says(f"test ! -e {path} && echo 0 || cat {path} | wc -c") == "0", path
        for path in ("/proc/sys/kernel/core_pattern", "/proc/sysrq-trigger", "/proc/sys/vm/drop_caches"):
            assert (await made.sh(f"echo 1 > {path}"))[0] != 0, path

    adapter.inside(body)


@on(FILES)
def test_devices(adapter: Adapter) -> None:
    """The harmless devices, and no other."""

    async def body(made: Box) -> None:
        found = set((await made.says("ls /dev")).split())
        assert {"null", "zero", "full", "random", "urandom", "tty", "shm", "pts", "mqueue"} <= found
        assert found <= {
            *("null", "zero", "full", "random", "urandom", "tty", "shm", "pts", "mqueue"),
            *("console", "ptmx", "fd", "stdin", "stdout", "stderr", "core"),
        }
        assert await made.says("echo x > /dev/null; head -c 4 /dev/zero | wc -c; head -c 4 /dev/urandom | wc -c") == (
            "4\n4"
        )

    adapter.inside(body)


@on(Behaviour.EMPTY_SYS)
def test_empty_sys(adapter: Adapter) -> None:
    """/sys has the control groups in it and no device of the host's."""

    async def body(made: Box) -> None:
        assert await made.says("ls /sys") == "fs"

    adapter.inside(body)


@on(FILES)
def test_control_groups_cannot_be_written(adapter: Adapter) -> None:
    """The job can't move itself or lift its limits."""

    async def body(made: Box) -> None:
        script = (
            "for f in /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/cgroup.procs; do echo $$ > $f && echo MOVED; done"
        )
        _, output = await made.sh(script)
        assert "MOVED" not in output

    adapter.inside(body)


@on(LIMITS)
def test_limits_are_in_force(adapter: Adapter) -> None:
    """The kernel has the planned limits for PID 1's own group."""

    async def body(made: Box) -> None:
        applied = made.group.applied(made.own_group.removeprefix(f"{made.group.path}/"))
        assert (applied.memory, applied.pids) == (MEMORY, PIDS)
        assert applied.cpus == pytest.approx(CPUS, abs=0.02)

    adapter.inside(body)


@on(LIMITS)
def test_memory_kill_is_seen_from_outside(adapter: Adapter) -> None:
    """A memory kill is in the evidence of the group, also where a child died and the shell reports 7 (C28)."""

    async def body(made: Box) -> None:
        status, _ = await made.sh("tail /dev/zero & wait $!; exit 7")
        assert status == 7 << 8
        evidence = made.group.evidence(made.own_group.removeprefix(f"{made.group.path}/"))
        assert evidence.memory.oom_kills == 1

    adapter.apart(body)


@on(LIMITS)
def test_process_limit_is_seen_from_outside(adapter: Adapter) -> None:
    """A refused fork is in the evidence of the group, and the sandbox lives on (C30)."""

    async def body(made: Box) -> None:
        status, _ = await made.sh(f"for i in $(seq {2 * PIDS}); do sleep 100 & done")
        assert status != 0
        evidence = made.group.evidence(made.own_group.removeprefix(f"{made.group.path}/"))
        assert evidence.pids.refused >= 1
        assert await made.says("echo on") == "on"

    adapter.apart(body)
