"""Stage one table's batch a part at a time, in bounded memory.

No key is in two parts, so the batch's images, deleted keys and masked images are those of its parts, concatenated.
Images are written to disk at once; keys, and masked images, which need values of the table's rows, stay in memory until the
commit.  The keys of parts that only insert are in their data files; whether two such parts share one is found out at the commit,
too (expectations).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Final, Protocol

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pubsub.delta.files import data_files
from pubsub.delta.files.bounded_rows import are_large
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Action
from pubsub.delta.places import Place, open_output, remove_tree
from pubsub.delta.table import TargetTable
from pubsub.delta.writers import arrow_writer, spark_writer
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.changeset import Expected, Folded
from pubsub.delta.writers.expectations import Inserted
from pubsub.delta.writers.spark_writer import Staged

# A data file is closed at this many rows or bytes: large enough not to be merged with others later.
_FILE_ROWS: Final = 1 << 19
_FILE_BYTES: Final = 64 << 20
# The most files that the writer threads hold while the next part is worked out.
_WRITING: Final = 1


class StagedParts(Protocol):
    """One table's batch while it is staged.  Every method blocks."""

    def add(self, folded: Folded) -> None:
        """Stage the next part."""

    def finish(self) -> Staged | DirectStaged:
        """Finish the batch; no part may follow."""

    def abort(self) -> None:
        """Remove what was staged.  Does nothing after `finish`, whose result `choose_writer.discard` removes."""


class DirectParts:
    """Writes images to data files in the table's directory, which the log does not name yet."""

    def __init__(self, log: TableLog, table: TargetTable, *, replace_all: bool) -> None:
        self._log = log
        self._table = table
        self._replace_all = replace_all
        self._images: list[pa.Table] = []
        self._image_rows = self._image_bytes = 0
        self._writing: deque[Future[list[Action]]] = deque()
        self._added: list[Action] = []
        self._rest = Rest()
        # The files and keys of the parts up to here, which only insert; None: there are none yet.
        self._inserted: Inserted | None = None
        self._inserts_only = True

    def add(self, folded: Folded) -> None:
        if (expected := folded.expected) is not None:
            # Then each key that a row arrives under is that of an image.
            arriving = expected.either if expected.either.num_rows else expected.free
            self._inserts_only &= (
                not (expected.standing.num_rows or folded.masked.num_rows)
                and arriving.num_rows == folded.images.num_rows
                # Of one key several versions may arrive.
                and not (self._table.versions and (folded.updates or folded.deletes or folded.marks))
                and (self._inserted is None or self._inserted.gives_way == (arriving is expected.either))
            )
            if self._inserts_only:
                if arriving.num_rows:
                    self._inserted = self._inserted or Inserted(gives_way=arriving is expected.either)
                    self._inserted.add(arriving)
                none = arriving.schema.empty_table()
                folded = replace(
                    folded, deleted_keys=none, expected=Expected(expected.standing.slice(0, 0), none, none)
                )
            else:
                self._end_of_inserts()
        self._rest.add(folded)
        if not folded.images.num_rows:
            return
        # The writer holds a large value several times: nothing else is done meanwhile.
        large = are_large(folded.images)
        if large:
            self._write()
            self._wait(0)
        self._images.append(folded.images)
        self._image_rows += folded.images.num_rows
        self._image_bytes += folded.images.nbytes
        if large or self._image_rows >= _FILE_ROWS or self._image_bytes >= _FILE_BYTES:
            self._write()
        if large:
            self._wait(0)

    def finish(self) -> DirectStaged:
        self._write()
        self._wait(0)
        self._end_of_inserts()
        folded = self._rest.joined(self._table)
        added, self._added = self._added, []
        staged = arrow_writer.staged_of(self._log, self._table, folded, added, replace_all=self._replace_all)
        staged.inserted = self._inserted
        return staged

    def abort(self) -> None:
        self._images.clear()
        while self._writing:
            written = self._writing.popleft()
            if written.exception() is None:
                self._added += written.result()
        data_files.remove(data_files.paths(self._table.path, self._added))
        self._added = []

    def _end_of_inserts(self) -> None:
        """Note which files have the rows of parts that only insert; images of later parts go to other files."""
        if self._inserted is not None and not self._inserted.files:
            self._write()
            self._wait(0)
            self._inserted.files = tuple(self._added)

    def _write(self) -> None:
        if self._images:
            self._wait(_WRITING)
            self._writing.append(data_files.write_later(self._table, self._images))
            self._images = []
            self._image_rows = self._image_bytes = 0

    def _wait(self, writing: int) -> None:
        """Wait until at most `writing` files are being written."""
        while len(self._writing) > writing:
            self._added += self._writing.popleft().result()


