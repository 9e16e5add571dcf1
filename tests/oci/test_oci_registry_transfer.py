"""Blobs: hashed and measured as they come, resumed where they broke off, and never taken for more than they are."""

from __future__ import annotations

import hashlib
import os
import random
import tempfile
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from bad_registry import (
    BadRegistry,
    Behaviour,
    Call,
    chunked,
    chunked_cut_at,
    cut_at,
    dribble,
    flip,
    ignore_range,
    reply,
    silence,
    stall_at,
    with_body,
    with_headers,
)
from registry_clients import IMPATIENT, Counting, client, image, pull_blob

from forgeyard_model.errors import ExecutorError, FailureClass, SandboxError
from forgeyard_oci.registry.client import RegistryClient

DATA = random.Random(63).randbytes(300_000)
SIZE = len(DATA)
DIGEST = f"sha256:{hashlib.sha256(DATA).hexdigest()}"


@pytest.fixture
def registry() -> Iterator[BadRegistry]:
    """A registry that has DATA."""
    with BadRegistry() as server:
        server.add_blob(DATA)
        yield server


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[RegistryClient]:
    """A client with no patience."""
    made = client(tmp_path)
    yield made
    made.close()


def ranges(registry: BadRegistry) -> list[str | None]:
    """The Range of each request for a blob."""
    return [seen.headers.get("range") for seen in registry.seen("/blobs/")]


def test_a_blob_arrives_whole(registry: BadRegistry, puller: RegistryClient) -> None:
    """The file holds exactly the blob, one request was made, and the last progress is its size."""
    told: list[int] = []
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE, received=told.append) == DATA
    assert told == sorted(told)
    assert told[-1] == SIZE
    assert len(registry.requests) == 1
    assert registry.requests[0].headers["accept-encoding"] == "identity"


def test_the_empty_blob_needs_no_request(registry: BadRegistry, puller: RegistryClient) -> None:
    """Nothing is asked for what is there, be it nothing or all."""
    empty = f"sha256:{hashlib.sha256(b'').hexdigest()}"
    assert pull_blob(puller, image(registry.host), empty, 0) == b""
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE, there=DATA) == DATA
    assert registry.requests == []


@pytest.mark.parametrize("behaviour", [cut_at(180_000), chunked_cut_at(180_000)])
def test_a_connection_that_breaks_is_resumed(
    registry: BadRegistry, puller: RegistryClient, behaviour: Behaviour
) -> None:
    """Closed at 60%, with a length or chunked: the rest is asked for, with If-Range, and the hash goes on."""
    registry.on("/blobs/", behaviour, times=1)
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE) == DATA
    assert ranges(registry) == [None, "bytes=180000-"]
    assert registry.requests[1].headers["if-range"] == f'"{DIGEST}"'


def test_a_partial_file_is_gone_on_with(registry: BadRegistry, puller: RegistryClient) -> None:
    """What an earlier transfer left is hashed again, and only the rest is asked for."""
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE, there=DATA[:1000]) == DATA
    assert ranges(registry) == ["bytes=1000-"]


@pytest.mark.parametrize("there", [flip(DATA[:1000]), flip(DATA), DATA + b"x"])
def test_a_partial_file_that_is_wrong(registry: BadRegistry, puller: RegistryClient, there: bytes) -> None:
    """Wrong, complete but wrong, or too long: it is dropped, and the blob arrives whole."""
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE, there=there) == DATA
    assert ranges(registry)[-1] is None


def bad_range(value: str) -> Behaviour:
    """206 with another part than was asked for."""

    def behave(call: Call) -> bool:
        if call.answer.status == 206:
            call.answer.headers["Content-Range"] = value
            if not value:
                del call.answer.headers["Content-Range"]
        return False

    return behave


