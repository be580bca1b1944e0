"""Reading and writing pgoutput's messages, protocol versions 1 to 4, without I/O.

A transaction arrives in one of these forms:

    B Begin         … changes …  C Commit                              version 1
    S StreamStart   … changes …  E StreamStop   (again and again)      version 2: sent while it is still open
                                 c StreamCommit | A StreamAbort
    b BeginPrepare  … changes …  P Prepare,  later K CommitPrepared | r RollbackPrepared          version 3
    S … E           …            p StreamPrepare, later K | r                                     version 3

Changes are I, U, D, T.  R Relation precedes a table's first change, and the first one after its definition changed;
Y Type precedes a Relation with a column of a type that is not built in; O Origin follows Begin or StreamStart; M comes
from pg_logical_emit_message, also outside any transaction.

The bytes alone do not tell two things, so the caller of `read_message` must.  `streaming`: between StreamStart and
StreamStop the messages R, Y, I, U, D, T and M carry the id of their (sub)transaction after the type byte.  `parallel`:
a StreamAbort carries its LSN and time only if the subscriber requested streaming 'parallel' (version 4).  On writing,
both follow from the message.

Follows proto.c (logicalrep_read_*, logicalrep_write_*) but is stricter: it refuses trailing bytes, unknown flags, and
counts too large for the message.  The hot path does not read rows this way: rows.py decodes them by columns.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from struct import Struct
from typing import Final, assert_never

from pubsub.errors import ProtocolViolation
from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.messages import (
    COLUMN_IN_REPLICA_IDENTITY,
    MAX_COLUMNS,
    MAX_GID_BYTES,
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
    OldKind,
    Origin,
    Prepare,
    Relation,
    ReplicaIdentity,
    RollbackPrepared,
    StreamAbort,
    StreamCommit,
    StreamPrepare,
    StreamStart,
    StreamStop,
    Truncate,
    TupleData,
    Type,
    Unchanged,
    Update,
    Value,
)
from pubsub.protocol.wire import U8, U16, U32, U64, Reader, write_string

__all__ = [
    "COLUMN_IN_REPLICA_IDENTITY",
    "MAX_COLUMNS",
    "MAX_GID_BYTES",
    "UNCHANGED",
    "Begin",
    "BeginPrepare",
    "Binary",
    "Column",
    "Commit",
    "CommitPrepared",
    "Delete",
    "Insert",
    "LogicalMessage",
    "Message",
    "Oid",
    "OldKind",
    "Origin",
    "Prepare",
    "Relation",
    "ReplicaIdentity",
    "RollbackPrepared",
    "StreamAbort",
    "StreamCommit",
    "StreamPrepare",
    "StreamStart",
    "StreamStop",
    "Truncate",
    "TupleData",
    "Type",
    "Unchanged",
    "Update",
    "Value",
    "Xid",
    "read_message",
    "write_message",
]

_PG_CATALOG: Final = "pg_catalog"
_MIN_COLUMN_BYTES: Final = 10  # flags, the NUL of an empty name, type, modifier
_TRUNCATE_CASCADE: Final = 1
_TRUNCATE_RESTART_SEQS: Final = 2
_MESSAGE_TRANSACTIONAL: Final = 1

_NULL, _UNCHANGED, _TEXT, _BINARY = b"nutb"
_NEW, _OLD, _KEY = b"NOK"

_BEGIN: Final = Struct(">QqI")
_COMMIT: Final = Struct(">BQQq")
_COLUMN_TYPE: Final = Struct(">Ii")
_TRUNCATE: Final = Struct(">IB")
_LSN_TIME: Final = Struct(">Qq")
_BEGIN_PREPARE: Final = Struct(">QQqI")
_PREPARED: Final = Struct(">BQQqI")
_ROLLBACK_PREPARED: Final = Struct(">BQQqqI")


def read_message(data: bytes, *, streaming: bool = False, parallel: bool = False, start: int = 0) -> Message:
    """Read the one message that fills `data` from `start` to its end.

    `streaming`: the message is inside a stream block, where changes carry their transaction's id.  `parallel`: the
    subscriber requested streaming 'parallel'.  `start`: with copyboth.XLOG_HEADER a frame is read without copying its
    payload.  Raises nothing but ProtocolViolation, whatever the bytes are.
    """
    if start >= len(data):
        raise ProtocolViolation("no data left in message")
    kind = data[start]
    message: Message
    if (control := _CONTROL.get(kind)) is not None:
        name, read = control
        reader = Reader(data, start + 1, name)
        message = read(reader)
    elif (change := _CHANGES.get(kind)) is not None:
        name, read_change = change
        reader = Reader(data, start + 1, name)
        message = read_change(reader, _read_xid(reader) if streaming else None)
    elif kind == _STREAM_ABORT:
        reader = Reader(data, start + 1, "STREAM ABORT")
        message = _read_stream_abort(reader, parallel)
    else:
        raise ProtocolViolation(f'invalid logical replication message type "??? ({kind})"')
    reader.end()
    return message


def write_message(message: Message) -> bytes:
    """Return the bytes of `message`, with the transaction's id if `xid` is set; a StreamAbort's LSN and time if set.

    Raises ValueError for a value that the protocol cannot carry.
    """
    try:
        return _write(message)
    except struct.error as error:
        raise ValueError(f"a field out of range: {error}") from error


# Parts of several messages


def _read_xid(reader: Reader) -> Xid:
    """Read a streamed transaction's id; refuse 0 (worker.c: handle_streamed_transaction)."""
    xid = reader.u32()
    if xid == 0:
        raise reader.fail("invalid transaction ID in streamed replication transaction")
    return Xid(xid)


