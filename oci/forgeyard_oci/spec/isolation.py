"""Namespaces and identity mapping."""

from __future__ import annotations

from typing import Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.plan import ContainerPlan, Placement
from forgeyard_model.policy import NetworkMode
from forgeyard_oci.spec.compose import Fields

# Not `time`: runc 1.1 refuses it, and nothing in a build needs a clock of its own.
_ALWAYS: Final = ("cgroup", "ipc", "mount", "pid", "uts")
_WITHOUT_NETNS_OF_OURS: Final = (NetworkMode.DENY, NetworkMode.HOST)


def with_namespaces(
    network: NetworkMode,
    netns: str | None,
    *,
    user_namespace: bool,
    userns: str | None = None,
    plumbed: bool = False,
) -> Fields:
    """New ones of every kind; the network's is joined when `netns` names it, and left out for the host's.

    :param userns: path of the user namespace to join instead of a new one. The network's is then left out, and has to
        be the runtime's own.
    :param plumbed: the network is put into a new one before anything runs there.
    :raises SandboxError: NETWORK_SETUP_FAILED when mode and namespace contradict each other; NAMESPACE_FAILED for a
        `userns` that is not absolute, or not wanted.
    """
    if userns is not None and not (user_namespace and userns.startswith("/")):
        raise _namespace("userns_path", f"{userns!r} is not absolute, or no user namespace was planned")
    names = [{"type": kind} for kind in _ALWAYS]
    if user_namespace:
        names.append({"type": "user"} if userns is None else {"type": "user", "path": userns})
    if network is NetworkMode.HOST:
        if netns is not None:
            raise _network("host_network_with_namespace", f"the host's network was asked for, not {netns}")
    elif netns is not None:
        if not netns.startswith("/"):
            raise _network("relative_netns", f"{netns!r} is not an absolute path")
        if userns is None:
            names.append({"type": "network", "path": netns})
        # Otherwise the runtime is started in it, and the container inherits it: runc 1.1 joins the user namespace
        # first, and from there no network of the host's own may be joined. The gate compares what came of it.
    elif network not in _WITHOUT_NETNS_OF_OURS and not plumbed:
        raise _network("no_network_namespace", f"mode {network.value} needs a namespace made for it, none was given")
    else:
        names.append({"type": "network"})
    return {"linux/namespaces": names}


def with_id_mappings(plan: ContainerPlan, placement: Placement) -> Fields:
    """Container ids from 0 on become host ids from `placement.uid_base` on, users and groups alike.

    :raises SandboxError: NAMESPACE_FAILED when plan and placement disagree about a user namespace, when the range
        would hold the host's root, or when an id of the job lies outside it.
    """
    if not plan.user_namespace:
        if placement.uid_base is not None:
            raise _namespace("range_without_namespace", "a range of uids was placed, but no user namespace planned")
        return {}
    if placement.uid_base is None or placement.uid_count < 1:
        raise _namespace("no_uid_range", "a user namespace was planned, but no range of uids placed")
    if placement.uid_base < 1:
        raise _namespace("range_holds_root", "the range of uids would map the container's root to the host's")
    ids = (plan.user.uid, plan.user.gid, *plan.user.groups)
    if max(ids) >= placement.uid_count:
        raise _namespace("id_outside_range", f"id {max(ids)} lies outside the {placement.uid_count} ids of the sandbox")
    mapping = {"containerID": 0, "hostID": placement.uid_base, "size": placement.uid_count}
    return {"linux/uidMappings": [mapping], "linux/gidMappings": [mapping]}


def with_hostname(name: str) -> Fields:
    """The host name inside."""
    return {"hostname": name}


def _network(reason: str, details: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NETWORK_SETUP_FAILED, reason, "the network can't be as planned", details=details
    )


def _namespace(reason: str, details: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.NAMESPACE_FAILED, reason, "the user namespace can't be as planned", details=details
    )
