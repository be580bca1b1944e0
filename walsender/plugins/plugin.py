"""The interface between decoding and an output plugin (output_plugin.h).

    create slot … LOGICAL name ─► registered.py: is there an entry point of this name?
    decoding process ─► the class, with its options ─► describe, begin, change, … commit ─► write ─► client

A plugin of a user's own is a class derived from `Plugin`, named by an entry point of the group `pubsub.output_plugins`
(docs/output-plugins.md).  pgoutput and test_decoding keep to the same interface.

A plugin describes each relation once, in `describe`, when a change of it is read from the WAL: the catalog is known for
that moment only.  The callbacks come when a transaction is sent.  Each writes messages with `write(lsn, xid, data)`;
the LSN is the one that a walsender puts before the message.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from pubsub.errors import PubsubError
from pubsub.protocol.output.styles import Styles
from walsender.historic.relation import RelationInfo, RelationResolver
from walsender.types.layout import Raw

Entry = TypeVar("Entry")
Write = Callable[[int, int, bytes], None]
"""LSN, transaction (0: none), message."""


@dataclass(slots=True)
class SentTransaction:
    """A transaction that is being sent.

    LSNs as ReorderBufferTXN has them; times are microseconds since 2000-01-01 UTC.
    """

    xid: int
    first_lsn: int
    final_lsn: int
    """Start of the record that ends it, or of its PREPARE."""
    end_lsn: int
    time: int
    origin_id: int = 0
    origin_name: str | None = None
    origin_lsn: int = 0
    gid: bytes = b""
    prepare_end_lsn: int = 0
    prepare_time: int = 0
    private: Any = None
    """The plugin's own data, made at begin or at the first stream."""


@dataclass(slots=True)
class RowChange:
    """A change of a row.

    `kind`: "insert", "update" or "delete"; `old`, `new`: values by column, or None if there is no such row.
    """

    lsn: int
    xid: int
    """The subtransaction that made it."""
    kind: str
    old: list[Raw] | None
    new: list[Raw] | None


class OutputPlugin(Protocol[Entry]):
    """The callbacks.

    `streaming`: transactions may be sent before they end.  `path`: the search path for names in values.
    """

    streaming: bool
    path: tuple[str, ...]

    def describe(self, relation: RelationInfo, resolver: RelationResolver) -> Entry | None:
        """Return what is needed to send the relation's changes; None: they are not sent."""

    def refusal(self, relation: RelationInfo, entry: Entry) -> PubsubError | None:
        """Return why changes of the relation cannot be sent, if that is known before there are any."""

    def skips_origin(self, origin_id: int) -> bool:
        """Return whether changes that came from this origin are left out (filter_by_origin_cb)."""

    def prepares(self, gid: bytes) -> bool:
        """Return whether a prepared transaction is sent at its PREPARE, not at COMMIT PREPARED (filter_prepare_cb)."""

    def forget(self, *, definitions: bool) -> None:
        """Note that relations are others than those that it knows; with `definitions` also that there is another subscriber,
        who does not know what was sent of relations."""

    def begin(self, txn: SentTransaction) -> None: ...
    def change(self, txn: SentTransaction, relation: RelationInfo, entry: Entry, change: RowChange) -> None: ...
    def row(self, txn: SentTransaction, entry: Entry, lsn: int, kind: str, data: bytes, at: int) -> bool:
        """Send an insert, or an update without an old row, from its bytes data[at:]; False: `change` has to do it."""

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


@dataclass(frozen=True, slots=True)
class PluginContext:
    """What a plugin of a user's own is made with."""

    options: Mapping[str, str]
    """Those of START_REPLICATION or of the SQL function."""
    write: Write
    encoding: str
    """Python's name of the database's encoding, in which all texts from rows are."""
    server_version: int
    two_phase: bool
    """Whether the slot decodes at PREPARE (its property two_phase); else COMMIT PREPARED is a commit like others."""
    keywords: Set[str]
    """Words that the server quotes as identifiers."""
    styles: Styles
    """How the session writes times and numbers."""


class Plugin(Generic[Entry]):
    """The base of plugins of users' own: it sends nothing, and takes no options.

    A derived class has at least `describe` and `change`.  Callbacks run in the decoding process of a database, one at a time;
    a PubsubError ends the stream with its texts (guard.py).  `binary`: what it writes is no text, see get_binary_changes.
    """

    binary: ClassVar[bool] = False
    streaming: bool = False
    path: tuple[str, ...] = ()

    def __init__(self, context: PluginContext) -> None:
        """Raises PubsubError for options that are wrong."""
        self.context = context

    def describe(self, relation: RelationInfo, resolver: RelationResolver) -> Entry | None:
        return None

    def refusal(self, relation: RelationInfo, entry: Entry) -> PubsubError | None:
        return None

    def skips_origin(self, origin_id: int) -> bool:
        return False

    def prepares(self, gid: bytes) -> bool:
        return self.context.two_phase

    def forget(self, *, definitions: bool) -> None:
        """Relations are described anew; an output of a user's own has one subscriber."""

    def begin(self, txn: SentTransaction) -> None:
        """A transaction begins that is sent now, after it has committed."""

    def change(self, txn: SentTransaction, relation: RelationInfo, entry: Entry, change: RowChange) -> None:
        """A row has changed."""

    def row(self, txn: SentTransaction, entry: Entry, lsn: int, kind: str, data: bytes, at: int) -> bool:
        return False

    def truncate(
        self,
        txn: SentTransaction,
        lsn: int,
        xid: int,
        relations: list[tuple[RelationInfo, Entry | None]],
        cascade: bool,
        restart_seqs: bool,
    ) -> None:
        """Tables were emptied together; those that are not sent have no entry."""

    def message(
        self, txn: SentTransaction | None, lsn: int, xid: int, transactional: bool, prefix: bytes, content: bytes
    ) -> None:
        """pg_logical_emit_message was called."""

    def commit(self, txn: SentTransaction) -> None:
        """The transaction that has begun is at its end."""

    def begin_prepare(self, txn: SentTransaction) -> None:
        self.begin(txn)

    def prepare(self, txn: SentTransaction) -> None:
        """The transaction that has begun was prepared."""

    def commit_prepared(self, txn: SentTransaction) -> None:
        """A transaction that was sent at its PREPARE has committed."""

    def rollback_prepared(self, txn: SentTransaction) -> None:
        """A transaction that was sent at its PREPARE was rolled back."""

    # With `streaming`, transactions in progress come in blocks of their changes.

    def stream_start(self, txn: SentTransaction, lsn: int, first: bool) -> None:
        raise NotImplementedError

    def stream_stop(self, txn: SentTransaction, lsn: int) -> None:
        raise NotImplementedError

    def stream_abort(self, txn: SentTransaction, xid: int, lsn: int, time: int) -> None:
        raise NotImplementedError

    def stream_prepare(self, txn: SentTransaction) -> None:
        raise NotImplementedError

    def stream_commit(self, txn: SentTransaction) -> None:
        raise NotImplementedError
