"""From flags and job files to one Job: flags win, paths start where they should, nothing is dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from forgeyard_api.cli_flags import JobArguments, JobFlags
from forgeyard_api.env_flags import read_environment
from forgeyard_api.job_from_flags import PlannedRun, plan_run
from forgeyard_api.main import UnusableInput
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.policy import NetworkMode, SourceMode
from forgeyard_model.profile import ExecutionProfile

DIGEST = "sha256:" + "a" * 64


def plan(*command: str, **flags: Any) -> PlannedRun:
    """A plan for ``-- command`` with `flags`."""
    return plan_run(JobArguments(JobFlags(**flags), command or None))


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    """A job file in a directory of its own, with a restricted network."""
    (tmp_path / "project" / "src").mkdir(parents=True)
    path = tmp_path / "project" / "job.yaml"
    path.write_text(
        "version: 1\nname: a\nimage: oci:layout@" + DIGEST + "\nprofile: development\n"
        "source: {path: src, mode: ro}\nresources: {memory: 1g, pids: 100}\ntimeout: 1m\n"
        "env: {A: file, B: file}\nuser: ci\n"
        "network: {restricted: {allow: [{host: example.org}]}}\n"
        "steps:\n  - {run: a, env: {A: step, C: step}}\n"
    )
    return path


def test_a_command_is_one_step_in_process_mode() -> None:
    """The defaults: host rootfs, standard-ci, no network asked for, no source."""
    planned = plan("/usr/bin/make", "test")
    job = planned.job
    assert (job.rootfs, job.profile, job.network, planned.source) == ("host", ExecutionProfile.STANDARD_CI, None, None)
    assert [(step.argv, step.entrypoint) for step in job.steps] == [(("/usr/bin/make", "test"), False)]
    assert job.name == "make"


def test_image_arguments_go_through_the_entrypoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As docker has it; a relative layout starts at the working directory."""
    monkeypatch.chdir(tmp_path)
    job = plan("a", "b", image=f"oci:layout@{DIGEST}").job
    assert job.image == f"oci:{tmp_path}/layout@{DIGEST}"
    assert [(step.argv, step.entrypoint) for step in job.steps] == [(("a", "b"), True)]
    assert job.entrypoint is None


@pytest.mark.parametrize(("text", "entrypoint"), [("", ()), ("/bin/sh", ("/bin/sh",))])
def test_entrypoint_replaces_or_clears(text: str, entrypoint: tuple[str, ...]) -> None:
    """An empty one clears the image's."""
    assert plan("a", image="x", entrypoint=text).job.entrypoint == entrypoint


def test_an_image_needs_no_command() -> None:
    """Without arguments it is the image's CMD."""
    (step,) = plan(image="x").job.steps
    assert (step.argv, step.entrypoint) == ((), True)


def test_flags_become_limits() -> None:
    """Every flag arrives in the job."""
    job = plan(
        "a", memory="64MiB", cpus="0.5", pids="32", disk="1g", timeout="10s", grace="0s", user="0", workdir="sub",
        network="host", profile="development", env=["A=b=c"],
    ).job  # fmt: skip
    limits = job.limits
    assert (limits.memory, limits.cpus, limits.pids, limits.disk) == (64 << 20, 0.5, 32, 1 << 30)
    assert (limits.wall_time, job.timeouts.grace) == (10.0, 0.0)
    assert (job.user, job.workdir, dict(job.env)) == ("0", "/work/source/sub", {"A": "b=c"})
    assert job.network is not None
    assert (job.network.mode, job.profile) == (NetworkMode.HOST, ExecutionProfile.DEVELOPMENT)


def test_flags_win_over_the_file(job_file: Path, tmp_path: Path) -> None:
    """`-e` also over a step's own variables; another network than the file's."""
    other = tmp_path / "other"
    other.mkdir()
    planned = plan(
        job_file=job_file, network="deny", memory="64m", env=["A=flag"], user="root", source=other, source_mode="cow",
        grace="3s",
    )  # fmt: skip
    job = planned.job
    assert (job.limits.memory, job.limits.pids, job.limits.wall_time) == (64 << 20, 100, 60.0)
    assert dict(job.env) == {"A": "flag", "B": "file"}
    assert dict(job.steps[0].env) == {"C": "step"}
    assert (job.user, planned.source, job.source_mode, job.timeouts.grace) == ("root", str(other), SourceMode.COW, 3.0)
    assert job.network is not None
    assert job.network.mode is NetworkMode.DENY


