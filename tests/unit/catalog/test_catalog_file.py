"""catalog.file: the catalog's state, read from its file without SQLAlchemy."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from catalog.figures import CopyProgress, PublisherStatus, Registration, TableRows, TableStorage, Warned
from catalog.file import read_state
from catalog.records import ForeignCommit, NewRelation, NewSubscription, PinnedSnapshot, PinnedTable, PreparedXact
from catalog.states import RelState
from catalog.store import Catalog
from pubsub.errors import PubsubError
from pubsub.memory import Memory
from pubsub.protocol.lsn import Lsn
from pubsub.sql.options import SubscriptionOptions

TIME = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


async def filled(path: Path) -> Catalog:
    """Return a catalog with rows in every table that a State shows, and with values of every column."""
    catalog = await Catalog.open(path)
    for number, name in enumerate(("b", "a"), start=1):
        options = replace(SubscriptionOptions(), streaming="parallel", stop_lsn=Lsn(2**63 + number))
        new = NewSubscription(name, "host=h", ("p", "q ,"), options, name, None if number == 1 else "slot", number == 1)
        tables = [NewRelation(oid, "public", f"t{oid}", f"/w/{name}/{oid}", estimated_rows=5) for oid in (9, 8)]
        oid = (await catalog.create_subscription(new, tables)).oid
        await catalog.alter_subscription(oid, skip_lsn=Lsn(0xF_0000_0000), publisher_timeline=3)
        await catalog.begin_copy(oid, 9, sync_slot="s", definition="{}")
        await catalog.set_relation_state(oid, 9, RelState.FINISHEDCOPY)
        await catalog.set_foreign_commit(oid, 9, ForeignCommit(7, "MERGE", "other"))
        await catalog.advance_origin(oid, Lsn(0x20), relid=9)
        await catalog.put_copy_progress(oid, 9, 10, None, 1000, finished=True)
        await catalog.put_worker_stats(
            oid, None, {"pid": 7, "received_lsn": Lsn(1), "latest_end_time": TIME, "lag_seconds": 2.0}
        )
        await catalog.put_worker_stats(oid, 9, {"worker_type": "table synchronization", "sync_state": "w"})
        status = PublisherStatus(
            Lsn(5), 6, 7, "reserved", (Warned("m", "d", "h"),), {0: Warned("apply"), 9: Warned("copy")}, TIME
        )
        await catalog.put_statistics(
            copies=[CopyProgress(oid, 8, 1, 2, 3, 4, False)],
            publishers={oid: status},
            rows=[TableRows(oid, 9, 1, 12, Lsn(3))],
            storage=[TableStorage(oid, 9, 1, 12, 3, 2**40, 5, 6, TIME), TableStorage(oid, 8, 1, 0, 1, 0, 0, 6)],
            registrations=[
                Registration(oid, 9, "/w/t", ("lake", "s", "t é")),
                Registration(oid, 8, "/w/u", None, "is another table", "Drop it."),
            ],
        )
        await catalog.add_counters(oid, transactions=2**40, spill_count=3)
        await catalog.set_subscription_error(oid, PubsubError("é", detail="d", hint="h"), count="apply")
        await catalog.set_prepared(oid, [PreparedXact(2, "g2", TIME), PreparedXact(1, "g1", TIME.replace(year=2025))])
    for name, complete in (("b", False), ("a", True)):
        await catalog.add_pinned_snapshot(
            PinnedSnapshot(name, "s", Lsn(2**40), TIME, complete, (PinnedTable("public.t", "/w/t", 3),))
        )
    await catalog.hold(Path("/home"))
    await catalog.put_memory(Memory(1, 2, 3, 2**40, None))
    return catalog


async def test_the_file_holds_what_the_catalog_says(tmp_path: Path) -> None:
    async with await filled(tmp_path / "a #?% catalog.db") as catalog:
        assert read_state(tmp_path / "a #?% catalog.db") == await catalog.state()


async def test_an_empty_catalog(tmp_path: Path) -> None:
    async with await Catalog.open(tmp_path / "catalog.db") as catalog:
        assert read_state(tmp_path / "catalog.db") == await catalog.state()


def change(path: Path, *statements: str) -> None:
    with closing(sqlite3.connect(path)) as file, file:
        for statement in statements:
            file.execute(statement)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE pubsub_node SET schema_version = schema_version - 1",
        "UPDATE pubsub_node SET schema_version = schema_version + 1",
        "DELETE FROM pubsub_node",
        "DROP TABLE pubsub_node",
        "DROP TABLE pubsub_worker",
    ],
)
async def test_any_other_catalog_is_left_to_its_store(tmp_path: Path, statement: str) -> None:
    path = tmp_path / "catalog.db"
    await (await Catalog.open(path)).close()
    change(path, statement)
    assert read_state(path) is None


def test_what_is_no_catalog_is_left_to_its_store(tmp_path: Path) -> None:
    assert read_state(tmp_path / "catalog.db") is None
    (tmp_path / "catalog.db").write_bytes(b"no database" * 1000)
    assert read_state(tmp_path / "catalog.db") is None
    assert [path.name for path in tmp_path.iterdir()] == ["catalog.db"]
