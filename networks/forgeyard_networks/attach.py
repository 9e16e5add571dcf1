"""Turn a network policy into what a runtime attaches a container to."""

from __future__ import annotations

from typing import Final

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_model.plan import NetworkAttachment
from forgeyard_model.policy import NetworkMode, NetworkPolicy

SUPPORTED: Final = frozenset({NetworkMode.DENY, NetworkMode.HOST})


def attach(policy: NetworkPolicy) -> NetworkAttachment:
    """The attachment for `policy`.

    DENY needs nothing made beforehand: the runtime makes a namespace with loopback alone, and it dies with the
    container, so there is nothing to lease and nothing to give back.

    :raises ExecutorError: UNSUPPORTED, for a mode this version can't enforce. Nothing weaker is put in its place.
    """
    if policy.mode not in SUPPORTED:
        raise ExecutorError(
            ExecutorErrorKind.UNSUPPORTED,
            "network_mode",
            f"network {policy.mode.value} can't be enforced by this version",
            resolution="use network deny, or host in the development profile",
        )
    return NetworkAttachment(policy.mode)
