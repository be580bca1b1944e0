"""The options columns, exclude, mask and rename: which of a table's published columns its Delta table gets, which of them masked,
and under which names.  The first three fail closed.  Which rows it gets is decided at the same time (kept_rows).

A table of which the options say something is closed: its columns were chosen by name once, and are known by their numbers at the
publisher from then on.  A new name lets no column in, or out; a column that is added later stays out.  A copy that nobody asked
for (an ALTER TABLE that takes one, a lost slot) keeps to these numbers.  RESYNC TABLE lets in what came later and no option leaves
out; names are looked at anew if the options have other texts by then.  Until then a copy takes away, or masks, what either text does.

What rename says of a column is decided in the same way, and does not close the table: a column that is added later joins it, under
the name that the option has for it by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from apply.schema_changes import kept_rows
from apply.schema_changes.attributes import Attribute, Attributes, KeptRows, LeftOut, Rule, sent_as, stored
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.layouts import Layouts
from pubsub.sql.mask_rules import MaskRule


@dataclass(frozen=True, slots=True)
class Choice:
    """What a copy gives a table.  `left_out`, `rule`, `masks`, `renames`, `naming`, `where`, `filtering`: see Attributes; `left_out`
    None: the table is open, and gets all columns.

    `listed`: the names of all published columns.
    """

    columns: tuple[ColumnDefinition, ...]
    listed: frozenset[str]
    left_out: tuple[LeftOut, ...] | None = None
    rule: Rule | None = None
    masks: Mapping[int, MaskRule] = field(default_factory=dict)
    renames: Mapping[int, str] = field(default_factory=dict)
    naming: str | None = None
    where: KeptRows | None = None
    filtering: str | None = None

    @property
    def names(self) -> frozenset[str]:
        """The publisher's names of the columns that the table gets."""
        return frozenset(column.name for column in self.columns)

    @property
    def goes_by_numbers(self) -> bool:
        """As of Attributes."""
        return self.left_out is not None or bool(self.renames) or self.where is not None

    @property
    def masked(self) -> Mapping[str, MaskRule]:
        """The rules of the columns that the table gets masked, by the Delta table's names."""
        return {self.here(column): self.masks[column.attnum] for column in self.columns if column.attnum in self.masks}

    @property
    def read(self) -> Mapping[str, str]:
        """The columns whose values a copy reads: the publisher's name and the Delta table's."""
        masks = self.masks
        absent = {
            column.attnum for column in self.columns if column.attnum in masks and masks[column.attnum].keeps_type
        }
        return {column.name: self.here(column) for column in self.columns if column.attnum not in absent}

    def here(self, column: ColumnDefinition) -> str:
        """Return the name that the Delta table has for a column of the publisher."""
        return self.renames.get(column.attnum, column.name)


def choose(layouts: Layouts, definition: TableDefinition, attnames: Sequence[str] | None, held: str | None) -> Choice:
    """Return the columns for a copy of a table.

    `attnames` as in PublishedTable.  `held`: the table's definition (definition_json) of before, if it has one.  Raises
    UndefinedObject for an option that names a column of this very table which is not there, if names are looked at.
    """
    published = definition.published(attnames)
    layout, rule = layouts.choice_of(definition.schema, definition.name), layouts.rule
    before = stored(held)
    renames, naming = _names(layouts, definition, published, before)
    where, filtering = kept_rows.chosen(layouts, definition, published, before)
    earlier = {} if before is None else {one.number: one.named for one in before.left_out or ()}
    # By names, of columns whose numbers say nothing yet.
    masks = {c.attnum: layout.mask[c.name] for c in definition.columns if c.name in layout.mask}

    def divided(out: Callable[[ColumnDefinition], bool], decided: Rule | None) -> Choice:
        """Leave out these columns, and those of before that are not published now: they may be again, under another name."""
        there = {column.attnum for column in published}
        gone = [c for c in definition.columns if (out(c) if c.attnum in there else c.attnum in earlier)]
        left_out = tuple(
            LeftOut(c.attnum, c.name, earlier.get(c.attnum, False) or layout.leaves_out(c.name)) for c in gone
        )
        numbers = {column.attnum for column in gone}
        columns = tuple(column for column in published if column.attnum not in numbers)
        names = frozenset(column.name for column in published)
        return Choice(columns, names, left_out, decided, masks, renames, naming, where, filtering)

    def by_names() -> Choice:
        names = [column.name for column in published]
        layouts.require_columns(definition.schema, definition.name, names)
        earlier.clear()
        return divided(lambda column: layout.leaves_out(column.name), rule)

    everything = Choice(
        tuple(published),
        frozenset(column.name for column in published),
        renames=renames,
        naming=naming,
        where=where,
        filtering=filtering,
    )
    if before is None or before.left_out is None:
        return by_names() if layout.is_closed else everything
    known = before.by_number
    same = before.rule == rule
    if same or not before.asked:
        # A column that the table had in clear stays so under another name, unless the options have another text.
        masks = {number: one for number, one in masks.items() if number not in known or not same} | dict(before.masks)
    if not before.asked:
        # With other options, names are looked at when RESYNC TABLE is given.
        return divided(
            lambda c: c.attnum not in known or (not same and layout.leaves_out(c.name)), rule if same else None
        )
    if same:
        return divided(
            lambda c: earlier.get(c.attnum, False) or (c.attnum not in known and layout.leaves_out(c.name)), rule
        )
    return by_names() if layout.is_closed else everything


