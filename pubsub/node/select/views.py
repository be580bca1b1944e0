"""The catalog's views as relations of a SELECT: their rows become VALUES in the query's text."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

from catalog.records import State
from catalog.system_views import VIEWS, Value, View
from catalog.system_views import Type as Declared
from pubsub.node.select.translated import Relation
from pubsub.node.select.types import BOOL, FLOAT8, INT8, LSN, OID, TEXT, TIMESTAMPTZ, Type, array_of
from pubsub.node.select.values import quoted
from pubsub.protocol.lsn import Lsn

_TYPES: Final = {
    Declared.OID: OID,
    Declared.TEXT: TEXT,
    Declared.BIGINT: INT8,
    Declared.DOUBLE: FLOAT8,
    Declared.BOOL: BOOL,
    Declared.LSN: LSN,
    Declared.TIME: TIMESTAMPTZ,
    Declared.TEXTS: array_of(TEXT),
}


def is_view(schema: str | None, name: str) -> bool:
    """Return whether the name is a view's."""
    return schema in (None, "pg_catalog") and name in VIEWS


def relation(name: str, state: State) -> Relation:
    """Return the view with its rows from this state of the catalog."""
    view = VIEWS[name]
    columns = tuple((title, f"v{place}", _TYPES[kind]) for place, (title, kind) in enumerate(view.columns))
    rows = [
        f"({', '.join(_literal(value, type_) for value, (_, _, type_) in zip(row, columns, strict=True))})"
        for row in view.rows(state)
    ]
    shown = ", ".join(f"{_cast(engine, type_)} AS {engine}" for _, engine, type_ in columns)
    if not rows:
        nothing = f"({', '.join('NULL' for _ in columns)})"
        return Relation(f"(SELECT {shown} FROM (VALUES {nothing}) AS v({_titles(view)}) WHERE FALSE)", columns)
    return Relation(f"(SELECT {shown} FROM (VALUES {', '.join(rows)}) AS v({_titles(view)}))", columns)


def _titles(view: View) -> str:
    return ", ".join(f"v{place}" for place in range(len(view.columns)))


def _literal(value: Value, type_: Type) -> str:
    match value:
        case None:
            return "NULL"
        case bool():
            return "TRUE" if value else "FALSE"
        case int():
            return str(value)
        case tuple():
            return f"make_array({', '.join(map(quoted, value))})" if value else "arrow_cast(make_array(), 'List(Utf8)')"
        case datetime():
            return quoted(value.astimezone(UTC).replace(tzinfo=None).isoformat(timespec="microseconds") + "Z")
        case str() if type_ == LSN:
            return quoted(str(int(Lsn.parse(value))))
        case _:
            return quoted(str(value))


def _cast(engine: str, type_: Type) -> str:
    if type_.element is not None:
        return f"arrow_cast({engine}, 'List(Utf8)')"
    if type_ == TIMESTAMPTZ:
        return f"""arrow_cast({engine}, 'Timestamp(Microsecond, Some("UTC"))')"""
    return f"CAST({engine} AS {type_.engine})"
