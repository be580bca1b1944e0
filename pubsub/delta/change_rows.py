"""A table in mode history: each change of the publisher's table is a row, with these columns before the publisher's own.

    _pubsub_op           R  a row that a copy read         I  an inserted row
                         U  a row as an UPDATE made it     O  the same row before the UPDATE, if that changed its key,
                         D  a deleted row                     or if the table has none
                         T  the table was emptied: TRUNCATE, or a copy that begins anew
    _pubsub_lsn          the end LSN of the transaction; of a copied row the LSN of its snapshot
    _pubsub_seq          the change's place in the transaction: ascending, with gaps
    _pubsub_commit_time  when the publisher committed it; NULL for a copied row, as is the next
    _pubsub_xid          its id at the publisher
    _pubsub_unchanged    the columns that an UPDATE left as they were and that were not sent; they are NULL in the row

(_pubsub_lsn, _pubsub_seq) orders all changes; only the rows of one copy share a place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from pubsub.protocol.lsn import INVALID_LSN, Lsn

OP: Final = "_pubsub_op"
LSN: Final = "_pubsub_lsn"
SEQ: Final = "_pubsub_seq"
COMMIT_TIME: Final = "_pubsub_commit_time"
XID: Final = "_pubsub_xid"
UNCHANGED: Final = "_pubsub_unchanged"

# The place of change n is 2n + 1, that of what comes just before it, an `O` or a `T`, 2n.  What a copy reads stands after the
# transaction that ends at its snapshot's LSN, which it includes, and after earlier copies at that LSN.
_COPIES: Final = 1 << 62

FIELDS: Final = (
    pa.field(OP, pa.string()),
    pa.field(LSN, pa.int64()),
    pa.field(SEQ, pa.int64()),
    pa.field(COMMIT_TIME, pa.timestamp("us", tz="UTC")),
    pa.field(XID, pa.int64()),
    pa.field(UNCHANGED, pa.list_(pa.string())),
)
#: The operations whose rows have every column that the publisher's table had then.
WHOLE: Final = ("R", "I", "U")
NAMES: Final = frozenset(field.name for field in FIELDS)


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """A place between two changes: after the transactions that end up to `lsn`, and the copies up to `generation` there.

    A later copy may have the LSN of the history's last transaction, and of an earlier copy.
    """

    lsn: Lsn
    generation: int

    @property
    def seq(self) -> int:
        """The greatest _pubsub_seq that a row before this place can have at its LSN."""
        return _COPIES + 2 * self.generation + 1


BEGINNING: Final = Place(INVALID_LSN, 0)
"""Before all rows."""


def copied(lsn: Lsn, generation: int) -> Mapping[str, str | int]:
    """Return the columns, other than NULL, of the rows that a copy under a snapshot of this LSN reads."""
    return {OP: "R", LSN: int(lsn), SEQ: _COPIES + 2 * generation + 1}


def begun_anew(lsn: Lsn, generation: int) -> Mapping[str, str | int]:
    """Return the columns, other than NULL, of the row before those of a copy which is not the table's first."""
    return {OP: "T", LSN: int(lsn), SEQ: _COPIES + 2 * generation}
