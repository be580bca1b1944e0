"""Plant a fault: one node of a file's syntax tree is another."""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.mutants.places import PLACES, Place

_TURNED: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_OTHER: Final = {"min": "max", "max": "min"}
#: Calls that change nothing but what is said, and places where tests hold a process.
_SILENT: Final = ("log.", "faults.", "logger.")
_LONGEST: Final = 90

_Change = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, by what it does to which function.  `source`: the whole file with it."""

    place: Place
    name: str
    said: str
    source: str


def faults() -> list[Fault]:
    """Return the list: of each place, faults of all its kinds, spread over its functions."""
    return [fault for place in PLACES for fault in _of(place)]


def _of(place: Place) -> list[Fault]:
    text = Path(place.file).read_text()
    found = [one for one in _candidates(text) if not place.only or one[0] in place.only]
    step = max(1.0, len(found) / place.faults)
    chosen = [found[int(number * step)] for number in range(min(place.faults, len(found)))]
    return [
        Fault(place, f"{place.file}:{function}:{kind}", said, _planted(text, number))
        for function, kind, said, number in chosen
    ]


def _candidates(text: str) -> list[tuple[str, str, str, int]]:
    """Return (function, kind and which, what it does, number) of each fault that could be planted."""
    counts = Counter[tuple[str, str]]()
    result = []
    for number, (function, kind, said, _) in enumerate(_changes(ast.parse(text))):
        counts[function, kind] += 1
        result.append((function, f"{kind} {counts[function, kind]}", said, number))
    return result


def _planted(text: str, number: int) -> str:
    tree = ast.parse(text)
    next(change for place, (_, _, _, change) in enumerate(_changes(tree)) if place == number)()
    return ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _changes(tree: ast.Module) -> list[tuple[str, str, str, _Change]]:
    """Return (function, kind, what it does, what changes the tree)."""
    return [
        (function, kind, said, change)
        for function, body in _functions(tree, "")
        for node in _within(body)
        for kind, said, change in (*_in_expression(node), *_in_statements(node))
    ]


def _functions(node: ast.AST, inside: str) -> Iterator[tuple[str, ast.AST]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield from _functions(child, f"{child.name}.")
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"{inside}{child.name}", child


def _within(function: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function's body in order."""
    yield function
    for name, value in ast.iter_fields(function):
        if name in ("args", "decorator_list", "returns", "annotation", "type_comment"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield from _within(child)


def _in_expression(node: ast.AST) -> Iterator[tuple[str, str, _Change]]:
    match node:
        case ast.Compare(ops=[operator, *_]) if type(operator) in _TURNED:
            turned = copy.copy(node)
            turned.ops = [_TURNED[type(operator)](), *node.ops[1:]]

            def turn(node: ast.Compare = node, turned: ast.Compare = turned) -> None:
                node.ops = turned.ops

            yield "comparison", f"`{_short(node)}` is `{_short(turned)}`", turn
        case ast.Call(func=ast.Name(id="min" | "max" as name) as called):

            def swap(called: ast.Name = called, name: str = name) -> None:
                called.id = _OTHER[name]

            yield "extreme", f"`{_short(node)}` takes the {_OTHER[name]}", swap
        case ast.BinOp(op=ast.Add() | ast.Sub()) if not isinstance(node.right, ast.Constant | ast.JoinedStr | ast.List):
            other = ast.Sub() if isinstance(node.op, ast.Add) else ast.Add()

            def compute(node: ast.BinOp = node, other: ast.operator = other) -> None:
                node.op = other

            yield "sum", f"`{_short(node)}` has the other sign", compute
        case ast.BoolOp():
            connective = ast.Or() if isinstance(node.op, ast.And) else ast.And()

            def connect(node: ast.BoolOp = node, connective: ast.boolop = connective) -> None:
                node.op = connective

            yield "connective", f"`{_short(node)}` has {'or' if isinstance(connective, ast.Or) else 'and'}", connect


def _in_statements(node: ast.AST) -> Iterator[tuple[str, str, _Change]]:
    for name in ("body", "orelse", "finalbody"):
        statements = getattr(node, name, None)
        if not isinstance(statements, list):
            continue
        for place, statement in enumerate(statements):
            yield from _in_statement(statements, place, statement)


def _in_statement(statements: list[ast.stmt], place: int, statement: ast.stmt) -> Iterator[tuple[str, str, _Change]]:
    def replace(*others: ast.stmt) -> _Change:
        def change() -> None:
            statements[place : place + 1] = others

        return change

    match statement:
        case ast.Expr(value=ast.Call() | ast.Await()) if not _short(statement).startswith(_SILENT):
            yield "call", f"`{_short(statement)}` is left out", replace(ast.Pass())
            following = statements[place + 1] if place + 1 < len(statements) else None
            if isinstance(following, ast.Expr | ast.Assign) and not _short(following).startswith(_SILENT):

                def exchange() -> None:
                    statements[place : place + 2] = reversed(statements[place : place + 2])

                yield "order", f"`{_short(following)}` comes before `{_short(statement)}`", exchange
        case ast.With() | ast.AsyncWith() if any(word in _short(statement.items[0]) for word in ("lock", "_writing")):
            yield "lock", f"`{_short(statement.items[0])}` is not held", replace(*statement.body)
        case ast.Raise(exc=ast.expr()):
            yield "error", f"`{_short(statement)}` is left out", replace(ast.Pass())
        case ast.Assign(targets=[ast.Attribute()]) | ast.AugAssign(target=ast.Attribute()):
            yield "state", f"`{_short(statement)}` is left out", replace(ast.Pass())


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split()).replace("|", "¦").replace("`", "'")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}…"
