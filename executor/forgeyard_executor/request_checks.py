"""What the types of a request leave open, asked before anything on the host is looked at. Pure.

Job files and flags were checked where they were read. This is for what came from a program: to a runtime a limit of
-1 is no limit at all, so a wrong number here would not fail, it would silently take a limit away.
"""

from __future__ import annotations

from forgeyard_executor.environment import check_length, check_text
from forgeyard_model.errors import InvalidRequest
from forgeyard_model.job import Output, Timeouts
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import FilesystemPolicy
from forgeyard_model.request import ExecutionRequest
from forgeyard_model.services import checked_services
from forgeyard_model.units import MAX_SECONDS


def check_request(request: ExecutionRequest) -> None:
    """Refuse values that no part of this executor could give a meaning.

    :raises InvalidRequest: names the field.
    """
    _check_limits(request.limits)
    _check_timeouts(request.timeouts)
    deadline = request.context.deadline
    if deadline is not None and deadline.utcoffset() is None:
        raise InvalidRequest("deadline", deadline, "give it a time zone, such as datetime.UTC")
    if request.spec.image is not None:
        check_text("image", request.spec.image)
    checked_services(request.spec.services)
    seen: set[str] = set()
    for index, output in enumerate(request.spec.outputs):
        _check_output(f"outputs[{index}].path", output, seen)
    _check_filesystem(request.sandbox.filesystem)
    for toolchain in request.sandbox.filesystem.toolchains:
        if ":" in toolchain.destination:
            raise InvalidRequest("destination", toolchain.destination, "a ':' would split it in PATH; leave it out")


def _check_filesystem(policy: FilesystemPolicy) -> None:
    """A policy of a program's own making may ask for what this version has no means for; it is not passed over."""
    standard = FilesystemPolicy(policy.source_mode, policy.root_read_only)
    if policy.tmp_size is not None:
        raise InvalidRequest("tmp_size", policy.tmp_size, "is not served by this version: limit the disk instead")
    if set(policy.writable_paths) != set(standard.writable_paths):
        asked = ", ".join(policy.writable_paths)
        raise InvalidRequest("writable_paths", asked, f"this version has {', '.join(standard.writable_paths)}")


def _check_limits(limits: ResourceLimits) -> None:
    limits.check()
    for name in ("cpus", "memory", "pids"):
        if getattr(limits, name) is None:
            raise InvalidRequest(name, None, "every job has this limit in this version: give a value")


def _check_timeouts(timeouts: Timeouts) -> None:
    for field, seconds in (
        ("prepare_timeout", timeouts.prepare),
        ("grace", timeouts.grace),
        ("finally_timeout", timeouts.finally_),
        ("services_timeout", timeouts.services),
    ):
        if not 0 <= seconds <= MAX_SECONDS:  # NaN compares as False
            raise InvalidRequest(field, seconds, "write seconds from 0 to a year")


def _check_output(field: str, output: Output, seen: set[str]) -> None:
    path = output.path
    check_text(field, path)
    parts = [part for part in path.split("/") if part not in ("", ".")]
    if path.startswith("/") or not parts or ".." in parts:
        raise InvalidRequest(field, path, "write a path relative to /work/output, without '..'")
    check_length(field, path)
    name = "/".join(parts)
    if name in seen:
        raise InvalidRequest(field, path, "stands twice in outputs: keep one")
    seen.add(name)
