"""The Delta writer on a real Spark and Delta: every statement that commits a batch, on every kind of table.

Frames go in as a publisher sends them; the rows are read by deltalake's own engine, not by Spark.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from apply.batch import Batch
from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destination, WrittenByOthers
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from pubsub.delta import table as delta
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.table import TargetTable
from pubsub.delta.writers import arrow_writer, spark_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import NotAsExpected
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.column_types import NUMERICOID, delta_type
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import UNCHANGED, Message, Relation
from pubsub.protocol.text.columns import from_text
from pubsub.protocol.type_contract import BY_NAME
from tests.support.frames import INT8, TEXT, delete, insert, relation, transaction, truncate, update

OID = 16384
FLOAT8 = BY_NAME["float8"].oid
_typmods = {NUMERICOID: (38 << 16 | 18) + 4}


def plain(value: Any) -> Any:
    """Convert a time with a zone to UTC, so that equal times have equal representations."""
    return value.astimezone(UTC) if isinstance(value, datetime) and value.tzinfo else value


class Replica:
    """One Delta table and its publisher: each `send` is one batch and one commit."""

    def __init__(
        self,
        spark: Spark,
        path: Path,
        sent: Relation,
        *,
        direct: bool,
        read_by_spark: bool = False,
        key: Sequence[str] = ("id",),
        extra: str = "",
    ) -> None:
        self.session = spark.session
        self.relation = sent
        fields = [
            pa.field(c.name, delta_type(c.type_oid, _typmods.get(c.type_oid, -1)), c.name not in key)
            for c in sent.columns
        ]
        self.table = TargetTable(str(path / "t"), pa.schema(fields), tuple(key), f"public.{sent.name}")
        transactions = DeltaTransactions(self.session)
        if not (direct and delta.create_empty(transactions, self.table, {"pubsub.node": "1"})):
            delta.create(self.session, self.table, {"pubsub.node": "1"})
        if extra:
            self.session.sql(f"ALTER TABLE delta.{spark_writer.quote(self.table.path)} ADD COLUMNS ({extra})")
        self.table = delta.load(self.table.path, self.table.relation, json.dumps({"key": list(key)}))
        self.direct, self.read_by_spark = direct, read_by_spark
        self.stage = TableWriters(path / "a stage [of] {odd} *name% ä", transactions, direct=direct)
        self.lsn = 0
        self._dispatcher = Dispatcher(INVALID_LSN)

    def batch(self, *messages: Message) -> Batch:
        self.lsn += 100
        self._dispatcher.feed(transaction(self.lsn, self.relation, *messages), 0.0)
        return self._dispatcher.take()

    def send(self, *messages: Message) -> int:
        """Commit one batch; return how many Delta versions it made."""
        return self.commit(self.batch(*messages))

    def commit(self, batch: Batch) -> int:
        before = self.version
        destination = Destination(OID, self.table, "app", INVALID_LSN)
        try:
            (table,) = self.staged(batch, destination)
        except WrittenByOthers as found:
            self.stage.forget_others(self.table.path, "app", found.commits[-1].version)
            (table,) = self.staged(batch, replace(destination, contested=True))
        try:
            self.commit_staged(table)
        except NotAsExpected:
            (table,) = self.staged(batch, replace(destination, contested=True))
            self.commit_staged(table)
        assert delta.committed_lsn(self.table.path, "app") == batch.last_lsn
        (newest,) = DeltaTable(self.table.path).history(1)
        assert newest["userMetadata"] == f'{{"first": "{batch.first_lsn}", "last": "{batch.last_lsn}"}}'
        return self.version - before

    def staged(self, batch: Batch, destination: Destination) -> list[StagedTable]:
        return stage_batch(batch, [{("public", self.relation.name): destination}], self.stage, "pg_1")

    def commit_staged(self, table: StagedTable, *, again: Lsn | None = None) -> None:
        """Commit it; `again`: the position before, of a commit whose outcome was not known."""
        staged = table.staged
        record = replace(table.commit, previous=again or delta.committed_lsn(self.table.path, "app"))
        try:
            self.stage.look(staged, record)
            if isinstance(staged, DirectStaged):
                assert self.direct
                arrow_writer.commit(staged, record)
            else:
                spark_writer.commit(self.session, staged, record)
        finally:
            discard(staged)

    @property
    def version(self) -> int:
        return DeltaTable(self.table.path).version()

    def rows(self, *, by: int | None = 0) -> list[tuple[Any, ...]]:
        """Return every row, as deltalake and Spark both read it; sorted by a column, or by everything for NULLs."""
        found = QueryBuilder().register("t", DeltaTable(self.table.path)).execute("SELECT * FROM t").read_all()
        if self.direct and self.read_by_spark:
            by_spark = self.session.read.format("delta").load(self.table.path).toArrow()
            spark_rows = [[*map(plain, row.values())] for row in by_spark.to_pylist()]
            assert sorted(map(repr, spark_rows)) == sorted(
                repr([*map(plain, row.values())]) for row in pa.table(found).to_pylist()
            )
        columns = [column.to_pylist() for column in pa.table(found).columns]
        rows = [tuple(map(plain, row)) for row in zip(*columns, strict=True)]
        return sorted(rows, key=lambda row: row[by]) if by is not None else sorted(rows, key=repr)

    def operations(self) -> list[str]:
        return [entry["operation"] for entry in DeltaTable(self.table.path).history()]


@pytest.fixture(params=["directly", "by Spark"])
def made(spark: Spark, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    numbers = itertools.count()

    def make(columns: Sequence[tuple[str, int]] = (("id", INT8), ("v", TEXT)), **options: Any) -> Replica:
        key = options.pop("key", ("id",))
        sent = relation(OID, "t", columns, key=key, identity=options.pop("identity", "d"))
        path = tmp_path / str(next(numbers))
        path.mkdir()
        return Replica(spark, path, sent, direct=request.param == "directly", key=key, **options)

    return make


@pytest.mark.parametrize("made", ["directly", pytest.param("by Spark", marks=pytest.mark.full)], indirect=True)
def test_the_life_of_a_table(made: Any) -> None:
    """Each batch is one commit, by the cheapest statement that does it."""
    r = made()
    assert r.send(*(insert(OID, i, f"row {i}") for i in range(1, 7))) == 1
    assert r.operations()[0] == "WRITE"
    assert r.rows() == [(i, f"row {i}") for i in range(1, 7)]
    # Updates, a delete, an insert, a key change, a swap of two keys.
    assert (
        r.send(
            update(OID, 1, "one"),
            delete(OID, 2, None),
            insert(OID, 7, None),
            update(OID, 30, "thirty", old=(3, None)),
            update(OID, -4, "row 4", old=(4, None)),
            update(OID, 4, "row 5", old=(5, None)),
            update(OID, 5, "row 4", old=(-4, None)),
        )
        == 1
    )
    r.read_by_spark = True
    assert r.rows() == [(1, "one"), (4, "row 5"), (5, "row 4"), (6, "row 6"), (7, None), (30, "thirty")]
    r.read_by_spark = False
    # Deletes alone; one of them is of a missing key.
    assert r.send(delete(OID, 1, None), delete(OID, 99, None)) == 1
    assert [row[0] for row in r.rows()] == [4, 5, 6, 7, 30]
    # A batch that matches nothing, or that undoes itself, records its version all the same.
    assert r.send(delete(OID, 99, None)) == 1
    assert r.send(insert(OID, 50, "x"), delete(OID, 50, None)) == 1
    assert r.send(update(OID, 98, "no such row")) == 1
    rows = r.rows()
    assert (98, "no such row") in rows or len(rows) == 5
    # TRUNCATE, with and without rows after it.
    assert r.send(insert(OID, 60, "gone"), truncate(OID), insert(OID, 61, "there")) == 1
    r.read_by_spark = True
    assert r.rows() == [(61, "there")]
    r.read_by_spark = False
    assert r.send(truncate(OID)) == 1
    assert r.rows() == []
    assert delta.properties(r.table.path)["pubsub.relation"] == "public.t"


@pytest.mark.full
def test_a_batch_is_held_once(made: Any) -> None:
    """Each statement does nothing when it is sent again under a version that the table has."""
    r = made()
    r.send(*(insert(OID, i, "x") for i in range(4)))
    batches = [
        (insert(OID, 10, "a"),),
        (update(OID, 0, "b"), insert(OID, 11, "c")),
        (update(OID, 1, UNCHANGED),),
        (delete(OID, 2, None),),
        (truncate(OID), insert(OID, 1, "z")),
    ]
    for messages in batches:
        batch = r.batch(*messages)
        destination = Destination(OID, r.table, "app", INVALID_LSN)
        position = delta.committed_lsn(r.table.path, "app")
        for expected, again in ((1, None), (0, position)):
            before = r.version
            (table,) = stage_batch(batch, [{("public", "t"): destination}], r.stage, "pg_1")
            r.commit_staged(table, again=again)
            assert r.version - before == expected
    assert r.rows() == [(1, "z")]


def test_unchanged_values_come_from_the_table(made: Any) -> None:
    """Also with changed keys, chains in one batch, missing rows, and rows inserted in the same batch."""
    r = made((("id", INT8), ("v", TEXT), ("w", TEXT)), read_by_spark=True)
    big = "TOAST " * 2000
    r.send(*(insert(OID, i, big + str(i), big) for i in range(1, 7)), insert(OID, 7, None, None))
    r.send(
        update(OID, 1, UNCHANGED, "w1"),
        update(OID, 20, UNCHANGED, UNCHANGED, old=(2, None, None)),
        update(OID, 3, UNCHANGED, "w3"),
        update(OID, 30, "v30", UNCHANGED, old=(3, None, None)),
        update(OID, 31, UNCHANGED, UNCHANGED, old=(30, None, None)),
        insert(OID, 8, "new", "new"),
        update(OID, 8, UNCHANGED, "newer"),
        update(OID, 99, UNCHANGED, "not there"),
        update(OID, 7, UNCHANGED, "seven"),
        delete(OID, 4, None, None),
        update(OID, 4, UNCHANGED, "five", old=(5, None, None)),
    )
    assert r.rows() == [
        (1, big + "1", "w1"),
        (4, big + "5", "five"),
        (6, big + "6", big),
        (7, None, "seven"),
        (8, "new", "newer"),
        (20, big + "2", big),
        (31, "v30", "w3"),
    ]


KEYS: dict[str, tuple[int, list[Any]]] = {
    "decimal": (
        NUMERICOID,
        ["0.000000000000000001", "-99999999999999999999.999999999999999999", "1.500000000000000000"],
    ),
    "timestamp": (
        BY_NAME["timestamp"].oid,
        ["0001-01-01 00:00:00", "1582-10-10 12:00:00.000001", "9999-12-31 23:59:59.999999"],
    ),
    "timestamptz": (
        BY_NAME["timestamptz"].oid,
        ["1969-12-31 23:59:59.999999+00", "2024-03-31 01:30:00+00", "2024-03-31 01:30:00.000001+00"],
    ),
    "text": (TEXT, ["", 'it\'s "so" \\ `x`', "zwölf 🐘\n\t%_"]),
    "bytea": (BY_NAME["bytea"].oid, ["\\x", "\\x00ff27", "\\x00ff2700"]),
    "date": (BY_NAME["date"].oid, ["0001-01-01", "1582-10-04", "9999-12-31"]),
    "bool": (BY_NAME["bool"].oid, ["t", "f"]),
    "bigint": (INT8, ["-9223372036854775808", "0", "9223372036854775807"]),
    "double": (FLOAT8, ["-Infinity", "1e-300", "NaN"]),
}


def value(kind: str, text: str) -> Any:
    """Return the Python value that deltalake gives for a key's text, as a repr."""
    oid = KEYS[kind][0]
    arrow = delta_type(oid, _typmods.get(oid, -1))
    found = from_text(pa.array([text.encode()]), arrow)[0].as_py()
    return repr(plain(found))


