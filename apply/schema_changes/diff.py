"""Work out what a changed Relation message requires of the Delta table, from its columns' numbers and the publisher's catalog.

    known      1 id   2 a   3 b                message   id, x, c            catalog   1 id   2 x   4 c (missing value 5)
    numbers    1, 2, 4                  ►      a is renamed x;  b is dropped: kept, or dropped;  c is added, with 5 in all rows

Where these do not determine it, the table must be copied again: CopyAgain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, cast

import pyarrow as pa

from apply.schema_changes.attributes import (
    Attribute,
    Attributes,
    LeftOut,
    Numbers,
    sent_as,
    shape_of,
    shape_of_columns,
    under,
)
from apply.schema_changes.kept_rows import dropped
from apply.schema_changes.table_definition import column_type, refuse_names_of_history, refuse_same_names
from pubsub.delta.alter import Alteration
from pubsub.delta.table import TargetTable
from pubsub.errors import InvalidValue, NotInPrerequisiteState
from pubsub.protocol.column_types import folded_name, is_nested, shaped_type
from pubsub.protocol.ids import Oid
from pubsub.protocol.pgoutput import COLUMN_IN_REPLICA_IDENTITY, Column, Relation, ReplicaIdentity
from pubsub.protocol.refused_values import InvalidText
from pubsub.protocol.text.columns import from_text
from pubsub.protocol.type_contract import VARIANT
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition, rewritten
from pubsub.sql.layouts import Layout
from pubsub.sql.typechoices import TypeChoices

#: Types that write a value in one way, by oid: text and varchar.
_SAME_TEXTS: Final = frozenset((25, 1043))
#: Types between which an ALTER TYPE may leave the stored values as they are, and their texts, too: text, varchar and
#: character; bit and bit varying.
_SAME_OUTPUT: Final = (frozenset((25, 1043, 1042)), frozenset((1560, 1562)))


class CopyAgain(NotInPrerequisiteState):
    """Stream and catalog do not determine the table's rows; only a new copy does."""

    def __init__(self, relid: int, relation: str, reason: str) -> None:
        super().__init__(
            f'table "{relation}" was altered, and must be copied again: {reason}',
            hint=f"ALTER SUBSCRIPTION … RESYNC TABLE {relation}",
        )
        self.relid = relid
        self.relation = relation
        self.reason = reason


@dataclass(frozen=True, slots=True)
class Described:
    """A table in the publisher's catalog.  `names`: its column list; None: all columns that are not generated."""

    definition: TableDefinition
    names: tuple[str, ...] | None

    @property
    def published(self) -> tuple[ColumnDefinition, ...]:
        """Its published columns."""
        return tuple(self.definition.published(self.names))

    def as_message(self, relid: int) -> Relation:
        """Return the Relation message that the publisher would send now (proto.c: logicalrep_write_rel)."""
        one = self.definition
        named = [column.name for column in self.published] if one.replica_identity == "f" else one.identity_key
        columns = [
            Column(COLUMN_IN_REPLICA_IDENTITY * (c.name in named), c.name, c.type_oid, c.type_modifier)
            for c in self.published
        ]
        identity = cast(ReplicaIdentity, one.replica_identity)
        return Relation(Oid(relid), one.schema, one.name, identity, tuple(columns))

    def same_columns(self, other: Described) -> bool:
        """Return whether no ALTER TABLE has changed columns or keys between these two states."""
        one, two = (replace(d.definition, estimated_rows=0, pages=0, bytes=0, storage="") for d in (self, other))
        return (one, self.names) == (two, other.names)


@dataclass(frozen=True, slots=True)
class Change:
    """The table's new attributes, and the alteration of the Delta table (None: nothing to alter)."""

    attributes: Attributes
    alteration: Alteration | None
    moves_key: bool = False
    """Whether other columns identify rows from now on."""


