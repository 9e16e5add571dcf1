"""What is known of the host when a request is judged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from forgeyard_model.capabilities import ExecutorCapabilities, Feature, Probe
from forgeyard_model.config import ExecutorConfig
from forgeyard_model.enforcement import Enforcement, PlanRow
from forgeyard_model.errors import SandboxError, SandboxErrorKind

if TYPE_CHECKING:
    from forgeyard_networks.manager import NetworkCapabilities


@dataclass(frozen=True, slots=True)
class HostFacts:
    """Facts of one host, and the configuration that judges by them.

    :param candidates: the backends, the caller's preferred one first.
    :param nofile_ceiling: open files that a job can be given at the most.
    :param backend: the one whose claims and probes the rows speak of; the first candidate unless chosen.
    :param lowered: profile defaults that the configured maximum cut down, by field of ResourceLimits.
    :param source_idmap: what a look at the source's filesystem found; None: not looked at.
    :param rootfs: digest of the root filesystem; empty: not looked at.
    :param networks: what networks this host can make; None: not looked at.
    """

    candidates: tuple[ExecutorCapabilities, ...]
    nofile_ceiling: int
    config: ExecutorConfig = field(default_factory=ExecutorConfig)
    backend: ExecutorCapabilities | None = None
    lowered: Mapping[str, float | None] = field(default_factory=dict)
    source_idmap: Probe | None = None
    rootfs: str = ""
    networks: NetworkCapabilities | None = None

    def __post_init__(self) -> None:
        if self.backend is None and self.candidates:
            object.__setattr__(self, "backend", self.candidates[0])

    def probe(self, feature: Feature, *, claim: bool) -> Probe:
        """What is known of `feature`. Probes decide where there are any; before the first, the adapter's claim does.

        :param claim: of the adapter; it is checked again at the gate of every job.
        """
        probes = self.backend.probes if self.backend is not None else ()
        if not probes:
            return Probe(feature, claim and self.backend is not None)
        found = next((probe for probe in probes if probe.feature is feature), None)
        if found is None or not found.seen:
            # Nothing stood in its way and nothing showed it: the gate of each job decides, as before any probe.
            return Probe(feature, claim)
        return found

    def row(
        self, name: str, asked: str, feature: Feature, *, by: str, kind: SandboxErrorKind, claim: bool = True
    ) -> PlanRow:
        """The row of a field that stands or falls with `feature`."""
        probe = self.probe(feature, claim=claim)
        if probe.works:
            return PlanRow(name, asked, Enforcement.ENFORCED, by)
        note = probe.details or "does not work on this host"
        cure = probe.cure or "`forgeyard runner sandbox doctor` says what this host lacks"
        brief = f"{name} can't be enforced on this host: {feature.value.replace('_', ' ')} does not work"
        error = SandboxError(kind, f"no_{feature.value}", brief, details=probe.details, resolution=cure)
        return PlanRow(name, asked, Enforcement.REFUSED, "the host", note, cure, error)
