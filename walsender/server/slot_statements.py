"""SQL over slots: views show ours, and functions that make, move and drop slots do so here.

Follows slotfuncs.c and logicalfuncs.c.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from pubsub.errors import InsufficientPrivilege, NotInPrerequisiteState, ProtocolViolation, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import Statistics
from pubsub.sql.identifiers import quote_literal
from pubsub.sql.lexer import Kind, Token, tokenize
from walsender.repl_gram import cut_name
from walsender.server import commands, slot_changes, slot_sql
from walsender.server.slot_sql import Call, View
from walsender.slots.slot import Slot

if TYPE_CHECKING:
    from walsender.server.service import Service
    from walsender.server.session import Session

_MAY: Final = (
    "SELECT rolreplication OR rolsuper,"
    " (SELECT oid FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database())"
    " FROM pg_catalog.pg_roles WHERE rolname = current_user"
)
_MAY_RESET: Final = (
    "SELECT pg_catalog.has_function_privilege('pg_catalog.pg_stat_reset_replication_slot(text)', 'EXECUTE')"
)
_JSONB: Final = 3802
_NO_TYPES: Final = bytes(2)
_NO_VALUES: Final = bytes(4)
_OIDS: Final = {"name": 19, "pg_lsn": 3220, "int4": 23, "bool": 16, "text": 25, "text[]": 1009}


# Simple queries


async def carry_out(session: Session, text: str) -> bool:
    """Carry out a simple query if it is about slots; return whether it was.  Raises PubsubError.

    Its statements are looked at one after the other, so that each sees what those before it have done to slots.
    """
    if not slot_sql.mentions(text):
        return False
    pieces = [text[start:end] for start, end in slot_sql.statements(text)]
    try:
        found = [slot_sql.find(piece) for piece in pieces]
    except PubsubError:
        if len(pieces) == 1:
            await session.exchange.analyze(_encoded(text), _NO_TYPES, in_batch=False)
        raise
    if not any(views or calls for views, calls in found):
        return False
    await session.exchange.idle()
    with session.working():
        if len(pieces) == 1:
            # So that the server says what is wrong, of the client's own text; later ones may need what earlier ones make.
            await session.exchange.analyze(_encoded(text), _NO_TYPES, in_batch=False)
        parts: list[str] = []
        for piece, (views, calls) in zip(pieces, found, strict=True):
            edits = [
                slot_sql.view_edit(
                    view, slot_sql.literal(_rows(session, view.name)), session.service.feed.server.version
                )
                for view in views
            ]
            for call in calls:
                asked = await session.query(_with_views(session, call.arguments_query()))
                results = await _call(session, call, [json.loads(row[0] or "null") for row in asked])
                edits.append(slot_sql.call_edit(call, slot_sql.literal(results)))
            parts.append(slot_sql.edited(piece, edits))
    await session.forward(b"Q", _encoded("".join(parts)) + b"\0")
    return True


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


def _with_views(session: Session, text: str) -> str:
    views, _ = slot_sql.find(text)
    edits = [
        slot_sql.view_edit(view, slot_sql.literal(_rows(session, view.name)), session.service.feed.server.version)
        for view in views
    ]
    return slot_sql.edited(text, edits)


# Prepared statements


@dataclass(frozen=True, slots=True)
class _Statement:
    """A prepared statement about slots.  `types`: the oids of its parameters, 0 where they are not known."""

    views: Sequence[View]
    calls: Sequence[Call]
    types: Sequence[int]


class Prepared:
    """A session's prepared statements that are about slots."""

    def __init__(self) -> None:
        self.known: dict[bytes, _Statement] = {}


async def take(session: Session, kind: bytes, body: bytes) -> None:
    """Take a Parse, Bind, Describe or Close of the extended protocol.

    Raises PubsubError, and Failed if an earlier message of the batch has failed.
    """
    known = session.statements.known
    hidden = 0
    if kind == b"P":
        body = await _parse(session, known, body)
    elif kind == b"B":
        statement = known.get(body.split(b"\0", 2)[1]) if body.count(b"\0") >= 2 else None
        if statement is not None:
            with session.working():
                body = await _bind(session, statement, body)
    elif body[:1] == b"S":
        name = body[1:].partition(b"\0")[0]
        hidden = int(name in known)
        if kind == b"C":
            known.pop(name, None)
    await session.exchange.pass_on(kind, body, hidden=hidden)