def _names(
    layouts: Layouts, definition: TableDefinition, published: Sequence[ColumnDefinition], before: Attributes | None
) -> tuple[Mapping[int, str], str | None]:
    """Return Attributes.renames and naming for a copy of a table.  `before`: its attributes of before.  Raises UndefinedObject."""
    rename = layouts.choice_of(definition.schema, definition.name).rename
    found = {c.attnum: rename[c.name] for c in definition.columns if c.name in rename}
    if before is None or before.naming is None or (before.asked and before.naming != layouts.naming):
        names = [column.name for column in published]
        layouts.require_columns(definition.schema, definition.name, names, rename=True)
        return found, layouts.naming if rename else None
    known = before.by_number
    return {number: name for number, name in found.items() if number not in known} | dict(before.renames), before.naming


def asking(definition: str) -> str:
    """Return a table's definition (definition_json) for whose next copy RESYNC TABLE was given."""
    said = stored(definition)
    if said is None or not said.was_chosen:
        return definition
    return _with(definition, replace(said, asked=True))


def of_table_made_anew(definition: str, now: TableDefinition) -> str | None:
    """Return the definition by which a table that was dropped and created again is copied; None if no option said anything of it.

    It gets the columns that the earlier one gave to the Delta table, by their names; an open one gets all.
    """
    said = stored(definition)
    if said is None or not said.was_chosen:
        return None
    names = {column.published for column in said.columns}
    ruled = {one.name for one in said.left_out or () if one.named}
    named = {name: said.masks[number] for name, number in said.published.items() if number in said.masks}
    other = {name: said.renames[number] for name, number in said.published.items() if number in said.renames}
    here = [(c, other.get(c.name, c.name)) for c in now.columns if c.name in names]
    columns = tuple(
        Attribute(c.attnum, name, c.type_oid, c.type_modifier, sent_as=sent_as(c.name, name)) for c, name in here
    )
    left_out = tuple(LeftOut(c.attnum, c.name, c.name in ruled) for c in now.columns if c.name not in names)
    carried = Attributes(
        "",
        now.attributes,
        now.storage,
        said.since,
        columns,
        left_out=None if said.left_out is None else left_out,
        rule=said.rule,
        asked=said.asked,
        masks={c.attnum: named[c.name] for c in now.columns if c.name in named},
        fingerprint=said.fingerprint,
        renames={c.attnum: other[c.name] for c in now.columns if c.name in other},
        naming=said.naming,
        where=kept_rows.under_other_numbers(said.where, {number: name for name, number in said.published.items()}, now),
        filtering=said.filtering,
    )
    return _with(definition, carried)


def _with(definition: str, attributes: Attributes) -> str:
    return json.dumps({**json.loads(definition), "attributes": attributes.as_json()}, ensure_ascii=False)


def replicated(known: Attributes | None, columns: Sequence[ColumnDefinition]) -> list[ColumnDefinition]:
    """Return those of the published columns that the Delta table gets now, by its attributes."""
    if known is None or known.left_out is None:
        return list(columns)
    return [column for column in columns if column.attnum in known.by_number]
