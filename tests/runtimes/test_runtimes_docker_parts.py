"""Parts of the Docker adapter that need no daemon: which one is meant, engine sockets, the skeleton, reading mounts."""

from __future__ import annotations

import hashlib
import io
import json
import os
import socket
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.docker.capabilities import docker_capabilities, maps_ids, refuse_unfit
from forgeyard_runtimes.docker.differences import hidden_in_sys, seccomp_for_docker
from forgeyard_runtimes.docker.effective import root_propagation, with_kernel_flags
from forgeyard_runtimes.docker.endpoint import DEFAULT_HOST, find_endpoint
from forgeyard_runtimes.docker.engine_socket import is_engine_socket
from forgeyard_runtimes.docker.skeleton import Skeleton, build_image
from forgeyard_runtimes.docker.staging import unstage
from forgeyard_runtimes.docker.transport import OnePoolAdapter
from forgeyard_runtimes.mount_table import parse_mountinfo


def context(config: Path, name: str, host: str, *, skip_verify: bool = False) -> None:
    """A context as Docker's client keeps it."""
    digest = hashlib.sha256(name.encode()).hexdigest()
    meta = config / "contexts/meta" / digest
    meta.mkdir(parents=True)
    endpoint = {"Host": host, "SkipTLSVerify": skip_verify}
    (meta / "meta.json").write_text(json.dumps({"Name": name, "Endpoints": {"docker": endpoint}}))


@pytest.fixture
def environ(tmp_path: Path) -> Mapping[str, str]:
    """An environment with a configuration directory in which `current` is the context in use."""
    context(tmp_path, "current", "unix:///run/current.sock")
    context(tmp_path, "named", "unix:///run/named.sock")
    (tmp_path / "config.json").write_text(json.dumps({"currentContext": "current"}))
    return {"DOCKER_CONFIG": str(tmp_path)}


def test_a_daemon_is_named_by_the_first_that_says_so(environ: Mapping[str, str]) -> None:
    """Setting, DOCKER_HOST, DOCKER_CONTEXT, the context in use, the usual socket: in that order."""
    host, named = {"DOCKER_HOST": "unix:///run/env.sock"}, {"DOCKER_CONTEXT": "named"}
    assert find_endpoint("unix:///run/set.sock", "named", {**environ, **host}).socket == "/run/set.sock"
    assert find_endpoint("", "named", {**environ, **host}).socket == "/run/named.sock"
    assert find_endpoint("", "", {**environ, **host, **named}).socket == "/run/env.sock"
    assert find_endpoint("", "", {**environ, **named}).socket == "/run/named.sock"
    assert find_endpoint("", "", environ).socket == "/run/current.sock"
    assert find_endpoint("", "default", environ).host == DEFAULT_HOST
    assert find_endpoint("", "", {"HOME": "/nosuch"}).host == DEFAULT_HOST


def test_certificates_come_from_the_environment_or_the_context(tmp_path: Path) -> None:
    """DOCKER_CERT_PATH with DOCKER_TLS_VERIFY, and a context's own files with its own word on verifying."""
    for name in ("ca", "cert", "key"):
        (tmp_path / f"{name}.pem").write_text("x")
    here = {"DOCKER_HOST": "tcp://127.0.0.1:2376", "DOCKER_CERT_PATH": str(tmp_path), "HOME": "/nosuch"}
    verified = find_endpoint("", "", {**here, "DOCKER_TLS_VERIFY": "1"}).tls
    assert verified is not None
    assert (verified.verify, verified.file("cert"), verified.file("x")) == (True, f"{tmp_path}/cert.pem", None)
    unverified = find_endpoint("", "", here).tls
    assert unverified is not None
    assert unverified.verify is False
    context(tmp_path, "remote", "tcp://localhost:2376", skip_verify=True)
    own = tmp_path / "contexts/tls" / hashlib.sha256(b"remote").hexdigest() / "docker"
    own.mkdir(parents=True)
    found = find_endpoint("", "remote", {"DOCKER_CONFIG": str(tmp_path)}).tls
    assert found is not None
    assert (found.directory, found.verify) == (own, False)


