"""The Docker adapter with a real dockerd: the same bundle, on our own root, and what Docker can't carry is refused."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from daemons import Dockerd
from docker_jobs import DockerJob, busybox_root, docker, docker_job, mounts_of, settings

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind
from forgeyard_model.job import Job
from forgeyard_model.limits import Limits
from forgeyard_model.plan import RootfsPlan
from forgeyard_model.policy import NetworkPolicy
from forgeyard_model.profile import ExecutionProfile
from forgeyard_process_shim.protocol import Exited
from forgeyard_runtimes.comparison import compare, undeclared
from forgeyard_runtimes.contract import ContainerRef, ContainerStatus
from forgeyard_runtimes.docker import translate
from forgeyard_runtimes.docker.runtime import DockerRuntime

pytestmark = [pytest.mark.kernel, pytest.mark.daemon("dockerd")]

Body = Callable[[DockerJob], Awaitable[None]]


def with_job(
    daemon: Dockerd, state: Path, body: Body, *, job: Job | None = None, rootfs: RootfsPlan | None = None
) -> None:
    """Run `body` with a job that is laid out on `daemon`."""

    async def main() -> None:
        runtime = await DockerRuntime.find(settings(daemon, state))
        try:
            async with docker_job(runtime, state, job, rootfs) as made:
                await body(made)
        finally:
            await runtime.close()

    asyncio.run(main())


def containers(daemon: Dockerd) -> list[str]:
    """Names of all containers of the daemon."""
    return docker(daemon, "ps", "-a", "--format", "{{.Names}}").split()


def test_a_container_lives_as_its_bundle_says(dockerd: Dockerd, shared_state: Path) -> None:
    """From create to remove: nothing is weaker than the bundle but what is declared, and nothing is left."""

    async def body(made: DockerJob) -> None:
        runtime, ref = made.runtime, made.ref
        assert runtime.carries(made.bundle) == ()
        await made.open_gate()
        comparison = compare(made.spec, runtime.effective_spec(ref))
        assert undeclared(comparison.weaker, runtime.declared_weaker) == ()
        state = await runtime.state(ref)
        assert (state.status, state.pid) == (ContainerStatus.RUNNING, made.pid)
        assert await runtime.list((ref.directory,)) == (state,)
        assert await runtime.list((ref.directory / "other",)) == ()
        assert await made.out("id -u; cat /etc/hostname; echo $HOSTNAME") == "1000"
        end, _ = await made.sh("exit 137")
        assert isinstance(end, Exited)
        assert end.status == 137 << 8
        await made.end()
        assert (await runtime.state(ref)).status is ContainerStatus.ABSENT
        await runtime.remove(ref)
        assert ref.container_id not in containers(dockerd)
        assert not any(f"docker-{ref.container_id}" in path for path in mounts_of(os.getpid()))

    with_job(dockerd, shared_state, body)


def test_limits_are_in_a_group_below_ours(dockerd: Dockerd, shared_state: Path) -> None:
    """PID 1 is in a group of Docker's below the bundle's cgroupsPath, with the bundle's limits, in every hierarchy."""
    job = Job(rootfs="host", steps=(), limits=Limits(memory="64MiB", cpus=0.5, pids=40))

    async def body(made: DockerJob) -> None:
        await made.open_gate()
        group = made.runtime.cgroup(made.ref)
        assert group is not None
        leaf = group.removeprefix(f"{made.cgroup.path}/")
        assert leaf.startswith("job/")
        applied = made.cgroup.applied(leaf)
        assert (applied.memory, applied.cpus, applied.pids) == (64 << 20, 0.5, 40)
        assert made.cgroup.processes(leaf) == (made.pid,)
        end, _ = await made.sh("exec /usr/bin/tail /dev/zero")
        assert isinstance(end, Exited)
        assert end.status == 9
        assert made.cgroup.evidence(leaf).memory.oom_kills >= 1  # type: ignore[union-attr]  # memory evidence is there

    with_job(dockerd, shared_state, body, job=job)


