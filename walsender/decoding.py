"""A decoding session: from a server's conninfo to an output plugin's messages.

    inspect the server ► checkpoint ► read the catalogs' files ► scan the WAL from the redo position to now
      ► the catalogs at the redo position ► decode from there, over the consistent point, for as long as is wanted

Serves the purpose of logical.c (CreateInitDecodingContext, DecodingContextFindStartpoint).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pubsub.errors import ConnectionFailure, FeatureNotSupported, NotInPrerequisiteState, PublisherError, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.publisher import publication
from pubsub.publisher.connection import Connection
from pubsub.reorderbuffer.buffer import ReorderBuffer
from walsender.decode.assembly import Assembly
from walsender.decode.decoder import Decoder
from walsender.decode.relations import Registry
from walsender.decode.snapbuild import SnapshotBuilder, State
from walsender.historic import upstream
from walsender.historic.bootstrap import CatalogBootstrap, WindowScan
from walsender.historic.catalog_layouts import CatalogName
from walsender.historic.encodings import encoded, python_encoding
from walsender.historic.names import TextSettings
from walsender.historic.tracker import CatalogTracker
from walsender.historic.upstream import CatalogFile, SessionTexts, Upstream
from walsender.output.pgoutput import PgoutputOptions, PgoutputPlugin
from walsender.output.plugin import OutputPlugin, Write
from walsender.output.publication import PublicationFilter, missing_publication
from walsender.output.rowfilter import RowFilterCompiler
from walsender.output.test_decoding import TestDecodingOptions, TestDecodingPlugin
from walsender.source.retry import Retry, is_lost
from walsender.source.source import WalSource
from walsender.startpoint import redo_before
from walsender.xlog.formats import format_of_version
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader
from walsender.xlog.record import parse_record

WORK_MEM = 64 << 20


@dataclass(frozen=True, slots=True)
class DecodeRequest:
    """What to decode.  `start`, `end`: LSNs, 0 for none; `options`: the plugin's; `work_mem`: bytes."""

    conninfo: str
    plugin: str
    options: dict[str, str]
    spill: Path
    start: int = 0
    end: int = 0
    wal: Path | None = None
    slot: str | None = None
    work_mem: int = WORK_MEM
    missing_is_error: bool = False
    """A missing publication ends the decoding with any release, and at once if the server does not have it now either.  By
    default it does as the server: 15 to 17 fail at the first change, 18 warns and leaves it out."""


class Session:
    """One decoding, made by `open`; `run` decodes up to the requested end, or for ever."""

    def __init__(
        self, request: DecodeRequest, server: Upstream, source: WalSource, reader: WalReader, decoder: Decoder
    ) -> None:
        self.server = server
        self.decoder = decoder
        self.reader = reader
        self._request = request
        self._source = source

    @classmethod
    async def open(
        cls,
        request: DecodeRequest,
        write: Write,
        on_consistent: Callable[[int], None],
        on_warning: Callable[[PubsubError], None] = lambda _: None,
    ) -> Session:
        """Prepare a session up to the redo position; begin anew if the server restarts meanwhile.

        Raises NotInPrerequisiteState, InsufficientPrivilege and so on, before anything is written.
        """
        retry = Retry()
        try:
            connection = await Connection.connect(request.conninfo, application_name="walsender")
        except PublisherError as error:
            retry.judge(error)
            connection = await retry.connect(request.conninfo)
        while True:
            async with connection:
                try:
                    return await cls._open(connection, request, write, on_consistent, on_warning)
                except (ConnectionFailure, PublisherError) as error:
                    # The session still works: the error is final, such as a replication connection that is refused.
                    if not await is_lost(connection):
                        raise
                    retry.judge(error)
            connection = await retry.connect(request.conninfo)

    @classmethod
    async def _open(
        cls,
        connection: Connection,
        request: DecodeRequest,
        write: Write,
        on_consistent: Callable[[int], None],
        on_warning: Callable[[PubsubError], None],
    ) -> Session:
        server = await upstream.inspect(connection)
        plugin_options = _parse_options(request, server)
        if request.slot is not None:
            await upstream.check_slot(connection, request.slot)
        # If the requested start lies in the past, decoding needs an older checkpoint.
        now = await upstream.flushed(connection)
        past = 0 < request.start <= now
        redo = await upstream.checkpoint(connection, may_checkpoint=server.may_checkpoint and not past)
        source = WalSource(request.conninfo, server, request.wal, request.slot)
        try:
            await source.open()
            if past:
                redo = await redo_before(source, server, request.start, redo, now)
            files, contents, status, scan = await _scan(connection, server, source, redo, request.start if past else 0)
            builtins = await upstream.builtins(connection)
            texts = await upstream.session_texts(connection, builtins.keywords)
        except BaseException:
            await source.close()
            raise
        bootstrap = CatalogBootstrap(files, contents, server)
        tables, pending = bootstrap.tables(scan, status)
        small = request.work_mem // 4
        assembly = Assembly(ReorderBuffer(request.spill, request.work_mem - small), small)
        tracker = CatalogTracker(
            server.database,
            tables,
            {file.name: file.oid for file in files},
            assembly.by_xid.__contains__,
            (xid for xid, said in status.items() if said == "aborted"),
        )
        for xid, changes in pending.items():
            for table, tid, inserted in changes:
                tracker.remember(xid, table, tid, inserted)
        encoding = python_encoding(server.encoding)
        plugin = _make_plugin(
            plugin_options,
            tracker,
            RowFilterCompiler(builtins, encoding, c_collation=server.c_collation, version=server.version),
            server,
            write,
            encoding,
            texts,
            on_warning,
            missing_is_error=request.missing_is_error,
        )
        if request.missing_is_error and isinstance(plugin_options, PgoutputOptions):
            await _check_publications(connection, plugin_options.publication_names, tracker, server)
        wal_format = format_of_version(server.version)
        assert wal_format is not None
        builder = SnapshotBuilder(request.start)
        builder.enter(State.BUILDING)
        decoder = Decoder(
            database=server.database,
            wal_format=wal_format,
            tracker=tracker,
            registry=Registry(
                tracker,
                plugin.describe,
                encoding,
                TextSettings(server.dollars, plugin.path, texts.keywords, server.encoding, texts.styles.outputs()),
            ),
            assembly=assembly,
            builder=builder,
            plugin=plugin,
            on_consistent=on_consistent,
            redo=int(redo),
            work_mem=request.work_mem,
        )
        reader = WalReader(Geometry(server.segment_size), int(redo))
        return cls(request, server, source, reader, decoder)

    async def run(self, idle: Callable[[], None] = lambda: None) -> None:
        """Decode up to the requested end, or until cancelled.

        `idle` is called whenever there is nothing more to read for now.  Raises what ends a decoding.
        """
        end = self._request.end
        reader, decoder = self.reader, self.decoder
        stop = reader.geometry.to_byte_position(end) if end else 0
        async for nothing_more in self._source.feed(reader):
            if decoder.run(reader, end):
                break
            if nothing_more:
                idle()
                self._source.flushed = decoder.restart_point
            if end and reader.geometry.to_byte_position(reader.position) >= stop:
                break
        if not decoder.builder.consistent:
            raise NotInPrerequisiteState(
                f"there is no consistent point before {Lsn(end)}",
                detail="No list of running transactions that all have ended since was found in the WAL up to there.",
                hint="Begin further back (--wal with an older archive), or end later.",
            )

    async def close(self) -> None:
        await self._source.close()


