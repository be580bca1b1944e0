"""stage_batch: a batch's changes by destination, filtered, matched by name, and refused if they do not fit."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from apply.conflicts import ConflictType, UniqueViolation
from apply.pipeline.dispatch import Dispatcher
from apply.staging.destination import Destination
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from pubsub.delta.soft_deletes import FIELD
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.changeset import Folded
from pubsub.errors import (
    FeatureNotSupported,
    InvalidValue,
    NotInPrerequisiteState,
    ProgramLimitExceeded,
    ProtocolViolation,
)
from pubsub.masks import VARIABLE, Masks, fingerprint_of
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import UNCHANGED, Message
from pubsub.reorderbuffer.log import FrameLog
from pubsub.sql.mask_rules import MaskRule
from tests.support.frames import INT8, TEXT, delete, insert, relation, transaction, truncate, update
from tests.support.memory import Holding, MemoryDelta, target

A, B = relation(16384, "a"), relation(16385, "b")


class Bench:
    """Prepares a batch for `targets`; its transactions end at 100, 200, …"""

    def __init__(self, *targets: TargetTable) -> None:
        self.delta = MemoryDelta(*(targets or (target("a"), target("b"))))
        self.dispatcher = Dispatcher(INVALID_LSN)
        self.after: dict[str, int] = {}
        self.contested = False
        self.whole: int | None = None
        self.end = 0

    def send(self, *messages: Message, xid: int = 700) -> None:
        self.end += 100
        self.dispatcher.feed(transaction(self.end, *messages, xid=xid), 0.0)

    def stage(self) -> dict[str, StagedTable]:
        destinations = {
            ("public", t.path): Destination(
                1, t, f"app {t.path}", Lsn(self.after.get(t.path, 0)), contested=self.contested
            )
            for t in self.delta.targets.values()
        }
        with self.delta.installed():
            writers: Any = self.delta
            found = stage_batch(self.dispatcher.batch, [destinations], writers, "pg_16389", whole=self.whole)
        return {p.staged.table.path: p for p in found}

    def folded(self, path: str = "a") -> Folded:
        return self.delta.staged[self.stage()[path].staged.directory][1]

    def fails(self, *errors: type[Exception]) -> Any:
        with pytest.raises(errors) as raised:
            self.stage()
        assert not self.delta.staged, "staged files stay behind"
        return raised.value


def test_each_table_gets_only_its_own_changes() -> None:
    b = Bench()
    b.send(
        A, B, relation(9, "c"), insert(A.oid, 1, "x"), insert(9, 5, "z"), insert(B.oid, 2, "y"), insert(A.oid, 3, "x")
    )
    b.send(insert(A.oid, 4, "x"), delete(B.oid, 2, None))
    found = b.stage()
    assert {name: (p.inserts, p.updates, p.deletes) for name, p in found.items()} == {"a": (3, 0, 0), "b": (1, 0, 1)}
    assert found["a"].commit.app_id == "app a"
    assert (found["a"].commit.first, found["a"].commit.last) == (100, 200)


def test_a_table_without_changes_in_the_batch_is_not_staged() -> None:
    b = Bench()
    b.send(A, B, insert(A.oid, 1, "x"))
    assert set(b.stage()) == {"a"}


def test_transactions_that_a_table_holds_already_are_dropped() -> None:
    b = Bench()
    b.send(A, insert(A.oid, 1, "x"), truncate(A.oid))
    b.send(insert(A.oid, 2, "x"))
    b.send(insert(A.oid, 3, "x"))
    b.after["a"] = 100
    assert b.folded().images.column("id").to_pylist() == [2, 3]
    assert not b.stage()["a"].staged.replace_all
    b.after["a"] = 200
    assert b.folded().images.column("id").to_pylist() == [3]
    b.after["a"] = 300
    assert b.stage() == {}


def test_a_truncate_voids_what_came_before_it() -> None:
    b = Bench()
    b.send(A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x"), truncate(A.oid, B.oid), insert(A.oid, 2, "y"))
    found = b.stage()
    assert found["a"].staged.replace_all
    assert b.delta.staged[found["a"].staged.directory][1].images.to_pylist() == [{"id": 2, "v": "y"}]
    assert found["b"].staged.replace_all
    assert b.delta.staged[found["b"].staged.directory][1].images.num_rows == 0


@pytest.mark.parametrize("whole", [None, 100])
def test_a_truncate_that_is_ignored(whole: int | None) -> None:
    """Its rows stay, and give way to those that come again, also in a batch in parts; alone it is no change."""
    b = Bench(replace(target("a"), truncate="ignore"), replace(target("b", key=()), truncate="ignore"))
    b.whole = whole
    b.send(A, relation(B.oid, "b", identity="f"), truncate(A.oid, B.oid))
    assert b.stage() == {}
    b.send(insert(A.oid, 1, "x"), insert(A.oid, 2, "x"), insert(B.oid, 1, "x"), truncate(A.oid, B.oid))
    b.send(insert(A.oid, 1, "y"), insert(B.oid, 1, "x"), truncate(A.oid), insert(A.oid, 1, "z"), delete(A.oid, 3, None))
    found = b.stage()
    staged = {path: b.delta.staged[found[path].staged.directory] for path in found}
    assert not staged["a"][2]
    assert not staged["b"][2]
    assert sorted(row["v"] for row in staged["a"][1].images.to_pylist()) == ["x", "z"]
    assert sorted(staged["a"][1].deleted_keys.column("id").to_pylist()) == [1, 2, 3]
    expected = staged["a"][1].expected
    assert expected is not None
    assert sorted(expected.either.column("id").to_pylist()) == [1, 2]
    assert (expected.standing.num_rows, expected.free.num_rows) == (1, 0)
    assert staged["b"][1].images.num_rows == 2
    assert (found["a"].inserts, found["a"].deletes, found["b"].inserts) == (4, 1, 2)


SOFT = replace(
    target(
        "a",
        pa.field("id", pa.int64(), False),
        pa.field("v", pa.string()),
        pa.field("lsn", pa.int64()),
        pa.field("op", pa.string()),
        FIELD,
    ),
    soft_deletes=True,
    truncate="soft",
    metadata=(("lsn", "lsn"), ("op", "op")),
)


@pytest.mark.parametrize("whole", [None, 100])
def test_a_truncate_that_marks(whole: int | None) -> None:
    """It deletes what the batch has until then, with its own LSN; of other rows it is said what they get."""
    b = Bench(SOFT)
    b.whole = whole
    b.send(A, insert(A.oid, 1, "a"), update(A.oid, 2, "b"), delete(A.oid, 4, None), update(A.oid, 6, UNCHANGED))
    b.send(truncate(A.oid), insert(A.oid, 1, "c"), insert(A.oid, 3, "d"))
    b.send(truncate(A.oid, A.oid), insert(A.oid, 3, "e"), update(A.oid, 7, "missing"), insert(A.oid, 8, "f"))
    b.send(update(A.oid, 9, "moved", old=(8, None)))
    staged = b.stage()["a"]
    _, folded, replace_all = b.delta.staged[staged.staged.directory]
    assert not replace_all
    names = ("id", "v", "lsn", "op")
    assert sorted(tuple(row[name] for name in names) for row in folded.images.to_pylist()) == [
        (1, "c", 300, "D"),
        (2, "b", 200, "D"),
        (3, "e", 300, "I"),
        (8, "f", 400, "D"),
        (9, "moved", 400, "U"),
    ]
    masked = sorted(tuple(row[name] for name in names) for row in folded.masked.to_pylist())
    assert masked == [(4, None, 100, "D"), (6, None, 200, "D")]
    expected = folded.expected
    assert expected is not None
    found = [sorted(one.column("id").to_pylist()) for one in (expected.standing, expected.free, expected.either)]
    assert found == [[2, 4, 6], [1], [3, 8, 9]]
    assert folded.marks is not None
    assert [folded.marks[name].as_py() for name in ("lsn", "op")] == [200, "D"]
    assert staged.conflicts.counts == {ConflictType.UPDATE_MISSING: 1}
    assert (staged.inserts, staged.updates, staged.deletes) == (5, 4, 1)


@pytest.mark.parametrize("whole", [None, 100])
def test_a_truncate_that_marks_comes_alone(whole: int | None) -> None:
    b = Bench(SOFT, target("b"))
    b.whole = whole
    b.send(A, B, *(insert(B.oid, number, "x" * 50) for number in range(9)), truncate(A.oid))
    _, folded, replace_all = b.delta.staged[b.stage()["a"].staged.directory]
    assert (folded.images.num_rows, folded.deleted_keys.num_rows, replace_all) == (0, 0, False)
    assert folded.marks is not None
    assert folded.marks["lsn"].as_py() == 100


def test_a_truncate_after_an_alter_needs_no_new_column() -> None:
    """No row needs the column, so the table is not altered yet: the batch was refused, again and again."""
    b = Bench(target("a"), target("b", key=()))
    wider = (("id", INT8), ("v", TEXT), ("w", TEXT))
    b.send(A, insert(A.oid, 1, "x"), relation(A.oid, "a", wider), truncate(A.oid))
    b.send(relation(B.oid, "b", wider, identity="f"), truncate(B.oid))
    for found in b.stage().values():
        assert found.staged.replace_all
        assert b.delta.staged[found.staged.directory][1].images.num_rows == 0


def test_columns_go_by_name() -> None:
    b = Bench()
    b.send(relation(A.oid, "a", (("v", TEXT), ("id", INT8))), insert(A.oid, "x", 1))
    assert b.folded().images.to_pylist() == [{"id": 1, "v": "x"}]


def test_columns_that_only_the_target_has() -> None:
    fields = [pa.field("extra", pa.list_(pa.int8())), pa.field("id", pa.int64(), False), pa.field("v", pa.string())]
    b = Bench(target("a", *fields))
    b.send(A, insert(A.oid, 1, "x"), update(A.oid, 2, "y"), update(A.oid, 3, UNCHANGED, old=(4, None)))
    folded = b.folded()
    assert folded.images.to_pylist() == [{"extra": None, "id": 1, "v": "x"}]
    assert folded.masked.column_names[:3] == ["extra", "id", "v"]
    assert folded.masked.num_rows == 2


def test_a_definition_that_changed_holds_from_its_place_on() -> None:
    b = Bench(target("a", pa.field("id", pa.int64(), False), pa.field("v", pa.string()), pa.field("w", pa.string())))
    wider = relation(A.oid, "a", (("id", INT8), ("w", TEXT), ("v", TEXT)))
    b.send(A, insert(A.oid, 1, "v1"))
    b.send(insert(A.oid, 2, "v2"), wider, insert(A.oid, 3, "w3", "v3"), update(A.oid, 1, "w1", UNCHANGED))
    assert sorted(b.folded().images.to_pylist(), key=lambda row: row["id"]) == [
        {"id": 1, "v": "v1", "w": "w1"},
        {"id": 2, "v": "v2", "w": None},
        {"id": 3, "v": "v3", "w": "w3"},
    ]


def test_a_table_dropped_and_made_again_is_one_destination_in_order_of_time() -> None:
    """The newer oid may be the smaller one, since oids wrap around."""
    for old, new in ((20000, 16384), (16384, 20000)):
        b = Bench()
        b.send(relation(old, "a"), insert(old, 1, "old"), insert(old, 2, "old"))
        b.send(relation(new, "a"), update(new, 1, "new"), delete(new, 2, None))
        folded = b.folded()
        assert folded.images.to_pylist() == [{"id": 1, "v": "new"}], (old, new)


def test_a_value_that_does_not_fit_is_located() -> None:
    b = Bench()
    b.send(A, B, insert(A.oid, 1, "x"), xid=41)
    b.send(insert(B.oid, b"two", "x"), xid=42)
    error = b.fails(InvalidValue)
    assert error.context == (
        'processing remote data for replication origin "pg_16389" for replication target relation "public.b" '
        'column "id" in transaction 42, finished at 0/C0'
    )


@pytest.mark.parametrize("change", [update(A.oid, 1, "x"), delete(A.oid, 1, None)])
def test_a_row_must_be_named_by_the_key_that_the_target_has(change: Message) -> None:
    b = Bench(target("a", key=("v",)))
    b.send(A, insert(A.oid, 1, "x"))
    b.stage()
    b.delta.staged.clear()
    b.send(change)
    error = b.fails(NotInPrerequisiteState)
    assert error.message.startswith(
        "publisher did not send replica identity column expected by the logical replication target"
    )
    assert error.detail == "The publisher identifies rows by (id), the Delta table by (v)."


def test_missing_columns_are_named() -> None:
    b = Bench(target("a", pa.field("id", pa.int64())))
    b.send(A, insert(A.oid, 1, "x"))
    assert 'missing replicated column: "v"' in b.fails(NotInPrerequisiteState).message


def test_a_full_row_names_itself_without_a_key() -> None:
    b = Bench(target("a", key=()))
    b.send(relation(A.oid, "a", identity="f"), insert(A.oid, 1, "x"), delete(A.oid, 2, "y", kind="O"))
    folded = b.folded()
    assert folded.images.to_pylist() == [{"id": 1, "v": "x"}]
    assert folded.removed.num_rows == 1


def test_changes_without_a_definition_are_refused() -> None:
    b = Bench()
    b.send(insert(A.oid, 1, "x"))
    assert b.fails(NotInPrerequisiteState).message == "no relation map entry for remote relation ID 16384"
    b = Bench()
    b.send(insert(A.oid, 1, "x"), A, insert(A.oid, 2, "x"))
    assert "no relation map entry" in b.fails(NotInPrerequisiteState).message


def test_malformed_rows_are_a_protocol_violation() -> None:
    b = Bench()
    b.send(A, insert(A.oid, 1))
    b.fails(ProtocolViolation)


def test_one_table_that_fails_leaves_nothing_of_the_others() -> None:
    b = Bench()
    b.send(A, B, insert(A.oid, 1, "x"), insert(B.oid, b"two", "x"))
    b.fails(InvalidValue)


def test_columns_of_a_closed_table_are_not_told_by_name() -> None:
    """Of a table that was made anew under its name, say: a column that is left out may have any name there."""
    b = Bench(replace(target("a"), closed=True))
    b.send(A, insert(A.oid, 1, "secret"))
    error = b.fails(NotInPrerequisiteState)
    assert "which columns" in error.message
    assert "RESYNC TABLE a" in error.hint


@pytest.mark.parametrize("whole", [None, 2], ids=["at once", "in parts"])
def test_a_contested_table_that_only_spark_reads_is_not_looked_at(monkeypatch: pytest.MonkeyPatch, whole: Any) -> None:
    """Nothing is expected of it either, but two rows of the batch itself still must not have one key."""

    def refuse(*_: object) -> None:
        raise FeatureNotSupported("only Spark reads it")

    b = Bench(target("a"))
    b.contested = True
    b.whole = whole
    monkeypatch.setattr(Holding, "keys", refuse)
    b.send(A, insert(A.oid, 1, "x"), update(A.oid, 2, "y"), delete(A.oid, 3, None))
    folded = b.folded()
    assert folded.expected is None
    assert folded.missing is None
    assert sorted(folded.images.column("id").to_pylist()) == [1, 2]
    assert sorted(folded.deleted_keys.column("id").to_pylist()) == [2, 3]
    b.delta.staged.clear()
    b.send(insert(A.oid, 4, "x"), insert(A.oid, 4, "y"))
    assert "insert_exists" in str(b.fails(UniqueViolation))


@pytest.fixture
def small_arrays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrays of 60 kB instead of 2 GB, and blocks of frames of 5 kB."""
    monkeypatch.setattr(FrameLog.__init__, "__defaults__", (5_000,))
    concat_arrays = pa.concat_arrays

    def limited(arrays: Any) -> pa.Array:
        arrays = list(arrays)
        if sum(one.nbytes for one in arrays) > 60_000:
            raise pa.ArrowInvalid("offset overflow while concatenating arrays")
        return concat_arrays(arrays)

    monkeypatch.setattr(pa, "concat_arrays", limited)


