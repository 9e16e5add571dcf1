"""Admission: the host is never promised twice, nobody waits for ever, and what is given back can be had again."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from forgeyard_api.serve.admission import Admission, Capacity, Claim
from forgeyard_model.config_serve import TenantShare
from forgeyard_model.errors import ExecutorError, InvalidRequest
from forgeyard_model.limits import ResourceReservation

GIB = 1 << 30
TENANTS = ("red", "green", "blue")
SHARES = {"red": TenantShare(slots=1, cpus=2.0), "green": TenantShare(memory=2 * GIB)}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def room(**changes: object) -> Capacity:
    """A small host."""
    values = {"slots": 3, "cpus": 4.0, "memory": 4 * GIB, "disk": 8 * GIB, "pids": 100, "queue": 20, "aging": 60.0}
    return Capacity(**{**values, "tenants": SHARES, **changes})  # type: ignore[arg-type]  # fields by name


reservations = st.builds(
    ResourceReservation,
    cpus=st.sampled_from((0.1, 0.5, 1.0, 2.0, 4.0)),
    memory=st.sampled_from((0, GIB // 2, GIB, 3 * GIB)),
    disk=st.sampled_from((None, GIB, 8 * GIB)),
    pids=st.sampled_from((None, 10, 100)),
)


class Host(RuleBasedStateMachine):
    """Attempts that come, run and go in any order, on a host that may shrink and grow."""

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock()
        self.capacity = room()
        self.admission = Admission(self.capacity, clock=self.clock)
        self.waiting: dict[str, Claim] = {}
        self.running: dict[str, Claim] = {}
        self.restored: set[str] = set()
        self.number = 0

    @initialize(restored=st.lists(reservations, max_size=2))
    def adopt(self, restored: list[ResourceReservation]) -> None:
        """Attempts that ran before there was a server count, whether or not they fit."""
        for reserved in restored:
            claim = self._claim("blue", reserved, 0)
            self.admission.restore(claim)
            self.running[claim.key] = claim
            self.restored.add(claim.key)

    @rule(tenant=st.sampled_from(TENANTS), reserved=reservations, priority=st.integers(-3, 3))
    def come(self, tenant: str, reserved: ResourceReservation, priority: int) -> None:
        """One more; a full queue takes none, and is not changed by it."""
        claim = self._claim(tenant, reserved, priority)
        try:
            self.admission.check(claim)
        except InvalidRequest:
            return
        if len(self.waiting) == self.capacity.queue:
            with pytest.raises(ExecutorError) as caught:
                self.admission.enqueue(claim)
            assert caught.value.reason == "queue_full"
        else:
            self.admission.enqueue(claim)
            self.waiting[claim.key] = claim

    @rule()
    def admit(self) -> None:
        """Whoever is let in was waiting, and fits beside all others."""
        before = dict(self.running)
        for claim in self.admission.admit():
            assert self.waiting.pop(claim.key) == claim
            self.running[claim.key] = claim
            self._fits()
        assert before.items() <= self.running.items()

    @precondition(lambda self: self.running or self.waiting)
    @rule(data=st.data(), twice=st.booleans())
    def end(self, data: st.DataObject, twice: bool) -> None:
        """One ends, or is cancelled while it waits; saying so twice changes nothing."""
        key = data.draw(st.sampled_from(sorted({*self.running, *self.waiting})))
        for _ in range(1 + twice):
            self.admission.release(key)
        self.running.pop(key, None)
        self.waiting.pop(key, None)
        self.restored.discard(key)

    @rule(slots=st.integers(1, 5), cpus=st.sampled_from((1.0, 4.0, 8.0)), aging=st.sampled_from((0.0, 1.0, 60.0)))
    def reload(self, slots: int, cpus: float, aging: float) -> None:
        """Other bounds. What runs goes on; from here on nobody is let in beyond the new ones."""
        self.capacity = room(slots=slots, cpus=cpus, aging=aging)
        self.admission.resize(self.capacity)

    @rule(seconds=st.floats(0, 1000))
    def wait(self, seconds: float) -> None:
        """Time passes."""
        self.clock.now += seconds

    @invariant()
    def counts_are_those_of_who_is_there(self) -> None:
        """Nothing is lost, nothing is counted twice."""
        assert (self.admission.running, self.admission.waiting) == (len(self.running), len(self.waiting))
        used = self.admission.used()
        assert used.cpus == pytest.approx(sum(claim.reserved.cpus for claim in self.running.values()))
        assert used.memory == sum(claim.reserved.memory for claim in self.running.values())
        assert used.disk == sum(claim.reserved.disk or 0 for claim in self.running.values())
        assert used.pids == sum(claim.reserved.pids or 0 for claim in self.running.values())

    @invariant()
    def positions_are_an_order(self) -> None:
        """Each of those that wait has a place of its own, and nobody else has one."""
        places = sorted(self.admission.position(key) for key in self.waiting)
        assert places == list(range(1, len(self.waiting) + 1))
        assert not any(self.admission.position(key) for key in self.running)

    def teardown(self) -> None:
        """When all that run have ended, everybody who waits gets in, in turn: nobody starves."""
        self.capacity = room()
        self.admission.resize(self.capacity)
        for _ in range(len(self.waiting) + 1):
            for key in list(self.running):
                self.admission.release(key)
                del self.running[key]
            self.restored.clear()
            self.admit()
        assert not self.waiting
        for key in list(self.running):
            self.admission.release(key)
        assert self.admission.used() == ResourceReservation(pytest.approx(0.0, abs=1e-9), 0, 0, 0)

    def _claim(self, tenant: str, reserved: ResourceReservation, priority: int) -> Claim:
        self.number += 1
        return Claim(f"attempt-{self.number}", tenant, reserved, priority)

    def _fits(self) -> None:
        """Whatever was there before this server may be too much; whoever was let in is not."""
        claims = [claim.reserved for claim in self.running.values()]
        capacity = self.capacity
        assert len(claims) <= capacity.slots
        assert sum(claim.cpus for claim in claims) <= (capacity.cpus or 0) + 1e-6
        assert sum(claim.memory for claim in claims) <= (capacity.memory or 0)
        assert sum(claim.disk or 0 for claim in claims) <= (capacity.disk or 0)
        assert sum(claim.pids or 0 for claim in claims) <= (capacity.pids or 0)
        for tenant, share in SHARES.items():
            theirs = [claim.reserved for claim in self.running.values() if claim.tenant == tenant]
            assert share.slots is None or len(theirs) <= share.slots
            assert share.cpus is None or sum(claim.cpus for claim in theirs) <= share.cpus + 1e-6
            assert share.memory is None or sum(claim.memory for claim in theirs) <= share.memory


TestHost = Host.TestCase
TestHost.settings = settings(max_examples=60, stateful_step_count=30)


SMALL = ResourceReservation(0.5, GIB // 4)
LARGE = ResourceReservation(4.0, 4 * GIB)


def test_a_large_attempt_is_not_passed_for_ever() -> None:
    """One that needs the whole host gets it, while small ones of the same priority keep coming."""
    clock = Clock()
    admission = Admission(room(slots=100, queue=1000), clock=clock)
    admission.restore(Claim("first", "blue", SMALL))
    admission.enqueue(Claim("large", "blue", LARGE))
    admission.enqueue(Claim("small", "blue", SMALL))
    assert admission.admit() == ()  # the small one would fit
    admission.release("first")
    assert [claim.key for claim in admission.admit()] == ["large"]


@settings(max_examples=10)
@given(urgency=st.integers(1, 10))
def test_waiting_is_worth_priority(urgency: int) -> None:
    """An attempt of low priority runs although urgent ones never cease to come, and not before its time."""
    clock = Clock()
    admission = Admission(room(slots=1, queue=2000, aging=5.0), clock=clock)
    admission.restore(Claim("first", "blue", SMALL))
    admission.enqueue(Claim("patient", "blue", SMALL))
    running, order = "first", []
    for number in range(200):
        clock.now += 1.0
        admission.enqueue(Claim(f"urgent-{number}", "blue", SMALL, urgency))
        admission.release(running)
        (claim,) = admission.admit()
        running = claim.key
        order.append(running)
    assert "patient" in order
    assert order[0] == "urgent-0"


def test_without_aging_order_is_by_priority_then_time() -> None:
    """Equal ones run in the order they came in."""
    clock = Clock()
    admission = Admission(room(slots=10, aging=0.0), clock=clock)
    for number, priority in enumerate((0, 5, 0, 5)):
        clock.now += 1.0
        admission.enqueue(Claim(str(number), "blue", SMALL, priority))
    assert [admission.position(str(number)) for number in range(4)] == [3, 1, 4, 2]
    assert [claim.key for claim in admission.admit()] == ["1", "3", "0", "2"]


def test_a_tenant_at_its_share_holds_back_itself_alone() -> None:
    """Another tenant's attempts pass it, and its next one runs when its first has ended."""
    admission = Admission(room())
    for key, tenant in (("r1", "red"), ("r2", "red"), ("b1", "blue")):
        admission.enqueue(Claim(key, tenant, SMALL))
    assert [claim.key for claim in admission.admit()] == ["r1", "b1"]
    admission.release("b1")
    assert admission.admit() == ()
    admission.release("r1")
    assert [claim.key for claim in admission.admit()] == ["r2"]


