"""Requests made by programs: whatever their values, a plan or one of our errors comes out, on one line."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forgeyard_executor.environment import STRING_LIMIT, TOTAL_LIMIT
from forgeyard_executor.planning import plan_request, process_mode_user
from forgeyard_executor.request_checks import check_request
from forgeyard_executor.sources import canonical_request
from forgeyard_model.capabilities import ExecutorKind
from forgeyard_model.errors import ForgeyardError, InvalidRequest, SandboxError
from forgeyard_model.identity import AttemptContext, SandboxId
from forgeyard_model.job import Job, Output, Step, Timeouts
from forgeyard_model.limits import Limits, ResourceLimits
from forgeyard_model.plan import Bundle, NetworkAttachment, Placement, RootfsPlan
from forgeyard_model.policy import (
    ApprovedHostPath,
    EgressPolicy,
    IsolationLevel,
    NetworkDestination,
    NetworkMode,
    NetworkPolicy,
)
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job
from forgeyard_oci.spec import compile_bundle

STATE = Path("/var/lib/no-such-state")
ROOTFS = RootfsPlan(ExecutorKind.PROCESS, ("/skeleton",), "sha256:" + "0" * 64)
TRUE = Step("/bin/true")


def compiled(job: Job, workspace: PreparedWorkspace, context: AttemptContext) -> Bundle:
    """All that is pure between a Job and its bundle."""
    request = canonical_request(request_from_job(job, context=context, workspace=workspace), STATE)
    network = NetworkAttachment(request.network.mode)
    rootfs = dataclasses.replace(ROOTFS, user=process_mode_user(request.spec.user))
    planned = plan_request(request, rootfs, isolation=IsolationLevel.NAMESPACE, nofile_ceiling=20000)
    slots = {mount.slot: f"/s/{mount.slot}" for mount in planned.plan.mounts if mount.slot}
    placement = Placement(SandboxId.mint(), "/s/root", slots, 100000, 65536, "/forgeyard/x/job", network.netns, ("/i",))
    return compile_bundle(planned.plan, placement)


def assert_ours(call: Callable[[], object]) -> None:
    """`call` returns, or raises an error of ours that is one line."""
    refusal = ""
    try:
        call()
    except ForgeyardError as error:
        refusal = str(error)
    assert "\n" not in refusal


# Half surrogates are what Python's own decoding makes of bytes that are no UTF-8, and what JSON can smuggle in.
TEXT = st.one_of(
    st.text(st.characters(codec=None), max_size=20),
    st.sampled_from(
        ["", ".", "..", "/", "//", "../x", "/..", "/a/../b", "a b,c:d=ü", "\\", "\n", "-x", "日本", "\0", "\udcff"]
    ),
    st.integers(0, 400).map("a".__mul__),
    st.integers(0, 3000).map("/a".__mul__),
)
NUMBERS = st.one_of(
    st.none(),
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1, 1 << 31, 1 << 62, 1 << 63, 1 << 64, 10**5000, float("nan"), float("inf")]),
)
LIMITS = st.builds(ResourceLimits, **{field.name: NUMBERS for field in dataclasses.fields(ResourceLimits)})
STEPS = st.builds(
    lambda argv, env, workdir, name: Step("/bin/x", *argv, env=env, workdir=workdir, name=name),
    st.lists(TEXT, max_size=3),
    st.dictionaries(TEXT, TEXT, max_size=2),
    st.none() | TEXT,
    TEXT,
)
SCRIPTS = st.builds(lambda text, workdir: Step(script=text, workdir=workdir), TEXT, st.none() | TEXT)
APPROVED = st.lists(
    st.builds(ApprovedHostPath, st.sampled_from(["/usr", "/etc"]) | TEXT, TEXT, st.booleans()), max_size=3
)
NETWORKS = st.none() | st.builds(
    NetworkPolicy,
    st.sampled_from(list(NetworkMode)),
    st.none() | st.builds(EgressPolicy, st.just((NetworkDestination(host="\n", ports=(-1,)),))),
)
TIMEOUTS = st.builds(Timeouts, NUMBERS.filter(lambda n: n is not None), NUMBERS.filter(lambda n: n is not None))
JOBS: Mapping[str, st.SearchStrategy[Any]] = {
    "limits": LIMITS,
    "steps": st.lists(STEPS | SCRIPTS, min_size=1, max_size=2),
    "toolchains": APPROVED.map(tuple),
    "host_paths": APPROVED.map(tuple),
    "outputs": st.lists(TEXT.map(Output), max_size=3).map(tuple),
    "network": NETWORKS,
    "timeouts": TIMEOUTS,
    "user": st.none() | TEXT,
    "workdir": st.none() | TEXT,
    "env": st.dictionaries(TEXT, TEXT, max_size=2),
    "name": TEXT,
}


@pytest.mark.parametrize("field", JOBS)
def test_any_value_of_a_field_is_a_plan_or_an_error_of_ours(field: str) -> None:
    """One field at a time: no ValueError, UnicodeError, TypeError or OSError of Python's comes through."""

    @settings(max_examples=60, database=None)
    @given(JOBS[field])
    def holds(value: object) -> None:
        job = Job(rootfs="host", **{"steps": (TRUE,), field: value})  # type: ignore[arg-type]  # any field by its name
        assert_ours(lambda: compiled(job, PreparedWorkspace(), AttemptContext("a")))

    holds()


