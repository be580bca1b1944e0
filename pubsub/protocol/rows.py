"""Decode row changes by columns: from a batch's frames to Arrow arrays, with no Python value per field or per row.

    blocks ── split_by_relation ──► relation → pieces (the places of its I, U and D messages)
    pieces ── decode_changes ─────► Changes: one array per column, one element per change

A message is a type byte, the relation's oid, and tuples.  The new row is 'N' and a tuple (I, U).  The old tuple comes
before it (U, optional) or alone (D): 'K' and the replica identity's columns, or 'O' and the whole old row.  A tuple is
a count (2 bytes) and for each column: 't', a length (4 bytes) and PostgreSQL's text; 'b', a length and the type's
binary form; 'n' for NULL; or 'u' for an unchanged TOASTed value that was not sent.  (proto.c: logicalrep_write_insert,
_update, _delete, _tuple.)

Decoding walks all rows in parallel: positions[i] is the read position in row i, and each column advances every position
by one value.  A piece is one relation's share of a block, small enough for the cache; the pieces' arrays are joined at
the end.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import InvalidValue, ProgramLimitExceeded, ProtocolViolation
from pubsub.processor_time import spent_on
from pubsub.protocol.arrow_arrays import Bytes, Mask, contents, nulls, slices
from pubsub.protocol.binary.columns import from_binary
from pubsub.protocol.binary.single_values import BinaryTypes
from pubsub.protocol.pgoutput import Relation
from pubsub.protocol.refused_values import InvalidText, printable
from pubsub.protocol.text.columns import from_text

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
"""Pieces are joined up to this size before decoding, because each piece costs a few array calls per column."""

Offsets = npt.NDArray[np.int64]
_BUILT_IN: Final = BinaryTypes()


class Block(Protocol):
    """Concatenated frames, each with `header` bytes before its message: reorderbuffer's FrameBlock or ChangeBlock."""

    @property
    def header(self) -> int: ...
    @property
    def data(self) -> bytes | Bytes: ...
    @property
    def lengths(self) -> npt.NDArray[np.uint32]: ...


@dataclass(frozen=True, slots=True, eq=False)
class RowFrames:
    """Row changes of one relation in `data`.

    Messages run from `starts` (the type byte) to `ends` (exclusive), both ascending.  `seq` is each change's number in
    the batch, in order of arrival.
    """

    data: Bytes
    starts: Offsets
    ends: Offsets
    seq: Offsets


@dataclass(frozen=True, slots=True, eq=False)
class Changes:
    """The changes of one relation in order of arrival.  All arrays have one element per change.

    `op` is I, U or D.  `new` has the new rows' columns, by target column name; NULL for D.  `unchanged` marks the new
    values that were sent neither in the new nor in the old tuple, and are NULL in `new`; it has only columns with such
    values.  `old_kind` is 'K' or 'O', or 0 without an old tuple.  `old` has the old tuples' columns, or only the
    requested ones; NULL without an old tuple.
    """

    seq: Offsets
    op: Bytes
    new: dict[str, pa.Array]
    unchanged: dict[str, Mask]
    old_kind: Bytes
    old: dict[str, pa.Array]

    @property
    def count(self) -> int:
        return len(self.seq)


class InvalidField(InvalidValue):
    """A value that its target column cannot hold.

    `seq` is its change's number in the batch, `column` the column's name.  `key` identifies the row as PostgreSQL does:
    (a, b)=(1, x).
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


@spent_on("decoding")
def split_by_relation(blocks: Iterable[Block], first_seq: int = 0) -> dict[int, list[RowFrames]]:
    """Find each relation's row changes in the blocks; return them by relation oid, in order of arrival.

    Frames are numbered from `first_seq` through all blocks; messages other than I, U and D are left out but counted.
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


