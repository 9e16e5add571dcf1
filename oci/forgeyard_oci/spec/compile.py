"""One bundle from a plan and its placement, as the sum of small options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from forgeyard_model.identity import SandboxId
from forgeyard_model.plan import Bundle, ContainerPlan, Placement
from forgeyard_oci.spec.canonical import canonical_json, digest, plan_digest
from forgeyard_oci.spec.compose import Fields, compose
from forgeyard_oci.spec.filesystem import base_mounts, with_masked_paths, with_mounts, with_propagation, with_root
from forgeyard_oci.spec.isolation import with_hostname, with_id_mappings, with_namespaces
from forgeyard_oci.spec.process import process_options
from forgeyard_oci.spec.resources import with_cgroup, with_resources
from forgeyard_oci.spec.seccomp import load_profile, with_seccomp

OCI_VERSION: Final = "1.0.2"
"""The version whose fields we emit. Every runtime we drive honours all of them."""
ANNOTATION_PREFIX: Final = "dev.forgeyard."
_TTY_GID: Final = 5


def compile_bundle(plan: ContainerPlan, placement: Placement, *, machine: str = "x86_64") -> Bundle:
    """The bundle that runs `plan` where `placement` says. Pure.

    :param machine: the host's, as uname(2) names it.
    :raises SandboxError: for a plan that would not be what it says (a slot without a source, a user namespace
        without a range, a grant that can't hold, ...).
    :raises InvalidRequest: for a string that can't stand in a bundle.
    """
    identity = plan_digest(plan)
    config = canonical_json(compose(_options(plan, placement, identity, machine)))
    return Bundle(config=config, plan_digest=identity, bundle_digest=digest(config))


def compile_exec(
    plan: ContainerPlan, placement: Placement, argv: Sequence[str], env: Mapping[str, str], cwd: str
) -> bytes:
    """A process.json for one more process in the running container, with init's user, limits and rights exactly.

    A runtime applies what such a file says, even above init, so it is never written by hand.

    :raises SandboxError, InvalidRequest: as with `compile_bundle`.
    """
    with_id_mappings(plan, placement)  # refuses ids that the running container does not have
    return canonical_json(compose(process_options(plan, argv, env, cwd))["process"])


def with_version() -> Fields:
    """The specification's version."""
    return {"ociVersion": OCI_VERSION}


def with_annotations(sandbox: SandboxId, plan: str, seccomp: str) -> Fields:
    """What lets a person or a sweep find whose container this is, whichever runtime holds it."""
    values: dict[str, Any] = {"sandbox": sandbox.value, "plan": plan, "seccomp": seccomp}
    return {"annotations": {ANNOTATION_PREFIX + name: value for name, value in values.items()}}


def _options(plan: ContainerPlan, placement: Placement, identity: str, machine: str) -> tuple[Fields, ...]:
    tty_group = not plan.user_namespace or placement.uid_count > _TTY_GID
    return (
        with_version(),
        *process_options(plan, placement.argv, plan.env, "/"),
        with_root(placement.rootfs, read_only=plan.root_read_only),
        with_mounts((*base_mounts(plan.limits.shm), *plan.mounts), placement.sources, tty_group=tty_group),
        with_masked_paths(),
        with_propagation(),
        with_hostname(placement.hostname or placement.sandbox.hostname),
        with_namespaces(
            plan.network,
            placement.netns,
            user_namespace=plan.user_namespace,
            userns=placement.userns,
            plumbed=placement.plumbed,
        ),
        with_id_mappings(plan, placement),
        with_resources(plan.limits),
        with_cgroup(placement.cgroup),
        with_seccomp(plan.seccomp, machine),
        with_annotations(placement.sandbox, identity, load_profile(plan.seccomp).identity),
    )
