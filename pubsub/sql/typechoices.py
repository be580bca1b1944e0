"""The subscription option `types`: what becomes of a column or a type, where the contract leaves a choice.

    types = 'timestamptz text, public.events.price text'

Elements are divided by commas; each names a type, as pg_type or SQL does, or a column as schema.table.column, and then says
`text` (PostgreSQL's text, which holds every value) or `natural` (Delta's own type, which refuses some).  A column's own choice
goes before its type's.  It counts when a Delta table is made: later changes do not touch tables that are there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal, cast

from pubsub.errors import PubsubError
from pubsub.sql.lexer import Kind, Token, tokenize

TypeChoice = Literal["natural", "text"]
_CHOICES: Final = ("natural", "text")
Column = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class TypeChoices:
    """`columns` by schema, table and column; `types` by the type's name, in lower case and with single blanks."""

    columns: Mapping[Column, TypeChoice] = field(default_factory=dict)
    types: Mapping[str, TypeChoice] = field(default_factory=dict)

    @classmethod
    def parse(cls, text: str) -> TypeChoices:
        """Read the option's text; '' is no choice at all.  Raises PubsubError (22023), SqlSyntaxError."""
        columns: dict[Column, TypeChoice] = {}
        types: dict[str, TypeChoice] = {}
        for element in _elements(text):
            if len(element) < 2 or element[-1].value not in _CHOICES or element[-1].kind is not Kind.WORD:
                raise PubsubError(
                    f'invalid value for parameter "types": "{text}"',
                    sqlstate="22023",
                    detail="Each element is a type or schema.table.column, and then text or natural.",
                )
            choice = cast(TypeChoice, element[-1].value)
            name = element[:-1]
            if any(_is(token, ".") for token in name):
                columns[_column(name, text)] = choice
            else:
                types[text[name[0].start : name[-1].end].lower() if _is_quoted(name) else _words(name)] = choice
        return cls(columns, types)

    def of(self, schema: str, table: str, column: str, type_names: tuple[str, ...]) -> TypeChoice:
        """The choice for a column whose type has these names."""
        own = self.columns.get((schema, table, column))
        if own is not None:
            return own
        return next((self.types[name] for name in type_names if name in self.types), "natural")


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


def _words(name: list[Token]) -> str:
    return " ".join(token.value for token in name)


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
