"""What a job may count on, runtime by runtime: the table that README shows and that the conformance suite goes by.

Everything applies everywhere but for what EXCEPTIONS says. A cell that does not apply is refused or stated, and its
test is not run; there is no other way to leave one out.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from forgeyard_runtimes.docker import differences as docker
from forgeyard_runtimes.find import CONTRACT_ONLY
from forgeyard_runtimes.podman import translate as podman

RUNTIMES: Final = ("runc", "crun", "containerd", "podman", "docker", "runsc")


class Behaviour(StrEnum):
    """Rows of the table. The value is what README says."""

    STEPS = "steps, their exit codes and signals, output and input by the shim's own channel"
    IMMUNE_INIT = "PID 1, which is ours, can't be killed, stopped or looked into by the job"
    LIMITS = "memory, pids and cpu limits, with evidence from control groups of our own"
    PRIVILEGES = "no capabilities, no_new_privs, seccomp filter, rlimits, as an ordinary user"
    FILES = "read-only root, mounts with exactly the planned flags, masked /proc"
    NAMESPACES = "mount, pid, ipc, uts, network and cgroup namespaces of the job's own"
    USER_NAMESPACE = "a user namespace of each attempt's own"
    ROOT_IN_USERNS = "root of its own user namespace, for jobs that are granted it"
    TMPFS = "memory file systems at any place, with their planned mode"
    UMASK = "any umask for PID 1 (a step may always set its own)"
    EMPTY_SYS = "/sys is an empty file system with the job's own cgroup in it"
    LITERAL_ROOT = "new entries at the top of a writable root"
    UNKNOWN_CALLS = "calls that the filter does not know answer ENOSYS, whatever their arguments"
    EXEC = "one more process in the container, with exactly the rights of PID 1"
    READ_BACK = "what the runtime applied is read back and compared before the job starts"
    NETWORKS = "a network of the attempt's own, with its policy, for the job and its services"
    SHARED_NETWORK = "services in the job's own network namespace"
    OPERATOR_NETWORK = "an operator's own CNI network, for the job and its services"
    DAEMON_RESTART = "a job goes on while its daemon restarts"


_OWN_KERNEL: Final = "gVisor's kernel applies it, of which nothing can be read back from the host"
_NOT_TRIED: Final = "not tried on gVisor, so not claimed"
_UNTRIED: Final = (
    *(Behaviour.LITERAL_ROOT, Behaviour.UNKNOWN_CALLS),
    *(Behaviour.NETWORKS, Behaviour.SHARED_NETWORK, Behaviour.OPERATOR_NETWORK),
)
EXCEPTIONS: Final[dict[tuple[str, Behaviour], str]] = {
    ("docker", Behaviour.USER_NAMESPACE): "Docker has one range of ids for all containers, or none: a level lower",
    ("docker", Behaviour.ROOT_IN_USERNS): "needs a user namespace of the attempt's own",
    (
        "docker",
        Behaviour.TMPFS,
    ): "their mode is that of a directory in a root of ours, which Docker does not take: refused",
    ("docker", Behaviour.UMASK): "Docker has no field for it: another one than 0022 is refused",
    ("docker", Behaviour.EMPTY_SYS): "sysfs with everything but the job's cgroup and the list of cpus masked",
    ("docker", Behaviour.LITERAL_ROOT): "Docker takes no root of ours: its parts are bound, the top stays read-only",
    ("docker", Behaviour.UNKNOWN_CALLS): "before Docker 23 numbers that no kernel gives to a call answer EPERM",
    ("podman", Behaviour.EMPTY_SYS): "the container's root sees an empty directory in place of its cgroup",
    ("runc", Behaviour.DAEMON_RESTART): "there is no daemon",
    ("crun", Behaviour.DAEMON_RESTART): "there is no daemon",
    ("runsc", Behaviour.IMMUNE_INIT): "gVisor lets a job kill or stop its PID 1, which ends its sandbox and no other",
    (
        "runsc",
        Behaviour.LIMITS,
    ): "the group holds gVisor's kernel as well: a memory kill ends the sandbox, not the step",
    ("runsc", Behaviour.FILES): "file systems of gVisor's kernel: no nodev in the mount table, no /dev/mqueue",
    ("runsc", Behaviour.TMPFS): "file systems of gVisor's kernel: no nodev in the mount table, no /dev/mqueue",
    ("runsc", Behaviour.NAMESPACES): "around gVisor's kernel, which shares the host's cgroup namespace",
    ("runsc", Behaviour.USER_NAMESPACE): "around gVisor's kernel, which shows the job another one",
    ("runsc", Behaviour.READ_BACK): _OWN_KERNEL,
    ("runsc", Behaviour.DAEMON_RESTART): "there is no daemon",
    **{("runsc", behaviour): _NOT_TRIED for behaviour in _UNTRIED},
}


STRICTER: Final[Mapping[str, Mapping[str, str]]] = {
    "docker": docker.DECLARED_STRICTER,
    "podman": podman.DECLARED_STRICTER,
}
"""Where a runtime always applies more than a bundle says, field by field. No result tells of it again."""

V2_ONLY: Final = frozenset({"crun"})
"""Refuses a host whose control groups are v1 with v2 mounted beside it; on v2 everything above applies."""


CONTRACT_ONLY_NOTE: Final = "the adapter alone, which the suite holds to it where runsc is installed; jobs are refused"


def exception(runtime: str, behaviour: Behaviour) -> str:
    """Why `behaviour` does not apply on `runtime`; empty where it applies.

    :raises KeyError: the table has no such column.
    """
    if runtime not in RUNTIMES:
        raise KeyError(runtime)
    return EXCEPTIONS.get((runtime, behaviour), "")


def markdown() -> str:
    """The table as README has it, with its footnotes."""
    notes: dict[str, int] = {}
    lines = [f"| | {' | '.join(RUNTIMES)} |", f"|---|{'---|' * len(RUNTIMES)}"]
    for behaviour in Behaviour:
        cells = [_cell(runtime, exception(runtime, behaviour), notes) for runtime in RUNTIMES]
        lines.append(f"| {behaviour.value} | {' | '.join(cells)} |")
    footnotes = [f"{number}. {why}" for why, number in notes.items()]
    footnotes.append(f"\n{', '.join(sorted(V2_ONLY))}: only where control groups are v2.")
    return "\n".join((*lines, "", *footnotes)) + "\n"


def stricter_markdown() -> str:
    """The table of declared stricter fields, as docs/runtimes.md has it."""
    lines = ["| Runtime | Field | What it applies |", "|---|---|---|"]
    lines += [
        f"| {runtime} | `{field}` | {what} |" for runtime, fields in STRICTER.items() for field, what in fields.items()
    ]
    return "\n".join(lines) + "\n"


def _cell(runtime: str, why: str, notes: dict[str, int]) -> str:
    def note(text: str) -> int:
        return notes.setdefault(text, len(notes) + 1)

    if why:
        return f"no ({note(why)})"
    return f"contract ({note(CONTRACT_ONLY_NOTE)})" if runtime in CONTRACT_ONLY else "yes"
