"""COPY … TO STDOUT: a table or a query as text, CSV or binary (copyto.c)."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import tzinfo
from typing import TYPE_CHECKING, Any, Final

from pubsub.errors import FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.server import values
from pubsub.server.queries import Batches, Query
from pubsub.server.values import Field
from pubsub.sql.lexer import Kind, Token

if TYPE_CHECKING:
    from pubsub.server.session import Session
    from pubsub.server.statements import Statement

_ESCAPES: Final = {
    ord("\\"): "\\\\", ord("\b"): "\\b", ord("\f"): "\\f", ord("\n"): "\\n", ord("\r"): "\\r", ord("\t"): "\\t", ord("\v"): "\\v",
}  # fmt: skip
_SIGNATURE: Final = b"PGCOPY\n\xff\r\n\0" + bytes(8)
_TRAILER: Final = struct.pack(">h", -1)
_TRUE: Final = frozenset({"true", "on", "1", ""})


async def copy(session: Session, statement: Statement) -> tuple[tuple[Field, ...], AsyncIterator[bytes], bool]:
    """Begin a COPY TO STDOUT; return the columns, the lines, and whether they are binary.  Raises PubsubError."""
    query, options = _parsed(statement)
    form = options.get("format", "text")
    if form not in ("text", "csv", "binary"):
        raise PubsubError(f'COPY format "{form}" not recognized', sqlstate="22023")
    fields, rows = await Query(query).run(await session.environment(), ())
    if form == "binary":
        return fields, _binary(fields, rows), True
    zone = session.parameters.zone
    lines = _csv(fields, rows, options, zone) if form == "csv" else _text(rows, options, zone)
    return fields, lines, False


def _parsed(statement: Statement) -> tuple[str, Mapping[str, str]]:
    """Return the query whose rows are copied, and the options.  Raises SqlSyntaxError and FeatureNotSupported."""
    tokens = [token for token in statement.tokens[1:] if token.value != ";"]
    text = statement.text
    if not tokens:
        raise SqlSyntaxError("syntax error at end of input", statement=text, position=len(text))
    at = 0
    if tokens[0].value == "(":
        at = _closing(tokens, 0)
        query = text[tokens[0].end : tokens[at].start]
        at += 1
    else:
        while at < len(tokens) and (tokens[at].value == "." or at == 0 or tokens[at - 1].value == "."):
            at += 1
        name = text[tokens[0].start : tokens[at - 1].end]
        columns = "*"
        if at < len(tokens) and tokens[at].value == "(":
            end = _closing(tokens, at)
            columns = text[tokens[at].end : tokens[end].start]
            at = end + 1
        query = f"SELECT {columns} FROM {name}"
    words = [token.value for token in tokens[at : at + 2]]
    if words[:1] != ["to"]:
        raise FeatureNotSupported("COPY FROM is not supported: tables are written by their subscriptions")
    if words[1:] != ["stdout"]:
        raise FeatureNotSupported(
            "COPY to a file or a program is not supported", hint="COPY … TO STDOUT, or psql's \\copy."
        )
    rest = tokens[at + 2 :]
    if rest and rest[0].value == "with":
        rest = rest[1:]
    return query, _options(rest)


def _options(tokens: Sequence[Token]) -> dict[str, str]:
    """Read (FORMAT csv, HEADER, …), or the words of releases before 9.0."""
    if not tokens:
        return {}
    if tokens[0].value != "(":
        words = [token.value for token in tokens]
        found = {"format": next((word for word in words if word in ("csv", "binary")), "text")}
        if "header" in words:
            found["header"] = "true"
        for name in ("delimiter", "null", "quote"):
            if name in words:
                found[name] = tokens[
                    min(words.index(name) + 1 + (words[words.index(name) + 1 :][:1] == ["as"]), len(tokens) - 1)
                ].value
        return found
    options: dict[str, str] = {}
    part: list[Token] = []
    for token in [*tokens[1:-1], Token(Kind.OPERATOR, ",", 0, 0)]:
        if token.value == "," and token.kind is Kind.OPERATOR:
            if part:
                options[part[0].value] = part[1].value if len(part) > 1 else ""
            part = []
        else:
            part.append(token)
    for name in options:
        if name not in ("format", "header", "delimiter", "null", "quote", "escape", "encoding", "force_quote"):
            raise PubsubError(f'option "{name}" not recognized', sqlstate="42601")
    return options


def _closing(tokens: Sequence[Token], start: int) -> int:
    depth = 0
    for place in range(start, len(tokens)):
        if tokens[place].kind is Kind.OPERATOR:
            depth += (tokens[place].value == "(") - (tokens[place].value == ")")
            if depth == 0:
                return place
    return len(tokens) - 1


async def _text(rows: Batches, options: Mapping[str, str], zone: tzinfo | None) -> AsyncIterator[bytes]:
    delimiter, null = options.get("delimiter", "\t"), options.get("null", "\\N")
    escapes = {**_ESCAPES, ord(delimiter): _ESCAPES.get(ord(delimiter), f"\\{delimiter}")}

    def shown(value: Any) -> str:
        data = values.as_text(value, zone)
        return null if data is None else data.decode("utf-8", "surrogateescape").translate(escapes)

    async for batch in rows:
        for row in batch:
            yield (delimiter.join(map(shown, row)) + "\n").encode("utf-8", "surrogateescape")


async def _csv(
    fields: Sequence[Field], rows: Batches, options: Mapping[str, str], zone: tzinfo | None
) -> AsyncIterator[bytes]:
    delimiter, null, quote = options.get("delimiter", ","), options.get("null", ""), options.get("quote", '"')

    def quoted(text: str) -> str:
        if text == null or any(one in text for one in (delimiter, quote, "\n", "\r")):
            return quote + text.replace(quote, quote * 2) + quote
        return text

    def shown(value: Any) -> str:
        data = values.as_text(value, zone)
        return null if data is None else quoted(data.decode("utf-8", "surrogateescape"))

    if options.get("header", "false").lower() in _TRUE:
        yield (delimiter.join(quoted(one.name) for one in fields) + "\n").encode()
    async for batch in rows:
        for row in batch:
            yield (delimiter.join(map(shown, row)) + "\n").encode("utf-8", "surrogateescape")


async def _binary(fields: Sequence[Field], rows: Batches) -> AsyncIterator[bytes]:
    before = _SIGNATURE  # comes with the first row, as PostgreSQL sends it
    head = struct.pack(">h", len(fields))
    async for batch in rows:
        for row in batch:
            parts = [head]
            for value, one in zip(row, fields, strict=True):
                data = values.as_binary(value, one.oid)
                parts += [b"\xff" * 4] if data is None else [struct.pack(">i", len(data)), data]
            yield before + b"".join(parts)
            before = b""
    yield before + _TRAILER
