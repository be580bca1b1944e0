"""Query the upstream server, once, when decoding begins: all SQL of this package.

Works on 15 to 19.  It follows no source of PostgreSQL: it asks for facts that physical WAL lacks.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import groupby
from typing import Final, Protocol

from pubsub.errors import (
    DataCorrupted,
    FeatureNotSupported,
    InsufficientPrivilege,
    NotInPrerequisiteState,
    PublisherError,
    PubsubError,
    UndefinedObject,
)
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.output.styles import Styles, TimeZone
from pubsub.publisher.connection import Connection, Parameter
from pubsub.sql.identifiers import ANY_NAME
from walsender.historic.catalog_layouts import DEFINITIONS, CatalogAttribute, CatalogName
from walsender.types.layout import alignment_of
from walsender.types.registry import DOLLARS
from walsender.xlog.formats import BLCKSZ, XLOG_BLCKSZ, format_of_version

_CHUNK: Final = 1 << 20
_XACTS_PER_SEGMENT: Final = 32 * BLCKSZ * 4
"""Transactions in a file of pg_xact, two bits each (clog.c, slru.h)."""
MANAGED: Final = (
    "A managed service may grant neither these nor physical replication: there is nothing to decode there from outside, "
    "and the server's own logical slots serve instead."
)

_SETTINGS: Final = """
SELECT current_setting('wal_level'), current_setting('full_page_writes'), current_setting('block_size'),
       current_setting('wal_block_size'), pg_size_bytes(current_setting('wal_segment_size')), d.oid,
       pg_encoding_to_char(d.encoding), (SELECT system_identifier FROM pg_control_system()), pg_is_in_recovery(),
       (SELECT rolreplication OR rolsuper FROM pg_roles WHERE rolname = current_user),
       has_function_privilege('pg_catalog.pg_read_binary_file(text,bigint,bigint,boolean)', 'EXECUTE'),
       (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) OR pg_has_role('pg_checkpoint', 'USAGE'),
       current_setting('server_version_num'), d.datcollate IN ('C', 'POSIX') AND d.datlocprovider = 'c', d.dattablespace,
       current_setting('effective_wal_level', true)
  FROM pg_database d WHERE d.datname = current_database()
"""
_CATALOGS: Final = """
SELECT c.relname, c.oid, pg_relation_filenode(c.oid), pg_relation_filepath(c.oid)
  FROM pg_class c WHERE c.relnamespace IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace) AND c.relname = ANY ($1)
"""
_ATTRIBUTES: Final = """
SELECT c.relname, a.attname, a.atttypid, a.attlen, a.attalign
  FROM pg_attribute a JOIN pg_class c ON c.oid = a.attrelid
 WHERE c.relnamespace IN ('pg_catalog'::regnamespace, 'pg_toast'::regnamespace) AND c.relname = ANY ($1) AND a.attnum > 0
 ORDER BY c.relname, a.attnum
"""
_REDO: Final = "SELECT redo_lsn FROM pg_control_checkpoint()"
_NEXT: Final = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text"
_XACT_STATUS: Final = "SELECT x, pg_xact_status(x::text::xid8) FROM unnest($1::numeric[]) x"
_OPERATORS: Final = """
SELECT o.oid, o.oprname, o.oprcode::oid FROM pg_operator o WHERE o.oid < 16384
"""
_DATABASE_NAME: Final = (
    "SELECT encode(replace(datname::text, chr(92), repeat(chr(92), 2))::bytea, 'hex') FROM pg_database WHERE oid = $1"
)
_KEYWORDS: Final = "SELECT word FROM pg_get_keywords() WHERE catcode <> 'U'"
_FUNCTIONS: Final = (
    "SELECT p.oid, p.proname, p.proargtypes::text FROM pg_proc p WHERE p.oid < 16384 AND p.prolang IN (12, 14)"
)

_TEXTS: Final = """
SELECT name, reset_val, setting FROM pg_catalog.pg_settings
 WHERE name IN ('TimeZone', 'DateStyle', 'IntervalStyle', 'extra_float_digits', 'bytea_output', 'quote_all_identifiers',
                'lc_monetary')