def _write_xid(xid: Xid | None) -> bytes:
    if xid is None:
        return b""
    if xid == 0:
        raise ValueError("a streamed transaction has an id")
    return U32.pack(xid)


def _read_flags(reader: Reader, flags: int, known: int = 0) -> int:
    if flags & ~known:
        raise reader.fail(f"unrecognized flags {flags}")
    return flags


def _read_set_lsn(reader: Reader, lsn: int, what: str) -> Lsn:
    """Return the LSN; refuse 0."""
    if lsn == 0:
        raise reader.fail(f"{what} is not set")
    return Lsn(lsn)


def _read_namespace(reader: Reader) -> str:
    """Read a namespace; an empty name stands for pg_catalog (proto.c: logicalrep_read_namespace)."""
    return reader.string() or _PG_CATALOG


def _write_namespace(name: str) -> bytes:
    return write_string("" if name == _PG_CATALOG else name)


def _read_tuple(reader: Reader) -> TupleData:
    count = reader.u16()
    if count > MAX_COLUMNS or count > reader.remaining:
        raise reader.fail(f"a tuple cannot have {count} columns here")
    return tuple([_read_value(reader) for _ in range(count)])


def _write_tuple(values: TupleData) -> bytes:
    if len(values) > MAX_COLUMNS:
        raise ValueError(f"a tuple cannot have {len(values)} columns")
    parts = [U16.pack(len(values))]
    for value in values:
        if value is None:
            parts.append(b"n")
        elif isinstance(value, bytes):
            parts += (b"t", U32.pack(len(value)), value)
        elif isinstance(value, Binary):
            parts += (b"b", U32.pack(len(value.data)), value.data)
        else:
            parts.append(b"u")
    return b"".join(parts)


def _read_value(reader: Reader) -> Value:
    kind = reader.u8()
    if kind == _TEXT:
        return reader.take(reader.u32())
    if kind == _NULL:
        return None
    if kind == _UNCHANGED:
        return UNCHANGED
    if kind == _BINARY:
        return Binary(reader.take(reader.u32()))
    raise reader.fail(f"unrecognized data representation type {kind}")


# Transactions


def _read_begin(reader: Reader) -> Begin:
    final_lsn, commit_time, xid = reader.fields(_BEGIN)
    return Begin(_read_set_lsn(reader, final_lsn, "final_lsn"), commit_time, Xid(xid))


def _read_commit(reader: Reader) -> Commit:
    flags, commit_lsn, end_lsn, commit_time = reader.fields(_COMMIT)
    return Commit(_read_flags(reader, flags), Lsn(commit_lsn), Lsn(end_lsn), commit_time)


def _read_origin(reader: Reader) -> Origin:
    return Origin(reader.lsn(), reader.string())


def _read_stream_start(reader: Reader) -> StreamStart:
    return StreamStart(_read_xid(reader), reader.flag("first segment"))


def _read_stream_stop(reader: Reader) -> StreamStop:
    return StreamStop()


