"""Parse the options that say something of tables (pubsub.sql.layouts): a rule for each pattern that an option's text names.

element, element, …     element: schema.table, schema.* or *, and what the option says of it in parentheses
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Literal, TypeVar

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.nearest import nearest
from pubsub.sql.lexer import Kind, Token, tokenize
from pubsub.sql.mask_rules import MaskRule, rule_of
from pubsub.sql.row_conditions import RowCondition

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
METADATA: Final = {kind: f"_pubsub_{kind}" for kind in ("lsn", "commit_time", "xid", "op")}
_DELETES: Final[Mapping[str, Deletes]] = {"hard": "hard", "soft": "soft"}
#: What a TRUNCATE does.  follow: the table is emptied.  ignore: its rows stay as they are, until their keys come again.  soft: they
#: are marked as deleted.
Truncate = Literal["follow", "ignore", "soft"]
_TRUNCATE: Final[Mapping[str, Truncate]] = {"follow": "follow", "ignore": "ignore", "soft": "soft"}


def columns_of(option: str, text: str) -> dict[Pattern, tuple[str, ...]]:
    """Parse an option that names columns.  Raises PubsubError (22023) and SqlSyntaxError."""
    found: dict[Pattern, tuple[str, ...]] = {}
    for pattern, inside in _elements(option, text):
        names = []
        for item in _split(inside):
            if len(item) != 1 or item[0].kind not in (Kind.WORD, Kind.NAME):
                raise invalid(option, text, "In the parentheses are names of columns, separated by commas.")
            names.append(item[0].value)
        if len(set(names)) < len(names):
            raise invalid(option, text, "A column is named twice.")
        _add(found, pattern, tuple(names), option, text)
    return found


def masks_of(text: str) -> dict[Pattern, Mapping[str, MaskRule]]:
    """Parse mask.  Raises PubsubError (22023) and SqlSyntaxError."""

    def read(item: list[Token]) -> MaskRule | None:
        return rule_of(item[1:]) if _are_names(item[:1]) else None

    detail = "In the parentheses are names of columns, each with null, redact, hash or truncate and a number, separated by commas."
    return _by_column("mask", text, read, detail)


def renames_of(text: str) -> dict[Pattern, Mapping[str, str]]:
    """Parse rename.  Raises PubsubError (22023) and SqlSyntaxError."""

    def read(item: list[Token]) -> str | None:
        return item[1].value if len(item) == 2 and _are_names(item) and all(token.value for token in item) else None

    detail = "In the parentheses are names of columns, each with the one that it has in the Delta table, separated by commas."
    return _by_column("rename", text, read, detail, different=True)


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
            place = next((number for number, token in enumerate(item) if is_sign(token, "=")), 0)
            name, value = item[:place], item[place + 1 :]
            if not name or not value or any(token.kind is Kind.STRING for token in name):
                raise invalid(option, text, "In the parentheses are properties as name = value, separated by commas.")
            key = _source(name, text)
            _require_known(key)
            if key in properties:
                raise invalid(option, text, "A property is named twice.")
            properties[key] = _source(value, text)
        _add(found, pattern, properties, option, text)
    return found


def name_beside(name: str, mode: Mode | None) -> str:
    """Return the name of the Delta table that stands in that mode beside the mirror `name`."""
    return name if mode is None else f"{name}_{mode}"


def modes_of(text: str) -> dict[Pattern, tuple[Mode, ...]]:
    """Parse mode: of several, the mirror comes first.  Raises PubsubError (22023) and SqlSyntaxError."""

    def modes(tokens: list[Token]) -> tuple[Mode, ...]:
        words = tokens[::2]
        named = all(token.kind in (Kind.WORD, Kind.NAME) and token.value in _MODES for token in words)
        if not (named and len(tokens) % 2 and all(is_sign(token, "+") for token in tokens[1::2])):
            raise invalid(
                "mode", text, f"The modes are {', '.join(_MODES)}, and the others beside a mirror: mirror + history."
            )
        given = {token.value for token in words}
        if len(given) < len(words) or (len(words) > 1 and "mirror" not in given):
            raise invalid("mode", text, "Several modes are a mirror and others, each named once.")
        return tuple(mode for mode in _MODES.values() if mode in given)

    tokens = tokenize(text)
    if tokens and not any(is_sign(token, "(") for token in tokens):
        return {(None, None): modes(tokens)}
    found: dict[Pattern, tuple[Mode, ...]] = {}
    for pattern, inside in _elements("mode", text):
        _add(found, pattern, modes(inside), "mode", text)
    return found


def deletes_of(text: str) -> dict[Pattern, Deletes]:
    """Parse deletes.  Raises PubsubError (22023) and SqlSyntaxError."""
    return _words_of("deletes", text, _DELETES, f"Rows are deleted {' or '.join(_DELETES)}.")


def truncate_of(text: str) -> dict[Pattern, Truncate]:
    """Parse truncate.  Raises PubsubError (22023) and SqlSyntaxError."""
    return _words_of("truncate", text, _TRUNCATE, f"A TRUNCATE is one of {', '.join(_TRUNCATE)}.")


def metadata_of(text: str) -> dict[Pattern, Mapping[str, str]]:
    """Parse metadata.  Raises PubsubError (22023) and SqlSyntaxError."""

    def read(item: list[Token]) -> str | None:
        if len(item) not in (1, 2) or not _are_names(item) or item[0].value not in METADATA:
            return None
        return item[-1].value if len(item) == 2 else METADATA[item[0].value]

    detail = f"In the parentheses are some of {', '.join(METADATA)}, each perhaps with a name, separated by commas."
    return _by_column("metadata", text, read, detail, different=True)


def _by_column(
    option: str, text: str, read: Callable[[list[Token]], V | None], detail: str, *, different: bool = False
) -> dict[Pattern, Mapping[str, V]]:
    """Parse an option whose items each begin with a column's name.

    `read` returns what an item says, None if that is not known; `different`: what columns get are names, each another one.
    """
    found: dict[Pattern, Mapping[str, V]] = {}
    for pattern, inside in _elements(option, text):
        said: dict[str, V] = {}
        for item in _split(inside):
            value = read(item)
            if value is None:
                raise invalid(option, text, detail)
            if item[0].value in said:
                raise invalid(option, text, "A column is named twice.")
            said[item[0].value] = value
        if different and len(set(said.values())) < len(said):
            raise invalid(option, text, "Two columns have one name.")
        _add(found, pattern, said, option, text)
    return found


def _are_names(tokens: Sequence[Token]) -> bool:
    return bool(tokens) and all(token.kind in (Kind.WORD, Kind.NAME) for token in tokens)


def registers_of(text: str) -> dict[Pattern, tuple[str, ...]]:
    """Parse register: a catalog, perhaps a schema in it, and perhaps a table.  Raises PubsubError (22023) and SqlSyntaxError."""

    def name(tokens: list[Token], most: int) -> tuple[str, ...]:
        parts = tokens[::2]
        named = all(token.kind in (Kind.WORD, Kind.NAME) and token.value for token in parts)
        dotted = all(is_sign(token, ".") for token in tokens[1::2])
        if not (named and dotted and len(tokens) % 2 and len(parts) <= most):
            raise invalid("register", text, _NAMES)
        return tuple(token.value for token in parts)

    tokens = tokenize(text)
    if not any(is_sign(token, "(") for token in tokens):
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
            raise invalid(option, text, detail)
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
        raise invalid(option, text, "A table is named twice.")
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


def divided(option: str, text: str, form: str) -> Iterator[tuple[list[Token], list[Token]]]:
    """Yield the tokens of each element before and in its parentheses; `form` says how an option looks that is refused."""
    tokens = tokenize(text)
    place = 0
    while place < len(tokens):
        opened = next((n for n in range(place, len(tokens)) if is_sign(tokens[n], "(")), None)
        closed = None if opened is None else _closing(tokens, opened)
        if opened is None or closed is None or closed == opened + 1:
            raise invalid(option, text, form)
        yield tokens[place:opened], tokens[opened + 1 : closed]
        place = closed + 1
        if place < len(tokens):
            if not is_sign(tokens[place], ",") or place + 1 == len(tokens):
                raise invalid(option, text, form)
            place += 1


def _elements(option: str, text: str) -> Iterator[tuple[Pattern, list[Token]]]:
    """Yield each element's pattern and the tokens in its parentheses."""
    for named, inside in divided(option, text, _FORM):
        yield _pattern(named, option, text), inside


def _closing(tokens: Sequence[Token], opened: int) -> int | None:
    """Return the place of the parenthesis that closes the one at `opened`; None if there is none."""
    depth = 0
    for place in range(opened, len(tokens)):
        depth += is_sign(tokens[place], "(") - is_sign(tokens[place], ")")
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
    raise invalid(option, text, form)


def _split(tokens: list[Token]) -> Iterator[list[Token]]:
    item: list[Token] = []
    for token in tokens:
        if is_sign(token, ","):
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


def is_sign(token: Token, sign: str) -> bool:
    """Return whether the token is this operator."""
    return token.kind is Kind.OPERATOR and token.value == sign


def _add(found: dict[Pattern, V], pattern: Pattern, value: V, option: str, text: str) -> None:
    if pattern in found:
        raise invalid(option, text, "A table is named twice.")
    found[pattern] = value


def invalid(option: str, text: str, detail: str) -> PubsubError:
    """Return the error for an option whose text says nothing that is known."""
    return PubsubError(f'invalid value for parameter "{option}": "{text}"', sqlstate="22023", detail=detail)
