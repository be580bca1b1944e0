"""Define the Delta table for a publisher's table: its columns and the key that identifies a row."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import pyarrow as pa

from apply.schema_changes import kept_rows
from apply.schema_changes.attributes import Attributes, of_definition
from apply.schema_changes.column_choice import Choice
from apply.staging.matching_rows import unfit_to_tell
from pubsub.delta import change_rows, soft_deletes, versions
from pubsub.delta.files.key_set import can_match
from pubsub.delta.metadata_columns import Metadata, fields_of
from pubsub.delta.table import TargetTable
from pubsub.errors import FeatureNotSupported
from pubsub.masks import Masks
from pubsub.protocol.column_types import folded_name, is_nested, shaped_type
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.type_contract import RULES
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition, row_key
from pubsub.publisher.replica_identities import refused_keys
from pubsub.sql.layout_rules import Deletes, Mode, Truncate, name_beside
from pubsub.sql.layouts import Layouts
from pubsub.sql.mask_rules import MaskRule
from pubsub.sql.source import Source
from pubsub.sql.typechoices import TypeChoices

#: Types whose text is not the value's alone, but also what the catalog, or a setting, has when it is written: names of objects
#: (reg…), of roles (aclitem), and money.
_NOT_HASHED: Final = frozenset({rule.oid for rule in RULES if rule.binary == "refused"} | {1033})


def planned_table(
    definition: TableDefinition,
    published: Sequence[str] | None,
    path: str,
    choices: TypeChoices | None,
    choice: Choice,
    layouts: Layouts,
    source: Source | None,
    beside: Mode | None = None,
) -> TargetTable:
    """Return the Delta table for `definition` as the subscription's options want it, or what is to stand beside it in a mode.

    Raises as `target_table` and Layouts do.
    """
    name = definition.schema, definition.name
    if source is not None:
        layouts.refuse_unfit_for_sources(*name)
    layouts = layouts.beside(beside)
    target = target_table(
        definition,
        published,
        path,
        choices,
        choice,
        layouts.mode_of(*name),
        layouts.deletes_of(*name),
        layouts.metadata_of(*name),
        layouts.truncate_of(*name),
        source,
    )
    return replace(target, relation=f"{definition.schema}.{name_beside(definition.name, beside)}")


def target_table(
    definition: TableDefinition,
    published: Sequence[str] | None,
    path: str,
    choices: TypeChoices | None = None,
    choice: Choice | None = None,
    mode: Mode = "mirror",
    deletes: Deletes = "hard",
    metadata: Metadata = (),
    truncate: Truncate = "follow",
    source: Source | None = None,
) -> TargetTable:
    """Return the Delta table for `definition`.

    `published`: the column list's names, None for all.  `choices`: the subscription's option `types`.  `choice`: those of the
    published columns that it gets; None: all.  `source`: whose rows they are, in a Delta table of several sources.

    Raises FeatureNotSupported for a table without columns, and, naming the column, for a type that Delta cannot hold, for a name
    that another column has, or that history, metadata, soft deletes, scd2 or the source need, for a column of the key that is left
    out, for a mask that does not fit, for metadata, soft deletes or scd2 of a table without a key, for the latter two, or a source,
    of one whose key is of floating-point numbers, and for a source of one without a key whose rows change.
    """
    qualified = f"{definition.schema}.{definition.name}"
    every = definition.published(published)
    columns = every if choice is None else list(choice.columns)
    if every and not columns:
        raise FeatureNotSupported(f'the options columns and exclude leave no column of table "{qualified}"')
    if not columns:
        raise FeatureNotSupported(
            f'table "{qualified}" has no column that is published',
            detail="A Delta table has at least one column.",
            hint="Add a column, or drop the table from the publication and refresh the subscription.",
        )
    named = {column.name: column.name if choice is None else choice.here(column) for column in columns}
    refuse_same_names([*named.items()], qualified)
    names = {*named.values()}
    key = row_key(definition, {column.name for column in every})
    missing = [name for name in key if name not in named]
    if missing and definition.replica_identity == "f":
        key = ()  # rows are found by the values that they have here
    elif missing:
        raise FeatureNotSupported(
            f'column "{missing[0]}" of table "{qualified}" cannot be left out: it is part of the key',
            detail="An UPDATE or DELETE could not find its row.",
        )
    for error in refused_keys(columns, key, qualified):
        raise error
    key = tuple(named[name] for name in key)
    rules = {} if choice is None else choice.masked
    _refuse_unfit_masks(rules, names, key, qualified)
    fields = [
        pa.field(named[column.name], column_type(column, definition, choices, rules.get(named[column.name])))
        for column in columns
    ]
    masks = Masks(rules)
    where = None
    if choice is not None and choice.where is not None:
        here = {column.attnum: named[column.name] for column in columns}
        where = kept_rows.row_filter(choice.where, definition, here, rules, pa.schema(fields))
    closed = choice is not None and choice.goes_by_numbers
    if mode == "history":
        refuse_names_of_history(names, qualified)
        schema = pa.schema([*change_rows.FIELDS, *fields])
        found = TargetTable(path, schema, (), qualified, history=key, closed=closed, masks=masks, where=where)
        _refuse_untold(found, definition, choice)
        return found
    soft, scd2 = deletes == "soft", mode == "scd2"
    if not scd2:
        fields = [field.with_nullable(field.name not in key) for field in fields]
    whose = [] if source is None else [pa.field(source.column, pa.string())]
    own = [*fields_of(metadata), *([soft_deletes.FIELD] if soft else []), *(versions.FIELDS if scd2 else []), *whose]
    _refuse_names_of_own(own, names, qualified, source)
    if source is not None:
        _refuse_unfit_for_sources(fields, key, definition, qualified)
    if soft:
        _refuse_unfit_key(
            "deletes = soft", "deletes", "a deleted row could be told from others", fields, key, qualified
        )
    if scd2:
        _refuse_unfit_key(
            "mode = scd2", "mode", "the versions of a row could be told from others", fields, key, qualified
        )
    if metadata and not key:
        raise FeatureNotSupported(
            f'table "{qualified}" has no key, without which its rows are found by all their columns',
            hint="Give it a primary key, or leave it out of the option metadata.",
        )
    found = TargetTable(
        path,
        pa.schema([*fields, *own]),
        key,
        qualified,
        soft_deletes=soft,
        truncate=truncate,
        versions=scd2,
        metadata=metadata,
        closed=closed,
        masks=masks,
        where=where,
        source=source,
        partitioned_by=() if source is None else (source.column,),
    )
    _refuse_untold(found, definition, choice)
    return found


def _refuse_untold(table: TargetTable, definition: TableDefinition, choice: Choice | None) -> None:
    """Raise FeatureNotSupported if neither changes nor the table will tell which rows met the condition of the option where."""
    if choice is None or choice.where is None:
        return
    lacking, reason = kept_rows.untold_column(choice.where, definition), unfit_to_tell(table)
    only_inserts = not definition.identity_key and definition.replica_identity != "f"
    if lacking is None or reason is None or only_inserts:
        return
    raise FeatureNotSupported(
        f'column "{lacking}" of table "{table.relation}", which the condition of the option where names, is not part of the replica '
        "identity",
        detail=f"Changes do not tell whether their rows met the condition before, and {reason}.",
        hint=f"ALTER TABLE {table.relation} REPLICA IDENTITY FULL, or use a condition of columns of its key."
        if definition.kind != "p"
        else "Use a condition of columns of its primary key.",
    )


def refuse_same_names(named: Sequence[tuple[str, str]], relation: str) -> None:
    """Raise FeatureNotSupported for two columns, each by the publisher's name and the Delta table's, that have one name there."""
    folded: dict[str, tuple[str, str]] = {}
    for one in named:
        other = folded.setdefault(folded_name(one[1]), one)
        if other == one:
            continue
        if other[0] == other[1] and one[0] == one[1]:
            raise FeatureNotSupported(
                f'columns "{other[0]}" and "{one[0]}" of table "{relation}" differ only in case',
                detail="Delta does not tell such columns apart.",
                hint="Rename one of them, there or by the option rename, or publish the table with a column list.",
            )
        raise FeatureNotSupported(
            f'columns "{other[0]}" and "{one[0]}" of table "{relation}" would have one name here, "{one[1]}"',
            detail="Delta does not tell names apart that differ only in case.",
            hint="Give one of them another name by the option rename, or publish the table with a column list.",
        )


def _refuse_names_of_own(
    own: Sequence[pa.Field], names: Iterable[str], relation: str, source: Source | None = None
) -> None:
    folded = {folded_name(name): name for name in names}
    for field in own:
        other = folded.setdefault(folded_name(field.name), field.name)
        if field.name == other and other not in names:
            continue
        option = "deletes = soft" if field.name == soft_deletes.DELETED_AT else "metadata"
        if field in versions.FIELDS:
            option = "mode = scd2"
        if source is not None and field.name == source.column:
            option = "source"
        raise FeatureNotSupported(
            f'column "{other}" of table "{relation}" has a name that {option} needs',
            hint="Rename it, there or by the option rename, publish the table with a column list, or give the option another name.",
        )


def _refuse_unfit_for_sources(
    fields: Sequence[pa.Field], key: Sequence[str], definition: TableDefinition, relation: str
) -> None:
    """Raise FeatureNotSupported for a table whose rows only a statement of Spark's changes, which knows no partition."""
    if not key and definition.replica_identity == "f":
        raise FeatureNotSupported(
            f'table "{relation}" has no key, by which its rows could be found beside those of other sources',
            hint="Give it a primary key, or publish it to a subscription without a source.",
        )
    if not can_match(pa.schema([field for field in fields if field.name in key])):
        raise FeatureNotSupported(
            f'table "{relation}" has a key that only Spark\'s statement finds rows by, which a source cannot use',
            detail="Its columns are floating-point numbers.",
            hint="Publish it to a subscription without a source.",
        )


