"""The output plugin test_decoding: changes as lines of text (contrib/test_decoding/test_decoding.c)."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import Final

from pubsub.errors import PubsubError
from pubsub.nearest import nearest
from pubsub.protocol.output.styles import Styles
from pubsub.sql.identifiers import quote_identifier
from walsender.historic.relation import ColumnInfo, RelationInfo, RelationResolver
from walsender.plugins.plugin import RowChange, SentTransaction, Write
from walsender.types.layout import Raw, ToastPointer
from walsender.types.registry import UnsupportedType

# Words of the type boolean and their abbreviations (bool.c: parse_bool_with_len).
TRUE: Final = {"t", "tr", "tru", "true", "y", "ye", "yes", "on", "1"}
FALSE: Final = {"f", "fa", "fal", "fals", "false", "n", "no", "of", "off", "0"}
_BARE: Final = frozenset({20, 21, 23, 26, 700, 701, 1700})
_BITS: Final = frozenset({1560, 1562})
_BOOL: Final = 16

_OPTIONS: Final = {
    "include-xids": "include_xids",
    "include-timestamp": "include_timestamp",
    "force-binary": "force_binary",
    "skip-empty-xacts": "skip_empty_xacts",
    "only-local": "only_local",
    "include-rewrites": "include_rewrites",
    "stream-changes": "stream_changes",
    "two-phase": "two_phase",
}


@dataclass(frozen=True, slots=True)
class TestDecodingOptions:
    """test_decoding's own options; `two_phase` stands for the slot's property, which is no option there."""

    __test__ = False

    include_xids: bool = True
    include_timestamp: bool = False
    force_binary: bool = False
    skip_empty_xacts: bool = False
    only_local: bool = False
    include_rewrites: bool = False
    stream_changes: bool = False
    two_phase: bool = False

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> TestDecodingOptions:
        """Parse the options.  Raises PubsubError in the server's words."""
        values: dict[str, bool] = {}
        for name, text in options.items():
            field = _OPTIONS.get(name)
            if field is None:
                best = nearest(name, _OPTIONS)
                hint = f'Perhaps you meant the option "{best}".' if best is not None else None
                raise PubsubError(f'option "{name}" = "{text}" is unknown', sqlstate="22023", hint=hint)
            lowered = text.lower()
            if lowered not in TRUE | FALSE:
                raise PubsubError(f'could not parse value "{text}" for parameter "{name}"', sqlstate="22023")
            values[field] = lowered in TRUE
        return cls(**values)


@dataclass(eq=False, slots=True)
class TextEntry:
    """A relation's name and the texts that stand before its columns' values."""

    head: bytes
    name: bytes
    columns: tuple[tuple[int, bytes, ColumnInfo], ...]
    """Index, " name[type]:" and column, of the columns that are written."""


@dataclass(slots=True)
class _Private:
    wrote_changes: bool = False
    stream_wrote_changes: bool = False


