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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal, NamedTuple, TypeVar

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.nearest import nearest
from pubsub.sql.identifiers import quote_for_spark
from pubsub.sql.lexer import Kind, Token, tokenize
from pubsub.sql.mask_rules import MaskRule, rule_of
from pubsub.sql.row_conditions import RowCondition
from pubsub.sql.source import Source

V = TypeVar("V")

#: A table's schema and name; None for all of them.
Pattern = tuple[str | None, str | None]

#: The properties of Delta's own that may be given.  The others follow from what the table holds, from [housekeeping], or stand
#: against what a replicated table needs.
PROPERTIES: Final = (
    "delta.checkpointPolicy",
    "delta.columnMapping.mode",
    "delta.enableChangeDataFeed",
    "delta.enableInCommitTimestamps",
    "delta.enableRowTracking",
    "delta.targetFileSize",
    "delta.tuneFileSizesForRewrites",
)


#: Those by which Delta writes for readers of Iceberg, in lower case (UniForm).
_ICEBERG: Final = ("delta.universalformat.", "delta.enableicebergcompat")

#: mirror: the rows that the publisher's table has now.  history: every change a row (pubsub.delta.change_rows).  scd2: every version
#: of a row, and when it held (pubsub.delta.versions).
Mode = Literal["mirror", "history", "scd2"]
_MODES: Final[Mapping[str, Mode]] = {"mirror": "mirror", "history": "history", "scd2": "scd2"}
#: hard: a deleted row goes.  soft: it stays, and has the time of its deletion (pubsub.delta.soft_deletes).
Deletes = Literal["hard", "soft"]
#: The kinds of metadata, in the order of their columns (pubsub.delta.metadata_columns), with the names that these have by themselves.
_METADATA: Final = {kind: f"_pubsub_{kind}" for kind in ("lsn", "commit_time", "xid", "op")}
_DELETES: Final[Mapping[str, Deletes]] = {"hard": "hard", "soft": "soft"}
#: What a TRUNCATE does.  follow: the table is emptied.  ignore: its rows stay as they are, until their keys come again.  soft: they
#: are marked as deleted.
Truncate = Literal["follow", "ignore", "soft"]
_TRUNCATE: Final[Mapping[str, Truncate]] = {"follow": "follow", "ignore": "ignore", "soft": "soft"}


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
    modes: Mapping[Pattern, Mode] = field(default_factory=dict)
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
    source: Source | None = None
    """Whose rows the tables get, beside those of other subscriptions."""

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
        source: Source | None = None,
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
            source,
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
        """Return a table's mode."""
        return _of_table(self.modes, schema, table, "mirror")

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
        return tuple((kind, found[kind]) for kind in _METADATA if kind in found)

    def registered_as(self, schema: str, table: str) -> TableName | None:
        """Return a table's name in a catalog; None if it is to have none."""
        given = _of_table(self.register, schema, table, ())
        return TableName(*given, *(schema, table)[len(given) - 1 :]) if given else None

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


def columns_of(option: str, text: str) -> dict[Pattern, tuple[str, ...]]:
    """Parse an option that names columns.  Raises PubsubError (22023) and SqlSyntaxError."""
    found: dict[Pattern, tuple[str, ...]] = {}
    for pattern, inside in _elements(option, text):
        names = []
        for item in _split(inside):
            if len(item) != 1 or item[0].kind not in (Kind.WORD, Kind.NAME):
                raise _invalid(option, text, "In the parentheses are names of columns, separated by commas.")
            names.append(item[0].value)
        if len(set(names)) < len(names):
            raise _invalid(option, text, "A column is named twice.")
        _add(found, pattern, tuple(names), option, text)
    return found


def masks_of(text: str) -> dict[Pattern, Mapping[str, MaskRule]]:
    """Parse mask.  Raises PubsubError (22023) and SqlSyntaxError."""
    found: dict[Pattern, Mapping[str, MaskRule]] = {}
    for pattern, inside in _elements("mask", text):
        rules: dict[str, MaskRule] = {}
        for item in _split(inside):
            rule = rule_of(item[1:])
            if rule is None or item[0].kind not in (Kind.WORD, Kind.NAME):
                raise _invalid(
                    "mask",
                    text,
                    "In the parentheses are names of columns, each with null, redact, hash or truncate and a number, "
                    "separated by commas.",
                )
            if item[0].value in rules:
                raise _invalid("mask", text, "A column is named twice.")
            rules[item[0].value] = rule
        _add(found, pattern, rules, "mask", text)
    return found