def test_every_mount_has_the_flags_of_the_bundle(dockerd: Dockerd, shared_state: Path) -> None:
    """The kernel shows nosuid, nodev, noexec and ro on each bind exactly where the bundle has them."""

    async def body(made: DockerJob) -> None:
        await made.open_gate()
        seen = mounts_of(made.pid)
        for mount in made.spec["mounts"]:
            if mount["type"] == "bind":
                flags = {flag for flag in ("ro", "nosuid", "nodev", "noexec") if flag in mount["options"]}
                found = set(seen[mount["destination"]]) & {"ro", "nosuid", "nodev", "noexec"}
                assert found == flags, mount["destination"]
        assert {"ro", "nosuid", "nodev"} <= set(seen["/etc"])

    with_job(dockerd, shared_state, body)


def test_sys_shows_cpus_and_the_own_group_alone(dockerd: Dockerd, shared_state: Path) -> None:
    """Docker mounts sysfs; the job finds in it what every other runtime shows, and empty directories."""

    async def body(made: DockerJob) -> None:
        await made.open_gate()
        assert (
            await made.out("ls /sys/class /sys/kernel /sys/module /sys/devices/virtual | grep -v : | tr -d '\\n'") == ""
        )
        assert "online" in await made.out("ls /sys/devices/system/cpu")
        assert await made.out("cat /sys/fs/cgroup/pids/pids.max") == "512"

    with_job(dockerd, shared_state, body)


SYSCALLS = """
import ctypes, errno
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *more):
    ctypes.set_errno(0)
    libc.syscall(number, *more)
    return errno.errorcode.get(ctypes.get_errno(), "none")
print(call(435, 0, 0), call(425, 0, 0), call(9999), call(467), call(462), call(272, 0x10000000), call(139, 1))
print(open("/proc/sys/net/ipv4/ip_unprivileged_port_start").read().strip())
"""


def test_unknown_calls_answer_enosys_as_everywhere(dockerd: Dockerd, shared_state: Path) -> None:
    """Docker drops the filter's default errno: clone3, io_uring and calls of the future answer ENOSYS all the same."""

    async def body(made: DockerJob) -> None:
        await made.open_gate()
        answer, port = (await made.out(f"python3 -c '{SYSCALLS}'")).splitlines()
        assert answer.split() == ["ENOSYS", "ENOSYS", "ENOSYS", "ENOSYS", "ENOSYS", "EPERM", "ENOSYS"]
        assert port == "1024"

    with_job(dockerd, shared_state, body)


def test_the_network_is_new_and_reached_at_the_gate(dockerd: Dockerd, shared_state: Path) -> None:
    """No network of Docker's: a new namespace with loopback, to be plumbed through PID 1; none is joined by path."""

    async def body(made: DockerJob) -> None:
        assert made.runtime.network_join == "plumbed"
        await made.create()
        await made.start()
        assert Path(f"/proc/{made.pid}/ns/net").stat().st_ino != Path("/proc/self/ns/net").stat().st_ino
        devices = Path(f"/proc/{made.pid}/net/dev").read_text().splitlines()[2:]
        assert [line.split(":")[0].strip() for line in devices] == ["lo"]
        assert "/etc/resolv.conf" not in mounts_of(made.pid)
        with pytest.raises(ExecutorError) as caught:
            await made.runtime.start(made.ref, netns="/proc/self/ns/net")
        assert caught.value.kind is ExecutorErrorKind.UNSUPPORTED

    with_job(dockerd, shared_state, body)


def test_the_hosts_network_is_the_hosts(dockerd: Dockerd, shared_state: Path) -> None:
    """Asked for, the host's own network namespace, with our files in place of Docker's, and no hook of Docker's."""
    job = Job(rootfs="host", steps=(), profile=ExecutionProfile.DEVELOPMENT, network=NetworkPolicy.host())

    async def body(made: DockerJob) -> None:
        await made.open_gate()
        assert Path(f"/proc/{made.pid}/ns/net").stat().st_ino == Path("/proc/self/ns/net").stat().st_ino
        comparison = compare(made.spec, made.runtime.effective_spec(made.ref))
        assert undeclared(comparison.weaker, made.runtime.declared_weaker) == ()
        assert await made.out("cat /etc/resolv.conf") == Path("/etc/resolv.conf").read_text().strip()

    with_job(dockerd, shared_state, body, job=job)