def _read_stream_commit(reader: Reader) -> StreamCommit:
    xid = _read_xid(reader)
    flags, commit_lsn, end_lsn, commit_time = reader.fields(_COMMIT)
    return StreamCommit(xid, _read_flags(reader, flags), Lsn(commit_lsn), Lsn(end_lsn), commit_time)


def _read_stream_abort(reader: Reader, parallel: bool) -> StreamAbort:
    xid, subxid = _read_xid(reader), _read_xid(reader)
    if not parallel:
        return StreamAbort(xid, subxid)
    abort_lsn, abort_time = reader.fields(_LSN_TIME)
    return StreamAbort(xid, subxid, Lsn(abort_lsn), abort_time)


def _write_stream_abort(message: StreamAbort) -> bytes:
    head = b"A" + _write_xid(message.xid) + _write_xid(message.subxid)
    if message.abort_lsn is None and message.abort_time is None:
        return head
    if message.abort_lsn is None or message.abort_time is None:
        raise ValueError("a StreamAbort has both an LSN and a time, or neither")
    return head + _LSN_TIME.pack(message.abort_lsn, message.abort_time)


def _read_begin_prepare(reader: Reader) -> BeginPrepare:
    prepare_lsn, end_lsn, prepare_time, xid = reader.fields(_BEGIN_PREPARE)
    return BeginPrepare(
        _read_set_lsn(reader, prepare_lsn, "prepare_lsn"),
        _read_set_lsn(reader, end_lsn, "end_lsn"),
        prepare_time,
        Xid(xid),
        reader.string(MAX_GID_BYTES),
    )


def _read_prepared(reader: Reader, first: str) -> tuple[int, Lsn, Lsn, int, Xid, str]:
    """Read the fields that P, p and K share; `first` names the first LSN (proto.c: logicalrep_read_prepare_common)."""
    flags, lsn, end_lsn, time, xid = reader.fields(_PREPARED)
    return (
        _read_flags(reader, flags),
        _read_set_lsn(reader, lsn, first),
        _read_set_lsn(reader, end_lsn, "end_lsn"),
        time,
        Xid(xid),
        reader.string(MAX_GID_BYTES),
    )


def _write_prepared(kind: bytes, message: Prepare | StreamPrepare) -> bytes:
    m = message
    fields = _PREPARED.pack(m.flags, m.prepare_lsn, m.end_lsn, m.prepare_time, m.xid)
    return kind + fields + write_string(m.gid, MAX_GID_BYTES)


def _read_prepare(reader: Reader) -> Prepare:
    return Prepare(*_read_prepared(reader, "prepare_lsn"))


def _read_stream_prepare(reader: Reader) -> StreamPrepare:
    return StreamPrepare(*_read_prepared(reader, "prepare_lsn"))


def _read_commit_prepared(reader: Reader) -> CommitPrepared:
    return CommitPrepared(*_read_prepared(reader, "commit_lsn"))


def _read_rollback_prepared(reader: Reader) -> RollbackPrepared:
    flags, prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid = reader.fields(_ROLLBACK_PREPARED)
    return RollbackPrepared(
        _read_flags(reader, flags),
        _read_set_lsn(reader, prepare_end_lsn, "prepare_end_lsn"),
        _read_set_lsn(reader, rollback_end_lsn, "rollback_end_lsn"),
        prepare_time,
        rollback_time,
        Xid(xid),
        reader.string(MAX_GID_BYTES),
    )


# Messages that carry a transaction's id in a stream block


def _read_relation(reader: Reader, xid: Xid | None) -> Relation:
    oid = Oid(reader.u32())
    namespace = _read_namespace(reader)
    name = reader.string()
    replica_identity = _read_replica_identity(reader)
    count = reader.u16()
    if count > MAX_COLUMNS or count * _MIN_COLUMN_BYTES > reader.remaining:
        raise reader.fail(f"a relation cannot have {count} columns here")
    columns = tuple([_read_column(reader) for _ in range(count)])
    if len({column.name for column in columns}) < count:
        raise reader.fail("a relation has two columns of one name")
    return Relation(oid, namespace, name, replica_identity, columns, xid)