@pytest.mark.parametrize("host", ["tcp://10.0.0.1:2375", "ssh://root@build", "npipe:////./pipe/docker", "fd://"])
def test_a_daemon_elsewhere_is_refused(host: str) -> None:
    """FIFOs, mounts and pids mean nothing to another machine."""
    with pytest.raises(ExecutorError) as caught:
        find_endpoint(host, "", {})
    assert (caught.value.kind, caught.value.reason) == (ExecutorErrorKind.UNSUPPORTED, "docker_not_local")


def test_a_broken_configuration_is_named(tmp_path: Path) -> None:
    """A context that is not there, and a file that can't be read, are errors with a cure, not the default daemon."""
    with pytest.raises(ExecutorError, match="nosuch") as caught:
        find_endpoint("", "nosuch", {"DOCKER_CONFIG": str(tmp_path)})
    assert caught.value.reason == "docker_context"
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ExecutorError, match=r"config\.json"):
        find_endpoint("", "", {"DOCKER_CONFIG": str(tmp_path)})


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Path]:
    """A socket of some engine."""
    path = tmp_path / "engine" / "api"
    path.parent.mkdir()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        yield path


def test_engine_sockets_are_known_under_any_name(engine: Path, tmp_path: Path) -> None:
    """Itself, a link, a hard link, a directory above it, and the usual places before anything is there."""
    link, hard = tmp_path / "link", tmp_path / "hard"
    link.symlink_to(engine)
    os.link(engine, hard)
    for path in (engine, link, hard, engine.parent, tmp_path):
        assert is_engine_socket(str(path), [str(engine)]), path
    assert not is_engine_socket(str(engine))
    for usual in ("/var/run/docker.sock", "/run", "/", "/run/containerd", str(tmp_path / "docker.sock")):
        assert is_engine_socket(usual), usual
    for harmless in ("/usr", str(tmp_path / "nosuch"), "/etc/passwd"):
        assert not is_engine_socket(harmless)


def test_a_skeletons_image_depends_on_its_content_alone() -> None:
    """The same top of a root is the same image; its id is the digest of the configuration that Docker loads."""
    one = build_image(Skeleton.of({"bin": "usr/bin"}, {"usr": True, "file": False}), "s", "x86_64")
    two = build_image(Skeleton.of({"bin": "usr/bin"}, {"file": False, "usr": True}), "s", "x86_64")
    other = build_image(Skeleton.of({"bin": "usr/sbin"}, {"usr": True}), "s", "x86_64")
    assert one == two
    assert one.identity != other.identity
    with tarfile.open(fileobj=io.BytesIO(one.archive)) as archive:
        manifest = json.load(archive.extractfile("manifest.json"))[0]  # type: ignore[arg-type]  # a file, so not None
        config = archive.extractfile(manifest["Config"]).read()  # type: ignore[union-attr]  # as above
        layer = archive.extractfile("layer.tar").read()  # type: ignore[union-attr]  # as above
    assert one.identity == f"sha256:{hashlib.sha256(config).hexdigest()}"
    assert json.loads(config)["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}"]
    with tarfile.open(fileobj=io.BytesIO(layer)) as inside:
        kinds = {entry.name: (entry.isdir(), entry.issym(), entry.linkname) for entry in inside}
    assert kinds == {"bin": (False, True, "usr/bin"), "usr": (True, False, ""), "file": (False, False, "")}


MOUNTINFO = """\
1 0 0:41 / / ro,relatime master:3 - overlay overlay rw
2 1 0:43 / /proc rw,nosuid,nodev,noexec - proc proc rw
3 1 254:0 /a /data rw,nosuid - ext4 /dev/x rw
4 1 254:0 /b /with\\040blank ro,nosuid,nodev - ext4 /dev/x rw
5 2 0:54 / /proc/acpi ro - tmpfs tmpfs ro
6 1 254:0 /c /more rw - ext4 /dev/x rw
"""


