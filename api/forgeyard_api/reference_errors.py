"""The page of docs/ that lists every reason of every error kind, read from the code that raises them.

A reason is a literal, or comes to a function that makes the error; then the calls of that function say what it is.
Parts of a text that only a run knows are shown as `…`.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Final, NamedTuple

from forgeyard_model.errors import ExecutorErrorKind, SandboxErrorKind

AREAS: Final = ("model", "host", "oci", "process_shim", "networks", "runtimes", "services", "executor", "api")
KINDS: Final = {"SandboxError": SandboxErrorKind, "ExecutorError": ExecutorErrorKind}
_FIELDS: Final = ("kind", "reason", "brief", "resolution")
_KIND_CLASSES: Final = frozenset(kinds.__name__ for kinds in KINDS.values())
_SUBCLASSES: Final = {"NotThere": "ExecutorError"}
_UNKNOWN: Final = "…"
_ROUNDS: Final = 4
"""More than functions that make errors call one another."""


class Parameter(NamedTuple):
    """A place in a text that a caller fills."""

    name: str


Text = tuple["str | Parameter", ...]
Texts = tuple[Text, ...]
Function = ast.FunctionDef | ast.AsyncFunctionDef
Name = tuple[str, str]
"""A module, and a function in it."""


class Known(NamedTuple):
    """One way in which the code fails."""

    type: str
    kind: str
    reason: str
    brief: str
    cure: str


@dataclass(frozen=True, slots=True)
class _Maker:
    """A function that makes an error of what it is given, or an error's class itself."""

    type: str
    parameters: tuple[str, ...]
    fields: Mapping[str, Texts]


@dataclass(frozen=True, slots=True)
class _Call:
    """A call, where it stands."""

    module: str
    constants: Mapping[str, ast.expr]
    function: Function | None
    node: ast.Call

    @property
    def called(self) -> str:
        target = self.node.func
        return target.id if isinstance(target, ast.Name) else getattr(target, "attr", "")

    @property
    def parameters(self) -> tuple[str, ...]:
        if self.function is None:
            return ()
        arguments = self.function.args
        return tuple(item.arg for item in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs))

    def text(self, node: ast.expr | None) -> Texts:
        """What `node` may say, as far as it stands in the code."""
        found: Texts = ((_UNKNOWN,),)
        match node:
            case None:
                found = ((),)
            case ast.Constant(value):
                found = ((str(value),),)
            case ast.IfExp(_, body, orelse):
                found = self.text(body) + self.text(orelse)
            case ast.JoinedStr(parts):
                found = self._joined(parts)
            case ast.BinOp(left, _, right):
                found = self._joined([left, right])
            case ast.FormattedValue(ast.Name(name)) if name in self.parameters:
                found = ((Parameter(name),),)
            case ast.Name(name):
                found = ((Parameter(name),),) if name in self.parameters else self._assigned(name)
            case ast.Attribute(ast.Name(owner), attribute) if owner in _KIND_CLASSES:
                found = ((attribute.lower(),),)
        return found

    def _joined(self, parts: Iterable[ast.expr]) -> Texts:
        return tuple(sum(choice, ()) for choice in itertools.product(*map(self.text, parts)))

    def _assigned(self, name: str) -> Texts:
        """What a local variable may hold."""
        found: Texts = ()
        for item in ast.walk(self.function) if self.function is not None else ():
            if not isinstance(item, ast.Assign):
                continue
            for target in item.targets:
                if isinstance(target, ast.Name) and target.id == name and not isinstance(item.value, ast.Name):
                    found += self.text(item.value)
                elif isinstance(target, ast.Tuple) and isinstance(item.value, ast.Tuple):
                    pairs = zip(target.elts, item.value.elts, strict=True)
                    found += tuple(
                        text
                        for place, value in pairs
                        if isinstance(place, ast.Name) and place.id == name
                        for text in self.text(value)
                    )
        if not found and name in self.constants:
            return self.text(self.constants[name])
        return found or ((_UNKNOWN,),)

    def fields(self, maker: _Maker) -> dict[str, Texts]:
        """The maker's texts with this call's arguments in them."""
        bound = dict(zip(maker.parameters, self.node.args, strict=False))
        bound.update({item.arg: item.value for item in self.node.keywords if item.arg is not None})
        values = {name: self.text(bound.get(name)) for name in maker.parameters}
        return {field: tuple(_filled(texts, values)) for field, texts in maker.fields.items()}


def _filled(texts: Texts, values: Mapping[str, Texts]) -> Iterator[Text]:
    for text in texts:
        parts = [values.get(part.name, ((),)) if isinstance(part, Parameter) else ((part,),) for part in text]
        for choice in itertools.product(*parts):
            yield sum(choice, ())


@cache
def known_errors() -> tuple[Known, ...]:
    """Every error that the code of the areas makes, each kind's reasons in order of the alphabet."""
    code = _Code()
    classes = {name: _class(name) for name in KINDS} | {name: _class(of) for name, of in _SUBCLASSES.items()}
    makers: dict[Name, _Maker] = {}
    found: set[Known] = set()
    for _ in range(_ROUNDS):
        code.read({*classes, *(function for _, function in makers)})
        for call in code.calls:
            name = code.imports.get((call.module, call.called), (call.module, call.called))
            maker = classes.get(call.called) or makers.get(name)
            if maker is None:
                continue
            fields = call.fields(maker)
            if call.function is not None and _open(fields):
                made = _Maker(maker.type, tuple(p for p in call.parameters if p not in ("self", "cls")), fields)
                makers.setdefault((call.module, call.function.name), made)
            else:
                found.update(_said(maker.type, fields))
    return tuple(sorted(found))


