"""What a hostile job does to its resolver: broken packets, floods, slow connections, more names than anybody has."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import time
from ipaddress import IPv4Address

import dns.flags
import dns.message
import dns.rcode
import fake_dns
import pytest
from dns_clients import DB, LOOPBACK, addresses, resolving
from fake_dns import Zone
from hypothesis import example, given, settings
from hypothesis import strategies as st

from forgeyard_model.policy import NetworkDestination, NetworkMode
from forgeyard_networks.dns_codec import Query
from forgeyard_networks.dns_wire import Malformed, NotAnAnswer, address_reply, parse, render
from forgeyard_networks.resolver_audit import MOST_NAMES, OTHERS, DnsAudit, DnsVerdict
from forgeyard_networks.resolver_limits import Bucket, ResolverLimits
from forgeyard_networks.resolver_openings import MOST_OPEN, Openings, TooManyOpen
from forgeyard_networks.resolver_upstream import Upstream, UpstreamLimits

WILD = NetworkDestination("*.example.org")
HEADER = struct.pack(">6H", 7, 0x0100, 1, 0, 0, 0)
QUESTION = b"\x02db\x00\x00\x01\x00\x01"
OPT = b"\x00\x00\x29\x04\xd0\x00\x00\x00\x00\x00\x00"
GOOD = HEADER + QUESTION
BROKEN = {
    "empty": b"",
    "short": HEADER[:11],
    "no question": HEADER,
    "response": struct.pack(">6H", 7, 0x8100, 1, 0, 0, 0) + QUESTION,
    "update": struct.pack(">6H", 7, 0x2900, 1, 0, 0, 0) + QUESTION,
    "two questions": struct.pack(">6H", 7, 0x0100, 2, 0, 0, 0) + QUESTION * 2,
    "answer in it": struct.pack(">6H", 7, 0x0100, 1, 1, 0, 0) + QUESTION,
    "pointer to itself": HEADER + b"\xc0\x0c\x00\x01\x00\x01",
    "pointer ahead": HEADER + b"\xc0\x20\x00\x01\x00\x01" + b"\xc0\x0c" * 20,
    "reserved label": HEADER + b"\x80aa\x00\x00\x01\x00\x01",
    "label past the end": HEADER + b"\x3faaa",
    "name of 300 bytes": HEADER + (b"\x3f" + b"a" * 63) * 5 + b"\x00\x00\x01\x00\x01",
    "no end": HEADER + b"\x01a" * 200,
    "chaos class": HEADER + b"\x02db\x00\x00\x01\x00\x03",
    "trailing": GOOD + b"x",
    "four kilobytes": GOOD + b"x" * 5000,
    "half an OPT": HEADER[:10] + b"\x00\x01" + QUESTION + OPT[:5],
    "OPT that lies": HEADER[:10] + b"\x00\x01" + QUESTION + OPT[:-1] + b"\x09",
    "EDNS 1": HEADER[:10] + b"\x00\x01" + QUESTION + OPT[:6] + b"\x01" + OPT[7:],
    "TSIG": HEADER[:10] + b"\x00\x01" + QUESTION + b"\x00\x00\xfa\x00\xff" + b"\x00" * 6,
}


@given(data=st.binary(max_size=600))
@example(data=GOOD)
def test_any_bytes_are_a_question_or_malformed(data: bytes) -> None:
    """No other exception; a question renders to what a real parser reads."""
    try:
        question = parse(data)
    except Malformed:
        return
    assert question.name.isprintable()
    read = dns.message.from_wire(render(question, address_reply(DB, 5)))
    assert read.id == question.id
    assert len(read.answer) == 1


@given(start=st.sampled_from([GOOD, *BROKEN.values()]), at=st.integers(0, 80), byte=st.integers(0, 255))
def test_a_changed_byte_is_a_question_or_malformed(start: bytes, at: int, byte: int) -> None:
    """Closer to the real thing than random bytes."""
    changed = bytearray(start)
    if changed:
        changed[at % len(changed)] = byte
    with contextlib.suppress(Malformed):
        parse(bytes(changed))


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_no_question_is_malformed(name: str) -> None:
    """Each of them, and what is answered is an error that a real parser reads; responses get nothing."""
    with pytest.raises(Malformed) as caught:
        parse(BROKEN[name])
    if caught.value.reply is not None:
        assert dns.message.from_wire(caught.value.reply).rcode() != dns.rcode.NOERROR
        assert len(caught.value.reply) <= max(12, len(BROKEN[name]) + 11)  # no amplification
    assert (caught.value.reply is None) is (name in ("empty", "short", "response"))


@pytest.mark.parametrize("label", [b"a.db", b"a\nb", b"\xff\xfe", b"\x00", b"a b"])
def test_odd_labels_are_no_other_name_and_no_other_line(label: bytes) -> None:
    """A dot inside a label would otherwise make `a.example.org` of something else."""
    question = parse(HEADER + bytes((len(label),)) + label + b"\x07example\x03org\x00\x00\x01\x00\x01")
    assert question.name.isprintable()
    assert question.name.count(".") == 2


@given(data=st.binary(max_size=300), header=st.booleans())
def test_any_answer_of_a_server_is_read_or_refused(data: bytes, *, header: bool) -> None:
    """Also with the right id and question in front."""
    query = Query("example.org", 1, edns=True)
    start = (
        query.wire[:2] + b"\x81\x80\x00\x01\x00\x02\x00\x00\x00\x00" + query.wire[12:29] if header else query.wire[:2]
    )
    try:
        answer = query.read(start + data)
    except NotAnAnswer:
        return
    if answer is not None and answer.rcode in (0, 3):
        answer.reply(5, answer.addresses)


def test_pointer_loops_in_an_answer_are_refused() -> None:
    """As in a question."""
    query = Query("example.org", 1, edns=False)
    answer = query.wire[:2] + b"\x81\x80\x00\x01\x00\x01\x00\x00\x00\x00" + query.wire[12:]
    with pytest.raises(NotAnAnswer):
        query.read(answer + struct.pack(">H", 0xC000 | len(answer)) + b"\x00\x01\x00\x01\x00\x00\x00\x05\x00\x04abcd")


@pytest.mark.kernel
def test_broken_packets_are_counted_and_the_next_question_is_answered() -> None:
    """All of them over a real socket."""

    async def check() -> None:
        async with resolving(NetworkMode.DENY) as kit:
            client = kit.client()
            for packet in BROKEN.values():
                client.send(packet)
            assert addresses(await kit.ask("db")) == [str(DB)]
            assert kit.resolver.stats.malformed == len(BROKEN)
            assert not kit.resolver.failed.done()

    asyncio.run(check())


@pytest.mark.kernel
@pytest.mark.parametrize("size", [0, 1, 4097, 65535])
def test_tcp_messages_that_are_no_question_end_the_connection(size: int) -> None:
    """64 KiB are not waited for."""

    async def check() -> None:
        async with resolving(NetworkMode.DENY) as kit:
            reader, writer = await kit.tcp()
            writer.write(struct.pack(">H", size) + b"x" * min(size, 100))
            async with asyncio.timeout(5):
                with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                    await reader.readexactly(1)
            writer.transport.abort()
            assert kit.resolver.stats.malformed == 1
            assert addresses(await kit.ask_tcp("db")) == [str(DB)]

    asyncio.run(check())


@pytest.mark.kernel
def test_slow_connections_are_few_and_short() -> None:
    """A client has eight; a ninth is closed at once, and those that say nothing end by themselves."""

    async def check() -> None:
        async with resolving(NetworkMode.DENY, limits=ResolverLimits(idle=0.3)) as kit:
            slow = [await kit.tcp() for _ in range(8)]
            for _, writer in slow:
                writer.write(b"\x00")
            extra, extra_writer = await kit.tcp()
            with pytest.raises((asyncio.IncompleteReadError, ConnectionError)):
                await asyncio.wait_for(extra.readexactly(1), 5)
            assert kit.resolver.stats.refused_connections == 1
            for reader, _ in slow:
                assert await asyncio.wait_for(reader.read(), 5) == b""
            assert addresses(await kit.ask_tcp("db")) == [str(DB)]
            for writer in (extra_writer, *(writer for _, writer in slow)):
                writer.transport.abort()

    asyncio.run(check())


@pytest.mark.kernel
def test_a_client_that_does_not_read_holds_no_task_for_long() -> None:
    """Its answers fill the kernel's buffers; then the connection ends, and close waits for nobody."""

    async def check() -> None:
        async with resolving(NetworkMode.DENY, limits=ResolverLimits(idle=0.3, rate=10**6)) as kit:
            _, writer = await kit.tcp(buffer=2048)
            writer.transport.pause_reading()
            many = (struct.pack(">H", len(GOOD)) + GOOD) * 2000

            async def write_on() -> None:
                while True:
                    writer.write(many)
                    await writer.drain()

            with pytest.raises(ConnectionError):
                await asyncio.wait_for(write_on(), 20)
            assert addresses(await kit.ask("db")) == [str(DB)]

    asyncio.run(check())