@pytest.mark.parametrize("read_only", [True, False])
def test_an_images_root_is_ours(dockerd: Dockerd, shared_state: Path, tmp_path: Path, read_only: bool) -> None:
    """The root is the assembled one, with links and files at its top; writable where planned, but for new top names."""
    tmp_path.chmod(0o711)

    def edit(spec: dict[str, Any]) -> None:
        spec["root"]["readonly"] = read_only

    async def body(made: DockerJob) -> None:
        made.edit(edit)
        await made.open_gate()
        assert await made.out("readlink /bin; cat /marker; ls /srv") == "usr/bin\na file at the top"
        assert await made.out("test -x /bin/sh && test -d /work/build && touch /work/build/x && echo yes") == "yes"
        end, said = await made.sh("touch /new")
        assert isinstance(end, Exited)
        assert "Read-only file system" in said
        written = Path(f"/proc/{made.pid}/root/etc/written")
        if read_only:
            with pytest.raises(OSError, match="Read-only"):
                written.write_text("x")
        else:
            written.write_text("x")
            upper = Path(made.placed.scratch, "rootfs/upper/etc/written")
            assert upper.read_text() == "x"
        comparison = compare(made.spec, made.runtime.effective_spec(made.ref))
        assert undeclared(comparison.weaker, made.runtime.declared_weaker) == ()

    with_job(dockerd, shared_state, body, rootfs=busybox_root(tmp_path))


def test_exec_has_the_processs_code_and_never_more_rights(dockerd: Dockerd, shared_state: Path) -> None:
    """exec runs a compiled process and tells its code; other rights than PID 1's, and what never starts, are errors."""

    async def body(made: DockerJob) -> None:
        await made.open_gate()
        process = made.spec["process"]

        async def run(*argv: str, deadline: float = 20, **more: Any) -> int:
            document = {**process, "args": list(argv), "env": ["PATH=/usr/bin:/bin"], **more}
            return await made.runtime.exec(made.ref, json.dumps(document).encode(), deadline=deadline)

        assert await run("/bin/sh", "-c", "exit 7") == 7
        assert await run("/bin/sh", "-c", "grep -q 'NoNewPrivs:.1' /proc/self/status && test $(id -u) = 1000") == 0
        with pytest.raises(ExecutorError) as caught:
            await run("/nosuch")
        assert caught.value.kind is ExecutorErrorKind.SPAWN_FAILED
        with pytest.raises(SandboxError, match="capabilities"):
            await run("/bin/true", capabilities={"bounding": ["CAP_SYS_ADMIN"]})
        with pytest.raises(SandboxError, match="user"):
            await run("/bin/true", user={"uid": 0, "gid": 0})
        with pytest.raises(ExecutorError) as caught:
            await run("/bin/sleep", "60", deadline=0.2)
        assert caught.value.kind is ExecutorErrorKind.TIMEOUT
        leaf = str(made.runtime.cgroup(made.ref)).removeprefix(f"{made.cgroup.path}/")
        assert made.cgroup.processes(leaf) == (made.pid,)

    with_job(dockerd, shared_state, body)


def test_another_adapter_process_finds_the_container(dockerd: Dockerd, shared_state: Path) -> None:
    """What one executor started, another one sees, runs a probe in, and removes."""

    async def body(made: DockerJob) -> None:
        await made.open_gate()
        other = await DockerRuntime.find(settings(dockerd, shared_state))
        try:
            assert (await other.state(made.ref)).pid == made.pid
            process = {**made.spec["process"], "args": ["/bin/sh", "-c", "exit 3"], "env": ["PATH=/usr/bin:/bin"]}
            assert await other.exec(made.ref, json.dumps(process).encode(), deadline=20) == 3
            await other.remove(made.ref)
            await other.wait(made.pidfd)
        finally:
            await other.close()

    with_job(dockerd, shared_state, body)


