"""A whole archive with broken bytes in its records, under valid checksums: typed errors with the position, and no hang.

The catalogs that are read when decoding begins are intact.  From there, each process decodes the WAL with other bytes
broken.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import random
import resource
import signal
import time
import traceback
from dataclasses import dataclass
from pathlib import Path

import pytest
from google_crc32c import extend

from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import walsender_workload as workload
from walsender.decoding import DecodeRequest, Session
from walsender.plugin_request import PluginRequest
from walsender.xlog.formats import RECORD_HEADER_BYTES, XLOG_BLCKSZ, Rmgr
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader

STEP = 1 << 17
HEADERS = 80
"""The number of bytes after a record's header that are mostly headers of its contents."""
MESSAGE_IS_TRANSACTIONAL = RECORD_HEADER_BYTES + 2 + 4
"""After the header of the main data and the database's oid (message.h: xl_logical_message)."""
MEMORY = 3 << 30
SECONDS = 60
SOAK_SECONDS = 600.0
STREAMING = {"proto_version": "2", "publication_names": "p", "streaming": "on", "messages": "on"}
KINDS: dict[str, tuple[str, dict[str, str], int]] = {
    "pgoutput": ("pgoutput", {"proto_version": "1", "publication_names": "p"}, 64 << 20),
    "streaming": ("pgoutput", STREAMING, 64 << 10),
    "test_decoding": ("test_decoding", {"stream-changes": "on"}, 64 << 10),
}


@dataclass
class Archive:
    """The WAL from `first`, a page's start, to `end`; `records`: (LSN, length) by resource manager and kind."""

    first: int
    end: int
    data: bytes
    geometry: Geometry
    records: dict[tuple[int, int], list[tuple[int, int]]]

    @classmethod
    def of(cls, directory: Path, geometry: Geometry, redo: int, end: int) -> Archive:
        first = redo - redo % XLOG_BLCKSZ
        size = geometry.segment_size
        whole = b"".join(
            (directory / geometry.segment_name(1, lsn)).read_bytes()
            for lsn in range(first - first % size, end + size - 1, size)
            if lsn < end
        )
        data = whole[first % size :][: end - first]
        reader = WalReader(geometry, redo)
        reader.feed(first, data)
        records: dict[tuple[int, int], list[tuple[int, int]]] = {}
        for _, _, length, lsn, _, info, rmgr in reader.records():
            records.setdefault((rmgr, info & 0xF0), []).append((lsn, length))
        return cls(first, end, data, geometry, records)

    def places(self, lsn: int, length: int) -> list[int]:
        """Return the offsets in `data` of a record's bytes."""
        found: list[int] = []
        while len(found) < length:
            if lsn % XLOG_BLCKSZ == 0:
                lsn += self.geometry.header_bytes(lsn)
            take = min(length - len(found), XLOG_BLCKSZ - lsn % XLOG_BLCKSZ)
            found += range(lsn - self.first, lsn - self.first + take)
            lsn += take
        return found

    def broken(self, r: random.Random) -> bytes:
        data = bytearray(self.data)
        for _ in range(r.choice((1, 1, 1, 2, 5))):
            places = self.places(*r.choice(self.records[r.choice(list(self.records))]))
            for _ in range(r.choice((1, 1, 2, 4))):
                place = r.choice(places[RECORD_HEADER_BYTES:][: r.choice((HEADERS, len(places)))] or places[16:18])
                data[place] = r.choice((0, 1, 127, 128, 255, r.randrange(256), data[place] ^ 1 << r.randrange(8)))
            seal(data, places)
        return bytes(data)


def seal(data: bytearray, places: list[int]) -> None:
    """Make a record's checksum valid."""
    record = bytes(data[place] for place in places)
    crc = extend(extend(0, record[RECORD_HEADER_BYTES:]), record[:20])
    for place, byte in zip(places[20:24], crc.to_bytes(4, "little"), strict=True):
        data[place] = byte


