"""Jobs and services on images that the engine itself was given and unpacked, as the operator's configuration asks."""

from __future__ import annotations

import importlib.util
import inspect
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from adapter_jobs import ADDRESS_VARIABLES, Jobs
from adapters import DAEMON_FIXTURES, parameter
from daemons import Containerd, Dockerd, PodmanService
from jobs import run, sh
from small_images import image as make_image

from forgeyard_executor import Executor, Job, Outcome
from forgeyard_model.errors import ExecutorError, ForgeyardError
from forgeyard_model.identity import AttemptContext
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, request_from_job
from forgeyard_model.result import ServiceState
from forgeyard_model.services import ServiceSpec
from forgeyard_runtimes.image_layout import LaidImage

pytestmark = [pytest.mark.kernel, pytest.mark.timeout(180)]

MODES = {"containerd": "snapshotter", "podman": "image", "docker": "image"}
Daemons = Containerd | PodmanService | Dockerd


def conformance() -> ModuleType:
    """What a job sees on every runtime, as tests that take their adapter as an argument."""
    path = Path(__file__).parents[1] / "conformance/test_conformance_jobs.py"
    spec = importlib.util.spec_from_file_location("conformance_on_engine_images", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CONFORMANCE = conformance()
CHECKS = (
    "test_exit_codes_and_signals",
    "test_working_directories",
    "test_source_and_outputs",
    "test_image_config",
    "test_image_root_is_private",
    "test_user_and_privileges",
    "test_proc_is_masked",
    "test_devices_and_shared_memory",
)


@pytest.fixture(scope="module", params=[parameter(name) for name in MODES])
def jobs(request: pytest.FixtureRequest, shared_state: Path) -> Iterator[Jobs]:
    """Jobs on the engine's own images."""
    name: str = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ADDRESS_VARIABLES[name], request.getfixturevalue(DAEMON_FIXTURES[name]).address)
        made = Jobs(name, shared_state, rootfs=MODES[name])
        try:
            yield made
        finally:
            made.close()


@pytest.fixture
def engine(jobs: Jobs, request: pytest.FixtureRequest) -> Daemons:
    """The daemon itself."""
    daemon: Daemons = request.getfixturevalue(DAEMON_FIXTURES[jobs.name])
    return daemon


@pytest.mark.parametrize("check", CHECKS)
def test_a_job_sees_what_it_sees_everywhere(
    jobs: Jobs, check: str, busybox_image: str, tree: Path, tmp_path: Path
) -> None:
    """Tests of the conformance suite, on the engine's layers."""
    test = getattr(CONFORMANCE, check)
    given = {"adapter": jobs, "root": {"image": busybox_image}, "busybox_image": busybox_image}
    given |= {"tree": tree, "tmp_path": tmp_path}
    test(**{name: given[name] for name in inspect.signature(test).parameters})


def test_files_are_those_of_our_own_unpacking(jobs: Jobs, busybox_image: str, state_dir: Path) -> None:
    """Owners, modes, links and sizes of every file, as the executor's own store has them."""
    script = (
        "find /bin /etc /home /srv /usr /var -xdev | sort | xargs stat -c '%n %A %u %g %s %N' | grep -v '/etc/host'"
    )
    job = Job(image=busybox_image, user="1000:1000", steps=(sh(script),))
    result, seen, err = jobs.run(job)
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    own, expected, _ = run(state_dir, job)
    assert own.provenance.engine_image == ""
    ours = {line for line in expected.split(b"\n") if b"resolv.conf" not in line and b"mtab" not in line}
    assert len(ours) > 20
    # A directory's size is its file system's affair.
    assert {line for line in ours if b" d" not in line} <= set(seen.split(b"\n"))


def test_the_engine_reports_the_image_by_digest(jobs: Jobs, engine: Daemons, busybox_image: str) -> None:
    """A running job's container is of the image that provenance names, by the engine's own tool."""

    async def body(executor: Executor) -> None:
        async with executor.run(jobs.fitted(Job(image=busybox_image, steps=(sh("echo up; sleep 600"),)))) as execution:
            async for _ in execution.output():
                break
            reported.append(image_of(engine, f"fy-{execution.sandbox_id}"))
            await execution.cancel(kill=True)
            named.append((await execution.wait()).provenance.engine_image)

    reported: list[str] = []
    named: list[str] = []
    jobs.drive(body)
    assert reported == named
    assert "sha256:" in named[0]


