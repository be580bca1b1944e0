"""Sequences that PostgreSQL 19 publishes: in pg_subscription_rel from i to r, and as rows of a Delta table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pubsub.errors import PubsubError
from pubsub.publisher.check import check
from pubsub.testing.fixtures import Database, Servers, fresh
from tests.support.captured_logs import captured_logs
from tests.support.replica import Faults, Replica, read, wait_until

pytestmark = pytest.mark.full  # a server of another version than the base's


@pytest.fixture
def database(servers: Servers) -> Iterator[Database]:
    """An empty database on PostgreSQL 19."""
    yield from fresh(servers["19"])


def sequences(replica: Replica) -> dict[str, tuple[str, int | None, bool | None]]:
    """Return state, last value and is_called of the subscription's sequences, by name."""
    rows = replica.node.fetch(
        f"SELECT sequence_name, state, last_value, is_called FROM pubsub_sequences WHERE subname = '{replica.name}'"
    )
    return {row["sequence_name"]: (row["state"], row["last_value"], row["is_called"]) for row in rows}


def path(replica: Replica) -> str:
    return str(
        replica.node.fetch(
            "SELECT DISTINCT path FROM pg_subscription_rel r JOIN pg_subscription s ON s.oid = r.srsubid "
            f"WHERE s.subname = '{replica.name}' AND path LIKE '%/pg_sequences/%'"
        )[0]["path"]
    )


def in_delta(where: str) -> list[tuple[Any, ...]]:
    """Return the rows of the Delta table, without the LSNs, by name."""
    from deltalake import DeltaTable, QueryBuilder

    found = read(QueryBuilder().register("t", DeltaTable(where)).execute("SELECT * FROM t ORDER BY 1, 2"))
    assert all(row.pop("page_lsn") > "0/" for row in found)
    return [tuple(row.values()) for row in found]


def all_ready(replica: Replica) -> bool:
    return {state for state, *_ in sequences(replica).values()} == {"r"}


def on_publisher(replica: Replica) -> list[tuple[Any, ...]]:
    return replica.query(
        "SELECT n.nspname, c.relname, d.last_value, d.is_called FROM pg_sequence s JOIN pg_class c ON c.oid = s.seqrelid "
        "JOIN pg_namespace n ON n.oid = c.relnamespace, pg_get_sequence_data(c.oid) d "
        'ORDER BY n.nspname COLLATE "C", c.relname COLLATE "C"'
    )


def test_sequences_are_synchronized_and_refreshed(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (id serial PRIMARY KEY)",
        "CREATE SEQUENCE called START 5 INCREMENT 3; SELECT nextval('called'), nextval('called')",
        'CREATE SCHEMA "Odd"; CREATE SEQUENCE "Odd"."S q" AS smallint INCREMENT -1 MAXVALUE -1 CYCLE',
        "INSERT INTO t DEFAULT VALUES",
        "CREATE PUBLICATION p FOR ALL TABLES, ALL SEQUENCES",
    )
    replica.subscribe()
    replica.assert_equal("t")
    wait_until(lambda: all_ready(replica), "the sequences' synchronization")
    assert sequences(replica) == {"called": ("r", 8, True), "S q": ("r", -1, False), "t_id_seq": ("r", 1, True)}
    assert in_delta(path(replica)) == on_publisher(replica)
    (lsn,) = replica.query("SELECT page_lsn FROM pg_get_sequence_data('called')")[0]
    shown = replica.node.fetch("SELECT srsubstate, srsublsn FROM pg_subscription_rel WHERE relation = 'public.called'")
    assert [tuple(row.values()) for row in shown] == [("r", _lsn(lsn))]

    replica.execute("SELECT nextval('called')", "INSERT INTO t DEFAULT VALUES")
    replica.assert_equal("t")
    assert sequences(replica)["called"] == ("r", 8, True), "sequences are synchronized only when asked for"
    replica.alter("REFRESH SEQUENCES")
    wait_until(lambda: sequences(replica)["called"] == ("r", 11, True), "the second synchronization")
    wait_until(lambda: all_ready(replica), "the sequences' synchronization")
    assert in_delta(path(replica)) == on_publisher(replica)
    assert replica.node.statistics(replica.name)["sync_seq_error_count"] == 0


