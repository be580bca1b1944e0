"""What the readers give Spark of a history, as Spark asks them: pickled, with offsets as JSON, a share at a time."""

from __future__ import annotations

import json
import pickle
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit
from pyspark.sql.types import LongType, StructField, StructType

from pubsub.delta import change_rows, schema_json
from pubsub.delta import table as delta
from pubsub.delta.files import data_files
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action, Operation, transaction
from pubsub.delta.table import TargetTable
from pubsub.errors import DataCorrupted, FeatureNotSupported, NotInPrerequisiteState, PubsubError, UndefinedFile
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.type_contract import VARIANT
from pubsub.spark_source import PubsubSource
from tests.support.json_transactions import JsonTransactions

NODE = {"pubsub.node": "n", "pubsub.subscription": "5", "pubsub.publisher": "1/d"}
COLUMNS = (pa.field("id", pa.int32()), pa.field("v", pa.string()))


class History:
    """A history, written as the subscriber writes it."""

    def __init__(self, path: Path, *columns: pa.Field) -> None:
        schema = pa.schema([*change_rows.FIELDS, *(columns or COLUMNS)])
        self.table = TargetTable(str(path), schema, (), "public.t", history=("id",))
        assert delta.create_empty(JsonTransactions(), self.table, NODE)
        self.log = TableLog(self.table.path, JsonTransactions())
        self.log.refresh()

    def commit(self, position: int, *rows: dict[str, Any], generation: int = 1, removed: Any = ()) -> list[Action]:
        made = [{change_rows.OP: "I", change_rows.SEQ: 1, **row} for row in rows]
        added = data_files.write_table(self.table, pa.Table.from_pylist(made, self.table.schema))
        gone = [{"remove": {"path": path, "deletionTimestamp": 1, "dataChange": False}} for path in removed]
        of_us = [] if position < 0 else [transaction(f"pubsub/n/5/16400/{generation}", position)]
        self.log.commit([*gone, *added, *of_us], Operation.WRITE)
        return added

    def changes(self, *lsns: int, generation: int = 1) -> None:
        """Commit a transaction of one row for each LSN."""
        self.commit(lsns[-1], *({change_rows.LSN: lsn, "id": lsn} for lsn in lsns), generation=generation)

    def copy(self, lsn: int, generation: int, *ids: int, begins: bool = False) -> None:
        rows = [{**change_rows.copied(Lsn(lsn), generation), "id": one} for one in ids]
        first = [change_rows.begun_anew(Lsn(lsn), generation)] if begins else []
        self.commit(lsn, *first, *rows, generation=generation)

    def source(self, **options: object) -> PubsubSource:
        return PubsubSource({"path": self.table.path, **{name: str(value) for name, value in options.items()}})

    def stream(self, **options: object) -> Stream:
        return Stream(self.source(**options))

    def batch(self, **options: object) -> list[dict[str, Any]]:
        source = self.source(**options)
        reader = pickle.loads(pickle.dumps(source.reader(source.schema())))
        return [row for share in reader.partitions() for part in reader.read(share) for row in part.to_pylist()]


class Stream:
    """A streaming query's use of a reader: it plans in one process, and reads in others."""

    def __init__(self, source: PubsubSource, offset: dict[str, Any] | None = None) -> None:
        self.schema = source.schema()
        self._pickled = pickle.dumps(source.streamReader(self.schema))
        self.reader = pickle.loads(self._pickled)
        self.offset = self.reader.initialOffset() if offset is None else offset

    def next(self, limit: ReadLimit | None = None) -> list[dict[str, Any]]:
        """Return the rows of the next micro-batch, and go on behind it."""
        end = json.loads(json.dumps(self.reader.latestOffset(self.offset, limit or self.reader.getDefaultReadLimit())))
        found = self.between(self.offset, end)
        self.offset = end
        return found

    def between(self, start: dict[str, Any], end: dict[str, Any]) -> list[dict[str, Any]]:
        executor = pickle.loads(self._pickled)
        shares = pickle.loads(pickle.dumps(self.reader.partitions(start, end)))
        expected = to_arrow_schema(self.schema, timezone="UTC")
        found = []
        for share in shares:
            for part in executor.read(share):
                assert part.schema.equals(expected)
                found += part.to_pylist()
        return found