class SparkParts:
    """Writes images to one staged Parquet file in a new `directory`."""

    def __init__(self, directory: Place, table: TargetTable, *, replace_all: bool) -> None:
        self._directory = directory
        self._table = table
        self._replace_all = replace_all
        self._path = directory / "images.parquet"
        self._file: pa.NativeFile | None = None
        self._images: pq.ParquetWriter | None = None
        self._rest = Rest()
        self._finished = False
        directory.mkdir(mode=0o700)

    def add(self, folded: Folded) -> None:
        spark_writer.require_storable(self._table, folded)
        self._rest.add(folded)
        if not folded.images.num_rows:
            return
        if self._images is None:
            self._file = open_output(self._path)
            self._images = pq.ParquetWriter(
                self._file,
                folded.images.schema,
                compression="lz4",
                use_dictionary=False,
                write_statistics=False,
                store_decimal_as_integer=True,
            )
        self._images.write_table(folded.images, row_group_size=spark_writer.ROW_GROUP)

    def finish(self) -> Staged:
        images = None
        if self._images is not None:
            assert self._file is not None
            self._images.close()
            self._file.close()
            images = self._path
        staged = spark_writer.stage_beside(
            self._directory, self._table, self._rest.joined(self._table), images, replace_all=self._replace_all
        )
        self._finished = True
        return staged

    def abort(self) -> None:
        if not self._finished:
            if self._file is not None:
                with suppress(OSError):  # its contents are not wanted
                    self._file.close()
            remove_tree(self._directory)


class Rest:
    """Everything of the parts except their images."""

    def __init__(self) -> None:
        self._masked: list[pa.Table] = []
        self._deleted: list[pa.Table] = []
        self._removed: list[pa.Table] = []
        self._counts = [0, 0, 0]
        self._insert_only = True
        self._truncated = False
        self._standing: list[pa.Table] = []
        self._free: list[pa.Table] = []
        self._either: list[pa.Table] = []
        self._expects = False
        self._marks: Mapping[str, pa.Scalar] | None = None

    def add(self, folded: Folded) -> None:
        for kept, part in (
            (self._masked, folded.masked),
            (self._deleted, folded.deleted_keys),
            (self._removed, folded.removed),
        ):
            if part.num_rows:
                kept.append(part)
        self._counts = [
            self._counts[0] + folded.inserts,
            self._counts[1] + folded.updates,
            self._counts[2] + folded.deletes,
        ]
        self._insert_only &= folded.insert_only
        self._truncated |= folded.truncated
        self._marks = folded.marks or self._marks
        if (expected := folded.expected) is not None:
            self._expects = True
            self._standing.append(expected.standing)
            self._free.append(expected.free)
            self._either.append(expected.either)

    def joined(self, table: TargetTable) -> Folded:
        """Return the parts joined into one, with empty `images`."""
        none = table.schema.empty_table()
        return Folded(
            images=none,
            masked=_joined_masked(self._masked, table) if self._masked else none,
            deleted_keys=pa.concat_tables(self._deleted) if self._deleted else none.select(list(table.key)),
            removed=pa.concat_tables(self._removed) if self._removed else none,
            insert_only=self._insert_only,
            truncated=self._truncated,
            inserts=self._counts[0],
            updates=self._counts[1],
            deletes=self._counts[2],
            expected=Expected(*map(pa.concat_tables, (self._standing, self._free, self._either)))
            if self._expects
            else None,
            marks=self._marks,
        )


def _joined_masked(parts: list[pa.Table], table: TargetTable) -> pa.Table:
    """Join masked images; an UNCHANGED_PREFIX column that a part lacks is filled with false: no unchanged values."""
    joined = pa.concat_tables(parts, promote_options="default")
    for index, name in enumerate(joined.column_names):
        if name not in table.schema.names and pa.types.is_boolean(joined.schema.field(index).type):
            joined = joined.set_column(index, name, pc.fill_null(joined.column(index), False))
    return joined
