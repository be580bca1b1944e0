"""SELECT on the views: PostgreSQL's SQL, run by SQLite on a copy of their rows in memory.

The query is turned into SQLite's by sqlglot, so that conditions, joins, order and aggregates work.  An LSN compares as
the position that it is, by a collation of its own; `lsn - lsn` and pg_wal_lsn_diff give bytes.  What comes straight
from a column keeps its type.
"""

from __future__ import annotations

import json
import math
import re
import sqlite3
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite
from sqlglot.errors import ErrorLevel, SqlglotError

from catalog.records import State
from catalog.store import Catalog
from catalog.system_views import VIEWS, Row, Type, Value, View
from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject, UndefinedTable
from pubsub.protocol.lsn import Lsn
from pubsub.sql.dialect import parse_query, tables_of
from pubsub.sql.identifiers import QualifiedName


class Result(NamedTuple):
    """Columns and rows of a query; times are aware datetimes, LSNs text, arrays tuples."""

    columns: tuple[str, ...]
    rows: list[Row]


#: What SQLite declares a column as.  The names that sqlite3 finds a converter by are our own.
_DECLARED: Final = {
    Type.OID: "INTEGER",
    Type.BIGINT: "INTEGER",
    Type.TEXT: "TEXT",
    Type.DOUBLE: "REAL",
    Type.LSN: "TEXT COLLATE pg_lsn",
    Type.BOOL: "PUBSUB_BOOL",
    Type.TIME: "PUBSUB_TIME",
    Type.TEXTS: "PUBSUB_TEXTS",
}
sqlite3.register_converter("PUBSUB_BOOL", lambda data: data != b"0")
sqlite3.register_converter("PUBSUB_TIME", lambda data: datetime.fromisoformat(data.decode()))
sqlite3.register_converter("PUBSUB_TEXTS", lambda data: tuple(json.loads(data)))


async def select(catalog: Catalog, sql: str) -> Result:
    """Run one query on the views.  Raises SqlSyntaxError, UndefinedTable and others, in PostgreSQL's words."""
    tree = parse_query(sql)
    views = [_view(name) for name in tables_of(tree)]
    state = await catalog.state()
    resets: list[int | None] = []
    result = run(tree, views, state, resets)
    for oid in resets:
        if oid is not None and all(one.oid != oid for one in state.subscriptions):
            raise UndefinedObject(f"subscription with OID {oid} does not exist")
        await catalog.reset_statistics(oid)
    return result


def is_on_views(tables: tuple[QualifiedName, ...]) -> bool:
    """Whether every table of a query is one of the views (or it has none), so that `select` can answer it."""
    return all(name.name in VIEWS and name.schema in (None, "pg_catalog") for name in tables)


def run(tree: exp.Query, views: list[View], state: State, resets: list[int | None] | None = None) -> Result:
    """Run a parsed query on these views of a state.

    `resets` gets the oids that pg_stat_reset_subscription_stats was called with (None: all subscriptions).
    """
    connection = sqlite3.connect(":memory:", detect_types=sqlite3.PARSE_DECLTYPES)
    failures: list[PubsubError] = []
    try:
        _functions(connection, failures)
        connection.create_function(
            "pg_stat_reset_subscription_stats", 1, lambda oid: _note(oid, resets if resets is not None else [])
        )
        for view in views:
            _load(connection, view, state)
        truths = _truths(tree)
        cursor = connection.execute(_translate(tree))
        rows = [
            tuple(bool(value) if place in truths and value is not None else value for place, value in enumerate(row))
            for row in cursor.fetchall()
        ]
        return Result(tuple(column[0] for column in cursor.description), rows)
    except sqlite3.Error as error:
        raise (failures[0] if failures else _typed(error)) from error
    finally:
        connection.close()


