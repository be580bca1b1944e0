"""Compare a publisher's table with its Delta table: every row and every column, in 8 bytes of memory per row.

The comparison shares no code with the product.  The publisher's side is PostgreSQL's own text (COPY … FORMAT csv).  The
Delta side is read by DataFusion (deltalake's QueryBuilder, which supports deletion vectors and needs no JVM) and
rendered as PostgreSQL's text by DuckDB; arrays, structs and variants by `nested`.  Only floating point is compared as
numbers, parsed from the text, because the two write different shortest texts; a value that does not parse stays text,
and differs.

Each side is streamed once and keeps a 64-bit hash of all columns for each row.  The sorted hashes are compared as
multisets: order does not matter, duplicates count.  If they differ, both sides are streamed again, in the same snapshot
and version, for the rows with the differing hashes.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.csv as pa_csv
from psycopg import sql

from pubsub import object_stores
from pubsub.errors import UndefinedTable
from pubsub.publisher.session_settings import SERVER_17
from pubsub.testing import nested
from pubsub.texts import first_line

if TYPE_CHECKING:
    from deltalake import DeltaTable

Row = tuple[str | None, ...]
Hashes = np.ndarray[Any, np.dtype[np.uint64]]

_SESSION: Final = (
    "-c datestyle=ISO -c intervalstyle=postgres -c extra_float_digits=3 -c bytea_output=hex -c timezone=UTC "
    "-c search_path= -c row_security=off -c quote_all_identifiers=off -c default_transaction_read_only=on "
    "-c statement_timeout=0 -c lock_timeout=0 -c idle_in_transaction_session_timeout=0"
)
_BLOCK_BYTES: Final = 4 << 20
_LARGEST_BLOCK_BYTES: Final = 1 << 30
_ROWS_KEPT: Final = 10_000


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference: `missing` rows are only at the publisher, `extra` rows only in Delta (duplicates count).

    The samples are rows as texts in the order of `columns`, sorted by the key, up to the requested number.  `reason`
    says why the rows could not be compared at all.
    """

    table: str
    columns: tuple[str, ...]
    key: tuple[str, ...]
    publisher_rows: int
    delta_rows: int
    missing: int = 0
    extra: int = 0
    missing_sample: tuple[Row, ...] = ()
    extra_sample: tuple[Row, ...] = ()
    reason: str | None = None

    def __str__(self) -> str:
        if self.reason is not None:
            return f"{self.table}: {self.reason}"
        counts = f"{self.publisher_rows} rows at the publisher, {self.delta_rows} in Delta"
        lines = [f"{self.table}: {counts}; {self.missing} missing or different, {self.extra} extra or different"]
        lines += [f"  publisher only: {self._show(row)}" for row in self.missing_sample]
        lines += [f"  Delta only:     {self._show(row)}" for row in self.extra_sample]
        return "\n".join(lines)

    def _show(self, row: Row) -> str:
        values = []
        for name, value in zip(self.columns, row, strict=True):
            text = "NULL" if value is None else repr(value)
            values.append(f"{name}={text if len(text) <= 80 else f'{text[:80]}… ({len(text)} characters)'}")
        return ", ".join(values)


