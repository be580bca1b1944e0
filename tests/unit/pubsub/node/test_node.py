"""pubsub.Node as a client: SQL on the catalog and on Delta tables, without a publisher and without Spark."""

from __future__ import annotations

import stat
from collections.abc import AsyncIterator
from decimal import Decimal
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pyarrow as pa
import pytest
from deltalake import write_deltalake

import pubsub
from catalog.home_lock import DaemonLock
from catalog.records import NewRelation
from catalog.states import RelState
from pubsub.errors import (
    FeatureNotSupported,
    NotInPrerequisiteState,
    ObjectInUse,
    PubsubError,
    UndefinedObject,
    UndefinedTable,
)
from pubsub.node.node import CatchupTimeoutError, Node
from pubsub.protocol.lsn import Lsn
from pubsub.settings import Settings

UNCONNECTED = "CREATE SUBSCRIPTION {} CONNECTION 'host=h password=secret' PUBLICATION p WITH (connect = false)"


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    async with Node(tmp_path / "home", workers=False) as node:
        yield node


@pytest.fixture
async def tables(node: Node) -> Node:
    """Subscription s with public.orders and "Odd"."My Table", ready; public.empty, to be copied."""
    await node.execute(UNCONNECTED.format("s"))
    oid = (await node.catalog.subscription("s")).oid
    orders = pa.table(
        {"id": [1, 2, 3], "amount": pa.array([Decimal("1.50"), None, Decimal("3.00")], pa.decimal128(12, 2))}
    )
    odd = pa.table({"Key Col": ["a", "b"], "id": [2, 3]})
    relations = []
    for relid, schema, name, data in [
        (1, "public", "orders", orders),
        (2, "Odd", "My Table", odd),
        (3, "public", "empty", None),
    ]:
        path = f"{node.settings.warehouse_uri}/db/{relid}"
        state = RelState.READY if data is not None else RelState.INIT
        relations.append(NewRelation(relid, schema, name, path, state, Lsn(1) if data is not None else None))
        if data is not None:
            write_deltalake(path, data)
    await node.catalog.add_relations(oid, relations)
    return node


def test_is_exported() -> None:
    assert pubsub.Node is Node


async def test_home_is_made_private(node: Node) -> None:
    assert stat.S_IMODE(node.home.stat().st_mode) == 0o700


async def test_execute_gives_a_result_for_each_statement(node: Node) -> None:
    results = await node.execute(f"SHOW wal_receiver_timeout; {UNCONNECTED.format('s')}; SELECT 1 AS one;")
    assert [r.tag for r in results] == ["SHOW", "CREATE SUBSCRIPTION", "SELECT 1"]
    assert (results[0].columns, results[0].rows) == (("wal_receiver_timeout",), (("1min",),))
    assert [n.severity for n in results[1].notices] == ["WARNING"]
    assert (results[2].columns, results[2].rows) == (("one",), ((1,),))


async def test_statements_before_an_error_are_done(node: Node) -> None:
    with pytest.raises(UndefinedObject):
        await node.execute(f"{UNCONNECTED.format('s')}; DROP SUBSCRIPTION nope; {UNCONNECTED.format('t')}")
    assert await node.fetch("SELECT subname FROM pg_subscription") == [{"subname": "s"}]


async def test_fetch_wants_a_query(node: Node) -> None:
    with pytest.raises(PubsubError, match="not a query"):
        await node.fetch(UNCONNECTED.format("s"))


async def test_passwords_do_not_show(node: Node) -> None:
    await node.execute(UNCONNECTED.format("s"))
    assert "secret" not in str(await node.fetch("SELECT * FROM pg_subscription"))
    assert "secret" not in str((await node.status()).as_json())


async def test_select_on_delta_tables(tables: Node) -> None:
    assert await tables.fetch("SELECT * FROM orders ORDER BY id DESC LIMIT 1") == [{"id": 3, "amount": Decimal("3.00")}]
    found = await tables.fetch(
        'SELECT public.orders.id, o."Key Col" FROM public.orders JOIN "Odd"."My Table" o ON o.id = orders.id ORDER BY 1'
    )
    assert found == [{"id": 2, "Key Col": "a"}, {"id": 3, "Key Col": "b"}]


async def test_select_on_tables_and_views(tables: Node) -> None:
    sql = "SELECT SubName, count(*) FROM orders, pg_subscription GROUP BY subname"
    assert await tables.fetch(sql) == [{"subname": "s", "count": 3}]


async def test_columns_are_named_as_postgresql_names_them(tables: Node) -> None:
    (result,) = await tables.execute("SELECT count(*), count(amount), 1 + 1, id::text FROM orders GROUP BY id LIMIT 1")
    assert result.columns == ("count", "count", "?column?", "id")


