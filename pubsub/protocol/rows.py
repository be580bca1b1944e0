"""Row changes by columns: from the frames of a batch to Arrow arrays, with no Python value per field or per row.

    blocks ── split_by_relation ──► relation → pieces (where its I, U and D messages lie)
    pieces ── decode_changes ─────► Changes: one array for each column, one element for each change

A message is a type byte, the relation's oid, and tuples: 'N' and the new row (I, U), before it for U, and alone for D, 'K' and
the replica identity's columns or 'O' and the whole old row.  A tuple is a count (2 bytes) and, for each column, 't', a length
(4 bytes) and PostgreSQL's text; 'b', a length and the type's binary form; 'n' for NULL; or 'u' for an unchanged TOASTed value
that was not sent.  (proto.c: logicalrep_write_insert, _update, _delete, _tuple.)

Decoding walks all rows side by side: positions[i] is where row i is being read, and each column moves every position forward by
one value.  A piece is a block's share of one relation, small enough for the cache; the pieces' arrays are joined at the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import InvalidValue, ProgramLimitExceeded, ProtocolViolation
from pubsub.protocol.arrays import Bytes, Mask, contents, slices
from pubsub.protocol.binary.columns import from_binary
from pubsub.protocol.binary.values import BinaryTypes
from pubsub.protocol.pgoutput import Relation
from pubsub.protocol.types import InvalidText, from_text, nulls, printable

INSERT: Final = ord("I")
UPDATE: Final = ord("U")
DELETE: Final = ord("D")
OLD_KEY: Final = ord("K")
OLD_ROW: Final = ord("O")

_XLOG_DATA: Final = ord("w")
_NEW: Final = ord("N")
_TEXT: Final = ord("t")
_BINARY: Final = ord("b")
_NULL: Final = ord("n")
_UNCHANGED: Final = ord("u")
_RELATION_END: Final = 5  # the type byte and the relation's oid
_PIECE_BYTES: Final = 256 << 10
"""Smaller pieces are joined before they are decoded: each costs some array calls for each column."""

Offsets = npt.NDArray[np.int64]
_BUILT_IN: Final = BinaryTypes()


class Block(Protocol):
    """Frames one after the other, each with `header` bytes before its message: reorderbuffer's FrameBlock, ChangeBlock."""

    @property
    def header(self) -> int: ...
    @property
    def data(self) -> bytes | Bytes: ...
    @property
    def lengths(self) -> npt.NDArray[np.uint32]: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowFrames:
    """Row changes of one relation in `data`: messages from `starts` (the type byte) to `ends` (exclusive), both ascending.

    `seq` is each change's number in the batch, in order of arrival.
    """

    data: Bytes
    starts: Offsets
    ends: Offsets
    seq: Offsets


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """The changes of one relation in order of arrival.  All arrays have one element for each change.

    `op` is I, U or D.  `new` holds the new rows, NULL for D, by the target's column names; `unchanged` says, for the columns
    where it ever happens, which new values were sent neither there nor in the old tuple (they are NULL in `new`).  `old_kind` is
    'K' or 'O' where there is an old tuple, else 0; `old` holds its columns, NULL where there is none, or only those asked for.
    The arrays of `new` and `old` are pyarrow's.
    """

    seq: Offsets
    op: Bytes
    new: dict[str, Any]
    unchanged: dict[str, Mask]
    old_kind: Bytes
    old: dict[str, Any]

    @property
    def count(self) -> int:
        return len(self.seq)


class InvalidField(InvalidValue):
    """A value that its target column can not hold: `seq` is the number of its change in the batch, `column` its name.

    `key` names the row as PostgreSQL does: (a, b)=(1, x).
    """

    def __init__(self, relation: Relation, column: str, seq: int, key: str, cause: InvalidText) -> None:
        super().__init__(
            cause.message,
            sqlstate=cause.sqlstate,
            context=f'column "{column}" of relation "{relation.namespace}.{relation.name}"',
        )
        self.column = column
        self.seq = seq
        self.key = key


