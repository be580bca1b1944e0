"""SELECT on replicated tables and on the views, without a JVM: DataFusion, from the deltalake package, reads the rows.

A table's name is schema.name as on the publisher, with public as the default schema; target.schema.name distinguishes
tables of several subscriptions.  Each table is read at one version; two tables of a query may show different LSNs
(`pubsub snapshot` gives versions that fit together).  pubsub.node.select translates PostgreSQL's SQL to DataFusion's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

from sqlglot import exp

from catalog.records import State, SubscriptionRel
from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject, UndefinedTable
from pubsub.node.select import outputs, types, views
from pubsub.node.select.engine import spelled
from pubsub.node.select.queries import Queries
from pubsub.node.select.translated import Relation
from pubsub.sql.dialect import parse_query

if TYPE_CHECKING:
    import pyarrow as pa
    from deltalake import DeltaTable, QueryBuilder

_RESET = "pg_stat_reset_subscription_stats"


class Rows(NamedTuple):
    """A query's answer, as Python values (Decimal, aware datetime in UTC, bytes); LSNs are strings."""

    columns: tuple[str, ...]
    rows: list[tuple[Any, ...]]


async def select_and_reset(state: State, sql: str, reset: Callable[[int | None], Awaitable[None]]) -> Rows:
    """Run one query, then `reset` the statistics for which it calls pg_stat_reset_subscription_stats.

    `reset` gets a subscription's oid, None for all.  Raises as `select` does, and UndefinedObject for a subscription
    that does not exist.
    """
    resets: list[int | None] = []
    found = await asyncio.to_thread(select, state, sql, resets)
    for oid in resets:
        if oid is not None and all(one.oid != oid for one in state.subscriptions):
            raise UndefinedObject(f"subscription with OID {oid} does not exist")
        await reset(oid)
    return found


def select(state: State, sql: str, resets: list[int | None] | None = None) -> Rows:
    """Run one query.  Blocks.  Raises SqlSyntaxError, UndefinedTable and other PubsubErrors, in PostgreSQL's words.

    Appends to `resets` the oids that the query calls pg_stat_reset_subscription_stats with (None: all subscriptions).
    """
    tables = _Tables(state)
    try:
        tree = parse_query(sql)
        reset_places = _take_resets(tree)
        translated = Queries(tables.find).statement(tree)
    except RecursionError as error:
        raise PubsubError("stack depth limit exceeded", sqlstate="54001") from error
    try:
        # Read with arro3, which deltalake brings: pyarrow imports NumPy, and that takes longer than most queries.
        table = tables.builder().execute(spelled(translated.sql)).read_all()
    except BaseException as error:
        if not outputs.of_engine(error):
            raise
        raise outputs.complaint(error) from error
    rows = outputs.rows(table, translated)
    if reset_places:
        (resets if resets is not None else []).extend(row[place] for row in rows for place in reset_places)
        rows = [tuple("" if place in reset_places else one for place, one in enumerate(row)) for row in rows]
    return Rows(tuple(column.name for column in translated.columns), rows)


class Query:
    """A query, translated when it is made; `batches` runs it.  Raises as `select` does, but without resets."""

    def __init__(
        self, state: State, tree: exp.Query | exp.Values, versions: Mapping[str, int] = MappingProxyType({})
    ) -> None:
        """`versions`: of tables, by path, that are read at an earlier version."""
        self._tables = _Tables(state, versions)
        try:
            self._translated = Queries(self._tables.find).statement(tree)
        except RecursionError as error:
            raise PubsubError("stack depth limit exceeded", sqlstate="54001") from error
        self.columns = self._translated.columns

    @property
    def sql(self) -> str:
        """DataFusion's SQL."""
        return spelled(self._translated.sql)

    def versions(self) -> dict[str, tuple[str, int]]:
        """Return path and version of the tables that it reads, by their names in `sql`."""
        return self._tables.versions()

    def rows(self, table: pa.Table) -> list[tuple[Any, ...]]:
        """Return rows of the query's result, as Python values."""
        return outputs.rows(table, self._translated)

    def batches(self) -> Iterator[list[tuple[Any, ...]]]:
        """Yield the rows, some thousand at a time, as they are read.  Blocks."""
        from arro3.core import Table

        try:
            for batch in self._tables.builder().execute(spelled(self._translated.sql)):
                yield outputs.rows(Table.from_batches([batch]), self._translated)
        except PubsubError:
            raise
        except BaseException as error:
            if not outputs.of_engine(error):
                raise
            raise outputs.complaint(error) from error