@pytest.mark.parametrize(
    "behaviour",
    [
        ignore_range,
        reply(416, Content_Range=f"bytes */{SIZE}"),
        bad_range(f"bytes 0-{SIZE - 1}/{SIZE}"),
        bad_range(f"bytes 999-{SIZE - 1}/{SIZE}"),
        bad_range(f"bytes 1000-{SIZE - 1}/{SIZE + 1}"),
        bad_range(f"bytes 1000-{SIZE}/*"),
        bad_range("lines 1000-2000/3000"),
        bad_range(""),
    ],
    ids=["200", "416", "from-zero", "one-off", "other-total", "beyond", "other-unit", "none"],
)
def test_a_range_that_is_not_kept_means_from_the_start(
    registry: BadRegistry, puller: RegistryClient, behaviour: Behaviour
) -> None:
    """A resume that is answered with anything but the part asked for starts again from zero, and comes right."""
    registry.on("/blobs/", cut_at(1000), times=1)
    registry.on("/blobs/", behaviour, times=1)
    told: list[int] = []
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE, received=told.append) == DATA
    assert ranges(registry)[:2] == [None, "bytes=1000-"]
    assert 0 in told


def test_an_etag_that_changed(registry: BadRegistry, puller: RegistryClient) -> None:
    """If-Range with another tag gets the whole blob, which is taken from its start; weak tags are not used."""
    for tag, sent in (('"other"', '"other"'), ('W/"weak"', None)):
        registry.requests.clear()
        registry.on("/blobs/", tagged_and_cut(tag), times=1)
        assert pull_blob(puller, image(registry.host), DIGEST, SIZE) == DATA
        assert registry.requests[-1].headers.get("if-range") == sent


def tagged_and_cut(tag: str) -> Behaviour:
    """The first 1000 bytes, under that ETag."""

    def behave(call: Call) -> bool:
        call.answer.headers["ETag"] = tag
        call.answer.body = call.answer.body[:1000]
        return False

    return behave


def test_truncation_ends_after_five_tries(registry: BadRegistry, puller: RegistryClient) -> None:
    """A connection that breaks each time, with little to show for it, is an infrastructure error after five."""
    registry.on("/blobs/", cut_at(100))
    with pytest.raises(ExecutorError) as caught:
        pull_blob(puller, image(registry.host), DIGEST, SIZE)
    assert caught.value.reason == "truncated"
    assert caught.value.failure_class is FailureClass.INFRASTRUCTURE
    assert ranges(registry) == [None, *(f"bytes={count}00-" for count in range(1, 5))]


def test_tries_that_bring_much_do_not_count(tmp_path: Path) -> None:
    """A flaky line gets a large blob through in more than five pieces."""
    data = random.Random(5).randbytes(8 << 20)
    with BadRegistry() as server:
        digest = server.add_blob(data)
        server.on("/blobs/", cut_at(1 << 20))
        puller = client(tmp_path)
        assert pull_blob(puller, image(server.host), digest, len(data)) == data
        puller.close()
        assert len(server.requests) == 8


def test_a_chunked_answer_without_a_length(registry: BadRegistry, puller: RegistryClient) -> None:
    """No Content-Length is no obstacle: the size is known from the manifest."""
    registry.on("/blobs/", chunked)
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE) == DATA


def test_a_flipped_bit_is_tried_once_more(registry: BadRegistry, puller: RegistryClient) -> None:
    """A wrong digest at the right size is fetched again from scratch; right the second time is right."""
    registry.on("/blobs/", with_body(flip), times=1)
    assert pull_blob(puller, image(registry.host), DIGEST, SIZE) == DATA
    assert ranges(registry) == [None, None]


def test_a_wrong_digest_is_refused(registry: BadRegistry, puller: RegistryClient) -> None:
    """Wrong twice is refused as what it is, and nothing of it stays in the file."""
    registry.on("/blobs/", with_body(flip))
    with tempfile.TemporaryFile() as file:
        with pytest.raises(SandboxError) as caught:
            puller.blob(image(registry.host), DIGEST, SIZE, file.fileno(), Counting(), lambda total: None)
        assert os.fstat(file.fileno()).st_size == 0
    assert caught.value.reason == "digest_mismatch"
    assert caught.value.failure_class is FailureClass.CONFIGURATION
    assert len(registry.requests) == 2


@pytest.mark.parametrize("also", [None, chunked])
def test_more_bytes_than_the_size_are_cut_off(
    registry: BadRegistry, puller: RegistryClient, also: Behaviour | None
) -> None:
    """A blob longer than its descriptor says is refused: at once when it says so, else at the first byte more."""

    def longer(call: Call) -> bool:
        call.answer.body = DATA + bytes(64 << 20)
        call.answer.length = None if also else len(call.answer.body)
        return False

    registry.on("/blobs/", longer)
    most = [0]
    with pytest.raises(SandboxError) as caught:
        pull_blob(puller, image(registry.host), DIGEST, SIZE, received=lambda total: most.append(total))
    assert caught.value.reason == "size_mismatch"
    assert max(most) <= SIZE
    assert len(registry.requests) == 1