# Spark's statement takes half a minute for each type.
_OFTEN_BY_SPARK = ("decimal", "timestamptz", "text")


@pytest.mark.full
@pytest.mark.parametrize(
    ("made", "kind"),
    [
        pytest.param(way, kind, marks=[pytest.mark.soak] if way == "by Spark" and kind not in _OFTEN_BY_SPARK else [])
        for way in ("directly", "by Spark")
        for kind in KEYS
    ],
    indirect=["made"],
)
def test_key_types(made: Any, kind: str) -> None:
    """Rows are found, completed from the table, moved and deleted by every type of key."""
    oid, keys = KEYS[kind]
    r = made((("id", oid), ("v", TEXT), ("w", INT8)), read_by_spark=True)
    r.send(*(insert(OID, key, f"v{i}", i) for i, key in enumerate(keys)))
    # One row keeps an unchanged value; one is deleted and inserted again; one stays deleted.
    last = [delete(OID, keys[2], None, None)] if len(keys) > 2 else []
    r.send(
        update(OID, keys[0], UNCHANGED, 10),
        delete(OID, keys[1], None, None),
        insert(OID, keys[1], "back", 11),
        update(OID, keys[1], UNCHANGED, 12),
        *last,
    )
    expected = sorted([(value(kind, keys[0]), "v0", 10), (value(kind, keys[1]), "back", 12)])
    assert sorted((repr(k), v, w) for k, v, w in r.rows(by=None)) == expected
    assert r.send(delete(OID, keys[1], None, None)) == 1
    assert [(repr(k), v, w) for k, v, w in r.rows()] == [(value(kind, keys[0]), "v0", 10)]


