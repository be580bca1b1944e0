"""SQL over slots: views show ours, and functions that make, move and drop slots do so here.

Follows slotfuncs.c and logicalfuncs.c.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from pubsub.backend import messages as m
from pubsub.errors import (
    FeatureNotSupported,
    InsufficientPrivilege,
    NotInPrerequisiteState,
    ProgramLimitExceeded,
    ProtocolViolation,
    PubsubError,
)
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import Statistics
from pubsub.sql.identifiers import quote_literal
from pubsub.sql.lexer import Kind, Token, tokenize
from walsender.repl_gram import cut_name
from walsender.server import commands, slot_changes, slot_edits, slot_rows, slot_sql
from walsender.server.exchange import RefusedError
from walsender.server.slot_sql import Call, View
from walsender.slots.slot import Slot
from walsender.slots.wal_limit import safe_wal_size

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
_MAY_SEE: Final = (
    "SELECT pg_catalog.pg_has_role('pg_read_all_stats', 'USAGE'), (SELECT pg_catalog.string_agg(oid::text, ',')"
    " FROM pg_catalog.pg_roles WHERE pg_catalog.pg_has_role(oid, 'USAGE'))"
)
_SEEN_BY_ALL: Final = {"pid", "usesysid", "usename", "application_name"}
_SEEN_OF_OWN: Final = {"client_addr", "client_port", "backend_start"}
_JSONB: Final = 3802
_NO_STATEMENT: Final = "26000"
"""undefined_pstatement."""
_NO_TYPES: Final = bytes(2)
_NO_VALUES: Final = bytes(4)
_QUICK: Final = 1 << 10
"""Characters of a text that is looked at in the event loop: about 20 ms; 256 kB take seconds."""
_SHORT: Final = 256 << 10
"""Bytes that are put together in the event loop."""
_THREAD: Final = ThreadPoolExecutor(1, "slots")
"""Longer ones have a thread of their own, one after the other: a client that sends many keeps no other work waiting."""
_NOT_SKIPPED: Final = {"slotsync_skip_count": 0, "slotsync_last_skip": None}
"""Nothing is synchronized from here to a standby."""
_OIDS: Final = {"name": 19, "pg_lsn": 3220, "int4": 23, "bool": 16, "text": 25, "text[]": 1009}

_T = TypeVar("_T")


# Simple queries


async def carry_out(session: Session, text: str) -> bool:
    """Carry out a simple query if it is about slots; return whether it was.  Raises PubsubError.

    Its statements are looked at one after the other, so that each sees what those before it have done to slots.
    """
    if not slot_sql.mentions(text):
        return False
    pieces = [text[start:end] for start, end in await _looked(len(text), lambda: slot_sql.statements(text))]
    try:
        found = await _looked(len(text), lambda: [slot_sql.find(piece) for piece in pieces])
    except PubsubError:
        if len(pieces) == 1:
            await session.exchange.analyze(_encoded(text), _NO_TYPES, in_batch=False)
        raise
    places = sum(len(views) + len(calls) for views, calls in found)
    if not places:
        return False
    slot_sql.check_number(places)
    await session.exchange.idle()
    with session.working(), closing(slot_changes.Moves(session)) as moves:
        asking = _Asking(session, moves)
        if len(pieces) == 1:
            # So that the server says what is wrong, of the client's own text; later ones may need what earlier ones make.
            description = await session.exchange.analyze(_encoded(text), _NO_TYPES, in_batch=False)
            if await _send_rows(asking, text, *found[0], description):
                return True
        parts: list[str] = []
        for piece, (views, calls) in zip(pieces, found, strict=True):
            edits = await asking.view_edits(views)
            for call in calls:
                asked = await session.query(await asking.with_views(call.arguments_query()))
                results = await _call(asking, call, _arguments(asked))
                edits.append(await asking.call_edit(call, results))
            parts.append(slot_edits.edited(piece, edits))
        query = await _put_together(sum(map(len, parts)), lambda: _encoded("".join(parts)) + b"\0")
        await moves.carry_out()
    await session.forward(b"Q", query)
    return True


async def _send_rows(
    asking: _Asking, text: str, views: Sequence[View], calls: Sequence[Call], description: bytes
) -> bool:
    """Answer a query that does no more than show a call's changes; return whether it is one.  Raises PubsubError."""
    if views or len(calls) != 1:
        return False
    session, call = asking.session, calls[0]
    places = await _looked(len(text), lambda: slot_rows.columns(text, call))
    if places is None or len(m.read_description(description)[0]) != len(places):
        return False
    shown = await slot_rows.text_of(session, call)
    if shown is None:
        return False
    (arguments,) = _arguments(await session.query(await asking.with_views(call.arguments_query())))
    await _check_may(session)
    await slot_rows.send(session, call, arguments, asking.moves, description, places, shown)
    return True


