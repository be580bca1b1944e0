"""pgoutput's codec on bytes that PostgreSQL 18.4 sent, and on bytes that must be refused."""

from __future__ import annotations

import pytest

from pubsub.errors import ProtocolViolation
from pubsub.protocol.copyboth import XLOG_HEADER
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import (
    MAX_COLUMNS,
    UNCHANGED,
    Begin,
    BeginPrepare,
    Binary,
    Column,
    Commit,
    CommitPrepared,
    Delete,
    Insert,
    LogicalMessage,
    Message,
    Oid,
    Origin,
    Prepare,
    Relation,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    Type,
    Update,
    Xid,
    read_message,
    write_message,
)

T = Oid(0x4005)
COLUMNS = (
    Column(1, "id", Oid(23), -1),
    Column(0, "name", Oid(25), -1),
    Column(0, "m", Oid(0x4001), -1),
    Column(0, "big", Oid(25), -1),
    Column(0, "b", Oid(17), -1),
)
COLUMNS_SENT = (
    "00050169640000000017ffffffff006e616d650000000019ffffffff006d0000004001ffffffff006269670000000019ffffffff"
    "00620000000011ffffffff"
)

# The bytes in hexadecimal, whether inside a stream, whether with streaming = parallel, and the message.
CAPTURED: list[tuple[str, bool, bool, Message]] = [
    (
        "42000000000172c518000303c854aed093000002f3",
        False,
        False,
        Begin(Lsn(0x172C518), 0x303C854AED093, Xid(755)),
    ),
    (
        "4300000000000172c518000000000172c548000303c854aed093",
        False,
        False,
        Commit(0, Lsn(0x172C518), Lsn(0x172C548), 0x303C854AED093),
    ),
    ("4f0000000000000abc656c7365776865726500", False, False, Origin(Lsn(0xABC), "elsewhere")),
    (
        "52000040057075626c696300740064" + COLUMNS_SENT,
        False,
        False,
        Relation(T, "public", "t", "d", COLUMNS),
    ),
    (
        "52000002fb000040057075626c696300740064" + COLUMNS_SENT,
        True,
        False,
        Relation(T, "public", "t", "d", COLUMNS, Xid(763)),
    ),
    ("59000040017075626c6963006d6f6f6400", False, False, Type(Oid(0x4001), "public", "mood")),
    ("59000002fb000040017075626c6963006d6f6f6400", True, True, Type(Oid(0x4001), "public", "mood", Xid(763))),
    ("49000040054e00057400000001326e6e6e6e", False, False, Insert(T, (b"2", None, None, None, None))),
    (
        "49000002fb000040054e000562000000040000000162000000016e6e6e6e",
        True,
        False,
        Insert(T, (Binary(b"\0\0\0\1"), Binary(b"n"), None, None, None), Xid(763)),
    ),
    (
        "55000040054e000574000000013174000000016274000000037361647574000000065c7830306666",
        False,
        False,
        Update(T, None, None, (b"1", b"b", b"sad", UNCHANGED, b"\\x00ff")),
    ),
    ("44000040054b00057400000001336e6e6e6e", False, False, Delete(T, "K", (b"3", None, None, None, None))),
    ("5400000002030000400500004012", False, False, Truncate((T, Oid(0x4012)), True, True)),
    ("54000002fd000000010000004012", True, False, Truncate((Oid(0x4012),), False, False, Xid(765))),
    (
        "4d00000000000172d8706e6f6e000000000178",
        False,
        False,
        LogicalMessage(False, Lsn(0x172D870), "non", b"x"),
    ),
    (
        "4d000002fb0100000000017f4c0070000000000873747265616d6564",
        True,
        False,
        LogicalMessage(True, Lsn(0x17F4C00), "p", b"streamed", Xid(763)),
    ),
    ("53000002fb01", False, False, StreamStart(Xid(763), True)),
    ("45", True, False, StreamStop()),
    ("41000002fb000002fc", False, False, StreamAbort(Xid(763), Xid(764))),
    (
        "41000002fb000002fc00000000017f48d0000303c854af0f3d",
        False,
        True,
        StreamAbort(Xid(763), Xid(764), Lsn(0x17F48D0), 0x303C854AF0F3D),
    ),
    (
        "63000002fb0000000000017f4c0000000000017f4c80000303c854af10d4",
        False,
        False,
        StreamCommit(Xid(763), 0, Lsn(0x17F4C00), Lsn(0x17F4C80), 0x303C854AF10D4),
    ),
    (
        "6200000000018545280000000001854620000303c854af21f0000002ff67696420c3a900",
        False,
        False,
        BeginPrepare(Lsn(0x1854528), Lsn(0x1854620), 0x303C854AF21F0, Xid(767), "gid é"),
    ),
    (
        "500000000000018545280000000001854620000303c854af21f0000002ff67696420c3a900",
        False,
        False,
        Prepare(0, Lsn(0x1854528), Lsn(0x1854620), 0x303C854AF21F0, Xid(767), "gid é"),
    ),
    (
        "4b0000000000018546200000000001854660000303c854af229e000002ff67696420c3a900",
        False,
        False,
        CommitPrepared(0, Lsn(0x1854620), Lsn(0x1854660), 0x303C854AF229E, Xid(767), "gid é"),
    ),
    (
        "7200000000000185479800000000018547d0000303c854af2333000303c854af236e00000300673200",
        False,
        False,
        RollbackPrepared(0, Lsn(0x1854798), Lsn(0x18547D0), 0x303C854AF2333, 0x303C854AF236E, Xid(768), "g2"),
    ),
    (
        "700000000000018b3ff800000000018b4108000303c854af316000000301673300",
        False,
        False,
        StreamPrepare(0, Lsn(0x18B3FF8), Lsn(0x18B4108), 0x303C854AF3160, Xid(769), "g3"),
    ),
]


