"""Builds copy-both frames as a publisher sends them, and whole transactions, as input for the tests of apply."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from pubsub.protocol.copyboth import Keepalive, XLogData, write_server_message
from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import (
    Begin,
    Column,
    Commit,
    Delete,
    Insert,
    Message,
    Relation,
    ReplicaIdentity,
    Truncate,
    Update,
    write_message,
)

INT8, TEXT = 20, 25


def frame(message: Message, lsn: int = 0) -> bytes:
    """Return the frame of one XLogData message."""
    return write_server_message(XLogData(Lsn(lsn), Lsn(lsn), 0, write_message(message)))


def keepalive(wal_end: int, *, reply: bool = False) -> bytes:
    return write_server_message(Keepalive(Lsn(wal_end), 0, reply))


def relation(
    oid: int,
    name: str,
    columns: Sequence[tuple[str, int]] = (("id", INT8), ("v", TEXT)),
    *,
    key: Iterable[str] = ("id",),
    identity: ReplicaIdentity = "d",
    schema: str = "public",
) -> Relation:
    keys = set(key) if identity != "f" else {name for name, _ in columns}
    return Relation(Oid(oid), schema, name, identity, tuple(Column(int(c in keys), c, Oid(t), -1) for c, t in columns))


def insert(oid: int, *values: Any) -> Insert:
    return Insert(Oid(oid), texts(values))


def update(oid: int, *values: Any, old: Sequence[Any] | None = None, kind: Any = "K") -> Update:
    return Update(Oid(oid), kind if old is not None else None, None if old is None else texts(old), texts(values))


def delete(oid: int, *values: Any, kind: Any = "K") -> Delete:
    return Delete(Oid(oid), kind, texts(values))


def truncate(*oids: int) -> Truncate:
    return Truncate(tuple(map(Oid, oids)), cascade=False, restart_identity=False)


def texts(values: Iterable[Any]) -> tuple[Any, ...]:
    """Convert values to pgoutput's text, or NULL; UNCHANGED and bytes stay."""
    return tuple(
        v if v is None or isinstance(v, bytes) or not isinstance(v, str | int) else str(v).encode() for v in values
    )


def transaction(
    end: int, *messages: Message, xid: int = 700, commit_time: int = 0, final: int | None = None
) -> list[bytes]:
    """Return the frames of a transaction whose commit record is from `final` (by default 8 bytes earlier) to `end`."""
    begins = Lsn(end - 8 if final is None else final)
    return [
        frame(Begin(begins, commit_time, Xid(xid))),
        *(frame(message) for message in messages),
        frame(Commit(0, begins, Lsn(end), commit_time)),
    ]