async def test_with_queries_hide_tables(tables: Node) -> None:
    assert await tables.fetch("WITH empty AS (SELECT id FROM orders) SELECT count(*) FROM empty") == [{"count": 3}]


@pytest.mark.parametrize(
    ("sql", "kind", "message"),
    [
        ("SELECT * FROM nothere", UndefinedTable, 'relation "nothere" does not exist'),
        ("SELECT * FROM odd.orders", UndefinedTable, 'relation "odd.orders" does not exist'),
        ("SELECT nope FROM orders", PubsubError, 'column "nope" does not exist'),
        ("SELECT * FROM public.empty", UndefinedTable, 'table "public.empty" has no rows yet'),
        ("SELECT * FROM orders, LATERAL (SELECT 1) AS x", FeatureNotSupported, "LATERAL is not supported"),
        ("SELECT 'ab' LIKE 'a\\'", FeatureNotSupported, "a LIKE pattern that ends with the escape character"),
        ("SELECT 'ab' LIKE 'a!' ESCAPE '!'", FeatureNotSupported, "a LIKE pattern that ends with the escape character"),
        (
            "SELECT 'a' LIKE p FROM (VALUES ('a\\')) v(p)",
            FeatureNotSupported,
            "a LIKE pattern that ends with the escape",
        ),
        ("SELECT 'a'::char(2) UNION SELECT 'a'::char(3)", FeatureNotSupported, "UNION of type character"),
        ("SELECT DISTINCT 'a'::char(2) ORDER BY 1", FeatureNotSupported, "DISTINCT with ORDER BY of type character"),
        ("SELECT least('a'::char(2), 'a'::char(3))", FeatureNotSupported, "LEAST of type character"),
        (
            "SELECT (SELECT x.id FROM orders x WHERE x.id = o.id) FROM orders o",
            FeatureNotSupported,
            "this query is not supported",
        ),
    ],
)
async def test_select_refused(tables: Node, sql: str, kind: type[PubsubError], message: str) -> None:
    with pytest.raises(kind) as caught:
        await tables.fetch(sql)
    assert caught.value.message.startswith(message)


async def test_a_table_of_two_subscriptions_needs_its_target(tables: Node) -> None:
    await tables.execute(UNCONNECTED.format("t").replace("false)", "false, target = 'other')"))
    oid = (await tables.catalog.subscription("t")).oid
    path = f"{tables.settings.warehouse_uri}/other/1"
    write_deltalake(path, pa.table({"id": [9]}))
    await tables.catalog.add_relations(oid, [NewRelation(1, "public", "orders", path, RelState.READY, Lsn(1))])
    with pytest.raises(PubsubError, match="ambiguous"):
        await tables.fetch("SELECT * FROM orders")
    assert await tables.fetch("SELECT * FROM other.public.orders") == [{"id": 9}]


async def test_snapshot_of_a_table_that_joined_without_a_copy(tables: Node) -> None:
    oid = (await tables.catalog.subscription("s")).oid
    await tables.catalog.advance_origin(oid, Lsn(0x500))
    found = await tables.snapshot("s")
    assert found.lsn == 0x500
    assert {name: version for name, (version, _) in found.tables.items()} == {"public.orders": 0, "Odd.My Table": 0}
    with pytest.raises(NotInPrerequisiteState, match="has not reached LSN 0/501"):
        await tables.snapshot("s", "0/501")


class ToldSpark:
    """In place of a Spark: what it was made with, and what was read."""

    made: ClassVar[list[dict[str, Any]]] = []

    def __init__(self, home: Path, **given: Any) -> None:
        self.made.append(given)
        self.session = MagicMock()

    def running(self) -> Any:
        return self.session

    def stop(self) -> None: ...


@pytest.mark.parametrize(
    ("spark", "conf"),
    [
        ({"packages": ["g:a:1", "g:b:2"]}, {"spark.jars.packages": "g:a:1,g:b:2"}),
        ({"packages": ["g:a:1"], "conf": {"spark.jars.packages": "g:c:3"}}, {"spark.jars.packages": "g:c:3"}),
        ({"conf": {"spark.driver.memory": "1g"}}, {"spark.driver.memory": "1g"}),
    ],
)
async def test_a_client_reads_with_the_settings_of_the_node(
    tmp_path: Path, tables: Node, monkeypatch: pytest.MonkeyPatch, spark: dict[str, Any], conf: dict[str, str]
) -> None:
    monkeypatch.setattr("pubsub.delta.spark.spark_session.Spark", ToldSpark)
    ToldSpark.made.clear()
    settings = Settings.read({"spark": {"master": "local[3]", **spark}}, tables.home)
    async with Node(tables.home, workers=False, settings=settings) as client:
        client.table("public.orders")
    assert ToldSpark.made == [{"master": "local[3]", "conf": conf, "warehouse": settings.warehouse_uri}]