async def _looked(size: int, work: Callable[[], _T]) -> _T:
    """Look at a text of this size; at a longer one in a thread, so that others are served meanwhile."""
    return work() if size < _QUICK else await _aside(work)


async def _put_together(size: int, work: Callable[[], _T]) -> _T:
    """Put a text of this size together, a longer one in a thread."""
    return work() if size < _SHORT else await _aside(work)


async def _aside(work: Callable[[], _T]) -> _T:
    return await asyncio.get_running_loop().run_in_executor(_THREAD, work)


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogateescape")


class _Asking:
    """A session that asks about slots, and what the calls of its query have done so far."""

    def __init__(self, session: Session, moves: slot_changes.Moves) -> None:
        self.session = session
        self.moves = moves

    async def rows(self, views: Sequence[View]) -> dict[str | None, list[dict[str, Any]]]:
        """Return what views show, by their names."""
        session, service = self.session, self.session.service
        found: dict[str | None, list[dict[str, Any]]] = {None: []}
        for name in {view.name for view in views} - {None}:
            if name == "pg_stat_replication":
                found[name] = await _stream_rows(session)
                continue
            slots = [slot for slot in service.slots if _is_visible(session, slot)]
            if name == "pg_stat_replication_slots":
                found[name] = [_statistics(slot) for slot in slots]
            else:
                found[name] = [self.moves.shown(slot, slot_row(service, slot)) for slot in slots]
        return found

    async def view_edits(self, views: Sequence[View]) -> list[tuple[int, int, str]]:
        version = self.session.service.feed.server.version
        literals = {name: slot_edits.literal(rows) for name, rows in (await self.rows(views)).items()}
        return [slot_edits.view_edit(view, literals[view.name], version) for view in views]

    async def with_views(self, text: str) -> str:
        views, _ = await _looked(len(text), lambda: slot_sql.find(text))
        return slot_edits.edited(text, await self.view_edits(views))

    async def call_edit(self, call: Call, results: list[dict[str, Any]]) -> tuple[int, int, str]:
        size = 2 * self.moves.size + 100 * len(results)
        version = self.session.service.feed.server.version
        return await _put_together(size, lambda: slot_edits.call_edit(call, slot_edits.literal(results), version))


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
    elif (name := _statement_of(kind, body)) is not None and name in known:
        if kind == b"C":
            del known[name]
        else:
            with session.working():
                if await _is_there(session, known, name):
                    hidden = 1
                    body = await _bind(session, known[name], body) if kind == b"B" else body
    await session.exchange.pass_on(kind, body, hidden=hidden)


def _statement_of(kind: bytes, body: bytes) -> bytes | None:
    """Return the name of the prepared statement that a Bind, Describe or Close is about; None for a portal's."""
    if kind == b"B":
        return body.split(b"\0", 2)[1] if body.count(b"\0") >= 2 else None
    return body[1:].partition(b"\0")[0] if body[:1] == b"S" else None


async def _is_there(session: Session, known: dict[bytes, _Statement], name: bytes) -> bool:
    """Return whether the server's statement of this name is the one that was noted; forget it if not.

    DEALLOCATE, DISCARD and a simple query take statements away, and PREPARE makes others.  Raises RefusedError, Failed.
    """
    try:
        types = await session.exchange.parameters_of(name)
    except RefusedError as error:
        if error.sqlstate == _NO_STATEMENT:
            del known[name]
        raise
    if len(types) == len(known[name].types) + 1 and types[-1] == _JSONB:
        return True
    del known[name]
    return False


