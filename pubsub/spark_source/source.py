"""The data source itself, as PySpark's Data Source API has it (pyspark/sql/datasource.py): for batch and for streams.

Its methods run in processes that Spark starts and that get the objects pickled, so a reader opens the table when it is first
asked.  One process plans a stream as long as that runs: there the table's log is followed, not read again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from pubsub.delta.change_rows import BEGINNING, Place
from pubsub.delta.files.history_rows import Span
from pubsub.errors import DataCorrupted, NotInPrerequisiteState, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.spark_source import offsets
from pubsub.spark_source.history_table import HistoryTable
from pubsub.spark_source.locate import Located, located
from pubsub.spark_source.options import Latest, Options
from pubsub.spark_source.reading import Share, reach, rows, shares

#: Spark's longs; a limit that is none.
_NO_LIMIT: Final = (1 << 63) - 1
_ASK_CATALOG: Final = "Of a quiet table a node's catalog knows more: give home, subscription and table instead of path."


class PubsubSource(DataSource):
    """Changes of one table: the rows of a history, by their LSNs (docs/spark-source.md)."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "pubsub"

    def schema(self) -> StructType:
        """Return the columns of the history, as `spark.read` has them."""
        with _told():
            return _Opened(Options.parse(self.options)).table.schema

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return a reader of the rows between two LSNs."""
        with _told():
            return ChangesReader(Options.parse(self.options).of_batch(), schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802
        """Return a reader of the rows from an LSN on."""
        with _told():
            return ChangesStreamReader(Options.parse(self.options).of_stream(), schema)


class _Opened:
    """The table that the options name, opened and found readable."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.at: Located = located(options)
        reach(self.at.path, self.at.home)
        self.table = HistoryTable(self.at.path)
        self.table.refresh()

    def place_of(self, lsn: Lsn | Latest, name: str) -> Place:
        """Return the place after all that the table has up to `lsn`, which is called `name`.

        Raises NotInPrerequisiteState if the table is not known to have every change up to there: what is read would not be
        all, and later not the same.
        """
        position = self.table.position
        if lsn == "latest":
            return position
        if lsn == INVALID_LSN:
            return BEGINNING
        if lsn > position.lsn and lsn > self.at.covered:
            # The catalog is read before the log, whose rows of up to there are committed then.
            self.at = located(self._options)
            self.table.refresh()
            position = self.table.position
            known = max(position.lsn, self.at.covered)
            if lsn > known:
                raise NotInPrerequisiteState(
                    f'the history at "{self.at.path}" has not reached {name} {lsn}',
                    detail=f"It is known to have every change up to {known}.",
                    hint=None if self._options.path is None else _ASK_CATALOG,
                )
        return Place(lsn, position.generation)

    def shares(self, span: Span) -> list[Share]:
        """Return what tasks read of a span."""
        return shares(self.table.target, self.table.files(span), span, self.at.home)


class _Rows:
    """What both readers do in executors."""

    _schema: StructType

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one share."""
        with _told():
            # Spark makes a partition without contents where there is none.
            if isinstance(partition, Share):
                yield from rows(partition, to_arrow_schema(self._schema, timezone="UTC"))


class ChangesReader(_Rows, DataSourceReader):
    """Reads the rows after startingLSN and up to endingLSN, once."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema

    def partitions(self) -> Sequence[InputPartition]:
        """Return the shares of all rows.  Raises PubsubErrors."""
        with _told():
            opened = _Opened(self._options)
            opened.table.require(self._schema)
            span = Span(
                opened.place_of(self._options.starting, "startingLSN"),
                opened.place_of(self._options.ending, "endingLSN"),
            )
            return opened.shares(span)


class ChangesStreamReader(_Rows, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the rows from startingLSN on, in micro-batches of whole transactions.  Offsets are places (offsets.py)."""

    def __init__(self, options: Options, schema: StructType) -> None:
        self._options = options
        self._schema = schema
        self._opened: _Opened | None = None
        #: Where a query with the trigger availableNow ends.
        self._last: Place | None = None

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        """Return the offset at which a new query begins."""
        with _told():
            opened = self._current()
            return offsets.as_json(opened.place_of(self._options.starting, "startingLSN"), opened.table.id)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        """Return up to where the next micro-batch reads: `start` itself if there is nothing more."""
        with _told():
            opened = self._current()
            at = offsets.place_of(start, opened.table.id, opened.at.path)
            end = self._end(opened, at)
            if end <= at:
                return start
            if not isinstance(limit, ReadAllAvailable):
                end = opened.table.admitted(Span(at, end), self._options.transactions, _rows_of(limit))
            return offsets.as_json(end, opened.table.id)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        """Return the limits that the options give.  Spark knows none of transactions, so that one stays here."""
        if self._options.rows is None and self._options.transactions is None:
            return ReadAllAvailable()
        return ReadMaxRows(self._options.rows or _NO_LIMIT)

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        """Return where the table is, as it was last seen: Spark shows it in a query's progress."""
        with _told():
            opened = self._opened
            return None if opened is None else offsets.as_json(opened.table.position, opened.table.id)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        """Let the query end with what is there now."""
        with _told():
            self._last = self._current().table.position

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        """Return the shares of the rows between two offsets, in the newest version: whatever files they are in by now."""
        with _told():
            opened = self._current()
            first, last = (offsets.place_of(one, opened.table.id, opened.at.path) for one in (start, end))
            if last <= first:
                return []
            if last > opened.table.position:
                raise _went_back(opened.at.path, last, opened.table.position)
            return opened.shares(Span(first, last))

    def _current(self) -> _Opened:
        """Return the table as it is now.  Raises NotInPrerequisiteState if its columns are not the query's."""
        if self._opened is None:
            self._opened = _Opened(self._options)
        else:
            self._opened.table.refresh()
        self._opened.table.require(self._schema)
        return self._opened

    def _end(self, opened: _Opened, start: Place) -> Place:
        """Return up to where rows can be read.  Raises DataCorrupted if the table has lost what the query has read."""
        position = opened.table.position
        if start.lsn > position.lsn:
            try:
                opened.place_of(start.lsn, "the query's offset")
            except NotInPrerequisiteState as error:
                raise _went_back(opened.at.path, start, position) from error
        return position if self._last is None else min(position, self._last)


def _rows_of(limit: ReadLimit) -> int | None:
    return limit.max_rows if isinstance(limit, ReadMaxRows) and limit.max_rows < _NO_LIMIT else None


def _went_back(path: str, held: Place, position: Place) -> PubsubError:
    return DataCorrupted(
        f'the history at "{path}" ends at {position.lsn}, and the query has read up to {held.lsn}',
        sqlstate="55000",
        detail="The table was restored to an earlier version.",
        hint="Start another query, with another checkpoint, or from the LSN up to which the target is right.",
    )


@contextmanager
def _told() -> Iterator[None]:
    """Add to an error what Spark would not show of it: it prints tracebacks, with their notes."""
    try:
        yield
    except PubsubError as error:
        labels: Mapping[str, str | None] = {"DETAIL": error.detail, "HINT": error.hint}
        for label, text in labels.items():
            if text and (note := f"{label}:  {text}") not in getattr(error, "__notes__", ()):
                error.add_note(note)
        raise
