"""The catalog on SQLite: what it stores and refuses, and what two processes see of each other."""

from __future__ import annotations

import asyncio
import os
import shutil
import sqlite3
import stat
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from catalog.records import (
    CopyProgress,
    ForeignCommit,
    NewRelation,
    NewSubscription,
    PublisherStatus,
    Request,
    Subscription,
    TableRows,
    Warned,
)
from catalog.requests import RequestTimeoutError
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.errors import (
    DataCorrupted,
    DuplicateObject,
    FeatureNotSupported,
    NotInPrerequisiteState,
    ObjectInUse,
    PubsubError,
    UndefinedObject,
)
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.options import SubscriptionOptions

BIG = Lsn(2**64 - 1)


@pytest.fixture
def location(tmp_path: Path) -> Path | str:
    """The catalog's location; scenario 065 runs the same tests on a PostgreSQL database."""
    return tmp_path / "catalog.db"


@pytest.fixture
async def catalog(location: Path | str) -> AsyncIterator[Catalog]:
    async with await Catalog.open(location) as opened:
        yield opened


def new(name: str = "sub", **fields: object) -> NewSubscription:
    made = NewSubscription(
        name=name,
        conninfo="host=h password=secret",
        publications=("p", "q"),
        options=SubscriptionOptions(batch_rows=7, streaming="on", origin="none"),
        target="db",
        slot_name=name,
        publisher_system_identifier="18446744073709551615",
        publisher_timeline=1,
        publisher_database="db",
    )
    return replace(made, **fields)  # type: ignore[arg-type]


def table(relid: int = 1, name: str = "t", target: str = "db") -> NewRelation:
    return NewRelation(relid, "public", name, f"/w/{target}/public/{name}")


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}


async def with_table(catalog: Catalog) -> Subscription:
    return await catalog.create_subscription(new(), [table()])


async def test_a_node_keeps_its_identity(tmp_path: Path) -> None:
    path = tmp_path / "home" / "catalog.db"
    async with await Catalog.open(path) as first:
        node = await first.node()
    async with await Catalog.open(path) as second:
        assert await second.node() == node
    assert 2**32 < int(node.node_id) < 2**64
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


async def test_the_files_beside_it_are_private_too(catalog: Catalog, tmp_path: Path) -> None:
    await catalog.set_daemon()
    assert modes(tmp_path) == {0o600}


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


async def test_a_table_s_way_through_the_states(catalog: Catalog) -> None:
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


async def test_commands_are_taken_once_and_in_order(catalog: Catalog) -> None:
    before = await catalog.change_counter()
    for number in range(3):
        await catalog.note_command("ALTER SUBSCRIPTION", f"ALTER SUBSCRIPTION s{number} ENABLE")
    assert await catalog.change_counter() > before
    taken = await catalog.take_commands()
    assert [one.statement for one in taken] == [f"ALTER SUBSCRIPTION s{number} ENABLE" for number in range(3)]
    assert await catalog.take_commands() == []
    await catalog.note_command("DROP SUBSCRIPTION", "DROP SUBSCRIPTION s")
    assert [one.tag for one in await catalog.take_commands()] == ["DROP SUBSCRIPTION"]


async def test_of_commands_that_nobody_takes_the_latest_stay(catalog: Catalog) -> None:
    for number in range(103):
        await catalog.note_command("ALTER SUBSCRIPTION", str(number))
    assert [one.statement for one in await catalog.take_commands()] == [str(number) for number in range(3, 103)]


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


async def test_done_needs_its_lsn(catalog: Catalog) -> None:
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


async def test_what_befell_a_table_stands_until_its_next_copy(catalog: Catalog) -> None:
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


async def test_what_is_waited_for_and_what_tables_hold(catalog: Catalog) -> None:
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


async def test_the_counter_moves_with_what_someone_waits_for_only(catalog: Catalog) -> None:
    counter = await catalog.change_counter()
    sub = await with_table(catalog)
    moved = await catalog.change_counter()
    assert moved > counter
    await catalog.advance_origin(sub.oid, Lsn(5))
    await catalog.put_worker_stats(sub.oid, None, {"pid": 1})
    await catalog.add_counters(sub.oid, commits=1)
    assert await catalog.change_counter() == moved
    await catalog.begin_copy(sub.oid, 1)
    assert await catalog.change_counter() > moved


async def test_a_refused_change_does_not_move_the_counter(catalog: Catalog) -> None:
    await with_table(catalog)
    counter = await catalog.change_counter()
    with pytest.raises(DuplicateObject):
        await with_table(catalog)
    assert await catalog.change_counter() == counter


