"""Find the attribute number of each column of a Relation message: numbers stay, names change.

A Relation message has names and types as they were at its place in the stream.  The publisher's catalog has attribute numbers,
which never change, but it shows the present, which may be newer.  Three facts connect the two:

    a number stays in the catalog until its column is dropped, and is never reused
    a message lists its columns in the order of their numbers
    a column whose row in pg_attribute is not younger than the message's transaction existed then, under that name

    known      1 id   2 a   3 b
    message    id, x, b, n
    catalog    1 id   2 y   3 b   5 n (4 is dropped)          ►  1, 2 (renamed twice: its place is taken by nothing else), 3, 5

A column that has been dropped by now needs no number: no row of the publisher has it any more.  Where two answers are possible,
`identify` returns None and the table is copied again.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final

from pubsub.masks import Masks
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Relation
from pubsub.publisher.definitions import ColumnDefinition, TableDefinition
from pubsub.sql.mask_rules import MaskRule

if TYPE_CHECKING:
    from pubsub.delta.table import TargetTable
    from pubsub.row_filters import RowFilter

PROPERTY: Final = "pubsub.attributes"
"""The Delta table's property that holds the attributes; the commit that alters the columns sets it.  In a table of several sources
each has one of its own (property_of)."""

# How many known shapes are kept, for messages that are resent after a restart.  A batch with more has hardly anything else.
_SHAPES_KEPT: Final = 32

Shape = tuple[tuple[str, int, int], ...]
Numbers = tuple[int | None, ...]


Rule = tuple[str, str, str]
"""The texts of the options columns, exclude and mask."""


@dataclass(frozen=True, slots=True)
class Attribute:
    """A replicated column.  `name` is the Delta table's; `missing` is the text of the value in older rows (None: NULL).

    Of a column that is masked `missing` is not stored: "" says that there is one.
    """

    number: int
    name: str
    type_oid: int
    type_modifier: int
    missing: str | None = None
    xmin: int = 0
    under: int = 0
    """Of a domain the type under it; 0: the column's type is none, or it was recorded by an earlier release."""
    sent_as: str = ""
    """The publisher's name of it, if that is another one (the option rename)."""

    @property
    def base(self) -> int:
        """The type whose output function writes the values."""
        return self.under or self.type_oid

    @property
    def published(self) -> str:
        """Its name at the publisher."""
        return self.sent_as or self.name

    def as_list(self) -> list[Any]:
        """Return what `Attribute(*…)` takes."""
        return [
            self.number,
            self.name,
            self.type_oid,
            self.type_modifier,
            self.missing,
            self.xmin,
            *([self.under, self.sent_as] if self.sent_as else [self.under] if self.under else ()),
        ]


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A published column that the table does not get.  `named`: an option leaves it out; else it came later."""

    number: int
    name: str
    named: bool


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Which of the publisher's rows the table has: the `text` of a condition, and the numbers of its columns by the names that it has
    for them.  `partitioned`: as in RowFilter.
    """

    text: str
    numbers: Mapping[str, int]
    partitioned: bool = False

    def as_json(self) -> dict[str, Any]:
        return {"text": self.text, "numbers": dict(self.numbers), "partitioned": self.partitioned}