async def _parse(session: Session, known: dict[bytes, _Statement], body: bytes) -> bytes:
    """Note a statement about slots, and return a Parse that takes what we know about slots as one more parameter."""
    name, _, rest = body.partition(b"\0")
    encoded, _, types = rest.partition(b"\0")
    known.pop(name, None)
    text = encoded.decode("utf-8", "surrogateescape")
    if not slot_sql.mentions(text):
        return body
    views, calls = slot_sql.find(text)
    if not views and not calls:
        return body
    await session.exchange.analyze(encoded, types, in_batch=True)
    if slot_sql.is_utility(text):
        # It can be given no parameter, so it has what is known now.
        edits = [_literal_edit(session, view) for view in views]
        for call in calls:
            query = _with_views(session, call.arguments_query())
            asked = await session.exchange.ask_bound(query, [], _NO_VALUES)
            edits.append(slot_sql.call_edit(call, slot_sql.literal(await _call_in_batch(session, call, asked))))
        return name + b"\0" + _encoded(slot_sql.edited(text, edits)) + b"\0" + types
    given = [int.from_bytes(types[at : at + 4], "big") for at in range(2, len(types) - 3, 4)]
    used = max(_parameters(text), default=0)
    oids = given + [0] * (used - len(given))
    for call in calls:
        # What is no more in the text gives its parameters no type.
        for argument, (_, kind) in zip(call.arguments, call.signature.parameters, strict=True):
            number = argument.strip()[1:] if argument is not None and argument.strip()[:1] == "$" else ""
            if number.isdecimal() and not oids[int(number) - 1]:
                oids[int(number) - 1] = _OIDS[kind]
    known[name] = _Statement(views, calls, oids)
    ours = f"${len(oids) + 1}"
    edits = [
        slot_sql.view_edit(view, f"({ours} -> 'v{number}')", session.service.feed.server.version)
        for number, view in enumerate(views)
    ]
    edits += [slot_sql.call_edit(call, f"({ours} -> 'c{number}')") for number, call in enumerate(calls)]
    described = b"".join(oid.to_bytes(4, "big") for oid in [*oids, _JSONB])
    new = slot_sql.edited(text, edits).encode("utf-8", "surrogateescape")
    return name + b"\0" + new + b"\0" + (len(oids) + 1).to_bytes(2, "big") + described


async def _bind(session: Session, statement: _Statement, body: bytes) -> bytes:
    """Carry a statement's calls out with the parameters of a Bind, and return a Bind that has their results, too."""
    portal, name, rest = body.split(b"\0", 2)
    formats, values, after = _read_bind(rest)
    count = len(statement.types)
    if len(values) != count:
        shown = name.decode("utf-8", "replace")
        raise ProtocolViolation(
            f'bind message supplies {len(values)} parameters, but prepared statement "{shown}" requires {count}'
        )
    if len(formats) not in {0, 1, count}:
        raise ProtocolViolation(f"bind message has {len(formats)} parameter formats but {count} parameters")
    formats = formats * count if len(formats) == 1 else formats or [0] * count
    known: dict[str, Any] = {f"v{at}": _rows(session, view.name) for at, view in enumerate(statement.views)}
    for number, call in enumerate(statement.calls):
        text = _with_views(session, call.arguments_query())
        used = sorted(set(_parameters(text)))
        text = _renumbered(text, {one: at for at, one in enumerate(used, 1)})
        bound = _write_bind([formats[one - 1] for one in used], [values[one - 1] for one in used])
        asked = await session.exchange.ask_bound(text, [statement.types[one - 1] for one in used], bound)
        known[f"c{number}"] = await _call_in_batch(session, call, asked)
    new = json.dumps(known).encode()
    return portal + b"\0" + name + b"\0" + _write_bind([*formats, 0], [*values, new]) + after


def _read_bind(data: bytes) -> tuple[list[int], list[bytes | None], bytes]:
    """Read a Bind's parameters: formats, values, and the rest.  Raises ProtocolViolation."""

    def number(at: int, size: int) -> int:
        if at + size > len(data):
            raise ProtocolViolation("insufficient data left in message")
        return int.from_bytes(data[at : at + size], "big", signed=size == 4)

    count = number(0, 2)
    formats = [number(2 + 2 * at, 2) for at in range(count)]
    at = 2 + 2 * count
    values: list[bytes | None] = []
    left = number(at, 2)
    at += 2
    for _ in range(left):
        length = number(at, 4)
        at += 4
        if length > len(data) - at:
            raise ProtocolViolation("insufficient data left in message")
        values.append(None if length < 0 else data[at : at + length])
        at += max(length, 0)
    return formats, values, data[at:]