def ids(rows: list[dict[str, Any]]) -> list[int | None]:
    return [row["id"] for row in rows]


def test_whole_transactions_and_where_a_query_goes_on(tmp_path: Path) -> None:
    history = History(tmp_path / "t")
    history.copy(100, 1, 1, 2, 3)
    history.commit(
        300, {change_rows.LSN: 200, "id": 4}, {change_rows.LSN: 300, "id": 5}, {change_rows.LSN: 300, "id": 6}
    )
    stream = history.stream(maxTransactionsPerTrigger=1)
    assert [ids(stream.next()) for _ in range(4)] == [[1, 2, 3], [4], [5, 6], []]
    assert stream.offset["lsn"] == "0/12C"
    unmoved = stream.offset
    assert stream.reader.latestOffset(unmoved, ReadAllAvailable()) is unmoved, "Spark would make an empty micro-batch"
    history.changes(400, 500)
    again = Stream(history.source(), stream.offset)
    assert ids(again.next()) == [400, 500]
    assert ids(stream.between({**unmoved, "lsn": "0/0", "generation": 0}, unmoved)) == [1, 2, 3, 4, 5, 6], (
        "again, as ever"
    )
    assert ids(history.stream(maxRowsPerTrigger=4).next()) == [1, 2, 3, 4]
    assert ids(history.stream(maxRowsPerTrigger=1).next()) == [1, 2, 3], "never less than a transaction"
    assert ids(history.stream(maxRowsPerTrigger=1).next(ReadAllAvailable())) == [1, 2, 3, 4, 5, 6, 400, 500]
    assert ids(history.stream(startingLSN="0/C8").next()) == [5, 6, 400, 500]
    latest = history.stream(startingLSN="latest")
    assert latest.next() == []
    history.changes(600)
    assert ids(latest.next()) == [600]


def test_what_is_not_in_the_table_in_whole_is_not_offered(tmp_path: Path) -> None:
    """Rows are offered up to the position, which is that of the history's own subscription."""
    history = History(tmp_path / "t")
    assert history.stream().next() == [], "nothing has been committed"
    history.changes(100)
    history.commit(-1, {change_rows.LSN: 900, "id": 9})
    history.log.commit([transaction("pubsub/other/5/16400/1", 950)], Operation.WRITE)
    history.log.commit([transaction("pubsub/n/5/16400/1/chunk", 960)], Operation.WRITE)
    stream = history.stream()
    assert ids(stream.next()) == [100]
    assert stream.reader.reportLatestOffset()["lsn"] == "0/64"


def test_available_now_ends(tmp_path: Path) -> None:
    history = History(tmp_path / "t")
    history.changes(100, 200)
    stream = history.stream(maxTransactionsPerTrigger=1)
    stream.reader.prepareForTriggerAvailableNow()
    history.changes(300)
    assert [ids(stream.next()) for _ in range(3)] == [[100], [200], []]


def test_rewritten_files(tmp_path: Path) -> None:
    """Merged, divided or deleted since the offsets were given: rows are found by their LSNs, and only files of the span read."""
    history = History(tmp_path / "t")
    history.changes(100, 200)
    history.changes(300)
    history.changes(400)
    stream = history.stream(maxTransactionsPerTrigger=2)
    assert ids(stream.next()) == [100, 200]
    shares = stream.reader.partitions(stream.offset, {**stream.offset, "lsn": "0/12C"})
    assert [len(share.files) for share in shares] == [1]
    paths = list(history.log.files)
    merged = [{change_rows.LSN: lsn, "id": lsn} for lsn in (100, 200, 300, 400)]
    history.commit(-1, *merged, removed=paths)
    for path in paths:
        (tmp_path / "t" / path).unlink()
    with pytest.raises(UndefinedFile, match="was deleted before it was read") as gone:
        list(stream.reader.read(shares[0]))
    assert any("HINT:  Start the query again" in note for note in gone.value.__notes__)
    assert [ids(stream.next()) for _ in range(2)] == [[300, 400], []]


