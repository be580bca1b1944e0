"""The option source: several databases write one Delta table, each of them its own rows."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from deltalake import DeltaTable

from pubsub.delta.log.table_log import TableLog
from pubsub.delta.log.transactions import Conflict, Listed, Operation, Request
from pubsub.delta.spark.jvm_transactions import DeltaTransactions
from pubsub.delta.spark.spark_session import Spark
from pubsub.delta.writers import copy_chunks
from pubsub.errors import PubsubError
from pubsub.protocol.rows import INSERT, UPDATE
from pubsub.testing.servers import EmbeddedPostgres
from tablesync import choose_copier
from tests.scenarios.test_034_resumed_copy import TABLE, WRITES
from tests.support.replica import Faults, RunningNode, wait_until
from tests.support.sources import COLUMN, Tenant
from tests.unit.pubsub.delta.test_sources import Tenants as Tenancies

SETUP = (
    "CREATE TABLE t (id int PRIMARY KEY, v text, n int); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;"
    "INSERT INTO t SELECT g, '{name}' || repeat('x', 3000) || g, g FROM generate_series(1, {rows}) g;"
    "CREATE PUBLICATION p FOR TABLE t"
)
CHANGES = (
    "INSERT INTO t VALUES (1000, '{name}', 1)",
    "UPDATE t SET n = -n WHERE id IN (1, 2)",
    "DELETE FROM t WHERE id = 5",
    "UPDATE t SET id = id + 2000 WHERE id = 4",
    (
        "BEGIN; INSERT INTO t SELECT g, '{name}' || g, g FROM generate_series(3000, 3100) g;"
        "UPDATE t SET n = 0 WHERE id > 3090; DELETE FROM t WHERE id BETWEEN 3000 AND 3050; COMMIT"
    ),
)

RESUMED = TABLE.replace("{", "{{").replace("}", "}}")

Tenants = Callable[..., Tenant]


@pytest.fixture
def tenants(node: RunningNode, publisher: EmbeddedPostgres, request: pytest.FixtureRequest) -> Iterator[Tenants]:
    """A function that makes a tenant's database, with the same keys as the others' and other values."""
    made: list[Tenant] = []
    target = f"t{zlib.crc32(request.node.nodeid.encode())}"

    def make(value: str, rows: int = 20, setup: str = SETUP) -> Tenant:
        tenant = Tenant(node, publisher, value, target)
        made.append(tenant)
        tenant.execute(setup.format(name=tenant.database.name, rows=rows))
        return tenant

    yield make
    for tenant in made:
        tenant.close()


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Divide a few megabytes into some chunks."""
    monkeypatch.setattr(choose_copier, "_LEAST_CHUNK_BYTES", 131072)
    monkeypatch.setattr(choose_copier, "_MOST_CHUNK_BYTES", 131072)


@pytest.mark.full
def test_changes_under_equal_keys_are_each_source_s_own(tenants: Tenants) -> None:
    """Compared after each statement: what one source's rows hide in the end may be wrong in between."""
    every = [tenants(value, rows) for value, rows in (("one", 20), ("two", 30))]
    for tenant in every:
        tenant.join()
    for statement in CHANGES:
        for tenant in every:
            tenant.execute(statement.format(name=tenant.database.name))
        for tenant in every:
            tenant.assert_own("t")


