"""By which labels objects of ours are found at an engine, and nothing of others."""

from __future__ import annotations

from pathlib import Path
from typing import Final, Protocol

from forgeyard_host.processes import boot_id

SANDBOX: Final = "forgeyard.sandbox"
EXECUTOR: Final = "forgeyard.executor"
STATE: Final = "forgeyard.state"
BOOT: Final = "forgeyard.boot"
DIRECTORY: Final = "forgeyard.directory"
_CONTAINER: Final = "fy-"


class Owner(Protocol):
    """Whose objects they are: every adapter's settings say it."""

    @property
    def executor(self) -> str:
        """Its id."""

    @property
    def state(self) -> str:
        """What names its state directory, see `find.state_name`."""


def owner_labels(owner: Owner, sandbox: str, directory: Path | None = None) -> dict[str, str]:
    """Of everything that is made for `sandbox`.

    :param directory: of a container: by which `list` finds it.
    """
    labels = {SANDBOX: sandbox, EXECUTOR: owner.executor, STATE: owner.state, BOOT: boot_id()}
    return labels if directory is None else {**labels, DIRECTORY: str(directory)}


def label_filter(owner: Owner) -> dict[str, list[str]]:
    """What a listing of Docker's or Podman's takes to show one state directory's objects, whoever made them."""
    return {"label": [f"{STATE}={owner.state}"]}


def sandbox_of(container_id: str) -> str:
    """The sandbox's id in a container's name."""
    return container_id.removeprefix(_CONTAINER)
