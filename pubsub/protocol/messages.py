"""pgoutput's messages as records, one class per message; pgoutput.py reads and writes them.

Times are microseconds since 2000-01-01 UTC (copyboth.py converts them).  An `…end_lsn` is the position after a WAL
record, any other LSN the record's start.  `flags` is 0 in every version so far.  In messages that can occur in a
stream block, `xid` is the id of the (sub)transaction that made the change, and None outside a block.

Follows logicalproto.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn

MAX_COLUMNS: Final = 1600
"""The most columns of a table (htup_details.h: MaxHeapAttributeNumber)."""
MAX_GID_BYTES: Final = 199
"""The most bytes of a prepared transaction's name (xact.h: GIDSIZE, less its NUL)."""

COLUMN_IN_REPLICA_IDENTITY: Final = 1


class Unchanged(Enum):
    """Marks a TOASTed value that an UPDATE did not change and the publisher did not send."""

    UNCHANGED = "u"

    def __repr__(self) -> str:
        return self.name


UNCHANGED: Final = Unchanged.UNCHANGED


@dataclass(frozen=True, slots=True)
class Binary:
    """A value in its type's binary format (typsend)."""

    data: bytes


Value = bytes | Binary | Unchanged | None
"""A column's value: text as bytes, Binary, UNCHANGED, or None for NULL."""
TupleData = tuple[Value, ...]
OldKind = Literal["K", "O"]
"""An old tuple's contents: 'K': the replica identity's columns, others NULL; 'O': the row (REPLICA IDENTITY FULL)."""
ReplicaIdentity = Literal["d", "n", "f", "i"]
"""Default, nothing, full, index (pg_class.relreplident)."""


@dataclass(frozen=True, slots=True)
class Begin:
    """`final_lsn` is the commit record's LSN: the finish LSN that ALTER SUBSCRIPTION … SKIP takes."""

    final_lsn: Lsn
    commit_time: int
    xid: Xid


@dataclass(frozen=True, slots=True)
class Commit:
    """`end_lsn` is the commit record's end, exclusive: where replication continues."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The publisher itself received the transaction from the origin `name`, where it committed at `commit_lsn`."""

    commit_lsn: Lsn
    name: str


@dataclass(frozen=True, slots=True)
class Column:
    flags: int
    name: str
    type_oid: Oid
    type_modifier: int

    @property
    def in_replica_identity(self) -> bool:
        return bool(self.flags & COLUMN_IN_REPLICA_IDENTITY)


@dataclass(frozen=True, slots=True)
class Relation:
    """A table's definition: its published columns in the order of the tuples."""

    oid: Oid
    namespace: str
    name: str
    replica_identity: ReplicaIdentity
    columns: tuple[Column, ...]
    xid: Xid | None = None


@dataclass(frozen=True, slots=True)
class Type:
    oid: Oid
    namespace: str
    name: str
    xid: Xid | None = None


@dataclass(frozen=True, slots=True)
class Insert:
    relation: Oid
    new: TupleData
    xid: Xid | None = None


@dataclass(frozen=True, slots=True)
class Update:
    """`old` and `old_kind` are set together: if the key changed, or under REPLICA IDENTITY FULL."""

    relation: Oid
    old_kind: OldKind | None
    old: TupleData | None
    new: TupleData
    xid: Xid | None = None


@dataclass(frozen=True, slots=True)
class Delete:
    relation: Oid
    old_kind: OldKind
    old: TupleData
    xid: Xid | None = None


@dataclass(frozen=True, slots=True)
class Truncate:
    relations: tuple[Oid, ...]
    cascade: bool
    restart_identity: bool
    xid: Xid | None = None


@dataclass(frozen=True, slots=True)
class LogicalMessage:
    """A message of pg_logical_emit_message, sent only if the subscriber requested messages."""

    transactional: bool
    lsn: Lsn
    prefix: str
    content: bytes
    xid: Xid | None = None


@dataclass(frozen=True, slots=True)
class StreamStart:
    xid: Xid
    first_segment: bool


@dataclass(frozen=True, slots=True)
class StreamStop:
    pass


@dataclass(frozen=True, slots=True)
class StreamCommit:
    xid: Xid
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class StreamAbort:
    """`subxid` equals `xid` if the whole transaction aborted; LSN and time are set together, under 'parallel'."""

    xid: Xid
    subxid: Xid
    abort_lsn: Lsn | None = None
    abort_time: int | None = None


@dataclass(frozen=True, slots=True)
class BeginPrepare:
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class Prepare:
    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class StreamPrepare:
    flags: int
    prepare_lsn: Lsn
    end_lsn: Lsn
    prepare_time: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class CommitPrepared:
    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int
    xid: Xid
    gid: str


@dataclass(frozen=True, slots=True)
class RollbackPrepared:
    """`prepare_end_lsn` and `prepare_time` tell whether the subscriber has received the PREPARE."""

    flags: int
    prepare_end_lsn: Lsn
    rollback_end_lsn: Lsn
    prepare_time: int
    rollback_time: int
    xid: Xid
    gid: str


Message = (
    Begin
    | Commit
    | Origin
    | Relation
    | Type
    | Insert
    | Update
    | Delete
    | Truncate
    | LogicalMessage
    | StreamStart
    | StreamStop
    | StreamCommit
    | StreamAbort
    | BeginPrepare
    | Prepare
    | StreamPrepare
    | CommitPrepared
    | RollbackPrepared
)