def split_by_relation(blocks: Iterable[Block], first_seq: int = 0) -> dict[int, list[RowFrames]]:
    """Where each relation's row changes lie, by relation oid, in order of arrival.

    Frames are numbered from `first_seq` through all blocks; those that are not I, U or D are left out but counted.
    Raises ProtocolViolation for a row change too short to name its relation.
    """
    relations: dict[int, list[RowFrames]] = {}
    for block in blocks:
        data = np.frombuffer(block.data, np.uint8)
        lengths = block.lengths.astype(np.int64)
        ends = np.cumsum(lengths)
        if len(ends) and ends[-1] != data.size:
            raise ValueError("the lengths of a block do not add up to its bytes")
        seq = np.arange(first_seq, first_seq + len(lengths), dtype=np.int64)
        first_seq += len(lengths)
        if not data.size:
            continue
        frames = ends - lengths
        starts = frames + block.header
        kind = data.take(starts, mode="clip")
        rows = (lengths > block.header) & (data.take(frames, mode="clip") == _XLOG_DATA)
        rows &= (kind == INSERT) | (kind == UPDATE) | (kind == DELETE)
        if not rows.all():
            starts, ends, seq = starts[rows], ends[rows], seq[rows]
        if (starts + _RELATION_END > ends).any():
            raise ProtocolViolation("a row change ends before its relation")
        for oid, chosen in _groups(_big_endian(data, starts + 1, 4)):
            piece = RowFrames(data, starts[chosen], ends[chosen], seq[chosen])
            relations.setdefault(oid, []).append(piece)
    return relations


def _groups(oids: Offsets) -> Iterator[tuple[int, Any]]:
    """Each oid with the index of its elements, in order."""
    if not len(oids):
        return
    if (oids == oids[0]).all():
        yield int(oids[0]), slice(None)
        return
    order = np.argsort(oids, kind="stable")
    borders = np.flatnonzero(np.diff(oids[order])) + 1
    for chosen in np.split(order, borders):
        yield int(oids[chosen[0]]), chosen


def decode_changes(
    frames: Sequence[RowFrames],
    relation: Relation,
    targets: Sequence[Any],
    *,
    key: Collection[str] | None = None,
    types: BinaryTypes = _BUILT_IN,
) -> Changes:
    """The changes in `frames` (in order of arrival) as arrays of the targets' types.

    `targets` has, for each column of the relation, the pyarrow.Field that it goes to, or None if it is not replicated.  With
    `key` (names of targets) only those columns of the old tuples are returned.  `types` reads values of binary transfer.
    Raises ProtocolViolation for malformed bytes; UnknownBinary; InvalidField for a value that its target can not hold.
    """
    if len(targets) != len(relation.columns):
        raise ValueError(f"{len(targets)} targets for {len(relation.columns)} columns")
    pieces = [_decode_piece(piece, relation, targets, key, types) for piece in _joined(frames) if len(piece.seq)]
    if pieces:
        return concat_changes(pieces)
    none = np.empty(0, np.uint8)
    new = {target.name: pa.array([], target.type) for target in targets if target is not None}
    return Changes(np.empty(0, np.int64), none, new, {}, none, {})


def concat_changes(pieces: Sequence[Changes]) -> Changes:
    """The changes of all pieces, at least one, which have the same targets, one after the other.

    Raises ProgramLimitExceeded if a column has more bytes than one array can hold (2 GB).
    """
    if len(pieces) == 1:
        return pieces[0]
    unchanged = dict.fromkeys(name for piece in pieces for name in piece.unchanged)
    old = {name: column.type for piece in pieces for name, column in piece.old.items()}
    try:
        return Changes(
            np.concatenate([piece.seq for piece in pieces]),
            np.concatenate([piece.op for piece in pieces]),
            {name: pa.concat_arrays([piece.new[name] for piece in pieces]) for name in pieces[0].new},
            {
                name: np.concatenate([piece.unchanged.get(name, np.zeros(piece.count, np.bool_)) for piece in pieces])
                for name in unchanged
            },
            np.concatenate([piece.old_kind for piece in pieces]),
            {
                name: pa.concat_arrays([piece.old.get(name, nulls(piece.count, kind)) for piece in pieces])
                for name, kind in old.items()
            },
        )
    except pa.ArrowInvalid as error:
        raise ProgramLimitExceeded(
            "a column of the batch is too large", detail=str(error), hint="Make batch_bytes smaller."
        ) from error


def _joined(frames: Iterable[RowFrames]) -> Iterator[RowFrames]:
    """The same changes in fewer pieces: neighbours of few bytes are copied together."""
    small: list[RowFrames] = []
    size = 0
    for piece in frames:
        piece_size = int((piece.ends - piece.starts).sum())
        if small and size + piece_size > _PIECE_BYTES:
            yield _join(small)
            small, size = [], 0
        small.append(piece)
        size += piece_size
    if small:
        yield _join(small)