@pytest.mark.kernel
def test_several_questions_on_a_connection_are_answered_in_turn() -> None:
    """As clients with a kept connection do (RFC 7766)."""

    async def check() -> None:
        async with resolving(NetworkMode.DENY) as kit:
            reader, writer = await kit.tcp()
            queries = [dns.message.make_query(name, "A") for name in ("db", "job", "nobody")]
            writer.write(b"".join(struct.pack(">H", len(q.to_wire())) + q.to_wire() for q in queries))
            for query in queries:
                (size,) = struct.unpack(">H", await reader.readexactly(2))
                assert query.is_response(dns.message.from_wire(await reader.readexactly(size)))
            writer.transport.abort()

    asyncio.run(check())


@pytest.mark.kernel
def test_a_flood_leaves_the_loop_its_time() -> None:
    """Questions beyond the rate are read later or dropped by the kernel; other work goes on."""

    async def check() -> None:
        async with resolving(NetworkMode.DENY, limits=ResolverLimits(rate=200)) as kit:
            client = kit.client()
            start = time.monotonic()
            turns = 0
            while time.monotonic() - start < 0.5:
                for _ in range(20):
                    client.send(GOOD)
                await asyncio.sleep(0)
                turns += 1
            took = time.monotonic() - start
            assert kit.resolver.stats.questions <= 200 + 200 * took + 32
            assert turns > 20
            client.close()

    asyncio.run(check())


