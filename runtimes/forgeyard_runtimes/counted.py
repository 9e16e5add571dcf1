"""What the kernel counted for one container, wherever its engine put it below its attempt's group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any, TypeVar

from forgeyard_host.cgroups import AttemptCgroup
from forgeyard_model.errors import SandboxError, SandboxErrorKind
from forgeyard_model.live import LiveUsage
from forgeyard_model.result import Evidence, ResourceUsage

T = TypeVar("T")


class Counted:
    """Evidence and usage of a container.

    :ivar leaf: its own group below its attempt's.
    """

    def __init__(self, cgroup: AttemptCgroup, leaf: str) -> None:
        self.leaf = leaf
        self._cgroup = cgroup
        self._seen: tuple[Evidence, ResourceUsage] | None = None

    def lies_at(self, path: str | None) -> None:
        """Its engine's own word for where it is; None: where its bundle says.

        :raises SandboxError: RESOURCE_LIMIT_FAILED, when that is not below the group of its bundle.
        """
        if path is None:
            return
        own = self._cgroup.leaf(self.leaf)
        if path != own and not path.startswith(f"{own}/"):
            raise not_below((path,), own)
        self.leaf = path.removeprefix(f"{self._cgroup.path}/")

    def remember(self) -> None:
        """Read now what may soon be gone."""
        seen = self._cgroup.evidence(self.leaf), self._cgroup.usage(self.leaf)
        before = self._seen
        self._seen = seen if before is None else (_evidence(before[0], seen[0]), _known(before[1], seen[1]))

    def evidence(self) -> Evidence:
        """Memory and pids evidence; what can't be read any more, as it was when it was remembered."""
        now = self._cgroup.evidence(self.leaf)
        return now if self._seen is None else _evidence(self._seen[0], now)

    def live(self) -> LiveUsage:
        """What it uses now, but for its disk."""
        return self._cgroup.live(self.leaf)

    def usage(self) -> ResourceUsage:
        """What it used, likewise."""
        now = self._cgroup.usage(self.leaf)
        return now if self._seen is None else _known(self._seen[1], now)


def not_below(groups: Iterable[str], own: str) -> SandboxError:
    """A container in `groups` of which none is `own`: its limits and counters are not those that were made for it."""
    return SandboxError(
        SandboxErrorKind.RESOURCE_LIMIT_FAILED,
        "gate_cgroup",
        "the container is not below its attempt's control group",
        details=f"it is in {', '.join(sorted(set(groups)))}, and not below {own}; the job was not started",
        resolution="check the runtime's cgroup driver: it has to be cgroupfs",
    )


def _evidence(before: Evidence, after: Evidence) -> Evidence:
    return Evidence(_known(before.memory, after.memory), _known(before.pids, after.pids), after.disk)


def _known(before: T, after: T) -> T:
    """`after`, and where that knows nothing, `before`."""
    found: dict[str, Any] = {item.name: getattr(after, item.name) for item in fields(after)}  # type: ignore[arg-type]  # a dataclass
    known = {name: value for name, value in found.items() if value is not None}
    return replace(before, **known)  # type: ignore[type-var]  # a dataclass
