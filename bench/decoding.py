"""The publisher's decoder beside pg_recvlogical: the same WAL, one core, in one run.

    python -m bench.decoding [--rows N] [--transactions N]

inserts    an INSERT of N rows            pgbench    N transactions of pgbench's mix
skip       inserts of which nothing is published           ddl        N CREATE TABLEs with a row each

Ours is measured in processor seconds of the decoding itself, pg_recvlogical by the clock: it waits for a walsender that decodes.
"""

from __future__ import annotations

import argparse
import asyncio
import resource
import subprocess
import tempfile
import time
from pathlib import Path

from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres
from walsender.session import DecodeRequest, Session

_SETTINGS: dict[str, str | int] = {"max_wal_size": "8GB", "autovacuum": "off", "wal_keep_size": "4GB"}


def _position(server: EmbeddedPostgres) -> int:
    server.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
    return int(Lsn.parse(str(server.query("SELECT pg_current_wal_insert_lsn()")[0][0])))


async def _decode(server: EmbeddedPostgres, start: int, end: int, publication: str) -> tuple[float, int]:
    """Processor seconds, and messages."""
    count = 0

    def write(lsn: int, xid: int, data: bytes) -> None:
        nonlocal count
        count += 1

    options = {"proto_version": "1", "publication_names": publication}
    with tempfile.TemporaryDirectory() as spill:
        request = DecodeRequest(server.conninfo(), "pgoutput", options, Path(spill), start, end)
        session = await Session.open(request, write, lambda _: None)
        began = time.process_time()
        await session.run()
        seconds = time.process_time() - began
        await session.close()
    return seconds, count


def _load(server: EmbeddedPostgres, name: str, rows: int, transactions: int) -> None:
    if name in {"inserts", "skip"}:
        server.execute(
            f"INSERT INTO bench_rows SELECT g, g % 1000, md5(g::text), now() FROM generate_series(1, {rows}) g"
        )
    elif name == "pgbench":
        command = [str(binaries.program("pgbench")), "-n", "-c", "2", "-t", str(transactions // 2), server.conninfo()]
        subprocess.run(command, check=True, capture_output=True)
    else:
        with server.connect() as connection:
            for number in range(transactions // 5):
                connection.execute(f"CREATE TABLE d{number} (a int PRIMARY KEY, b text)".encode())
                connection.execute(f"INSERT INTO d{number} VALUES (1, 'x')".encode())


def measure(name: str, rows: int, transactions: int) -> str:
    """One line of figures."""
    with EmbeddedPostgres("18", settings=_SETTINGS) as server:
        pgbench = [str(binaries.program("pgbench")), "-i", "-q", "-s", "1", server.conninfo()]
        subprocess.run(pgbench, check=True, capture_output=True)
        server.execute(
            "CREATE TABLE bench_rows (id bigint PRIMARY KEY, a int, b text, c timestamptz); CREATE TABLE other (x int); "
            "CREATE PUBLICATION p FOR ALL TABLES; CREATE PUBLICATION none FOR TABLE other"
        )
        server.execute("CHECKPOINT")
        publication = "none" if name == "skip" else "p"
        server.query("SELECT pg_create_logical_replication_slot('bench', 'pgoutput')")
        start = _position(server)
        _load(server, name, rows, transactions)
        end = _position(server)
        command = [
            str(binaries.program("pg_recvlogical")),
            "-d",
            server.conninfo(),
            "-S",
            "bench",
            "--start",
            "-f",
            "/dev/null",
        ]
        command += ["-o", "proto_version=1", "-o", f"publication_names={publication}", "--endpos", str(Lsn(end))]
        began = time.monotonic()
        subprocess.run(command, check=True, capture_output=True)
        theirs = time.monotonic() - began
        ours, messages = asyncio.run(_decode(server, start - 1, end, publication))
    size = (end - start) / 1e6
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return (
        f"{name:8} {size:6.1f} MB of WAL, {messages:8} messages   ours {size / ours:6.1f} MB/s   "
        f"pg_recvlogical {size / theirs:6.1f} MB/s   ratio {theirs / ours:4.2f}   peak memory {memory:.0f} MB"
    )


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.decoding", description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--transactions", type=int, default=10_000)
    parsed = parser.parse_args()
    for name in ("inserts", "pgbench", "skip", "ddl"):
        print(measure(name, parsed.rows, parsed.transactions), flush=True)


if __name__ == "__main__":
    main()
