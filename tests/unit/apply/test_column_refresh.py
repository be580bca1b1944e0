"""REFRESH asks for the columns of a table that sends no rows: two looks at the publisher that agree."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from apply.schema_changes.refresh import altered_between
from pubsub.protocol.lsn import Lsn
from tests.support.apply_tables import A, Bench, Meanwhile, Same, opened, until_committed


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    async with opened(tmp_path) as bench:
        yield bench


def test_a_table_was_altered_between_two_looks_if_they_differ() -> None:
    same, other = Same(), Same("other")
    assert not altered_between(same, same)  # type: ignore[arg-type]
    assert altered_between(same, other)  # type: ignore[arg-type]
    assert altered_between(None, same)  # type: ignore[arg-type]
    assert not altered_between(same, None), "dropped: it gets no rows any more"  # type: ignore[arg-type]


async def test_columns_are_taken_over_once_the_stream_is_past_the_first_look(bench: Bench) -> None:
    """The first look's WAL ends at 50."""
    tables = bench.follows(Meanwhile(until_committed, at="never"))
    await bench.ready(10)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.relations.load()
    await tables.begin_refresh()
    assert bench.follower is not None
    await tables.refresh_columns(Lsn(49))
    assert (bench.follower.asked, bench.follower.taken_over) == ([[A.oid]], [])
    await tables.refresh_columns(Lsn(50))
    assert (bench.follower.asked, bench.follower.taken_over) == ([[A.oid], [A.oid]], [A.oid])
    assert not tables.refresh_pending


async def test_a_table_altered_between_the_looks_is_looked_at_a_third_time(bench: Bench) -> None:
    async def altered() -> None:
        assert bench.follower is not None
        bench.follower.columns = Same("altered")

    tables = bench.follows(Meanwhile(altered, at="look 2"))
    await bench.ready(10)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.relations.load()
    await tables.begin_refresh()
    assert bench.follower is not None
    await tables.refresh_columns(Lsn(50))
    assert bench.follower.taken_over == []
    assert tables.refresh_pending
    await tables.refresh_columns(Lsn(50))
    assert bench.follower.taken_over == [A.oid]


async def test_a_table_that_leaves_while_its_columns_are_looked_at(bench: Bench) -> None:
    """REFRESH asks for the columns, a second one takes the table out: the KeyError once ended the worker."""
    tables = bench.follows(Meanwhile(bench.leaves, at="look 2"))
    await bench.ready(100)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.relations.load()
    await tables.begin_refresh()
    assert tables.refresh_pending
    await tables.refresh_columns(Lsn(100))
    assert bench.follower is not None
    assert bench.follower.asked == [[A.oid], [A.oid]]
    assert bench.follower.taken_over == []
    assert not tables.refresh_pending


async def test_a_table_that_begins_anew_while_its_columns_are_looked_at_is_not_altered(bench: Bench) -> None:
    async def joins_again() -> None:
        await bench.joins_again()
        await bench.tables.relations.load()

    tables = bench.follows(Meanwhile(joins_again, at="look 2"))
    await bench.ready(100)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.relations.load()
    await tables.begin_refresh()
    await tables.refresh_columns(Lsn(100))
    assert bench.follower is not None
    assert bench.follower.taken_over == []


async def test_columns_that_are_asked_for_again_while_they_are_looked_at_are_looked_at_again(bench: Bench) -> None:
    """An ALTER TABLE after the look, and a REFRESH after that, were once answered by the look before both."""

    async def asked_again() -> None:
        await bench.catalog.ask_for_columns(bench.subscription.oid)
        await bench.tables.relations.load()

    tables = bench.follows(Meanwhile(asked_again, at="look 2"))
    await bench.ready(100)
    await bench.catalog.ask_for_columns(bench.subscription.oid)
    await tables.relations.load()
    await tables.begin_refresh()
    await tables.refresh_columns(Lsn(100))
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.look_again == 2
    assert tables.refresh_pending
    await tables.refresh_columns(Lsn(100))
    (stored,) = await bench.catalog.relations(bench.subscription.oid)
    assert stored.look_again == 0
    assert not tables.refresh_pending
