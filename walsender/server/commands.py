"""Replication commands, carried out here, with a walsender's answers (walsender.c: exec_replication_command)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from pubsub.backend import messages as m
from pubsub.errors import FeatureNotSupported, NotInPrerequisiteState, ObjectInUse, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.connection import Connection
from pubsub.sql.identifiers import quote_identifier
from walsender import repl_gram as gram
from walsender.feed.commits import VisibleSet, fitting
from walsender.plugins import registered
from walsender.plugins.pgoutput import PgoutputOptions
from walsender.plugins.test_decoding import TestDecodingOptions
from walsender.server.stream import Stream
from walsender.slots.slot import Slot, check_name

if TYPE_CHECKING:
    from walsender.server.session import Session

_SNAPSHOT: Final = "SELECT pg_catalog.pg_current_snapshot(), pg_catalog.pg_current_wal_insert_lsn()"
_BEGIN: Final = "BEGIN READ ONLY ISOLATION LEVEL REPEATABLE READ"
_FLUSH_LSN: Final = "SELECT pg_catalog.pg_current_wal_flush_lsn()"
_INSERT_LSN: Final = (
    "SELECT pg_catalog.pg_current_wal_insert_lsn(), oid, pg_catalog.pg_current_xact_id_if_assigned()"
    " FROM pg_catalog.pg_database WHERE datname = pg_catalog.current_database()"
)
_PAUSE: Final = 0.001
_LONGEST_PAUSE: Final = 0.1
"""Seconds before the first snapshot that is taken again, and before any."""
_TRUE_ALONE: Final = {"include-xids", "include-timestamp", "skip-empty-xacts", "only-local"}
_WITHOUT_EFFECT: Final = {"force-binary", "include-rewrites", "stream-changes"}
"""test_decoding's options that are true without a value, and those that are nothing then."""
_VERSION_16: Final = 160000
_VERSION_18: Final = 180000


async def carry_out(session: Session, command: gram.Command) -> None:
    """Carry out a command and answer it.  Raises PubsubError."""
    if session.status == b"E":
        raise PubsubError(
            "current transaction is aborted, commands ignored until end of transaction block", sqlstate="25P02"
        )
    match command:
        case gram.IdentifySystem():
            await _identify_system(session)
        case gram.Show(setting):
            if not setting:
                raise PubsubError('unrecognized configuration parameter ""', sqlstate="42704")
            # Part by part: the server cuts each to what a name can have.
            parts = setting.split(".")
            name = ".".join(map(quote_identifier, parts if all(parts) else [setting]))
            await session.forward(b"Q", f"SHOW {name}".encode() + b"\0")
        case gram.TimelineHistory(timeline):
            await _timeline_history(session, timeline)
        case gram.ReadReplicationSlot(name):
            _read_slot(session, name)
        case gram.CreateReplicationSlot():
            await _create(session, command)
        case gram.AlterReplicationSlot():
            _alter(session, command)
        case gram.DropReplicationSlot(name, wait):
            await drop(session, name, wait=wait)
            session.answer(m.complete("DROP_REPLICATION_SLOT"))
        case gram.StartLogicalReplication():
            await _start(session, command)
        case gram.StartPhysicalReplication(name):
            if name is not None and session.service.slots.find(name) is not None:
                raise NotInPrerequisiteState("cannot use a logical replication slot for physical replication")
            raise FeatureNotSupported(
                "physical replication is not served here", hint="Connect to the upstream server for it."
            )


async def _identify_system(session: Session) -> None:
    feed = session.service.feed
    if session.status == b"T":
        # The client's transaction is to take no snapshot by this.
        async with await Connection.connect(session.service.upstream.conninfo) as connection:
            ((lsn,),) = await connection.query(_FLUSH_LSN)
    else:
        ((lsn,),) = await session.query(_FLUSH_LSN)
    timeline = m.INT8 if feed.server.version >= _VERSION_16 else m.INT4
    columns = [("systemid", m.TEXT), ("timeline", timeline), ("xlogpos", m.TEXT), ("dbname", m.TEXT)]
    row = [str(feed.server.system_identifier), str(feed.timeline), lsn, session.database_shown]
    session.answer(m.rows(columns, [row], "IDENTIFY_SYSTEM"))


