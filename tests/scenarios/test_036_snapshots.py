"""Snapshots under load: the versions named together show one LSN, whatever is committed meanwhile."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest
from deltalake import DeltaTable, QueryBuilder

from tests.support.replica import Replica, read, wait_until

# pgbench's tables: a transaction adds one amount to an account, a teller, a branch and, as a row, to the history.
TABLES = {"accounts": "abalance", "tellers": "tbalance", "branches": "bbalance", "history": "delta"}
DDL = """
CREATE TABLE accounts (aid int PRIMARY KEY, bid int, abalance int DEFAULT 0, filler text);
CREATE TABLE tellers (tid int PRIMARY KEY, bid int, tbalance int DEFAULT 0);
CREATE TABLE branches (bid int PRIMARY KEY, bbalance int DEFAULT 0);
CREATE TABLE history (tid int, bid int, aid int, delta int, mtime timestamp DEFAULT now());
INSERT INTO accounts SELECT g, 1, 0, md5(g::text) FROM generate_series(1, 1000) g;
INSERT INTO tellers SELECT g, 1 FROM generate_series(1, 10) g;
INSERT INTO branches VALUES (1);
CREATE PUBLICATION p FOR TABLE accounts, tellers, branches, history
"""


@contextmanager
def load(conninfo: str) -> Iterator[Callable[[], int]]:
    """Run pgbench's transactions one after the other until the block ends; yield a function that counts them."""
    ending = threading.Event()
    done = 0

    def work() -> None:
        nonlocal done
        chance = random.Random(1)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            while not ending.is_set():
                delta, aid, tid = chance.randint(-5000, 5000), chance.randint(1, 1000), chance.randint(1, 10)
                with connection.transaction():
                    connection.execute("UPDATE accounts SET abalance = abalance + %s WHERE aid = %s", [delta, aid])
                    connection.execute("UPDATE tellers SET tbalance = tbalance + %s WHERE tid = %s", [delta, tid])
                    connection.execute("UPDATE branches SET bbalance = bbalance + %s WHERE bid = 1", [delta])
                    connection.execute(
                        "INSERT INTO history (tid, bid, aid, delta) VALUES (%s, 1, %s, %s)", [tid, aid, delta]
                    )
                done += 1

    working = threading.Thread(target=work, name="load")
    working.start()
    try:
        yield lambda: done
    finally:
        ending.set()
        working.join()


def merges(path: str) -> int:
    """Return how many of the table's commits have merged small files."""
    return sum(b'"OPTIMIZE"' in file.read_bytes() for file in (Path(path) / "_delta_log").glob("*.json"))


@pytest.mark.parametrize("count", [60, pytest.param(1000, marks=pytest.mark.soak)])
def test_four_sums_are_equal_in_each_snapshot(replica: Replica, count: int) -> None:
    replica.execute(DDL)
    replica.subscribe()
    replica.caught_up()
    paths = {table: replica.path(table) for table in TABLES}
    lsns: list[int] = []
    with load(replica.conninfo) as transactions:
        wait_until(lambda: transactions() > 10, "the load")
        for number in range(count):
            if number % 20 == 10:
                table = list(TABLES)[number // 20 % 4]
                replica.execute(f"ALTER TABLE {table} ADD COLUMN more_{number} int DEFAULT {number}")
            taken = replica.node.run(replica.node._node.snapshot(replica.name))
            sums = {}
            for table, column in TABLES.items():
                version, path = taken.tables[f"public.{table}"]
                assert path == paths[table]
                builder = QueryBuilder().register("t", DeltaTable(path, version=version))
                (row,) = read(builder.execute(f"SELECT coalesce(sum({column}), 0) AS sum FROM t"))
                sums[table] = row["sum"]
            assert len(set(sums.values())) == 1, (number, str(taken.lsn), taken.tables, sums)
            assert not lsns or taken.lsn >= lsns[-1]
            lsns.append(taken.lsn)
    assert len(set(lsns)) > count // 4, "the load stood still"
    assert sum(map(merges, paths.values())), "nothing was merged meanwhile"
    replica.assert_equal(*TABLES)
