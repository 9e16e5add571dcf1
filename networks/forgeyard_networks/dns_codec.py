"""Questions to upstream servers and what they answer, in wire form. The one module that loads dnspython (0.1 s)."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rdata
import dns.rdatatype
import dns.rrset

from forgeyard_networks.dns_wire import MOST_UDP, TYPE_A, NotAnAnswer, Rcode, Reply

MOST_ADDRESSES = 64
"""Of one answer; what is beyond that is left out."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What an upstream server said. `ttl`: seconds, the least along the chain of names.

    :ivar rcode: with any other than NOERROR and NXDOMAIN there is nothing else in it.
    """

    rcode: int
    ttl: int
    addresses: tuple[IPv4Address, ...]
    _question: dns.message.Message
    _chain: tuple[dns.rrset.RRset, ...]
    _records: dns.rrset.RRset | None

    def reply(self, ttl: int, keep: Sequence[IPv4Address]) -> Reply:
        """To pass on: the chain of names and the records; of addresses, only `keep`.

        :raises NotAnAnswer: it does not fit into a message.
        """
        sections = [dns.rrset.from_rdata_list(part.name, ttl, list(part)) for part in self._chain]
        if self._records is not None:
            kept = self._kept(keep)
            if kept:
                sections.append(dns.rrset.from_rdata_list(self._records.name, ttl, kept))
        message = dns.message.Message(id=0)
        message.question = self._question.question
        message.answer = sections
        try:
            wire = message.to_wire(max_size=65535)
        except dns.exception.DNSException as error:
            raise NotAnAnswer(str(error)) from error
        asked = 12 + len(self._question.question[0].name.to_wire() or b"") + 4
        return Reply(Rcode(self.rcode), wire[asked:], sum(len(part) for part in sections))

    def _kept(self, keep: Sequence[IPv4Address]) -> list[dns.rdata.Rdata]:
        if self._records is None:
            return []
        if self._records.rdtype != dns.rdatatype.A:
            return list(self._records)
        wanted = {str(address) for address in keep}
        return [record for record in self._records if record.to_text() in wanted]


class Query:
    """One question to an upstream server, with an id that cannot be guessed."""

    def __init__(self, name: str, kind: int, *, edns: bool) -> None:
        labels = [label.encode("ascii") for label in name.split(".")]
        self._message = dns.message.make_query(
            dns.name.Name([*labels, b""]),
            dns.rdatatype.RdataType.make(kind),
            use_edns=0 if edns else False,
            payload=MOST_UDP,
            id=secrets.randbits(16),
        )
        self._kind = kind
        self.wire = self._message.to_wire()

    def read(self, data: bytes) -> Answer | None:
        """The answer in `data`; None when it was too long for UDP.

        :raises NotAnAnswer: another id or question, or bytes that are no message at all.
        """
        if data[:2] != self.wire[:2]:
            raise NotAnAnswer("another id")
        try:
            message = dns.message.from_wire(data, raise_on_truncation=True)
        except dns.message.Truncated:
            return None
        except (dns.exception.DNSException, ValueError) as error:
            raise NotAnAnswer(str(error)) from error
        if not self._message.is_response(message):
            raise NotAnAnswer("another question")
        return self._answer(message)

    def _answer(self, message: dns.message.Message) -> Answer:
        code = int(message.rcode())
        if code not in (Rcode.NOERROR, Rcode.NXDOMAIN) or not isinstance(message, dns.message.QueryMessage):
            return Answer(code, 0, (), self._message, (), None)
        message.question = self._message.question  # an error may come without; then there is nothing to follow
        try:
            found = message.resolve_chaining()
        except dns.exception.DNSException as error:
            raise NotAnAnswer(str(error)) from error
        addresses: tuple[IPv4Address, ...] = ()
        if found.answer is not None and self._kind == TYPE_A:
            addresses = tuple(IPv4Address(item.to_text()) for item in list(found.answer)[:MOST_ADDRESSES])
        return Answer(code, found.minimum_ttl, addresses, self._message, tuple(found.cnames), found.answer)
