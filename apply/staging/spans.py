"""Which changes of a batch make versions that stay in a table with mode = scd2, and which end them (pubsub.delta.versions).

A transaction leaves at most one version under each key, that of its last touch; the next transaction that touches the key ends it.
The row that the table has from before ends with the first of them.  Touches in their order, and what becomes of key 7:

    10  U 7       20  U 7   D 7   I 7       30  U 7→8
    the table's row ends at 10;  the U of 10 holds from 10 to 20,  the I of 20 from 20 to 30
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from apply.staging.own_columns import Leaving
from apply.staging.touches import Touches
from pubsub.delta.versions import ENDS, VALID_TO_LSN
from pubsub.protocol.arrow_arrays import Indices


@dataclass(frozen=True, slots=True, eq=False)
class Spans:
    """The changes that make a version, ascending, and for every change the one that ends what it made; -1: none does."""

    final: Indices
    ended_by: Indices

    def ends(self, leaving: Leaving) -> Mapping[str, pa.Array]:
        """Return the columns that say when versions end, for every change."""
        by = pa.array(self.ended_by, mask=self.ended_by < 0)
        return {name: leaving[name].take(by) for name in ENDS}


def spans_of(touches: Touches, leaving: Leaving) -> Spans:
    """Return the spans of the versions that changes with these touches make; `leaving` has the LSN of each change's transaction."""
    transaction = np.asarray(leaving[VALID_TO_LSN])[touches.event]
    last = touches.last()
    stays = last | (np.diff(transaction, append=-1) != 0)
    made = np.flatnonzero(stays & touches.arrives)
    ended_by = np.full(len(leaving[VALID_TO_LSN]), -1)
    ended = made[~last[made]]
    ended_by[touches.event[ended]] = touches.event[ended + 1]
    return Spans(np.sort(touches.event[made]), ended_by)


def with_ends(keys: pa.Table, ending: Touches, leaving: Leaving) -> pa.Table:
    """Return the keys of these touches, which end the table's own rows, with the columns that say when they do."""
    at = pa.array(ending.event)
    for name in ENDS:
        keys = keys.append_column(name, leaving[name].take(at))
    return keys