async def _scan(
    connection: Connection, server: Upstream, source: WalSource, redo: Lsn, start: int
) -> tuple[list[CatalogFile], dict[CatalogName, bytes], dict[int, str | None], WindowScan]:
    """Read the catalogs' files, the transactions' fates, and the WAL from `redo` to the moment after that.

    `start`: LSN from which decoding was requested; 0 if that lies after this WAL.
    """
    files = await upstream.catalog_files(connection)
    contents: dict[CatalogName, bytes] = {file.name: await upstream.read_file(connection, file.path) for file in files}
    bootstrap = CatalogBootstrap(files, contents, server)
    scan = WindowScan(server.database, files, start)
    wal_format = format_of_version(server.version)
    assert wal_format is not None
    reader = WalReader(Geometry(server.segment_size), int(redo))
    status: dict[int, str | None] = {}
    feeding = source.feed(reader)
    while True:
        unknown = bootstrap.undecided(scan) - status.keys()
        if unknown:
            status |= await upstream.xact_status(connection, unknown)
        end = int(await upstream.flushed(connection))
        while reader.position < end and reader.geometry.to_byte_position(
            reader.position
        ) < reader.geometry.to_byte_position(end):
            await anext(feeding)
            reader.walk = scan.skim
            for data, offset, length, lsn, xid, info, rmgr in reader.records():
                scan.add(parse_record(data, offset, length, lsn, lsn, xid, info, rmgr), wal_format)
        if not bootstrap.undecided(scan) - status.keys():
            break
    await feeding.aclose()
    await source.close()
    if await upstream.catalog_files(connection) != files:
        raise NotInPrerequisiteState("a catalog was written anew while decoding began", hint="Start again.")
    return files, contents, status, scan


async def _check_publications(
    connection: Connection, names: Sequence[str], tracker: CatalogTracker, server: Upstream
) -> None:
    """Refuse publications that exist neither where the WAL begins nor on the server now: others may be created or dropped later."""
    keys = {name: encoded(name, server.encoding) for name in names}
    for name, key in keys.items():
        if key is None:
            raise missing_publication(name)  # the server could not even be asked
    for name in await publication.missing_publications(connection, names):
        key = keys[name]
        if key is None or tracker.first("pg_publication", key, frozenset(), 1) is None:
            raise missing_publication(name)


def _parse_options(request: DecodeRequest, server: Upstream) -> PgoutputOptions | TestDecodingOptions:
    if request.plugin == "pgoutput":
        return PgoutputOptions.parse(request.options, server.version)
    if request.plugin == "test_decoding":
        return TestDecodingOptions.parse(request.options)
    raise FeatureNotSupported(
        f'there is no output plugin "{request.plugin}"', hint='There are "pgoutput" and "test_decoding".'
    )


def _make_plugin(
    options: PgoutputOptions | TestDecodingOptions,
    tracker: CatalogTracker,
    compiler: RowFilterCompiler,
    server: Upstream,
    write: Write,
    encoding: str,
    texts: SessionTexts,
    on_warning: Callable[[PubsubError], None],
    *,
    missing_is_error: bool,
) -> OutputPlugin[Any]:
    if isinstance(options, PgoutputOptions):
        publications = PublicationFilter(
            options.publication_names,
            tracker,
            compiler,
            server.version,
            server.encoding,
            on_warning,
            missing_is_error=missing_is_error,
        )
        return PgoutputPlugin(options, publications, write, encoding)
    return TestDecodingPlugin(options, write, encoding, server.version, texts.keywords, texts.styles, texts.path)
