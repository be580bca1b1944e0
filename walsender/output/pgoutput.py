"""The output plugin pgoutput, protocol 1 to 4 (pgoutput.c, proto.c).

Relation and Type messages are sent before a relation's first change, and again when what they say has changed.  PostgreSQL
repeats them more often, whenever it has forgotten, and so do two of its walsenders of each other; a subscriber must not
tell the difference.  What was sent inside a stream counts for the stream's transaction only: a subscriber comes by it when it
applies the transaction, over what it was told since, and never where its subtransaction is rolled back.  One that applies in
parallel may also have taken it up at once (worker.c: handle_streamed_transaction), so that what it knows then is uncertain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from struct import Struct
from typing import Final, Literal

from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.wire import U16, U32, U64
from walsender.historic.relation import RelationInfo, RelationResolver
from walsender.output.encoder import Encoder, make_encoder
from walsender.output.plugin import RowChange, SentTransaction, Write
from walsender.output.publication import PublicationFilter, PublishedRelation
from walsender.types.layout import Raw, ToastPointer
from walsender.types.registry import UnsupportedType

Streaming = Literal["off", "on", "parallel"]

_FIRST_GENBKI_OID: Final = 10000
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
        """Raises PubsubError in the server's words; what the server's version does not know is refused too."""
        given = dict(options)
        version = _number(given.pop("proto_version", None))
        names = given.pop("publication_names", None)
        if names is None:
            raise PubsubError("publication_names parameter missing", sqlstate="22023")
        binary = _flag(given.pop("binary", "false"), "binary")
        messages = _flag(given.pop("messages", "false"), "messages")
        two_phase = _flag(given.pop("two_phase", "false"), "two_phase")
        streaming = _streaming(given.pop("streaming", "off"), server_version)
        origin = given.pop("origin", "any")
        if origin not in {"any", "none"} or (server_version < 160000 and "origin" in options):
            raise PubsubError(f'unrecognized origin value: "{origin}"', sqlstate="22023")
        if given:
            raise PubsubError(f"unrecognized pgoutput option: {next(iter(given))}", sqlstate="XX000")
        newest = 4 if server_version >= 160000 else 3
        if version > newest:
            raise FeatureNotSupported(
                f"client sent proto_version={version} but server only supports protocol {newest} or lower"
            )
        if version < 1:
            raise FeatureNotSupported(
                f"client sent proto_version={version} but server only supports protocol 1 or higher"
            )
        for needed, least, what in (
            (streaming == "on", 2, "streaming"),
            (streaming == "parallel", 4, "parallel streaming"),
            (two_phase, 3, "two-phase commit"),
        ):
            if needed and version < least:
                raise FeatureNotSupported(
                    f"requested proto_version={version} does not support {what}, need {least} or higher"
                )
        return cls(
            version,
            tuple(_split_identifiers(names)),
            binary,
            messages,
            streaming,
            two_phase,
            "none" if origin == "none" else "any",
        )


@dataclass(eq=False, slots=True)
class PgoutputEntry:
    """A published relation and its definition's messages; with `xid` bytes left out, which only streams have."""

    relation: int
    published: PublishedRelation
    relation_id: bytes
    definitions: tuple[tuple[int, tuple[bytes, ...]], ...]
    """(oid, Type messages and the Relation message) of the ancestor that it is sent as, and of itself."""
    generation: tuple[int, ...]
    encode: Encoder | None
    """For rows that are sent as they are."""
    insert_head: bytes
    update_head: bytes
    """What such a row's message begins with, outside of streams."""


@dataclass(eq=False, slots=True)
class _Known:
    """What the subscriber was told: each relation's messages, and at which generation a relation's were last looked at."""

    generations: dict[int, tuple[int, ...]] = field(default_factory=dict)
    messages: dict[int, tuple[bytes, ...]] = field(default_factory=dict)
    uncertain: set[int] = field(default_factory=set)
    """Relations of which it may have been told something else, inside of this stream."""

    def is_uncertain(self, oid: int) -> None:
        """Whatever is sent of the relation next has its messages before it."""
        self.messages.pop(oid, None)
        self.generations.clear()

    def rolled_back(self) -> None:
        """A part of the stream is cut off; it is not known which."""
        self.uncertain.update(self.messages)
        self.messages.clear()
        self.generations.clear()


