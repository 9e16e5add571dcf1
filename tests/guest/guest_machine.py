"""The virtual machine: QEMU, and the daemon that shows it this host's tree read-only. For trusted tests alone.

Both die with this process (PR_SET_PDEATHSIG), whatever ends it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import resource
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from guest_image import GuestUnavailable

MEMORY_MIB: Final = 768
DISK_MIB: Final = 512
PORTS: Final = ("stdout", "stderr", "status")
_VIRTIOFSD: Final = ("/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd")
_KERNEL_ARGUMENTS: Final = (
    "quiet loglevel=3 console=ttyS0 panic=-1 reboot=t tsc=reliable "
    "mitigations=off cryptomgr.notests apparmor=0 lsm= audit=0"
)
_NICE: Final = -10
_PR_SET_PDEATHSIG: Final = 1
_CLONE_NEWNS: Final = 0x20000
# mount_setattr(2): every mount at and below a path made read-only, and private to the namespace.
_SYS_MOUNT_SETATTR: Final = 442
_AT_FDCWD: Final = -100
_AT_RECURSIVE: Final = 0x8000
_MOUNT_ATTR_RDONLY: Final = 1
_MS_PRIVATE: Final = 1 << 18


def require(name: str) -> str:
    """The path of a program.

    :raises GuestUnavailable: when it is not installed.
    """
    path = shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin")
    if path is None:
        raise GuestUnavailable(f"{name} is not installed (./dev setup installs it)")
    return path


@dataclass(frozen=True, slots=True)
class Machine:
    """A running guest: QEMU's process, our end of each port, and the file with its console."""

    qemu: subprocess.Popen[bytes]
    ports: dict[str, socket.socket]
    console: Path


@contextmanager
def machine(kernel: Path, initrd: Path, directory: Path) -> Iterator[Machine]:
    """Boot; on leaving, both processes are killed and reaped.

    :param directory: for the disk, the socket and the console's text.
    :raises GuestUnavailable: for a missing program.
    """
    with ExitStack() as stack:
        files = _share_host(stack, directory)
        ours, theirs = _port_pairs(stack)
        console = directory / "console"
        argv = _qemu(kernel, initrd, _disk(directory), console, files.fileno(), theirs)
        keep = [files.fileno(), *(end.fileno() for end in theirs.values())]
        qemu = _spawn(stack, argv, keep)
        # Held by QEMU alone from here on, so that its end shows as the end of the ports.
        for end in theirs.values():
            end.close()
        yield Machine(qemu, ours, console)


def _port_pairs(stack: ExitStack) -> tuple[dict[str, socket.socket], dict[str, socket.socket]]:
    ours, theirs = {}, {}
    for name in PORTS:
        ours[name], theirs[name] = (stack.enter_context(end) for end in socket.socketpair())
    return ours, theirs


def _qemu(
    kernel: Path, initrd: Path, disk: Path, console: Path, files: int, ports: dict[str, socket.socket]
) -> list[str]:
    memory = f"{MEMORY_MIB}M"
    argv = [require("qemu-system-x86_64"), *("-M", "microvm,memory-backend=mem"), *("-accel", "tcg,thread=multi")]
    argv += ["-cpu", "qemu64,+rdrand", "-smp", "1", "-m", memory, "-nodefaults", "-no-user-config", "-nographic"]
    # virtiofsd speaks no legacy virtio, which is what devices without PCI default to.
    argv += ["-no-reboot", "-global", "virtio-mmio.force-legacy=false", "-serial", f"file:{console}"]
    argv += ["-kernel", str(kernel), "-initrd", str(initrd)]
    argv += ["-append", f"{_KERNEL_ARGUMENTS} tsc_early_khz={tsc_khz()}"]
    argv += ["-object", f"memory-backend-memfd,id=mem,size={memory},share=on"]
    argv += ["-chardev", f"socket,id=files,fd={files}", "-device", "vhost-user-fs-device,chardev=files,tag=host"]
    argv += ["-drive", f"if=none,id=state,file={disk},format=raw,cache=unsafe"]
    argv += ["-device", "virtio-blk-device,drive=state,serial=state", "-device", "virtio-serial-device"]
    for name, end in ports.items():
        argv += ["-chardev", f"socket,id={name},fd={end.fileno()}"]
        argv += ["-device", f"virtserialport,chardev={name},name={name}"]
    return argv


