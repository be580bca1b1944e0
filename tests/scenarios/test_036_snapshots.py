"""Snapshots under load: the versions named together show one LSN, whatever is committed meanwhile."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import psycopg
import pytest
from deltalake import DeltaTable, QueryBuilder
from psycopg.rows import dict_row

from pubsub.delta.places import place
from pubsub.protocol.lsn import Lsn
from tests.support.decoded_record import DecodedRecord
from tests.support.foreign_writer import merge_files
from tests.support.replica import PATIENCE, Replica, read, wait_until

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
    return sum(b'"OPTIMIZE"' in file.read_bytes() for file in (place(path) / "_delta_log").glob("*.json"))


@pytest.mark.parametrize(
    "count", [8, pytest.param(60, marks=pytest.mark.full), pytest.param(1000, marks=pytest.mark.soak)]
)
def test_every_snapshot_shows_the_same_sum_in_four_tables(replica: Replica, count: int) -> None:
    replica.execute(DDL)
    replica.subscribe()
    replica.caught_up()
    paths = {table: replica.path(table) for table in TABLES}
    lsns: list[int] = []

    def another() -> bool:
        """Compare the tables in one more snapshot; return whether that is enough: some are from after a merge."""
        number = len(lsns)
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
        return number + 1 >= count and any(map(merges, paths.values()))

    with load(replica.conninfo) as transactions:
        wait_until(lambda: transactions() > 10, "the load")
        wait_until(another, "the snapshots, and small files merged meanwhile", max(PATIENCE, 4 * count))
    assert len(set(lsns)) > count // 4, "the load stood still"
    replica.assert_equal(*TABLES)


# Transactions move money between two tables, note it in a third, and write words to a table without a key.
KEYS = {"accounts": "id", "savings": "id", "moves": "id", "words": None}
BANK = """
CREATE TABLE accounts (id int PRIMARY KEY, balance bigint, note text);
CREATE TABLE savings (id int PRIMARY KEY, balance bigint);
CREATE TABLE moves (id bigserial PRIMARY KEY, account int, saving int, amount int);
CREATE TABLE words (n int, word text);
ALTER TABLE words REPLICA IDENTITY FULL;
CREATE TABLE alters (relation text, name text, value int);
CREATE PUBLICATION p FOR TABLE accounts, savings, moves, words
"""
OPENING = """
INSERT INTO accounts SELECT g, 1000, 'opened' FROM generate_series(1, 200) g;
INSERT INTO savings SELECT g, 1000 FROM generate_series(1, 100) g;
INSERT INTO words SELECT g % 5, 'it''s [one]: ' || g % 3 FROM generate_series(1, 30) g
"""
SUM = 200 * 1000 + 100 * 1000


def transact(connection: psycopg.Connection, chance: random.Random) -> None:
    """Move money in one transaction, of which a part or all may be rolled back."""
    account, saving, amount = chance.randint(1, 200), chance.randint(1, 100), chance.randint(-100, 100)
    what = chance.random()
    with connection.transaction(force_rollback=what < 0.1):
        connection.execute(
            "UPDATE accounts SET balance = balance - %s, note = %s WHERE id = %s", [amount, f"{what}", account]
        )
        if what > 0.9:
            with connection.transaction(force_rollback=True):
                connection.execute("DELETE FROM savings WHERE id < 50")
        connection.execute("UPDATE savings SET balance = balance + %s WHERE id = %s", [amount, saving])
        connection.execute("INSERT INTO moves (account, saving, amount) VALUES (%s, %s, %s)", [account, saving, amount])
        if 0.2 < what < 0.4:
            connection.execute("DELETE FROM moves WHERE id < (SELECT max(id) - 300 FROM moves)")
        if 0.4 < what < 0.5:
            connection.execute("UPDATE moves SET id = -id WHERE id = (SELECT max(id) - 7 FROM moves)")
        if what > 0.6:
            connection.execute("INSERT INTO words VALUES (%s, %s)", [amount % 5, f"w{amount % 7}"])
        if what > 0.8:
            connection.execute("UPDATE words SET n = n + 1 WHERE word = %s", [f"w{amount % 7}"])
            connection.execute("DELETE FROM words WHERE n > 8")


@contextmanager
def writers(conninfo: str, count: int) -> Iterator[Callable[[], int]]:
    """Let so many connections transact until the block ends; yield a function that counts what they committed."""
    ending = threading.Event()
    done = [0] * count

    def work(number: int) -> None:
        chance = random.Random(number)
        with psycopg.connect(conninfo, autocommit=True) as connection:
            while not ending.is_set():
                try:
                    transact(connection, chance)
                    done[number] += 1
                except (psycopg.errors.DeadlockDetected, psycopg.errors.UniqueViolation):
                    pass
                ending.wait(0.02)  # the machine has other work

    working = [threading.Thread(target=work, args=(number,), name=f"writer {number}") for number in range(count)]
    for one in working:
        one.start()
    try:
        yield lambda: sum(done)
    finally:
        ending.set()
        for one in working:
            one.join()


@contextmanager
def foreign_optimizer(paths: list[str]) -> Iterator[None]:
    """Let a Spark of another process OPTIMIZE the tables in turn, until the block ends."""
    command = [sys.executable, "-m", "tests.support.foreign_optimizer", *paths]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        try:
            assert process.stdout.readline() == "ready\n"
            yield
            process.stdin.close()
            assert process.wait(120) == 0
        finally:
            process.kill()


def add_column(replica: Replica, number: int) -> None:
    table, name = list(KEYS)[number % 4], f"more_{number}"
    replica.execute(
        f"ALTER TABLE {table} ADD COLUMN {name} int DEFAULT {number}; INSERT INTO alters VALUES ('{table}', '{name}', {number})"
    )


def held(conninfo: str, table: str) -> tuple[list[dict[str, Any]], list[str]]:
    """Return the rows and the columns that PostgreSQL has now."""
    with psycopg.connect(conninfo, row_factory=dict_row) as connection:
        found = connection.execute(f"SELECT * FROM {table}")
        return found.fetchall(), [column.name for column in found.description or ()]


def rows_at(version: int, path: str) -> tuple[list[str], list[dict[str, Any]]]:
    table = DeltaTable(path, version=version)
    rows = read(QueryBuilder().register("t", table).execute("SELECT * FROM t"))
    return [column.name for column in table.schema().fields], rows


@pytest.mark.soak
@pytest.mark.parametrize("count", [20, 1000])
def test_the_tables_at_a_random_lsn_are_what_postgresql_had_there(replica: Replica, count: int) -> None:
    """Every row of four tables at random LSNs of the past, beside the record of PostgreSQL's own decoding."""
    soak = count > 100
    replica.execute(BANK)
    chance = random.Random(count)
    samples: dict[int, dict[str, tuple[int, str]]] = {}
    asked: list[tuple[int, int]] = []
    with DecodedRecord(replica.conninfo, KEYS) as record:
        replica.execute(OPENING)
        replica.subscribe(streaming="'parallel'")
        replica.caught_up()
        paths = {table: replica.path(table) for table in KEYS}
        start = replica.node.run(replica.node._node.snapshot(replica.name)).lsn
        foreign = foreign_optimizer([*paths.values()]) if soak else nullcontext()
        with writers(replica.conninfo, 3) as committed, foreign:
            wait_until(lambda: committed() > 20, "the load")
            for number in range(count):
                if number % (count // 20) == 0:
                    add_column(replica, number)
                if not soak and number % 5 == 4:
                    merge_files(replica.node.spark.session.newSession(), paths[list(KEYS)[number // 5]])
                if soak and number % 100 == 50:
                    replica.execute("TRUNCATE words")
                newest = replica.node.run(replica.node._node.snapshot(replica.name)).lsn
                wanted = Lsn(chance.randint(start, newest))
                taken = replica.node.run(replica.node._node.snapshot(replica.name, wanted))
                assert start <= taken.lsn <= wanted
                asked.append((wanted, taken.lsn))
                samples[taken.lsn] = dict(taken.tables)
            ended = committed()
        replica.caught_up()
        merged = {table: merges(path) for table, path in paths.items()}
        replica.assert_equal(*KEYS)
        print(f"{ended} transactions; {len(samples)} of {count} LSNs; merges {merged}")
        rounded = sorted(wanted - taken for wanted, taken in asked)
        print(f"rounded down by {rounded[len(rounded) // 2]} bytes in the middle, {rounded[-1]} at most")
        differences = []
        later = sorted(samples)
        for end, changes in record.transactions_in_order():
            while later and later[0] < end:
                differences += compare(record, later.pop(0), samples)
            record.apply(end, changes)
        for lsn in later:
            differences += compare(record, lsn, samples)
        for table in KEYS:
            assert record.difference(table, *held(replica.conninfo, table)) is None, "the record is wrong"
    assert not differences, differences[:10]
    assert len(samples) > count // 10, "the load stood still"
    assert any(merged.values()), "nothing was merged meanwhile"


def compare(record: DecodedRecord, lsn: int, samples: dict[int, dict[str, tuple[int, str]]]) -> list[str]:
    """Compare the tables at one LSN; also the sum that no transaction changes."""
    found = {name.removeprefix("public."): rows_at(*where) for name, where in samples[lsn].items()}
    differences = [record.difference(name, rows, columns) for name, (columns, rows) in found.items()]
    total = sum(row["balance"] for name in ("accounts", "savings") for row in found[name][1])
    differences.append(None if total == SUM else f"the sum is {total}")
    return [f"at {Lsn(lsn)}: {difference}" for difference in differences if difference is not None]
