"""What differs between two decodings, for a subscriber: ours and PostgreSQL's.

Two kinds (design: a logical slot on the server pins catalog_xmin and hides pruning):

    `differences`               bytes against those of a logical slot on the same server (walsender_decodings.py)
    walsender_random.Replica    no slot: the changes applied to an empty copy, against the tables
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence, Set

from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Relation, read_message
from tests.walsender_decodings import Message, aborted_streams

_PREPARED = re.compile(rb"(PREPARE TRANSACTION|COMMIT PREPARED|ROLLBACK PREPARED) ('[^']*')")

Definition = tuple[bytes, ...]
"""A relation's Type messages and its Relation message, without what streams have between."""


def comparable(messages: Sequence[Message], *, pgoutput: bool, at_once: bool = False) -> list[tuple[object, ...]]:
    """Messages in a form that is equal for equal decodings: repeats of Relation and Type messages are taken out, and each
    row, or truncation, has the definitions in effect beside it.  `at_once`: for a subscriber's leader, which takes up what a
    stream says while a parallel worker applies the stream."""
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
    """A logical message bears the LSN where its record ends, and so may the next record's changes bear it.  Where those are of
    another subtransaction, a server merges the two by LSN, and which comes first is the chance of its heap
    (ReorderBufferIterCompare): here the message, as in the WAL."""
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
    """Empty where a subscriber can read every row by the definition that it has then, and every stream has come to an end.
    `parallel`: also one that applies streams in parallel, where it can.  `only_local`: origin = none; then a stream of which
    the commit came from elsewhere has no end, nor has it with a server (DecodeCommit: ReorderBufferForget)."""
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
    """The definitions in a streamed transaction, as a subscriber that spools it will come by them (worker.c)."""

    def __init__(self) -> None:
        self.definitions: list[tuple[bytes, Definition]] = []
        """Each relation's oid and its messages, in order."""
        self._first: dict[bytes, int] = {}

    def enter(self, xid: bytes) -> None:
        """The next message is of the (sub)transaction `xid`."""
        self._first.setdefault(xid, len(self.definitions))

    def abort(self, xid: bytes) -> None:
        """What came since the subtransaction's first message is cut off (stream_abort_internal)."""
        start = self._first.get(xid)
        if start is not None:
            del self.definitions[start:]
            self._first = {other: first for other, first in self._first.items() if first < start}


def _rolled_back(messages: Sequence[Message]) -> set[bytes]:
    """Those that were prepared."""
    return {m.data[34:38] for m in messages if m.data[:1] == b"r"}


def _without(messages: Sequence[Message], aborted: Set[bytes], rolled_back: Set[bytes]) -> list[Message]:
    """Streamed transactions that were aborted are left out, and what prepared ones changed that were rolled back: a server that
    reads late knows of it, and sends less.  That these were prepared stays, and what was said of relations, which holds.

    The end of one that was never said to be prepared is left out, too: one that has changed nothing, but is known to a server
    (rows locked, a subtransaction rolled back), which sends its COMMIT PREPARED without a PREPARE (ReorderBufferReplay
    returns where there is no base snapshot, ReorderBufferFinishPrepared does not).  Ours sends nothing of it.  So are Stream Aborts
    where there was no stream: 18 takes the subtransactions of what is prepared for streamed (ReorderBufferTruncateTXN), and says
    so where ROLLBACK PREPARED comes from an origin that is left out.
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
    """The same of test_decoding's lines, where it is not compared that they were prepared, either: with `skip-empty-xacts` that
    may not be said."""
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
    """By transaction and subtransaction."""
    return {m.data[1:9]: m for m in messages if m.data[:1] == b"A"}


def assembled(messages: Sequence[Message], partly: Set[bytes] = frozenset()) -> list[tuple[object, ...]]:
    """The transactions in the order of their ends, each with its changes: the same whether, and where, it was streamed.

    What is sent at the beginning is left out: of a stream it is not known what it will come to.

    Logical messages are left out of transactions that are among `partly`, of which something was rolled back while they were
    streamed: in a stream a message bears the id of the whole transaction (pgoutput.c: pgoutput_message), so that one that is
    rolled back stays if it was sent before.
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
            # Without the id of its (sub)transaction.
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
    # A transaction of which nothing is left is none.
    left: list[tuple[object, ...]] = []
    changed = False
    for item in found:
        kind = _kind(item)
        if changed or kind != b"C":
            left.append(item)
        changed = kind not in {b"C", b"P", b"K", b"r"} and (changed or not _stands_alone(item))
    return left


def _stands_alone(item: tuple[object, ...]) -> bool:
    """Whether it is a logical message that belongs to no transaction."""
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
    """Empty where both are equal; else the first difference, with what is around it.  `whole`: see `assembled`.

    `stopped`: the server could not decode the rest.
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