def renames_of(text: str) -> dict[Pattern, Mapping[str, str]]:
    """Parse rename.  Raises PubsubError (22023) and SqlSyntaxError."""
    found: dict[Pattern, Mapping[str, str]] = {}
    for pattern, inside in _elements("rename", text):
        names: dict[str, str] = {}
        for item in _split(inside):
            named = len(item) == 2 and all(token.kind in (Kind.WORD, Kind.NAME) and token.value for token in item)
            if not named:
                raise _invalid(
                    "rename",
                    text,
                    "In the parentheses are names of columns, each with the one that it has in the Delta table, separated by "
                    "commas.",
                )
            if item[0].value in names:
                raise _invalid("rename", text, "A column is named twice.")
            names[item[0].value] = item[1].value
        if len(set(names.values())) < len(names):
            raise _invalid("rename", text, "Two columns have one name.")
        _add(found, pattern, names, "rename", text)
    return found


def conditions_of(text: str) -> dict[Pattern, RowCondition]:
    """Parse where.  Raises PubsubError (22023), FeatureNotSupported and SqlSyntaxError."""
    found: dict[Pattern, RowCondition] = {}
    for pattern, inside in _elements("where", text):
        _add(found, pattern, RowCondition.parse(text[inside[0].start : inside[-1].end]), "where", text)
    return found


def properties_of(text: str) -> dict[Pattern, Mapping[str, str]]:
    """Parse table_properties.  Raises PubsubError (22023), UndefinedObject and SqlSyntaxError."""
    found: dict[Pattern, Mapping[str, str]] = {}
    option = "table_properties"
    for pattern, inside in _elements(option, text):
        properties: dict[str, str] = {}
        for item in _split(inside):
            place = next((number for number, token in enumerate(item) if _is(token, "=")), 0)
            name, value = item[:place], item[place + 1 :]
            if not name or not value or any(token.kind is Kind.STRING for token in name):
                raise _invalid(option, text, "In the parentheses are properties as name = value, separated by commas.")
            key = _source(name, text)
            _require_known(key)
            if key in properties:
                raise _invalid(option, text, "A property is named twice.")
            properties[key] = _source(value, text)
        _add(found, pattern, properties, option, text)
    return found


def modes_of(text: str) -> dict[Pattern, Mode]:
    """Parse mode.  Raises PubsubError (22023) and SqlSyntaxError."""
    return _words_of("mode", text, _MODES, f"The modes are {' and '.join(_MODES)}.")


def deletes_of(text: str) -> dict[Pattern, Deletes]:
    """Parse deletes.  Raises PubsubError (22023) and SqlSyntaxError."""
    return _words_of("deletes", text, _DELETES, f"Rows are deleted {' or '.join(_DELETES)}.")


def truncate_of(text: str) -> dict[Pattern, Truncate]:
    """Parse truncate.  Raises PubsubError (22023) and SqlSyntaxError."""
    return _words_of("truncate", text, _TRUNCATE, f"A TRUNCATE is one of {', '.join(_TRUNCATE)}.")


def metadata_of(text: str) -> dict[Pattern, Mapping[str, str]]:
    """Parse metadata.  Raises PubsubError (22023) and SqlSyntaxError."""
    found: dict[Pattern, Mapping[str, str]] = {}
    for pattern, inside in _elements("metadata", text):
        names: dict[str, str] = {}
        for item in _split(inside):
            known = len(item) in (1, 2) and all(token.kind in (Kind.WORD, Kind.NAME) for token in item)
            if not known or item[0].value not in _METADATA:
                raise _invalid(
                    "metadata",
                    text,
                    f"In the parentheses are some of {', '.join(_METADATA)}, each perhaps with a name, separated by commas.",
                )
            if item[0].value in names:
                raise _invalid("metadata", text, "A column is named twice.")
            names[item[0].value] = item[-1].value if len(item) == 2 else _METADATA[item[0].value]
        if len(set(names.values())) < len(names):
            raise _invalid("metadata", text, "Two columns have one name.")
        _add(found, pattern, names, "metadata", text)
    return found


def registers_of(text: str) -> dict[Pattern, tuple[str, ...]]:
    """Parse register: a catalog, perhaps a schema in it, and perhaps a table.  Raises PubsubError (22023) and SqlSyntaxError."""

    def name(tokens: list[Token], most: int) -> tuple[str, ...]:
        parts = tokens[::2]
        named = all(token.kind in (Kind.WORD, Kind.NAME) and token.value for token in parts)
        dotted = all(_is(token, ".") for token in tokens[1::2])
        if not (named and dotted and len(tokens) % 2 and len(parts) <= most):
            raise _invalid("register", text, _NAMES)
        return tuple(token.value for token in parts)

    tokens = tokenize(text)
    if not any(_is(token, "(") for token in tokens):
        return {(None, None): name(tokens, 2)} if tokens else {}
    found: dict[Pattern, tuple[str, ...]] = {}
    for pattern, inside in _elements("register", text):
        _add(found, pattern, name(inside, 2 if pattern[1] is None else 3), "register", text)
    return found


