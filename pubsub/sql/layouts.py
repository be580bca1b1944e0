"""What the Delta tables of a subscription have, how they lie, and their names in a catalog: mode, deletes, truncate, metadata,
columns, exclude, mask, rename, where, partition_by, cluster_by, table_properties and register.

    columns = 'public.users (id, name)'
    exclude = 'public.users (password), hr.* (salary)'
    mask = 'public.users (email hash, phone null, card truncate 4), * (name redact)'
    rename = 'public.users (email mail, "Odd" odd), hr.* (pay salary)'
    where = 'public.orders (status <> ''draft'' AND amount > 10), shop.* (region = ''eu'')'
    mode = 'history'
    mode = 'public.payments (history), public.customers (scd2), sales.* (mirror)'
    deletes = 'public.users (soft)'
    truncate = 'public.users (soft), audit.* (ignore)'
    metadata = 'public.users (lsn, commit_time changed_at)'
    partition_by = 'public.orders (region), sales.* (country, kind)'
    cluster_by = 'public.customers (zip)'
    table_properties = '* (team = shop), public.orders (delta.enableChangeDataFeed = true)'
    register = 'lake'
    register = '* (lake.shop), public.orders (lake.shop.all_orders)'

Elements are separated by commas.  Each names a table, all tables of a schema (schema.*) or all tables (*), and has columns,
columns with other names, a condition of its rows, a mode, how rows are deleted, what a TRUNCATE does, properties, or kinds of
metadata, each perhaps with a column's name, or a name in a catalog, in parentheses; a mode, a way to delete or to truncate, or a
name in a catalog stands without a table for all tables.  The element that says most about a table counts alone.  Only what is
excluded is joined, and so are masks, other names and properties, of which those of the element that says most go before.  A name is
written as in SQL; values with other than letters and digits are in double quotes.  The options take effect when a Delta table is
created, mode, deletes, truncate, metadata, columns, exclude, mask, rename and where whenever a table is copied; changing them does
not affect existing tables.  Register alone holds at once.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, TypeVar

from pubsub.errors import FeatureNotSupported, UndefinedObject
from pubsub.sql.identifiers import quote_for_spark
from pubsub.sql.layout_rules import (
    METADATA,
    Deletes,
    Mode,
    Pattern,
    Truncate,
    columns_of,
    conditions_of,
    deletes_of,
    masks_of,
    matches,
    metadata_of,
    modes_of,
    name_beside,
    properties_of,
    registers_of,
    renames_of,
    truncate_of,
)
from pubsub.sql.mask_rules import MaskRule
from pubsub.sql.row_conditions import RowCondition
from pubsub.sql.sharing import Sharing

V = TypeVar("V")

_PLAIN: Final = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")


class TableName(NamedTuple):
    """A table's name in one of Spark's catalogs."""

    catalog: str
    schema: str
    table: str

    def __str__(self) -> str:
        """Return it as Spark's SQL has it, with quotes where they are needed."""
        return ".".join(part if _PLAIN.fullmatch(part) else quote_for_spark(part) for part in self)


@dataclass(frozen=True, slots=True)
class Layout:
    """How one Delta table lies, and its mode."""

    partition_by: tuple[str, ...] = ()
    cluster_by: tuple[str, ...] = ()
    properties: Mapping[str, str] = field(default_factory=dict)
    mode: Mode = "mirror"
    deletes: Deletes = "hard"
    truncate: Truncate = "follow"
    columns: tuple[str, ...] = ()
    """The columns that it has; (): those that are published."""
    exclude: frozenset[str] = frozenset()
    """The columns that it does not have."""
    mask: Mapping[str, MaskRule] = field(default_factory=dict)
    """The columns that are masked."""
    rename: Mapping[str, str] = field(default_factory=dict)
    """The names that columns have in the Delta table, by the publisher's."""
    where: RowCondition | None = None
    """The condition of the rows that it has; None: it has all."""

    @property
    def is_closed(self) -> bool:
        """Whether columns that are added later stay out until somebody lets them in."""
        return bool(self.columns or self.exclude or self.mask)

    def leaves_out(self, name: str) -> bool:
        """Return whether the table does not get a published column of this name."""
        return name in self.exclude or (bool(self.columns) and name not in self.columns)

    def __bool__(self) -> bool:
        """Return whether the table is to lie in any other way than by itself."""
        return bool(self.partition_by or self.cluster_by or self.properties)