def test_copies(tmp_path: Path) -> None:
    """Another copy is a part of the stream, also at the LSN that the query has reached."""
    history = History(tmp_path / "t")
    history.copy(100, 1, 1)
    history.changes(200)
    stream = history.stream()
    assert ids(stream.next()) == [1, 200]
    history.copy(200, 2, 1, 200, begins=True)
    assert [(row[change_rows.OP], row["id"]) for row in stream.next()] == [("T", None), ("R", 1), ("R", 200)]
    history.changes(300, generation=2)
    assert ids(stream.next()) == [300]
    history.copy(250, 3, 7)
    with pytest.raises(DataCorrupted, match="begun anew at 0/FA, but ended at 0/12C before"):
        stream.next()


def test_other_columns(tmp_path: Path) -> None:
    """A running query ends before it reads on; started again it has the columns as they are now."""
    history = History(tmp_path / "t")
    history.changes(100)
    stream = history.stream()
    stream.next()
    metadata = dict(history.log.metadata)
    columns = [*schema_json.fields(metadata), {"name": "n", "type": "long", "nullable": True, "metadata": {}}]
    history.log.commit(
        [{"metaData": {**metadata, "schemaString": schema_json.schema_string(columns)}}], Operation.ALTER
    )
    history.table = TargetTable(
        history.table.path, history.table.schema.append(pa.field("n", pa.int64())), (), "public.t", history=("id",)
    )
    history.commit(200, {change_rows.LSN: 200, "id": 200, "n": 7})
    with pytest.raises(NotInPrerequisiteState, match="are not those that the query began with") as refused:
        stream.next()
    assert refused.value.detail == "They differ in n."
    again = Stream(history.source(), stream.offset)
    assert [(row["id"], row["n"]) for row in again.next()] == [(200, 7)]
    assert [(row["id"], row["n"]) for row in history.batch()] == [(100, None), (200, 7)]


def test_another_table_at_the_path(tmp_path: Path) -> None:
    history = History(tmp_path / "t")
    history.changes(100)
    stream = history.stream()
    stream.next()
    (tmp_path / "t").rename(tmp_path / "aside")
    other = History(tmp_path / "t")
    other.changes(50, 200)
    with pytest.raises(NotInPrerequisiteState, match="is not the one that the query has read up to now"):
        Stream(other.source(), stream.offset).next()


def test_a_table_that_has_lost_what_was_read(tmp_path: Path) -> None:
    history = History(tmp_path / "t")
    history.changes(100)
    stream = history.stream()
    stream.next()
    with pytest.raises(DataCorrupted, match="ends at 0/64, and the query has read up to 0/C8"):
        Stream(history.source(), {**stream.offset, "lsn": "0/C8"}).next()
    with pytest.raises(DataCorrupted, match="ends at 0/64, and the query has read up to 0/C8"):
        stream.between(stream.offset, {**stream.offset, "lsn": "0/C8"})


def test_batches(tmp_path: Path) -> None:
    history = History(tmp_path / "t")
    history.copy(100, 1, 1)
    history.changes(200, 300)
    history.changes(400)
    assert ids(history.batch()) == [1, 200, 300, 400]
    assert ids(history.batch(startingLSN="0/64", endingLSN="0/12C")) == [200, 300]
    assert ids(history.batch(startingLSN="0/65", endingLSN="0/C8")) == [200]
    assert history.batch(startingLSN="latest") == []
    with pytest.raises(NotInPrerequisiteState, match="has not reached endingLSN 0/191") as refused:
        history.batch(endingLSN="0/191")
    assert refused.value.detail == "It is known to have every change up to 0/190."
    with pytest.raises(NotInPrerequisiteState, match="has not reached startingLSN 0/191"):
        history.stream(startingLSN="0/191")


