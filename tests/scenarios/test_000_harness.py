"""The harness itself: servers that work and die with their owner, and a comparison that finds every difference."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from decimal import Decimal
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from deltalake import write_deltalake

from pubsub.errors import PubsubError, UndefinedTable
from pubsub.testing import binaries
from pubsub.testing.compare import compare_tables
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres

OWNER = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job has it ignored
from pubsub.testing.servers import EmbeddedPostgres
server = EmbeddedPostgres("18").start()
print(server.pid, server._watcher.pid, server._base, flush=True)
time.sleep(600)
"""


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 60
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.02)


def test_a_server_publishes(any_publisher: EmbeddedPostgres) -> None:
    version = any_publisher.query("SHOW server_version_num")[0][0]
    assert str(int(version) // 10000) == any_publisher.version
    assert any_publisher.query("SHOW wal_level") == [("logical",)]
    with psycopg.connect(any_publisher.conninfo(host=str(any_publisher.socket_dir))) as connection:
        assert connection.info.port == any_publisher.port


def test_each_test_has_a_database_of_its_own(database: Database) -> None:
    database.execute("CREATE TABLE t (a int); INSERT INTO t VALUES (1)")
    database.execute("SELECT pg_create_logical_replication_slot('harness', 'pgoutput')")
    assert database.query("TABLE t") == [(1,)]
    database.server.drop_database(database.name)
    assert database.server.query("SELECT 1 FROM pg_replication_slots WHERE slot_name = 'harness'") == []


def test_the_wheel_serves_and_has_the_clients() -> None:
    with EmbeddedPostgres("18", wheel=True) as server:
        ran = subprocess.run(
            [server.bin("pgbench"), "-i", "-q", "-s", "1", server.conninfo()],
            capture_output=True,
            text=True,
            check=False,
        )
        assert ran.returncode == 0, ran.stderr
        assert server.query("SELECT count(*) FROM pgbench_accounts") == [(100_000,)]
        directory = server.data_dir.parent
    assert not directory.exists()


def test_kill_and_restart_keep_port_and_data() -> None:
    with EmbeddedPostgres("18", settings={"fsync": "on", "work_mem": "5MB"}) as server:
        port = server.port
        server.execute("CREATE TABLE t AS SELECT 1 AS a")
        server.kill()
        assert not server.running
        with pytest.raises(psycopg.OperationalError):
            server.query("SELECT 1")
        server.start()
        server.restart()
        assert server.port == port
        assert server.query("TABLE t") == [(1,)]
        assert server.query("SHOW work_mem") == [("5MB",)]


def test_a_data_directory_that_was_given_stays(tmp_path_factory: pytest.TempPathFactory) -> None:
    data = binaries.readable_directory() / f"pubsub-given-{os.getpid()}"
    try:
        with EmbeddedPostgres("17", data_dir=data) as server:
            server.execute("CREATE TABLE t AS SELECT 1 AS a")
        with EmbeddedPostgres("17", data_dir=data) as server:
            assert server.query("TABLE t") == [(1,)]
    finally:
        subprocess.run(["rm", "-rf", str(data)], check=True)


def test_scram_wants_the_password() -> None:
    with EmbeddedPostgres("18", auth="scram-sha-256", password="right one") as server:
        assert server.query("SELECT 1") == [(1,)]
        with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
            psycopg.connect(server.conninfo(password="wrong"))


def test_a_server_that_fails_to_start_says_why() -> None:
    server = EmbeddedPostgres("18", settings={"shared_buffers": "none"})
    with pytest.raises(PubsubError) as caught:
        server.start()
    assert "shared_buffers" in (caught.value.detail or "")
    assert not server.data_dir.parent.exists()


@pytest.mark.parametrize("version", ["19"])
def test_version_19_runs_from_a_private_directory(
    version: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """It is copied to where the servers' account can read it; its programs then use the copy's loader and libraries."""
    if binaries.account().uid is None:
        pytest.skip("servers run as this user, who can read everything here")
    there = binaries.directory() / version
    shutil.copytree(there, tmp_path / "servers" / version, symlinks=True)
    (tmp_path / "servers").chmod(0o700)
    monkeypatch.setenv("PUBSUB_SERVERS", str(tmp_path / "servers"))
    with EmbeddedPostgres(version) as server:
        maps = Path(f"/proc/{server.pid}/maps").read_text()
        assert str(tmp_path) not in maps
        assert str(there) not in maps
        assert server.query("SELECT current_setting('server_version_num')::int / 10000") == [(19,)]


def test_a_missing_server_says_how_to_fetch_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PUBSUB_SERVERS", str(tmp_path))
    with pytest.raises(PubsubError) as caught:
        EmbeddedPostgres("16")
    assert caught.value.hint == 'Run "python -m pubsub.testing.binaries fetch".'


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        ("owner", signal.SIGKILL),
        pytest.param("owner", signal.SIGTERM, marks=pytest.mark.full),
        pytest.param("owner", signal.SIGINT, marks=pytest.mark.full),
        pytest.param("watcher", signal.SIGKILL, marks=pytest.mark.full),
    ],
)
def test_no_server_outlives_its_owner(victim: str, number: signal.Signals) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        assert owner.stdout is not None
        server, watcher, directory = owner.stdout.readline().split()
        assert alive(int(server))
        os.kill(owner.pid if victim == "owner" else int(watcher), number)
        wait_until_gone(int(server))
        if victim == "owner":
            owner.wait(20)
            wait_until_gone(int(watcher))
            assert not Path(directory).exists()
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()
    if victim == "watcher":
        subprocess.run(["rm", "-rf", directory], check=True)


