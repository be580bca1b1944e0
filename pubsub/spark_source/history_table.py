"""A history as its log has it: its columns as Spark has them, its position, and the files of a span."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import ArrayType, DataType, MapType, StructField, StructType, VariantType

from pubsub.delta import change_rows, schema_json
from pubsub.delta.change_rows import BEGINNING, Place
from pubsub.delta.files import history_rows
from pubsub.delta.files.file_rows import laid_out
from pubsub.delta.files.history_rows import Span, files_within, least_lsn
from pubsub.delta.log import demands
from pubsub.delta.log.add_file import AddFile
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import is_reached
from pubsub.delta.table import HISTORY, TargetTable
from pubsub.errors import DataCorrupted, FeatureNotSupported, NotInPrerequisiteState
from pubsub.protocol.arrow_arrays import Indices
from pubsub.protocol.lsn import Lsn
from pubsub.spark_source.admission import Counted, last_admitted

_COPY: Final = re.compile(r"pubsub/(?P<table>[^/]+/\d+/\d+)/(?P<generation>\d+)")
# Of a field in the log, what Delta keeps to itself.
_DELTAS_OWN: Final = "delta."


class HistoryTable:
    """The history at `path`.  `refresh` first; all else is of the version that it found.

    Raises FeatureNotSupported, also from `refresh`, for a table that is not reached without Spark, for one that is no
    history, and for features and types that cannot be read here.
    """

    def __init__(self, path: str) -> None:
        if not is_reached(path):
            raise FeatureNotSupported(
                f'the Delta table at "{path}" is in a store that only Spark reaches',
                hint='Read the history itself: spark.readStream.format("delta").',
            )
        self.path = path
        self._log = TableLog(path)
        self._metadata: Mapping[str, Any] = {}
        self._schema = StructType()
        self._target: TargetTable | None = None

    def refresh(self) -> None:
        """Read what was committed since the last time.  Raises UndefinedTable and DataCorrupted, too."""
        self._log.refresh()
        if self._log.metadata is self._metadata:
            return
        reason = demands.of_readers(self._log.protocol)
        columns = schema_json.fields(self._log.metadata)
        by_id = self._log.properties.get(schema_json.MODE) == "id"
        if reason is None and (schema_json.nests(columns) if by_id else schema_json.maps_nested(columns)):
            reason = "its columns are mapped in another way"
        if reason is not None:
            raise FeatureNotSupported(f'the Delta table at "{self.path}" cannot be read without Spark: {reason}')
        if HISTORY not in self._log.properties:
            raise FeatureNotSupported(
                f'the Delta table at "{self.path}" does not keep its changes',
                hint="The source reads tables in mode history.",
            )
        self._schema = _spark_schema(columns)
        arrow = to_arrow_schema(self._schema, timezone="UTC")
        self._target = laid_out(self._log, TargetTable(self.path, arrow, (), self.path, schema_json.mapping(columns)))
        self._metadata = self._log.metadata

    @property
    def id(self) -> str:
        """The id that Delta gave the table when it was made."""
        return str(self._log.metadata["id"])

    @property
    def schema(self) -> StructType:
        """The columns, as `spark.read` has them."""
        return self._schema

    @property
    def position(self) -> Place:
        """The place up to which all transactions are in the table, whole.

        Raises DataCorrupted if the last copy began before the end of what was there: its rows would be missed.
        """
        node, subscription = (self._log.properties.get(f"pubsub.{name}") for name in ("node", "subscription"))
        places: dict[str, list[Place]] = {}
        for app_id in self._log.applications:
            copy = _COPY.fullmatch(app_id)
            if copy is not None and copy["table"].startswith(f"{node}/{subscription}/"):
                place = Place(Lsn(self._log.application_version(app_id) or 0), int(copy["generation"]))
                places.setdefault(copy["table"], []).append(place)
        for copies in places.values():
            last = max(copies, key=lambda one: one.generation)
            if last.lsn < max(copies).lsn:
                raise DataCorrupted(
                    f'the history at "{self.path}" was begun anew at {last.lsn}, but ended at {max(copies).lsn} before',
                    sqlstate="55000",
                    hint="Start another query, with another checkpoint.",
                )
        return max((max(copies) for copies in places.values()), default=BEGINNING)

    def require(self, schema: StructType) -> None:
        """Raise NotInPrerequisiteState if the table does not have these columns any more, and in this order."""
        have, wanted = _kinds(self._schema), _kinds(schema)
        if have != wanted:
            changed = sorted({name for name, _ in set(have) ^ set(wanted)})
            told = f"They differ in {', '.join(changed)}." if changed else "They are in another order."
            raise NotInPrerequisiteState(
                f'the columns of the history at "{self.path}" are not those that the query began with',
                detail=told,
                hint="Start the query again with its checkpoint: it goes on where it was, and has the columns as they are now.",
            )

    def files(self, span: Span) -> list[AddFile]:
        """Return the files that can have rows of the span, without what only a log needs."""
        found = files_within(self._log, self.target, span)
        for file in found:
            if not file.inside:
                raise FeatureNotSupported(f'files of the Delta table at "{self.path}" lie elsewhere', detail=file.path)
        return [replace(file, stats=None, bounds={}) for file in found]

    @property
    def target(self) -> TargetTable:
        """The table as its files are read (file_rows.laid_out)."""
        assert self._target is not None
        return self._target

    def admitted(self, span: Span, transactions: int | None, rows: int | None) -> Place:
        """Return up to where the limits let a micro-batch come that begins where the span does; at most the span's end."""
        table = self.target
        files = [
            Counted(least_lsn(file, table), file.rows, lambda file=file: self._lsns(file, table, span))  # type: ignore[misc]
            for file in files_within(self._log, table, span)
        ]
        last = last_admitted(files, transactions, rows)
        return span.end if last is None or last >= span.end.lsn else Place(Lsn(last), span.end.generation)

    def _lsns(self, file: AddFile, table: TargetTable, span: Span) -> Iterator[Indices]:
        for batch in history_rows.rows_within(self._log, file, table, [change_rows.LSN], span):
            yield np.asarray(batch.column(0))


