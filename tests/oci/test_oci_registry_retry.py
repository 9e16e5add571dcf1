"""Waiting and trying again: Retry-After in all its forms, the cap on tries, the budget, cancellation."""

from __future__ import annotations

import email.utils
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from bad_registry import BadRegistry, drop, reply, silence, stall_at
from registry_clients import IMPATIENT, Counting, client, image, pull_blob

from forgeyard_model.errors import ExecutorError, FailureClass
from forgeyard_oci.registry.budget import Budget, TransferCancelled, TransferTimeout
from forgeyard_oci.registry.client import RegistryClient
from forgeyard_oci.registry.faults import failure
from forgeyard_oci.registry.retry import Timings, Transient, Tries, retry_after


@pytest.fixture
def registry() -> Iterator[BadRegistry]:
    """A registry with one image of no content."""
    with BadRegistry() as server:
        server.add_manifest(b"{}", "1")
        yield server


@pytest.fixture
def puller(tmp_path: Path) -> Iterator[RegistryClient]:
    """A client with no patience."""
    made = client(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("text", [None, "", "soon", "985.86µs", "-3", "1e3", "1.5", "9" * 400, "Mon, 99 Foo", "٣"])
def test_a_retry_after_that_says_nothing(text: str | None) -> None:
    """What is neither a number of seconds nor a date counts as absent."""
    assert retry_after(text) is None


def test_retry_after_in_seconds_and_as_a_date() -> None:
    """Both forms of the header are understood; a date in the past means now."""
    assert retry_after(" 7 ") == 7
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    later = retry_after(email.utils.formatdate(time.time() + 100, usegmt=True))
    assert later is not None
    assert 95 < later <= 100


def test_waits_grow_and_differ() -> None:
    """Waits double up to a bound, with jitter, and the tries are counted."""
    budget, timings = Counting(), Timings(tries=8)
    tries, trouble = Tries(timings, budget), Transient(failure("x", "x"))
    for _ in range(7):
        tries.again(trouble)
    with pytest.raises(ExecutorError):
        tries.again(trouble)
    for wait, most in zip(budget.waits, (0.5, 1, 2, 4, 8, 8, 8), strict=True):
        assert most / 2 <= wait <= most
    assert len(set(budget.waits)) > 1


def test_a_429_is_waited_out(registry: BadRegistry, puller: RegistryClient) -> None:
    """The wait a registry asks for is kept, with jitter on top."""
    registry.on("/manifests/", reply(429, Retry_After="3"), times=2)
    budget = Counting()
    assert puller.manifest(image(registry.host), "1", budget).data == b"{}"
    assert [3 <= wait <= 4 for wait in budget.waits] == [True, True]


@pytest.mark.parametrize("header", [None, "nonsense"])
def test_a_429_without_a_wait_is_bounded(registry: BadRegistry, puller: RegistryClient, header: str | None) -> None:
    """Five tries, then a typed error that names the registry and is not "access denied"."""
    headers = {} if header is None else {"Retry_After": header}
    registry.on("/manifests/", reply(429, b'{"errors":[{"code":"TOOMANYREQUESTS","message":"985.86us"}]}', **headers))
    with pytest.raises(ExecutorError) as caught:
        puller.manifest(image(registry.host), "1", Counting())
    assert caught.value.reason == "rate_limited"
    assert registry.host in caught.value.brief
    assert "TOOMANYREQUESTS" in caught.value.details
    assert caught.value.failure_class is FailureClass.INFRASTRUCTURE
    assert len(registry.requests) == 5


def test_a_wait_longer_than_the_budget_is_not_begun(registry: BadRegistry, puller: RegistryClient) -> None:
    """Hours are told at once, as a rate limit and not as a time-out."""
    registry.on("/manifests/", reply(429, Retry_After="3600"))
    for budget in (Counting.within(30), Counting()):
        with pytest.raises(ExecutorError) as caught:
            puller.manifest(image(registry.host), "1", budget)
        assert caught.value.reason == "rate_limited"
        assert "3600 s" in caught.value.details
    assert len(registry.requests) == 2


@pytest.mark.parametrize("status", [408, 500, 502, 503, 504])
def test_server_errors_are_tried_again(registry: BadRegistry, puller: RegistryClient, status: int) -> None:
    """A passing server error is not seen by the caller."""
    registry.on("/manifests/", reply(status), times=4)
    assert puller.manifest(image(registry.host), "1", Counting()).data == b"{}"


def test_server_errors_end(registry: BadRegistry, puller: RegistryClient) -> None:
    """A lasting one is a typed error after five tries, and another client error after one."""
    registry.on("/manifests/", reply(503), times=5)
    with pytest.raises(ExecutorError, match="HTTP 503") as caught:
        puller.manifest(image(registry.host), "1", Counting())
    assert caught.value.reason == "registry_error"
    registry.on("/manifests/", reply(418), times=1)
    with pytest.raises(ExecutorError, match="HTTP 418"):
        puller.manifest(image(registry.host), "1", Counting())
    assert len(registry.requests) == 6


def test_connections_that_break_are_tried_again(registry: BadRegistry, puller: RegistryClient) -> None:
    """A connection closed without an answer is one more try; a port nobody listens on is a typed error."""
    registry.on("/manifests/", drop, times=2)
    assert puller.manifest(image(registry.host), "1", Counting()).data == b"{}"
    budget = Counting()
    with pytest.raises(ExecutorError, match="Connection refused") as caught:
        puller.manifest(image("localhost:1"), "1", budget)
    assert caught.value.reason == "registry_unreachable"
    assert len(budget.waits) == 4


def test_silence_ends(registry: BadRegistry, tmp_path: Path) -> None:
    """A registry that takes the request and says nothing is given up after the idle time."""
    registry.on("/manifests/", silence)
    impatient = client(tmp_path, timings=IMPATIENT)
    with pytest.raises(ExecutorError, match="timed out"):
        impatient.manifest(image(registry.host), "1", Counting())
    impatient.close()
    assert len(registry.requests) == 3


def cancel_when_asked(registry: BadRegistry, budget: Budget, count: int) -> threading.Thread:
    """Cancel once `count` requests have come in."""

    def run() -> None:
        registry.wait_for(count)
        budget.cancelled.set()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("where", ["headers", "body", "backoff"])
def test_cancelling_takes_about_a_second(registry: BadRegistry, tmp_path: Path, where: str) -> None:
    """Whatever is waited for, an answer, more of one, or the next try: cancelling ends it, long before any time-out."""
    patient = client(tmp_path, timings=Timings(first_wait=60, most_wait=60))
    digest = registry.add_blob(bytes(1000))
    registry.on("/blobs/", {"headers": silence, "body": stall_at(10), "backoff": reply(500)}[where])
    budget = Budget.within(50)
    canceller = cancel_when_asked(registry, budget, 1)
    with pytest.raises(TransferCancelled) as caught:
        pull_blob(patient, image(registry.host), digest, 1000, budget=budget)
    left = budget.remaining()
    canceller.join()
    patient.close()
    assert left is not None
    assert left > 45
    assert caught.value.failure_class is FailureClass.CANCELLED


@pytest.mark.parametrize("behaviour", [silence, stall_at(10)])
def test_the_deadline_holds(registry: BadRegistry, tmp_path: Path, behaviour: object) -> None:
    """A budget of half a second ends a request whose own time-out is half a minute."""
    digest = registry.add_blob(bytes(1000))
    registry.on("/blobs/", behaviour)  # type: ignore[arg-type]  # a Behaviour, which parametrize does not know
    patient, started = client(tmp_path, timings=Timings()), time.monotonic()
    with pytest.raises(TransferTimeout) as caught:
        pull_blob(patient, image(registry.host), digest, 1000, budget=Budget.within(0.5))
    patient.close()
    assert time.monotonic() - started < 5
    assert caught.value.failure_class is FailureClass.TIMEOUT


def test_nothing_is_asked_with_no_time_left(registry: BadRegistry, puller: RegistryClient) -> None:
    """A budget that is over before the start means no request."""
    with pytest.raises(TransferTimeout):
        puller.manifest(image(registry.host), "1", Budget.within(0))
    assert registry.requests == []


def test_the_shipped_patience() -> None:
    """The defaults are those that are documented."""
    real = Timings()
    assert (real.connect, real.idle, real.tries) == (10, 30, 5)
    assert (real.slow_window, real.slow_rate) == (60, 1024)
