"""Folding against a plain model: random histories, sent as a publisher sends them, give the model's table."""

from __future__ import annotations

import datetime
from collections import Counter
from dataclasses import dataclass, field
from decimal import Decimal
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from hypothesis import given, settings
from hypothesis import strategies as st

from apply.batch import Truncation
from apply.staging.emptied import with_deletions
from apply.staging.fold import fold
from apply.staging.own_columns import with_columns
from pubsub.delta import soft_deletes
from pubsub.delta.table import TargetTable
from pubsub.delta.writers.changeset import BASE_PREFIX, COUNT_COLUMN, OURS, UNCHANGED_PREFIX, Folded, Present
from pubsub.protocol.ids import Oid
from pubsub.protocol.pgoutput import UNCHANGED, Column, Delete, Insert, Relation, Update, write_message
from pubsub.protocol.rows import DELETE, decode_changes, split_by_relation
from pubsub.reorderbuffer.log import FrameLog

T = Oid(16384)
HEADER = b"w" + bytes(24)
Row = tuple[Any, ...]

KEYS: dict[str, tuple[list[pa.Field], list[Row]]] = {
    "int": ([pa.field("k", pa.int64())], [(key,) for key in range(5)]),
    "far apart": ([pa.field("k", pa.int64())], [(-(2**63),), (-1,), (0,), (2**62,), (2**63 - 1,)]),
    "text": ([pa.field("k", pa.string())], [("",), ("a",), ("b",), ("ä",), ("aa",)]),
    "composite": (
        [pa.field("k", pa.int64()), pa.field("l", pa.string()), pa.field("m", pa.int64())],
        [(1, "a", 2**62), (1, "b", 0), (-(2**62), "a", 2**62), (2, "a", -5), (2, "b", 0)],
    ),
    "bool": ([pa.field("k", pa.bool_()), pa.field("l", pa.int32())], [(a, b) for a in (True, False) for b in (0, 1)]),
    "composite, wide": (
        [pa.field("k", pa.int64()), pa.field("l", pa.int64())],
        [(a, b) for a in (0, 2**40) for b in (-(2**40), 7)],
    ),
}
_AT = datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.UTC)
KEYS |= {
    "decimal": (
        [pa.field("k", pa.decimal128(20, 2))],
        [(Decimal(value),) for value in ("0.00", "-0.01", "1.00", "999999999999999999.99")],
    ),
    "bytes": ([pa.field("k", pa.binary())], [(b"",), (b"\0",), (b"\0\0",), (b"\xff'",)]),
    "time and date": (
        [pa.field("k", pa.timestamp("us", "UTC")), pa.field("l", pa.date32())],
        [(_AT + datetime.timedelta(microseconds=us), datetime.date(day, 1, 1)) for us in (0, 1) for day in (1, 9999)],
    ),
}
VALUES = [pa.field("v", pa.string()), pa.field("w", pa.int32())]

text_of = {True: b"t", False: b"f"}


def text(value: Any) -> bytes | None:
    if value is None:
        return None
    if isinstance(value, bytes):
        return b"\\x" + value.hex().encode()
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%d %H:%M:%S.%f+00").encode()
    return text_of[value] if isinstance(value, bool) else str(value).encode()


@dataclass
class History:
    """The changes sent so far, and the table that PostgreSQL has after them."""

    fields: list[pa.Field]
    key_width: int
    full: bool
    table: dict[Row, Row]
    sent: list[Insert | Update | Delete] = field(default_factory=list)
    truncated_at: int | None = None
    emptied: list[int] = field(default_factory=list)  # where a TRUNCATE marked all rows as deleted
    gone: set[Row] = field(default_factory=set)  # keys that some change of the batch left without a row
    marked: dict[Row, Row] = field(
        default_factory=dict
    )  # rows that were deleted, with the number of the change that did it

    def old(self, row: Row) -> tuple[str, tuple[bytes | None, ...]]:
        shown = row if self.full else row[: self.key_width] + (None,) * (len(row) - self.key_width)
        return ("O" if self.full else "K"), tuple(map(text, shown))

    def insert(self, row: Row) -> None:
        self.sent.append(Insert(T, tuple(map(text, row))))
        self.table[row[: self.key_width]] = row
        self.gone.discard(row[: self.key_width])
        self.marked.pop(row[: self.key_width], None)

    def delete(self, key: Row) -> None:
        if key in self.table:
            self.marked[key] = (*self.table[key], _time(len(self.sent)))
        row = self.table.pop(key, (*key, *(None,) * len(VALUES)))
        self.sent.append(Delete(T, *self.old(row)))  # type: ignore[arg-type]
        self.gone.add(key)

    def update(self, key: Row, row: Row, hide: tuple[bool, ...]) -> None:
        """Update a row; `hide` marks the values that are not sent if they are unchanged."""
        present = key in self.table
        before = self.table.pop(key, (*key, *(None,) * len(VALUES)))
        new: list[Any] = list(map(text, row))
        for place, hidden in enumerate(hide, self.key_width):
            if hidden and before[place] == row[place]:
                new[place] = UNCHANGED
        moved = row[: self.key_width] != key
        old = self.old(before) if self.full or moved else (None, None)
        self.sent.append(Update(T, *old, tuple(new)))  # type: ignore[arg-type]
        if moved:
            self.gone.add(key)
        if present:
            if moved:
                self.marked[key] = (*before, _time(len(self.sent) - 1))
                self.marked.pop(row[: self.key_width], None)
            self.table[row[: self.key_width]] = row
            self.gone.discard(row[: self.key_width])

    def truncate_softly(self) -> None:
        self.emptied.append(len(self.sent))
        self.marked |= {key: (*row, _time_of_truncate(len(self.sent))) for key, row in self.table.items()}
        self.table.clear()

    def truncate(self) -> None:
        self.truncated_at = len(self.sent)
        self.table.clear()
        self.gone.clear()
        self.marked.clear()


