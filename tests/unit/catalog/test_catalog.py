"""The catalog: what it stores and refuses."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest
from sqlalchemy.ext.asyncio import AsyncConnection

from catalog.database import now
from catalog.figures import CopyProgress, PublisherStatus, TableRows, TableStorage, Warned
from catalog.records import (
    ForeignCommit,
    LastCommit,
    NewRelation,
    NewSequence,
    PinnedSnapshot,
    PinnedTable,
    SequenceValue,
)
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.errors import DuplicateObject, NotInPrerequisiteState, PubsubError, UndefinedObject
from pubsub.memory import Memory
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from tests.support.catalog import new, table, with_table

BIG = Lsn(2**64 - 1)


@pytest.fixture
def location(tmp_path: Path) -> Path | str:
    """The catalog's location; scenario 065 runs the same tests on a PostgreSQL database."""
    return tmp_path / "catalog.db"


@pytest.fixture
async def catalog(location: Path | str) -> AsyncIterator[Catalog]:
    async with await Catalog.open(location) as opened:
        yield opened


async def test_a_subscription_comes_back_as_it_was_stored(catalog: Catalog) -> None:
    made = await with_table(catalog)
    assert made.oid == 16384
    assert (made.enabled, made.slot_name, made.generation, made.dropping) == (True, "sub", 1, False)
    assert made.publications == ("p", "q")
    assert made.publisher_system_identifier == "18446744073709551615"
    assert made.options == replace(new().options, slot_name="sub", target="db")
    assert await catalog.subscription("sub") == made
    assert await catalog.subscription(made.oid) == made
    assert await catalog.subscriptions() == [made]


async def test_oids_are_not_given_out_twice(catalog: Catalog) -> None:
    first = await with_table(catalog)
    await catalog.drop_subscription(first.oid)
    second = await with_table(catalog)
    assert second.oid == first.oid + 1


async def test_names_are_unique_and_the_words_postgresql_s(catalog: Catalog) -> None:
    await with_table(catalog)
    other = await catalog.create_subscription(new("other"))
    with pytest.raises(DuplicateObject, match=r'^subscription "sub" already exists$'):
        await catalog.create_subscription(new())
    with pytest.raises(DuplicateObject):
        await catalog.alter_subscription(other.oid, name="sub")
    assert (await catalog.alter_subscription(other.oid, name="other")).name == "other"
    with pytest.raises(UndefinedObject, match=r'^subscription "nope" does not exist$'):
        await catalog.subscription("nope")


async def test_sources_share_a_delta_table(catalog: Catalog) -> None:
    """Each has one owner; its path is the table's, whatever the source is called."""

    def joining(relid: int, source: str | None) -> NewRelation:
        known = {} if source is None else {"source": ["_pubsub_source", source]}
        return replace(table(relid), definition=json.dumps(known))

    one = await catalog.create_subscription(new("one"), [joining(1, "it's / 1\\")])
    two = await catalog.create_subscription(new("two"), [joining(1, "two")])
    for relid, source in ((1, "two"), (2, None)):
        with pytest.raises(DuplicateObject, match=r'belongs to subscription "(one|two)"'):
            await catalog.create_subscription(new("three"), [joining(relid, source)])
    plain = await catalog.create_subscription(new("four"), [replace(table(1, "u"), definition="{}")])
    with pytest.raises(DuplicateObject, match='belongs to subscription "four"'):
        await catalog.add_relations(two.oid, [replace(joining(2, "two"), path=table(1, "u").path)])
    for sub in (one, two):
        (found,) = await catalog.relations(sub.oid)
        assert found.path == table().path
    assert len({relation.path for relation in (await catalog.state()).relations if relation.subid != plain.oid}) == 1
    await catalog.drop_subscription(two.oid)
    await catalog.create_subscription(new("three"), [joining(1, "two")])


async def test_a_delta_table_has_one_owner(catalog: Catalog) -> None:
    await with_table(catalog)
    with pytest.raises(DuplicateObject, match='belongs to subscription "sub"') as caught:
        await catalog.create_subscription(new("other"), [table(9)])
    assert "target" in (caught.value.hint or "")
    assert [sub.name for sub in await catalog.subscriptions()] == ["sub"]  # nothing of it was stored
    await catalog.create_subscription(new("other"), [table(9, target="elsewhere")])


