"""One version of a Delta table, read in bounded pieces: by our own reader, or by deltalake's for tables that it cannot read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.delta import table
from pubsub.delta.files import file_rows
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.deltalake_turns import ask
from pubsub.delta.log.table_log import TableLog, log_at
from pubsub.delta.places import is_reached
from pubsub.delta.sources import own_files
from pubsub.delta.table import TargetTable
from pubsub.digest.forms import RowForm
from pubsub.digest.hashing import Hashes
from pubsub.digest.sums import Hashed, range_of
from pubsub.errors import FeatureNotSupported
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.type_contract import VARIANT
from pubsub.sql.source import Source

#: What one piece holds at most: rows, and bytes as Arrow has them.
_ROWS: Final = 1 << 16
_BYTES: Final = 16 << 20


_NOTHING: Final = Hashed(np.empty(0, np.uint64), np.empty(0, np.uint64), pa.array([], pa.int32()))


class DeltaVersion:
    """The rows of version `version` of the table at `path`.  Blocks.

    Raises FileNotFoundError or DataCorrupted if its files or its log are gone, FeatureNotSupported if only Spark reads it.
    """

    def __init__(self, path: str, version: int, relation: str, source: Source | None = None) -> None:
        """`source`: whose rows they are, in a table of several sources."""
        self.path = path
        self.version = version
        schema, mapped, properties = table.described_at(path, version)
        self.schema: pa.Schema = schema
        self.properties = properties
        self._table = TargetTable(path, schema, (), relation, mapped, source=source)
        # Of rows that are marked as deleted, or as ended, the publisher has none.
        mark = table.mark_of(properties)
        self._mark = mark if mark in schema.names else None
        self._log: TableLog | None = None
        if is_reached(path):
            log = log_at(path, version)
            self._log = log if log.unsupported() is None else None
        self._files: list[AddFile] = own_files(self._log, self._table) if self._log is not None else []

    def pieces(
        self, names: Sequence[str], files: Collection[int] | None = None
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Yield the named columns of the rows, each piece with its file's number; of these `files` only, if given."""
        if self._log is None:
            for batch in self._elsewhere(names):
                for piece in _pieces(batch):
                    yield 0, piece
            return
        for number, file in enumerate(self._files):
            if files is not None and number not in files:
                continue
            read = names if self._mark is None else [*names, self._mark]
            for rows in file_rows.live_rows(self._log, [file], self._table, read):
                if self._mark is not None:
                    rows = rows.filter(pc.is_null(rows.column(len(names)))).select(range(len(names)))
                for batch in rows.to_batches():
                    for piece in _pieces(_variants_as_here(batch, self.schema)):
                        yield number, piece

    def _elsewhere(self, names: Sequence[str]) -> Iterator[pa.RecordBatch]:
        from deltalake import QueryBuilder
        from deltalake.exceptions import DeltaError

        listed = ", ".join('"' + name.replace('"', '""') + '"' for name in names)
        opened = ask(self.path, lambda table: table, self.version)
        conditions = [] if self._mark is None else [f'"{self._mark}" IS NULL']
        if (source := self._table.source) is not None:
            value = source.value.replace("'", "''")
            conditions.append(f"\"{source.column}\" = '{value}'")
        condition = f" WHERE {' AND '.join(conditions)}" if conditions else ""
        try:
            result = QueryBuilder().register("t", opened).execute(f"SELECT {listed} FROM t{condition}")
            reader = pa.RecordBatchReader.from_stream(result)
        except DeltaError as error:
            raise FeatureNotSupported(
                f'the Delta table at "{self.path}" has features that only Spark reads', detail=str(error)
            ) from error
        fields = [self.schema.field(name) for name in names]
        for batch in reader:
            columns = [batch.column(place).cast(field.type) for place, field in enumerate(fields)]
            yield pa.RecordBatch.from_arrays(columns, names=list(names))

    def rows_in(self, form: RowForm, bits: int, ranges: Indices) -> Hashed:
        """Return the rows whose keys' hashes are in these ranges; `at` has their files' numbers."""
        wanted = np.zeros(1 << bits, np.bool_)
        wanted[ranges] = True
        found = [_NOTHING]
        for number, piece in self.pieces(form.columns):
            inside = wanted[range_of(form.key_hashes(piece), bits)]
            if inside.any():
                keys, rows = form.hashes(piece.filter(pa.array(inside)))
                found.append(Hashed(keys, rows, pa.array(np.full(len(keys), number, np.int32))))
        return Hashed.joined(found)

    def rows_like(self, form: RowForm, hashes: Sequence[int]) -> Hashed:
        """Return the rows with one of these hashes, signed; `at` has their files' numbers."""
        wanted = np.unique(np.array(hashes, np.int64).view(np.uint64))
        found = [_NOTHING]
        for number, piece in self.pieces(form.columns):
            keys, rows = form.hashes(piece)
            places = np.flatnonzero(np.isin(rows, wanted))
            found.append(Hashed(keys[places], rows[places], pa.array(np.full(len(places), number, np.int32))))
        return Hashed.joined(found)

    def rows_under(self, form: RowForm, keys: Hashes, fewest: np.uint64 | None = None) -> Hashed:
        """Return the rows whose keys have one of these hashes; with `fewest`, those with hashes below that, too."""
        names = [one.column for one in form.key]
        wanted = np.unique(keys)

        def chosen(piece: pa.RecordBatch) -> Indices:
            hashes = form.key_hashes(piece)
            inside = np.isin(hashes, wanted)
            return np.flatnonzero(inside if fewest is None else inside | (hashes < fewest))

        # The key's columns alone say which files are to be read.
        files = {number for number, piece in self.pieces(names) if len(chosen(piece))}
        found = [_NOTHING]
        for number, piece in self.pieces(form.columns, files):
            places = chosen(piece)
            hashed, rows = form.hashes(piece.take(pa.array(places)))
            found.append(Hashed(hashed, rows, pa.array(np.full(len(places), number, np.int32))))
        return Hashed.joined(found)

    def rows_of(
        self, form: RowForm, wanted: Hashed, names: Sequence[str] | None = None
    ) -> Iterator[tuple[Hashed, pa.RecordBatch]]:
        """Yield the rows of `wanted`, which `rows_in` or `rows_like` has found; of equal rows as many.

        `names`: the columns, all of `form` among them, which is the default.
        """
        pairs = list(zip(wanted.keys.tolist(), wanted.rows.tolist(), strict=True))
        left = Counter(pairs)
        sought = np.unique(wanted.keys)
        for number, piece in self.pieces(names or form.columns, set(wanted.at.unique().to_pylist())):
            near = np.flatnonzero(np.isin(form.key_hashes(piece), sought))
            if not len(near):
                continue
            rows = piece.take(pa.array(near))
            keys, hashes = form.hashes(rows)
            chosen = []
            for place, pair in enumerate(zip(keys.tolist(), hashes.tolist(), strict=True)):
                if left[pair] > 0:
                    left[pair] -= 1
                    chosen.append(place)
            if chosen:
                places = np.array(chosen)
                at = pa.array(np.full(len(places), number, np.int32))
                yield Hashed(keys[places], hashes[places], at), rows.take(pa.array(places))


def _variants_as_here(rows: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return the rows with VARIANT columns as our own files have them; others write the two fields in another order."""
    for place, field in enumerate(rows.schema):
        if schema.field(field.name).type == VARIANT and field.type != VARIANT:
            column = rows.column(place)
            inside = [column.field(one.name) for one in VARIANT]
            same = pa.StructArray.from_arrays(inside, fields=list(VARIANT), mask=column.is_null())
            rows = rows.set_column(place, field.name, same)
    return rows


def _pieces(rows: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Divide rows so that a piece is small enough to be hashed at once."""
    size = min(max(_BYTES * rows.num_rows // max(rows.nbytes, 1), 1), _ROWS)
    for at in range(0, rows.num_rows, size):
        yield rows.slice(at, size)
