"""The caches of one attempt: taken before it is planned, saved once its tree is dead, let go after its mounts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from forgeyard_executor.planning import UID_COUNT, Planned
from forgeyard_host.operations import SandboxPlaced
from forgeyard_model.cache import CacheReport
from forgeyard_model.request import ExecutionRequest

if TYPE_CHECKING:
    from forgeyard_executor.caches import CacheLease, CacheStore


class AttemptCaches:
    """Leases of one attempt. Blocking; an attempt without caches has none of this."""

    def __init__(self, leases: tuple[CacheLease, ...]) -> None:
        self._leases = leases

    @classmethod
    def open(cls, store: Callable[[], CacheStore], request: ExecutionRequest) -> AttemptCaches | None:
        """What `request` may see of each of its caches; None when it has none.

        :raises ExecutorError: IO_FAILED.
        """
        caches, context = request.spec.caches, request.context
        if not caches:
            return None
        return cls(store().open(caches, tenant=context.tenant, trusted=context.trusted))

    def join(self, planned: Planned) -> Planned:
        """`planned` with the caches in it. They lie over the sandbox's own directories, and under its channel."""
        from forgeyard_executor.caches import cache_requests

        parts = cache_requests(self._leases, planned.plan.user)
        *mounts, channel = planned.plan.mounts
        return replace(
            planned,
            plan=replace(planned.plan, mounts=(*mounts, *parts.mounts, channel)),
            binds=(*planned.binds, *parts.binds),
            overlays=(*planned.overlays, *parts.overlays),
            scratch=(*planned.scratch, *parts.scratch),
        )

    def make_places(self, planned: Planned, placed: SandboxPlaced, uid_base: int) -> None:
        """Make the mount points inside the job's own directories, as the job's.

        :raises InvalidRequest: when something that is no directory is in the way.
        """
        from forgeyard_executor.caches import make_mountpoints

        own = {lease.slot for lease in self._leases}
        scratch = {item.slot for item in planned.scratch} - own
        writable = {
            mount.destination: placed.sources[mount.slot] for mount in planned.plan.mounts if mount.slot in scratch
        }
        user = planned.plan.user
        requests = [lease.request for lease in self._leases]
        make_mountpoints(requests, writable, (uid_base + user.uid, uid_base + user.gid))

    def save(self, planned: Planned, placed: SandboxPlaced, uid_base: int) -> tuple[CacheReport, ...]:
        """Keep what the job left in its writable caches. Only once nothing of it runs, and its mounts are up."""
        from forgeyard_executor.caches import left_in

        user = (planned.plan.user.uid, planned.plan.user.gid)
        return tuple(
            lease.commit(left_in(lease, placed), uid_base=uid_base, uid_count=UID_COUNT, job=user)
            for lease in self._leases
        )

    def unsaved(self, why: str) -> tuple[CacheReport, ...]:
        """What became of them when nothing is kept."""
        return tuple(lease.report(why if lease.writable else "") for lease in self._leases)

    def close(self) -> None:
        """Let them go, once nothing is mounted any more. Repeating it is no error."""
        for lease in self._leases:
            lease.close()
