"""ApplyTables on a real catalog: the transactions that a table gets, which worker writes it, when it is ready."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

import pytest

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
from pubsub.errors import NotInPrerequisiteState, StartAgain
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions
from tests.support.frames import relation
from tests.support.memory import MemoryDelta, target

A, B = relation(16384, "a"), relation(16385, "b")
DEFINITION = json.dumps({"columns": ["id", "v"], "key": ["id"]})


async def quiet() -> None:
    """Return at once: no batch is under way."""


class Meanwhile:
    """A follower whose every question to the publisher takes a while, in which `happens` happens, once."""

    def __init__(self, happens: Callable[[], Awaitable[None]], *, at: str = "look", again: bool = False) -> None:
        self._happens: Callable[[], Awaitable[None]] | None = happens
        self._at = at
        self._again = again
        self.asked: list[list[int]] = []
        self.taken_over: list[int] = []
        self.now: dict[int, tuple[str, str]] = {}

    async def _awaited(self, what: str) -> None:
        if what == self._at and self._happens is not None:
            happens, self._happens = self._happens, None
            await happens()

    async def look(self, tables: Sequence[Columns]) -> Looked:
        self.asked.append([table.relid for table in tables])
        await self._awaited(f"look {len(self.asked)}")
        return Looked({table.relid: Same() for table in tables}, Lsn(50))  # type: ignore[misc]

    async def take_over(self, table: Columns, now: object, since: Lsn, version: object) -> None:
        self.taken_over.append(table.relid)
        await self._awaited("take over")

    async def renamed(self, relids: Sequence[int]) -> dict[int, tuple[str, str]]:
        await self._awaited("renamed")
        return self.now

    async def rename(self, relid: int, table: Columns | None, schema: str, name: str) -> None:
        raise AssertionError("the table has left")

    async def follow(self, batch: Batch, tables: object, quiet: object, version: object) -> list[CopyAgain]:
        await self._awaited("follow")
        return [CopyAgain(A.oid, "public.a", "which column is which can not be told")] if self._again else []


class Same:
    """A table in the publisher's catalog that nobody alters."""

    def same_columns(self, other: object) -> bool:
        return isinstance(other, Same)


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
        return self.tables.promise(relid, at, self.decided)

    def start_again(self) -> None:
        self.restarts += 1

    def tables_changed(self) -> None: ...

    async def copied(self, at: int, relid: int = A.oid) -> None:
        """Store the states of a sync worker up to f."""
        generation = await self.catalog.begin_copy(self.subscription.oid, relid)
        await self.catalog.set_relation_definition(self.subscription.oid, relid, DEFINITION)
        self.delta.tables["a"].versions[self.app_id(generation, relid)] = Lsn(at)
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
        await self.tables.load()
        await self.tables.durable(Lsn(at))

    async def leaves(self) -> None:
        """REFRESH takes table a out, and the worker hears of it."""
        await self.catalog.remove_relation(self.subscription.oid, A.oid)
        await self.tables.load()

    async def joins_again(self) -> None:
        """REFRESH takes table a out, and another one takes it in: the worker has heard of neither."""
        await self.catalog.remove_relation(self.subscription.oid, A.oid)
        await self.catalog.add_relations(self.subscription.oid, [NewRelation(A.oid, "public", "a", "a")])

    async def destination(self) -> Destination:
        """Where a batch that is staged now goes."""
        async with asyncio.timeout(10):
            found = await self.tables.destinations(Batch({A.oid: A}), quiet)
        return found[("public", "a")]

    async def state(self) -> RelState:
        (found,) = await self.catalog.relations(self.subscription.oid)
        return found.state

    async def after(self, name: str = "a") -> Lsn | None:
        async with asyncio.timeout(10):
            found = await self.tables.destinations(Batch({A.oid: A, B.oid: B}), quiet)
        return found[("public", name)].after if ("public", name) in found else None


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    delta = MemoryDelta(target("a"), target("b"))
    async with await Catalog.open(tmp_path / "catalog.db") as catalog:
        new = NewSubscription("s", "", ("p",), SubscriptionOptions(), "s", "s")
        subscription = await catalog.create_subscription(new, [NewRelation(A.oid, "public", "a", "a")])
        with delta.installed():
            yield Bench(catalog, subscription, delta)


