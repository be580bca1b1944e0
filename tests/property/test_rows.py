"""Columns from decode_changes, against the codec that reads one message at a time."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pubsub.errors import InvalidValue, ProtocolViolation
from pubsub.protocol.ids import Oid
from pubsub.protocol.pgoutput import (
    UNCHANGED,
    Binary,
    Column,
    Delete,
    Insert,
    Relation,
    TupleData,
    Update,
    read_message,
    write_message,
)
from pubsub.protocol.rows import Changes, decode_changes, split_by_relation
from pubsub.reorderbuffer.log import FrameLog

HEADER = b"w" + bytes(24)
NAMES = ("a", "b", "c")
RELATIONS = {
    oid: Relation(Oid(oid), "public", f"t{oid}", "d", tuple(Column(0, name, Oid(25), -1) for name in NAMES))
    for oid in (16384, 16385, 4_000_000_000)
}
TARGETS = [pa.field(name, pa.string()) for name in NAMES]

texts = st.none() | st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=20).map(
    str.encode
)
old_tuples = st.tuples(texts, texts, texts)
new_values = texts | st.just(UNCHANGED)
new_tuples = st.tuples(new_values, new_values, new_values)
oids = st.sampled_from([Oid(oid) for oid in RELATIONS])
old_kinds = st.sampled_from(["K", "O"])
messages = st.one_of(
    st.builds(Insert, oids, old_tuples),
    st.builds(Update, oids, st.none(), st.none(), new_tuples),
    st.builds(Update, oids, old_kinds, old_tuples, new_tuples),
    st.builds(Delete, oids, old_kinds, old_tuples),
)


def row(values: TupleData | None) -> list[Any]:
    """Return a row as text columns hold it; a value sent in binary keeps its bytes."""
    sent = [value.data if isinstance(value, Binary) else value for value in values or (None,) * len(NAMES)]
    return [value.decode() if isinstance(value, bytes) else None for value in sent]


def completed(message: Insert | Update | Delete) -> TupleData | None:
    """Return the new row, with unchanged values filled in from the old tuple."""
    if isinstance(message, Delete):
        return None
    if isinstance(message, Insert) or message.old is None:
        return message.new
    # What is unchanged is not NULL: an old row's NULL only says that it was not sent.
    held = [UNCHANGED if value is None else value for value in message.old]
    return tuple(b if a is UNCHANGED else a for a, b in zip(message.new, held, strict=True))


def rows(columns: dict[str, Any], count: int) -> list[list[Any]]:
    if not columns:
        return [[None] * len(NAMES)] * count
    return [list(values) for values in zip(*(columns[name].to_pylist() for name in NAMES), strict=True)]


@settings(max_examples=150, deadline=None)
@given(st.lists(messages, max_size=30), st.integers(1, 400), st.integers(1, 5))
def test_columns_hold_what_the_messages_hold(
    sent: list[Insert | Update | Delete], block_bytes: int, at_once: int
) -> None:
    log = FrameLog(block_bytes)
    frames = [HEADER + write_message(message) for message in sent]
    for first in range(0, len(frames), at_once):
        log.append(frames[first : first + at_once])
    pieces = split_by_relation(log.blocks())
    assert set(pieces) == {message.relation for message in sent}
    for oid, relation in RELATIONS.items():
        mine = [(seq, message) for seq, message in enumerate(sent) if message.relation == oid]
        changes: Changes = decode_changes(pieces.get(oid, []), relation, TARGETS)
        assert changes.seq.tolist() == [seq for seq, _ in mine]
        assert bytes(changes.op).decode() == "".join(type(message).__name__[0] for _, message in mine)
        new = [completed(message) for _, message in mine]
        assert rows(changes.new, len(mine)) == [row(values) for values in new]
        for place, name in enumerate(NAMES):
            expected = [values is not None and values[place] is UNCHANGED for values in new]
            mask = changes.unchanged.get(name)
            assert (mask.tolist() if mask is not None else [False] * len(mine)) == expected
        assert rows(changes.old, len(mine)) == [row(getattr(message, "old", None)) for _, message in mine]
        kinds = [getattr(message, "old_kind", None) for _, message in mine]
        assert [chr(kind) if kind else None for kind in changes.old_kind] == kinds


@settings(max_examples=300, deadline=None)
@given(
    st.lists(messages, min_size=1, max_size=5),
    st.lists(
        st.tuples(st.integers(0, 10_000), st.integers(0, 255) | st.sampled_from(b"tnuKONIUDb")), min_size=1, max_size=3
    ),
    st.integers(0, 4),
)
def test_damaged_bytes_are_refused_or_read_as_the_codec_reads_them(
    sent: list[Insert | Update | Delete], damage: list[tuple[int, int]], victim: int
) -> None:
    frames = [bytearray(HEADER + write_message(message)) for message in sent]
    frame = frames[victim % len(frames)]
    for place, byte in damage:
        frame[25 + place % (len(frame) - 25)] = byte
    log = FrameLog()
    log.append([bytes(each) for each in frames])
    damaged = bytes(frame[25:])
    try:
        decoded = {
            oid: decode_changes(found, RELATIONS[oid], TARGETS)
            for oid, found in split_by_relation(log.blocks()).items()
            if oid in RELATIONS
        }
    except (ProtocolViolation, InvalidValue):
        return
    relation = int.from_bytes(damaged[1:5])
    if damaged[:1] not in (b"I", b"U", b"D") or relation not in decoded:
        return
    message = read_message(damaged)
    changes = decoded[relation]
    at = changes.seq.tolist().index(victim % len(frames))
    assert isinstance(message, Insert | Update | Delete)
    assert rows(changes.new, changes.count)[at] == row(completed(message))
    assert rows(changes.old, changes.count)[at] == row(getattr(message, "old", None))