@pytest.mark.full
def test_a_composite_key(made: Any) -> None:
    r = made((("v", TEXT), ("a", INT8), ("b", TEXT), ("c", BY_NAME["date"].oid)), key=("b", "a", "c"))
    r.send(*(insert(OID, f"{a}{b}", a, b, "2024-01-01") for a in (1, 2) for b in ("x", "y")))
    r.send(
        update(OID, "new", 1, "x", "2024-01-01"),
        update(OID, UNCHANGED, 2, "z", "2024-01-01", old=(None, 2, "y", "2024-01-01")),
        delete(OID, None, 1, "y", "2024-01-01"),
        delete(OID, None, 2, "x", "2024-01-02"),
    )
    assert r.rows(by=None) == [
        ("2x", 2, "x", date(2024, 1, 1)),
        ("2y", 2, "z", date(2024, 1, 1)),
        ("new", 1, "x", date(2024, 1, 1)),
    ]
    r.send(delete(OID, None, 2, "z", "2024-01-01"))
    assert len(r.rows()) == 2


NAMES = [
    "t",
    "s",
    "id ",
    "a.b",
    "a`b",
    'quo"te',
    "com,ma;{}()=",
    "new\nline\ttab",
    "ünïcode",
    "select",
    "*",
    "__pubsub_target",
    "x" * 63,
]