def compare_tables(
    conninfo: str,
    table: str,
    path: str,
    *,
    columns: Sequence[str] | None = None,
    where: str | None = None,
    version: int | None = None,
    snapshot: str | None = None,
    storage_options: Mapping[str, str] | None = None,
    sample: int = 5,
) -> Difference | None:
    """Compare the publisher's `table`, named as for regclass, with the Delta table at `path`; return None if equal.

    `columns` is a publication's column list (default: all published columns), `where` its row filter in the publisher's
    SQL.  `version` pins the Delta version (default: the newest); `snapshot` names an exported snapshot of the publisher
    (default: a new one).  `storage_options` are deltalake's (default: by the settings of the node that this process
    opened last).  Columns that only Delta has are ignored.  Raises UndefinedTable if one of the tables does not
    exist.
    """
    import deltalake
    from deltalake.exceptions import TableNotFoundError

    try:
        options = object_stores.options(path) if storage_options is None else dict(storage_options)
        delta = deltalake.DeltaTable(path, version=version, storage_options=options)
    except TableNotFoundError as error:
        raise UndefinedTable(f'there is no Delta table at "{path}"') from error
    types = {field.name: field.type for field in pa.schema(delta.schema().to_arrow())}
    with psycopg.connect(conninfo, options=_SESSION, client_encoding="UTF8") as connection:
        if connection.info.server_version >= SERVER_17:
            # An older server would refuse it as an option.  Reading a large Delta table takes longer than a database may allow.
            connection.execute("SET transaction_timeout = 0")
            connection.commit()
        connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        _import_snapshot(connection, snapshot)
        published, key, source = _describe(connection, table, columns, types)
        absent = [name for name in published if name not in types]
        if absent:
            return Difference(table, tuple(published), key, 0, 0, reason=f"Delta lacks the columns {', '.join(absent)}")
        kinds = [types[name] for name in published]
        publisher = _Publisher(connection, _copy_statement(source, published, where), kinds, snapshot)
        target = _Delta(delta, published, kinds)
        ours, theirs = publisher.hashes(), target.hashes()
        missing, extra = _multiset_difference(ours, theirs)
        if not len(missing) and not len(extra):
            return None
        order = [published.index(name) for name in key]
        return Difference(
            table,
            tuple(published),
            key,
            len(ours),
            len(theirs),
            len(missing),
            len(extra),
            _first(publisher.rows(missing), order, sample),
            _first(target.rows(extra), order, sample),
        )


def _import_snapshot(connection: psycopg.Connection, snapshot: str | None) -> None:
    """Adopt an exported snapshot, if there is one; must be the transaction's first statement."""
    if snapshot is not None:
        connection.execute(sql.SQL("SET TRANSACTION SNAPSHOT {}").format(snapshot))


def _describe(
    connection: psycopg.Connection, table: str, columns: Sequence[str] | None, types: Mapping[str, pa.DataType]
) -> tuple[list[str], tuple[str, ...], str]:
    """Return the columns to compare, the primary key's columns (empty without a key), and the text after FROM."""
    try:
        row = connection.execute(
            "SELECT c.oid, c.relkind, format('%%I.%%I', n.nspname, c.relname) FROM pg_catalog.pg_class c"
            " JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = %s::text::regclass",
            [table],
        ).fetchone()
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
        raise UndefinedTable(first_line(error)) from error
    assert row is not None
    oid, kind, name = row
    names = connection.execute(
        "SELECT attname, attgenerated <> '' FROM pg_catalog.pg_attribute"
        " WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
        [oid],
    ).fetchall()
    if columns is None:
        published = [each for each, generated in names if not generated or each in types]
    else:
        published = list(columns)
    key = connection.execute(
        "SELECT a.attname FROM pg_catalog.pg_index i CROSS JOIN unnest(i.indkey::int2[]) WITH ORDINALITY k (attnum, n)"
        " JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum"
        " WHERE i.indrelid = %s AND i.indisprimary AND k.n <= i.indnkeyatts ORDER BY k.n",
        [oid],
    ).fetchall()
    only = "" if kind in {"p", b"p"} else "ONLY "
    return published, tuple(each for (each,) in key if each in published), only + name


def _copy_statement(source: str, columns: Sequence[str], where: str | None) -> bytes:
    # Without the leading constant, a NULL in a table's only column would be an empty line.
    names = "".join(f", {sql.Identifier(name).as_string(None)}" for name in columns)
    condition = f" WHERE {where}" if where else ""
    return f"COPY (SELECT 1{names} FROM {source}{condition}) TO STDOUT (FORMAT csv)".encode()