def test_an_image_is_sent_once(jobs: Jobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second job finds its layers at the engine."""
    sent: list[str] = []
    pieces = LaidImage.pieces

    def counted(image: LaidImage, blob: Any) -> Iterator[bytes]:
        sent.append(blob.digest)
        return pieces(image, blob)

    monkeypatch.setattr(LaidImage, "pieces", counted)
    job = Job(image=unique_image(tmp_path, "once"), user="1000:1000", steps=(sh("cat /once"),))
    assert jobs.run(job)[1] == b"once\n"
    assert sent
    sent.clear()
    assert jobs.run(job)[1] == b"once\n"
    assert sent == []


def test_an_image_of_a_registry(jobs: Jobs, registry: Any, tmp_path: Path) -> None:
    """Its blobs go from the executor's store to the engine, which asks no registry."""
    unique_image(tmp_path, f"pulled-{jobs.name}")
    reference = registry.push(tmp_path / "image", "latest", f"daemon-images/{jobs.name}")
    job = Job(image=reference, user="1000:1000", steps=(sh(f"cat /pulled-{jobs.name}"),))
    result, out, err = jobs.run(job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, f"pulled-{jobs.name}\n".encode()), (result.message, err)


def test_a_service_runs_from_the_engines_image(jobs: Jobs, busybox_image: str, tmp_path: Path) -> None:
    """A service beside its job, each on an image at the engine."""
    reference = unique_image(tmp_path, "served")
    script = "mkdir /tmp/www; cp /served /tmp/www/index.html; exec httpd -f -p 8080 -h /tmp/www"
    service = ServiceSpec("web", image=reference, user="1000:1000", entrypoint=(), command=("/bin/sh", "-c", script))
    wanted = "i=0; until wget -q -O - http://web:8080/; do i=$((i+1)); test $i -lt 100 || exit 1; sleep 0.1; done"
    job = jobs.fitted(Job(image=busybox_image, steps=(sh(wanted),), services=(service,)))
    result, out, err = jobs.run(job)
    assert (result.outcome, out) == (Outcome.SUCCEEDED, b"served\n"), (result.message, err)
    assert [item.state for item in result.services] != [ServiceState.FAILED]


def test_an_image_removed_under_a_prepared_job(jobs: Jobs, engine: Daemons, tmp_path: Path) -> None:
    """Taken away between prepare and start it is an error with a cure, and the next job has it again."""
    job = Job(image=unique_image(tmp_path, "removed"), user="1000:1000", steps=(sh("cat /removed"),))
    ends: list[ForgeyardError | None] = []

    async def body(executor: Executor) -> None:
        prepared = await executor.prepare(asked(job))
        remove_image(engine, tmp_path / "image")
        try:
            execution = await executor.start(prepared)
        except ForgeyardError as error:
            ends.append(error)
        else:
            ends.append(None)
            result = await execution.wait()
            assert result.outcome is Outcome.SUCCEEDED, result.message
            await executor.close_execution(execution)

    jobs.drive(body)
    if jobs.name == "containerd":
        # There the attempt's lease keeps the layers, whatever becomes of the image's name.
        assert ends == [None]
    else:
        assert isinstance(ends[0], ExecutorError)
        assert ends[0].reason == "image_removed"
        assert "run again" in ends[0].resolution
    assert jobs.run(job)[1] == b"removed\n"


def test_what_the_store_forgets_goes_from_the_engine(
    jobs: Jobs, engine: Daemons, tmp_path: Path, state_dir: Path
) -> None:
    """An image stays at the engine as long as the executor's store has it, and is swept when that has pruned it."""
    own = Jobs(jobs.name, state_dir, rootfs=MODES[jobs.name])
    job = Job(image=unique_image(tmp_path, "forgotten"), user="1000:1000", steps=(sh("cat /forgotten"),))
    try:
        assert own.run(job)[1] == b"forgotten\n"

        async def kept(executor: Executor) -> None:
            await executor.recover()

        own.drive(kept)
        assert has_image(engine, tmp_path / "image")

        async def forgotten(executor: Executor) -> None:
            executor._images.store.prune(unused_for=0.0, keep_bytes=None)
            report = await executor.recover()
            assert report.errors == ()

        own.drive(forgotten)
        assert not has_image(engine, tmp_path / "image")
    finally:
        own.close()


def test_volumes_of_an_image_are_the_jobs_own(jobs: Jobs, tmp_path: Path) -> None:
    """What an image declares as a volume is written within the job's bounds; one that can't be is refused by name."""
    reference = make_image(tmp_path / "image", {"Volumes": {"/srv/data/": {}, "/var/lib/x": {}}})
    script = "echo kept > /srv/data/f && cat /srv/data/f; grep -c /volumes/ /proc/self/mountinfo; true"
    result, out, err = jobs.run(
        Job(image=reference, user="0" if jobs.name != "docker" else "1000", steps=(sh(script),))
    )
    assert result.outcome is Outcome.SUCCEEDED, (result.message, err)
    assert out.split()[-1] == b"0"
    inside = make_image(tmp_path / "inside", {"Volumes": {"/tmp/cache": {}}})
    job = Job(image=inside, user="1000:1000", steps=(sh("true"),))
    if jobs.name == "docker":
        with pytest.raises(ForgeyardError, match=r"image\.Volumes\./tmp/cache"):
            jobs.run(job)
    else:
        assert jobs.run(job)[0].outcome is Outcome.SUCCEEDED


def test_capabilities_name_the_rootfs(jobs: Jobs) -> None:
    """What the operator chose is among the claims."""

    async def body(executor: Executor) -> None:
        assert (await executor.capabilities()).rootfs == MODES[jobs.name]

    jobs.drive(body)


# --- the engine's own view ---------------------------------------------------------------------------------------


def asked(job: Job) -> ExecutionRequest:
    """A request as `run` would make it."""
    return request_from_job(job, context=AttemptContext("daemon-images"), workspace=PreparedWorkspace())


def unique_image(directory: Path, word: str) -> str:
    """busybox with a file of that name and content at its top."""
    from build import Entry, tar

    return make_image(directory / "image", layers=(tar([Entry(word, f"{word}\n".encode())]),))


def told(engine: Daemons, argv: list[str]) -> str:
    """Output of the engine's own command line, which has to succeed."""
    done = subprocess.run(argv, env=engine.environment(), capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, (argv, done.stderr)
    return done.stdout


def image_of(engine: Daemons, container: str) -> str:
    """The image that the engine says a container is made of."""
    if isinstance(engine, Containerd):
        return str(json.loads(told(engine, engine.ctr("containers", "info", container)))["Image"])
    line = engine.podman if isinstance(engine, PodmanService) else engine.docker
    found = told(engine, line("inspect", "--type", "container", "--format", "{{.Image}}", container)).strip()
    return f"sha256:{found.removeprefix('sha256:')}"


def documents(layout: Path) -> tuple[str, str]:
    """Digests of the manifest and the config of the only image of a layout."""
    manifest = str(json.loads((layout / "index.json").read_text())["manifests"][0]["digest"])
    blob = json.loads((layout / "blobs" / manifest.replace(":", "/")).read_text())
    return manifest, str(blob["config"]["digest"])


def remove_image(engine: Daemons, layout: Path) -> None:
    """As an operator does it."""
    manifest, config = documents(layout)
    if isinstance(engine, Containerd):
        told(engine, engine.ctr("images", "rm", "--sync", f"forgeyard.invalid/store@{manifest}"))
        return
    line = engine.podman if isinstance(engine, PodmanService) else engine.docker
    told(engine, line("rmi", "--force", config.removeprefix("sha256:")))


def has_image(engine: Daemons, layout: Path) -> bool:
    """Whether the engine still has it."""
    manifest, config = documents(layout)
    if isinstance(engine, Containerd):
        return manifest in told(engine, engine.ctr("images", "list", "-q"))
    line = engine.podman if isinstance(engine, PodmanService) else engine.docker
    listed = told(engine, line("images", "--all", "--quiet", "--no-trunc"))
    return config.removeprefix("sha256:") in listed
