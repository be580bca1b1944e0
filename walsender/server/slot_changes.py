"""pg_logical_slot_get_changes and its relatives: a slot's changes as rows, decoded in a process (logicalfuncs.c)."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from pubsub.errors import FeatureNotSupported, ProgramLimitExceeded, PubsubError
from pubsub.protocol.lsn import Lsn
from walsender.repl_gram import cut_name
from walsender.server import commands
from walsender.streaming.changes import Task

if TYPE_CHECKING:
    from walsender.server.session import Session
    from walsender.slots.slot import Slot

FUNCTIONS: Final = frozenset(
    f"pg_logical_slot_{way}{binary}_changes" for way in ("get", "peek") for binary in ("", "_binary")
)
PROGRAM: Final = "slot-changes"
_NO_TEXT: Final = "22021"
"""character_not_in_repertoire."""
_CHUNK: Final = Struct(">cI")
_ROW: Final = Struct(">QI")
_POSITION: Final = Struct(">11Q")
_MOST: Final = 64 << 20
"""Bytes of the answers of one query: they are put together, and go to the server as a text."""
_ROW_COSTS: Final = 100
"""Bytes that a row counts for beside its data."""
_AHEAD: Final = 1 << 20
"""Bytes of rows that are received before they are asked for."""
_UNREAD: Final = 1 << 16
"""Bytes that may wait to be read by a decoding process."""
_CHECKED: Final = 4 << 20
"""Bytes that the server is asked about at a time."""
_CONVERTED: Final = "pg_catalog.convert_from(pg_catalog.decode(x, 'hex'), pg_catalog.getdatabaseencoding())"

_TEXT_SETTINGS: Final = (
    *("TimeZone", "DateStyle", "IntervalStyle", "extra_float_digits", "bytea_output", "quote_all_identifiers"),
    "lc_monetary",
)
_NAMES: Final = (*_TEXT_SETTINGS, "search_path")
_PATH: Final = (
    "pg_catalog.array_to_string(ARRAY(SELECT pg_catalog.quote_ident(x)"
    " FROM pg_catalog.unnest(pg_catalog.current_schemas(false)) x), ', ')"
)
_SETTINGS: Final = f"SELECT {', '.join(f'pg_catalog.current_setting({name!r})' for name in _TEXT_SETTINGS)}, {_PATH}"
_SPECIAL: Final = re.compile(r"[\\\s]")
"""What has a backslash before it in `options` (postinit.c: pg_split_opts)."""

Row = tuple[int, int, bytes]
"""LSN, transaction, and what the plugin has written."""


class Moves:
    """How far the calls of one query will move their slots, once all of them have their rows.

    A slot is the session's until `close`, and stays where it is until `carry_out`: an error must not lose rows.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._acquired: list[Slot] = []
        self._to: dict[Slot, tuple[int, int]] = {}
        self.size = 0
        """Bytes of the rows so far."""

    def acquire(self, name: str) -> Slot:
        """Raises what SlotStore.acquire raises."""
        slot = self._session.service.slots.acquire(name, self._session, self._session.pid, self._session.end)
        if slot not in self._acquired:
            self._acquired.append(slot)
        return slot

    def position(self, slot: Slot) -> int:
        """Return where the next call of this query begins."""
        return max(slot.confirmed_flush_lsn, self._to.get(slot, (0, 0))[0])

    def add(self, slot: Slot, confirmed_flush_lsn: int, restart_lsn: int) -> None:
        self._to[slot] = confirmed_flush_lsn, restart_lsn if restart_lsn <= confirmed_flush_lsn else 0

    def shown(self, slot: Slot, row: dict[str, Any]) -> dict[str, Any]:
        """Return a slot's row of pg_replication_slots as it is after this query's calls so far."""
        if slot in self._acquired:
            row |= {"active": slot.temporary, "active_pid": self._session.pid if slot.temporary else None}
        if slot in self._to:
            confirmed, restart = self._to[slot]
            row |= {"confirmed_flush_lsn": str(Lsn(confirmed)), "restart_lsn": str(Lsn(max(slot.restart_lsn, restart)))}
        return row

    async def carry_out(self) -> None:
        """Move the slots, durably: the rows' reader has no origin by which to skip them after a crash of this server."""
        old: list[tuple[Slot, int, int]] = []
        for slot in self._acquired:
            confirmed, restart = self._to.get(slot, (0, 0))
            if confirmed > slot.confirmed_flush_lsn:
                old.append((slot, slot.confirmed_flush_lsn, slot.restart_lsn))
                slot.confirmed_flush_lsn, slot.restart_lsn = confirmed, max(slot.restart_lsn, restart)
                slot.changed = True
        if not old:
            return
        try:
            await self._session.service.slots.save_changed()
        except BaseException:
            # The rows are not returned.
            for slot, confirmed, restart in old:
                slot.confirmed_flush_lsn, slot.restart_lsn, slot.changed = confirmed, restart, True
            raise

    def close(self) -> None:
        """Give the slots back."""
        for slot in self._acquired:
            self._session.service.slots.free(slot)
        self._acquired = []