@pytest.mark.parametrize(("captured", "streaming", "parallel", "message"), CAPTURED)
def test_messages_captured_from_postgresql(captured: str, streaming: bool, parallel: bool, message: Message) -> None:
    data = bytes.fromhex(captured)
    assert read_message(data, streaming=streaming, parallel=parallel) == message
    assert write_message(message) == data
    assert read_message(bytes(XLOG_HEADER) + data, streaming=streaming, parallel=parallel, start=XLOG_HEADER) == message


def test_an_old_row_comes_before_the_new_one() -> None:
    message = Update(Oid(7), "O", (b"a", None), (None, UNCHANGED))
    data = b"U\0\0\0\7O\0\2t\0\0\0\1anN\0\2nu"
    assert read_message(data) == message
    assert write_message(message) == data
    with pytest.raises(ProtocolViolation):
        read_message(b"U\0\0\0\7N\0\2nuO\0\2t\0\0\0\1an")


def test_an_empty_namespace_is_pg_catalog() -> None:
    data = b"Y\0\0\0\x17\0int4\0"
    message = Type(Oid(23), "pg_catalog", "int4")
    assert read_message(data) == message
    assert write_message(message) == data


def test_column_flags_give_the_replica_identity() -> None:
    assert [column.in_replica_identity for column in COLUMNS] == [True, False, False, False, False]


BEGIN = bytes.fromhex("42000000000172c518000303c854aed093000002f3")
REFUSED = [
    (b"", "no data left in message"),
    (b"Z", 'invalid logical replication message type "??? (90)"'),
    (b"B" + bytes(20), "final_lsn is not set"),
    (BEGIN[:-1], "insufficient data left in message"),
    (BEGIN + b"\0", "invalid message format"),
    (b"C\1" + bytes(24), "unrecognized flags 1"),
    (b"S\0\0\0\0\1", "invalid transaction ID in streamed replication transaction"),
    (b"S\0\0\0\1\2", "unrecognized value 2 for first segment"),
    (b"O" + bytes(8) + b"name without its end", "invalid string in message"),
    (b"O" + bytes(8) + b"\xff\0", 'invalid byte sequence for encoding "UTF8"'),
    (b"R\0\0\0\1s\0t\0x\0\0", "unrecognized replica identity 'x'"),
    (b"R\0\0\0\1s\0t\0d\0\1", "a relation cannot have 1 columns here"),
    (b"R\0\0\0\1s\0t\0d\0\1\2a\0" + bytes(8), "unrecognized flags 2"),
    (b"I\0\0\0\1N\xff\xff" + b"n" * 65535, "a tuple cannot have 65535 columns here"),
    (b"I\0\0\0\1N\0\2n", "a tuple cannot have 2 columns here"),
    (b"I\0\0\0\1N\0\1t\xff\xff\xff\xff", "insufficient data left in message"),
    (b"I\0\0\0\1N\0\1x", "unrecognized data representation type 120"),
    (b"I\0\0\0\1K\0\0", "expected a new tuple, got 75"),
    (b"U\0\0\0\1X\0\0", "expected an old tuple, got 88"),
    (b"U\0\0\0\1K\0\0O\0\0", "expected a new tuple, got 79"),
    (b"D\0\0\0\1N\0\0", "expected an old tuple, got 78"),
    (b"T\xff\xff\xff\xff\0\0\0\0\1", "4294967295 relations do not fill the message"),
    (b"T\0\0\0\0\4", "unrecognized flags 4"),
    (b"M\2" + bytes(13), "unrecognized flags 2"),
    (b"M\0" + bytes(8) + b"p\0\0\0\0\2x", "insufficient data left in message"),
    (b"b" + bytes(28) + b"g\0", "prepare_lsn is not set"),
    (b"P\0" + bytes(7) + b"\1" + bytes(20) + b"g\0", "end_lsn is not set"),
    (b"b" + b"\1" * 28 + b"g" * 200 + b"\0", "invalid string in message"),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_malformed_bytes_are_a_protocol_violation(data: bytes, message: str) -> None:
    with pytest.raises(ProtocolViolation) as caught:
        read_message(data)
    assert caught.value.message == message
    assert caught.value.sqlstate == "08P01"


def test_a_streamed_change_without_a_transaction_is_refused() -> None:
    with pytest.raises(ProtocolViolation, match="invalid transaction ID"):
        read_message(b"I\0\0\0\0\0\0\0\1N\0\0", streaming=True)


def test_the_error_names_the_message() -> None:
    with pytest.raises(ProtocolViolation) as caught:
        read_message(b"c\0\0\0\1")
    assert caught.value.context == 'while reading message type "STREAM COMMIT"'


@pytest.mark.parametrize(
    "message",
    [
        Begin(Lsn(1), 0, Xid(1 << 32)),
        Begin(Lsn(1), 1 << 63, Xid(1)),
        Origin(Lsn(1), "a\0b"),
        Insert(Oid(1), (None,) * (MAX_COLUMNS + 1)),
        Relation(Oid(1), "s", "t", "d", COLUMNS * 400),
        Insert(Oid(1), (), Xid(0)),
        StreamAbort(Xid(1), Xid(1), Lsn(1), None),
        Update(Oid(1), "K", None, ()),
        Prepare(0, Lsn(1), Lsn(2), 0, Xid(1), "é" * 100),
    ],
)
def test_values_out_of_the_protocols_range_are_not_written(message: Message) -> None:
    with pytest.raises(ValueError, match=r"\w"):
        write_message(message)
