"""Changes of a table of iptables, as data: for each program that can make them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final

COMMENT: Final = "forgeyard: job networks"
"""On every jump of ours, so that whoever lists the rules sees where it comes from."""


class Op(Enum):
    """INSERT a jump as the first rule, DELETE one that matches exactly, or empty and remove a chain."""

    INSERT = auto()
    DELETE = auto()
    DROP_CHAIN = auto()


@dataclass(frozen=True, slots=True)
class Edit:
    """One change: in `chain`, of the jump to `target`."""

    op: Op
    chain: str
    target: str

    @property
    def text(self) -> str:
        """As iptables-restore reads it."""
        jump = f'-m comment --comment "{COMMENT}" -j {self.target}'
        match self.op:
            case Op.INSERT:
                return f"-I {self.chain} 1 {jump}"
            case Op.DELETE:
                return f"-D {self.chain} {jump}"
            case Op.DROP_CHAIN:
                return f"-F {self.chain}\n-X {self.chain}"
