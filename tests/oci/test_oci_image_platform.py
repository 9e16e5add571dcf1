"""Which images run on which host."""

from __future__ import annotations

import os

import pytest

from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.image_platform import Platform


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("linux/amd64", "linux/amd64"),
        ("linux/x86_64", "linux/amd64"),
        ("Linux/AArch64", "linux/arm64"),
        ("linux/arm64/v8", "linux/arm64"),
        ("linux/arm64/8", "linux/arm64"),
        ("linux/arm/v7", "linux/arm"),
        ("linux/armv6l", "linux/arm/v6"),
        ("linux/amd64/v3", "linux/amd64/v3"),
    ],
)
def test_spellings_of_one_platform_are_one(text: str, shown: str) -> None:
    """Other names of an architecture, and the variant that is its plain form, don't matter."""
    assert str(Platform.parse(text)) == shown


@pytest.mark.parametrize("text", ["", "linux", "linux/", "linux/amd64/v1/x", "linux/am d64", "linux//v8", "a/b\n"])
def test_malformed_platforms_are_refused(text: str) -> None:
    """The caller's mistake is named with an example."""
    with pytest.raises(InvalidRequest, match="linux/amd64"):
        Platform.parse(text)


@pytest.mark.parametrize(
    ("host", "image", "runs"),
    [
        ("linux/amd64", "linux/amd64", True),
        ("linux/amd64", "linux/amd64/v1", True),
        ("linux/amd64", "linux/amd64/v2", False),
        ("linux/amd64/v3", "linux/amd64/v2", True),
        ("linux/amd64", "linux/arm64", False),
        ("linux/amd64", "linux/386", False),
        ("linux/amd64", "windows/amd64", False),
        ("linux/arm64", "linux/arm64/v8", True),
        ("linux/arm64", "linux/arm64/v9", False),
        ("linux/arm/v7", "linux/arm/v6", True),
        ("linux/arm/v6", "linux/arm/v7", False),
        ("linux/riscv64", "linux/riscv64", True),
        ("linux/amd64", "linux/amd64/odd", False),
    ],
)
def test_older_variants_run_and_newer_do_not(host: str, image: str, runs: bool) -> None:
    """The architecture is the same, and the variant not newer than the host's."""
    assert Platform.parse(host).runs(Platform.parse(image)) is runs


def test_the_newest_variant_that_runs_is_chosen() -> None:
    """Of several that run the newest wins, of equals the first."""
    offered = [Platform.parse(text) for text in ("linux/arm/v5", "linux/arm/v7", "linux/arm/v6", "linux/arm/v7")]
    assert Platform.parse("linux/arm/v7").best(offered) == 1
    assert Platform.parse("linux/arm/v6").best(offered) == 2
    assert Platform.parse("linux/amd64").best(offered) is None


def test_host_is_this_machine() -> None:
    """The host's platform is what the kernel says, in the registry's spelling."""
    assert Platform.host() == Platform.parse(f"linux/{os.uname().machine}")