@dataclass(slots=True)
class Wanted:
    """What a call asks for, and where its decoding has come to.

    `start`: where the slot stands; `binary`: the rows are bytea; `moves_slot`: it gets the changes, and does not only peek;
    `reached`, `restart`: the LSN up to which the slot was decoded, and where it may begin then; 0 before the end.
    """

    slot: Slot
    options: dict[str, str]
    start: int
    upto_lsn: str | None
    upto_changes: int | None
    binary: bool
    moves_slot: bool
    reached: int = 0
    restart: int = 0

    def add_to(self, moves: Moves) -> None:
        """Have the slot moved, all rows being there."""
        if self.moves_slot and self.reached > self.start:
            moves.add(self.slot, self.reached, self.restart)


def wanted(session: Session, function: str, arguments: Sequence[Any], moves: Moves) -> Wanted:
    """Look at a call's arguments and take its slot.  Raises PubsubError."""
    name, upto_lsn, upto_changes, options = arguments
    if name is None:
        raise PubsubError("slot name must not be null", sqlstate="22004")
    if options is None:
        raise PubsubError("options array must not be null", sqlstate="22004")
    if any(isinstance(one, list) for one in options):
        raise FeatureNotSupported("array must be one-dimensional")
    if any(one is None for one in options):
        raise FeatureNotSupported("array must not contain nulls")
    if len(options) % 2:
        raise FeatureNotSupported("array must have even number of elements")
    slot = moves.acquire(cut_name(name))
    commands.check_database(session, slot)
    binary = "_binary_" in function
    options = [session.in_unicode(one) for one in options]
    given = dict(zip(options[::2], options[1::2], strict=True))
    start = moves.position(slot)
    parsed = commands.plugin_options(session, slot, given, start)
    if not binary and commands.is_binary(slot.plugin, given):
        raise FeatureNotSupported(
            f'logical decoding output plugin "{slot.plugin}" produces binary output, but function '
            f'"{function}(name,pg_lsn,integer,text[])" expects textual data'
        )
    return Wanted(slot, parsed, start, upto_lsn, upto_changes, binary, "_get_" in function)


async def changes(session: Session, function: str, arguments: Sequence[Any], moves: Moves) -> list[dict[str, Any]]:
    """Return the rows of a call: lsn, xid, data.  Raises PubsubError.  The slot moves by `moves`."""
    call = wanted(session, function, arguments, moves)

    def take(length: int) -> None:
        moves.size += length + _ROW_COSTS
        if moves.size > _MOST:
            raise ProgramLimitExceeded(
                "the changes are too many for one call",
                detail=f"They take more than {_MOST >> 20} MB in one query.",
                hint="Ask for fewer with upto_nchanges, for all of them by a simple query that does no more than "
                "SELECT columns FROM the function, or stream them with START_REPLICATION.",
            )

    async with aclosing(decoded(session, call, take)) as rows:
        found = [row async for row in rows]
    if not call.binary:
        await check_texts(session, [data for _, _, data in found])
    call.add_to(moves)
    return [
        {"lsn": str(Lsn(lsn)), "xid": xid, "data": "\\x" + data.hex() if call.binary else data.hex()}
        for lsn, xid, data in found
    ]