async def test_altering_counts_the_generation(catalog: Catalog) -> None:
    made = await with_table(catalog)
    changed = await catalog.alter_subscription(
        made.oid,
        publications=("z",),
        options=replace(made.options, batch_age=2.5, stop_lsn=BIG),
        skip_lsn=BIG,
        slot_name=None,
    )
    assert (changed.publications, changed.options.batch_age, changed.skip_lsn) == (("z",), 2.5, BIG)
    assert (changed.options.stop_lsn, str(changed.options.stop_lsn)) == (BIG, str(BIG))
    assert (changed.slot_name, changed.generation) == (None, 2)
    disabled = await catalog.set_enabled(made.oid, False)
    assert (disabled.enabled, disabled.options.enabled, disabled.generation) == (False, False, 3)
    with pytest.raises(UndefinedObject):
        await catalog.set_enabled(99, True)


async def test_a_skip_is_cleared_only_if_it_is_still_the_same(catalog: Catalog) -> None:
    made = await with_table(catalog)
    await catalog.alter_subscription(made.oid, skip_lsn=Lsn(5))
    assert not await catalog.clear_skip_lsn(made.oid, Lsn(4))
    assert await catalog.clear_skip_lsn(made.oid, Lsn(5))
    assert (await catalog.subscription(made.oid)).skip_lsn == INVALID_LSN