def test_mount_flags_are_the_kernels() -> None:
    """Flags in the runtime's spec count for nothing; mounts that only the kernel has are added, covers are not."""
    mounts = [
        {"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid", "noexec", "nodev"]},
        {"destination": "/data", "type": "bind", "source": "/a", "options": ["rbind", "ro", "nodev"]},
        {"destination": "/with blank", "type": "bind", "source": "/b", "options": ["rbind"]},
        {"destination": "/absent", "type": "bind", "source": "/x", "options": ["rbind", "ro"]},
    ]
    found = {mount["destination"]: mount["options"] for mount in with_kernel_flags(mounts, parse_mountinfo(MOUNTINFO))}
    assert found["/data"] == ["rbind", "nosuid"]
    assert found["/with blank"] == ["rbind", "ro", "nosuid", "nodev"]
    assert found["/absent"] == ["rbind"]
    assert found.keys() - {mount["destination"] for mount in mounts} == {"/more"}
    assert parse_mountinfo(MOUNTINFO)["/more"][:2] == ("ext4", frozenset({"rw"}))
    assert root_propagation(parse_mountinfo(MOUNTINFO)) == "rslave"
    assert root_propagation(parse_mountinfo(MOUNTINFO.replace("master:3", "shared:3"))) == "rshared"
    assert root_propagation(parse_mountinfo(MOUNTINFO.replace(" master:3", ""))) == "rprivate"


def test_all_of_sysfs_is_hidden_but_two_places(tmp_path: Path) -> None:
    """Every entry beside the ways to the own group and the cpus, whatever this machine has; links need no cover."""
    for name in ("fs/cgroup", "fs/ext4", "devices/system/cpu", "devices/system/node", "devices/pci0", "kernel/debug"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "fs/link").symlink_to("ext4")
    expected = {"/sys/fs/ext4", "/sys/devices/system/node", "/sys/devices/pci0"}
    assert set(hidden_in_sys(["/sys/kernel"], tmp_path)) == expected


def test_a_filters_default_errno_is_written_out() -> None:
    """Calls that the filter does not name get its default's errno by a rule; those it names are left alone."""
    rule = {"names": ["read", "clone3"], "action": "SCMP_ACT_ALLOW"}
    filter_ = {"defaultAction": "SCMP_ACT_ERRNO", "defaultErrnoRet": 38, "syscalls": [rule]}
    first, added = seccomp_for_docker(filter_)["syscalls"]
    assert first == rule
    assert (added["action"], added["errnoRet"]) == ("SCMP_ACT_ERRNO", 38)
    assert "io_uring_setup" in added["names"]
    assert not {"read", "clone3"} & set(added["names"])
    plain = {"defaultAction": "SCMP_ACT_ERRNO", "syscalls": [rule]}
    assert seccomp_for_docker(plain) == plain


INFO = {
    "OSType": "linux",
    "CgroupDriver": "cgroupfs",
    "SecurityOptions": ["name=seccomp,profile=default"],
    "MemoryLimit": True,
    "PidsLimit": True,
    "CpuCfsQuota": True,
}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"OSType": "windows"}, "docker_not_linux"),
        ({"CgroupDriver": "systemd"}, "docker_cgroup_driver"),
        ({"SecurityOptions": ["name=seccomp,profile=default", "name=rootless"]}, "docker_rootless"),
        ({"SecurityOptions": []}, "docker_seccomp"),
    ],
)
def test_a_daemon_that_cannot_serve_is_refused(change: Mapping[str, object], reason: str) -> None:
    """What is in the way is named, with a cure."""
    refuse_unfit(INFO)
    with pytest.raises(ExecutorError) as caught:
        refuse_unfit({**INFO, **change})
    assert caught.value.reason == reason
    assert caught.value.resolution


def test_claims_are_a_user_namespace_lower() -> None:
    """No user namespace, also where the daemon maps all its containers into one range; limits are the daemon's."""
    claims = docker_capabilities("docker 1", {**INFO, "PidsLimit": False})
    assert (claims.user_namespace, claims.seccomp, claims.resource_controls.pids) == (False, True, False)
    assert not maps_ids(INFO)
    assert maps_ids({**INFO, "SecurityOptions": ["name=userns"]})


def test_unstaging_nothing_is_no_error(tmp_path: Path) -> None:
    """Nothing mounted, and nothing there."""
    unstage(tmp_path)
    unstage(tmp_path / "nosuch")


def test_requests_share_one_pool() -> None:
    """Connections are kept by socket, not by URL."""
    adapter = OnePoolAdapter("/nosuch", 1, 2)
    assert adapter.get_connection("http+docker://localhost/a") is adapter.get_connection("http+docker://localhost/b")
    adapter.close()
