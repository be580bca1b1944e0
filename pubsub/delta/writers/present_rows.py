"""Look up which rows a Delta table holds, by keys or by whole rows, to find conflicts (changeset.Present).

For tables that arrow_writer can write, only the needed columns of the data files are read; for others, the deltalake
package reads the table.  Blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pyarrow as pa

from pubsub.delta.files import file_rows, marked_rows
from pubsub.delta.files.key_set import KeySet
from pubsub.delta.files.sought_rows import find
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.table import TargetTable, query
from pubsub.delta.writers.changeset import OURS, THEIRS
from pubsub.processor_time import spent_on
from pubsub.protocol.arrow_arrays import Indices


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

    @spent_on("finding")
    def _look(self, asked: pa.Table, *, whole: bool) -> Indices:
        wanted = KeySet(asked, whole=whole)
        answer = np.zeros(len(wanted), np.int64)
        if not whole and self._log is not None:
            table = file_rows.laid_out(self._log, self._table)
            for found in marked_rows.only_live(self._log, table, find(self._log, wanted, table)):
                writers = found.file.writers
                answer[found.key_rows] = THEIRS if writers is not None and self._app_id not in writers else OURS
            return answer
        for batch in self._read(asked.column_names):
            rows = wanted.rows(batch)
            rows = rows[rows >= 0]
            if whole:
                answer += np.bincount(rows, minlength=len(wanted))
            else:
                answer[rows] = OURS
        return answer

    def _read(self, names: Sequence[str]) -> Iterator[pa.Table | pa.RecordBatch]:
        """Yield the named columns of the live rows."""
        if self._log is not None:
            yield from file_rows.live_columns(self._log, self._table, names)
            return
        listed = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
        schema = pa.schema([self._table.schema.field(name) for name in names])
        for batch in query(self._table.path, f"SELECT {listed} FROM t"):
            columns = [batch.column(index).cast(field.type) for index, field in enumerate(schema)]
            yield pa.table(columns, names=list(names))
