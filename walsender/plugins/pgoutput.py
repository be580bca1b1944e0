"""The output plugin pgoutput, protocol 1 to 4 (pgoutput.c, proto.c).

Relation and Type messages are sent before a relation's first change, and again when their contents have changed.
PostgreSQL resends them more often, whenever its RelationSyncCache was invalidated, and two of its walsenders differ in
this; a subscriber must not depend on it.

Messages inside a stream count for the stream's transaction only.  A subscriber processes them when it applies the
transaction, after messages that were sent since, and never if their subtransaction is rolled back.  A subscriber that
applies in parallel may also have processed them at once (worker.c: handle_streamed_transaction): its relation cache is
then uncertain.

A message that is followed by another one of the same change has no LSN (0): a walsender must not send an LSN twice
(walsender.c: WalSndPrepareWrite, last_write).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, Literal

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.nearest import nearest
from pubsub.protocol.wire import U16, U32, U64
from walsender.historic.client_encoding import Convert
from walsender.historic.relation import RelationInfo, RelationResolver
from walsender.plugins.encoder import Encoder, make_encoder
from walsender.plugins.plugin import RowChange, SentTransaction, Write
from walsender.plugins.publication import PublicationFilter, PublishedRelation
from walsender.types.layout import Raw, ToastPointer
from walsender.types.registry import UnsupportedType

Streaming = Literal["off", "on", "parallel"]

VERSION_16: Final = 160000
VERSION_17: Final = 170000
_FIRST_GENBKI_OID: Final = 10000
_MAX_UINT32: Final = (1 << 32) - 1
_NAME_BYTES: Final = 63
_SPACES: Final = " \t\n\r\f\v"
_UNSIGNED: Final = re.compile(r"(?:[ \t\n\r\f\v]*[+-]?[0-9]+)?")
_IDENTIFIER: Final = re.compile(
    r'(?:"((?:[^"]|"")*)"|([^", \t\n\r\f\v][^, \t\n\r\f\v]*))[ \t\n\r\f\v]*(?:(,)[ \t\n\r\f\v]*|\Z)'
)
"""A name in quotes or a plain one, and the comma after it."""
_BEGIN: Final = Struct(">QqI")
_COMMIT: Final = Struct(">BQQq")
_PREPARE: Final = Struct(">QQqI")
_PREPARED: Final = Struct(">BQQqI")
_ROLLBACK: Final = Struct(">BQQqqI")
_COLUMN: Final = Struct(">Ii")


@dataclass(frozen=True, slots=True)
class PgoutputOptions:
    """START_REPLICATION's options for pgoutput (pgoutput.c: parse_output_parameters)."""

    proto_version: int
    publication_names: tuple[str, ...]
    binary: bool = False
    messages: bool = False
    streaming: Streaming = "off"
    two_phase: bool = False
    origin: Literal["any", "none"] = "any"

    @classmethod
    def parse(cls, options: Mapping[str, str], server_version: int) -> PgoutputOptions:
        """Parse the options, in their order.  Raises PubsubError like a server of `server_version`, in its words."""
        version: int | None = None
        names: tuple[str, ...] | None = None
        flags = {"binary": False, "messages": False, "two_phase": False}
        streaming: Streaming = "off"
        origin: Literal["any", "none"] = "any"
        for name, value in options.items():
            if name == "proto_version":
                version = _number(value)
            elif name == "publication_names":
                names = tuple(_split_identifiers(value))
            elif name in flags:
                flags[name] = _flag(value, name)
            elif name == "streaming":
                streaming = _streaming(value, server_version)
            elif name == "origin" and server_version >= VERSION_16:
                origin = _origin(value)
            else:
                raise PubsubError(
                    f"unrecognized pgoutput option: {name}", sqlstate="XX000", hint=_meant(name, server_version)
                )
        if server_version >= VERSION_17:
            for given, name in ((version, "proto_version"), (names, "publication_names")):
                if given is None:
                    raise PubsubError(f'option "{name}" missing', sqlstate="22023")
        version = version or 0
        who = "server only supports" if server_version >= VERSION_16 else "we only support"
        newest = 4 if server_version >= VERSION_16 else 3
        if not 1 <= version <= newest:
            bound = f"{newest} or lower" if version else "1 or higher"
            raise FeatureNotSupported(f"client sent proto_version={version} but {who} protocol {bound}")
        if server_version < VERSION_17 and not names:
            raise PubsubError("publication_names parameter missing", sqlstate="22023")
        for needed, least, what in (
            (streaming == "on", 2, "streaming"),
            (streaming == "parallel", 4, "parallel streaming"),
            (flags["two_phase"], 3, "two-phase commit"),
        ):
            if needed and version < least:
                raise PubsubError(
                    f"requested proto_version={version} does not support {what}, need {least} or higher",
                    sqlstate="22023",
                )
        return cls(version, names or (), flags["binary"], flags["messages"], streaming, flags["two_phase"], origin)


