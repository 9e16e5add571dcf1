"""Images from a real registry through the command line: pulled once, held, pinned, listed, removed; no secret leaks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from build import busybox_layout

if TYPE_CHECKING:
    from docker_registry import Registry

pytestmark = pytest.mark.kernel

Run = Callable[..., "subprocess.CompletedProcess[str]"]
CANARY = "canary-5f0c2d"


def command(*args: str) -> list[str]:
    """The command line of the program."""
    return [sys.executable, "-m", "forgeyard_api", *args]


@pytest.fixture(scope="module")
def state_dir() -> Iterator[Path]:
    """One state directory for all tests here."""
    path = Path(tempfile.mkdtemp(prefix="fy-", dir="/var/tmp"))
    path.chmod(0o711)
    yield path
    assert f" {path}/" not in Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
    shutil.rmtree(path)


@pytest.fixture
def environment(state_dir: Path, require_tool: Callable[[str], str], leaks: object) -> dict[str, str]:
    """An executor in this module's directory, with credentials and proxies of its own that no job may see."""
    require_tool("runc")
    auth = json.dumps({"auths": {"registry.example.org": {"username": CANARY, "password": CANARY}}})
    return {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | {
        "FORGEYARD_STATE_DIR": str(state_dir),
        "DOCKER_AUTH_CONFIG": auth,
        "HTTPS_PROXY": f"http://user:{CANARY}@proxy.example.org:3128",
        "NO_PROXY": "localhost,127.0.0.1",
    }


@pytest.fixture
def forgeyard(environment: dict[str, str], tmp_path: Path) -> Run:
    """Run a command line in an empty directory."""

    def call(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command(*args),
            env=environment | more,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=50,
            check=False,
        )

    return call


@pytest.fixture(scope="module")
def app(registry: Registry, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """busybox in the registry: its tagged and its pinned reference."""
    layout, _ = busybox_layout(tmp_path_factory.mktemp("layout"))
    return f"{registry.host}/app:latest", registry.push(layout, "latest", "app")


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a registry that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


@pytest.fixture
def closed() -> str:
    """The address of a registry that is not there."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def result_of(path: Path) -> dict[str, Any]:
    """What --result has written."""
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def run_in(forgeyard: Run, reference: str, *flags: str) -> subprocess.CompletedProcess[str]:
    """A job of one echo in an image."""
    return forgeyard("run", *flags, "--image", reference, "--", "echo", "hi")


def test_an_image_is_pulled_once(forgeyard: Run, app: tuple[str, str], tmp_path: Path) -> None:
    """The first run pulls and says so on stderr alone; the second finds it, and asks no registry."""
    _, pin = app
    forgeyard("image", "prune", "--all")
    first = run_in(forgeyard, pin, "--result", "1")
    assert (first.returncode, first.stdout) == (0, "hi\n"), first.stderr
    assert "forgeyard: pulling layer" in first.stderr
    one = result_of(tmp_path / "1")
    assert one["provenance"]["image"] == {
        "asked": pin,
        "pinned": pin,
        "platform": f"linux/{_machine()}",
        "source": "pulled",
    }
    assert one["startup"]["pull"] > 0
    # A proxy that is nowhere: had anything been asked, it would have failed.
    second = forgeyard(
        "run", "--result", "2", "--image", pin, "--", "echo", "hi", HTTP_PROXY="http://127.0.0.1:1", NO_PROXY=""
    )
    assert (second.returncode, second.stdout) == (0, "hi\n"), second.stderr
    assert "pulling" not in second.stderr
    two = result_of(tmp_path / "2")
    assert two["provenance"]["image"]["source"] == "present"
    assert "pull" not in two["startup"]


def _machine() -> str:
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)


def test_a_tag_is_resolved_and_recorded_in_development(forgeyard: Run, app: tuple[str, str], tmp_path: Path) -> None:
    """The result says what the tag was taken for."""
    tag, pin = app
    done = run_in(forgeyard, tag, "--profile", "development", "--result", "r")
    assert (done.returncode, done.stdout) == (0, "hi\n"), done.stderr
    assert result_of(tmp_path / "r")["provenance"]["image"] | {"platform": "", "source": ""} == {
        "asked": tag,
        "pinned": pin,
        "platform": "",
        "source": "",
    }


@pytest.mark.parametrize("profile", ["standard-ci", "release"])
def test_a_strict_profile_says_the_digest_that_it_wants(forgeyard: Run, app: tuple[str, str], profile: str) -> None:
    """A bare tag is refused, with the pinned form to put in its place."""
    tag, pin = app
    done = run_in(forgeyard, tag, "--profile", profile)
    assert done.returncode == 125
    assert done.stdout == ""
    assert pin in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_strict_profile_says_how_to_ask_where_it_could_not(forgeyard: Run, closed: str, silent: str) -> None:
    """With its registry down or silent the refusal names the command, within seconds."""
    for host in (closed, silent):
        begin = time.monotonic()
        done = run_in(forgeyard, f"{host}/app:1")
        assert done.returncode == 125
        assert f"forgeyard image resolve {host}/app:1" in done.stderr
        assert done.stderr.count("\n") == 1
        assert time.monotonic() - begin < 20


def test_an_unreachable_registry_is_one_line_and_leaves_nothing(
    forgeyard: Run, closed: str, state_dir: Path, tmp_path: Path
) -> None:
    """The job is refused with a typed error; no attempt, ledger or half an image stays."""
    reference = f"{closed}/app@sha256:{'a' * 64}"
    done = run_in(forgeyard, reference, "--result", "r")
    assert done.returncode == 125
    assert done.stderr.count("\n") == 1
    assert closed in done.stderr
    error = result_of(tmp_path / "r")["error"]
    assert error["type"] == "ExecutorError"
    assert error["failure_class"] == "infrastructure"
    assert_nothing_stays(state_dir)


def assert_nothing_stays(state_dir: Path) -> None:
    """No attempt, no ledger, nothing half done in the store."""
    for folder in ("sandboxes", "ledger", "spool", "images/ingest", "images/partial", "images/claims"):
        left = [path for path in (state_dir / folder).rglob("*") if path.is_file()]
        assert not left, folder


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_pull(
    environment: dict[str, str], silent: str, state_dir: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """The first signal ends a run that waits for its registry, soon, with its code, and cleans up."""
    reference = f"{silent}/app@sha256:{'a' * 64}"
    with tempfile.TemporaryFile() as err:
        process = subprocess.Popen(
            command("run", "--image", reference, "--", "true"),
            env=environment,
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=err,
        )
        _wait_for_connection(process, silent)
        begin = time.monotonic()
        process.send_signal(number)
        process.communicate(timeout=20)
        assert time.monotonic() - begin < 10
        assert process.returncode == 128 + number
        err.seek(0)
        assert b"cancelled before the job started" in err.read()
    assert_nothing_stays(state_dir)


def _wait_for_connection(process: subprocess.Popen[bytes], address: str) -> None:
    """Until the registry at `address` has been connected to."""
    port = f":{int(address.rpartition(':')[2]):04X}"
    deadline = time.monotonic() + 30
    while process.poll() is None and time.monotonic() < deadline:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        if any(row[2].endswith(port) and row[3] == "01" for row in rows):
            return
        # Nothing tells a listener that never accepts.
        time.sleep(0.02)
    raise AssertionError("the registry was never asked")


def test_prepare_timeout_ends_a_pull(forgeyard: Run, silent: str, tmp_path: Path) -> None:
    """The pull counts as preparing: a job file's prepare_timeout names itself and the image."""
    reference = f"{silent}/app@sha256:{'a' * 64}"
    job = f"version: 1\nimage: {reference}\nprepare_timeout: 1s\nsteps: [{{argv: ['true']}}]\n"
    (tmp_path / "job.yaml").write_text(job)
    done = forgeyard("run", "job.yaml", "--result", "r")
    assert done.returncode == 125
    assert "prepare_timeout of 1s expired" in done.stderr
    assert reference in done.stderr
    assert result_of(tmp_path / "r")["error"]["reason"] == "prepare_timeout"


def test_pull_policies(forgeyard: Run, app: tuple[str, str]) -> None:
    """never takes what is there and refuses the rest; always asks for a tag again; others are named."""
    tag, pin = app
    assert run_in(forgeyard, pin).returncode == 0
    assert run_in(forgeyard, pin, "--pull", "never").returncode == 0
    missing = run_in(forgeyard, f"{pin.rpartition('@')[0]}@sha256:{'0' * 64}", "--pull", "never")
    assert missing.returncode == 125
    assert "is not in the store" in missing.stderr
    assert run_in(forgeyard, tag, "--profile", "development", "--pull", "always").returncode == 0
    wrong = run_in(forgeyard, pin, "--pull", "sometimes")
    assert (wrong.returncode, wrong.stderr) == (2, "forgeyard: --pull 'sometimes': write missing, always, never\n")


def test_another_architecture_is_refused_before_anything(forgeyard: Run, app: tuple[str, str]) -> None:
    """--platform of another machine: refused by run, plan and bundle, with a cure."""
    _, pin = app
    for words in (("run",), ("plan",), ("bundle", "show")):
        done = forgeyard(*words, "--image", pin, "--platform", "linux/s390x", "--", "true")
        assert done.returncode == 125
        assert "platform linux/s390x was asked for" in done.stdout + done.stderr
    alone = forgeyard("run", "--platform", "linux/s390x", "--", "true")
    assert alone.returncode == 2


def test_a_lock_pins_tags_for_strict_profiles(
    forgeyard: Run, app: tuple[str, str], registry: Registry, tmp_path: Path
) -> None:
    """The first run resolves and writes; the next ask no registry, also when the tag has moved on."""
    tag, pin = app
    first = run_in(forgeyard, tag, "--lock", "images.lock", "--result", "1")
    assert (first.returncode, first.stdout) == (0, "hi\n"), first.stderr
    text = (tmp_path / "images.lock").read_text()
    assert f'reference: "{tag}"\n    pinned: "{pin}"\n' in text
    second = forgeyard(
        "run",
        "--locked",
        "--lock",
        "images.lock",
        "--result",
        "2",
        "--image",
        tag,
        "--",
        "echo",
        "hi",
        HTTP_PROXY="http://127.0.0.1:1",
        NO_PROXY="",
    )
    assert (second.returncode, second.stdout) == (0, "hi\n"), second.stderr
    assert (tmp_path / "images.lock").read_text() == text
    assert result_of(tmp_path / "2")["provenance"]["image"]["asked"] == tag


def test_a_frozen_lock_refuses_what_it_lacks(forgeyard: Run, app: tuple[str, str], tmp_path: Path) -> None:
    """--locked never resolves; without --lock it is a mistake; a damaged lock is one line with its place."""
    tag, _ = app
    frozen = run_in(forgeyard, tag, "--lock", "images.lock", "--locked")
    assert frozen.returncode == 125
    assert "is not in" in frozen.stderr
    assert not (tmp_path / "images.lock").exists()
    assert run_in(forgeyard, tag, "--locked").returncode == 2
    (tmp_path / "images.lock").write_text("version: 1\nimages:\n  - oops\n")
    damaged = run_in(forgeyard, tag, "--lock", "images.lock")
    assert damaged.returncode == 2
    assert damaged.stderr.count("\n") == 1
    assert "entry 1" in damaged.stderr


def test_rules_are_asked_before_a_registry(forgeyard: Run, silent: str, tmp_path: Path) -> None:
    """An image that allowed_registries turns down costs no contact: a silent registry does not delay the refusal."""
    rules = tmp_path / "forgeyard" / "config.toml"
    rules.parent.mkdir()
    rules.write_text('allowed_registries = ["registry.example.org"]\n')
    reference = f"{silent}/app"
    cases = (
        ("run", "--image", f"{reference}@sha256:{'a' * 64}", "--", "true"),
        ("run", "--image", f"{reference}:1", "--profile", "development", "--", "true"),
        ("run", "--lock", "l", "--image", f"{reference}:1", "--", "true"),
        ("image", "pull", f"{reference}:1"),
        ("image", "resolve", f"{reference}:1"),
        ("image", "push", "oci:/nowhere:x", f"{reference}:1"),
    )
    for words in cases:
        done = forgeyard(*words, XDG_CONFIG_HOME=str(tmp_path))
        assert done.returncode == 125, words
        assert "is not in allowed_registries" in done.stderr, words


def test_a_job_sees_nothing_of_the_registrys_access(
    forgeyard: Run, app: tuple[str, str], state_dir: Path, tmp_path: Path
) -> None:
    """No proxy, credential or variable of the executor reaches the job, its result, its bundle or the state."""
    _, pin = app
    script = "env; cat /proc/self/environ | tr '\\0' '\\n'; cat /proc/1/environ || true"
    done = forgeyard("run", "--image", pin, "--result", "r", "--", "sh", "-c", script)
    assert done.returncode == 0, done.stderr
    names = {line.partition("=")[0].upper() for line in done.stdout.splitlines()}
    assert not names & {
        "DOCKER_AUTH_CONFIG",
        "REGISTRY_AUTH_FILE",
        "HTTP_PROXY",
        "HTTPS_PROXY",
        "NO_PROXY",
        "ALL_PROXY",
    }
    bundle = forgeyard("bundle", "generate", "--image", pin, "--to", "bundle", "--", "true")
    assert bundle.returncode == 0, bundle.stderr
    texts = [done.stdout, done.stderr, (tmp_path / "r").read_text(), (tmp_path / "bundle/config.json").read_text()]
    assert not any(CANARY in text for text in texts)
    for path in (
        *state_dir.rglob("*.jsonl"),
        *(state_dir / "images/records").iterdir(),
        state_dir / "images/layout/index.json",
    ):
        assert CANARY.encode() not in path.read_bytes()


def test_image_commands(forgeyard: Run, app: tuple[str, str], registry: Registry) -> None:
    """pull, ls, inspect, push, verify, rm, prune and resolve, for people and for programs."""
    tag, pin = app
    assert forgeyard("image", "resolve", tag).stdout == f"{pin}\n"
    pulled = forgeyard("image", "pull", tag)
    assert (pulled.returncode, pulled.stdout) == (0, f"{pin}\n"), pulled.stderr
    (info,) = json.loads(forgeyard("image", "ls", "--json").stdout)
    assert tag in info["names"]
    assert info["held"] is False
    assert info["digest"] in forgeyard("image", "inspect", pin).stdout
    assert json.loads(forgeyard("image", "inspect", tag, "--json").stdout)["info"]["names"] == info["names"]
    pushed = forgeyard("image", "push", f"{registry.host}/app@{info['digest']}", f"{registry.host}/copy:2")
    assert pushed.stdout.startswith(f"{registry.host}/copy@sha256:"), pushed.stderr
    assert forgeyard("image", "resolve", f"{registry.host}/copy:2").stdout == pushed.stdout
    assert forgeyard("image", "verify").returncode == 0
    assert forgeyard("image", "prune", "--older-than", "7d", "--keep-size", "20GiB").returncode == 0
    assert json.loads(forgeyard("image", "ls", "--json").stdout)
    assert forgeyard("image", "rm", *info["names"]).returncode == 0
    assert forgeyard("image", "ls", "--json").stdout == "[]\n"
    gone = forgeyard("image", "inspect", tag)
    assert (gone.returncode, gone.stderr.count("\n")) == (125, 1)


def test_image_command_mistakes(forgeyard: Run) -> None:
    """One line and the right code for each kind of mistake."""
    for words, code in (
        (("image", "prune"), 2),
        (("image", "prune", "--older-than", "7"), 2),
        (("image", "prune", "--keep-size", "much"), 2),
        (("image", "rm"), 2),
        (("image", "pull", "UPPER:1"), 125),
        (("image", "resolve", "a b"), 125),
        (("image", "rm", "localhost/none:1"), 125),
        (("image", "push", "localhost/none:1", "localhost:1/x:1"), 125),
    ):
        done = forgeyard(*words)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (code, "", 1), (words, done.stderr)
        assert done.stderr.startswith("forgeyard: ")


def test_verify_finds_damage_and_repairs_it(forgeyard: Run, app: tuple[str, str], state_dir: Path) -> None:
    """A file of a layer that was changed is a problem, exit 1; repaired, the next run pulls what is missing."""
    _, pin = app
    assert run_in(forgeyard, pin).returncode == 0
    victim = next(path for path in (state_dir / "images/layers").rglob("tree/bin/busybox"))
    with victim.open("ab") as file:
        file.write(b"x")
    found = forgeyard("image", "verify", "--json")
    assert found.returncode == 1
    assert json.loads(found.stdout)["problems"]
    assert forgeyard("image", "verify", "--repair").returncode == 1
    assert forgeyard("image", "verify").returncode == 0
    assert run_in(forgeyard, pin).stdout == "hi\n"


def test_what_a_job_uses_is_not_removed(environment: dict[str, str], forgeyard: Run, app: tuple[str, str]) -> None:
    """While a job runs, rm of its image is refused and prune passes it over; afterwards both work."""
    _, pin = app
    job = command("run", "--image", pin, "--", "sh", "-c", "echo ready; read _ < /work/tmp/never || sleep 60")
    process = subprocess.Popen(job, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    try:
        (info,) = json.loads(forgeyard("image", "ls", "--json").stdout)
        assert info["held"] is True
        refused = forgeyard("image", "rm", pin)
        assert (refused.returncode, refused.stderr.count("\n")) == (125, 1)
        assert forgeyard("image", "prune", "--all").returncode == 0
        assert len(json.loads(forgeyard("image", "ls", "--json").stdout)) == 1
    finally:
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=30)
    assert forgeyard("image", "prune", "--all").returncode == 0
    assert forgeyard("image", "ls", "--json").stdout == "[]\n"


def test_plan_pulls_as_run_does(forgeyard: Run, app: tuple[str, str]) -> None:
    """plan needs the image's own words; with --pull never it refuses what run would refuse."""
    _, pin = app
    forgeyard("image", "prune", "--all")
    never = forgeyard("plan", "--pull", "never", "--image", pin, "--", "true")
    assert never.returncode == 125
    assert "is not in the store" in never.stdout
    done = forgeyard("plan", "--image", pin, "--", "true")
    assert (done.returncode, "pulling layer" in done.stderr) == (0, True), done.stderr