LONG = "x" * 500
FULL = relation(16384, "a", identity="f")


def in_parts(*targets: TargetTable) -> Bench:
    b = Bench(*targets)
    b.whole = 20_000
    return b


@pytest.mark.usefixtures("small_arrays")
def test_a_transaction_that_no_array_holds_without_a_key() -> None:
    """Each row is added, and its copies are removed, with those that equal it: UPDATEs are divided."""
    b = in_parts(target("a", key=()))
    b.send(
        FULL,
        *(update(FULL.oid, n + 1, LONG, old=(n, LONG), kind="O") for n in range(200)),
        *(delete(FULL.oid, 500 + n, LONG, kind="O") for n in range(50)),
        *(insert(FULL.oid, 500 + n, LONG) for n in range(25)),
        update(FULL.oid, 900, LONG, old=(900, LONG), kind="O"),
    )
    found = b.stage()["a"]
    assert (found.inserts, found.updates, found.deletes) == (25, 201, 50)
    folded = b.delta.staged[found.staged.directory][1]
    assert folded.images.column("id").to_pylist() == [200]
    assert sorted(folded.removed.column("id").to_pylist()) == [0, *range(525, 550)]


@pytest.mark.usefixtures("small_arrays")
@pytest.mark.parametrize("by", [1000, 100])
def test_a_transaction_that_no_array_holds_moves_keys(by: int) -> None:
    """Keys between which rows move, directly or by others, are folded together; others are not."""
    b = in_parts(target("a"))
    b.send(A)
    for first in (150, 100, 50, 0):
        b.send(*(update(A.oid, n + by, LONG, old=(n, None)) for n in reversed(range(first, first + 50))))
    found = b.stage()["a"]
    assert found.updates == 200
    folded = b.delta.staged[found.staged.directory][1]
    assert sorted(folded.images.column("id").to_pylist()) == list(range(by, by + 200))
    assert sorted(folded.deleted_keys.column("id").to_pylist()) == sorted({*range(200), *range(by, by + 200)})


