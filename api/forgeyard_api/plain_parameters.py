"""Values of the command line without pydantic.

Recent typer reads every value that is not a flag through a pydantic adapter, also the two completion options that
each command line carries: 100 ms before `forgeyard ps` does anything. All our values are text, paths, or lists of
them, so they need none of it. typer keeps its reader in a private field; should that move, typer's own way takes over,
slower but right, and a test of ours says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

from forgeyard_api.main import UnusableInput
from forgeyard_model.errors import InvalidRequest


class PlainReader:
    """Stands in for typer's reader of one parameter: text stays text, paths become Path."""

    def __init__(self, annotation: Any, name: str) -> None:
        self._name = name
        self._is_path = Path in (annotation, *get_args(annotation))

    def coerce(self, value: Any, **_: Any) -> Any:
        """The value a command gets; typer passes the parameter and context as well."""
        if isinstance(value, (list, tuple)):
            return [self._one(item) for item in value]
        return self._one(value)

    def _one(self, value: Any) -> Any:
        if not self._is_path or not isinstance(value, str):
            return value
        if not value or "\0" in value:
            # Path("") is the working directory, which `--source "$UNSET"` did not mean.
            cure = "holds a NUL byte: take it out" if value else "can't be empty: name a path, or leave it out"
            raise UnusableInput(InvalidRequest(self._name, value, cure))
        return Path(value)


def use_plain_readers(command: Any) -> None:
    """Give every flag, text and path parameter of `command`, and of the commands below it, a PlainReader."""
    for parameter in command.params:
        _use(parameter)
    find_help = command.get_help_option

    def help_option(ctx: Any) -> Any:
        # --help is made when it is first looked for, and read like the rest.
        found = find_help(ctx)
        return found if found is None else _use(found)

    command.get_help_option = help_option
    for child in getattr(command, "commands", {}).values():
        use_plain_readers(child)


def _use(parameter: Any) -> Any:
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    if annotation in (str, Path, list[str], list[Path], bool):
        parameter._runtime_param = PlainReader(annotation, _name(parameter))
    return parameter


def _name(parameter: Any) -> str:
    """As the user writes it: the long flag, or an argument's placeholder."""
    flags = [flag for flag in getattr(parameter, "opts", ()) if flag.startswith("--")]
    return flags[0] if flags else str(parameter.metavar or parameter.name).strip("[]")
