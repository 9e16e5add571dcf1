"""Messages and the model say the same, field by field, and errors cross the socket whole."""

from __future__ import annotations

import dataclasses
from datetime import UTC, datetime
from enum import Enum
from typing import Any, get_args, get_type_hints

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorSet
from hypothesis import HealthCheck as Check
from hypothesis import given, settings
from hypothesis import strategies as st

from forgeyard_api.wire import build_protos, messages
from forgeyard_api.wire.convert import enum_number, from_message, to_message
from forgeyard_api.wire.errors import DETAILS, code_of, detail_of, error_of, from_rpc, trailing
from forgeyard_model.capabilities import ExecutorCapabilities, Probe
from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    ForgeyardError,
    InvalidRequest,
    SandboxError,
    SandboxErrorKind,
)
from forgeyard_model.job import Job, Step, When
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import IsolationLevel, NetworkMode, NetworkPolicy
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.result import (
    CollectedOutput,
    EndCause,
    Evidence,
    ExecutionResult,
    MemoryEvidence,
    Outcome,
    OutputSummary,
    ProcessExit,
    Provenance,
    ResourceUsage,
    StepResult,
)
from forgeyard_model.services import Condition, ExecProbe, HealthCheck, ServiceSpec, TcpProbe
from forgeyard_runtimes.proto_build import DESCRIPTORS, Generated

ROOTS = (Job, ExecutionResult, ExecutorCapabilities, StepResult)


def message_of(name: str) -> Any:
    """The class of the message of that name."""
    for file in (messages.job, messages.result, messages.capabilities, messages.common):
        if hasattr(file, name):
            return getattr(file, name)
    raise AssertionError(f"no message {name}")


def parts(kind: Any, found: set[Any]) -> set[Any]:
    """Dataclasses and enums that `kind` is made of, itself included."""
    if dataclasses.is_dataclass(kind):
        if kind in found:
            return found
        found.add(kind)
        for hint in get_type_hints(kind).values():
            parts(hint, found)
    elif isinstance(kind, type) and issubclass(kind, Enum):
        found.add(kind)
    for part in get_args(kind):
        parts(part, found)
    return found


MODEL = sorted({kind for root in ROOTS for kind in parts(root, set())}, key=lambda kind: kind.__name__)
DATACLASSES = [kind for kind in MODEL if dataclasses.is_dataclass(kind)]
ENUMS = [kind for kind in MODEL if issubclass(kind, Enum)]


@pytest.fixture(scope="module")
def made() -> Generated:
    """Made now, by the compiler that is installed."""
    return build_protos.FOLDER.generate()


def test_what_is_generated_is_checked_in(made: Generated) -> None:
    """Every name, number and type of the descriptors that the classes are made from."""
    kept = FileDescriptorSet.FromString((build_protos.FOLDER.kept / DESCRIPTORS).read_bytes())
    assert FileDescriptorSet.FromString(made.descriptors) == kept


@pytest.mark.parametrize("kind", DATACLASSES, ids=lambda kind: kind.__name__)
def test_a_message_has_its_dataclasss_fields(kind: Any) -> None:
    """No more and no fewer; one of several kinds stands as a oneof of the field's name."""
    descriptor = message_of(kind.__name__).DESCRIPTOR
    grouped = {field.name for one in descriptor.oneofs if len(one.fields) > 1 for field in one.fields}
    groups = {one.name for one in descriptor.oneofs if len(one.fields) > 1}
    assert {field.name for field in descriptor.fields} - grouped | groups == {f.name for f in dataclasses.fields(kind)}


@pytest.mark.parametrize("kind", ENUMS, ids=lambda kind: kind.__name__)
def test_an_enum_has_its_models_values(kind: type[Enum]) -> None:
    """Each has a number of its own, and 0 is nobody's."""
    descriptor = next(
        field.enum_type
        for owner in DATACLASSES
        for field in [*message_of(owner.__name__).DESCRIPTOR.fields, *_map_values(owner)]
        if field.enum_type is not None and field.enum_type.name == kind.__name__
    )
    numbers = {enum_number(descriptor, value) for value in kind}
    assert len(numbers) == len(kind)
    assert 0 not in numbers
    assert len(descriptor.values) == len(kind) + 1


