"""The sources of the WAL: crashes, archives, roles; and what is refused before anything starts."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pytest

from pubsub.protocol.lsn import Lsn
from pubsub.testing.fault_points import Faults
from pubsub.testing.servers import EmbeddedPostgres
from tests.support import walsender_workload as workload
from tests.support.replica import PATIENCE
from tests.support.walsender_compare import differences
from tests.support.walsender_decodings import Decoding, create_slot, flush_lsn, slot_changes

OPTIONS = {"proto_version": "1", "publication_names": "p"}


@pytest.mark.full
def test_crashes(tmp_path: Path) -> None:
    """kill -9 of the server, with records cut off in the middle: the decoding goes on when it is back."""
    with EmbeddedPostgres("18", settings={"fsync": "on", "autovacuum": "off"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        create_slot(server, "postgres", "compare", "pgoutput")
        with Decoding(server, "postgres") as decoding:
            decoding.wait_consistent()
            for number in range(3):
                first = number * 10000
                server.execute(
                    f"INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series({first}, {first + 500}) g"
                )
                connection = server.connect()
                connection.execute("BEGIN")
                connection.execute(
                    f"INSERT INTO t SELECT g, repeat('y', 500) FROM generate_series({first + 5000}, {first + 5500}) g".encode()
                )
                server.kill()
                connection.close()
                server.start()
                server.execute(f"UPDATE t SET b = 'z' WHERE id = {first}")
            end = flush_lsn(server)
            decoding.wait_for(end, 90)
            ours = decoding.stop()
        assert differences(ours, slot_changes(server, "postgres", "compare", "pgoutput", OPTIONS)) == ""


@pytest.mark.parametrize("version", ["15", "18", "19"])
def test_an_archive(version: str) -> None:
    """Part of the past comes from compressed segments, the end from the server, which has removed the rest."""
    with EmbeddedPostgres(version, settings={"autovacuum": "off", "max_prepared_transactions": 10}) as server:
        archive = server.socket_dir / "archive"
        archive.mkdir()
        os.chown(archive, server.data_dir.stat().st_uid, -1)
        server.execute(f"ALTER SYSTEM SET archive_command = 'cp %p {archive}/%f'")
        server.execute("ALTER SYSTEM SET archive_mode = on")
        server.restart()
        server.create_database("db")
        with server.connect("db") as connection:
            for statement in workload.SETUP.split(";\n"):
                if statement.strip():
                    connection.execute(statement.encode())
        server.execute("CHECKPOINT")
        start = create_slot(server, "db", "compare", "pgoutput")
        with server.connect("db") as connection:
            for number, statement in enumerate(workload.STATEMENTS[:60]):
                connection.execute(statement.encode())
                if number % 20 == 19:
                    connection.execute("CHECKPOINT")
                    connection.execute("SELECT pg_switch_wal()")
        end = flush_lsn(server, "db")
        theirs = slot_changes(server, "db", "compare", "pgoutput", OPTIONS)
        deadline = time.monotonic() + 30
        while server.query("SELECT archived_count FROM pg_stat_archiver")[0][0] < 3 and time.monotonic() < deadline:
            time.sleep(0.05)
        segments = sorted(path for path in archive.iterdir() if len(path.name) == 24)
        assert len(segments) >= 3
        for path, (codec, ending) in zip(segments, (("zstd", ".zst"), ("gzip", ".gz"), ("lz4", ".lz4")), strict=False):
            with pa.CompressedOutputStream(str(path) + ending, codec) as output:
                output.write(path.read_bytes())
            path.unlink()
        more = ["--wal", str(archive), "--start", str(Lsn(start)), "--end", str(Lsn(end))]
        with Decoding(server, "db", more=more) as decoding:
            assert differences(decoding.finish(), theirs) == ""
        # A broken segment with others after it ends the decoding, with the position.
        broken = archive / segments[1].name
        with pa.CompressedInputStream(str(broken) + ".gz", "gzip") as stream:
            data = bytearray(stream.read())
        data[100_000] ^= 1
        broken.write_bytes(data)
        with Decoding(server, "db", more=more) as decoding:
            assert decoding.process.wait(PATIENCE) == 1
            assert "WAL position" in "".join(decoding.errors)


def test_a_copy_of_a_servers_directory(tmp_path: Path) -> None:
    """Segments kept for reuse lie after those in use; another cluster's segments are refused; a gap is reported."""
    small = ["--wal-segsize=1"]
    settings: dict[str, str | int] = {"autovacuum": "off", "min_wal_size": "8MB", "max_wal_size": "8MB"}
    with (
        EmbeddedPostgres("18", settings=settings, initdb=small) as server,
        EmbeddedPostgres("18", settings=settings, initdb=small) as other,
    ):
        load = "INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series({0} * 10000, {0} * 10000 + 3000) g"
        for one in (server, other):
            one.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
            for number in range(8):
                one.execute(load.format(number))
                one.execute("CHECKPOINT")
        start = create_slot(server, "postgres", "compare", "pgoutput")
        for number in range(10, 13):
            server.execute(load.format(number))
        server.execute("CHECKPOINT")
        server.query("SELECT pg_create_physical_replication_slot('hold', true)")
        ((held,),) = server.query(
            "SELECT pg_walfile_name(restart_lsn) FROM pg_replication_slots WHERE slot_name = 'hold'"
        )
        for number in range(13, 15):
            server.execute(load.format(number))
        end = flush_lsn(server)
        theirs = slot_changes(server, "postgres", "compare", "pgoutput", OPTIONS)
        directory = server.data_dir / "pg_wal"
        archive = tmp_path / "archive"
        shutil.copytree(directory, archive)
        ((current,),) = server.query("SELECT pg_walfile_name(pg_current_wal_lsn())")
        for number in (1, 2):
            # Recycled segments, as the server itself keeps them ready after a time of more WAL.
            shutil.copy(archive / segments(archive)[0], archive / f"{int(current, 16) + number:024X}")
        until = ["--start", str(Lsn(start)), "--end", str(Lsn(end))]
        with Decoding(server, "postgres", more=["--wal", str(archive), *until]) as decoding:
            assert differences(decoding.finish(), theirs) == ""
        server.drop_slot("compare")
        for number in range(20, 24):
            server.execute(load.format(number))
            server.execute("CHECKPOINT")
        # The server's segments begin where the archive's end.
        assert segments(directory)[0] == held
        for name in segments(archive):
            if name >= held:
                (archive / name).unlink()
        with Decoding(server, "postgres", more=["--wal", str(archive), *until]) as decoding:
            assert differences(decoding.finish(), theirs) == ""
        missing = segments(archive)[-2]
        (archive / missing).unlink()
        ran = decode(server.conninfo(), "--wal", str(archive), *until)
        assert ran.returncode == 1
        assert f"requested WAL segment {missing} has already been removed" in ran.stderr
        assert "HINT:" in ran.stderr
        for path in (other.data_dir / "pg_wal").iterdir():
            if len(path.name) == 24:
                shutil.copy(path, archive)
        ran = decode(server.conninfo(), "--wal", str(archive), *until)
        assert ran.returncode == 1
        assert "WAL file is from different database system" in ran.stderr