def _groups(oids: Offsets) -> Iterator[tuple[int, Offsets | slice]]:
    """Yield each oid with the indices of its elements, in order."""
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
    targets: Sequence[pa.Field | None],
    *,
    key: Collection[str] | None = None,
    types: BinaryTypes = _BUILT_IN,
    hidden: Set[str] = frozenset(),
) -> Changes:
    """Decode the changes in `frames`, which are in order of arrival, into arrays of the targets' types.

    `targets` has a field for each column of the relation, or None for a column that is not replicated.  `key`,
    if given, names the targets whose old values are returned; otherwise all are.  `types` reads values in binary
    transfer.  `hidden` names the targets whose values no error shows.  Raises ProtocolViolation for malformed bytes;
    UnknownBinary; InvalidField for a value that its target cannot hold.
    """
    if len(targets) != len(relation.columns):
        raise ValueError(f"{len(targets)} targets for {len(relation.columns)} columns")
    pieces = [_decode_piece(one, relation, targets, key, types, hidden) for one in _joined(frames) if len(one.seq)]
    if pieces:
        return concat_changes(pieces)
    none = np.empty(0, np.uint8)
    new = {target.name: pa.array([], target.type) for target in targets if target is not None}
    return Changes(np.empty(0, np.int64), none, new, {}, none, {})


def concat_changes(pieces: Sequence[Changes]) -> Changes:
    """Concatenate pieces (at least one) that have the same targets.

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
    """Yield the same changes in fewer pieces: consecutive small pieces are copied together."""
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
    """Read unsigned numbers of `width` bytes at `positions`; a position past the end gives an arbitrary number."""
    numbers = data.take(positions, mode="clip").astype(np.int64)
    for place in range(1, width):
        numbers <<= 8
        numbers |= data.take(positions + place, mode="clip")
    return numbers


class _Tuples:
    """Tuples read in parallel: `positions` is the read position in each row's tuple, `ends` the end of its message."""

    def __init__(self, data: Bytes, positions: Offsets, ends: Offsets, columns: int) -> None:
        """`positions` are those of the tuples' marks: N, K or O.  Raises ProtocolViolation for a wrong column count."""
        self._data = data
        self._ends = ends
        self.positions = positions + 3
        if (_big_endian(data, positions + 1, 2) != columns).any():
            raise ProtocolViolation(f"a tuple has not the {columns} columns of its relation")

    def next(self) -> tuple[Bytes | None, Offsets, Offsets]:
        """Read the next column: each value's kind (None if all are text), and where its bytes begin and end.

        A read past a message's end is harmless: it moves the position past the end too, which this method checks, and
        the caller checks after the last tuple.
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
    frames: RowFrames,
    relation: Relation,
    targets: Sequence[pa.Field | None],
    key: Collection[str] | None,
    types: BinaryTypes,
    hidden: Set[str],
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
    shown = frozenset(
        column.name
        for column, target in zip(relation.columns, targets, strict=True)
        if target is not None and target.name not in hidden
    )

    def read_old(wanted: Collection[str] | None) -> dict[str, pa.Array]:
        """Read the old tuples' columns and move the positions past them."""
        columns = {}
        tuples = _Tuples(data, old_positions, frames.ends[old_rows], width)
        for column, target in zip(relation.columns, targets, strict=True):
            kinds, starts, ends = tuples.next()
            if kinds is not None and (kinds == _UNCHANGED).any():
                raise ProtocolViolation("an old tuple with an unchanged value")
            if target is not None and (wanted is None or target.name in wanted):
                values = _Values(old_rows, kinds, starts, ends, column.name, column.type_oid, types, shown)
                columns[target.name] = _column(frames, relation, target, values)
        positions[old_rows] = tuples.positions
        return columns

    old = read_old(key) if len(old_rows) else {}
    new: dict[str, pa.Array] = {}
    unchanged: dict[str, Mask] = {}
    if len(new_rows):
        if (data.take(positions[new_rows], mode="clip") != _NEW).any():
            raise ProtocolViolation("an INSERT or UPDATE without a new tuple")
        tuples = _Tuples(data, positions[new_rows], frames.ends[new_rows], width)
        for column, target in zip(relation.columns, targets, strict=True):
            kinds, starts, ends = tuples.next()
            if target is None:
                continue
            values = _Values(new_rows, kinds, starts, ends, column.name, column.type_oid, types, shown)
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
        # A 'K' tuple has NULL for the columns outside the replica identity; so has an 'O' tuple of a partition, since the mark
        # is its root's.  A value that is unchanged is none of the NULLs.
        sent = has_old & known[name].is_valid().to_numpy(zero_copy_only=False)
        new[name] = pc.if_else(pa.array(unchanged[name] & sent), known[name], new[name])
        unchanged[name] &= ~sent
    unchanged = {name: mask for name, mask in unchanged.items() if mask.any()}
    return Changes(frames.seq, op, new, unchanged, np.where(has_old, mark, np.uint8(0)), old)


