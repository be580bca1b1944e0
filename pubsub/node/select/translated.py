"""A translated query, and the relations that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pubsub.node.select.types import Type
from pubsub.node.select.values import Exact


@dataclass(frozen=True, slots=True)
class Output:
    """A query's column: the user's name for it, its name in the SQL, and its type.

    If `exact` is set, Python computes the values from the columns `leaves`.
    """

    name: str
    engine: str
    type: Type
    exact: Exact | None = None
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Translated:
    """A query in DataFusion's SQL."""

    sql: str
    columns: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """A relation of FROM: DataFusion's SQL, and its columns, each with name, DataFusion's name and type."""

    sql: str
    columns: tuple[tuple[str, str, Type], ...]


#: Finds a relation by target, schema and name; target and schema may be None.  Raises UndefinedTable.
Finder = Callable[[str | None, str | None, str], Relation]
