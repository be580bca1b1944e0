"""Commit one table's batch as one Delta commit by Spark, where arrow_writer cannot.

A folded batch is first staged as immutable Parquet, so that bad values fail before the commit.  Then the cheapest
sufficient statement commits it: an append for inserts alone, one overwrite with replaceOn where keys change or are
deleted (MERGE, which takes longer, if Delta makes an identity column's values), an overwrite of the whole table after
TRUNCATE.  Every commit carries (application id, end LSN), so Delta itself refuses to apply it twice, and in its
userMetadata the end LSNs of its first and last transaction.

Everything here blocks: call it in a thread.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub.delta.files import partitions
from pubsub.delta.log.transactions import Conflict
from pubsub.delta.places import Place, StorePath, open_output, remove_tree
from pubsub.delta.spark.jvm_transactions import CONFLICTS, DeltaTransactions, at_version, is_refusal
from pubsub.delta.table import (
    Commit,
    TargetTable,
    committed_lsn,
    filled_columns,
    identity_columns,
    not_at_version,
    spark_ddl,
)
from pubsub.delta.writers.changeset import BASE_PREFIX, COUNT_COLUMN, UNCHANGED_PREFIX, Expected, Folded
from pubsub.protocol.output.variants import exact_text
from pubsub.protocol.type_contract import VARIANT
from pubsub.sql.identifiers import quote_for_spark as quote

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    # Makes a temporary view of a DataFrame and returns its name.
    _View = Callable[[DataFrame], str]

ROW_GROUP: Final = 128 * 1024
# Longer than PostgreSQL's names can be, so no user's column has them: with a column t, `t.x` would be its field x.
_TARGET: Final = "__pubsub_target".ljust(64, "_")
_SOURCE: Final = "__pubsub_source".ljust(64, "_")
_ROW: Final = "__row".ljust(64, "_")
_IMAGE: Final = "__image".ljust(64, "_")
_HAVE: Final = "__have".ljust(64, "_")
_EXACT: Final = "__exact".ljust(64, "_")
_view_numbers = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Staged:
    """One table's part of a batch, staged as Parquet files in `directory`; a path is None if it has no rows."""

    table: TargetTable
    directory: Place
    images: Place | None
    masked: Place | None
    deleted_keys: Place | None
    removed: Place | None
    replace_all: bool
    key_range: tuple[str, str, str] | None
    rows: int
    expected: Expected | None = None


def stage(directory: Place, table: TargetTable, folded: Folded, *, replace_all: bool) -> Staged:
    """Write one table's folded batch as Parquet in a new `directory`.  A failure leaves nothing behind."""
    require_storable(table, folded)
    directory.mkdir(mode=0o700)
    try:
        images = _write(directory / "images.parquet", folded.images)
        return stage_beside(directory, table, folded, images, replace_all=replace_all)
    except BaseException:
        remove_tree(directory)
        raise


def stage_beside(
    directory: Place, table: TargetTable, folded: Folded, images: Place | None, *, replace_all: bool
) -> Staged:
    """Stage all of a batch except its images, which the file `images` in `directory` already holds (None: none)."""
    return Staged(
        table=table,
        directory=directory,
        images=images,
        masked=_write(directory / "masked.parquet", folded.masked),
        deleted_keys=_write(directory / "keys.parquet", folded.deleted_keys),
        removed=_write(directory / "removed.parquet", folded.removed),
        replace_all=replace_all,
        key_range=_key_range(folded.deleted_keys),
        rows=folded.inserts + folded.updates + folded.deletes,
        expected=folded.expected,
    )


def require_storable(table: TargetTable, folded: Folded) -> None:
    """Raise InvalidValue for a value that Spark would silently store as another."""
    partitions.require_storable(table, folded.images)
    partitions.require_storable(table, folded.masked)


def discard(staged: Staged) -> None:
    """Remove the staged files, after the commit or when the batch is abandoned."""
    remove_tree(staged.directory)