def _refuse_unfit_key(
    what: str, option: str, told: str, fields: Sequence[pa.Field], key: Sequence[str], relation: str
) -> None:
    if not key:
        raise FeatureNotSupported(
            f'table "{relation}" has no key, by which {told}',
            hint=f"Give it a primary key, or leave it out of the option {option}.",
        )
    if not can_match(pa.schema([field for field in fields if field.name in key])):
        raise FeatureNotSupported(
            f'table "{relation}" has a key that only Spark\'s statement finds rows by, which {what} cannot use',
            detail="Its columns are floating-point numbers.",
            hint=f"Leave the table out of the option {option}.",
        )


def _refuse_unfit_masks(rules: Mapping[str, MaskRule], names: Iterable[str], key: Sequence[str], relation: str) -> None:
    """Raise FeatureNotSupported for a column of the key whose values are not told apart, and for a table with nothing but NULLs."""
    for name, rule in rules.items():
        if name in key and not rule.tells_values_apart:
            raise FeatureNotSupported(
                f'column "{name}" of table "{relation}" cannot be masked by {rule.name}: it is part of the key',
                detail="An UPDATE or DELETE could not find its row.",
                hint="Mask it by hash.",
            )
    if all(name in rules and rules[name].keeps_type for name in names):
        raise FeatureNotSupported(f'the option mask leaves no value of table "{relation}"')


