"""What a node publishes: its publications, the positions of its tables' commits, slots, and what these show in system catalogs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from catalog.records import State, SubscriptionRel
from pubsub.delta.table import exists
from pubsub.errors import PubsubError
from pubsub.server.publishing.positions import Positions
from pubsub.server.publishing.publications import Publication, Publications
from pubsub.server.system_catalogs import contents as catalogs
from pubsub.server.system_catalogs.contents import Contents
from pubsub.server.system_catalogs.definitions import PUBLISHED, Row
from pubsub.settings import Settings
from walsender.slots.slot import Slot, SlotStore

Pin = Callable[[str, str, Sequence[str]], Awaitable[None]]
"""Pins or releases tables: "pin" or "release", the pin's name, the paths."""


@dataclass(frozen=True, slots=True)
class Published:
    """A table of publications: its relation, the columns that are published in order, and the actions."""

    relation: SubscriptionRel
    table: catalogs.Table
    columns: tuple[str, ...]
    actions: frozenset[str]


class Publisher:
    """The publisher of the node of `settings`."""

    def __init__(self, settings: Settings, pin: Pin) -> None:
        self.settings = settings
        self.publications = Publications.load(settings.home)
        self.slots = SlotStore(settings.home / "slots", settings.walsender.max_replication_slots)
        self.positions = Positions(settings.home)
        self.pin = pin
        self.streams: set[Any] = set()
        self._collecting = asyncio.Lock()

    async def close(self) -> None:
        """Save the slots, and let go of the positions."""
        await self.slots.save_changed()
        self.positions.close()

    def paths(self, state: State) -> list[str]:
        """Return the Delta tables of all publications that are there."""
        found = {
            one.path
            for one in state.relations
            if any(publication.columns_of(one) is not False for publication in self.publications.by_name.values())
        }
        return sorted(path for path in found if exists(path))

    async def collect(self, state: State) -> int:
        """Look for new commits; return the LSN up to which everything is known.  Raises PubsubError."""
        async with self._collecting:
            paths = await asyncio.to_thread(self.paths, state)
            await asyncio.to_thread(self.positions.collect, paths)
            return await asyncio.to_thread(self.positions.end)

    def published(self, state: State, names: Sequence[str]) -> dict[str, Published]:
        """Return the tables of these publications, by path.  Raises PubsubError for a publication that does not exist."""
        chosen: list[Publication] = []
        for name in names:
            if name not in self.publications.by_name:
                raise PubsubError(f'publication "{name}" does not exist', sqlstate="42704")
            chosen.append(self.publications.by_name[name])
        found: dict[str, Published] = {}
        for table in catalogs.tables(state):
            lists = [one for one in chosen if one.columns_of(table.relation) is not False]
            if lists:
                columns = _columns(lists[0], table)
                actions = frozenset(action for one in lists for action in one.publish)
                found[table.path] = Published(table.relation, table, columns, actions)
        return found

    def rows(self, known: Contents) -> Mapping[str, list[Row]]:
        """Return what the system catalogs show of publications and slots."""
        publications: list[Row] = []
        members: list[Row] = []
        schemas: list[Row] = []
        listed: list[Row] = []
        functions: list[Row] = []
        for one in self.publications.by_name.values():
            publications.append(
                {"oid": one.oid, "pubname": one.name, "pubowner": catalogs.OWNER_OID, "puballtables": one.all_tables,
                 "pubinsert": "insert" in one.publish, "pubupdate": "update" in one.publish,
                 "pubdelete": "delete" in one.publish, "pubtruncate": "truncate" in one.publish, "pubviaroot": False,
                 "pubgencols": "n"}
            )  # fmt: skip
            schemas += [
                {"oid": one.oid + number + 1, "pnpubid": one.oid, "pnnspid": known.schemas.get(name)}
                for number, name in enumerate(one.schemas)
            ]
            for table in known.tables:
                chosen = one.columns_of(table.relation)
                if chosen is False:
                    continue
                names = [attribute.name for attribute in table.attributes]
                columns = _columns(one, table)
                numbers = " ".join(str(names.index(name) + 1) for name in columns)
                functions.append(
                    {"pubname": one.name, "pubid": one.oid, "relid": table.oid, "attrs": numbers, "qual": None}
                )
                listed.append(
                    {"pubname": one.name, "schemaname": table.schema, "tablename": table.name, "attnames": tuple(columns),
                     "rowfilter": None}
                )  # fmt: skip
                if any((schema, name) == (table.schema, table.name) for schema, name, _ in one.tables):
                    attrs = None if chosen is None else numbers
                    members.append(
                        {"oid": table.oid ^ one.oid, "prpubid": one.oid, "prrelid": table.oid, "prattrs": attrs}
                    )
        return {
            "pg_publication": publications,
            "pg_publication_rel": members,
            "pg_publication_namespace": schemas,
            "pg_publication_tables": listed,
            PUBLISHED: functions,
            "pg_replication_slots": [slot_row(one) for one in self.slots],
            "pg_stat_replication": [one.row() for one in self.streams],
        }


def _columns(publication: Publication, table: catalogs.Table) -> tuple[str, ...]:
    chosen = publication.columns_of(table.relation)
    return tuple(one.name for one in table.attributes if not isinstance(chosen, tuple) or one.name in chosen)


def slot_row(slot: Slot) -> Row:
    """Return a slot's row of pg_replication_slots."""
    from pubsub.protocol.lsn import Lsn

    lost = slot.invalidation_reason is not None
    return {
        "slot_name": slot.name, "plugin": slot.plugin, "slot_type": "logical", "datoid": catalogs.DATABASE_OID,
        "database": catalogs.DATABASE, "temporary": slot.temporary, "active": slot.active_pid is not None,
        "active_pid": slot.active_pid, "restart_lsn": None if lost else str(Lsn(slot.restart_lsn)),
        "confirmed_flush_lsn": str(Lsn(slot.confirmed_flush_lsn)), "wal_status": "lost" if lost else "reserved",
        "two_phase": slot.two_phase, "conflicting": False, "invalidation_reason": slot.invalidation_reason,
        "failover": slot.failover, "synced": False,
    }  # fmt: skip
