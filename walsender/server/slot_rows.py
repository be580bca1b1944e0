"""Rows of pg_logical_slot_get_changes and its relatives that are sent as they are decoded, however many they are.

That is possible where a simple query does no more than SELECT columns FROM one call, in any order and under any names:
nothing of it is left for the upstream server to do.  Any other query gets the rows as a text (slot_edits.call_edit), which is
bounded.

Follows printtup.c.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from pubsub.backend import messages as m
from pubsub.errors import FeatureNotSupported, PubsubError
from pubsub.protocol.output.texts import bytea_escape_out, bytea_out
from walsender.historic.client_encoding import converter
from walsender.server import slot_changes

if TYPE_CHECKING:
    from walsender.server.session import Session
    from walsender.server.slot_changes import Moves, Row
    from walsender.server.slot_sql import Call

_SENT: Final = 256 << 10
"""Bytes of rows that are sent at a time."""
_LONG: Final = 1 << 20
"""Bytes of rows that are put into messages in a thread: a single one may be as long as a value can be."""
_DATA: Final = 2
"""The place of the column `data`."""
_VERSION_19: Final = 190000
_COUNT: Final = Struct(">H")
_LENGTH: Final = Struct(">I")
_ASKED: Final = "SELECT pg_catalog.getdatabaseencoding(), pg_catalog.current_setting('bytea_output')"

Text = Callable[[bytes], bytes]


def columns(text: str, call: Call) -> list[int] | None:
    """Return which of lsn, xid and data (0, 1, 2) each column of a query's result is; None where the server must do more."""
    from sqlglot import errors, exp, parse

    from pubsub.sql.dialect import PubsubDialect

    if call.name not in slot_changes.FUNCTIONS or not call.is_relation or call.ordinality:
        return None
    try:
        roots = [one for one in parse(text, read=PubsubDialect) if one is not None]
    except (errors.SqlglotError, PubsubError, RecursionError):
        return None
    if len(roots) != 1 or not isinstance(roots[0], exp.Select) or not _has_only(roots[0], "expressions", "from_"):
        return None
    select = roots[0]
    source = select.args["from_"].this if select.args.get("from_") is not None else None
    if not isinstance(source, exp.Table) or not _has_only(source, "this", "db", "alias"):
        return None
    if not isinstance(source.this, exp.Anonymous):
        return None
    names = [name for name, _ in call.signature.columns]
    alias = source.args.get("alias")
    for place, one in enumerate(alias.args.get("columns") or () if alias is not None else ()):
        if place >= len(names) or not isinstance(one, exp.Identifier):
            return None
        names[place] = _name(one)
    found: list[int] = []
    for one in select.expressions:
        column = one.this if isinstance(one, exp.Alias) else one
        if isinstance(column, exp.Star) or (isinstance(column, exp.Column) and isinstance(column.this, exp.Star)):
            found += range(len(names))
        elif isinstance(column, exp.Column) and names.count(_name(column.this)) == 1:
            found.append(names.index(_name(column.this)))
        else:
            return None
    return found


def _has_only(node: Any, *parts: str) -> bool:
    return not any(value for part, value in node.args.items() if part not in parts)


def _name(identifier: Any) -> str:
    name: str = identifier.this
    return name if identifier.args.get("quoted") else name.lower()


async def text_of(session: Session, call: Call) -> Text | None:
    """Return how `data` is written in the client's encoding; None where the server must do that."""
    ((encoding, style),) = await session.query(_ASKED)
    if not call.signature.in_hex:
        return bytea_escape_out if style == "escape" else bytea_out
    try:
        return converter(encoding or "", session.client_encoding) or bytes
    except FeatureNotSupported:
        return None


async def send(
    session: Session,
    call: Call,
    arguments: Sequence[Any],
    moves: Moves,
    description: bytes,
    places: list[int],
    text: Text,
) -> None:
    """Carry a call out and answer its query with the rows, each once it is decoded.  Raises PubsubError.

    `description`: the body of the answer's RowDescription; `places`: see `columns`; `text`: see `text_of`.  The slot moves
    when the client has taken all but what its connection holds.
    """
    wanted = slot_changes.wanted(session, call.name, arguments, moves)
    session.send(m.message(b"T", description))
    low = "{:08X}" if session.service.feed.server.version >= _VERSION_19 else "{:X}"
    held: list[Row] = []
    size = count = 0

    async def pass_on() -> None:
        if not wanted.binary and _DATA in places:
            await slot_changes.check_texts(session, [data for _, _, data in held])
        taken = held.copy()
        held.clear()
        if size < _LONG:
            session.send(_messages(taken, places, text, low))
        else:
            session.send(await asyncio.to_thread(_messages, taken, places, text, low))
        await session.writer.drain()

    async with aclosing(slot_changes.decoded(session, wanted)) as rows:
        async for row in rows:
            held.append(row)
            size += len(row[2])
            count += 1
            if size >= _SENT or len(held) >= _SENT >> 6:
                await pass_on()
                size = 0
    await pass_on()
    wanted.add_to(moves)
    await moves.carry_out()
    session.answer(m.complete(f"SELECT {count}"))


def _messages(rows: Sequence[Row], places: Sequence[int], text: Text, low: str) -> bytes:
    """Return rows as DataRow messages.  `low`: how the low half of an LSN is written."""
    head = _COUNT.pack(len(places))
    parts: list[bytes] = []
    for lsn, xid, data in rows:
        shown = [f"{lsn >> 32:X}/{low.format(lsn & 0xFFFFFFFF)}".encode(), b"%d" % xid]
        if _DATA in places:
            shown.append(text(data))
        values = [shown[place] for place in places]
        parts += (b"D", _LENGTH.pack(6 + sum(map(len, values)) + 4 * len(values)), head)
        for value in values:
            parts += (_LENGTH.pack(len(value)), value)
    return b"".join(parts)