class PgoutputPlugin:
    """See the module's text.  `write` gets each message with its LSN."""

    path: tuple[str, ...] = ()
    """Subscribers set an empty one (libpqwalreceiver.c: libpqrcv_connect)."""

    def __init__(self, options: PgoutputOptions, publications: PublicationFilter, write: Write, encoding: str) -> None:
        self.streaming = options.streaming != "off"
        self.two_phase = options.two_phase
        self._options = options
        self._publications = publications
        self._write = write
        self._encoding = encoding
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
        if plain and all(column.type is not None for column in relation.columns):
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
        """The Type messages and the Relation message, without the xid of streams (pgoutput.c: send_relation_and_attrs)."""
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
        return text.encode(self._encoding) + b"\0"

    def _send_definitions(self, txn: SentTransaction, lsn: int, xid: int, entry: PgoutputEntry) -> None:
        """What the subscriber has not been told yet (pgoutput.c: maybe_send_schema)."""
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
                self._send(txn, lsn, message[:1] + U32.pack(xid) + message[1:] if self._in_stream else message)

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
        """Send an insert, or an update without an old row, straight from its bytes; False: `change` is to do it."""
        if entry.encode is None or self._in_stream:
            return False
        insert = kind == "insert"
        if not (entry.published.insert if insert else entry.published.update):
            return True
        try:
            written = entry.encode(entry.insert_head if insert else entry.update_head, data, at)
        except UnsupportedType:
            return False  # the general way says of which table
        if written is None:
            return False
        if not txn.private:
            self._begin_sent(txn, lsn)
        if self._known.generations.get(entry.relation) != entry.generation:
            self._send_definitions(txn, lsn, 0, entry)
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
        self._send_definitions(txn, change.lsn, change.xid, entry)
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
        """proto.c: logicalrep_write_tuple."""
        columns = published.target.columns
        parts = [U16.pack(len(published.columns))]
        binary = self._options.binary
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
            self._send_definitions(txn, lsn, xid, entry)
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
        # Of the transaction, not of the subtransaction as with changes (pgoutput.c: pgoutput_message).
        stream = U32.pack(txn.xid) if self._in_stream and txn is not None else b""
        head = b"M" + stream + (b"\1" if transactional else b"\0")
        body = U64.pack(lsn) + prefix + b"\0" + U32.pack(len(content)) + content
        self._write(lsn, txn.xid if txn is not None else 0, head + body)

    # Transactions

    def begin(self, txn: SentTransaction) -> None:
        txn.private = False  # whether Begin was sent: it is, with the first change

    def _begin_sent(self, txn: SentTransaction, lsn: int) -> None:
        if txn.private is False:
            txn.private = True
            self._send(txn, lsn, b"B" + _BEGIN.pack(txn.final_lsn, txn.time, txn.xid))
            self._send_origin(txn, lsn, txn.origin_lsn)

    def _send_origin(self, txn: SentTransaction, lsn: int, origin_lsn: int) -> None:
        if txn.origin_id and txn.origin_name is not None:
            self._send(txn, lsn, b"O" + U64.pack(origin_lsn) + self._string(txn.origin_name))

    def commit(self, txn: SentTransaction) -> None:
        if txn.private:
            self._send(txn, txn.end_lsn, b"C" + _COMMIT.pack(0, txn.final_lsn, txn.end_lsn, txn.time))

    def begin_prepare(self, txn: SentTransaction) -> None:
        self._send(
            txn, txn.first_lsn, b"b" + _PREPARE.pack(txn.final_lsn, txn.end_lsn, txn.time, txn.xid) + txn.gid + b"\0"
        )
        self._send_origin(txn, txn.first_lsn, txn.origin_lsn)

    def prepare(self, txn: SentTransaction) -> None:
        self._prepared(b"P", txn)

    def commit_prepared(self, txn: SentTransaction) -> None:
        self._prepared(b"K", txn)

    def _prepared(self, kind: bytes, txn: SentTransaction) -> None:
        fields = _PREPARED.pack(0, txn.final_lsn, txn.end_lsn, txn.time, txn.xid)
        self._send(txn, txn.end_lsn, kind + fields + txn.gid + b"\0")

    def rollback_prepared(self, txn: SentTransaction) -> None:
        fields = _ROLLBACK.pack(0, txn.prepare_end_lsn, txn.end_lsn, txn.prepare_time, txn.time, txn.xid)
        self._send(txn, txn.end_lsn, b"r" + fields + txn.gid + b"\0")

    # Streams

    def stream_start(self, txn: SentTransaction, lsn: int, first: bool) -> None:
        self._send(txn, lsn, b"S" + U32.pack(txn.xid) + (b"\1" if first else b"\0"))
        if first:
            self._send_origin(txn, lsn, 0)
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
        elif (told := self._known_in_stream.get(txn.xid)) is not None:
            told.rolled_back()

    def stream_commit(self, txn: SentTransaction) -> None:
        fields = _COMMIT.pack(0, txn.final_lsn, txn.end_lsn, txn.time)
        self._send(txn, txn.end_lsn, b"c" + U32.pack(txn.xid) + fields)
        self._applied(txn)

    def stream_prepare(self, txn: SentTransaction) -> None:
        self._prepared(b"p", txn)
        self._applied(txn)

    def _applied(self, txn: SentTransaction) -> None:
        """The subscriber has come by all that the stream said."""
        told = self._known_in_stream.pop(txn.xid, None)
        if told is None:
            return
        known = self._known
        for oid in told.uncertain - told.messages.keys():
            known.is_uncertain(oid)
        for oid, messages in told.messages.items():
            if known.messages.get(oid) != messages:
                known.is_uncertain(oid)
                if self._options.streaming != "parallel":
                    known.messages[oid] = messages
        if self._options.streaming != "parallel":
            known.generations |= told.generations

    def _send(self, txn: SentTransaction, lsn: int, message: bytes) -> None:
        self._write(lsn, txn.xid, message)


