"""Services out of the files of other CI systems: a parsed YAML tree becomes ServiceSpecs, and notes on what differs.

Nothing is taken over silently that means something else here, and nothing is dropped: it is read, noted, or refused
by name.
"""

from __future__ import annotations

from collections.abc import Mapping

from forgeyard_model.errors import InvalidRequest
from forgeyard_model.services import ServiceSpec
from forgeyard_services.github import github_services
from forgeyard_services.gitlab import gitlab_services

Found = tuple[tuple[ServiceSpec, ...], tuple[str, ...]]


def read_services(tree: object, job: str | None = None) -> Found:
    """The services of `job` in a GitLab or a GitHub file, and notes. A GitHub workflow is known by its ``jobs``.

    :param job: None for a GitLab file's services for every job, or for a GitHub file's only job with services.
    :raises InvalidRequest: names the place in the file, and the cure.
    """
    if not isinstance(tree, Mapping):
        raise InvalidRequest("services file", type(tree).__name__, "is no CI file: it has to be a mapping")
    return github_services(tree, job) if isinstance(tree.get("jobs"), Mapping) else gitlab_services(tree, job)
