"""How image references are read: layouts on disk, and the grammar of registries."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, FailureClass, ForgeyardError, InvalidRequest
from forgeyard_oci.reference import LayoutReference, RegistryReference, parse_reference

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"


@pytest.mark.parametrize("path", ["/images/app", "images/app", "/a:b@c/d", "/a@sha256:zz", "a b,c", "/x:tag"])
def test_pinned_reference_keeps_any_path(path: str) -> None:
    """Everything before the last @sha256: is the path, with its colons and at signs."""
    reference = layout(f"oci:{path}@{DIGEST}")
    assert (reference.path, reference.digest, reference.tag) == (path, DIGEST, None)
    assert str(reference) == f"oci:{path}@{DIGEST}"


def test_tag_is_what_follows_the_last_colon() -> None:
    """oci:PATH:TAG names an entry of index.json."""
    reference = layout("oci:/a:b/c:v1.2-rc_3")
    assert (reference.path, reference.tag, reference.digest) == ("/a:b/c", "v1.2-rc_3", None)


@pytest.mark.parametrize(
    "text",
    [
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
        parse_reference(text)


@pytest.mark.parametrize("text", ["docker-archive:/x.tar", "oci-archive:/x.tar", "dir:/x", "containers-storage:/x"])
def test_other_places_are_unsupported(text: str) -> None:
    """Archives and other tools' stores are refused as what they are: not supported, with what is."""
    with pytest.raises(ExecutorError, match="oci:PATH@sha256:") as caught:
        parse_reference(text)
    assert caught.value.kind is ExecutorErrorKind.UNSUPPORTED
    assert caught.value.reason == "image_source"
    assert caught.value.failure_class is FailureClass.CONFIGURATION


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("busybox", "docker.io/library/busybox:latest"),
        ("busybox:1.36", "docker.io/library/busybox:1.36"),
        (f"busybox@{DIGEST}", f"docker.io/library/busybox@{DIGEST}"),
        (f"busybox:1.36@{DIGEST}", f"docker.io/library/busybox:1.36@{DIGEST}"),
        ("team/app", "docker.io/team/app:latest"),
        ("docker.io/busybox", "docker.io/library/busybox:latest"),
        ("index.docker.io/busybox", "docker.io/library/busybox:latest"),
        ("index.docker.io/team/app:x", "docker.io/team/app:x"),
        ("DOCKER.IO/busybox", "docker.io/library/busybox:latest"),
        ("localhost/app", "localhost/app:latest"),
        ("localhost:5000/app", "localhost:5000/app:latest"),
        ("localhost:5000", "docker.io/library/localhost:5000"),
        ("registry.example.org/a/b/c:v1", "registry.example.org/a/b/c:v1"),
        ("registry.example.org:8443/a", "registry.example.org:8443/a:latest"),
        ("Registry.Example.ORG/a", "registry.example.org/a:latest"),
        ("xn--n3h.example/a", "xn--n3h.example/a:latest"),
        ("192.0.2.1:5000/a", "192.0.2.1:5000/a:latest"),
        ("[::1]:5000/a/b:c", "[::1]:5000/a/b:c"),
        ("[2001:db8::1]/a", "[2001:db8::1]/a:latest"),
        ("host:1/a_b/c__d/e---f/g.h", "host:1/a_b/c__d/e---f/g.h:latest"),
        ("a" * 200, f"docker.io/library/{'a' * 200}:latest"),
        (f"host:1/{'a' * 255}", f"host:1/{'a' * 255}:latest"),
        (f"a:{'T' * 128}", f"docker.io/library/a:{'T' * 128}"),
    ],
)
def test_registry_references_in_full(text: str, canonical: str) -> None:
    """Defaults are filled in, hosts are lower case, and the canonical form reads back as itself."""
    reference = parse_reference(text)
    assert str(reference) == canonical
    assert parse_reference(canonical) == reference


def test_the_digest_decides_and_the_tag_is_kept() -> None:
    """With both, pinning and pulling go by the digest; the tag is there to be shown."""
    reference = parse_reference(f"registry.example.org/app:v1@{DIGEST}")
    assert isinstance(reference, RegistryReference)
    assert (reference.tag, reference.digest) == ("v1", DIGEST)
    assert reference.pinned(DIGEST) == f"registry.example.org/app@{DIGEST}"


