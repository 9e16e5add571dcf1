"""What becomes of a bundle as Podman's request, and which of its fields are refused by name."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from contract_box import UID_BASE
from podman_jobs import PLAN

from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import NetworkAttachment, Placement
from forgeyard_model.policy import NetworkMode
from forgeyard_oci.spec import compile_bundle
from forgeyard_runtimes.contract import ContainerRef
from forgeyard_runtimes.labels import owner_labels
from forgeyard_runtimes.podman.endpoint import find_endpoint
from forgeyard_runtimes.podman.mounts import HostMounts
from forgeyard_runtimes.podman.settings import PodmanSettings, pod_of
from forgeyard_runtimes.podman.translate import Around, translate, uncarried

PLACEMENT = Placement(
    sandbox=SandboxId("01jfzq3v5m8r2t4w6x8y0z1a2b"),
    rootfs="/state/root",
    sources={"tmp": "/state/tmp", "control": "/state/ctl"},
    uid_base=UID_BASE,
    uid_count=65536,
    cgroup="/forgeyard/job",
    netns=None,
    argv=("/.forgeyard/init", "fifo"),
)
AROUND = Around("fy-x", "/state/seccomp.json", {"a": "b"}, None, {"RLIMIT_NPROC": 5, "RLIMIT_NOFILE": 7}, False)
NO_MOUNTS = HostMounts({})


def bundle(**placement: Any) -> dict[str, Any]:
    """A compiled bundle."""
    spec: dict[str, Any] = json.loads(compile_bundle(PLAN, replace(PLACEMENT, **placement)).config)
    return spec


def test_a_compiled_bundle_is_carried_whole() -> None:
    """Nothing that the compiler writes is refused, and the request says it in Podman's words."""
    spec = bundle()
    assert uncarried(spec, NO_MOUNTS) == ()
    body = translate(spec, AROUND)
    assert body["rootfs"] == "/state/root"
    assert body["command"] == ["/.forgeyard/init", "fifo"]
    assert body["user"] == "1000:1000"
    assert body["cap_drop"] == ["ALL"]
    assert body["cap_add"] == []
    assert body["netns"] == {"nsmode": "none"}
    assert body["idmappings"]["UIDMap"] == [{"container_id": 0, "host_id": UID_BASE, "size": 65536}]
    limits = {limit["type"]: limit["hard"] for limit in body["r_limits"]}
    assert limits == {"core": 0, "nofile": 1024, "nproc": 5}
    assert body["resource_limits"]["memory"] == {"limit": 128 << 20, "swap": 128 << 20}
    assert "/proc/interrupts" in body["mask"]
    assert not [option for mount in body["mounts"] for option in mount["options"] if option.startswith("rno")]


@pytest.mark.parametrize(
    ("edit", "name"),
    [
        (lambda s: s["process"].update(terminal=True), "process.terminal"),
        (lambda s: s["process"].update(noNewPrivileges=False), "process.noNewPrivileges"),
        (lambda s: s["process"].update(apparmorProfile="strict"), "process.apparmorProfile"),
        (lambda s: s["process"]["capabilities"].update(ambient=["CAP_CHOWN"]), "process.capabilities.ambient"),
        (lambda s: s["process"]["capabilities"].update(bounding=["CAP_KILL"]), "process.capabilities.effective"),
        (lambda s: s["linux"].update(devices=[{"path": "/dev/x"}]), "linux.devices"),
        (lambda s: s["linux"]["readonlyPaths"].append("/opt"), "linux.readonlyPaths[/opt]"),
        (lambda s: s["linux"]["namespaces"].append({"type": "time"}), "linux.namespaces[time]"),
        (lambda s: s.update(hooks={"poststop": [{"path": "/x"}]}), "hooks"),
        (lambda s: s["mounts"][0]["options"].append("idmap"), "mounts[/proc].options=idmap"),
        (lambda s: s["mounts"][0].update(type="nfs"), "mounts[/proc].type=nfs"),
    ],
)
def test_what_is_not_carried_is_named(edit: Callable[[dict[str, Any]], Any], name: str) -> None:
    """A field that the container would not have is named, never dropped."""
    spec = copy.deepcopy(bundle())
    edit(spec)
    assert name in uncarried(spec, NO_MOUNTS)


def test_a_user_namespace_by_path_is_not_carried() -> None:
    """Podman joins it without its maps."""
    assert "linux.namespaces[user].path" in uncarried(bundle(userns="/proc/1/ns/user"), NO_MOUNTS)


def test_recursive_flags_need_a_source_without_open_mounts() -> None:
    """A mount below a bound directory that lacks a flag is refused; one that has them all is as good as none."""
    spec = bundle()
    open_below = HostMounts({"/state/tmp/disk": frozenset({"rw", "nodev"})})
    assert uncarried(spec, open_below) == ("mounts[/tmp].options: r-forms, for /state/tmp/disk",)
    assert uncarried(spec, HostMounts({"/state/tmp/disk": frozenset({"rw", "nosuid", "nodev"})})) == ()
    assert uncarried(spec, HostMounts({"/state/tmp2": frozenset({"rw"})})) == ()


def test_a_pod_is_of_an_attempt_with_a_network() -> None:
    """All containers of an attempt are in one pod, named for its job; one without a network made for it is in none."""
    ref = ContainerRef("fy-x", Path("/state"))
    assert pod_of(NetworkAttachment(NetworkMode.DENY), ref) is None
    assert pod_of(NetworkAttachment(NetworkMode.ALLOW, "/run/netns/x"), ref) == "fy-pod-x"
    assert pod_of(NetworkAttachment(NetworkMode.ALLOW, "/run/netns/x", attempt="y"), ref) == "fy-pod-y"
    spec = bundle()
    next(entry for entry in spec["linux"]["namespaces"] if entry["type"] == "network")["path"] = "/run/netns/x"
    assert translate(spec, AROUND)["netns"] == {"nsmode": "path", "value": "/run/netns/x"}


@pytest.mark.parametrize(
    ("url", "environment", "uid", "path"),
    [
        (None, {}, 0, "/run/podman/podman.sock"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/7"}, 7, "/run/user/7/podman/podman.sock"),
        (None, {"XDG_RUNTIME_DIR": "/run/user/0"}, 0, "/run/podman/podman.sock"),
        (None, {}, 7, "/run/user/7/podman/podman.sock"),
        (None, {"CONTAINER_HOST": "unix:///a/b"}, 0, "/a/b"),
        ("unix:/c/d", {"CONTAINER_HOST": "unix:///a/b"}, 0, "/c/d"),
        ("http+unix://%2Frun%2Fx.sock", {}, 0, "/run/x.sock"),
        ("http+unix:///run/x.sock", {}, 0, "/run/x.sock"),
    ],
)
def test_where_the_socket_is(url: str | None, environment: dict[str, str], uid: int, path: str) -> None:
    """From the setting, CONTAINER_HOST, or the user's usual place, in every form of URL."""
    assert find_endpoint(url, environment, uid).path == Path(path)


def test_labels_name_sandbox_executor_state_and_boot() -> None:
    """What a person or a sweep filters by."""
    labels = owner_labels(PodmanSettings("e", "s"), "x", Path("/d"))
    assert {name.removeprefix("forgeyard.") for name in labels} == {"sandbox", "executor", "state", "boot", "directory"}
