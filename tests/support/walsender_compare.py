"""Compares our decoding with PostgreSQL's, as far as a subscriber can tell the difference.

There are two kinds of comparison, since a logical slot on the server pins catalog_xmin and so hides pruning:

    `differences`               our bytes with those of a logical slot on the same server (walsender_decodings.py)
    walsender_random.Replica    without a slot: our changes, applied to an empty copy, with the server's tables
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence, Set

from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Relation, read_message
from tests.support.walsender_decodings import Message, aborted_streams

_PREPARED = re.compile(rb"(PREPARE TRANSACTION|COMMIT PREPARED|ROLLBACK PREPARED) ('[^']*')")

Definition = tuple[bytes, ...]
"""A relation's Type messages and its Relation message, without their kind and, in a stream, xid."""


def comparable(messages: Sequence[Message], *, pgoutput: bool, at_once: bool = False) -> list[tuple[object, ...]]:
    """Convert messages to a form that is equal for equal decodings.

    Relation and Type messages are removed; each row, or truncation, carries the definitions in effect instead.
    `at_once`: as a subscriber's leader, which uses a stream's definitions at once, sees them while a parallel worker
    applies the stream.
    """
    if not pgoutput:
        return [(m.lsn, m.xid, m.data) for m in messages]
    found: list[tuple[object, ...]] = []
    relations: dict[bytes, Definition] = {}
    in_stream: dict[bytes, _Spooled] = {}
    types: list[bytes] = []
    stream: _Spooled | None = None
    for m in messages:
        kind = m.data[:1]
        skip = 5 if stream is not None else 1
        if stream is not None and kind not in {b"E", b"O"}:
            stream.enter(m.data[1:5])
        if kind == b"Y":
            types.append(m.data[skip:])
        elif kind == b"R":
            oid, definition = m.data[skip : skip + 4], (*types, m.data[skip:])
            types = []
            if stream is not None:
                stream.definitions.append((oid, definition))
            if stream is None or at_once:
                relations[oid] = definition
        elif kind in {b"I", b"U", b"D", b"T"}:
            if kind == b"T":
                (count,) = struct.unpack_from(">I", m.data, skip)
                oids = [m.data[skip + 5 + 4 * i : skip + 9 + 4 * i] for i in range(count)]
            else:
                oids = [m.data[skip : skip + 4]]
            inside = dict(stream.definitions) if stream is not None else {}
            found.append((m.lsn, m.data, [inside.get(oid) or relations.get(oid) for oid in oids]))
        else:
            if kind == b"S":
                stream = in_stream.setdefault(m.data[1:5], _Spooled())
            elif kind == b"E":
                stream = None
            elif kind == b"A" and m.data[1:5] in in_stream:
                in_stream[m.data[1:5]].abort(m.data[5:9])
            elif kind in {b"c", b"p"}:
                xid = m.data[1:5] if kind == b"c" else m.data[26:30]
                applied = in_stream.pop(xid, _Spooled())
                if not at_once:
                    relations.update(applied.definitions)
            found.append((m.lsn, m.data))
    _messages_first(found)
    return found


def _messages_first(found: list[tuple[object, ...]]) -> None:
    """Move each logical message before the changes that have the same LSN, as in the WAL.

    A logical message has the LSN of its record's end, which the next record's changes can have, too.  If those belong
    to another subtransaction, a server merges the two by LSN, and its binary heap decides which comes first
    (ReorderBufferIterCompare).
    """
    for number, item in enumerate(found):
        if _kind(item) == b"M":
            place = number
            while place > 0 and found[place - 1][0] == item[0] and _kind(found[place - 1]) in {b"I", b"U", b"D", b"T"}:
                found[place] = found[place - 1]
                place -= 1
            found[place] = item


def _kind(item: tuple[object, ...]) -> bytes:
    data = item[1]
    assert isinstance(data, bytes)
    return data[:1]


def inconsistency(messages: Sequence[Message], *, parallel: bool = False, only_local: bool = False) -> str:
    """Return "" if a subscriber's definitions fit every row and every stream has an end; otherwise what is wrong.

    `parallel` also checks a subscriber that applies streams in parallel.  `only_local`: origin = none, where a stream
    whose commit came from elsewhere has no end, as with a server (DecodeCommit: ReorderBufferForget).
    """
    for at_once in (False, True) if parallel else (False,):
        streaming = False
        for item in comparable(messages, pgoutput=True, at_once=at_once):
            data = item[1]
            assert isinstance(data, bytes)
            kind = data[:1]
            streaming = kind == b"S" or (streaming and kind != b"E")
            if kind in {b"I", b"U", b"D"}:
                effect = item[2]
                assert isinstance(effect, list)
                (columns,) = struct.unpack_from(">H", data, 10 if streaming else 6)
                if effect[0] is None or columns != _columns(effect[0]):
                    return f"a row of {columns} columns: {_shown(item)}"
    begun = {m.data[1:5] for m in messages if m.data[:1] == b"S"}
    ended = {m.data[26:30] if m.data[:1] == b"p" else m.data[1:5] for m in messages if m.data[:1] in {b"c", b"p"}}
    if not only_local and (left := begun - ended - aborted_streams(messages)):
        return f"streams without an end: {[int.from_bytes(xid) for xid in left]}"
    return ""


