"""pg_logical_slot_get_changes and its relatives: a slot's changes as rows, decoded in a process (logicalfuncs.c)."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from struct import Struct
from typing import TYPE_CHECKING, Any, Final

from pubsub.backend import messages as m
from pubsub.errors import FeatureNotSupported, ProgramLimitExceeded, PubsubError
from pubsub.protocol.lsn import Lsn
from walsender.repl_gram import cut_name
from walsender.server import commands
from walsender.streaming.changes import Task

if TYPE_CHECKING:
    from walsender.server.session import Session
    from walsender.slots.slot import Slot, SlotStore

FUNCTIONS: Final = frozenset(
    f"pg_logical_slot_{way}{binary}_changes" for way in ("get", "peek") for binary in ("", "_binary")
)
_CHUNK: Final = Struct(">cI")
_ROW: Final = Struct(">QI")
_POSITION: Final = Struct(">10Q")
_MOST: Final = 256 << 20
"""Bytes of one answer: a function's result is put together before it is returned."""


async def changes(session: Session, function: str, arguments: Sequence[Any]) -> list[dict[str, Any]]:
    """Return the rows of a call: lsn, xid, data.  Raises PubsubError; the slot has moved only if it does not."""
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
    store = session.service.slots
    slot = store.acquire(cut_name(name), session, session.pid, session.end)
    try:
        commands.check_database(session, slot)
        binary = "_binary_" in function
        given = dict(zip(options[::2], options[1::2], strict=True))
        parsed = commands.plugin_options(session, slot, given, slot.confirmed_flush_lsn)
        if not binary and commands.is_binary(slot.plugin, given):
            raise FeatureNotSupported(
                f'logical decoding output plugin "{slot.plugin}" produces binary output, but function '
                f'"{function}(name,pg_lsn,integer,text[])" expects textual data'
            )
        if upto_changes is not None and upto_changes < 0:
            return []  # the server stops behind the first record
        rows, reached, restart = await _decoded(session, slot, parsed, upto_lsn, upto_changes, binary=binary)
        if "_get_" in function and reached > slot.confirmed_flush_lsn:
            await _move(store, slot, reached, max(slot.restart_lsn, restart))
        return rows
    finally:
        store.free(slot)


async def _move(store: SlotStore, slot: Slot, confirmed_flush_lsn: int, restart_lsn: int) -> None:
    """Move the slot, durably: the rows' reader has no origin by which to skip them after a crash of this server."""
    old = slot.confirmed_flush_lsn, slot.restart_lsn
    slot.confirmed_flush_lsn, slot.restart_lsn, slot.changed = confirmed_flush_lsn, restart_lsn, True
    try:
        await store.save_changed()
    except BaseException:
        # The rows are not returned.
        slot.confirmed_flush_lsn, slot.restart_lsn = old
        slot.changed = True
        raise


async def _decoded(
    session: Session,
    slot: Slot,
    options: dict[str, str],
    upto_lsn: str | None,
    upto_changes: int | None,
    *,
    binary: bool,
) -> tuple[list[dict[str, Any]], int, int]:
    """Return the rows, the LSN up to which the slot was decoded, and where it may begin then."""
    service, feed = session.service, session.service.feed
    ((flushed,),) = await session.query("SELECT pg_catalog.pg_current_wal_flush_lsn()")
    end = Lsn.parse(flushed or "")
    if upto_lsn is not None and Lsn.parse(upto_lsn):
        end = min(end, Lsn.parse(upto_lsn))
    start = slot.confirmed_flush_lsn
    if end <= start:
        return [], 0, 0
    await feed.wait_for(end)
    if slot.failover:
        await service.standby_slots.wait_for(end)
    restart = feed.commits.restart_for(start, feed.oldest) or slot.restart_lsn
    task = Task(
        service.upstream.with_database(slot.database, session.settings),
        slot.plugin,
        options,
        str(feed.spool.directory),
        feed.received,
        start,
        feed.redo_for(restart),
        slot.two_phase_at or None,
        service.options.work_mem,
        session.client_encoding,
        feed.server.system_identifier,
        end,
        upto_changes or 0,
        feed.receiver_timeout,
    )
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "walsender.streaming.changes"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 20,
    )
    lines = process.stdin
    assert lines is not None
    assert process.stdout is not None

    def tell(lsn: int) -> None:
        if not lines.is_closing():
            lines.write(b"%d\n" % lsn)

    feed.listeners.add(tell)
    try:
        lines.write(task.line())
        tell(feed.received)
        return await _read(session, slot, process.stdout, binary=binary)
    except asyncio.IncompleteReadError:
        code = await process.wait()
        raise PubsubError(f"the decoding process ended unexpectedly, with exit code {code}") from None
    finally:
        feed.listeners.discard(tell)
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()


async def _read(
    session: Session, slot: Slot, output: asyncio.StreamReader, *, binary: bool
) -> tuple[list[dict[str, Any]], int, int]:
    rows: list[dict[str, Any]] = []
    size = 0
    while True:
        kind, length = _CHUNK.unpack(await output.readexactly(_CHUNK.size))
        size += length + 100
        if size > _MOST:
            raise ProgramLimitExceeded(
                "the changes are too many for one call",
                detail=f"They take more than {_MOST >> 20} MB.",
                hint="Ask for fewer with upto_nchanges, or stream them with START_REPLICATION.",
            )
        content = await output.readexactly(length)
        match kind:
            case b"R":
                lsn, xid = _ROW.unpack_from(content)
                data = content[_ROW.size :]
                text = "\\x" + data.hex() if binary else data.decode("utf-8", "surrogateescape")
                rows.append({"lsn": str(Lsn(lsn)), "xid": xid, "data": text})
            case b"P":
                reached, restart, *counted = _POSITION.unpack(content)
                slot.statistics.add(counted)
                slot.changed = True
                return rows, reached, restart
            case b"W":
                session.send(m.error(PubsubError(**json.loads(content)), "WARNING"))
            case _:
                raise PubsubError(**json.loads(content))