async def test_a_table_goes_through_the_states(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    (rel,) = await catalog.relations(sub.oid)
    assert (rel.state, rel.copy_generation, rel.lsn, rel.qualified_name) == (RelState.INIT, 0, None, "public.t")
    assert await catalog.begin_copy(sub.oid, 1, sync_slot="pg_1", definition="{}", estimated_rows=5) == 1
    assert await catalog.begin_copy(sub.oid, 1) == 2
    await catalog.set_relation_state(sub.oid, 1, RelState.FINISHEDCOPY, Lsn(10))
    await catalog.set_relation_state(sub.oid, 1, RelState.SYNCDONE, BIG)
    await catalog.set_relation_state(sub.oid, 1, RelState.SYNCDONE, BIG)
    await catalog.set_relation_state(sub.oid, 1, RelState.READY, BIG)
    found = await catalog.relation(sub.oid, 1)
    assert found is not None
    assert (found.state, found.lsn, found.copy_generation) == (RelState.READY, BIG, 2)
    assert (found.sync_slot, found.definition, found.estimated_rows) == ("pg_1", "{}", 5)
    await catalog.set_relation_state(sub.oid, 1, RelState.INIT)
    assert await catalog.begin_copy(sub.oid, 1) == 3  # RESYNC: a generation that no earlier copy had


async def test_a_table_that_joins_again_has_copies_of_its_own(catalog: Catalog) -> None:
    """Its Delta table says which copy it holds: the next, cut short, was once taken for that one, and never made."""
    sub = await catalog.create_subscription(new(), [NewRelation(1, "public", "a", "/w/a")])
    for generation in (1, 2):
        assert await catalog.begin_copy(sub.oid, 1) == generation
    await catalog.remove_relation(sub.oid, 1)
    await catalog.add_relations(sub.oid, [NewRelation(1, "public", "a", "/w/a")])
    assert await catalog.begin_copy(sub.oid, 1) == 3
    await catalog.remove_relation(sub.oid, 1)
    await catalog.remove_relation(sub.oid, 1)
    await catalog.add_relations(sub.oid, [NewRelation(1, "public", "a", "/w/a")])
    assert await catalog.begin_copy(sub.oid, 1) == 4


async def test_a_table_that_joins_again_without_a_copy_has_a_generation_of_its_own(catalog: Catalog) -> None:
    """With an earlier one its commits would look overtaken by those of its first stay, or its columns be taken for that stay's."""
    joins = NewRelation(1, "public", "a", "/w/a", RelState.READY, Lsn(1))
    sub = await catalog.create_subscription(new(), [joins])
    seen = []
    for copies in (0, 0, 1):
        if copies:
            await catalog.set_relation_state(sub.oid, 1, RelState.INIT)
            await catalog.begin_copy(sub.oid, 1)
        (rel,) = await catalog.relations(sub.oid)
        seen.append((rel.copy_generation, rel.copied))
        await catalog.remove_relation(sub.oid, 1)
        await catalog.add_relations(sub.oid, [joins])
    (rel,) = await catalog.relations(sub.oid)
    assert [*seen, (rel.copy_generation, rel.copied)] == [(0, False), (1, False), (3, True), (4, False)]


async def test_an_error_of_a_table_that_has_left_is_passed_over(catalog: Catalog) -> None:
    sub = await catalog.create_subscription(new())
    await catalog.set_relation_error(sub.oid, 1, "e", "h")
    assert await catalog.relation(sub.oid, 1) is None


@pytest.mark.parametrize("state", [RelState.SYNCWAIT, RelState.CATCHUP, RelState.READY, RelState.FINISHEDCOPY])
async def test_a_step_that_is_not_in_the_table_is_refused(catalog: Catalog, state: RelState) -> None:
    sub = await with_table(catalog)
    with pytest.raises(NotInPrerequisiteState):
        await catalog.set_relation_state(sub.oid, 1, state, Lsn(1))
    (rel,) = await catalog.relations(sub.oid)
    assert rel.state is RelState.INIT


async def test_syncdone_needs_an_lsn(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    await catalog.begin_copy(sub.oid, 1)
    await catalog.set_relation_state(sub.oid, 1, RelState.FINISHEDCOPY)
    with pytest.raises(NotInPrerequisiteState):
        await catalog.set_relation_state(sub.oid, 1, RelState.SYNCDONE)


async def test_a_table_s_error_goes_with_its_next_state(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    await catalog.set_relation_error(sub.oid, 1, "it broke", "mend it")
    (rel,) = await catalog.relations(sub.oid)
    assert (rel.error, rel.error_hint) == ("it broke", "mend it")
    await catalog.begin_copy(sub.oid, 1)
    (rel,) = await catalog.relations(sub.oid)
    assert (rel.error, rel.error_hint) == (None, None)


async def test_warnings_and_foreign_commits_of_a_table_last_until_its_next_copy(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    await catalog.add_relations(sub.oid, [table(2, "u")])
    await catalog.set_relation_error(sub.oid, 2, "it broke")
    foreign = ForeignCommit(7, "UPDATE", "an engine")
    await catalog.set_foreign_commit(sub.oid, 1, foreign)
    await catalog.stop_relation(sub.oid, 1, "no", "copy it", Lsn(500), count="apply")
    for relation in (await catalog.relation(sub.oid, 1), (await catalog.state()).relations[0]):
        assert relation is not None
        assert (relation.stopped, relation.error_lsn, relation.foreign) == (True, Lsn(500), foreign)
        assert (relation.error, relation.error_hint) == ("no", "copy it")
    assert (await catalog.subscription_stats())[0].apply_error_count == 1
    # This clears only failures of workers, not a stopped table's error.
    await catalog.clear_subscription_error(sub.oid)
    assert [relation.error for relation in await catalog.relations(sub.oid)] == ["no", None]
    await catalog.set_relation_state(sub.oid, 1, RelState.INIT)
    relation = await catalog.relation(sub.oid, 1)
    assert relation is not None
    assert (relation.stopped, relation.error_lsn, relation.foreign, relation.error) == (False, None, None, None)
    # A worker may report on a table that has left.
    await catalog.remove_relation(sub.oid, 1)
    await catalog.stop_relation(sub.oid, 1, "no", None, None, count="sync")
    await catalog.set_foreign_commit(sub.oid, 1, foreign)
    await catalog.add_relations(sub.oid, [table(1, "t")])
    relation = await catalog.relation(sub.oid, 1)
    assert relation is not None
    assert (relation.stopped, relation.foreign) == (False, None)
    assert (await catalog.subscription_stats())[0].sync_error_count == 0


async def test_sequences_are_synchronized_and_leave(catalog: Catalog) -> None:
    joining = [NewSequence(7, "public", "s", "/w/db/pg_sequences/sub", "{}"), NewSequence(8, "public", "r", "/w", "{}")]
    sub = await catalog.create_subscription(new(), [], joining)
    first, second = await catalog.sequences(sub.oid)
    assert (first.qualified_name, first.state, first.asked, first.last_value) == ("public.s", RelState.INIT, 0, None)
    value = SequenceValue(5, True, Lsn(90), '{"cycle": true}')
    counter = await catalog.change_counter()
    await catalog.sequences_synchronized(sub.oid, {7: (0, value)})
    assert await catalog.change_counter() > counter
    first, second = (await catalog.state()).sequences
    assert (first.state, first.last_value, first.is_called, first.lsn) == (RelState.READY, 5, True, Lsn(90))
    assert (first.definition, second.state) == ('{"cycle": true}', RelState.INIT)
    # A command that came after the worker had read the value has the last word.
    await catalog.ask_for_sequences(sub.oid)
    await catalog.sequences_synchronized(sub.oid, {7: (0, value), 8: (1, value)})
    assert [one.state for one in await catalog.sequences(sub.oid)] == [RelState.INIT, RelState.READY]
    # One that leaves is shown no more, and is there until the worker has taken it out of the Delta table.
    await catalog.refresh_subscription(sub.oid, {}, [], [], ([7], [NewSequence(9, "public", "t", "/w", "{}")]))
    assert [one.relid for one in (await catalog.state()).sequences] == [8, 9]
    assert [(one.relid, one.leaving) for one in await catalog.sequences(sub.oid)] == [(7, True), (8, False), (9, False)]
    await catalog.ask_for_sequences(sub.oid)
    assert [one.asked for one in await catalog.sequences(sub.oid)] == [1, 2, 1]
    await catalog.sequences_synchronized(sub.oid, {}, [7, 8])
    assert [one.relid for one in await catalog.sequences(sub.oid)] == [8, 9]
    await catalog.refresh_subscription(sub.oid, {}, [], [], ([8], [joining[1]]))
    rejoined = (await catalog.sequences(sub.oid))[0]
    assert (rejoined.relid, rejoined.leaving, rejoined.state) == (8, False, RelState.INIT)
    await catalog.drop_subscription(sub.oid)
    assert await catalog.sequences(sub.oid) == []


async def test_tables_join_and_leave(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    await catalog.add_relations(sub.oid, [table(2, "u"), replace(table(3, "v"), state=RelState.READY, lsn=INVALID_LSN)])
    with pytest.raises(DuplicateObject):
        await catalog.add_relations(sub.oid, [table(2, "w")])
    await catalog.advance_origin(sub.oid, Lsn(3), relid=2)
    await catalog.put_copy_progress(sub.oid, 2, 10)
    await catalog.remove_relation(sub.oid, 2)
    assert [rel.name for rel in await catalog.relations(sub.oid)] == ["t", "v"]
    assert await catalog.origin(sub.oid, 2) == INVALID_LSN
    assert await catalog.copy_progress() == []
    assert await catalog.relation(sub.oid, 2) is None
    with pytest.raises(UndefinedObject):
        await catalog.begin_copy(sub.oid, 2)


async def test_an_origin_never_goes_back(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    assert await catalog.origin(sub.oid) == INVALID_LSN
    # As text 0/FFFFFFFF and 1/0 compare the other way round; LSNs of the upper half do not fit a signed integer.
    for lsn in (Lsn(0xFFFFFFFF), Lsn(0x1_0000_0000), Lsn(2**63), BIG):
        assert await catalog.advance_origin(sub.oid, lsn, Lsn(1)) == lsn
        assert await catalog.advance_origin(sub.oid, Lsn(lsn - 1)) == lsn
        assert await catalog.origin(sub.oid) == lsn
    assert await catalog.origin(sub.oid, 1) == INVALID_LSN
    (status,) = await catalog.origins()
    assert (status.external_id, status.remote_lsn, status.local_lsn) == (f"pg_{sub.oid}", BIG, Lsn(1))


async def test_the_last_commit_goes_with_the_origin(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    oid, last = sub.oid, LastCommit(Lsn(2**63 + 5), -(2**62))
    assert await catalog.last_commit(oid) is None
    await catalog.advance_origin(oid, Lsn(2**63 + 9), last=last)
    await catalog.advance_origin(oid, Lsn(2**63 + 8), last=LastCommit(Lsn(1), 1))
    await catalog.advance_origin(oid, Lsn(2**63 + 10), last=None)
    assert await catalog.last_commit(oid) == last
    # A commit is looked for in the WAL of its own system only, and not once every table is copied anew.
    await catalog.set_publisher(oid, "7", 1)
    await catalog.advance_origin(oid, BIG, last=last)
    await catalog.set_publisher_lost(oid, BIG)
    assert (await catalog.subscription(oid)).publisher_lost_at == BIG
    await catalog.set_publisher(oid, "7", 2)
    assert await catalog.last_commit(oid) == last
    assert (await catalog.subscription(oid)).publisher_lost_at is None
    await catalog.set_publisher(oid, "8", 1)
    assert await catalog.last_commit(oid) is None
    await catalog.set_publisher_lost(oid, BIG)
    await catalog.copy_again(oid, {1: None}, ("8", 1))
    assert await catalog.last_commit(oid) is None
    assert (await catalog.subscription(oid)).publisher_lost_at is None


async def test_where_another_system_continues_is_kept_until_everything_is_copied_anew(catalog: Catalog) -> None:
    oid = (await with_table(catalog)).oid

    async def continues_at() -> Lsn:
        return (await catalog.subscription(oid)).options.continues_at

    await catalog.set_publisher(oid, "7", 1)
    assert await continues_at() == INVALID_LSN
    await catalog.set_publisher(oid, "8", 1, None, BIG)
    await catalog.set_publisher(oid, "8", 2)
    await catalog.copy_again(oid, {1: None}, None)
    assert await continues_at() == BIG
    # The positions of a stream that begins anew are not to be compared with it.
    await catalog.copy_again(oid, {1: None}, ("8", 1))
    assert await continues_at() == INVALID_LSN


async def test_drop_leaves_nothing(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    await catalog.advance_origin(sub.oid, Lsn(1), relid=1)
    await catalog.put_worker_stats(sub.oid, None, {"pid": 1})
    await catalog.put_copy_progress(sub.oid, 1, 1)
    await catalog.drop_subscription(sub.oid)
    await catalog.drop_subscription(sub.oid)
    state = await catalog.state()
    assert not any((state.subscriptions, state.relations, state.origins, state.workers, state.copies, state.statistics))
    with pytest.raises(UndefinedObject):
        await catalog.advance_origin(sub.oid, Lsn(2))
    with pytest.raises(UndefinedObject):
        await catalog.advance_origin(sub.oid, Lsn(2), relid=1)


async def test_late_statistics_of_a_dropped_subscription_are_passed_over(catalog: Catalog) -> None:
    await catalog.put_worker_stats(7, None, {"pid": 1})
    await catalog.put_copy_progress(7, 1, 1)
    await catalog.add_counters(7, commits=1)
    await catalog.set_subscription_error(7, PubsubError("x"))
    assert (await catalog.state()).workers == ()


async def test_worker_statistics_keep_what_is_not_given(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    time = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)
    await catalog.put_worker_stats(sub.oid, None, {"pid": 5, "publisher_lsn": Lsn(100), "latest_end_time": time})
    await catalog.put_worker_stats(sub.oid, None, {"flush_lsn": Lsn(60)})
    await catalog.put_worker_stats(sub.oid, 1, {"pid": 6})
    apply, sync = await catalog.worker_stats()
    assert (apply.relid, apply.worker_type, apply.pid, apply.lag_bytes) == (None, "apply", 5, 40)
    assert apply.latest_end_time == time
    assert (sync.relid, sync.worker_type, sync.lag_bytes) == (1, "table synchronization", None)
    await catalog.clear_worker_stats(sub.oid)
    assert [worker.relid for worker in await catalog.worker_stats()] == [1]
    await catalog.clear_worker_stats()
    assert await catalog.worker_stats() == []


async def test_statistics_that_have_not_changed_are_not_stored_again(
    catalog: Catalog, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An idle daemon wrote rows for every subscription each second: an fsync, or dead rows in PostgreSQL."""
    sub = await with_table(catalog)
    stored, storing = 0, catalog._storing

    def counted() -> AbstractAsyncContextManager[AsyncConnection]:
        nonlocal stored
        stored += 1
        return storing()

    monkeypatch.setattr(catalog, "_storing", counted)

    async def put(flushed: int) -> None:
        await catalog.put_statistics(
            workers=[(sub.oid, None, {"pid": 5, "flush_lsn": Lsn(flushed)})],
            counters=[(sub.oid, {"commits": 0})],
            publishers={sub.oid: PublisherStatus(current_lsn=Lsn(70), waits={1: Warned("Spark")})},
        )

    await put(60)
    await put(60)
    assert stored == 1
    await put(61)
    assert stored == 2
    assert (await catalog.worker_stats())[0].flush_lsn == 61
    # A row that was removed is not one that has not changed.
    await catalog.clear_worker_stats(sub.oid)
    await put(61)
    await catalog.clear_worker_stats()
    await put(61)
    state = await catalog.state()
    assert (state.workers[0].pid, state.workers[0].flush_lsn) == (5, 61)
    assert state.publishers[sub.oid].current_lsn == 70
    # Nor is one whose transaction failed.
    stored = 0
    with pytest.raises(PubsubError):
        async with catalog._storing():
            raise PubsubError("rolled back")
    await put(61)
    await put(61)
    assert stored == 2


async def test_waits_and_row_counts_are_stored(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    since = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    looked = PublisherStatus(waits={0: Warned("no slot", None, "more"), 1: Warned("Spark")}, away_since=since)
    rows = TableRows(sub.oid, 1, 2, 2**40, Lsn(7))
    await catalog.put_statistics(publishers={sub.oid: looked}, rows=[rows, replace(rows, subid=99)])
    state = await catalog.state()
    assert state.publishers == {sub.oid: looked}
    assert state.rows == (rows,)
    await catalog.put_statistics(publishers={sub.oid: PublisherStatus()}, rows=[replace(rows, rows=5)])
    state = await catalog.state()
    assert (state.publishers[sub.oid].waits, state.publishers[sub.oid].away_since) == ({}, None)
    await catalog.clear_worker_stats()
    state = await catalog.state()
    assert (state.publishers, state.rows) == ({}, (replace(rows, rows=5),)), "what tables hold outlives the daemon"
    await catalog.remove_relation(sub.oid, 1)
    assert (await catalog.state()).rows == ()


async def test_what_tables_take_on_disk_is_stored(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    time = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    one = TableStorage(sub.oid, 1, 1, 7, 2, 2**40, 2**41, 5)
    await catalog.put_statistics(storage=[one, replace(one, subid=99)])
    assert (await catalog.state()).storage == (one,)
    one = replace(one, retained_bytes=0, last_vacuum=time, due=time)
    await catalog.put_statistics(storage=[one])
    assert (await catalog.state()).storage == (one,)
    await catalog.remove_relation(sub.oid, 1)
    assert (await catalog.state()).storage == ()


async def test_many_statistics_in_one_transaction(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    await catalog.put_statistics(
        workers=[(sub.oid, None, {"pid": 1})],
        copies=[CopyProgress(sub.oid, 1, 10, 20, 30, 40, False)],
        counters=[(sub.oid, {"commits": 2, "rows_inserted": 5})],
    )
    await catalog.add_counters(sub.oid, commits=1)
    await catalog.put_copy_progress(sub.oid, 1, 20, 20, 60, finished=True)
    state = await catalog.state()
    assert state.copies == (CopyProgress(sub.oid, 1, 20, 20, 60, None, True),)
    assert (state.statistics[0].commits, state.statistics[0].rows_inserted) == (3, 5)


async def test_errors_are_counted_kept_and_overcome(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    error = PubsubError("no", sqlstate="08006", hint="try")
    await catalog.set_subscription_error(sub.oid, error, count="apply")
    await catalog.set_subscription_error(sub.oid, error, count="sync")
    await catalog.set_subscription_error(sub.oid, error)
    (stats,) = await catalog.subscription_stats()
    assert (stats.apply_error_count, stats.sync_error_count) == (1, 1)
    assert (stats.error, stats.error_hint, stats.error_sqlstate) == ("no", "try", "08006")
    await catalog.clear_subscription_error(sub.oid)
    (stats,) = await catalog.subscription_stats()
    assert (stats.error, stats.error_time, stats.apply_error_count) == (None, None, 1)
    await catalog.reset_statistics(sub.oid)
    (stats,) = await catalog.subscription_stats()
    assert stats.apply_error_count == 0
    assert stats.stats_reset is not None


async def test_the_memory_is_the_running_daemon_s(catalog: Catalog) -> None:
    for _ in range(2):
        await catalog.hold(Path("/home"))
        (daemon,) = (await catalog.state()).daemons
        assert daemon.memory is None, "not an earlier one's"
        await catalog.put_memory(Memory(1, 2, 3, 2**40, None))
        (daemon,) = (await catalog.state()).daemons
        assert daemon.memory == Memory(1, 2, 3, 2**40, None)
        await catalog.let_go()


async def test_an_older_catalog_gets_what_it_lacks(location: Path | str) -> None:
    older = (
        "ALTER TABLE pubsub_subscription_stats DROP COLUMN spill_txns",
        "ALTER TABLE pubsub_subscription_stats DROP COLUMN error",
        "DROP TABLE pubsub_copy_progress",
        "DROP TABLE pubsub_table_rows",
        "DROP TABLE pubsub_pinned_snapshot",
        "ALTER TABLE pubsub_publisher DROP COLUMN away_since",
        "ALTER TABLE pubsub_replication_origin DROP COLUMN commit_time",
        "DROP TABLE pubsub_lease",
        "DROP TABLE pubsub_daemon",
        "UPDATE pubsub_node SET schema_version = 1",
    )
    async with await Catalog.open(location) as catalog:
        sub = await with_table(catalog)
        await catalog.add_counters(sub.oid, commits=3)
        async with catalog._write(bump=False) as connection:
            for statement in older:
                await connection.exec_driver_sql(statement)
    for _ in range(2):
        async with await Catalog.open(location) as catalog:
            await catalog.add_counters(sub.oid, spill_txns=1)
            await catalog.put_copy_progress(sub.oid, 1, 1)
            await catalog.put_statistics(
                publishers={sub.oid: PublisherStatus()}, rows=[TableRows(sub.oid, 1, 1, 1, Lsn(1))]
            )
            assert (await catalog.state()).pinned_snapshots == ()
            (stats,) = await catalog.subscription_stats()
    assert (stats.commits, stats.spill_txns, stats.error) == (3, 2, None)


async def test_a_pinned_snapshot_outlives_its_subscription(catalog: Catalog) -> None:
    sub = await with_table(catalog)
    tables = (PinnedTable("public.t", "/w/db/public/t", 7), PinnedTable('odd "."t', "/w/ü", 2**40))
    pinned = PinnedSnapshot("näme", sub.name, BIG, now(), False, tables)
    await catalog.add_pinned_snapshot(pinned)
    with pytest.raises(DuplicateObject, match=r'^pinned snapshot "näme" already exists$'):
        await catalog.add_pinned_snapshot(pinned)
    await catalog.complete_pinned_snapshot("näme")
    await catalog.drop_subscription(sub.oid)
    assert (await catalog.state()).pinned_snapshots == (replace(pinned, complete=True),)
    await catalog.drop_pinned_snapshot("näme")
    await catalog.drop_pinned_snapshot("näme")
    assert (await catalog.state()).pinned_snapshots == ()
    with pytest.raises(UndefinedObject, match=r'^pinned snapshot "näme" does not exist$'):
        await catalog.complete_pinned_snapshot("näme")


def test_passwords_are_not_in_reprs() -> None:
    assert "secret" not in repr(new())