async def wait_for_request(catalog: Catalog) -> list[Request]:
    while True:
        if pending := await catalog.pending_requests():
            return pending


async def answer_next(catalog: Catalog, error: PubsubError | None = None) -> str:
    pending = await wait_for_request(catalog)
    assert await catalog.answer(pending[0].id, error)
    assert not await catalog.answer(pending[0].id)
    return f"{pending[0].kind} {pending[0].subid} {pending[0].payload}"


async def test_a_request_is_answered(catalog: Catalog, location: Path | str) -> None:
    async with await Catalog.open(location) as command:
        counter = await catalog.change_counter()
        daemon = asyncio.create_task(answer_next(catalog))
        await command.request("drop subscription", 16385, {"slot": "x"})
        assert await daemon == "drop subscription 16385 {'slot': 'x'}"
        assert await catalog.change_counter() > counter
        assert await catalog.pending_requests() == []


async def test_a_request_s_error_comes_back_whole(catalog: Catalog) -> None:
    error = PubsubError("no", sqlstate="55006", detail="d", hint="h", context="c")
    daemon = asyncio.create_task(answer_next(catalog, error))
    with pytest.raises(PubsubError) as caught:
        await catalog.request("drop subscription", 1)
    await daemon
    assert caught.value.report(verbose=True) == error.report(verbose=True)


async def test_a_request_that_is_given_up_is_withdrawn(catalog: Catalog) -> None:
    with pytest.raises(RequestTimeoutError):
        await catalog.request("resync", 1, timeout=0.01)
    assert await catalog.pending_requests() == []
    asking = asyncio.create_task(catalog.request("resync", 1))
    pending = await wait_for_request(catalog)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert await catalog.pending_requests() == []
    assert not await catalog.answer(pending[0].id)


async def test_the_daemon_s_row(catalog: Catalog) -> None:
    assert await catalog.daemon() is None
    await catalog.set_daemon()
    found = await catalog.daemon()
    assert found is not None
    assert found.pid == os.getpid()
    await catalog.clear_daemon()
    assert await catalog.daemon() is None


async def test_a_cancelled_task_leaves_the_catalog_usable(catalog: Catalog) -> None:
    """A worker may be cancelled at any await: no lock may remain, and its change must be stored fully or not at all."""
    sub = await with_table(catalog)
    for steps in range(40):
        task = asyncio.create_task(catalog.advance_origin(sub.oid, Lsn(1000 + steps)))
        for _ in range(steps):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
    async with asyncio.timeout(20):
        assert await catalog.advance_origin(sub.oid, Lsn(5000)) == 5000


async def test_writers_side_by_side_all_count(catalog: Catalog, location: Path | str) -> None:
    sub = await with_table(catalog)
    async with await Catalog.open(location) as other:
        await asyncio.gather(*(each.add_counters(sub.oid, commits=1) for each in [catalog, other] * 20))
    (stats,) = await catalog.subscription_stats()
    assert stats.commits == 40


_OTHER_PROCESS = """
import asyncio, sys
from pathlib import Path
from catalog.records import NewSubscription
from catalog.store import Catalog
from pubsub.sql.options import SubscriptionOptions

async def main(path, name):
    async with await Catalog.open(path if "://" in path else Path(path)) as catalog:
        for place in range(10):
            new = NewSubscription(f"{name}{place}", "", (), SubscriptionOptions(), "t", None)
            await catalog.create_subscription(new)
        print((await catalog.node()).node_id)

asyncio.run(main(*sys.argv[1:]))
"""


async def test_processes_that_open_a_new_catalog_at_once(location: Path | str) -> None:
    """They create one schema and one identity, and assign no oid twice."""
    command = [sys.executable, "-c", _OTHER_PROCESS, str(location)]
    pipe = asyncio.subprocess.PIPE
    processes = [await asyncio.create_subprocess_exec(*command, name, stdout=pipe) for name in ("a", "b", "c")]
    printed = {(await process.communicate())[0] for process in processes}
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert len(printed) == 1
    async with await Catalog.open(location) as catalog:
        oids = [sub.oid for sub in await catalog.subscriptions()]
        assert sorted(oids) == list(range(16384, 16384 + 30))


async def test_a_catalog_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    await (await Catalog.open(path)).close()
    with sqlite3.connect(path) as raw:
        raw.execute("UPDATE pubsub_node SET schema_version = 99")
    raw.close()
    with pytest.raises(DataCorrupted, match="version 99"):
        await Catalog.open(path)