@pytest.mark.parametrize(
    ("text", "cure"),
    [
        ("", "write "),
        (" busybox", "parts of a-z"),
        ("busybox\n", "write "),
        ("team/App", "lower case: write team/app"),
        ("BusyBox", "lower case: write busybox"),
        ("localhost/App:x", "lower case: write app"),
        ("a//b", "parts of a-z"),
        ("/a", "parts of a-z"),
        ("a/", "parts of a-z"),
        ("a..b", "parts of a-z"),
        ("a___b", "parts of a-z"),
        ("-a", "parts of a-z"),
        ("a-", "parts of a-z"),
        ("a/../b", "parts of a-z"),
        ("a:", "a tag has"),
        ("a:-x", "a tag has"),
        ("a:.x", "a tag has"),
        (f"a:{'t' * 129}", "a tag has"),
        (f"a@sha512:{'0' * 128}", "sha512 is not taken"),
        (f"a@blake3:{'0' * 64}", "blake3 is not taken"),
        (f"a@md5:{'0' * 32}", "md5 is not taken"),
        (f"a@sha256:{HEX[1:]}", "64 lower-case hex digits"),
        (f"a@sha256:{HEX.upper()}", "64 lower-case hex digits"),
        ("a@", "64 lower-case hex digits"),
        (f"a@{DIGEST}@{DIGEST}", "parts of a-z"),
        (HEX, "are an image's id"),
        ("a" * 248, "at most 255"),
        (f"host:1/{'a' * 256}", "at most 255"),
        ("host:0/a", "HOST:PORT"),
        ("host:65536/a", "HOST:PORT"),
        ("host:/a", "HOST:PORT"),
        ("host:x/a", "HOST:PORT"),
        ("-host.example/a", "HOST:PORT"),
        ("a_b.example/a", "HOST:PORT"),
        (".example/a", "HOST:PORT"),
        ("[::1/a", "HOST:PORT"),
        ("[::g]:5000/a", "HOST:PORT"),
        ("[127.0.0.1]:5000/a", "HOST:PORT"),
        ("::1/a", "HOST:PORT"),
        ("https://registry.example.org/a", "leave https:// out"),
        ("docker://busybox", "leave docker:// out"),
        ("x" * 5000, "write "),
    ],
)
def test_malformed_registry_references_name_the_cure(text: str, cure: str) -> None:
    """What can't be a reference is the caller's error: field, value, and what to write instead."""
    with pytest.raises(InvalidRequest) as caught:
        parse_reference(text)
    assert caught.value.field == "image"
    assert cure in caught.value.cure


@pytest.mark.parametrize(
    "text",
    [
        "me:canary@registry.example.org/a",
        f"me:can/ary@host:5000/a@{DIGEST}",
        "https://me:canary@host/a",
        "a:b@canary@c:5",
    ],
)
def test_a_password_in_a_reference_is_not_repeated(text: str) -> None:
    """References hold no credentials; those that somebody writes there stay out of the message."""
    with pytest.raises(InvalidRequest) as caught:
        parse_reference(text)
    assert "canary" not in str(caught.value).replace("can/ary", "canary")


def test_relative_paths_start_at_the_base_directory() -> None:
    """A path in a job file is relative to the file; an absolute one stays."""
    assert layout("oci:images/app:x").layout_path(Path("/jobs")) == Path("/jobs/images/app")
    assert layout("oci:/images/app:x").layout_path(Path("/jobs")) == Path("/images/app")


@given(st.text(max_size=60), st.sampled_from(["oci:", "oci:/a:", "oci:/a@sha256:"]))
def test_any_text_gives_a_reference_or_one_of_our_errors(text: str, prefix: str) -> None:
    """No text makes the parser fail in a way of its own; what it takes, it writes back unchanged."""
    try:
        reference = parse_reference(prefix + text)
    except ForgeyardError:
        return
    assert str(reference) == prefix + text


@given(st.text(alphabet="aB0./:@[]-_ \n\u00e9" + "sha256", max_size=60) | st.text(max_size=60))
def test_any_text_gives_a_registry_reference_that_is_stable_or_one_of_our_errors(text: str) -> None:
    """What is taken has a canonical form that reads back as the same image, within the grammar's bounds."""
    try:
        reference = parse_reference(text)
    except ForgeyardError:
        return
    assert parse_reference(str(reference)) == reference
    if isinstance(reference, RegistryReference):
        assert len(reference.repository) <= 255
        assert reference.registry == reference.registry.lower()
        assert reference.tag or reference.digest


_COMPONENT = st.from_regex(r"[a-z0-9]{1,8}((\.|_|__|-{1,3})[a-z0-9]{1,8}){0,2}", fullmatch=True)
_HOST = st.from_regex(r"([a-z0-9]{1,8}\.[a-z]{1,5}|localhost|\[::[0-9a-f]{1,4}\])(:[1-9][0-9]{0,3})?", fullmatch=True)


@given(_HOST, st.lists(_COMPONENT, min_size=1, max_size=4), st.from_regex(r"[\w][\w.-]{0,20}", fullmatch=True))
def test_every_part_of_a_good_reference_comes_back(host: str, parts: list[str], tag: str) -> None:
    """Registry, repository and tag are what was put together."""
    if not tag.isascii():
        return
    reference = parse_reference(f"{host}/{'/'.join(parts)}:{tag}")
    assert reference == RegistryReference(host, "/".join(parts), tag)


def layout(text: str) -> LayoutReference:
    """`text`, which has to be a layout's reference."""
    reference = parse_reference(text)
    assert isinstance(reference, LayoutReference)
    return reference
