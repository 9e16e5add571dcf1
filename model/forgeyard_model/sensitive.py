"""Which variables of a job hold what nobody else should read, as far as a name can say it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

from forgeyard_model.job import Step
from forgeyard_model.services import ServiceSpec

_WORDS: Final = ("TOKEN", "PASSWORD", "PASSWD", "SECRET", "KEY", "CREDENTIAL")


def is_sensitive(name: str) -> bool:
    """Whether the variable `name` sounds like a secret. Rather one too many: ``CACHE_KEY`` is one too."""
    upper = name.upper()
    return any(word in upper for word in _WORDS)


def sensitive_values(
    env: Mapping[str, str], steps: tuple[Step, ...], services: tuple[ServiceSpec, ...]
) -> tuple[tuple[str, str], ...]:
    """Names and values of the variables of a job, its steps and its services that sound like secrets; no empty ones."""
    return tuple(sorted(set(_of_all((env, *(step.env for step in steps), *(service.env for service in services))))))


def _of_all(sources: tuple[Mapping[str, str], ...]) -> Iterator[tuple[str, str]]:
    for env in sources:
        yield from ((name, value) for name, value in env.items() if value and is_sensitive(name))
