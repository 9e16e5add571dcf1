"""Any weakening of a bundle is found; what isolates alike, or more, is not called weaker."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable

import pytest
from bundle_changes import INTENDED, STRENGTHENINGS, WEAKENINGS, Change, Spec, mount_of
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeyard_model.errors import FailureClass, SandboxError
from forgeyard_runtimes.comparison import Comparison, compare, undeclared, verify_effective


def changed(change: Change, data: st.DataObject) -> tuple[Comparison, str]:
    """The comparison of the bundle with a changed copy, and the field that was changed."""
    effective = copy.deepcopy(INTENDED)
    field = change(effective, data)
    return compare(INTENDED, effective), field


@pytest.mark.parametrize("change", WEAKENINGS, ids=lambda change: change.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_every_weakening_is_found(change: Change, data: st.DataObject) -> None:
    """Whatever is weakened is reported as weaker, under its field's name."""
    found, field = changed(change, data)
    assert any(line.partition(": ")[0] == field for line in found.weaker), (field, found)


@given(data=st.data(), chosen=st.lists(st.sampled_from(WEAKENINGS), min_size=1, max_size=4, unique=True))
def test_weakenings_do_not_hide_each_other(chosen: list[Change], data: st.DataObject) -> None:
    """Several at once are at least not accepted; and a declared field excuses no other."""
    effective = copy.deepcopy(INTENDED)
    for change in chosen:
        try:
            change(effective, data)
        except (KeyError, TypeError, IndexError, ValueError):
            # An earlier change removed what this one would have changed.
            continue
    with pytest.raises(SandboxError):
        verify_effective(INTENDED, effective, frozenset({"linux.nosuch"}))


@pytest.mark.parametrize("change", STRENGTHENINGS, ids=lambda change: change.__name__)
@settings(max_examples=20)
@given(data=st.data())
def test_what_is_stricter_is_noted_and_accepted(change: Change, data: st.DataObject) -> None:
    """A stricter field is reported as such, and nothing is called weaker."""
    found, field = changed(change, data)
    assert found.weaker == ()
    assert any(line.partition(": ")[0] == field for line in found.stricter), (field, found)


# --- alike ---------------------------------------------------------------------------------------------------------


def regrouped(spec: Spec) -> None:
    """A filter as Docker writes it: one rule for each call."""
    profile = spec["linux"]["seccomp"]
    profile["syscalls"] = [
        {**rule, "names": [name], "args": rule.get("args"), **({"errnoRet": 1} if "EPERM" in str(rule) else {})}
        for rule in reversed(profile["syscalls"])
        for name in rule["names"]
    ]


def rules_of_an_engine(spec: Spec) -> None:
    """What engines allow every container."""
    rules = spec["linux"]["resources"]["devices"]
    rules += [{"type": kind, "access": "m", "allow": True} for kind in ("b", "c")]
    rules += [{"type": "c", "major": 1, "minor": minor, "access": "rwm", "allow": True} for minor in (3, 5, 7, 8, 9)]
    rules += [{"type": "c", "major": 136, "access": "rwm", "allow": True}]
    rules += [{"type": "c", "major": 10, "minor": 229, "access": "rwm", "allow": False}]


def sizes_in_other_units(spec: Spec) -> None:
    """``65536k`` is 64 MiB."""
    mount = mount_of(spec, "/dev/shm")
    mount["options"] = [f"size={64 << 10}k" if "size=" in option else option for option in mount["options"]]


def group_below(spec: Spec) -> None:
    """An engine's group below ours."""
    spec["linux"]["cgroupsPath"] += "/0123456789ab"


def main_group_twice(spec: Spec) -> None:
    """The main group is among the others, or not."""
    spec["process"]["user"]["additionalGids"] = [1001]


def other_order(spec: Spec) -> None:
    """Mounts in another order in which none hides another."""
    spec["mounts"] = sorted(spec["mounts"], key=lambda mount: mount["destination"])


def environment(spec: Spec) -> None:
    """The shim's environment reaches no step."""
    spec["process"]["env"] += ["container=podman", "HOSTNAME=x"]


def labels(spec: Spec) -> None:
    """Annotations, version and nulls."""
    spec["annotations"]["org.engine"] = "x"
    spec["ociVersion"] = "1.1.0"
    spec["hooks"] = None
    spec["linux"]["sysctl"] = None


@pytest.mark.parametrize(
    "change",
    [regrouped, rules_of_an_engine, sizes_in_other_units, group_below, main_group_twice, other_order, environment,
     labels],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_what_isolates_alike_is_no_difference(change: Callable[[Spec], None]) -> None:
    """What an engine writes in another way, or adds without effect, is no difference at all."""
    effective = copy.deepcopy(INTENDED)
    change(effective)
    assert effective != INTENDED
    assert compare(INTENDED, effective) == ((), ())


def test_a_bundle_equals_itself() -> None:
    """Nor is there any after a round through JSON."""
    assert compare(INTENDED, json.loads(json.dumps(INTENDED))) == ((), ())


def test_error_names_what_is_weaker() -> None:
    """The refusal is ours to answer for, and says which fields."""
    effective = copy.deepcopy(INTENDED)
    effective["process"]["noNewPrivileges"] = False
    effective["linux"]["resources"]["pids"] = {}
    with pytest.raises(SandboxError) as caught:
        verify_effective(INTENDED, effective, frozenset({"linux.resources.pids"}))
    assert caught.value.reason == "runtime_weaker"
    assert caught.value.failure_class is FailureClass.INFRASTRUCTURE
    assert caught.value.details == "process.noNewPrivileges: off"
    found = verify_effective(INTENDED, effective, frozenset({"linux.resources.pids", "process.noNewPrivileges"}))
    assert len(found.weaker) == 2


def test_declared_fields_stand_for_what_is_below() -> None:
    """A declared mount excuses its flags, and no mount whose name only begins alike."""
    lines = ("mounts./etc/hosts.ro: not set", "mounts./etc/hosts2: not there", "mounts./etc: not there")
    assert undeclared(lines, frozenset({"mounts./etc/hosts"})) == lines[1:]