async def test_a_table_in_copy_gets_nothing(bench: Bench) -> None:
    await bench.tables.load()
    assert await bench.after() is None
    await bench.copied(100)
    await bench.tables.load()
    assert await bench.after() is None
    assert await bench.after("b") is None, "it is not in the subscription"


async def test_c_is_at_or_past_what_was_decided(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.decided = Lsn(150)
    bench.handover.attach(bench)
    assert await bench.handover.catchup_lsn(A.oid, Lsn(100)) == 150
    assert await bench.after() == 150


async def test_what_the_catalog_got_since_it_was_read_is_known_at_the_first_batch(bench: Bench) -> None:
    """The first commit once had the previous copy's application id; a restart then did not find its version."""
    await bench.tables.load()
    await bench.copied(100)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    async with asyncio.timeout(10):
        found = await bench.tables.destinations(Batch({A.oid: A}), quiet)
    assert found[("public", "a")].app_id == bench.app_id(1)


async def test_a_table_that_joined_and_was_copied_meanwhile_is_known_at_the_first_batch(bench: Bench) -> None:
    await bench.tables.load()
    await bench.catalog.add_relations(bench.subscription.oid, [NewRelation(B.oid, "public", "b", "b")])
    await bench.copied(100, B.oid)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(B.oid, Lsn(100))
    assert await bench.after("b") == 100


async def test_a_table_that_joined_without_a_copy_is_known_at_the_first_batch(bench: Bench) -> None:
    """Its first rows were once skipped if they arrived before the catalog had been read again."""
    await bench.tables.load()
    joined = NewRelation(B.oid, "public", "b", "b", RelState.READY, Lsn(100), DEFINITION)
    await bench.catalog.add_relations(bench.subscription.oid, [joined])
    assert await bench.after("b") == 100


async def test_apply_writes_after_s(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    staged = await bench.destination()
    task = asyncio.create_task(bench.tables.may_write(staged))
    await asyncio.sleep(0.01)
    assert not task.done()
    bench.delta.tables["a"].versions[bench.app_id(1)] = Lsn(90)
    await bench.synced(100)
    assert await task
    assert bench.tables.version(A.oid) == 90
    assert await bench.after() == 100
    bench.tables.committed(staged, Lsn(200))
    assert bench.tables.version(A.oid) == 200
    assert await bench.after() == 200


async def test_a_table_that_leaves_is_not_waited_for(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    staged = await bench.destination()
    task = asyncio.create_task(bench.tables.may_write(staged))
    await asyncio.sleep(0.01)
    await bench.catalog.remove_relation(bench.subscription.oid, A.oid)
    await bench.tables.load()
    assert not await task
    assert await bench.after() is None
    assert not await bench.tables.may_write(staged)
    bench.tables.committed(staged, Lsn(200))


async def test_a_worker_that_drains_waits_for_no_sync_worker(bench: Bench) -> None:
    """Both end; stopping once took the whole drain_timeout."""
    await bench.copied(100)
    await bench.tables.load()
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    staged = await bench.destination()
    task = asyncio.create_task(bench.tables.may_write(staged))
    await asyncio.sleep(0.01)
    bench.tables.drain()
    with pytest.raises(NotInPrerequisiteState, match="not synchronized"):
        async with asyncio.timeout(10):
            await task


async def test_r_is_stored_when_the_origin_has_come_to_s(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.load()
    await bench.tables.durable(Lsn(149))
    assert await bench.state() is RelState.SYNCDONE
    await asyncio.gather(bench.tables.durable(Lsn(150)), bench.tables.settle(), bench.tables.settle())
    assert await bench.state() is RelState.READY
    assert await bench.catalog.origin(bench.subscription.oid) == 150


async def test_r_is_stored_after_a_restart_of_a_quiet_publisher(bench: Bench) -> None:
    """The origin is already past the LSN of s, and nothing moves it."""
    await bench.copied(100)
    await bench.synced(150)
    await bench.catalog.advance_origin(bench.subscription.oid, Lsn(200))
    await bench.restarted().load()
    await bench.tables.settle()
    assert await bench.state() is RelState.READY


async def test_the_origin_never_goes_back(bench: Bench) -> None:
    await bench.tables.durable(Lsn(200))
    await bench.tables.durable(Lsn(100))
    assert await bench.catalog.origin(bench.subscription.oid) == 200


@pytest.mark.parametrize("slow", ["origin", "advance_origin"])
async def test_a_slow_look_at_the_origin_does_not_take_it_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, slow: str
) -> None:
    """A table of a quiet publisher then stayed in s."""
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.load()
    ask, answered, go_on = getattr(bench.catalog, slow), asyncio.Event(), asyncio.Event()

    async def slowly(*args: object) -> Lsn:
        found: Lsn = await ask(*args)
        monkeypatch.undo()
        answered.set()
        await go_on.wait()
        return found

    monkeypatch.setattr(bench.catalog, slow, slowly)
    late = asyncio.create_task(bench.tables.load() if slow == "origin" else bench.tables.durable(Lsn(120)))
    await answered.wait()
    monkeypatch.setattr(bench.tables, "settle", quiet)  # nobody settles yet
    await bench.tables.durable(Lsn(200))
    go_on.set()
    await late
    monkeypatch.undo()
    await bench.tables.settle()
    assert await bench.state() is RelState.READY


async def test_after_a_restart_the_table_says_what_it_holds(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    bench.delta.tables["a"].versions[bench.app_id(1)] = Lsn(500)
    await bench.restarted().load()
    assert await bench.after() == 500
    assert bench.tables.greatest_version == 500


async def test_after_a_restart_s_counts_where_the_table_holds_less(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.restarted().load()
    assert await bench.after() == 150
    assert bench.tables.version(A.oid) == 100


async def test_the_next_apply_worker_keeps_the_promise_that_still_holds(bench: Bench) -> None:
    await bench.copied(100)
    await bench.tables.load()
    bench.decided = Lsn(150)
    bench.handover.attach(bench)
    await bench.handover.catchup_lsn(A.oid, Lsn(100))
    bench.handover.detach()
    await bench.restarted().load()
    assert await bench.after() == 150
    # A new copy breaks the promise after the worker has read it and before it is attached: no one is notified.
    bench.handover.new_copy(A.oid)
    bench.tables.keep_promises()
    assert await bench.after() is None
    assert bench.restarts == 0


async def test_changes_of_a_renamed_table_are_refused(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.load()
    renamed = relation(A.oid, "other")
    with pytest.raises(NotInPrerequisiteState, match=r'relation "public\.other" does not exist'):
        await bench.tables.destinations(Batch({A.oid: renamed}), quiet)
    assert await bench.tables.destinations(Batch({77: relation(77, "other")}), quiet) == {}


# What happens while something is waited for.


async def test_a_table_that_leaves_while_its_columns_are_looked_at(bench: Bench) -> None:
    """REFRESH asks for the columns, a second one takes the table out: the KeyError once ended the worker."""
    tables = bench.follows(Meanwhile(bench.leaves, at="look 2"))
    await bench.ready(100)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.load()
    await tables.look()
    assert tables.asked
    await tables.settle_columns(Lsn(100))
    assert bench.follower is not None
    assert bench.follower.asked == [[A.oid], [A.oid]]
    assert bench.follower.taken_over == []
    assert not tables.asked


async def test_a_table_that_begins_anew_while_its_columns_are_looked_at_is_not_altered(bench: Bench) -> None:
    async def joins_again() -> None:
        await bench.joins_again()
        await bench.tables.load()

    tables = bench.follows(Meanwhile(joins_again, at="look 2"))
    await bench.ready(100)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.load()
    await tables.look()
    await tables.settle_columns(Lsn(100))
    assert bench.follower is not None
    assert bench.follower.taken_over == []


async def test_columns_that_are_asked_for_again_while_they_are_looked_at_are_looked_at_again(bench: Bench) -> None:
    """An ALTER TABLE after the look, and a REFRESH after that, were once answered by the look before both."""

    async def asked_again() -> None:
        await bench.catalog.ask_for_columns(bench.subscription.oid)
        await bench.tables.load()

    tables = bench.follows(Meanwhile(asked_again, at="look 2"))
    await bench.ready(100)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.load()
    await tables.look()
    await tables.settle_columns(Lsn(100))
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.look_again == 2
    assert tables.asked
    await tables.settle_columns(Lsn(100))
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.look_again == 0
    assert not tables.asked


async def test_a_table_that_leaves_while_the_publisher_is_asked_for_its_name(bench: Bench) -> None:
    """Another table has its name in the stream: dropped and made again, or renamed?"""
    follower = Meanwhile(bench.leaves, at="renamed")
    follower.now = {A.oid: ("public", "other")}
    tables = bench.follows(follower)
    await bench.ready(100)
    assert await tables.destinations(Batch({77: relation(77, "a")}), quiet) == {}


async def test_a_table_that_leaves_before_it_is_renamed(bench: Bench) -> None:
    """Until the batches before are committed, which may take long."""
    tables = bench.follows(Meanwhile(quiet, at="never"))
    await bench.ready(100)
    assert await tables.destinations(Batch({A.oid: relation(A.oid, "other")}), bench.leaves) == {}


@pytest.mark.parametrize("how", ["leaves", "leaves unheard"])
async def test_a_table_that_leaves_before_it_is_to_be_copied_again(bench: Bench, how: str) -> None:
    async def unheard() -> None:
        await bench.catalog.remove_relation(bench.subscription.oid, A.oid)

    tables = bench.follows(Meanwhile(bench.leaves if how == "leaves" else unheard, at="follow", again=True))
    await bench.ready(100)
    with pytest.raises(StartAgain):
        await tables.destinations(Batch({A.oid: A}), quiet)


async def test_a_table_that_leaves_before_it_is_ready(bench: Bench) -> None:
    """The catalog refused `r`, and the worker failed of it."""
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.load()
    await bench.catalog.remove_relation(bench.subscription.oid, A.oid)
    await bench.tables.durable(Lsn(200))
    await bench.tables.load()
    assert await bench.after() is None


async def test_a_table_that_joined_again_is_not_ready_by_what_it_was(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.load()
    await bench.joins_again()
    await bench.tables.durable(Lsn(200))
    assert await bench.state() is RelState.INIT


async def test_a_table_that_left_and_joined_again_begins_anew(bench: Bench) -> None:
    """Between two readings of the catalog: apply once went on to write what its sync worker copied."""
    await bench.ready(100)
    assert await bench.after() == 100
    await bench.joins_again()
    await bench.tables.load()
    assert await bench.after() is None


async def test_what_was_staged_for_a_table_is_not_committed_to_its_next_copy(bench: Bench) -> None:
    """The copy holds it already, and newer rows besides."""
    await bench.ready(100)
    staged = await bench.destination()
    await bench.joins_again()
    await bench.tables.load()
    await bench.copied(300)
    bench.decided = Lsn(200)
    bench.handover.attach(bench)
    assert await bench.handover.catchup_lsn(A.oid, Lsn(300)) == 300
    await bench.synced(300)
    assert not await bench.tables.may_write(staged)
    bench.tables.committed(staged, Lsn(200))
    assert (await bench.destination()).after == 300


async def test_a_table_that_leaves_while_its_destination_is_found_is_left_out(bench: Bench) -> None:
    tables = bench.follows(Meanwhile(bench.leaves, at="follow"))
    await bench.ready(100)
    assert await tables.destinations(Batch({A.oid: A}), quiet) == {}
