"""The comparison of every table's rows and columns at the publisher and in Delta."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from psycopg import sql

from pubsub.demo.interruption import Interruption
from pubsub.demo.node import DemoFailed, DemoNode
from pubsub.demo.screen import Screen
from pubsub.protocol.lsn import Lsn
from pubsub.testing.compare import compare_tables


@dataclass(frozen=True, slots=True)
class Source:
    """A database and the subscription that follows it; `tables` are the published (schema, table) names."""

    subscription: str
    conninfo: str
    tables: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """A comparison's result: the numbers compared, and a text for each table that differs."""

    tables: int
    rows: int
    values: int
    differences: tuple[str, ...]


def compare(
    node: DemoNode,
    source: Source,
    at: Lsn,
    interruption: Interruption,
    tell: Callable[[str], None],
    *,
    snapshot: str | None = None,
) -> Compared:
    """Compare all tables of a subscription as of `at`; call `tell` with each table's result.

    The node must have reached `at` and show nothing later.  `snapshot` is an exported snapshot of the publisher at
    `at`; None if nothing writes there.  Raises DemoFailed if the node has not reached `at`, and Interrupted.
    """
    shown = node.snapshot(source.subscription)
    if Lsn.parse(shown["lsn"]) < at:
        raise DemoFailed(f'subscription "{source.subscription}" shows {shown["lsn"]}, and should show {at}')
    rows = values = 0
    differences = []
    for schema, name in source.tables:
        label = f"{source.subscription}: {schema}.{name}"
        place = shown["tables"].get(f"{schema}.{name}")
        if place is None:
            differences.append(f"{label}: published, and not in the subscription")
            tell(f"{label}: MISSING")
            continue
        table = sql.Identifier(schema, name).as_string(None)
        path, version = str(place["path"]), int(place["version"])
        found = interruption.run(partial(_compare_one, source.conninfo, table, path, version, snapshot))
        if found.difference is None:
            tell(f"{label}: {found.rows:,} rows, {found.columns} columns: equal")
        else:
            tell(f"{label}: DIFFERENT")
            differences.append(f"{source.subscription}: {found.difference}")
        rows += found.rows
        values += found.rows * found.columns
    return Compared(len(source.tables), rows, values, tuple(differences))


def show_comparison(found: Sequence[Compared], screen: Screen) -> bool:
    """Print the outcome; return whether everything is equal."""
    differences = [text for one in found for text in one.differences]
    if not differences:
        screen.step(
            f"Equal: {sum(one.tables for one in found)} tables, {sum(one.rows for one in found):,} rows, "
            f"{sum(one.values for one in found):,} values"
        )
        return True
    screen.fail(f"DIFFERENT: {len(differences)} of {sum(one.tables for one in found)} tables")
    for text in differences:
        screen.fail(text)
    return False


@dataclass(frozen=True, slots=True)
class _Table:
    rows: int
    columns: int
    difference: str | None


def _compare_one(conninfo: str, table: str, path: str, version: int, snapshot: str | None) -> _Table:
    difference = compare_tables(conninfo, table, path, version=version, snapshot=snapshot)
    count, columns = _size(path, version)
    return _Table(count, columns, None if difference is None else str(difference))


def _size(path: str, version: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of a Delta table."""
    from deltalake import DeltaTable, QueryBuilder

    table = DeltaTable(path, version=version)
    counted: Any = QueryBuilder().register("counted", table).execute("SELECT count(*) AS n FROM counted").read_all()
    return int(counted["n"][0].as_py()), len(table.schema().fields)