def test_unnamed_tenants_have_the_default_share_each() -> None:
    """Two tenants of one default share do not share it."""
    admission = Admission(room(default_share=TenantShare(slots=1)))
    for key, tenant in (("a1", "a"), ("a2", "a"), ("b1", "b")):
        admission.enqueue(Claim(key, tenant, SMALL))
    admitted = Counter(claim.tenant for claim in admission.admit())
    assert admitted == {"a": 1, "b": 1}


@pytest.mark.parametrize(
    ("reserved", "field"),
    [
        (ResourceReservation(5.0, 0), "resources.cpus"),
        (ResourceReservation(0.1, 5 * GIB), "resources.memory"),
        (ResourceReservation(0.1, 0, disk=9 * GIB), "resources.disk"),
        (ResourceReservation(0.1, 0, pids=101), "resources.pids"),
    ],
)
def test_what_can_never_run_is_refused(reserved: ResourceReservation, field: str) -> None:
    """At once, by its field, instead of a wait that never ends."""
    with pytest.raises(InvalidRequest) as caught:
        Admission(room()).check(Claim("a", "blue", reserved))
    assert caught.value.field == field


def test_a_smaller_host_lets_run_what_runs() -> None:
    """A reload with less capacity ends nothing; nothing more comes in until there is room."""
    admission = Admission(room())
    for number in range(3):
        admission.enqueue(Claim(str(number), "blue", SMALL))
    assert len(admission.admit()) == 3
    admission.resize(room(slots=1))
    admission.enqueue(Claim("next", "blue", SMALL))
    for number in range(3):
        assert admission.admit() == ()
        admission.release(str(number))
    assert [claim.key for claim in admission.admit()] == ["next"]


def test_what_can_never_run_any_more_holds_nobody_up() -> None:
    """An attempt that a reload left no room for waits; those behind it do not wait for it."""
    admission = Admission(room())
    admission.enqueue(Claim("large", "blue", LARGE))
    admission.resize(room(cpus=2.0))
    admission.enqueue(Claim("small", "blue", SMALL))
    assert [claim.key for claim in admission.admit()] == ["small"]
    admission.release("small")
    admission.resize(room())
    assert [claim.key for claim in admission.admit()] == ["large"]


def test_a_reload_of_aging_reorders_the_queue() -> None:
    """Positions and order are of the new bounds at once."""
    clock = Clock()
    admission = Admission(room(aging=1.0), clock=clock)
    admission.enqueue(Claim("old", "blue", SMALL))
    clock.now += 10.0
    admission.enqueue(Claim("urgent", "blue", SMALL, 5))
    assert [admission.position(key) for key in ("old", "urgent")] == [1, 2]
    admission.resize(room(aging=60.0))
    assert [admission.position(key) for key in ("old", "urgent")] == [2, 1]
    admission.release("urgent")
    assert [admission.position(key) for key in ("old", "urgent")] == [1, 0]