def _columns(definition: Definition) -> int:
    relation = read_message(b"R" + definition[-1])
    assert isinstance(relation, Relation)
    return len(relation.columns)


class _Spooled:
    """The definitions in a streamed transaction, as a subscriber that spools it reads them later (worker.c)."""

    def __init__(self) -> None:
        self.definitions: list[tuple[bytes, Definition]] = []
        """Relations' oids and their messages, in order."""
        self._first: dict[bytes, int] = {}

    def enter(self, xid: bytes) -> None:
        """Note that the next message belongs to (sub)transaction `xid`."""
        self._first.setdefault(xid, len(self.definitions))

    def abort(self, xid: bytes) -> None:
        """Cut off everything since the subtransaction's first message (stream_abort_internal)."""
        start = self._first.get(xid)
        if start is not None:
            del self.definitions[start:]
            self._first = {other: first for other, first in self._first.items() if first < start}


def _rolled_back(messages: Sequence[Message]) -> set[bytes]:
    """Return the xids of the prepared transactions that were rolled back."""
    return {m.data[34:38] for m in messages if m.data[:1] == b"r"}


def _without(messages: Sequence[Message], aborted: Set[bytes], rolled_back: Set[bytes]) -> list[Message]:
    """Remove aborted streamed transactions, and the changes of prepared transactions that were rolled back.

    A server that reads late knows of the rollback, and sends less.  The messages about the preparation stay, and
    those that define relations, which remain in effect.

    Also removed is the end of a transaction without a Prepare.  Such a transaction changed nothing, but a server
    knows it (it locked rows, or a subtransaction was rolled back), and sends its COMMIT PREPARED without a PREPARE
    (ReorderBufferReplay returns if there is no base snapshot, ReorderBufferFinishPrepared does not); ours sends
    nothing of it.  So are Stream Aborts without a stream: 18 takes the subtransactions of a prepared transaction for
    streamed (ReorderBufferTruncateTXN), and sends aborts of them if ROLLBACK PREPARED comes from an origin that is
    left out.
    """
    found: list[Message] = []
    inside: bytes | None = None
    prepared: set[bytes] = set()
    streamed: set[bytes] = set()
    for m in messages:
        kind = m.data[:1]
        if kind == b"S":
            inside = m.data[1:5]
            streamed.add(inside)
        elif kind in {b"P", b"p"}:
            inside = None
            prepared.add(m.data[26:30])
        elif kind == b"b":
            inside = m.data[25:29]
        if not (
            inside in aborted
            or (inside in rolled_back and kind in {b"I", b"U", b"D", b"T", b"M", b"O"})
            or (kind == b"A" and (m.data[1:5] in aborted or m.data[1:5] not in streamed))
            or (kind == b"K" and m.data[26:30] not in prepared)
            or (kind == b"r" and m.data[34:38] not in prepared)
        ):
            found.append(m)
        if kind == b"E":
            inside = None
    return found


def _without_rolled_back(lines: Sequence[Message], gids: Set[bytes]) -> list[Message]:
    """Do the same with test_decoding's lines; remove PREPARE TRANSACTION too, which `skip-empty-xacts` may omit."""
    prepared = {end[2] for m in lines if (end := _PREPARED.match(m.data)) and end[1] == b"PREPARE TRANSACTION"}
    found: list[Message] = []
    begun = 0
    for m in lines:
        if m.data.startswith(b"BEGIN"):
            begun = len(found)
        found.append(m)
        end = _PREPARED.match(m.data)
        if end and end[1] == b"PREPARE TRANSACTION" and end[2] in gids:
            del found[begun:]
        elif end and (end[2] in gids or end[2] not in prepared):
            found.pop()
    return found


def _gids_rolled_back(lines: Sequence[Message]) -> set[bytes]:
    found = (_PREPARED.match(m.data) for m in lines)
    return {end[2] for end in found if end and end[1] == b"ROLLBACK PREPARED"}


def _stream_aborts(messages: Sequence[Message]) -> dict[bytes, Message]:
    """Return the Stream Abort messages by transaction and subtransaction."""
    return {m.data[1:9]: m for m in messages if m.data[:1] == b"A"}


