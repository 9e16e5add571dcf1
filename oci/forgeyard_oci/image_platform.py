"""Platforms of images: what the host runs, and which entry of an index fits it."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from forgeyard_model.errors import InvalidRequest

_ALIASES: Final = {
    "x86_64": ("amd64", ""),
    "x86-64": ("amd64", ""),
    "aarch64": ("arm64", ""),
    "armv8l": ("arm", "v7"),
    "armv7l": ("arm", "v7"),
    "armv6l": ("arm", "v6"),
    "armhf": ("arm", "v7"),
    "armel": ("arm", "v6"),
    "i386": ("386", ""),
    "i686": ("386", ""),
}
# What a platform without a variant means, per architecture.
_BASE_VARIANT: Final = {"amd64": "v1", "arm64": "v8", "arm": "v7"}
_WORD: Final = re.compile(r"[a-z0-9_.-]{1,32}\Z")
_VARIANT: Final = re.compile(r"v(\d{1,2})(?:\.(\d{1,2}))?\Z")


@dataclass(frozen=True, slots=True)
class Platform:
    """An operating system, an architecture in the registry's spelling, and a variant ("" when plain)."""

    os: str
    architecture: str
    variant: str = ""

    @classmethod
    def parse(cls, text: str) -> Platform:
        """Read ``linux/arm64`` or ``linux/arm/v7``; ``linux/x86_64`` means amd64.

        :raises InvalidRequest: for anything else.
        """
        words = text.lower().split("/")
        if not 2 <= len(words) <= 3 or not all(_WORD.match(word) for word in words):
            raise InvalidRequest("platform", text, "write OS/ARCH or OS/ARCH/VARIANT, such as linux/amd64")
        return cls.of(*words)

    @classmethod
    def of(cls, os_name: str, architecture: str, variant: str = "") -> Platform:
        """From the three words of an index or a config, in their usual other spellings too."""
        architecture, implied = _ALIASES.get(architecture, (architecture, ""))
        variant = variant or implied
        if variant and not variant.startswith("v") and variant[0].isdigit():
            variant = f"v{variant}"
        return cls(os_name, architecture, "" if variant == _BASE_VARIANT.get(architecture) else variant)

    @classmethod
    def host(cls) -> Platform:
        """What this machine runs without emulation."""
        return cls.of("linux", os.uname().machine)

    def runs(self, image: Platform) -> bool:
        """Whether a program for `image` runs here: same architecture, and a variant that is not newer."""
        if (self.os, self.architecture) != (image.os, image.architecture):
            return False
        return self.variant == image.variant or (image._level is not None and (self._level or (0, 0)) >= image._level)

    @property
    def _level(self) -> tuple[int, int] | None:
        match = _VARIANT.match(self.variant or _BASE_VARIANT.get(self.architecture, ""))
        return (int(match[1]), int(match[2] or 0)) if match else None

    def best(self, offered: Sequence[Platform]) -> int | None:
        """Position of the offered platform to run: the newest variant that runs, the first of equals."""
        fitting = [(place._level or (0, 0), -position) for position, place in enumerate(offered) if self.runs(place)]
        return -max(fitting)[1] if fitting else None

    def __str__(self) -> str:
        return "/".join(word for word in (self.os, self.architecture, self.variant) if word)
