"""What PostgreSQL's own subscription tests (src/test/subscription/t) check and no other scenario here does.

The number in each name is that test's.  Most run on 18; tests of what differed before run on 15, too.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pubsub.errors import PubsubError
from pubsub.sql.identifiers import quote_literal
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, RunningNode, wait_until

on_both = pytest.mark.parametrize("database", ["15", "18"], indirect=True)


@pytest.fixture
def database(request: pytest.FixtureRequest, servers: Any) -> Iterator[Database]:
    """An empty database, on PostgreSQL 18 unless a test names a version."""
    server: EmbeddedPostgres = servers[getattr(request, "param", "18")]
    name = f"published_{abs(hash(request.node.name)) % 10**8}"
    server.create_database(name)
    yield Database(server, name)
    server.drop_database(name)


def ids(replica: Replica, table: str) -> list[int]:
    """Return the ids in the Delta table, once the node has caught up."""
    replica.caught_up()
    return sorted(row["id"] for row in replica.rows(table, "id"))


def notices(replica: Replica, statement: str) -> list[str]:
    """Return a statement's messages, as psql prints them."""
    results = replica.node.execute(statement)
    return [str(notice) for result in results for notice in result.notices]


@pytest.mark.full
@on_both
def test_001_inherited_tables_and_publications_of_inserts(replica: Replica) -> None:
    """Each table of an inheritance tree is copied by itself; unpublished tables and actions do not arrive."""
    replica.execute(
        """
        CREATE TABLE parent (id int PRIMARY KEY, t text); CREATE TABLE child (more int, PRIMARY KEY (id)) INHERITS (parent);
        CREATE TABLE lone_parent (id int PRIMARY KEY); CREATE TABLE unasked (PRIMARY KEY (id)) INHERITS (lone_parent);
        CREATE TABLE ins (id int PRIMARY KEY, n int); CREATE TABLE nothing (id int); ALTER TABLE nothing REPLICA IDENTITY NOTHING;
        INSERT INTO parent VALUES (1, 'p'); INSERT INTO child VALUES (2, 'c', 3); INSERT INTO unasked VALUES (9);
        INSERT INTO ins VALUES (1, 0), (2, 0); INSERT INTO nothing VALUES (1);
        CREATE PUBLICATION p FOR TABLE parent, ONLY lone_parent; CREATE PUBLICATION i FOR TABLE ins, nothing WITH (publish = 'insert')
        """
    )
    replica.subscribe("p, i")
    replica.caught_up()
    assert set(replica.states()) == {
        "public.parent",
        "public.child",
        "public.lone_parent",
        "public.ins",
        "public.nothing",
    }
    replica.execute(
        "UPDATE parent SET t = t || '!'; INSERT INTO parent VALUES (4, 'p'); INSERT INTO child VALUES (5, 'c', 6); "
        "DELETE FROM parent WHERE id = 2; INSERT INTO lone_parent VALUES (8); "
        "UPDATE ins SET n = 7; DELETE FROM ins WHERE id = 1; INSERT INTO ins VALUES (3, 3); TRUNCATE nothing; "
        "INSERT INTO nothing VALUES (2)"
    )
    replica.assert_equal("parent", "lone_parent")
    replica.assert_equal("child")
    assert [(row["id"], row["n"]) for row in replica.rows("ins", "* FROM delta_t ORDER BY id")] == [
        (1, 0),
        (2, 0),
        (3, 3),
    ]
    assert ids(replica, "nothing") == [1, 2]
    # The stream follows a publication that is altered to publish more.
    replica.execute("ALTER PUBLICATION i SET (publish = 'insert, delete')", "DELETE FROM ins WHERE id = 2")
    assert ids(replica, "ins") == [1, 3]


