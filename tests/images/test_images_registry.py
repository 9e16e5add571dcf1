"""The registry of the test run, and the images in it: what other tests stand on."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from build import Entry, LayoutWriter, sha256, tar
from docker_registry import PROGRAM, RegistryProcess

ROOT = Path(__file__).resolve().parents[2]
ACCEPT = ", ".join(
    f"application/vnd.{name}+json"
    for name in ("oci.image.index.v1", "oci.image.manifest.v1", "docker.distribution.manifest.v2")
)


def get(registry: Any, path: str) -> bytes:
    """What the registry answers."""
    request = urllib.request.Request(f"http://{registry.address}/v2/{path}", headers={"Accept": ACCEPT})
    with urllib.request.urlopen(request, timeout=20) as response:
        return bytes(response.read())


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    """A small image, tagged."""
    writer = LayoutWriter(tmp_path / "layout")
    image = writer.image([tar([Entry("file", b"content\n")])])
    writer.finish({**image, "annotations": {"org.opencontainers.image.ref.name": "v1"}})
    return tmp_path / "layout"


def test_what_is_pushed_can_be_fetched(registry: Any, layout: Path) -> None:
    """A pushed image keeps its digest; its manifest, config and layer come back as they were, by tag and by digest."""
    pinned = registry.push(layout, "v1", "fetched/app")
    host, _, rest = pinned.partition("/")
    name, _, digest = rest.partition("@")
    assert host == f"localhost:{registry.port}"
    data = get(registry, f"{name}/manifests/{digest}")
    assert sha256(data) == digest
    assert get(registry, f"{name}/manifests/v1") == data
    manifest = json.loads(data)
    for blob in (manifest["config"], *manifest["layers"]):
        assert sha256(get(registry, f"{name}/blobs/{blob['digest']}")) == blob["digest"]


def test_an_index_is_pushed_whole(registry: Any, images: Any) -> None:
    """Every manifest of an index is there, foreign ones and attestations too."""
    _, _, rest = images.reference("multiarch").partition("/")
    name, _, digest = rest.partition("@")
    entries = json.loads(get(registry, f"{name}/manifests/{digest}"))["manifests"]
    assert len(entries) == 4
    for entry in entries:
        assert sha256(get(registry, f"{name}/manifests/{entry['digest']}")) == entry["digest"]


def test_what_it_does_not_have(registry: Any) -> None:
    """An unknown name is the registry's own 404."""
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(registry, "no-such/manifests/latest")


def test_skopeo_reads_it(registry: Any, layout: Path, require_tool: Callable[[str], str]) -> None:
    """A client that is not ours finds the image under its tag."""
    pinned = registry.push(layout, "v1", "skopeo/app")
    command = [require_tool("skopeo"), "inspect", "--tls-verify=false", f"docker://{registry.host}/skopeo/app:v1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["Digest"] == pinned.partition("@")[2]


def test_a_reference_is_pushed_once(registry: Any, images: Any) -> None:
    """Asked twice, the second time finds the first one's mark."""
    first = images.reference("opaque")
    mark = registry.directory / "pushed-opaque:latest"
    written = mark.stat().st_mtime_ns
    assert images.reference("opaque") == first == mark.read_text()
    assert mark.stat().st_mtime_ns == written


def test_a_registry_ends_with_its_starter(require_tool: Callable[[str], str]) -> None:
    """A test run that is killed leaves no registry running."""
    require_tool(PROGRAM)
    script = "import docker_registry as d, os; p = d.RegistryProcess(); d.Registry(p.directory); "
    script += "print(p._process.pid, p.directory, flush=True); os.kill(os.getpid(), 9)"
    environ = os.environ | {"PYTHONPATH": str(ROOT / "tests/images")}
    run = subprocess.run([sys.executable, "-c", script], env=environ, capture_output=True, text=True, check=False)
    pid, directory = run.stdout.split()
    try:
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(int(pid))
            assert select.select([ended], [], [], 20)[0]  # also of a zombie that nobody has waited for
            os.close(ended)
    finally:
        subprocess.run(["rm", "-r", directory], check=True)


def test_stopping_removes_everything(require_tool: Callable[[str], str]) -> None:
    """A stopped registry is gone, with its storage, even when it was never waited for."""
    require_tool(PROGRAM)
    process = RegistryProcess()
    process.stop()
    assert not process.directory.exists()


def nested(tmp_path: Path, test: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A test run of its own, of one file, with our conftest and no plugins but those named."""
    (tmp_path / "test_it.py").write_text(test)
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "conftest", "-p", "no:cacheprovider", *options]
    environ = {key: value for key, value in os.environ.items() if not key.startswith(("PYTEST_", "FORGEYARD_TEST"))}
    environ |= {
        "PYTHONPATH": ":".join(str(ROOT / name) for name in ("tests", "tests/images", "tests/support")),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    return subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path / "test_it.py")],
        env=environ | environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_registry_for_all_workers(tmp_path: Path, require_tool: Callable[[str], str]) -> None:
    """Two workers of one run see the same registry, and after the run it is gone."""
    require_tool(PROGRAM)
    test = """
import os
def test_it(registry):
    with open("seen", "a") as file:
        file.write(f"{os.environ['PYTEST_XDIST_WORKER']} {registry.port} {registry.directory}\\n")
"""
    run = nested(tmp_path, test, "-p", "xdist", "-n", "2", "--dist", "each")
    assert run.returncode == 0, run.stdout + run.stderr
    lines = [line.split() for line in (tmp_path / "seen").read_text().splitlines()]
    assert {line[0] for line in lines} == {"gw0", "gw1"}
    assert len({line[1] for line in lines}) == 1
    assert not Path(lines[0][2]).exists()


@pytest.mark.parametrize(("ci", "words"), [("", r"SKIPPED .*\(\./dev setup"), ("true", "1 error")])
def test_a_missing_registry_is_loud(ci: str, words: str, tmp_path: Path) -> None:
    """Without docker-registry a test skips with the cure; under CI it fails."""
    if any(Path(folder, PROGRAM).exists() for folder in ("/usr/sbin", "/usr/local/sbin", "/sbin")):
        pytest.skip("docker-registry is where every PATH finds it")
    run = nested(tmp_path, "def test_it(registry): pass\n", PATH=str(tmp_path), CI=ci)
    assert "docker-registry is not installed" in run.stdout
    assert re.search(words, run.stdout), run.stdout
    assert run.returncode == (1 if ci else 0)
