"""new_tables = follow: tables that are published later are copied and followed, without REFRESH PUBLICATION."""

from __future__ import annotations

import threading

import psycopg
import pytest

from launcher import new_tables
from pubsub.errors import PubsubError
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.captured_logs import captured_logs
from tests.support.replica import Replica, RunningNode, Stock, wait_until


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have publishers looked at so often that no test waits for the interval."""
    monkeypatch.setattr(new_tables, "_INTERVAL", 0.2)


def joined(replica: Replica, *tables: str) -> None:
    """Wait until the subscription has the tables."""
    wanted = {f"public.{table}" if "." not in table else table for table in tables}
    wait_until(lambda: wanted <= replica.states().keys(), f"{', '.join(wanted)} to be added")


def warnings(replica: Replica) -> list[tuple[str, str | None]]:
    """Return what status says of published tables that are not replicated."""
    found = replica.node.status_json(replica.name)["warnings"]
    return [(one["message"], one["hint"]) for one in found if "not replicated" in one["message"]]


def test_a_table_that_the_stream_names_is_added_at_once(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first row brings it, long before the next look; every row is there, and the other tables are not copied again."""
    monkeypatch.setattr(new_tables, "_INTERVAL", 1e6)
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1)", "CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(new_tables="follow")
    replica.assert_equal("t")
    replica.execute(
        "CREATE TABLE u (id int PRIMARY KEY, v text)",
        "INSERT INTO u VALUES (1, 'a'), (2, 'b')",
        "INSERT INTO t VALUES (2)",
    )
    joined(replica, "u")
    replica.execute("UPDATE u SET v = 'c' WHERE id = 1", "INSERT INTO u VALUES (3, 'd')")
    replica.assert_equal("t", "u")
    assert replica.relation("t").copy_generation == 1


def test_a_table_that_cannot_be_read_waits_for_its_grant(node: RunningNode, database: Database, soon: None) -> None:
    """Status and log name it with what to do; the other new tables are followed, and it is as soon as it can be."""
    role = f"reader_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION PASSWORD 'secret'")
    database.execute(f"CREATE PUBLICATION p FOR ALL TABLES; GRANT USAGE ON SCHEMA public TO {role}")

    class Reader(Replica):
        @property
        def conninfo(self) -> str:
            return f"{database.conninfo} user={role} password=secret"

    replica = Reader(node, database)
    try:
        replica.subscribe(new_tables="follow")
        with captured_logs() as logs:
            replica.execute("CREATE TABLE closed (id int PRIMARY KEY)", "INSERT INTO closed VALUES (1)")
            replica.execute("CREATE TABLE open (id int PRIMARY KEY)", f"GRANT SELECT ON open TO {role}")
            joined(replica, "open")
            message, hint = wait_until(lambda: warnings(replica), "the warning")[0]
            wait_until(
                lambda: any(one["event"] == "published table is not replicated" for one in logs), "the log's warning"
            )
        assert message == 'published table "public.closed" is not replicated: permission denied for table closed'
        assert f"GRANT SELECT ON public.closed TO {role}" in str(hint)
        assert "public.closed" not in replica.states()
        replica.execute(f"GRANT SELECT ON closed TO {role}")
        joined(replica, "closed")
        replica.execute("INSERT INTO closed VALUES (2)")
        replica.caught_up()
        assert sorted(row["id"] for row in replica.rows("closed")) == [1, 2]
        wait_until(lambda: not warnings(replica), "the warning to end")
    finally:
        replica.leave()
        database.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


@pytest.mark.full
def test_what_is_published_is_followed_whatever_publishes_it(replica: Replica, soon: None) -> None:
    """Empty tables, tables of a published schema, those that ALTER PUBLICATION adds, partitions, and a column list."""
    replica.execute(
        "CREATE SCHEMA s; CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE listed (id int PRIMARY KEY, a int, b int);"
        "INSERT INTO listed VALUES (1, 2, 3); CREATE TABLE root (id int PRIMARY KEY) PARTITION BY RANGE (id);"
        "CREATE TABLE root_1 PARTITION OF root FOR VALUES FROM (0) TO (10); INSERT INTO root VALUES (1)",
        "CREATE PUBLICATION p FOR TABLE t, root, TABLES IN SCHEMA s",
    )
    replica.subscribe(new_tables="follow")
    replica.assert_equal("t", "root_1")
    replica.execute(
        "CREATE TABLE s.empty (id int PRIMARY KEY)",
        "CREATE TABLE s.filled AS SELECT g AS id FROM generate_series(1, 1000) g",
        "CREATE TABLE root_2 PARTITION OF root FOR VALUES FROM (10) TO (20)",
        "CREATE TABLE root_3 (id int PRIMARY KEY); INSERT INTO root_3 VALUES (25), (26)",
        "ALTER TABLE root ATTACH PARTITION root_3 FOR VALUES FROM (20) TO (30)",
        "INSERT INTO root VALUES (2), (12), (22)",
    )
    joined(replica, "s.empty", "s.filled", "root_2", "root_3")
    replica.execute("INSERT INTO s.empty VALUES (1); INSERT INTO root VALUES (3), (13), (23)")
    replica.assert_equal("s.empty", "s.filled", "root_1", "root_2", "root_3")
    replica.execute("CREATE PUBLICATION q FOR TABLE listed (id, b) WHERE (id < 100)")
    replica.alter("ADD PUBLICATION q WITH (refresh = false)")
    joined(replica, "listed")
    replica.execute("INSERT INTO listed VALUES (2, 3, 4), (200, 0, 0)")
    replica.assert_equal("listed", columns=["id", "b"], where="id < 100")
    assert set(replica.states().values()) <= {"r", "s"}