@dataclass(frozen=True, slots=True)
class Attributes:
    """A table's columns as its Delta table has them.

    `count`: how many numbers have been assigned.  `storage`: TableDefinition's.  `since`: the end LSN of the transaction that
    created this state.  `kept`: columns of the Delta table that the publisher has dropped, by their former numbers; those that an
    earlier copy left have numbers below zero.  `shapes`: known Relation messages with the numbers of their columns, the newest
    last.  `left_out`: published columns that the table does not get, whatever they are called later; None: it gets all, and all
    that are added.  `masks`: the rules of the columns that are masked, by number, also of those that it does not get now;
    `fingerprint`: that of the key of those that are hashed.  `rule`: the options that decided this; `asked`: RESYNC TABLE was
    given since (column_choice).  `app_id`: the copy that they belong to.  `renames`: the names of columns that do not follow the
    publisher's, by number, also of those that it does not get now; `naming`: the text of the option rename that decided them, None
    if it said nothing of the table.  `where`: which rows the table has, None: all; `filtering`: the text of the option where that
    decided it, None if it said nothing of the table.
    """

    app_id: str
    count: int
    storage: str
    since: Lsn
    columns: tuple[Attribute, ...]
    kept: tuple[tuple[int, str], ...] = ()
    shapes: tuple[tuple[Shape, Numbers], ...] = ()
    left_out: tuple[LeftOut, ...] | None = None
    rule: Rule | None = None
    asked: bool = False
    masks: Mapping[int, MaskRule] = field(default_factory=dict)
    fingerprint: str = ""
    renames: Mapping[int, str] = field(default_factory=dict)
    naming: str | None = None
    where: KeptRows | None = None
    filtering: str | None = None

    @property
    def goes_by_numbers(self) -> bool:
        """Whether the publisher's names do not tell which of the Delta table's columns is which, or columns must not be mistaken."""
        return self.left_out is not None or bool(self.renames) or self.where is not None

    @property
    def was_chosen(self) -> bool:
        """Whether options have decided something of the table."""
        return self.left_out is not None or self.naming is not None or self.filtering is not None

    @property
    def row_filter(self) -> RowFilter | None:
        """The condition of the table's rows, by its columns' present names."""
        if self.where is None:
            return None
        from pubsub.row_filters import RowFilter

        of_type = {column.number: column.base for column in self.columns}
        columns = tuple(
            (name, self.names.get(number, ""), of_type.get(number, 0)) for name, number in self.where.numbers.items()
        )
        return RowFilter(self.where.text, columns, self.where.partitioned)

    @property
    def masked(self) -> Masks:
        """The masks of the Delta table's columns, also of those that the publisher has dropped: rows from before may still come."""
        found = {name: self.masks[number] for number, name in self.names.items() if number in self.masks}
        return Masks(found, self.fingerprint)

    @property
    def by_number(self) -> Mapping[int, Attribute]:
        return {column.number: column for column in self.columns}

    @property
    def names(self) -> Mapping[int, str]:
        """The Delta table's columns that are or were the publisher's, by number."""
        return dict(self.kept) | {column.number: column.name for column in self.columns}

    @property
    def published(self) -> Mapping[str, int]:
        """The numbers of the publisher's columns, by its names, also of those that the table does not get."""
        out = {one.name: one.number for one in self.left_out or ()}
        return out | {one.published: one.number for one in self.columns}

    @property
    def numbers(self) -> frozenset[int]:
        """The numbers of all of these columns."""
        return frozenset(self.published.values())

    def here(self, column: ColumnDefinition) -> str:
        """Return the name that the Delta table has for a column of the publisher."""
        return self.renames.get(column.attnum, column.name)

    def known(self, shape: Shape) -> Numbers | None:
        """Return the numbers of the columns of the newest known message of this shape, or None."""
        return next((numbers for known, numbers in reversed(self.shapes) if known == shape), None)

    def with_shapes(self, found: Sequence[tuple[Shape, Numbers]]) -> Attributes:
        """Return a copy that knows these shapes, too."""
        shapes = [one for one in self.shapes if one not in found] + list(found)
        return replace(self, shapes=tuple(shapes[-_SHAPES_KEPT:]))

    def as_json(self) -> str:
        return json.dumps(
            {
                "app_id": self.app_id,
                "count": self.count,
                "storage": self.storage,
                "since": str(self.since),
                "columns": [column.as_list() for column in self.columns],
                "kept": [list(one) for one in self.kept],
                **self._choice(),
                **self._naming(),
                **self._filtering(),
                "shapes": [[[list(c) for c in shape], list(numbers)] for shape, numbers in self.shapes],
            },
            ensure_ascii=False,
            separators=(",", ":"),
        )

    def _choice(self) -> Mapping[str, Any]:
        if self.left_out is None:
            return {}
        left_out = [[one.number, one.name, one.named] for one in self.left_out]
        masks = [[number, str(rule)] for number, rule in sorted(self.masks.items())]
        masked = {"masks": masks, "fingerprint": self.fingerprint} if masks else {}
        return {"left_out": left_out, "rule": self.rule, "asked": self.asked, **masked}

    def _naming(self) -> Mapping[str, Any]:
        if self.naming is None:
            return {}
        renames = [[number, name] for number, name in sorted(self.renames.items())]
        return {"renames": renames, "naming": self.naming, "asked": self.asked}

    def _filtering(self) -> Mapping[str, Any]:
        if self.filtering is None:
            return {}
        where = {} if self.where is None else {"where": self.where.as_json()}
        return {**where, "filtering": self.filtering, "asked": self.asked}


def read(text: str | None) -> Attributes | None:
    """Parse what `as_json` wrote."""
    if not text:
        return None
    found: dict[str, Any] = json.loads(text)
    return Attributes(
        found["app_id"],
        found["count"],
        found["storage"],
        Lsn.parse(found["since"]),
        tuple(Attribute(*column) for column in found["columns"]),
        tuple((number, name) for number, name in found["kept"]),
        tuple((tuple((n, o, m) for n, o, m in shape), tuple(numbers)) for shape, numbers in found["shapes"]),
        None if (left_out := found.get("left_out")) is None else tuple(LeftOut(*one) for one in left_out),
        None if (rule := found.get("rule")) is None else (rule[0], rule[1], rule[2] if len(rule) > 2 else ""),
        bool(found.get("asked")),
        {number: MaskRule.parse(text) for number, text in found.get("masks", ())},
        found.get("fingerprint", ""),
        dict(found.get("renames", ())),
        found.get("naming"),
        None if (where := found.get("where")) is None else KeptRows(**where),
        found.get("filtering"),
    )


