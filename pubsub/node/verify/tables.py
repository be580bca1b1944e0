"""The tables of a verification: those that were named, and those that can be compared."""

from __future__ import annotations

from collections.abc import Sequence

from catalog.records import SubscriptionRel
from catalog.states import RelState
from pubsub.errors import UndefinedTable
from pubsub.sql.identifiers import parse_qualified_name
from tablesync.row_forms import CannotCompare


def chosen(relations: Sequence[SubscriptionRel], names: Sequence[str], subscription: str) -> list[SubscriptionRel]:
    """Return the tables of these names, written as in SQL; all without names.  Raises UndefinedTable."""
    if not names:
        return list(relations)
    found = []
    for text in names:
        name = parse_qualified_name(text)
        schema = name.schema or "public"
        one = next((r for r in relations if (r.schema, r.name) == (schema, name.name)), None)
        if one is None:
            raise UndefinedTable(f'table "{schema}.{name.name}" is not part of subscription "{subscription}"')
        if one not in found:
            found.append(one)
    return found


def obstacle(relation: SubscriptionRel) -> CannotCompare | None:
    """Return why a table has no state that could be compared; None if it has one."""
    if relation.stopped:
        return CannotCompare(
            "the table has stopped alone" + (f": {relation.error}" if relation.error else ""), relation.error_hint
        )
    if relation.state is not RelState.READY:
        return CannotCompare(f"the table is in state {relation.state.value}, not ready yet")
    return None
