"""What a comparison found, field by field, while it goes on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, TypeAlias

Spec: TypeAlias = Mapping[str, Any]
"""A part of a runtime spec, as JSON has it."""


class Comparison(NamedTuple):
    """Differences, each as ``field: what``. Both are empty for specs that isolate alike.

    :param weaker: the effective spec lets the workload do, see or use more, or is not what was asked for.
    :param stricter: it lets it do less, or refuses in another way.
    """

    weaker: tuple[str, ...]
    stricter: tuple[str, ...]


class Findings:
    """Collects differences. Every part of the comparison writes into one of these."""

    def __init__(self) -> None:
        self._weaker: dict[str, None] = {}
        self._stricter: dict[str, None] = {}

    def weaker(self, field: str, what: str) -> None:
        """Note that `field` is weaker than intended."""
        self._weaker[f"{field}: {what}"] = None

    def stricter(self, field: str, what: str) -> None:
        """Note that `field` is stricter than intended."""
        self._stricter[f"{field}: {what}"] = None

    def grants(self, field: str, intended: Iterable[object], effective: Iterable[object]) -> None:
        """Compare two sets of things that are given: more is weaker, less is stricter."""
        wanted, found = set(intended), set(effective)
        if more := found - wanted:
            self.weaker(field, f"{listed(more)} not intended")
        if less := wanted - found:
            self.stricter(field, f"{listed(less)} intended")

    def at_most(self, field: str, intended: float | None, effective: float | None) -> None:
        """Compare two limits; None is no limit."""
        if intended == effective:
            return
        if effective is None or (intended is not None and effective > intended):
            self.weaker(field, f"{_limit(effective)}, intended {_limit(intended)}")
        else:
            self.stricter(field, f"{_limit(effective)}, intended {_limit(intended)}")

    def same(self, field: str, intended: object, effective: object) -> None:
        """Compare what has no order: anything else than intended is reported as weaker."""
        if intended != effective:
            self.weaker(field, f"{effective!r}, intended {intended!r}")

    def result(self) -> Comparison:
        """All of it."""
        return Comparison(tuple(self._weaker), tuple(self._stricter))


def listed(items: Iterable[object], most: int = 12) -> str:
    """A few of `items`, and how many more there are."""
    names = sorted(map(str, items))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


def part(spec: Spec, *path: str) -> Any:
    """What stands at `path`; None where there is nothing. Engines write null as well as leave out."""
    node: Any = spec
    for name in path:
        if not isinstance(node, Mapping):
            return None
        node = node.get(name)
    return node


def _limit(value: float | None) -> str:
    return "no limit" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