@pytest.mark.full
@pytest.mark.parametrize("key", [NAMES[1:], NAMES[:1]], ids=["most", "one"])
def test_odd_names(made: Any, key: list[str]) -> None:
    """As key and as value, in every statement; with column mapping where Parquet would not take the names."""
    r = made([(name, INT8) for name in NAMES], key=tuple(key))
    width, places = len(NAMES), [NAMES.index(name) for name in key]

    def row(number: int, other: Any) -> list[Any]:
        return [number if i in places else other for i in range(width)]

    r.send(*(insert(OID, *row(n, 0)) for n in range(1, 5)))
    r.send(update(OID, *row(1, UNCHANGED)), update(OID, *row(2, 5)), update(OID, *row(30, UNCHANGED), old=row(3, None)))
    r.send(delete(OID, *row(4, None)))
    assert [tuple(row(*expected)) for expected in ((1, 0), (2, 5), (30, 0))] == r.rows(by=places[0])
    assert DeltaTable(r.table.path).schema().to_arrow() is not None
    assert list(delta.read_schema(r.table.path).names) == NAMES


@pytest.mark.full
def test_odd_names_without_a_key(made: Any) -> None:
    r = made([(name, INT8) for name in NAMES], key=(), identity="f")
    rows = [[n] * len(NAMES) for n in range(3)]
    r.send(*(insert(OID, *row) for row in rows + rows))
    r.send(delete(OID, *rows[1], kind="O"), update(OID, *rows[0], old=rows[2], kind="O"))
    assert [row[0] for row in r.rows()] == [0, 0, 0, 1, 2]


