"""The names that an expression can see: relations of FROM, their columns, and those of the queries around it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedTable
from pubsub.nearest import nearest
from pubsub.select.types import Type
from pubsub.select.values import Value


def folded(identifier: Any) -> str:
    """An identifier as PostgreSQL takes it: in lower case unless it is quoted."""
    name: str = identifier.this
    return name if identifier.args.get("quoted") else name.lower()


@dataclass(frozen=True, slots=True)
class Column:
    """A column that can be seen: its name to the user, DataFusion's SQL, and the relation (None: of several, by USING)."""

    name: str
    sql: str
    type: Type
    relation: str | None


@dataclass(slots=True)
class Scope:
    """One query's FROM: `columns` in the order of a star; `hidden` are those that USING has merged, seen by their relation only."""

    parent: Scope | None = None
    columns: list[Column] = field(default_factory=list)
    hidden: list[Column] = field(default_factory=list)
    schemas: dict[str, str | None] = field(default_factory=dict)
    """The relations by the names they go by, with the schema of those without an alias."""
    aliases: dict[str, str] = field(default_factory=dict)
    """By a table's own name, its alias."""

    def column(self, name: str) -> tuple[Column, Scope]:
        """The column of that name, and the scope that has it.  Raises PubsubError."""
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
        """relation.name.  Raises PubsubError."""
        scope = self.relation(relation, schema)
        for one in scope.of(relation):
            if one.name == name:
                return one, scope
        shown = f"{schema}.{relation}" if schema else relation
        raise PubsubError(
            f"column {shown}.{name} does not exist", sqlstate="42703", hint=self._hint(name, scope.of(relation))
        )

    def relation(self, name: str, schema: str | None = None) -> Scope:
        """The scope that has a relation of that name.  Raises UndefinedTable."""
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
        """A relation's columns."""
        return [one for one in (*self.hidden, *self.columns) if one.relation == relation]

    def star(self) -> list[Column]:
        return self.columns

    def _relations(self) -> set[str]:
        return set(self.schemas) | (self.parent._relations() if self.parent else set())

    def _all_columns(self) -> list[Column]:
        return self.columns + (self.parent._all_columns() if self.parent else [])

    def _hint(self, name: str, among: Iterable[Column]) -> str | None:
        """parse_relation.c: errorMissingColumn."""
        known = {one.name: one for one in among}
        best = nearest(name, known, most=3)
        if best is None:
            return None
        relation = known[best].relation
        return f'Perhaps you meant to reference the column "{relation + "." if relation else ""}{best}".'


def value_of(column: Column) -> Value:
    return Value(column.type, column.sql)