class _Side:
    """One side: a stream of columns c0, c1, …, and DuckDB's expressions that render them as PostgreSQL's text."""

    def __init__(self, rendered: Sequence[str]) -> None:
        # Columns are named by position because DuckDB folds the case of names.
        columns = ", ".join(each.replace("{}", f"c{index}") + f" AS v{index}" for index, each in enumerate(rendered))
        self._from = f"(SELECT {columns or '1 AS v0'} FROM stream)"
        self._columns = ", ".join(f"v{index}" for index in range(max(len(rendered), 1)))
        self._width = len(rendered)

    def hashes(self) -> Hashes:
        """Return the 64-bit hashes of all rows, sorted."""
        found = self._select(f"SELECT hash({self._columns}) FROM {self._from}", {})
        hashes = np.array(found.column(0).to_numpy(), np.uint64)
        hashes.sort()
        return hashes

    def rows(self, hashes: Hashes) -> list[Row]:
        """Return the rows with these hashes (the first 10,000), each as often as its hash occurs."""
        if not len(hashes):
            return []
        left = Counter(hashes[:_ROWS_KEPT].tolist())
        found = self._select(
            f"SELECT hash({self._columns}), {self._columns} FROM {self._from}"
            f" WHERE hash({self._columns}) IN (SELECT h FROM wanted) LIMIT {_ROWS_KEPT}",
            {"wanted": pa.table({"h": pa.array(left, pa.uint64())})},
        )
        rows = []
        for code, *values in zip(*(column.to_pylist() for column in found.columns), strict=True):
            if left[code] > 0:
                left[code] -= 1
                rows.append(tuple(values[: self._width]))
        return rows

    def _select(self, statement: str, tables: Mapping[str, pa.Table]) -> pa.Table:
        import duckdb

        with self._open() as reader, duckdb.connect(config={"threads": 1}) as connection:
            connection.register("stream", reader)
            for name, table in tables.items():
                connection.register(name, table)
            return connection.sql(statement).to_arrow_table()

    def _open(self) -> AbstractContextManager[pa.RecordBatchReader]:
        raise AssertionError("each side opens its own stream")


class _Publisher(_Side):
    def __init__(
        self,
        connection: psycopg.Connection,
        statement: bytes,
        kinds: Sequence[pa.DataType],
        snapshot: str | None,
    ) -> None:
        super().__init__([_from_publisher(kind) for kind in kinds])
        self._connection = connection
        self._snapshot = snapshot
        self._statement = statement
        self._names = [f"c{index}" for index in range(len(kinds))]
        self._block = _BLOCK_BYTES

    def _select(self, statement: str, tables: Mapping[str, pa.Table]) -> pa.Table:
        while True:
            try:
                return super()._select(statement, tables)
            except Exception as error:
                # A row is larger than the block, and the parser needs it whole: try again with a larger block.
                if "straddl" not in str(error) or self._block >= _LARGEST_BLOCK_BYTES:
                    raise
                self._block *= 16
                self._connection.rollback()
                _import_snapshot(self._connection, self._snapshot)

    @contextmanager
    def _open(self) -> Iterator[pa.RecordBatchReader]:
        with self._connection.cursor().copy(self._statement) as copy:
            names = ["one", *self._names]
            file = _CopyFile(copy)
            if file.is_empty():
                # Arrow refuses an empty file.
                schema = pa.schema([(name, pa.large_string()) for name in names])
                yield pa.RecordBatchReader.from_batches(schema, [])
                return
            yield pa_csv.open_csv(
                pa.PythonFile(file, mode="r"),
                pa_csv.ReadOptions(column_names=names, block_size=self._block, use_threads=False),
                pa_csv.ParseOptions(newlines_in_values=True),
                pa_csv.ConvertOptions(
                    column_types=dict.fromkeys(names, pa.large_string()),
                    null_values=[""],
                    strings_can_be_null=True,
                    quoted_strings_can_be_null=False,
                ),
            )


class _Delta(_Side):
    def __init__(self, table: DeltaTable, columns: Sequence[str], kinds: Sequence[pa.DataType]) -> None:
        super().__init__([_from_delta(kind) for kind in kinds])
        self._table = table
        self._kinds = kinds
        self._list = ", ".join(f"{_quoted(name)} AS c{index}" for index, name in enumerate(columns))

    @contextmanager
    def _open(self) -> Iterator[pa.RecordBatchReader]:
        from deltalake import QueryBuilder

        builder = QueryBuilder().register("target", self._table)
        reader = pa.RecordBatchReader.from_stream(builder.execute(f"SELECT {self._list or '1 AS one'} FROM target"))
        places = [place for place, kind in enumerate(self._kinds) if nested.is_nested(kind)]
        if places:
            schema = reader.schema
            for place in places:
                schema = schema.set(place, pa.field(f"c{place}", pa.large_string()))
            reader = pa.RecordBatchReader.from_batches(schema, self._rendered(reader, places, schema))
        yield reader

    def _rendered(
        self, reader: pa.RecordBatchReader, places: Sequence[int], schema: pa.Schema
    ) -> Iterator[pa.RecordBatch]:
        for batch in reader:
            columns = list(batch.columns)
            for place in places:
                columns[place] = nested.texts(_cast(columns[place], self._kinds[place]))
            yield pa.RecordBatch.from_arrays(columns, schema=schema)