@pytest.mark.full
def test_full_identity_without_a_key(made: Any) -> None:
    """As many of the equal rows go as were deleted.  NULL is a value; microseconds and the sign of zero count."""
    columns = (
        ("a", INT8),
        ("at", BY_NAME["timestamptz"].oid),
        ("f", FLOAT8),
        ("b", BY_NAME["bytea"].oid),
        ("s", TEXT),
        ("n", NUMERICOID),
    )
    r = made(columns, key=(), identity="f")
    first = (1, "2024-01-01 00:00:00.000001+00", "0", "\\x00", "x", "1.000000000000000001")
    second = (1, "2024-01-01 00:00:00.000002+00", "0", "\\x00", "x", "1.000000000000000001")
    negative = (1, "2024-01-01 00:00:00.000001+00", "-0", "\\x00", "x", "1.000000000000000001")
    empty = (None,) * 6
    blank = (None, None, None, None, "", None)
    assert r.send(*(insert(OID, *row) for row in [first] * 5 + [second, negative] + [empty] * 3 + [blank])) == 1
    assert r.send(*(delete(OID, *first, kind="O") for _ in range(2)), delete(OID, *empty, kind="O")) == 1

    def counts() -> dict[Any, int]:
        found: dict[Any, int] = {}
        for row in r.rows(by=None):
            found[repr(row)] = found.get(repr(row), 0) + 1
        return found

    at = datetime(2024, 1, 1, tzinfo=UTC)
    n = Decimal("1.000000000000000001")
    assert counts() == {
        repr((1, at.replace(microsecond=1), 0.0, b"\0", "x", n)): 3,
        repr((1, at.replace(microsecond=2), 0.0, b"\0", "x", n)): 1,
        repr((1, at.replace(microsecond=1), -0.0, b"\0", "x", n)): 1,
        repr(empty): 2,
        repr((None, None, None, None, "", None)): 1,
    }
    # Updates: one row becomes another; one becomes a copy of an existing row.  A delete of a missing row.
    moved = (2, *first[1:])
    r.send(
        update(OID, *moved, old=first, kind="O"),
        update(OID, *blank, old=empty, kind="O"),
        delete(OID, 77, None, None, None, None, None, kind="O"),
        update(OID, *second[:4], UNCHANGED, second[5], old=second, kind="O"),
    )
    assert counts() == {
        repr((1, at.replace(microsecond=1), 0.0, b"\0", "x", n)): 2,
        repr((2, at.replace(microsecond=1), 0.0, b"\0", "x", n)): 1,
        repr((1, at.replace(microsecond=2), 0.0, b"\0", "x", n)): 1,
        repr((1, at.replace(microsecond=1), -0.0, b"\0", "x", n)): 1,
        repr(empty): 1,
        repr((None, None, None, None, "", None)): 2,
    }
    # Deletes alone, after which none of the equal rows is left.
    before = counts()
    assert r.send(delete(OID, *moved, kind="O"), delete(OID, *empty, kind="O")) == 1
    del before[repr((2, at.replace(microsecond=1), 0.0, b"\0", "x", n))], before[repr(empty)]
    assert counts() == before
    before = r.version
    assert r.send(truncate(OID), insert(OID, *first), insert(OID, *first), delete(OID, *first, kind="O")) == 1
    assert r.version == before + 1
    assert len(r.rows()) == 1


