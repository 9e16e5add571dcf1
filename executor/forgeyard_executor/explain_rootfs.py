"""Rows about files: the root, the source, what else of the host appears."""

from __future__ import annotations

from collections.abc import Iterator

from forgeyard_executor.config_apply import turned_down
from forgeyard_executor.explain_facts import HostFacts
from forgeyard_model.capabilities import Feature
from forgeyard_model.enforcement import Enforcement, PlanRow
from forgeyard_model.errors import InvalidRequest, SandboxErrorKind
from forgeyard_model.policy import ApprovedHostPath, SourceMode
from forgeyard_model.request import ExecutionRequest

_MOUNT = SandboxErrorKind.MOUNT_FAILED


def rootfs_rows(request: ExecutionRequest, facts: HostFacts) -> Iterator[PlanRow]:
    """Root filesystem, source, toolchains and host paths."""
    filesystem = request.sandbox.filesystem
    yield _image(request, facts) if request.spec.image is not None else _host_rootfs(facts)
    if filesystem.root_read_only:
        yield facts.row("root_read_only", "on", Feature.READ_ONLY_BIND, by="a read-only mount", kind=_MOUNT)
    else:
        yield facts.row("root_read_only", "off", Feature.OVERLAY, by="an overlay that is thrown away", kind=_MOUNT)
    if request.workspace.source is not None:
        yield _source(filesystem.source_mode, facts)
        yield _source_owner(facts)
    for name, paths in (("toolchains", filesystem.toolchains), ("host_path", filesystem.allow_host_paths)):
        for path in paths:
            yield _host_path(name, path, facts)


def _host_rootfs(facts: HostFacts) -> PlanRow:
    shown = f"read-only binds of /usr over a skeleton {facts.rootfs}".rstrip()
    return facts.row("rootfs", "host", Feature.READ_ONLY_BIND, by=shown, kind=_MOUNT)


def _image(request: ExecutionRequest, facts: HostFacts) -> PlanRow:
    image = request.spec.image or ""
    refused = refused_image("image", "image", image, facts)
    if refused is not None:
        return refused
    pinned = "@sha256:" in image
    by = "every blob is checked against its digest" if pinned else "the tag is resolved once, and recorded"
    if facts.rootfs:
        by += f": {facts.rootfs}"
    return PlanRow("image", image, Enforcement.ENFORCED, by)


def refused_image(row: str, field: str, image: str, facts: HostFacts) -> PlanRow | None:
    """The row `row` of an image that the configuration does not let pass; else None. `field`: for the error."""
    found = turned_down(image, facts.config)
    if found is None:
        return None
    key, rule = found
    cure = f"use an image that {key} lets pass: {', '.join(rule.patterns) or 'none, only rootfs: host'}"
    error = InvalidRequest(field, image, f"is not in {key} ({rule.origin}); {cure}")
    return PlanRow(row, image, Enforcement.REFUSED, f"{key} ({rule.origin})", "no pattern fits", cure, error)


def _source(mode: SourceMode, facts: HostFacts) -> PlanRow:
    if mode is SourceMode.COW:
        return facts.row(
            "source.mode", mode.value, Feature.OVERLAY, by="an overlay; writes are thrown away", kind=_MOUNT
        )
    if mode is SourceMode.RO:
        return facts.row("source.mode", mode.value, Feature.READ_ONLY_BIND, by="a read-only bind", kind=_MOUNT)
    return PlanRow(
        "source.mode", mode.value, Enforcement.ENFORCED, "a bind", "the job writes the tree; the result says impure"
    )


def _source_owner(facts: HostFacts) -> PlanRow:
    """Not a boundary, so no refusal: a tree that can't be mapped is readable, and owned by nobody."""
    probe = facts.source_idmap or facts.probe(Feature.IDMAPPED_MOUNT, claim=True)
    if probe.works:
        return PlanRow("source.owner", "the job's user", Enforcement.ENFORCED, "an ID-mapped mount")
    return PlanRow(
        "source.owner",
        "the job's user",
        Enforcement.CLAMPED,
        "the source's filesystem",
        f"files appear owned by nobody: {probe.details}",
        probe.cure or "keep the source on ext4, xfs or btrfs",
    )


def _host_path(name: str, path: ApprovedHostPath, facts: HostFacts) -> PlanRow:
    asked = f"{path.source} at {path.destination}"
    if path.read_only:
        return facts.row(
            name, asked, Feature.READ_ONLY_BIND, by="a read-only bind; the result says impure", kind=_MOUNT
        )
    note = "the job writes on the host; the result says impure"
    return PlanRow(name, f"{asked}, writable", Enforcement.ENFORCED, "a bind", note)