async def test_an_older_catalog_gets_what_it_lacks(location: Path | str) -> None:
    older = (
        "ALTER TABLE pubsub_subscription_stats DROP COLUMN spill_txns",
        "ALTER TABLE pubsub_subscription_stats DROP COLUMN error",
        "DROP TABLE pubsub_copy_progress",
        "DROP TABLE pubsub_table_rows",
        "ALTER TABLE pubsub_publisher DROP COLUMN away_since",
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
            (stats,) = await catalog.subscription_stats()
    assert (stats.commits, stats.spill_txns, stats.error) == (3, 2, None)


async def test_what_is_no_catalog_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / "catalog.db"
    path.write_bytes(b"this is no database, and long enough to be looked at" * 100)
    with pytest.raises(PubsubError, match="could not access the catalog: file is not a database"):
        await Catalog.open(path)
    with pytest.raises(PubsubError, match="could not open the catalog"):
        await Catalog.open(tmp_path)
    with pytest.raises(FeatureNotSupported):
        await Catalog.open("mysql://u:secret@h/d")
    with pytest.raises(PubsubError) as caught:
        await Catalog.open("://u:secret@h/d")
    assert "secret" not in caught.value.report(verbose=True)


async def test_a_failed_statement_does_not_show_its_parameters(catalog: Catalog, tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "catalog.db") as raw:
        raw.execute("ALTER TABLE pubsub_subscription RENAME COLUMN target TO other")
    raw.close()
    with pytest.raises(PubsubError) as caught:
        await catalog.create_subscription(new())
    assert "secret" not in repr(caught.value) + repr(caught.value.__cause__) + str(caught.value.__cause__)


def test_passwords_are_not_in_reprs() -> None:
    assert "secret" not in repr(new())


async def test_a_catalog_has_one_daemon_whichever_home_it_is_of(catalog: Catalog, location: Path | str) -> None:
    await catalog.hold()
    await catalog.set_daemon(4711)
    async with await Catalog.open(location) as second:
        with pytest.raises(ObjectInUse, match="a daemon is already running on catalog") as caught:
            await second.hold()
        assert caught.value.sqlstate == "55006"
        assert "process id is" in (caught.value.detail or "")
        assert "a catalog of its own" in (caught.value.hint or "")
        # It is no daemon, and writes as any command does.
        await second.create_subscription(new())
        await catalog.prove()
        await catalog.let_go()
        await second.hold()
        await second.prove()
        await second.let_go()


async def test_a_copied_home_is_told_from_one_that_was_moved(tmp_path: Path) -> None:
    home = tmp_path / "home"
    tables = [NewRelation(1, "public", "t", f"{home}/warehouse/db/t"), NewRelation(2, "public", "u", "/lake/db/u")]
    async with await Catalog.open(home / "catalog.db") as catalog:
        oid = (await catalog.create_subscription(new(), tables)).oid
        await catalog.hold()
        await catalog.let_go()

    async def paths(catalog: Catalog) -> list[str]:
        return sorted(relation.path for relation in await catalog.relations(oid))

    copy = tmp_path / "copy"
    shutil.copytree(home, copy)
    async with await Catalog.open(copy / "catalog.db") as catalog:
        with pytest.raises(ObjectInUse, match="is a copy of") as caught:
            await catalog.hold()
        assert str(home / "catalog.db") in caught.value.message
        assert await paths(catalog) == ["/lake/db/u", f"{home}/warehouse/db/t"]
    # Renamed, it is itself, though the copy lies in its old place then.
    moved = tmp_path / "moved"
    home.rename(moved)
    copy.rename(home)
    for place in (moved, moved, home):
        async with await Catalog.open(place / "catalog.db") as catalog:
            await catalog.hold()
            assert await paths(catalog) == ["/lake/db/u", f"{place}/warehouse/db/t"]
            await catalog.let_go()
    # Moved to another file system: the old one is gone.
    elsewhere = tmp_path / "elsewhere"
    shutil.copytree(moved, elsewhere)
    shutil.rmtree(moved)
    async with await Catalog.open(elsewhere / "catalog.db") as catalog:
        await catalog.hold()
        assert f"{elsewhere}/warehouse/db/t" in await paths(catalog)
        await catalog.let_go()
    # Another node lies there since: it is no original.
    again = tmp_path / "again"
    shutil.copytree(elsewhere, again)
    shutil.rmtree(elsewhere)
    await (await Catalog.open(elsewhere / "catalog.db")).close()
    async with await Catalog.open(again / "catalog.db") as catalog:
        await catalog.hold()
        await catalog.let_go()
