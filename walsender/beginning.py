"""Read the catalogs of a server that goes on working: decoding begins so where none are on disk (bootstrap.py, state.py).

checkpoint ► the WAL from the redo position to now ► the catalogs' files ► the WAL since ► the catalogs at the redo position

The first look at the WAL is for memory alone: what it says is dead is dropped while the files come in.
"""

from __future__ import annotations

from dataclasses import replace

from pubsub import faults
from pubsub.errors import NotInPrerequisiteState
from pubsub.publisher.connection import Connection
from walsender.historic import upstream
from walsender.historic.bootstrap import CatalogBootstrap, WindowScan
from walsender.historic.state import CatalogState, DatabaseFacts
from walsender.historic.tracker import Prepared
from walsender.historic.upstream import Upstream
from walsender.source.source import Source
from walsender.xlog.formats import format_of_version
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader
from walsender.xlog.record import parse_record


async def read_catalogs(
    connection: Connection, server: Upstream, source: Source, redo: int, start: int = 0
) -> CatalogState:
    """Return the catalogs as they were at a checkpoint's redo position.

    `start`: LSN from which decoding was requested; 0 if that lies after the WAL that is there now.  Raises
    NotInPrerequisiteState, DataCorrupted, and what the source and the connection raise.
    """
    files = await upstream.catalog_files(connection)
    scan = WindowScan(server.database, files, start)
    bootstrap = CatalogBootstrap(files, server, scan)
    wal_format = format_of_version(server.version)
    assert wal_format is not None
    reader = WalReader(Geometry(server.segment_size), redo)
    status: dict[int, str | None] = {}
    feeding = source.feed(reader)

    async def look() -> None:
        """Look through the WAL up to now."""
        end = int(await upstream.flushed(connection))
        while reader.position < end and reader.geometry.to_byte_position(
            reader.position
        ) < reader.geometry.to_byte_position(end):
            await anext(feeding)
            reader.walk = scan.skim
            for data, offset, length, lsn, xid, info, rmgr in reader.records():
                scan.add(parse_record(data, offset, length, lsn, lsn, xid, info, rmgr), wal_format)

    try:
        await look()
        await faults.reached("catalogs being read")
        for file in files:
            block = 0
            async for pages in upstream.read_file(connection, file.path):
                block = bootstrap.take(file, block, pages)
                await source.keep_alive()
        await faults.reached("catalogs read")
        while True:
            unknown = bootstrap.undecided() - status.keys()
            if unknown:
                status |= await upstream.xact_status(connection, unknown)
            prepared = await upstream.prepared_transactions(connection)
            await look()
            if not bootstrap.undecided() - status.keys():
                break
    finally:
        await feeding.aclose()
        await source.close()
    if await upstream.catalog_files(connection) != files:
        raise NotInPrerequisiteState("a catalog was written anew while decoding began", hint="Start again.")
    forgotten = sorted(bootstrap.needed({xid for xid in bootstrap.undecided() if status[xid] is None}))
    if forgotten:
        raise NotInPrerequisiteState(
            f"the server no longer knows whether transaction {forgotten[0]} was committed",
            detail="It changed a catalog before the WAL that is there, and pg_xact was truncated since.",
            hint="Begin later.",
        )
    tables, pending = bootstrap.tables(status)
    aborted = [xid for xid, said in status.items() if said == "aborted" and xid not in scan.seen]
    at_start = replace(server, tablespace=[*scan.spaces, server.tablespace][0])
    facts = DatabaseFacts(at_start, await upstream.builtins(connection))
    at_redo: Prepared = dict.fromkeys(scan.prepared_before(prepared))
    return CatalogState(redo, facts, files, tables, pending, aborted, at_redo)
