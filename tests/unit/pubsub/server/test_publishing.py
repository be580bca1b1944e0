"""What a node publishes of its Delta tables: rows matched by key, pieces of a version, positions, statements."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake

from catalog.records import NewRelation, NewSubscription, State
from catalog.store import Catalog
from pubsub.delta.table import TargetTable
from pubsub.errors import PubsubError
from pubsub.server.publishing.changes import Change, changes, matched
from pubsub.server.publishing.positions import Positions
from pubsub.server.publishing.publications import Publications
from pubsub.server.publishing.stream import _some
from pubsub.server.statements import Statement
from pubsub.server.system_catalogs import contents
from pubsub.sql.options import SubscriptionOptions

SCHEMA = pa.schema([("id", pa.int32()), ("v", pa.string())])


def test_rows_belong_together_by_their_key() -> None:
    nan = float("nan")
    found = list(matched([(1, "a"), (2, "b"), (3, nan), (4, "d")], [(1, "a"), (2, "B"), (3, nan), (5, "e")], [0]))
    assert found == [Change((4, "d"), None), Change((2, "b"), (2, "B")), Change(None, (5, "e"))]
    assert list(matched([(1,), (1,), (2,)], [(1,), (2,), (2,)], [])) == [Change((1,), None), Change(None, (2,))]


def test_no_change_is_lost_between_pieces() -> None:
    found = iter([Change(None, (number,)) for number in range(1503)])
    pieces = []
    while piece := _some(found):
        pieces.append(piece)
    assert [one.new for one in chain.from_iterable(pieces)] == [(number,) for number in range(1503)]


def test_a_version_s_changes_whoever_wrote_it(tmp_path: Path) -> None:
    """deltalake rewrites whole files, appends, and compacts; with a change data feed the feed is read."""
    for feed in ("false", "true"):
        path = str(tmp_path / feed)
        rows = pa.table({"id": range(10), "v": ["x"] * 10}, SCHEMA)
        write_deltalake(path, rows, configuration={"delta.enableChangeDataFeed": feed})
        table = TargetTable(path, SCHEMA, ("id",), "public.t")
        assert len(list(changes(path, table, 0))) == 10
        DeltaTable(path).update(predicate="id < 2", updates={"v": "upper(v)"})
        assert sorted(changes(path, table, 1), key=repr) == [Change((0, "x"), (0, "X")), Change((1, "x"), (1, "X"))]
        DeltaTable(path).delete("id = 5")
        assert list(changes(path, table, 2)) == [Change((5, "x"), None)]
        write_deltalake(path, rows.slice(5, 1), mode="append")
        assert list(changes(path, table, 3)) == [Change(None, (5, "x"))]


def test_a_change_data_feed_that_another_spark_has_written(tmp_path: Path) -> None:
    """It writes timestamps as INT96, past whose nanoseconds in Arrow are the years after 2262."""
    path, far = str(tmp_path / "t"), datetime(9999, 12, 31, 1, 2, 3, 4, UTC)
    schema = pa.schema([("id", pa.int32()), ("at", pa.timestamp("us", "UTC"))])
    rows = pa.table({"id": [1, 2], "at": [far, None]}, schema)
    write_deltalake(path, rows, configuration={"delta.enableChangeDataFeed": "true"})
    DeltaTable(path).delete("id = 1")
    (feed,) = Path(path).glob("_change_data/**/*.parquet")
    pq.write_table(pq.ParquetFile(feed).read(), feed, use_deprecated_int96_timestamps=True, store_schema=False)
    table = TargetTable(path, schema, ("id",), "public.t")
    assert list(changes(path, table, 1)) == [Change((1, far), None)]


def test_positions_are_given_once(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    rows = pa.table({"id": [1], "v": ["x"]}, SCHEMA)
    write_deltalake(path, rows)
    positions = Positions(tmp_path)
    assert positions.collect([path]) is False
    start = positions.end()
    assert positions.versions_at(start, [path]) == {path: 0}
    write_deltalake(path, rows, mode="append")
    write_deltalake(path, rows, mode="append")
    assert positions.collect([path]) is True
    found = positions.after(start)
    assert [one.version for one in found] == [1, 2]
    assert start <= found[0].lsn < found[0].end_lsn <= found[1].lsn < found[1].end_lsn == positions.end()
    assert [positions.versions_at(one.end_lsn, [path])[path] for one in found] == [1, 2]
    assert positions.after(found[0].end_lsn) == found[1:]
    DeltaTable(path).optimize.compact()
    assert positions.collect([path]) is False, "OPTIMIZE changes no row"
    positions.close()
    again = Positions(tmp_path)
    assert again.after(start) == found
    again.close()


@pytest.fixture
def state(tmp_path: Path) -> State:
    async def make() -> State:
        async with await Catalog.open(tmp_path / "catalog.db") as catalog:
            new = NewSubscription("s", "host=h", ("p",), SubscriptionOptions(), "s", "s", False)
            definition = '{"key": ["id"], "columns": ["id", "v"]}'
            tables = [
                NewRelation(20000 + n, "public", f"t{n}", str(tmp_path / f"t{n}"), definition=definition)
                for n in range(3)
            ]
            scd2 = (
                '{"mode": "scd2", "key": ["id"], "columns": ["id", "v", "_pubsub_valid_from_lsn", "_pubsub_valid_to"]}'
            )
            tables.append(NewRelation(20003, "public", "versions", str(tmp_path / "versions"), definition=scd2))
            await catalog.create_subscription(new, tables)
            return await catalog.state()

    return asyncio.run(make())


def test_what_tells_the_rows_of_a_table_apart(state: State) -> None:
    """Of one that keeps every version of a row, its key and where the version begins."""
    found = {table.name: table for table in contents.tables(state)}
    assert (found["t0"].key, found["versions"].key) == ((1,), (1, 3))
    assert [(one.name, one.type_oid) for one in found["versions"].attributes[2:]] == [
        ("_pubsub_valid_from_lsn", 20),
        ("_pubsub_valid_to", 1184),
    ]
    assert {rel.name: rel.mode for rel in state.relations} == {
        "t0": "mirror",
        "t1": "mirror",
        "t2": "mirror",
        "versions": "scd2",
    }


def test_statements_on_publications(tmp_path: Path, state: State) -> None:
    held = Publications.load(tmp_path)

    def run(text: str) -> str:
        return held.execute(text, Statement.parse(text).tokens, state)

    assert (
        run("CREATE PUBLICATION p FOR TABLE t0, public.t1 (id, v) WITH (publish = 'insert, update')")
        == "CREATE PUBLICATION"
    )
    assert run("CREATE PUBLICATION everything FOR ALL TABLES;") == "CREATE PUBLICATION"
    assert run("ALTER PUBLICATION p ADD TABLE t2, TABLES IN SCHEMA shop") == "ALTER PUBLICATION"
    assert run("ALTER PUBLICATION p DROP TABLE t0") == "ALTER PUBLICATION"
    assert run("ALTER PUBLICATION p SET (publish = 'delete')") == "ALTER PUBLICATION"
    found = Publications.load(tmp_path).by_name["p"]
    assert found.tables == (("public", "t1", ("id", "v")), ("public", "t2", None))
    assert (found.schemas, found.publish) == (("shop",), ("delete",))
    for text, sqlstate in {
        "CREATE PUBLICATION p": "42710",
        "CREATE PUBLICATION q FOR TABLE nope": "42P01",
        "CREATE PUBLICATION q FOR TABLE t0 (nope)": "42703",
        "CREATE PUBLICATION q FOR TABLE t0 (v)": "42P10",
        "CREATE PUBLICATION q FOR TABLE versions (id, v)": "42P10",
        "CREATE PUBLICATION q FOR TABLE t0 WHERE (id > 1)": "0A000",
        "CREATE PUBLICATION q FOR TABLE": "42601",
        "CREATE PUBLICATION q WITH (publish = 'nope')": "42601",
        "ALTER PUBLICATION nope ADD TABLE t0": "42704",
        "ALTER PUBLICATION everything ADD TABLE t0": "55000",
        "ALTER PUBLICATION p ADD TABLE t1": "42710",
        "ALTER PUBLICATION p DROP TABLE t0": "42704",
        "DROP PUBLICATION nope": "42704",
    }.items():
        with pytest.raises(PubsubError) as caught:
            run(text)
        assert caught.value.sqlstate == sqlstate, text
    assert run("ALTER PUBLICATION p RENAME TO other") == "ALTER PUBLICATION"
    assert run("DROP PUBLICATION IF EXISTS other, everything, nope") == "DROP PUBLICATION"
    assert Publications.load(tmp_path).by_name == {}