"""
_BEGIN: Final = "BEGIN ISOLATION LEVEL READ COMMITTED READ ONLY"
# For a while the server counts a zone's days.
_NO_TIMEOUTS: Final = (
    "SELECT pg_catalog.set_config(name, '0', true) FROM pg_catalog.pg_settings "
    "WHERE name IN ('statement_timeout', 'transaction_timeout', 'idle_in_transaction_session_timeout')"
)
_OWN_PATH: Final = "SET LOCAL search_path TO DEFAULT"
# Qualified, since the schemas on that path may have functions of the same name.
_PATH: Final = "SELECT pg_catalog.unnest(pg_catalog.current_schemas(false))"
_OWN_ZONE: Final = "SET LOCAL TimeZone TO DEFAULT"
_FOR_ZONE: Final = "SET LOCAL search_path TO ''; SET LOCAL DateStyle TO 'SQL, MDY'"
# With DateStyle SQL the abbreviation is the third word, in its own case; to_char would put it in capitals.
_ZONE_AT: Final = "extract(timezone FROM to_timestamp(s))::int, split_part(to_timestamp(s)::text, ' ', 3)"
_ZONE_CHANGES: Final = f"""
SELECT s, s_offset, s_name
  FROM (SELECT s, s_offset, s_name, lag((s_offset, s_name)) OVER (ORDER BY s) AS before
          FROM (SELECT s, {_ZONE_AT} FROM generate_series($1::bigint, $2::bigint, $3::bigint) s) _ (s, s_offset, s_name)) _
 WHERE before IS DISTINCT FROM (s_offset, s_name) ORDER BY s
