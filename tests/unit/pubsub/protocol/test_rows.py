"""Frames to columns: each kind of message, each kind of value, and malformed bytes."""

from __future__ import annotations

import dataclasses
import struct
import traceback
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pubsub.errors import ProtocolViolation
from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import (
    UNCHANGED,
    Begin,
    Binary,
    Column,
    Delete,
    Insert,
    Message,
    Relation,
    Update,
    write_message,
)
from pubsub.protocol.rows import Changes, InvalidField, concat_changes, decode_changes, split_by_relation
from pubsub.reorderbuffer.log import FrameBlock

T = Oid(16384)
COLUMNS = (Column(1, "id", Oid(23), -1), Column(0, "note", Oid(25), -1), Column(0, "big", Oid(25), -1))
RELATION = Relation(T, "public", "t", "d", COLUMNS)
TARGETS = [pa.field("id", pa.int32()), pa.field("note", pa.string()), pa.field("big", pa.string())]
HEADER = b"w" + bytes(24)


def block(*messages: Message) -> FrameBlock:
    return FrameBlock.pack([HEADER + write_message(message) for message in messages])


def decode(blocks: list[FrameBlock], relation: Relation = RELATION, targets: Any = TARGETS, **options: Any) -> Changes:
    return decode_changes(split_by_relation(blocks)[relation.oid], relation, targets, **options)


def lists(columns: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: column.to_pylist() for name, column in columns.items()}


ALL = (
    Insert(T, (b"1", b"one", b"")),
    Update(T, None, None, (b"1", None, UNCHANGED)),
    Update(T, "K", (b"1", None, None), (b"2", b"two", UNCHANGED)),
    Delete(T, "K", (b"2", None, None)),
    Update(T, "O", (b"3", b"old", b"BIG"), (b"3", b"new", b"b")),
    Delete(T, "O", (b"4", None, b"BIG")),
)


def check_all(changes: Changes) -> None:
    assert bytes(changes.op) == b"IUUDUD"
    assert bytes(changes.old_kind) == b"\0\0KKOO"
    assert lists(changes.new) == {
        "id": [1, 1, 2, None, 3, None],
        "note": ["one", None, "two", None, "new", None],
        "big": ["", None, None, None, "b", None],
    }
    assert {name: mask.tolist() for name, mask in changes.unchanged.items()} == {
        "big": [False, True, True, False, False, False]
    }
    assert lists(changes.old) == {
        "id": [None, None, 1, 2, 3, 4],
        "note": [None, None, None, None, "old", None],
        "big": [None, None, None, None, "BIG", "BIG"],
    }
    for column in (*changes.new.values(), *changes.old.values()):
        column.validate(full=True)


def test_every_kind_of_change_and_value() -> None:
    check_all(decode([block(*ALL)]))


def test_the_same_from_a_block_for_each_frame() -> None:
    check_all(decode([block(message) for message in ALL]))


def test_pieces_joined_and_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pubsub.protocol.rows._PIECE_BYTES", 1)
    check_all(decode([block(message) for message in ALL]))
    check_all(decode([block(*ALL[:3]), block(*ALL[3:])]))


def test_only_the_key_of_old_tuples_is_read_when_asked() -> None:
    changes = decode([block(*ALL)], key=["id"])
    assert lists(changes.old)["id"] == [None, None, 1, 2, 3, 4]
    assert "note" not in changes.old


def test_unchanged_values_come_from_an_old_tuple_that_holds_them() -> None:
    """Under REPLICA IDENTITY FULL the old tuple has all values, otherwise the key's, with NULLs for the others.

    The mark does not tell which of both: a partition is marked as its root is, and has its own identity.
    """
    full = Update(T, "O", (b"3", None, b"BIG"), (b"4", UNCHANGED, UNCHANGED))
    key = Update(T, "K", (b"3", None, None), (UNCHANGED, UNCHANGED, b"b"))
    for options in ({}, {"key": ["id"]}):
        changes = decode([block(*ALL, full, key)], **options)
        assert lists(changes.new)["id"][-2:] == [4, 3]
        assert lists(changes.new)["note"][-2:] == [None, None]
        assert lists(changes.new)["big"][-2:] == ["BIG", "b"]
        assert "id" not in changes.unchanged
        assert changes.unchanged["note"].tolist() == [False] * 6 + [True, True]
        assert ("big" in changes.old) == (not options)


def test_frames_other_than_row_changes_are_numbered_too() -> None:
    begin = Begin(Lsn(1), 0, Xid(7))
    keepalive = FrameBlock.pack([b"k" + bytes(17)])
    other = dataclasses.replace(ALL[0], relation=Oid(9))
    pieces = split_by_relation([block(begin, ALL[0], other), keepalive, block(other, ALL[1])], first_seq=100)
    assert sorted(pieces) == [9, T]
    assert decode_changes(pieces[T], RELATION, TARGETS).seq.tolist() == [101, 105]
    assert decode_changes(pieces[9], RELATION, TARGETS).seq.tolist() == [102, 104]
    assert split_by_relation([]) == {}
    assert split_by_relation([keepalive, FrameBlock.pack([])]) == {}


def test_columns_that_are_not_replicated_are_stepped_over() -> None:
    changes = decode([block(*ALL)], targets=[TARGETS[0], None, pa.field("renamed", pa.string())])
    assert list(changes.new) == ["id", "renamed"]
    assert changes.new["renamed"].to_pylist() == ["", None, None, None, "b", None]


def test_no_changes() -> None:
    changes = decode_changes([], RELATION, TARGETS)
    assert changes.count == 0
    assert {name: column.type for name, column in changes.new.items()} == {f.name: f.type for f in TARGETS}


