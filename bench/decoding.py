"""Measure the publisher's decoder compared with pg_recvlogical, on the same WAL in one run.

    python -m bench.decoding [--rows N] [--runs N]

decode-inserts     an INSERT of N rows
decode-pgbench     N/10 pgbench transactions, by four clients
decode-skip        the inserts, with a publication that has none of them
decode-ddl         the pgbench transactions with a burst of DDL statements in the middle: how much slower than without

Ours is a process that reads the WAL from the server's directory on one core; its time starts when the catalogs have
been read.  pg_recvlogical waits for a walsender that decodes from a slot created before the WAL was written.  Both
discard the output.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from bench.results import OURS, THEIRS, Comparison, Limit, Results, Run
from bench.subscribers import Failed
from pubsub.protocol import commands
from pubsub.protocol.lsn import Lsn
from pubsub.testing import binaries
from pubsub.testing.servers import EmbeddedPostgres

NAMES: Final = ("decode-inserts", "decode-pgbench", "decode-skip", "decode-ddl")

_DATABASE: Final = "decoding"
_CLIENTS: Final = ("--client=4", "--jobs=2")
_GOAL: Final = 0.5
_SKIPPED_BYTES: Final = 60_000_000
"""The goal: bytes of WAL per second."""
_MEMORY_GOAL: Final = 200 << 20
_SLOWDOWN_GOAL: Final = 2.0


def measure(
    server: EmbeddedPostgres, wanted: Sequence[str], rows: int, runs: int, results: Results, say: Callable[[str], None]
) -> None:
    """Measure all of `wanted` into `results`.  The server must be otherwise idle, its WAL on this machine's disk."""
    server.create_database(_DATABASE)
    server.execute(
        "CREATE TABLE rows (id bigint PRIMARY KEY, a int, b text, c timestamptz); CREATE TABLE other (x int);"
        "CREATE PUBLICATION everything FOR ALL TABLES; CREATE PUBLICATION nothing FOR TABLE other",
        _DATABASE,
    )
    _pgbench(server, "--initialize", "--quiet")
    bench = _Decoding(server, runs, say)
    transactions = max(8, rows // 10)
    if "decode-inserts" in wanted or "decode-skip" in wanted:
        load = bench.load(lambda: _insert(server, rows), "everything", "nothing")
        if "decode-inserts" in wanted:
            found, size = bench.both(load, "everything")
            title = f"decoding {rows:,} inserts, {size / 1e6:.0f} MB of WAL"
            results.comparisons.append(Comparison("decode-inserts", title, rows, _GOAL, found))
        if "decode-skip" in wanted:
            found, size = bench.both(load, "nothing")
            title = f"decoding {size / 1e6:.0f} MB of WAL of which nothing is published (in bytes)"
            compared = Comparison("decode-skip", title, size, None, found)
            results.comparisons.append(compared)
            seconds = compared.seconds(OURS) * _SKIPPED_BYTES / size
            theirs = compared.seconds(THEIRS) * _SKIPPED_BYTES / size
            title = "decoding 60 MB of WAL of which nothing is published"
            results.limits.append(Limit("decode_skip", title, "seconds", seconds, theirs, 1.0))
        bench.drop(load)
    if "decode-pgbench" in wanted or "decode-ddl" in wanted:
        load = bench.load(
            lambda: _pgbench(server, "--no-vacuum", *_CLIENTS, f"--transactions={transactions // 4}"), "everything"
        )
        plain, plain_size = bench.both(load, "everything")
        bench.drop(load)
        title = f"decoding {transactions:,} pgbench transactions, {plain_size / 1e6:.0f} MB of WAL"
        compared = Comparison("decode-pgbench", title, transactions * 4, _GOAL, plain)
        if "decode-pgbench" in wanted:
            results.comparisons.append(compared)
        if "decode-ddl" in wanted:
            statements = max(4, rows // 20 // 4 * 4)
            load = bench.load(lambda: _burst(server, transactions, statements), "everything")
            found, size = bench.both(load, "everything")
            bench.drop(load)
            title = f"… with {statements:,} DDL statements in their midst, {size / 1e6:.0f} MB of WAL (in bytes)"
            mixed = Comparison("decode-ddl", title, size, None, found)
            results.comparisons.append(mixed)
            ours, theirs = (
                (mixed.seconds(side) / size) / (compared.seconds(side) / plain_size) for side in (OURS, THEIRS)
            )
            title = "decoding a byte of WAL with the DDL statements, as a multiple of without"
            results.limits.append(Limit("decode_ddl", title, "times", ours, theirs, _SLOWDOWN_GOAL))
    results.limits.append(Limit("decode_memory", "memory of the decoder", "bytes", bench.peak, goal=_MEMORY_GOAL))
    server.drop_database(_DATABASE)


class _Load:
    """WAL from `start` to `end`, and the `slots` created before it, by publication."""

    def __init__(self, start: int, end: int, slots: dict[str, str]) -> None:
        self.start, self.end, self.slots = start, end, slots


class _Decoding:
    def __init__(self, server: EmbeddedPostgres, runs: int, say: Callable[[str], None]) -> None:
        self._server = server
        self._runs = runs
        self._say = say
        self.peak = 0
        """The peak memory of our processes, in bytes."""

    def load(self, write: Callable[[], None], *publications: str) -> _Load:
        """Create a slot for each publication, then write WAL."""
        self._server.execute("CHECKPOINT")
        slots = {publication: f"bench_{publication}" for publication in publications}
        for slot in slots.values():
            self._server.query(f"SELECT pg_create_logical_replication_slot('{slot}', 'pgoutput')", _DATABASE)
        start = self._position()
        write()
        return _Load(start, self._position(), slots)

    def drop(self, load: _Load) -> None:
        for slot in load.slots.values():
            self._server.drop_slot(slot)

    def both(self, load: _Load, publication: str) -> tuple[list[Run], int]:
        """Measure both sides, alternating which is first; return their runs and the bytes of WAL."""
        found: list[Run] = []
        for number in range(self._runs):
            for side in (THEIRS, OURS) if number % 2 == 0 else (OURS, THEIRS):
                run = self._theirs(load, publication) if side == THEIRS else self._ours(load, publication)
                self._say(f"  {side}: {run.seconds:.2f} s, {(load.end - load.start) / 1e6 / run.seconds:.1f} MB/s")
                found.append(run)
        return found, load.end - load.start

    def _position(self) -> int:
        self._server.execute("SELECT pg_logical_emit_message(true, 'bench', '')", _DATABASE)
        return int(Lsn.parse(str(self._server.query("SELECT pg_current_wal_insert_lsn()")[0][0])))

    def _theirs(self, load: _Load, publication: str) -> Run:
        # A receiver confirms what it received, which advances the slot: each run gets its own copy.
        self._server.query(
            f"SELECT pg_copy_logical_replication_slot('{load.slots[publication]}', 'bench_decoding')", _DATABASE
        )
        options = commands.pgoutput_options(180000, [publication])
        command = [
            str(binaries.program("pg_recvlogical")),
            f"--dbname={self._server.conninfo(_DATABASE)}",
            "--slot=bench_decoding",
            "--start",
            f"--endpos={Lsn(load.end)}",
            "--file=/dev/null",
            *(f"--option={name}={value}" for name, value in options.items()),
        ]
        began = time.monotonic()
        _run(command)
        seconds = time.monotonic() - began
        self._server.drop_slot("bench_decoding")
        return Run(THEIRS, seconds)

    def _ours(self, load: _Load, publication: str) -> Run:
        ((directory,),) = self._server.query("SHOW data_directory")
        arguments = [
            self._server.conninfo(_DATABASE),
            f"{directory}/pg_wal",
            publication,
            str(load.start - 1),
            str(load.end),
        ]
        details = json.loads(_run([sys.executable, "-m", "bench.decoder", *arguments]))
        self.peak = max(self.peak, details["memory"])
        return Run(OURS, details["seconds"], {"decoder": details["cpu"]}, details["memory"])


def _run(command: list[str]) -> str:
    done = subprocess.run(command, cwd=Path(__file__).parent.parent, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Failed(f"{Path(command[0]).name}: {done.stderr.strip()[-2000:]}")
    return done.stdout


def _insert(server: EmbeddedPostgres, rows: int) -> None:
    server.execute(
        f"INSERT INTO rows SELECT g, g % 1000, md5(g::text), now() FROM generate_series(1, {rows}) g", _DATABASE
    )


def _pgbench(server: EmbeddedPostgres, *arguments: str) -> None:
    conninfo = server.conninfo(_DATABASE) + " options='-c synchronous_commit=off'"
    _run([str(binaries.program("pgbench")), *arguments, conninfo])


def _burst(server: EmbeddedPostgres, transactions: int, statements: int) -> None:
    half = f"--transactions={transactions // 8}"
    _pgbench(server, "--no-vacuum", *_CLIENTS, half)
    with server.connect(_DATABASE) as connection:
        connection.execute("SET synchronous_commit = off")
        for number in range(statements // 4):
            for statement in (
                f"CREATE TABLE d{number} (a int PRIMARY KEY, b text)",
                f"ALTER TABLE d{number} ADD COLUMN c int",
                f"INSERT INTO d{number} VALUES (1, 'x', 2)",
                f"ALTER TABLE d{number} RENAME COLUMN b TO d",
                f"INSERT INTO d{number} VALUES (2, 'x', 2)",
                f"DROP TABLE d{number}",
            ):
                connection.execute(statement.encode())
    _pgbench(server, "--no-vacuum", *_CLIENTS, half)


def main() -> int:
    from rich.console import Console

    from bench import machine, report

    parser = argparse.ArgumentParser(
        prog="python -m bench.decoding", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=NAMES, metavar="NAME,…")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--runs", type=int, default=2)
    parsed = parser.parse_args()
    results = Results()
    settings: dict[str, str | int] = {"max_wal_size": "8GB", "autovacuum": "off"}
    with EmbeddedPostgres("18", settings=settings) as server:
        measure(server, parsed.only, parsed.rows, parsed.runs, results, lambda text: print(text, file=sys.stderr))
        ((version,),) = server.query("SELECT split_part(version(), ' on ', 1)")
    report.show(Console(width=132, highlight=False), results, {**machine.facts(), "postgresql": version})
    return 0


if __name__ == "__main__":
    sys.exit(main())