def wanted(
    target: TargetTable,
    known: Attributes,
    message: Relation,
    numbers: Numbers,
    described: Described | None,
    *,
    keep: bool,
    choices: TypeChoices | None = None,
    layout: Layout | None = None,
) -> Change | None:
    """Return what `message` requires of the table, or None.

    `keep`: a dropped column stays in the Delta table.  `choices`: the subscription's option `types`.  `layout`: what its
    other options say of the table.

    Raises CopyAgain, and FeatureNotSupported for a type that Delta cannot hold.
    """
    return _Wanted(target, known, message, numbers, described, keep, choices, layout).found()


def identity(message: Relation, numbers: Numbers) -> frozenset[int] | None:
    """Return the numbers of the message's replica identity columns; None for all (REPLICA IDENTITY FULL)."""
    if message.replica_identity == "f":
        return None
    return frozenset(
        number
        for sent, number in zip(message.columns, numbers, strict=True)
        if sent.in_replica_identity and number is not None
    )


class _Wanted:
    def __init__(
        self,
        target: TargetTable,
        known: Attributes,
        message: Relation,
        numbers: Numbers,
        described: Described | None,
        keep: bool,
        choices: TypeChoices | None,
        layout: Layout | None,
    ) -> None:
        self._layout = Layout() if layout is None else layout
        self._target, self._known, self._message, self._numbers = target, known, message, numbers
        self._live: Mapping[int, ColumnDefinition] = (
            {} if described is None else {column.attnum: column for column in described.published}
        )
        self._choices = choices
        self._definition = None if described is None else described.definition
        self._keep = keep
        self._rewritten = described is not None and rewritten(known.storage, described.definition.storage)

    def found(self) -> Change | None:
        before = self._known.by_number
        columns: list[Attribute] = []
        renamed: dict[str, str] = {}
        retyped: dict[str, pa.DataType] = {}
        added: list[tuple[Attribute, pa.DataType]] = []
        closed = self._layout.is_closed or self._known.left_out is not None
        masks, renames = dict(self._known.masks), dict(self._known.renames)
        left_out = {one.number: one for one in self._known.left_out or () if self._may_be_there(one.number)}
        for sent, number in zip(self._message.columns, self._numbers, strict=True):
            if number is None:
                continue  # dropped by now and never seen: no row of the publisher has it
            if number in left_out or (closed and number not in before):
                # A later column stays out, too, until RESYNC TABLE lets it in.
                named = left_out[number].named if number in left_out else self._layout.leaves_out(sent.name)
                rule = self._layout.mask.get(sent.name)
                if number not in left_out and rule is not None:
                    masks.setdefault(number, rule)
                left_out[number] = LeftOut(number, sent.name, named)
                continue
            old, now = before.get(number), self._live.get(number)
            if old is None:
                if self._known.naming is not None and sent.name in self._layout.rename:
                    renames.setdefault(number, self._layout.rename[sent.name])
                column, kind = self._added(sent.name, number, renames.get(number, sent.name))
                added.append((column, kind))
                columns.append(column)
                continue
            name = renames.get(number, sent.name)
            if name != old.name:
                renamed[old.name] = name
            sent_type = (int(sent.type_oid), sent.type_modifier)
            if sent_type != (old.type_oid, old.type_modifier):
                kind = self._retyped(old, now, sent_type)
                if kind is not None:
                    retyped[name] = kind
            elif self._made_of_others(old, now):
                raise self._copy_again(f'the composite type of column "{old.name}" was altered')
            elif self._written_anew(old, now):
                raise self._copy_again(f'the publisher has written the values of column "{old.name}" anew')
            columns.append(
                replace(
                    old,
                    name=name,
                    type_oid=sent_type[0],
                    type_modifier=sent_type[1],
                    xmin=now.xmin if now is not None else old.xmin,
                    under=old.under if now is None or now.type_oid != sent.type_oid else under(now),
                    sent_as=sent_as(sent.name, name),
                )
            )
        self._look_at_condition(columns)
        key = self._key(columns, renamed)
        if not columns and self._message.replica_identity == "f" and self._target.history is None:
            raise self._copy_again("it has no column left to tell its rows apart")
        # Where rows are found by all their values, a kept column would make them differ.
        keep = self._keep and bool(key or self._message.replica_identity != "f")
        keep |= self._target.keeps_past
        keep |= not columns  # a Delta table has at least one: the last ones go when another comes
        numbers = {column.number for column in columns}
        gone = [(number, column.name) for number, column in before.items() if number not in numbers]
        taken = {folded_name(name) for name in (*renamed.values(), *(column.name for column, _ in added))}
        kept = tuple(one for one in (*self._known.kept, *gone) if keep and folded_name(one[1]) not in taken)
        stays = {name for _, name in kept}
        dropped = [name for _, name in (*self._known.kept, *gone) if name not in stays]
        names = [(column.published, column.name) for column in columns]
        refuse_same_names([*names, *((name, name) for name in stays)], self._target.relation)
        new_names = [*renamed.values(), *(column.name for column, _ in added)]
        if self._target.history is not None:
            refuse_names_of_history(new_names, self._target.relation)
        if self._target.keeps_past:
            self._refuse_names_in_past(new_names, renamed)
        if self._target.history is None:
            self._refuse_names_of_others(new_names)
        count, storage = self._known.count, self._known.storage
        if self._definition is not None and shape_of(self._message) == shape_of_columns(tuple(self._live.values())):
            # The catalog is not newer than the message, so its file numbers hold at the message, too.
            count, storage = self._definition.attributes, self._definition.storage
        elif added:
            count = max(count, *(column.number for column, _ in added))
        after = replace(
            self._known,
            columns=tuple(columns),
            kept=kept,
            count=count,
            storage=storage,
            left_out=tuple(one for _, one in sorted(left_out.items())) if closed else None,
            masks=masks,
            renames=renames,
        )
        alteration = None
        if renamed or dropped or retyped or added or key != self._target.identity or gone:
            alteration = Alteration(
                key=key,
                relation=self._target.relation,
                drop=tuple(dropped),
                rename=renamed,
                retype=retyped,
                add=tuple((pa.field(column.name, kind), self._value(column, kind)) for column, kind in added),
            )
        if after == self._known and alteration is None:
            return None
        if self._target.source is not None and alteration is not None:
            self._refuse_what_concerns_others(alteration)
        for field in self._target.schema:
            if renamed.get(field.name, field.name) in key and is_nested(field.type):
                raise self._copy_again(f'column "{field.name}" joins its key')
        for column in columns:
            if column.name in key and column.number in masks and not masks[column.number].tells_values_apart:
                raise self._copy_again(f'column "{column.name}", which is masked, joins its key')
        moves_key = set(key) != {renamed.get(name, name) for name in self._target.identity}
        keeps = self._target.mark is not None or self._target.truncate == "ignore"
        if moves_key and (self._target.history is not None or keeps):
            raise self._copy_again("other columns identify its rows")
        return Change(after, alteration, moves_key)

    def _look_at_condition(self, columns: Sequence[Attribute]) -> None:
        """Refuse that a column of the condition of the table's rows is dropped; have the table copied anew if its type is another."""
        where, before = self._known.where, self._known.by_number
        if where is None:
            return
        now = {column.number: column for column in columns}
        for name, number in where.numbers.items():
            if number not in now:
                raise dropped(self._target.relation, name)
            if number in before and (before[number].type_oid, before[number].type_modifier) != (
                now[number].type_oid,
                now[number].type_modifier,
            ):
                raise self._copy_again(
                    f'the type of column "{now[number].name}", by which its rows are chosen, is another'
                )

    def _may_be_there(self, number: int) -> bool:
        """Return whether a column has this number at the publisher, as far as is known."""
        columns = None if self._definition is None else self._definition.columns
        return number in self._numbers or columns is None or any(column.attnum == number for column in columns)

    def _added(self, published: str, number: int, name: str) -> tuple[Attribute, pa.DataType]:
        now = self._live.get(number)
        assert now is not None  # an unknown number comes from the catalog
        if number <= self._known.count:
            raise self._copy_again(f'column "{published}" is published from now on')
        assert self._definition is not None
        partitioned = self._definition.kind == "p"
        unknown = now.missing_differs or (self._rewritten and (partitioned or now.missing is None))
        if unknown:
            raise self._copy_again(f'the values of column "{published}" in its rows are known to the publisher alone')
        kind = column_type(now, self._definition, self._choices)
        column = Attribute(
            number,
            name,
            now.type_oid,
            now.type_modifier,
            now.missing,
            now.xmin,
            under(now),
            sent_as(published, name),
        )
        return column, kind

    def _made_of_others(self, old: Attribute, now: ColumnDefinition | None) -> bool:
        """Return whether the column's composite type is the same but has other attributes, which the stream does not show."""
        have = self._target.schema.field(old.name).type
        if now is None or self._definition is None or have == VARIANT or not is_nested(have):
            return False
        # Arrays and composites are natural in this column, whatever the option says now.
        return not _same_fields(have, shaped_type(now.shape, lambda names: None, "natural"))

    def _written_anew(self, old: Attribute, now: ColumnDefinition | None) -> bool:
        """Return whether an ALTER TYPE may have changed the column's values but not its type.

        It rewrites the table and the column's row in the catalog.  So does a VACUUM FULL that stores a missing value.
        """
        return (
            self._definition is not None
            and now is not None
            and self._rewritten
            and now.xmin != old.xmin
            and (now.missing is not None or old.missing is None)
        )

    def _retyped(self, old: Attribute, now: ColumnDefinition | None, sent: tuple[int, int]) -> pa.DataType | None:
        """Return the type that the Delta column needs, or None if it has it."""
        if now is None or (now.type_oid, now.type_modifier) != sent:
            raise self._copy_again(f'the type of column "{old.name}" was changed more than once')
        assert self._definition is not None
        have = self._target.schema.field(old.name).type
        mask = self._known.masks.get(old.number)
        kind = column_type(now, self._definition, self._choices, mask)
        if mask is not None and not mask.keeps_type and not {old.type_oid, int(now.type_oid)} <= _SAME_TEXTS:
            # Its texts may be others now, which the Delta column's type does not show.
            raise self._copy_again(f'the type of column "{old.name}", which is masked, is another')
        if self._rewritten:
            raise self._copy_again(f'the publisher has written the values of column "{old.name}" anew')
        if kind == have:
            if pa.types.is_string(have) and not _writes_as(int(now.base_type_oid), old.base):
                raise self._copy_again(
                    f'the values of column "{old.name}" have another text as the type that it has now'
                )
            return None
        grows = (
            pa.types.is_decimal(have)
            and pa.types.is_decimal(kind)
            and kind.scale == have.scale
            and kind.precision >= have.precision
        )
        if not grows:
            raise self._copy_again(f'the type of column "{old.name}" is another')
        return kind

    def _key(self, columns: Sequence[Attribute], renamed: Mapping[str, str]) -> tuple[str, ...]:
        """Return the columns that identify a row from now on.

        None of them if that is uncertain: then rows are found by all their values, or are only inserted.
        """
        names = {column.number: column.name for column in columns}
        before = tuple(renamed.get(name, name) for name in self._target.identity)
        if not set(before) <= set(names.values()):
            before = ()
        flagged = identity(self._message, self._numbers)
        if flagged is not None and flagged:
            if flagged == self._numbers_of(names, before):
                return before
            if not flagged <= names.keys():
                return ()  # the table does not get some of the key: there are only inserts
            listed = () if self._definition is None else self._definition.identity_key
            if not {column.name for column in self._live.values()}.issuperset(listed):
                return ()  # a column list leaves out some of the key: there are only inserts
            return tuple(name for number, name in names.items() if number in flagged)
        # FULL, NOTHING, or no key: which one there is only the catalog tells, which may be newer.
        primary = () if self._definition is None else self._definition.primary_key
        of_name = {column.name: column.attnum for column in self._live.values()}
        now = {of_name.get(name, 0) for name in primary}
        certain = self._message.replica_identity in ("f", "n") and before and now == self._numbers_of(names, before)
        return before if certain else ()

    @staticmethod
    def _numbers_of(names: Mapping[int, str], some: Sequence[str]) -> set[int]:
        return {number for number, name in names.items() if name in some}

    def _refuse_names_of_others(self, new: Sequence[str]) -> None:
        """Refuse the name of a column that only the Delta table has."""
        others = {folded_name(name): name for name in {*self._target.schema.names} - {*self._known.names.values()}}
        for name in new:
            other = others.get(folded_name(name))
            if other is not None and other == name and name in self._target.others:
                continue  # other sources have it: it is theirs and this one's then
            if other is not None:
                raise NotInPrerequisiteState(
                    f'table "{self._target.relation}" has a new column "{name}", but its Delta table has a column "{other}" '
                    "of its own",
                    detail=f'The Delta table lies at "{self._target.path}".',
                    hint=f"Rename or drop that one.  RESYNC TABLE {self._target.relation} leaves the publisher's columns alone.",
                )

    def _refuse_what_concerns_others(self, alteration: Alteration) -> None:
        """Refuse what would change the rows of the Delta table's other sources, or have the table copied where a copy does it.

        A copy leaves the columns that others have as they are, and adds those that they lack.
        """
        value = self._target.whose
        where = f'The Delta table at "{self._target.path}" has rows of other sources, too.'
        if alteration.retype:
            name = min(alteration.retype)
            raise NotInPrerequisiteState(
                f'column "{name}" of table "{self._target.relation}" of source "{value}" has another type now',
                detail=where,
                hint="Change it at all sources, and let a new Delta table have their rows: another target.",
            )
        if set(alteration.key) != {alteration.rename.get(name, name) for name in self._target.identity}:
            raise NotInPrerequisiteState(
                f'other columns identify the rows of table "{self._target.relation}" of source "{value}" now',
                detail=where,
                hint="All sources of a Delta table have the same key.",
            )
        if alteration.rename or alteration.drop:
            raise self._copy_again("other sources of its Delta table have the columns that were renamed or taken away")

    def _refuse_names_in_past(self, new: Sequence[str], renamed: Mapping[str, str]) -> None:
        """Have the table copied anew if a column gets the name of one that stays, with the values that it had."""
        there = {folded_name(name) for name in self._target.replicated} - {folded_name(name) for name in renamed}
        for name in new:
            if folded_name(name) in there:
                raise self._copy_again(f'its history has the values of another column "{name}"')

    def _value(self, column: Attribute, kind: pa.DataType) -> pa.Scalar:
        """Return the value of an added column in older rows.  Raises InvalidValue for one that its type cannot hold."""
        if column.missing is None:
            return pa.scalar(None, kind)
        try:
            return from_text(pa.array([column.missing.encode()], pa.binary()), kind)[0]
        except InvalidText as error:
            named = f"{self._target.relation}.{column.name}"
            raise InvalidValue(
                f'column "{column.name}" of table "{self._target.relation}": {error.message}',
                sqlstate=error.sqlstate,
                detail="It is the value of the rows that are older than the column.",
                hint=f"ALTER SUBSCRIPTION … SET (types = '{named} text'), or leave the column out by a column list.",
            ) from error

    def _copy_again(self, reason: str) -> CopyAgain:
        return CopyAgain(int(self._message.oid), self._target.relation, reason)


def _writes_as(now: int, before: int) -> bool:
    """Return whether the types, by oid, write a value that an ALTER TYPE has left as it was stored with the same text.

    cidr writes a netmask where inet has none; a timestamp with time zone has the zone; xml leaves its encoding out.
    """
    return now == before or any({now, before} <= types for types in _SAME_OUTPUT)


def _same_fields(have: pa.DataType, now: pa.DataType) -> bool:
    """Return whether inner structs have the same fields; values that either keeps as text are not compared."""
    if pa.types.is_list(have) and pa.types.is_list(now):
        return _same_fields(have.value_type, now.value_type)
    if pa.types.is_struct(have) and pa.types.is_struct(now):
        return [field.name for field in have] == [field.name for field in now] and all(
            _same_fields(one.type, other.type) for one, other in zip(have, now, strict=True)
        )
    return True