async def _timeline_history(session: Session, timeline: int) -> None:
    if session.status == b"T":
        raise PubsubError("TIMELINE_HISTORY cannot run inside a transaction block", sqlstate="25001")
    async with await Connection.connect(session.service.upstream.conninfo, replication=True) as connection:
        ((name, content),) = await connection.query(f"TIMELINE_HISTORY {timeline}")
    columns = [("filename", m.TEXT), ("content", m.TEXT if session.service.feed.server.version < 160000 else m.BYTEA)]
    session.answer(m.rows(columns, [[name, content]], "TIMELINE_HISTORY"))


def _read_slot(session: Session, name: str) -> None:
    if session.service.slots.find(name) is not None:
        raise FeatureNotSupported("cannot use READ_REPLICATION_SLOT with a logical replication slot")
    columns = [("slot_type", m.TEXT), ("restart_lsn", m.TEXT), ("restart_tli", m.INT8)]
    session.answer(m.rows(columns, [[None, None, None]], "READ_REPLICATION_SLOT"))


async def _create(session: Session, command: gram.CreateReplicationSlot) -> None:
    if command.plugin is None:
        session.service.slots.check_new(command.slot)
        raise FeatureNotSupported(
            "physical replication slots are not kept here", hint="Create it at the upstream server."
        )
    _check_new(session, command.slot, temporary=command.temporary, failover=command.failover)
    snapshot = command.snapshot or "export"
    if snapshot == "export" and session.status == b"T":
        raise PubsubError("CREATE_REPLICATION_SLOT ... (SNAPSHOT 'export') must not be called inside a transaction")
    name: str | None = None
    if snapshot == "nothing":
        slot = await create(
            session,
            command.slot,
            command.plugin,
            temporary=command.temporary,
            two_phase=command.two_phase,
            failover=command.failover,
        )
    else:
        lsn, restart, name = await _snapshot(session, command.plugin, export=snapshot == "export")
        slot = _add(session, command.slot, command.plugin, lsn, restart, command)
    columns = [(one, m.TEXT) for one in ("slot_name", "consistent_point", "snapshot_name", "output_plugin")]
    row = [slot.name, str(Lsn(slot.confirmed_flush_lsn)), name, slot.plugin]
    session.answer(m.rows(columns, [row], "CREATE_REPLICATION_SLOT"))


async def _check_use(session: Session) -> None:
    """Raise PubsubError as walsender.c: CreateReplicationSlot does for SNAPSHOT 'use'."""
    what = "CREATE_REPLICATION_SLOT ... (SNAPSHOT 'use')"
    if session.status != b"T":
        raise PubsubError(f"{what} must be called inside a transaction")
    # What takes no snapshot itself: the client's transaction is to have none, too.
    ((isolation,),) = await session.query("SHOW transaction_isolation")
    if isolation != "repeatable read":
        raise PubsubError(f"{what} must be called in REPEATABLE READ isolation mode transaction")
    ((read_only,),) = await session.query("SHOW transaction_read_only")
    if read_only != "on" and session.service.feed.server.version >= _VERSION_16:
        raise PubsubError(f"{what} must be called in a read-only transaction")
    try:
        # The server refuses another level under the same conditions (variable.c: check_transaction_isolation).
        await session.query("SET TRANSACTION ISOLATION LEVEL READ COMMITTED")
    except PubsubError as error:
        if error.sqlstate != "25001":
            raise
        why = "not be called in a subtransaction" if "subtransaction" in error.message else "be called before any query"
        raise PubsubError(f"{what} must {why}") from error
    await session.query("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")


def _check_new(session: Session, name: str, *, temporary: bool, failover: bool) -> None:
    """Raise what keeps a slot from being made (slot.c: ReplicationSlotCreate)."""
    check_name(name)
    if temporary and failover:
        raise FeatureNotSupported("cannot enable failover for a temporary replication slot")
    session.service.slots.check_new(name)


def check_plugin(session: Session, plugin: str) -> None:
    """Raise PubsubError for a plugin that is not there, as the upstream server's release does."""
    if plugin in registered.names():
        return
    if session.service.feed.server.version >= _VERSION_18:
        raise PubsubError(
            f'library "{plugin}" may not be used as an output plugin',
            sqlstate="42501",
            hint="If it is safe for all REPLICATION users to use this library as an output plugin, add it to "
            '"output_plugin_libraries" and reload the server configuration.',
        )
    raise PubsubError(f'could not access file "{plugin}": No such file or directory', sqlstate="58P01")