@pytest.mark.parametrize("values", [("one", "it's 2"), pytest.param(("one", "two", "it's 3"), marks=pytest.mark.full)])
def test_databases_write_one_table(tenants: Tenants, values: tuple[str, ...]) -> None:
    """Changes under equal keys, TRUNCATE, RESYNC and ALTER TABLE of one are its own; one more joins without touching the others."""
    every = [tenants(value, 20 + 10 * number) for number, value in enumerate(values)]
    one, two, last = every[0], every[1], every[-1]
    for tenant in every:
        tenant.join()
    assert len({tenant.path("t") for tenant in every}) == 1
    for statement in CHANGES:
        for tenant in every:
            tenant.execute(statement.format(name=tenant.database.name))
    for tenant in every:
        tenant.assert_own("t")
    two.execute("BEGIN; TRUNCATE t; INSERT INTO t VALUES (1, 'after it', 1); COMMIT")
    one.execute("UPDATE t SET n = 7 WHERE id = 1")
    for tenant in every:
        tenant.assert_own("t")
    generation = last.relation("t").copy_generation
    last.alter("RESYNC TABLE t")
    last.until_copied("t", generation)
    one.execute("ALTER TABLE t ADD c int DEFAULT 5; INSERT INTO t VALUES (9000, 'with c', 1, 6)")
    two.execute("UPDATE t SET n = 8 WHERE id = 1; INSERT INTO t VALUES (2, 'without', 2)")
    one.assert_own("t", "id, v, n, c")
    for tenant in every[1:]:
        tenant.execute("UPDATE t SET n = n + 1 WHERE id = 1")
        tenant.assert_own("t")
        assert {row["c"] for row in tenant.own("t")} == {None}
    # The others get the column later, with values of their own.
    two.execute("ALTER TABLE t ADD c int DEFAULT 11; INSERT INTO t VALUES (3, 'with c', 1, NULL)")
    two.assert_own("t", "id, v, n, c")
    one.assert_own("t", "id, v, n, c")

    before = [[(row["id"], row["v"], row["n"]) for row in tenant.own("t")] for tenant in every]
    version = one.version("t")
    versions = [tenant.node.run(tenant.node._node.snapshot(tenant.name)).lsn for tenant in every]
    more = tenants("more", 25)
    more.join()
    more.assert_own("t")
    assert [[(row["id"], row["v"], row["n"]) for row in tenant.own("t")] for tenant in every] == before
    assert changed_since(one, version) == {"more"}
    assert all(
        tenant.node.run(tenant.node._node.snapshot(tenant.name)).lsn >= at
        for tenant, at in zip(every, versions, strict=True)
    )
    for tenant in (*every, more):
        tenant.execute(f"INSERT INTO t VALUES (9999, '{tenant.database.name}', 9)")
    for tenant in (*every, more):
        tenant.assert_own("t")
        tenant.assert_verified("public.t")
        assert tenant.relation("t").foreign is None
        statistics = tenant.node.statistics(tenant.name)
        assert (statistics["apply_error_count"], statistics["sync_error_count"]) == (0, 0)
    assert DeltaTable(one.path("t")).metadata().partition_columns == [COLUMN]
    found = one.node.fetch(f"SELECT {COLUMN} AS source, count(*) AS rows FROM {one.target}.public.t GROUP BY 1")
    assert {row["source"]: row["rows"] for row in found} == {
        tenant.value: len(tenant.publishers("t", "id")) for tenant in (*every, more)
    }
    shown = one.node.fetch("SELECT source FROM pg_subscription_rel WHERE source IS NOT NULL")
    assert {row["source"] for row in shown} == {tenant.value for tenant in (*every, more)}


def changed_since(tenant: Tenant, version: int) -> set[str | None]:
    """Return the sources whose files commits after this version have added or removed; merged files have the same rows."""
    log = TableLog(tenant.path("t"))
    log.refresh()
    found: set[str | None] = set()
    for number in range(version + 1, log.version + 1):
        for action in log.actions(number) or ():
            for kind, what in action.items():
                if kind in ("add", "remove") and what["dataChange"]:
                    found.add(what["partitionValues"][COLUMN])
    return found