@dataclass(eq=False, slots=True)
class PgoutputEntry:
    """A published relation and its definition's messages, without the xid that they have in streams."""

    relation: int
    published: PublishedRelation
    relation_id: bytes
    definitions: tuple[tuple[int, tuple[bytes, ...]], ...]
    """(oid, Type messages and the Relation message) of the ancestor that it is sent as, if any, and of itself."""
    generation: tuple[int, ...]
    encode: Encoder | None
    """Encodes rows that are sent as they are; None: they take the general path."""
    insert_head: bytes
    update_head: bytes
    """How such a row's message begins, outside of streams."""


@dataclass(eq=False, slots=True)
class _Known:
    """The state of the subscriber: the messages it was sent for each relation, and the generation when they were last compared."""

    generations: dict[int, tuple[int, ...]] = field(default_factory=dict)
    messages: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    uncertain: set[int] = field(default_factory=set)
    """Relations of which the subscriber may have been sent other messages, inside this stream."""

    def is_uncertain(self, oid: int) -> None:
        """Have the relation's messages sent again before its next change."""
        self.messages.pop(oid, None)
        self.generations.clear()

    def rolled_back(self) -> None:
        """Note that a part of the stream is rolled back; it is not known which."""
        self.uncertain.update(self.messages)
        self.messages.clear()
        self.generations.clear()