@dataclass
class Kept(History):
    """The changes sent so far, and beside the publisher's table one to which no TRUNCATE is done."""

    kept: dict[Row, Row] = field(default_factory=dict)

    def insert(self, row: Row) -> None:
        super().insert(row)
        self.kept[row[: self.key_width]] = row

    def delete(self, key: Row) -> None:
        super().delete(key)
        self.kept.pop(key, None)

    def update(self, key: Row, row: Row, hide: tuple[bool, ...]) -> None:
        if key in self.table:
            self.kept.pop(key)
            self.kept[row[: self.key_width]] = row
        super().update(key, row, hide)

    def truncate(self) -> None:
        self.table.clear()


def _time(change: int) -> datetime.datetime:
    """Return when the transaction of a change was committed."""
    return _AT + datetime.timedelta(seconds=change)


def _time_of_truncate(before: int) -> datetime.datetime:
    """Return when the transaction of a TRUNCATE before this change was committed."""
    return _time(before) - datetime.timedelta(microseconds=1)


@dataclass
class Emptying:
    """Stands for the transaction of a TRUNCATE (batch.Transaction)."""

    before: int

    @property
    def committed_at(self) -> int:
        return round(_time_of_truncate(self.before).timestamp() * 1_000_000)


def applied(folded: Folded, target: dict[Row, Row], key_width: int, width: int) -> dict[Row, Row]:
    """Return `target` after a writer has applied `folded` to it."""
    result = {} if folded.truncated else dict(target)
    deleted = [tuple(row.values()) for row in folded.deleted_keys.to_pylist()]
    assert len(deleted) == len(set(deleted))
    for key in deleted:
        result.pop(key, None)
    rows = [tuple(row.values()) for row in folded.images.to_pylist()]
    for image in folded.masked.to_pylist():
        values = list(image.values())[:width]
        base = target[tuple(image[f"{BASE_PREFIX}{place}"] for place in range(key_width))]
        hidden = [place for place in range(width) if image.get(f"{UNCHANGED_PREFIX}{place}")]
        assert hidden
        for place in hidden:
            assert values[place] is None
            values[place] = base[place]
        rows.append(tuple(values))
    for row in rows:
        assert row[:key_width] not in result, "a key twice"
        result[row[:key_width]] = row
    if folded.truncated:
        assert not deleted
    assert folded.insert_only == (not deleted and not folded.masked.num_rows)
    return result


def folded_of(history: History, key: list[str] | None, present: Present | None = None) -> Folded:
    relation = Relation(T, "public", "t", "f", tuple(Column(0, f.name, Oid(25), -1) for f in history.fields))
    log = FrameLog(block_bytes=300)
    log.append([HEADER + write_message(message) for message in history.sent])
    changes = decode_changes(split_by_relation(log.blocks()).get(T, []), relation, history.fields, key=key)
    return fold(changes, key, full=history.full, truncate_before=history.truncated_at, present=present)


values = st.tuples(st.sampled_from([None, "", "x", "long " * 5]), st.sampled_from([None, 0, 1]))


mostly = st.sampled_from([True, True, True, False])
steps = st.lists(
    st.tuples(
        st.sampled_from(["insert", "update", "update", "move", "move", "delete", "truncate"]),
        st.integers(0, 31),
        st.integers(0, 3),
        values,
        st.tuples(mostly, mostly),  # not sent if unchanged
        st.tuples(mostly, mostly),  # unchanged
    ),
    min_size=5,
    max_size=20,
)