async def create(session: Session, name: str, plugin: str, *, temporary: bool, two_phase: bool, failover: bool) -> Slot:
    """Make a slot that begins now, without a snapshot.  Raises PubsubError."""
    _check_new(session, name, temporary=temporary, failover=failover)
    check_plugin(session, plugin)
    ((text, oid, written),) = await session.query(_INSERT_LSN)
    if written is not None:
        # As CreateInitDecodingContext says it.
        raise PubsubError(
            "cannot create logical replication slot in transaction that has performed writes", sqlstate="25001"
        )
    session.database_oid = int(oid or 0)
    lsn = Lsn.parse(text or "")
    restart = await _restart_for(session, lsn)
    command = gram.CreateReplicationSlot(name, plugin, temporary, None, two_phase, failover)
    while restart is None:
        # A transaction runs that began before the WAL that is here: begin when it has ended.
        await session.service.feed.wait_for_more()
        lsn = Lsn(session.service.feed.position)
        restart = await _restart_for(session, lsn)
    return _add(session, name, plugin, lsn, restart, command)


def _add(session: Session, name: str, plugin: str, lsn: int, restart: int, command: gram.CreateReplicationSlot) -> Slot:
    store = session.service.slots
    store.check_new(name)
    slot = Slot(
        name,
        plugin,
        session.database,
        restart,
        lsn,
        session.database_oid,
        temporary=command.temporary,
        two_phase=command.two_phase,
        two_phase_at=lsn if command.two_phase else 0,
        failover=command.failover,
        active_pid=session.pid if command.temporary else None,
        owner=session if command.temporary else None,
    )
    store.add(slot)
    session.service.decoders.slots_changed()
    return slot


async def _restart_for(session: Session, lsn: int) -> int | None:
    feed = session.service.feed
    await feed.wait_for(lsn)
    return feed.commits.restart_for(lsn, feed.oldest)


async def _snapshot(session: Session, plugin: str, *, export: bool) -> tuple[int, int, str | None]:
    """Take a snapshot in the session that fits an LSN exactly; return the LSN, where to begin, and an exported name.

    Where no LSN fits (commits.py), the transaction is begun anew. Raises PubsubError where the command is refused, and
    Closed if the client is gone meanwhile.
    """
    feed = session.service.feed
    checked = False
    pause = _PAUSE
    while True:
        # From before the session has the snapshot, which its first query takes, until it is compared with the commits.
        with feed.commits.all_kept() as commits:
            if not checked:
                if not export:
                    await _check_use(session)
                check_plugin(session, plugin)
                checked = True
            if export:
                await session.query(_BEGIN)
            ((text, insert),) = await session.query(_SNAPSHOT)
            await feed.wait_for(Lsn.parse(insert or ""))
            lsn = fitting(commits.recent, VisibleSet.parse(text or ""), feed.position)
            if feed.commits is not commits:
                lsn = None  # the WAL was begun anew meanwhile
        restart = feed.commits.restart_for(lsn, feed.oldest) if lsn is not None else None
        if lsn is not None and restart is not None:
            name = None
            if export:
                ((name,),) = await session.query("SELECT pg_catalog.pg_export_snapshot()")
                # Nothing has kept the WAL meanwhile.
                restart = feed.commits.restart_for(lsn, feed.oldest)
            if restart is not None:
                if export:
                    session.exported = True
                    session.exchange.status = b"I"
                return lsn, restart, name
        again = [m.cstring(one) for one in session.exchange.transaction]
        await session.query("ROLLBACK")
        if not export:
            for query in again:
                await session.query(query)
        session.check_client()
        if lsn is not None:
            await feed.wait_for_more()
        else:
            # What was not visible yet becomes so without a word in the WAL, and only if its standby is there.
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def _alter(session: Session, command: gram.AlterReplicationSlot) -> None:
    """Change a slot (slot.c: ReplicationSlotAlter)."""
    store = session.service.slots
    slot = store.acquire(command.slot, session, session.pid, session.end)
    try:
        if command.failover and slot.temporary:
            raise FeatureNotSupported("cannot enable failover for a temporary replication slot")
        if command.failover is not None:
            slot.failover = command.failover
        if command.two_phase is not None and command.two_phase != slot.two_phase:
            # Unchanged, it keeps what was sent at its PREPARE.
            slot.two_phase = command.two_phase
            slot.two_phase_at = slot.confirmed_flush_lsn if command.two_phase else 0
        store.save(slot)
    finally:
        store.free(slot)
    session.answer(m.complete("ALTER_REPLICATION_SLOT"))