@settings(max_examples=100, database=None)
@given(source=st.none() | TEXT, output=st.none() | TEXT, attempt=TEXT)
@example(source="\ud800", output=None, attempt="a")
@example(source=None, output="/tmp/\0", attempt="a")
@example(source="/" + "a" * 300, output=None, attempt="a")
@example(source="/" + "a/" * 3000, output=None, attempt="a")
def test_any_workspace_is_a_plan_or_an_error_of_ours(source: str | None, output: str | None, attempt: str) -> None:
    """Paths of the source and the output, and the caller's id."""
    job = Job(rootfs="host", steps=(TRUE,))
    assert_ours(lambda: compiled(job, PreparedWorkspace(source, output), AttemptContext(attempt)))


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(ResourceLimits)])
@pytest.mark.parametrize("value", [-1, 0, -(1 << 63), float("nan"), 1 << 64], ids=repr)
def test_a_limit_that_would_switch_itself_off_is_refused_by_name(name: str, value: float) -> None:
    """To a runtime -1 and 0 mean "no limit": from us they never reach it."""
    with pytest.raises(InvalidRequest) as caught:
        check_request(request(limits=ResourceLimits(**{name: value})))  # type: ignore[arg-type]  # a wrong type on purpose
    assert caught.value.field == name


def test_a_request_without_a_limit_is_refused() -> None:
    """A request that a program put together itself, with a limit left out, is no job without that limit."""
    whole = request()
    for name in ("cpus", "memory", "pids"):
        bare = dataclasses.replace(whole, limits=dataclasses.replace(whole.limits, **{name: None}))
        with pytest.raises(InvalidRequest) as caught:
            check_request(bare)
        assert caught.value.field == name


@pytest.mark.parametrize("field", ["prepare", "grace", "finally_"])
@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_times_that_are_none(field: str, value: float) -> None:
    """A negative or endless time is refused, not waited for."""
    with pytest.raises(InvalidRequest, match="write seconds"):
        check_request(request(timeouts=Timeouts(**{field: value})))


def test_a_long_grace_is_fine() -> None:
    """400 seconds, more than many a client waits for an answer, are nobody's bound here (C26)."""
    check_request(request(timeouts=Timeouts(grace=400.0)))


def test_a_deadline_needs_a_time_zone() -> None:
    """Without one it is refused before anything starts, not compared and failed over while the job runs."""
    with pytest.raises(InvalidRequest, match="time zone"):
        check_request(request(deadline=datetime(2030, 1, 1)))
    check_request(request(deadline=datetime(2030, 1, 1, tzinfo=UTC)))


@pytest.mark.parametrize(
    "path", ["../x", "/etc", "a/../b", "", ".", "a\0b", "\ud800", "a" * 256, "a/" * 2500], ids=repr
)
def test_outputs_that_can_not_be_collected(path: str) -> None:
    """Named before the job, since nobody wants to hear of it after an hour."""
    with pytest.raises(InvalidRequest) as caught:
        check_request(request(outputs=(Output("fine"), Output(path))))
    assert caught.value.field == "outputs[1].path"


def test_an_output_twice() -> None:
    """Two spellings of one path are one path."""
    with pytest.raises(InvalidRequest, match="stands twice"):
        check_request(request(outputs=(Output("a/b"), Output("./a//b/"))))