class PgoutputPlugin:
    """The plugin, see the module's docstring.  `write` gets each message with its LSN."""

    path: tuple[str, ...] = ()
    """Subscribers set an empty search path (libpqwalreceiver.c: libpqrcv_connect)."""

    def __init__(
        self,
        options: PgoutputOptions,
        publications: PublicationFilter,
        write: Write,
        encoding: str,
        convert: Convert | None = None,
    ) -> None:
        """`encoding`: Python's name for the database's; `convert`: makes text in it text in the client's encoding."""
        self.streaming = options.streaming != "off"
        self._options = options
        self._publications = publications
        self._write = write
        self._encoding = encoding
        self._convert = convert
        self._known = _Known()
        self._known_in_stream: dict[int, _Known] = {}
        self._in_stream = False

    # Relations

    def describe(self, relation: RelationInfo, resolver: RelationResolver) -> PgoutputEntry | None:
        published = self._publications.published(relation, resolver)
        if published is None:
            return None
        definitions = []
        target = published.target
        if target is not relation:
            definitions.append((target.oid, self._definition(target, published.columns)))
        definitions.append((relation.oid, self._definition(relation, published.own_columns)))
        encode = None
        plain = published.filters == (None, None, None) and target is relation and not self._options.binary
        if plain and self._convert is None and all(column.type is not None for column in relation.columns):
            sent = set(published.columns)
            encode = make_encoder(
                [
                    (column.type.base_oid, column.type.length, column.type.alignment, column.type.out, index in sent)
                    for index, column in enumerate(relation.columns)
                    if column.type is not None
                ],
                len(sent),
            )
        return PgoutputEntry(
            relation.oid,
            published,
            U32.pack(target.oid),
            tuple(definitions),
            relation.generation,
            encode,
            b"I" + U32.pack(target.oid),
            b"U" + U32.pack(target.oid),
        )

    def _definition(self, relation: RelationInfo, columns: Sequence[int]) -> tuple[bytes, ...]:
        """Make the Type messages and the Relation message, without the xid of streams.

        Follows pgoutput.c: send_relation_and_attrs.
        """
        messages: list[bytes] = []
        parts = [
            U32.pack(relation.oid),
            self._string("" if relation.schema == "pg_catalog" else relation.schema),
            self._string(relation.name),
            relation.replica_identity.encode(),
            U16.pack(len(columns)),
        ]
        full = relation.replica_identity == "f"
        for index in columns:
            column = relation.columns[index]
            if column.type_oid >= _FIRST_GENBKI_OID and column.type is not None:
                info = column.type
                namespace = "" if info.base_namespace == "pg_catalog" else info.base_namespace
                messages.append(
                    b"Y" + U32.pack(column.type_oid) + self._string(namespace) + self._string(info.base_name)
                )
            parts += (
                b"\1" if full or column.number in relation.identity else b"\0",
                self._string(column.name),
                _COLUMN.pack(column.type_oid, column.type_modifier),
            )
        messages.append(b"R" + b"".join(parts))
        return tuple(messages)

    def _string(self, text: str) -> bytes:
        return self._text(text.encode(self._encoding)) + b"\0"

    def _text(self, text: bytes) -> bytes:
        return text if self._convert is None else self._convert(text)

    def _send_definitions(self, txn: SentTransaction, xid: int, entry: PgoutputEntry) -> None:
        """Send the definitions that the subscriber was not sent yet (pgoutput.c: maybe_send_schema)."""
        known = self._known_in_stream.setdefault(txn.xid, _Known()) if self._in_stream else self._known
        if known.generations.get(entry.relation) == entry.generation:
            return
        known.generations[entry.relation] = entry.generation
        for oid, messages in entry.definitions:
            if known.messages.get(oid) == messages:
                continue
            known.messages[oid] = messages
            if self._in_stream and self._options.streaming == "parallel" and self._known.messages.get(oid) != messages:
                self._known.is_uncertain(oid)
            for message in messages:
                self._send(txn, 0, message[:1] + U32.pack(xid) + message[1:] if self._in_stream else message)

    def forget(self, *, definitions: bool) -> None:
        for known in (self._known, *self._known_in_stream.values()):
            known.generations.clear()
        if definitions:
            self._known.messages.clear()

    def refusal(self, relation: RelationInfo, entry: PgoutputEntry) -> PubsubError | None:
        published = entry.published
        if not (published.insert or published.update or published.delete):
            return None
        for index in published.columns:
            info = published.target.columns[index].type
            if info is not None and info.refusal is not None:
                return _of_table(relation, info.refusal)
        return None

    def skips_origin(self, origin_id: int) -> bool:
        return origin_id != 0 and self._options.origin == "none"

    # Rows

    def row(self, txn: SentTransaction, entry: PgoutputEntry, lsn: int, kind: str, data: bytes, at: int) -> bool:
        """Send an insert, or an update without an old row, from its bytes; return False to have `change` do it."""
        if entry.encode is None or self._in_stream:
            return False
        insert = kind == "insert"
        if not (entry.published.insert if insert else entry.published.update):
            return True
        try:
            written = entry.encode(entry.insert_head if insert else entry.update_head, data, at)
        except UnsupportedType:
            return False  # the general path names the table
        if written is None:
            return False
        if not txn.private:
            self._begin_sent(txn, lsn)
        if self._known.generations.get(entry.relation) != entry.generation:
            self._send_definitions(txn, 0, entry)
        self._write(lsn, txn.xid, written)
        return True

    def change(self, txn: SentTransaction, relation: RelationInfo, entry: PgoutputEntry, change: RowChange) -> None:
        published = entry.published
        kind = change.kind
        if kind == "insert":
            if not published.insert:
                return
            row_filter = published.filters[0]
        elif kind == "update":
            if not published.update:
                return
            row_filter = published.filters[1]
        else:
            if not published.delete or change.old is None:
                return
            row_filter = published.filters[2]
        old = published.as_target(change.old)
        new = published.as_target(change.new)
        if row_filter is not None:
            if old is None or new is None:
                row = old if new is None else new
                assert row is not None
                if not row_filter(row):
                    return
            else:
                merged = _with_old_values(published.target, old, new)
                old_matches, new_matches = row_filter(old), row_filter(merged)
                if not old_matches and not new_matches:
                    return
                if not old_matches:
                    kind, old, new = "insert", None, merged
                elif not new_matches:
                    kind, new = "delete", None
        self._begin_sent(txn, change.lsn)
        self._send_definitions(txn, change.xid, entry)
        head = U32.pack(change.xid) + entry.relation_id if self._in_stream else entry.relation_id
        try:
            if kind == "insert":
                assert new is not None
                message = b"I" + head + b"N" + self._tuple(published, new)
            elif kind == "update":
                assert new is not None
                before = b"" if old is None else self._old_mark(published.target) + self._tuple(published, old)
                message = b"U" + head + before + b"N" + self._tuple(published, new)
            else:
                assert old is not None
                message = b"D" + head + self._old_mark(published.target) + self._tuple(published, old)
        except UnsupportedType as error:
            raise _of_table(relation, error) from error
        self._send(txn, change.lsn, message)

    def _old_mark(self, relation: RelationInfo) -> bytes:
        return b"O" if relation.replica_identity == "f" else b"K"

    def _tuple(self, published: PublishedRelation, row: list[Raw]) -> bytes:
        """Write a row as a tuple (proto.c: logicalrep_write_tuple)."""
        columns = published.target.columns
        parts = [U16.pack(len(published.columns))]
        binary, convert = self._options.binary, self._convert
        for index in published.columns:
            value = row[index]
            if value is None:
                parts.append(b"n")
            elif isinstance(value, ToastPointer):
                parts.append(b"u")
            else:
                info = columns[index].type
                assert info is not None
                as_binary = binary and info.has_binary
                written = info.send(value) if as_binary else info.out(value)
                if convert is not None and not as_binary:
                    written = convert(written)
                parts += (b"b" if as_binary else b"t", U32.pack(len(written)), written)
        return b"".join(parts)

    def truncate(
        self,
        txn: SentTransaction,
        lsn: int,
        xid: int,
        relations: list[tuple[RelationInfo, PgoutputEntry | None]],
        cascade: bool,
        restart_seqs: bool,
    ) -> None:
        oids: list[int] = []
        for relation, entry in relations:
            if entry is None or not entry.published.truncate:
                continue
            if relation.is_partition and entry.published.target.oid != relation.oid:
                continue
            oids.append(relation.oid)
            self._begin_sent(txn, lsn)
            self._send_definitions(txn, xid, entry)
        if oids:
            flags = bytes((cascade | restart_seqs << 1,))
            head = b"T" + (U32.pack(xid) if self._in_stream else b"")
            self._send(txn, lsn, head + U32.pack(len(oids)) + flags + b"".join([U32.pack(oid) for oid in oids]))

    def message(
        self, txn: SentTransaction | None, lsn: int, xid: int, transactional: bool, prefix: bytes, content: bytes
    ) -> None:
        if not self._options.messages:
            return
        if transactional and txn is not None:
            self._begin_sent(txn, lsn)
        # The transaction's id, not the subtransaction's as with changes (pgoutput.c: pgoutput_message).
        stream = U32.pack(txn.xid) if self._in_stream and txn is not None else b""
        head = b"M" + stream + (b"\1" if transactional else b"\0")
        body = U64.pack(lsn) + self._text(prefix) + b"\0" + U32.pack(len(content)) + content
        self._write(lsn, txn.xid if txn is not None else 0, head + body)

    # Transactions

    def prepares(self, gid: bytes) -> bool:
        return self._options.two_phase

    def begin(self, txn: SentTransaction) -> None:
        txn.private = False  # whether Begin was sent; the first change sends it

    def _begin_sent(self, txn: SentTransaction, lsn: int) -> None:
        if txn.private is False:
            txn.private = True
            self._send_first(txn, lsn, b"B" + _BEGIN.pack(txn.final_lsn, txn.time, txn.xid), txn.origin_lsn)

    def _send_first(self, txn: SentTransaction, lsn: int, message: bytes, origin_lsn: int) -> None:
        """Send a transaction's first message, and its Origin message if it has an origin."""
        self._send(txn, 0 if txn.origin_id else lsn, message)
        if txn.origin_id and txn.origin_name is not None:
            self._send(txn, lsn, b"O" + U64.pack(origin_lsn) + self._string(txn.origin_name))

    def commit(self, txn: SentTransaction) -> None:
        if txn.private:
            self._send(txn, txn.end_lsn, b"C" + _COMMIT.pack(0, txn.final_lsn, txn.end_lsn, txn.time))

    def begin_prepare(self, txn: SentTransaction) -> None:
        fields = _PREPARE.pack(txn.final_lsn, txn.end_lsn, txn.time, txn.xid)
        self._send_first(txn, txn.first_lsn, b"b" + fields + self._text(txn.gid) + b"\0", txn.origin_lsn)

    def prepare(self, txn: SentTransaction) -> None:
        self._prepared(b"P", txn)

    def commit_prepared(self, txn: SentTransaction) -> None:
        self._prepared(b"K", txn)

    def _prepared(self, kind: bytes, txn: SentTransaction) -> None:
        fields = _PREPARED.pack(0, txn.final_lsn, txn.end_lsn, txn.time, txn.xid)
        self._send(txn, txn.end_lsn, kind + fields + self._text(txn.gid) + b"\0")

    def rollback_prepared(self, txn: SentTransaction) -> None:
        fields = _ROLLBACK.pack(0, txn.prepare_end_lsn, txn.end_lsn, txn.prepare_time, txn.time, txn.xid)
        self._send(txn, txn.end_lsn, b"r" + fields + self._text(txn.gid) + b"\0")

    # Streams

    def stream_start(self, txn: SentTransaction, lsn: int, first: bool) -> None:
        if first:
            self._send_first(txn, lsn, b"S" + U32.pack(txn.xid) + b"\1", 0)
        else:
            self._send(txn, lsn, b"S" + U32.pack(txn.xid) + b"\0")
        self._in_stream = True

    def stream_stop(self, txn: SentTransaction, lsn: int) -> None:
        self._send(txn, lsn, b"E")
        self._in_stream = False

    def stream_abort(self, txn: SentTransaction, xid: int, lsn: int, time: int) -> None:
        message = b"A" + U32.pack(txn.xid) + U32.pack(xid)
        if self._options.streaming == "parallel":
            message += Struct(">Qq").pack(lsn, time)
        self._send(txn, lsn, message)
        if xid == txn.xid:
            self._known_in_stream.pop(xid, None)
        elif (sent := self._known_in_stream.get(txn.xid)) is not None:
            sent.rolled_back()

    def stream_commit(self, txn: SentTransaction) -> None:
        fields = _COMMIT.pack(0, txn.final_lsn, txn.end_lsn, txn.time)
        self._send(txn, txn.end_lsn, b"c" + U32.pack(txn.xid) + fields)
        self._applied(txn)

    def stream_prepare(self, txn: SentTransaction) -> None:
        self._prepared(b"p", txn)
        self._applied(txn)

    def _applied(self, txn: SentTransaction) -> None:
        """Take over what the stream sent: the subscriber has applied all of it."""
        sent = self._known_in_stream.pop(txn.xid, None)
        if sent is None:
            return
        known = self._known
        for oid in sent.uncertain - sent.messages.keys():
            known.is_uncertain(oid)
        for oid, messages in sent.messages.items():
            if known.messages.get(oid) != messages:
                known.is_uncertain(oid)
                if self._options.streaming != "parallel":
                    known.messages[oid] = messages
        if self._options.streaming != "parallel":
            known.generations |= sent.generations

    def _send(self, txn: SentTransaction, lsn: int, message: bytes) -> None:
        self._write(lsn, txn.xid, message)