def _write_relation(message: Relation) -> bytes:
    if len(message.columns) > MAX_COLUMNS:
        raise ValueError(f"a relation cannot have {len(message.columns)} columns")
    parts = [
        b"R",
        _write_xid(message.xid),
        U32.pack(message.oid),
        _write_namespace(message.namespace),
        write_string(message.name),
        message.replica_identity.encode("ascii"),
        U16.pack(len(message.columns)),
    ]
    for column in message.columns:
        parts += (
            U8.pack(column.flags),
            write_string(column.name),
            _COLUMN_TYPE.pack(column.type_oid, column.type_modifier),
        )
    return b"".join(parts)


def _read_replica_identity(reader: Reader) -> ReplicaIdentity:
    match chr(reader.u8()):
        case "d" | "n" | "f" | "i" as identity:
            return identity
        case other:
            raise reader.fail(f"unrecognized replica identity {other!a}")


def _read_column(reader: Reader) -> Column:
    flags = _read_flags(reader, reader.u8(), COLUMN_IN_REPLICA_IDENTITY)
    name = reader.string()
    type_oid, type_modifier = reader.fields(_COLUMN_TYPE)
    return Column(flags, name, Oid(type_oid), type_modifier)


def _read_type(reader: Reader, xid: Xid | None) -> Type:
    return Type(Oid(reader.u32()), _read_namespace(reader), reader.string(), xid)


def _read_insert(reader: Reader, xid: Xid | None) -> Insert:
    relation = Oid(reader.u32())
    _read_new_mark(reader, reader.u8())
    return Insert(relation, _read_tuple(reader), xid)


def _read_update(reader: Reader, xid: Xid | None) -> Update:
    relation = Oid(reader.u32())
    old_kind: OldKind | None = None
    old: TupleData | None = None
    kind = reader.u8()
    if kind != _NEW:
        old_kind = _read_old_kind(reader, kind)
        old = _read_tuple(reader)
        kind = reader.u8()
    _read_new_mark(reader, kind)
    return Update(relation, old_kind, old, _read_tuple(reader), xid)


def _write_update(message: Update) -> bytes:
    head = b"U" + _write_xid(message.xid) + U32.pack(message.relation)
    if message.old_kind is not None and message.old is not None:
        head += message.old_kind.encode("ascii") + _write_tuple(message.old)
    elif message.old_kind is not None or message.old is not None:
        raise ValueError("an Update has both an old tuple and its kind, or neither")
    return head + b"N" + _write_tuple(message.new)


def _read_delete(reader: Reader, xid: Xid | None) -> Delete:
    relation = Oid(reader.u32())
    old_kind = _read_old_kind(reader, reader.u8())
    return Delete(relation, old_kind, _read_tuple(reader), xid)


def _read_old_kind(reader: Reader, kind: int) -> OldKind:
    if kind == _KEY:
        return "K"
    if kind == _OLD:
        return "O"
    raise reader.fail(f"expected an old tuple, got {kind}")


def _read_new_mark(reader: Reader, kind: int) -> None:
    if kind != _NEW:
        raise reader.fail(f"expected a new tuple, got {kind}")


def _read_truncate(reader: Reader, xid: Xid | None) -> Truncate:
    count, flags = reader.fields(_TRUNCATE)
    _read_flags(reader, flags, _TRUNCATE_CASCADE | _TRUNCATE_RESTART_SEQS)
    if count * U32.size != reader.remaining:
        raise reader.fail(f"{count} relations do not fill the message")
    relations = tuple([Oid(reader.u32()) for _ in range(count)])
    return Truncate(relations, bool(flags & _TRUNCATE_CASCADE), bool(flags & _TRUNCATE_RESTART_SEQS), xid)


def _write_truncate(message: Truncate) -> bytes:
    flags = _TRUNCATE_CASCADE * message.cascade | _TRUNCATE_RESTART_SEQS * message.restart_identity
    head = b"T" + _write_xid(message.xid) + _TRUNCATE.pack(len(message.relations), flags)
    return head + b"".join([U32.pack(oid) for oid in message.relations])


def _read_logical_message(reader: Reader, xid: Xid | None) -> LogicalMessage:
    flags = _read_flags(reader, reader.u8(), _MESSAGE_TRANSACTIONAL)
    lsn = reader.lsn()
    prefix = reader.string()
    return LogicalMessage(flags == _MESSAGE_TRANSACTIONAL, lsn, prefix, reader.take(reader.u32()), xid)


