"""The adapter for OCI runtime command lines: runc, and by name crun and runsc.

Each attempt has a `--root` of its own below its directory, so a runtime's state goes with that directory and no
runtime process is left behind. `start` is one `run --detach` rather than create and start: the gate that the two
commands would give is the shim's, and each command costs a Go start-up.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar, Final

from forgeyard_host.children import wait_readable
from forgeyard_host.processes import send_signal
from forgeyard_model.capabilities import ExecutorCapabilities, ResourceControls
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxError, SandboxErrorKind
from forgeyard_model.plan import Bundle, NetworkAttachment, RootfsPlan
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_runtimes.cli_traits import TRAITS, RuntimeTraits
from forgeyard_runtimes.commands import OUTPUT_LIMIT, CommandTimeout, Completed, run_command
from forgeyard_runtimes.contract import (
    ContainerRef,
    ContainerState,
    ContainerStatus,
    NetworkJoin,
    NetworkShare,
    Stdio,
    SweepReport,
)

START_DEADLINE: Final = 60.0
QUERY_DEADLINE: Final = 20.0
_ENV: Final = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LANG": "C.UTF-8"}


class CliRuntime:
    """One OCI runtime command line. Use `find`."""

    network_join: ClassVar[NetworkJoin] = "inherited"
    network_share: ClassVar[NetworkShare] = "made"
    joins_user_namespace: ClassVar[bool] = True
    literal: ClassVar[bool] = True
    images: ClassVar[None] = None
    declared_weaker: ClassVar[frozenset[str]] = frozenset()
    declared_stricter: ClassVar[frozenset[str]] = frozenset()

    def __init__(self, binary: Path, traits: RuntimeTraits, version: str) -> None:
        self._binary = str(binary)
        self._traits = traits
        self._version = version

    @classmethod
    async def find(cls, name: str, program: str | None = None) -> CliRuntime:
        """Locate the runtime called `name` and ask its version.

        :param program: path of its program; None looks in the usual places.
        :raises ExecutorError: UNSUPPORTED when it is unknown or not installed.
        """
        traits = TRAITS.get(name)
        if traits is None:
            raise _unsupported("runtime_unknown", f"no runtime is called {name!r}", f"use one of {', '.join(TRAITS)}")
        path = program or shutil.which(name, path=_ENV["PATH"] + ":/usr/local/sbin:/usr/local/bin")
        if path is None:
            raise _unsupported("runtime_missing", f"{name} is not installed", f"install the package {name}")
        done = await _run((path, "--version"), QUERY_DEADLINE)
        words = done.stdout.decode("utf-8", "replace").split()
        if done.code != 0 or len(words) < 3:
            raise _lost(f"{name} does not tell its version", done.shown())
        return cls(Path(path), traits, words[2])

    @property
    def name(self) -> str:
        """Name and version, such as ``runc 1.1.5``."""
        return f"{self._traits.name} {self._version}"

    @property
    def address(self) -> str:
        """Nowhere: nothing is kept outside the state directory."""
        return ""

    async def create(
        self, ref: ContainerRef, bundle: Bundle, rootfs: RootfsPlan, network: NetworkAttachment, stdio: Stdio
    ) -> None:
        """Write the bundle. Nothing is at the runtime yet."""
        if stdio.carrier not in self._traits.carriers:
            raise _unsupported("runtime_carrier", f"{self._traits.name} has no carrier {stdio.carrier}", "use runc")
        ref.bundle.mkdir(mode=0o700, exist_ok=True)
        (ref.bundle / "config.json").write_bytes(bundle.config)

    async def start(self, ref: ContainerRef, *, netns: str | None = None) -> int:
        """`run --detach`: returns once PID 1, our shim, has been executed.

        :param netns: the runtime is started in it, and the container inherits it. By path runc 1.1 would join it after
            the user namespace, from which it may not.
        """
        pid_file = ref.directory / "pid"
        argv = self._argv(ref, "run", "--detach", "--bundle", str(ref.bundle), "--pid-file", str(pid_file))
        done = await _run((*argv, ref.container_id), START_DEADLINE, netns)
        if done.code != 0:
            raise SandboxError(
                SandboxErrorKind.NAMESPACE_FAILED,
                "runtime_start",
                f"{self._traits.name} could not start the container",
                details=_log_message(ref.directory / "runtime.log") or done.shown(),
            )
        try:
            return int(pid_file.read_text())
        except (OSError, ValueError) as error:
            raise _lost(f"{self._traits.name} wrote no pid", str(error)) from error

    async def exec(self, ref: ContainerRef, process: bytes, *, deadline: float) -> int:
        """Run a compiled process.json in the container; its exit code. Output is not kept.

        After `deadline` seconds, or when cancelled, the process is killed, and not just the command that waits for it.

        :raises ExecutorError: SPAWN_FAILED, when the runtime itself failed: its own exit code is no process's; TIMEOUT.
        """
        stem = ref.directory / f"exec-{os.urandom(8).hex()}"
        path, log, pid_file = (stem.with_suffix(suffix) for suffix in (".json", ".log", ".pid"))
        path.write_bytes(process)
        try:
            argv = self._argv(ref, "exec", "--process", str(path), "--pid-file", str(pid_file), log=log)
            try:
                done = await _run((*argv, ref.container_id), deadline)
            except BaseException:
                _kill_at(pid_file)
                raise
            message = _log_message(log) if done.code != 0 else ""
        finally:
            path.unlink()
            log.unlink(missing_ok=True)
            pid_file.unlink(missing_ok=True)
        if message:
            raise _lost(f"{self._traits.name} could not run a process in the container", message)
        return done.code

    async def wait(self, pidfd: int) -> None:
        """Until PID 1 is dead."""
        await wait_readable(pidfd)

    async def kill(self, ref: ContainerRef, pidfd: int) -> None:
        """SIGKILL PID 1 by its pidfd; already dead is what was wanted."""
        send_signal(pidfd, signal.SIGKILL)

    async def remove(self, ref: ContainerRef) -> None:
        """For runc a directory is all there is, and ours to delete; others are asked."""
        if not self._traits.needs_delete or not self._root(ref).exists():
            return
        done = await _run((*self._argv(ref, "delete", "--force"), ref.container_id), START_DEADLINE)
        if done.code != 0 and (await self.state(ref)).status is not ContainerStatus.ABSENT:
            raise SandboxError(
                SandboxErrorKind.CLEANUP_FAILED,
                "runtime_delete",
                f"{self._traits.name} can't delete the container",
                details=done.shown(),
            )

    async def state(self, ref: ContainerRef) -> ContainerState:
        """What the runtime's own `state` says."""
        absent = ContainerState(ref.container_id, ContainerStatus.ABSENT)
        if ref.container_id not in _kept_in(self._root(ref)):
            return absent
        done = await _run((*self._argv(ref, "state"), ref.container_id), QUERY_DEADLINE)
        if done.code != 0:
            return absent
        try:
            answer = json.loads(done.stdout)
            return ContainerState(ref.container_id, ContainerStatus(answer["status"]), int(answer.get("pid", 0)))
        except (ValueError, KeyError, TypeError) as error:
            raise _lost(f"{self._traits.name} state gave no readable answer", done.shown()) from error

    async def list(self, directories: tuple[Path, ...]) -> tuple[ContainerState, ...]:
        """The containers of the attempts in `directories`, by their directories' names."""
        found = []
        for directory in directories:
            names = sorted(_kept_in(directory / "runtime"))
            found.extend([await self.state(ContainerRef(name, directory)) for name in names])
        return tuple(found)

    def effective_spec(self, ref: ContainerRef) -> Mapping[str, Any]:
        """The bundle's config.json: a command-line runtime adds nothing of its own to it."""
        with (ref.bundle / "config.json").open("rb") as file:
            spec: Mapping[str, Any] = json.load(file)
        return spec

    def capabilities(self) -> ExecutorCapabilities:
        """What bundles on this adapter enforce; the executor verifies each at the gate of every job."""
        seen = not self._traits.own_kernel
        levels = {IsolationLevel.PROCESS, IsolationLevel.NAMESPACE, IsolationLevel.CONTAINER}
        return ExecutorCapabilities(
            runtime=self.name,
            isolation_levels=frozenset(levels) if seen else frozenset(),
            network_modes=frozenset({NetworkMode.DENY, NetworkMode.HOST}) if seen else frozenset(),
            resource_controls=ResourceControls(cpu=seen, memory=seen, pids=seen, disk=seen),
            user_namespace=True,
            seccomp=seen,
        )

    def carries(self, bundle: Bundle) -> tuple[str, ...]:
        """All of a bundle is carried."""
        return ()

    def cgroup(self, ref: ContainerRef) -> None:
        """The group that the bundle names."""

    async def loss(self, ref: ContainerRef) -> None:
        """Nothing of the runtime lives beside a container, so nothing takes it along."""

    async def sweep(self, alive: Callable[[str], bool]) -> SweepReport:
        """Nothing: a container's state is in its attempt's directory, which the ledger knows."""
        return SweepReport()

    async def close(self) -> None:
        """There is no connection."""

    @staticmethod
    def _root(ref: ContainerRef) -> Path:
        return ref.directory / "runtime"

    def exec_argv(self, ref: ContainerRef, process: Path, log: Path) -> tuple[str, ...]:
        """The command that runs a compiled process.json in the container on the caller's own stdin and stdout."""
        return (*self._argv(ref, "exec", "--process", str(process), log=log), ref.container_id)

    def _argv(self, ref: ContainerRef, *command: str, log: Path | None = None) -> tuple[str, ...]:
        path = str(log or ref.directory / "runtime.log")
        flags = tuple(path if flag == "{}" else flag for flag in self._traits.log)
        return (self._binary, "--root", str(self._root(ref)), *flags, *self._traits.flags, *command)