@pytest.mark.full
def test_tables_created_under_load(replica: Replica, servers: dict[str, EmbeddedPostgres], soon: None) -> None:
    """Tables made, filled, changed and taken back by transactions of all sizes, beside writers: all equal."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, n int); CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe(new_tables="follow", streaming="parallel")
    ended = threading.Event()

    def write() -> None:
        with psycopg.connect(replica.conninfo, autocommit=True) as connection:
            number = 0
            while not ended.is_set():
                number += 1
                connection.execute("INSERT INTO t VALUES (%s, 0)", (number,))
                connection.execute("UPDATE t SET n = n + 1 WHERE id > %s", (number - 10,))

    writer = threading.Thread(target=write)
    writer.start()
    names = [f"n{number}" for number in range(12)]
    try:
        for number, name in enumerate(names):
            with psycopg.connect(replica.conninfo) as connection:
                connection.execute(f"CREATE TABLE lost_{name} (id int PRIMARY KEY)")
                connection.execute(f"INSERT INTO lost_{name} VALUES (1)")
                connection.rollback()
                connection.execute(f"CREATE TABLE {name} (id int PRIMARY KEY, v text)")
                rows = 30_000 if number % 4 == 0 else 10
                connection.execute(f"INSERT INTO {name} SELECT g, md5(g::text) FROM generate_series(1, {rows}) g")
                connection.commit()
                connection.execute(f"UPDATE {name} SET v = 'changed' WHERE id % 3 = 0")
                connection.execute(f"DELETE FROM {name} WHERE id % 5 = 0")
                connection.commit()
                if number % 3 == 0:
                    connection.execute(f"ALTER TABLE {name} ADD COLUMN later int DEFAULT 7")
                    connection.execute(f"UPDATE {name} SET later = id WHERE id < 5")
                    connection.commit()
        joined(replica, *names)
    finally:
        ended.set()
        writer.join()
    replica.assert_equal("t", *names)
    assert replica.states().keys() == {"public.t", *(f"public.{name}" for name in names)}
    wait_until(lambda: replica.slots() == [replica.name], "the sync workers' slots to be gone")


@pytest.mark.full
def test_it_can_be_switched_at_any_time(replica: Replica, soon: None) -> None:
    """Without it, or while it is ignored, only REFRESH adds a table, as in PostgreSQL."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe()
    replica.execute("CREATE TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1); INSERT INTO t VALUES (1)")
    replica.assert_equal("t")
    assert replica.states().keys() == {"public.t"}
    replica.alter("SET (new_tables = follow)")
    joined(replica, "u")
    replica.assert_equal("t", "u")
    replica.alter("SET (new_tables = ignore)")
    replica.execute("CREATE TABLE v (id int PRIMARY KEY)", "INSERT INTO v VALUES (1); INSERT INTO t VALUES (2)")
    replica.assert_equal("t")
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("t", "u", "v")
    (row,) = replica.node.fetch(f"SELECT new_tables FROM pg_subscription WHERE subname = '{replica.name}'")
    assert row["new_tables"] == "ignore"