def _map_values(owner: Any) -> list[Any]:
    fields = message_of(owner.__name__).DESCRIPTOR.fields
    entries = [field.message_type for field in fields if field.message_type is not None]
    return [entry.fields_by_name["value"] for entry in entries if entry.GetOptions().map_entry]


JOBS = (
    Job(steps=(Step("make"),), rootfs="host"),
    Job(
        steps=(
            Step.shell("exit 3", when=When.ALWAYS, env={"A": "ü\n"}),
            Step("x", stdin=b"\0\xff"),
            Step("y", stdin=b""),
        ),
        image="localhost:5000/a@sha256:" + "0" * 64,
        profile=ExecutionProfile.RELEASE,
        limits=ResourceLimits(cpus=0.5, memory=1 << 30, pids=1),
        network=NetworkPolicy(NetworkMode.FETCH_ONLY),
        entrypoint=(),
        output_cap=0,
        services=(
            ServiceSpec(
                name="db",
                image="i",
                argv=("a",),
                entrypoint=(),
                command=None,
                health=HealthCheck(ExecProbe(("pg_isready",))),
            ),
            ServiceSpec(
                name="web",
                image="i",
                command=("a", ""),
                health=HealthCheck(TcpProbe(80)),
                depends_on={"db": Condition.HEALTHY},
            ),
        ),
    ),
)


@pytest.mark.parametrize("job", JOBS)
def test_a_job_comes_back_as_it_was(job: Job) -> None:
    """Also over the wire: an empty list is not an absent one, nor are empty bytes."""
    sent = to_message(job, messages.job.Job()).SerializeToString()
    assert from_message(Job, messages.job.Job.FromString(sent)) == job


@st.composite
def jobs(draw: st.DrawFn) -> Job:
    """Jobs of any words and numbers."""
    words = st.text(min_size=1, max_size=8)
    steps = draw(
        st.lists(st.builds(Step, words, name=words, env=st.dictionaries(words, words)), min_size=1, max_size=3)
    )
    limits = st.builds(ResourceLimits, cpus=st.none() | st.floats(0.1, 9), memory=st.none() | st.integers(1, 1 << 62))
    return draw(
        st.builds(Job, st.just(tuple(steps)), rootfs=st.just("host"), name=words, limits=limits, user=st.none() | words)
    )


@given(job=jobs())
@settings(max_examples=100, deadline=None, suppress_health_check=[Check.too_slow])
def test_any_job_comes_back_as_it_was(job: Job) -> None:
    """Whatever its texts and numbers are."""
    sent = to_message(job, messages.job.Job()).SerializeToString()
    assert from_message(Job, messages.job.Job.FromString(sent)) == job


def test_what_is_absent_has_the_models_default() -> None:
    """A client that says little gets what the job file's defaults are."""
    message = messages.job.Job(rootfs="host", steps=[messages.job.Step(argv=["true"])])
    assert from_message(Job, message) == Job(steps=(Step("true"),), rootfs="host")


def test_what_the_model_refuses_is_refused() -> None:
    """In the model's own words, or naming the number that this version does not know."""
    with pytest.raises(InvalidRequest, match="rootfs"):
        from_message(Job, messages.job.Job(steps=[messages.job.Step(argv=["true"])]))
    with pytest.raises(InvalidRequest, match="profile '99'"):
        from_message(Job, messages.job.Job(rootfs="host", profile=99, steps=[messages.job.Step(argv=["true"])]))
    with pytest.raises(InvalidRequest, match="step"):
        from_message(Step, messages.job.Step())


