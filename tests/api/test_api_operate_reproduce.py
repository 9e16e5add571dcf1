"""What a result file holds of its job, and that it runs again from there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from results import RESULT

from forgeyard_api.main import run
from forgeyard_api.operate.reproduce import differences, read_recorded, with_values
from forgeyard_api.operate.reproduction import Origin, Pins, reproduction
from forgeyard_model.cache import CacheRequest
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.job import Job, Output, Step
from forgeyard_model.job_json import job_data, job_from_data
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import ApprovedHostPath, IsolationLevel, NetworkDestination, NetworkPolicy
from forgeyard_model.result_json import read_result, result_json
from forgeyard_model.services import (
    ExecProbe,
    HealthCheck,
    HttpProbe,
    LogProbe,
    ServiceFile,
    ServiceSpec,
    TcpProbe,
    Tmpfs,
)

USAGE = 2
DIGEST = "@sha256:" + "0" * 64
JOB = Job(
    image="registry.example.org/a:1",
    steps=(
        Step("a", "", "ü", env={"X": "1"}, stdin=b"in", entrypoint=True),
        Step.shell("make\n", interpreter="bash", when="always", continue_on_error=True),
    ),
    env={"CI": "yes", "API_TOKEN": "s3cret-value"},
    limits=ResourceLimits(memory=64 << 20),
    network=NetworkPolicy.restricted(NetworkDestination("a.example", ports=(443,))),
    toolchains=(ApprovedHostPath("/opt/x", "/toolchains/x"),),
    outputs=(Output("report.xml", optional=True),),
    caches=(CacheRequest("pip", "/home/x"),),
    entrypoint=(),
    services=(
        ServiceSpec(
            "db",
            image="registry.example.org/db:1",
            env={"DB_PASSWORD": "s3cret-value"},
            health=HealthCheck(ExecProbe(("pg_isready",)), interval=0.5),
            files=(ServiceFile("a.sql", "/init/a.sql"),),
            tmpfs=(Tmpfs("/run", 1 << 20),),
        ),
        ServiceSpec("web", argv=("x",), health=HealthCheck(HttpProbe(80, "/up"))),
        ServiceSpec("tcp", argv=("x",), health=HealthCheck(TcpProbe(80))),
        ServiceSpec("log", argv=("x",), health=HealthCheck(LogProbe("ready", regex=True))),
    ),
)
PINS = Pins("registry.example.org/a" + DIGEST, {"db": "registry.example.org/db" + DIGEST})


def written(path: Path, job: Job = JOB, config: ExecutorConfig | None = None, **origin: object) -> Path:
    """A result file of that job."""
    config = config or ExecutorConfig()
    more = reproduction(job, Origin(**{"source": None, **origin}), config, PINS)  # type: ignore[arg-type]  # its fields
    path.write_bytes(result_json(RESULT, **more))
    return path


def test_a_job_as_json() -> None:
    """Every field comes back as it was."""
    assert job_from_data(json.loads(json.dumps(job_data(JOB)))) == JOB


def test_the_job_as_it_was_resolved(tmp_path: Path) -> None:
    """Images by digest, limits of configuration and profile, the caller's words; and the result beside it."""
    config = ExecutorConfig(default_limits=ResourceLimits(cpus=0.5))
    path = written(tmp_path / "r.json", config=config, source="/src", tenant="t", trusted=False)
    recorded = read_recorded(path)
    assert recorded.job.image == PINS.job
    assert recorded.job.services[0].image == PINS.services["db"]
    assert (recorded.job.limits.cpus, recorded.job.limits.memory) == (0.5, 64 << 20)
    assert recorded.job.limits.pids is not None
    assert (recorded.source, recorded.tenant, recorded.trusted) == ("/src", "t", False)
    assert recorded.result == RESULT == read_result(path.read_bytes())


def test_no_secret_is_in_it(tmp_path: Path) -> None:
    """The values are asked for again, all of them and no others."""
    path = written(tmp_path / "r.json")
    assert b"s3cret-value" not in path.read_bytes()
    recorded = read_recorded(path)
    assert recorded.withheld == ("API_TOKEN", "DB_PASSWORD")
    with pytest.raises(InvalidRequest, match="API_TOKEN"):
        with_values(recorded, {"DB_PASSWORD": "x"})
    with pytest.raises(InvalidRequest, match="CI"):
        with_values(recorded, {"API_TOKEN": "x", "DB_PASSWORD": "y", "CI": "no"})
    job = with_values(recorded, {"API_TOKEN": "x", "DB_PASSWORD": "y"})
    assert (job.env, job.services[0].env) == ({"CI": "yes", "API_TOKEN": "x"}, {"DB_PASSWORD": "y"})


