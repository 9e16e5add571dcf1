"""How image references are read."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, ForgeyardError, InvalidRequest
from forgeyard_oci.reference import ImageReference

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"


@pytest.mark.parametrize("path", ["/images/app", "images/app", "/a:b@c/d", "/a@sha256:zz", "a b,c", "/x:tag"])
def test_pinned_reference_keeps_any_path(path: str) -> None:
    """Everything before the last @sha256: is the path, with its colons and at signs."""
    reference = ImageReference.parse(f"oci:{path}@{DIGEST}")
    assert (reference.path, reference.digest, reference.tag) == (path, DIGEST, None)
    assert str(reference) == f"oci:{path}@{DIGEST}"


def test_tag_is_what_follows_the_last_colon() -> None:
    """oci:PATH:TAG names an entry of index.json."""
    reference = ImageReference.parse("oci:/a:b/c:v1.2-rc_3")
    assert (reference.path, reference.tag, reference.digest) == ("/a:b/c", "v1.2-rc_3", None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "oci:",
        "oci:/images/app",
        "oci:/a:b/c",
        f"oci:@{DIGEST}",
        f"oci:/a@sha256:{HEX[:-1]}",
        f"oci:/a@sha256:{HEX.upper()}",
        f"oci:/a@sha256:{HEX}0",
        "oci:/a:",
        "oci:/a:-tag",
        "oci:/a\0b:tag",
        "oci:/a\nb:tag",
        f"oci:/a@{DIGEST}\n",
    ],
)
def test_malformed_references_name_the_cure(text: str) -> None:
    """A layout reference that is not well formed is the caller's error, with what to write instead."""
    with pytest.raises(InvalidRequest, match="oci:PATH@sha256:"):
        ImageReference.parse(text)


@pytest.mark.parametrize("text", ["alpine", f"registry.example.org/app@{DIGEST}", "docker-archive:/x.tar", "OCI:/a:b"])
def test_other_sources_are_unsupported(text: str) -> None:
    """Registries and archives are refused as what they are: not supported, with what is."""
    with pytest.raises(ExecutorError, match="oci:PATH@sha256:") as caught:
        ImageReference.parse(text)
    assert caught.value.kind is ExecutorErrorKind.UNSUPPORTED
    assert caught.value.reason == "image_source"
    assert caught.value.failure_class is FailureClass.CONFIGURATION


def test_relative_paths_start_at_the_base_directory() -> None:
    """A path in a job file is relative to the file; an absolute one stays."""
    assert ImageReference.parse("oci:images/app:x").layout_path(Path("/jobs")) == Path("/jobs/images/app")
    assert ImageReference.parse("oci:/images/app:x").layout_path(Path("/jobs")) == Path("/images/app")


@given(st.text(max_size=60), st.sampled_from(["", "oci:", "oci:/a:", "oci:/a@sha256:"]))
def test_any_text_gives_a_reference_or_one_of_our_errors(text: str, prefix: str) -> None:
    """No text makes the parser fail in a way of its own; what it takes, it writes back unchanged."""
    try:
        reference = ImageReference.parse(prefix + text)
    except ForgeyardError:
        return
    assert str(reference) == prefix + text