@pytest.mark.full
def test_a_target_with_more_columns_keeps_them(made: Any) -> None:
    """Updates leave the extra columns as they are, inserts set them to NULL, whatever their types."""
    extra = "note STRING, tags ARRAY<STRING>, tiny TINYINT, box STRUCT<x: INT, y: MAP<STRING, DOUBLE>>"
    r = made(extra=extra, read_by_spark=True)
    r.send(insert(OID, 1, "a"), insert(OID, 2, "b"), insert(OID, 3, "c"))
    r.session.sql(
        f"UPDATE delta.{spark_writer.quote(r.table.path)} SET note = 'kept', tags = array('x'), tiny = 3, "
        "box = named_struct('x', 1, 'y', map('k', 1.5D)) WHERE id < 3"
    )
    kept = ("kept", ["x"], 3, {"x": 1, "y": [("k", 1.5)]})
    none = (None,) * 4
    r.send(update(OID, 1, "A"), update(OID, 20, UNCHANGED, old=(2, None)), insert(OID, 4, "d"))
    assert r.rows() == [(1, "A", *kept), (3, "c", *none), (4, "d", *none), (20, "b", *kept)]
    r.send(insert(OID, 5, "e"))
    assert r.rows()[3] == (5, "e", *none)


@pytest.mark.full
def test_full_identity_with_a_key(made: Any) -> None:
    """Rows are found by key.  An unchanged value comes from the old row, except in columns that only the target has."""
    r = made(identity="f", extra="note STRING")
    r.send(insert(OID, 1, "big"), insert(OID, 2, "b"))
    r.session.sql(f"UPDATE delta.{spark_writer.quote(r.table.path)} SET note = 'kept'")
    r.send(update(OID, 10, UNCHANGED, old=(1, "big"), kind="O"), delete(OID, 2, "b", kind="O"))
    assert r.rows() == [(10, "big", "kept")]


@pytest.mark.full
def test_a_target_with_more_columns_without_a_key(made: Any) -> None:
    """The extra columns count as NULL (execReplication.c: FindReplTupleInLocalRel compares all columns)."""
    r = made(key=(), identity="f", extra="note STRING")
    r.send(insert(OID, 1, "a"), insert(OID, 1, "a"))
    r.send(update(OID, 1, "b", old=(1, "a"), kind="O"))
    assert r.rows(by=1) == [(1, "a", None), (1, "b", None)]


@pytest.mark.full
def test_rows_that_differ_in_an_identity_of_the_publishers(spark: Spark, tmp_path: Path) -> None:
    """A batch that only removed rows was once taken for one of a publisher without the column: any of the equal rest went."""
    sent = relation(OID, "t", (("id", INT8), ("v", TEXT), ("number", INT8)), key=(), identity="f")
    spark.session.sql(
        f"CREATE TABLE delta.`{tmp_path / 't'}` (id BIGINT, v STRING, number BIGINT GENERATED BY DEFAULT AS IDENTITY) USING delta"
    )
    r = Replica(spark, tmp_path, sent, direct=False, key=())
    r.send(*(insert(OID, 1, "x", number) for number in (5, 6, 7)), insert(OID, 2, "x", 8))
    r.send(delete(OID, 1, "x", 5, kind="O"), delete(OID, 2, "x", 8, kind="O"))
    assert r.rows(by=2) == [(1, "x", 6), (1, "x", 7)]
    # Delta once numbered the rows of a batch in which the publisher's values are all NULL.
    r.table = replace(r.table, sent=frozenset(("id", "v", "number")))
    r.send(insert(OID, 3, "x", None))
    assert r.rows(by=0) == [(1, "x", 6), (1, "x", 7), (3, "x", None)]


@pytest.mark.full
def test_a_value_that_the_table_refuses_leaves_no_commit(made: Any) -> None:
    r = made()
    r.send(insert(OID, 1, "a"))
    r.session.sql(f"ALTER TABLE delta.{spark_writer.quote(r.table.path)} ADD CONSTRAINT short CHECK (length(v) < 3)")
    before = r.version
    with pytest.raises(Exception, match=r"(?i)constraint"):
        r.send(update(OID, 1, "too long"), insert(OID, 2, "b"))
    assert r.version == before
    assert delta.committed_lsn(r.table.path, "app") == 100
    assert r.rows() == [(1, "a")]