def _write_bind(formats: Sequence[int], values: Sequence[bytes | None]) -> bytes:
    parts = [len(formats).to_bytes(2, "big"), *(one.to_bytes(2, "big") for one in formats)]
    parts.append(len(values).to_bytes(2, "big"))
    for value in values:
        parts += [b"\xff" * 4] if value is None else [len(value).to_bytes(4, "big"), value]
    return b"".join(parts)


def _is_parameter(token: Token) -> bool:
    return token.kind is Kind.OTHER and token.value[:1] == "$" and token.value[1:].isdecimal()


def _parameters(text: str) -> list[int]:
    return [int(token.value[1:]) for token in tokenize(text) if _is_parameter(token)]


def _renumbered(text: str, numbers: dict[int, int]) -> str:
    edits = [
        (token.start, token.end, f"${numbers[int(token.value[1:])]}")
        for token in tokenize(text)
        if _is_parameter(token)
    ]
    return slot_sql.edited(text, edits)


async def _call_in_batch(session: Session, call: Call, asked: Sequence[Sequence[str | None]]) -> list[dict[str, Any]]:
    session.in_batch = True
    try:
        return await _call(session, call, [json.loads(row[0] or "null") for row in asked])
    finally:
        session.in_batch = False


def _literal_edit(session: Session, view: View) -> tuple[int, int, str]:
    version = session.service.feed.server.version
    return slot_sql.view_edit(view, slot_sql.literal(_rows(session, view.name)), version)


# Functions


async def _call(session: Session, call: Call, asked: Sequence[Any]) -> list[dict[str, Any]]:
    """Do what a call asks for, once for each of the statement's rows; return the results (see slot_sql.call_edit).

    `asked`: the arguments of each row.
    """
    of_statistics = call.name.startswith("pg_stat_")
    if not of_statistics:
        ((may, database_oid),) = await session.query(_MAY)
        if may != "t":
            raise InsufficientPrivilege(
                "permission denied to use replication slots",
                detail="Only roles with the REPLICATION attribute may use replication slots.",
            )
        session.database_oid = int(database_oid or 0)
    results: list[dict[str, Any]] = []
    for arguments in asked:
        if call.name in slot_changes.FUNCTIONS:
            rows = await slot_changes.changes(session, call.name, arguments)
        elif of_statistics:
            rows = await _of_statistics(session, call.name, arguments[0])
        elif any(one is None for one in arguments[: call.signature.required]):
            continue  # a strict function: the result is NULL
        else:
            values = await _carry_out(session, call.name, arguments)
            rows = [dict(zip((name for name, _ in call.signature.columns), values, strict=False))]
        results += [{"k": call.row_key(arguments), **row} for row in rows]
    return results


async def _carry_out(session: Session, name: str, given: Sequence[Any]) -> tuple[str, str]:
    slot_name = cut_name(given[0])
    if name == "pg_drop_replication_slot":
        if session.service.slots.find(slot_name) is None:
            # A physical one is the upstream server's, which says so if there is none.
            await session.query(f"SELECT pg_catalog.pg_drop_replication_slot({quote_literal(slot_name)})")
        else:
            await commands.drop(session, slot_name, wait=False)
        return slot_name, ""
    if name == "pg_create_logical_replication_slot":
        slot = await commands.create(
            session,
            slot_name,
            given[1],
            temporary=bool(given[2]),
            two_phase=bool(given[3]),
            failover=bool(given[4]),
        )
        return slot_name, str(Lsn(slot.confirmed_flush_lsn))
    if name == "pg_replication_slot_advance":
        return slot_name, str(await _advance(session, slot_name, given[1]))
    return await _copy(session, slot_name, cut_name(given[1]), given[2], given[3])


async def _of_statistics(session: Session, name: str, slot_name: str | None) -> list[dict[str, Any]]:
    """Show or reset statistics (pgstatfuncs.c, pgstat_replslot.c: pgstat_reset_replslot)."""
    store = session.service.slots
    if name == "pg_stat_get_replication_slot":
        if slot_name is None:
            return []
        slot = store.find(slot_name)
        return [{"slot_name": slot_name, **asdict(Statistics())} if slot is None else _statistics(slot)]
    if await session.query(_MAY_RESET) != [["t"]]:
        raise InsufficientPrivilege(f"permission denied for function {name}")
    slots = list(store) if slot_name is None else [store.find(slot_name)]
    for one in slots:
        if one is None:
            raise PubsubError(f'replication slot "{slot_name}" does not exist', sqlstate="22023")
        one.statistics, one.stats_reset, one.changed = Statistics(), time.time(), True
    return [{}]


