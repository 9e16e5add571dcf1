"""Which containerd, and how: given by configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from forgeyard_runtimes.contract import Carrier
from forgeyard_runtimes.labels import STATE

NAMESPACE: Final = "forgeyard"
RUNC: Final = "io.containerd.runc.v2"

# What of ours each handler's containers can reach. gVisor, unless its shim is configured with host-fifo, and a virtual
# machine open no FIFO of the host's, so nothing of ours can run there until the shim has another carrier.
HANDLERS: Final = {
    RUNC: frozenset({Carrier.FIFO}),
    "io.containerd.runsc.v1": frozenset[Carrier](),
    "io.containerd.kata.v2": frozenset[Carrier](),
}


@dataclass(frozen=True, slots=True)
class ContainerdSettings:
    """One daemon as one executor uses it.

    :param address: a path, or ``unix:///PATH``; empty takes CONTAINERD_ADDRESS, or the usual place.
    :param namespace: containerd's, apart from other users of the daemon.
    :param handler: name of the runtime handler, one of HANDLERS.
    :param binary: program with runc's command line that the handler runs; empty takes its default.
    :param systemd_cgroup: that program makes control groups through systemd.
    :param snapshotter: what unpacks images that are put into the daemon.
    :param executor: its id, for labels.
    :param state: what names its state directory (a digest), for labels: a sweep looks at no other's objects.
    :param own_rootfs: images are unpacked by the executor; False leaves it to the engine.
    :param images: directory of the executor's image store: what that forgets goes here too.
    """

    address: str = ""
    namespace: str = NAMESPACE
    handler: str = RUNC
    binary: str = ""
    systemd_cgroup: bool = False
    snapshotter: str = "overlayfs"
    executor: str = ""
    state: str = ""
    own_rootfs: bool = True
    images: str = ""


def owned_by(settings: ContainerdSettings) -> str:
    """The filter for objects of one state directory, whichever executor made them."""
    return f'labels."{STATE}"=={settings.state}'
