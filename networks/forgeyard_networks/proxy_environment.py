"""What makes tools inside use the fetch proxy: variables, and files in HOME for those that read none."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final
from xml.sax.saxutils import escape

LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")
GRADLE: Final = ".gradle/gradle.properties"
MAVEN: Final = ".m2/settings.xml"


def proxy_environment(address: str, port: int, no_proxy: Sequence[str] = ()) -> Mapping[str, str]:
    """Variables for a job and its services. Both cases, since tools differ in which they read.

    :param no_proxy: names and addresses of the members of the job's network; loopback is added.
    """
    url = f"http://{address}:{port}"
    spared = ",".join(dict.fromkeys((*LOOPBACK, *no_proxy)))
    both = {"HTTP_PROXY": url, "HTTPS_PROXY": url, "NO_PROXY": spared}
    lower = {name.lower(): value for name, value in both.items()}
    # Node reads the variables above from 22.21 and 24 on, and only with this.
    return MappingProxyType({**both, **lower, "NODE_USE_ENV_PROXY": "1"})


def jvm_files(address: str, port: int, no_proxy: Sequence[str] = ()) -> Mapping[str, str]:
    """Files by their path below HOME, for Gradle, Maven and what reads Maven's settings. One that is there stays.

    A variable such as JAVA_TOOL_OPTIONS would reach every JVM, and each would say so on its stderr.
    """
    spared = tuple(dict.fromkeys((*LOOPBACK, *no_proxy)))
    return MappingProxyType(
        {GRADLE: gradle_properties(address, port, spared), MAVEN: maven_settings(address, port, spared)}
    )


def gradle_properties(address: str, port: int, spared: Sequence[str]) -> str:
    """System properties that Gradle sets for itself and its workers. https has no nonProxyHosts of its own."""
    lines = [
        line
        for scheme in ("http", "https")
        for line in (f"systemProp.{scheme}.proxyHost={address}", f"systemProp.{scheme}.proxyPort={port}")
    ]
    # A colon would end the key in a properties file, not the value; it is safe here.
    return "\n".join([*lines, f"systemProp.http.nonProxyHosts={_bars(spared)}", ""])


def maven_settings(address: str, port: int, spared: Sequence[str]) -> str:
    """A settings.xml with one proxy for each scheme."""
    proxies = "".join(
        f"    <proxy><id>forgeyard-{scheme}</id><active>true</active><protocol>{scheme}</protocol>"
        f"<host>{escape(address)}</host><port>{port}</port>"
        f"<nonProxyHosts>{escape(_bars(spared))}</nonProxyHosts></proxy>\n"
        for scheme in ("http", "https")
    )
    return (
        '<?xml version="1.0" encoding="UTF-8"?>\n'
        '<settings xmlns="http://maven.apache.org/SETTINGS/1.0.0">\n'
        f"  <proxies>\n{proxies}  </proxies>\n"
        "</settings>\n"
    )


def _bars(spared: Sequence[str]) -> str:
    return "|".join(f"[{name}]" if ":" in name else name for name in spared)