def decoded(session: Session, archive: Archive, data: bytes) -> str:
    """Decode in a process of its own; return "", the report of a typed error, or a description of any other end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = ""
        try:
            resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(SECONDS)
            for at in range(0, len(data), STEP):
                session.reader.feed(archive.first + at, data[at : at + STEP])
                if session.decoder.run(session.reader, archive.end):
                    break
        except PubsubError as error:
            said = error.report()
            if "WAL position" not in said and "change at" not in said:
                said = f"BROKEN without a position: {said}"
        except BaseException:
            said = f"BROKEN {traceback.format_exc()}"
        finally:
            os.write(writing, pickle.dumps(said[-20_000:]))
            os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        result = pipe.read()
    _, status = os.waitpid(child, 0)
    return str(pickle.loads(result)) if result else f"BROKEN: it ended with status {status}"


@pytest.mark.parametrize(
    ("version", "kind"), [("18", "pgoutput"), ("15", "streaming"), ("17", "test_decoding"), ("19", "pgoutput")]
)
def test_broken_records(version: str, kind: str, tmp_path: Path) -> None:
    asyncio.run(broken_records(version, kind, tmp_path, 5.0))


@pytest.mark.soak
@pytest.mark.parametrize("version", ["15", "16", "17", "18", "19"])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_records_for_long(version: str, kind: str, tmp_path: Path) -> None:
    asyncio.run(broken_records(version, kind, tmp_path, SOAK_SECONDS / 5 / len(KINDS)))


async def broken_records(version: str, kind: str, directory: Path, seconds: float) -> None:
    plugin, options, work_mem = KINDS[kind]
    settings: dict[str, str | int] = {"autovacuum": "off", "max_prepared_transactions": 10, "wal_compression": "pglz"}
    with EmbeddedPostgres(version, settings=settings, initdb=["--wal-segsize=1"]) as server:
        server.query("SELECT pg_create_physical_replication_slot('hold', true)")
        with server.connect() as connection:
            for statement in workload.SETUP.split(";\n"):
                if statement.strip():
                    connection.execute(statement.encode())
            connection.execute("CHECKPOINT")
            start = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchall()[0][0]
            for number, statement in enumerate(workload.STATEMENTS):
                # A catalog that moves to another file cannot be in the part that is read at the start.
                if not statement.startswith("VACUUM FULL pg_"):
                    connection.execute(statement.encode())
                if number % 25 == 24:
                    connection.execute("CHECKPOINT")
            connection.execute("CREATE TABLE marked_name (id int PRIMARY KEY)")
            connection.execute("INSERT INTO marked_name VALUES (1)")
            connection.execute("SELECT pg_logical_emit_message(true, 'a', 'b'), pg_switch_wal()")
            end = connection.execute("SELECT pg_current_wal_insert_lsn()").fetchall()[0][0]
        lsns = int(Lsn.parse(start)), int(Lsn.parse(end))
        request = DecodeRequest(
            server.conninfo(), PluginRequest(plugin, options, lsns[0]), directory, *lsns[1:], work_mem=work_mem
        )
        session = await Session.open(request, lambda _lsn, _xid, _data: None, lambda _: None)
        await session.close()
        geometry = session.reader.geometry
        archive = Archive.of(server.data_dir / "pg_wal", geometry, session.reader.position, lsns[1])
    assert decoded(session, archive, archive.data) == ""
    # A name that is invalid in the database's encoding.
    data = bytearray(archive.data)
    for lsn, length in itertools.chain.from_iterable(archive.records.values()):
        places = archive.places(lsn, length)
        record = bytes(data[place] for place in places)
        if b"marked_name\0" in record:
            data[places[record.index(b"marked_name\0")]] = 0xFF
            seal(data, places)
    assert "WAL position" in decoded(session, archive, bytes(data))
    # A message that says it belongs to a transaction, in a record without one.
    data = bytearray(archive.data)
    for lsn, length in archive.records[Rmgr.LOGICALMSG, 0]:
        places = archive.places(lsn, length)
        if not any(data[place] for place in places[4:8]):
            data[places[MESSAGE_IS_TRANSACTIONAL]] = 1
            seal(data, places)
    assert "belongs to no transaction" in decoded(session, archive, bytes(data))
    seed = random.randrange(1 << 32)
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        seed += 1
        said = decoded(session, archive, archive.broken(random.Random(seed)))
        assert not said.startswith("BROKEN"), f"seed {seed}: {said}"
