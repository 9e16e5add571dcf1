"""What a runtime really applies, compared with the bundle it was given: nothing of it may be silently lost.

Pure. An adapter reads the effective spec from its engine (see each adapter's effective.py) and hands it over here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_runtimes.comparison.findings import Comparison, Findings, Spec, listed, part
from forgeyard_runtimes.comparison.isolation import compare_isolation
from forgeyard_runtimes.comparison.mounts import compare_mounts
from forgeyard_runtimes.comparison.process import compare_process
from forgeyard_runtimes.comparison.resources import compare_resources
from forgeyard_runtimes.comparison.seccomp import compare_seccomp

__all__ = ["Comparison", "compare", "undeclared", "verify_effective"]

_HOOKS: Final = ("prestart", "createRuntime", "createContainer", "startContainer", "poststart", "poststop")


def compare(intended: Spec, effective: Spec) -> Comparison:
    """Compare two runtime specs by what they let a workload do.

    :param intended: the compiled bundle's config.json.
    :param effective: what the engine runs, in the same form.
    """
    findings = Findings()
    if intended != effective:
        compare_process(findings, part(intended, "process") or {}, part(effective, "process") or {})
        _compare_root(findings, part(intended, "root") or {}, part(effective, "root") or {})
        findings.same("hostname", part(intended, "hostname"), part(effective, "hostname"))
        compare_mounts(findings, part(intended, "mounts") or (), part(effective, "mounts") or ())
        _compare_hooks(findings, part(intended, "hooks") or {}, part(effective, "hooks") or {})
        linux, effective_linux = part(intended, "linux") or {}, part(effective, "linux") or {}
        compare_isolation(findings, linux, effective_linux)
        resources = part(linux, "resources") or {}, part(effective_linux, "resources") or {}
        compare_resources(findings, *resources)
        compare_seccomp(findings, part(linux, "seccomp"), part(effective_linux, "seccomp"))
    return findings.result()


def undeclared(weaker: Iterable[str], allowed: frozenset[str]) -> tuple[str, ...]:
    """Those of `weaker` whose field an adapter did not declare.

    :param allowed: names of fields, such as ``linux.rootfsPropagation``. One stands for everything below it as well:
        ``mounts./etc/hosts`` for ``mounts./etc/hosts.noexec``, not for ``mounts./etc/hosts2``.
    """
    return tuple(line for line in weaker if not _is_allowed(line.partition(": ")[0], allowed))


def verify_effective(intended: Spec, effective: Spec, allowed: frozenset[str] = frozenset()) -> Comparison:
    """The comparison, when nothing is weaker but what the adapter declares.

    :raises SandboxError: PRIVILEGE_DROP_FAILED, ``runtime_weaker``, naming what is; the container must then be
        destroyed unreleased, and the attempt is an infrastructure failure.
    """
    comparison = compare(intended, effective)
    if wrong := undeclared(comparison.weaker, allowed):
        raise SandboxError(
            SandboxErrorKind.PRIVILEGE_DROP_FAILED,
            "runtime_weaker",
            "the runtime applies less than the bundle says",
            details="; ".join(wrong[:8]) + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""),
            resolution="check the runtime's configuration; the job was not started",
        )
    return comparison


def _is_allowed(field: str, allowed: frozenset[str]) -> bool:
    return field in allowed or any(field.startswith(f"{name}.") for name in allowed)


def _compare_root(findings: Findings, intended: Spec, effective: Spec) -> None:
    findings.same("root.path", part(intended, "path"), part(effective, "path"))
    wanted, found = bool(part(intended, "readonly")), bool(part(effective, "readonly"))
    if wanted and not found:
        findings.weaker("root.readonly", "the root can be written")
    elif found and not wanted:
        findings.stricter("root.readonly", "the root is read-only")


def _compare_hooks(findings: Findings, intended: Spec, effective: Spec) -> None:
    """A hook is a program that runs on the host."""
    for name in _HOOKS:
        wanted, found = part(intended, name) or [], part(effective, name) or []
        more = [hook.get("path") for hook in found if hook not in wanted]
        if more:
            findings.weaker(f"hooks.{name}", f"{listed(more)} not intended")
        elif wanted != found:
            findings.stricter(f"hooks.{name}", "fewer hooks")
