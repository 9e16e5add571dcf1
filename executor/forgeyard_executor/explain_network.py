"""Rows about a job's network and its services."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

from forgeyard_executor.config_load import shown_limit
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_executor.explain_limits import above_maximum
from forgeyard_executor.explain_rootfs import refused_image
from forgeyard_model.capabilities import Feature
from forgeyard_model.enforcement import Enforcement, PlanRow
from forgeyard_model.errors import ExecutorError, ExecutorErrorKind, SandboxErrorKind
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import NetworkMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.services import ServiceSpec

_BY: Final = {
    NetworkMode.FETCH_ONLY: "a network of the job's own: nothing but the fetch proxy can be reached",
    NetworkMode.RESTRICTED: "a network of the job's own: its router lets through what is named, and rejects the rest",
    NetworkMode.ALLOW: "a network of the job's own with a way out; the host and private ranges stay closed",
    NetworkMode.CONFLIST: "the operator's own network, whose rules are the operator's",
}


def network_row(request: ExecutionRequest, facts: HostFacts) -> PlanRow:
    """What the job can reach."""
    mode = request.network.mode
    if facts.backend is None or mode not in facts.backend.network_modes:
        return _refused(mode, facts)
    if mode is NetworkMode.HOST:
        return PlanRow(
            "network", mode.value, Enforcement.ENFORCED, "none: the host network", "no boundary; the result says impure"
        )
    if request.spec.services and facts.networks is not None and mode not in facts.networks.modes:
        return _refused(mode, facts)
    if mode is NetworkMode.DENY:
        by = "a network namespace with loopback alone"
        if request.spec.services:
            by = "a network of the job and its services, with no way out of it"
        kind = SandboxErrorKind.NETWORK_SETUP_FAILED
        return facts.row("network", mode.value, Feature.NETWORK_DENY, by=by, kind=kind)
    backend = f" ({facts.networks.backend})" if facts.networks is not None and facts.networks.backend else ""
    note = "audit: everything outside is let through, and recorded" if request.network.audit else ""
    return PlanRow("network", _asked(request), Enforcement.ENFORCED, f"{_BY[mode]}{backend}", note)


def _asked(request: ExecutionRequest) -> str:
    policy = request.network
    if policy.mode is NetworkMode.CONFLIST:
        return f"{policy.mode.value} {policy.conflist}"
    if policy.egress is None:
        return policy.mode.value
    named = ", ".join(item.host or item.cidr for item in policy.egress.destinations[:8])
    more = len(policy.egress.destinations) - 8
    return f"{policy.mode.value}: {named}{f' and {more} more' if more > 0 else ''}"


def _refused(mode: NetworkMode, facts: HostFacts) -> PlanRow:
    networks = facts.networks
    cure = (networks and networks.cure) or "use network deny, or host in the development profile"
    problem = (networks and networks.problem) or "can't be enforced"
    error = ExecutorError(
        ExecutorErrorKind.UNSUPPORTED,
        "network_mode",
        f"network {mode.value} can't be enforced on this host",
        details=networks.problem if networks is not None else "",
        resolution=cure,
    )
    return PlanRow("network", mode.value, Enforcement.REFUSED, "the host", problem, cure, error)


def service_rows(request: ExecutionRequest, facts: HostFacts) -> Iterator[PlanRow]:
    """One row for each service, and one for each limit of it that is above the maximum."""
    for service in request.spec.services:
        yield _service_image(service, facts)
        yield from _above_maximum(service, facts)


def _service_image(service: ServiceSpec, facts: HostFacts) -> PlanRow:
    name, image = f"services.{service.name}", service.image
    if image is None:
        by = "a container of its own on the host rootfs, on the job's network"
        return PlanRow(name, "host", Enforcement.ENFORCED, by, _limits(service))
    if (refused := refused_image(name, f"{name}.image", image, facts)) is not None:
        return refused
    return PlanRow(name, image, Enforcement.ENFORCED, "a container of its own, on the job's network", _limits(service))


def _limits(service: ServiceSpec) -> str:
    shown = (
        f"{item.name} {shown_limit(item.name, value)}"
        for item in fields(ResourceLimits)
        if (value := getattr(service.limits, item.name)) is not None
    )
    return ", ".join(shown)


def _above_maximum(service: ServiceSpec, facts: HostFacts) -> Iterator[PlanRow]:
    for item in fields(ResourceLimits):
        value = getattr(service.limits, item.name)
        row = above_maximum(item.name, f"services.{service.name}.resources.{item.name}", value, facts)
        if value is not None and row is not None:
            yield row
