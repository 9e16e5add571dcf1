"""The containers of an attempt that runs, as they are at this moment: for operators, and for whoever shows them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from forgeyard_model.live import LiveContainer, LiveUsage

if TYPE_CHECKING:
    from forgeyard_executor.attempt import Attempt
    from forgeyard_executor.member import Member


def containers_of(attempt: Attempt, *, running: bool) -> tuple[LiveContainer, ...]:
    """The containers of `attempt`, its job's first. Blocking for a few reads of the kernel's files."""
    job = attempt.job
    found = [_container(job, attempt.request.spec.name, attempt.request.spec.image, running=running)]
    for container in attempt.services:
        spec, member = container.spec, container.member
        live = _container(member, spec.name, spec.image, running=running)
        address = "" if attempt.network is None else str(attempt.network.address(spec))
        found.append(replace(live, address=address))
    return tuple(found)


def _container(member: Member, name: str, image: str | None, *, running: bool) -> LiveContainer:
    launched = running and member.launched
    pid = member.container.pid if launched else 0
    dead = launched and member.container.death.done()
    return LiveContainer(
        name=name,
        container_id=member.sandbox.container,
        sandbox_id=member.sandbox.value,
        state="created" if not launched else "exited" if dead else "running",
        pid=pid or None,
        bundle=member.bundle,
        rootfs=member.blueprint.rootfs.identity,
        image=image if member.blueprint.image is None else member.blueprint.image.used.pinned,
        cgroup=member.cgroup.leaf(member.blueprint.leaf),
        usage=_usage(member) if launched and not dead else None,
    )


def _usage(member: Member) -> LiveUsage:
    return replace(member.container.live(), disk_bytes=member.disk.peak)