def test_a_relation_without_columns() -> None:
    bare = Relation(T, "public", "bare", "f", ())
    changes = decode([block(Insert(T, ()), Delete(T, "O", ()))], bare, [])
    assert bytes(changes.op) == b"ID"
    with pytest.raises(ProtocolViolation):
        decode([block(ALL[0])], bare, [])


def test_large_values() -> None:
    large = b"x" * (5 << 20)
    changes = decode([block(Insert(T, (b"1", large, b"y"))), block(Insert(T, (b"2", b"z", large)))])
    assert [len(text) for text in changes.new["note"].to_pylist()] == [len(large), 1]


def test_deletes_alone() -> None:
    changes = decode([block(Delete(T, "K", (b"2", None, None)))])
    assert lists(changes.new) == {"id": [None], "note": [None], "big": [None]}
    assert lists(changes.old)["id"] == [2]


def test_concat_keeps_what_only_one_piece_has() -> None:
    first = decode([block(*ALL[:1])])
    check_all(concat_changes([first, decode([block(*ALL[1:])])]))


def test_binary_transfer_alone_and_beside_text() -> None:
    """A prepared transaction may have been sent before the subscription was altered."""

    def binary(message: Any) -> Any:
        def sent(row: Any) -> Any:
            if row is None:
                return None
            first = Binary(struct.pack(">i", int(row[0]))) if isinstance(row[0], bytes) else row[0]
            return first, *(Binary(value) if isinstance(value, bytes) else value for value in row[1:])

        parts = {name: sent(getattr(message, name)) for name in ("old", "new") if hasattr(message, name)}
        return dataclasses.replace(message, **parts)

    in_binary = [binary(message) for message in ALL]
    check_all(decode([block(*in_binary)]))
    mixed = decode([block(*ALL, *in_binary)])
    alone = decode([block(*ALL, *ALL)])
    assert lists(mixed.new) == lists(alone.new)
    assert lists(mixed.old) == lists(alone.old)
    with pytest.raises(InvalidField) as caught:
        decode(
            [
                block(
                    Delete(T, "K", (Binary(struct.pack(">i", 77)), None, None)), Insert(T, (b"1", b"", Binary(b"\xff")))
                )
            ]
        )
    assert caught.value.key == "(id)=(1)"


def test_a_bad_value_names_its_column_and_change() -> None:
    messages = [*ALL, Insert(T, (b"x", b"", b""))]
    with pytest.raises(InvalidField) as caught:
        decode_changes(split_by_relation([block(*messages)], first_seq=10)[T], RELATION, TARGETS)
    assert (caught.value.column, caught.value.seq, caught.value.sqlstate) == ("id", 16, "22003")
    assert caught.value.context == 'column "id" of relation "public.t"'
    messages = [*ALL, Delete(T, "K", (b"3000000000", None, None)), *ALL]
    with pytest.raises(InvalidField) as caught:
        decode([block(*messages)])
    assert caught.value.seq == 6
    assert caught.value.key == "(id)=(3000000000)"


def test_a_hidden_value_is_in_no_error() -> None:
    """Neither as the value that is refused, nor as the key of its row, nor in what the error comes from."""
    for row, hidden in (((b"77", b"bad \xff", b""), "note"), ((b"secret", b"", b""), "id")):
        with pytest.raises(InvalidField) as caught:
            decode_changes(split_by_relation([block(Insert(T, row))])[T], RELATION, TARGETS, hidden={hidden})
        shown = "".join(traceback.format_exception(caught.value)) + caught.value.key
        assert "masked value" in shown
        assert "bad" not in shown
        assert "secret" not in shown
        assert ("77" in shown) is (hidden != "id")


@pytest.mark.parametrize(
    "message",
    [
        Insert(T, (b"1", b"", UNCHANGED)),
        Insert(T, (Binary(b"1"), b"", b"")),
        Insert(T, (b"1", b"")),
        Insert(T, (b"1", b"", b"", b"")),
        Update(T, "O", (b"1", b"", UNCHANGED), (b"1", b"", b"")),
        Update(T, "K", (b"1",), (b"1", b"", b"")),
        Delete(T, "K", ()),
    ],
)
def test_malformed_tuples_are_a_protocol_violation(message: Message) -> None:
    for messages in ([message], [*ALL, message], [message, *ALL]):
        with pytest.raises(ProtocolViolation):
            decode([block(*messages)])


@pytest.mark.parametrize("cut", ALL)
def test_a_change_cut_anywhere_or_followed_by_more(cut: Message) -> None:
    """Whatever follows, a value is never read from the next frame's bytes."""
    whole = HEADER + write_message(cut)
    rest = [HEADER + write_message(message) for message in ALL]
    for frame in (*(whole[:end] for end in range(len(HEADER) + 1, len(whole))), whole + b"\0", whole + whole[25:]):
        for frames in ([frame], [frame, *rest], [*rest, frame]):
            with pytest.raises(ProtocolViolation):
                decode_changes(split_by_relation([FrameBlock.pack(frames)])[T], RELATION, TARGETS)


@pytest.mark.parametrize("mark", [b"N", b"X", b"K", b"O"])
def test_wrong_marks(mark: bytes) -> None:
    tuple_bytes = write_message(ALL[0])[6:]
    for kind, right in ((b"I", b"N"), (b"D", b"KO")):
        frame = HEADER + kind + write_message(ALL[0])[1:5] + mark + tuple_bytes
        if mark in right:
            continue
        with pytest.raises(ProtocolViolation):
            decode([FrameBlock.pack([frame])])


def test_a_block_whose_lengths_are_wrong() -> None:
    with pytest.raises(ValueError, match="lengths"):
        split_by_relation([FrameBlock(HEADER, np.array([24], np.uint32))])
