"""The options columns, exclude and mask: which of a table's published columns its Delta table gets, and which of them masked.
They fail closed.

A table of which the options say something is closed: its columns were chosen by name once, and are known by their numbers at the
publisher from then on.  A new name lets no column in, or out; a column that is added later stays out.  A copy that nobody asked
for (an ALTER TABLE that takes one, a lost slot) keeps to these numbers.  RESYNC TABLE lets in what came later and no option leaves
out; names are looked at anew if the options have other texts by then.  Until then a copy takes away, or masks, what either text does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from apply.schema_changes.attributes import Attribute, Attributes, LeftOut, Rule, stored
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.layouts import Layouts
from pubsub.sql.mask_rules import MaskRule


@dataclass(frozen=True, slots=True)
class Choice:
    """What a copy gives a table.  `left_out`, `rule`, `masks`: see Attributes; `left_out` None: the table is open, and gets all
    columns.

    `listed`: the names of all published columns.
    """

    columns: tuple[ColumnDefinition, ...]
    listed: frozenset[str]
    left_out: tuple[LeftOut, ...] | None = None
    rule: Rule | None = None
    masks: Mapping[int, MaskRule] = field(default_factory=dict)

    @property
    def names(self) -> frozenset[str]:
        """The names of the columns that the table gets."""
        return frozenset(column.name for column in self.columns)

    @property
    def masked(self) -> Mapping[str, MaskRule]:
        """The rules of the columns that the table gets masked, by name."""
        return {column.name: self.masks[column.attnum] for column in self.columns if column.attnum in self.masks}


def choose(layouts: Layouts, definition: TableDefinition, attnames: Sequence[str] | None, held: str | None) -> Choice:
    """Return the columns for a copy of a table.

    `attnames` as in PublishedTable.  `held`: the table's definition (definition_json) of before, if it has one.  Raises
    UndefinedObject for an option that names a column of this very table which is not there, if names are looked at.
    """
    layout, rule = layouts.choice_of(definition.schema, definition.name), layouts.rule
    published = definition.published(attnames)
    before = stored(held)
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
        return Choice(columns, frozenset(column.name for column in published), left_out, decided, masks)

    def by_names() -> Choice:
        layouts.require_columns(definition.schema, definition.name, [column.name for column in published])
        earlier.clear()
        return divided(lambda column: layout.leaves_out(column.name), rule)

    everything = Choice(tuple(published), frozenset(column.name for column in published))
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


def asking(definition: str) -> str:
    """Return a table's definition (definition_json) for whose next copy RESYNC TABLE was given."""
    said = stored(definition)
    if said is None or said.left_out is None:
        return definition
    return _with(definition, replace(said, asked=True))


def of_table_made_anew(definition: str, now: TableDefinition) -> str | None:
    """Return the definition by which a table that was dropped and created again is copied; None if it was open.

    It gets the columns that the earlier one gave to the Delta table, by their names.
    """
    said = stored(definition)
    if said is None or said.left_out is None:
        return None
    names = {column.name for column in said.columns}
    ruled = {one.name for one in said.left_out if one.named}
    named = {name: said.masks[number] for name, number in said.published.items() if number in said.masks}
    columns = tuple(Attribute(c.attnum, c.name, c.type_oid, c.type_modifier) for c in now.columns if c.name in names)
    left_out = tuple(LeftOut(c.attnum, c.name, c.name in ruled) for c in now.columns if c.name not in names)
    carried = Attributes(
        "",
        now.attributes,
        now.storage,
        said.since,
        columns,
        left_out=left_out,
        rule=said.rule,
        asked=said.asked,
        masks={c.attnum: named[c.name] for c in now.columns if c.name in named},
        fingerprint=said.fingerprint,
    )
    return _with(definition, carried)


def _with(definition: str, attributes: Attributes) -> str:
    return json.dumps({**json.loads(definition), "attributes": attributes.as_json()}, ensure_ascii=False)


def replicated(known: Attributes | None, columns: Sequence[ColumnDefinition]) -> list[ColumnDefinition]:
    """Return those of the published columns that the Delta table gets now, by its attributes."""
    if known is None or known.left_out is None:
        return list(columns)
    return [column for column in columns if column.attnum in known.by_number]
