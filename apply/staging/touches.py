"""Which changes use which keys, and in what order: the touches of a batch's changes (fold)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from apply.identity_missing import IdentityMissing
from apply.staging.row_codes import row_codes
from pubsub.protocol.arrow_arrays import Indices, Mask
from pubsub.protocol.rows import DELETE, INSERT, UPDATE, Changes

CODE_BITS: Final = 63  # of a sort key: a key's code and an event's number


def take(columns: Mapping[str, pa.Array], rows: Indices) -> dict[str, pa.Array]:
    """Return these rows of the columns."""
    indices = pa.array(rows)
    return {name: column.take(indices) for name, column in columns.items()}


def no_identity(column: str) -> IdentityMissing:
    """Return the error for a change that lacks a value of its row's identity (worker.c: check_relation_updatable)."""
    return IdentityMissing(
        "publisher did not send replica identity column expected by the logical replication target relation",
        detail=f'Column "{column}" has no value.',
    )


@dataclass(frozen=True, slots=True, eq=False)
class EventKeys:
    """The keys that events touch, as columns and as codes: equal keys have equal codes, in [0, bound).

    The first n entries are the key that each of the n events always touches; the rest are keys that rows leave.  `left` holds,
    for each event, the position of the key that its row leaves, or 0 if the row stays.
    """

    columns: dict[str, pa.Array]
    codes: Indices
    bound: int
    left: Indices

    def base(self, events: Indices) -> dict[str, pa.Array]:
        """Return the keys that the rows of these events had before them."""
        return take(self.columns, self._base(events))

    def moved(self, events: Indices) -> Mask:
        """Return for each event whether, in this batch, a row has left the key that the event's row had before it."""
        return np.isin(self.codes[self._base(events)], self.codes[self.left[np.flatnonzero(self.left)]])

    def _base(self, events: Indices) -> Indices:
        return np.where(self.left[events], self.left[events], events)


@dataclass(frozen=True, slots=True, eq=False)
class Touches:
    """Touches ordered by key, then by arrival.

    `arrives`: a row has the key afterwards.  `leaves`: the event's row moves to another key.  `from_here`: the event changes or
    deletes the row that had the key.  `stands`: a row of the table has the key before the batch, or would have to if this were
    the key's first touch.
    """

    code: Indices
    event: Indices
    arrives: Mask
    leaves: Mask
    from_here: Mask
    stands: Mask

    def only(self, chosen: Mask) -> Touches:
        return Touches(
            self.code[chosen],
            self.event[chosen],
            self.arrives[chosen],
            self.leaves[chosen],
            self.from_here[chosen],
            self.stands[chosen],
        )

    def first(self) -> Mask:
        """Mark the first touch of each key."""
        return np.not_equal(np.diff(self.code, prepend=-1), 0)

    def last(self) -> Mask:
        """Mark the last touch of each key."""
        return np.not_equal(np.diff(self.code, append=-1), 0)

    def after_arrival(self) -> Mask:
        """Mark touches before which a row of the batch has the key."""
        return np.roll(self.arrives, 1) & ~self.first()

    def occupied(self) -> Mask:
        """Mark touches before which a row of the batch or of the table has the key."""
        return self.after_arrival() | (self.first() & self.stands)


def event_keys(changes: Changes, key: Sequence[str]) -> EventKeys:
    """Return the keys that the changes touch.  Raises IdentityMissing for a change that does not identify its row."""
    deletes = changes.op == DELETE
    with_old = np.flatnonzero((changes.op == UPDATE) & (changes.old_kind != 0))
    columns = {}
    for name in key:
        column = changes.new[name]
        if deletes.any():
            column = pc.if_else(pa.array(deletes), changes.old[name], column)
        if with_old.size:
            column = pa.concat_arrays([column, changes.old[name].take(pa.array(with_old))])
        if column.null_count:
            raise no_identity(name)
        columns[name] = column
    codes, bound = row_codes(list(columns.values()), 1 << CODE_BITS - _event_bits(changes.count))
    left = np.zeros(changes.count, np.int64)
    places = np.arange(changes.count, len(codes))
    moved = codes[places] != codes[with_old]
    left[with_old[moved]] = places[moved]
    return EventKeys(columns, codes, bound, left)


def _event_bits(events: int) -> int:
    """Return the bits that a touch needs: its event's number, and one for whether its row leaves."""
    return (2 * events).bit_length()


def touches_of(changes: Changes, keys: EventKeys, standing: Indices | None) -> Touches:
    """Return every touch, by one sort of integers composed of key code and event number.

    `standing`: for each key who wrote the table's row under it, 0 if there is none; None if that is not known.
    """
    bits = _event_bits(changes.count)
    moved = np.flatnonzero(keys.left)
    events = np.arange(changes.count)
    numbers = keys.codes[: changes.count] << bits | events << 1
    if moved.size:
        numbers = np.concatenate([numbers, keys.codes[keys.left[moved]] << bits | moved << 1 | 1])
    numbers.sort()
    event = (numbers & (1 << bits) - 1) >> 1
    leaves = (numbers & 1).astype(np.bool_)
    op = changes.op[event]
    stays = (op != INSERT) & (keys.left[event] == 0)
    from_here = leaves | stays
    stands = from_here if standing is None else standing[np.where(leaves, keys.left[event], event)] > 0
    return Touches(numbers >> bits, event, ~leaves & (op != DELETE), leaves, from_here, stands)


def places_of(keys: EventKeys, touches: Touches) -> Indices:
    """Return the position of each touch's key."""
    return np.where(touches.leaves, keys.left[touches.event], touches.event)
