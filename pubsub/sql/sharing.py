"""Delta tables that have rows of several sources: those of other subscriptions (source), or of other tables (gather).

    gather = 'tenant_*.* (tenants)'                        tenant_7.orders is in tenants.orders, as the source tenant_7
    gather = 'public.orders_* (public.orders)'             public.orders_2025 is in public.orders, as the source orders_2025
    gather = 'shop_*.sales_* (everywhere.sales)'           shop_1.sales_eu is there as shop_1.sales_eu

Elements are separated by commas; each has schema.table, in which * stands for any characters, and in parentheses the schema
of the Delta tables, or schema.table.  The first element that stands for a table counts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from pubsub.sql.layout_rules import divided, invalid, is_sign
from pubsub.sql.lexer import Kind, Token
from pubsub.sql.source import DEFAULT_COLUMN, Source, checked_source

_OPTION: Final = "gather"
_FORM: Final = "Each element is schema.table, where * stands for any characters, and then a schema, or schema.table, in parentheses."


@dataclass(frozen=True, slots=True)
class _Rule:
    """Tables whose schema and name are like these are in the Delta tables of `schema`, those of the name `table` if that is given."""

    schemas: re.Pattern[str]
    tables: re.Pattern[str]
    schema: str
    table: str | None


@dataclass(frozen=True, slots=True)
class Sharing:
    """Which Delta tables a subscription's tables are in, and whose rows they have there, in `column`.

    `value`: the option source, for all tables; None: those of `rules` are sources.
    """

    column: str = DEFAULT_COLUMN
    value: str | None = None
    rules: tuple[_Rule, ...] = ()

    def __bool__(self) -> bool:
        """Return whether Delta tables are shared at all."""
        return self.value is not None or bool(self.rules)

    def place_of(self, schema: str, table: str) -> tuple[str, str]:
        """Return schema and name of the Delta table that a publisher's table is in."""
        rule = self._rule_of(schema, table)
        return (schema, table) if rule is None else (rule.schema, rule.table or table)

    def source_of(self, schema: str, table: str) -> Source | None:
        """Return whose rows a publisher's table has; None: its Delta table is its own.

        Raises PubsubError (22023) for names that cannot be a source's.
        """
        if self.value is not None:
            return Source(self.column, self.value)
        rule = self._rule_of(schema, table)
        if rule is None:
            return None
        # What distinguishes it from the others there.
        same_name, same_schema = table == (rule.table or table), schema == rule.schema
        return Source(
            self.column, checked_source(schema if same_name else table if same_schema else f"{schema}.{table}")
        )

    def _rule_of(self, schema: str, table: str) -> _Rule | None:
        return next((one for one in self.rules if one.schemas.fullmatch(schema) and one.tables.fullmatch(table)), None)


def gathered(text: str) -> tuple[_Rule, ...]:
    """Parse gather; '' says nothing.  Raises PubsubError (22023) and SqlSyntaxError."""
    found: list[_Rule] = []
    for named, inside in divided(_OPTION, text, _FORM):
        dot = next((place for place, token in enumerate(named) if is_sign(token, ".")), 0)
        schema, table = _target(inside, text)
        found.append(_Rule(_like(named[:dot], text), _like(named[dot + 1 :], text), schema, table))
    return tuple(found)


def _like(tokens: Sequence[Token], text: str) -> re.Pattern[str]:
    """Return what a name with * in it stands for."""
    parts = [""]
    for before, token in zip([None, *tokens], tokens, strict=False):
        apart = before is not None and before.end != token.start
        if apart or not (is_sign(token, "*") or token.kind in (Kind.WORD, Kind.NAME, Kind.NUMBER)):
            raise invalid(_OPTION, text, _FORM)
        if is_sign(token, "*"):
            parts.append("")
        else:
            parts[-1] += re.escape(text[token.start : token.end] if token.kind is Kind.NUMBER else token.value)
    if parts == [""]:
        raise invalid(_OPTION, text, _FORM)
    first, *rest = parts
    # What comes between two * is found where it is first: nothing is tried again, however many there are.
    return re.compile(
        first + "".join(f"(?>.*?{one})" for one in rest[:-1]) + "".join(f".*{one}" for one in rest[-1:]), re.DOTALL
    )


def _target(tokens: Sequence[Token], text: str) -> tuple[str, str | None]:
    names = tokens[::2]
    named = all(token.kind in (Kind.WORD, Kind.NAME) and token.value for token in names)
    dotted = all(is_sign(token, ".") for token in tokens[1::2])
    if not (named and dotted and len(tokens) in (1, 3)):
        raise invalid(_OPTION, text, _FORM)
    return names[0].value, names[1].value if len(names) > 1 else None
