"""Give the Delta tables the names in Spark's catalogs that the option register wants: a task of the daemon.

A table gets its name once its copy has ended, loses it when the option no longer wants it, and another when the publisher's table
is renamed: the new one first, so that it is never without, but where another table wants the old one, as in a swap of two.  A table
that leaves keeps its name, as its Delta table stays.

What was given is in the catalog of the node, so a daemon that starts asks for nothing again, but looks once whether the names are
still there: somebody may have dropped them.  The row is stored after what it tells of.  So after a crash the work is done again,
and finds what it did.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Final

import structlog

from catalog.figures import Registration
from catalog.records import State, SubscriptionRel
from catalog.states import RelState
from catalog.store import Catalog
from launcher.failures import typed
from pubsub.delta.spark.engine import Engine
from pubsub.delta.spark.table_names import forget, register
from pubsub.setting_tables import SparkSettings
from pubsub.sql.layout_rules import registers_of
from pubsub.sql.layouts import Layouts, TableName
from pubsub.texts import first_line

NAP: Final = 2.0
#: How long a table whose name could not be given is left alone, in seconds.
_AFTER_FAILURE: Final = 300.0

logger = structlog.get_logger()


_Key = tuple[str, str, TableName | None]


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A ready table, the name that it is to have, and what is stored of the one that it has."""

    relation: SubscriptionRel
    name: TableName | None
    held: Registration | None

    @property
    def key(self) -> _Key:
        """What a failure, or a success, is one of."""
        return self.relation.qualified_name, self.relation.path, self.name

    @property
    def had(self) -> TableName | None:
        """The name that it has."""
        return None if self.held is None or self.held.name is None else TableName(*self.held.name)

    def is_in_the_way(self, names: Collection[str]) -> bool:
        """Return whether it has, and is to lose, one of the names that are wanted, maybe its own in another case."""
        return self.had is not None and self.had != self.name and str(self.had).casefold() in names


class Registrar:
    """One node's names; `run` lasts until it is cancelled, and then until the statement under way has ended."""

    def __init__(self, settings: SparkSettings, catalog: Catalog, engine: Engine) -> None:
        self._settings = settings
        self._catalog = catalog
        self._engine = engine
        self._seen = -1
        self._keys: dict[tuple[int, int], _Key] = {}
        # By subscription and table: what this daemon has seen to, and when it tries again what it could not.
        self._done: dict[tuple[int, int], _Key] = {}
        self._again: dict[tuple[int, int], float] = {}
        self.nap = NAP

    async def run(self) -> None:
        """Work until cancelled.  Nothing is done while the catalog is another daemon's."""
        while True:
            await asyncio.sleep(self.nap)
            try:
                await self._look()
            except Exception as error:
                logger.warning("names of tables could not be looked at", reason=first_line(error))

    async def _look(self) -> None:
        counter = await self._catalog.change_counter()
        if counter == self._seen and all(again > time.monotonic() for again in self._again.values()):
            return
        wanted = _wanted(await self._catalog.state())
        keys = {place: one.key for place, one in wanted.items()}
        if keys != self._keys:
            # Who was in the way may be so no longer: of two tables that swap their names one is heard of first.
            self._keys = keys
            self._again.clear()
        for place in self._done.keys() - keys.keys():
            del self._done[place]
        now = time.monotonic()
        due = [
            place for place, key in keys.items() if self._done.get(place) != key and self._again.get(place, now) <= now
        ]
        names = {str(one.name).casefold() for one in wanted.values() if one.name is not None}
        for place in due:
            if wanted[place].is_in_the_way(names):
                found = await self._follow(replace(wanted[place], name=None), counter)
                if found is None:
                    return
                wanted[place] = replace(wanted[place], held=found)
        for place in due:
            found = await self._follow(wanted[place], counter)
            if found is None:
                return
            if found.error is None:
                self._done[place] = keys[place]
                self._again.pop(place, None)
            else:
                self._done.pop(place, None)
                self._again[place] = time.monotonic() + _AFTER_FAILURE
        self._seen = counter

    async def _follow(self, one: _Wanted, counter: int) -> Registration | None:
        """See to a table, and store what is so then; None: the catalog has changed, and the table may have left."""
        await self._engine.fence()
        await self._catalog.prove()
        if await self._catalog.change_counter() != counter:
            return None
        found = await self._see_to(one)
        if found != one.held:
            await self._catalog.put_statistics(registrations=[found])
        return found

    async def _see_to(self, one: _Wanted) -> Registration:
        """Give the table its name and take away the one that it had; return what is so then."""
        relation, held = one.relation, one.held
        name = had = one.had
        try:
            moved = held is not None and held.path != relation.path
            if held is not None and had is not None and moved:
                await self._forget(relation, held.path, had)
                name = had = None
            if one.name is not None:
                self._settings.require_catalogs([one.name.catalog])
                if await self._engine.run(register, relation.path, one.name):
                    logger.info("table was registered", relation=relation.qualified_name, name=str(one.name))
                name = one.name
            if held is not None and had is not None and had != one.name:
                await self._forget(relation, held.path, had)
                name = one.name
        except Exception as error:
            known = typed(error)
            logger.warning(
                "table could not be registered",
                relation=relation.qualified_name,
                name=str(one.name or had),
                reason=first_line(known),
                detail=known.detail,
                hint=known.hint,
            )
            # Until the old name is gone it is the one to remember, with its path: the new one is found to be there again.
            path = relation.path if held is None or had is None else held.path
            return Registration(relation.subid, relation.relid, path, had, first_line(known), known.hint)
        return Registration(relation.subid, relation.relid, relation.path, name)

    async def _forget(self, relation: SubscriptionRel, path: str, name: TableName) -> None:
        if await self._engine.run(forget, path, name):
            logger.info("table is no longer registered", relation=relation.qualified_name, name=str(name))


def _wanted(state: State) -> dict[tuple[int, int], _Wanted]:
    """Return the ready tables that are to have a name, or have one."""
    # Of all that layouts say this is asked for at each change of the catalog.
    layouts = {one.oid: Layouts(register=registers_of(one.options.register)) for one in state.subscriptions}
    held = {(one.subid, one.relid): one for one in state.registrations}
    found = {}
    for one in state.relations:
        # Without a definition a table has joined without a copy, and its Delta table is still to be made.
        if one.state is not RelState.READY or one.definition is None:
            continue
        place = (one.subid, one.relid)
        name = layouts[one.subid].registered_as(one.schema, one.published_name, one.beside)
        if name is not None or place in held:
            found[place] = _Wanted(one, name, held.get(place))
    return found
