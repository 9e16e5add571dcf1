"""Filters of system calls, compared by what they let through rather than by how they are written.

Engines write a filter anew: other groups, other order, names left out that their library lacks. So rules are taken
apart by call and by test of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final, TypeAlias

from forgeyard_runtimes.comparison.findings import Findings, Spec, listed, part

_RANKS: Final = {
    "SCMP_ACT_KILL_PROCESS": 0,
    "SCMP_ACT_KILL": 1,
    "SCMP_ACT_KILL_THREAD": 1,
    "SCMP_ACT_TRAP": 2,
    "SCMP_ACT_ERRNO": 3,
    "SCMP_ACT_NOTIFY": 4,
    "SCMP_ACT_TRACE": 5,
    "SCMP_ACT_LOG": 6,
    "SCMP_ACT_ALLOW": 7,
}
"""How much each action gives: from the end of the process, over a refusal, to the call."""
_REFUSAL: Final = _RANKS["SCMP_ACT_ERRNO"]
_EPERM: Final = 1

_Tests: TypeAlias = tuple[tuple[int, str, int, int], ...]
_Decision: TypeAlias = tuple[int, int]
"""Rank, and the errno of a refusal (0 for other actions)."""
_Rules: TypeAlias = dict[str, dict[_Tests, _Decision]]


def compare_seccomp(findings: Findings, intended: Spec | None, effective: Spec | None) -> None:
    """`linux.seccomp`: default, architectures, flags, and every rule."""
    if intended == effective:
        return
    if not effective:
        if intended:
            findings.weaker("linux.seccomp", "no filter")
        return
    if not intended:
        findings.stricter("linux.seccomp", "a filter")
        return
    _compare_default(findings, intended, effective)
    _compare_architectures(findings, intended, effective)
    flags = set(part(effective, "flags") or ()) - set(part(intended, "flags") or ())
    if "SECCOMP_FILTER_FLAG_SPEC_ALLOW" in flags:
        findings.weaker("linux.seccomp.flags", "speculation is not held back")
    if intended.get("syscalls") != effective.get("syscalls") or _default(intended) != _default(effective):
        _compare_rules(findings, intended, effective)


def _default(profile: Spec) -> _Decision:
    return _decision(profile.get("defaultAction", ""), profile.get("defaultErrnoRet"))


def _decision(action: str, errno: int | None) -> _Decision:
    # An action that is not known here is taken for the widest.
    rank = _RANKS.get(action, _RANKS["SCMP_ACT_ALLOW"])
    return rank, (_EPERM if errno is None else errno) if rank == _REFUSAL else 0


def _compare_default(findings: Findings, intended: Spec, effective: Spec) -> None:
    wanted, found = _default(intended), _default(effective)
    if found[0] > wanted[0]:
        findings.weaker("linux.seccomp.defaultAction", effective.get("defaultAction", "none"))
    elif found[0] < wanted[0]:
        findings.stricter("linux.seccomp.defaultAction", effective.get("defaultAction", "none"))
    elif found != wanted:
        findings.stricter("linux.seccomp.defaultErrnoRet", f"{found[1]}, intended {wanted[1]}")


def _compare_architectures(findings: Findings, intended: Spec, effective: Spec) -> None:
    """None listed means the native one alone, which is what one listed is here."""
    wanted, found = (set(part(profile, "architectures") or ()) for profile in (intended, effective))
    if found or len(wanted) > 1:
        findings.grants("linux.seccomp.architectures", wanted, found)


def _compare_rules(findings: Findings, intended: Spec, effective: Spec) -> None:
    wanted, found = _rules(intended, min), _rules(effective, max)
    weaker: set[str] = set()
    stricter: set[str] = set()
    for name in wanted.keys() | found.keys():
        signs = _compare_call(wanted.get(name, {}), found.get(name, {}), _default(intended), _default(effective))
        if "weaker" in signs:
            weaker.add(name)
        if "stricter" in signs:
            stricter.add(name)
    if weaker:
        findings.weaker("linux.seccomp.syscalls", listed(weaker))
    if stricter:
        findings.stricter("linux.seccomp.syscalls", listed(stricter))


def _compare_call(
    wanted: dict[_Tests, _Decision], found: dict[_Tests, _Decision], intended: _Decision, effective: _Decision
) -> set[str]:
    """Which words hold of one call: weaker, stricter, both or none. The last two are the defaults."""
    if wanted == found and (() in wanted or intended == effective):
        return set()
    base, found_base = wanted.get((), intended), found.get((), effective)
    signs = _sign(base, found_base)
    for tests in (wanted.keys() | found.keys()) - {()}:
        signs |= _sign(wanted.get(tests, base), found.get(tests, found_base))
        if tests in wanted and tests not in found and any(other[0] > wanted[tests][0] for other in found.values()):
            # Another rule of this call, wider than the missing one, may hold for the same arguments.
            signs.add("weaker")
    return signs


def _sign(wanted: _Decision, found: _Decision) -> set[str]:
    if found[0] > wanted[0]:
        return {"weaker"}
    return {"stricter"} if found != wanted else set()


def _rules(profile: Spec, choose: Callable[[Iterable[_Decision]], _Decision]) -> _Rules:
    """Decisions by call and tests. `choose` picks one where two rules are about the same."""
    rules: _Rules = {}
    for entry in part(profile, "syscalls") or ():
        decision = _decision(entry["action"], entry.get("errnoRet"))
        tests = tuple(sorted(map(_test, entry.get("args") or ())))
        for name in entry.get("names") or ():
            call = rules.setdefault(name, {})
            call[tests] = choose((call[tests], decision)) if tests in call else decision
    return rules


def _test(argument: Any) -> tuple[int, str, int, int]:
    # Only a masked comparison has a second value; some engines write one for all.
    second = argument.get("valueTwo") or 0 if argument["op"] == "SCMP_CMP_MASKED_EQ" else 0
    return argument["index"], argument["op"], argument["value"], second