def commit(spark: SparkSession, staged: Staged, record: Commit) -> None:
    """Commit one staged table; do nothing if it holds `record.last` already.

    Raises Overtaken if the table holds another version than `record.previous`, also when the statement's transaction
    begins, or if a later copy of it has begun; DataCorrupted if the version is an earlier one; Conflict if another writer
    was first, or another program's commit took this one's place; and Spark's errors, whose outcome the caller reads from
    the table's version (apply.pipeline.commit).
    """
    table = staged.table
    held = committed_lsn(table.path, record.app_id)
    if held == record.last:
        return
    if (held or 0) != (record.previous or 0):
        raise not_at_version(table, held, record)
    try:
        with at_version(spark, record.app_id, int(record.previous or 0)):
            _commit(spark, staged, record)
    except Exception as error:
        if is_refusal(error):
            raise not_at_version(table, committed_lsn(table.path, record.app_id), record) from error
        if isinstance(error, CONFLICTS):
            raise Conflict(str(error)) from error
        raise
    if committed_lsn(table.path, record.app_id) != record.last:
        # Another program's store renamed its commit to the name that this one had just got.
        DeltaTransactions(spark).forget(table.path)
        raise Conflict(f'the commit to the Delta table "{table.path}" was replaced by another program\'s')


def _commit(spark: SparkSession, staged: Staged, record: Commit) -> None:
    table = staged.table
    views: list[str] = []

    def view(frame: DataFrame) -> str:
        views.append(_viewed(frame))
        return views[-1]

    try:
        images = _read(spark, staged.images, table.schema)
        made = _made_by_delta(staged)
        if staged.replace_all:
            _save(images.drop(*made), "overwrite", table, record)
        elif staged.removed is not None:
            _commit_without_key(spark, staged, images, record, view, made)
        elif staged.deleted_keys is None:
            _save(images.drop(*made), "append", table, record)
        elif staged.images is None and staged.masked is None:
            _delete_keys(spark, staged, record)
        elif made and set(made).intersection(identity_columns(table.path)):
            _merge(spark, staged, record, made)
        else:
            if staged.masked is not None:
                images = images.unionByName(_complete(spark, staged, view))
            keys = view(_read(spark, staged.deleted_keys, _key_schema(table)))
            images = images.drop(*made)
            _save(images, "overwrite", table, record, replace_on=_matches(table.key, keys, staged.key_range))
    finally:
        for name in views:
            spark.catalog.dropTempView(name)


def _viewed(frame: DataFrame) -> str:
    """Make a temporary view of a DataFrame, in its session, and return its name."""
    name = f"pubsub_{next(_view_numbers)}"
    frame.createOrReplaceTempView(name)
    return name


def _made_by_delta(staged: Staged) -> list[str]:
    """Return the generated and identity columns for which the batch has no value: the publisher lacks them, Delta makes them.

    A NULL would be a value that contradicts their definition.  Rows that are removed have values, too, if the publisher does.
    A column that the publisher is known to send may be NULL in all rows of a batch.
    """
    made = []
    for name in filled_columns(staged.table.path):
        if name in staged.table.sent:
            continue
        flag = f"{UNCHANGED_PREFIX}{staged.table.schema.get_field_index(name)}"
        values = 0
        for path in (staged.images, staged.masked, staged.removed):
            if path is None:
                continue
            flagged = flag in pq.read_schema(path).names
            rows = pq.read_table(path, columns=[name, flag] if flagged else [name])
            given = pc.is_valid(rows.column(name))
            if flagged:
                given = pc.and_(given, pc.invert(rows.column(flag)))
            values += pc.sum(given).as_py() or 0
        if not values:
            made.append(name)
    return made


def _save(frame: DataFrame, mode: str, table: TargetTable, record: Commit, *, replace_on: str | None = None) -> None:
    options = {
        "txnAppId": record.app_id,
        "txnVersion": str(int(record.last)),
        "userMetadata": record.user_metadata,
    }
    if replace_on is not None:
        options |= {"replaceOn": replace_on, "targetAlias": _TARGET}
    frame.alias(_SOURCE).write.format("delta").mode(mode).options(**options).save(table.path)