def segments(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if len(path.name) == 24)


def decode(conninfo: str, *more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "walsender", "decode", "--conninfo", conninfo, "--publication", "p", *more]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.full
def test_roles_and_settings() -> None:
    with EmbeddedPostgres("18") as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t; CREATE ROLE plain LOGIN")
        conninfo = server.conninfo(user="plain")
        ran = decode(conninfo)
        assert ran.returncode == 1
        assert "REPLICATION" in ran.stderr
        assert "pg_read_binary_file" in ran.stderr
        assert "A managed service may grant neither" in ran.stderr
        server.execute(
            "ALTER ROLE plain REPLICATION; "
            "GRANT EXECUTE ON FUNCTION pg_read_binary_file(text, bigint, bigint, boolean) TO plain"
        )
        server.execute("CHECKPOINT")
        with Decoding(server, "postgres", conninfo=conninfo) as decoding:
            decoding.wait_consistent()
            server.execute("INSERT INTO t VALUES (1)")
            decoding.wait_for(flush_lsn(server))
            assert [message.data[:1] for message in decoding.stop()] == [b"B", b"R", b"I", b"C"]
        ran = decode(server.conninfo(), "--proto-version", "9")
        assert "only supports protocol 4 or lower" in ran.stderr
        assert decode(server.conninfo(), "--option", "nothing=1").returncode == 1
        assert decode(server.conninfo(), "--start", "xyz").returncode == 2
        server.execute("ALTER SYSTEM SET wal_level = 'replica'")
    with EmbeddedPostgres("18", settings={"wal_level": "replica", "full_page_writes": "off"}) as server:
        ran = decode(server.conninfo())
        assert ran.returncode == 1
        assert 'wal_level is "replica"' in ran.stderr
        assert "full_page_writes" in ran.stderr
        assert "HINT:  ALTER SYSTEM SET wal_level = logical" in ran.stderr


