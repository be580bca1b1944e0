"""Refuse the subscription option register where two tables of the node would have one name in a catalog."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from catalog.store import Catalog
from pubsub.errors import DuplicateObject
from pubsub.sql.identifiers import quote_qualified
from pubsub.sql.layout_rules import Mode, name_beside
from pubsub.sql.layouts import Layouts


async def refuse_one_name(
    catalog: Catalog,
    layouts: Layouts,
    subid: int | None,
    joining: Iterable[tuple[str, str, Mode | None]] = (),
    leaving: Collection[str] = (),
) -> None:
    """Refuse it for the tables that `subid` has, and those that join, by schema, name and mode if they stand beside a mirror;
    `leaving`: paths that do not count.

    Catalogs take names for the same that differ only in case.
    """
    if not layouts.register:
        return
    state = await catalog.state()
    others = {one.oid: one.options.layouts for one in state.subscriptions}
    if subid is not None:
        others[subid] = layouts
    taken: dict[str, str] = {}
    here = [
        (others[one.subid], one.schema, one.published_name, one.beside)
        for one in state.relations
        if one.path not in leaving and one.subid in others
    ]
    for rule, schema, name, beside in [*here, *((layouts, *one) for one in joining)]:
        wanted = rule.registered_as(schema, name, beside)
        if wanted is None:
            continue
        relation = quote_qualified(schema, name_beside(name, beside))
        other = taken.get(str(wanted).casefold())
        taken[str(wanted).casefold()] = relation
        if other is not None:
            raise DuplicateObject(
                f'relations "{other}" and "{relation}" would both be registered as "{wanted}"',
                hint="Give one of them a name of its own: register = 'schema.table (catalog.schema.name)'.",
            )