async def _parse(session: Session, known: dict[bytes, _Statement], body: bytes) -> bytes:
    """Note a statement about slots, and return a Parse that takes what we know about slots as one more parameter."""
    name, _, rest = body.partition(b"\0")
    encoded, _, types = rest.partition(b"\0")
    known.pop(name, None)
    text = encoded.decode("utf-8", "surrogateescape")
    if not slot_sql.mentions(text):
        return body
    views, calls = await _looked(len(text), lambda: slot_sql.find(text))
    if not views and not calls:
        return body
    await session.exchange.analyze(encoded, types, in_batch=True)
    if await _looked(len(text), lambda: slot_sql.is_utility(text)):
        # It can be given no parameter, so it has what is known now.
        with session.batch(), closing(slot_changes.Moves(session)) as moves:
            asking = _Asking(session, moves)
            edits = await asking.view_edits(views)
            for call in calls:
                query = await asking.with_views(call.arguments_query())
                asked = await session.exchange.ask_bound(query, [], _NO_VALUES)
                edits.append(await asking.call_edit(call, await _call(asking, call, _arguments(asked))))
            await moves.carry_out()
        return name + b"\0" + _encoded(slot_edits.edited(text, edits)) + b"\0" + types
    given = [int.from_bytes(types[at : at + 4], "big") for at in range(2, len(types) - 3, 4)]
    used = await _looked(len(text), lambda: max(_parameters(text), default=0))
    oids = given + [0] * (used - len(given))
    for call in calls:
        # What is no more in the text gives its parameters no type.
        for argument, (_, kind) in zip(call.arguments, call.signature.parameters, strict=True):
            number = argument.strip()[1:] if argument is not None and argument.strip()[:1] == "$" else ""
            if number.isdecimal() and not oids[int(number) - 1]:
                oids[int(number) - 1] = _OIDS[kind]
    known[name] = _Statement(views, calls, oids)
    ours, version = f"${len(oids) + 1}", session.service.feed.server.version
    edits = [slot_edits.view_edit(view, f"({ours} -> 'v{number}')", version) for number, view in enumerate(views)]
    edits += [slot_edits.call_edit(call, f"({ours} -> 'c{number}')", version) for number, call in enumerate(calls)]
    described = b"".join(oid.to_bytes(4, "big") for oid in [*oids, _JSONB])
    new = slot_edits.edited(text, edits).encode("utf-8", "surrogateescape")
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
    with session.batch(), closing(slot_changes.Moves(session)) as moves:
        asking = _Asking(session, moves)
        rows = await asking.rows(statement.views)
        known: dict[str, Any] = {f"v{at}": rows[view.name] for at, view in enumerate(statement.views)}
        for number, call in enumerate(statement.calls):
            text = await asking.with_views(call.arguments_query())
            text, used = await _looked(len(text), partial(_renumbered, text))
            bound = _write_bind([formats[one - 1] for one in used], [values[one - 1] for one in used])
            asked = await session.exchange.ask_bound(text, [statement.types[one - 1] for one in used], bound)
            known[f"c{number}"] = await _call(asking, call, _arguments(asked))
        new = await _put_together(2 * moves.size, lambda: json.dumps(known).encode())
        await moves.carry_out()
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
        if length < -1 or length > len(data) - at:
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


def _renumbered(text: str) -> tuple[str, list[int]]:
    """Return a text with its parameters numbered from 1 on, and their numbers before."""
    tokens = [token for token in tokenize(text) if _is_parameter(token)]
    used = sorted({int(token.value[1:]) for token in tokens})
    numbers = {one: at for at, one in enumerate(used, 1)}
    edits = [(token.start, token.end, f"${numbers[int(token.value[1:])]}") for token in tokens]
    return slot_edits.edited(text, edits), used


def _arguments(asked: Sequence[Sequence[str | None]]) -> list[Any]:
    """Return the arguments of each row's call.  Raises ProgramLimitExceeded."""
    if len(asked) > slot_sql.MOST_ROWS:
        raise ProgramLimitExceeded(f"a query can call a function over slots for {slot_sql.MOST_ROWS} rows at most here")
    return [json.loads(row[0] or "null") for row in asked]


# Functions


async def _call(asking: _Asking, call: Call, asked: Sequence[Any]) -> list[dict[str, Any]]:
    """Do what a call asks for, once for each of the statement's rows; return the results (see slot_edits.call_edit).

    `asked`: the arguments of each row.
    """
    session = asking.session
    of_statistics = call.name.startswith("pg_stat_")
    if not of_statistics:
        await _check_may(session)
    results: list[dict[str, Any]] = []
    for arguments in asked:
        key = call.row_key(arguments)
        if session.client_encoding != "UTF8" and not all(one is None or str(one).isascii() for one in key):
            # They go back to the server as JSON, which is read as UTF-8 here.
            raise FeatureNotSupported(
                f"arguments of {call.name} that differ from row to row must be ASCII here",
                hint="Set client_encoding to UTF8.",
            )
        if call.name in slot_changes.FUNCTIONS:
            rows = await slot_changes.changes(session, call.name, arguments, asking.moves)
        elif of_statistics:
            rows = await _of_statistics(session, call.name, arguments[0])
        elif any(one is None for one in arguments[: call.signature.required]):
            continue  # a strict function: the result is NULL
        else:
            values = await _carry_out(session, call.name, arguments)
            rows = [dict(zip((name for name, _ in call.signature.columns), values, strict=False))]
        results += [{"k": key, **row} for row in rows]
    return results