def refuse_names_of_history(names: Iterable[str], relation: str) -> None:
    """Raise FeatureNotSupported for a column with a name that a table in mode history has for itself."""
    for name in names:
        if folded_name(name) in change_rows.NAMES:
            raise FeatureNotSupported(
                f'column "{name}" of table "{relation}" has a name that mode = history needs',
                hint="Rename it, there or by the option rename, or publish the table with a column list.",
            )


def column_type(
    column: ColumnDefinition,
    definition: TableDefinition,
    choices: TypeChoices | None = None,
    mask: MaskRule | None = None,
) -> pa.DataType:
    """Return the type of a column; a key column is text where the choice for its type would make it nested.

    Raises FeatureNotSupported, naming the column, for a type that Delta cannot hold, for a key column that is itself chosen
    to be nested, and for one whose type was chosen, or is such, that its `mask` does not fit.
    """
    choices = choices or TypeChoices()
    own = choices.of_column(definition.schema, definition.name, column.name)
    if mask is not None and not mask.keeps_type:
        _refuse_unfit_type(column, definition, own, mask)
        own = "text"
    is_key = column.name in row_key(definition, {one.name for one in definition.columns})
    try:
        found = shaped_type(column.shape, choices.of_type, own)
        if not (is_key and is_nested(found)):
            return found
        if own is None:
            return shaped_type(column.shape, choices.of_type, "text")
        raise FeatureNotSupported(
            f"a column of the key cannot be replicated as {own}",
            detail="Delta keeps no least and greatest value of arrays, structs and variants, and has no order of them.",
            hint="Leave it as text.",
        )
    except FeatureNotSupported as error:
        raise FeatureNotSupported(
            f'column "{column.name}" of table "{definition.schema}.{definition.name}": {error.message}',
            detail=error.detail,
            hint=error.hint,
        ) from error