class _CopyFile(io.RawIOBase):
    """COPY's output as a readable file."""

    def __init__(self, copy: psycopg.Copy) -> None:
        self._rows = iter(copy)
        self._left = bytes(next(self._rows, b""))

    def is_empty(self) -> bool:
        """Whether there are no rows; valid only before the first read."""
        return not self._left

    def readable(self) -> bool:
        return True

    def read(self, size: int | None = -1) -> bytes:
        parts, length = [self._left], len(self._left)
        while size is None or size < 0 or length < size:
            row = next(self._rows, None)
            if row is None:
                break
            parts.append(bytes(row))
            length += len(row)
        data = b"".join(parts)
        if size is None or size < 0:
            size = len(data)
        data, self._left = data[:size], data[size:]
        return data


def _from_publisher(kind: pa.DataType) -> str:
    """Return DuckDB's expression over PostgreSQL's text: the text itself, except for floating point."""
    if pa.types.is_floating(kind):
        number = "FLOAT" if kind.bit_width == 32 else "DOUBLE"
        return f"coalesce(CAST(TRY_CAST({{}} AS {number}) AS VARCHAR), {{}})"
    return "{}"


def _from_delta(kind: pa.DataType) -> str:
    """Return DuckDB's expression that renders a Delta column of this Arrow type as PostgreSQL's text."""
    text = "CAST({} AS VARCHAR)"
    if pa.types.is_boolean(kind):
        return "CASE WHEN {} THEN 't' WHEN NOT {} THEN 'f' END"
    if pa.types.is_decimal(kind):
        # DuckDB prints .5 if the type has only fractional digits.
        return f"regexp_replace({text}, '^(-?)\\.', '\\10.')"
    if pa.types.is_date(kind):
        return _with_era(text, "")
    if pa.types.is_timestamp(kind):
        return _with_era("CAST(make_timestamp(epoch_us({})) AS VARCHAR)", "" if kind.tz is None else "+00")
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_binary_view(kind):
        return "'\\x' || lower(hex(CAST({} AS BLOB)))"
    if nested.is_nested(kind):
        return "{}"  # texts already
    return text


def _cast(column: pa.Array, kind: pa.DataType) -> pa.Array:
    """Cast a column to the table's own type: DataFusion reads strings as views, also within structs."""
    return column if column.type == kind else column.cast(kind)


def _with_era(text: str, zone: str) -> str:
    """Return the expression that moves the era: DuckDB writes " (BC)" after the date, PostgreSQL " BC" at the end."""
    before_christ = f"replace({text}, ' (BC)', '') || '{zone} BC'"
    return f"CASE WHEN contains({text}, ' (BC)') THEN {before_christ} ELSE {text} || '{zone}' END"


def _multiset_difference(ours: Hashes, theirs: Hashes) -> tuple[Hashes, Hashes]:
    """Return the surplus hashes of each side, repeated by their surplus count; both sides come sorted."""
    if np.array_equal(ours, theirs):
        return ours[:0], theirs[:0]
    values, inverse = np.unique(np.concatenate([ours, theirs]), return_inverse=True)
    left = np.bincount(inverse[: len(ours)], minlength=len(values))
    right = np.bincount(inverse[len(ours) :], minlength=len(values))
    return np.repeat(values, np.maximum(left - right, 0)), np.repeat(values, np.maximum(right - left, 0))


def _first(rows: list[Row], key: Sequence[int], count: int) -> tuple[Row, ...]:
    """Return the first `count` rows in the order of the key; numbers sort by value."""

    def order(row: Row) -> list[tuple[int, str]]:
        values = [row[index] or "" for index in (key or range(len(row)))]
        return [(len(value) if value.isdigit() else 0, value) for value in values]

    return tuple(sorted(rows, key=order)[:count])


def _quoted(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'
