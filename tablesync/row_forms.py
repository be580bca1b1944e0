"""How the rows of a subscription's tables are hashed on both sides, for comparisons and repairs (pubsub.digest)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from apply.schema_changes import attributes
from apply.schema_changes.column_choice import replicated
from apply.schema_changes.kept_rows import published_filter
from catalog.records import SubscriptionRel
from pubsub.digest.forms import Form, RowForm, form_of
from pubsub.digest.source import SourceTable, largest_file, require_places
from pubsub.digest.target import DeltaVersion
from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.protocol.ids import Oid
from pubsub.publisher import definitions, publication
from pubsub.publisher.connection import Connection
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition, row_key
from pubsub.publisher.publication import Operations, PublishedTable
from pubsub.publisher.read_table import ReadTable, hold_as_described

if TYPE_CHECKING:
    from psycopg import Connection as PsycopgConnection


class CannotCompare(PubsubError):
    """A table, as it is at the publisher and here, cannot be compared.  `differs`: since it differs for that very reason."""

    default_sqlstate = "55000"

    def __init__(self, message: str, hint: str | None = None, *, differs: bool = False) -> None:
        super().__init__(message, hint=hint)
        self.differs = differs


_ALTERED: Final = "The table's next row at the publisher alters it; so does ALTER SUBSCRIPTION … REFRESH PUBLICATION."


@dataclass(frozen=True, slots=True)
class Published:
    """The subscription's tables as the publisher has them under the snapshot, by oid; `encoding`: of its database."""

    tables: Mapping[Oid, PublishedTable]
    definitions: Mapping[Oid, TableDefinition]
    operations: Mapping[Oid, Operations]
    encoding: str


async def published(connection: Connection, publications: Sequence[str]) -> Published:
    """Return what the publications publish, as the connection's transaction sees it."""
    tables = {table.oid: table for table in await publication.published_tables(connection, publications)}
    encoding = connection.pgconn.parameter_status(b"server_encoding") or b"UTF8"
    return Published(
        tables,
        await definitions.table_definitions(connection, tables),
        await publication.operations(connection, publications),
        encoding.decode(),
    )


def row_form(
    relation: SubscriptionRel,
    found: Published,
    target: DeltaVersion,
    app_id: str,
    drawn: tuple[int, str] | None = None,
) -> RowForm:
    """Return how the rows of a table are hashed.

    `relation`: as it was at `target`'s version, or before.  `app_id`: the id under which its rows are written.  `drawn`: an earlier
    form's seed and text for NULL.  Raises CannotCompare.
    """
    if relation.mode == "history":
        raise CannotCompare("the table keeps the history (mode = history), of which the publisher has only the end")
    oid = relation.oid
    table, definition = found.tables.get(oid), found.definitions.get(oid)
    if table is None or definition is None:
        raise CannotCompare(
            "the publications do not publish the table any more",
            f'ALTER SUBSCRIPTION … REFRESH PUBLICATION takes "{relation.qualified_name}" out of the subscription.',
        )
    known = attributes.current(relation.definition, target.properties, app_id)
    try:
        published_filter(None, None if known is None else known.where, definition)
    except NotInPrerequisiteState as error:
        raise CannotCompare(error.message, error.hint, differs=True) from error
    columns = replicated(known, definition.published(table.attnames))
    here = {column.name: column.name if known is None else known.here(column) for column in columns}
    absent = [name for name in here.values() if name not in target.schema.names]
    if absent:
        raise CannotCompare(
            f"the Delta table lacks the columns {', '.join(absent)}",
            "The table's next row at the publisher adds them; so does ALTER SUBSCRIPTION … REFRESH PUBLICATION.",
            differs=True,
        )
    others = attributes.named_otherwise(known, columns)
    if others:
        raise CannotCompare(
            f"the Delta table has other columns under the names {', '.join(others)}: they were dropped or renamed",
            _ALTERED,
            differs=True,
        )
    key, hidden = row_key(definition, {column.name for column in columns}), masked_columns(known, columns)
    in_key = [name for name in key if name in hidden]
    if in_key:
        raise CannotCompare(f'column "{in_key[0]}", by which its rows are found, is masked')
    forms = [
        _named(_form(column, target.schema.field(here[column.name]).type, found.encoding), here[column.name])
        for column in columns
        if column.name not in hidden
    ]
    if not forms:
        raise CannotCompare("its columns are masked" if columns else "no column of the table is published")
    form = RowForm.of(forms, [here[name] for name in key])
    return form if drawn is None else replace(form, seed=drawn[0], null=drawn[1])


