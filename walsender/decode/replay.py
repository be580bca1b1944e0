"""A transaction's changes given to the output plugin, in order (reorderbuffer.c: ReorderBufferProcessTXN).

Changes of relations that the output does not send are passed over: other outputs do.

TOAST chunks come before the rows that point at them.  They are kept until such a row was sent and then dropped, as
ReorderBufferToastReplace and ReorderBufferToastReset do.  A pointer whose chunks did not come is an unchanged value.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pubsub.errors import DataCorrupted, PubsubError
from pubsub.protocol.lsn import Lsn
from walsender.decode import changes as c
from walsender.decode.relations import View
from walsender.plugins.plugin import OutputPlugin, RowChange, SentTransaction
from walsender.types.layout import Raw, ToastPointer, read_varlena, toast_value

_KINDS: Final = {
    c.INSERT: "insert",
    c.INSERT_MORE: "insert",
    c.SPEC_INSERT: "insert",
    c.UPDATE: "update",
    c.DELETE: "delete",
}
_NO_OLD: Final = bytes(4)
_CHUNK_HEADER: Final = struct.Struct("<Ii")
_U32: Final = struct.Struct("<I")


class Replay:
    """Sends the changes of one transaction, with relations as `views` has them, by number.

    `run` is called once or several times; this keeps the state in between.
    """

    def __init__(self, views: Mapping[int, View], plugin: OutputPlugin[Any], txn: SentTransaction) -> None:
        self._views = views
        self._plugin = plugin
        self._txn = txn
        self._chunks: dict[int, dict[int, bytes]] = {}
        self._speculative: bytes | None = None

    def run(self, frames: Iterable[bytes]) -> None:
        """Send `frames`.  Raises DataCorrupted and what the plugin raises, each with the change's position."""
        unpack = c.HEAD.unpack_from
        find = self._views.get
        row = self._plugin.row
        txn = self._txn
        for frame in frames:
            kind, xid, number, lsn = unpack(frame)
            try:
                if number:
                    view = find(number)
                    if view is None:
                        continue
                    # The fast paths first: most changes are inserts, or updates without an old row.
                    if kind == c.INSERT:
                        if not self._chunks and row(txn, view.entry, lsn, "insert", frame, c.HEAD_BYTES):
                            continue
                        self._row(kind, xid, view, lsn, frame)
                    elif (
                        kind == c.UPDATE
                        and not self._chunks
                        and frame[c.HEAD_BYTES : c.PAYLOAD] == _NO_OLD
                        and row(txn, view.entry, lsn, "update", frame, c.PAYLOAD)
                    ):
                        continue
                    elif kind in _KINDS:
                        if kind == c.SPEC_INSERT:
                            self._speculative = frame
                            continue
                        self._row(kind, xid, view, lsn, frame)
                    elif kind == c.TOAST_CHUNK:
                        self._chunk(frame)
                    elif kind == c.SPEC_CONFIRM:
                        confirmed, self._speculative = self._speculative, None
                        if confirmed is not None:
                            _, xid, number, lsn = unpack(confirmed)
                            self._row(c.SPEC_INSERT, xid, self._views[number], lsn, confirmed)
                    else:  # SPEC_ABORT
                        self._speculative = None
                        self._chunks.clear()
                elif kind == c.TRUNCATE:
                    self._truncate(xid, lsn, frame)
                else:
                    self._message(xid, lsn, frame)
            except (struct.error, IndexError, ValueError) as error:
                raise DataCorrupted(
                    "a row's bytes cannot be read",
                    context=f"change at WAL position {Lsn(lsn)} of transaction {self._txn.xid}",
                ) from error
            except PubsubError as error:
                error.context = error.context or f"change at WAL position {Lsn(lsn)} of transaction {self._txn.xid}"
                raise

    def _row(self, kind: int, xid: int, found: View, lsn: int, frame: bytes) -> None:
        read = found.relation.row.deform
        old: list[Raw] | None = None
        new: list[Raw] | None = None
        if kind in {c.UPDATE, c.DELETE}:
            (length,) = _U32.unpack_from(frame, c.HEAD_BYTES)
            end = c.PAYLOAD + length
            if length:
                old = read(frame[c.PAYLOAD : end])
            if kind == c.UPDATE:
                new = read(frame[end:])
        else:
            new = read(frame[c.HEAD_BYTES :])
        if self._chunks and new is not None:
            for index, value in enumerate(new):
                if isinstance(value, ToastPointer) and value.value_id in self._chunks:
                    # A large value is here once from now on.
                    new[index] = toast_value(value, b"".join(self._chunks.pop(value.value_id).values()))
        self._plugin.change(self._txn, found.relation, found.entry, RowChange(lsn, xid, _KINDS[kind], old, new))
        if kind != c.INSERT_MORE:
            self._chunks.clear()

    def _chunk(self, frame: bytes) -> None:
        """Keep a row of a TOAST table: value id, chunk number, bytes (ReorderBufferToastAppendChunk)."""
        start = c.HEAD_BYTES + frame[c.HEAD_BYTES + 4] - 18
        try:
            value_id, sequence = _CHUNK_HEADER.unpack_from(frame, start)
            # The slice keeps the tuple's alignment: the data follows two integers of 4 bytes.
            data, _ = read_varlena(frame[start + 8 :], 0)
        except (struct.error, IndexError) as error:
            raise DataCorrupted("a TOAST chunk is too short") from error
        if not isinstance(data, bytes):
            raise DataCorrupted("a TOAST chunk lies in a TOAST table")
        parts = self._chunks.setdefault(value_id, {})
        if sequence != len(parts):
            raise DataCorrupted(f"got sequence entry {sequence} for toast chunk {value_id} instead of {len(parts)}")
        parts[sequence] = data

    def _truncate(self, xid: int, lsn: int, frame: bytes) -> None:
        flags = frame[c.HEAD_BYTES]
        count = (len(frame) - c.HEAD_BYTES - 1) // 4
        numbers = struct.unpack_from(f"<{count}I", frame, c.HEAD_BYTES + 1)
        found = [(view.relation, view.entry) for number in numbers if (view := self._views.get(number)) is not None]
        if found:
            self._plugin.truncate(self._txn, lsn, xid, found, bool(flags & 1), bool(flags & 2))

    def _message(self, xid: int, lsn: int, frame: bytes) -> None:
        (length,) = _U32.unpack_from(frame, c.HEAD_BYTES)
        end = c.PAYLOAD + length
        self._plugin.message(self._txn, lsn, xid, True, frame[c.PAYLOAD : end], frame[end:])
