"""An apply worker's tables on a real catalog, with Delta tables in memory and a publisher that answers as a test says."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from apply.batch import Batch
from apply.handover import Handover
from apply.schema_changes.diff import CopyAgain
from apply.schema_changes.follow import Columns, Looked
from apply.staging.destination import Destination
from apply.tables import ApplyTables
from catalog.records import NewRelation, NewSubscription, Subscription
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.delta.table import application_id
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions
from tests.support.frames import relation
from tests.support.memory import MemoryDelta, target

A, B = relation(16384, "a"), relation(16385, "b")
DEFINITION = json.dumps({"columns": ["id", "v"], "key": ["id"]})


async def until_committed() -> None:
    """Return at once: no batch is under way."""


@dataclass(frozen=True)
class Same:
    """A table in the publisher's catalog, with the same columns as every other one of this name."""

    columns: str = "id, v"

    def same_columns(self, other: object) -> bool:
        return self == other


class Meanwhile:
    """A follower whose every question to the publisher takes a while, in which `happens` happens, once."""

    def __init__(self, happens: Callable[[], Awaitable[None]], *, at: str = "look", again: bool = False) -> None:
        self._happens: Callable[[], Awaitable[None]] | None = happens
        self._at = at
        self._again = again
        self.asked: list[list[int]] = []
        self.asked_for_names: list[list[int]] = []
        self.taken_over: list[int] = []
        self.now: dict[int, tuple[str, str]] = {}
        self.hidden: frozenset[int] = frozenset()
        self.columns = Same()

    async def _awaited(self, what: str) -> None:
        if what == self._at and self._happens is not None:
            happens, self._happens = self._happens, None
            await happens()

    async def look(self, tables: Sequence[Columns]) -> Looked:
        self.asked.append([table.relid for table in tables])
        await self._awaited(f"look {len(self.asked)}")
        return Looked({table.relid: self.columns for table in tables}, Lsn(50))  # type: ignore[misc]

    async def take_over(self, table: Columns, now: object, since: Lsn, version: object) -> None:
        self.taken_over.append(table.relid)
        await self._awaited("take over")

    async def renamed(self, batch: Batch, oids: Sequence[int]) -> tuple[dict[int, tuple[str, str]], frozenset[int]]:
        self.asked_for_names.append([*oids])
        await self._awaited("renamed")
        return self.now, self.hidden

    async def rename(self, relid: int, table: Columns | None, schema: str, name: str) -> None:
        raise AssertionError("the table has left")

    async def follow(self, batch: Batch, tables: object, until_committed: object, version: object) -> list[CopyAgain]:
        await self._awaited("follow")
        return [CopyAgain(A.oid, "public.a", "which column is which cannot be told")] if self._again else []


class Bench:
    """A subscription with table a, and its apply worker's ApplyTables."""

    def __init__(self, catalog: Catalog, subscription: Subscription, delta: MemoryDelta) -> None:
        self.follower: Meanwhile | None = None
        self.catalog, self.subscription, self.delta = catalog, subscription, delta
        self.handover = Handover()
        self.tables = self.restarted()
        self.decided = INVALID_LSN
        self.restarts = 0

    def restarted(self) -> ApplyTables:
        self.tables = ApplyTables(
            self.catalog,
            "9",
            self.subscription,
            self.handover,
            self.follower,  # type: ignore[arg-type]
        )
        return self.tables

    def follows(self, follower: Meanwhile) -> ApplyTables:
        """A worker that follows the publisher's tables."""
        self.follower = follower
        return self.restarted()

    # handover.Applying

    def answer(self, relid: int, at: Lsn) -> Lsn:
        return self.tables.relations.promise(relid, at, self.decided)

    def start_again(self) -> None:
        self.restarts += 1

    def tables_changed(self) -> None: ...

    async def copied(self, at: int, relid: int = A.oid) -> None:
        """Store the states of a sync worker up to f."""
        generation = await self.catalog.begin_copy(self.subscription.oid, relid)
        await self.catalog.set_relation_definition(self.subscription.oid, relid, DEFINITION)
        name = "b" if relid == B.oid else "a"
        self.delta.tables[name].versions[self.app_id(generation, relid)] = Lsn(at)
        await self.catalog.set_relation_state(self.subscription.oid, relid, RelState.FINISHEDCOPY, Lsn(at))

    async def synced(self, at: int) -> None:
        await self.catalog.set_relation_state(self.subscription.oid, A.oid, RelState.SYNCDONE, Lsn(at))
        self.handover.synced(A.oid)

    def app_id(self, generation: int, relid: int = A.oid) -> str:
        return application_id("9", self.subscription.oid, relid, generation)

    async def ready(self, at: int) -> None:
        """Table a is copied, and apply's."""
        await self.copied(at)
        await self.synced(at)
        await self.tables.relations.load()
        await self.tables.durable(Lsn(at), None)

    async def leaves(self) -> None:
        """REFRESH takes table a out, and the worker hears of it."""
        await self.catalog.remove_relation(self.subscription.oid, A.oid)
        await self.tables.relations.load()

    async def joins_again(self) -> None:
        """REFRESH takes table a out, and another one takes it in: the worker has heard of neither."""
        await self.catalog.remove_relation(self.subscription.oid, A.oid)
        await self.catalog.add_relations(self.subscription.oid, [NewRelation(A.oid, "public", "a", "a")])

    async def destination(self) -> Destination:
        """Where a batch that is staged now goes."""
        async with asyncio.timeout(10):
            found, *_ = await self.tables.adapt_tables(Batch({A.oid: A}), until_committed)
        return found[("public", "a")]

    async def state(self) -> RelState:
        (found,) = await self.catalog.relations(self.subscription.oid)
        return found.state

    async def after(self, name: str = "a") -> Lsn | None:
        async with asyncio.timeout(10):
            found, *_ = await self.tables.adapt_tables(Batch({A.oid: A, B.oid: B}), until_committed)
        return found[("public", name)].after if ("public", name) in found else None


@asynccontextmanager
async def opened(path: Path) -> AsyncIterator[Bench]:
    """A bench whose catalog is at `path`."""
    delta = MemoryDelta(target("a"), target("b"))
    async with await Catalog.open(path / "catalog.db") as catalog:
        new = NewSubscription("s", "", ("p",), SubscriptionOptions(), "s", "s")
        subscription = await catalog.create_subscription(new, [NewRelation(A.oid, "public", "a", "a")])
        with delta.installed():
            yield Bench(catalog, subscription, delta)
