"""What decoding gives to an output plugin, and what a plugin gives back (output_plugin.h).

A plugin describes each relation once, in `describe`, when a change of it is read from the WAL: the catalog is known for
that moment only.  The callbacks come when a transaction is sent; each writes messages with `write(lsn, xid, data)`, the LSN
being the one that a walsender puts before the message.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from pubsub.errors import PubsubError
from walsender.historic.relation import RelationInfo, RelationResolver
from walsender.types.layout import Raw

Entry = TypeVar("Entry")
Write = Callable[[int, int, bytes], None]
"""LSN, transaction (0: none), message."""


@dataclass(slots=True)
class SentTransaction:
    """A transaction that is being sent.  LSNs as ReorderBufferTXN has them; times are microseconds since 2000-01-01 UTC."""

    xid: int
    first_lsn: int
    final_lsn: int
    """Where the record of its end starts."""
    end_lsn: int
    time: int
    origin_id: int = 0
    origin_name: str | None = None
    origin_lsn: int = 0
    gid: bytes = b""
    prepare_end_lsn: int = 0
    prepare_time: int = 0
    streamed: bool = False
    private: Any = None
    """The plugin's own, made at begin or at the first stream."""


@dataclass(slots=True)
class RowChange:
    """`kind` is "insert", "update" or "delete"; rows are lists of values by column, None where there is no such row."""

    lsn: int
    xid: int
    """Of the subtransaction that made it."""
    kind: str
    old: list[Raw] | None
    new: list[Raw] | None


class OutputPlugin(Protocol[Entry]):
    """The callbacks.  `streaming`: whether transactions may be sent before they end; `path`: the search path by which names in
    values are written."""

    streaming: bool
    path: tuple[str, ...]

    def describe(self, relation: RelationInfo, resolver: RelationResolver) -> Entry | None:
        """What is needed to send changes of the relation; None: they are not sent."""

    def refusal(self, relation: RelationInfo, entry: Entry) -> PubsubError | None:
        """Why changes of the relation can not be sent, where that is known before there are any."""

    def skips_origin(self, origin_id: int) -> bool:
        """Whether changes that came from this origin are left out (filter_by_origin_cb)."""

    def prepares(self, gid: bytes) -> bool:
        """Whether a prepared transaction is sent at its PREPARE, and not at COMMIT PREPARED (filter_prepare_cb)."""

    def begin(self, txn: SentTransaction) -> None: ...
    def change(self, txn: SentTransaction, relation: RelationInfo, entry: Entry, change: RowChange) -> None: ...
    def row(self, txn: SentTransaction, entry: Entry, lsn: int, kind: str, data: bytes, at: int) -> bool:
        """The short way for an insert, or an update without an old row, that lies at data[at:]; False: not for this one."""

    def truncate(
        self,
        txn: SentTransaction,
        lsn: int,
        xid: int,
        relations: list[tuple[RelationInfo, Entry | None]],
        cascade: bool,
        restart_seqs: bool,
    ) -> None: ...
    def message(
        self, txn: SentTransaction | None, lsn: int, xid: int, transactional: bool, prefix: bytes, content: bytes
    ) -> None: ...
    def commit(self, txn: SentTransaction) -> None: ...
    def begin_prepare(self, txn: SentTransaction) -> None: ...
    def prepare(self, txn: SentTransaction) -> None: ...
    def commit_prepared(self, txn: SentTransaction) -> None: ...
    def rollback_prepared(self, txn: SentTransaction) -> None: ...
    def stream_start(self, txn: SentTransaction, lsn: int, first: bool) -> None: ...
    def stream_stop(self, txn: SentTransaction, lsn: int) -> None: ...
    def stream_abort(self, txn: SentTransaction, xid: int, lsn: int, time: int) -> None: ...
    def stream_prepare(self, txn: SentTransaction) -> None: ...
    def stream_commit(self, txn: SentTransaction) -> None: ...