def stored(definition: str | None) -> Attributes | None:
    """Parse the attributes in a table's definition (table_definition.definition_json); None if it has none."""
    return read(json.loads(definition or "{}").get("attributes"))


def property_of(table: TargetTable) -> str:
    """Return the name of the Delta table's property that holds the table's attributes."""
    return PROPERTY if table.source is None else f"{PROPERTY}.{table.source.value}"


def _said(properties: Mapping[str, str], app_id: str) -> Attributes | None:
    """Return the attributes of the copy `app_id` in a Delta table's properties."""
    quoted = json.dumps(app_id, ensure_ascii=False)
    for name, text in properties.items():
        if (name == PROPERTY or name.startswith(f"{PROPERTY}.")) and quoted in text:
            said = read(text)
            if said is not None and said.app_id == app_id:
                return said
    return None


def newer(properties: Mapping[str, str], app_id: str, than: Attributes | None) -> Attributes | None:
    """Return the attributes in a Delta table's properties, if they are of the copy `app_id` and newer than the catalog's, `than`."""
    said = _said(properties, app_id)
    if said is None or (than is not None and than.since >= said.since):
        return None
    return said


def current(definition: str | None, properties: Mapping[str, str], app_id: str) -> Attributes | None:
    """Return the attributes of the copy `app_id` that hold now: the Delta table's, or those of the catalog's definition."""
    held = stored(definition)
    return newer(properties, app_id, held) or held


def named_otherwise(known: Attributes | None, columns: Sequence[ColumnDefinition]) -> list[str]:
    """Return the names of those of the publisher's columns that the Delta table does not have under the names that they should have.

    A column of that name in the Delta table is another one, which an ALTER TABLE has dropped or renamed.  `known` None: the
    columns' numbers are not known, and names are all that there is.
    """
    if known is None:
        return []
    here = {one.number: one.name for one in known.columns}
    return [column.name for column in columns if here.get(column.attnum) != known.here(column)]


def of_definition(
    definition: TableDefinition,
    names: Sequence[str],
    app_id: str,
    since: Lsn,
    left_out: Sequence[LeftOut] | None = None,
    rule: Rule | None = None,
    listed: Collection[str] | None = None,
    masks: Mapping[int, MaskRule] = MappingProxyType({}),
    fingerprint: str = "",
    renames: Mapping[int, str] = MappingProxyType({}),
    naming: str | None = None,
    where: KeptRows | None = None,
    filtering: str | None = None,
) -> Attributes:
    """Return the attributes of a table that is being copied or is first seen.

    `names` are its replicated columns, as the publisher names them; `left_out`, `rule`, `masks`, `fingerprint`, `renames`, `naming`,
    `where` and `filtering` as in Attributes.  `listed`: all published columns (None: `names`).
    """
    published = [column for column in definition.columns if column.name in (names if listed is None else listed)]
    shape = (shape_of_columns(published), tuple(column.attnum for column in published))
    columns = [column for column in definition.columns if column.name in names]
    named = [renames.get(c.attnum, c.name) for c in columns]
    found = tuple(
        Attribute(
            c.attnum,
            name,
            c.type_oid,
            c.type_modifier,
            _missing(c, c.attnum in masks),
            c.xmin,
            under(c),
            sent_as(c.name, name),
        )
        for c, name in zip(columns, named, strict=True)
    )
    return Attributes(
        app_id,
        definition.attributes,
        definition.storage,
        since,
        found,
        shapes=(shape,),
        left_out=None if left_out is None else tuple(left_out),
        rule=rule,
        masks=dict(masks),
        fingerprint=fingerprint,
        renames=dict(renames),
        naming=naming,
        where=where,
        filtering=filtering,
    )


def sent_as(published: str, name: str) -> str:
    """Return Attribute.sent_as of a column."""
    return published if published != name else ""


def under(column: ColumnDefinition) -> int:
    """Return Attribute.under of a column in the catalog."""
    return int(column.base_type_oid) if column.base_type_oid != column.type_oid else 0


def _missing(column: ColumnDefinition, is_masked: bool) -> str | None:
    return "" if is_masked and column.missing is not None else column.missing


def shape_of(message: Relation) -> Shape:
    """Return the part of a message that describes its columns."""
    return tuple((column.name, int(column.type_oid), column.type_modifier) for column in message.columns)


