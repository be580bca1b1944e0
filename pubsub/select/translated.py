"""A query as it goes to DataFusion, and the relations that it reads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pubsub.select.types import Type
from pubsub.select.values import Exact


@dataclass(frozen=True, slots=True)
class Output:
    """A query's column: its name to the user, its name in the SQL, and how Python finishes it, from which columns."""

    name: str
    engine: str
    type: Type
    exact: Exact | None = None
    leaves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Translated:
    """A query as DataFusion's SQL."""

    sql: str
    columns: tuple[Output, ...]


@dataclass(frozen=True, slots=True)
class Relation:
    """What a name in FROM stands for: DataFusion's SQL, and columns by name, DataFusion's name and type."""

    sql: str
    columns: tuple[tuple[str, str, Type], ...]


#: Finds a relation by schema and name, or by target, schema and name.  Raises UndefinedTable.
Finder = Callable[[str | None, str | None, str], Relation]
