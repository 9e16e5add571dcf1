"""Limits of the control group."""

from __future__ import annotations

from typing import Any, Final

from forgeyard_runtimes.comparison.findings import Findings, Spec, listed, part
from forgeyard_runtimes.comparison.isolation import compare_device_rules

_DEFAULT_SHARES: Final = 1024
_DEFAULT_PERIOD: Final = 100_000
# Everything else that a spec can limit: what was intended has to be there, word for word.
_AS_GIVEN: Final = ("blockIO", "hugepageLimits", "network", "rdma", "unified")


def compare_resources(findings: Findings, intended: Spec, effective: Spec) -> None:
    """`linux.resources`."""
    if intended == effective:
        return
    for name in ("limit", "swap", "kernel", "kernelTCP"):
        field = f"linux.resources.memory.{name}"
        findings.at_most(field, _limit(intended, "memory", name), _limit(effective, "memory", name))
    if part(effective, "memory", "disableOOMKiller") and not part(intended, "memory", "disableOOMKiller"):
        findings.weaker("linux.resources.memory.disableOOMKiller", "the OOM killer is off")
    pids = _limit(intended, "pids", "limit"), _limit(effective, "pids", "limit")
    findings.at_most("linux.resources.pids.limit", *pids)
    _compare_cpu(findings, part(intended, "cpu") or {}, part(effective, "cpu") or {})
    compare_device_rules(findings, part(intended, "devices") or (), part(effective, "devices") or ())
    for name in _AS_GIVEN:
        _compare_as_given(findings, f"linux.resources.{name}", part(intended, name), part(effective, name))


def _limit(resources: Spec, group: str, name: str) -> int | None:
    """A limit; None where there is none, for which engines also write 0 or -1."""
    value = part(resources, group, name)
    return None if value is None or value <= 0 else int(value)


def _compare_cpu(findings: Findings, intended: Spec, effective: Spec) -> None:
    findings.at_most("linux.resources.cpu.quota", _cores(intended), _cores(effective))
    wanted, found = (part(spec, "shares") or _DEFAULT_SHARES for spec in (intended, effective))
    findings.at_most("linux.resources.cpu.shares", wanted, found)
    for name in ("burst", "realtimeRuntime"):
        findings.at_most(f"linux.resources.cpu.{name}", part(intended, name) or 0, part(effective, name) or 0)
    for name in ("cpus", "mems"):
        _compare_set(findings, f"linux.resources.cpu.{name}", part(intended, name), part(effective, name))


def _cores(cpu: Spec) -> float | None:
    quota = part(cpu, "quota")
    return None if quota is None or quota <= 0 else float(quota) / (part(cpu, "period") or _DEFAULT_PERIOD)


def _compare_set(findings: Findings, field: str, intended: str | None, effective: str | None) -> None:
    if not intended and not effective:
        return
    if not intended:
        findings.stricter(field, str(effective))
    elif not effective:
        findings.weaker(field, f"all, intended {intended}")
    else:
        findings.grants(field, _numbers(intended), _numbers(effective))


def _numbers(text: str) -> set[int]:
    """``0-2,5`` as numbers."""
    found: set[int] = set()
    for piece in text.split(","):
        first, _, last = piece.strip().partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found


def _compare_as_given(findings: Findings, field: str, intended: Any, effective: Any) -> None:
    if not intended:
        if effective:
            findings.stricter(field, listed(effective))
    elif intended != effective:
        findings.weaker(field, "not as intended")