def play(history: History, keys: list[Row], chosen: list[Any], *, truncates: bool, softly: bool = False) -> None:
    """Turn the draws of `steps` into changes that a publisher could send."""
    key_width = history.key_width
    for action, pick, other, value, hide, keep in chosen:
        present = sorted(history.table)
        # mostly a key that the table has; otherwise a key that it may have had
        key = present[pick % len(present)] if present and pick < 24 else keys[pick % len(keys)]
        row = history.table.get(key, key + value)
        changed = tuple(old if kept else new for old, new, kept in zip(row[key_width:], value, keep, strict=True))
        known = key in history.table or key in history.gone or history.truncated_at is not None or history.emptied
        if action == "insert":
            free = [each for each in keys if each not in history.table]
            if free:
                history.insert(free[pick % len(free)] + value)
        elif action == "update" and known:
            history.update(key, key + changed, hide)
        elif action == "move" and known:
            to = keys[other]
            history.update(key, (key if to in history.table else to) + changed, hide)
        elif action == "delete":
            history.delete(key)
        elif action == "truncate" and truncates:
            (history.truncate_softly if softly else history.truncate)()


@settings(max_examples=300, deadline=None)
@given(st.data(), st.sampled_from(sorted(KEYS)), st.booleans(), st.booleans())
def test_folding_agrees_with_the_model_on_keyed_tables(
    data: st.DataObject, kind: str, full: bool, truncates: bool
) -> None:
    key_fields, keys = KEYS[kind]
    key_width = len(key_fields)
    before = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=2, max_size=4))
    target = {key: key + value for key, value in before.items()}
    history = History(key_fields + VALUES, key_width, full, dict(target))
    play(history, keys, data.draw(steps), truncates=truncates)
    folded = folded_of(history, [f.name for f in key_fields])
    assert applied(folded, target, key_width, len(history.fields)) == history.table
    assert folded.inserts + folded.updates + folded.deletes == len(history.sent)
    assert folded.removed.num_rows == 0


class Looked:
    """Looks up live rows (changeset.Present)."""

    def __init__(self, target: dict[Row, Row]) -> None:
        self._target = target

    def keys(self, keys: pa.Table) -> Any:
        return np.array([OURS if tuple(row.values()) in self._target else 0 for row in keys.to_pylist()])

    def copies(self, rows: pa.Table) -> Any:
        raise AssertionError


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(sorted(KEYS)), st.booleans(), st.booleans())
def test_rows_that_stay_after_a_truncate_give_way(data: st.DataObject, kind: str, full: bool, looked: bool) -> None:
    """Whatever the table has from before: a row that arrives takes the place of one that stands."""
    key_fields, keys = KEYS[kind]
    width, names = len(key_fields), [f.name for f in key_fields]
    before = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=2, max_size=4))
    stay: dict[Row, Row] = {key: (*key, "stays", 0) for key in keys if key not in before}
    live = {key: key + value for key, value in before.items()}
    target = live | stay
    history = Kept(key_fields + VALUES, width, full, live, kept=dict(target))
    play(history, keys, data.draw(steps), truncates=True)
    relation = Relation(T, "public", "t", "f", tuple(Column(0, f.name, Oid(25), -1) for f in history.fields))
    log = FrameLog(block_bytes=300)
    log.append([HEADER + write_message(message) for message in history.sent])
    changes = decode_changes(split_by_relation(log.blocks()).get(T, []), relation, history.fields, key=names)
    folded = fold(changes, names, full=full, present=Looked(target) if looked else None, gives_way=True)
    assert folded.collisions is None
    if folded.expected is not None:
        standing = {tuple(row.values()) for row in folded.expected.standing.to_pylist()}
        assert not folded.expected.free.num_rows
        if not standing <= target.keys():
            folded = fold(changes, names, full=full, present=Looked(target), gives_way=True)
    assert applied(folded, target, width, len(history.fields)) == history.kept