def _view(name: QualifiedName) -> View:
    found = VIEWS.get(name.name)
    if found is None or name.schema not in (None, "pg_catalog"):
        shown = name.name if name.schema is None else f"{name.schema}.{name.name}"
        raise UndefinedTable(f'relation "{shown}" does not exist')
    return found


def _load(connection: sqlite3.Connection, view: View, state: State) -> None:
    columns = ", ".join(f'"{name}" {_DECLARED[kind]}' for name, kind in view.columns)
    connection.execute(f'CREATE TABLE "{view.name}" ({columns})')
    marks = ", ".join("?" * len(view.columns))
    rows = ([_stored(value) for value in row] for row in view.rows(state))
    connection.executemany(f'INSERT INTO "{view.name}" VALUES ({marks})', rows)


def _stored(value: Value) -> str | int | float | None:
    match value:
        case datetime():
            # Of one width, so that texts compare as times.
            return value.astimezone(UTC).isoformat(timespec="microseconds")
        case tuple():
            return json.dumps(value)
        case _:
            return value


def _functions(connection: sqlite3.Connection, failures: list[PubsubError]) -> None:
    """SQLite says only that a function raised: what it raised goes to `failures`."""

    def arithmetic(operator: str, one: Any, other: Any) -> Any:
        try:
            return _arithmetic(operator, one, other)
        except PubsubError as error:
            failures.append(error)
            raise

    connection.create_collation("pg_lsn", _compare_lsns)
    connection.execute("PRAGMA case_sensitive_like = ON")
    functions: dict[str, tuple[int, Callable[..., Any]]] = {
        "pg_wal_lsn_diff": (2, lambda one, other: arithmetic("-", one, other)),
        "pubsub_arithmetic": (3, arithmetic),
        "now": (0, lambda: _stored(datetime.now(UTC))),
        "regexp": (2, lambda pattern, value: None if value is None else re.search(pattern, value) is not None),
        "pubsub_any": (2, _any),
    }
    for name, (arguments, function) in functions.items():
        connection.create_function(name, arguments, function)


def _note(oid: int | None, into: list[int | None]) -> str:
    """A function's call; its result is void, as text."""
    into.append(oid)
    return ""


def _any(value: Any, values: str | None) -> bool | None:
    return None if value is None or values is None else value in json.loads(values)


def _arithmetic(operator: str, one: Any, other: Any) -> Any:
    """An LSN minus an LSN gives bytes; SQLite would take any text for the number that it begins with: refused here."""
    if one is None or other is None:
        return None
    if isinstance(one, str) or isinstance(other, str):
        if operator == "-" and isinstance(one, str) and isinstance(other, str):
            try:
                return int(Lsn.parse(one)) - int(Lsn.parse(other))
            except PubsubError:
                pass
        raise FeatureNotSupported(f'operator "{operator}" is not supported for these types on the views')
    if operator in "/%" and other == 0:
        raise PubsubError("division by zero", sqlstate="22012")
    whole = isinstance(one, int) and isinstance(other, int)
    match operator:
        case "+":
            return one + other
        case "-":
            return one - other
        case "*":
            return one * other
        case "/":
            return _quotient(one, other) if whole else one / other
        case _:
            return one - other * _quotient(one, other) if whole else math.fmod(one, other)


def _quotient(one: int, other: int) -> int:
    """Integers divide towards zero."""
    quotient = abs(one) // abs(other)
    return quotient if (one < 0) == (other < 0) else -quotient


def _compare_lsns(one: str, other: str) -> int:
    """What is no LSN is an error in PostgreSQL; a collation can not raise, so it sorts last, by its text."""
    keys = [_lsn_key(text) for text in (one, other)]
    return (keys[0] > keys[1]) - (keys[0] < keys[1])


def _lsn_key(text: str) -> tuple[int, str]:
    try:
        return int(Lsn.parse(text)), ""
    except PubsubError:
        return 1 << 64, text


