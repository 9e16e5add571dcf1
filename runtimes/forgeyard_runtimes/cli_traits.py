"""How the command lines of OCI runtimes differ."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forgeyard_runtimes.contract import Carrier


@dataclass(frozen=True, slots=True)
class RuntimeTraits:
    """How one command line differs from runc's.

    :param log: global flags that put its log into a file, with ``{}`` for the path.
    :param carriers: what its containers can carry the shim's channel over.
    :param needs_delete: it keeps more than a directory (processes, mounts), so `delete` must be run.
    :param flags: global flags that each of its commands needs.
    :param own_kernel: containers run on a kernel of its own, which stands in this host's /proc as a few processes like
        any other. What it applied can't be read back there, so nothing is claimed of it, and no job runs on it.
    """

    name: str
    log: tuple[str, ...]
    carriers: frozenset[Carrier]
    needs_delete: bool
    flags: tuple[str, ...] = ()
    own_kernel: bool = False


_RUNSC_FLAGS: Final = (
    # The FIFOs of the shim's channel are the host's, which gVisor else opens none of; we unlink them at its first word.
    "--host-fifo=open",
    # By default gofers share a namespace, mounted in the state directory, which nobody takes away.
    "--gofer-network-namespace=new",
    # Without it a bundle's filter is ignored.
    "--oci-seccomp",
    "--network=none",
)
TRAITS: Final = {
    "runc": RuntimeTraits("runc", ("--log", "{}", "--log-format", "json"), frozenset({Carrier.FIFO}), False),
    "crun": RuntimeTraits("crun", ("--log", "{}", "--log-format", "json"), frozenset({Carrier.FIFO}), True),
    "runsc": RuntimeTraits(
        *("runsc", ("--log", "{}", "--log-format", "json"), frozenset({Carrier.FIFO}), True),
        flags=_RUNSC_FLAGS,
        own_kernel=True,
    ),
}
