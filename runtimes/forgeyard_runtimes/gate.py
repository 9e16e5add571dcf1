"""What a runtime really applied, checked while the shim waits at its gate: no claim rests on the bundle alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from forgeyard_host.processes import ProcessFacts
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.plan import ContainerPlan, Placement
from forgeyard_model.policy import NetworkMode

_SECCOMP_FILTER: Final = 2
# linux/capability.h, for the sets a plan may grant.
_CAPABILITY_BITS: Final = {
    "CAP_CHOWN": 0,
    "CAP_DAC_OVERRIDE": 1,
    "CAP_FOWNER": 3,
    "CAP_FSETID": 4,
    "CAP_KILL": 5,
    "CAP_SETGID": 6,
    "CAP_SETUID": 7,
    "CAP_SETFCAP": 31,
}
_NAMESPACES: Final = ("pid", "mnt", "ipc", "uts", "cgroup")


def verify_applied(
    facts: ProcessFacts, plan: ContainerPlan, placement: Placement, own_namespaces: Mapping[str, int]
) -> None:
    """Compare PID 1 of the container with its plan.

    :param own_namespaces: inode numbers of the executor's namespaces by name, which the job must not share.
    :raises SandboxError: names the first difference; the container must then be destroyed unreleased.
    """
    _verify_privileges(facts, plan)
    _verify_identity(facts, plan, placement)
    wanted = [*_NAMESPACES]
    if plan.user_namespace:
        wanted.append("user")
    if plan.network is not NetworkMode.HOST:
        wanted.append("net")
    _verify_network(facts, placement)
    for name in wanted:
        if facts.namespaces[name] == own_namespaces[name]:
            raise _difference(SandboxErrorKind.NAMESPACE_FAILED, f"namespace_{name}", f"shares the {name} namespace")


def _verify_network(facts: ProcessFacts, placement: Placement) -> None:
    """A network was made for it: then it is in that one and no other."""
    if placement.netns is not None and facts.namespaces["net"] != Path(placement.netns).stat().st_ino:
        raise _difference(SandboxErrorKind.NETWORK_SETUP_FAILED, "network", "is not in the network made for it")


def _verify_privileges(facts: ProcessFacts, plan: ContainerPlan) -> None:
    if not facts.no_new_privileges:
        raise _difference(SandboxErrorKind.PRIVILEGE_DROP_FAILED, "no_new_privs", "runs without no_new_privs")
    if facts.seccomp != _SECCOMP_FILTER:
        raise _difference(SandboxErrorKind.PRIVILEGE_DROP_FAILED, "seccomp", "runs without its seccomp filter")
    granted = sum(1 << _CAPABILITY_BITS[name] for name in plan.capabilities)
    for name, held in facts.capabilities.items():
        if held & ~granted:
            raise _difference(
                SandboxErrorKind.PRIVILEGE_DROP_FAILED, "capabilities", f"holds {name} {held:#x}, granted {granted:#x}"
            )


def _verify_identity(facts: ProcessFacts, plan: ContainerPlan, placement: Placement) -> None:
    base = placement.uid_base or 0
    expected = ((0, base, placement.uid_count),)
    if placement.uid_base is not None and (facts.uid_map != expected or facts.gid_map != expected):
        raise _difference(
            SandboxErrorKind.NAMESPACE_FAILED, "id_map", f"has id maps {facts.uid_map} and {facts.gid_map}"
        )
    if set(facts.uids) != {base + plan.user.uid} or set(facts.gids) != {base + plan.user.gid}:
        raise _difference(SandboxErrorKind.PRIVILEGE_DROP_FAILED, "identity", f"runs as {facts.uids}, {facts.gids}")


def _difference(kind: SandboxErrorKind, reason: str, what: str) -> SandboxError:
    return SandboxError(
        kind,
        f"gate_{reason}",
        f"the container {what}",
        details="the runtime did not apply its bundle; the job was not started",
        resolution="check the runtime's version and configuration",
    )