def shape_of_columns(columns: Sequence[ColumnDefinition]) -> Shape:
    """Return the shape that a message about these columns would have now."""
    return tuple((column.name, int(column.type_oid), column.type_modifier) for column in columns)


def identify(
    shape: Shape,
    known: Attributes,
    live: Sequence[ColumnDefinition],
    count: int,
    xid: int,
    *,
    older: bool = False,
) -> Numbers | None:
    """Return the number of each column of a message sent in transaction `xid`; None if that cannot be determined.

    `known`: the columns before the message (`older`: after it, for a table that joined without a copy).  `live`: the published
    columns in the catalog now, when `count` numbers have been assigned.  A column that is gone from the catalog has the number
    in `known`, or None.
    """
    places = {name: place for place, (name, _, _) in enumerate(shape)}
    before = known.published
    alive = {column.attnum for column in live}
    # What the table gets of each column's values: the mask, or True for all of them.
    gets: Mapping[int, MaskRule | bool] = {one.number: known.masks.get(one.number, True) for one in known.columns}
    found: dict[int, int] = {}  # place in the message ► number
    open_columns: list[ColumnDefinition] = []
    for column in live:
        place = places.get(column.name)
        if place is not None and not _younger(column.xmin, xid) and _same_type(shape[place], column):
            found[place] = column.attnum
        else:
            open_columns.append(column)
    if known.left_out is not None and shape != shape_of_columns(live):
        # The catalog is newer than the message.  A transaction with a lower xid may still have taken the table later, and given the
        # name of a column that is left out or masked to another one.
        for place, number in found.items():
            named = before.get(shape[place][0], number)
            if named != number and gets.get(named, False) != gets.get(number, False):
                return None
    # Known columns that have been dropped since: their places belong to no other column.
    gone = {
        place: before[name]
        for place, (name, _, _) in enumerate(shape)
        if place not in found and name in before and before[name] not in alive
    }
    if known.left_out is not None:
        # A column that is left out, or masked in another way, may have had the name of one that the table gets: both are gone now.
        left_out = {one.number for one in known.left_out} | set(range(known.count + 1, count + 1))
        for at, number in gone.items():
            masked_otherwise = {one for one, rule in gets.items() if rule != gets.get(number, False)}
            lost = (left_out | masked_otherwise - set(gone.values())) - alive
            if number in gets and any(_in_order(at, other, found) for other in lost):
                return None
    dead = _fill_gaps(len(shape), found, gone, known, alive, count)
    for column in open_columns:
        if column.attnum in found.values():
            continue
        fit = [
            place
            for place in range(len(shape))
            if not (place in found or place in gone or place in dead) and _in_order(place, column.attnum, found | gone)
        ]
        there = column.attnum in known.numbers and not older
        if len(fit) == 1 and there:
            found[fit[0]] = column.attnum
        elif fit or there:
            return None
    numbers = found | gone
    ordered = [numbers[place] for place in sorted(numbers)]
    if ordered != sorted(set(ordered)):
        return None
    return tuple(numbers.get(place) for place in range(len(shape)))


def _fill_gaps(
    width: int, found: dict[int, int], gone: dict[int, int], known: Attributes, alive: Collection[int], count: int
) -> set[int]:
    """Number the places between columns whose numbers are known, where as many numbers as places are left, in order.

    Of the numbers assigned after those known, all still in the catalog, the places take the first ones: a column is never there
    without the ones before it.  Adds to `found`; returns the places whose columns have been dropped by now.
    """
    old = {*known.numbers, *(number for number in alive if number <= known.count)}
    possible = sorted(old | set(range(known.count + 1, count + 1)))
    dead: set[int] = set()
    fixed = sorted((found | gone).items())
    for (before, low), (after, high) in pairwise([(-1, 0), *fixed, (width, sys.maxsize)]):
        places = range(before + 1, after)
        numbers = [number for number in possible if low < number < high]
        later = numbers[len(places) :]
        if len(numbers) < len(places) or (
            later and not (all(number in alive for number in numbers) and later[0] > known.count)
        ):
            continue
        for place, number in zip(places, numbers, strict=False):
            if number in alive:
                found[place] = number
            else:
                dead.add(place)
    return dead


def _same_type(sent: tuple[str, int, int], column: ColumnDefinition) -> bool:
    return sent[1:] == (column.type_oid, column.type_modifier)


def _younger(xmin: int, xid: int) -> bool:
    """Return whether transaction `xmin` began after `xid` (transam.c: TransactionIdFollows)."""
    return xmin > 2 and 0 < (xmin - xid) & 0xFFFFFFFF < 1 << 31


def _in_order(place: int, number: int, found: Mapping[int, int]) -> bool:
    return all((number > other) == (place > at) for at, other in found.items())