@pytest.mark.full
def test_001_unlogged_tables_are_not_published(replica: Replica) -> None:
    """FOR ALL TABLES leaves unlogged and temporary tables out; one that becomes logged joins at REFRESH."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY)", "CREATE UNLOGGED TABLE u (id int PRIMARY KEY)", "INSERT INTO u VALUES (1)",
        "CREATE VIEW v AS SELECT * FROM a", "CREATE MATERIALIZED VIEW m AS SELECT * FROM a", "CREATE PUBLICATION p FOR ALL TABLES",
    )  # fmt: skip
    replica.subscribe()
    replica.assert_equal("a")
    assert set(replica.states()) == {"public.a"}
    replica.execute("ALTER TABLE u SET LOGGED")
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("a", "u")


@pytest.mark.full
def test_004_a_copy_that_fails_goes_on_when_it_can(replica: Replica) -> None:
    """A value that Delta lacks stops that table's copy alone; after a correction the copy is made."""
    replica.execute(
        "CREATE TABLE bad (id int PRIMARY KEY, d date); CREATE TABLE good (id int PRIMARY KEY)",
        "INSERT INTO bad VALUES (1, 'infinity'); INSERT INTO good VALUES (1)",
        "CREATE PUBLICATION p FOR TABLE bad, good",
    )
    replica.subscribe()
    wait_until(lambda: replica.relation("bad").error, "the copy's error")
    wait_until(lambda: replica.states()["public.good"] == "r", "the other table")
    assert replica.node.statistics(replica.name)["sync_error_count"] > 0
    replica.execute("UPDATE bad SET d = '2024-01-01'; INSERT INTO good VALUES (2)")
    replica.assert_equal("bad", "good")
    # A table that is dropped while it waits for its copy.
    replica.execute("CREATE TABLE gone (id int PRIMARY KEY, d date); INSERT INTO gone VALUES (1, 'infinity')")
    replica.execute("ALTER PUBLICATION p ADD TABLE gone")
    replica.alter("REFRESH PUBLICATION")
    wait_until(lambda: replica.relation("gone").error, "the copy's error")
    replica.execute("DROP TABLE gone", "INSERT INTO good VALUES (3)")
    wait_until(lambda: "not found on publisher" in (replica.relation("gone").error or ""), "the reason")
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("bad", "good")


@pytest.mark.full
def test_008_a_delta_table_with_more_columns(replica: Replica, node: RunningNode) -> None:
    """Columns that the publisher lacks are NULL; the Delta table keeps its own order of columns."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, a text); INSERT INTO t VALUES (1, 'x'), (2, 'y')")
    replica.execute("CREATE PUBLICATION p FOR TABLE t")
    path = node.home / "warehouse" / "wider" / "public" / "t"
    path.mkdir(parents=True)
    schema = pa.schema([("extra", pa.float64()), ("a", pa.string()), pa.field("id", pa.int32(), nullable=False)])
    write_deltalake(path, schema.empty_table())
    replica.subscribe(target="'wider'", create_tables="false")
    replica.execute("INSERT INTO t VALUES (3, 'z'); UPDATE t SET a = 'u' WHERE id = 1; DELETE FROM t WHERE id = 2")
    replica.caught_up()
    rows = replica.rows("t", "* FROM delta_t ORDER BY id")
    assert [(row["id"], row["a"], row["extra"]) for row in rows] == [(1, "u", None), (3, "z", None)]


def test_010_truncate_is_published_by_any(replica: Replica) -> None:
    """TRUNCATE counts if either of a table's two publications publishes it; a cascade reaches unpublished tables."""
    replica.execute(
        "CREATE TABLE a (id int PRIMARY KEY); CREATE TABLE b (id int PRIMARY KEY REFERENCES a); CREATE TABLE c (id int PRIMARY KEY)",
        "INSERT INTO a VALUES (1); INSERT INTO b VALUES (1); INSERT INTO c VALUES (1)",
        "CREATE PUBLICATION p FOR TABLE a, c WITH (publish = 'insert'); CREATE PUBLICATION q FOR TABLE a WITH (publish = 'truncate')",
    )
    replica.subscribe("p, q")
    replica.assert_equal("a", "c")
    replica.execute("TRUNCATE a CASCADE", "TRUNCATE c", "INSERT INTO a VALUES (2)")
    assert ids(replica, "a") == [2]
    assert ids(replica, "c") == [1]