def _join(pieces: Sequence[RowFrames]) -> RowFrames:
    if len(pieces) == 1:
        return pieces[0]
    messages = pa.concat_arrays([slices(piece.data, piece.starts, piece.ends, pa.binary()) for piece in pieces])
    data, offsets = contents(messages)
    bounds = offsets.astype(np.int64)
    return RowFrames(data, bounds[:-1], bounds[1:], np.concatenate([piece.seq for piece in pieces]))


def _big_endian(data: Bytes, positions: Offsets, width: int) -> Offsets:
    """The unsigned numbers of `width` bytes at `positions`; anything where they lie past the end."""
    numbers = data.take(positions, mode="clip").astype(np.int64)
    for place in range(1, width):
        numbers <<= 8
        numbers |= data.take(positions + place, mode="clip")
    return numbers


class _Tuples:
    """Tuples read side by side: `positions` is where each row's tuple is being read, `ends` where its message ends."""

    def __init__(self, data: Bytes, positions: Offsets, ends: Offsets, columns: int) -> None:
        """Start behind each tuple's mark."""
        self._data = data
        self._ends = ends
        self.positions = positions + 3
        if (_big_endian(data, positions + 1, 2) != columns).any():
            raise ProtocolViolation(f"a tuple has not the {columns} columns of its relation")

    def next(self) -> tuple[Bytes | None, Offsets, Offsets]:
        """The next column: each value's kind (None if all are text), and where its bytes begin and end.

        What is read past a message's end does not matter: the position then lies past it too, which is checked here, and
        after the last tuple by the caller.
        """
        kinds = self._data.take(self.positions, mode="clip")
        text = (kinds == _TEXT) | (kinds == _BINARY)
        lengths = _big_endian(self._data, self.positions + 1, 4)
        if text.all():
            starts = self.positions + 5
            ends = starts + lengths
            found = None if (kinds == _TEXT).all() else kinds
        else:
            if not (text | (kinds == _NULL) | (kinds == _UNCHANGED)).all():
                raise ProtocolViolation("a column's value is neither text, binary, NULL nor unchanged")
            starts = self.positions + np.where(text, 5, 1)
            ends = starts + np.where(text, lengths, 0)
            found = kinds
        if (ends > self._ends).any():
            raise ProtocolViolation("a column's value passes the end of its message")
        self.positions = ends
        return found, starts, ends


def _decode_piece(
    frames: RowFrames, relation: Relation, targets: Sequence[Any], key: Collection[str] | None, types: BinaryTypes
) -> Changes:
    data, width, count = frames.data, len(targets), len(frames.seq)
    op = data[frames.starts]
    positions = frames.starts + _RELATION_END
    mark = data.take(positions, mode="clip")
    has_old = ((mark == OLD_KEY) | (mark == OLD_ROW)) & (op != INSERT)
    has_new = op != DELETE
    if not (has_old | has_new).all():
        raise ProtocolViolation("a DELETE without an old tuple")
    old_rows, new_rows = np.flatnonzero(has_old), np.flatnonzero(has_new)
    old_positions = positions[old_rows]

    def read_old(wanted: Collection[str] | None) -> dict[str, Any]:
        """The old tuples' columns; moves the positions behind them."""
        columns = {}
        tuples = _Tuples(data, old_positions, frames.ends[old_rows], width)
        for column, target in zip(relation.columns, targets, strict=True):
            kinds, starts, ends = tuples.next()
            if kinds is not None and (kinds == _UNCHANGED).any():
                raise ProtocolViolation("an old tuple with an unchanged value")
            if target is not None and (wanted is None or target.name in wanted):
                values = _Values(old_rows, kinds, starts, ends, column.type_oid, types)
                columns[target.name] = _column(frames, relation, target, values)
        positions[old_rows] = tuples.positions
        return columns

    old = read_old(key) if len(old_rows) else {}
    new: dict[str, Any] = {}
    unchanged: dict[str, Mask] = {}
    if len(new_rows):
        if (data.take(positions[new_rows], mode="clip") != _NEW).any():
            raise ProtocolViolation("an INSERT or UPDATE without a new tuple")
        tuples = _Tuples(data, positions[new_rows], frames.ends[new_rows], width)
        for column, target in zip(relation.columns, targets, strict=True):
            kinds, starts, ends = tuples.next()
            if target is None:
                continue
            values = _Values(new_rows, kinds, starts, ends, column.type_oid, types)
            new[target.name] = _column(frames, relation, target, values)
            if kinds is not None and (kinds == _UNCHANGED).any():
                unchanged[target.name] = np.zeros(count, np.bool_)
                unchanged[target.name][new_rows] = kinds == _UNCHANGED
        positions[new_rows] = tuples.positions
    else:
        new = {target.name: nulls(count, target.type) for target in targets if target is not None}
    if (positions != frames.ends).any():
        raise ProtocolViolation("a row change with trailing bytes")
    if any((mask & (op == INSERT)).any() for mask in unchanged.values()):
        raise ProtocolViolation("an INSERT with an unchanged value")
    whole = has_old & (mark == OLD_ROW)
    unread = [name for name, mask in unchanged.items() if name not in old and (mask & whole).any()]
    known = old | read_old(unread) if unread else old
    for name in unchanged.keys() & known.keys():
        # a key's tuple has NULL for what it does not hold
        sent = whole | (has_old & known[name].is_valid().to_numpy(zero_copy_only=False))
        new[name] = pc.if_else(pa.array(unchanged[name] & sent), known[name], new[name])
        unchanged[name] &= ~sent
    unchanged = {name: mask for name, mask in unchanged.items() if mask.any()}
    return Changes(frames.seq, op, new, unchanged, np.where(has_old, mark, np.uint8(0)), old)


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """One column of the rows `rows` (of a piece): each value's kind (None: all text), and where its bytes lie."""

    rows: Offsets
    kinds: Bytes | None
    starts: Offsets
    ends: Offsets
    type_oid: int
    types: BinaryTypes