@pytest.mark.full
def test_a_type_that_cannot_be_decoded_is_named() -> None:
    """It is refused by name when the stream starts; what comes later is refused at its first value."""
    with EmbeddedPostgres("18") as server:
        server.execute(
            "CREATE EXTENSION seg; CREATE TABLE rules (id int PRIMARY KEY, a seg); "
            "CREATE TABLE fine (id int PRIMARY KEY, t text)"
        )
        server.execute("CREATE PUBLICATION p FOR TABLE fine, rules; CREATE PUBLICATION q FOR TABLE fine, rules (id)")
        ran = decode(server.conninfo())
        assert ran.returncode == 1
        assert 'table "public.rules"' in ran.stderr
        assert "public.seg" in ran.stderr
        assert "consistent point" not in ran.stderr
        server.execute("CREATE PUBLICATION r FOR TABLE fine WHERE (t = normalize('x'))")
        ran = decode(server.conninfo(), "--publication", "r")
        assert ran.returncode == 1
        assert 'the row filter of table "public.fine"' in ran.stderr
        with Decoding(server, "postgres", publications="q") as decoding:
            decoding.wait_consistent()
            server.execute("INSERT INTO fine VALUES (1)")
            server.execute("INSERT INTO rules VALUES (1, NULL), (2, '1 .. 2')")
            server.execute("ALTER PUBLICATION q SET TABLE fine, rules")
            server.execute("INSERT INTO rules VALUES (3, NULL)")
            server.execute("INSERT INTO rules VALUES (4, '1 .. 2')")
            assert decoding.process.wait(PATIENCE) == 1
            errors = "".join(decoding.errors)
            assert 'table "public.rules"' in errors
            assert "public.seg" in errors
            assert sum(message.data[:1] == b"I" for message in decoding.messages()) == 4


@pytest.mark.full
def test_spill_files_of_a_killed_decoder_are_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with EmbeddedPostgres("18", settings={"autovacuum": "off"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR ALL TABLES")
        more = ("--work-mem", "64kB")
        with Decoding(server, "postgres", more=more) as killed, Decoding(server, "postgres", more=more) as living:
            killed.wait_consistent()
            living.wait_consistent()
            with server.connect() as connection:
                connection.execute("BEGIN")
                connection.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 5000) g")
                killed.wait_for(flush_lsn(server))
                living.wait_for(flush_lsn(server))
                spilled = set(tmp_path.glob("walsender-spill-*/*.spill.arrows"))
                assert len({path.parent for path in spilled}) == 2
                killed.process.kill()
                killed.process.wait()
                with Decoding(server, "nowhere") as third:
                    assert third.process.wait() == 1
                left = {path for path in spilled if path.exists()}
                assert len({path.parent for path in left}) == 1
                connection.execute("COMMIT")
            end = flush_lsn(server)
            living.wait_for(end)
            assert len(living.stop()) == 5003
    assert list(tmp_path.glob("walsender-spill-*")) == []


def test_sessions_that_end_while_the_catalogs_are_read(fault: Faults) -> None:
    """Reading begins anew if an administrator or a restart ends the session; a refused connection is reported."""
    with EmbeddedPostgres("18", settings={"autovacuum": "off", "max_wal_senders": 1}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
        sessions = "FROM pg_stat_activity WHERE application_name = 'walsender' AND backend_type = 'client backend'"
        begun, read = "catalogs being read", "catalogs read"
        fault.arm(begun)
        with Decoding(server, "postgres") as decoding:
            for here, further in ((begun, read), (read, begun)):
                fault.wait(here)
                fault.arm(further)
                assert server.query(f"SELECT pg_terminate_backend(pid, 60000) {sessions}") == [(True,)]
                fault.release(here)
            fault.wait(begun)
            # In order it would wait for the walsender, whose client is held.
            server.restart("immediate")
            fault.release(begun)
            decoding.wait_consistent()
            server.execute("INSERT INTO t VALUES (1)")
            decoding.wait_for(flush_lsn(server))
            ran = decode(server.conninfo())
            assert ran.returncode == 1
            assert 'number of requested standby connections exceeds "max_wal_senders"' in ran.stderr
            assert [message.data[:1] for message in decoding.stop()] == [b"B", b"R", b"I", b"C"]