@pytest.mark.full
def test_a_subscription_without_a_connection_gets_every_table(replica: Replica, soon: None) -> None:
    """After CREATE SUBSCRIPTION WITH (connect = false) and ENABLE no REFRESH is needed."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(connect="false", new_tables="follow")
    replica.query(f"SELECT pg_create_logical_replication_slot('{replica.name}', 'pgoutput')")
    replica.alter("ENABLE")
    joined(replica, "t")
    replica.execute("INSERT INTO t VALUES (2)")
    replica.assert_equal("t")


@pytest.mark.full
def test_a_name_that_is_used_again(replica: Replica, soon: None) -> None:
    """A table takes a renamed one's name: that of the Delta table, which it may not have; so status says until it has another."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE TABLE t_new (id int PRIMARY KEY);"
        "CREATE PUBLICATION p FOR ALL TABLES"
    )
    replica.subscribe(new_tables="follow")
    replica.assert_equal("t", "t_new")
    replica.execute(
        "BEGIN; ALTER TABLE t RENAME TO t_old; CREATE TABLE t (id int PRIMARY KEY); COMMIT",
        "INSERT INTO t VALUES (7)",
    )
    replica.execute("INSERT INTO t_old VALUES (2)")
    message, _ = wait_until(lambda: warnings(replica), "the warning")[0]
    assert message.endswith('the Delta table for relation "public.t" is that of relation "public.t_old"'), message
    replica.execute("ALTER TABLE t RENAME TO t_third")
    joined(replica, "t_third")
    replica.assert_equal("t_old", "t_third", "t_new")


@pytest.mark.full
def test_more_tables_are_refused_than_status_names(replica: Replica, soon: None) -> None:
    """A column list that differs between publications stops all of them, and is told; it is over when it is mended."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe(new_tables="follow")
    replica.execute("CREATE TABLE u (id int PRIMARY KEY, a int, b int)", "CREATE PUBLICATION q FOR TABLE u (id, a)")
    replica.execute("ALTER PUBLICATION p ADD TABLE u (id, b)")
    replica.alter("ADD PUBLICATION q WITH (refresh = false)")
    reason = wait_until(
        lambda: [
            one["message"]
            for one in replica.node.status_json(replica.name)["warnings"]
            if one["message"].startswith("new tables could not be looked for")
        ],
        "the warning",
    )
    assert "different column lists" in reason[0]
    replica.execute("ALTER PUBLICATION q SET TABLE u (id, b)")
    joined(replica, "u")
    replica.assert_equal("u", columns=["id", "b"])


@pytest.mark.full
def test_a_refresh_at_the_same_time(replica: Replica, soon: None) -> None:
    """A command and the daemon add the same tables: each is added once, and neither fails."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR ALL TABLES")
    replica.subscribe(new_tables="follow")
    for number in range(10):
        replica.execute(f"CREATE TABLE n{number} (id int PRIMARY KEY); INSERT INTO n{number} VALUES ({number})")
        replica.alter("REFRESH PUBLICATION")
    replica.assert_equal(*(f"n{number}" for number in range(10)))
    assert not warnings(replica)


@pytest.mark.full
@pytest.mark.parametrize("database", ["15", "16", "17", "18"], indirect=True)
def test_beside_a_stock_subscriber(replica: Replica, servers: dict[str, EmbeddedPostgres], soon: None) -> None:
    """Where the stock subscriber needs REFRESH PUBLICATION the result is the same without."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR ALL TABLES")
    ddl = "CREATE TABLE t (id int PRIMARY KEY); CREATE TABLE u (id int PRIMARY KEY, v text)"
    stock = Stock(replica, servers["17"], ddl)
    try:
        stock.subscribe()
        replica.subscribe(new_tables="follow")
        replica.execute(
            "CREATE TABLE u (id int PRIMARY KEY, v text)", "INSERT INTO u SELECT g, g FROM generate_series(1, 100) g"
        )
        stock.server.execute(f"ALTER SUBSCRIPTION {stock.name} REFRESH PUBLICATION", stock.name)
        joined(replica, "u")
        replica.execute("UPDATE u SET v = 'x' WHERE id < 10; DELETE FROM u WHERE id > 90; INSERT INTO t VALUES (1)")
        replica.assert_equal("t", "u")
        stock.assert_equal("t", "u")
    finally:
        stock.close()


def test_it_excludes_two_phase(replica: Replica) -> None:
    """PostgreSQL adds no table with a copy to a subscription with two_phase; both together are refused."""
    replica.execute("CREATE PUBLICATION p FOR ALL TABLES")
    create = f"CREATE SUBSCRIPTION {replica.name} CONNECTION {quote_literal(replica.conninfo)} PUBLICATION p WITH "
    for options in ("(new_tables = follow, two_phase = true)", "(new_tables = 'other')"):
        with pytest.raises(PubsubError) as refused:
            replica.node.execute(create + options)
        assert refused.value.sqlstate in ("42601", "22023")
    replica.subscribe(two_phase="true")
    with pytest.raises(PubsubError, match="two_phase = true and new_tables = follow are mutually exclusive options"):
        replica.alter("SET (new_tables = follow)")
