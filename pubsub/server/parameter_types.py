"""The types of a query's parameters, where the client does not say: those of what they are compared with (parse_param.c)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from sqlglot import exp

from catalog.records import State
from catalog.system_views import VIEWS
from pubsub.errors import PubsubError
from pubsub.node.select.scope import folded
from pubsub.server import values
from pubsub.server.system_catalogs import result_types
from pubsub.server.system_catalogs.definitions import definitions

_SQL: Final = {name: oid for oid, name in values.PARAMETER_TYPES.items()}
_SUPPORTED: Final = frozenset(
    {*values.PARAMETER_TYPES, values.TEXT, values.VARCHAR, values.NAME, values.JSON, values.JSONB}
)


def parameter_types(tree: Any, given: Sequence[int], state: State) -> tuple[int, ...]:
    """Return an oid for each parameter.  Raises PubsubError for numbers that leave a gap of more than a thousand."""
    found: dict[int, int] = {}
    for one in tree.find_all(exp.Parameter):
        number = int(str(one.this.this))
        if not 1 <= number <= 65535:
            raise PubsubError(f"there is no parameter ${number}", sqlstate="42P02")
        known = given[number - 1] if number <= len(given) else 0
        found[number] = known or found.get(number) or _guessed(one, state)
    count = max([*found, len(given)], default=0)
    return tuple(
        found.get(number) or (given[number - 1] if number <= len(given) else 0) or values.TEXT
        for number in range(1, count + 1)
    )


def _guessed(node: Any, state: State) -> int:
    above = node.parent
    while isinstance(above, exp.Paren):
        above = above.parent
    if isinstance(above, exp.Cast):
        name = result_types.cast_name(above.to)
        return definitions().type_oids.get(name, 0)
    if isinstance(above, exp.Limit | exp.Offset | exp.Fetch):
        return values.INT8
    others: list[Any] = []
    if isinstance(above, exp.Binary):
        others = [above.expression if above.this is node else above.this]
    elif isinstance(above, exp.In | exp.Between):
        others = [above.this]
    for other in others:
        if isinstance(other, exp.Column):
            found = next((oid for oid in _column(folded(other.this), node, state) if oid), 0)
            return found if found in _SUPPORTED else 0
        if isinstance(other, exp.Literal) and not other.is_string:
            return values.INT4 if str(other.this).isdecimal() else values.NUMERIC
        if isinstance(other, exp.Cast):
            return definitions().type_oids.get(result_types.cast_name(other.to), 0)
    return 0


def _column(name: str, node: Any, state: State) -> Iterator[int]:
    """Yield the types of columns of this name in the relations that the query names."""
    for table in node.root().find_all(exp.Table):
        if not isinstance(table.this, exp.Identifier):
            continue
        relation = folded(table.this)
        if relation in VIEWS:
            for column, kind in VIEWS[relation].columns:
                if column == name:
                    yield values.field_of(name, kind.value).oid
        for one in state.relations:
            if one.name == relation:
                yield from (oid for column, (oid, _) in one.column_types.items() if column == name)
        known = definitions()
        columns = known.relations["pg_catalog"].get(relation, (0, "", ()))[2]
        yield from (known.type_oids.get(kind, 0) for column, kind in columns if column == name)
