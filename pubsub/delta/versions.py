"""A table that keeps every version of each row (mode = scd2): four columns after the publisher's say when it held.

    _pubsub_valid_from      when the publisher committed the change that made the version; NULL in a copied row
    _pubsub_valid_to        when it committed the one that ended it; NULL in a current row
    _pubsub_valid_from_lsn  the end LSN of the one transaction, as a number; of a copied row that of the copy
    _pubsub_valid_to_lsn    that of the other; NULL in a current row, and in no other

At an LSN x the publisher's rows are those with valid_from_lsn <= x, and valid_to_lsn NULL or > x.  What a transaction left behind
counts, not how it came to it: a version of no duration is not kept.  There is at most one current row of each key.  The others are
not there to changes, as deleted rows that stay are not (soft_deletes).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from pubsub.protocol.lsn import Lsn

VALID_FROM: Final = "_pubsub_valid_from"
VALID_TO: Final = "_pubsub_valid_to"
VALID_FROM_LSN: Final = "_pubsub_valid_from_lsn"
VALID_TO_LSN: Final = "_pubsub_valid_to_lsn"

FIELDS: Final = (
    pa.field(VALID_FROM, pa.timestamp("us", tz="UTC")),
    pa.field(VALID_TO, pa.timestamp("us", tz="UTC")),
    pa.field(VALID_FROM_LSN, pa.int64()),
    pa.field(VALID_TO_LSN, pa.int64()),
)
NAMES: Final = tuple(field.name for field in FIELDS)
#: The columns that a change sets in the row that it ends.
ENDS: Final = (VALID_TO, VALID_TO_LSN)


def copied(lsn: Lsn) -> Mapping[str, int]:
    """Return the columns, other than NULL, of rows that are read from the publisher at this LSN."""
    return {VALID_FROM_LSN: int(lsn)}


def ended(lsn: Lsn) -> Mapping[str, pa.Scalar]:
    """Return what rows get that a copy, or a repair, at this LSN ends: no commit is known that did."""
    return {VALID_TO: pa.scalar(None, pa.timestamp("us", tz="UTC")), VALID_TO_LSN: pa.scalar(int(lsn), pa.int64())}