def test_a_shorter_blob_is_of_another_size(registry: BadRegistry, puller: RegistryClient) -> None:
    """An honest, shorter length is a size that disagrees, not a truncation."""
    registry.on("/blobs/", with_body(lambda data: data[:-1]))
    with pytest.raises(SandboxError) as caught:
        pull_blob(puller, image(registry.host), DIGEST, SIZE)
    assert caught.value.reason == "size_mismatch"
    assert len(registry.requests) == 1


def test_an_encoding_is_refused(registry: BadRegistry, puller: RegistryClient) -> None:
    """Bytes in a Content-Encoding are not those the digest is of."""
    registry.on("/blobs/", with_headers(Content_Encoding="gzip"))
    with pytest.raises(SandboxError) as caught:
        pull_blob(puller, image(registry.host), DIGEST, SIZE)
    assert caught.value.reason == "content_encoding"


@pytest.fixture
def impatient(tmp_path: Path) -> Iterator[RegistryClient]:
    """A client that takes a third of a second for a stall."""
    made = client(tmp_path, timings=IMPATIENT)
    yield made
    made.close()


@pytest.mark.parametrize("behaviour", [stall_at(1000), silence])
def test_a_stalled_socket_is_left(registry: BadRegistry, impatient: RegistryClient, behaviour: Behaviour) -> None:
    """A connection gone quiet is dropped after the idle time, and the rest comes over another."""
    registry.on("/blobs/", behaviour, times=1)
    assert pull_blob(impatient, image(registry.host), DIGEST, SIZE) == DATA
    assert len(registry.requests) > 1


def test_stalling_for_ever_ends(registry: BadRegistry, impatient: RegistryClient) -> None:
    """A registry that stalls each time is a typed error that says so."""
    registry.on("/blobs/", stall_at(10))
    with pytest.raises(ExecutorError) as caught:
        pull_blob(impatient, image(registry.host), DIGEST, SIZE)
    assert caught.value.reason == "stalled"
    assert len(registry.requests) == 3


def test_dribbling_ends(registry: BadRegistry, tmp_path: Path) -> None:
    """A byte now and then, each within the idle time, is stalled all the same: a minimum rate is asked for."""
    registry.on("/blobs/", dribble(0.05))
    slow = client(tmp_path, timings=replace(IMPATIENT, idle=10))
    with pytest.raises(ExecutorError) as caught:
        pull_blob(slow, image(registry.host), DIGEST, SIZE)
    slow.close()
    assert caught.value.reason == "stalled"


def test_a_missing_blob(registry: BadRegistry, puller: RegistryClient) -> None:
    """404 is not found, once, naming blob and registry."""
    other = f"sha256:{'0' * 64}"
    with pytest.raises(SandboxError, match="BLOB_UNKNOWN") as caught:
        pull_blob(puller, image(registry.host), other, 5)
    assert caught.value.reason == "not_found"
    assert other in caught.value.brief
    assert registry.host in caught.value.brief
    assert len(registry.requests) == 1


def test_a_full_disk_is_the_hosts(registry: BadRegistry, puller: RegistryClient) -> None:
    """A disk without space is named as that, and no other try or mirror is asked."""
    with open("/dev/full", "r+b", buffering=0) as full, pytest.raises(ExecutorError) as caught:
        puller.blob(image(registry.host), DIGEST, SIZE, full.fileno(), Counting(), lambda total: None)
    assert caught.value.reason == "no_space"
    assert len(registry.requests) == 1


def test_four_blobs_at_once(tmp_path: Path) -> None:
    """One client serves several threads; each file holds its own blob."""
    blobs = [random.Random(seed).randbytes(400_000) for seed in range(4)]
    got: dict[int, bytes] = {}
    with BadRegistry() as server:
        digests = [server.add_blob(data) for data in blobs]
        server.on("/blobs/", cut_at(100_000), times=4)
        puller = client(tmp_path)

        def pull(number: int) -> None:
            got[number] = pull_blob(puller, image(server.host), digests[number], 400_000)

        threads = [threading.Thread(target=pull, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        puller.close()
    assert got == dict(enumerate(blobs))
