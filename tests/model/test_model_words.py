"""Types of the model that carry rules: exits, errors, identities, and a job's expansion by its profile."""

from __future__ import annotations

from dataclasses import replace

import pytest

from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    FailureClass,
    ForgeyardError,
    InvalidRequest,
    RetryRule,
    SandboxError,
    SandboxErrorKind,
)
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job, Shell, Step, When
from forgeyard_model.policy import CapabilityGrant, IsolationLevel, Need, NetworkMode, NetworkPolicy, SourceMode
from forgeyard_model.profile import PROFILES, ExecutionProfile
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, impurities, request_from_job
from forgeyard_model.result import ExecutionOutcome, ProcessExit

PINNED = "oci:/images/a@sha256:" + "0" * 64


def expand(job: Job) -> ExecutionRequest:
    """A request for `job` with nothing around it."""
    return request_from_job(job, context=AttemptContext("a"), workspace=PreparedWorkspace())


@pytest.mark.parametrize("code", [0, 1, 126, 127, 137, 159, 255])
def test_exit_codes_stay_codes(code: int) -> None:
    """`exit 137` is a code, never a signal."""
    found = ProcessExit.from_wait_status(code << 8)
    assert (found.code, found.signal, found.core_dumped) == (code, None, False)
    assert found.ok == (code == 0)
    assert found.shell_code == code
    assert str(found) == f"exit {code}"


@pytest.mark.parametrize(
    ("number", "shown"), [(9, "signal SIGKILL"), (15, "signal SIGTERM"), (31, "signal SIGSYS"), (40, "signal 40")]
)
@pytest.mark.parametrize("core", [False, True])
def test_signals_stay_signals(number: int, shown: str, core: bool) -> None:
    """A death by signal has no code; a shell would say 128 + n."""
    found = ProcessExit.from_wait_status(number | (0x80 if core else 0))
    assert (found.code, found.signal, found.core_dumped) == (None, number, core)
    assert not found.ok
    assert found.shell_code == 128 + number
    assert str(found) == shown


def test_every_outcome_has_a_class_and_every_class_a_retry_rule() -> None:
    """A scheduler never meets an outcome it has no rule for."""
    assert {outcome: outcome.failure_class.retry for outcome in ExecutionOutcome}
    assert {found.retry for found in FailureClass} == set(RetryRule)
    assert ExecutionOutcome.INFRASTRUCTURE_FAILURE.failure_class.retry is RetryRule.YES
    assert ExecutionOutcome.FAILED.failure_class.retry is RetryRule.NEVER


def test_an_error_says_what_why_and_what_to_do() -> None:
    """brief, details and cure stand in one line."""
    assert str(ForgeyardError("no runc", details="not in PATH", resolution="install it")) == (
        "no runc: not in PATH (install it)"
    )
    assert str(ForgeyardError("no runc")) == "no runc"


def test_an_invalid_request_keeps_hostile_values_on_one_line() -> None:
    """Newlines and escapes in a value are shown, not sent to the terminal; long ones are cut."""
    error = InvalidRequest("env", "a\n\x1b[31m" + "x" * 500, "write less")
    assert "\n" not in str(error)
    assert "\x1b" not in str(error)
    assert len(str(error)) < 150
    assert error.failure_class is FailureClass.CONFIGURATION


@pytest.mark.parametrize("kind", list(SandboxErrorKind))
def test_a_prepare_error_keeps_its_sandbox_errors_class(kind: SandboxErrorKind) -> None:
    """Wrapping loses neither the words nor the class."""
    inner = SandboxError(kind, "why", "brief", details="details", resolution="cure")
    outer = ExecutorError.prepare(inner)
    assert str(outer) == str(inner)
    assert (outer.kind, outer.reason) == (ExecutorErrorKind.PREPARE, "why")
    assert outer.failure_class is inner.failure_class


def test_unsupported_is_the_requests_fault() -> None:
    """Trying again does not help against what a version can't do."""
    error = ExecutorError(ExecutorErrorKind.UNSUPPORTED, "x", "y")
    assert error.failure_class.retry is RetryRule.NEVER


def test_sandbox_ids_sort_by_time_and_survive_a_round_trip() -> None:
    """Names on the host come from it, so it has to be lower case, unique, and readable back."""
    ids = [SandboxId.mint() for _ in range(100)]
    assert len({found.value for found in ids}) == 100
    assert all(SandboxId.parse(str(found)) == found == SandboxId.parse(str(found).upper()) for found in ids)
    assert all(found.container == f"fy-{found}" and len(found.hostname) <= 63 for found in ids)


@pytest.mark.parametrize("text", ["", "x", "../../etc", "0" * 25, "0" * 27, "8" * 26, "u" * 26])
def test_what_is_no_sandbox_id(text: str) -> None:
    """A path or a shortened id is refused."""
    with pytest.raises(InvalidRequest):
        SandboxId.parse(text)