def test_011_generated_columns(replica: Replica) -> None:
    """18: stored ones are published as the publication or a column list says; virtual ones never."""
    for name in ("none", "stored"):
        replica.execute(
            f"CREATE TABLE g_{name} (id int PRIMARY KEY, s int GENERATED ALWAYS AS (id * 2) STORED, "
            f"v int GENERATED ALWAYS AS (id * 3) VIRTUAL); INSERT INTO g_{name} VALUES (1), (2); "
            f"CREATE PUBLICATION p_{name} FOR TABLE g_{name} WITH (publish_generated_columns = {name})"
        )
    replica.execute(
        "CREATE TABLE g_list (id int PRIMARY KEY, n int, s int GENERATED ALWAYS AS (id * 2) STORED); "
        "INSERT INTO g_list VALUES (1, 1); "
        "CREATE PUBLICATION p_list FOR TABLE g_list (id, s)"
    )
    replica.subscribe("p_none, p_stored, p_list")
    replica.execute("INSERT INTO g_none VALUES (3); INSERT INTO g_stored VALUES (3); INSERT INTO g_list VALUES (3, 3)")
    replica.execute("UPDATE g_stored SET id = 10 WHERE id = 1; UPDATE g_list SET id = 10 WHERE id = 1")
    replica.assert_equal("g_none", columns=["id"])
    replica.assert_equal("g_stored", "g_list", columns=["id", "s"])
    columns = {
        name: [f.name for f in DeltaTable(replica.path(name)).schema().fields]
        for name in ("g_none", "g_stored", "g_list")
    }
    assert columns == {"g_none": ["id"], "g_stored": ["id", "s"], "g_list": ["id", "s"]}


@pytest.mark.full
@on_both
def test_013_partitions_come_and_go(replica: Replica) -> None:
    """Published by themselves, a new partition joins at REFRESH; published via the root, its rows simply arrive."""
    for name in ("apart", "whole"):
        replica.execute(
            f"CREATE TABLE {name} (id int, k int, t text, PRIMARY KEY (id, k)) PARTITION BY LIST (k); "
            f"CREATE TABLE {name}_1 PARTITION OF {name} FOR VALUES IN (1); CREATE TABLE {name}_d PARTITION OF {name} DEFAULT; "
            f"INSERT INTO {name} SELECT g, g % 3, g FROM generate_series(1, 30) g"
        )
    replica.execute(
        "CREATE PUBLICATION p FOR TABLE apart; CREATE PUBLICATION r FOR TABLE whole WITH (publish_via_partition_root)"
    )
    replica.subscribe("p, r")
    replica.assert_equal("apart_1", "apart_d", "whole")
    for name in ("apart", "whole"):
        replica.execute(
            f"DELETE FROM {name} WHERE k = 2",
            f"CREATE TABLE {name}_2 (t text, k int NOT NULL, id int NOT NULL, PRIMARY KEY (id, k))",
            f"INSERT INTO {name}_2 VALUES ('old', 2, 100)",
            f"ALTER TABLE {name} ATTACH PARTITION {name}_2 FOR VALUES IN (2)",
            f"INSERT INTO {name} VALUES (101, 2, 'new'); INSERT INTO {name}_1 VALUES (102, 1, 'direct'); "
            f"UPDATE {name} SET k = 2 WHERE id = 1; UPDATE {name} SET k = 0 WHERE id = 4",
        )
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("apart_1", "apart_d", "apart_2")
    # Rows that came with an attached table were never sent, as in PostgreSQL.
    replica.assert_equal("whole", where="id <> 100")
    replica.execute("ALTER TABLE apart DETACH PARTITION apart_2", "INSERT INTO apart_2 VALUES ('detached', 2, 103)")
    replica.execute("ALTER TABLE whole DETACH PARTITION whole_2", "INSERT INTO whole_2 VALUES ('detached', 2, 103)")
    replica.caught_up()
    assert 103 not in ids(replica, "whole")
    replica.alter("REFRESH PUBLICATION")
    assert "public.apart_2" not in replica.states()
    replica.execute("TRUNCATE whole, apart")
    replica.assert_equal("apart_1", "apart_d")
    replica.assert_equal("whole")