def _lsn(text: object) -> str:
    high, _, low = str(text).partition("/")
    return f"{int(high, 16):X}/{int(low, 16):X}"


def test_refresh_publication_adds_and_removes_sequences(replica: Replica) -> None:
    replica.execute("CREATE SEQUENCE a", "CREATE SEQUENCE b START 7", "CREATE PUBLICATION p FOR ALL SEQUENCES")
    replica.subscribe()
    wait_until(lambda: all_ready(replica), "the sequences' synchronization")
    replica.execute("DROP SEQUENCE a", "CREATE SEQUENCE c START 9", "SELECT nextval('b')", "SELECT nextval('b')")
    replica.alter("REFRESH PUBLICATION")
    wait_until(lambda: in_delta(path(replica)) == [("public", "b", 7, False), ("public", "c", 9, False)], "the change")
    # The catalog has it after the Delta table.
    wait_until(lambda: all_ready(replica), "the sequences' synchronization")
    assert sequences(replica) == {"b": ("r", 7, False), "c": ("r", 9, False)}, "b had been synchronized"
    replica.execute("CREATE SEQUENCE d")
    replica.alter("REFRESH PUBLICATION WITH (copy_data = false)")
    assert sequences(replica)["d"] == ("r", None, None)
    # Another publication's tables alone: all sequences leave.
    where = path(replica)
    replica.execute("CREATE TABLE t (id int PRIMARY KEY)", "CREATE PUBLICATION q FOR TABLE t")
    replica.alter("SET PUBLICATION q")
    wait_until(lambda: in_delta(where) == [], "the sequences' leaving")
    assert sequences(replica) == {}
    replica.assert_equal("t")


def test_several_batches_are_one_query_and_one_commit_each(replica: Replica) -> None:
    from deltalake import DeltaTable

    names = [f"s{number:03}" for number in range(250)]
    replica.execute("; ".join(f"CREATE SEQUENCE {name}" for name in names), "CREATE PUBLICATION p FOR ALL SEQUENCES")
    replica.subscribe()
    wait_until(lambda: all_ready(replica), "the sequences' synchronization")
    assert [row[1] for row in in_delta(path(replica))] == names
    written = [one for one in DeltaTable(path(replica)).history() if one["operation"] == "WRITE"]
    assert len(written) == 3


def test_sequences_that_cannot_be_synchronized_are_named_and_tried_again(replica: Replica) -> None:
    replica.execute(
        "CREATE ROLE reader REPLICATION LOGIN",
        "CREATE SEQUENCE good; CREATE SEQUENCE hidden; CREATE SEQUENCE gone",
        "GRANT SELECT ON SEQUENCE good, gone TO reader",
        "CREATE PUBLICATION p FOR ALL SEQUENCES",
    )
    try:
        replica.subscribe()
        wait_until(lambda: all_ready(replica), "the sequences' synchronization")
        replica.alter(f"CONNECTION '{replica.conninfo} user=reader'")
        with captured_logs() as logged:
            replica.execute("DROP SEQUENCE gone", "SELECT nextval('good')", "SELECT nextval('good')")
            replica.alter("REFRESH SEQUENCES")
            error = "logical replication sequence synchronization failed for subscription"
            assert replica.error() == f'{error} "{replica.name}"'
        warned = {(one.get("reason"), one.get("hint")) for one in logged if one["log_level"] == "warning"}
        assert ('missing sequence on publisher ("public.gone")', None) in warned
        grant = "Grant SELECT on the sequence to the role used for the replication connection on the publisher."
        assert ('insufficient privileges on publisher sequence ("public.hidden")', grant) in warned
        assert sequences(replica) == {"good": ("r", 2, True), "hidden": ("i", 1, False), "gone": ("i", 1, False)}
        statistics = replica.node.statistics(replica.name)
        assert statistics["sync_seq_error_count"] >= 1
        assert statistics["sync_table_error_count"] == statistics["sync_error_count"] == 0
        assert statistics["apply_error_count"] == 0
        replica.execute("GRANT SELECT ON SEQUENCE hidden TO reader", "CREATE SEQUENCE gone START 3")
        replica.execute("GRANT SELECT ON SEQUENCE gone TO reader")
        wait_until(lambda: all_ready(replica), "another attempt")
        assert in_delta(path(replica)) == on_publisher(replica)
        wait_until(lambda: replica.node.statistics(replica.name)["error"] is None, "the failure's end")
    finally:
        if replica.created:
            replica.drop()
        replica.execute("DROP OWNED BY reader", "DROP ROLE reader")


