"""Daemons that make control groups through systemd are refused by name, before anything starts."""

from __future__ import annotations

import pytest
from adapters import Adapter
from contract_box import box
from daemons import PodmanService

from forgeyard_model.errors import ExecutorError, ExecutorErrorKind
from forgeyard_runtimes.containerd.messages import runc
from forgeyard_runtimes.containerd.settings import ContainerdSettings
from forgeyard_runtimes.containerd.translate import runtime_options, uncarried
from forgeyard_runtimes.contract import ContainerRuntime, ContainerStatus

GROUP = {"linux": {"cgroupsPath": "/forgeyard/x/job"}, "root": {"path": "/r"}}


class SystemdPodman(PodmanService):
    """Podman with the manager that most hosts have. It says so, and needs no systemd until it makes a group."""

    def podman(self, *arguments: str) -> list[str]:
        return ["systemd" if word == "cgroupfs" else word for word in super().podman(*arguments)]


@pytest.mark.kernel
@pytest.mark.daemon("podman")
def test_podman() -> None:
    """A real service with systemd as its manager takes none of our groups: typed, with a cure, and nothing is left."""
    with SystemdPodman() as service:
        adapter = Adapter("podman", service.address)

        async def main(runtime: ContainerRuntime) -> None:
            async with box(runtime) as made:
                with pytest.raises(ExecutorError) as caught:
                    await made.create()
                assert (caught.value.kind, caught.value.reason) == (
                    ExecutorErrorKind.UNSUPPORTED,
                    "podman_cgroup_manager",
                )
                assert "cgroupfs" in caught.value.resolution
                assert (await runtime.state(made.ref)).status is ContainerStatus.ABSENT

        try:
            adapter.run(main)
        finally:
            adapter.close()


def test_containerd_is_told_the_driver() -> None:
    """Options go along with each container, so that no configuration of the daemon's decides about its group."""
    options = runtime_options(ContainerdSettings())
    assert options is not None
    sent = runc.Options.FromString(options.value)
    assert sent.systemd_cgroup is False
    assert uncarried(GROUP, ContainerdSettings()) == ()
    assert uncarried(GROUP, ContainerdSettings(systemd_cgroup=True)) == (
        "linux.cgroupsPath (of another cgroup driver)",
    )