@pytest.mark.full
def test_many_rows_in_many_files(made: Any) -> None:
    """Many rows in many files: batches above a row group, keys scattered and close; compared with a dict."""
    r = made(read_by_spark=True)
    model: dict[int, str] = {}
    for first in range(0, 6000, 2000):
        r.send(*(insert(OID, key, f"v{key}") for key in range(first, first + 2000)))
        model |= {key: f"v{key}" for key in range(first, first + 2000)}
    scattered = [key * 7 % 6000 for key in range(500)]
    r.send(*(update(OID, key, f"u{key}") for key in scattered), *(delete(OID, key, None) for key in range(5000, 5100)))
    model |= {key: f"u{key}" for key in scattered}
    model = {key: v for key, v in model.items() if not 5000 <= key < 5100}
    assert r.rows() == sorted(model.items())
    assert delta.row_count(r.table.path) == len(model)


def test_create_takes_a_table_that_fits_and_refuses_one_that_does_not(made: Any) -> None:
    r = made()
    delta.create(r.session, r.table, {})
    fields = [pa.field("id", pa.int64(), False), pa.field("v", pa.int32())]
    with pytest.raises(NotInPrerequisiteState, match=r'column "v".*has type string'):
        delta.create(r.session, TargetTable(r.table.path, pa.schema(fields), ("id",), "public.t"), {})
    fields = [pa.field("id", pa.int64(), False), pa.field("w", pa.string())]
    with pytest.raises(NotInPrerequisiteState, match='missing replicated columns: "w"'):
        delta.create(r.session, TargetTable(r.table.path, pa.schema(fields), ("id",), "public.t"), {})


LAYOUTS = {
    "plain": "",
    "partitioned": "PARTITIONED BY (v)",
    "partitioned by the key": "PARTITIONED BY (id)",
    "clustered": "CLUSTER BY (id)",
    "mapped by id": "TBLPROPERTIES ('delta.columnMapping.mode' = 'id')",
    "rows tracked": "TBLPROPERTIES ('delta.enableRowTracking' = 'true')",
    "in-commit timestamps, v2 checkpoints": (
        "TBLPROPERTIES ('delta.enableInCommitTimestamps' = 'true', 'delta.checkpointPolicy' = 'v2')"
    ),
}


@pytest.mark.parametrize(
    "layout", [name if name == "partitioned" else pytest.param(name, marks=pytest.mark.full) for name in LAYOUTS]
)
@pytest.mark.full
def test_both_ways_of_writing_take_turns(spark: Spark, tmp_path: Path, layout: str) -> None:
    """Each batch meets rows and deletion vectors of the other way; both carry the transaction on."""
    sent = relation(OID, "t", (("id", INT8), ("v", TEXT), ("w", TEXT)), key=("id",), identity="d")
    spark.session.sql(
        f"CREATE TABLE delta.`{tmp_path / 't'}` (id BIGINT NOT NULL, v STRING, w STRING) USING delta {LAYOUTS[layout]}"
    )
    replicas = []
    for direct in (True, False):
        r = Replica(spark, tmp_path, sent, direct=direct, read_by_spark=True)
        r.stage = TableWriters(tmp_path / str(direct), DeltaTransactions(spark.session), direct=direct)
        replicas.append(r)
    model: dict[int, tuple[Any, Any]] = {}
    for number in range(4):
        r = replicas[number % 2]
        r.lsn = 1000 * number
        first = 10 * number
        messages = [insert(OID, i, f"p/{i % 3}" if i % 4 else None, f"w{i}") for i in range(first, first + 10)]
        model |= {i: (f"p/{i % 3}" if i % 4 else None, f"w{i}") for i in range(first, first + 10)}
        if number:
            before = first - 10
            messages += [update(OID, before, "moved", UNCHANGED), delete(OID, before + 1, None, None)]
            messages += [update(OID, -before - 2, UNCHANGED, "key", old=(before + 2, None, None))]
            model[before] = ("moved", model[before][1])
            model[-before - 2] = (model.pop(before + 2)[0], "key")
            del model[before + 1]
        batch = r.batch(*messages)
        (table,) = r.staged(batch, Destination(OID, r.table, "app", Lsn(0)))
        assert isinstance(table.staged, DirectStaged) is r.direct
        r.commit_staged(table)
        assert r.rows() == sorted((i, *values) for i, values in model.items())