async def _copy(
    session: Session, name: str, target: str, temporary: bool | None, plugin: str | None
) -> tuple[str, str]:
    """Copy a slot (slotfuncs.c: copy_replication_slot)."""
    store = session.service.slots
    source = store.get(name)
    store.check_new(target)
    if source.invalidation_reason is not None:
        raise NotInPrerequisiteState(f'cannot copy invalidated replication slot "{name}"')
    if plugin is not None:
        commands.check_plugin(session, plugin)
    is_temporary = source.temporary if temporary is None else temporary
    copy = Slot(
        target,
        plugin or source.plugin,
        source.database,
        source.restart_lsn,
        source.confirmed_flush_lsn,
        source.database_oid,
        temporary=is_temporary,
        two_phase=source.two_phase,
        two_phase_at=source.two_phase_at,
        active_pid=session.pid if is_temporary else None,
        owner=session if is_temporary else None,
    )
    store.add(copy)
    return target, str(Lsn(copy.confirmed_flush_lsn))


async def _advance(session: Session, name: str, text: str) -> Lsn:
    """Move a slot forward (slotfuncs.c: pg_replication_slot_advance)."""
    store, feed = session.service.slots, session.service.feed
    to = Lsn.parse(text)
    if to == 0:
        raise PubsubError("invalid target WAL LSN", sqlstate="22023")
    slot = store.acquire(name, session, session.pid, session.end)
    try:
        commands.check_database(session, slot)
        if to < slot.confirmed_flush_lsn:
            raise NotInPrerequisiteState(
                f"cannot advance replication slot to {to}, minimum is {Lsn(slot.confirmed_flush_lsn)}"
            )
        ((flushed,),) = await session.query("SELECT pg_catalog.pg_current_wal_flush_lsn()")
        to = min(to, Lsn.parse(flushed or ""))
        await feed.wait_for(to)
        if slot.failover:
            await session.service.standby_slots.wait_for(to)
        slot.confirmed_flush_lsn = max(to, slot.confirmed_flush_lsn)
        restart = feed.commits.restart_for(slot.confirmed_flush_lsn, feed.oldest)
        slot.restart_lsn = max(slot.restart_lsn, restart or 0)
        return Lsn(slot.confirmed_flush_lsn)
    finally:
        store.free(slot)


def _rows(session: Session, view: str | None) -> list[dict[str, Any]]:
    if view is None:
        return []
    if view in {"pg_replication_slots", "pg_get_replication_slots"}:
        return [slot_row(session.service, slot) for slot in session.service.slots if _is_visible(session, slot)]
    if view == "pg_stat_replication":
        return [_stream_row(one, one.stream.row()) for one in session.service.sessions if one.stream is not None]
    return [_statistics(slot) for slot in session.service.slots if _is_visible(session, slot)]


def _statistics(slot: Slot) -> dict[str, Any]:
    """Return a slot's row of pg_stat_replication_slots."""
    return {"slot_name": slot.name, **asdict(slot.statistics), "stats_reset": _time(slot.stats_reset)}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _stream_row(session: Session, row: dict[str, Any]) -> dict[str, Any]:
    return {"usesysid": session.user_oid, "client_port": session.port, **row}


def _is_visible(session: Session, slot: Slot) -> bool:
    return not slot.temporary or slot.owner is not None


def slot_row(service: Service, slot: Slot) -> dict[str, Any]:
    """Return a slot's row of pg_replication_slots."""
    lost = slot.invalidation_reason is not None
    feed = service.feed
    keep = service.options.keep_size
    held = feed.received - slot.restart_lsn
    return {
        "slot_name": slot.name,
        "plugin": slot.plugin,
        "slot_type": "logical",
        "datoid": slot.database_oid or None,
        "database": slot.database,
        "temporary": slot.temporary,
        "active": slot.active_pid is not None,
        "active_pid": slot.active_pid,
        "xmin": None,
        "catalog_xmin": None,
        "restart_lsn": None if slot.invalidation_reason == "wal_removed" else str(Lsn(slot.restart_lsn)),
        "confirmed_flush_lsn": str(Lsn(slot.confirmed_flush_lsn)),
        # Before `oldest` there is an archive only.
        "wal_status": "lost" if lost else "reserved" if slot.restart_lsn >= feed.oldest else "unreserved",
        "safe_wal_size": None if lost or keep is None else keep - held,
        "two_phase": slot.two_phase,
        "two_phase_at": str(Lsn(slot.two_phase_at)) if slot.two_phase_at else None,
        "inactive_since": _time(slot.inactive_since),
        "conflicting": False,
        "invalidation_reason": slot.invalidation_reason,
        "failover": slot.failover,
        "synced": False,
    }