@dataclass(frozen=True, slots=True, eq=False)
class _Values:
    """One column of a piece's rows `rows`: each value's kind (None: all are text) and the bounds of its bytes.

    `column` is its name at the publisher.  `shown`: the columns whose values an error may show.
    """

    rows: Offsets
    kinds: Bytes | None
    starts: Offsets
    ends: Offsets
    column: str
    type_oid: int
    types: BinaryTypes
    shown: Collection[str]


def _column(frames: RowFrames, relation: Relation, target: pa.Field, values: _Values) -> pa.Array:
    """Return a column as an array with an element per change: the values of `rows`, NULL for the others."""
    kinds = values.kinds
    if kinds is None:
        return _converted(frames, relation, target, values, None, binary=False)
    text, binary = kinds == _TEXT, kinds == _BINARY
    if not binary.any():
        if not text.any():
            return nulls(len(frames.seq), target.type)
        return _converted(frames, relation, target, values, text, binary=False)
    found = _converted(frames, relation, target, values, None if binary.all() else binary, binary=True)
    if text.any():  # a prepared transaction has both if the subscription's `binary` changed while it was sent
        found = pc.coalesce(found, _converted(frames, relation, target, values, text, binary=False))
    return found


def _converted(
    frames: RowFrames, relation: Relation, target: pa.Field, values: _Values, valid: Mask | None, *, binary: bool
) -> pa.Array:
    """Like _column, for the values that are `valid` (None: all); these are all text, or all binary."""
    count, rows = len(frames.seq), values.rows
    starts, ends = values.starts, values.ends
    if valid is not None and not np.array_equal(valid, ends > starts):
        ends = np.where(valid, ends, starts)
    if len(rows) < count:  # the others get an empty slice at their own message's start, so that slices stay in order
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
        key = _key(frames, error.index, relation, values)
        seq = int(frames.seq[error.index])
        if values.column in values.shown:
            raise InvalidField(relation, target.name, seq, key, error) from error
        raise InvalidField(relation, target.name, seq, key, error.without_value()) from None


def _key(frames: RowFrames, index: int, relation: Relation, values: _Values) -> str:
    """Return the text that identifies a change's row: its replica identity, read from the change's first tuple.

    A column without a target, or with a hidden one, is not for everybody's eyes.
    """
    message = frames.data[frames.starts[index] : frames.ends[index]].tobytes()
    at = _RELATION_END + 3
    shown: dict[str, str] = {}
    for column in relation.columns:
        if at >= len(message):
            return "(unknown): the message ends within it"
        kind, at = message[at], at + 1
        value = b"null"
        is_shown = column.in_replica_identity and column.name in values.shown
        if kind in {_TEXT, _BINARY}:
            length = int.from_bytes(message[at : at + 4], "big")
            value, at = message[at + 4 : at + 4 + length], at + 4 + length
            if kind == _BINARY and is_shown:
                value = values.types.out(column.type_oid)(value)
        if is_shown:
            shown[column.name] = printable(value)
    return f"({', '.join(shown)})=({', '.join(shown.values())})"
