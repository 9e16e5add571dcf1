"""Ways out over a socket, or into another network namespace's and the host's own IPC, under `deny`."""

from __future__ import annotations

import ctypes
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import pytest
from attacks import HostFacts, build_attacker, run_attacks

pytestmark = pytest.mark.kernel

_LIBC = ctypes.CDLL(None, use_errno=True)
_KEY = 0x0F07
REFUSED = {"ECONNREFUSED"}
NO_WAY = {"ENETUNREACH"}
ABSENT = {"ENOENT"}


class Services:
    """Services of the host, each open to everybody there: nothing but the sandbox keeps a job from them."""

    def __init__(self, stack: ExitStack) -> None:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="forgeyard-canary-", dir="/run")))
        place.chmod(0o777)
        self.path = str(place / "socket")
        self.abstract = place.name
        self.tcp = self._listen(stack, socket.AF_INET, ("127.0.0.1", 0))
        self.anywhere = self._listen(stack, socket.AF_INET, ("0.0.0.0", 0))
        self.listeners = [
            self.tcp,
            self.anywhere,
            self._listen(stack, socket.AF_UNIX, self.path),
            self._listen(stack, socket.AF_UNIX, f"\0{self.abstract}"),
        ]
        os.chmod(self.path, 0o777)
        segment = _LIBC.shmget(_KEY, 4096, 0o1666)  # IPC_CREAT; both modes may share it
        assert segment >= 0
        stack.callback(_LIBC.shmctl, segment, 0, None)  # IPC_RMID
        self.shm = Path(f"/dev/shm/{place.name}")
        self.shm.write_bytes(b"canary")
        self.shm.chmod(0o666)
        stack.callback(self.shm.unlink)

    @staticmethod
    def _listen(stack: ExitStack, family: int, address: object) -> socket.socket:
        listener = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listener.bind(address)
        listener.listen()
        listener.setblocking(False)
        return listener

    def assert_untouched(self) -> None:
        """Nobody connected, and the shared memory is as it was. The services do work: the host itself gets in."""
        for listener in self.listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()
        assert self.shm.read_bytes() == b"canary"
        for listener in self.listeners:
            with socket.socket(listener.family, socket.SOCK_STREAM) as client:
                client.connect(listener.getsockname())
            listener.accept()[0].close()

    def attacks(self) -> dict[str, tuple[str, set[str]]]:
        """By name: the attack, and the refusals that will do."""
        port, anywhere = self.tcp.getsockname()[1], self.anywhere.getsockname()[1]
        return {
            "loopback service": (f"call:connect=127.0.0.1:{port}", REFUSED),
            "another loopback address": (f"call:connect=127.0.0.2:{anywhere}", REFUSED),
            "the host by its address": (f"call:connect={_own_address()}:{anywhere}", NO_WAY),
            "an address elsewhere": ("call:connect=192.0.2.1:80", NO_WAY),
            "cloud metadata": ("call:connect=169.254.169.254:80", NO_WAY),
            "a name server": ("call:connect=192.0.2.53:53", NO_WAY),
            "abstract socket": (f"call:abstract_socket={self.abstract}", REFUSED),
            "socket by path": (f"call:unix_socket={self.path}", ABSENT),
            "shared memory by key": (f"call:shared_memory={_KEY}", ABSENT),
            "shared memory by name": (f"read:{self.shm}", ABSENT),
        }


NAMES = (
    *("loopback service", "another loopback address", "the host by its address", "an address elsewhere"),
    *("cloud metadata", "a name server", "abstract socket", "socket by path", "shared memory by key"),
    "shared memory by name",
)


def _own_address() -> str:
    """An address of the host; one that nobody has where it has none but loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "192.0.2.2"
        return str(probe.getsockname()[0])


class Tried:
    """The answers in one mode."""

    def __init__(self, stack: ExitStack, state: Path, attacker: Path, job: dict[str, object]) -> None:
        self.before = HostFacts.look()
        self.services = Services(stack)
        self.attacks = self.services.attacks()
        self.answers = run_attacks(state, attacker, [attack for attack, _ in self.attacks.values()], **job)


@pytest.fixture(scope="module")
def sandboxes(
    shared_state: Path, tmp_path_factory: pytest.TempPathFactory, busybox_image: str
) -> Iterator[Callable[[str], Tried]]:
    """One sandbox per mode, made when first asked for: tests in random order would make a parametrised one anew."""
    jobs: dict[str, dict[str, object]] = {"host": {"rootfs": "host"}, "image": {"image": busybox_image}}
    attacker = build_attacker(tmp_path_factory.mktemp("attacker"))
    with ExitStack() as stack:
        yield cache(lambda mode: Tried(stack, shared_state, attacker, jobs[mode]))


@pytest.fixture(params=["host", "image"])
def tried(request: pytest.FixtureRequest, sandboxes: Callable[[str], Tried]) -> Tried:
    """All attacks in one sandbox of each mode."""
    return sandboxes(request.param)


@pytest.mark.acceptance("Network Deny blocks outbound network.")
@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_host_answers(tried: Tried, name: str) -> None:
    """No way to a service, an address or shared memory of the host; the host's services saw nobody."""
    attack, refusals = tried.attacks[name]
    assert tried.answers[attack] in refusals
    tried.services.assert_untouched()
    tried.before.assert_unchanged(HostFacts.look())
