"""examples/restricted-egress, run by the command line on a host and with an outside that the test makes."""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fake_dns
import pytest
import yaml
from net_host import OTHER, SERVER, Host

from forgeyard_host.netns import in_namespace

pytestmark = [pytest.mark.kernel, pytest.mark.usefixtures("warm_rootfs")]

EXAMPLE = Path(__file__).parents[2] / "examples" / "restricted-egress"
# The host's name servers, seen by the executor alone.
IN_HOST = 'mount --bind "$0" /etc/resolv.conf && exec "$@"'

Forgeyard = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    """A host with an outside, both in namespaces of the test."""
    made = Host(tmp_path)
    yield made
    made.close()


@pytest.fixture
def forgeyard(host: Host, state_dir: Path, tmp_path: Path, leaks: object) -> Forgeyard:
    """Run a command line on the host, while the outside has a name server and two web servers."""
    resolv = tmp_path / "resolv.conf"
    resolv.write_text(f"nameserver {SERVER}\n")
    example = tmp_path / "example"
    shutil.copytree(EXAMPLE, example)

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", IN_HOST, str(resolv)]
        command += [sys.executable, "-m", "forgeyard_api", *words]
        if words[0] == "run":
            command += ["--state-dir", str(state_dir)]
        start = partial(subprocess.run, command, cwd=example, capture_output=True, text=True, check=False, timeout=50)
        act = partial(in_namespace, host.namespace.fd, start)
        return in_namespace(host.outside.fd, lambda: asyncio.run(served(act)))

    return run


async def served(act: Callable[[], Any]) -> Any:
    """What comes of `act`, which blocks, while example.org and example.com are there. In the outside."""
    zone = fake_dns.Zone()
    zone.add("example.org", f"60 IN A {SERVER}")
    zone.add("example.com", f"60 IN A {OTHER}")
    dns = await fake_dns.start(zone, SERVER, port=53)
    servers = [
        await asyncio.start_server(lambda _, writer: writer.close(), address, port)
        for address, port in ((SERVER, 80), (SERVER, 22), (OTHER, 80))
    ]
    try:
        return await asyncio.to_thread(act)
    finally:
        dns.close()
        for server in servers:
            server.close()


def test_what_is_named_is_reached_and_all_else_refused(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """The job's own checks pass, and the result has each destination with its verdict; nothing is left on the host."""
    done = forgeyard("run", "--result", "result.json", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "example.org:80: reached"
    assert [line.split()[1] for line in lines[1:]] == ["refused"] * 5
    network = json.loads((tmp_path / "example" / "result.json").read_text())["network"]
    seen = {(row["verdict"], row["name"], row["address"], row["port"]) for row in network["destinations"]}
    assert seen >= {
        ("allowed", "example.org", SERVER, 80),
        ("refused", "example.org", SERVER, 22),
        ("refused", "", "192.0.2.1", 80),
        ("refused", "", "169.254.169.254", 80),
    }
    assert not any(verdict == "allowed" and port != 80 for verdict, _, _, port in seen)
    assert "refused" in {row["verdict"] for row in network["dns"] if row["name"] == "example.com"}


def test_an_audit_writes_the_policy_that_is_enough(forgeyard: Forgeyard, tmp_path: Path) -> None:
    """What the audit of one run prints lets the same job through when it is enforced, and is what the README shows."""
    done = forgeyard("run", "--result", "audit.json", "audit.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    printed = forgeyard("policy", "from-audit", "audit.json")
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout in (EXAMPLE / "README.md").read_text()
    enforced = tmp_path / "example" / "enforced.yaml"
    job = yaml.safe_load((EXAMPLE / "audit.yaml").read_text())
    enforced.write_text(json.dumps({**job, **yaml.safe_load(printed.stdout)}))
    done = forgeyard("run", "--result", "enforced.json", "enforced.yaml")
    assert (done.returncode, done.stdout) == (0, "example.org:80: reached\nexample.com:80: reached\n"), done.stderr
    found = json.loads((tmp_path / "example" / "enforced.json").read_text())
    assert found["provenance"]["network"] == "restricted"


def test_the_host_is_left_as_it_was(forgeyard: Forgeyard, host: Host) -> None:
    """After the job no rule and no link of ours is on the host."""
    done = forgeyard("run", "job.yaml")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "FORGEYARD" not in host.rules()
    host.wait_clean()