def _of_table(relation: RelationInfo, error: UnsupportedType) -> UnsupportedType:
    return UnsupportedType(f'table "{relation.qualified_name}": {error.message}', detail=error.detail, hint=error.hint)


def _with_old_values(relation: RelationInfo, old: list[Raw], new: list[Raw]) -> list[Raw]:
    """Return the new row, with unchanged TOASTed values from the old row as far as that has them."""
    if not any(isinstance(value, ToastPointer) for value in new):
        return new
    return [
        before
        if isinstance(value, ToastPointer) and before is not None and not isinstance(before, ToastPointer)
        else value
        for before, value in zip(old, new, strict=True)
    ]


def _number(text: str) -> int:
    """Parse a number as strtoul does: an empty text is 0, a negative number is out of range."""
    if not _UNSIGNED.fullmatch(text):
        raise PubsubError("invalid proto_version", sqlstate="22023")
    number = int(text or "0")
    if not 0 <= number <= _MAX_UINT32:
        raise PubsubError(f'proto_version "{text}" out of range', sqlstate="22023")
    return number


def _flag(text: str, name: str, requires: str = "a Boolean value") -> bool:
    """Parse a Boolean option (define.c: defGetBoolean), which knows fewer words than the type does."""
    found = {"true": True, "on": True, "false": False, "off": False}.get(text.lower())
    if found is None:
        raise PubsubError(f"{name} requires {requires}", sqlstate="42601")
    return found


