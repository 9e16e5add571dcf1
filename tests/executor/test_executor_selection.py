"""The choice of a backend: the least costly that meets every demand, a minimum that holds, refusals that explain."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_executor.selection import ExecutorSelectionError, ExecutorSelector
from forgeyard_model.capabilities import ExecutorCapabilities, ExecutorKind, ResourceControls
from forgeyard_model.errors import ExecutorError, FailureClass, SandboxErrorKind
from forgeyard_model.policy import IsolationLevel, NetworkMode
from forgeyard_model.requirements import ExecutionRequirements

L, K = IsolationLevel, ExecutorKind
RUNC = ExecutorCapabilities(
    runtime="runc 1.1.5",
    isolation_levels=frozenset({L.PROCESS, L.NAMESPACE, L.CONTAINER}),
    network_modes=frozenset({NetworkMode.DENY, NetworkMode.HOST}),
    resource_controls=ResourceControls(cpu=True, memory=True, pids=True, disk=True),
    user_namespace=True,
    seccomp=True,
)
VM = replace(
    RUNC,
    runtime="a-vm 1",
    isolation_levels=frozenset({L.VIRTUAL_MACHINE}),
    network_modes=frozenset({NetworkMode.DENY, NetworkMode.ALLOW}),
    kinds=frozenset({K.VIRTUAL_MACHINE}),
)
HOST = ExecutionRequirements(
    image=False,
    minimum=L.NAMESPACE,
    network=NetworkMode.DENY,
    user_namespace=True,
    disk_limit=False,
    profile="standard-ci",
)
IMAGE = replace(HOST, image=True)
select = ExecutorSelector().select


@pytest.mark.parametrize(
    ("needs", "minimum", "kind", "runtime", "level"),
    [
        (HOST, L.NONE, K.PROCESS, "runc 1.1.5", L.NAMESPACE),
        (IMAGE, L.NONE, K.CONTAINER, "runc 1.1.5", L.CONTAINER),
        (IMAGE, L.CONTAINER, K.CONTAINER, "runc 1.1.5", L.CONTAINER),
        (HOST, L.CONTAINER, K.VIRTUAL_MACHINE, "a-vm 1", L.VIRTUAL_MACHINE),
        (replace(HOST, minimum=L.VIRTUAL_MACHINE), L.NONE, K.VIRTUAL_MACHINE, "a-vm 1", L.VIRTUAL_MACHINE),
        (replace(HOST, network=NetworkMode.ALLOW), L.NONE, K.VIRTUAL_MACHINE, "a-vm 1", L.VIRTUAL_MACHINE),
        (replace(HOST, minimum=L.CONTAINER), L.PROCESS, K.VIRTUAL_MACHINE, "a-vm 1", L.VIRTUAL_MACHINE),
    ],
)
def test_the_least_costly_that_fits(
    needs: ExecutionRequirements, minimum: IsolationLevel, kind: ExecutorKind, runtime: str, level: IsolationLevel
) -> None:
    """A process sandbox before a container before a VM, whichever order the candidates come in."""
    for candidates in ([RUNC, VM], [VM, RUNC]):
        found = select(needs, candidates, minimum)
        assert (found.kind, found.candidate.runtime, found.isolation) == (kind, runtime, level)


def test_the_first_of_two_equals_is_taken() -> None:
    """The caller's order decides where cost does not."""
    assert select(HOST, [replace(RUNC, runtime="crun"), RUNC]).candidate.runtime == "crun"


@pytest.mark.parametrize("image", [True, False])
def test_high_assurance_needs_a_vm(image: bool) -> None:
    """Without a VM backend it is refused, never put into a container (section 303)."""
    needs = replace(HOST, image=image, minimum=L.VIRTUAL_MACHINE, profile="high-assurance")
    with pytest.raises(
        ExecutorSelectionError, match="profile high-assurance needs isolation virtual_machine"
    ) as caught:
        select(needs, [RUNC])
    assert caught.value.kind is SandboxErrorKind.UNSUPPORTED_ISOLATION
    assert "VM backend" in caught.value.resolution


def test_a_refusal_names_each_candidate_and_why_not() -> None:
    """Every unmet demand of every candidate, and the whole of it in the one line that a user sees."""
    needs = replace(HOST, minimum=L.CONTAINER, network=NetworkMode.RESTRICTED)
    with pytest.raises(ExecutorSelectionError) as caught:
        select(needs, [replace(RUNC, seccomp=False), VM])
    assert [(item.runtime, item.kind, item.why) for item in caught.value.rejections] == [
        (
            "runc 1.1.5",
            K.PROCESS,
            ("isolation namespace is below container", "network restricted can't be enforced", "no seccomp filter"),
        ),
        ("a-vm 1", K.VIRTUAL_MACHINE, ("network restricted can't be enforced",)),
    ]
    wrapped = ExecutorError.prepare(caught.value)
    assert "runc 1.1.5 (process): isolation namespace is below container" in str(wrapped)
    assert wrapped.failure_class is FailureClass.CONFIGURATION


def test_the_organisations_minimum_is_named() -> None:
    """Who can't run a job should know that it is not the job's profile."""
    with pytest.raises(ExecutorSelectionError, match="the organisation's minimum needs isolation container"):
        select(HOST, [RUNC], L.CONTAINER)


def test_no_candidate_at_all() -> None:
    """An empty list is a refusal like another."""
    with pytest.raises(ExecutorSelectionError, match="there is no candidate"):
        select(HOST, [])


CAPABILITIES = st.builds(
    replace,
    st.sampled_from([RUNC, VM]),
    isolation_levels=st.frozensets(st.sampled_from(L)),
    network_modes=st.frozensets(st.sampled_from(NetworkMode)),
    user_namespace=st.booleans(),
    seccomp=st.booleans(),
    kinds=st.frozensets(st.sampled_from(K)),
)
NEEDS = st.builds(
    ExecutionRequirements,
    image=st.booleans(),
    minimum=st.sampled_from(L),
    network=st.sampled_from(NetworkMode),
    user_namespace=st.booleans(),
    disk_limit=st.booleans(),
)


@given(NEEDS, st.lists(CAPABILITIES, max_size=3), st.sampled_from(L))
def test_no_choice_is_weaker_than_asked(
    needs: ExecutionRequirements, candidates: list[ExecutorCapabilities], minimum: IsolationLevel
) -> None:
    """Whatever the candidates claim, a choice meets the request, the organisation and its own claims; or none is."""
    try:
        found = select(needs, candidates, minimum)
    except ExecutorSelectionError:
        return
    assert found.isolation >= max(needs.minimum, minimum)
    assert found.isolation in found.candidate.isolation_levels
    assert needs.network in found.candidate.network_modes
    assert found.candidate.seccomp
    assert found.candidate.user_namespace or not needs.user_namespace
