"""A stream of a node's Delta tables to a subscriber, as pgoutput: one transaction for each version of a table."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from itertools import islice
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from pubsub.backend import messages as m
from pubsub.delta import table as delta_table
from pubsub.errors import NotInPrerequisiteState, ProtocolViolation
from pubsub.protocol import messages as p
from pubsub.protocol.copyboth import (
    Keepalive,
    PrimaryStatusRequest,
    StatusUpdate,
    pg_now,
    read_client_message,
    write_server_message,
)
from pubsub.protocol.ids import Oid, Xid
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import write_message
from pubsub.server import values
from pubsub.server.publishing.changes import Change, Row, changes
from pubsub.server.publishing.positions import Position
from pubsub.server.publishing.publisher import Published
from pubsub.server.system_catalogs.definitions import definitions
from walsender.slots.slot import Slot

if TYPE_CHECKING:
    from pubsub.server.publishing.publisher import Publisher
    from pubsub.server.session import Session
    from walsender.repl_gram import PgoutputParameters

_POLL: Final = 0.25
"""Seconds between two looks at the tables' logs, which tell nobody of a commit."""
_HEADER: Final = Struct(">cQQq")
_EPOCH: Final = 946_684_800_000_000
_PIECE: Final = 500
_TIMEOUT: Final = 60.0


class _Ended(Exception):
    """The client has ended the stream."""


