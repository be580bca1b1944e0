"""pgoutput's messages as records, one class a message; pgoutput.py reads and writes them.

Times are microseconds since 2000-01-01 UTC (copyboth.py has the conversions).  An `…end_lsn` is the position after a
WAL record, any other LSN where the record starts.  `flags` is 0 in every version so far.  On messages that may lie in a
stream block `xid` is the id of the (sub)transaction that made the change; None outside of one.

Follows logicalproto.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn

MAX_COLUMNS: Final = 1600
"""Columns of a table (htup_details.h: MaxHeapAttributeNumber)."""
MAX_GID_BYTES: Final = 199
"""Bytes of a prepared transaction's name (xact.h: GIDSIZE, less its NUL)."""

COLUMN_IN_REPLICA_IDENTITY: Final = 1
REPLICA_IDENTITIES: Final = frozenset("dnfi")


class Unchanged(Enum):
    """The mark of a TOASTed value that an UPDATE left alone and the publisher did not send."""

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
"""What an old tuple holds: 'K' the replica identity's columns and NULLs; 'O' the row (REPLICA IDENTITY FULL)."""
ReplicaIdentity = Literal["d", "n", "f", "i"]
"""Default, nothing, full, index (pg_class.relreplident)."""


@dataclass(frozen=True, slots=True)
class Begin:
    """`final_lsn` is the LSN of the commit record: the finish LSN that SKIP takes."""

    final_lsn: Lsn
    commit_time: int
    xid: Xid


@dataclass(frozen=True, slots=True)
class Commit:
    """`end_lsn` is the commit record's end, exclusive: where replication goes on."""

    flags: int
    commit_lsn: Lsn
    end_lsn: Lsn
    commit_time: int


@dataclass(frozen=True, slots=True)
class Origin:
    """The transaction came to the publisher from elsewhere, where it was committed at `commit_lsn`."""

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
    """A table's definition: the published columns in the order that tuples have them."""

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
    """`old` and `old_kind` are there together: when the key changed, or under REPLICA IDENTITY FULL."""

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
    """pg_logical_emit_message; sent only where the subscriber asked for messages."""

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
    """`subxid` equals `xid` when the whole transaction aborted; LSN and time are there together, under 'parallel'."""

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
    """`prepare_end_lsn` and `prepare_time` tell whether the PREPARE had reached the subscriber."""

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
