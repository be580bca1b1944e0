"""What other tools send, replayed to `pubsub publish` and to PostgreSQL itself: the answers must be the same."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from psycopg import pq

from pubsub.protocol.copyboth import Keepalive, StatusUpdate, pg_now, read_server_message, write_client_message
from pubsub.protocol.lsn import Lsn
from pubsub.testing.fixtures import Database
from tests.support.publish import Publish
from tests.support.replica import wait_until
from tests.support.tool_sequences import SEQUENCES, Prepared, Simple, Snapshot, Step, Stream, Write

_CHANGING = re.compile(r"\b[0-9A-F]+/[0-9A-F]+\b|\b[0-9A-F]{8}-[0-9A-F]{8}-\d+\b|\bPID \d+")


class Player:
    """Plays a sequence on one server, and notes the answers without positions, snapshots' names and process ids."""

    def __init__(self, conninfo: str, database: Database) -> None:
        self.conninfo, self.database = conninfo, database
        self.seen: list[tuple[str, Any]] = []
        self._open: dict[str, pq.PGconn] = {}
        self._last: dict[str, list[Any]] = {}

    def close(self) -> None:
        for connection in self._open.values():
            connection.finish()

    def play(self, steps: Sequence[Step]) -> list[tuple[str, Any]]:
        for step in steps:
            match step:
                case Write(sql):
                    self.database.execute(sql)
                case Snapshot(name, source):
                    self._take_up(name, source)
                case Stream(command, commits):
                    self._stream(command, commits)
                case Simple(name, sql, shape):
                    self._note(name, sql, self._connection(name).exec_(sql.encode()), shape=shape)
                case Prepared(name, sql, parameters, shape):
                    result = self._connection(name).exec_params(sql.encode(), [one.encode() for one in parameters])
                    self._note(name, sql, result, shape=shape)
        return self.seen

    def _connection(self, name: str) -> pq.PGconn:
        if name not in self._open:
            more = " replication=database" if name.startswith("r") else ""
            made = pq.PGconn.connect(f"{self.conninfo}{more} application_name=tool".encode())
            assert made.status == pq.ConnStatus.OK, made.error_message
            self._open[name] = made
        return self._open[name]

    def _note(self, name: str, sql: str, result: pq.PGresult, *, shape: bool) -> None:
        answer: Any
        if result.status == pq.ExecStatus.FATAL_ERROR:
            answer = [
                (result.error_field(field) or b"").decode()
                for field in (pq.DiagnosticField.SQLSTATE, pq.DiagnosticField.MESSAGE_PRIMARY)
            ]
        elif result.status == pq.ExecStatus.COPY_OUT:
            answer = self._copied(name, shape=shape)
        else:
            columns = [((result.fname(n) or b"").decode(), result.ftype(n)) for n in range(result.nfields)]
            rows = [
                [None if (v := result.get_value(r, n)) is None else v.decode() for n in range(result.nfields)]
                for r in range(result.ntuples)
            ]
            if rows:
                self._last[name] = rows[-1]
            answer = (columns, len(rows) if shape else rows, (result.command_status or b"").decode())
        self.seen.append((sql, _CHANGING.sub("*", repr(answer))))

    def _copied(self, name: str, *, shape: bool) -> Any:
        connection = self._connection(name)
        data = b""
        while (got := connection.get_copy_data(0))[0] > 0:
            data += bytes(got[1])
        connection.get_result()
        return len(data) if shape else data

    def _take_up(self, name: str, source: str) -> None:
        """The last row of `source` is an exported snapshot's name, or names it as CREATE_REPLICATION_SLOT does."""
        row = self._last[source]
        snapshot = row[2] if len(row) == 4 else row[0]
        connection = self._connection(name)
        for sql in ("BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY", f"SET TRANSACTION SNAPSHOT '{snapshot}'"):
            assert connection.exec_(sql.encode()).status == pq.ExecStatus.COMMAND_OK, connection.error_message

    def _stream(self, command: str, commits: int) -> None:
        connection = pq.PGconn.connect(f"{self.conninfo} replication=database application_name=tool".encode())
        started = connection.exec_(command.encode())
        assert started.status == pq.ExecStatus.COPY_BOTH, started.error_message
        kinds: list[str] = []
        position = 0
        while kinds.count("C") < commits:
            length, data = connection.get_copy_data(0)
            assert length > 0, connection.error_message
            frame = bytes(data)
            if frame[:1] == b"w":
                kinds.append(chr(frame[25]))
                position = int.from_bytes(frame[9:17], "big")
            else:
                message = read_server_message(frame)
                assert isinstance(message, Keepalive)
                position = max(position, message.wal_end)
        status = StatusUpdate(Lsn(position), Lsn(position), Lsn(position), pg_now(), True)
        connection.put_copy_data(write_client_message(status))
        connection.flush()
        # The answer shows that it was taken.
        while connection.get_copy_data(0)[1][:1] != b"k":
            continue
        connection.finish()
        self.seen.append((command, "".join(kind for kind in kinds if kind != "R")))
        slot = command.split()[2].strip('"')
        free = f"SELECT active FROM pg_replication_slots WHERE slot_name = '{slot}'"

        def is_free() -> bool:
            result = self._connection("watcher").exec_(free.encode())
            return result.get_value(0, 0) == b"f"

        wait_until(is_free, "the slot is free")


@pytest.fixture
def sides(served: Publish, database: Database) -> Iterator[tuple[Player, Player]]:
    players = Player(served.conninfo(dbname=database.name), database), Player(database.conninfo, database)
    yield players
    for player in players:
        player.close()


@pytest.mark.parametrize("tool", SEQUENCES)
def test_a_tool_gets_postgresql_s_answers(sides: tuple[Player, Player], database: Database, tool: str) -> None:
    answers = []
    for player in sides:
        database.execute("DROP TABLE IF EXISTS t; CREATE TABLE t (a int PRIMARY KEY, b text)")
        database.execute("INSERT INTO t SELECT g, 'row ' || g FROM generate_series(1, 50) g")
        database.execute("DROP PUBLICATION IF EXISTS p; CREATE PUBLICATION p FOR TABLE t")
        answers.append(player.play(SEQUENCES[tool]))
    for ours, theirs in zip(*answers, strict=True):
        assert ours == theirs
