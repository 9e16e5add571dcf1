"""Clients for the tests of registries: quick to lose patience, with files and environment of their own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from forgeyard_oci.reference import RegistryReference
from forgeyard_oci.registry.budget import Budget
from forgeyard_oci.registry.client import RegistryClient
from forgeyard_oci.registry.retry import Timings
from forgeyard_oci.registry.settings import RegistrySettings

QUICK = Timings(connect=10, idle=10, commit=10, slow_window=10, tick=0.02)
"""For a registry that answers: a loaded machine must not look like a stalled one. Nothing waits for these."""
IMPATIENT = Timings(connect=10, idle=0.3, commit=10, slow_window=0.3, tick=0.02, tries=3)
"""For one that stalls."""


@dataclass(frozen=True, slots=True)
class Counting(Budget):
    """A budget that notes its waits, and does not sit through them."""

    waits: list[float] = field(default_factory=list)

    def wait(self, seconds: float) -> None:
        """Note it."""
        self.check()
        self.waits.append(seconds)


def settings(root: Path, *, insecure: tuple[str, ...] = (), **environ: str) -> RegistrySettings:
    """Settings that see nothing of this machine: only `environ`, and files below `root`."""
    return RegistrySettings.load(environ, home=root, insecure=insecure, root=root)


def client(root: Path, *, timings: Timings = QUICK, insecure: tuple[str, ...] = (), **environ: str) -> RegistryClient:
    """A client with such settings."""
    return RegistryClient(settings(root, insecure=insecure, **environ), timings=timings)


def image(host: str, repository: str = "team/app", tag: str = "1") -> RegistryReference:
    """A reference to that registry."""
    return RegistryReference(host, repository, tag)


def pull_blob(
    puller: RegistryClient,
    ref: RegistryReference,
    digest: str,
    size: int,
    *,
    budget: Budget | None = None,
    there: bytes = b"",
    received: Callable[[int], None] = lambda total: None,
) -> bytes:
    """Pull into a file that holds `there`, and give what it holds then."""
    with tempfile.TemporaryFile() as file:
        file.write(there)
        file.flush()
        puller.blob(ref, digest, size, file.fileno(), budget or Counting(), received)
        return os.pread(file.fileno(), size + 1, 0)