def _of_table(relation: RelationInfo, error: UnsupportedType) -> UnsupportedType:
    return UnsupportedType(f'table "{relation.qualified_name}": {error.message}', detail=error.detail, hint=error.hint)


def _with_old_values(relation: RelationInfo, old: list[Raw], new: list[Raw]) -> list[Raw]:
    """The new row; its unchanged TOASTed values are those of the old row, where that has them."""
    if not any(isinstance(value, ToastPointer) for value in new):
        return new
    return [
        before
        if isinstance(value, ToastPointer) and before is not None and not isinstance(before, ToastPointer)
        else value
        for before, value in zip(old, new, strict=True)
    ]


def _number(text: str | None) -> int:
    if text is None:
        raise PubsubError("proto_version option missing", sqlstate="22023")
    try:
        return int(text)
    except ValueError:
        raise PubsubError("invalid proto_version", sqlstate="22023") from None


def _flag(text: str, name: str) -> bool:
    lowered = text.lower()
    if lowered in {"true", "on", "1", "yes", "t", "y"}:
        return True
    if lowered in {"false", "off", "0", "no", "f", "n"}:
        return False
    raise PubsubError(f"{name} requires a Boolean value", sqlstate="22023")


def _streaming(text: str, server_version: int) -> Streaming:
    if text.lower() == "parallel" and server_version >= 160000:
        return "parallel"
    return "on" if _flag(text, "streaming") else "off"


def _split_identifiers(names: str) -> list[str]:
    """varlena.c: SplitIdentifierString."""
    from pubsub.sql.identifiers import parse_qualified_name

    found: list[str] = []
    rest = names
    while rest.strip():
        rest = rest.lstrip()
        if rest.startswith('"'):
            end = 1
            while True:
                end = rest.find('"', end)
                if end < 0:
                    raise PubsubError("invalid publication_names syntax", sqlstate="42602")
                if rest[end + 1 : end + 2] == '"':
                    end += 2
                    continue
                break
            found.append(rest[1:end].replace('""', '"'))
            rest = rest[end + 1 :].lstrip()
        else:
            name, comma, tail = rest.partition(",")
            found.append(parse_qualified_name(name.strip()).name)
            rest = comma + tail
        if rest.startswith(","):
            rest = rest[1:]
        elif rest:
            raise PubsubError("invalid publication_names syntax", sqlstate="42602")
    return found