def _kept_in(root: Path) -> set[str]:
    """Ids of the containers that a runtime keeps in its root: a directory each, or ``ID_sandbox:ID.state`` (runsc)."""
    children = list(root.iterdir()) if root.is_dir() else []
    return {child.name.partition("_")[0] for child in children if child.is_dir() or child.suffix == ".state"}


async def _run(argv: tuple[str, ...], deadline: float, netns: str | None = None) -> Completed:
    try:
        return await run_command(argv, env=_ENV, deadline=deadline, netns=netns)
    except CommandTimeout as error:
        raise ExecutorError(
            ExecutorErrorKind.TIMEOUT, "runtime_hangs", "the runtime does not answer", details=str(error)
        ) from error
    except OSError as error:
        raise _lost(f"{argv[0]} can't be executed", str(error)) from error


def _kill_at(pid_file: Path) -> None:
    """Kill the process whose number the runtime wrote, if it got that far. Its parent, the command, is dead by now."""
    try:
        pidfd = os.pidfd_open(int(pid_file.read_text()))
    except (FileNotFoundError, ValueError, ProcessLookupError):
        return
    try:
        send_signal(pidfd, signal.SIGKILL)
    finally:
        os.close(pidfd)


def _log_message(path: Path) -> str:
    """The last error in a runtime's JSON log; empty when there is none."""
    try:
        with path.open("rb") as file:
            lines = file.read(OUTPUT_LIMIT).splitlines()
    except FileNotFoundError:
        return ""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and entry.get("level") in ("error", "fatal"):
            return str(entry.get("msg", ""))[:2000]
    return ""


def _unsupported(reason: str, brief: str, resolution: str) -> ExecutorError:
    return ExecutorError(ExecutorErrorKind.UNSUPPORTED, reason, brief, resolution=resolution)


def _lost(brief: str, details: str) -> ExecutorError:
    return ExecutorError(ExecutorErrorKind.SPAWN_FAILED, "runtime_output", brief, details=details)
