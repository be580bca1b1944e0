"""Columns of a mirror that say of each row which change made it (the option metadata).

lsn           the end LSN of its transaction, as a number; of a copied row that of the copy
commit_time   when the publisher committed it; NULL in a copied row, as is the next
xid           its id at the publisher
op            R  a copy read the row     I  it was inserted     U  it was changed     D  deleted, and stays (soft_deletes)
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from pubsub.protocol.lsn import Lsn

#: By kind, in the order that a table has them; the values' types.
KINDS: Final[Mapping[str, pa.DataType]] = {
    "lsn": pa.int64(),
    "commit_time": pa.timestamp("us", tz="UTC"),
    "xid": pa.int64(),
    "op": pa.string(),
}

#: The kinds of a table's columns with their names, in the order of KINDS.
Metadata = tuple[tuple[str, str], ...]


def fields_of(metadata: Metadata) -> list[pa.Field]:
    """Return the columns as fields."""
    return [pa.field(name, KINDS[kind]) for kind, name in metadata]


def copied(metadata: Metadata, lsn: Lsn) -> dict[str, str | int]:
    """Return the columns, other than NULL, of rows that are read from the publisher at this LSN, by name."""
    values: dict[str, str | int] = {"lsn": int(lsn), "op": "R"}
    return {name: values[kind] for kind, name in metadata if kind in values}
