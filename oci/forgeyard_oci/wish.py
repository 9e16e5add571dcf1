"""What is asked of an image store."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from forgeyard_oci.image_platform import Platform
from forgeyard_oci.reference import Reference, RegistryReference
from forgeyard_oci.registry.budget import Budget, NoProgress, Progress


class PullPolicy(StrEnum):
    """When a registry is asked. For a pinned reference, which can't change, it is asked for what is missing alone."""

    MISSING = "missing"
    ALWAYS = "always"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Wish:
    """One image that somebody wants.

    :param base_dir: what a relative layout path is relative to.
    :param whole: with the blobs in the store, where it comes from a registry; not only its trees.
    """

    image: Reference
    platform: Platform
    base_dir: Path
    policy: PullPolicy = PullPolicy.MISSING
    budget: Budget = field(default_factory=Budget)
    progress: Progress = field(default_factory=NoProgress)
    whole: bool = False

    @property
    def wants_blobs(self) -> bool:
        """Whether trees alone are not enough."""
        return self.whole and isinstance(self.image, RegistryReference)
