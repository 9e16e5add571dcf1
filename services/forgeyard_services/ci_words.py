"""Pieces that the readers of CI files share: values out of a YAML tree; every refusal has the place it stands at."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Final

from forgeyard_model.errors import InvalidRequest

MOST_EXPANDED: Final = 64 << 10
_TAG: Final = re.compile(r":[^/:]*\Z")
_PORT: Final = re.compile(r":\d+(?=/)")
_ENGINES: Final = re.compile(r"(?:^|/)(?:docker(?::.*dind.*|)|podman|dind|buildkit|kaniko)(?=[:@]|\Z)")


def mapping_at(value: object, where: str) -> Mapping[str, object]:
    """A mapping with text for keys; absent is an empty one.

    :raises InvalidRequest: it is something else.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidRequest(where, value, "write a mapping")
    return value


def text_at(value: object, where: str) -> str:
    """Text that says something.

    :raises InvalidRequest: it is something else.
    """
    if not isinstance(value, str) or not value.strip():
        raise InvalidRequest(where, value, "write text")
    return value


def scalar_at(value: object, where: str) -> str:
    """A variable's value, which YAML may have read as a number or a truth value.

    :raises InvalidRequest: it is a list or a mapping.
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise InvalidRequest(where, value, "write text, in quotes")


def words_at(value: object, where: str) -> tuple[str, ...] | None:
    """A command: a list of words, or one string, split as a shell would; None when it is not there.

    :raises InvalidRequest: it is something else.
    """
    if value is None:
        return None
    if isinstance(value, str):
        try:
            return tuple(shlex.split(value))
        except ValueError as error:
            raise InvalidRequest(where, value, f"is no command ({error}): write a list") from error
    if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
        raise InvalidRequest(where, value, "write a list of words")
    return tuple(value)


def refuse_others(given: Mapping[str, object], known: frozenset[str], where: str) -> None:
    """Refuse every key that is not `known`.

    :raises InvalidRequest: names the first.
    """
    for key in given:
        if key not in known:
            raise InvalidRequest(f"{where}.{key}", given[key], "is not supported here: take it out")


def refuse_engines(image: str, where: str) -> None:
    """Refuse images that are container engines: they need rights that no sandbox gives.

    :raises InvalidRequest: with what to do instead.
    """
    if _ENGINES.search(image):
        cure = "a container engine can't run in a sandbox: declare what it would start as services of their own"
        raise InvalidRequest(where, image, cure)


def image_names(image: str) -> tuple[str, ...]:
    """Host names that an image's reference stands for: tag, digest and port dropped, then ``/`` as ``-`` and ``__``."""
    path = _PORT.sub("", _TAG.sub("", image.partition("@")[0])).lower()
    return tuple(dict.fromkeys(re.sub(r"[^a-z0-9_.-]", "-", path.replace("/", by)) for by in ("-", "__")))


_REFERENCE: Final = re.compile(r"\$\$|\$(?:(?P<plain>[A-Za-z_][A-Za-z0-9_]*)|\{(?P<braced>[A-Za-z_][A-Za-z0-9_]*)\})")


def references(text: str) -> Iterator[str]:
    """Names of the variables that ``$NAME`` and ``${NAME}`` in `text` stand for."""
    for match in _REFERENCE.finditer(text):
        if name := match["plain"] or match["braced"]:
            yield name


def expand(text: str, values: Mapping[str, str], where: str) -> str:
    """`text` with variables of `values` filled in, unknown ones as nothing, ``$$`` as ``$``. One pass.

    :raises InvalidRequest: it grows past what a variable can hold, as one of doubling references would.
    """
    room = MOST_EXPANDED

    def value(match: re.Match[str]) -> str:
        nonlocal room
        name = match["plain"] or match["braced"]
        found = values.get(name, "") if name else "$"
        room -= len(found)
        if room < 0:
            raise InvalidRequest(where, text, f"grows past {MOST_EXPANDED >> 10} KiB when it is filled in")
        return found

    return _REFERENCE.sub(value, text)
