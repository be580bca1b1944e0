"""Renames by the publisher: which tables were renamed, which were dropped, which must wait."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from apply.batch import Batch
from apply.schema_changes.follow import Columns
from apply.schema_changes.table_renames import Name, displaced, newly_announced, without_taken
from catalog.records import NewRelation, SubscriptionRel
from catalog.states import RelState
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from tests.support.apply_tables import A, B, Bench, Meanwhile, opened, until_committed
from tests.support.frames import relation


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as bench:
        yield bench


# Our tables a and b, with oids 16384 and 16385; what the batch announces, by oid.
OURS = {A.oid: ("public", "a"), B.oid: ("public", "b")}


@dataclass
class Known:
    """A table of the subscription, as renames see it."""

    relation: SubscriptionRel
    after: int | None = 100
    columns: None = None
    announced_name: Name | None = None

    @property
    def name(self) -> Name:
        return self.relation.schema, self.relation.name


def known(**changes: Any) -> dict[int, Known]:
    return {
        oid: Known(
            SubscriptionRel(1, oid, schema, name, RelState.READY, None, 1, None, name, None, None, None, None),
            **changes,
        )
        for oid, (schema, name) in OURS.items()
    }


def found(announced: Mapping[int, Name], tables: Mapping[int, Any]) -> tuple[dict[int, Name], set[int]]:
    """The tables announced under a new name, and those whose names others use."""
    renamed = newly_announced(announced, tables)
    return renamed, displaced(announced, renamed, tables, {table.name: table for table in tables.values()})


def test_a_table_is_renamed_once() -> None:
    new = {A.oid: ("other", "c")}
    assert found(new, known()) == (new, set())
    assert found(new, known(announced_name=("other", "c"))) == ({}, set()), "announced before, and looked at then"
    assert found({A.oid: ("public", "a")}, known()) == ({}, set())
    assert found(new, known(after=None)) == ({}, set()), "its sync worker has it"
    assert found({99: ("other", "c")}, known()) == ({}, set()), "not in the subscription"


def test_a_table_whose_name_another_uses_is_in_doubt() -> None:
    assert found({99: ("public", "a")}, known()) == ({}, {A.oid}), "dropped and created again, or renamed"
    assert found({99: ("public", "a")}, known(after=None)) == ({}, set())
    assert found({A.oid: ("public", "b")}, known()) == ({A.oid: ("public", "b")}, {B.oid})
    exchanged = {A.oid: ("public", "b"), B.oid: ("public", "a")}
    assert found(exchanged, known()) == (exchanged, set()), "the stream says it of both"


def test_a_name_that_another_table_keeps_is_not_taken_yet() -> None:
    assert without_taken({A.oid: ("public", "b")}, known()) == {}
    exchanged = {A.oid: ("public", "b"), B.oid: ("public", "a")}
    assert without_taken(exchanged, known()) == exchanged
    assert without_taken({A.oid: ("public", "c")}, known()) == {A.oid: ("public", "c")}


async def test_changes_of_a_renamed_table_are_refused(bench: Bench) -> None:
    await bench.copied(100)
    await bench.synced(150)
    await bench.tables.relations.load()
    renamed = relation(A.oid, "other")
    with pytest.raises(NotInPrerequisiteState, match=r'relation "public\.other" does not exist'):
        await bench.tables.adapt_tables(Batch({A.oid: renamed}), until_committed)
    assert await bench.tables.adapt_tables(Batch({77: relation(77, "other")}), until_committed) == [{}]


async def test_a_table_that_leaves_while_the_publisher_is_asked_for_its_name(bench: Bench) -> None:
    """Another table has its name in the stream: dropped and made again, or renamed?"""
    follower = Meanwhile(bench.leaves, at="renamed")
    follower.now = {A.oid: ("public", "other")}
    tables = bench.follows(follower)
    await bench.ready(100)
    assert await tables.adapt_tables(Batch({77: relation(77, "a")}), until_committed) == [{}]


async def test_a_table_that_leaves_before_it_is_renamed(bench: Bench) -> None:
    """Until the batches before are committed, which may take long."""
    tables = bench.follows(Meanwhile(until_committed, at="never"))
    await bench.ready(100)
    assert await tables.adapt_tables(Batch({A.oid: relation(A.oid, "other")}), bench.leaves) == [{}]


class Renaming(Meanwhile):
    """A follower that renames in the catalog alone: the table's Delta table is in memory."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(until_committed, at="never")
        self._bench = bench

    async def rename(self, relid: int, table: Columns | None, schema: str, name: str) -> None:
        await self._bench.catalog.rename_relation(self._bench.subscription.oid, relid, schema, name)


