"""Several subscribers that follow pgbench: the processor time of our server, beside that of as many PostgreSQL walsenders.

    python -m bench.fanout [TRANSACTIONS [RATE]]

Each number of subscribers has its pgbench run, which all of ours and all of PostgreSQL's follow one after the other, at
the same rate; pg_recvlogical takes what comes.  Then one subscriber takes a backlog of a million inserts.  Prints JSON:

cpu       seconds of processor time of all that sends
primary   seconds that the upstream server spends on sending to us its WAL
memory    bytes at the end
lag       seconds until WAL that was flushed has been sent to all, sampled twice a second: p50, p95, largest
seconds   until the backlog was taken
ratio     ours over PostgreSQL's: of processor time, and of the backlog's seconds
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import psycopg

from pubsub.testing.ports import Port
from pubsub.testing.servers import EmbeddedPostgres

_COUNTS: Final = (1, 4, 16)
_TICK: Final = os.sysconf("SC_CLK_TCK")
_OPTIONS: Final = ("-o", "proto_version=1", "-o", "publication_names=p")


def _seconds(pid: int) -> float:
    """Return the processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICK


def _tree(pid: int) -> list[int]:
    found = [pid]
    for one in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        found += _tree(int(one))
    return found


def _memory(pid: int) -> int:
    """Return the bytes that belong to this process alone, or its share of what it shares."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024


class _Side:
    """Where subscribers connect: a server of ours (`pid`), or the upstream server itself."""

    def __init__(self, server: EmbeddedPostgres, port: int, pid: int | None) -> None:
        self._server, self._pid = server, pid
        self._conninfo = f"user=postgres dbname=postgres host=127.0.0.1 port={port}"

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self._conninfo, autocommit=True) as connection:
            return connection.execute(statement).fetchall()

    def _processes(self) -> list[int]:
        if self._pid is not None:
            return _tree(self._pid)
        return [
            pid for (pid,) in self.query("SELECT pid FROM pg_stat_replication WHERE application_name LIKE 'pg_recv%'")
        ]

    def _used(self) -> float:
        return sum(map(_seconds, self._processes()))

    def _of_primary(self) -> float:
        senders = self._server.query("SELECT pid FROM pg_stat_replication WHERE application_name = 'walsender'")
        return sum(_seconds(pid) for (pid,) in senders)

    def follow(self, count: int, load: list[str]) -> dict[str, Any]:
        """Follow a load with so many subscribers; return what the module's docstring names."""
        for number in range(count):
            self.query(f"SELECT pg_create_logical_replication_slot('s{number}', 'pgoutput')")
        program = [str(self._server.bin("pg_recvlogical")), "--dbname", self._conninfo, "--start", "-f", "/dev/null"]
        readers = [subprocess.Popen([*program, "--slot", f"s{number}", *_OPTIONS]) for number in range(count)]
        try:
            self._wait_for_all(count)
            before, primary = self._used(), self._of_primary()
            lags = self._lags(load)
            self._wait_for_all(count)
            return {
                "cpu": round(self._used() - before, 2),
                "primary": round(self._of_primary() - primary, 2),
                "memory": sum(map(_memory, self._processes())),
                "lag": [round(lags[int(part * (len(lags) - 1))], 2) for part in (0.5, 0.95, 1.0)],
            }
        finally:
            for reader in readers:
                reader.terminate()
                reader.wait()
            for number in range(count):
                self._wait(f"SELECT NOT active FROM pg_replication_slots WHERE slot_name = 's{number}'")
                self.query(f"SELECT pg_drop_replication_slot('s{number}')")

    def _wait_for_all(self, count: int) -> None:
        """Wait until all subscribers were sent what there is: their decoding has begun, then."""
        self._server.execute("SELECT pg_logical_emit_message(true, 'bench', '')")
        ((end,),) = self.query("SELECT pg_current_wal_flush_lsn()")
        self._wait(
            f"SELECT count(*) = {count} FROM pg_stat_replication"
            f" WHERE sent_lsn >= '{end}' AND application_name LIKE 'pg_recv%'"
        )

    def _lags(self, load: list[str]) -> list[float]:
        """Run a load; return how long WAL took to be sent to all, in order of size."""
        sent_to_all = "SELECT min(sent_lsn - '0/0') FROM pg_stat_replication WHERE application_name LIKE 'pg_recv%'"
        flushed: list[tuple[float, int]] = []
        lags: list[float] = []
        with subprocess.Popen(load, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
            while running.poll() is None:
                ((lsn,),) = self._server.query("SELECT pg_current_wal_flush_lsn() - '0/0'")
                flushed.append((time.monotonic(), int(lsn)))
                ((sent,),) = self.query(sent_to_all)
                now = time.monotonic()
                lags.append(now - next((at for at, lsn in flushed if lsn > sent), now))
                with suppress(subprocess.TimeoutExpired):
                    running.wait(0.5)
            if running.returncode:
                raise subprocess.CalledProcessError(running.returncode, load)
        return sorted(lags)

    def backlog(self, statements: list[str]) -> float:
        """Return the seconds that one subscriber takes for what the statements write."""
        self.query("SELECT pg_create_logical_replication_slot('s0', 'pgoutput')")
        for one in statements:
            self._server.execute(one)
        ((end,),) = self.query("SELECT pg_current_wal_flush_lsn()")
        program = [str(self._server.bin("pg_recvlogical")), "--dbname", self._conninfo, "--start", "-f", "/dev/null"]
        began = time.monotonic()
        subprocess.run([*program, "--slot", "s0", *_OPTIONS, f"--endpos={end}"], check=True)
        seconds = time.monotonic() - began
        self._wait("SELECT NOT active FROM pg_replication_slots WHERE slot_name = 's0'")
        self.query("SELECT pg_drop_replication_slot('s0')")
        return round(seconds, 2)

    def _wait(self, condition: str) -> None:
        end = time.monotonic() + 300
        while self.query(condition) != [(True,)]:
            if time.monotonic() > end:
                raise TimeoutError(condition)
            time.sleep(0.1)


def _measured(transactions: int, rate: int) -> dict[str, Any]:
    settings: dict[str, str | int] = {"max_wal_senders": 40, "max_replication_slots": 40}
    with EmbeddedPostgres("18", settings=settings) as server, tempfile.TemporaryDirectory() as directory:
        target = ["--host=127.0.0.1", f"--port={server.port}", "--username=postgres", "postgres"]
        pgbench = str(server.bin("pgbench"))
        subprocess.run([pgbench, "--initialize", "--quiet", *target], check=True, capture_output=True)
        server.execute("CREATE PUBLICATION p FOR ALL TABLES")
        load = [pgbench, "--no-vacuum", "--client=4", f"--transactions={transactions // 4}", f"--rate={rate}", *target]
        reserved = Port.reserve()
        port = reserved.number
        command = [sys.executable, "-m", "pubsub.cli", "--home", f"{directory}/node", "publish"]
        command += ["--upstream", server.conninfo(), "--listen", f"127.0.0.1:{port}"]
        command += ["--max-replication-slots", "40", "--max-wal-senders", "40"]
        found: dict[str, Any] = {"transactions": transactions, "rate": rate}
        for count in _COUNTS:
            theirs = _Side(server, server.port, None).follow(count, load)
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as ours_process:
                try:
                    _listens(port)
                    ours = _Side(server, port, ours_process.pid).follow(count, load)
                finally:
                    ours_process.terminate()
            ratio = round(ours["cpu"] / theirs["cpu"], 3) if theirs["cpu"] else None
            found[str(count)] = {"ours": ours, "postgresql": theirs, "ratio": ratio}
        server.execute("CREATE TABLE backlog (id bigint PRIMARY KEY, a int, b text)")
        one = "INSERT INTO backlog SELECT {} + g, g, 'row ' || g FROM generate_series(1, 1000) g"
        writes = [one.format(first * 1000) for first in range(1000)]
        backlog = _Side(server, server.port, None).backlog(writes)
        server.execute("TRUNCATE backlog")
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as ours_process:
            try:
                _listens(port)
                seconds = _Side(server, port, ours_process.pid).backlog(writes)
            finally:
                ours_process.terminate()
        found["backlog"] = {
            "ours": {"seconds": seconds},
            "postgresql": {"seconds": backlog},
            "ratio": round(seconds / backlog, 3),
        }
        return found


def _listens(port: int) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if not probe.connect_ex(("127.0.0.1", port)):
                return
        time.sleep(0.1)
    raise TimeoutError("our server does not listen")


if __name__ == "__main__":
    asked = [int(one) for one in sys.argv[1:]]
    print(json.dumps(_measured(*(asked + [20_000, 1_000][len(asked) :])), indent=1))