def namespaces(spec: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of a spec."""
    found: list[dict[str, Any]] = spec["linux"]["namespaces"]
    return found


REFUSED: dict[str, Callable[[dict[str, Any]], None]] = {
    "linux.namespaces.user": lambda spec: namespaces(spec).append({"type": "user"}),
    "linux.namespaces.network.path": lambda spec: namespaces(spec)[-1].update(path="/proc/self/ns/net"),
    "linux.namespaces.pid": lambda spec: spec["linux"].update(
        namespaces=[entry for entry in namespaces(spec) if entry["type"] != "pid"]
    ),
    "linux.uidMappings": lambda spec: spec["linux"].update(uidMappings=[{"containerID": 0, "hostID": 1, "size": 1}]),
    "linux.resources.memory.limit": lambda spec: spec["linux"]["resources"].update(memory={"limit": 4 << 20}),
    "linux.resources.devices": lambda spec: spec["linux"]["resources"].update(devices=[]),
    "linux.resources.rdma": lambda spec: spec["linux"]["resources"].update(rdma={}),
    "linux.sysctl": lambda spec: spec["linux"].update(sysctl={"net.ipv4.ip_forward": "1"}),
    "linux.cgroupsPath": lambda spec: spec["linux"].pop("cgroupsPath"),
    "linux.seccomp": lambda spec: spec["linux"].update(seccomp=None),
    "hooks": lambda spec: spec.update(hooks={}),
    "process.user.umask": lambda spec: spec["process"]["user"].update(umask=0o077),
    "process.noNewPrivileges": lambda spec: spec["process"].update(noNewPrivileges=False),
    "process.capabilities.ambient": lambda spec: spec["process"]["capabilities"].update(ambient=["CAP_CHOWN"]),
    "process.rlimits.RLIMIT_AS": lambda spec: spec["process"]["rlimits"].append(
        {"type": "RLIMIT_AS", "soft": 1, "hard": 1}
    ),
    "mounts./x": lambda spec: spec["mounts"].append({"destination": "/x", "type": "overlay", "options": []}),
    "mounts./tmp.options": lambda spec: next(m for m in spec["mounts"] if m["destination"] == "/tmp").update(
        options=["rbind", "rprivate", "ro"]
    ),
}


def test_what_docker_cannot_carry_is_refused_by_name(dockerd: Dockerd, shared_state: Path) -> None:
    """Each field that has no place in Docker's request ends create with that name, and nothing is made."""

    async def body(made: DockerJob) -> None:
        original = made.bundle
        for field, change in REFUSED.items():
            made.bundle = original
            made.edit(change)
            assert field in made.runtime.carries(made.bundle), field
            with pytest.raises(SandboxError) as caught:
                await made.create()
            assert caught.value.kind is SandboxErrorKind.UNSUPPORTED_ISOLATION
            assert field in str(caught.value)
        assert made.ref.container_id not in containers(dockerd)

    with_job(dockerd, shared_state, body)


def test_no_job_is_given_an_engines_socket(dockerd: Dockerd, shared_state: Path, tmp_path: Path) -> None:
    """The daemon's own socket, under whatever name, is no source of a bind."""
    alias = tmp_path / "innocent"
    os.link(dockerd.socket, alias)

    async def body(made: DockerJob) -> None:
        for source in (dockerd.socket, dockerd.directory, alias):
            mount = {"destination": "/x", "type": "bind", "source": str(source), "options": ["nosuid", "nodev"]}
            made.edit(lambda spec, mount=mount: spec["mounts"].append(mount))  # type: ignore[misc]  # a bound default
            with pytest.raises(SandboxError, match=r"mounts\./x\.source"):
                await made.create()
            made.edit(lambda spec: spec["mounts"].pop())

    with_job(dockerd, shared_state, body)


WEAKENED: dict[str, Callable[[dict[str, Any]], None]] = {
    "process.capabilities.bounding": lambda host: host.update(CapAdd=["CAP_NET_RAW"]),
    "process.noNewPrivileges": lambda host: host["SecurityOpt"].remove("no-new-privileges"),
    "linux.seccomp": lambda host: host.update(SecurityOpt=["no-new-privileges", "seccomp=unconfined"]),
    "linux.seccomp.syscalls": lambda host: host.update(SecurityOpt=["no-new-privileges"]),
    "linux.maskedPaths": lambda host: host.update(MaskedPaths=host["MaskedPaths"][1:]),
    "linux.readonlyPaths": lambda host: host.update(ReadonlyPaths=[]),
    "mounts./sys.type": lambda host: host["MaskedPaths"].remove("/sys/kernel"),
    "root.readonly": lambda host: host.update(ReadonlyRootfs=False),
    "linux.namespaces.ipc": lambda host: host.update(IpcMode="host"),
    "linux.namespaces.cgroup": lambda host: host.update(CgroupnsMode="host"),
    "linux.resources.pids.limit": lambda host: host.update(PidsLimit=0),
    "linux.resources.memory.limit": lambda host: host.update(Memory=1 << 34, MemorySwap=1 << 34),
    "linux.resources.memory.swap": lambda host: host.update(MemorySwap=-1),
    "linux.resources.cpu.quota": lambda host: host.update(CpuQuota=0, CpuPeriod=0),
    "linux.devices": lambda host: host.update(
        Devices=[{"PathOnHost": "/dev/kmsg", "PathInContainer": "/dev/kmsg", "CgroupPermissions": "rwm"}]
    ),
    "process.rlimits.RLIMIT_NOFILE.hard": lambda host: host.update(
        Ulimits=[{"Name": "nofile", "Soft": 16000, "Hard": 16000}, {"Name": "core", "Soft": 0, "Hard": 0}]
    ),
    "linux.sysctl.net.ipv4.ip_unprivileged_port_start": lambda host: host.update(Sysctls={}),
    "mounts./more": lambda host: host["Mounts"].append({"Type": "bind", "Source": "/opt", "Target": "/more"}),
    "mounts./home/forgeyard.source": lambda host: next(
        mount for mount in host["Mounts"] if mount["Target"] == "/home/forgeyard"
    ).update(Source="/opt"),
    "mounts./home/forgeyard.nosuid": lambda host: next(
        mount for mount in host["Mounts"] if mount["Target"] == "/home/forgeyard"
    ).update(Source="/opt"),
}


@pytest.mark.parametrize("field", WEAKENED)
def test_a_daemon_that_applies_less_is_seen(
    dockerd: Dockerd, shared_state: Path, monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    """What Docker's runtime was given, weakened on purpose, is named by the comparison with the bundle."""
    plain = translate._host_config

    def weakened(*arguments: Any) -> dict[str, Any]:
        config = plain(*arguments)
        WEAKENED[field](config)
        return config

    monkeypatch.setattr(translate, "_host_config", weakened)

    async def body(made: DockerJob) -> None:
        await made.create()
        made.pid = await made.runtime.start(made.ref)
        made.pidfd = os.pidfd_open(made.pid)
        found = undeclared(
            compare(made.spec, made.runtime.effective_spec(made.ref)).weaker, made.runtime.declared_weaker
        )
        assert field in {line.partition(": ")[0] for line in found}, found

    with_job(dockerd, shared_state, body)


def test_a_container_or_image_removed_under_us(require_tool: Callable[[str], str], shared_state: Path) -> None:
    """An image that somebody removed is made again; a container that somebody removed is absent, and no error."""
    require_tool("dockerd")

    async def body(made: DockerJob) -> None:
        await made.create()
        await made.runtime.remove(made.ref)
        image = docker(dockerd, "images", "-q", "forgeyard/skeleton").split()
        docker(dockerd, "rmi", "-f", *image)
        await made.open_gate()
        docker(dockerd, "rm", "-f", made.ref.container_id)
        await made.runtime.wait(made.pidfd)
        assert (await made.runtime.state(made.ref)).status is ContainerStatus.ABSENT

    # One of its own: other tests need the images that this one takes away.
    with Dockerd() as dockerd:
        with_job(dockerd, shared_state, body)


def test_a_failed_start_leaves_nothing(dockerd: Dockerd, shared_state: Path) -> None:
    """A program that is not there fails the start with Docker's own words, and no container is left."""

    async def body(made: DockerJob) -> None:
        made.edit(lambda spec: spec["process"].update(args=["/nosuch"]))
        await made.create()
        with pytest.raises(SandboxError, match="nosuch") as caught:
            await made.runtime.start(made.ref)
        assert caught.value.kind is SandboxErrorKind.NAMESPACE_FAILED
        assert made.ref.container_id not in containers(dockerd)

    with_job(dockerd, shared_state, body)


def test_nothing_found_for_a_stranger(dockerd: Dockerd, shared_state: Path) -> None:
    """A container that never was is absent; its spec can't be asked for."""

    async def body(made: DockerJob) -> None:
        stranger = ContainerRef("fy-nosuch", made.ref.directory)
        assert (await made.runtime.state(stranger)).status is ContainerStatus.ABSENT
        await made.runtime.remove(stranger)
        with pytest.raises(ExecutorError) as caught:
            made.runtime.effective_spec(stranger)
        assert caught.value.kind is ExecutorErrorKind.LOST

    with_job(dockerd, shared_state, body)
