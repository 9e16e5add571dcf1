"""The part of a job's root that comes from no host: accounts, names, and the places that mounts go onto."""

from __future__ import annotations

from typing import Final

from forgeyard_model.plan import SHIM_DIR, JobUser
from forgeyard_process_shim.hostroot_tree import Tree, directory, link, text

JOB_USER: Final = JobUser(1000, 1000, (), "forgeyard")
HOME: Final = "/home/forgeyard"
HOSTS: Final = "/etc/hosts"
"""A file of its own in the skeleton, so that an attempt's `hosts_file` can be bound over it."""
RESOLV_CONF: Final = "/etc/resolv.conf"
"""Empty in the skeleton; a networked attempt binds its own over it."""
HOSTNAME: Final = "/etc/hostname"
"""As RESOLV_CONF."""

EXTRA_WRITABLE: Final = ("/var/tmp", "/run")  # noqa: S108  inside the sandbox
"""Beside FilesystemPolicy.writable_paths: places that programs expect to write to. The root is read-only."""

_OPEN: Final = 0o1777
_MOUNTPOINTS: Final = (
    *(("/proc", 0o555), ("/sys", 0o555), ("/sys/fs/cgroup", 0o555), ("/dev", 0o755)),
    *((f"/sys/devices/system/{name}", 0o555) for name in ("cpu", "node")),
    *(("/tmp", _OPEN), ("/var/tmp", _OPEN), ("/run", 0o755), ("/run/secrets", 0o755)),  # noqa: S108  in the sandbox
    *((f"/work/{name}", 0o755) for name in ("source", "build", "output", "tmp")),
    *((path, 0o755) for path in ("/toolchains", HOME, SHIM_DIR, "/usr", "/opt")),
)
"""runc gives a tmpfs the mode of the directory it covers, so these modes are the ones that a job sees."""

# Root is at home where the job is: there is no /root, and a tool that asks passwd must not be sent to one.
_PASSWD: Final = f"""\
root:x:0:0:root:{HOME}:/bin/sh
forgeyard:x:{JOB_USER.uid}:{JOB_USER.gid}:forgeyard:{HOME}:/bin/sh
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP: Final = f"""\
root:x:0:
tty:x:5:
forgeyard:x:{JOB_USER.gid}:
nogroup:x:65534:
"""
_NSSWITCH: Final = """\
passwd: files
group: files
shadow: files
hosts: files dns
networks: files
services: files
protocols: files
rpc: files
ethers: files
"""


def hosts_file(hostname: str = "") -> str:
    """Text of a hosts file. The skeleton's has no `hostname`: it is shared by attempts whose names differ.

    An attempt that binds its own over HOSTS can look up its own name, which Java and MPI insist on.
    """
    own = f"127.0.1.1 {hostname}\n" if hostname else ""
    return f"127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n{own}"


def synthetic_tree(shells: tuple[str, ...]) -> Tree:
    """Everything in the skeleton that is the same on all hosts with the same shells.

    :param shells: paths for /etc/shells.
    """
    tree = {path: directory(mode) for path, mode in _MOUNTPOINTS}
    tree["/var/run"] = link("/run")
    tree["/etc"] = directory()
    tree["/etc/mtab"] = link("/proc/self/mounts")
    files = {
        "passwd": _PASSWD,
        "group": _GROUP,
        "nsswitch.conf": _NSSWITCH,
        "host.conf": "multi on\n",
        "machine-id": "",  # a host's is a fingerprint; an empty one means "not set yet" to those who read it
        "shells": "".join(f"{shell}\n" for shell in shells),
    }
    tree |= {f"/etc/{name}": text(content) for name, content in files.items()}
    # no server listed: glibc then asks loopback, where nothing listens, and a look-up fails at once
    return tree | {HOSTS: text(hosts_file()), RESOLV_CONF: text(""), HOSTNAME: text("")}