def test_013_one_publication_via_the_root_is_enough(replica: Replica) -> None:
    """If one of two publications publishes a partitioned table via its root, the root stands for all partitions."""
    replica.execute(
        "CREATE TABLE r (id int PRIMARY KEY, t text) PARTITION BY RANGE (id); "
        "CREATE TABLE r_1 PARTITION OF r FOR VALUES FROM (0) TO (10); CREATE TABLE r_2 PARTITION OF r FOR VALUES FROM (10) TO (100); "
        "INSERT INTO r SELECT g, g FROM generate_series(1, 50) g; "
        "CREATE PUBLICATION p FOR TABLE r WITH (publish_via_partition_root); CREATE PUBLICATION q FOR TABLE r_1"
    )
    replica.subscribe("p, q")
    replica.execute("UPDATE r SET id = id + 50 WHERE id < 20; INSERT INTO r_1 VALUES (5, 'again')")
    replica.assert_equal("r")
    assert set(replica.states()) == {"public.r"}


@pytest.mark.full
def test_024_publications_come_and_go(replica: Replica) -> None:
    """ADD, DROP and SET PUBLICATION, with and without a refresh; a refused one changes nothing."""
    for name in ("a", "b", "c"):
        replica.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY); INSERT INTO {name} VALUES (1)",
            f"CREATE PUBLICATION p{name} FOR TABLE {name}",
        )
    replica.subscribe("pa")
    replica.alter("ADD PUBLICATION pb")
    replica.execute("INSERT INTO a VALUES (2)", "INSERT INTO b VALUES (2)")
    replica.assert_equal("a", "b")
    replica.alter("DROP PUBLICATION pa")
    replica.execute("INSERT INTO b VALUES (3)")
    replica.assert_equal("b")
    assert set(replica.states()) == {"public.b"}
    replica.alter("ADD PUBLICATION pc WITH (refresh = false)")
    assert set(replica.states()) == {"public.b"}
    replica.execute("INSERT INTO c VALUES (2)")
    replica.caught_up()  # the row is passed over: the table has not joined
    replica.alter("REFRESH PUBLICATION WITH (copy_data = false)")
    replica.execute("INSERT INTO c VALUES (3)")
    assert ids(replica, "c") == [3]
    for action, message in {
        "ADD PUBLICATION pb": "is already in subscription",
        "DROP PUBLICATION pa": "is not in subscription",
        "DROP PUBLICATION pb, pc": "cannot drop all the publications",
        "SET PUBLICATION pb, pb": "used more than once",
        "ADD PUBLICATION nope": 'publication "nope" does not exist',
    }.items():
        with pytest.raises(PubsubError, match=message):
            replica.alter(action)
    replica.execute("INSERT INTO b VALUES (4)")
    replica.assert_equal("b")