DEFINITION = """
CREATE TABLE t ("Id""x" bigint PRIMARY KEY, s text, n numeric(12,2), f numeric(5,5), z timestamptz, l timestamp, d date,
    b boolean, r float8, q real, y bytea, c char(4))
"""
ROWS = r"""
INSERT INTO t VALUES
    (1, E'a,"b\n', 1.5, 0.5, '2024-01-01 00:00:00.12+00', '0044-01-01 01:02:03 BC', '9999-12-31',
        true, 'NaN', '1e-5', '\xdeadbeef', 'x'),
    (2, '', -0.05, -0.5, '0044-01-01 01:02:03+00 BC', '2024-01-01', '0044-01-01 BC', false, '-0', 3.14, '', ''),
    (3, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL)
"""


def microseconds(database: Database, value: str) -> int:
    return int(database.query(f"SELECT (extract(epoch FROM {value}) * 1000000)::bigint")[0][0])


@pytest.fixture
def pair(database: Database, tmp_path: Path) -> tuple[Database, str]:
    """A table with every kind of column, and the Delta table that equals it, made without any of our code."""
    database.execute(DEFINITION)
    database.execute(ROWS)
    zoned = [
        microseconds(database, f"timestamptz '{v}'") for v in ("2024-01-01 00:00:00.12+00", "0044-01-01 01:02:03+00 BC")
    ]
    local = [microseconds(database, f"timestamp '{v}'") for v in ("0044-01-01 01:02:03 BC", "2024-01-01")]
    days = [database.query(f"SELECT date '{v}' - date '1970-01-01'")[0][0] for v in ("9999-12-31", "0044-01-01 BC")]
    table = pa.table(
        {
            'Id"x': pa.array([1, 2, 3], pa.int64()),
            "s": ['a,"b\n', "", None],
            "n": pa.array([Decimal("1.50"), Decimal("-0.05"), None], pa.decimal128(12, 2)),
            "f": pa.array([Decimal("0.5"), Decimal("-0.5"), None], pa.decimal128(5, 5)),
            "z": pa.array([*zoned, None], pa.timestamp("us", "UTC")),
            "l": pa.array([*local, None], pa.timestamp("us")),
            "d": pa.array([*days, None], pa.date32()),
            "b": [True, False, None],
            "r": [float("nan"), -0.0, None],
            "q": pa.array([1e-5, 3.14, None], pa.float32()),
            "y": [b"\xde\xad\xbe\xef", b"", None],
            "c": ["x   ", "    ", None],
            "ours alone": [1, 2, 3],
        }
    )
    path = str(tmp_path / "t")
    write_deltalake(path, table)
    return database, path