def _class(name: str) -> _Maker:
    return _Maker(name, _FIELDS, {field: ((Parameter(field),),) for field in _FIELDS})


def _open(fields: Mapping[str, Texts]) -> bool:
    """Whether kind or reason is left to the caller."""
    return any(isinstance(part, Parameter) for field in ("kind", "reason") for text in fields[field] for part in text)


def _said(type_: str, fields: Mapping[str, Texts]) -> Iterator[Known]:
    reasons = fields["reason"]

    def beside(field: str, index: int) -> Texts:
        # Where several reasons and as many of something else are chosen between, they are chosen together.
        texts = fields[field]
        return (texts[index],) if len(texts) == len(reasons) else texts if field == "kind" else texts[:1]

    for index, reason in enumerate(reasons):
        for kind in beside("kind", index):
            texts = (kind, reason, *beside("brief", index), *beside("resolution", index))
            known = Known(type_, *map(_shown, texts))
            if known.kind in set(KINDS[type_]) and not known.reason.startswith(_UNKNOWN):
                yield known


def _shown(text: Text) -> str:
    return "".join(_UNKNOWN if isinstance(part, Parameter) else part for part in text)


class _Code:
    """The areas' modules, of which those are parsed that call what is of interest.

    calls: all of their calls. imports: what each of their imported names is.
    """

    def __init__(self) -> None:
        self.calls: list[_Call] = []
        self.imports: dict[Name, Name] = {}
        self._unread = dict(_modules())

    def read(self, functions: set[str]) -> None:
        """Parse what calls one of these, and was not parsed before."""
        called = re.compile(rf"\b(?:{'|'.join(functions)})\(")
        for module in [module for module, text in self._unread.items() if called.search(text)]:
            tree = ast.parse(self._unread.pop(module))
            named = _constants(tree)
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    names = {(module, item.asname or item.name): (node.module, item.name) for item in node.names}
                    self.imports.update(names)
            self.calls += [_Call(module, named, function, node) for function, node in _calls(tree)]


def _modules() -> Iterator[tuple[str, str]]:
    for area in AREAS:
        spec = find_spec(f"forgeyard_{area}")
        for root in (spec.submodule_search_locations or ()) if spec is not None else ():
            for path in sorted(Path(root).rglob("*.py")):
                parts = path.relative_to(Path(root).parent).with_suffix("").parts
                yield ".".join(parts).removesuffix(".__init__"), path.read_text(encoding="utf-8")


def _constants(tree: ast.Module) -> dict[str, ast.expr]:
    """The texts that a module names."""
    named: dict[str, ast.expr] = {}
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        value = getattr(node, "value", None)
        if isinstance(value, ast.Constant | ast.JoinedStr | ast.BinOp):
            named.update({target.id: value for target in targets if isinstance(target, ast.Name)})
    return named


def _calls(tree: ast.Module) -> Iterator[tuple[Function | None, ast.Call]]:
    """Every call of a module, with the innermost function around it."""
    waiting: list[tuple[Function | None, ast.AST]] = [(None, tree)]
    while waiting:
        function, node = waiting.pop()
        if isinstance(node, ast.Call):
            yield function, node
        inner = node if isinstance(node, Function) else function
        waiting += [(inner, child) for child in ast.iter_child_nodes(node)]


_INTRO: Final = """\
# Errors and their reasons

<!-- Made by `python -m forgeyard_api.reference_docs docs` from the code that makes the errors: do not edit. -->

Every error has a type, a kind, a reason for programs, one line for people, and mostly a cure. What each kind means, and
what to do about it, is in [troubleshooting](troubleshooting.md). A kind is stable; reasons are added, and one that is
gone is named in the change log. `…` stands for what only the moment knows. `InvalidRequest`, which is no row here,
names a field, its value and a cure of its own; it is always the request's fault.
"""


def reasons_page() -> str:
    """docs/error-reasons.md."""
    known = known_errors()
    lines = [_INTRO]
    for type_, kinds in KINDS.items():
        for kind in kinds:
            rows = [item for item in known if (item.type, item.kind) == (type_, kind.value)]
            lines += [f"## {type_} {kind.value}\n", *(_table(rows) or [_NO_REASONS])]
    return "\n".join(lines)


_NO_REASONS: Final = "Nothing is refused with this kind by this version.\n"


def _table(rows: list[Known]) -> list[str]:
    lines = []
    for reason, group in itertools.groupby(rows, key=lambda item: item.reason):
        items = list(group)
        said = "<br>".join(dict.fromkeys(_cell(item.brief) for item in items))
        cure = "<br>".join(dict.fromkeys(_cell(item.cure) for item in items if item.cure and item.cure != _UNKNOWN))
        lines.append(f"| `{reason}` | {said} | {cure} |")
    return ["| Reason | It says | Cure |\n|---|---|---|", *lines, ""] if lines else []


def _cell(text: str) -> str:
    """`text` inside a table, where nothing of it is markup."""
    for character in "\\|*<[":
        text = text.replace(character, f"\\{character}")
    return text