def masked_columns(known: attributes.Attributes | None, columns: Sequence[ColumnDefinition]) -> tuple[str, ...]:
    """Return those of the publisher's columns that are masked here, by their names there; they are not compared."""
    return () if known is None else tuple(column.name for column in columns if column.attnum in known.masks)


def source_table(
    connection: PsycopgConnection,
    relation: SubscriptionRel,
    found: Published,
    form: RowForm,
    target: DeltaVersion,
    app_id: str,
) -> SourceTable:
    """Return the publisher's table as the digest reads it, of which `form` is, as of `row_form`: its rows that the Delta table gets.

    `connection`: with the snapshot that `found` is of.  Blocks.

    The table stays as it is until the connection's transaction ends.  Raises SerializationFailure (hold_as_described), and
    InsufficientPrivilege (require_places).
    """
    table, definition = found.tables[relation.oid], found.definitions[relation.oid]
    known = attributes.current(relation.definition, target.properties, app_id)
    read = ReadTable.of(definition, form.published_names.values())
    in_key = {form.published_names[name] for name in form.key_columns}
    require_places(connection, read)
    hold_as_described(connection, read)
    return SourceTable(
        read,
        published_filter(table.row_filter, None if known is None else known.where, definition),
        form,
        largest_file(connection, relation.oid),
        definition.bytes,
        {column.name: column.type_name for column in definition.columns if column.name in in_key},
    )


def _named(form: Form, here: str) -> Form:
    """Return the form of a publisher's column that the Delta table has under this name."""
    return form if form.column == here else replace(form, column=here, published=form.column)


#: Added to each type modifier (varatt.h).
_VARHDRSZ: Final = 4
#: Per kind of Arrow type: base types at the publisher that have it (type_contract.RULES).
_INTEGERS, _FLOATS = frozenset((20, 21, 23, 26)), frozenset((700, 701))


def _scale(column: ColumnDefinition) -> int | None:
    """Return the scale of a numeric column, with which its texts are written; None if its type has none (numeric.c)."""
    if column.base_typmod < _VARHDRSZ:
        return None
    return (((column.base_typmod - _VARHDRSZ) & 0x7FF) ^ 0x400) - 0x400


def _form(column: ColumnDefinition, kind: pa.DataType, encoding: str) -> Form:
    """Return a column's form.  Raises CannotCompare if its type was changed at the publisher, and not yet here."""
    kinds, oid = pa.types, int(column.base_type_oid)
    natural = {
        kinds.is_boolean: oid == 16,
        kinds.is_integer: oid in _INTEGERS,
        kinds.is_float32: oid == 700,
        kinds.is_float64: oid in _FLOATS,
        kinds.is_decimal: oid == 1700 and _scale(column) in (None, getattr(kind, "scale", None)),
        kinds.is_date: oid == 1082,
        kinds.is_timestamp: oid == (1114 if getattr(kind, "tz", None) is None else 1184),
        kinds.is_binary: oid == 17,
    }
    if not next((fits for is_kind, fits in natural.items() if is_kind(kind)), True):
        raise CannotCompare(
            f'column "{column.name}" has type {column.type_name} at the publisher, which the Delta table does not have yet',
            _ALTERED,
            differs=True,
        )
    return form_of(column, kind, encoding)
