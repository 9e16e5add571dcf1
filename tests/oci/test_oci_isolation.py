"""Which namespaces a bundle makes, and which it joins."""

from __future__ import annotations

import pytest

from forgeyard_model.errors import SandboxError
from forgeyard_model.policy import NetworkMode
from forgeyard_oci.spec.isolation import with_namespaces


def test_user_namespace_is_joined_by_path() -> None:
    """A namespace that the placement names is joined; every other one is still new."""
    fields = with_namespaces(NetworkMode.DENY, None, user_namespace=True, userns="/proc/7/fd/9")
    kinds = {entry["type"]: entry.get("path") for entry in fields["linux/namespaces"]}
    assert kinds.pop("user") == "/proc/7/fd/9"
    assert kinds == dict.fromkeys(("cgroup", "ipc", "mount", "pid", "uts", "network"))


@pytest.mark.parametrize(("planned", "path"), [(True, "proc/7/fd/9"), (False, "/proc/7/fd/9")])
def test_user_namespace_that_does_not_fit_is_refused(planned: bool, path: str) -> None:
    """A relative path, or a namespace that no plan asked for, is refused."""
    with pytest.raises(SandboxError, match="user namespace"):
        with_namespaces(NetworkMode.DENY, None, user_namespace=planned, userns=path)