def test_equal_tables_compare_equal(pair: tuple[Database, str]) -> None:
    database, path = pair
    assert compare_tables(database.conninfo, "public.t", path) is None


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE t SET s = NULL WHERE s = ''",
        "UPDATE t SET s = '' WHERE s IS NULL",
        'UPDATE t SET n = n + 0.01 WHERE "Id""x" = 2',
        "UPDATE t SET r = 0 WHERE r = 0",
        'UPDATE t SET q = q + 1e-6 WHERE "Id""x" = 2',
        "UPDATE t SET z = z + interval '1 microsecond'",
        "UPDATE t SET l = l + interval '1 microsecond'",
        "UPDATE t SET d = d - 1",
        "UPDATE t SET y = NULL WHERE y = ''",
        "UPDATE t SET b = NOT b",
        "UPDATE t SET c = 'y'",
        'DELETE FROM t WHERE "Id""x" = 3',
        "INSERT INTO t VALUES (4)",
    ],
)
def test_every_difference_is_found(pair: tuple[Database, str], change: str) -> None:
    database, path = pair
    database.execute(change)
    difference = compare_tables(database.conninfo, "public.t", path)
    assert difference is not None
    assert difference.missing + difference.extra > 0
    assert len(difference.missing_sample) == difference.missing
    assert len(difference.extra_sample) == difference.extra


def test_the_number_of_equal_rows_is_compared(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (a int); INSERT INTO t SELECT g % 3 FROM generate_series(0, 9) g")
    path = str(tmp_path / "t")
    write_deltalake(path, pa.table({"a": pa.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2], pa.int32())}))
    assert compare_tables(database.conninfo, "public.t", path) is None
    write_deltalake(path, pa.table({"a": pa.array([0, 0, 0, 1, 1, 1, 2, 2, 2, 2], pa.int32())}), mode="overwrite")
    difference = compare_tables(database.conninfo, "public.t", path)
    assert difference is not None
    assert (difference.missing_sample, difference.extra_sample) == ((("0",),), (("2",),))
    assert "a='0'" in str(difference)
    assert compare_tables(database.conninfo, "public.t", path, version=0) is None


def test_a_row_larger_than_the_parsers_block(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (a int, s text); INSERT INTO t VALUES (1, repeat(E'x\\n', 5000000))")
    path = str(tmp_path / "t")
    write_deltalake(path, pa.table({"a": pa.array([1], pa.int32()), "s": ["x\n" * 5_000_000]}))
    assert compare_tables(database.conninfo, "public.t", path) is None


def test_a_column_list_and_a_row_filter(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (a int, b int); INSERT INTO t VALUES (1, 1), (2, 2)")
    path = str(tmp_path / "t")
    write_deltalake(path, pa.table({"a": pa.array([2], pa.int32())}))
    assert compare_tables(database.conninfo, "public.t", path, columns=["a"], where="a > 1") is None
    difference = compare_tables(database.conninfo, "public.t", path)
    assert difference is not None
    assert difference.reason == "Delta lacks the columns b"


def test_comparing_a_missing_table_is_an_error(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (a int)")
    with pytest.raises(UndefinedTable, match="no Delta table"):
        compare_tables(database.conninfo, "public.t", str(tmp_path / "t"))
    write_deltalake(str(tmp_path / "t"), pa.table({"a": pa.array([], pa.int32())}))
    assert compare_tables(database.conninfo, "public.t", str(tmp_path / "t")) is None
    with pytest.raises(UndefinedTable, match=r'relation "public\.u" does not exist'):
        compare_tables(database.conninfo, "public.u", str(tmp_path / "t"))
