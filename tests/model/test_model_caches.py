"""Caches as a job names them: keys, places, profiles, what a result says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forgeyard_model.cache import CacheMode, CacheReport, CacheRequest, checked_caches, parse_cache
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.identity import AttemptContext
from forgeyard_model.job import Job, Step
from forgeyard_model.policy import ApprovedHostPath
from forgeyard_model.profile import ExecutionProfile
from forgeyard_model.request import ExecutionRequest, PreparedWorkspace, impurities, request_from_job

RO, RW = CacheMode.RO, CacheMode.RW
JOB = Job([Step("true")], rootfs="host", caches=(CacheRequest("pip", "/c"),))


def request(job: Job, *, anywhere: bool = False) -> ExecutionRequest:
    """`job` as a request."""
    context, workspace = AttemptContext("a"), PreparedWorkspace()
    return request_from_job(job, context=context, workspace=workspace, caches_anywhere=anywhere)


@pytest.mark.parametrize(
    ("text", "cache"),
    [
        ("pip=/c", CacheRequest("pip", "/c", RW)),
        ("pip=/c:ro", CacheRequest("pip", "/c", RO)),
        ("npm/main v=1=/c/d:rw", CacheRequest("npm/main v=1", "/c/d", RW)),
        ("k=/a:b", CacheRequest("k", "/a:b", RW)),
    ],
)
def test_a_flag(text: str, cache: CacheRequest) -> None:
    """KEY=PATH, and a mode after the last colon."""
    assert parse_cache(text) == cache


@pytest.mark.parametrize("text", ["", "pip", "pip=", "pip=c", "=/c", "p\n=/c", "p=/../c", "p=/proc/x", "p=/", " p=/c"])
def test_what_is_no_flag(text: str) -> None:
    """Refused by the flag's name."""
    with pytest.raises(InvalidRequest) as caught:
        parse_cache(text)
    assert caught.value.field == "--cache"


@pytest.mark.parametrize(
    "path", ["/proc", "/sys/x", "/dev/shm", "/.forgeyard", "/etc", "/work/source/a", "/work/output"]
)
def test_places_of_the_sandbox(path: str) -> None:
    """What the sandbox itself has its place in is nobody's to cover."""
    with pytest.raises(InvalidRequest, match="belongs to the sandbox"):
        checked_caches([CacheRequest("k", path)])


@pytest.mark.parametrize("path", ["/", "/work", "/home", "//", "/work/", "/./home", "/tmp", "/work/build"])
def test_places_above_them(path: str) -> None:
    """Neither what would hide one of them."""
    with pytest.raises(InvalidRequest, match=r"would hide|belongs"):
        checked_caches([CacheRequest("k", path)])


@pytest.mark.parametrize(
    "path", ["/home/forgeyard/.cache", "/work/build/x", "/tmp/x", "/root/.m2", "/usr/src", "/etcetera"]
)
def test_places_that_are_fine(path: str) -> None:
    """Below or in the place of the job's writable directories, and anywhere else."""
    assert checked_caches([CacheRequest("k", path)]) == (CacheRequest("k", path),)


@pytest.mark.parametrize(("one", "two"), [("/a", "/a"), ("/a", "/a/b"), ("/a/b", "/a"), ("/a", "//a/./c/")])
def test_no_two_overlap(one: str, two: str) -> None:
    """However they are written; nor with anything else that is mounted."""
    with pytest.raises(InvalidRequest, match="overlaps"):
        checked_caches([CacheRequest("k", one), CacheRequest("l", two)])
    with pytest.raises(InvalidRequest, match="overlaps"):
        checked_caches([CacheRequest("k", one)], taken=[two.rstrip("/").replace("//", "/").replace("/./", "/")])


def test_a_key_stands_once() -> None:
    """Two places of one cache would be saved over each other."""
    with pytest.raises(InvalidRequest, match=r"caches\[1\].key 'k': stands twice"):
        checked_caches([CacheRequest("k", "/a"), CacheRequest("k", "/b")])


@given(key=st.text(max_size=600), path=st.text(max_size=60))
def test_any_text_is_taken_or_refused(key: str, path: str) -> None:
    """No other error, and what is taken is printable and absolute."""
    try:
        (cache,) = checked_caches([CacheRequest(key, path)])
    except InvalidRequest as error:
        cache = CacheRequest(error.field, f"/{error.cure}")
    assert cache.key.isprintable()
    assert cache.path.startswith("/")
    assert ".." not in cache.path.split("/")


@pytest.mark.parametrize("profile", list(ExecutionProfile))
def test_which_profiles_take_something_from_earlier_jobs(profile: ExecutionProfile) -> None:
    """Not those that promise more; the configuration may let all."""
    job = replace(JOB, profile=profile)
    allowed = profile in (ExecutionProfile.DEVELOPMENT, ExecutionProfile.STANDARD_CI)
    if not allowed:
        with pytest.raises(InvalidRequest, match=f"profile {profile.value} takes nothing from earlier jobs"):
            request(job)
    assert request(job, anywhere=not allowed).spec.caches == JOB.caches


def test_a_cache_is_impure_and_named() -> None:
    """In provenance, by key and mode."""
    reasons = impurities(request(replace(JOB, caches=(CacheRequest("a b", "/c"), CacheRequest("r", "/d", RO)))))
    assert reasons == ("host rootfs", "cache a b rw", "cache r ro")


def test_toolchains_have_their_place() -> None:
    """A cache over one is refused when the request is made."""
    toolchain = ApprovedHostPath("/usr", "/toolchains/go")
    with pytest.raises(InvalidRequest, match="overlaps /toolchains/go"):
        request(replace(JOB, toolchains=(toolchain,), caches=(CacheRequest("k", "/toolchains/go/pkg"),)))


def test_what_a_result_says() -> None:
    """One line each."""
    assert str(CacheReport("k", "/c", RO, hit=True)) == "cache k: hit"
    assert (
        str(CacheReport("k", "/c", RW, hit=False, why="the job failed")) == "cache k: miss, not saved: the job failed"
    )
    assert str(CacheReport("k", "/c", RW, hit=True, saved=True)) == "cache k: hit, saved"
