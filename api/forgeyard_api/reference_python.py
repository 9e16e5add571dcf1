"""The page of docs/ that has the public Python names, from their docstrings."""

from __future__ import annotations

import enum
import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass
from typing import Any, Final

MODULES: Final = ("forgeyard_executor", "forgeyard_api.client", "forgeyard_executor.testing")
_PLAIN: Final = (bool, int, float, str, bytes, type(None), tuple)
_FIELD: Final = re.compile(r"^:(?P<role>param|raises|return|returns) ?(?P<name>[^:]*): ?(?P<text>.*)$")
_INTRO: Final = """\
# Python reference

<!-- Made by `python -m forgeyard_api.reference_docs docs` from docstrings: do not edit. -->

What programs import. `forgeyard_api` has the most used of these names too, and imports them when they are first used.
Everything is typed; sizes are bytes or words such as `"512MiB"`, times are seconds or words such as `"10m"`.
"""


def python_page() -> str:
    """docs/python-reference.md."""
    seen: set[int] = set()
    parts = [_INTRO]
    for name in MODULES:
        module = importlib.import_module(name)
        parts += [f"## {name}\n", _words(module.__doc__ or "") + "\n"]
        for public in sorted(module.__all__):
            found = getattr(module, public)
            if id(found) not in seen:
                seen.add(id(found))
                parts += [f"### {public}\n", *_described(public, found)]
    return "\n".join(parts).rstrip() + "\n"


def _described(name: str, found: Any) -> Iterator[str]:
    if isinstance(found, enum.EnumMeta):
        yield _words(found.__doc__ or "") + "\n"
        members: list[enum.Enum] = list(found.__members__.values())
        yield "\n".join(f"- `{member.name}`: `{member.value}`" for member in members) + "\n"
    elif isinstance(found, type):
        yield from _class(name, found)
    elif callable(found):
        yield _code(_signature(name, found))
        yield _words(inspect.getdoc(found) or "") + "\n"
    else:
        yield f"One of {found}.\n"


def _class(name: str, found: type) -> Iterator[str]:
    if is_dataclass(found) or found.__init__ is not object.__init__:  # type: ignore[misc]  # looked at, not called
        yield _code(_signature(name, found))
    yield _words(inspect.getdoc(found) or "") + "\n"
    for attribute, member in sorted(vars(found).items()):
        if attribute.startswith("_"):
            continue
        plain = inspect.unwrap(getattr(member, "__func__", member)) if not isinstance(member, property) else member
        if isinstance(member, property):
            yield f"`{attribute}`: {_words(inspect.getdoc(member) or '')}\n"
        elif inspect.isroutine(plain) and inspect.getdoc(plain):
            yield _code(_signature(attribute, plain))
            yield _words(inspect.getdoc(plain) or "") + "\n"


def _signature(name: str, found: Callable[..., Any]) -> str:
    try:
        signature = inspect.signature(found)
    except ValueError:  # an exception of the interpreter's own
        return f"{name}(…)"
    kept = [
        item.replace(default=_Default(item.default)) if item.default is not item.empty else item
        for item in signature.parameters.values()
        if item.name not in ("self", "cls")
    ]
    # A class's own annotation of its result says nothing.
    result = signature.empty if isinstance(found, type) else signature.return_annotation
    prefix = "async " if inspect.iscoroutinefunction(found) else ""
    text = str(signature.replace(parameters=kept, return_annotation=result)).replace("'", "")
    return f"{prefix}{name}{text}" if len(text) < 90 else prefix + name + _broken(text)


def _broken(text: str) -> str:
    """A signature with one parameter a line."""
    depth, lines, current = 0, [], ""
    inside, _, result = text[1:].rpartition(")")
    for character in inside:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            lines.append(current.strip())
            current = ""
        else:
            current += character
    lines.append(current.strip())
    return "(\n" + "".join(f"    {line},\n" for line in lines) + ")" + result


class _Default:
    """A parameter's default, as code has it; `...` for what is long or different each time."""

    def __init__(self, value: object) -> None:
        self._value = value

    def __repr__(self) -> str:
        if isinstance(self._value, enum.Enum):
            return f"{type(self._value).__name__}.{self._value.name}"
        return repr(self._value) if isinstance(self._value, _PLAIN) and len(repr(self._value)) < 40 else "..."


def _code(text: str) -> str:
    return f"```python\n{text}\n```\n"


def _words(doc: str) -> str:
    """A docstring as Markdown: its fields become a list."""
    lines: list[str] = []
    for line in inspect.cleandoc(doc).replace("``", "`").splitlines():
        field = _FIELD.match(line)
        if field is None:
            lines.append(line)
            continue
        if lines and lines[-1] and not lines[-1].startswith("- "):
            lines.append("")
        named = f"`{field['name']}`" if field["name"] else ""
        role = {"param": "", "raises": "raises "}.get(field["role"], "returns ")
        lines.append(f"- {role}{named}: {field['text']}".replace("returns :", "returns"))
    return "\n".join(lines)