def _spark_schema(columns: list[schema_json.Field]) -> StructType:
    """Return a log's columns as Spark shows them.  Raises FeatureNotSupported for a type that Arrow does not carry."""
    fields = []
    for column in columns:
        try:
            field = StructField.fromJson(json.loads(json.dumps({"metadata": {}, **column})))
            field.dataType = _shown(field.dataType)
            to_arrow_schema(StructType([field]), timezone="UTC")
        except (PySparkException, ValueError) as error:
            raise FeatureNotSupported(
                f'column "{column["name"]}" has a type that the source cannot carry: {column["type"]}',
                detail=str(error),
            ) from error
        if _holds_variant(field.dataType):
            raise FeatureNotSupported(
                f'column "{column["name"]}" has a type that the source cannot carry: {field.dataType.simpleString()}',
                detail="It has VARIANT inside another type.",
            )
        field.metadata = _public(field.metadata)
        fields.append(field)
    return StructType(fields)


def _shown(kind: DataType) -> DataType:
    """Return the type with what Spark shows of its fields' metadata."""
    match kind:
        case StructType():
            return StructType(
                [StructField(one.name, _shown(one.dataType), one.nullable, _public(one.metadata)) for one in kind]
            )
        case ArrayType():
            return ArrayType(_shown(kind.elementType), kind.containsNull)
        case MapType():
            return MapType(_shown(kind.keyType), _shown(kind.valueType), kind.valueContainsNull)
        case _:
            return kind


def _public(metadata: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metadata.items() if not name.startswith(_DELTAS_OWN)}


def _holds_variant(kind: DataType) -> bool:
    """Return whether a type other than VARIANT has it inside."""
    match kind:
        case StructType():
            inside = [field.dataType for field in kind]
        case ArrayType():
            inside = [kind.elementType]
        case MapType():
            inside = [kind.keyType, kind.valueType]
        case _:
            return False
    return any(isinstance(one, VariantType) or _holds_variant(one) for one in inside)


def _kinds(schema: StructType) -> list[tuple[str, str]]:
    return [(field.name, field.dataType.simpleString()) for field in schema]