def test_paths_of_the_file_start_at_the_file(job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the command is called."""
    monkeypatch.chdir(tmp_path)
    planned = plan(job_file=job_file.relative_to(tmp_path), network="deny")
    assert planned.source == str(tmp_path / "project" / "src")
    assert planned.job.image == f"oci:{tmp_path}/project/layout@{DIGEST}"
    assert planned.job.steps[0].entrypoint is False


def test_a_flag_changes_where_the_file_runs(job_file: Path) -> None:
    """`--process` for a file that names an image."""
    job = plan(job_file=job_file, network="deny", process=True).job
    assert (job.rootfs, job.image) == ("host", None)


def test_without_the_flag_the_files_network_stands(job_file: Path) -> None:
    """The file's own network; `--allow` puts another restricted one in its place."""
    network = plan(job_file=job_file).job.network
    assert network is not None
    assert network.egress is not None
    assert network.egress.destinations[0].host == "example.org"
    other = plan(job_file=job_file, allow=["192.0.2.0/24:80"]).job.network
    assert other is not None
    assert other.egress is not None
    assert (other.egress.destinations[0].cidr, other.egress.destinations[0].ports) == ("192.0.2.0/24", (80,))


@pytest.mark.parametrize(
    ("flags", "command", "field"),
    [
        ({}, (), "CMD"),
        ({}, ("",), "CMD"),
        ({"process": True, "image": "x"}, ("a",), "--image"),
        ({"entrypoint": "x"}, ("a",), "--entrypoint"),
        ({"memory": "0"}, ("a",), "--memory"),
        ({"memory": "1k"}, ("a",), "--memory"),
        ({"cpus": "x"}, ("a",), "--cpus"),
        ({"pids": "-1"}, ("a",), "--pids"),
        ({"pids": "9" * 30}, ("a",), "--pids"),
        ({"disk": "1"}, ("a",), "--disk"),
        ({"timeout": "90"}, ("a",), "--timeout"),
        ({"grace": "x"}, ("a",), "--grace"),
        ({"profile": "fast"}, ("a",), "--profile"),
        ({"network": "internet"}, ("a",), "--network"),
        ({"network": "restricted"}, ("a",), "--network"),
        ({"network": "deny", "allow": ["example.org"]}, ("a",), "--allow"),
        ({"source_mode": "copy"}, ("a",), "--source-mode"),
        ({"source_mode": "ro"}, ("a",), "--source-mode"),
        ({"source": Path("/nowhere")}, ("a",), "--source"),
        ({"source": Path("/etc/passwd")}, ("a",), "--source"),
        ({"env": ["=x"]}, ("a",), "--env"),
        ({"env": ["A B=x"]}, ("a",), "--env"),
        ({"env_file": [Path("/nowhere")]}, ("a",), "--env-file"),
        ({"user": ""}, ("a",), "--user"),
        ({"workdir": ""}, ("a",), "--workdir"),
        ({"image": ""}, ("a",), "--image"),
        ({"job_file": Path("/nowhere.yaml")}, (), "job file"),
        ({"job_file": Path("/nowhere.yaml")}, ("a",), "JOBFILE"),
    ],
)
def test_flags_that_can_not_be_used(flags: dict[str, Any], command: tuple[str, ...], field: str) -> None:
    """A usage error by the flag's own name, before anything is started."""
    with pytest.raises(UnusableInput) as caught:
        plan(*command, **flags)
    assert caught.value.error.field == field
    assert caught.value.error.cure


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ({"secret": ["TOKEN=env:HUSH"]}, "--secret: not supported"),
        ({"timeout": "unlimited"}, "--timeout: unlimited"),
        ({"memory": "unlimited"}, "--memory: unlimited"),
    ],
)
def test_flags_that_are_refused(flags: dict[str, Any], shown: str) -> None:
    """What this version can't do is a refusal, by the flag's name and without a secret's text."""
    with pytest.raises(ExecutorError) as caught:
        plan("a", **flags)
    assert str(caught.value).startswith(shown)
    assert "HUSH" not in str(caught.value)


def test_variables_as_docker_reads_them(tmp_path: Path) -> None:
    """Comments, blank lines, names alone, no quotes; -e after files; an unset name sets nothing."""
    path = tmp_path / "env"
    path.write_bytes(b'\xef\xbb\xbf# comment\n\n  A=1\r\nB="quoted # no comment"\nMINE\nUNSET\nE=\nF=a\xffb\n')
    found = read_environment([path], ["A=2", "OTHER", "NONE"], caller={"MINE": "m", "OTHER": "o"})
    assert found == {"A": "2", "B": '"quoted # no comment"', "MINE": "m", "E": "", "F": "a\udcffb", "OTHER": "o"}


@pytest.mark.parametrize(("line", "field"), [("A B=c", ":2"), ("=c", ":2"), ("A\0=c", "--env-file")])
def test_a_bad_line_of_an_env_file_is_named(tmp_path: Path, line: str, field: str) -> None:
    """By file and line."""
    path = tmp_path / "env"
    path.write_text(f"GOOD=1\n{line}\n")
    with pytest.raises(InvalidRequest) as caught:
        read_environment([path], [])
    assert caught.value.field.endswith(field)