class Stream:
    """One stream, made for `run`; `start`: what ends after this LSN is sent."""

    def __init__(
        self, session: Session, publisher: Publisher, slot: Slot, options: PgoutputParameters, start: int
    ) -> None:
        self._session = session
        self._publisher = publisher
        self._slot = slot
        self._options = options
        self._sent = start
        self._written = self._flushed = self._applied = 0
        self._began = datetime.now(UTC)
        self._known: dict[str, p.Relation] = {}
        self._heard = time.monotonic()

    def row(self) -> dict[str, Any]:
        """Return the stream's row of pg_stat_replication."""
        shown = {
            "sent_lsn": self._sent,
            "write_lsn": self._written,
            "flush_lsn": self._flushed,
            "replay_lsn": self._applied,
        }
        return {
            "pid": self._session.pid, "usename": self._session.user.name, "state": "streaming", "sync_state": "async",
            "application_name": self._session.parameters.show("application_name")[1], "backend_start": self._began,
            "sync_priority": 0, **{name: str(Lsn(lsn)) if lsn else None for name, lsn in shown.items()},
        }  # fmt: skip

    async def run(self) -> None:
        """Stream until the client ends it.  Raises PubsubError, Closed."""
        names = self._options.publications
        self._publisher.published(await self._session.backend.node.state(), names)
        self._session.send(m.message(b"W", b"\0\0\0"))
        work = [asyncio.create_task(one) for one in (self._send(), self._take_replies())]
        try:
            done, _ = await asyncio.wait(work, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in work:
                one.cancel()
            await asyncio.gather(*work, return_exceptions=True)
        with suppress(_Ended):
            for one in done:
                one.result()
        self._session.send(m.message(b"c"))

    async def _send(self) -> None:
        """Send what there is, and look for more."""
        asked = 0.0
        while True:
            state = await self._session.backend.node.state()
            end = await self._publisher.collect(state)
            published = self._publisher.published(state, self._options.publications)
            for position in await asyncio.to_thread(self._publisher.positions.after, self._sent):
                found = published.get(position.path)
                if found is not None:
                    await self._transaction(position, found)
                self._sent = position.end_lsn
            silent = time.monotonic() - self._heard
            if silent > _TIMEOUT:
                raise m.Closed
            if self._sent >= end or not await asyncio.to_thread(self._publisher.positions.after, self._sent, 1):
                self._sent = max(self._sent, end)
                if self._flushed < self._sent or silent > _TIMEOUT / 2 or time.monotonic() - asked > 10:
                    asked = time.monotonic()
                    self._keepalive(reply=silent > _TIMEOUT / 2)
                await self._session.drain()
                await self._publisher.slots.save_changed()
                await asyncio.sleep(_POLL)

    async def _transaction(self, position: Position, published: Published) -> None:
        """Send a version's changes as a transaction; one without any published change is left out."""
        relation = published.relation
        try:
            table = await asyncio.to_thread(
                delta_table.load, relation.path, relation.qualified_name, relation.definition
            )
            found = changes(relation.path, table, position.version)
            writer = _Writer(published, table.schema.names, table.schema)
            first = await asyncio.to_thread(_some, found)
            messages = writer.messages(first)
            if not messages:
                return
            moment = position.time - _EPOCH
            xid = Xid(position.lsn >> 8 & 0x7FFFFFFF)
            self._put(position.lsn, p.Begin(Lsn(position.lsn), moment, xid))
            if self._known.get(relation.path) != writer.relation:
                self._known[relation.path] = writer.relation
                self._put(0, writer.relation)
            while first:
                for one in messages:
                    self._put(position.lsn, one)
                await self._session.drain()
                first = await asyncio.to_thread(_some, found)
                messages = writer.messages(first)
            self._put(position.lsn, p.Commit(0, Lsn(position.lsn), Lsn(position.end_lsn), moment))
        except FileNotFoundError as error:
            self._publisher.slots.invalidate(self._slot, "wal_removed")
            raise NotInPrerequisiteState(
                f'can no longer get changes from replication slot "{self._slot.name}"',
                detail=f'Version {position.version} of table "{relation.qualified_name}" cannot be read any more: {error}.',
                hint="VACUUM or the clean-up of the log has removed what the slot needs.",
            ) from error

    def _put(self, lsn: int, message: p.Message) -> None:
        data = write_message(message)
        self._session.send(m.message(b"d", _HEADER.pack(b"w", lsn, lsn, pg_now()) + data))

    def _keepalive(self, *, reply: bool) -> None:
        self._session.send(m.message(b"d", write_server_message(Keepalive(Lsn(self._sent), pg_now(), reply))))

    async def _take_replies(self) -> None:
        while True:
            kind, length = await m.read_head(self._session.reader, 1 << 20)
            body = await m.read_body(self._session.reader, length)
            self._heard = time.monotonic()
            if kind == b"d":
                reply = read_client_message(body)
                if isinstance(reply, StatusUpdate):
                    self._status(reply)
                    await self._session.drain()
                elif isinstance(reply, PrimaryStatusRequest):
                    # A publisher of release 18 does not know it.
                    raise ProtocolViolation('unexpected message type "p"')
            elif kind == b"c":
                raise _Ended
            elif kind == b"X":
                raise m.Closed
            else:
                raise ProtocolViolation(f"unexpected standby message type {kind[0]}")

    def _status(self, reply: StatusUpdate) -> None:
        self._written, self._flushed, self._applied = reply.written, reply.flushed, reply.applied
        if reply.reply_requested:
            self._keepalive(reply=False)
        confirmed = min(int(reply.flushed), self._sent)
        if confirmed > self._slot.confirmed_flush_lsn:
            self._slot.confirmed_flush_lsn = self._slot.restart_lsn = confirmed
            self._slot.changed = True


def _some(found: Iterator[Change]) -> list[Change]:
    return list(islice(found, _PIECE))


class _Writer:
    """Writes the changes of one table."""

    def __init__(self, published: Published, names: Sequence[str], schema: pa.Schema) -> None:
        self._places = [names.index(name) for name in published.columns if name in names]
        self._single = {place for place in self._places if pa.types.is_float32(schema.field(place).type)}
        self._actions = published.actions
        table = published.table
        key = {table.attributes[number - 1].name for number in table.key}
        self._key = [names.index(name) for name in names if name in key]
        self._is_key = [names[place] in key for place in self._places]
        known = {row["oid"] for row in definitions().types}
        typed = {
            one.name: (one.type_oid if one.type_oid in known else values.TEXT, one.modifier) for one in table.attributes
        }
        columns = []
        for place in self._places:
            oid, modifier = typed.get(names[place], (values.TEXT, -1))
            flags = p.COLUMN_IN_REPLICA_IDENTITY if not key or names[place] in key else 0
            columns.append(p.Column(flags, names[place], Oid(oid), modifier))
        self.relation = p.Relation(Oid(table.oid), table.schema, table.name, "d" if key else "f", tuple(columns))

    def messages(self, found: Sequence[Change]) -> list[p.Message]:
        """Return the messages of changes; those whose action is not published are left out."""
        oid = self.relation.oid
        written: list[p.Message] = []
        for one in found:
            if one.old is None:
                assert one.new is not None
                if "insert" in self._actions:
                    written.append(p.Insert(oid, self._tuple(one.new)))
            elif one.new is None:
                if "delete" in self._actions:
                    written.append(p.Delete(oid, "K" if self._key else "O", self._old(one.old)))
            elif "update" in self._actions:
                if self._key:
                    written.append(p.Update(oid, None, None, self._tuple(one.new)))
                else:
                    written.append(p.Update(oid, "O", self._old(one.old), self._tuple(one.new)))
        return written

    def _tuple(self, row: Row) -> p.TupleData:
        return tuple(self._value(row[place], place) for place in self._places)

    def _old(self, row: Row) -> p.TupleData:
        if not self._key:
            return self._tuple(row)
        return tuple(
            self._value(row[place], place) if is_key else None
            for place, is_key in zip(self._places, self._is_key, strict=True)
        )

    def _value(self, value: Any, place: int) -> bytes | None:
        if value is not None and place in self._single:
            from pubsub.node.select.outputs import single

            value = single(value)
        return values.as_text(value)
