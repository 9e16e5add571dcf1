"""A Podman service in trouble: typed errors within their deadline, jobs that go on, and nothing left."""

from __future__ import annotations

import asyncio
import contextlib
import http.server
import json
import os
import socketserver
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from contract_box import Box
from daemons import PodmanService
from podman_jobs import podman_job, podman_runtime

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError
from forgeyard_process_shim.channel import ShimDied
from forgeyard_runtimes.comparison import verify_effective
from forgeyard_runtimes.contract import ContainerStatus
from forgeyard_runtimes.podman.client import Deadlines
from forgeyard_runtimes.podman.runtime import PodmanRuntime
from forgeyard_runtimes.podman.settings import PodmanSettings
from forgeyard_runtimes.podman.translate import DECLARED

pytestmark = [pytest.mark.kernel, pytest.mark.daemon("podman")]
SHORT = Deadlines(query=0.5, change=0.5)


def not_found(url: str, deadlines: Deadlines = SHORT) -> ExecutorError:
    """The error with which `find` ends."""

    async def main() -> None:
        runtime = await PodmanRuntime.find(PodmanSettings("test", "state", url, deadlines=deadlines))
        await runtime.close()

    with pytest.raises(ExecutorError) as caught:
        asyncio.run(main())
    assert caught.value.resolution
    return caught.value


def test_no_socket_is_a_refusal_with_a_cure(tmp_path: Path) -> None:
    """A service that is not there, or not on this host, is named."""
    assert not_found(f"unix://{tmp_path}/none.sock").reason == "podman_missing"
    assert not_found("tcp://127.0.0.1:2375").reason == "podman_address"
    assert not_found("unix:relative.sock").reason == "podman_address"


def test_a_socket_without_permission(podman_service: PodmanService) -> None:
    """Another user's socket is a refusal that says so."""
    podman_service.socket.chmod(0o600)
    os.seteuid(65534)
    try:
        error = not_found(podman_service.address)
    finally:
        os.seteuid(0)
    assert (error.kind, error.reason) == (ExecutorErrorKind.UNSUPPORTED, "podman_permission")