def _matches(key: tuple[str, ...], keys: str, key_range: tuple[str, str, str] | None) -> str:
    """Return the replaceOn condition; its range on the key lets Delta skip files that cannot match."""
    columns = ", ".join(quote(name) for name in key)
    target = ", ".join(f"{_TARGET}.{quote(name)}" for name in key)
    left = target if len(key) == 1 else f"({target})"
    condition = f"{left} IN (SELECT {columns} FROM {keys})"
    if key_range is not None:
        name, low, high = key_range
        condition = f"{_TARGET}.{quote(name)} BETWEEN {low} AND {high} AND {condition}"
    return condition


def _complete(spark: SparkSession, staged: Staged, view: _View) -> DataFrame:
    """Return the masked images, with unchanged TOAST values taken from the target's rows before the batch."""
    table = staged.table
    names = [field.name for field in table.schema]
    assert staged.masked is not None
    masked_schema = pq.read_schema(staged.masked)
    source = view(_read(spark, staged.masked, masked_schema))
    on = " AND ".join(f"{_SOURCE}.{BASE_PREFIX}{i} = {_TARGET}.{quote(name)}" for i, name in enumerate(table.key))
    columns = []
    for index, name in enumerate(names):
        flag = f"{UNCHANGED_PREFIX}{index}"
        if flag in masked_schema.names:
            columns.append(
                f"IF({_SOURCE}.{quote(flag)}, {_TARGET}.{quote(name)}, {_SOURCE}.{quote(name)}) AS {quote(name)}"
            )
        else:
            columns.append(f"{_SOURCE}.{quote(name)}")
    # An inner join: an update of a row that the target lacks is skipped, as PostgreSQL skips it (update_missing).
    target = f"delta.{quote(table.path)} {_TARGET}"
    return spark.sql(f"SELECT {', '.join(columns)} FROM {source} {_SOURCE} JOIN {target} ON {on}")


def _merge(spark: SparkSession, staged: Staged, record: Commit, made: Sequence[str]) -> None:
    """Commit changed rows such that they keep the values that Delta has made for them, unless their key changes."""
    from pyspark.sql import functions

    own = spark.newSession()
    table = staged.table
    images = _read(own, staged.images, table.schema)
    if staged.masked is not None:
        images = images.unionByName(_complete(own, staged, _viewed))
    images = images.drop(*made)
    keys = _read(own, staged.deleted_keys, _key_schema(table))
    gone = keys.join(images.select(*table.key), list(table.key), "left_anti")
    source = images.withColumn(_IMAGE, functions.lit(True)).unionByName(
        gone.withColumn(_IMAGE, functions.lit(False)), allowMissingColumns=True
    )
    sent = [name for name in table.schema.names if name not in made]
    values = ", ".join(f"{_SOURCE}.{quote(name)}" for name in sent)
    changed = ", ".join(f"{quote(name)} = {_SOURCE}.{quote(name)}" for name in sent if name not in table.key)
    of_image = f"{_SOURCE}.{_IMAGE}"
    clauses = [f"WHEN MATCHED AND NOT {of_image} THEN DELETE"]
    if changed:
        clauses.append(f"WHEN MATCHED THEN UPDATE SET {changed}")
    clauses.append(f"WHEN NOT MATCHED AND {of_image} THEN INSERT ({', '.join(map(quote, sent))}) VALUES ({values})")
    on = " AND ".join(f"{_TARGET}.{quote(name)} = {_SOURCE}.{quote(name)}" for name in table.key)
    _run_merge(own, table, record, source, on, clauses)


def _delete_keys(spark: SparkSession, staged: Staged, record: Commit) -> None:
    """Commit a batch that only deletes."""
    own = spark.newSession()
    table = staged.table
    keys = _read(own, staged.deleted_keys, _key_schema(table))
    on = " AND ".join(f"{_TARGET}.{quote(name)} = {_SOURCE}.{quote(name)}" for name in table.key)
    if staged.key_range is not None:
        name, low, high = staged.key_range
        on += f" AND {_TARGET}.{quote(name)} BETWEEN {low} AND {high}"
    _delete(own, table, record, keys, on)