@pytest.mark.parametrize(
    ("where", "cure"),
    [
        ("//proc", "write it as /proc"),
        ("/a/./b", "write it as /a/b"),
        ("/a/", "write it as /a"),
        ("x", "absolute"),
        ("/a/../etc", "absolute"),
        ("/" + "a" * 256, "longer than Linux"),
        ("/\ud800", "surrogate"),
        ("/etc/x", "belongs to the sandbox"),
        ("/proc", "belongs to the sandbox"),
    ],
)
def test_destinations_that_are_none(where: str, cure: str, tmp_path: Path) -> None:
    """Refused as the caller's field, with what to write instead, not as a failed mount of the runtime."""
    job = Job(rootfs="host", steps=(TRUE,), host_paths=(ApprovedHostPath(str(tmp_path), where),))
    with pytest.raises(InvalidRequest, match=cure) as caught:
        compiled(job, PreparedWorkspace(), AttemptContext("a"))
    assert caught.value.field == "destination"


def test_a_toolchain_is_a_directory_whose_name_path_can_hold(tmp_path: Path) -> None:
    """A colon would end the entry in PATH, and a file has no bin directory."""
    (tmp_path / "file").write_text("")
    for source, where in ((tmp_path, "/toolchains/a:b"), (tmp_path / "file", "/toolchains/a")):
        job = Job(rootfs="host", steps=(TRUE,), toolchains=(ApprovedHostPath(str(source), where),))
        with pytest.raises(InvalidRequest):
            compiled(job, PreparedWorkspace(), AttemptContext("a"))


def test_an_empty_source_is_not_the_working_directory() -> None:
    """An unset variable of the caller's must not hand over whatever directory the executor was started in."""
    for workspace in (PreparedWorkspace(source=""), PreparedWorkspace(output="")):
        with pytest.raises(InvalidRequest, match="can't be empty"):
            compiled(Job(rootfs="host", steps=(TRUE,)), workspace, AttemptContext("a"))


def test_an_output_inside_our_state_is_refused(tmp_path: Path) -> None:
    """A job's files never come to lie among the executor's own."""
    for output in (tmp_path, tmp_path / "rootfs" / "new"):
        with pytest.raises(InvalidRequest, match="the executor's own state"):
            canonical_request(request(output=str(output)), tmp_path)


@pytest.mark.parametrize("sign", ["word", "total"])
def test_what_is_too_long_for_the_kernel_is_named(sign: str) -> None:
    """One variable over the limit of one, or many over the limit of all: the message names the (longest) one."""
    env = {"SMALL": "x"}
    if sign == "word":
        env["BIG"] = "x" * STRING_LIMIT
    else:
        env |= {f"V{n}": "x" * 100_000 for n in range(TOTAL_LIMIT // 100_000)} | {"BIG": "x" * 120_000}
    job = Job(rootfs="host", steps=(TRUE,), env=env)
    with pytest.raises(InvalidRequest) as caught:
        compiled(job, PreparedWorkspace(), AttemptContext("a"))
    assert "env.BIG" in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize(
    "text", [10**5000, "9" * 5000, "9" * 400 + "g", -(10**5000)], ids=["number", "digits", "gibibytes", "negative"]
)
def test_absurd_sizes_are_our_error(text: int | str) -> None:
    """Also those that Python itself would not write out."""
    with pytest.raises(InvalidRequest) as caught:
        Limits(memory=text)
    assert len(str(caught.value)) < 200


def test_a_mount_that_hides_another_is_refused(tmp_path: Path) -> None:
    """A path approved at /work would take /work/output away from under the job."""
    for where in ("/work", "/tmp", "/home"):
        job = Job(rootfs="host", steps=(TRUE,), host_paths=(ApprovedHostPath(str(tmp_path), where),))
        with pytest.raises(SandboxError):
            compiled(job, PreparedWorkspace(), AttemptContext("a"))


def request(
    *,
    limits: ResourceLimits | None = None,
    timeouts: Timeouts | None = None,
    outputs: tuple[Output, ...] = (),
    deadline: datetime | None = None,
    output: str | None = None,
) -> ExecutionRequest:
    """A small job's request with some of its values replaced."""
    job = Job(
        rootfs="host",
        steps=(TRUE,),
        limits=limits or ResourceLimits(),
        timeouts=timeouts or Timeouts(),
        outputs=outputs,
    )
    context = AttemptContext("a", deadline=deadline)
    return request_from_job(job, context=context, workspace=PreparedWorkspace(None, output))
