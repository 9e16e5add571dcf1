"""System call filters: data files of our own shape, rendered into OCI's `linux.seccomp`. See docs/seccomp.md.

Rules are grouped, since a filter is compiled anew for every container and each entry of the spec costs time there.
"""

from __future__ import annotations

import errno
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_oci.spec.compose import Fields

CURRENT: Final[Mapping[str, int]] = {"general-build": 2}
"""Version in use of each profile. A profile that changes gets a new file and a new number, never an edit."""

_OPS: Final = {"eq": "SCMP_CMP_EQ", "ne": "SCMP_CMP_NE", "gt": "SCMP_CMP_GT", "masked_eq": "SCMP_CMP_MASKED_EQ"}


@dataclass(frozen=True, slots=True)
class ArgumentTest:
    """A test of one argument of a call. OCI has `value` and `valueTwo`: for masked_eq the mask comes first."""

    index: int
    op: str
    value: int
    mask: int | None = None

    def render(self) -> dict[str, Any]:
        """As OCI writes it."""
        if self.mask is None:
            return {"index": self.index, "op": _OPS[self.op], "value": self.value}
        return {"index": self.index, "op": _OPS[self.op], "value": self.mask, "valueTwo": self.value}


@dataclass(frozen=True, slots=True)
class ConditionalRule:
    """Allow a call, or refuse it with `errno`, when all tests hold."""

    syscall: str
    tests: tuple[ArgumentTest, ...]
    errno: str | None = None

    def render(self) -> dict[str, Any]:
        """As OCI writes it."""
        return _rule([self.syscall], self.errno) | {"args": [test.render() for test in self.tests]}


@dataclass(frozen=True, slots=True)
class SeccompProfile:
    """A profile: what is allowed, what is refused as known, and the answer to everything else.

    :param allow: calls allowed whatever their arguments.
    :param refuse: calls that exist and are not for a job: `refuse_errno`.
    :param rules: decisions by argument.
    :param architectures: machine, as uname(2) has it, to libseccomp's name of the one architecture that is filtered.
    :param allow_on: calls allowed on one machine only.
    """

    name: str
    version: int
    default_errno: str
    allow: tuple[str, ...]
    refuse: tuple[str, ...]
    refuse_errno: str
    rules: tuple[ConditionalRule, ...]
    architectures: Mapping[str, str]
    allow_on: Mapping[str, tuple[str, ...]]

    @property
    def identity(self) -> str:
        """Name and version, for provenance: ``general-build/2``."""
        return f"{self.name}/{self.version}"

    def render(self, machine: str) -> dict[str, Any]:
        """OCI's `linux.seccomp` for `machine`: one architecture, and few entries.

        :raises SandboxError: UNSUPPORTED_ISOLATION when the profile was not made for `machine`.
        """
        architecture = self.architectures.get(machine)
        if architecture is None:
            raise _unsupported("seccomp_machine", f"profile {self.identity} has no list for {machine}")
        return {
            "defaultAction": "SCMP_ACT_ERRNO",
            "defaultErrnoRet": _number(self.default_errno),
            "architectures": [architecture],
            "syscalls": [
                _rule(sorted((*self.allow, *self.allow_on.get(machine, ()))), None),
                _rule(sorted(self.refuse), self.refuse_errno),
                *(rule.render() for rule in self.rules),
            ],
        }


def with_seccomp(name: str, machine: str) -> Fields:
    """The filter called `name`. There is no way to have none.

    :raises SandboxError: UNSUPPORTED_ISOLATION for a name or machine we have no profile for.
    """
    return {"linux/seccomp": _rendered(name, machine)}


@lru_cache(maxsize=8)
def load_profile(name: str) -> SeccompProfile:
    """Read the current version of a profile, once per process.

    :raises SandboxError: UNSUPPORTED_ISOLATION for a name we have no profile for.
    """
    # Not at import: the compiler is imported by commands that never compile.
    from importlib.resources import files

    version = CURRENT.get(name)
    if version is None:
        raise _unsupported("seccomp_profile", f"no profile is called {name!r}; there is {', '.join(sorted(CURRENT))}")
    file = files("forgeyard_oci").joinpath("data", "seccomp", f"{name}-{version}.json")
    return _parse(json.loads(file.read_bytes()))


@lru_cache(maxsize=8)
def _rendered(name: str, machine: str) -> dict[str, Any]:
    return load_profile(name).render(machine)


def _parse(data: dict[str, Any]) -> SeccompProfile:
    return SeccompProfile(
        name=data["name"],
        version=data["version"],
        default_errno=data["default_errno"],
        allow=tuple(call for group in data["allow"].values() for call in group),
        refuse=tuple(call for group in data["refuse"].values() for call in group),
        refuse_errno=data["refuse_errno"],
        rules=tuple(_parse_rule(rule) for rule in data["rules"]),
        architectures=dict(data["architectures"]),
        allow_on={machine: tuple(calls) for machine, calls in data["allow_on"].items()},
    )


def _parse_rule(data: dict[str, Any]) -> ConditionalRule:
    tests = tuple(ArgumentTest(**test) for test in data["args"])
    return ConditionalRule(data["syscall"], tests, data.get("errno"))


def _rule(names: list[str], refusal: str | None) -> dict[str, Any]:
    if refusal is None:
        return {"names": names, "action": "SCMP_ACT_ALLOW"}
    return {"names": names, "action": "SCMP_ACT_ERRNO", "errnoRet": _number(refusal)}


def _number(name: str) -> int:
    # The generic numbers, the same on both machines we have profiles for.
    return int(getattr(errno, name))


def _unsupported(reason: str, details: str) -> SandboxError:
    return SandboxError(
        SandboxErrorKind.UNSUPPORTED_ISOLATION, reason, "the system call filter is not available", details=details
    )
