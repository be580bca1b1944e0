"""The names that an expression can see: the relations of FROM and their columns, also of the enclosing queries."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedTable
from pubsub.nearest import nearest
from pubsub.node.select.types import Type
from pubsub.node.select.values import Value


def folded(identifier: Any) -> str:
    """Return an identifier's name as PostgreSQL folds it: in lower case unless it is quoted."""
    name: str = identifier.this
    return name if identifier.args.get("quoted") else name.lower()


@dataclass(frozen=True, slots=True)
class Column:
    """A visible column: the user's name for it, DataFusion's SQL, and its relation (None: merged by USING)."""

    name: str
    sql: str
    type: Type
    relation: str | None


@dataclass(slots=True)
class Scope:
    """One query's FROM.

    `columns` are in the order of a star.  `hidden` are the columns that USING has merged; they are visible only with
    their relation's name.
    """

    parent: Scope | None = None
    columns: list[Column] = field(default_factory=list)
    hidden: list[Column] = field(default_factory=list)
    schemas: dict[str, str | None] = field(default_factory=dict)
    """The relations by alias or name, each with its schema (None: it has an alias, or no schema was given)."""
    aliases: dict[str, str] = field(default_factory=dict)
    """The tables' aliases by their own names."""

    def column(self, name: str) -> tuple[Column, Scope]:
        """Return the column of that name and its scope.  Raises PubsubError."""
        scope: Scope | None = self
        while scope is not None:
            found = [one for one in scope.columns if one.name == name]
            if len(found) > 1:
                raise PubsubError(f'column reference "{name}" is ambiguous', sqlstate="42702")
            if found:
                return found[0], scope
            scope = scope.parent
        if name in self._relations():
            raise FeatureNotSupported(f'a reference to the whole row of "{name}" is not supported')
        raise PubsubError(
            f'column "{name}" does not exist', sqlstate="42703", hint=self._hint(name, self._all_columns())
        )

    def qualified(self, relation: str, name: str, schema: str | None = None) -> tuple[Column, Scope]:
        """Return the column relation.name and its scope.  Raises PubsubError."""
        scope = self.relation(relation, schema)
        for one in scope.of(relation):
            if one.name == name:
                return one, scope
        shown = f"{schema}.{relation}" if schema else relation
        raise PubsubError(
            f"column {shown}.{name} does not exist", sqlstate="42703", hint=self._hint(name, scope.of(relation))
        )

    def relation(self, name: str, schema: str | None = None) -> Scope:
        """Return the scope that has a relation of that name.  Raises UndefinedTable."""
        scope: Scope | None = self
        while scope is not None:
            if name in scope.schemas and schema in (None, scope.schemas[name]):
                return scope
            scope = scope.parent
        scope = self
        while scope is not None:
            if name in scope.aliases:
                raise UndefinedTable(
                    f'invalid reference to FROM-clause entry for table "{name}"',
                    hint=f'Perhaps you meant to reference the table alias "{scope.aliases[name]}".',
                )
            scope = scope.parent
        raise UndefinedTable(f'missing FROM-clause entry for table "{name}"')

    def of(self, relation: str) -> list[Column]:
        """Return a relation's columns."""
        return [one for one in (*self.hidden, *self.columns) if one.relation == relation]

    def star(self) -> list[Column]:
        return self.columns

    def _relations(self) -> set[str]:
        return set(self.schemas) | (self.parent._relations() if self.parent else set())

    def _all_columns(self) -> list[Column]:
        return self.columns + (self.parent._all_columns() if self.parent else [])

    def _hint(self, name: str, among: Iterable[Column]) -> str | None:
        """Return a hint with the closest column name (parse_relation.c: errorMissingColumn)."""
        known = {one.name: one for one in among}
        best = nearest(name, known, most=3)
        if best is None:
            return None
        relation = known[best].relation
        return f'Perhaps you meant to reference the column "{relation + "." if relation else ""}{best}".'


def value_of(column: Column) -> Value:
    return Value(column.type, column.sql)