def test_steps_name_themselves() -> None:
    """A step without a name is called by its program."""
    assert Step("/usr/bin/make", "test").name == "make"
    assert Step.shell("true").name == "run"
    assert Step("a", name="b").name == "b"


def test_a_step_runs_one_thing() -> None:
    """Nothing to run, or two things, is an error of the program that made it."""
    with pytest.raises(InvalidRequest):
        Step()
    with pytest.raises(InvalidRequest):
        Step("a", script="b")
    assert Step(entrypoint=True).argv == ()


def test_shells_stop_at_the_first_failure() -> None:
    """Both interpreters run scripts with -e."""
    assert Shell.SH.argv == ("/bin/sh", "-e")
    assert "-eo" in Shell.BASH.argv
    assert Step.shell("x", interpreter="bash", when="always").when is When.ALWAYS


@pytest.mark.parametrize("fields", [{}, {"rootfs": "host", "image": PINNED}, {"rootfs": "/"}])
def test_a_job_runs_in_one_place(fields: dict[str, str]) -> None:
    """Exactly one of the host rootfs and an image."""
    with pytest.raises(InvalidRequest):
        Job(steps=(Step("true"),), **fields)  # type: ignore[arg-type]  # a table of keyword arguments


@pytest.mark.parametrize("profile", list(ExecutionProfile))
def test_every_profile_denies_network_and_limits_the_job(profile: ExecutionProfile) -> None:
    """Nothing asked for: deny, limits on cpu, memory and pids, no capabilities."""
    request = expand(Job(steps=(Step("true"),), image=PINNED, profile=profile))
    assert request.network.mode is NetworkMode.DENY
    assert None not in (request.limits.cpus, request.limits.memory, request.limits.pids, request.limits.wall_time)
    assert request.sandbox.privileges.capabilities is CapabilityGrant.NONE
    assert request.sandbox.filesystem.source_mode is PROFILES[profile].source_mode


@pytest.mark.parametrize(
    ("profile", "changes", "field"),
    [
        ("standard-ci", {"network": NetworkPolicy.host()}, "network"),
        ("release", {"network": NetworkPolicy.allow()}, "network"),
        ("high-assurance", {"network": NetworkPolicy.fetch_only()}, "network"),
        ("standard-ci", {"source_mode": SourceMode.RW}, "source.mode"),
        ("release", {"source_mode": SourceMode.COW}, "source.mode"),
        ("release", {"capabilities": CapabilityGrant.ROOT_IN_USERNS}, "capabilities"),
        ("standard-ci", {"image": "a:latest"}, "image"),
        ("release", {"image": "a:latest"}, "image"),
        (
            "development",
            {"image": None, "rootfs": "host", "capabilities": CapabilityGrant.ROOT_IN_USERNS},
            "capabilities",
        ),
    ],
)
def test_what_a_profile_refuses(profile: str, changes: dict[str, object], field: str) -> None:
    """A value the profile does not allow names its field, and how to go on."""
    job = Job(steps=(Step("true"),), image=PINNED, profile=ExecutionProfile(profile))
    with pytest.raises(InvalidRequest) as caught:
        expand(replace(job, **changes))  # type: ignore[arg-type]  # a table of changes
    assert caught.value.field == field


def test_development_allows_what_the_others_refuse() -> None:
    """Tags, the host network, a source written in place; all of it is impure."""
    job = Job(
        steps=(Step("true"),),
        image="a:latest",
        profile=ExecutionProfile.DEVELOPMENT,
        network=NetworkPolicy.host(),
        source_mode=SourceMode.RW,
    )
    assert impurities(expand(job)) == ("host network", "source written in place")


def test_root_in_development_gets_its_capabilities_and_needs_a_user_namespace() -> None:
    """What makes apt-get work is safe only inside a user namespace of the job's own."""
    job = Job(steps=(Step("true"),), image="a", profile=ExecutionProfile.DEVELOPMENT, user="root")
    policy = expand(job).sandbox
    assert policy.privileges.capabilities is CapabilityGrant.ROOT_IN_USERNS
    assert policy.isolation.user_namespace is Need.REQUIRED
    assert expand(replace(job, user="ci")).sandbox.isolation.user_namespace is Need.PREFERRED


def test_isolation_levels_have_an_order() -> None:
    """A VM satisfies a namespace minimum, never the reverse."""
    assert IsolationLevel.PROCESS < IsolationLevel.NAMESPACE < IsolationLevel.CONTAINER < IsolationLevel.VIRTUAL_MACHINE
    assert max(IsolationLevel) is IsolationLevel.CONFIDENTIAL_VIRTUAL_MACHINE
