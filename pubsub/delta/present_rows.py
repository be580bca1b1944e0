"""Look up which rows a Delta table holds, by keys or by whole rows, to find conflicts (changeset.Present).

For tables that arrow_writer can write, only the needed columns of the data files are read; for others, the deltalake
package reads the table.  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta import file_rows
from pubsub.delta.changeset import OURS, THEIRS
from pubsub.delta.key_set import KeySet
from pubsub.delta.log import TableLog
from pubsub.delta.table import TargetTable, query

Indices = npt.NDArray[np.int64]


class TablePresent:
    """The rows of a table at its log's present state.  `log`: None if the deltalake package must read the table."""

    def __init__(self, table: TargetTable, app_id: str, log: TableLog | None) -> None:
        self._table = table
        self._app_id = app_id
        self._log = log
        self._asked: list[tuple[pa.Table, Indices, bool]] = []

    def still_holds(self) -> bool:
        """Return whether all earlier look-ups would have the same answers now.  The log must be refreshed."""
        return all(np.array_equal(self._look(asked, whole=whole), answer) for asked, answer, whole in self._asked)

    def keys(self, keys: pa.Table) -> Indices:
        """See changeset.Present."""
        return self._ask(keys, whole=False)

    def copies(self, rows: pa.Table) -> Indices:
        """See changeset.Present."""
        return self._ask(rows, whole=True)

    def _ask(self, asked: pa.Table, *, whole: bool) -> Indices:
        answer = self._look(asked, whole=whole)
        self._asked.append((asked, answer, whole))
        return answer

    def _look(self, asked: pa.Table, *, whole: bool) -> Indices:
        wanted = KeySet(asked if whole else _zeros_alike(asked), whole=whole)
        found = np.zeros(len(wanted), np.int64)
        for batch, theirs in self._read(asked.column_names, None if whole else wanted):
            rows = wanted.rows(batch if whole else _zeros_alike(batch))
            rows = rows[rows >= 0]
            if whole:
                found += np.bincount(rows, minlength=len(wanted))
            else:
                found[rows] = THEIRS if theirs else OURS
        return found

    def _read(self, names: Sequence[str], wanted: KeySet | None) -> Iterator[tuple[pa.Table | pa.RecordBatch, bool]]:
        """Yield the named columns of the live rows, and whether others are known to have written them."""
        if self._log is not None:
            for batch, file in file_rows.live_columns(self._log, self._table, names, wanted):
                yield batch, file.writers is not None and self._app_id not in file.writers
            return
        listed = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
        schema = pa.schema([self._table.schema.field(name) for name in names])
        for batch in query(self._table.path, f"SELECT {listed} FROM t"):
            columns = [batch.column(index).cast(field.type) for index, field in enumerate(schema)]
            yield pa.table(columns, names=list(names)), False


def _zeros_alike(columns: pa.Table | pa.RecordBatch) -> pa.Table:
    """Return a table in which floats -0 are 0: they are one key, as in PostgreSQL."""
    table = columns if isinstance(columns, pa.Table) else pa.Table.from_batches([columns])
    for index, field in enumerate(table.schema):
        if pa.types.is_floating(field.type):
            table = table.set_column(index, field.name, pc.add(table.column(index), pa.scalar(0.0, field.type)))
    return table