@settings(max_examples=300, deadline=None)
@given(
    st.data(), st.sampled_from(sorted(KEYS)), st.booleans(), st.sampled_from(["no", "follow", "soft"]), st.booleans()
)
def test_deleted_rows_that_stay(data: st.DataObject, kind: str, full: bool, truncates: str, looked: bool) -> None:
    """With the values that they had and the time when they went, until their key is inserted again."""
    key_fields, keys = KEYS[kind]
    width, names = len(key_fields), [f.name for f in key_fields]
    before = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=2, max_size=4))
    live = {key: key + value for key, value in before.items()}
    marked = {key: (*key, "was", 0, _time(-1)) for key in keys if key not in live}
    history = History(key_fields + VALUES, width, full, dict(live), marked=dict(marked))
    play(history, keys, data.draw(steps), truncates=truncates != "no", softly=truncates == "soft")
    relation = Relation(T, "public", "t", "f", tuple(Column(0, f.name, Oid(25), -1) for f in history.fields))
    log = FrameLog(block_bytes=300)
    log.append([HEADER + write_message(message) for message in history.sent])
    changes = decode_changes(split_by_relation(log.blocks()).get(T, []), relation, history.fields, key=names)
    schema = pa.schema([*history.fields, soft_deletes.FIELD])
    table = TargetTable("", schema, tuple(names), "public.t", soft_deletes=True)
    ended = pa.array([_time(int(seq)) for seq in changes.seq], soft_deletes.FIELD.type)
    deleted_at = pc.if_else(pa.array(changes.op == DELETE), ended, pa.scalar(None, ended.type))
    marked_changes = with_columns(changes, table, {soft_deletes.DELETED_AT: deleted_at})
    leaving = {soft_deletes.DELETED_AT: ended}
    keywords: dict[str, Any] = {"full": full, "truncate_before": history.truncated_at}
    if history.emptied:
        batch: Any = SimpleNamespace(transactions=[Emptying(seq) for seq in history.emptied])
        emptied = [Truncation(seq, (T,), place) for place, seq in enumerate(history.emptied)]
        marked_changes, leaving, keywords["emptied"] = with_deletions(marked_changes, leaving, table, batch, emptied)
    keywords["leaving"] = leaving
    folded = fold(marked_changes, names, present=None, **keywords)
    standing, free = set[Row](), set[Row]()
    if folded.expected is not None:
        standing, free = (
            {tuple(row.values()) for row in rows.to_pylist()}
            for rows in (folded.expected.standing, folded.expected.free)
        )
    if looked or not standing <= live.keys() or free & live.keys():
        folded = fold(marked_changes, names, present=Looked(live), **keywords)
        free = set()
    elif folded.expected is not None:
        free |= {tuple(row.values()) for row in folded.expected.either.to_pylist()}
    assert folded.collisions is None
    assert folded.inserts + folded.updates + folded.deletes == len(history.sent)
    result = {} if folded.truncated else {key: (*row, None) for key, row in live.items()} | marked
    for key in free:
        result.pop(key, None)
    gone = folded.deleted_keys if folded.expected is None else folded.expected.standing
    for row in gone.to_pylist():
        result.pop(tuple(row.values()), None)
    if folded.marks is not None:
        (value,) = (one.as_py() for one in folded.marks.values())
        result = {key: (*row[:-1], value) if row[-1] is None else row for key, row in result.items()}
    rows = [tuple(row.values()) for row in folded.images.to_pylist()]
    for image in folded.masked.to_pylist():
        filled = list(image.values())[: len(schema)]
        base = live[tuple(image[f"{BASE_PREFIX}{place}"] for place in range(width))]
        for place in range(width, len(history.fields)):
            if image.get(f"{UNCHANGED_PREFIX}{place}"):
                filled[place] = base[place]
        rows.append(tuple(filled))
    for row in rows:
        assert row[:width] not in result, "a key twice"
        result[row[:width]] = row
    assert result == {key: (*row, None) for key, row in history.table.items()} | history.marked


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_tables_without_a_key(data: st.DataObject) -> None:
    """Of equal rows, NULLs among their values, each change takes one copy."""
    before = Counter(data.draw(st.lists(values, max_size=6)))
    rows = Counter(before)
    history = History(VALUES, 0, True, {})
    for action, value, hide in data.draw(
        st.lists(st.tuples(st.sampled_from("iiuuuddt"), values, st.booleans()), max_size=25)
    ):
        present = sorted(rows.elements(), key=repr)
        if action == "i":
            rows[value] += 1
            history.sent.append(Insert(T, tuple(map(text, value))))
        elif action == "t" and hide:
            rows.clear()
            history.truncated_at = len(history.sent)
        elif action in "ud" and present:
            old = data.draw(st.sampled_from(present))
            rows[old] -= 1
            if action == "u":
                rows[value] += 1
                new = tuple(UNCHANGED if hide and a == b else text(b) for a, b in zip(old, value, strict=True))
                history.sent.append(Update(T, "O", tuple(map(text, old)), new))
            else:
                history.sent.append(Delete(T, "O", tuple(map(text, old))))
    folded = folded_of(history, None)
    result = Counter() if folded.truncated else Counter(before)
    removed = folded.removed.to_pylist()
    distinct = [tuple(row[f.name] for f in VALUES) for row in removed]
    assert len(distinct) == len(set(distinct))
    for row, values_of in zip(removed, distinct, strict=True):
        assert row[COUNT_COLUMN] > 0
        result[values_of] -= row[COUNT_COLUMN]
        assert result[values_of] >= 0
    added = Counter(tuple(row.values()) for row in folded.images.to_pylist())
    assert not added.keys() & set(distinct)
    assert +(result + added) == +rows
    assert folded.insert_only == (not removed)