def assembled(messages: Sequence[Message], partly: Set[bytes] = frozenset()) -> list[tuple[object, ...]]:
    """Return the transactions in the order of their ends, each with its changes, regardless of whether it was streamed.

    Messages that begin a transaction are left out, since the start of a stream does not tell how it will end.

    Transactions in `partly`, of which a subtransaction was rolled back while they were streamed, lose their logical
    messages.  In a stream a message has the id of the whole transaction (pgoutput.c: pgoutput_message), so that a
    message that was rolled back after it had been sent cannot be removed.
    """
    found: list[tuple[object, ...]] = []
    begun = b""
    open_ones: dict[bytes, list[tuple[bytes, tuple[object, ...]]]] = {}
    stream: bytes | None = None
    for item in comparable(messages, pgoutput=True):
        lsn, data, *effect = item
        assert isinstance(data, bytes)
        kind = data[:1]
        if kind == b"S":
            stream = data[1:5]
        elif kind == b"E":
            stream = None
        elif kind == b"B":
            begun = data[-4:]
        elif kind == b"b":
            begun = data[25:29]
        elif kind == b"O" or (kind == b"M" and (stream or begun) in partly):
            continue
        elif stream is not None:
            # Without the id of the (sub)transaction.
            open_ones.setdefault(stream, []).append((data[1:5], (lsn, data[:1] + data[5:], *effect)))
        elif kind == b"A":
            kept = open_ones.get(data[1:5], [])
            open_ones[data[1:5]] = [one for one in kept if one[0] != data[5:9]]
        elif kind == b"c":
            found += [one for _, one in open_ones.pop(data[1:5], [])]
            found.append((lsn, b"C" + data[5:]))
        elif kind == b"p":
            found += [one for _, one in open_ones.pop(data[26:30], [])]
            found.append((lsn, b"P" + data[1:]))
        else:
            if kind in {b"C", b"P"}:
                begun = b""
            found.append(item)
    # Remove transactions without any change left.
    left: list[tuple[object, ...]] = []
    changed = False
    for item in found:
        kind = _kind(item)
        if changed or kind != b"C":
            left.append(item)
        changed = kind not in {b"C", b"P", b"K", b"r"} and (changed or not _stands_alone(item))
    return left


def _stands_alone(item: tuple[object, ...]) -> bool:
    """Return whether it is a logical message outside of transactions."""
    data = item[1]
    return isinstance(data, bytes) and data[:2] == b"M\0"


def _shown(item: tuple[object, ...]) -> str:
    return " ".join(str(Lsn(part)) if isinstance(part, int) else repr(part)[:600] for part in item)


def differences(
    ours: Sequence[Message],
    theirs: Sequence[Message],
    *,
    pgoutput: bool = True,
    whole: bool = False,
    stopped: bool = False,
) -> str:
    """Return "" if both are equal; otherwise the first difference with its surroundings.

    `whole` compares transactions as `assembled`; `stopped`: the server could not decode the rest.
    """
    partly = {m.data[1:5] for m in (*ours, *theirs) if pgoutput and m.data[:1] == b"A" and m.data[5:9] != m.data[1:5]}
    if pgoutput:
        aborts, other_aborts = _stream_aborts(ours), _stream_aborts(theirs)
        for key in aborts.keys() & other_aborts.keys():
            if (aborts[key].lsn, aborts[key].data) != (other_aborts[key].lsn, other_aborts[key].data):
                return f"a stream's abort: ours {aborts[key]}, the server's {other_aborts[key]}"
        aborted, rolled_back = (
            aborted_streams(ours) | aborted_streams(theirs),
            _rolled_back(ours) | _rolled_back(theirs),
        )
        ours, theirs = _without(ours, aborted, rolled_back), _without(theirs, aborted, rolled_back)
    else:
        gids = _gids_rolled_back(ours) | _gids_rolled_back(theirs)
        ours, theirs = _without_rolled_back(ours, gids), _without_rolled_back(theirs, gids)
    if whole:
        mine, other = assembled(ours, partly), assembled(theirs, partly)
    else:
        mine, other = comparable(ours, pgoutput=pgoutput), comparable(theirs, pgoutput=pgoutput)
    for number, (a, b) in enumerate(zip(mine, other, strict=False)):
        if a != b:
            before = "\n".join(f"  both    {_shown(x)}" for x in mine[max(0, number - 3) : number])
            after = "\n".join(f"  ours    {_shown(x)}" for x in mine[number : number + 3])
            after2 = "\n".join(f"  server  {_shown(x)}" for x in other[number : number + 3])
            return f"message {number} of {len(mine)} (server: {len(other)})\n{before}\n{after}\n{after2}"
    if len(mine) != len(other) and not (stopped and len(other) < len(mine)):
        rest = mine[len(other) :] or other[len(mine) :]
        return f"{len(mine)} messages, the server has {len(other)}; first of the rest: {[_shown(x) for x in rest[:3]]}"
    return ""