async def check_texts(session: Session, texts: Sequence[bytes]) -> None:
    """Raise PubsubError unless all are text in the database's encoding: the server takes no others.

    What the server's own functions return is not looked at: they hand on whatever bytes a plugin writes.
    """
    unsure = [text for text in texts if not text.isascii() or b"\0" in text]
    if not unsure:
        return
    ((encoding,),) = await session.query("SELECT pg_catalog.getdatabaseencoding()")
    if encoding == "UTF8":
        unsure = [text for text in unsure if b"\0" in text or not _is_utf8(text)][:1]
    while unsure:
        size, number = 0, 0
        while number < len(unsure) and (not number or size + len(unsure[number]) <= _CHECKED):
            size += len(unsure[number])
            number += 1
        array = ",".join(text.hex() for text in unsure[:number])
        unsure = unsure[number:]
        try:
            await session.query(
                f"SELECT pg_catalog.count({_CONVERTED}) FROM pg_catalog.unnest('{{{array}}}'::pg_catalog.text[]) x"
            )
        except PubsubError as error:
            if error.sqlstate == _NO_TEXT:
                error.detail = "A change is no text in the database's encoding.  The slot has not moved."
                error.hint = "Get the changes with pg_logical_slot_get_binary_changes, or stream them."
            raise


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode()
    except UnicodeDecodeError:
        return False
    return True


async def decoded(session: Session, call: Wanted, take: Callable[[int], None] = lambda _: None) -> AsyncGenerator[Row]:
    """Yield the rows of a call as they are decoded, and note in the end how far that went.  Raises PubsubError.

    Whoever takes no more of them keeps the decoding process waiting, so none are held here.  `take` is called with the length of
    each before it is read, and may refuse it.
    """
    service, feed = session.service, session.service.feed
    if call.upto_changes is not None and call.upto_changes < 0:
        return  # the server stops behind the first record
    ((flushed,),) = await session.query("SELECT pg_catalog.pg_current_wal_flush_lsn()")
    end = Lsn.parse(flushed or "")
    if call.upto_lsn is not None and Lsn.parse(call.upto_lsn):
        end = min(end, Lsn.parse(call.upto_lsn))
    if end <= call.start:
        return
    await feed.wait_for(end)
    if call.slot.failover:
        await service.standby_slots.wait_for(end)
    restart = feed.commits.restart_for(call.start, feed.oldest) or call.slot.restart_lsn
    task = Task(
        service.upstream.with_database(call.slot.database, await _settings(session)),
        call.slot.plugin,
        call.options,
        str(feed.spool.directory),
        feed.received,
        call.start,
        feed.redo_for(restart),
        call.slot.two_phase_at or None,
        service.options.work_mem,
        session.client_encoding,
        feed.server.system_identifier,
        end,
        call.upto_changes or 0,
        feed.receiver_timeout,
    )
    ours, theirs = socket.socketpair()
    with theirs:
        chunks, lines = await asyncio.open_unix_connection(sock=ours, limit=_AHEAD)
        try:
            process = await service.processes.start(PROGRAM, [theirs.fileno()])
        except BaseException:
            lines.close()
            raise

    def tell(lsn: int) -> None:
        # A process that waits until its rows are taken reads nothing; it was told of all that it needs.
        if not lines.is_closing() and lines.transport.get_write_buffer_size() < _UNREAD:
            lines.write(b"%d\n" % lsn)

    feed.listeners.add(tell)
    try:
        lines.write(task.line())
        tell(feed.received)
        while (row := await _read(session, call, chunks, take)) is not None:
            yield row
    except (asyncio.IncompleteReadError, ConnectionError):
        code = await process.wait()
        raise PubsubError(f"the decoding process ended unexpectedly, with exit code {code}") from None
    finally:
        feed.listeners.discard(tell)
        process.kill()
        lines.close()
        await process.wait()


async def _settings(session: Session) -> str:
    """Return what texts depend on, as the session has it now, as `options` of a session of this program's own role."""
    (values,) = await session.query(_SETTINGS)
    # A schema's name would be in the client's encoding, and is wanted in the server's.
    given = [(name, value or "") for name, value in zip(_NAMES, values, strict=True) if (value or "").isascii()]
    return " ".join(f"-c {name}=" + _SPECIAL.sub(r"\\\g<0>", value) for name, value in given)


async def _read(
    session: Session, call: Wanted, output: asyncio.StreamReader, take: Callable[[int], None]
) -> Row | None:
    """Return the next row; None at the end."""
    while True:
        kind, length = _CHUNK.unpack(await output.readexactly(_CHUNK.size))
        if kind == b"R":
            take(length - _ROW.size)
        content = await output.readexactly(length)
        match kind:
            case b"R":
                lsn, xid = _ROW.unpack_from(content)
                return lsn, xid, content[_ROW.size :]
            case b"P":
                call.reached, call.restart, *counted = _POSITION.unpack(content)
                call.slot.statistics.add(counted)
                call.slot.changed = True
                return None
            case b"W":
                session.send(session.error(PubsubError(**json.loads(content)), "WARNING"))
            case _:
                raise PubsubError(**json.loads(content))
