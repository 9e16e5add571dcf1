"""What becomes of each policy field on one host: enforced, emulated, clamped or refused, by what, with the cure.

`forgeyard plan` prints these rows and `prepare` obeys them: one function makes both, so that no job is started on a
claim that plan would not have made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from dataclasses import field as dataclass_field
from enum import StrEnum

from forgeyard_model.errors import ForgeyardError


class Enforcement(StrEnum):
    """EMULATED: held by other means than the native one. CLAMPED: held at less than was asked, and said."""

    ENFORCED = "enforced"
    EMULATED = "emulated"
    CLAMPED = "clamped"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class PlanRow:
    """One policy field.

    :param asked: the value, as a person reads it; sizes in MiB.
    :param by: what holds it on this host; for a refusal, what turned it down.
    :param note: what differs from what was asked, and why; empty when nothing does.
    :param cure: what to change; empty unless something differs.
    :param error: what `prepare` raises for a refused row.
    """

    field: str
    asked: str
    status: Enforcement
    by: str
    note: str = ""
    cure: str = ""
    error: ForgeyardError | None = dataclass_field(default=None, compare=False, repr=False)

    @property
    def refused(self) -> bool:
        """The job can't run because of this field."""
        return self.status is Enforcement.REFUSED

    def as_dict(self) -> Mapping[str, str]:
        """The row for JSON."""
        return {
            "field": self.field,
            "asked": self.asked,
            "status": self.status.value,
            "by": self.by,
            "note": self.note,
            "cure": self.cure,
        }


@dataclass(frozen=True, slots=True)
class PlanReport:
    """All rows of one request on one host."""

    rows: tuple[PlanRow, ...]

    @property
    def runnable(self) -> bool:
        """No row is refused."""
        return not any(row.refused for row in self.rows)

    @property
    def notes(self) -> tuple[str, ...]:
        """What the result of a run has to say: every row held at less, or otherwise, than was asked."""
        softer = (Enforcement.CLAMPED, Enforcement.EMULATED)
        return tuple(f"{row.field}: {row.note}" for row in self.rows if row.status in softer and row.note)

    def require(self) -> None:
        """Fail closed.

        :raises ForgeyardError: of the first refused row.
        """
        for row in self.rows:
            if row.refused:
                raise row.error or ForgeyardError(f"{row.field}: {row.note}", resolution=row.cure)