async def _check_may(session: Session) -> None:
    """Raise InsufficientPrivilege unless the session's role may use slots (slot.c: CheckSlotPermissions)."""
    ((may, database_oid),) = await session.query(_MAY)
    if may != "t":
        raise InsufficientPrivilege(
            "permission denied to use replication slots",
            detail="Only roles with the REPLICATION attribute may use replication slots.",
        )
    session.database_oid = int(database_oid or 0)


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
        return [{"slot_name": slot_name, **asdict(Statistics()), **_NOT_SKIPPED} if slot is None else _statistics(slot)]
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
    """Copy a slot, but for two_phase and failover (slotfuncs.c: copy_replication_slot)."""
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


def _statistics(slot: Slot) -> dict[str, Any]:
    """Return a slot's row of pg_stat_replication_slots."""
    return {"slot_name": slot.name, **asdict(slot.statistics), **_NOT_SKIPPED, "stats_reset": _time(slot.stats_reset)}


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


async def _stream_rows(session: Session) -> list[dict[str, Any]]:
    """Return the streams' rows of pg_stat_replication, each with what the session's role may see.

    As pg_stat_get_activity and pg_stat_get_wal_senders do (HAS_PGSTAT_PERMISSIONS, ROLE_PG_READ_ALL_STATS).
    """
    streaming = [(one, one.stream) for one in session.service.sessions if one.stream is not None]
    if not streaming:
        return []
    ((all_of_them, roles),) = await session.query(_MAY_SEE)
    own = set((roles or "").split(","))
    rows: list[dict[str, Any]] = []
    for one, stream in streaming:
        row = {"usesysid": one.user_oid, "client_port": one.port, **stream.row()}
        row["usename"] = _storable(row["usename"], one.user_oid)
        if all_of_them != "t":
            seen = _SEEN_BY_ALL | (_SEEN_OF_OWN if str(one.user_oid) in own else set())
            row = {name: value for name, value in row.items() if name in seen}
        rows.append(row)
    return rows


def _is_visible(session: Session, slot: Slot) -> bool:
    return not slot.temporary or slot.owner is not None


def _storable(name: str, oid: int | None) -> str | None:
    """Return a name that any database's encoding has: JSON with another one is refused there, and the view with it.

    Where its oid is known the server has the name itself (slot_edits.py: view_edit), and other names are left to it.
    """
    if name.isascii():
        return name
    return None if oid else "".join(one if one.isascii() else "?" for one in name)


def slot_row(service: Service, slot: Slot) -> dict[str, Any]:
    """Return a slot's row of pg_replication_slots."""
    lost = slot.invalidation_reason is not None
    feed = service.feed
    keep = service.options.keep_size
    return {
        "slot_name": slot.name,
        "plugin": slot.plugin,
        "slot_type": "logical",
        "datoid": slot.database_oid or None,
        "database": _storable(slot.database, slot.database_oid),
        "temporary": slot.temporary,
        "active": slot.active_pid is not None,
        "active_pid": slot.active_pid,
        "xmin": None,
        "catalog_xmin": None,
        "restart_lsn": None if slot.invalidation_reason == "wal_removed" else str(Lsn(slot.restart_lsn)),
        "confirmed_flush_lsn": str(Lsn(slot.confirmed_flush_lsn)),
        # Before `oldest` there is an archive only.
        "wal_status": "lost" if lost else "reserved" if slot.restart_lsn >= feed.oldest else "unreserved",
        "safe_wal_size": None
        if lost or keep is None
        else safe_wal_size(feed.received, slot.restart_lsn, keep, feed.geometry.segment_size),
        "two_phase": slot.two_phase,
        "two_phase_at": str(Lsn(slot.two_phase_at)) if slot.two_phase_at else None,
        "inactive_since": _time(slot.inactive_since),
        "conflicting": False,
        "invalidation_reason": slot.invalidation_reason,
        "failover": slot.failover,
        "synced": False,
        "slotsync_skip_reason": None,
    }
