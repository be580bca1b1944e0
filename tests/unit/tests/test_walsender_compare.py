"""The comparison of two decodings reports what differs for a subscriber, and nothing else."""

from __future__ import annotations

import struct

from pubsub.protocol.wire import U32
from tests.support.walsender_compare import differences, inconsistency
from tests.support.walsender_decodings import Message


def relation(columns: int, xid: int | None = None) -> Message:
    head = b"R" + (b"" if xid is None else U32.pack(xid)) + U32.pack(7) + b"public\0t\0d" + struct.pack(">H", columns)
    return Message(0, 0, head + b"".join(b"\0c%d\0" % n + struct.pack(">Ii", 23, -1) for n in range(columns)))


def row(lsn: int, columns: int, xid: int | None = None) -> Message:
    head = b"I" + (b"" if xid is None else U32.pack(xid)) + U32.pack(7) + b"N"
    return Message(lsn, 0, head + struct.pack(">H", columns) + b"n" * columns)


def stream(xid: int, *messages: Message) -> list[Message]:
    return [Message(0, 0, b"S" + U32.pack(xid) + b"\1"), *messages, Message(0, 0, b"E")]


def aborted(xid: int, subxid: int) -> Message:
    return Message(0, 0, b"A" + U32.pack(xid) + U32.pack(subxid))


def committed(xid: int) -> Message:
    return Message(0, 0, b"c" + U32.pack(xid) + bytes(25))


BEGIN = Message(0, 0, b"B" + bytes(20))
COMMIT = Message(0, 0, b"C" + bytes(25))
LOGICAL = Message(5, 0, b"M\1" + bytes(8) + b"p\0" + bytes(4))


def test_definitions_in_a_rolled_back_part_of_a_stream_are_ignored() -> None:
    told = [BEGIN, relation(1), row(1, 1), COMMIT]
    part = [*told, *stream(9, relation(2, 10), row(2, 2, 10)), aborted(9, 10), committed(9)]
    assert inconsistency([*part, BEGIN, row(3, 1), COMMIT]) == ""
    assert "a row of 2 columns" in inconsistency([*part, BEGIN, row(3, 2), COMMIT])


def test_definitions_in_a_stream_take_effect_when_it_is_applied() -> None:
    late = [*stream(9, relation(2, 9), row(2, 2, 9)), BEGIN, relation(1), row(1, 1), COMMIT, committed(9)]
    assert "a row of 1 columns" in inconsistency([*late, BEGIN, row(3, 1), COMMIT])
    assert inconsistency([*late, BEGIN, relation(1), row(3, 1), COMMIT]) == ""
    at_once = [
        BEGIN,
        relation(1),
        row(1, 1),
        COMMIT,
        *stream(9, relation(2, 9)),
        BEGIN,
        row(3, 1),
        COMMIT,
        committed(9),
    ]
    assert inconsistency(at_once) == ""
    assert "a row of 1 columns" in inconsistency(at_once, parallel=True)


def test_a_stream_has_an_end() -> None:
    assert "without an end" in inconsistency(stream(9, relation(1, 9), row(2, 1, 9)))


def test_a_message_and_the_next_change_may_be_exchanged() -> None:
    first = [BEGIN, relation(1), LOGICAL, row(5, 1), row(5, 1), COMMIT]
    assert differences(first, [BEGIN, relation(1), row(5, 1), row(5, 1), LOGICAL, COMMIT]) == ""
    assert differences(first, [BEGIN, relation(1), row(6, 1), LOGICAL, row(5, 1), COMMIT]) != ""


def test_messages_missing_at_the_end_of_a_stopped_server_are_no_difference() -> None:
    sent = [BEGIN, relation(1), row(5, 1), COMMIT]
    more = [*sent, BEGIN, row(6, 1), COMMIT]
    assert differences(more, sent, stopped=True) == ""
    assert differences(more, sent) != ""
    assert differences(sent, more, stopped=True) != ""
    assert differences([BEGIN, relation(1), row(6, 1), COMMIT, *more], sent, stopped=True) != ""


def test_a_message_that_was_sent_before_its_part_was_rolled_back_is_no_difference() -> None:
    begin = Message(0, 0, b"B" + bytes(16) + U32.pack(9))
    message = Message(5, 0, b"M" + U32.pack(9) + LOGICAL.data[1:])
    streamed = [*stream(9, relation(1, 9), row(2, 1, 9), message), committed(9)]
    taken_back = [*streamed[:-1], aborted(9, 10), committed(9)]
    at_once = [begin, relation(1), row(2, 1), COMMIT]
    assert differences(taken_back, at_once, whole=True) == ""
    assert differences(streamed, at_once, whole=True) != ""
    assert differences([*at_once[:-1], row(3, 1), COMMIT], taken_back, whole=True) != ""


def test_a_stream_without_changes_is_no_difference_behind_a_message_of_no_transaction_either() -> None:
    alone = Message(5, 0, b"M\0" + LOGICAL.data[2:])
    empty = [*stream(9), committed(9)]
    rows = [*stream(8, relation(1, 8), row(6, 1, 8)), committed(8)]
    assert differences([alone, *empty, *rows], [alone, *rows], whole=True) == ""
    assert differences([alone, *rows], [alone, *rows[:-1]], whole=True) != ""
    of_one = [*stream(9, Message(5, 0, b"M" + U32.pack(9) + LOGICAL.data[1:])), committed(9)]
    assert differences([*of_one, *rows], rows, whole=True) != ""


def test_a_server_may_send_less_of_a_prepared_transaction_that_is_rolled_back() -> None:
    def prepared(*messages: Message, xid: int = 9) -> list[Message]:
        begin = Message(0, 0, b"b" + bytes(24) + U32.pack(xid) + b"gid\0")
        return [begin, *messages, Message(0, 0, b"P" + bytes(25) + U32.pack(xid) + b"gid\0")]

    def rollback(xid: int = 9) -> Message:
        return Message(0, 0, b"r" + bytes(33) + U32.pack(xid) + b"gid\0")

    ours = [*prepared(relation(1), row(1, 1), row(2, 1)), rollback(), BEGIN, row(3, 1), COMMIT]
    theirs = [*prepared(relation(1), row(1, 1)), rollback(), BEGIN, row(3, 1), COMMIT]
    assert differences(ours, theirs) == ""
    assert "the server has" in differences(ours[:-4], theirs)
    # If it is committed every row counts, streamed or not.
    commit = Message(0, 0, b"K" + bytes(25) + U32.pack(9) + b"gid\0")
    assert differences([*ours[:5], commit], [*theirs[:4], commit]) != ""
    streamed = [
        *stream(9, relation(1, 9), row(1, 1, 9), row(2, 1, 9)),
        Message(0, 0, b"p" + bytes(25) + U32.pack(9) + b"gid\0"),
        commit,
    ]
    assert differences(streamed, [*ours[:5], commit], whole=True) == ""
    assert differences(streamed, [*theirs[:4], commit], whole=True) != ""
    # A server may send the end of a transaction that changed nothing.
    assert (
        differences([BEGIN, relation(1), row(1, 1), COMMIT], [rollback(7), BEGIN, relation(1), row(1, 1), COMMIT]) == ""
    )


def test_where_a_stream_was_aborted_is_compared() -> None:
    ours = [*stream(9, relation(1, 9), row(1, 1, 9)), aborted(9, 9), BEGIN, relation(1), row(3, 1), COMMIT]
    theirs = [Message(7, 0, m.data) if m.data[:1] == b"A" else m for m in ours]
    assert differences(ours, ours, whole=True) == ""
    assert "a stream's abort" in differences(ours, theirs, whole=True)
