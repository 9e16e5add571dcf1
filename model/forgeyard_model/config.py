"""The executor's configuration as it is used. Reading and merging the files is `forgeyard_executor.config_load`'s."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from forgeyard_model.limits import ResourceLimits
from forgeyard_model.policy import ApprovedHostPath, IsolationLevel

DEFAULT_STATE_DIR: Final = "/var/lib/forgeyard"
DEFAULT_RUNTIME: Final = "runc"


@dataclass(frozen=True, slots=True)
class UidBlock:
    """Host ids that attempts take their ranges from: `base` .. `base` + `size` - 1."""

    base: int
    size: int


@dataclass(frozen=True, slots=True)
class PatternRule:
    """Patterns of one file: a value must match one of them. `origin`: where they stand, for messages."""

    patterns: tuple[str, ...]
    origin: str


@dataclass(frozen=True, slots=True)
class ExecutorConfig:
    """The effective configuration; a field that nothing sets has the product's default.

    :param minimum_isolation: no job runs behind less, whatever its profile says.
    :param default_limits: in the place of the profile's, where a job names none.
    :param maximum_limits: a job that asks for more is refused.
    :param exact_limits: a limit that this host could only clamp is refused too, instead of being noted.
    :param allowed_registries, allowed_images: every rule must let an image pass; no rule lets all pass.
    :param approved_host_paths: shown to every job; the results say impure.
    :param origins: where a value comes from, by dotted key; a default has none.
    """

    state_dir: str = DEFAULT_STATE_DIR
    runtime: str = DEFAULT_RUNTIME
    minimum_isolation: IsolationLevel = IsolationLevel.NONE
    default_limits: ResourceLimits = field(default_factory=ResourceLimits)
    maximum_limits: ResourceLimits = field(default_factory=ResourceLimits)
    exact_limits: bool = False
    allowed_registries: tuple[PatternRule, ...] = ()
    allowed_images: tuple[PatternRule, ...] = ()
    approved_host_paths: tuple[ApprovedHostPath, ...] = ()
    uid_block: UidBlock | None = None
    origins: tuple[tuple[str, str], ...] = ()

    def origin(self, key: str) -> str:
        """Where the value of `key` was set: ``FILE:LINE``, ``env NAME``, or ``default``."""
        return dict(self.origins).get(key, "default")