def test_what_does_not_fit_is_refused(tenants: Tenants, node: RunningNode) -> None:
    """By name, and before any row comes."""
    one = tenants("one")
    one.join()
    two = tenants("two")
    target = f"target = '{one.target}'"

    def refused(options: str, tenant: Tenant = two) -> str:
        return str(tenant.refused(f"{target}, {options}").message)

    assert "the source of the Delta table for relation" in refused("source = 'one'")
    assert "belongs to subscription" in refused("enabled = true")
    for mode in ("history", "scd2"):
        assert "mutually exclusive" in refused(f"source = 'two', mode = {mode}")
    assert "mutually exclusive" in refused("source = 'two', register = lake")
    assert "needs a copy" in refused("source = 'two', copy_data = false")
    assert "has its sources in column" in refused("source = 'two', source_column = tenant")
    assert "the option deletes" in refused("source = 'two', deletes = soft")
    three = tenants(
        "three", setup="CREATE TABLE t (id int PRIMARY KEY, v text, n text); CREATE PUBLICATION p FOR TABLE t"
    )
    assert 'column "n" of table "public.t" does not fit' in refused("source = 'three'", three)
    four = tenants("four", setup="CREATE TABLE t (id int, n int PRIMARY KEY, v text); CREATE PUBLICATION p FOR TABLE t")
    assert "has the key (n), its Delta table (id)" in refused("source = 'four'", four)
    five = tenants(
        "five", setup="CREATE TABLE t (v text); ALTER TABLE t REPLICA IDENTITY FULL; CREATE PUBLICATION p FOR TABLE t"
    )
    assert "has no key" in refused("source = 'five'", five)
    six = tenants("six")
    six.subscribe(target=f"'{one.target}_plain'")
    six.until_ready()
    six.drop()
    plain = two.refused(f"target = '{one.target}_plain', source = 'two'")
    assert "has no column of sources" in plain.message
    with pytest.raises(PubsubError, match="unrecognized subscription parameter"):
        one.alter("SET (source = 'other')")
    # The rows of a dropped subscription stay; another one takes the source over once they are gone.
    one.drop()
    assert "holds rows of source" in refused("source = 'one'", one)
    two.join()
    two.assert_own("t")
    assert len(two.own("t")) == 20


def test_columns_that_one_source_drops_or_renames(tenants: Tenants) -> None:
    """A dropped one stays while others have it; a renamed one is copied under its new name; another type is refused."""
    one, two = tenants("one"), tenants("two")
    one.join()
    two.join()
    one.execute("ALTER TABLE t DROP n; INSERT INTO t VALUES (500, 'without n')")
    two.execute("UPDATE t SET n = 50 WHERE id = 2")
    one.assert_own("t", "id, v")
    two.assert_own("t")
    generation = one.relation("t").copy_generation
    one.execute("ALTER TABLE t RENAME v TO w; INSERT INTO t VALUES (501, 'renamed')")
    one.until_copied("t", generation)
    one.assert_own("t", "id, w")
    assert {row["v"] for row in one.own("t")} == {None}
    two.execute("INSERT INTO t VALUES (501, 'as before', 1)")
    two.assert_own("t")
    assert {row["w"] for row in two.own("t")} == {None}
    two.execute("ALTER TABLE t ALTER n TYPE bigint; INSERT INTO t VALUES (502, 'wider', 5000000000)")
    text = 'column "n" of table "public.t" does not fit the Delta table of source "two"'
    wait_until(lambda: text in str(two.node.statistics(two.name)["error"]), "the copy to be refused")
    one.execute("INSERT INTO t VALUES (503, 'goes on')")
    one.assert_own("t", "id, w")


@pytest.mark.parametrize(
    "options",
    [
        {"deletes": "soft", "metadata": "'* (lsn, op)'", "truncate": "'* (soft)'"},
        pytest.param({"mask": "'public.t (v null)'"}, marks=pytest.mark.full),
        pytest.param({"truncate": "ignore"}, marks=pytest.mark.full),
        pytest.param(
            {"table_properties": "'* (delta.columnMapping.mode = name)'", "binary": "true"}, marks=pytest.mark.full
        ),
        pytest.param({"source_column": "tenant", "streaming": "parallel", "batch_rows": "5"}, marks=pytest.mark.full),
    ],
)
def test_with_other_options(tenants: Tenants, options: dict[str, str]) -> None:
    one, two = tenants("one"), tenants("two")
    for tenant in (one, two):
        tenant.join(**options)
    for statement in CHANGES:
        for tenant in (one, two):
            tenant.execute(statement.format(name=tenant.database.name))
    for tenant in (one, two):
        tenant.caught_up()
    column = options.get("source_column", COLUMN)
    soft, masked = "deletes" in options, "mask" in options
    for tenant in (one, two):
        rows = [row for row in tenant.rows("t") if row[column] == tenant.value]
        live = [row for row in rows if not soft or row["_pubsub_deleted_at"] is None]
        names = ("id", "n") if masked else ("id", "v", "n")
        found = sorted((tuple(row[name] for name in names) for row in live), key=repr)
        assert found == tenant.publishers("t", ", ".join(names))
        assert (len(rows) > len(live)) == soft
        tenant.assert_verified("public.t")
    one.execute("TRUNCATE t")
    one.caught_up()
    rows = one.rows("t")
    left = [row for row in rows if row[column] == "one" and (not soft or row["_pubsub_deleted_at"] is None)]
    assert bool(left) == ("truncate" in options and not soft)
    assert len([row for row in rows if row[column] == "two"]) >= len(two.publishers("t", "id"))


