"""What a runtime really applied, checked while the shim waits at its gate: no claim rests on the bundle alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final, NamedTuple

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
_SPEC_NAMES: Final = {"mnt": "mount", "net": "network"}


class Check(NamedTuple):
    """One thing that was looked at. Fields are named as the comparison of specs names them.

    :param applied: what the kernel has, in words.
    :param wrong: what to raise; None where it is no less than planned.
    """

    field: str
    applied: str
    wrong: SandboxError | None = None


def first_wrong(checks: Iterable[Check]) -> None:
    """Raise what the first failed check says; those after it are not carried out.

    :raises SandboxError: PRIVILEGE_DROP_FAILED, NAMESPACE_FAILED, RESOURCE_LIMIT_FAILED and the like.
    """
    for check in checks:
        if check.wrong is not None:
            raise check.wrong


def verify_applied(
    facts: ProcessFacts, plan: ContainerPlan, placement: Placement, own_namespaces: Mapping[str, int]
) -> None:
    """Compare PID 1 of the container with its plan; see `applied_checks`.

    :raises SandboxError: names the first difference; the container must then be destroyed unreleased.
    """
    first_wrong(applied_checks(facts, plan, placement, own_namespaces))


def applied_checks(
    facts: ProcessFacts, plan: ContainerPlan, placement: Placement, own_namespaces: Mapping[str, int]
) -> Iterator[Check]:
    """Compare PID 1 of the container with its plan.

    :param own_namespaces: inode numbers of the executor's namespaces by name, which the job must not share.
    """
    yield from _privileges(facts, plan)
    yield from _identity(facts, plan, placement)
    if placement.netns is not None:
        yield _network(facts, placement.netns)
    wanted = [*_NAMESPACES]
    if plan.user_namespace:
        wanted.append("user")
    if plan.network is not NetworkMode.HOST:
        wanted.append("net")
    for name in wanted:
        shared = facts.namespaces[name] == own_namespaces[name]
        what = f"shares the {name} namespace"
        wrong = _difference(SandboxErrorKind.NAMESPACE_FAILED, f"namespace_{name}", what) if shared else None
        yield Check(f"linux.namespaces.{_SPEC_NAMES.get(name, name)}", what if shared else "one of its own", wrong)


def _network(facts: ProcessFacts, netns: str) -> Check:
    """A network was made for it: then it is in that one and no other."""
    if facts.namespaces["net"] == Path(netns).stat().st_ino:
        return Check("linux.namespaces.network.path", "the one made for it")
    what = "is not in the network made for it"
    wrong = _difference(SandboxErrorKind.NETWORK_SETUP_FAILED, "network", what)
    return Check("linux.namespaces.network.path", what, wrong)


def _privileges(facts: ProcessFacts, plan: ContainerPlan) -> Iterator[Check]:
    def check(field: str, applied: str, reason: str, what: str, *, wrong: bool) -> Check:
        error = _difference(SandboxErrorKind.PRIVILEGE_DROP_FAILED, reason, what) if wrong else None
        return Check(field, what if wrong else applied, error)

    off = not facts.no_new_privileges
    yield check("process.noNewPrivileges", "on", "no_new_privs", "runs without no_new_privs", wrong=off)
    off = facts.seccomp != _SECCOMP_FILTER
    yield check("linux.seccomp", "a filter", "seccomp", "runs without its seccomp filter", wrong=off)
    granted = sum(1 << _CAPABILITY_BITS[name] for name in plan.capabilities)
    for name, held in facts.capabilities.items():
        what = f"holds {name} {held:#x}, granted {granted:#x}"
        more = bool(held & ~granted)
        yield check(f"process.capabilities.{name}", f"{held:#x}", "capabilities", what, wrong=more)


def _identity(facts: ProcessFacts, plan: ContainerPlan, placement: Placement) -> Iterator[Check]:
    base = placement.uid_base or 0
    expected = ((0, base, placement.uid_count),)
    maps = f"has id maps {facts.uid_map} and {facts.gid_map}"
    other = placement.uid_base is not None and (facts.uid_map != expected or facts.gid_map != expected)
    wrong = _difference(SandboxErrorKind.NAMESPACE_FAILED, "id_map", maps) if other else None
    yield Check("linux.uidMappings", maps, wrong)
    ids = f"runs as {facts.uids}, {facts.gids}"
    other = set(facts.uids) != {base + plan.user.uid} or set(facts.gids) != {base + plan.user.gid}
    yield Check(
        "process.user", ids, _difference(SandboxErrorKind.PRIVILEGE_DROP_FAILED, "identity", ids) if other else None
    )


def _difference(kind: SandboxErrorKind, reason: str, what: str) -> SandboxError:
    return SandboxError(
        kind,
        f"gate_{reason}",
        f"the container {what}",
        details="the runtime did not apply its bundle; the job was not started",
        resolution="check the runtime's version and configuration",
    )