class TestDecodingPlugin:
    """The plugin.  `write` gets each line without its end.

    `keywords`: those that are quoted as identifiers; `styles`, `path`: the session's.
    """

    __test__ = False

    def __init__(
        self,
        options: TestDecodingOptions,
        write: Write,
        encoding: str,
        server_version: int,
        keywords: Set[str],
        styles: Styles,
        path: tuple[str, ...],
    ) -> None:
        self.streaming = options.stream_changes
        self.path = path
        self._options = options
        self._write = write
        self._encoding = encoding
        self._in_stream = False
        self._keywords = keywords
        self._timestamp = styles.timestamptz_iso
        # Before 17 a message is no change that opens a transaction.
        self._messages_are_changes = server_version >= 170000

    def describe(self, relation: RelationInfo, resolver: RelationResolver) -> TextEntry | None:
        encoding = self._encoding
        own_name = relation.name
        if relation.rewrites:
            if not self._options.include_rewrites:
                return None
            written_anew = resolver.class_row(relation.rewrites)
            own_name = written_anew.text("relname") if written_anew is not None else own_name
        name = (
            f"{quote_identifier(relation.schema, self._keywords)}.{quote_identifier(own_name, self._keywords)}".encode(
                encoding
            )
        )
        columns = tuple(
            (
                index,
                f" {quote_identifier(column.name, self._keywords)}[{column.type.label if column.type else ''}]:".encode(
                    encoding
                ),
                column,
            )
            for index, column in enumerate(relation.columns)
            if not column.dropped  # a virtual generated column is NULL, as stored
        )
        return TextEntry(b"table " + name + b":", name, columns)

    def skips_origin(self, origin_id: int) -> bool:
        return origin_id != 0 and self._options.only_local

    def forget(self, *, definitions: bool) -> None:
        """Do nothing: it keeps nothing about relations."""

    # Transactions

    def prepares(self, gid: bytes) -> bool:
        return self._options.two_phase and b"_nodecode" not in gid

    def begin(self, txn: SentTransaction) -> None:
        txn.private = _Private()
        if not self._options.skip_empty_xacts:
            self._begin_line(txn, txn.first_lsn)

    def _begin_line(self, txn: SentTransaction, lsn: int) -> None:
        self._line(txn, lsn, b"BEGIN %d" % txn.xid if self._options.include_xids else b"BEGIN")

    def _before_change(self, txn: SentTransaction, lsn: int) -> None:
        private: _Private = txn.private
        if self._in_stream:
            if self._options.skip_empty_xacts and not private.stream_wrote_changes:
                self._stream_line(txn, lsn, b"opening a streamed block for transaction")
            private.wrote_changes = private.stream_wrote_changes = True
            return
        if self._options.skip_empty_xacts and not private.wrote_changes:
            self._begin_line(txn, lsn)
        private.wrote_changes = True

    def commit(self, txn: SentTransaction) -> None:
        if self._options.skip_empty_xacts and not txn.private.wrote_changes:
            return
        self._ended(txn, b"COMMIT %d" % txn.xid if self._options.include_xids else b"COMMIT")

    def _ended(self, txn: SentTransaction, line: bytes) -> None:
        if self._options.include_timestamp:
            line += b" (at " + self._timestamp(txn.time.to_bytes(8, "little", signed=True)) + b")"
        self._line(txn, txn.end_lsn, line)

    def begin_prepare(self, txn: SentTransaction) -> None:
        self.begin(txn)

    def prepare(self, txn: SentTransaction) -> None:
        if self._options.skip_empty_xacts and not txn.private.wrote_changes:
            return
        self._two_phase(txn, b"PREPARE TRANSACTION ")

    def commit_prepared(self, txn: SentTransaction) -> None:
        self._two_phase(txn, b"COMMIT PREPARED ")

    def rollback_prepared(self, txn: SentTransaction) -> None:
        self._two_phase(txn, b"ROLLBACK PREPARED ")

    def _two_phase(self, txn: SentTransaction, verb: bytes) -> None:
        line = verb + _literal(txn.gid)
        if self._options.include_xids:
            line += b", txid %d" % txn.xid
        self._ended(txn, line)

    # Changes

    def refusal(self, relation: RelationInfo, entry: TextEntry) -> PubsubError | None:
        """Return None: every table is sent, since none can be left out; the first row with such a value is refused."""
        return None

    def row(self, txn: SentTransaction, entry: TextEntry, lsn: int, kind: str, data: bytes, at: int) -> bool:
        return False

    def change(self, txn: SentTransaction, relation: RelationInfo, entry: TextEntry, change: RowChange) -> None:
        self._before_change(txn, change.lsn)
        if self._in_stream:
            self._streamed(txn, change.lsn, b"change")
            return
        parts = [entry.head]
        try:
            if change.kind == "insert":
                parts.append(b" INSERT:")
                self._row(parts, entry, change.new, skip_nulls=False)
            elif change.kind == "update":
                parts.append(b" UPDATE:")
                if change.old is not None:
                    parts.append(b" old-key:")
                    self._row(parts, entry, change.old, skip_nulls=True)
                    parts.append(b" new-tuple:")
                self._row(parts, entry, change.new, skip_nulls=False)
            else:
                parts.append(b" DELETE:")
                self._row(parts, entry, change.old, skip_nulls=True)
        except UnsupportedType as error:
            raise UnsupportedType(
                f'table "{relation.qualified_name}": {error.message}', detail=error.detail, hint=error.hint
            ) from error
        self._line(txn, change.lsn, b"".join(parts))

    def _row(self, parts: list[bytes], entry: TextEntry, row: list[Raw] | None, *, skip_nulls: bool) -> None:
        if row is None:
            parts.append(b" (no-tuple-data)")
            return
        for index, head, column in entry.columns:
            value = row[index]
            if value is None:
                if not skip_nulls:
                    parts += (head, b"null")
            elif isinstance(value, ToastPointer):
                parts += (head, b"unchanged-toast-datum")
            else:
                assert column.type is not None
                text = column.type.out(value)
                if column.type_oid in _BARE:
                    pass
                elif column.type_oid in _BITS:
                    text = b"B'" + text + b"'"
                elif column.type_oid == _BOOL:
                    text = b"true" if text == b"t" else b"false"
                else:
                    text = b"'" + text.replace(b"'", b"''") + b"'"
                parts += (head, text)

    def truncate(
        self,
        txn: SentTransaction,
        lsn: int,
        xid: int,
        relations: list[tuple[RelationInfo, TextEntry | None]],
        cascade: bool,
        restart_seqs: bool,
    ) -> None:
        self._before_change(txn, lsn)
        if self._in_stream:
            self._streamed(txn, lsn, b"truncate")
            return
        names = b", ".join(entry.name for _, entry in relations if entry is not None)
        flags = (b" restart_seqs" if restart_seqs else b"") + (b" cascade" if cascade else b"")
        self._line(txn, lsn, b"table " + names + b": TRUNCATE:" + (flags or b" (no-flags)"))

    def message(
        self, txn: SentTransaction | None, lsn: int, xid: int, transactional: bool, prefix: bytes, content: bytes
    ) -> None:
        if transactional and txn is not None and self._messages_are_changes:
            self._before_change(txn, lsn)
        kind = b"streaming message" if self._in_stream else b"message"
        line = kind + b": transactional: %d prefix: " % transactional + prefix + b", sz: %d" % len(content)
        if not (self._in_stream and transactional):
            line += b" content:" + content
        self._write(lsn, txn.xid if txn is not None else 0, line)

    # Streams

    def stream_start(self, txn: SentTransaction, lsn: int, first: bool) -> None:
        if txn.private is None:
            txn.private = _Private()
        txn.private.stream_wrote_changes = False
        self._in_stream = True
        if not self._options.skip_empty_xacts:
            self._stream_line(txn, lsn, b"opening a streamed block for transaction")

    def stream_stop(self, txn: SentTransaction, lsn: int) -> None:
        self._in_stream = False
        if not self._options.skip_empty_xacts or txn.private.stream_wrote_changes:
            self._stream_line(txn, lsn, b"closing a streamed block for transaction")

    def stream_abort(self, txn: SentTransaction, xid: int, lsn: int, time: int) -> None:
        if self._options.skip_empty_xacts and not txn.private.wrote_changes:
            return
        line = b"aborting streamed (sub)transaction"
        self._line(txn, lsn, line + (b" TXN %d" % xid if self._options.include_xids else b""))

    def stream_prepare(self, txn: SentTransaction) -> None:
        if self._options.skip_empty_xacts and not txn.private.wrote_changes:
            return
        line = b"preparing streamed transaction "
        if self._options.include_xids:
            self._ended(txn, line + b"TXN " + _literal(txn.gid) + b", txid %d" % txn.xid)
        else:
            self._ended(txn, line + _literal(txn.gid))

    def stream_commit(self, txn: SentTransaction) -> None:
        if self._options.skip_empty_xacts and not txn.private.wrote_changes:
            return
        line = b"committing streamed transaction"
        self._ended(txn, line + (b" TXN %d" % txn.xid if self._options.include_xids else b""))

    def _stream_line(self, txn: SentTransaction, lsn: int, line: bytes) -> None:
        self._line(txn, lsn, line + (b" TXN %d" % txn.xid if self._options.include_xids else b""))

    def _streamed(self, txn: SentTransaction, lsn: int, what: bytes) -> None:
        of = b"TXN %d" % txn.xid if self._options.include_xids else b"transaction"
        self._line(txn, lsn, b"streaming " + what + b" for " + of)

    def _line(self, txn: SentTransaction, lsn: int, line: bytes) -> None:
        self._write(lsn, txn.xid, line)


def _literal(text: bytes) -> bytes:
    """Write a text as a literal (quote.c: quote_literal_cstr)."""
    quoted = b"'" + text.replace(b"\\", b"\\\\").replace(b"'", b"''") + b"'"
    return b"E" + quoted if b"\\" in text else quoted