def test_an_altered_sequence_is_followed_or_refused(replica: Replica) -> None:
    replica.execute("CREATE SEQUENCE s", "CREATE PUBLICATION p FOR ALL SEQUENCES")
    replica.subscribe()
    wait_until(lambda: all_ready(replica), "the sequences' synchronization")
    replica.execute("ALTER SEQUENCE s INCREMENT 5", "SELECT nextval('s')", "SELECT nextval('s')")
    replica.alter("REFRESH SEQUENCES")
    wait_until(lambda: sequences(replica)["s"] == ("r", 6, True), "the synchronization")
    replica.alter("SET (schema_changes = refuse)")
    replica.execute("ALTER SEQUENCE s MAXVALUE 1000", "SELECT nextval('s')")
    with captured_logs() as logged:
        replica.alter("REFRESH SEQUENCES")
        assert "sequence synchronization failed" in replica.error()
    assert 'mismatched or renamed sequence on subscriber ("public.s")' in {one.get("reason") for one in logged}
    assert sequences(replica)["s"] == ("i", 6, True)


def test_what_a_command_asks_for_meanwhile_is_not_lost(replica: Replica, fault: Faults) -> None:
    """A worker's values that were read before REFRESH SEQUENCES do not answer it."""
    replica.execute("CREATE SEQUENCE s", "CREATE PUBLICATION p FOR ALL SEQUENCES")
    fault.arm("sequences committed")
    replica.subscribe()
    fault.wait("sequences committed")
    replica.execute("SELECT setval('s', 77)")
    replica.alter("REFRESH SEQUENCES")
    fault.release("sequences committed")
    wait_until(lambda: sequences(replica)["s"] == ("r", 77, True), "the second synchronization")
    assert in_delta(path(replica)) == [("public", "s", 77, True)]


async def test_check_names_sequences_that_cannot_be_read(replica: Replica) -> None:
    replica.execute("CREATE SEQUENCE seen", "CREATE SEQUENCE hidden", "CREATE PUBLICATION p FOR ALL SEQUENCES")
    assert [one.message for one in await check(replica.conninfo, ["p"])][-1] == "2 sequences"
    replica.execute("CREATE ROLE reader REPLICATION LOGIN", "GRANT SELECT ON SEQUENCE seen TO reader")
    try:
        (found,) = [one for one in await check(f"{replica.conninfo} user=reader", ["p"]) if one.severity == "error"]
        assert found.message == "permission denied for sequence hidden"
        assert found.change == ("GRANT SELECT ON SEQUENCE public.hidden TO reader;",)
    finally:
        replica.execute("DROP OWNED BY reader", "DROP ROLE reader")


def test_commands_are_refused_as_in_postgresql(replica: Replica) -> None:
    replica.execute("CREATE SEQUENCE s", "CREATE PUBLICATION p FOR ALL SEQUENCES")
    replica.subscribe()
    wait_until(lambda: all_ready(replica), "the sequences' synchronization")
    replica.alter("DISABLE")
    with pytest.raises(PubsubError, match=r"REFRESH SEQUENCES is not allowed for disabled subscriptions") as refused:
        replica.alter("REFRESH SEQUENCES")
    assert refused.value.sqlstate == "55000"
    with pytest.raises(PubsubError, match='syntax error at or near "WITH"'):
        replica.alter("REFRESH SEQUENCES WITH (copy_data = false)")
    where = path(replica)
    replica.drop()
    with pytest.raises(PubsubError, match="holds rows already"):
        replica.subscribe()
    assert in_delta(where) == [("public", "s", 1, False)]
