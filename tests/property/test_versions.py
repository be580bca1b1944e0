"""Versions against a plain model: after each transaction of a random batch the publisher's rows are those that hold at its LSN."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any, cast

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from apply.batch import Batch, Transaction, Truncation
from apply.staging.emptied import with_deletions
from apply.staging.fold import fold
from apply.staging.own_columns import with_own
from pubsub.delta import versions
from pubsub.delta.table import TargetTable
from pubsub.delta.versions import ENDS, VALID_FROM_LSN, VALID_TO_LSN
from pubsub.delta.writers.changeset import BASE_PREFIX, UNCHANGED_PREFIX, Folded
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Column, Relation, write_message
from pubsub.protocol.rows import decode_changes, split_by_relation
from pubsub.reorderbuffer.log import FrameLog
from tests.property.test_fold import HEADER, KEYS, VALUES, History, Looked, Row, T, play, steps, values

AT_FIRST = 100
"""The LSN of the copy."""


@dataclass
class Sent:
    """Transactions as they were sent: for each where it ends, and the publisher's rows after it."""

    transactions: list[Transaction] = field(default_factory=list)
    snapshots: dict[int, dict[Row, Row]] = field(default_factory=dict)
    emptied: list[Truncation] = field(default_factory=list)

    def batch(self) -> Batch:
        batch = Batch({})
        batch.transactions.extend(self.transactions)
        return batch


def time_of(lsn: int) -> datetime.datetime:
    return datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(seconds=lsn)


def applied(folded: Folded, current: dict[Row, Row], width: int, schema: pa.Schema) -> list[Row]:
    """Return all rows of a table, with the `current` ones from the copy, after a writer has applied `folded` to it."""
    names = schema.names
    from_copy = {key: (*row, None, None, AT_FIRST, None) for key, row in current.items()}
    gone = folded.deleted_keys if folded.expected is None else folded.expected.standing
    left = dict(from_copy)
    rows: list[Row] = []
    for of_key in gone.to_pylist():
        row = left.pop(tuple(of_key.values())[:width])
        rows.append(tuple(of_key[name] if name in ENDS else value for name, value in zip(names, row, strict=True)))
    if folded.marks is not None:
        marks = {name: value.as_py() for name, value in folded.marks.items()}
        left = {
            key: tuple(marks.get(name, value) for name, value in zip(names, row, strict=True))
            for key, row in left.items()
        }
    rows += [*left.values(), *(tuple(row.values()) for row in folded.images.to_pylist())]
    for image in folded.masked.to_pylist():
        base = from_copy[tuple(image[f"{BASE_PREFIX}{place}"] for place in range(width))]
        own = list(image.values())[: len(schema)]
        rows.append(tuple(base[at] if image.get(f"{UNCHANGED_PREFIX}{at}") else value for at, value in enumerate(own)))
    return rows


def as_of(rows: list[Row], lsn: int, width: int) -> dict[Row, Row]:
    """Return the rows that hold at an LSN, by key, without the columns of scd2."""
    found: dict[Row, Row] = {}
    for *row, _, _, begun, ended in rows:
        if begun <= lsn and (ended is None or ended > lsn):
            assert tuple(row[:width]) not in found, "a key twice"
            found[tuple(row[:width])] = tuple(row)
    return found


@settings(max_examples=400, deadline=None)
@given(st.data(), st.sampled_from(sorted(KEYS)), st.booleans(), st.booleans(), st.booleans())
def test_the_rows_as_of_each_transaction(
    data: st.DataObject, kind: str, full: bool, truncates: bool, looked: bool
) -> None:
    key_fields, keys = KEYS[kind]
    width, names = len(key_fields), [f.name for f in key_fields]
    before = data.draw(st.dictionaries(st.sampled_from(keys), values, min_size=2, max_size=4))
    current = {key: key + value for key, value in before.items()}
    history = History(key_fields + VALUES, width, full, dict(current))
    sent = Sent(snapshots={AT_FIRST: dict(current)})
    for number, some in enumerate(data.draw(st.lists(steps, min_size=1, max_size=6))):
        first, lsn = len(history.sent), AT_FIRST + 10 * (number + 1)
        play(history, keys, some[: data.draw(st.integers(1, 5))], truncates=truncates, softly=True)
        sent.emptied += [Truncation(seq, (T,), number) for seq in history.emptied[len(sent.emptied) :]]
        sent.transactions.append(
            Transaction(number, Lsn(lsn - 1), Lsn(lsn), lsn * 1_000_000, first, len(history.sent), Lsn(lsn - 1))
        )
        sent.snapshots[lsn] = dict(history.table)
    schema = pa.schema([*history.fields, *versions.FIELDS])
    table = TargetTable("", schema, tuple(names), "public.t", versions=True)
    relation = Relation(T, "public", "t", "f", tuple(Column(0, f.name, Oid(25), -1) for f in history.fields))
    log = FrameLog(block_bytes=300)
    log.append([HEADER + write_message(message) for message in history.sent])
    decoded = decode_changes(split_by_relation(log.blocks()).get(T, []), relation, history.fields, key=names)
    batch = sent.batch()
    changes, leaving = with_own(decoded, table, batch)
    assert leaving is not None
    keywords: dict[str, Any] = {"full": full, "versions": True}
    if sent.emptied:
        changes, leaving, keywords["emptied"] = with_deletions(changes, leaving, table, batch, sent.emptied)
    folded = fold(changes, names, present=None, leaving=leaving, **keywords)
    if folded.expected is not None:
        standing, free = (
            {cast(Row, tuple(row.values())) for row in rows.select(names).to_pylist()}
            for rows in (folded.expected.standing, folded.expected.free)
        )
        assert not folded.expected.either.num_rows
        looked |= not standing <= current.keys() or bool(free & current.keys())
    if looked:
        folded = fold(changes, names, present=Looked(current), leaving=leaving, **keywords)
    assert folded.collisions is None
    rows = applied(folded, current, width, schema)
    for lsn, snapshot in sent.snapshots.items():
        assert as_of(rows, lsn, width) == snapshot, lsn
    place = {name: schema.names.index(name) for name in versions.NAMES}
    for row in rows:
        begun, ended = row[place[VALID_FROM_LSN]], row[place[VALID_TO_LSN]]
        assert row[place[versions.VALID_FROM]] == (None if begun == AT_FIRST else time_of(begun))
        assert row[place[versions.VALID_TO]] == (None if ended is None else time_of(ended))
        assert ended is None or begun < ended
    assert folded.inserts + folded.updates + folded.deletes == len(history.sent)