@pytest.mark.full
def test_tenants_at_once(tenants: Tenants) -> None:
    """Copies, and then batches, of all at the same time: each is committed as it was staged."""
    every = [tenants(f"n{number}", 10 + number) for number in range(5)]
    for tenant in every:
        tenant.subscribe(target=f"'{tenant.target}'", source=f"'{tenant.value}'")
    for tenant in every:
        tenant.until_ready()
    for number in range(10):
        for tenant in every:
            tenant.execute(f"UPDATE t SET n = n + {number}; INSERT INTO t VALUES (100 + {number}, 'new', 0)")
    for tenant in every:
        tenant.assert_own("t")
        assert tenant.relation("t").foreign is None
        statistics = tenant.node.statistics(tenant.name)
        assert (statistics["apply_error_count"], statistics["sync_error_count"]) == (0, 0)


ODD = (
    "!$&'()+,;@~ -_.*:=?#%25[]{}^|<>`\"",
    "o'brien",
    "a+b",
    "x&y",
    " ",
    "null",
    "ü" * 100,
    "__hive_default_partition__",
)


@pytest.mark.full
def test_vacuum_leaves_the_files_of_odd_values(spark: Spark, tmp_path: Path) -> None:
    """VACUUM compares texts of paths, so the log must have each as Java would write it; of another's file it finds none in the log."""
    tenants = Tenancies(tmp_path, *ODD)
    for tenant in tenants:
        tenant.send((INSERT, 1, "a"), (INSERT, 2, "b"))
        tenant.send((UPDATE, 1, "c"))
    path = tenants.all[0].target.path
    strays = [Path(path, f"{unquote(name)}.stray.parquet") for name in tenants.log.files]
    for stray in strays:
        stray.write_bytes(b"")
    own = spark.session.newSession()
    own.conf.set("spark.databricks.delta.retentionDurationCheck.enabled", "false")
    own.conf.set("spark.sql.shuffle.partitions", "1")
    DeltaTransactions(spark.session).vacuum(path, [Listed(str(strays[0].relative_to(path)), 0, 0)])
    own.sql(f"VACUUM delta.`{path}` RETAIN 0 HOURS").collect()
    assert not any(stray.exists() for stray in strays)
    for tenant in tenants:
        tenant.assert_own()
    own.sql(f"OPTIMIZE delta.`{path}`").collect()
    own.sql(f"VACUUM delta.`{path}` RETAIN 0 HOURS").collect()
    for tenant in tenants:
        tenant.send((UPDATE, 2, "d"))
        tenant.assert_own()