def _delete(own: SparkSession, table: TargetTable, record: Commit, source: DataFrame, on: str) -> None:
    """Delete the rows that match a row of `source`, of session `own`.

    A MERGE records its transaction even if it matches nothing.  DELETE would not, and an overwrite with no rows would
    delete nothing.
    """
    _run_merge(own, table, record, source, on, ["WHEN MATCHED THEN DELETE"])


def _run_merge(
    own: SparkSession, table: TargetTable, record: Commit, source: DataFrame, on: str, clauses: Sequence[str]
) -> None:
    """Merge `source`, of session `own`, into the table.

    MERGE takes the transaction's id from session settings; a separate session keeps them from other tables' commits.
    """
    source.createOrReplaceTempView("merged")
    own.conf.set("spark.databricks.delta.write.txnAppId", record.app_id)
    own.conf.set("spark.databricks.delta.write.txnVersion", str(int(record.last)))
    own.conf.set(
        "spark.databricks.delta.commitInfo.userMetadata",
        record.user_metadata,
    )
    own.sql(
        f"MERGE INTO delta.{quote(table.path)} {_TARGET} USING merged {_SOURCE} ON {on} {' '.join(clauses)}"
    ).collect()


def _commit_without_key(
    spark: SparkSession, staged: Staged, images: DataFrame, record: Commit, view: _View, made: Sequence[str]
) -> None:
    """Commit changes to a table without a key (REPLICA IDENTITY FULL): of equal rows delete as many as were deleted.

    All rows equal to a changed one are replaced by the copies that remain, because no condition can match just some of
    several equal rows.  Rows are compared by one text that tells every value and NULL apart; to_json alone would
    truncate timestamps to milliseconds.  The rows that are replaced may include some whose VARIANT differs from a changed
    one's in the zeros after a point; of these all remain.  The columns `made` by Delta are not compared.
    """
    table = staged.table
    names = [field.name for field in table.schema]
    sent = pa.schema([field for field in table.schema if field.name not in made])
    assert staged.removed is not None
    removed_schema = pq.read_schema(staged.removed)
    removed = _read(spark, staged.removed, removed_schema)
    changed = view(_told_apart(removed, sent, COUNT_COLUMN))
    near = spark.sql(
        f"SELECT *, struct({', '.join(map(quote, names))}) AS {_IMAGE} FROM delta.{quote(table.path)} {_TARGET} "
        f"WHERE {_row_text(_TARGET + '.', sent)} IN (SELECT {_ROW} FROM {changed})"
    )
    have = view(_told_apart(near, sent, _IMAGE))
    remaining = spark.sql(
        f"SELECT inline(array_repeat(h.{_IMAGE}, CAST(greatest(h.{_HAVE} - coalesce(c.{COUNT_COLUMN}, 0), 0) AS INT))) FROM "
        f"(SELECT {_EXACT}, first({_IMAGE}) AS {_IMAGE}, count(*) AS {_HAVE} FROM {have} GROUP BY 1) h "
        f"LEFT JOIN {changed} c ON h.{_EXACT} = c.{_EXACT}"
    )
    if staged.images is None and remaining.isEmpty():
        own = spark.newSession()
        gone = _read(own, staged.removed, removed_schema).selectExpr(f"{_row_text('', sent)} AS {_ROW}")
        _delete(own, table, record, gone, f"{_row_text(_TARGET + '.', sent)} = {_SOURCE}.{_ROW}")
        return
    condition = f"{_row_text(_TARGET + '.', sent)} IN (SELECT {_ROW} FROM {changed})"
    _save(images.unionByName(remaining).drop(*made), "overwrite", table, record, replace_on=condition)