@dataclass(frozen=True, slots=True)
class Layouts:
    """What the options say, by pattern."""

    partition_by: Mapping[Pattern, tuple[str, ...]] = field(default_factory=dict)
    cluster_by: Mapping[Pattern, tuple[str, ...]] = field(default_factory=dict)
    properties: Mapping[Pattern, Mapping[str, str]] = field(default_factory=dict)
    modes: Mapping[Pattern, tuple[Mode, ...]] = field(default_factory=dict)
    """Of several, the mirror comes first."""
    deletes: Mapping[Pattern, Deletes] = field(default_factory=dict)
    truncate: Mapping[Pattern, Truncate] = field(default_factory=dict)
    metadata: Mapping[Pattern, Mapping[str, str]] = field(default_factory=dict)
    columns: Mapping[Pattern, tuple[str, ...]] = field(default_factory=dict)
    exclude: Mapping[Pattern, tuple[str, ...]] = field(default_factory=dict)
    mask: Mapping[Pattern, Mapping[str, MaskRule]] = field(default_factory=dict)
    rename: Mapping[Pattern, Mapping[str, str]] = field(default_factory=dict)
    where: Mapping[Pattern, RowCondition] = field(default_factory=dict)
    register: Mapping[Pattern, tuple[str, ...]] = field(default_factory=dict)
    rule: tuple[str, str, str] = ("", "", "")
    """The texts of columns, exclude and mask."""
    naming: str = ""
    """The text of rename."""
    filtering: str = ""
    """The text of where."""
    sharing: Sharing = field(default_factory=Sharing)
    """Whose rows the tables get, beside those of others."""

    @classmethod
    def parse(
        cls,
        partition_by: str,
        cluster_by: str,
        table_properties: str,
        mode: str = "",
        columns: str = "",
        exclude: str = "",
        mask: str = "",
        deletes: str = "",
        metadata: str = "",
        truncate: str = "",
        register: str = "",
        rename: str = "",
        sharing: Sharing | None = None,
        where: str = "",
    ) -> Layouts:
        """Parse the options' texts; '' says nothing.  Raises PubsubError (22023), UndefinedObject for a property, SqlSyntaxError."""
        return cls(
            columns_of("partition_by", partition_by),
            columns_of("cluster_by", cluster_by),
            properties_of(table_properties),
            modes_of(mode),
            deletes_of(deletes),
            truncate_of(truncate),
            metadata_of(metadata),
            columns_of("columns", columns),
            columns_of("exclude", exclude),
            masks_of(mask),
            renames_of(rename),
            conditions_of(where),
            registers_of(register),
            (columns, exclude, mask),
            rename,
            where,
            sharing or Sharing(),
        )

    @property
    def choices(self) -> Layouts:
        """What columns, exclude, mask, rename and where say alone."""
        return Layouts(
            columns=self.columns,
            exclude=self.exclude,
            mask=self.mask,
            rename=self.rename,
            where=self.where,
            rule=self.rule,
            naming=self.naming,
            filtering=self.filtering,
        )

    def of(self, schema: str, table: str) -> Layout:
        """Return a table's layout.

        Raises PubsubError (0A000) if it would be partitioned and clustered, and as `deletes_of` and `truncate_of`.
        """
        partition_by = _of_table(self.partition_by, schema, table, ())
        cluster_by = _of_table(self.cluster_by, schema, table, ())
        if partition_by and cluster_by:
            raise FeatureNotSupported(
                f'table "{schema}.{table}" cannot be partitioned and clustered',
                detail="Delta clusters tables without partitions.",
                hint="Name it in one of partition_by and cluster_by.",
            )
        return replace(
            self.choice_of(schema, table),
            partition_by=partition_by,
            cluster_by=cluster_by,
            properties=_joined(self.properties, schema, table),
            mode=self.mode_of(schema, table),
            deletes=self.deletes_of(schema, table),
            truncate=self.truncate_of(schema, table),
        )

    def choice_of(self, schema: str, table: str) -> Layout:
        """Return what columns, exclude, mask, rename and where say of a table."""
        exclude = frozenset(name for one in _patterns(schema, table) for name in self.exclude.get(one, ()))
        return Layout(
            columns=_of_table(self.columns, schema, table, ()),
            exclude=exclude,
            mask=_joined(self.mask, schema, table),
            rename=_joined(self.rename, schema, table),
            where=_of_table(self.where, schema, table, None),
        )

    def mode_of(self, schema: str, table: str) -> Mode:
        """Return a table's mode: of several, that of the mirror, and the others stand beside it."""
        return self._modes_of(schema, table)[0]

    def relations_of(self, schema: str, table: str) -> tuple[Mode | None, ...]:
        """Return the Delta tables of a published table: None, which is its own, and the modes in which others stand beside that."""
        return (None, *self._modes_of(schema, table)[1:])

    def _modes_of(self, schema: str, table: str) -> tuple[Mode, ...]:
        return _of_table(self.modes, schema, table, ("mirror",))

    def beside(self, mode: Mode | None) -> Layouts:
        """Return the layouts of what stands beside mirrors in that mode; None: of the tables themselves.

        What is said of rows that a mirror would lose is said of the mirror: the others lose none.
        """
        if mode is None:
            return self
        metadata = {} if mode == "history" else self.metadata
        return replace(self, modes={(None, None): (mode,)}, deletes={}, truncate={}, metadata=metadata)

    def deletes_of(self, schema: str, table: str) -> Deletes:
        """Return how a table's rows are deleted.  Raises PubsubError (0A000) if its rows are to be marked, and it is no mirror."""
        found, mode = _of_table(self.deletes, schema, table, "hard"), self.mode_of(schema, table)
        if found == "soft" and mode != "mirror":
            raise FeatureNotSupported(
                f'table "{schema}.{table}" cannot have mode = {mode} and deletes = soft',
                detail="A history has a row of its own for each deleted one."
                if mode == "history"
                else "Its deleted rows stay in any case, and have the time of their end.",
                hint="Name it in one of mode and deletes.",
            )
        return found

    def truncate_of(self, schema: str, table: str) -> Truncate:
        """Return what a TRUNCATE does to a table.

        Raises PubsubError (0A000) if it does not empty it, and the table is no mirror; if it marks its rows, and a DELETE does not.
        """
        found, mode = _of_table(self.truncate, schema, table, "follow"), self.mode_of(schema, table)
        if found != "follow" and mode != "mirror":
            raise FeatureNotSupported(
                f'table "{schema}.{table}" cannot have mode = {mode} and truncate = {found}',
                detail="A history keeps all rows, and has one that says that the table was emptied."
                if mode == "history"
                else "All rows stay, and a TRUNCATE ends those that the publisher has.",
                hint="Name it in one of mode and truncate.",
            )
        if found == "soft" and self.deletes_of(schema, table) != "soft":
            raise FeatureNotSupported(
                f'table "{schema}.{table}" cannot have truncate = soft without deletes = soft',
                detail="Its deleted rows leave it, and have no column for the time of their deletion.",
                hint="Name it in deletes, too, or leave it out of truncate.",
            )
        return found

    def metadata_of(self, schema: str, table: str) -> tuple[tuple[str, str], ...]:
        """Return a table's metadata columns, kind and name.  Raises PubsubError (0A000) if it has a history, which has them all."""
        found = _of_table(self.metadata, schema, table, {})
        if found and self.mode_of(schema, table) == "history":
            raise FeatureNotSupported(
                f'table "{schema}.{table}" cannot have mode = history and metadata',
                detail="A history has the metadata of each change.",
                hint="Name it in one of mode and metadata.",
            )
        return tuple((kind, found[kind]) for kind in METADATA if kind in found)

    def refuse_unfit_for_sources(self, schema: str, table: str) -> None:
        """Raise PubsubError (0A000) for a table of several sources that would be something else than a mirror, or lie in another way.

        For the option source they are refused when they are given (pubsub.sql.options).
        """
        layout = self.of(schema, table)
        given = {
            f"mode = {' + '.join(self._modes_of(schema, table))}": self._modes_of(schema, table) != ("mirror",),
            "partition_by": bool(layout.partition_by),
            "cluster_by": bool(layout.cluster_by),
            "register": self.registered_as(schema, table) is not None,
        }
        for option in (name for name, wanted in given.items() if wanted):
            raise FeatureNotSupported(
                f'table "{schema}.{table}" cannot be gathered and have {option}',
                detail="Its Delta table has the rows of others, too.",
                hint=f"Leave it out of one of the options gather and {option.partition(' ')[0]}.",
            )

    def registered_as(self, schema: str, table: str, beside: Mode | None = None) -> TableName | None:
        """Return the name in a catalog of a table, or of what stands beside it; None if it is to have none."""
        given = _of_table(self.register, schema, table, ())
        if not given:
            return None
        catalog, within, name = (*given, *(schema, table)[len(given) - 1 :])
        return TableName(catalog, within, name_beside(name, beside))

    def catalogs(self) -> set[str]:
        """Return the catalogs that `register` names."""
        return {names[0] for names in self.register.values()}

    def require_columns(self, schema: str, table: str, published: Collection[str], *, rename: bool = False) -> None:
        """Raise UndefinedObject if columns, exclude or mask name columns of this very table that are not published; with `rename`,
        if that option does."""
        for option, rules in self._naming_columns():
            for name in rules.get((schema, table), ()):
                if name not in published and rename == (option == "rename"):
                    raise no_column(option, schema, table, name)

    def require_columns_somewhere(self, published: Mapping[tuple[str, str], Collection[str]]) -> None:
        """Raise UndefinedObject if one of these options names a column that none of the tables has; `published`: all columns."""
        for option, rules in self._naming_columns():
            for pattern, names in rules.items():
                held = {name for at, some in published.items() if matches(pattern, *at) for name in some}
                for name in names:
                    if name not in held:
                        raise no_column(option, pattern[0] or "*", pattern[1] or "*", name)

    def _naming_columns(self) -> tuple[tuple[str, Mapping[Pattern, Collection[str]]], ...]:
        return ("columns", self.columns), ("exclude", self.exclude), ("mask", self.mask), ("rename", self.rename)

    def tables(self) -> Iterator[tuple[str, str, str]]:
        """Yield option, schema and name of each table that is named by itself."""
        named: Mapping[str, Iterable[Pattern]] = {
            "partition_by": self.partition_by,
            "cluster_by": self.cluster_by,
            "table_properties": self.properties,
            "mode": self.modes,
            "deletes": self.deletes,
            "truncate": self.truncate,
            "metadata": self.metadata,
            "columns": self.columns,
            "exclude": self.exclude,
            "mask": self.mask,
            "rename": self.rename,
            "where": self.where,
            "register": self.register,
        }
        for option, rules in named.items():
            for schema, table in rules:
                if schema is not None and table is not None:
                    yield option, schema, table


def _patterns(schema: str, table: str) -> tuple[Pattern, ...]:
    """Return the patterns that stand for a table, the one that says most first."""
    return (schema, table), (schema, None), (None, None)


def _of_table(rules: Mapping[Pattern, V], schema: str, table: str, default: V) -> V:
    return next((rules[one] for one in _patterns(schema, table) if one in rules), default)


def _joined(rules: Mapping[Pattern, Mapping[str, V]], schema: str, table: str) -> dict[str, V]:
    """Return what all elements say of a table; of those that say the same thing, the one that says most goes before."""
    found: dict[str, V] = {}
    for one in reversed(_patterns(schema, table)):
        found |= rules.get(one, {})
    return found


def no_column(option: str, schema: str, table: str, column: str) -> UndefinedObject:
    """Return the error for an option that names a column that is not published."""
    return UndefinedObject(
        f'column "{column}" of table "{schema}.{table}" in subscription option {option} is not published',
        sqlstate="42703",
    )


def not_published(option: str, names: Iterable[str]) -> UndefinedObject:
    """Return the error for an option that names tables that are not published."""
    return UndefinedObject(
        f"subscription option {option} names tables that are not published: {', '.join(names)}", sqlstate="42P01"
    )