def _column(frames: RowFrames, relation: Relation, target: Any, values: _Values) -> Any:
    """One column as an array with an element for each change: the values of `rows`, NULL for the others."""
    kinds = values.kinds
    if kinds is None:
        return _converted(frames, relation, target, values, None, binary=False)
    text, binary = kinds == _TEXT, kinds == _BINARY
    if not binary.any():
        if not text.any():
            return nulls(len(frames.seq), target.type)
        return _converted(frames, relation, target, values, text, binary=False)
    found = _converted(frames, relation, target, values, None if binary.all() else binary, binary=True)
    if text.any():  # sent in part before the subscription was altered: a prepared transaction may be
        found = pc.coalesce(found, _converted(frames, relation, target, values, text, binary=False))
    return found


def _converted(
    frames: RowFrames, relation: Relation, target: Any, values: _Values, valid: Mask | None, *, binary: bool
) -> Any:
    """As _column, of the values that are `valid` (None: all), which are all text, or all binary."""
    count, rows = len(frames.seq), values.rows
    starts, ends = values.starts, values.ends
    if valid is not None and not np.array_equal(valid, ends > starts):
        ends = np.where(valid, ends, starts)
    if len(rows) < count:  # the others get an empty slice that lies in order: their own message's start
        all_starts, all_ends = frames.starts.copy(), frames.starts.copy()
        all_starts[rows], all_ends[rows] = starts, ends
        all_valid = np.zeros(count, np.bool_)
        all_valid[rows] = True if valid is None else valid
        starts, ends, valid = all_starts, all_ends, all_valid
    found = slices(frames.data, starts, ends, pa.binary(), valid=valid)
    try:
        if binary:
            return from_binary(found, values.type_oid, target.type, values.types)
        return from_text(found, target.type)
    except InvalidText as error:
        key = _key(frames, error.index, relation, values.types)
        raise InvalidField(relation, target.name, int(frames.seq[error.index]), key, error) from error


def _key(frames: RowFrames, index: int, relation: Relation, types: BinaryTypes) -> str:
    """How the row of one change is called by the relation's replica identity: its first tuple has it."""
    message = frames.data[frames.starts[index] : frames.ends[index]].tobytes()
    at = _RELATION_END + 3
    shown: dict[str, str] = {}
    for column in relation.columns:
        if at >= len(message):
            return "(unknown): the message ends within it"
        kind, at = message[at], at + 1
        value = b"null"
        if kind in {_TEXT, _BINARY}:
            length = int.from_bytes(message[at : at + 4], "big")
            value, at = message[at + 4 : at + 4 + length], at + 4 + length
            if kind == _BINARY and column.in_replica_identity:
                value = types.out(column.type_oid)(value)
        if column.in_replica_identity:
            shown[column.name] = printable(value)
    return f"({', '.join(shown)})=({', '.join(shown.values())})"
