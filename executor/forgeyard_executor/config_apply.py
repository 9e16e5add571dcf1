"""What the configuration does to a job, and whether it lets an image pass. Pure, but for resolving symlinks."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Final

from forgeyard_model.config import ExecutorConfig, PatternRule
from forgeyard_model.job import Job
from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import ApprovedHostPath
from forgeyard_model.profile import PROFILES
from forgeyard_model.request import ExecutionRequest
from forgeyard_oci.reference import LayoutReference, Reference, parse_reference

_OCI: Final = "oci:"
# Parts of the host rootfs. Over an image's own they would hide what the image is.
_ROOT_PARTS: Final = ("/usr/local", "/opt")


@dataclass(frozen=True, slots=True)
class ConfiguredJob:
    """A job with the configuration's defaults. `lowered`: profile defaults, by limit, that the maximum cut down."""

    job: Job
    lowered: Mapping[str, float | None] = field(default_factory=dict)


def configured_job(job: Job, config: ExecutorConfig) -> ConfiguredJob:
    """`job` with the configured defaults where it names no limit, and the approved host paths.

    A default that nobody asked for is cut to the maximum; what the job itself asks for is left, and refused later.
    """
    defaults = config.default_limits.or_default(PROFILES[job.profile].limits)
    cut, lowered = {}, {}
    for item in fields(ResourceLimits):
        maximum, default = getattr(config.maximum_limits, item.name), getattr(defaults, item.name)
        if maximum is None or getattr(job.limits, item.name) is not None:
            continue
        if default is None or default > maximum:
            cut[item.name], lowered[item.name] = maximum, default
    limits = job.limits.or_default(replace(defaults, **cut))
    return ConfiguredJob(replace(job, limits=limits, host_paths=_host_paths(job, config)), lowered)


def _host_paths(job: Job, config: ExecutorConfig) -> tuple[ApprovedHostPath, ...]:
    taken = {path.destination for path in job.host_paths}
    approved = (
        path
        for path in config.approved_host_paths
        if path.destination not in taken and (job.image is None or path.destination not in _ROOT_PARTS)
    )
    return (*job.host_paths, *approved)


def canonical_image(request: ExecutionRequest, config: ExecutorConfig) -> ExecutionRequest:
    """`request` with its image in full, a path free of links and '..', when rules will be matched against it.

    :raises InvalidRequest: for a reference that is not well formed.
    :raises ExecutorError: UNSUPPORTED, for one that is neither in a registry nor a layout.
    """
    image = request.spec.image
    if image is None or not (config.allowed_images or config.allowed_registries):
        return request
    reference = parse_reference(image)
    if isinstance(reference, LayoutReference):
        reference = replace(reference, path=os.path.realpath(reference.path))
    return replace(request, spec=replace(request.spec, image=str(reference)))


def turned_down(image: str, config: ExecutorConfig) -> tuple[str, PatternRule] | None:
    """The key and the rule that does not let `image` pass; None when all do. The reference is matched in full.

    :raises InvalidRequest, ExecutorError: as canonical_image().
    """
    if not (config.allowed_images or config.allowed_registries):
        return None
    reference = parse_reference(image)
    for key, text, rules in (
        ("allowed_registries", registry_of(image), config.allowed_registries),
        ("allowed_images", _decisive(reference), config.allowed_images),
    ):
        for rule in rules:
            if not any(matches(pattern, text) for pattern in rule.patterns):
                return key, rule
    return None


def registry_of(image: str) -> str:
    """The registry in a reference; of a layout on disk, ``oci:PATH`` without tag and digest.

    :raises InvalidRequest, ExecutorError: as canonical_image().
    """
    reference = parse_reference(image)
    return f"{_OCI}{reference.path}" if isinstance(reference, LayoutReference) else reference.registry


def _decisive(reference: Reference) -> str:
    """What decides which image it is: beside a digest a tag is only a claim, and may not satisfy a rule."""
    return reference.pinned(reference.digest) if reference.digest else str(reference)


def matches(pattern: str, text: str) -> bool:
    """Whether `text` fits. ``*`` and ``?`` stay within one part of a path, ``**`` does not."""
    return _compiled(pattern).fullmatch(text) is not None


@lru_cache(maxsize=512)
def _compiled(pattern: str) -> re.Pattern[str]:
    words = {"**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*|\*|\?)", pattern)
    return re.compile("".join(words.get(part) or re.escape(part) for part in parts), re.DOTALL)