def _disk(directory: Path) -> Path:
    """An empty ext4 disk, sparse."""
    path = directory / "state.ext4"
    with path.open("wb") as file:
        file.truncate(DISK_MIB << 20)
    # Without a journal, and with its tables left for later: it lives for minutes.
    options = ["-q", "-F", "-O", "^has_journal", "-E", "lazy_itable_init=1,nodiscard", "-m", "0"]
    subprocess.run([require("mke2fs"), "-t", "ext4", *options, str(path)], check=True)
    return path


def _share_host(stack: ExitStack, directory: Path) -> socket.socket:
    """Start virtiofsd over / and return QEMU's connection to it."""
    daemon = next((path for path in _VIRTIOFSD if os.access(path, os.X_OK)), None)
    if daemon is None:
        raise GuestUnavailable("virtiofsd is not installed (./dev setup installs it)")
    path = str(directory / "files.socket")
    listener = stack.enter_context(socket.socket(socket.AF_UNIX))
    listener.bind(path)
    listener.listen(1)
    # Connected before anybody accepts: the backlog holds it, so there is nothing to wait for.
    client = stack.enter_context(socket.socket(socket.AF_UNIX))
    client.connect(path)
    options = ["-o", "source=/", "-o", "xattr", "-o", "cache=always", "-o", "sandbox=chroot", "-o", "log_level=warn"]
    # It holds a file open for each one the guest has seen: as few as that takes, and as many as we may.
    options += ["-o", "no_readdirplus", f"--rlimit-nofile={resource.getrlimit(resource.RLIMIT_NOFILE)[1]}"]
    argv = [daemon, f"--fd={listener.fileno()}", *options]
    _spawn(stack, argv, [listener.fileno()], prepare=_see_everything_read_only)
    listener.close()
    return client


def _spawn(
    stack: ExitStack, argv: list[str], keep: list[int], prepare: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    def in_child() -> None:
        _libc().prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # Others wait for us, not we for them: what the guest does takes a minute of a core at the best of times.
        with suppress(OSError):
            os.nice(_NICE)
            # Where each session is scheduled as one, this is what counts among sessions.
            Path("/proc/self/autogroup").write_text(str(_NICE))
        if prepare is not None:
            prepare()

    # preexec_fn is unsafe beside threads; this program has none.
    process = subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, pass_fds=keep, preexec_fn=in_child, start_new_session=True
    )
    stack.callback(_end, process)
    return process


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _see_everything_read_only() -> None:
    """In the daemon: a mount namespace of its own in which nothing can be written, so that no guest can harm a file."""
    libc = _libc()
    attributes = (ctypes.c_uint64 * 4)(_MOUNT_ATTR_RDONLY, 0, _MS_PRIVATE, 0)
    call = (_SYS_MOUNT_SETATTR, _AT_FDCWD, b"/", _AT_RECURSIVE, attributes, ctypes.sizeof(attributes))
    if libc.unshare(_CLONE_NEWNS) != 0 or libc.syscall(*call) != 0:
        raise OSError(ctypes.get_errno(), "cannot make this host's tree read-only for virtiofsd")


def tsc_khz() -> int:
    """The rate of this host's time stamp counter, which is the guest's too.

    Without it the kernel looks for a timer to measure with, of which a microvm has none, and stops.
    """
    code = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    with mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC) as page:
        page.write(code)
        start = ctypes.c_char.from_buffer(page)
        count = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(start))
        ticks, clock = count(), time.monotonic_ns()
        while (passed := time.monotonic_ns() - clock) < 50_000_000:
            pass
        ticks = count() - ticks
        del start, count
    return int(ticks * 1_000_000 // passed)
