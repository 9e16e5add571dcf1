"""What a hostile job tries with its network: a program that runs inside, with nothing but the standard library.

Its one argument is a JSON list of attacks, each a list of a verb and its words. It answers each with a line of JSON,
in order: what came of it, most often "ok", the name of an errno, or "timeout" when nothing happened within WAIT.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import json
import os
import select
import socket
import struct
import subprocess
import sys
from collections.abc import Callable

WAIT = 5.0
"""Seconds. A refusal is an event; whoever sees "timeout" was dropped instead of refused."""
IP_FREEBIND, IP_TRANSPARENT, SO_MARK = 15, 19, 36
CLONE_NEWNET, CLONE_NEWUSER, CLONE_NEWNS = 0x40000000, 0x10000000, 0x20000
NETLINK_NETFILTER = 12
ATF_COM = 0x02
ETH_P_ALL, ETH_P_ARP = 0x0003, 0x0806
_LIBC = ctypes.CDLL(None, use_errno=True)
WAYS = {}


def way(function: Callable[..., object]) -> Callable[..., object]:
    """Make a function a verb."""
    WAYS[function.__name__] = function
    return function


# ---- packets


@way
def tcp(address: str, port: int, text: str = "", source: str = "") -> str:
    """Connect, send `text`, and read what comes first."""
    with opened(address, socket.SOCK_STREAM) as client:
        if source:
            client.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            client.bind((source, 0))
        client.setblocking(False)
        code = client.connect_ex((address, port))
        if code == errno.EINPROGRESS:
            if not select.select([], [client], [], WAIT)[1]:
                return "timeout"
            code = client.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            return errno.errorcode[code]
        if not text:
            return "ok"
        client.settimeout(WAIT)
        client.sendall(text.encode("latin-1"))
        return received(client)


@way
def udp(address: str, port: int, source: str = "") -> str:
    """Send a datagram; "ok" when it comes back."""
    with opened(address, socket.SOCK_DGRAM) as client:
        if source:
            client.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)
            client.bind((source, 0))
        client.connect((address, port))
        client.settimeout(WAIT)
        client.send(b"attack")
        client.recv(100)
        return "ok"


@way
def shout(address: str, port: int) -> str:
    """A datagram to everybody."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_BROADCAST, 1)
        client.sendto(b"attack", (address, port))
        return "sent"


@way
def sweep(network: str, port: int) -> list[str]:
    """Send a datagram to each address of a /28; those that answered ARP by then."""
    prefix, _, last = network.rpartition(".")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as client:
        for number in range(int(last), int(last) + 16):
            with contextlib.suppress(OSError):
                client.sendto(b"attack", (f"{prefix}.{number}", port))
    lines = [line.split() for line in read("/proc/net/arp").splitlines()[1:]]
    return sorted(line[0] for line in lines if int(line[2], 16) & ATF_COM)


@way
def ping(address: str) -> str:
    """As ping(8) does where it needs no privilege: an ICMP socket of datagrams."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP) as client:
        client.settimeout(WAIT)
        client.sendto(struct.pack("!BBHHH", 8, 0, 0, 0, 1), (address, 0))
        client.recv(100)
        return "ok"


@way
def make(family: str, kind: str, protocol: int) -> str:
    """A socket that could forge."""
    socket.socket(getattr(socket, family), getattr(socket, kind), protocol).close()
    return "ok"


@way
def option(name: str) -> str:
    """An option that would change where packets seem to come from, or how they are routed."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as made:
        if name == "mark":
            made.setsockopt(socket.SOL_SOCKET, SO_MARK, 1)
        else:
            made.setsockopt(socket.IPPROTO_IP, IP_TRANSPARENT, 1)
    return "ok"


@way
def six(_: str = "") -> list[str]:
    """Addresses and routes of IPv6 on anything but loopback."""
    addresses = [line.split() for line in read("/proc/net/if_inet6").splitlines()]
    routes = [line.split() for line in read("/proc/net/ipv6_route").splitlines()]
    return sorted({words[-1] for words in (*addresses, *routes)} - {"lo"})


# ---- names


