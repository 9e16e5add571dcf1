"""From a question to its answer, whatever it came by."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address
from typing import Final

from forgeyard_networks.dns_wire import (
    TYPE_A,
    TYPE_AAAA,
    TYPE_PTR,
    NotAnAnswer,
    Question,
    Rcode,
    Reason,
    Reply,
    address_reply,
    name_reply,
)
from forgeyard_networks.resolver_audit import DnsAudit, DnsVerdict
from forgeyard_networks.resolver_openings import Openings, TooManyOpen
from forgeyard_networks.resolver_policy import MEMBER_TTL, Decision, NameRules, Verdict, admitted, opening
from forgeyard_networks.resolver_upstream import Upstream, UpstreamFailed

# musl passes over REFUSED and waits out its 5 s, and glibc calls it temporary, so that tools try again. To the C
# libraries' questions a refused name therefore is none; a real resolver reads in the reason what it is.
_NO_SUCH_NAME: Final = Reply(Rcode.NXDOMAIN, reason=Reason.PROHIBITED)
_REFUSED: Final = Reply(Rcode.REFUSED, reason=Reason.PROHIBITED)
_FILTERED: Final = Reply(reason=Reason.FILTERED)
_FAILED: Final = Reply(Rcode.SERVFAIL, reason=Reason.NO_REACHABLE_AUTHORITY)
_EMPTY: Final = Reply()


class Answers:
    """Answers the questions of one attempt."""

    def __init__(self, rules: NameRules, upstream: Upstream, openings: Openings, audit: DnsAudit) -> None:
        self._rules, self._upstream, self._openings, self._audit = rules, upstream, openings, audit
        self.problem = ""

    def known(self, question: Question) -> Reply | Decision:
        """The answer where nobody has to be asked; else the decision to hand to `asked`."""
        decision = self._rules.decide(question)
        if decision.verdict is Verdict.FORWARD:
            return decision
        if decision.verdict is Verdict.EMPTY:
            return _EMPTY  # not recorded: it is the twin of a question for an IPv4 address
        if decision.verdict is Verdict.REFUSE:
            self._record(question, DnsVerdict.REFUSED)
            return _NO_SUCH_NAME if _from_a_c_library(question) else _REFUSED
        if decision.address is None:
            self._record(question, DnsVerdict.ANSWERED)
            return name_reply(decision.name, MEMBER_TTL)
        self._record(question, DnsVerdict.ANSWERED, (decision.address,))
        return address_reply(decision.address, MEMBER_TTL)

    async def asked(self, question: Question, decision: Decision) -> Reply:
        """The answer of an upstream server, less what an outside name may not lead to; its addresses are open by then.

        :raises ForgeyardError: of the firewall, when an address could not be opened.
        """
        try:
            return await self._ask(question, decision)
        except (UpstreamFailed, NotAnAnswer, TooManyOpen) as error:
            self.problem = f"{question.name}: {error}"
            self._record(question, DnsVerdict.FAILED)
            return _FAILED

    def overloaded(self, question: Question) -> Reply:
        """The answer to one question too many."""
        self._audit.overload += 1
        self._record(question, DnsVerdict.FAILED)
        return _FAILED

    async def _ask(self, question: Question, decision: Decision) -> Reply:
        answer = await self._upstream.ask(question.name, question.type)
        kept, removed = admitted(self._rules.policy, answer.addresses)
        if removed:
            self._record(question, DnsVerdict.REBINDING, removed)
            if not kept:
                return _FILTERED
        seconds, ttl = opening(answer.ttl)
        reply = answer.reply(ttl, kept)
        if question.type == TYPE_A and decision.destinations:
            await self._openings.open(decision.destinations, kept, seconds)
        self._record(question, DnsVerdict.ANSWERED, kept)
        return reply

    def _record(self, question: Question, verdict: DnsVerdict, addresses: Sequence[IPv4Address] = ()) -> None:
        self._audit.add(question.name or ".", question.type, verdict, addresses)


def _from_a_c_library(question: Question) -> bool:
    """Whether getaddrinfo or getnameinfo ask that. Of other types a name that is allowed may be asked as well."""
    if question.type == TYPE_PTR:
        return question.name.endswith(".arpa")
    return question.type in (TYPE_A, TYPE_AAAA)