@pytest.mark.kernel
def test_questions_upstream_are_bounded() -> None:
    """Those beyond the bound fail at once; members are found meanwhile."""

    async def check() -> None:
        zone = Zone(behaviours={f"n{number}.example.org": "silent" for number in range(50)})
        server = await fake_dns.start(zone)
        upstream = Upstream((LOOPBACK,), port=server.port, limits=UpstreamLimits(attempt=0.5, total=0.6, at_once=4))
        async with resolving(NetworkMode.RESTRICTED, WILD, upstream=upstream, limits=ResolverLimits(pending=16)) as kit:
            found = await asyncio.gather(*(kit.ask(f"n{number}.example.org") for number in range(50)))
            assert {message.rcode() for message in found} == {dns.rcode.SERVFAIL}
            assert kit.resolver.stats.overload == 34
            assert len({item[0] for item in server.seen}) <= 16
            assert addresses(await kit.ask("db")) == [str(DB)]
        server.close()
        await asyncio.sleep(0)

    asyncio.run(check())


def test_records_are_bounded_whatever_is_asked() -> None:
    """What has no record of its own is counted with the others, by verdict."""
    audit = DnsAudit()
    for number in range(MOST_NAMES + 500):
        audit.add(f"n{number}.example.org", 1, DnsVerdict.REFUSED)
    audit.add("n3.example.org", 1, DnsVerdict.REFUSED)
    audit.add("late.example.org", 1, DnsVerdict.ANSWERED, (DB,))
    records = audit.records()
    assert len(records) == MOST_NAMES + 2
    assert [(record.verdict, record.count) for record in records if record.name == OTHERS] == [
        (DnsVerdict.REFUSED, 500),
        (DnsVerdict.ANSWERED, 1),
    ]
    assert records[3].count == 2
    assert audit.stats().verdicts[DnsVerdict.REFUSED] == MOST_NAMES + 501


def test_open_addresses_are_bounded() -> None:
    """More of them at a time are refused before any of the answer is opened."""

    async def check() -> None:
        opened: list[IPv4Address] = []

        async def note(index: int, address: IPv4Address, seconds: int) -> None:
            opened.append(address)

        openings = Openings(note)
        base = IPv4Address("203.0.0.0")
        for start in range(0, MOST_OPEN, 64):
            await openings.open((0,), [base + start + step for step in range(64)], 300)
        with pytest.raises(TooManyOpen):
            await openings.open((0,), [base + MOST_OPEN], 300)
        await openings.open((0,), [base], 400)
        assert len(opened) == MOST_OPEN + 1

    asyncio.run(check())


@settings(max_examples=50)
@given(rate=st.integers(1, 5000), takes=st.integers(0, 6000))
def test_a_bucket_gives_no_more_than_its_rate(rate: int, takes: int) -> None:
    """A second's worth at once, then as time goes."""
    bucket = Bucket(rate)
    start = time.monotonic()
    given_out = sum(bucket.take() for _ in range(takes))
    assert given_out <= rate + rate * (time.monotonic() - start) + 1
    assert given_out >= min(takes, rate)
