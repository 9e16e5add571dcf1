"""Who runs in the container and with which rights. Init and every exec take these from the same plan."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from forgeyard_model.errors import InvalidRequest, SandboxError, SandboxErrorKind
from forgeyard_model.plan import ContainerPlan, JobUser, Rlimit
from forgeyard_model.policy import ROOT_IN_USERNS_CAPABILITIES
from forgeyard_oci.spec.compose import Fields

_NO_CORE_DUMPS: Final = Rlimit("RLIMIT_CORE", 0, 0)


def with_process(argv: Sequence[str], env: Mapping[str, str], cwd: str) -> Fields:
    """What is executed. No terminal: a job's output goes through channels of ours, the same on every runtime.

    :raises InvalidRequest: for an empty argv, a relative cwd, or a variable whose name can't be one.
    """
    if not argv:
        raise InvalidRequest("argv", "", "give a program to run")
    if not cwd.startswith("/"):
        raise InvalidRequest("workdir", cwd, "write an absolute path")
    for name in env:
        if not name or "=" in name:
            raise InvalidRequest("env", name, "a variable's name is not empty and holds no =")
    return {
        "process/args": list(argv),
        "process/env": [f"{name}={env[name]}" for name in sorted(env)],
        "process/cwd": cwd,
        "process/terminal": False,
    }


def with_user(user: JobUser, umask: int) -> Fields:
    """Numeric identity inside the container, supplementary groups and umask."""
    return {
        "process/user": {
            "uid": user.uid,
            "gid": user.gid,
            "additionalGids": list(user.groups),
            "umask": umask,
        }
    }


def with_no_new_privileges() -> Fields:
    """No program gains rights by being set-uid. There is no parameter: it is not a choice."""
    return {"process/noNewPrivileges": True}


def with_capabilities(granted: Sequence[str], user: JobUser, *, user_namespace: bool) -> Fields:
    """All five sets: empty, or for uid 0 in a user namespace of its own the granted ones.

    Inheritable and ambient stay empty even then. Root keeps bounding and permitted across execve without them, and
    a program that root switches to another uid shall not carry any along.

    :raises SandboxError: UNSUPPORTED_ISOLATION when the grant is not one we know, or could not do what it says.
    """
    if granted:
        _check_grant(granted, user, user_namespace=user_namespace)
    held = sorted(granted)
    return {
        "process/capabilities": {
            "bounding": held,
            "effective": held,
            "permitted": held,
            "inheritable": [],
            "ambient": [],
        }
    }


def with_rlimits(rlimits: Sequence[Rlimit]) -> Fields:
    """POSIX limits of the plan, in order of name. Core dumps are off unless the plan has a word on them.

    :raises SandboxError: RESOURCE_LIMIT_FAILED for a limit named twice.
    """
    by_name = {limit.name: limit for limit in rlimits}
    if len(by_name) != len(rlimits):
        names = ", ".join(sorted(limit.name for limit in rlimits))
        raise SandboxError(
            SandboxErrorKind.RESOURCE_LIMIT_FAILED, "rlimit_twice", "a limit is named twice", details=names
        )
    by_name.setdefault(_NO_CORE_DUMPS.name, _NO_CORE_DUMPS)
    return {
        "process/rlimits": [
            {"type": name, "soft": by_name[name].soft, "hard": by_name[name].hard} for name in sorted(by_name)
        ]
    }


def process_options(plan: ContainerPlan, argv: Sequence[str], env: Mapping[str, str], cwd: str) -> tuple[Fields, ...]:
    """All of `process`. An exec differs from init in argv, env and cwd and in nothing else."""
    return (
        with_process(argv, env, cwd),
        with_user(plan.user, plan.umask),
        with_no_new_privileges(),
        with_capabilities(plan.capabilities, plan.user, user_namespace=plan.user_namespace),
        with_rlimits(plan.rlimits),
    )


def _check_grant(granted: Sequence[str], user: JobUser, *, user_namespace: bool) -> None:
    unknown = sorted(set(granted) - set(ROOT_IN_USERNS_CAPABILITIES))
    if unknown:
        reason, brief, cure = (
            "capability_not_grantable",
            f"no grant holds {', '.join(unknown)}",
            "use capabilities: root-in-userns",
        )
    elif not user_namespace:
        reason, brief, cure = (
            "capabilities_need_user_namespace",
            "capabilities are only given inside a user namespace of the job's own",
            "run where user namespaces work, or leave the capabilities out",
        )
    elif user.uid != 0:
        reason, brief, cure = (
            "capabilities_need_root",
            f"uid {user.uid} would lose the capabilities at its first execve",
            'add user: "root", or leave the capabilities out',
        )
    else:
        return
    raise SandboxError(SandboxErrorKind.UNSUPPORTED_ISOLATION, reason, brief, resolution=cure)
