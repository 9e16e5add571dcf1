"""The lock file of images: what it holds, what it refuses to read, and that nobody's entries get lost."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_executor.image_lock import MAX_BYTES, ImageLock
from forgeyard_model.errors import ExecutorError, InvalidRequest

DIGESTS = tuple(f"sha256:{letter * 64}" for letter in "abcdef")
APP = ("localhost:5000/app:1", "")
PINNED = f"localhost:5000/app@{DIGESTS[0]}"


def test_what_is_added_is_read_again(tmp_path: Path) -> None:
    """Entries come back as they were, with and without a platform, and the file opens with words for its reader."""
    lock = ImageLock.read(tmp_path / "images.lock")
    pins = {APP: PINNED}
    pins[("docker.io/library/redis:7", "linux/arm64")] = f"docker.io/library/redis@{DIGESTS[1]}"
    pins[("oci:/images/a 'b' \"c\": #d:x", "")] = f"oci:/images/a 'b' \"c\": #d@{DIGESTS[2]}"
    written = lock.add(pins)
    assert written.pins == ImageLock.read(lock.path).pins == pins
    assert lock.path.read_text().startswith("# ")
    assert (lock.path.stat().st_mode & 0o777) == 0o644


def test_the_text_does_not_depend_on_the_order(tmp_path: Path) -> None:
    """Two people who add the same images in another order get the same bytes."""
    pins = [
        ((f"localhost/{name}:1", ""), f"localhost/{name}@{digest}")
        for name, digest in zip("xyz", DIGESTS, strict=False)
    ]
    one, other = tmp_path / "one", tmp_path / "other"
    for pin in pins:
        ImageLock.read(one).add(dict([pin]))
    ImageLock.read(other).add(dict(reversed(pins)))
    assert one.read_bytes() == other.read_bytes()


def test_an_entry_that_stands_is_not_replaced(tmp_path: Path) -> None:
    """Who comes second takes the digest that stands in the file: all runs after mean the same image."""
    path = tmp_path / "images.lock"
    first, second = ImageLock.read(path), ImageLock.read(path)
    first.add({APP: PINNED})
    assert second.add({APP: f"localhost:5000/app@{DIGESTS[1]}"}).pins[APP] == PINNED
    assert ImageLock.read(path).pins == {APP: PINNED}


def _add_ten(path: Path, number: int) -> None:
    for index in range(10):
        name = f"localhost/{number}-{index}"
        ImageLock.read(path).add({(f"{name}:1", ""): f"{name}@{DIGESTS[0]}"})


def test_writers_at_the_same_time_lose_nothing(tmp_path: Path) -> None:
    """Four processes that add ten entries each leave forty, and no other file."""
    path = tmp_path / "images.lock"
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_add_ten, args=(path, number)) for number in range(4)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert [writer.exitcode for writer in writers] == [0] * 4
    assert len(ImageLock.read(path).pins) == 40
    assert os.listdir(tmp_path) == ["images.lock"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no `version: 1`"),
        ("[]", "no `version: 1`"),
        ("version: 2\nimages: []", "no `version: 1`"),
        ("version: 1", "the list `images`"),
        ("version: 1\nimages: {}", "the list `images`"),
        ("version: 1\nimages: []\nmore: 1", "the list `images`"),
        ("version: 1\nimages: [1]", "entry 1 needs"),
        ("version: 1\nimages:\n- {reference: a}", "entry 1 needs"),
        ("version: 1\nimages:\n- {reference: a, pinned: 7}", "no text"),
        (f"version: 1\nimages:\n- {{reference: 'a:1', pinned: 'b@{DIGESTS[0]}'}}", "no digest of 'a:1'"),
        ("version: 1\nimages:\n- {reference: 'a:1', pinned: 'a:2'}", "no digest of"),
        ("version: 1\nimages:\n- {reference: 'a:1', pinned: 'a@sha256:12'}", "entry 1"),
        ("version: 1\nimages:\n- {reference: 'A:1', pinned: 'A@sha256:12'}", "entry 1"),
        (
            f"version: 1\nimages:\n- {{reference: 'a:1', pinned: 'a@{DIGESTS[0]}'}}\n"
            f"- {{reference: 'a:1', pinned: 'a@{DIGESTS[1]}'}}",
            "a second time",
        ),
        ("version: 1\nimages:\n<<<<<<< ours\n- a", "line 4"),
        ("version: !!python/object/apply:os.system [true]", "line 1"),
        ("[" * 5000, "nesting"),
        ("\0", "unacceptable character"),
        ("#" * (MAX_BYTES + 1), "larger than 1 MiB"),
    ],
)
def test_a_damaged_lock_is_one_clear_line(tmp_path: Path, text: str, why: str) -> None:
    """What is no lock is refused with the file, the place and the cure, and is left as it was."""
    path = tmp_path / "images.lock"
    path.write_text(text)
    with pytest.raises(InvalidRequest, match="repair it, or remove it") as caught:
        ImageLock.read(path)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(InvalidRequest):
        ImageLock(path).add({APP: PINNED})
    assert path.read_text() == text


@given(st.binary(max_size=300) | st.text(max_size=200).map(lambda text: f"version: 1\nimages:\n- {text}".encode()))
def test_any_bytes_are_a_lock_or_refused(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    """No file makes the reader fail in another way."""
    path = tmp_path_factory.getbasetemp() / f"any-{os.getpid()}.lock"
    path.write_bytes(data)
    with suppress(InvalidRequest):
        assert ImageLock.read(path).path == path


def test_a_directory_that_can_not_be_written_is_an_error_of_ours(tmp_path: Path) -> None:
    """A lock in a directory that is not there: typed, with the path and a cure."""
    lock = ImageLock.read(tmp_path / "none" / "images.lock")
    with pytest.raises(ExecutorError, match="can't be written") as caught:
        lock.add({APP: PINNED})
    assert caught.value.reason == "lock_file"


def test_a_lock_behind_a_link_stays_there(tmp_path: Path) -> None:
    """The file that a link points to is written; the link stays a link."""
    real, link = tmp_path / "kept" / "real.lock", tmp_path / "images.lock"
    real.parent.mkdir()
    link.symlink_to(real)
    ImageLock.read(link).add({APP: PINNED})
    assert link.is_symlink()
    assert ImageLock.read(real).pins == {APP: PINNED}
