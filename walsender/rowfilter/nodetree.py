"""Expression trees as the catalog keeps them (pg_node_tree): text to nodes (read.c: nodeRead, readfuncs.c).

    {OPEXPR :opno 521 :args ({VAR :varattno 1 …} {CONST :constvalue 4 [ 10 0 0 0 0 0 0 0 ] …}) …}

A node is a `Node` with its fields; a list is a list; a datum is bytes; `<>` is None; everything else a string.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from pubsub.errors import DataCorrupted

_TOKEN: Final = re.compile(r"\s*((?:\\.|[^\\\s(){}\[\]])+|[(){}\[\]])", re.DOTALL)
_MAX_DEPTH: Final = 500

# A field's value.
Field: TypeAlias = "Node | list[Field] | bytes | str | None"


@dataclass(frozen=True, slots=True)
class Node:
    """A node: its `kind`, such as OPEXPR, and its fields by name."""

    kind: str
    fields: dict[str, Any]

    def number(self, name: str) -> int:
        """Return an integer or oid.  Raises DataCorrupted."""
        try:
            return int(self.fields[name])
        except (KeyError, TypeError, ValueError) as error:
            raise DataCorrupted(f"an expression's {self.kind} has no {name}") from error

    def items(self, name: str) -> list[Any]:
        value = self.fields.get(name)
        return value if isinstance(value, list) else []


def read_nodes(text: str) -> Field:
    """Parse an expression.  Raises DataCorrupted."""
    tokens = [match[1] for match in _TOKEN.finditer(text)]
    try:
        value, position = _value(tokens, 0, 0)
    except (IndexError, ValueError) as error:
        raise DataCorrupted("an expression in the catalog ends within") from error
    if position != len(tokens):
        raise DataCorrupted("an expression in the catalog has more behind its end")
    return value


def _value(tokens: list[str], at: int, depth: int) -> tuple[Field, int]:
    if depth > _MAX_DEPTH:
        raise DataCorrupted("an expression in the catalog is nested too deeply")
    token = tokens[at]
    if token == "{":
        kind = tokens[at + 1]
        fields: dict[str, Field] = {}
        at += 2
        while tokens[at] != "}":
            name = tokens[at]
            if not name.startswith(":"):
                raise DataCorrupted(f"an expression's {kind} has {name!r} in place of a field")
            value, at = _value(tokens, at + 1, depth + 1)
            if tokens[at] == "[":
                # A datum: the value read before was its length.
                end = tokens.index("]", at)
                value = bytes(int(byte) & 0xFF for byte in tokens[at + 1 : end])
                at = end + 1
            fields[name[1:]] = value
        return Node(kind, fields), at + 1
    if token == "(":
        items: list[Field] = []
        at += 1
        if tokens[at] in {"i", "o", "b", "x"}:
            at += 1
        while tokens[at] != ")":
            value, at = _value(tokens, at, depth + 1)
            items.append(value)
        return items, at + 1
    if token == "<>":
        return None, at + 1
    return token, at + 1