def _refuse_unfit_type(
    column: ColumnDefinition, definition: TableDefinition, chosen: str | None, mask: MaskRule
) -> None:
    name = f'column "{column.name}" of table "{definition.schema}.{definition.name}"'
    if chosen not in (None, "text"):
        raise FeatureNotSupported(
            f"{name} cannot be masked by {mask.name} and replicated as {chosen}",
            detail="What is left of its values is text.",
            hint="Take it out of the option types.",
        )
    unfit = next((one for one in column.shape.all() if one.oid in _NOT_HASHED), None)
    if mask.name == "hash" and unfit is not None:
        raise FeatureNotSupported(
            f"{name} has type {column.type_name}, which cannot be masked by hash",
            detail="The same value may have another text later, and so another hash.",
            hint="Mask it by null or redact, or exclude it.",
        )


def definition_json(table: TargetTable, attributes: str) -> str:
    """Return what the catalog stores of the table (read by follow.load); `attributes` is from Attributes.as_json."""
    columns = [field.name for field in table.schema]
    history = {} if table.history is None else {"history": list(table.history)}
    deletes = {"deletes": "soft"} if table.soft_deletes else {}
    truncate = {"truncate": table.truncate} if table.truncate != "follow" else {}
    metadata = {"metadata": table.metadata} if table.metadata else {}
    mode = {"mode": "scd2"} if table.versions else {}
    source = {} if table.source is None else {"source": [table.source.column, table.source.value]}
    known = {"columns": columns, "key": list(table.key), **history, **mode, **deletes, **truncate, **metadata, **source}
    return json.dumps(known | {"attributes": attributes}, ensure_ascii=False)


def with_left(known: Attributes, names: Iterable[str]) -> Attributes:
    """Return the attributes of a table that is copied again, whose Delta table has columns `names` of its earlier copies.

    Those that the copy does not fill were dropped or renamed meanwhile.  They are kept like others that the publisher has dropped.
    """
    filled = {folded_name(column.name) for column in known.columns}
    left = [name for name in names if folded_name(name) not in filled]
    return replace(known, kept=tuple((-place, name) for place, name in enumerate(left, 1)))


def described_json(
    table: TargetTable,
    definition: TableDefinition,
    since: Lsn = INVALID_LSN,
    choice: Choice | None = None,
    earlier: Sequence[str] = (),
) -> str:
    """Return `definition_json` for a table as the publisher's catalog has it at `since`; `choice` as it was made for `table`.

    `earlier`: columns that its Delta table has from earlier copies.
    """
    return definition_json(table, with_left(described(table, definition, "", since, choice), earlier).as_json())


def described(
    table: TargetTable, definition: TableDefinition, app_id: str, since: Lsn, choice: Choice | None
) -> Attributes:
    """Return the attributes of a table as the publisher's catalog has it at `since`."""
    if choice is None:
        return of_definition(definition, table.schema.names, app_id, since)
    if choice.left_out is None:
        return of_definition(
            definition,
            [*choice.names],
            app_id,
            since,
            renames=choice.renames,
            naming=choice.naming,
            where=choice.where,
            filtering=choice.filtering,
        )
    return of_definition(
        definition,
        [*choice.names],
        app_id,
        since,
        choice.left_out,
        choice.rule,
        choice.listed,
        choice.masks,
        table.masks.fingerprint,
        choice.renames,
        choice.naming,
        choice.where,
        choice.filtering,
    )