def _told_apart(frame: DataFrame, schema: pa.Schema, also: str) -> DataFrame:
    """Return for each row its _ROW, its _EXACT and the column `also`.

    _EXACT, too, is one text of the row; it tells VARIANT values apart as well, which takes Python: to_json writes 1.50 as 1.5.
    """
    from pyspark.sql import functions

    variants = [quote(field.name) for field in schema if field.type == VARIANT]
    parts = [f"{name} AS {_EXACT}{place}" for place, name in enumerate(variants)]
    rows = frame.selectExpr(f"{_row_text('', schema)} AS {_ROW}", also, *parts)
    if not variants:
        return rows.withColumn(_EXACT, functions.col(_ROW))
    exact = functions.udf(exact_text, "string")
    return rows.select(_ROW, also, exact(_ROW, *(f"{_EXACT}{place}" for place in range(len(variants)))).alias(_EXACT))


def _row_text(prefix: str, schema: pa.Schema) -> str:
    """Return a Spark expression for the row as one text, which is equal only for equal rows."""
    parts = []
    for index, field in enumerate(schema):
        parts.append(f"{_value_text(prefix + quote(field.name), field.type)} AS c{index}")
    return f"to_json(struct({', '.join(parts)}))"


def _value_text(value: str, kind: pa.DataType, depth: int = 0) -> str:
    """Return a Spark expression for the value as a text, or as an array or struct of such texts."""
    if kind == VARIANT:
        return f"to_json({value})"
    if pa.types.is_list(kind):
        one = f"v{depth}"
        return f"transform({value}, {one} -> {_value_text(one, kind.value_type, depth + 1)})"
    if pa.types.is_struct(kind):
        fields = (
            f"'f{place}', {_value_text(f'{value}.{quote(field.name)}', field.type, depth)}"
            for place, field in enumerate(kind)
        )
        return f"IF({value} IS NULL, NULL, named_struct({', '.join(fields)}))"
    return f"hex({value})" if pa.types.is_binary(kind) else f"CAST({value} AS STRING)"


def _read(spark: SparkSession, path: Place | None, schema: pa.Schema) -> DataFrame:
    """Read the staged file as a DataFrame with exactly `schema`; without a file it has no rows."""
    if path is None:
        columns = ", ".join(f"CAST(NULL AS {spark_ddl(f.type)}) AS {quote(f.name)}" for f in schema)
        return spark.sql(f"SELECT {columns} WHERE false")
    ddl = ", ".join(f"{quote(f.name)} {spark_ddl(f.type)}" for f in schema)
    return spark.read.schema(ddl).parquet(_hadoop_path(path))


def _hadoop_path(path: Place) -> str:
    """Return a file's path for Spark, with pattern characters escaped: Spark reads a pattern, but no URL-encoding."""
    scheme = "" if isinstance(path, StorePath) else "file://"
    return scheme + re.sub(r"[\\{}\[\]*?]", r"\\\g<0>", str(path))


def _write(path: Place, table: pa.Table | None) -> Place | None:
    """Write `table`, or return None if it has no rows.  Two or more row groups let two cores read it in parallel."""
    if table is None or table.num_rows == 0:
        return None
    group = max(1, min(ROW_GROUP, -(-table.num_rows // 2)))
    with open_output(path) as file:
        pq.write_table(
            table,
            file,
            row_group_size=group,
            compression="lz4",
            use_dictionary=False,
            write_statistics=False,
            store_decimal_as_integer=True,
        )
    return path


def _key_schema(table: TargetTable) -> pa.Schema:
    return pa.schema([table.schema.field(name) for name in table.key])


def _key_range(keys: pa.Table | None) -> tuple[str, str, str] | None:
    """Return (column, least, greatest) of the key's first column if it is an integer, as literals, to skip files."""
    if keys is None or keys.num_rows == 0 or not pa.types.is_integer(keys.schema.field(0).type):
        return None
    bounds = pc.min_max(keys.column(0)).as_py()
    return keys.schema.field(0).name, str(bounds["min"]), str(bounds["max"])