#: The arithmetic that is done here, by the node of sqlglot.
_OPERATORS: Final[dict[type[exp.Expr], str]] = {exp.Add: "+", exp.Sub: "-", exp.Mul: "*", exp.Div: "/", exp.Mod: "%"}


def _translate(tree: exp.Query) -> str:
    """The query as SQLite's SQL."""
    _name_columns(tree)
    try:
        return tree.transform(_rewrite).sql(SQLite, unsupported_level=ErrorLevel.RAISE)
    except SqlglotError as error:
        raise FeatureNotSupported("this query is not supported on the views") from error


def _rewrite(node: exp.Expression) -> exp.Expression:
    """What SQLite lacks."""
    match node:
        case exp.Table() if node.args.get("db"):
            node.set("db", None)
        case exp.Add() | exp.Sub() | exp.Mul() | exp.Div() | exp.Mod():
            operator = exp.Literal.string(_OPERATORS[type(node)])
            return exp.Anonymous(this="pubsub_arithmetic", expressions=[operator, node.this, node.expression])
        case exp.EQ(this=left, expression=exp.Any(this=right)):
            array = right.this if isinstance(right, exp.Paren) else right
            return exp.Anonymous(this="pubsub_any", expressions=[left, array])
        case exp.CurrentTimestamp():
            return exp.Anonymous(this="now", expressions=[])
        case _:
            pass
    return node


def _truths(tree: exp.Query) -> set[int]:
    """The columns that are conditions, by their place: SQLite gives 0 and 1 for them."""
    select = _first_select(tree)
    if select is None or any(column.is_star for column in select.expressions):
        return set()
    kinds = (exp.Predicate, exp.Connector, exp.Not, exp.Boolean)
    return {place for place, column in enumerate(select.expressions) if isinstance(column.unalias().unnest(), kinds)}


def _first_select(tree: exp.Query) -> exp.Select | None:
    while isinstance(tree, exp.SetOperation):
        tree = tree.left
    return tree if isinstance(tree, exp.Select) else None


def _name_columns(tree: exp.Query) -> None:
    """Name the columns that have no name as PostgreSQL does (parse_target.c: FigureColname)."""
    select = _first_select(tree)
    if select is None:
        return
    for column in select.expressions:
        if isinstance(column, exp.Alias | exp.Column | exp.Star):
            continue
        column.replace(exp.alias_(column.copy(), _figure_name(column), quoted=True))


def _figure_name(column: exp.Expression) -> str:
    match column:
        case exp.Cast():
            inner = _figure_name(column.this)
            return inner if inner != "?column?" else column.to.sql("postgres").lower()
        case exp.Paren() | exp.Window():
            return _figure_name(column.this)
        case exp.Column():
            return column.name
        case exp.Case():
            return "case"
        case exp.Exists():
            return "exists"
        case exp.Anonymous():
            return str(column.this).lower()
        case exp.Subquery():
            first = column.this.expressions[0] if column.this.expressions else column
            return first.alias or _figure_name(first)
        case exp.GroupConcat():
            return "string_agg"
        case exp.CurrentTimestamp():
            return "now"
        case exp.Func() if not isinstance(column, exp.Connector):
            return column.sql_name().lower()
        case _:
            return "?column?"


#: SQLite's complaints and PostgreSQL's words for them.
_COMPLAINTS: Final = (
    ("no such column: ", 'column "{}" does not exist', "42703"),
    ("no such table: ", 'relation "{}" does not exist', "42P01"),
    ("no such function: ", "function {} does not exist", "42883"),
    ("ambiguous column name: ", 'column reference "{}" is ambiguous', "42702"),
)


def _typed(error: sqlite3.Error) -> PubsubError:
    text = str(error)
    for beginning, message, sqlstate in _COMPLAINTS:
        if text.startswith(beginning):
            return PubsubError(message.format(text.removeprefix(beginning).lower()), sqlstate=sqlstate)
    return FeatureNotSupported("this query is not supported on the views", detail=f"{text}.")
