"""Collapse one table's changes to at most one final row per key.

With a key, an event touches the key that its row has afterwards (I, U) or had before (D); an UPDATE of the key also touches the
key that the row leaves.  Sorted by key and then by arrival, the touches of a key tell its story:

    first touch not an INSERT   the key may be in the table: deleted_keys
    last touch an arrival       its event's new row is the key's final image
    the touch before a U or D   its predecessor: the event that made the row which it changes; none: the row in the table

so that   1 I k=7   2 U k=7→8   3 U k=8   4 D k=9   gives   image of 3 under 8; deleted_keys 8 and 9 (7 began with an INSERT).

An UPDATE may leave a value unchanged that no old tuple holds (TOAST).  Such a value is the predecessor's, and so on back along
the chain; pointer doubling resolves all chains at once.  A chain that ends at a row of the table leaves the value to the writer,
together with the key that the row had (masked).  A U or D whose key was deleted earlier in the batch is skipped, as PostgreSQL's
subscriber skips it (worker.c: update_missing, delete_missing).

A row that arrives where one exists is a collision; the caller decides what to do about it (conflicts).  Which rows the table
has is looked up by `present`.  Without it the first touch of a key tells what it takes for granted: that a row has the key if
the touch changes or deletes it, and that none has if one arrives.  `expected` has these keys, and whoever commits the change
set looks whether it is so.  Where a row may have stayed that the publisher does not have (a TRUNCATE that is ignored), an arrival
takes nothing for granted: the row that stands leaves, and nothing is a collision.  Nor does one after a TRUNCATE whose rows stay,
marked as deleted (emptied); there a change finds rows of the batch alone.

Where deleted rows stay (own_columns), the last D of a key is an image, too, that leaves all values unchanged, and so is a key that
a row leaves for good.  To everything else such a row is gone.

Where every version of a row stays (spans), each transaction's last image of a key is one, with the time of its end.  The row that the
table has under a key which the batch touches leaves it, and comes again with its end, which is beside its key in deleted_keys.

Without a key, under REPLICA IDENTITY FULL, the table is a multiset of rows: each change adds its new row and removes one copy of
its old one, and the sums remain (worker.c: FindReplTupleInLocalRel takes one of the equal rows).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
import pyarrow as pa

from apply.staging.emptied import Emptied
from apply.staging.own_columns import Leaving
from apply.staging.row_codes import dense, row_codes
from apply.staging.spans import spans_of, with_ends
from apply.staging.touches import CODE_BITS, EventKeys, Touches, event_keys, no_identity, places_of, take, touches_of
from pubsub.delta.writers.changeset import (
    BASE_PREFIX,
    COUNT_COLUMN,
    MOVED_COLUMN,
    OURS,
    THEIRS,
    UNCHANGED_PREFIX,
    Conflicting,
    Expected,
    Folded,
    Present,
)
from pubsub.processor_time import spent_on
from pubsub.protocol.arrow_arrays import Indices, Mask, nulls
from pubsub.protocol.rows import DELETE, INSERT, OLD_ROW, UPDATE, Changes

# How many unmet changes are reported with their values.
SHOWN: Final = 10


@spent_on("folding")
def fold(
    changes: Changes,
    key: Sequence[str] | None,
    *,
    full: bool,
    truncate_before: int | None = None,
    present: Present | None = None,
    upsert: bool = False,
    leaving: Leaving | None = None,
    gives_way: bool = False,
    emptied: Emptied | None = None,
    versions: bool = False,
) -> Folded:
    """Fold `changes`, which are in order of arrival.

    `key`: the names of the columns that identify a row, or None.  `full`: without a key, the old rows are whole (REPLICA IDENTITY
    FULL).  `truncate_before`: the `seq` of the table's last TRUNCATE in the batch; changes before it are void.  `present` looks
    up what the table holds; None: what it must hold is in `expected`.  `upsert`, with a key: rows that the batch inserts may be
    in the table already, and nothing is expected of it.  `leaving`, of a table whose deleted rows stay: from
    own_columns.with_own, as the changes are.  `gives_way`, with a key: a row that stands where one arrives leaves.
    `emptied`: from emptied.with_deletions, as the changes are.  `versions`: every version of a row stays, and `leaving` has their
    ends.

    Raises NotInPrerequisiteState (55000) for an UPDATE or DELETE that does not identify its row.
    """
    sent = changes.op if emptied is None else changes.op[~emptied.made]
    counts = np.bincount(sent, minlength=max(INSERT, UPDATE, DELETE) + 1)
    truncated = truncate_before is not None
    if truncate_before is not None:
        before = changes.count
        changes = _since(changes, truncate_before)
        leaving = leaving and {name: column.slice(before - changes.count) for name, column in leaving.items()}
    missing = collisions = differing = expected = None
    if key:
        (images, masked, deleted), missing, collisions, differing, expected = _fold_keyed(
            changes, key, truncated, present, upsert, leaving, gives_way, emptied, versions
        )
        removed = _no_rows(changes)
    else:
        if present is not None:
            changes, missing = _without_missing(changes, truncated, present)
        images, removed = _fold_multiset(changes, full, truncated)
        masked, deleted = pa.table(changes.new).slice(0, 0), pa.table({})
    return Folded(
        images=images,
        masked=masked,
        deleted_keys=deleted,
        removed=removed,
        insert_only=emptied is None and not (masked.num_rows or deleted.num_rows or removed.num_rows),
        truncated=truncated,
        inserts=int(counts[INSERT]),
        updates=int(counts[UPDATE]),
        deletes=int(counts[DELETE]),
        missing=missing,
        collisions=collisions,
        differing=differing,
        expected=expected,
        marks=None if emptied is None else emptied.marks,
    )


def _since(changes: Changes, seq: int) -> Changes:
    """Return the changes numbered `seq` and later."""
    first = int(np.searchsorted(changes.seq, seq))
    return Changes(
        changes.seq[first:],
        changes.op[first:],
        {name: column.slice(first) for name, column in changes.new.items()},
        {name: mask[first:] for name, mask in changes.unchanged.items()},
        changes.old_kind[first:],
        {name: column.slice(first) for name, column in changes.old.items()},
    )


def _no_rows(changes: Changes) -> pa.Table:
    """Return an empty table of removed rows."""
    counts = pa.array([], pa.int64())
    return pa.table({name: column.slice(0, 0) for name, column in changes.new.items()} | {COUNT_COLUMN: counts})


# With a key


def _fold_keyed(
    changes: Changes,
    key: Sequence[str],
    truncated: bool,
    present: Present | None,
    upsert: bool,
    leaving: Leaving | None,
    gives_way: bool,
    emptied: Emptied | None,
    versions: bool,
) -> tuple[
    tuple[pa.Table, pa.Table, pa.Table], Conflicting | None, Conflicting | None, Conflicting | None, Expected | None
]:
    """Return (images, masked images, deleted keys), missing, collisions, differing and expected (Folded)."""
    values = changes.new
    if not changes.count:
        images = pa.table(values)
        return (
            (images, _masked(images, {}, list(values), images.select(key)), images.select(key)),
            None,
            None,
            None,
            None,
        )
    unchanged = {name: mask for name, mask in changes.unchanged.items() if mask.any()}
    keys = event_keys(changes, key)
    standing = _standing(keys, truncated, present, upsert)
    every = touches_of(changes, keys, standing)
    # From this change on an arrival makes a row of the table leave, if there is one under its key.
    anyway = 0 if gives_way else changes.count
    if emptied is not None:
        anyway = min(anyway, emptied.first)
        every = replace(every, stands=every.stands & (every.event < emptied.first))
    touches = _without_skipped(every)
    missing = collisions = differing = None
    if not upsert:
        if touches is not every:
            missing = _conflicting(changes, keys, _sent(np.setdiff1d(every.event, touches.event), emptied))
        if not gives_way:
            collisions = _conflicting(
                changes, keys, touches.event[touches.arrives & ~touches.from_here & touches.occupied()]
            )
    first = touches.first()
    if standing is not None and present is not None:
        theirs = standing[places_of(keys, touches)] == THEIRS
        differing = _conflicting(changes, keys, _sent(touches.event[first & touches.from_here & theirs], emptied))
    ends, left = touches.last() & touches.arrives, np.empty(0, np.int64)
    if leaving is not None and not versions:
        deletes = changes.op[touches.event] == DELETE
        left = np.sort(touches.event[touches.last() & touches.leaves])
        ends = touches.last() & (touches.arrives | deletes)
    final = np.sort(touches.event[ends])
    if versions:
        assert leaving is not None
        spans = spans_of(touches, leaving)
        values, final = {**values, **spans.ends(leaving)}, spans.final
    # A row marked as deleted, which no look at the table has shown, makes room for an inserted one.
    every_key = upsert or (leaving is not None and present is not None)
    goes = every_key | (changes.op[touches.event] != INSERT) | (touches.event >= anyway)
    deleted = touches.only(first & (touches.from_here if versions else goes))
    deleted_at = places_of(keys, deleted)
    deleted_keys = pa.table(take(keys.columns, deleted_at[:0] if truncated else deleted_at))
    if versions:
        assert leaving is not None
        deleted_keys = with_ends(deleted_keys, deleted, leaving)
    expected = None
    if standing is None:
        here = deleted.from_here
        standing_keys = deleted_keys if here.all() else deleted_keys.filter(pa.array(here))
        either = deleted_keys.slice(0, 0)
        free = first
        if anyway < changes.count:
            either = deleted_keys.filter(pa.array(~here & (deleted.event >= anyway)))
            free = first & (touches.event < anyway)
        expected = Expected(standing_keys, _free(changes, keys, touches, free), either)
    predecessor = _predecessors(keys, touches) if unchanged or left.size else np.empty(0, np.int64)
    if left.size:
        assert leaving is not None
        values, unchanged, keys, predecessor = _with_left(values, unchanged, key, keys, predecessor, left, leaving)
        final = np.concatenate([final, np.arange(changes.count, changes.count + len(left))])
    images, masked = _images(values, unchanged, keys, predecessor, final, upsert)
    return (images, masked, deleted_keys), missing, collisions, differing, expected


def _sent(events: Indices, emptied: Emptied | None) -> Indices:
    """Leave out events that the publisher did not send."""
    return events if emptied is None else events[~emptied.made[events]]


def _standing(keys: EventKeys, truncated: bool, present: Present | None, upsert: bool) -> Indices | None:
    """Return for each key who wrote the table's row under it (Present.keys), before the batch or after the TRUNCATE.

    None if that is not known: the first touch of a key decides.
    """
    if truncated or upsert:
        return np.full(len(keys.codes), 0 if truncated else OURS)
    if present is None:
        return None
    _, first, place = np.unique(keys.codes, return_index=True, return_inverse=True)
    there: Indices = present.keys(pa.table(take(keys.columns, first)))[place]
    return there


def _free(changes: Changes, keys: EventKeys, touches: Touches, first: Mask) -> pa.Table:
    """Return the keys whose first touch is an arrival."""
    free = first & ~touches.from_here
    if free.all() and len(free) == len(keys.codes) == changes.count:
        return pa.table(keys.columns)
    return pa.table(take(keys.columns, touches.event[free]))


def _conflicting(changes: Changes, keys: EventKeys, events: Indices) -> Conflicting | None:
    if not events.size:
        return None
    events = np.sort(events)
    shown = events[:SHOWN]
    looked_for = np.where((changes.op[shown] == UPDATE) & (keys.left[shown] > 0), keys.left[shown], shown)
    return Conflicting(
        changes.seq[events],
        changes.op[events],
        pa.table(take(keys.columns, looked_for)),
        pa.table(take(changes.new, shown)),
    )


def _without_skipped(touches: Touches) -> Touches:
    """Leave out events whose row is gone: deleted or moved earlier in the batch, or not in the table.

    A skipped event may have been another's predecessor, so repeat until nothing changes.  A publisher sends no such events, so
    one round is the rule.  A skipped event stays skipped, since its key stays without a row.
    """
    while True:
        gone = touches.from_here & ~touches.occupied()
        if not gone.any():
            return touches
        touches = touches.only(~np.isin(touches.event, touches.event[gone], kind="table"))


def _predecessors(keys: EventKeys, touches: Touches) -> Indices:
    """Return for each event the one that made the row which it changes, itself if none did."""
    made_here = touches.from_here & touches.after_arrival()
    predecessor = np.arange(len(keys.left))
    predecessor[touches.event[made_here]] = np.roll(touches.event, 1)[made_here]
    return predecessor


def _with_left(
    values: dict[str, pa.Array],
    unchanged: dict[str, Mask],
    key: Sequence[str],
    keys: EventKeys,
    predecessor: Indices,
    left: Indices,
    leaving: Leaving,
) -> tuple[dict[str, pa.Array], dict[str, Mask], EventKeys, Indices]:
    """Add for each of the events `left`, whose row leaves a key for good, one more: the deletion of a row under that key.

    It has the values that the row had before the event.
    """
    count, events = len(left), np.arange(len(keys.left))
    indices = pa.array(left)
    more: dict[str, pa.Array] = {}
    masks: dict[str, Mask] = {}
    for name, column in values.items():
        if name in key:
            more[name] = keys.columns[name].take(pa.array(keys.left[left]))
        elif name in leaving:
            more[name] = leaving[name].take(indices)
        else:
            more[name] = nulls(count, column.type)
            before = unchanged.get(name, np.zeros(len(events), np.bool_))
            masks[name] = np.concatenate([before, np.ones(count, np.bool_)])
    made_by = predecessor[left]
    own = np.arange(len(events), len(events) + count)
    return (
        {name: pa.concat_arrays([column, more[name]]) for name, column in values.items()},
        masks,
        replace(keys, left=np.concatenate([keys.left, keys.left[left]])),
        np.concatenate([predecessor, np.where(made_by == left, own, made_by)]),
    )


def _images(
    values: dict[str, pa.Array],
    unchanged: dict[str, Mask],
    keys: EventKeys,
    predecessor: Indices,
    final: Indices,
    upsert: bool,
) -> tuple[pa.Table, pa.Table]:
    """Return the images of the events `final`: complete ones and masked ones."""
    events = len(keys.left)
    names = list(values)
    everything = len(final) == events and not unchanged
    sources: dict[str, Indices] = {}
    still_unchanged: dict[str, Mask] = {}
    if unchanged:
        for name, mask in unchanged.items():
            sources[name] = _chase(np.where(mask, predecessor, np.arange(events)))[final]
            if mask[sources[name]].any():
                still_unchanged[name] = mask[sources[name]]

    def rows(chosen: Mask | slice) -> pa.Table:
        return pa.table(
            {name: column.take(pa.array(sources.get(name, final)[chosen])) for name, column in values.items()}
        )

    if not still_unchanged:
        images = pa.table(values) if everything else rows(slice(None))
        none = np.empty(0, np.int64)
        return images, _masked(images.slice(0, 0), {}, names, pa.table(keys.base(none)))
    masked = np.logical_or.reduce(list(still_unchanged.values()))
    chain_start = np.zeros(len(final), np.int64)  # the same for all columns: each event has one predecessor
    for name, mask in still_unchanged.items():
        chain_start[mask] = sources[name][mask]
    masks = {name: mask[masked] for name, mask in still_unchanged.items()}
    starts = chain_start[masked]
    images = _masked(rows(masked), masks, names, pa.table(keys.base(starts)))
    if upsert:
        images = images.append_column(MOVED_COLUMN, pa.array(keys.moved(starts)))
    return rows(~masked), images


def _chase(pointers: Indices) -> Indices:
    """Follow each pointer to its end, an element that points to itself."""
    while True:
        further = pointers[pointers]
        if np.array_equal(further, pointers):
            return pointers
        pointers = further


def _masked(images: pa.Table, masks: Mapping[str, Mask], names: Sequence[str], base: pa.Table) -> pa.Table:
    """Add to `images` the columns that mark missing values, and the key of the row that has them."""
    for name, mask in masks.items():
        images = images.append_column(f"{UNCHANGED_PREFIX}{names.index(name)}", pa.array(mask))
    for place, column in enumerate(base.columns):
        images = images.append_column(f"{BASE_PREFIX}{place}", column)
    return images


# Without a key


def _without_missing(changes: Changes, truncated: bool, present: Present) -> tuple[Changes, Conflicting | None]:
    """Split off updates and deletes of rows that do not exist.

    Rows are counted by their codes.  Only if the counts show that some row may be missing are the changes walked one by one.
    """
    minus = np.flatnonzero(changes.op != INSERT)
    if not minus.size:
        return changes, None
    if (changes.old_kind[minus] != OLD_ROW).any():
        raise no_identity(next(iter(changes.new)))
    rows = {
        name: pa.concat_arrays([column, _old(changes, name).take(pa.array(minus))])
        for name, column in changes.new.items()
    }
    codes = row_codes(list(rows.values()), 1 << CODE_BITS, exact=True)[0]
    _, first, place = np.unique(codes, return_index=True, return_inverse=True)
    new, old = place[: changes.count], np.full(changes.count, -1)
    old[minus] = place[changes.count :]
    taken = np.unique(old[minus])
    have = np.zeros(len(first), np.int64)
    if not truncated:
        have[taken] = present.copies(pa.table(take(rows, first[taken])))
    if (have[taken] >= np.bincount(old[minus], minlength=len(first))[taken]).all():
        return changes, None
    counts = have.tolist()
    found = np.ones(changes.count, np.bool_)
    for event, (op, arriving, leaving) in enumerate(zip(changes.op.tolist(), new.tolist(), old.tolist(), strict=True)):
        if op != INSERT:
            if not counts[leaving]:
                found[event] = False
                continue
            counts[leaving] -= 1
        if op != DELETE:
            counts[arriving] += 1
    events = np.flatnonzero(~found)
    if not events.size:
        return changes, None
    shown = events[:SHOWN]
    missing = Conflicting(
        changes.seq[events],
        changes.op[events],
        pa.table({name: _old(changes, name).take(pa.array(shown)) for name in changes.new}),
        pa.table(take(changes.new, shown)),
    )
    return _chosen(changes, found), missing


def _old(changes: Changes, name: str) -> pa.Array:
    """Return a column of the old rows; NULLs for a column that the publisher lacks."""
    column = changes.old.get(name)
    return nulls(changes.count, changes.new[name].type) if column is None else column


def _chosen(changes: Changes, chosen: Mask) -> Changes:
    mask = pa.array(chosen)
    return Changes(
        changes.seq[chosen],
        changes.op[chosen],
        {name: column.filter(mask) for name, column in changes.new.items()},
        {name: unchanged[chosen] for name, unchanged in changes.unchanged.items()},
        changes.old_kind[chosen],
        {name: column.filter(mask) for name, column in changes.old.items()},
    )


def _fold_multiset(changes: Changes, full: bool, truncated: bool) -> tuple[pa.Table, pa.Table]:
    """Return the rows to add, and the rows to remove with their counts."""
    minus = np.flatnonzero(changes.op != INSERT)
    if not minus.size:
        return pa.table(changes.new), _no_rows(changes)
    if not full or (changes.old_kind[minus] != OLD_ROW).any():
        raise no_identity(next(iter(changes.new)))
    plus = np.flatnonzero(changes.op != DELETE)
    added, taken = take(changes.new, plus), take(changes.old, minus)
    rows = {
        # A column that the publisher lacks is NULL in its rows.
        name: pa.concat_arrays([column, taken.get(name, nulls(len(minus), column.type))])
        for name, column in added.items()
    }
    codes, bound = dense(row_codes(list(rows.values()), 1 << CODE_BITS, exact=True)[0])
    sums = np.bincount(codes[: len(plus)], minlength=bound) - np.bincount(codes[len(plus) :], minlength=bound)
    row_of = np.empty(bound, np.int64)
    row_of[codes[::-1]] = np.arange(len(codes))[::-1]  # the first of the equal ones
    more, less = np.flatnonzero(sums > 0), np.flatnonzero(sums < 0)
    if truncated:
        less = less[:0]
    images = pa.table(take(rows, np.sort(np.repeat(row_of[more], sums[more]))))
    return images, pa.table(take(rows, row_of[less])).append_column(COUNT_COLUMN, pa.array(-sums[less]))
