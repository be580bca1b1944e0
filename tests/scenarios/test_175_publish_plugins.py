"""An output plugin of a user's own, registered by an entry point: wal2json's format 2, streamed and by SQL."""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Generator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import pq

import pubsub
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.publish import Publish
from tests.support.replica import wait_until


@pytest.fixture(scope="module")
def with_plugins(publisher: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Publish]:
    """Our server in an environment that has the plugin installed, and one that is broken."""
    installed = tmp_path_factory.mktemp("installed")
    metadata = installed / "user_plugins-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: user-plugins\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[pubsub.output_plugins]\nwal2json = tests.support.wal2json_plugin:Wal2Json\n"
        "failing = tests.support.failing_plugin:Failing\n"
        "broken = nowhere.at_all:Plugin\nno_class = json:dumps\npgoutput = json:dumps\nexits = exits_at_once:Plugin\n"
    )
    (installed / "exits_at_once.py").write_text("import sys\n\nsys.exit(3)\n")
    root = Path(pubsub.__file__).parents[1]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(installed), str(root)]))
        publish = Publish(tmp_path_factory.mktemp("publish") / "node", publisher.conninfo())
    yield publish
    assert publish.terminate() == 0, publish.tail()


@pytest.fixture
def ours(with_plugins: Publish, database: Database) -> Iterator[psycopg.Connection[Any]]:
    with with_plugins.connect(dbname=database.name) as connection:
        yield connection
        used = "SELECT count(*) FROM pg_replication_slots WHERE active"
        wait_until(lambda: connection.execute(used).fetchone() == (0,), "nothing uses a slot")
        connection.execute("SELECT pg_drop_replication_slot(slot_name) FROM pg_replication_slots")


def test_wal2json(ours: psycopg.Connection[Any], with_plugins: Publish, database: Database) -> None:
    ours.execute("SELECT pg_create_logical_replication_slot('j', 'wal2json')")
    database.execute(
        'CREATE TABLE t (id int PRIMARY KEY, v text, n numeric(8, 2), b bool, "at" date); CREATE TABLE left_out (id int)'
    )
    database.execute("INSERT INTO t VALUES (1, 'it''s \"ä\"', 1.50, true, '2026-01-02'), (2, NULL, 'NaN', NULL, NULL)")
    database.execute("UPDATE t SET v = 'new', id = 3 WHERE id = 2; INSERT INTO left_out VALUES (1)")
    database.execute("DELETE FROM t WHERE id = 1; TRUNCATE t; SELECT pg_logical_emit_message(true, 'p', 'hello')")
    options = "'filter-tables', 'public.left_out', 'include-types', 'off', 'format-version', '2'"
    query = f"SELECT data FROM pg_logical_slot_peek_changes('j', NULL, NULL, {options})"
    found = [json.loads(row[0]) for row in ours.execute(query).fetchall()]
    key = [{"name": "id", "value": 1}]
    assert [one for one in found if one["action"] not in "BC"] == [
        {
            "action": "I", "schema": "public", "table": "t",
            "columns": [
                *key, {"name": "v", "value": 'it\'s "ä"'}, {"name": "n", "value": 1.5}, {"name": "b", "value": True},
                {"name": "at", "value": "2026-01-02"},
            ],
        },
        {
            "action": "I", "schema": "public", "table": "t",
            "columns": [{"name": "id", "value": 2}, *({"name": one, "value": None} for one in ("v", "n", "b", "at"))],
        },
        {
            "action": "U", "schema": "public", "table": "t",
            "columns": [
                {"name": "id", "value": 3}, {"name": "v", "value": "new"},
                *({"name": one, "value": None} for one in ("n", "b", "at")),
            ],
            "identity": [{"name": "id", "value": 2}],
        },
        {"action": "D", "schema": "public", "table": "t", "identity": key},
        {"action": "T", "schema": "public", "table": "t"},
        {"action": "M", "transactional": True, "prefix": "p", "content": "hello"},
    ]  # fmt: skip
    assert [one["action"] for one in found if one["action"] in "BC"] == ["B", "C"] * 4
    conninfo = with_plugins.conninfo(dbname=database.name, replication="database")
    walsender = pq.PGconn.connect(conninfo.encode())
    start = b"START_REPLICATION SLOT j LOGICAL 0/0 (\"actions\" 'delete', \"include-transaction\" 'off')"
    assert walsender.exec_(start).status == pq.ExecStatus.COPY_BOTH
    while True:
        size, data = walsender.get_copy_data(0)
        assert size > 0, walsender.error_message
        if bytes(data)[:1] == b"w":
            break
    assert json.loads(bytes(data)[25:])["action"] == "D"
    walsender.finish()