@pytest.mark.full
def test_a_copy_is_resumed_beside_other_sources(
    tenants: Tenants, monkeypatch: pytest.MonkeyPatch, small_chunks: None, fault: Faults
) -> None:
    """Between its snapshots one source brings a column, and another is dropped; its own rows change, too."""
    one, two, three = (tenants(value, 40, setup=RESUMED) for value in ("one", "two", "three"))
    for tenant in (two, three):
        tenant.join()
    commit, kept, fails = copy_chunks.commit, list[int](), [3, 3]

    def interrupted(log: TableLog, copy: str, attempt: str, chunk: int, *rest: Any, **more: Any) -> None:
        if more["part"] == (COLUMN, "one"):
            kept.append(chunk)
            if fails and len(kept) >= fails[0]:
                fails.pop()
                between()
                raise RuntimeError("the disk is full")
        commit(log, copy, attempt, chunk, *rest, **more)

    def between() -> None:
        if fails:
            one.execute(*WRITES[:6])
            two.execute("ALTER TABLE a ADD more int DEFAULT 7", "UPDATE a SET n = n + 1 WHERE id < 5")
        else:
            one.execute("UPDATE a SET n = n + 1 WHERE id % 3 = 0", "DELETE FROM a WHERE id % 13 = 0")
            two.execute("UPDATE a SET n = n + 1 WHERE id > 5990")
            three.drop()

    monkeypatch.setattr(copy_chunks, "commit", interrupted)
    fault.arm("window public.a")
    one.subscribe(target=f"'{one.target}'", source="'one'")
    fault.wait("window public.a")
    one.execute(*WRITES[6:])
    two.execute("DELETE FROM a WHERE id = 3")
    fault.release("window public.a")
    one.until_ready()
    assert not fails
    assert one.relation("a").copy_generation == 1, "it went on"
    one.execute(
        "UPDATE a SET n = n + 1", "UPDATE a SET id = id + 9000000 WHERE id % 4 = 0", "DELETE FROM a WHERE id % 5 = 0"
    )
    for tenant, columns in ((one, "id, n, t, big"), (two, "id, n, t, big, more")):
        tenant.assert_own("a", columns)
        tenant.assert_verified("public.a")
        assert tenant.relation("a").foreign is None
    assert {row["more"] for row in one.own("a", "more")} == {None}
    assert len(two.rows("a", f"id FROM delta_t WHERE {COLUMN} = 'three'")) == 6000


@pytest.mark.full
def test_other_names_and_repairs(tenants: Tenants, spark: Spark) -> None:
    """Two publishers call a column differently, both alter their tables at once, and what a job spoils is repaired for its source."""
    one, two = tenants("one"), tenants("two")
    two.execute("ALTER TABLE t RENAME v TO w")
    one.join(rename="'public.t (v text)'", exclude="'public.t (n)'", metadata="'* (op)'", deletes="soft")
    two.join(rename="'public.t (w text)'", metadata="'* (op)'", deletes="soft")
    path = one.path("t")

    def live(tenant: Tenant) -> list[tuple[Any, ...]]:
        tenant.caught_up()
        names = (
            "id",
            "text",
            *(() if tenant is one else ("more", "n")),
        )  # what is added to a table with exclude stays out
        rows = [row for row in tenant.own("t") if row["_pubsub_deleted_at"] is None]
        return sorted((tuple(row[name] for name in names) for row in rows), key=repr)

    def assert_equal() -> None:
        assert live(one) == one.publishers("t", f"id, {named[0]}")
        assert live(two) == two.publishers("t", f"id, {named[1]}, more, n")
        for tenant in (one, two):
            tenant.assert_verified("public.t")

    named = ["v", "w"]
    for tenant, name in ((one, "v"), (two, "w")):
        tenant.execute(
            f"ALTER TABLE t ADD more int DEFAULT 5; UPDATE t SET {name} = 'a' WHERE id = 1",
            "DELETE FROM t WHERE id = 2",
        )
    two.execute("ALTER TABLE t RENAME w TO v; UPDATE t SET v = 'b', n = 5 WHERE id = 3")
    named = ["v", "v"]
    assert_equal()
    assert {(row["n"], row["more"]) for row in one.own("t")} == {(None, None)}
    spark.session.sql(f"UPDATE delta.`{path}` SET text = 'spoilt' WHERE id IN (4, 5)")
    spark.session.sql(f"DELETE FROM delta.`{path}` WHERE id = 6")
    before = live(two)
    report = one.node.run(one.node._node.verify(one.name, repair=True))
    assert [(found.outcome, found.repaired) for found in report.tables] == [("equal", 3)]
    assert live(two) == before
    assert live(one) == one.publishers("t", "id, v")
    one.execute("UPDATE t SET v = 'c' WHERE id IN (4, 6)")
    two.node.run(two.node._node.verify(two.name, repair=True))
    two.execute("UPDATE t SET v = 'd' WHERE id IN (4, 6)")
    assert_equal()