def test_types(tmp_path: Path) -> None:
    """Each type that a history can have arrives as Spark's for it, NULLs and what is inside arrays and composites too."""
    pair = pa.struct([pa.field("a", pa.int32()), pa.field("b", pa.string())])
    variant = {"metadata": b"\x01\x00\x00", "value": b"\x0c\x07"}
    columns: list[tuple[pa.DataType, Any]] = [
        (pa.bool_(), True),
        (pa.int16(), -5),
        (pa.int64(), 1 << 40),
        (pa.float32(), 0.5),
        (pa.float64(), -0.25),
        (pa.decimal128(10, 3), Decimal("12.345")),
        (pa.decimal128(38, 0), Decimal(10**37)),
        (pa.date32(), date(1, 1, 1)),
        (pa.timestamp("us"), datetime(9999, 12, 31, 23, 59, 59, 999999)),
        (pa.timestamp("us", "UTC"), datetime(2024, 2, 29, tzinfo=UTC)),
        (pa.binary(), b"\x00\xff"),
        (pa.string(), "\u00e9"),
        (pa.list_(pa.field("element", pa.list_(pa.field("element", pa.int32())))), [[1, None], None, []]),
        (pair, {"a": 1, "b": None}),
        (pa.list_(pa.field("element", pair)), [{"a": None, "b": "x"}, None]),
        (VARIANT, variant),
    ]
    fields = [pa.field(f"c{place}", kind) for place, (kind, _) in enumerate(columns)]
    history = History(tmp_path / "t", COLUMNS[0], *fields)
    values = {field.name: value for field, (_, value) in zip(fields, columns, strict=True)}
    history.commit(100, {change_rows.LSN: 100, "id": 1, **values}, {change_rows.LSN: 100, "id": 2})
    full, empty = history.stream().next()
    assert {name: full[name] for name in values} == values
    assert {empty[name] for name in values} == {None}
    assert history.source().schema().simpleString().endswith("c15:variant>")


def test_what_is_refused(tmp_path: Path) -> None:
    history = History(tmp_path / "t")
    history.changes(100)
    with pytest.raises(FeatureNotSupported, match="in a store that only Spark reaches"):
        PubsubSource({"path": "abfss://c@a/t"}).schema()
    mirror = TargetTable(str(tmp_path / "m"), pa.schema(COLUMNS), (), "public.m")
    assert delta.create_empty(JsonTransactions(), mirror, NODE)
    with pytest.raises(FeatureNotSupported, match="does not keep its changes"):
        PubsubSource({"path": mirror.path}).schema()
    with pytest.raises(PubsubError, match="does not exist"):
        PubsubSource({"path": str(tmp_path / "none")}).schema()
    with pytest.raises(NotInPrerequisiteState, match="not those that the query began with"):
        history.source().reader(StructType([StructField("id", LongType())])).partitions()
    for kind, words in (
        ("interval year to month", "cannot carry"),
        ({"type": "array", "elementType": "variant", "containsNull": True}, "VARIANT inside"),
    ):
        metadata = dict(history.log.metadata)
        columns = [*schema_json.fields(metadata)[:8], {"name": "n", "type": kind, "nullable": True, "metadata": {}}]
        altered = {**metadata, "schemaString": schema_json.schema_string(columns)}
        history.log.commit([{"metaData": altered}], Operation.ALTER)
        with pytest.raises(FeatureNotSupported, match='column "n" has a type that the source cannot carry') as refused:
            history.source().schema()
        assert words in str(refused.value) + str(refused.value.detail)