async def test_a_renamed_table_goes_on_under_its_new_name(bench: Bench) -> None:
    tables = bench.follows(Renaming(bench))
    await bench.ready(100)
    found, *_ = await tables.adapt_tables(Batch({A.oid: relation(A.oid, "other")}), until_committed)
    assert {name: one.relid for name, one in found.items()} == {("public", "other"): A.oid}
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.qualified_name == "public.other"


async def test_a_table_is_not_renamed_in_a_transaction_that_may_be_rolled_back(bench: Bench) -> None:
    tables = bench.follows(Renaming(bench))
    await bench.ready(100)
    with pytest.raises(NotInPrerequisiteState, match="renamed in a transaction in progress"):
        await tables.adapt_tables(Batch({A.oid: relation(A.oid, "other")}), None)
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.qualified_name == "public.a"


async def test_the_publisher_does_not_know_yet_what_a_transaction_in_progress_has_renamed(bench: Bench) -> None:
    """It has given our table's name to another one.  Its answer was taken for good: neither was ever renamed after the commit."""
    follower = Renaming(bench)
    follower.now = {A.oid: ("public", "a")}
    tables = bench.follows(follower)
    await bench.ready(100)
    with pytest.raises(NotInPrerequisiteState, match="renamed in a transaction in progress") as raised:
        await tables.adapt_tables(Batch({77: relation(77, "a")}), None)
    assert raised.value.relid == A.oid, "the transaction is staged again at its commit"
    assert not follower.asked_for_names
    follower.now = {A.oid: ("public", "old")}
    await tables.adapt_tables(Batch({77: relation(77, "a")}), until_committed)
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.qualified_name == "public.old"


async def test_the_publisher_is_asked_once_for_a_table_that_it_has_dropped(bench: Bench) -> None:
    """Another table has the name; ours stays, as in PostgreSQL."""
    follower = Renaming(bench)
    tables = bench.follows(follower)
    await bench.ready(100)
    for _ in range(2):
        found, *_ = await tables.adapt_tables(Batch({77: relation(77, "a")}), until_committed)
        assert [one.relid for one in found.values()] == [A.oid]
    assert follower.asked_for_names == [[A.oid]]


async def test_the_publisher_is_asked_again_for_a_table_whose_new_name_nobody_sees_yet(bench: Bench) -> None:
    follower = Renaming(bench)
    follower.now, follower.hidden = {A.oid: ("public", "a")}, frozenset({A.oid})
    tables = bench.follows(follower)
    await bench.ready(100)
    batch = {77: relation(77, "a")}
    await tables.adapt_tables(Batch(batch), until_committed)
    follower.now, follower.hidden = {A.oid: ("public", "old")}, frozenset()
    await tables.adapt_tables(Batch(batch), until_committed)
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.qualified_name == "public.old"


async def test_tables_that_exchange_names_while_the_catalog_is_read_again(bench: Bench) -> None:
    """Between the two renames both have one name."""

    class ReadAgain(Renaming):
        async def rename(self, relid: int, table: Columns | None, schema: str, name: str) -> None:
            await super().rename(relid, table, schema, name)
            await self._bench.tables.relations.load()

    tables = bench.follows(ReadAgain(bench))
    await bench.catalog.add_relations(bench.subscription.oid, [NewRelation(B.oid, "public", "b", "b")])
    await bench.ready(100)
    await bench.copied(100, B.oid)
    await bench.catalog.set_relation_state(bench.subscription.oid, B.oid, RelState.SYNCDONE, Lsn(100))
    await tables.relations.load()
    batch = Batch({A.oid: relation(A.oid, "b"), B.oid: relation(B.oid, "a")})
    found, *_ = await tables.adapt_tables(batch, until_committed)
    assert {name: one.relid for name, one in found.items()} == {("public", "b"): A.oid, ("public", "a"): B.oid}
    stored = await bench.catalog.relations(bench.subscription.oid)
    assert {one.relid: one.name for one in stored} == {A.oid: "b", B.oid: "a"}
