"""The command's options and output, also with mistakes: PostgreSQL's words, and earlier output is not lost."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest

from pubsub.backend.messages import read_error
from pubsub.errors import PubsubError
from pubsub.protocol.copyboth import Keepalive, XLogData, read_server_message
from pubsub.testing.fixtures import Servers
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import PATIENCE, wait_until
from tests.support.walsender_decodings import read_messages
from walsender.plugins.pgoutput import PgoutputOptions
from walsender.plugins.test_decoding import TestDecodingOptions

P = {"proto_version": "1", "publication_names": "p"}
PGOUTPUT: tuple[dict[str, str], ...] = (
    *({**P, "binary": value} for value in ("on", "FALSE", "1", "t", "yes", "")),
    *({**P, "messages": value} for value in ("true", "maybe")),
    *({**P, "proto_version": value} for value in ("0", "4", "5", "x", "", "-1", "+1", " 1", "1 ", "99999999999")),
    *({**P, "proto_version": "4", "streaming": value} for value in ("on", "OFF", "Parallel", "1", "sometimes")),
    *({**P, "origin": value} for value in ("none", "ANY", "other", "")),
    *(
        {**P, "publication_names": value}
        for value in ("", " ", "p,", ",p", "p q", '"p', '"p"q', '""', "P", " p , p ", "p.p", '"a,b","q""x"', "p" * 70)
    ),
    {**P, "streaming": "on"},
    {**P, "proto_version": "3", "streaming": "parallel"},
    {**P, "proto_version": "2", "two_phase": "on"},
    {**P, "proto_version": "3", "two_phase": "on"},
    {**P, "two_phase": "1"},
    {"proto_version": "1"},
    {"publication_names": "p"},
    {"publication_names": ""},
    {"nothing": "1", **P, "proto_version": "x"},
    {**P, "proto_version": "x", "nothing": "1"},
)
TEST_DECODING: tuple[dict[str, str], ...] = (
    *({"include-xids": value} for value in ("tru", "Of", "o", "1", "2", "", " on", "yesno")),
    {"skip-empty-xacts": "perhaps"},
    {"nothing": "1"},
    {"only-local": "x", "nothing": "1"},
)


@pytest.mark.parametrize("version", ["15", "16", "17", "18", "19"])
def test_options_are_taken_and_refused_as_the_server_does(servers: Servers, version: str) -> None:
    server = servers[version]
    dbname = "walsender_options"
    server.create_database(dbname)
    # All of these publish nothing: the names are not looked up.
    server.execute("CREATE TABLE t (id int)", dbname)
    with server.connect(dbname) as connection:
        for plugin, function, cases in (
            ("pgoutput", "pg_logical_slot_peek_binary_changes", PGOUTPUT),
            ("test_decoding", "pg_logical_slot_peek_changes", TEST_DECODING),
        ):
            slot = f"options_{plugin}"
            connection.execute("SELECT pg_create_logical_replication_slot(%s, %s)", [slot, plugin])
            for options in cases:
                given = [word for pair in options.items() for word in pair]
                theirs: tuple[str | None, ...] = ()
                try:
                    connection.execute(
                        f"SELECT count(*) FROM {function}(%s, NULL, NULL, VARIADIC %s)".encode(), [slot, given]
                    )
                except psycopg.Error as error:
                    theirs = error.sqlstate, error.diag.message_primary
                ours: tuple[str | None, ...] = ()
                try:
                    if plugin == "pgoutput":
                        PgoutputOptions.parse(options, connection.info.server_version)
                    else:
                        TestDecodingOptions.parse(options)
                except PubsubError as failure:
                    ours = failure.sqlstate, failure.message
                assert ours == theirs, options
    server.drop_database(dbname)


def decode(server: EmbeddedPostgres, *more: str, stdout: int | None = subprocess.PIPE) -> tuple[int, bytes, str]:
    command = [sys.executable, "-m", "walsender", "decode", "--conninfo", server.conninfo(), *more]
    ran = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, timeout=60, check=False)
    return ran.returncode, ran.stdout, ran.stderr.decode()


def test_a_publication_may_have_any_name(publisher: EmbeddedPostgres) -> None:
    from walsender.cli import _publications

    assert _publications("p") == ["p"]
    assert _publications('Pq,"a,b",q"x') == ["Pq", "a,b", 'q"x']
    assert _publications('"q""x",p') == ['q"x', "p"]
    assert _publications(" p") == [" p"]
    for wrong in ("", ",", "p,", ",p", '"p', '"p"q', '""'):
        with pytest.raises(PubsubError, match="invalid list of publications"):
            _publications(wrong)


@pytest.mark.full
@pytest.mark.parametrize("encoding", ["LATIN1", "SQL_ASCII"])
def test_publications_in_other_encodings(publisher: EmbeddedPostgres, encoding: str) -> None:
    """A missing publication is reported, as by 18, even if no such name can exist; SQL_ASCII takes names as bytes."""
    database = f"in_{encoding.lower()}"
    publisher.create_database(database, f"TEMPLATE template0 ENCODING '{encoding}' LOCALE 'C'")
    with psycopg.connect(publisher.conninfo(database), client_encoding="UTF8", autocommit=True) as connection:
        connection.execute('CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION "p\u00e4" FOR TABLE t'.encode())
        connection.execute("CHECKPOINT")
        start = publisher.query("SELECT pg_current_wal_insert_lsn()")[0][0]
        connection.execute("INSERT INTO t VALUES (1)")
        end = publisher.query("SELECT pg_current_wal_insert_lsn()")[0][0]
    more = ("--conninfo", publisher.conninfo(database), "--start", start, "--end", end)
    code, output, errors = decode(publisher, *more, "--publication", "p\u00e4")
    assert (code, errors.count("\n")) == (0, 1)
    assert [message.data[:1] for message in read_messages(output)] == [b"B", b"R", b"I", b"C"]
    both = (*more, "--publication", "p\u00e4,\u8868")
    # Without the option a missing publication is an error, before anything is written.
    code, output, errors = decode(publisher, *both)
    assert (code, output) == (1, b"")
    assert 'ERROR:  publication "\u8868" does not exist' in errors.splitlines()
    assert "--missing-publication server" in errors
    code, output, errors = decode(publisher, *both, "--missing-publication", "server")
    assert code == 0
    assert 'WARNING:  skipped loading publication "\u8868"' in errors.splitlines()
    assert errors.count("WARNING") == 1
    assert len(list(read_messages(output))) == 4
    publisher.drop_database(database)


def test_pgoutput_is_not_written_to_a_terminal(publisher: EmbeddedPostgres) -> None:
    ours, theirs = os.openpty()
    try:
        code, _, errors = decode(publisher, "--publication", "nothing", stdout=theirs)
        assert code == 2
        assert "ERROR:  pgoutput is binary, and is not written to a terminal" in errors.splitlines()
        assert "--output -" in errors
        # `--output -` gets as far as the publication; test_decoding is text and needs no such option.
        code, _, errors = decode(publisher, "--publication", "nothing", "--output", "-", stdout=theirs)
        assert (code, errors.splitlines()[0]) == (1, 'ERROR:  publication "nothing" does not exist')
        code, _, errors = decode(publisher, "--plugin", "test_decoding", "--option", "include-xid=1", stdout=theirs)
        assert (code, errors.splitlines()) == (
            1,
            ['ERROR:  option "include-xid" = "1" is unknown', 'HINT:  Perhaps you meant the option "include-xids".'],
        )
    finally:
        os.close(ours)
        os.close(theirs)
    code, _, errors = decode(publisher, "--publication", "p", "--option", "mesages=on")
    assert (code, errors.splitlines()[1]) == (1, 'HINT:  Perhaps you meant the option "messages".')


def test_as_a_stream_it_is_what_a_walsender_sends(publisher: EmbeddedPostgres) -> None:
    """The same messages, as CopyData; keepalives that say how far it is; CopyDone, or an error with all its fields."""
    publisher.execute("CREATE TABLE streamed (id int PRIMARY KEY); CREATE PUBLICATION streamed FOR TABLE streamed")
    publisher.execute("CHECKPOINT")
    start = publisher.query("SELECT pg_current_wal_insert_lsn()")[0][0]
    publisher.execute("INSERT INTO streamed VALUES (1)")
    publisher.execute("INSERT INTO streamed VALUES (2)")
    end = publisher.query("SELECT pg_current_wal_insert_lsn()")[0][0]
    more = ("--conninfo", publisher.conninfo(), "--publication", "streamed", "--start", start, "--end", end)
    code, output, _ = decode(publisher, *more)
    expected = [(message.lsn, message.data) for message in read_messages(output)]
    code, output, _ = decode(publisher, *more, "--as-stream")
    *frames, last = _messages(output)
    assert (code, last) == (0, (b"c", b""))
    assert {kind for kind, _ in frames} == {b"d"}
    sent = [read_server_message(body) for _, body in frames]
    changes = [message for message in sent if isinstance(message, XLogData)]
    assert [(message.start_lsn, message.data) for message in changes] == expected
    told = [message.wal_end for message in sent if isinstance(message, Keepalive)]
    assert told == sorted(told)
    code, output, errors = decode(publisher, *more, "--as-stream", "--option", "publication_names=missing")
    assert code == 2, errors
    more = ("--conninfo", publisher.conninfo(), "--publication", "missing", "--as-stream")
    code, output, errors = decode(publisher, *more)
    ((kind, body),) = _messages(output)
    error = read_error(body)
    assert (code, kind, error.sqlstate, error.message) == (1, b"E", "42704", 'publication "missing" does not exist')
    assert error.hint is not None
    assert error.hint in errors


def _messages(output: bytes) -> list[tuple[bytes, bytes]]:
    found = []
    while output:
        length = int.from_bytes(output[1:5], "big")
        found.append((output[:1], output[5 : 1 + length]))
        output = output[1 + length :]
    return found


def test_help_explains_the_output_and_its_start_and_end() -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "walsender", "decode", "--help"], capture_output=True, text=True, check=True
    )
    for words in (
        "8 of its LSN",
        "4 of its length",
        "Without --start",
        "With --end it ends by itself",
        "--missing-publication",
    ):
        assert words in ran.stdout


@pytest.mark.full
def test_wrong_usage(publisher: EmbeddedPostgres) -> None:
    for more, text in (
        ((), "pgoutput needs --publication"),
        (("--publication", "p,"), 'invalid list of publications: "p,"'),
        (("--publication", "p", "--option", "binary=on", "--option", "binary=off"), "conflicting or redundant options"),
        (("--publication", "p", "--option", "publication_names=p"), "conflicting or redundant options"),
        (("--publication", "p", "--proto-version", "1", "--option", "proto_version=1"), "conflicting or redundant"),
        (("--publication", "p", "--start", "0/2", "--end", "0/1"), "the end 0/1 lies before the start 0/2"),
        (("--publication", "p", "--start", "0/100000000"), 'invalid input syntax for type pg_lsn: "0/100000000"'),
        (("--publication", "p", "--confirm"), "--confirm needs --slot"),
        (
            ("--publication", "p", "--wal-receiver-timeout", "1x"),
            'invalid value for parameter "wal_receiver_timeout": "1x"',
        ),
        (("--publication", "p", "--work-mem", "-1"), 'invalid value for parameter "logical_decoding_work_mem": "-1"'),
    ):
        code, output, errors = decode(publisher, *more)
        assert (code, output) == (2, b""), more
        assert text in errors


@pytest.mark.full
def test_where_the_output_goes(tmp_path: Path) -> None:
    with EmbeddedPostgres("18", settings={"autovacuum": "off"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE t")
        server.execute("CHECKPOINT")
        ((start,),) = server.query("SELECT pg_current_wal_insert_lsn()")
        server.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 2000) g")
        ((end,),) = server.query("SELECT pg_current_wal_insert_lsn()")
        more = ("--publication", "p", "--wal", str(server.data_dir / "pg_wal"), "--start", start, "--end", end)
        code, output, errors = decode(server, *more)
        assert code == 0
        assert "consistent point" in errors
        assert len(list(read_messages(output))) == 2003
        # The other plugin's options are ignored.
        code, lines, _ = decode(server, *more, "--proto-version", "4", "--plugin", "test_decoding")
        assert code == 0
        assert lines.count(b"\n") == 2002
        file = tmp_path / "output"
        file.write_bytes(b"of the last time")
        # Earlier output stays until there is new output.
        assert decode(server, *more, "--slot", "nothing", "--output", str(file))[0] == 1
        assert file.read_bytes() == b"of the last time"
        assert decode(server, *more, "--output", str(file))[0] == 0
        assert file.read_bytes() == output
        for name, text in (
            (str(tmp_path), f'could not open file "{tmp_path}": Is a directory'),
            (f"{tmp_path}/no/where", f'could not open file "{tmp_path}/no/where": No such file or directory'),
            ("/dev/full", 'could not write to file "/dev/full": No space left on device'),
        ):
            code, _, errors = decode(server, *more, "--output", name)
            assert code == 1
            assert f"ERROR:  {text}" in errors.splitlines()
        with Path("/dev/full").open("wb") as full:
            code, _, errors = decode(server, *more, stdout=full.fileno())
        assert code == 1
        assert "ERROR:  could not write to standard output: No space left on device" in errors.splitlines()
        # A reader that closes the pipe has what it wants: nothing is said, as by other programs in a pipe.
        command = [sys.executable, "-m", "walsender", "decode", "--conninfo", server.conninfo(), *more]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.read(100) == output[:100]
            process.stdout.close()
            assert [line.partition(b" point ")[0] for line in process.stderr] == [b"consistent"]
            assert process.wait(PATIENCE) == 1


@pytest.mark.full
def test_signals_end_the_command_at_any_point(tmp_path: Path) -> None:
    """It ends with a whole message if someone reads the output, and also if nobody does; nothing is left behind."""
    spill = tmp_path / "spill"
    spill.mkdir()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    environment = {**os.environ, "TMPDIR": str(spill)}
    with EmbeddedPostgres("18", settings={"autovacuum": "off"}) as server:
        server.execute("CREATE TABLE t (id int PRIMARY KEY, b text); CREATE PUBLICATION p FOR TABLE t")
        server.execute("CHECKPOINT")
        ((start,),) = server.query("SELECT pg_current_wal_insert_lsn()")
        server.execute("INSERT INTO t SELECT g, repeat('x', 500) FROM generate_series(1, 4000) g")
        command = [sys.executable, "-m", "walsender", "decode", "--conninfo", server.conninfo(), "--publication", "p"]
        command += ["--start", start]

        @contextmanager
        def started(*more: str) -> Iterator[subprocess.Popen[bytes]]:
            pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
            # A suite under nohup ignores SIGHUP, and so would the command.
            before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
            process = subprocess.Popen([*command, *more], env=environment, **pipes)
            signal.signal(signal.SIGHUP, before)
            with process:
                try:
                    yield process
                finally:
                    process.kill()  # after a failure nobody else would end it

        def sleeps(process: subprocess.Popen[bytes]) -> bool:
            return ") S " in Path(f"/proc/{process.pid}/stat").read_text()

        def consistent_and_full(process: subprocess.Popen[bytes]) -> None:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stderr.readline().startswith(b"consistent point")
            pipe = process.stdout.fileno()
            size = fcntl.fcntl(pipe, fcntl.F_GETPIPE_SZ)
            held = bytearray(4)

            def is_full() -> bool:
                fcntl.ioctl(pipe, termios.FIONREAD, held)
                return int.from_bytes(held, sys.byteorder) > size // 2 and sleeps(process)

            wait_until(is_full, "the pipe is full")

        # A pipe that nobody reads, with two signals; one that is read on; a FIFO that nobody has opened.
        with started() as process:
            consistent_and_full(process)
            process.terminate()
            process.send_signal(signal.SIGINT)
            assert process.communicate(timeout=PATIENCE)[1] == b""
            assert process.returncode == 130
        for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
            with started() as process:
                consistent_and_full(process)
                process.send_signal(number)
                output, errors = process.communicate(timeout=PATIENCE)
                messages = list(read_messages(output))
                assert sum(12 + len(message.data) for message in messages) == len(output)
                assert 10 < len(messages) < 4000
                assert (process.returncode, errors) == (0, b"")
        with started("--output", str(fifo)) as process:
            wait_until(
                lambda: "google_crc32c" in Path(f"/proc/{process.pid}/maps").read_text() and sleeps(process),
                "it has begun",
            )
            process.terminate()
            assert process.wait(PATIENCE) == -signal.SIGTERM
        assert list(spill.iterdir()) == []
        wait_until(
            lambda: server.query("SELECT 1 FROM pg_stat_activity WHERE application_name = 'walsender'") == [],
            "the connections end",
        )


def test_a_position_is_asked_for_before_there_is_one() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        conninfo = f"host=127.0.0.1 port={silent.getsockname()[1]} sslmode=disable gssencmode=disable"
        command = [sys.executable, "-m", "walsender", "decode", "--conninfo", conninfo, "--publication", "p"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
            with silent.accept()[0]:
                process.send_signal(signal.SIGUSR1)
                process.send_signal(signal.SIGTERM)
                assert process.communicate(timeout=PATIENCE) == (b"", b"")
        assert process.returncode == 0
