"""The bundle compiler: a ContainerPlan and a Placement in, the bytes of config.json out.

Pure: the same input gives the same bytes, and nothing on the host is looked at. The one file it reads, once and at
first use, is its own seccomp profile. See docs/bundle.md.
"""

from forgeyard_oci.spec.canonical import plan_digest
from forgeyard_oci.spec.compile import compile_bundle, compile_exec
from forgeyard_oci.spec.compose import Fields, compose
from forgeyard_oci.spec.filesystem import base_mounts
from forgeyard_oci.spec.seccomp import SeccompProfile, load_profile

__all__ = [
    "Fields",
    "SeccompProfile",
    "base_mounts",
    "compile_bundle",
    "compile_exec",
    "compose",
    "load_profile",
    "plan_digest",
]