async def test_status(tables: Node) -> None:
    found = (await tables.status()).as_json()
    assert found["daemon"] is None
    (subscription,) = found["subscriptions"]
    assert {"name", "enabled", "slot", "received_lsn", "flush_lsn", "publisher_lsn", "lag_bytes", "lag_seconds"} <= set(
        subscription
    )
    assert {"retained_wal_bytes", "error", "hint", "tables"} <= set(subscription)
    assert (
        subscription["tables"][0] | {"name": "public.orders", "state": "r", "lsn": "0/1"} == subscription["tables"][0]
    )


async def test_a_home_whose_daemon_runs_refuses_workers(tmp_path: Path) -> None:
    with DaemonLock.acquire(tmp_path):
        with pytest.raises(ObjectInUse):
            async with Node(tmp_path, workers=True):
                pass
        async with Node(tmp_path) as node:
            assert node.service is None


async def test_waiting_for_no_one(node: Node) -> None:
    await node.execute(UNCONNECTED.format("s"))
    with pytest.raises(NotInPrerequisiteState, match='subscription "s" is disabled'):
        await node.wait_for_catchup("s", "0/1")
    await node.execute("ALTER SUBSCRIPTION s ENABLE")
    with pytest.raises(NotInPrerequisiteState, match="no daemon runs"):
        await node.wait_for_catchup("s", "0/1")


async def test_a_late_subscription_says_what_lags(tables: Node) -> None:
    await tables.execute("ALTER SUBSCRIPTION s ENABLE")
    oid = (await tables.catalog.subscription("s")).oid
    await tables.catalog.set_subscription_error(oid, PubsubError("slot is gone", hint="make it"))
    with DaemonLock.acquire(tables.home):
        with pytest.raises(CatchupTimeoutError) as caught:
            await tables.wait_for_catchup("s", "0/1", timeout=0)
    error = caught.value
    assert isinstance(error, TimeoutError)
    assert error.message == 'subscription "s" did not reach LSN 0/1 within 0 seconds: slot is gone'
    assert error.detail == 'Table "public.empty" is in state i; the origin is at 0/0.'
    assert error.hint == "make it"


async def test_caught_up(tables: Node) -> None:
    await tables.execute("ALTER SUBSCRIPTION s ENABLE")
    oid = (await tables.catalog.subscription("s")).oid
    await tables.catalog.remove_relation(oid, 3)
    await tables.catalog.advance_origin(oid, Lsn(0x10))
    with DaemonLock.acquire(tables.home):
        assert await tables.wait_for_catchup("s", "0/10", timeout=0) == 0x10


async def test_a_node_that_is_not_open() -> None:
    with pytest.raises(NotInPrerequisiteState, match="not open"):
        await Node("unused", workers=False).execute("SHOW ALL")


async def test_a_client_that_was_closed_reads_nothing(tmp_path: Path) -> None:
    async with Node(tmp_path, workers=False):
        pass
    async with Node(tmp_path, workers=False, make=False) as client:
        assert await client.fetch("SELECT * FROM pg_subscription") == []
    with pytest.raises(NotInPrerequisiteState, match="not open"):
        await client.fetch("SELECT * FROM pg_subscription")


async def test_opening_creates_a_node_unless_create_is_false(tmp_path: Path) -> None:
    home = tmp_path / "home"
    async with Node(home, workers=False, make=False) as client:
        for ask in (client.status, lambda: client.fetch("SELECT 1"), lambda: client.snapshot("s")):
            with pytest.raises(PubsubError, match="no node at") as caught:
                await ask()  # type: ignore[operator]
            assert caught.value.sqlstate == "58P01"
        with pytest.raises(PubsubError, match="no node at"):
            client.table("public.orders")
        assert not home.exists()
        async with Node(home, workers=False) as other:
            await other.execute(UNCONNECTED.format("s"))
        assert [row["subname"] for row in await client.fetch("SELECT subname FROM pg_subscription")] == ["s"]
        assert (await client.status()).subscriptions


async def test_a_client_that_finds_a_node_only_later(tmp_path: Path) -> None:
    async with Node(tmp_path / "home", workers=False, make=False) as client:
        async with Node(tmp_path / "home", workers=False):
            pass
        assert not (await client.status()).subscriptions