def _messages(walsender: pq.abc.PGconn) -> Generator[bytes]:
    """What a plugin writes, until the stream ends."""
    while True:
        size, data = walsender.get_copy_data(0)
        if size <= 0:
            return
        if bytes(data)[:1] == b"w":
            yield bytes(data)[25:]


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("change", "SystemExit"),
        ("commit", "KeyError"),
        *(pytest.param(at, "KeyError", marks=pytest.mark.full) for at in ("describe", "skips_origin", "made", "wrong")),
        *(pytest.param(at, "KeyboardInterrupt", marks=pytest.mark.full) for at in ("describe", "skips_origin", "made")),
        pytest.param("change", "ValueError", marks=pytest.mark.full),
    ],
)
def test_a_plugin_that_raises_anything_ends_its_stream_alone(
    ours: psycopg.Connection[Any], with_plugins: Publish, database: Database, where: str, what: str
) -> None:
    """And nothing of the transaction is passed over: the slot stays before it."""
    database.execute("CREATE TABLE good (id int); CREATE TABLE bad (id int); CREATE TABLE later (id int)")
    for slot, plugin in {"f": "failing", "j": "wal2json"}.items():
        ours.execute(f"SELECT pg_create_logical_replication_slot('{slot}', '{plugin}')")
    standing = "SELECT confirmed_flush_lsn FROM pg_replication_slots WHERE slot_name = 'f'"
    before = ours.execute(standing).fetchall()
    conninfo = with_plugins.conninfo(dbname=database.name, replication="database").encode()
    other, walsender = pq.PGconn.connect(conninfo), pq.PGconn.connect(conninfo)
    with closing(_messages(other)) as rest:
        assert other.exec_(b"START_REPLICATION SLOT j LOGICAL 0/0").status == pq.ExecStatus.COPY_BOTH
        database.execute("INSERT INTO good VALUES (1)")
        assert any(b"good" in data for data in rest)
        start = f"START_REPLICATION SLOT f LOGICAL 0/0 (\"where\" '{where}', \"what\" '{what}')"
        started = walsender.exec_(start.encode())
        if started.status == pq.ExecStatus.COPY_BOTH:
            database.execute("INSERT INTO good VALUES (2); INSERT INTO bad VALUES (1); INSERT INTO good VALUES (3)")
            database.execute("INSERT INTO later VALUES (1)")
            for data in _messages(walsender):
                assert data != b"later", "the rest of the transaction before it was never sent"
        result = walsender.get_result()
        while result is not None and result.status != pq.ExecStatus.FATAL_ERROR:
            result = walsender.get_result()
        assert result is not None
        text = (result.error_field(pq.DiagnosticField.MESSAGE_PRIMARY) or b"").decode()
        code = result.error_field(pq.DiagnosticField.SQLSTATE)
        if where == "wrong":
            assert (code, text) == (b"22023", '"wrong" is wrong')
        else:
            name = "tests.support.failing_plugin.Failing"
            said = repr(where) if what == "KeyError" else where
            assert (code, text) == (b"XX000", f'output plugin "{name}" has failed: {what}: {said}')
        database.execute("INSERT INTO later VALUES (2)")
        assert any(b"later" in data for data in rest), "the other stream goes on"
    walsender.finish()
    other.finish()
    if where in {"change", "describe", "commit"}:
        assert ours.execute(standing).fetchall() == before
        failing = f"SELECT * FROM pg_logical_slot_get_changes('f', NULL, NULL, 'where', '{where}', 'what', '{what}')"
        with pytest.raises(psycopg.errors.InternalError_, match=f"has failed: {what}"):
            ours.execute(failing)
        found = ours.execute("SELECT data FROM pg_logical_slot_get_changes('f', NULL, NULL)").fetchall()
        assert [name for (name,) in found][-5:] == ["good", "bad", "good", "later", "later"]


@pytest.mark.full
def test_a_message_of_100_mb_keeps_nobody_waiting(
    ours: psycopg.Connection[Any], with_plugins: Publish, database: Database
) -> None:
    """Its client reads nothing meanwhile."""
    database.execute("CREATE TABLE good (id int); CREATE TABLE bad (id int)")
    for slot, plugin in {"f": "failing", "j": "wal2json"}.items():
        ours.execute(f"SELECT pg_create_logical_replication_slot('{slot}', '{plugin}')")
    conninfo = with_plugins.conninfo(dbname=database.name, replication="database").encode()
    other, walsender = pq.PGconn.connect(conninfo), pq.PGconn.connect(conninfo)
    start = b"START_REPLICATION SLOT f LOGICAL 0/0 (\"size\" '104857600')"
    assert walsender.exec_(start).status == pq.ExecStatus.COPY_BOTH
    assert other.exec_(b"START_REPLICATION SLOT j LOGICAL 0/0").status == pq.ExecStatus.COPY_BOTH
    database.execute("INSERT INTO bad VALUES (1); INSERT INTO good VALUES (1)")
    with closing(_messages(other)) as rest:
        assert any(b"good" in data for data in rest)
    with closing(_messages(walsender)) as messages:
        assert [(data[:3], len(data)) for data in itertools.islice(messages, 1)] == [(b"bad", 100 << 20)]
        database.execute("INSERT INTO good VALUES (2)")
        assert any(data == b"good" for data in messages)
    walsender.finish()
    other.finish()


def test_only_what_is_registered_is_there(ours: psycopg.Connection[Any], database: Database) -> None:
    for name in ("json", "tests.support.wal2json_plugin", "../wal2json", "os:system", "nope"):
        with pytest.raises(psycopg.Error, match="may not be used as an output plugin"):
            ours.execute("SELECT pg_create_logical_replication_slot('n', %s)", [name])
    database.execute("CREATE TABLE t (id int)")
    wrong = {
        "broken": "could not load output plugin",
        "exits": "could not load output plugin .*SystemExit: 3",
        "no_class": "is no class derived from",
    }
    for name, text in wrong.items():
        ours.execute("SELECT pg_create_logical_replication_slot(%s, %s)", [name, name])
        database.execute("INSERT INTO t VALUES (1)")
        with pytest.raises(psycopg.Error, match=text):
            ours.execute("SELECT * FROM pg_logical_slot_get_changes(%s, NULL, NULL)", [name])
    ours.execute("SELECT pg_create_logical_replication_slot('j', 'wal2json')")
    database.execute("INSERT INTO t VALUES (2)")
    with pytest.raises(psycopg.errors.InvalidParameterValue, match='option "nope" = "1" is unknown'):
        ours.execute("SELECT * FROM pg_logical_slot_get_changes('j', pg_current_wal_lsn(), NULL, 'nope', '1')")