def test_025_tables_in_a_schema(replica: Replica) -> None:
    replica.execute(
        "CREATE SCHEMA s; CREATE SCHEMA other; CREATE TABLE s.a (id int PRIMARY KEY); CREATE TABLE s.b (id int PRIMARY KEY)",
        "CREATE TABLE s.part (id int PRIMARY KEY) PARTITION BY RANGE (id); "
        "CREATE TABLE other.part_1 PARTITION OF s.part FOR VALUES FROM (0) TO (100)",
        "INSERT INTO s.a VALUES (1); INSERT INTO s.b VALUES (1); INSERT INTO s.part VALUES (1)",
        "CREATE PUBLICATION p FOR TABLES IN SCHEMA s",
    )
    replica.subscribe()
    replica.assert_equal("s.a", "s.b", "other.part_1")
    replica.execute("CREATE TABLE s.c (id int PRIMARY KEY)", "INSERT INTO s.c VALUES (1)", "INSERT INTO s.a VALUES (2)")
    assert "s.c" not in replica.states()
    replica.alter("REFRESH PUBLICATION")
    replica.execute("ALTER TABLE s.b SET SCHEMA other", "INSERT INTO other.b VALUES (2)", "INSERT INTO s.c VALUES (2)")
    replica.assert_equal("s.a", "s.c", "other.part_1")
    assert ids(replica, "s.b") == [1]
    replica.alter("REFRESH PUBLICATION")
    assert set(replica.states()) == {"s.a", "s.c", "other.part_1"}
    replica.execute("ALTER PUBLICATION p ADD TABLES IN SCHEMA other")
    replica.alter("REFRESH PUBLICATION")
    replica.assert_equal("s.a", "s.c", "other.part_1", "other.b")


def test_026_counters_and_their_reset(replica: Replica) -> None:
    replica.execute("CREATE TABLE t (id int PRIMARY KEY, d date); CREATE PUBLICATION p FOR TABLE t")
    replica.subscribe()
    replica.caught_up()
    replica.execute("INSERT INTO t VALUES (1, 'infinity')")
    wait_until(lambda: replica.node.statistics(replica.name)["apply_error_count"] > 0, "the error to be counted")
    assert replica.node.statistics(replica.name)["stats_reset"] is None
    replica.alter("DISABLE")
    replica.node.fetch(
        f"SELECT pg_stat_reset_subscription_stats(oid) FROM pg_subscription WHERE subname = '{replica.name}'"
    )
    now = replica.node.statistics(replica.name)
    assert now["apply_error_count"] == 0
    assert now["stats_reset"] is not None
    replica.node.fetch("SELECT pg_stat_reset_subscription_stats(NULL)")
    assert replica.node.statistics(replica.name)["stats_reset"] > now["stats_reset"]
    with pytest.raises(PubsubError, match="does not exist"):
        replica.node.fetch("SELECT pg_stat_reset_subscription_stats(1)")