@way
def dns(server: str, name: str, kind: int = 1, transport: str = "udp", port: int = 53) -> list[object]:
    """Ask; the response code and the IPv4 addresses of the answer."""
    labels = b"".join(bytes((len(part),)) + part.encode("latin-1") for part in name.split(".") if part)
    message = struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">HH", kind, 1)
    with opened(server, socket.SOCK_DGRAM if transport == "udp" else socket.SOCK_STREAM) as client:
        client.settimeout(WAIT)
        client.connect((server, port))
        if transport == "udp":
            client.send(message)
            answer = client.recv(4096)
        else:
            client.sendall(struct.pack(">H", len(message)) + message)
            answer = client.recv(4096)[2:]
    if len(answer) < 12:
        return ["nothing"]
    return [answer[3] & 15, addresses_of(answer, len(message))]


def addresses_of(answer: bytes, at: int) -> list[str]:
    """Of all records of type A behind the question, whose names are pointers or written out."""
    found = []
    for _ in range(int.from_bytes(answer[6:8], "big")):
        while answer[at] and answer[at] < 0xC0:
            at += answer[at] + 1
        at += 2 if answer[at] >= 0xC0 else 1
        kind, _, _, size = struct.unpack(">HHIH", answer[at : at + 10])
        if kind == 1:
            found.append(socket.inet_ntoa(answer[at + 10 : at + 14]))
        at += 10 + size
    return found


@way
def lookup(name: str) -> list[str] | str:
    """As programs do it, through the C library."""
    try:
        found = socket.getaddrinfo(name, 80, socket.AF_INET, socket.SOCK_STREAM)
    except socket.gaierror as error:
        return {socket.EAI_NONAME: "EAI_NONAME", socket.EAI_AGAIN: "EAI_AGAIN"}.get(error.errno, str(error.errno))
    return sorted({str(item[4][0]) for item in found})


# ---- changing it


@way
def netlink(protocol: int, kind: int, flags: int, body: str) -> str:
    """One request to the kernel; the errno of its answer."""
    data = bytes.fromhex(body)
    with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, protocol) as made:
        made.settimeout(WAIT)
        made.sendto(struct.pack("=IHHII", 16 + len(data), kind, flags | 5, 1, 0) + data, (0, 0))
        answer = made.recv(4096)
    code = -struct.unpack("=i", answer[16:20])[0]
    return "ok" if code == 0 else errno.errorcode.get(code, str(code))


@way
def unshare(flags: int) -> str:
    """Namespaces of its own."""
    return called(_LIBC.unshare(flags))


@way
def enter(path: str) -> str:
    """The namespace of somebody else."""
    with open(path) as file:
        return called(_LIBC.setns(file.fileno(), 0))


@way
def write(path: str, text: str) -> str:
    """A kernel setting."""
    with open(path, "w") as file:
        file.write(text)
    return "ok"


@way
def program(*words: str) -> str:
    """A program of the host's, through its own loader where the root has none: "ok", or its exit."""
    prefix = json.loads(os.environ.get("ATTACK_LOADER", "[]"))
    done = subprocess.run([*prefix, *words], capture_output=True, timeout=WAIT * 2, check=False)
    return "ok" if done.returncode == 0 else f"exit {done.returncode}"


@way
def read(path: str) -> str:
    """The whole of a file."""
    with open(path) as file:
        return file.read()


def called(result: int) -> str:
    """Of a call of the C library."""
    return "ok" if result == 0 else errno.errorcode[ctypes.get_errno()]


def received(client: socket.socket) -> str:
    """Until the other side ends, or has said enough."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while len(data) < 2000 and (more := client.recv(2000)):
            data += more
    return data.decode("latin-1")


def opened(address: str, kind: int) -> socket.socket:
    """A socket of the address's family."""
    return socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, kind)


def attempt(verb: str, *words: object) -> object:
    """Try one."""
    try:
        return WAYS[verb](*words)
    except TimeoutError:
        return "timeout"
    except OSError as error:
        return errno.errorcode.get(error.errno or 0, str(error))
    except subprocess.TimeoutExpired:
        return "timeout"


if __name__ == "__main__":
    for item in json.loads(sys.argv[1]):
        print(json.dumps(attempt(*item)), flush=True)
