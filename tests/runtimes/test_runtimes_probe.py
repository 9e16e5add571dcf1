"""What a sandbox's report proves, and limits compared with those read back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forgeyard_host.cgroups import AppliedLimits
from forgeyard_model.capabilities import Feature
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.limits import ResourceLimits
from forgeyard_networks.probe import denied, deny_probes
from forgeyard_runtimes.gate_limits import verify_limits, verify_membership
from forgeyard_runtimes.probe import FEATURES, failed_sandbox, parse_report, sandbox_probes

OWN = {"pid": 1, "mnt": 2, "net": 3, "user": 4, "cgroup": 5}
SEEN = {
    "namespaces": "cgroup:[15] mnt:[12] net:[13] pid:[11] user:[14]",
    "uid_map": "0 2000000000 65536",
    "id": "1000:1000",
    "processes": "2",
    "after": "2",
    "NoNewPrivs": "1",
    "Seccomp": "2",
    **dict.fromkeys(("CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"), "0000000000000000"),
    "unshare": "refused: unshare failed: Operation not permitted",
    "chown": "refused: chown: Operation not permitted",
    "interfaces": "lo",
    "routes": "",
    "connect": "refused: Network is unreachable",
}


def works(**changed: str) -> set[Feature]:
    """Features that a report with some lines changed proves."""
    seen = SEEN | changed
    return {probe.feature for probe in sandbox_probes(seen, OWN, "runc", leftovers=2) if probe.works}


def test_a_good_report_proves_everything() -> None:
    """Each feature follows from what a sandbox saw."""
    assert works() == set(FEATURES)


@pytest.mark.parametrize(
    ("changed", "lost"),
    [
        ({"namespaces": "cgroup:[15] mnt:[12] net:[3] pid:[11] user:[14]"}, Feature.NETWORK_NAMESPACE),
        ({"namespaces": "cgroup:[15] mnt:[12] net:[13] user:[14]"}, Feature.PID_NAMESPACE),
        ({"uid_map": "0 0 4294967295"}, Feature.USER_NAMESPACE),
        ({"NoNewPrivs": "0"}, Feature.NO_NEW_PRIVS),
        ({"Seccomp": "0"}, Feature.SECCOMP),
        ({"unshare": "done "}, Feature.SECCOMP),
        ({"CapBnd": "000001ffffffffff"}, Feature.CAPABILITY_DROP),
        ({"chown": "done "}, Feature.CAPABILITY_DROP),
        ({"after": "4"}, Feature.KILL_TREE),
    ],
)
def test_each_line_counts(changed: dict[str, str], lost: Feature) -> None:
    """A sandbox that lacks one thing is found out, and only that is missing."""
    assert set(FEATURES) - works(**changed) == {lost}


def test_an_empty_report_proves_nothing() -> None:
    """What was not seen is not claimed."""
    assert not any(probe.works for probe in sandbox_probes({}, OWN, "runc", leftovers=0))
    assert not any(probe.works for probe in deny_probes({}))


@pytest.mark.parametrize("changed", [{"interfaces": "lo eth0"}, {"routes": "eth0 0000"}, {"connect": "done "}])
def test_denied_network(changed: dict[str, str]) -> None:
    """Deny is loopback alone, no route and no connection; each is looked at."""
    assert denied(SEEN)
    assert not denied(SEEN | changed)


def test_failed_sandbox_names_the_one_that_is_missing() -> None:
    """The gate's refusal says which feature is gone; the others were not seen, which is not the same."""
    probes = failed_sandbox("gate_seccomp", "runs without its seccomp filter", "cure")
    assert [probe.feature for probe in probes if probe.seen] == [Feature.SECCOMP]
    assert not any(probe.works for probe in probes)
    assert not any(probe.seen for probe in failed_sandbox("uid_ranges_exhausted", "none left", "cure"))


def test_report_lines() -> None:
    """Lines without a name are passed over; a value may be empty or hold tabs."""
    assert parse_report("a\tb\nnoise\n\nc\t\nd\te\tf\n") == {"a": "b", "c": "", "d": "e\tf"}


LIMITS = ResourceLimits(cpus=1.5, memory=10_000_000, pids=64)
APPLIED = AppliedLimits(memory=9_998_336, swap=0, pids=64, cpus=1.5)


def test_applied_limits_pass() -> None:
    """A memory limit may be cut to whole pages; without a limit nothing has to be there."""
    verify_limits(APPLIED, LIMITS)
    verify_limits(AppliedLimits(None, None, None, None), ResourceLimits())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("memory", None), ("memory", 20_000_000), ("memory", 4096), ("swap", 4096)),
        *(("pids", None), ("pids", 65), ("cpus", None), ("cpus", 2.0)),
    ],
)
def test_limits_that_are_not_in_force(name: str, value: float | None) -> None:
    """One that is missing, laxer or stricter than asked is named, with what the kernel has."""
    with pytest.raises(SandboxError) as caught:
        verify_limits(replace(APPLIED, **{name: value}), LIMITS)  # type: ignore[arg-type]  # a table of fields
    assert caught.value.kind is SandboxErrorKind.RESOURCE_LIMIT_FAILED
    assert caught.value.reason == f"gate_limit_{name.removesuffix('s') if name == 'cpus' else name}"


def test_membership() -> None:
    """PID 1 has to be in the limited group of every hierarchy that limits it."""
    leaf = "/forgeyard/x/job"
    v1 = {"memory": leaf, "pids": leaf, "cpu,cpuacct": leaf, "": "/"}
    verify_membership(v1, leaf, LIMITS)
    verify_membership({"": leaf}, leaf, LIMITS)
    for name in ("memory", "pids", "cpu,cpuacct"):
        with pytest.raises(SandboxError, match="not in force"):
            verify_membership(v1 | {name: "/"}, leaf, LIMITS)
    with pytest.raises(SandboxError):
        verify_membership({"": "/"}, leaf, LIMITS)