def test_027_a_role_with_just_the_needed_privileges(replica: Replica) -> None:
    """REPLICATION, CONNECT and SELECT on the tables suffice; rows under a policy are not copied in part."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE TABLE guarded (id int PRIMARY KEY); "
        "INSERT INTO guarded VALUES (1); ALTER TABLE guarded ENABLE ROW LEVEL SECURITY; CREATE PUBLICATION p FOR TABLE t; "
        "CREATE PUBLICATION g FOR TABLE guarded; DROP ROLE IF EXISTS just_enough; CREATE ROLE just_enough LOGIN REPLICATION; "
        "GRANT SELECT ON t, guarded TO just_enough"
    )
    conninfo = replica.database.server.conninfo(replica.database.name, user="just_enough")
    replica.node.execute(f"CREATE SUBSCRIPTION {replica.name} CONNECTION {quote_literal(conninfo)} PUBLICATION p, g")
    replica.created = True
    replica.execute("INSERT INTO t VALUES (2)")
    error = wait_until(lambda: replica.relation("guarded").error, "the copy's error")
    assert "row-level security" in error
    replica.execute("ALTER ROLE just_enough BYPASSRLS")
    replica.assert_equal("t", "guarded")


@on_both
def test_028_row_filters(replica: Replica) -> None:
    """The copy takes rows that any publication's filter lets in; the stream asks those that publish the action."""
    replica.execute(
        """
        CREATE TABLE f (id int PRIMARY KEY, n int, t text); INSERT INTO f SELECT g, g % 10, 'x' FROM generate_series(1, 40) g;
        CREATE TABLE every (id int PRIMARY KEY); INSERT INTO every SELECT g FROM generate_series(1, 5) g;
        CREATE TABLE root (id int PRIMARY KEY, n int) PARTITION BY RANGE (id);
        CREATE TABLE root_1 PARTITION OF root FOR VALUES FROM (0) TO (100); INSERT INTO root SELECT g, g FROM generate_series(1, 20) g;
        CREATE PUBLICATION ins FOR TABLE f WHERE (id > 10) WITH (publish = 'insert');
        CREATE PUBLICATION upd FOR TABLE f WHERE (id <= 5) WITH (publish = 'update, delete');
        CREATE PUBLICATION part FOR TABLE every WHERE (id > 3); CREATE PUBLICATION whole FOR TABLE every;
        CREATE PUBLICATION via FOR TABLE root WHERE (id % 2 = 0) WITH (publish_via_partition_root)
        """
    )
    replica.subscribe("ins, upd, part, whole, via")
    replica.assert_equal("f", where="id > 10 OR id <= 5")
    replica.assert_equal("every")
    replica.assert_equal("root", where="id % 2 = 0")
    replica.execute(
        "INSERT INTO f VALUES (0, 0, 'not'), (50, 0, 'in'), (-1, 0, 'not'); UPDATE f SET t = 'u' WHERE id IN (3, 20); "
        "DELETE FROM f WHERE id IN (2, 21); UPDATE root SET id = id + 51 WHERE id IN (4, 5, 6); INSERT INTO every VALUES (0)"
    )
    replica.caught_up()
    rows = {row["id"]: row["t"] for row in replica.rows("f")}
    assert (0 in rows, 50 in rows, -1 in rows) == (False, True, False)
    assert (rows[3], rows[20]) == ("u", "x")
    assert (2 in rows, 21 in rows) == (False, True)
    replica.assert_equal("every")
    replica.assert_equal("root", where="id % 2 = 0")
    # An update of a row that the filter then lets in comes as an insert; one that it then leaves out, as a delete.
    replica.execute("UPDATE root SET id = 30 WHERE id = 7", "UPDATE root SET id = 31 WHERE id = 8")
    replica.assert_equal("root", where="id % 2 = 0")
    replica.execute(
        "ALTER PUBLICATION via SET TABLE root WHERE (id % 2 = 1)", "INSERT INTO root VALUES (90, 0), (91, 0)"
    )
    found = ids(replica, "root")
    assert (90 in found, 91 in found) == (False, True)