TWO_COLUMNS = (
    'CREATE TABLE t (a int, "B c" text, v text, n int, PRIMARY KEY ({key})); ALTER TABLE t ALTER v SET STORAGE EXTERNAL;'
    "INSERT INTO t SELECT g, 'key ' || g % 3, '{{name}}' || repeat('x', 3000) || g, g FROM generate_series(1, {{rows}}) g;"
    "CREATE PUBLICATION p FOR TABLE t"
)


@pytest.mark.full
def test_a_key_of_two_columns(tenants: Tenants, spark: Spark) -> None:
    """Whose order is another at each source, and one of which has another name in data files; with odd values of sources."""
    every = [
        tenants(value, 12, TWO_COLUMNS.format(key=key))
        for value, key in (('o\'brien "x"/100%25', '"B c", a'), ("a\\b\\'=c", 'a, "B c"'))
    ]
    for tenant in every:
        tenant.join()
    for statement in (
        "INSERT INTO t VALUES (1000, 'key', '{name}', 1)",
        "UPDATE t SET n = -n WHERE a IN (1, 2)",
        "DELETE FROM t WHERE a = 5",
        "UPDATE t SET \"B c\" = 'another ' || a WHERE a = 4",
        "ALTER TABLE t ADD w int DEFAULT 5; UPDATE t SET w = 6 WHERE a = 1000",
    ):
        for tenant in every:
            tenant.execute(statement.format(name=tenant.database.name))
        for tenant in every:
            tenant.caught_up()
    every[0].alter("RESYNC TABLE t")
    every[0].until_ready()
    every[1].execute("UPDATE t SET n = n + 1")
    for tenant in every:
        tenant.execute("DELETE FROM t WHERE a IN (1000, 4)", "INSERT INTO t VALUES (5, 'key 5', 'again', 1)")
        tenant.assert_own("t", "a, B c, v, n, w")
        tenant.assert_verified("public.t")
        statistics = tenant.node.statistics(tenant.name)
        assert (statistics["apply_error_count"], statistics["sync_error_count"]) == (0, 0)
        assert tenant.relation("t").foreign is None


def test_delta_finds_conflicts_in_the_partition_alone(spark: Spark, tmp_path: Path) -> None:
    """A commit that was worked out from one partition may come after others that changed another, and not after one of its own."""
    path = str(tmp_path / "t")
    spark.session.sql(
        f"CREATE TABLE delta.`{path}` (k BIGINT, `{COLUMN}` STRING) USING delta PARTITIONED BY (`{COLUMN}`)"
    )
    transactions = DeltaTransactions(spark.session)
    table_id = DeltaTable(path).metadata().id

    def add(value: str, name: str) -> dict[str, Any]:
        stats = json.dumps({"numRecords": 0})
        Path(path, name).write_bytes(b"x")
        return {
            "add": {
                "path": name,
                "partitionValues": {COLUMN: value},
                "size": 1,
                "modificationTime": 0,
                "dataChange": True,
                "stats": stats,
            }
        }

    value = "it's \\ 1"

    def commit(of: str, name: str, part: str | None, meanwhile: list[tuple[str, str]]) -> None:
        version = DeltaTable(path).version()
        request = Request(
            path, version, table_id, [add(of, name)], Operation.WRITE, None, None if part is None else (COLUMN, part)
        )
        started = transactions._commit

        def late(transaction: Any, asked: Request) -> None:
            transactions._commit = started  # type: ignore[method-assign]
            for other, file in meanwhile:
                at = DeltaTable(path).version()
                between = Request(path, at, table_id, [add(other, file)], Operation.WRITE, None, (COLUMN, other))
                DeltaTransactions(spark.session).commit(between)
            started(transaction, asked)

        transactions._commit = late  # type: ignore[method-assign]
        transactions.commit(request)

    commit(value, "a", value, [("two", "b"), ("three", "c")])
    assert DeltaTable(path).version() == 3
    with pytest.raises(Conflict):
        commit(value, "d", value, [("two", "e"), (value, "f")])
    with pytest.raises(Conflict):
        commit(value, "g", None, [("two", "h")])
    assert DeltaTable(path).version() == 6, "those that came between"
