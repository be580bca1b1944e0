"""Queries of a client: on replicated tables and the node's views by DataFusion, on system catalogs by SQLite.

names a replicated table                  deltaquery, in batches
names views of the node, or nothing       deltaquery; what it lacks, the system catalogs may have
names system catalogs                     system_catalogs
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlglot import exp

from catalog.records import State
from catalog.system_views import VIEWS
from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.node import query as deltaquery
from pubsub.server import values
from pubsub.server.query_process import QueryProcesses
from pubsub.server.system_catalogs import translate
from pubsub.server.system_catalogs.contents import Contents
from pubsub.server.system_catalogs.database import Caller, SystemCatalogs
from pubsub.server.values import Field
from pubsub.sql.dialect import PubsubDialect, parse_query

if TYPE_CHECKING:
    pass

Batches = AsyncIterator[Sequence[tuple[Any, ...]]]

_ELSEWHERE = {"42883", "0A000", "42704"}
"""What deltaquery says of a function or a form of query that the system catalogs may have."""


@dataclass(frozen=True, slots=True)
class Environment:
    """What queries of a session work with."""

    state: State
    contents: Callable[[], Contents]
    catalogs: SystemCatalogs
    caller: Caller
    processes: QueryProcesses
    versions: Mapping[str, int] = field(default_factory=dict)
    """Of tables, by path, that are read at an earlier version: the snapshot of a slot."""


@dataclass(frozen=True, slots=True)
class Query:
    """A query, as it was written.  `types`: its parameters' oids."""

    text: str
    types: tuple[int, ...] = ()

    async def described(self, environment: Environment) -> tuple[tuple[int, ...], tuple[Field, ...]]:
        """Return the parameters' types and the result's columns.  Raises PubsubError."""
        known = await asyncio.to_thread(self._parameters, environment)
        prepared = await asyncio.to_thread(self._prepared, environment, [None] * len(known), known)
        return known, prepared.fields

    async def run(
        self, environment: Environment, parameters: Sequence[str | None]
    ) -> tuple[tuple[Field, ...], Batches]:
        """Begin to run it; return its columns and rows.  Raises PubsubError, then and while the rows come."""
        known = await asyncio.to_thread(self._parameters, environment) if parameters else ()
        prepared = await asyncio.to_thread(self._prepared, environment, parameters, known)
        return prepared.fields, prepared.rows()

    def _parameters(self, environment: Environment) -> tuple[int, ...]:
        """Return the types of the parameters, guessed from what they are compared with where the client did not say."""
        from pubsub.server.parameter_types import parameter_types

        return parameter_types(_parsed(self.text), self.types, environment.state)

    def _prepared(self, environment: Environment, parameters: Sequence[str | None], known: Sequence[int]) -> _Prepared:
        relations = translate.relations_of(_parsed(self.text))
        system = [one for one in relations if translate.is_system(*one)]
        of_node = [one for one in system if one[1] in VIEWS and one[0] in (None, "pg_catalog")]
        if len(system) > len(of_node):
            return self._on_catalogs(environment, parameters, known)
        try:
            return self._on_tables(environment, parameters, known)
        except PubsubError as error:
            if len(system) < len(relations) or error.sqlstate not in _ELSEWHERE:
                raise
            try:
                return self._on_catalogs(environment, parameters, known)
            except PubsubError:
                raise error from None

    def _on_tables(self, environment: Environment, parameters: Sequence[str | None], known: Sequence[int]) -> _Prepared:
        tree = _bound(parse_query(self.text), parameters, known)
        query = deltaquery.Query(environment.state, tree, environment.versions)
        fields = tuple(
            values.field_of(one.name, "text" if one.type.kept and one.type.name not in _KEPT else one.type.name)
            for one in query.columns
        )
        if not any(isinstance(one, exp.Table) for one in tree.walk()):
            # Nothing to wait for: an error of an expression is better known now.
            rows = [row for batch in query.batches() for row in batch]
            return _Prepared(fields, lambda: _once(rows))
        if not query.versions():
            return _Prepared(fields, lambda: _threaded(query.batches()))
        return _Prepared(fields, lambda: environment.processes.run(query))

    def _on_catalogs(
        self, environment: Environment, parameters: Sequence[str | None], known: Sequence[int]
    ) -> _Prepared:
        tree = _bound(_parsed(self.text), parameters, known)
        translated = translate.translate(tree, environment.catalogs.columns)
        rows = environment.catalogs.query(environment.state, environment.contents, translated, environment.caller)
        fields = tuple(values.catalog_field(one.name, one.type_name) for one in translated.columns)
        return _Prepared(fields, lambda: _once(rows))


_KEPT = frozenset({"uuid", "json", "jsonb"})


@dataclass(frozen=True, slots=True)
class _Prepared:
    fields: tuple[Field, ...]
    rows: Callable[[], Batches]


async def _once(rows: Sequence[tuple[Any, ...]]) -> Batches:
    for place in range(0, len(rows), 1000):
        yield rows[place : place + 1000]


async def _threaded(batches: Any) -> Batches:
    while True:
        batch = await asyncio.to_thread(next, batches, None)
        if batch is None:
            return
        yield batch


def _parsed(text: str) -> Any:
    """Parse a query with PostgreSQL's functions.  Raises SqlSyntaxError and FeatureNotSupported."""
    from sqlglot import errors, parse

    try:
        found = [one for one in parse(text, read=PubsubDialect) if one is not None]
    except errors.SqlglotError:
        parse_query(text)  # says where
        raise SqlSyntaxError("syntax error", statement=text) from None
    if len(found) != 1 or not isinstance(found[0], exp.Query | exp.Values | exp.Subquery):
        raise FeatureNotSupported("only plain queries are supported")
    return found[0]


def _bound(tree: Any, parameters: Sequence[str | None], known: Sequence[int]) -> Any:
    """Return the query with values in the place of its parameters.  Raises PubsubError."""

    def replaced(node: Any) -> Any:
        if not isinstance(node, exp.Parameter):
            return node
        number = int(str(node.this.this))
        if not 1 <= number <= len(parameters):
            raise PubsubError(f"there is no parameter ${number}", sqlstate="42P02")
        value, kind = parameters[number - 1], values.PARAMETER_TYPES.get(known[number - 1])
        literal = exp.Null() if value is None else exp.Literal.string(value)
        if isinstance(node.parent, exp.Limit | exp.Offset | exp.Fetch) and value is not None:
            if not value.lstrip("-").isdecimal():
                raise PubsubError(f'invalid input syntax for type bigint: "{value}"', sqlstate="22P02")
            return exp.Literal.number(value)
        return literal if kind is None else exp.cast(literal, kind, dialect="postgres")

    return tree.transform(replaced) if any(isinstance(one, exp.Parameter) for one in tree.walk()) else tree
