"""What of a Prepare is the operator's to allow: which host paths a caller may name, and whose paths they are."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Self

from forgeyard_api.serve.attempt_types import Caller, OnClientDeath, Wanted
from forgeyard_model.config_serve import ServeConfig
from forgeyard_model.errors import InvalidRequest
from forgeyard_oci.reference import LayoutReference, parse_reference


class Checks:
    """Rules for Prepare.

    :param roots: directories below which a caller's host paths must be, by uid; None: anywhere, for a keeper whose
        server has checked.
    :param default_roots: for a uid that `roots` does not name.
    """

    def __init__(
        self,
        roots: Mapping[int, tuple[str, ...]] | None,
        default_roots: tuple[str, ...] = (),
        on_client_death: OnClientDeath = OnClientDeath.CONTINUE,
    ) -> None:
        self.roots = roots
        self.default_roots = default_roots
        self.on_client_death = on_client_death

    @classmethod
    def configured(cls, config: ServeConfig) -> Self:
        """As the configuration has them."""
        checks = cls({})
        checks.become(config)
        return checks

    def become(self, config: ServeConfig) -> None:
        """Go by another configuration from here on."""
        self.roots = config.roots
        self.default_roots = config.default_roots
        self.on_client_death = OnClientDeath(config.on_client_death)

    def check(self, caller: Caller, wanted: Wanted) -> None:
        """Refuse a path that is not the caller's to name.

        :raises InvalidRequest: by its field, with the roots that are.
        """
        if self.roots is None:
            return
        allowed = self.roots.get(caller.uid, self.default_roots)
        job = wanted.job
        named = [("source", wanted.source), ("output", wanted.output)]
        named += [("job.toolchains", path.source) for path in job.toolchains]
        named += [("job.host_paths", path.source) for path in job.host_paths]
        for name, path in named:
            if path is not None:
                _beneath(name, path, allowed)
        self.check_image(caller, "job.image", job.image or "")
        for service in job.services:
            self.check_image(caller, f"job.services.{service.name}.image", service.image or "")

    def check_image(self, caller: Caller, field: str, image: str) -> None:
        """Refuse an image layout on disk that is not the caller's to name.

        :raises InvalidRequest: by `field`.
        """
        path = _on_disk(image)
        if self.roots is not None and path is not None:
            _beneath(field, path, self.roots.get(caller.uid, self.default_roots))


def _on_disk(image: str) -> str | None:
    """The path of an image layout; None for one in a registry."""
    reference = parse_reference(image) if image.startswith("oci:") else None
    return reference.path if isinstance(reference, LayoutReference) else None


def _beneath(name: str, path: str, roots: tuple[str, ...]) -> None:
    if not path.startswith("/"):
        raise InvalidRequest(name, path, "give an absolute path: the server has a working directory of its own")
    real = os.path.realpath(path)
    for root in roots:
        top = os.path.realpath(root)
        if real == top or real.startswith(top.rstrip("/") + "/"):
            return
    allowed = ", ".join(roots) or "none"
    raise InvalidRequest(name, path, f"is not below a directory that the operator allows you: {allowed}")
