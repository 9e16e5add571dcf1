"""Changes of legacy tables through python-iptables.

Its import takes 0.4 s and more, since it asks a linker for libraries: it happens when a table has to be changed, once
for an executor, and never for a job. It keeps table objects for the whole process, of whatever namespace they were
read in, and can't be used by two threads; both are dealt with here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from forgeyard_networks.firewall.edits import COMMENT, Edit, Op

if TYPE_CHECKING:
    import iptc  # type: ignore[import-untyped]  # it has no types

_LOCK: Final = threading.Lock()


class CommitError(Exception):
    """The kernel, or the library, refused."""


def commit(family: str, table: str, edits: Sequence[Edit]) -> None:
    """Make all of `edits`, or none, in one commit in the calling thread's namespace. The caller holds the lock.

    :raises CommitError: nothing was changed.
    """
    import iptc

    with _LOCK:
        try:
            with _fresh(family, table) as opened:
                for edit in edits:
                    _apply(opened, family, edit)
                opened.commit()
        except (iptc.IPTCError, iptc.XTablesError, ValueError) as error:
            raise CommitError(str(error)) from error


@contextmanager
def _fresh(family: str, table: str) -> Iterator[iptc.Table]:
    """A table that was read now and here, and that nobody finds afterwards."""
    import iptc

    kind = iptc.Table6 if family == "ip6" else iptc.Table
    _forget(kind, table)
    opened = kind(table, autocommit=False)
    try:
        yield opened
    finally:
        opened.close()
        _forget(kind, table)


def _forget(kind: type[iptc.Table], table: str) -> None:
    import iptc

    # No public way leads past these caches: a Table of that name would come back with its old handle.
    kind._cache.pop(table, None)
    iptc.Chain._cache.clear()


def _apply(table: iptc.Table, family: str, edit: Edit) -> None:
    import iptc

    chain = iptc.Chain(table, edit.chain)
    match edit.op:
        case Op.INSERT:
            chain.insert_rule(_jump(family, edit.target))
        case Op.DELETE:
            chain.delete_rule(_jump(family, edit.target))
        case Op.DROP_CHAIN:
            chain.flush()
            chain.delete()


def _jump(family: str, target: str) -> iptc.Rule:
    import iptc

    rule = iptc.Rule6() if family == "ip6" else iptc.Rule()
    rule.create_match("comment").comment = COMMENT
    rule.create_target(target)
    return rule