def test_030_origin_none(replica: Replica, servers: Any) -> None:
    """Rows that the publisher has from elsewhere are not sent; a copy that includes them anyway gives a warning."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t VALUES (1); CREATE PUBLICATION p FOR TABLE t")
    server = replica.database.server
    upstream = Database(server, f"{replica.database.name}_up")
    server.create_database(upstream.name)
    try:
        upstream.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION up FOR TABLE t")
        upstream.query(f"SELECT pg_create_logical_replication_slot('{upstream.name}', 'pgoutput')")
        replica.execute(
            f"CREATE SUBSCRIPTION up CONNECTION {quote_literal(upstream.conninfo)} PUBLICATION up "
            f"WITH (create_slot = false, slot_name = '{upstream.name}', copy_data = false)"
        )
        said = notices(
            replica,
            f"CREATE SUBSCRIPTION {replica.name} CONNECTION {quote_literal(replica.conninfo)} PUBLICATION p WITH (origin = none)",
        )
        replica.created = True
        assert any("requested copy_data with origin = NONE but might copy data" in text for text in said), said
        replica.assert_equal("t")
        upstream.execute("INSERT INTO t VALUES (100)")
        wait_until(lambda: replica.query("SELECT 1 FROM t WHERE id = 100"), "the row from upstream")
        replica.execute("INSERT INTO t VALUES (2)")
        assert ids(replica, "t") == [1, 2]
        (before,) = replica.query(
            active := f"SELECT active_pid FROM pg_replication_slots WHERE slot_name = '{replica.name}'"
        )
        replica.alter("SET (origin = any)")
        # As in PostgreSQL, the open stream keeps its options until the worker starts another, which repeats nothing.
        wait_until(lambda: replica.query(active) not in ([before], [(None,)]), "a stream with the new options")
        upstream.execute("INSERT INTO t VALUES (101)")
        wait_until(lambda: replica.query("SELECT 1 FROM t WHERE id = 101"), "the row from upstream")
        wait_until(lambda: 101 in ids(replica, "t"), "the row of another origin")
        with pytest.raises(PubsubError, match='unrecognized origin value: "elsewhere"'):
            replica.alter("SET (origin = elsewhere)")
    finally:
        replica.execute(
            "ALTER SUBSCRIPTION up DISABLE", "ALTER SUBSCRIPTION up SET (slot_name = NONE)", "DROP SUBSCRIPTION up"
        )
        server.drop_database(upstream.name)


@on_both
def test_031_column_lists(replica: Replica) -> None:
    """The publisher sends the columns of the list.

    Two lists for one table are refused, at CREATE, at REFRESH and in the stream.
    """
    replica.execute(
        """
        CREATE TABLE l (id int PRIMARY KEY, a text, b text, c text); INSERT INTO l VALUES (1, 'a', 'b', 'c');
        CREATE TABLE r (id int, k int, a text, b text, PRIMARY KEY (id, k)) PARTITION BY LIST (k);
        CREATE TABLE r_1 (b text, id int NOT NULL, k int NOT NULL, a text, PRIMARY KEY (id, k));
        ALTER TABLE r ATTACH PARTITION r_1 FOR VALUES IN (1); INSERT INTO r VALUES (1, 1, 'a', 'b');
        CREATE PUBLICATION p FOR TABLE l (id, b); CREATE PUBLICATION same FOR TABLE l (b, id);
        CREATE PUBLICATION other FOR TABLE l (id, c);
        CREATE PUBLICATION via FOR TABLE r (id, k, b) WITH (publish_via_partition_root)
        """
    )
    with pytest.raises(
        PubsubError, match=r'cannot use different column lists for table "public[.]l" in different publications'
    ):
        replica.subscribe("p, other")
    assert replica.slots() == []
    replica.subscribe("p, same, via")
    replica.execute(
        "UPDATE l SET a = 'x', b = 'y', c = 'z'; INSERT INTO r VALUES (2, 1, 'c', 'd'); UPDATE r SET b = 'u' WHERE id = 1"
    )
    replica.assert_equal("l", columns=["id", "b"])
    replica.assert_equal("r", columns=["id", "k", "b"])
    with pytest.raises(PubsubError, match="cannot use different column lists"):
        replica.alter("ADD PUBLICATION other")
    replica.execute("CREATE PUBLICATION bad FOR TABLE l (b)")
    with pytest.raises(psycopg.errors.InvalidColumnReference, match="cannot update"):
        replica.execute("UPDATE l SET b = 'no'")
    replica.execute("DROP PUBLICATION bad", "UPDATE l SET b = 'yes'")
    replica.assert_equal("l", columns=["id", "b"])


def test_034_a_key_without_overlaps(replica: Replica) -> None:
    """18: a range in the key is kept as text, and rows are found by it."""
    replica.execute(
        "CREATE EXTENSION IF NOT EXISTS btree_gist; CREATE TABLE t (id int4range, valid daterange, n int, "
        "PRIMARY KEY (id, valid WITHOUT OVERLAPS)); INSERT INTO t VALUES ('[1,2)', '[2024-01-01,2024-06-01)', 0), "
        "('[1,2)', '[2024-06-01,)', 0), ('[2,3)', '[2024-01-01,)', 0); CREATE PUBLICATION p FOR TABLE t"
    )
    replica.subscribe()
    replica.assert_equal("t")
    replica.execute(
        "UPDATE t SET n = 1 WHERE id = '[1,2)'; UPDATE t SET valid = '[2025-01-01,)' WHERE id = '[2,3)'; "
        "DELETE FROM t WHERE valid = '[2024-06-01,)'; INSERT INTO t VALUES ('[5,6)', '(,)', 5)"
    )
    replica.assert_equal("t")


@pytest.mark.full
def test_100_several_subscriptions_of_one_publisher(replica: Replica) -> None:
    """The same table twice, in folders of its own; one subscription is dropped, and the other goes on."""
    replica.execute(
        "CREATE SCHEMA s; CREATE TABLE t (id int PRIMARY KEY, dropped int, n int); ALTER TABLE t DROP COLUMN dropped; "
        "CREATE TABLE s.t (id int PRIMARY KEY); INSERT INTO t VALUES (1, 1); INSERT INTO s.t VALUES (7); "
        "CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q FOR TABLE t, s.t; CREATE PUBLICATION none"
    )
    replica.subscribe("p")
    second = Replica(replica.node, replica.database)
    second.subscribe("q, none", target="'second'")
    replica.execute("INSERT INTO t VALUES (2, 2); UPDATE t SET n = 5; INSERT INTO s.t VALUES (8)")
    replica.assert_equal("t")
    second.assert_equal("t", "s.t")
    second.drop()
    replica.execute("INSERT INTO t VALUES (3, 3)", "DELETE FROM t WHERE id = 1")
    replica.assert_equal("t")
    replica.alter("RENAME TO renamed")
    replica.name = "renamed"
    replica.execute("INSERT INTO t VALUES (4, 4)")
    replica.assert_equal("t")
    replica.drop()


def test_100_an_empty_publication_gets_its_tables_later(replica: Replica) -> None:
    """A table may also join in the middle of a transaction that writes it."""
    replica.execute("CREATE PUBLICATION p", "CREATE TABLE t (id int PRIMARY KEY)")
    replica.subscribe()
    with replica.database.server.connect(replica.database.name) as connection:
        connection.execute("BEGIN")
        connection.execute("INSERT INTO t VALUES (1)")
        replica.execute("ALTER PUBLICATION p ADD TABLE t")
        connection.execute("INSERT INTO t VALUES (2)")
        connection.execute("COMMIT")
    replica.alter("REFRESH PUBLICATION")
    replica.execute("INSERT INTO t VALUES (3)")
    replica.assert_equal("t")


def test_pg_stat_progress_copy_and_status_during_a_copy(replica: Replica, fault: Any) -> None:
    """While a copy is held, pg_stat_progress_copy has its row and `status` its table."""
    replica.execute("CREATE TABLE t (id int PRIMARY KEY); INSERT INTO t SELECT generate_series(1, 1000)", "ANALYZE t")
    replica.execute("CREATE PUBLICATION p FOR TABLE t")
    fault.arm("copy committed public.t")
    replica.subscribe()
    fault.wait("copy committed public.t")
    found = json.loads(json.dumps(replica.node.run(replica.node._node.status()).as_json()))
    table = next(one for one in found["subscriptions"] if one["name"] == replica.name)["tables"][0]
    assert (table["state"], table["rows_copied"], table["rows_estimated"]) == ("d", 1000, 1000)
    fault.release("copy committed public.t")
    replica.assert_equal("t")

    def lag() -> int | None:
        status = replica.node.run(replica.node._node.status()).as_json()
        table = next(one for one in status["subscriptions"] if one["name"] == replica.name)["tables"][0]
        assert table["state"] == "r"
        found: int | None = table["lag_bytes"]
        return found

    wait_until(lambda: lag() is not None, "the lag of a table that is ready")
