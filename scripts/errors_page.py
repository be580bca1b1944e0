"""The page of every error that the program can raise, read from its sources: SQLSTATE, message, detail and hint."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import psycopg.errors

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("apply", "catalog", "launcher", "pubsub", "tablesync", "walsender")
# What no user of a node meets: the demo's own, and the test harness's.
_ELSEWHERE = ("pubsub/demo/", "pubsub/testing/")

_INTRODUCTION = """\
Every error of the program, by SQLSTATE, from its sources. `…` stands for what differs from case to case. What to do is
the hint that comes with the error; [what happens after an error](../errors.md) is the same for all. What a publisher's
server says itself is passed on with its own SQLSTATE and is not listed.

"""


class Raised(NamedTuple):
    """An error as one place raises it; "" for a detail or a hint that it has not, "…" for what only the run knows."""

    sqlstate: str
    message: str
    detail: str
    hint: str


class _Class(NamedTuple):
    bases: tuple[str, ...]
    sqlstate: str | None


@cache
def raised() -> frozenset[Raised]:
    """Return the errors of all packages whose SQLSTATE and message stand in the source."""
    trees = [
        ast.parse(path.read_text(encoding="utf-8"))
        for package in PACKAGES
        for path in sorted((ROOT / package).rglob("*.py"))
        if not str(path.relative_to(ROOT)).startswith(_ELSEWHERE)
    ]
    classes = dict(one for tree in trees for one in _classes(tree))
    return frozenset(error for tree in trees for error in _errors(tree, classes))


def _classes(tree: ast.AST) -> Iterator[tuple[str, _Class]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            sqlstate = None
            for each in node.body:
                if isinstance(each, ast.Assign | ast.AnnAssign) and isinstance(each.value, ast.Constant):
                    target = each.targets[0] if isinstance(each, ast.Assign) else each.target
                    if isinstance(target, ast.Name) and target.id == "default_sqlstate":
                        sqlstate = str(each.value.value)
            yield node.name, _Class(tuple(filter(None, map(_name, node.bases))), sqlstate)


def _sqlstate(name: str, classes: dict[str, _Class]) -> str | None:
    """Return the default of an error's class; None if it is no PubsubError."""
    known = classes.get(name)
    if known is None:
        return None
    for base in known.bases:
        if base != name and (inherited := _sqlstate(base, classes)) is not None:
            return known.sqlstate or inherited
    return known.sqlstate if name == "PubsubError" else None


def _errors(tree: ast.AST, classes: dict[str, _Class]) -> Iterator[Raised]:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or (default := _sqlstate(_name(node.func), classes)) is None:
            continue
        given = {one.arg: one.value for one in node.keywords}
        sqlstate = _text(given["sqlstate"]) if "sqlstate" in given else default
        message = _text(node.args[0]) if node.args else ""
        if re.fullmatch("[0-9A-Z]{5}", sqlstate) and re.search("[a-z]{2}", message):
            yield Raised(sqlstate, message, *(_text(given[one]) if one in given else "" for one in ("detail", "hint")))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _text(node: ast.expr) -> str:
    """Return a string as far as the source has it."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else ""
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(one) if isinstance(one, ast.Constant) else "…" for one in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return _text(node.left) + _text(node.right)
    return "…"


def condition(sqlstate: str) -> str:
    """Return PostgreSQL's name of a condition, such as "undefined_table" (errcodes.txt)."""
    try:
        name = psycopg.errors.lookup(sqlstate).__name__
    except KeyError:
        return ""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).rstrip("_").lower()


def errors_page() -> str:
    """Return the page, in Markdown."""
    by_state: dict[str, list[Raised]] = defaultdict(list)
    for error in sorted(raised()):
        by_state[error.sqlstate].append(error)
    parts = ["# Errors, one by one\n\n", _INTRODUCTION]
    for sqlstate, errors in by_state.items():
        parts.append(
            f"## {sqlstate} {condition(sqlstate)}".rstrip()
            + "\n\n| message | detail | what to do |\n| --- | --- | --- |\n"
        )
        for error in errors:
            cells = (error.message, *("" if one == "…" else one for one in (error.detail, error.hint)))
            parts.append("| " + " | ".join(map(_cell, cells)) + " |\n")
        parts.append("\n")
    return "".join(parts)


def _cell(text: str) -> str:
    return re.sub(r"([\\`*_{}\[\]<>#|])", r"\\\1", " ".join(text.split()))