def test_a_result_comes_back_as_it_was() -> None:
    """What is not known stays unknown, and phases keep their order."""
    now = datetime(2026, 1, 2, tzinfo=UTC)
    result = ExecutionResult(
        sandbox_id="s",
        attempt_id="a",
        name="n",
        outcome=Outcome.OUT_OF_MEMORY,
        failure_class=Outcome.OUT_OF_MEMORY.failure_class,
        exit_code=137,
        message="m",
        end_cause=EndCause.EXITED,
        cancellation=None,
        exit=ProcessExit(9, signal=9),
        steps=(StepResult("one", ProcessExit(0, code=0), now, 0.0), StepResult("two", None, skipped=True)),
        started_at=now,
        finished_at=now,
        evidence=Evidence(MemoryEvidence(limit=0, oom_kills=1)),
        usage=ResourceUsage(cpu_time=0.0),
        output=OutputSummary(1, 2),
        outputs=(CollectedOutput("o", skipped=("x",)),),
        provenance=Provenance(
            profile=ExecutionProfile.RELEASE,
            isolation=IsolationLevel.CONTAINER,
            user_namespace=True,
            network=NetworkMode.DENY,
            seccomp="x",
            runtime="runc",
            rootfs="r",
            plan_digest="p",
            bundle_digest="b",
        ),
        startup={"z": 0.5, "a": 0.0},
    )
    sent = to_message(result, messages.result.ExecutionResult()).SerializeToString()
    back = from_message(ExecutionResult, messages.result.ExecutionResult.FromString(sent))
    assert back == result
    assert list(back.startup) == ["z", "a"]


def test_capabilities_come_back_as_they_were() -> None:
    """With their probes, and the moment of these."""
    found = ExecutorCapabilities(
        runtime="runc 1",
        isolation_levels=frozenset({next(iter(kind for kind in ENUMS if kind.__name__ == "IsolationLevel")).CONTAINER}),
        network_modes=frozenset(NetworkMode),
        resource_controls=dataclasses.replace(_controls(), cpu=False),
        user_namespace=True,
        seccomp=False,
        probes=(Probe(next(iter(_features())), works=True, by="x"),),
        probed_at=datetime(2026, 1, 2, 3, 4, 5, 678, UTC),
    )
    sent = to_message(found, messages.capabilities.ExecutorCapabilities()).SerializeToString()
    back = from_message(ExecutorCapabilities, messages.capabilities.ExecutorCapabilities.FromString(sent))
    assert back == found


def _controls() -> Any:
    kind = next(kind for kind in DATACLASSES if kind.__name__ == "ResourceControls")
    return kind(cpu=True, memory=True, pids=True, disk=True)


def _features() -> Any:
    return next(kind for kind in ENUMS if kind.__name__ == "Feature")


ERRORS: tuple[ForgeyardError, ...] = (
    InvalidRequest("resources.memory", "0", "give at least 6MiB"),
    SandboxError(SandboxErrorKind.MOUNT_FAILED, "no_mount", "brief", details="d", resolution="r"),
    ExecutorError(ExecutorErrorKind.LOST, "no_such_attempt", "brief", details="d"),
    ExecutorError.prepare(SandboxError(SandboxErrorKind.UNSUPPORTED_ISOLATION, "no_x", "brief", resolution="cure")),
    ForgeyardError("brief", details="d", resolution="r"),
)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_come_back_as_they_were(error: ForgeyardError) -> None:
    """Type, kind, reason, words, and the class that a scheduler goes by."""
    back = error_of(detail_of(error))
    assert (type(back), str(back), back.failure_class) == (type(error), str(error), error.failure_class)
    assert getattr(back, "reason", None) == getattr(error, "reason", None)
    assert getattr(back, "kind", None) == getattr(error, "kind", None)


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_errors_travel_in_the_status(error: ForgeyardError) -> None:
    """In the details that every gRPC library reads; a status without them names the server that failed."""
    metadata = grpc.aio.Metadata(*trailing(error))
    failed = grpc.aio.AioRpcError(code_of(error), grpc.aio.Metadata(), metadata, str(error))
    assert str(from_rpc(failed, "unix:/x")) == str(error)
    assert [key for key, _ in metadata] == [DETAILS]
    bare = grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "refused")
    assert "unix:/x" in str(from_rpc(bare, "unix:/x"))


def test_every_call_has_messages_of_its_own() -> None:
    """Each question is its call's alone, so that any call can grow by itself."""
    calls = [*messages.methods("Executor"), *messages.methods("Images")]
    assert len({call.question.DESCRIPTOR.full_name for call in calls}) == len(calls)
    for call in calls:
        assert call.question.DESCRIPTOR.name == f"{call.name}Request"
        assert call.answer.DESCRIPTOR.name == f"{call.name}Response"
