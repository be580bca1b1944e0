"""`pubsub publish` before a server that asks for passwords: SCRAM passed through, or held here; TLS; the protocol's versions."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import pq

from pubsub.backend import messages as m
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until

PASSWORD = "top secret"


@pytest.fixture(scope="module")
def upstream() -> Iterator[EmbeddedPostgres]:
    """A PostgreSQL 18 that asks for passwords by SCRAM, with a role that may replicate and one that may not."""
    with EmbeddedPostgres("18", auth="scram-sha-256", password=PASSWORD, settings={"wal_level": "logical"}) as server:
        server.start() if not server.running else None
        server.execute(
            "CREATE ROLE follower LOGIN REPLICATION PASSWORD 'follows';"
            "CREATE ROLE reader LOGIN PASSWORD 'reads'; CREATE TABLE t (id int PRIMARY KEY); GRANT SELECT ON t TO follower;"
            "CREATE PUBLICATION p FOR TABLE t"
        )
        yield server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl makes the certificate")
    folder = tmp_path_factory.mktemp("tls")
    key, path = folder / "key.pem", folder / "certificate.pem"
    subject = ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    command = [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", *subject]
    subprocess.run([*command, "-keyout", str(key), "-out", str(path)], check=True, capture_output=True)
    return str(path), str(key)


@pytest.fixture(scope="module")
def passed_on(
    upstream: EmbeddedPostgres, certificate: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Publish]:
    cert, key = certificate
    publish = Publish(tmp_path_factory.mktemp("publish") / "node", upstream.conninfo(), "--cert", cert, "--key", key)
    yield publish
    assert publish.terminate() == 0, publish.tail()


@pytest.fixture(scope="module")
def held(
    upstream: EmbeddedPostgres, certificate: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Publish]:
    """A server of ours with the verifiers of pg_authid in a file, and settings in a file, too."""
    home = tmp_path_factory.mktemp("publish") / "node"
    home.mkdir(mode=0o700)
    roles = upstream.query(
        "SELECT rolname, rolpassword FROM pg_authid WHERE rolpassword IS NOT NULL AND rolname <> 'reader'"
    )
    lines = [f"{name}\t{verifier}" for name, verifier in roles]
    (stale,) = {line.split("\t")[1] for line in lines if line.startswith("follower")}
    (home / "users").write_text("\n".join([*lines, f"reader {stale}"]))
    (home / "users").chmod(0o600)
    cert, key = certificate
    (home / "pubsub.toml").write_text(
        f'[walsender]\nauth_file = "users"\nssl_cert_file = "{cert}"\nssl_key_file = "{key}"\nauthentication_timeout = "5s"\n'
    )
    publish = Publish(home, upstream.conninfo())
    yield publish
    assert publish.terminate() == 0, publish.tail()


def refusal(conninfo: str) -> str:
    connection = pq.PGconn.connect(conninfo.encode())
    assert connection.status != pq.ConnStatus.OK
    return connection.error_message.decode()


@pytest.mark.parametrize("tls", ["disable", "require"])
@pytest.mark.parametrize("where", ["passed_on", "held"])
def test_passwords(request: pytest.FixtureRequest, where: str, tls: str) -> None:
    """Right ones, wrong ones, and what a role may."""
    publish: Publish = request.getfixturevalue(where)
    follower = {"user": "follower", "password": "follows", "sslmode": tls}
    assert publish.query("SELECT current_user, count(*) FROM t", **follower) == [("follower", 0)]
    assert publish.query("SELECT * FROM pg_create_logical_replication_slot('s', 'pgoutput')", **follower)[0][0] == "s"
    assert publish.query("SELECT pg_drop_replication_slot('s')", **follower) == [("",)]
    assert 'password authentication failed for user "follower"' in refusal(
        publish.conninfo(**{**follower, "password": "x"})
    )
    assert 'password authentication failed for user "nobody"' in refusal(
        publish.conninfo(**{**follower, "user": "nobody"})
    )
    walsender = pq.PGconn.connect(publish.conninfo(**follower, replication="database").encode())
    assert walsender.status == pq.ConnStatus.OK, walsender.error_message
    assert walsender.exec_(b"IDENTIFY_SYSTEM").status == pq.ExecStatus.TUPLES_OK
    walsender.finish()


def test_without_the_replication_attribute_nobody_follows(passed_on: Publish) -> None:
    conninfo = passed_on.conninfo(user="reader", password="reads", replication="database")
    assert "permission denied to start WAL sender" in refusal(conninfo)
    with (
        passed_on.connect(user="reader", password="reads") as connection,
        pytest.raises(psycopg.errors.InsufficientPrivilege, match="permission denied to use replication slots"),
    ):
        connection.execute("SELECT * FROM pg_create_logical_replication_slot(%s, 'pgoutput')", ["s"])


def test_held_here_channels_are_bound(held: Publish, passed_on: Publish) -> None:
    """Where this program has the verifiers, its own certificate can be bound to; passed on, it is not offered."""
    follower = {"user": "follower", "password": "follows", "channel_binding": "require"}
    assert held.query("SELECT 1", **follower, sslmode="require") == [(1,)]
    assert "channel binding" in refusal(passed_on.conninfo(**follower, sslmode="require"))


def test_a_verifier_that_the_upstream_server_does_not_have(held: Publish) -> None:
    assert "the upstream server has another password for this role" in refusal(
        held.conninfo(user="reader", password="follows")
    )


def test_a_subscription_with_passwords_held_here(held: Publish, upstream: EmbeddedPostgres) -> None:
    with EmbeddedPostgres("18", settings={"wal_level": "logical"}) as subscriber:
        subscriber.start() if not subscriber.running else None
        subscriber.execute("CREATE TABLE t (id int PRIMARY KEY)")
        upstream.execute("INSERT INTO t VALUES (1)")
        conninfo = held.conninfo(user="follower", password="follows", sslmode="require", channel_binding="require")
        subscriber.execute(f"CREATE SUBSCRIPTION s CONNECTION '{conninfo}' PUBLICATION p")
        upstream.execute("INSERT INTO t VALUES (2)")
        wait_until(lambda: subscriber.query("SELECT id FROM t ORDER BY 1") == [(1,), (2,)], "it follows")
        subscriber.execute("DROP SUBSCRIPTION s")
    upstream.execute("TRUNCATE t")


def _own_address() -> str:
    """An address of this machine's that is no loopback one."""
    with socket.socket(type=socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent
        except OSError:
            pytest.skip("the machine has no address of its own")
        return str(probe.getsockname()[0])


@pytest.mark.full
def test_trust_at_the_upstream_server_is_for_this_host_s_clients(
    publisher: EmbeddedPostgres, certificate: tuple[str, str], tmp_path: Path
) -> None:
    address = _own_address()
    cert, key = certificate
    publish = Publish(tmp_path / "node", publisher.conninfo(), host="0.0.0.0")
    try:
        assert publish.query("SELECT 1") == [(1,)]
        for parameters in ({}, {"replication": "database"}, {"replication": "true"}):
            assert "in without asking for anything" in refusal(publish.conninfo(host=address, **parameters))
    finally:
        assert publish.terminate() == 0, publish.tail()
    options = ("--allow-trust", "--require-tls", "--cert", cert, "--key", key)
    publish = Publish(tmp_path / "node", publisher.conninfo(), *options, host="0.0.0.0")
    try:
        for host in ("127.0.0.1", address):
            assert publish.query("SELECT 1", host=host, sslmode="require") == [(1,)]
            assert "no pg_hba.conf entry for host" in refusal(publish.conninfo(host=host, sslmode="disable"))
    finally:
        assert publish.terminate() == 0, publish.tail()


def sleeps(watcher: psycopg.Connection[Any], pid: int) -> None:
    active = "SELECT state = 'active' FROM pg_stat_activity WHERE pid = %s AND query LIKE 'SELECT pg_sleep%%'"
    wait_until(lambda: watcher.execute(active, [pid]).fetchone() == (True,), "it sleeps")


@pytest.mark.parametrize("where", ["passed_on", "held"])
def test_versions_of_the_protocol(request: pytest.FixtureRequest, where: str) -> None:
    """3.0 and 3.2, whose cancel keys are longer; a cancel request ends what runs."""
    publish: Publish = request.getfixturevalue(where)
    if pq.version() < 180000:
        pytest.skip("libpq knows 3.0 only")
    for version in ("3.0", "3.2", "latest"):
        conninfo = publish.conninfo(user="follower", password="follows", max_protocol_version=version)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            assert connection.execute("SELECT 1").fetchone() == (1,)
            connection.pgconn.send_query(b"SELECT pg_sleep(100)")
            with psycopg.connect(conninfo, autocommit=True) as watcher:
                sleeps(watcher, connection.info.backend_pid)
            connection.pgconn.get_cancel().cancel()
            result = connection.pgconn.get_result()
            assert result is not None
            assert result.error_field(pq.DiagnosticField.SQLSTATE) == b"57014"
            assert connection.pgconn.get_result() is None


def test_a_stream_can_be_cancelled(passed_on: Publish) -> None:
    walsender = pq.PGconn.connect(
        passed_on.conninfo(user="postgres", password=PASSWORD, replication="database").encode()
    )
    # An error drops temporary slots, as PostgreSQL's does; so only the other one is there afterwards.
    walsender.exec_(b"CREATE_REPLICATION_SLOT t TEMPORARY LOGICAL pgoutput (SNAPSHOT 'nothing')")
    walsender.exec_(b"CREATE_REPLICATION_SLOT c LOGICAL pgoutput (SNAPSHOT 'nothing')")
    started = walsender.exec_(b"START_REPLICATION SLOT c LOGICAL 0/0 (proto_version '4', publication_names 'p')")
    assert started.status == pq.ExecStatus.COPY_BOTH
    walsender.get_cancel().cancel()
    size, _ = 1, b""
    while size > 0:
        size, _ = walsender.get_copy_data(0)
    result = walsender.get_result()
    assert result is not None
    assert result.error_field(pq.DiagnosticField.SQLSTATE) == b"57014"
    assert walsender.get_result() is None
    gone = walsender.exec_(b"DROP_REPLICATION_SLOT t")
    assert gone.error_field(pq.DiagnosticField.SQLSTATE) == b"42704"
    assert walsender.exec_(b"DROP_REPLICATION_SLOT c").command_status == b"DROP_REPLICATION_SLOT"
    walsender.finish()


def test_nobody_is_heard_at_length_before_authentication(passed_on: Publish, held: Publish) -> None:
    """A message of a gigabyte, or a silent peer, costs neither memory nor time."""
    import psutil

    for publish in (passed_on, held):
        before = psutil.Process(publish.pid).memory_info().rss
        user = m.startup(3 << 16, {"user": "follower", "database": "postgres"})
        for beginning in (b"", user):
            with socket.create_connection(("127.0.0.1", publish.port)) as peer:
                peer.sendall(beginning)
                if beginning:
                    assert peer.recv(1) == b"R"
                peer.sendall(b"p" + (1 << 30).to_bytes(4, "big") if beginning else (1 << 30).to_bytes(4, "big"))
                peer.settimeout(30)
                sent = 0
                try:
                    while sent < 256 << 20:
                        peer.sendall(bytes(1 << 16))
                        sent += 1 << 16
                except ConnectionError:
                    pass
                assert sent < 64 << 20, "it went on listening"
        assert psutil.Process(publish.pid).memory_info().rss - before < 30 << 20
    with socket.create_connection(("127.0.0.1", held.port)) as peer:
        peer.settimeout(30)
        peer.sendall(m.startup(3 << 16, {"user": "follower", "database": "postgres"}))
        got = b""
        while data := peer.recv(1 << 16):
            got += data
        assert b"canceling authentication due to timeout" in got


def test_a_client_that_never_reads_is_bounded(passed_on: Publish, upstream: EmbeddedPostgres) -> None:
    """Rows wait at the upstream server, and a stream's messages in its process."""
    import psutil

    before = psutil.Process(passed_on.pid).memory_info().rss
    user = {"user": "postgres", "password": PASSWORD, "sslmode": "disable"}
    idle: list[psycopg.Connection[Any]] = [
        psycopg.connect(passed_on.conninfo(**user), autocommit=True) for _ in range(3)
    ]
    for connection in idle:
        connection.pgconn.send_query(b"SELECT repeat('x', 1000000) FROM generate_series(1, 500)")
    sending = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'ClientWrite'"
    wait_until(lambda: upstream.query(sending) == [(3,)], "the upstream server waits")
    assert psutil.Process(passed_on.pid).memory_info().rss - before < 40 << 20
    # One field of 300 MB passes in pieces, both ways.
    with psycopg.connect(passed_on.conninfo(**user), autocommit=True) as connection:
        (size,) = connection.execute("SELECT length(%s::text)", ["y" * (60 << 20)]).fetchone() or ()
        assert size == 60 << 20
        (text,) = connection.execute("SELECT repeat('z', 60 << 20)").fetchone() or ()
        assert len(text) == 60 << 20
    assert psutil.Process(passed_on.pid).memory_info().rss - before < 40 << 20
    for connection in idle:
        connection.close()
