"""Names: quoted for SQL, qualified, and as parts of a path in the warehouse.

In a path, every byte of a name's UTF-8 except ASCII letters, digits and the underscore becomes `-` and two hexadecimal
digits, the hyphen itself included: "my table" is my-20table.  So no name can leave its folder, two names never share a
path, no character is special to a file system, an object store or a URL, and the name can be decoded again.
"""

from __future__ import annotations

import re
from collections.abc import Set
from dataclasses import dataclass
from typing import Final

from pubsub.errors import PubsubError
from pubsub.sql.keywords import NOT_COLID, QUOTED
from pubsub.sql.lexer import Kind, near, tokenize

_PLAIN: Final = re.compile(r"[a-z_][a-z0-9_]*")
_SAFE: Final = frozenset(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_")
_ENCODED: Final = re.compile(r"-([0-9a-f]{2})")


@dataclass(frozen=True, slots=True)
class QualifiedName:
    """A table's name; `schema` is None if the statement gave none."""

    schema: str | None
    name: str

    def __str__(self) -> str:
        return quote_qualified(self.schema, self.name)


class _Any(frozenset[str]):
    def __contains__(self, name: object) -> bool:
        return True


ANY_NAME: Final[Set[str]] = _Any()
"""As the `keywords` of quote_identifier, makes it quote every name, like quote_all_identifiers."""


def quote_identifier(name: str, keywords: Set[str] = QUOTED) -> str:
    """Quote a name for SQL, only if it needs quotes (ruleutils.c: quote_identifier).

    `keywords` are the words that need quotes, which differ by server version; the default is version 18's.
    """
    if _PLAIN.fullmatch(name) and name not in keywords:
        return name
    return '"' + name.replace('"', '""') + '"'


def quote_for_spark(name: str) -> str:
    """Quote an identifier for Spark's SQL."""
    return "`" + name.replace("`", "``") + "`"


def quote_qualified(schema: str | None, name: str) -> str:
    """Return schema.name, quoted where needed (ruleutils.c: quote_qualified_identifier)."""
    return quote_identifier(name) if schema is None else f"{quote_identifier(schema)}.{quote_identifier(name)}"


def quote_literal(value: str) -> str:
    """Return the value as a string constant, valid with any standard_conforming_strings (quote.c: quote_literal)."""
    quoted = "'" + value.replace("\\", "\\\\").replace("'", "''") + "'"
    return f" E{quoted}" if "\\" in value else quoted


def parse_qualified_name(text: str) -> QualifiedName:
    """Parse `name` or `schema.name` by SQL's rules: folded to lower case unless quoted.

    Raises SqlSyntaxError, and PubsubError for more parts.
    """
    tokens = tokenize(text)
    names: list[str] = []
    for place, token in enumerate(tokens):
        expects_name = place % 2 == 0
        is_name = token.kind is Kind.NAME or (token.kind is Kind.WORD and (names or token.value not in NOT_COLID))
        is_dot = token.kind is Kind.OPERATOR and token.value == "."
        if not (is_name if expects_name else is_dot):
            raise near("syntax error", text, token.start, token.end)
        if expects_name:
            names.append(token.value)
    if len(tokens) % 2 == 0:
        raise near("syntax error", text, len(text), len(text))
    return qualified(names)


def qualified(names: list[str]) -> QualifiedName:
    """Build a name from its parts (namespace.c: DeconstructQualifiedName).  Raises PubsubError for more than two."""
    if len(names) > 2:
        dotted = ".".join(names)
        if len(names) == 3:
            raise PubsubError(f"cross-database references are not implemented: {dotted}", sqlstate="0A000")
        raise PubsubError(f"improper qualified name (too many dotted names): {dotted}", sqlstate="42601")
    return QualifiedName(names[0] if len(names) == 2 else None, names[-1])


def encode_path(name: str) -> str:
    """Encode a name as one part of a path.  Raises PubsubError for an empty one, which would be the folder itself."""
    if not name:
        raise PubsubError("a name in the warehouse cannot be empty", sqlstate="42602")
    return "".join(chr(byte) if byte in _SAFE else f"-{byte:02x}" for byte in name.encode())


def decode_path(part: str) -> str:
    """Decode a part of a path made by `encode_path`.  Raises PubsubError for any other text."""
    try:
        name = _ENCODED.sub(lambda match: chr(int(match[1], 16)), part).encode("latin-1").decode()
    except UnicodeError:
        name = ""
    if not name or encode_path(name) != part:
        raise PubsubError(f'"{part}" is not a name in a warehouse', sqlstate="42602")
    return name


def table_path(warehouse: str, target: str, schema: str, name: str) -> str:
    """Return a Delta table's path: <warehouse>/<target>/<schema>/<table>."""
    return "/".join([warehouse.rstrip("/"), encode_path(target), encode_path(schema), encode_path(name)])