def _write_logical_message(message: LogicalMessage) -> bytes:
    flags = _MESSAGE_TRANSACTIONAL if message.transactional else 0
    head = b"M" + _write_xid(message.xid) + U8.pack(flags) + U64.pack(message.lsn)
    return head + write_string(message.prefix) + U32.pack(len(message.content)) + message.content


# Dispatch; the names are those of proto.c: logicalrep_message_type


_STREAM_ABORT: Final = ord("A")

_CONTROL: Final[dict[int, tuple[str, Callable[[Reader], Message]]]] = {
    ord("B"): ("BEGIN", _read_begin),
    ord("C"): ("COMMIT", _read_commit),
    ord("O"): ("ORIGIN", _read_origin),
    ord("S"): ("STREAM START", _read_stream_start),
    ord("E"): ("STREAM STOP", _read_stream_stop),
    ord("c"): ("STREAM COMMIT", _read_stream_commit),
    ord("b"): ("BEGIN PREPARE", _read_begin_prepare),
    ord("P"): ("PREPARE", _read_prepare),
    ord("p"): ("STREAM PREPARE", _read_stream_prepare),
    ord("K"): ("COMMIT PREPARED", _read_commit_prepared),
    ord("r"): ("ROLLBACK PREPARED", _read_rollback_prepared),
}

_CHANGES: Final[dict[int, tuple[str, Callable[[Reader, Xid | None], Message]]]] = {
    ord("R"): ("RELATION", _read_relation),
    ord("Y"): ("TYPE", _read_type),
    ord("I"): ("INSERT", _read_insert),
    ord("U"): ("UPDATE", _read_update),
    ord("D"): ("DELETE", _read_delete),
    ord("T"): ("TRUNCATE", _read_truncate),
    ord("M"): ("MESSAGE", _read_logical_message),
}


def _write(message: Message) -> bytes:
    match message:
        case Begin(final_lsn, commit_time, xid):
            return b"B" + _BEGIN.pack(final_lsn, commit_time, xid)
        case Commit(flags, commit_lsn, end_lsn, commit_time):
            return b"C" + _COMMIT.pack(flags, commit_lsn, end_lsn, commit_time)
        case Origin(commit_lsn, name):
            return b"O" + U64.pack(commit_lsn) + write_string(name)
        case Relation():
            return _write_relation(message)
        case Type(oid, namespace, name, change_xid):
            return b"Y" + _write_xid(change_xid) + U32.pack(oid) + _write_namespace(namespace) + write_string(name)
        case Insert(relation, new, change_xid):
            return b"I" + _write_xid(change_xid) + U32.pack(relation) + b"N" + _write_tuple(new)
        case Update():
            return _write_update(message)
        case Delete(relation, old_kind, old, change_xid):
            head = b"D" + _write_xid(change_xid) + U32.pack(relation)
            return head + old_kind.encode("ascii") + _write_tuple(old)
        case Truncate():
            return _write_truncate(message)
        case LogicalMessage():
            return _write_logical_message(message)
        case StreamStart(xid, first_segment):
            return b"S" + _write_xid(xid) + (b"\1" if first_segment else b"\0")
        case StreamStop():
            return b"E"
        case StreamCommit(xid, flags, commit_lsn, end_lsn, commit_time):
            return b"c" + _write_xid(xid) + _COMMIT.pack(flags, commit_lsn, end_lsn, commit_time)
        case StreamAbort():
            return _write_stream_abort(message)
        case BeginPrepare(prepare_lsn, end_lsn, prepare_time, xid, gid):
            fields = _BEGIN_PREPARE.pack(prepare_lsn, end_lsn, prepare_time, xid)
            return b"b" + fields + write_string(gid, MAX_GID_BYTES)
        case Prepare():
            return _write_prepared(b"P", message)
        case StreamPrepare():
            return _write_prepared(b"p", message)
        case CommitPrepared(flags, commit_lsn, end_lsn, commit_time, xid, gid):
            fields = _PREPARED.pack(flags, commit_lsn, end_lsn, commit_time, xid)
            return b"K" + fields + write_string(gid, MAX_GID_BYTES)
        case RollbackPrepared(flags, prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid, gid):
            fields = _ROLLBACK_PREPARED.pack(flags, prepare_end_lsn, rollback_end_lsn, prepare_time, rollback_time, xid)
            return b"r" + fields + write_string(gid, MAX_GID_BYTES)
        case _:
            assert_never(message)
