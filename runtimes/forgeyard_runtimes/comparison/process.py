"""Who PID 1 is and what it may do."""

from __future__ import annotations

from typing import Final

from forgeyard_runtimes.comparison.findings import Findings, Spec, part

CAPABILITY_SETS: Final = ("bounding", "effective", "permitted", "inheritable", "ambient")
_DEFAULT_UMASK: Final = 0o022
_UNCONFINED: Final = ("", "unconfined")
# Counted by uid, and a range of uids belongs to one sandbox: the limit on its group is the one that holds.
_HARMLESS_RLIMITS: Final = frozenset({"RLIMIT_NPROC"})


def compare_process(findings: Findings, intended: Spec, effective: Spec) -> None:
    """All of `process` but its environment, which is the shim's and reaches no step."""
    if intended == effective:
        return
    _compare_capabilities(findings, intended, effective)
    _compare_privileges(findings, intended, effective)
    _compare_user(findings, part(intended, "user") or {}, part(effective, "user") or {})
    _compare_rlimits(findings, intended, effective)
    findings.same("process.args", part(intended, "args"), part(effective, "args"))
    findings.same("process.cwd", part(intended, "cwd"), part(effective, "cwd"))
    if part(effective, "terminal") and not part(intended, "terminal"):
        findings.weaker("process.terminal", "a terminal, not intended")


def _compare_capabilities(findings: Findings, intended: Spec, effective: Spec) -> None:
    wanted, found = part(intended, "capabilities"), part(effective, "capabilities")
    if found is None and wanted is not None:
        # Runtimes differ in what they take the absence for.
        findings.weaker("process.capabilities", "not set at all")
        return
    for name in CAPABILITY_SETS:
        findings.grants(f"process.capabilities.{name}", part(wanted, name) or (), part(found, name) or ())


def _compare_privileges(findings: Findings, intended: Spec, effective: Spec) -> None:
    wanted, found = bool(part(intended, "noNewPrivileges")), bool(part(effective, "noNewPrivileges"))
    if wanted and not found:
        findings.weaker("process.noNewPrivileges", "off")
    elif found and not wanted:
        findings.stricter("process.noNewPrivileges", "on")
    for name in ("apparmorProfile", "selinuxLabel"):
        _compare_label(findings, f"process.{name}", part(intended, name) or "", part(effective, name) or "")
    least = -(part(effective, "oomScoreAdj") or 0), -(part(intended, "oomScoreAdj") or 0)
    if least[0] > least[1]:
        findings.weaker("process.oomScoreAdj", f"{-least[0]}, intended {-least[1]}")
    elif least[0] < least[1]:
        findings.stricter("process.oomScoreAdj", f"{-least[0]}, intended {-least[1]}")


def _compare_label(findings: Findings, field: str, wanted: str, found: str) -> None:
    if wanted in _UNCONFINED and found in _UNCONFINED:
        return
    if wanted in _UNCONFINED:
        findings.stricter(field, found)
    else:
        findings.same(field, wanted, found)


def _compare_user(findings: Findings, intended: Spec, effective: Spec) -> None:
    for name in ("uid", "gid"):
        findings.same(f"process.user.{name}", part(intended, name) or 0, part(effective, name) or 0)
    # Some engines list the main group once more.
    own = {part(intended, "gid") or 0}
    findings.grants(
        "process.user.additionalGids",
        set(part(intended, "additionalGids") or ()) - own,
        set(part(effective, "additionalGids") or ()) - own,
    )
    wanted, found = _umask(intended), _umask(effective)
    if wanted & ~found:
        findings.weaker("process.user.umask", f"{found:#05o}, intended {wanted:#05o}")
    elif found & ~wanted:
        findings.stricter("process.user.umask", f"{found:#05o}, intended {wanted:#05o}")


def _umask(user: Spec) -> int:
    value = part(user, "umask")
    return _DEFAULT_UMASK if value is None else int(value)


def _compare_rlimits(findings: Findings, intended: Spec, effective: Spec) -> None:
    wanted, found = ({limit["type"]: limit for limit in part(spec, "rlimits") or ()} for spec in (intended, effective))
    for name in sorted(wanted.keys() | found.keys() - _HARMLESS_RLIMITS):
        field = f"process.rlimits.{name}"
        if name not in found:
            findings.weaker(field, "not set")
        elif name not in wanted:
            # Whether it raises or lowers what the runtime would have handed down can't be told from here.
            findings.weaker(field, "set, not intended")
        else:
            for kind in ("soft", "hard"):
                findings.at_most(f"{field}.{kind}", wanted[name][kind], found[name][kind])
