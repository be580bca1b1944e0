"""Names calls and columns: the function that an expression calls, and what PostgreSQL calls a column without an alias."""

from __future__ import annotations

from typing import Any

from sqlglot import exp

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.node.select.scope import folded
from pubsub.node.select.type_names import cast_name


def called(node: Any) -> tuple[str, list[Any]]:
    """Return a call's function name and arguments; special syntax becomes the function that PostgreSQL makes of it."""
    match node:
        case exp.Anonymous():
            name = node.this if isinstance(node.this, str) else folded(node.this)
            return name.lower(), list(node.expressions)
        case exp.Dot() if isinstance(node.expression, exp.Anonymous):
            if folded(node.this) != "pg_catalog":
                raise PubsubError(f'schema "{folded(node.this)}" does not exist', sqlstate="3F000")
            return called(node.expression)
        case exp.Substring():
            return "substring", [
                one for one in (node.this, node.args.get("start"), node.args.get("length")) if one is not None
            ]
        case exp.StrPosition():
            return "position", [node.this, node.args["substr"]]
        case exp.Trim():
            name = {"LEADING": "ltrim", "TRAILING": "rtrim"}.get(str(node.args.get("position") or "").upper(), "btrim")
            return name, [one for one in (node.this, node.expression) if one]
        case exp.Extract():
            return "extract", [node.expression]
        case exp.CurrentTimestamp():
            return "current_timestamp", []
        case exp.CurrentDate():
            return "current_date", []
        case exp.JSONExtract() | exp.JSONExtractScalar():
            raise FeatureNotSupported("paths into json are supported with -> and ->> only")
        case _:
            raise FeatureNotSupported(f"{node.sql('postgres')} is not supported")


def figure_name(node: Any) -> str:
    """Return the name for a column without an alias (parse_target.c: FigureColname)."""
    return _figured(node)[0]


def _figured(node: Any) -> tuple[str, int]:
    match node:
        case exp.Column():
            return folded(node.this), 2
        case exp.Alias():
            return folded(node.args["alias"]), 2
        case exp.Paren() | exp.Window() | exp.Filter() | exp.Bracket() | exp.Distinct():
            return _figured(node.this)
        case exp.Cast():
            inner, strength = _figured(node.this)
            return (inner, strength) if strength > 1 else (cast_name(node.to), 1)
        case exp.Interval():
            return "interval", 1
        case exp.Case():
            inner, strength = _figured(node.args["default"]) if node.args.get("default") is not None else ("", 0)
            return (inner, strength) if strength > 1 else ("case", 1)
        case exp.Exists():
            return "exists", 2
        case exp.Array():
            return "array", 2
        case exp.Subquery() | exp.Select():
            query = node
            while isinstance(query, exp.Subquery | exp.SetOperation):
                query = query.this
            return _figured(query.expressions[0]) if query.expressions else ("?column?", 0)
        case exp.AtTimeZone():
            return "timezone", 2
        case exp.Anonymous() if node.this in ("->", "->>"):
            return "?column?", 0
        case exp.Anonymous() | exp.Dot() | exp.Substring() | exp.StrPosition() | exp.Trim() | exp.Extract():
            return called(node)[0], 2
        case exp.CurrentTimestamp() | exp.CurrentDate():
            return called(node)[0], 2
        case exp.CurrentUser():
            return "current_user", 2
        case exp.SessionUser():
            return "session_user", 2
        case exp.CurrentSchema() | exp.CurrentCatalog():
            return ("current_schema" if isinstance(node, exp.CurrentSchema) else "current_catalog"), 2
        case exp.Func() if not isinstance(node, exp.Binary):
            # A function that sqlglot has a node of its own for, as when PostgreSQL's functions are read.
            return str(node.sql_names()[0]).lower(), 2
        case _:
            return "?column?", 0