"""
_ZONE_MOMENTS: Final = f"SELECT {_ZONE_AT} FROM unnest($1::bigint[]) WITH ORDINALITY _ (s, number) ORDER BY number"
_ZONE_FIRST: Final = -4_417_977_600
"""1830 in seconds since 1970: every place still had its own local time."""
_ZONE_END: Final = 16_725_225_600
"""2500 in seconds since 1970: later years repeat the 400 before it, whatever is set for years of this century."""
_ZONE_LONE: Final = 4 * 366 * 86_400
"""Four years in seconds.  The first change ever was in 1844: a zone that changes within four years of 1830 is a POSIX
rule, which holds at all times."""
_ZONE_STEP: Final = 345_600
"""Four days in seconds: less than the least between two changes of a zone (Fernando de Noronha's week in 2000)."""


@dataclass(frozen=True, slots=True)
class Upstream:
    """The server and the database that are decoded."""

    version: int
    """As libpq numbers versions."""
    database: int
    encoding: str
    system_identifier: int
    segment_size: int
    may_checkpoint: bool
    c_collation: bool
    """The database's default collation compares bytes."""
    tablespace: int = 1663
    """The database's default tablespace, at the moment that this is of."""


@dataclass(frozen=True, slots=True)
class CatalogFile:
    """The file of a catalog and the layout of its rows."""

    name: CatalogName
    oid: int
    number: int
    path: str
    attributes: tuple[CatalogAttribute, ...]


async def inspect(connection: Connection) -> Upstream:
    """Check that the server can be decoded and that the role has the needed privileges; return its properties.

    Raises NotInPrerequisiteState, InsufficientPrivilege, FeatureNotSupported with all that is missing.
    """
    (row,) = await connection.query(_SETTINGS)
    wal_level, fpw, block, wal_block, segment, database, encoding, system, recovery, replication, files, checkpoint = (
        row[:12]
    )
    version = int(str(row[12]))
    if format_of_version(version) is None:
        raise FeatureNotSupported(
            f"the WAL of PostgreSQL {version // 10000} cannot be decoded", hint="PostgreSQL 15 to 19 can."
        )
    if int(str(block)) != BLCKSZ or int(str(wal_block)) != XLOG_BLCKSZ:
        raise FeatureNotSupported(f"pages of {block} bytes and WAL pages of {wal_block} bytes are not supported")
    wrong: list[str] = []
    hints: list[str] = []
    if wal_level != "logical":
        # From 19 on slots raise it.  Decoding here needs no slot, and so could not keep it.
        while_slots = ', and "logical" only while a logical slot exists' if row[15] == "logical" else ""
        wrong.append(f'wal_level is "{wal_level}"{while_slots}, and must be "logical"')
        hints.append("ALTER SYSTEM SET wal_level = logical, and restart the server.")
    if fpw != "on":
        wrong.append('full_page_writes is "off", and must be "on"')
        hints.append("ALTER SYSTEM SET full_page_writes = on, and reload the configuration.")
    if recovery == "t":
        wrong.append("the server is a standby in recovery")
        hints.append("Decode the primary, or promote the standby.")
    if wrong:
        raise NotInPrerequisiteState(
            "the server's WAL cannot be decoded", detail="; ".join(wrong) + ".", hint=" ".join(hints)
        )
    missing: list[str] = []
    if replication != "t":
        missing.append("the attribute REPLICATION")
    if files != "t":
        missing.append("EXECUTE on pg_read_binary_file(text, bigint, bigint, boolean)")
    if missing:
        raise InsufficientPrivilege(
            f'the role "{connection.user}" may not do what decoding needs',
            detail=f"Missing: {', '.join(missing)}.",
            hint="ALTER ROLE … REPLICATION; GRANT EXECUTE ON FUNCTION pg_read_binary_file(text, bigint, bigint, boolean) TO …; "
            f"{MANAGED}",
        )
    return Upstream(
        version,
        int(str(database)),
        str(encoding),
        int(str(system)),
        int(str(segment)),
        checkpoint == "t",
        row[13] == "t",
        int(str(row[14])),
    )


async def database_name(connection: Connection, oid: int) -> str:
    """Return a database's name, as a connection string has it.  Raises PubsubError (3D000) if there is none.

    Its bytes are asked for: the server takes them for text of the connection's own database, whose encoding may be another.
    """
    rows = await connection.query(_DATABASE_NAME, [oid])
    if not rows:
        raise PubsubError(f"database with OID {oid} does not exist", sqlstate="3D000")
    return bytes.fromhex(str(rows[0][0])).decode("utf-8", "surrogateescape")


async def check_slot(connection: Connection, name: str) -> None:
    """Check that `name` is a physical slot.  Raises UndefinedObject, NotInPrerequisiteState, in the server's words."""
    rows = await connection.query("SELECT slot_type FROM pg_replication_slots WHERE slot_name = $1", [name])
    if not rows:
        raise UndefinedObject(
            f'replication slot "{name}" does not exist',
            hint="SELECT pg_create_physical_replication_slot(name, true) makes one.",
        )
    if rows[0][0] != "physical":
        raise NotInPrerequisiteState("cannot use a logical replication slot for physical replication")


async def catalog_files(connection: Connection) -> list[CatalogFile]:
    """Return the files of all catalogs of DEFINITIONS, in that order.  Raises DataCorrupted if the server lacks one."""
    names = [d.name for d in DEFINITIONS]
    attributes: dict[str, list[CatalogAttribute]] = {}
    for relname, attname, type_oid, length, align in await connection.query(_ATTRIBUTES, [names]):
        attributes.setdefault(str(relname), []).append(
            CatalogAttribute(str(attname), int(str(type_oid)), int(str(length)), alignment_of(str(align)))
        )
    found: dict[str, CatalogFile] = {}
    for relname, oid, number, path in await connection.query(_CATALOGS, [names]):
        name = next(d.name for d in DEFINITIONS if d.name == relname)
        found[name] = CatalogFile(name, int(str(oid)), int(str(number)), str(path), tuple(attributes[name]))
    absent = [name for name in names if name not in found]
    if absent:
        raise DataCorrupted(f"the server has no catalog {absent[0]}")
    return [found[name] for name in names]


async def read_file(connection: Connection, path: str) -> AsyncIterator[bytes]:
    """Read a file of the server's data directory with the segments that follow it: yield whole pages, in order."""
    segment = 0
    while True:
        offset = 0
        name = path if segment == 0 else f"{path}.{segment}"
        while True:
            ((text,),) = await connection.query(
                f"SELECT pg_read_binary_file($1, {offset}, {_CHUNK}, true)",
                [name],
            )
            data = b"" if text is None else bytes.fromhex(text[2:])
            yield data[: len(data) - len(data) % BLCKSZ]
            offset += len(data)
            if len(data) < _CHUNK:
                break
        if offset < 1 << 30:
            break
        segment += 1


async def checkpoint(connection: Connection, may_checkpoint: bool) -> Lsn:
    """Make a checkpoint if `may_checkpoint`; return the redo position of the last one."""
    if may_checkpoint:
        # It takes as long as the server needs to write.
        patience, connection.answer_timeout = connection.answer_timeout, None
        await connection.execute("CHECKPOINT")
        connection.answer_timeout = patience
    ((redo,),) = await connection.query(_REDO)
    return Lsn.parse(str(redo))


async def flushed(connection: Connection) -> Lsn:
    """Return the LSN where the WAL ends: every commit that is visible now lies before."""
    ((lsn,),) = await connection.query("SELECT pg_current_wal_insert_lsn()")
    return Lsn.parse(str(lsn))


async def prepared_transactions(connection: Connection) -> set[int]:
    """Return the transactions of all databases that are prepared now, by their 32-bit ids."""
    return {int(str(xid)) for (xid,) in await connection.query("SELECT transaction FROM pg_prepared_xacts")}


async def xact_status(connection: Connection, xids: Iterable[int]) -> dict[int, str | None]:
    """Return the status of each: "committed", "aborted", "in progress", or None if the server has forgotten it.

    One that waits for a synchronous standby is in progress for the server, although its end is written.  Of those that
    ended before the last checkpoint pg_xact's file tells it.
    """
    ((text,),) = await connection.query(_NEXT)
    completed = int(str(text))
    found: dict[int, str | None] = {}
    whole: dict[int, int] = {}
    for xid in xids:
        before = (completed - xid) & 0xFFFFFFFF
        if before == 0 or before >= 1 << 31:
            # It began after all those that have ended, as subtransactions do of which no list tells.
            found[xid] = "in progress"
        elif completed - before < 3:
            found[xid] = None
        else:
            whole[completed - before] = xid
    wanted = sorted(whole)
    for first in range(0, len(wanted), 1000):
        try:
            rows = await connection.query(_XACT_STATUS, [wanted[first : first + 1000]])
        except PublisherError as error:
            error.context = "while asking for the status of transactions"
            raise
        for number, status in rows:
            found[whole[int(str(number))]] = status
    running = sorted(xid for xid, status in found.items() if status == "in progress")
    for segment, group in groupby(running, lambda xid: xid // _XACTS_PER_SEGMENT):
        found |= await _status_on_disk(connection, segment, list(group))
    return found


async def _status_on_disk(connection: Connection, segment: int, xids: Sequence[int]) -> dict[int, str]:
    """Return what a file of pg_xact says of transactions, in order (clog.c: TransactionIdGetStatus)."""
    first = xids[0] % _XACTS_PER_SEGMENT // 4
    size = xids[-1] % _XACTS_PER_SEGMENT // 4 - first + 1
    ((text,),) = await connection.query(
        f"SELECT pg_read_binary_file($1, {first}, {size}, true)", [f"pg_xact/{segment:04X}"]
    )
    data = b"" if text is None else bytes.fromhex(text[2:])
    found: dict[int, str] = {}
    for xid in xids:
        at = xid % _XACTS_PER_SEGMENT // 4 - first
        bits = data[at] >> xid % 4 * 2 & 3 if at < len(data) else 0
        found[xid] = {1: "committed", 2: "aborted"}.get(bits, "in progress")
    return found


@dataclass(frozen=True, slots=True)
class Builtins:
    """Objects that came with the server: the operators and functions that row filters name, and the keywords."""

    operators: dict[int, tuple[str, int]]
    """oid → name, function."""
    functions: dict[int, tuple[str, tuple[int, ...]]]
    """oid → name, argument types."""
    keywords: frozenset[str]
    """Those that are quoted as identifiers."""


async def builtins(connection: Connection) -> Builtins:
    """Ask for the built-in objects; they never change while a server of one major version runs."""
    operators = {int(str(o)): (str(n), int(str(c))) for o, n, c in await connection.query(_OPERATORS)}
    functions = {
        int(str(o)): (str(n), tuple(int(a) for a in str(args).split()))
        for o, n, args in await connection.query(_FUNCTIONS)
    }
    keywords = frozenset(str(word) for (word,) in await connection.query(_KEYWORDS))
    return Builtins(operators, functions, keywords)


@dataclass(frozen=True, slots=True)
class SessionTexts:
    """The settings that texts depend on, as a session has them.

    They come from the configuration of server, database and role, from `options`, and from libpq's environment.
    """

    styles: Styles
    quote_all: bool
    """quote_all_identifiers."""
    path: tuple[str, ...]
    """The search path after pg_catalog."""
    dollars: bool
    """lc_monetary is one of registry.DOLLARS."""

    def keywords(self, known: Set[str]) -> Set[str]:
        """Return the names that are quoted as identifiers.  `known`: the server's, see Builtins."""
        return ANY_NAME if self.quote_all else known


class Asks(Protocol):
    """Something that answers SQL."""

    async def query(self, sql: str, params: Sequence[Parameter] = ()) -> Sequence[Sequence[object]]: ...
    async def execute(self, sql: str) -> object: ...


async def session_texts(
    session: Asks, zones: dict[str, TimeZone] | None = None, *, current: bool = False
) -> SessionTexts:
    """Ask for the session's settings: those that it began with, or the `current` ones, as a walsender has them.

    `zones`: time zones that are known, by name; one that is asked for is added.
    """
    settings = {str(name): str(now if current else first) for name, first, now in await session.query(_TEXTS)}
    await session.execute(_BEGIN)
    try:
        if not current:
            await session.execute(_OWN_PATH)
        path = await session.query(_PATH)
        name = settings["TimeZone"]
        zone = TimeZone() if name in {"UTC", "Etc/UTC"} else (zones or {}).get(name)
        if zone is None:
            await session.execute(_NO_TIMEOUTS)
            if not current:
                await session.execute(_OWN_ZONE)
            await session.execute(_FOR_ZONE)
            zone = await _time_zone(session)
            if zones is not None:
                zones[name] = zone
    finally:
        await session.execute("ROLLBACK")
    style, _, order = settings["DateStyle"].partition(", ")
    return SessionTexts(
        Styles(
            zone,
            style,
            order == "DMY",
            settings["IntervalStyle"],
            int(settings["extra_float_digits"]),
            settings["bytea_output"] == "escape",
        ),
        settings["quote_all_identifiers"] == "on",
        tuple(str(one) for (one,) in path),
        settings["lc_monetary"] in DOLLARS,
    )


async def _time_zone(session: Asks) -> TimeZone:
    """Ask for the session's zone, moment by moment, since the server's release of the rules counts; after _OWN_ZONE."""
    rows = await session.query(_ZONE_CHANGES, [_ZONE_FIRST, _ZONE_END, _ZONE_STEP])
    changes = [(int(str(s)), (int(str(offset)), str(name))) for s, offset, name in rows]
    # Each change lies in the step that ends where it was seen: bisect.
    late = [s for s, _ in changes[1:]]
    early = [s - _ZONE_STEP for s in late]
    while any(last - first > 1 for first, last in zip(early, late, strict=True)):
        middle = [(first + last) // 2 for first, last in zip(early, late, strict=True)]
        found = await session.query(_ZONE_MOMENTS, [middle])
        for number, (offset, name) in enumerate(found):
            if (int(str(offset)), name) == changes[number + 1][1]:
                late[number] = middle[number]
            else:
                early[number] = middle[number]
    return TimeZone(
        (_ZONE_FIRST, *late),
        tuple(offset for _, (offset, _) in changes),
        tuple(name for _, (_, name) in changes),
        _ZONE_END,
        is_rule=bool(late) and late[0] < _ZONE_FIRST + _ZONE_LONE,
    )
