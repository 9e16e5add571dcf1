"""What this host makes of a request, field by field. Pure: `forgeyard plan` prints it and `prepare` obeys it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from forgeyard_executor.capabilities import needed, reason_of
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_executor.explain_limits import limit_rows
from forgeyard_executor.explain_network import network_row, service_rows
from forgeyard_executor.explain_rootfs import rootfs_rows
from forgeyard_executor.planning import Planned
from forgeyard_executor.selection import ExecutorSelectionError, ExecutorSelector, Selection
from forgeyard_host.probes_files import idmap_probe
from forgeyard_model.capabilities import Feature
from forgeyard_model.enforcement import Enforcement, PlanReport, PlanRow
from forgeyard_model.errors import (
    ExecutorError,
    ExecutorErrorKind,
    ForgeyardError,
    InvalidRequest,
    SandboxErrorKind,
)
from forgeyard_model.plan import RootfsPlan
from forgeyard_model.policy import IsolationLevel, Need, NetworkMode
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.requirements import ExecutionRequirements, needs_user_namespace
from forgeyard_model.units import format_duration, format_size

_ON: Mapping[bool, str] = {True: "on", False: "off"}


@dataclass(frozen=True, slots=True)
class Explained:
    """The rows, and the backend that would run the request; None when none can."""

    report: PlanReport
    selection: Selection | None

    def chosen(self) -> Selection:
        """The backend, once nothing is refused.

        :raises ForgeyardError: of the first refused row.
        """
        self.report.require()
        if self.selection is None:
            # Every demand of the selector has a row of its own, so that this can't be reached.
            raise ExecutorError(ExecutorErrorKind.INTERNAL, "no_selection", "no backend was chosen")
        return self.selection


def explain(request: ExecutionRequest, facts: HostFacts) -> Explained:
    """Every policy field of `request` on a host of which `facts` are true."""
    isolation, selection = _isolation(request, facts)
    if selection is not None:
        facts = replace(facts, backend=selection.candidate)
    rows: tuple[PlanRow, ...] = (
        isolation,
        *_privilege_rows(request, facts),
        network_row(request, facts),
        *service_rows(request, facts),
        *rootfs_rows(request, facts),
        *limit_rows(request, facts),
        *_time_rows(request),
    )
    return Explained(PlanReport((*rows, *_rest(request, facts, rows))), selection)


def _rest(request: ExecutionRequest, facts: HostFacts, rows: tuple[PlanRow, ...]) -> Iterator[PlanRow]:
    """What a sandbox is made of beside the fields of its policy: shown where it does not work."""
    told = {reason_of(row.error) for row in rows if row.error is not None}
    for feature in needed(request, facts.config):
        name = feature.value
        row = facts.row(name, "needed", feature, by="", kind=SandboxErrorKind.UNSUPPORTED_ISOLATION)
        if row.refused and f"no_{name}" not in told:
            yield row


def _isolation(request: ExecutionRequest, facts: HostFacts) -> tuple[PlanRow, Selection | None]:
    """The boundary alone; the network and the limits have rows of their own to say what is wrong with them."""
    needs = ExecutionRequirements.of(request, facts.config)
    demanded = max(needs.minimum, facts.config.minimum_isolation)
    asked = f"{_words(demanded)} or more"
    by_whom = f"profile {needs.profile}"
    if demanded > needs.minimum:
        by_whom = f"minimum_isolation ({facts.config.origin('minimum_isolation')})"
    boundary = replace(needs, network=NetworkMode.DENY, disk_limit=False)
    selector = ExecutorSelector()
    try:
        bare = selector.select(boundary, facts.candidates, facts.config.minimum_isolation)
    except ExecutorSelectionError as error:
        return PlanRow("isolation", asked, Enforcement.REFUSED, by_whom, error.details, error.resolution, error), None
    level = _words(bare.isolation)
    row = PlanRow("isolation", asked, Enforcement.ENFORCED, f"{level}, by {bare.candidate.runtime}")
    try:
        return row, selector.select(needs, facts.candidates, facts.config.minimum_isolation)
    except ExecutorSelectionError:
        return row, None


def _words(level: IsolationLevel) -> str:
    return level.value.replace("_", " ")


def _privilege_rows(request: ExecutionRequest, facts: HostFacts) -> Iterator[PlanRow]:
    policy = request.sandbox
    claims = facts.backend
    kind = SandboxErrorKind.PRIVILEGE_DROP_FAILED
    yield _user_namespace(request, facts)
    yield facts.row(
        "seccomp",
        policy.process.seccomp,
        Feature.SECCOMP,
        claim=claims is not None and claims.seccomp,
        by="a filter with default ENOSYS, read back at the gate",
        kind=kind,
    )
    yield facts.row(
        "capabilities",
        policy.privileges.capabilities.value,
        Feature.CAPABILITY_DROP,
        by="five capability sets, read back at the gate",
        kind=kind,
    )
    yield facts.row("no_new_privs", "on", Feature.NO_NEW_PRIVS, by="prctl(2), read back at the gate", kind=kind)
    yield PlanRow("core_dumps", _ON[policy.process.core_dumps], Enforcement.ENFORCED, "RLIMIT_CORE")
    devices = ", ".join(policy.devices.allowed_devices)
    if devices:
        cure = "leave devices out"
        error = ExecutorError(
            ExecutorErrorKind.UNSUPPORTED, "devices", "devices can't be leased by this version", resolution=cure
        )
        yield PlanRow("devices", devices, Enforcement.REFUSED, "this version", "no device can be leased", cure, error)


def _user_namespace(request: ExecutionRequest, facts: HostFacts) -> PlanRow:
    row = facts.row(
        "user_namespace",
        request.sandbox.isolation.user_namespace.value,
        Feature.USER_NAMESPACE,
        claim=facts.backend is not None and facts.backend.user_namespace,
        by="65536 host ids of the job's own, read back at the gate",
        kind=SandboxErrorKind.NAMESPACE_FAILED,
    )
    if not row.refused or needs_user_namespace(request, facts.config):
        return row
    who = "the profile" if request.sandbox.isolation.user_namespace is Need.PREFERRED else "the configuration"
    by = "the runtime" if facts.backend is None else facts.backend.runtime
    note = f"{by} has none, and {who} only prefers one: ids inside are this host's, and the isolation is a level lower"
    return replace(row, status=Enforcement.CLAMPED, by=by, note=note, cure="use the runtime runc", error=None)


def _time_rows(request: ExecutionRequest) -> Iterator[PlanRow]:
    """What the executor itself holds, whatever the host has."""
    clock = "the executor's clock; the tree is killed"
    for field, seconds in (
        ("prepare_timeout", request.timeouts.prepare),
        ("grace", request.timeouts.grace),
        ("finally_timeout", request.timeouts.finally_),
        *((("services_timeout", request.timeouts.services),) if request.spec.services else ()),
    ):
        shown = format_duration(seconds) if seconds else "0s"
        yield PlanRow(
            field, shown, Enforcement.ENFORCED, clock if field != "prepare_timeout" else "the executor's clock"
        )
    yield PlanRow(
        "output_cap", format_size(request.output_cap), Enforcement.ENFORCED, "the spool: head and tail are kept"
    )


PlanRootfs = Callable[[ExecutionRequest, IsolationLevel], tuple[RootfsPlan, Planned]]


def report_of(request: ExecutionRequest, facts: HostFacts, plan: PlanRootfs) -> PlanReport:
    """The whole report, with what only a look at the host tells: the root filesystem, the source's filesystem.

    :param plan: what `prepare` plans with; its refusal becomes a row. Blocking.
    """
    source = request.workspace.source
    if source is not None:
        facts = replace(facts, source_idmap=idmap_probe(source))
    explained = explain(request, facts)
    if not explained.report.runnable:
        return explained.report
    try:
        rootfs, _ = plan(request, explained.chosen().isolation)
    except ForgeyardError as error:
        return PlanReport((*explained.report.rows, _unplanned(request, error)))
    return explain(request, replace(facts, rootfs=rootfs.identity)).report


def _unplanned(request: ExecutionRequest, error: ForgeyardError) -> PlanRow:
    if isinstance(error, InvalidRequest):
        return PlanRow(error.field, error.value, Enforcement.REFUSED, "the request", error.cure, error.cure, error)
    asked = request.spec.image or "host"
    field = "rootfs" if request.spec.image is None else "image"
    note = f"{error.brief}: {error.details}" if error.details else error.brief
    return PlanRow(field, asked, Enforcement.REFUSED, "the host", note, error.resolution, error)