@pytest.mark.parametrize(
    ("job", "why"),
    [
        (replace(JOB, steps=(Step("echo", "s3cret-value"),)), "stands elsewhere"),
        (replace(JOB, steps=(Step("a", env={"API_TOKEN": "other"}),)), "different values"),
        (replace(JOB, steps=(Step("a", stdin=b"\xff"),)), "UTF-8"),
        (replace(JOB, steps=(Step("a\udcff"),)), "UTF-8"),
    ],
)
def test_what_can_not_be_recorded_says_so(job: Job, why: str, tmp_path: Path) -> None:
    """Nothing of the job is in the file then, and the reason is."""
    path = written(tmp_path / "r.json", job)
    assert "job" not in json.loads(path.read_bytes())["reproduce"]
    with pytest.raises(InvalidRequest, match=why):
        read_recorded(path)


@pytest.mark.parametrize(
    ("content", "cure"),
    [
        (b"", "damaged"),
        (b"[]", "is no result"),
        (b"{}", "older forgeyard"),
        (b'{"error": {}}', "refusal"),
        (b'{"schema": 3}', "newer forgeyard"),
        (b'{"schema": "x"}', "damaged"),
        (b'{"schema": 2, "reproduce": {"job": {}}}', "damaged"),
        (result_json(RESULT), "older forgeyard"),
    ],
)
def test_other_files_are_refused(content: bytes, cure: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line with the cure."""
    path = tmp_path / "r.json"
    path.write_bytes(content)
    assert run(["reproduce", str(path)]) == USAGE
    err = capsys.readouterr().err
    assert cure in err
    assert err.count("\n") == 1


def test_a_file_can_not_allow_itself_host_paths(tmp_path: Path) -> None:
    """They are the configuration's to approve, and not recorded; one that has them was not written by us."""
    config = ExecutorConfig(approved_host_paths=(ApprovedHostPath("/srv/a", "/srv/a"),))
    path = written(tmp_path / "r.json", config=config)
    data = json.loads(path.read_bytes())
    assert data["reproduce"]["job"]["host_paths"] == []
    data["reproduce"]["job"]["host_paths"] = [{"source": "/etc", "destination": "/etc"}]
    path.write_text(json.dumps(data))
    with pytest.raises(InvalidRequest, match="host paths"):
        read_recorded(path)


def test_differences_are_said(tmp_path: Path) -> None:
    """Rules of the host, its runtime, the source and the caches."""
    recorded = read_recorded(written(tmp_path / "r.json", source="/src"))
    found = "\n".join(differences(recorded, ExecutorConfig(minimum_isolation=IsolationLevel.CONTAINER, runtime="crun")))
    assert all(word in found for word in ("minimum_isolation", "crun", "source", "caches"))
    plain = read_recorded(written(tmp_path / "p.json", replace(JOB, caches=())))
    assert differences(plain, ExecutorConfig()) == ()


@pytest.mark.kernel
def test_a_failure_comes_back(
    state_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The same plan, the same end; with the source where it is now, and the value that was not recorded."""
    monkeypatch.setenv("FORGEYARD_STATE_DIR", str(state_dir))
    source = tmp_path / "source"
    source.mkdir()
    (source / "code").write_text("7")
    first, second = tmp_path / "r.json", tmp_path / "s.json"
    script = 'test ${#API_TOKEN} = 12 && exit "$(cat /work/source/code)"'
    flags = ("--source", str(source), "-e", "API_TOKEN=s3cret-value", "--memory", "64MiB")
    assert run(["run", "--result", str(first), *flags, "--", "sh", "-c", script]) == 7
    capfd.readouterr()
    assert run(["reproduce", str(first), "-e", "API_TOKEN=s3cret-value", "--result", str(second)]) == 7
    assert "the same plan; then failed (7), now failed (7)" in capfd.readouterr().err
    assert read_recorded(second).job == read_recorded(first).job
    assert run(["reproduce", str(first)]) == USAGE
    moved = tmp_path / "moved"
    source.rename(moved)
    (moved / "code").write_text("0")
    assert run(["reproduce", str(second), "-e", "API_TOKEN=s3cret-value"]) == USAGE
    assert run(["reproduce", str(second), "--source", str(moved), "-e", "API_TOKEN=s3cret-value"]) == 0
    assert "then failed (7), now succeeded (0)" in capfd.readouterr().err