class _Tables:
    """The relations that a query names; each is opened once, when it is first found."""

    def __init__(self, state: State, versions: Mapping[str, int] = MappingProxyType({})) -> None:
        self._state = state
        self._versions = versions
        self._found: dict[tuple[int, int], tuple[str, DeltaTable, Relation]] = {}
        self._paths: dict[tuple[int, int], str] = {}

    def find(self, target: str | None, schema: str | None, name: str) -> Relation:
        """Return the view or replicated table of that name.  Raises UndefinedTable, and 42P09 if it is ambiguous."""
        if target is None and views.is_view(schema, name):
            return views.relation(name, self._state)
        try:
            found = find_relation(self._state, schema or "public", name, target)
        except UndefinedTable:
            shown = ".".join(one for one in (target, schema, name) if one is not None)
            raise UndefinedTable(f'relation "{shown}" does not exist') from None
        return self._table(found)

    def versions(self) -> dict[str, tuple[str, int]]:
        """Return path and version of the tables found so far, by their names in the query."""
        return {
            engine: (relation_path, table.version())
            for (engine, table, _), relation_path in zip(self._found.values(), self._paths.values(), strict=True)
        }

    def builder(self) -> QueryBuilder:
        """Return a builder of DataFusion queries that knows the tables found so far."""
        from deltalake import QueryBuilder

        builder = QueryBuilder()
        for engine, table, _ in self._found.values():
            builder.register(engine, table)
        return builder

    def _table(self, relation: SubscriptionRel) -> Relation:
        # Imported here: a query on views does without.
        from pubsub import logs
        from pubsub.delta.table import exists, opened

        key = (relation.subid, relation.relid)
        if key not in self._found:
            if not exists(relation.path):
                raise UndefinedTable(
                    f'table "{relation.qualified_name}" has no rows yet',
                    detail="Its initial copy has not been committed.",
                    hint="pubsub status shows how far it is.",
                )
            logs.configure_unless_done()  # a table that an earlier release has damaged is mended, which is logged
            table = opened(relation.path)
            if relation.path in self._versions:
                table.load_as_version(self._versions[relation.path])
            engine = f"t{len(self._found)}"
            self._paths[key] = relation.path
            self._found[key] = (engine, table, Relation(engine, _columns(table, relation)))
        return self._found[key][2]


def _columns(table: DeltaTable, relation: SubscriptionRel) -> tuple[tuple[str, str, types.Type], ...]:
    """Return a table's columns with the publisher's types where the catalog knows them."""
    import pyarrow as pa

    known = relation.column_types
    schema = pa.schema(table.schema().to_arrow())
    return tuple((one.name, one.name, types.of_column(one.type, known.get(one.name, (None,))[0])) for one in schema)


def _take_resets(tree: exp.Query | exp.Values) -> set[int]:
    """Replace calls of pg_stat_reset_subscription_stats among the columns by their arguments; return the indexes."""
    places: set[int] = set()
    for place, column in enumerate(tree.expressions if isinstance(tree, exp.Select) else []):
        call = column.unalias()
        if isinstance(call, exp.Anonymous) and str(call.this).lower() == _RESET and len(call.expressions) == 1:
            title = column.args["alias"] if isinstance(column, exp.Alias) else exp.to_identifier(_RESET)
            argument = exp.cast(call.expressions[0].copy(), exp.DType.BIGINT)
            column.replace(exp.Alias(this=argument, alias=title.copy()))
            places.add(place)
    return places


def find_relation(state: State, schema: str, name: str, target: str | None = None) -> SubscriptionRel:
    """Return the replicated table of that name.  Raises UndefinedTable, and 42P09 if several subscriptions have one.

    Of a Delta table of several sources it is that of the first of them.
    """
    targets = {subscription.oid: subscription.target for subscription in state.subscriptions}
    found = [
        relation
        for relation in state.relations
        if relation.place == (schema, name) and target in (None, targets.get(relation.subid))
    ]
    if not found:
        raise UndefinedTable(f'relation "{schema}.{name}" does not exist')
    if len({relation.path for relation in found}) > 1:
        known = ", ".join(sorted(f'"{targets[relation.subid]}"' for relation in found))
        raise PubsubError(
            f'table reference "{schema}.{name}" is ambiguous',
            sqlstate="42P09",
            detail=f"There is one in each of the targets {known}.",
            hint="Put the target before it: target.schema.table.",
        )
    return found[0]


__all__ = ["FeatureNotSupported", "Rows", "find_relation", "select", "select_and_reset"]