@pytest.mark.usefixtures("small_arrays")
@pytest.mark.parametrize("key", [("id",), ()])
def test_a_transaction_that_cannot_be_divided(key: tuple[str, ...]) -> None:
    """The table is named, and what helps."""
    b = in_parts(target("a", key=key))
    of = FULL if not key else A
    b.send(of)
    for _ in range(4):
        b.send(*(update(of.oid, 1, LONG, old=None if key else (1, LONG), kind="O") for _ in range(50)))
    error = b.fails(ProgramLimitExceeded)
    assert error.relid == 1
    assert error.sqlstate == "54000"
    assert error.message == 'the changes of table "a" that must be applied together are too large'
    assert "ALTER SUBSCRIPTION … RESYNC TABLE a" in error.hint


def test_masked_columns_are_masked_before_anything_looks_at_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys, too; a value that is not sent stays so.  Without the key, or with another one, nothing is staged."""
    key = b"sixteen bytes at least"
    rules = {"id": MaskRule("hash"), "v": MaskRule("redact"), "w": MaskRule("null")}
    fields = (pa.field("id", pa.string(), nullable=False), pa.field("v", pa.string()), pa.field("w", pa.int64()))
    b = Bench(replace(target("a", *fields), masks=Masks(rules, fingerprint_of(key))))
    of = relation(16384, "a", (("id", INT8), ("v", TEXT), ("w", TEXT)))
    b.send(of, insert(of.oid, 1, "x", "no number"), update(of.oid, 2, UNCHANGED, "9"), delete(of.oid, 3, None, None))
    for given in ("", "another key, as long as it"):
        monkeypatch.setenv(VARIABLE, given)
        b.fails(NotInPrerequisiteState)
    monkeypatch.setenv(VARIABLE, key.decode())
    folded = b.folded()
    one, two, three = (hmac.new(key, text, hashlib.sha256).hexdigest() for text in (b"1", b"2", b"3"))
    assert folded.images.to_pylist() == [{"id": one, "v": "***", "w": None}]
    assert [(row["id"], row["v"], row["w"]) for row in folded.masked.to_pylist()] == [(two, None, None)]
    assert three in folded.deleted_keys.column("id").to_pylist()