def _meant(name: str, server_version: int) -> str | None:
    known = ["proto_version", "publication_names", "binary", "messages", "streaming", "two_phase"]
    best = nearest(name, [*known, "origin"] if server_version >= VERSION_16 else known)
    return f'Perhaps you meant the option "{best}".' if best is not None else None


def _streaming(text: str, server_version: int) -> Streaming:
    """Parse the streaming mode (subscriptioncmds.c: defGetStreamingMode)."""
    if server_version < VERSION_16:
        return "on" if _flag(text, "streaming") else "off"
    if text.lower() == "parallel":
        return "parallel"
    return "on" if _flag(text, "streaming", 'a Boolean value or "parallel"') else "off"


def _origin(text: str) -> Literal["any", "none"]:
    if text.lower() == "none":
        return "none"
    if text.lower() == "any":
        return "any"
    raise PubsubError(f'unrecognized origin value: "{text}"', sqlstate="22023")


def _split_identifiers(names: str) -> list[str]:
    """Split a list of identifiers (varlena.c: SplitIdentifierString)."""
    found: list[str] = []
    rest = names.lstrip(_SPACES)
    while rest or found:
        match = _IDENTIFIER.match(rest)
        if match is None:
            raise PubsubError("invalid publication_names syntax", sqlstate="42602")
        quoted, plain, comma = match.groups()
        # Of a client that names no encoding, they may be any bytes.
        name = quoted.replace('""', '"') if plain is None else plain
        data = name.encode("utf-8", "surrogateescape")
        data = data if plain is None else data.lower()
        cut = len(data) > _NAME_BYTES
        found.append(data[:_NAME_BYTES].decode("utf-8", "ignore" if cut else "surrogateescape"))
        rest = rest[match.end() :]
        if not comma:
            break
    return found
