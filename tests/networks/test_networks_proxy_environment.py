"""What makes tools inside use the fetch proxy."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections.abc import Mapping
from pathlib import Path

import pytest
from fake_web import allow, proxied

from forgeyard_networks.proxy_environment import GRADLE, MAVEN, jvm_files, proxy_environment

MEMBERS = ("redis", "10.213.0.3")


def test_both_cases_and_no_proxy():
    """Each variable is there in both cases, and services and loopback are spared."""
    found = proxy_environment("10.213.0.1", 3128, (*MEMBERS, "localhost"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY"):
        assert found[name] == found[name.lower()] == "http://10.213.0.1:3128"
    assert found["NO_PROXY"] == found["no_proxy"] == "localhost,127.0.0.1,::1,redis,10.213.0.3"
    assert not any(name.upper() == "ALL_PROXY" for name in found)


def test_gradle_properties():
    """Gradle gets host and port for both schemes, and one list of hosts that are spared."""
    lines = jvm_files("10.213.0.1", 3128, MEMBERS)[GRADLE].splitlines()
    assert sorted(lines) == [
        "systemProp.http.nonProxyHosts=localhost|127.0.0.1|[::1]|redis|10.213.0.3",
        "systemProp.http.proxyHost=10.213.0.1",
        "systemProp.http.proxyPort=3128",
        "systemProp.https.proxyHost=10.213.0.1",
        "systemProp.https.proxyPort=3128",
    ]


def test_maven_settings():
    """Maven's settings are well-formed, with one active proxy for each scheme; any text in a name stays text."""
    text = jvm_files("10.213.0.1", 3128, ("a&b", "redis"))[MAVEN]
    space = "{http://maven.apache.org/SETTINGS/1.0.0}"
    proxies = ET.fromstring(text).findall(f"{space}proxies/{space}proxy")
    assert [item.findtext(f"{space}protocol") for item in proxies] == ["http", "https"]
    assert {item.findtext(f"{space}port") for item in proxies} == {"3128"}
    assert proxies[0].findtext(f"{space}nonProxyHosts") == "localhost|127.0.0.1|[::1]|a&b|redis"


TOOLS = {
    "curl": ["curl", "-s", "https://fetch.invalid/"],
    "wget": ["wget", "-q", "-t1", "-O-", "https://fetch.invalid/"],
    "git": ["git", "ls-remote", "https://fetch.invalid/x.git"],
    "python": [sys.executable, "-c", "import urllib.request as u; u.urlopen('https://fetch.invalid/')"],
    "go": ["go", "list", "-m", "example.invalid/x@v1.0.0"],
    "npm": ["npm", "view", "nothing", "--registry", "https://fetch.invalid/", "--fetch-retries", "0"],
    "maven": ["mvn", "-B", "-q", "example.invalid:x:1:y"],
}


@pytest.mark.parametrize("tool", sorted(TOOLS))
def test_tools_come_to_the_proxy(tool: str):
    """Tools that the table in docs/networks.md lists ask the proxy, and by name, for what they fetch."""
    command = TOOLS[tool]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")

    async def scenario(home: Path) -> None:
        async with proxied(allow("nothing.example.org")) as proxy:
            write(home, jvm_files("127.0.0.1", proxy.port))
            environment = {
                "PATH": os.environ["PATH"],
                "HOME": str(home),
                "GOPROXY": "https://fetch.invalid",
                "GONOSUMDB": "*",
                "GOFLAGS": "-mod=mod",
                # Java takes a home from the user database, where a job's user has the right one.
                "MAVEN_OPTS": f"-Duser.home={home}",
                **proxy_environment("127.0.0.1", proxy.port),
            }
            process = await asyncio.create_subprocess_exec(
                *command, env=environment, cwd=home, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
            try:
                record = (await proxy.settled(1, within=30))[0]
            finally:
                if process.returncode is None:
                    process.kill()
                await process.wait()
            assert (record.method, record.port, record.status) == ("CONNECT", 443, 403)
            assert "." in record.host

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as home:
        asyncio.run(scenario(Path(home)))


def write(home: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (home / name).parent.mkdir(parents=True, exist_ok=True)
        (home / name).write_text(text)