async def drop(session: Session, name: str, *, wait: bool) -> None:
    """Drop a slot; `wait` until nothing uses it.  Raises UndefinedObject, ObjectInUse."""
    store = session.service.slots
    while True:
        try:
            slot = store.acquire(name, session, session.pid, session.end, valid=False)
        except ObjectInUse:
            if not wait:
                raise
            await asyncio.sleep(0.05)
            continue
        store.drop(slot)
        return


def check_database(session: Session, slot: Slot) -> None:
    """Raise NotInPrerequisiteState for a slot of another database (logical.c: CheckSlotRequirements and after)."""
    if slot.database_oid and session.database_oid == slot.database_oid:
        if slot.database != session.database:
            # The database was renamed.
            slot.database, slot.changed = session.database, True
    elif (slot.database_oid and session.database_oid) or slot.database != session.database:
        raise NotInPrerequisiteState(f'replication slot "{slot.name}" was not created in this database')


def plugin_options(
    session: Session, slot: Slot, given: Mapping[str, str | None], lsn: int, *, twice: bool = False
) -> dict[str, str]:
    """Check a plugin's options, and return them with values.  `twice`: one was given twice.  Raises PubsubError."""
    try:
        options = _with_values(slot.plugin, given)
        asks_two_phase = _asks_two_phase(session, slot, options, twice=twice)
    except PubsubError as error:
        # As the server says it (logical.c, output_plugin_error_callback).
        error.context = f'slot "{slot.name}", output plugin "{slot.plugin}", in the startup callback'
        error.hint = None
        raise
    if asks_two_phase and not slot.two_phase:
        # pgoutput.c leaves it to the slot; once it is on, it stays (CreateDecodingContext).
        slot.two_phase = True
        slot.two_phase_at = max(slot.confirmed_flush_lsn, lsn)
        session.service.slots.save(slot)
    return options


def is_binary(plugin: str, options: dict[str, str]) -> bool:
    """Return whether the plugin's output is no text (OUTPUT_PLUGIN_BINARY_OUTPUT)."""
    if plugin == "test_decoding":
        return TestDecodingOptions.parse(options).force_binary
    return plugin == "pgoutput" or registered.load(plugin).binary


async def _start(session: Session, command: gram.StartLogicalReplication) -> None:
    """Stream a slot's changes until the client has enough (walsender.c: StartLogicalReplication)."""
    if session.status == b"T":
        raise PubsubError("START_REPLICATION cannot run inside a transaction block", sqlstate="25001")
    store = session.service.slots
    slot = store.acquire(command.slot, session, session.pid, session.end)
    try:
        check_database(session, slot)
        slot.database_oid = slot.database_oid or session.database_oid
        given = dict(command.options)
        twice = len(given) < len(command.options)
        options = plugin_options(session, slot, given, command.lsn, twice=twice)
        start = max(slot.confirmed_flush_lsn, command.lsn)
        stream = Stream(session, slot, start, options)
        session.stream = stream
        session.service.streams_changed()
        try:
            await stream.run()
        finally:
            session.stream = None
            session.service.streams_changed()
    finally:
        store.free(slot)
    session.answer(m.complete("COPY 0") + m.complete("START_REPLICATION"))


def _asks_two_phase(session: Session, slot: Slot, options: dict[str, str], *, twice: bool) -> bool:
    """Check a plugin's options; return whether pgoutput's ask for two_phase.  `twice`: one was given twice.

    Raises PubsubError.
    """
    if slot.plugin == "pgoutput":
        if twice:
            raise PubsubError("conflicting or redundant options", sqlstate="42601")
        return PgoutputOptions.parse(options, session.service.feed.server.version).two_phase
    if slot.plugin == "test_decoding":
        TestDecodingOptions.parse(options)
    return False


def _with_values(plugin: str, given: Mapping[str, str | None]) -> dict[str, str]:
    """Return options with what one without a value means (pgoutput.c, test_decoding.c: pg_decode_startup).

    A user's own plugin is given an empty text.  Raises PubsubError.
    """
    options: dict[str, str] = {}
    for name, value in given.items():
        if value is not None:
            options[name] = value
        elif plugin == "pgoutput":
            if name in {"proto_version", "publication_names", "origin"}:
                raise PubsubError(f"{name} requires a parameter", sqlstate="42601")
            options[name] = "true"
        elif plugin == "test_decoding":
            if name not in _WITHOUT_EFFECT:
                options[name] = "true" if name in _TRUE_ALONE else "(null)"
        else:
            options[name] = ""
    return options