def _words_of(option: str, text: str, words: Mapping[str, V], detail: str) -> dict[Pattern, V]:
    """Parse an option that has one of some words for each table; a word alone is that of all."""

    def word(tokens: list[Token]) -> V:
        known = len(tokens) == 1 and tokens[0].kind in (Kind.WORD, Kind.NAME)
        found = words.get(tokens[0].value) if known else None
        if found is None:
            raise _invalid(option, text, detail)
        return found

    tokens = tokenize(text)
    if len(tokens) == 1:
        return {(None, None): word(tokens)}
    found: dict[Pattern, V] = {}
    for pattern, inside in _elements(option, text):
        _add(found, pattern, word(inside), option, text)
    return found


def patterns_of(option: str, text: str) -> tuple[Pattern, ...]:
    """Parse a list of patterns, as of copy_first.  Raises PubsubError (22023) and SqlSyntaxError."""
    tokens = tokenize(text)
    found = tuple(_pattern(item, option, text, _PATTERNS) for item in _split(tokens)) if tokens else ()
    if len(set(found)) < len(found):
        raise _invalid(option, text, "A table is named twice.")
    return found


def matches(pattern: Pattern, schema: str, table: str) -> bool:
    """Return whether the pattern stands for the table."""
    return pattern[0] in (None, schema) and pattern[1] in (None, table)


def _require_known(name: str) -> None:
    """Refuse a property that this program or Delta decides about, or does not know."""
    prefix = name.partition(".")[0].lower()
    if name.lower().startswith(_ICEBERG):
        raise FeatureNotSupported(
            f'table property "{name}" cannot be given: Delta tables are not written for readers of Iceberg',
            detail="Delta writes Iceberg's metadata by a jar of its own (delta-iceberg), which is not there for this version of "
            "Spark; and Iceberg's formats before the third know no deletion vectors, by which changes are applied.",
            hint="Most engines that read Iceberg read Delta tables, too.",
        )
    if prefix == "pubsub" or (prefix == "delta" and name not in PROPERTIES):
        best = nearest(name, PROPERTIES)
        raise UndefinedObject(
            f'table property "{name}" cannot be given',
            detail=f"Of Delta's own these can: {', '.join(PROPERTIES)}.",
            hint=f'Perhaps you meant "{best}".' if best is not None else None,
        )


def _elements(option: str, text: str) -> Iterator[tuple[Pattern, list[Token]]]:
    """Yield each element's pattern and the tokens in its parentheses."""
    tokens = tokenize(text)
    place = 0
    while place < len(tokens):
        opened = next((n for n in range(place, len(tokens)) if _is(tokens[n], "(")), None)
        closed = None if opened is None else _closing(tokens, opened)
        if opened is None or closed is None or closed == opened + 1:
            raise _invalid(option, text, _FORM)
        yield _pattern(tokens[place:opened], option, text), tokens[opened + 1 : closed]
        place = closed + 1
        if place < len(tokens):
            if not _is(tokens[place], ",") or place + 1 == len(tokens):
                raise _invalid(option, text, _FORM)
            place += 1


def _closing(tokens: Sequence[Token], opened: int) -> int | None:
    """Return the place of the parenthesis that closes the one at `opened`; None if there is none."""
    depth = 0
    for place in range(opened, len(tokens)):
        depth += _is(tokens[place], "(") - _is(tokens[place], ")")
        if not depth:
            return place
    return None


_FORM: Final = "Each element is schema.table, schema.* or *, and then a list in parentheses."
_NAMES: Final = (
    "It is a catalog, or catalog.schema, for all tables, or for some in parentheses; of one table also the whole name."
)
_PATTERNS: Final = "Each element is schema.table, schema.* or *."


def _pattern(tokens: list[Token], option: str, text: str, form: str = _FORM) -> Pattern:
    named = (Kind.WORD, Kind.NAME)
    match ["n" if token.kind in named else token.value for token in tokens if token.kind in (*named, Kind.OPERATOR)]:
        case ["*"] if len(tokens) == 1:
            return None, None
        case ["n", ".", "n"] if len(tokens) == 3:
            return tokens[0].value, tokens[2].value
        case ["n", ".", "*"] if len(tokens) == 3:
            return tokens[0].value, None
    raise _invalid(option, text, form)


def _split(tokens: list[Token]) -> Iterator[list[Token]]:
    item: list[Token] = []
    for token in tokens:
        if _is(token, ","):
            yield item
            item = []
        else:
            item.append(token)
    yield item


def _source(tokens: list[Token], text: str) -> str:
    """Return what was written, without the quotes around all of it."""
    if len(tokens) == 1 and tokens[0].kind in (Kind.NAME, Kind.STRING):
        return tokens[0].value
    return text[tokens[0].start : tokens[-1].end]


def _is(token: Token, sign: str) -> bool:
    return token.kind is Kind.OPERATOR and token.value == sign


def _add(found: dict[Pattern, V], pattern: Pattern, value: V, option: str, text: str) -> None:
    if pattern in found:
        raise _invalid(option, text, "A table is named twice.")
    found[pattern] = value


def _invalid(option: str, text: str, detail: str) -> PubsubError:
    return PubsubError(f'invalid value for parameter "{option}": "{text}"', sqlstate="22023", detail=detail)


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
