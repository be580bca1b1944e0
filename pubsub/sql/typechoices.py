"""The subscription option `types`: the choice of a column's or type's Delta type, where the type contract offers one.

    types = 'timestamptz text, public.events.price text'

Elements are separated by commas.  Each names a type, as in pg_type or SQL, or a column as schema.table.column.  Then
follows `text` (PostgreSQL's text, which holds every value), `natural` (Delta's own type, which refuses some values) or,
for jsonb, `variant`.  User-defined types are schema.type; an array type is its element's type and []; `arrays` and
`composites` stand for all of them.  A column's choice has precedence over its type's, and that over the one for all
arrays or composites.  The option takes effect when a Delta table is created; changing it does not affect existing
tables.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from pubsub.errors import PubsubError
from pubsub.sql.identifiers import quote_qualified
from pubsub.sql.lexer import Kind, Token, tokenize

TypeChoice = Literal["natural", "text", "variant"]
_CHOICES: Final = ("natural", "text", "variant")
Column = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class TypeChoices:
    """`columns` by schema, table and column; `types` by the type's name as in format_type or pg_type."""

    columns: Mapping[Column, TypeChoice] = field(default_factory=dict)
    types: Mapping[str, TypeChoice] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> TypeChoices:
        """Parse the option's text; '' makes no choices.  Raises PubsubError (22023) and SqlSyntaxError."""
        columns: dict[Column, TypeChoice] = {}
        types: dict[str, TypeChoice] = {}
        for element in _elements(text):
            if len(element) < 2 or element[-1].value not in _CHOICES or element[-1].kind is not Kind.WORD:
                raise PubsubError(
                    f'invalid value for parameter "types": "{text}"',
                    sqlstate="22023",
                    detail="Each element is a type or schema.table.column, and then text, natural or variant.",
                )
            choice = cast(TypeChoice, element[-1].value)
            name = element[:-1]
            if sum(_is(token, ".") for token in name) > 1:
                columns[_column(name, text)] = choice
            else:
                types[_type(name, text)] = choice
        return cls(columns, types)

    def of_column(self, schema: str, table: str, column: str) -> TypeChoice | None:
        """Return the column's own choice, if any."""
        return self.columns.get((schema, table, column))

    def of_type(self, names: tuple[str, ...]) -> TypeChoice | None:
        """Return the choice for a type: that of the first of its names that has one, if any."""
        return next((self.types[name] for name in names if name in self.types), None)


def _elements(text: str) -> list[list[Token]]:
    tokens = tokenize(text)
    if not tokens:
        return []
    elements: list[list[Token]] = [[]]
    for token in tokens:
        if _is(token, ","):
            elements.append([])
        else:
            elements[-1].append(token)
    return elements


def _is(token: Token, sign: str) -> bool:
    return token.kind is Kind.OPERATOR and token.value == sign


def _is_quoted(name: list[Token]) -> bool:
    return len(name) == 1 and name[0].kind is Kind.NAME


def _type(name: list[Token], text: str) -> str:
    """Return the normal form of a type's name: words, "char", or schema.type, and [] for an array."""
    is_array = len(name) > 2 and _is(name[-2], "[") and _is(name[-1], "]")
    parts = name[:-2] if is_array else name
    qualified = len(parts) == 3 and _is(parts[1], ".")
    if not all(token.kind in (Kind.WORD, Kind.NAME) for token in (parts[0::2] if qualified else parts)):
        raise PubsubError(
            f'invalid value for parameter "types": "{text}"',
            sqlstate="22023",
            detail="A type is named as in SQL: words without a modifier, or schema.type, and [] for an array.",
        )
    if qualified:
        found = quote_qualified(parts[0].value, parts[2].value)
    elif _is_quoted(parts):
        found = text[parts[0].start : parts[0].end].lower()
    else:
        found = " ".join(token.value for token in parts)
    return found + "[]" * is_array


def _column(name: list[Token], text: str) -> Column:
    parts = [token.value for token in name[0::2]]
    named = all(token.kind in (Kind.WORD, Kind.NAME) for token in name[0::2])
    if len(name) != 5 or not named or not all(_is(token, ".") for token in name[1::2]):
        raise PubsubError(
            f'invalid value for parameter "types": "{text}"',
            sqlstate="22023",
            detail="A column is named as schema.table.column.",
        )
    return parts[0], parts[1], parts[2]