class Version(http.server.BaseHTTPRequestHandler):
    """Answers every request with the version that the server was given."""

    def do_GET(self) -> None:
        """One answer."""
        assert isinstance(self.server, OtherVersion)
        api, least = self.server.versions
        details = {"APIVersion": api, "MinAPIVersion": least}
        body = json.dumps({"Components": [{"Name": "Podman Engine", "Version": api, "Details": details}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self) -> str:
        """A client of a socket has no address."""
        return "client"

    def log_message(self, *_: object) -> None:
        """Nothing."""


class OtherVersion(socketserver.UnixStreamServer):
    """A service of a version that is installed nowhere here."""

    versions: tuple[str, str]


@contextlib.contextmanager
def other_version(path: Path, api: str, least: str) -> Iterator[str]:
    """The address of such a service."""
    with OtherVersion(str(path), Version) as server:
        server.versions = (api, least)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"unix://{path}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(("api", "least"), [("3.4.4", "3.1.0"), ("9.0.0", "8.0.0")])
def test_an_api_that_we_do_not_speak(tmp_path: Path, api: str, least: str) -> None:
    """A service that is too old, or too new, is refused by its version."""
    with other_version(tmp_path / "s", api, least) as address:
        error = not_found(address)
    assert error.reason == "podman_version"
    assert api in str(error)


def ending(job: Box) -> asyncio.Future[None]:
    """Done when PID 1 is dead."""
    return asyncio.ensure_future(job.runtime.wait(job.pidfd))


def test_a_job_outlives_its_service() -> None:
    """Killed mid-job: the step goes on with the right result, calls fail typed, an exec has no made-up code;
    started again, the service still has the container."""

    async def main(service: PodmanService) -> None:
        async with podman_runtime(service) as runtime, podman_job(runtime) as job:
            job.open_gate()
            step = asyncio.ensure_future(job.sh("while [ ! -e /tmp/go ]; do sleep 0.1; done; exit 7"))
            busy = asyncio.ensure_future(runtime.exec(job.ref, job.process("/bin/sleep", "600"), deadline=60))
            leaf = runtime.cgroup(job.ref).removeprefix(f"{job.group.path}/")
            while len(job.group.processes(leaf)) < 4:
                await asyncio.sleep(0)
            service.kill()
            with pytest.raises(ExecutorError) as lost:
                await busy
            assert lost.value.kind is ExecutorErrorKind.LOST
            with pytest.raises(ExecutorError) as gone:
                await runtime.state(job.ref)
            assert (gone.value.kind, gone.value.reason) == (ExecutorErrorKind.LOST, "podman_gone")
            (job.directory / "scratch/go").touch()
            assert (await step)[0] == 7 << 8
            await asyncio.to_thread(service.start)
            state = await runtime.state(job.ref)
            assert (state.status, state.pid) == (ContainerStatus.RUNNING, job.pid)

    with PodmanService() as service:
        asyncio.run(main(service))


def test_a_hung_service_meets_a_deadline() -> None:
    """Stopped, it takes calls and answers none: each ends by its deadline, and the job can still be killed."""

    async def main(service: PodmanService) -> None:
        async with podman_runtime(service) as runtime, podman_job(runtime) as job:
            service.freeze()
            usual, runtime._client._deadlines = runtime._client._deadlines, SHORT
            try:
                with pytest.raises(ExecutorError) as caught:
                    await runtime.state(job.ref)
                assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.TIMEOUT, "podman_hangs")
                dead = ending(job)
                await runtime.kill(job.ref, job.pidfd)
                await dead
            finally:
                service.thaw()
                runtime._client._deadlines = usual

    with PodmanService() as service:
        asyncio.run(main(service))


def test_a_container_removed_under_us(podman_service: PodmanService) -> None:
    """An operator's `podman rm -f` is the end of PID 1, no exit status; to remove it again is no error."""

    async def main() -> None:
        async with podman_runtime(podman_service) as runtime, podman_job(runtime) as job:
            job.open_gate()
            step = asyncio.ensure_future(job.sh("sleep 600"))
            command = podman_service.podman("rm", "--force", "--time", "0", job.ref.container_id)
            await asyncio.to_thread(subprocess.run, command, env=podman_service.environment(), check=True)
            await ending(job)
            with pytest.raises(ShimDied):
                await step
            assert (await runtime.state(job.ref)).status is ContainerStatus.ABSENT

    asyncio.run(main())


def test_a_cancelled_create_leaves_what_remove_removes(podman_service: PodmanService) -> None:
    """Cancelled while the service works, create ends first, so that the removal can't come too early."""

    async def main() -> None:
        async with podman_runtime(podman_service) as runtime, podman_job(runtime, start=False) as job:
            creating = asyncio.ensure_future(job.create())
            while not (job.directory / "bundle/seccomp.json").exists():
                await asyncio.sleep(0)
            creating.cancel()
            with pytest.raises(asyncio.CancelledError):
                await creating
            await runtime.remove(job.ref)
            assert (await runtime.state(job.ref)).status is ContainerStatus.ABSENT
            assert await runtime.list((job.directory,)) == ()

    asyncio.run(main())


def test_one_stuck_object_does_not_stop_a_sweep(podman_service: PodmanService) -> None:
    """A volume of ours that somebody else's container holds is reported, and what comes after it is removed."""

    def podman(*arguments: str) -> None:
        command = podman_service.podman(*arguments)
        subprocess.run(command, env=podman_service.environment(), check=True, stdout=subprocess.DEVNULL)

    async def main() -> None:
        async with podman_runtime(podman_service) as runtime:
            label = f"forgeyard.state={runtime._settings.state}"
            async with podman_job(runtime, start=False) as job:
                podman("volume", "create", "--label", label, "fy-held")
                podman("network", "create", "--label", label, "fy-free")
                podman("create", "--name", "others", "-v", "fy-held:/v", "--rootfs", job.placement.rootfs, "/bin/true")
                try:
                    report = await runtime.sweep(lambda _: False)
                    assert report.removed == ("network fy-free",)
                    ((name, reason),) = report.failed
                    assert name == "volume fy-held"
                    assert "others" in reason or "in use" in reason or "being used" in reason
                finally:
                    podman("rm", "--force", "--time", "0", "others")
                report = await runtime.sweep(lambda _: False)
                assert (report.removed, report.failed) == (("volume fy-held",), ())

    asyncio.run(main())


HOOK = """#!/usr/bin/python3
import json, sys
spec = json.load(sys.stdin)
linux, process = spec["linux"], spec["process"]
exec(open(@EDIT@).read())
json.dump(spec, sys.stdout)
"""
WEAKENED = {
    'process["noNewPrivileges"] = False': "process.noNewPrivileges",
    'process["capabilities"]["bounding"] = ["CAP_SYS_ADMIN"]': "process.capabilities.bounding",
    'del spec["hostname"]; del linux["namespaces"][[n["type"] for n in linux["namespaces"]].index("uts")]': (
        "linux.namespaces.uts"
    ),
    'linux["maskedPaths"].remove("/proc/keys")': "linux.maskedPaths",
    'del linux["resources"]["memory"]': "linux.resources.memory",
    'linux["seccomp"]["syscalls"][0]["names"].append("mount")': "linux.seccomp",
    '[m["options"].remove("ro") for m in spec["mounts"] if m["destination"] == "/.forgeyard"]': "mounts./.forgeyard.ro",
}


def test_a_weakened_service_is_seen(tmp_path: Path) -> None:
    """Whatever a service takes from a bundle by a hook of its operator's is found in what is read back."""
    with PodmanService() as service:
        hooks = service.directory / "hooks"
        hooks.mkdir()
        edit = service.directory / "edit"
        program = service.directory / "hook"
        program.write_text(HOOK.replace("@EDIT@", repr(str(edit))))
        program.chmod(0o755)
        hook = {"version": "1.0.0", "hook": {"path": str(program)}, "when": {"always": True}, "stages": ["precreate"]}
        (hooks / "weaken.json").write_text(json.dumps(hook))
        text = service.containers_conf.read_text().replace("[engine]", f'[engine]\nhooks_dir = ["{hooks}"]')
        service.containers_conf.write_text(text)
        service.stop()
        service.start()

        async def main() -> None:
            async with podman_runtime(service) as runtime:
                for source, field in WEAKENED.items():
                    edit.write_text(source)
                    async with podman_job(runtime) as job:
                        with pytest.raises(SandboxError, match=field):
                            verify_effective(job.intended, runtime.effective_spec(job.ref), DECLARED)

        asyncio.run(main())
