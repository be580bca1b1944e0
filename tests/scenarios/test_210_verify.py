"""pubsub verify: source and target compared at one LSN, while both move."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any, cast

import psycopg
import pytest

from catalog.records import SubscriptionRel
from launcher import repairs
from pubsub.digest import source as digest_source
from pubsub.errors import PubsubError
from pubsub.node.verify import comparison, verification
from pubsub.node.verify.comparison import Pace
from pubsub.node.verify.repair import Broken, Repair, Repaired
from pubsub.node.verify.report import Report, TableReport
from pubsub.node.verify.verification import Bounds, _Tables
from tests.scenarios.test_036_snapshots import BANK, OPENING, writers
from tests.support.replica import Replica, wait_until


class Clock:
    """A time that waits alone move; stands for the event by which a verification is stopped, too."""

    def __init__(self) -> None:
        self.now = 0.0
        self.lock = threading.Lock()

    def monotonic(self) -> float:
        return self.now

    def wait(self, seconds: float) -> bool:
        self.now += seconds
        return False

    def is_set(self) -> bool:
        return False


def verify(replica: Replica, *tables: str, **wanted: Any) -> Report:
    return replica.node.run(replica.node._node.verify(replica.name, tables, **wanted))


def outcomes(report: Report) -> dict[str, str]:
    return {table.relation: table.outcome for table in report.tables}


def of(report: Report, relation: str) -> TableReport:
    return next(table for table in report.tables if table.relation == relation)


@pytest.mark.full
def test_tables_that_move_are_found_equal_again_and_again(replica: Replica) -> None:
    """Writers change every table, one without a key, all the time; each comparison is at an LSN that both sides show."""
    replica.execute(BANK, OPENING)
    replica.subscribe()
    replica.caught_up()
    lsns = []
    with writers(replica.conninfo, 3) as transactions:
        wait_until(lambda: transactions() > 30, "the load")
        for _ in range(5):
            before = transactions()
            report = verify(replica)
            assert report.outcome == "equal", report
            assert set(outcomes(report).values()) == {"equal"}
            lsns.append(report.lsn)
            wait_until(lambda: transactions() > before + 5, "the load")  # noqa: B023
    assert lsns == sorted(set(lsns))
    assert replica.slots() == [replica.name]


def spoil(replica: Replica, statement: str, table: str) -> None:
    """Change a Delta table as another program would; `{}` stands for the table."""
    replica.node.spark.session.sql(statement.replace("{}", f"delta.`{replica.path(table)}`"))


def test_rows_that_differ_are_named_with_key_and_columns(replica: Replica) -> None:
    replica.execute(
        "CREATE TABLE t (a int, b text, v numeric(8,2), f float8, PRIMARY KEY (a, b))",
        "INSERT INTO t SELECT g, 'k ' || g, g * 1.5, g / 3.0 FROM generate_series(1, 3000) g",
        "CREATE TABLE bag (n int, w text)",
        "INSERT INTO bag SELECT g % 7, 'w' || g % 3 FROM generate_series(1, 100) g",
        "CREATE TABLE same (id int PRIMARY KEY)",
        "INSERT INTO same SELECT generate_series(1, 10)",
        "CREATE PUBLICATION p FOR TABLE t, bag, same",
    )
    replica.subscribe()
    replica.caught_up()
    spoil(replica, "DELETE FROM {} WHERE a = 17", "t")
    spoil(replica, "UPDATE {} SET v = 7.25, f = NULL WHERE a = 18", "t")
    spoil(replica, "INSERT INTO {} VALUES (9000, 'x''y', NULL, 0.1)", "t")
    spoil(replica, "INSERT INTO {} VALUES (1, 'w1'), (NULL, NULL)", "bag")
    report = verify(replica)
    assert report.outcome == "different"
    assert outcomes(report) == {"public.bag": "different", "public.same": "equal", "public.t": "different"}
    found = of(report, "public.t")
    assert (found.rows, found.delta_rows, found.missing, found.extra, found.different) == (3000, 3000, 1, 1, 1)
    shown = {one.kind: one for one in found.shown}
    assert shown["missing"].key == {"a": "17", "b": "k 17"}
    assert shown["missing"].publisher == {"a": "17", "b": "k 17", "v": "25.50", "f": "5.666666666666667"}
    assert shown["extra"].delta == {"a": "9000", "b": "x'y", "v": None, "f": "0.1"}
    assert shown["different"].key == {"a": "18", "b": "k 18"}
    assert (shown["different"].publisher, shown["different"].delta) == (
        {"v": "27.00", "f": "6"},
        {"v": "7.25", "f": None},
    )
    bag = of(report, "public.bag")
    assert (bag.missing, bag.extra) == (0, 2)
    assert sorted((one.delta["n"] or "", one.delta["w"] or "") for one in bag.shown if one.delta) == [
        ("", ""),
        ("1", "w1"),
    ]
    replica.execute("INSERT INTO t VALUES (17, 'again', 1, 1)")
    one = verify(replica, "same")
    assert outcomes(one) == {"public.same": "equal"}
    stored = replica.node.fetch(
        "SELECT relation, outcome, missing, extra, different FROM pubsub_verification ORDER BY 1"
    )
    assert [tuple(row.values()) for row in stored] == [
        ("public.bag", "different", 0, 2, 0),
        ("public.same", "equal", 0, 0, 0),
        ("public.t", "different", 1, 1, 1),
    ]


#: What an ALTER TABLE can do to the names of t (id, c, d), with no row of the table after it.
RENAMINGS = {
    "moved": ["DROP COLUMN d", "RENAME COLUMN c TO d"],
    "swapped": ["RENAME COLUMN c TO x", "RENAME COLUMN d TO c", "RENAME COLUMN x TO d"],
    "replaced": ["DROP COLUMN d", "ADD COLUMN d int DEFAULT 5"],
    "closed": ["DROP COLUMN d", "RENAME COLUMN c TO d"],
    "bag": ["DROP COLUMN d", "RENAME COLUMN c TO d"],
}


def create_and_subscribe(replica: Replica) -> None:
    for table in RENAMINGS:
        key = "" if table == "bag" else "PRIMARY KEY"
        replica.execute(
            f"CREATE TABLE {table} (id int {key}, c int, d int, e int)",
            f"ALTER TABLE {table} REPLICA IDENTITY FULL",
            f"INSERT INTO {table} SELECT g, 10 * g, 100 * g, 1000 * g FROM generate_series(1, 5) g",
        )
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(RENAMINGS)}")
    replica.subscribe(exclude="'public.closed (e)'")
    replica.caught_up()


def rename(replica: Replica) -> None:
    for table, actions in RENAMINGS.items():
        replica.execute(*(f"ALTER TABLE {table} {action}" for action in actions))


def assert_followed(replica: Replica) -> None:
    """The next row of each table alters it, and then every column is right."""
    replica.execute(*(f"INSERT INTO {table} (id, d) VALUES (6, 6)" for table in RENAMINGS))
    replica.caught_up()
    report = verify(replica)
    assert set(outcomes(report).values()) == {"equal"}, report
    replica.assert_equal(*(table for table in RENAMINGS if table != "closed"))
    replica.assert_equal("closed", columns=["id", "d"])


@pytest.mark.full
def test_every_table_has_its_turn(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longest not verified first; one that the time does not suffice for goes behind the others."""
    replica.execute(
        *(f"CREATE TABLE {name} (id int PRIMARY KEY)" for name in "abcd"),
        "CREATE PUBLICATION p FOR TABLE a, b, c, d",
    )
    replica.subscribe()
    replica.caught_up()
    compared: list[str] = []
    slow: set[str] = set()
    compare = _Tables.compare

    async def noted(tables: _Tables, relation: SubscriptionRel, *rest: Any) -> TableReport:
        compared.append(relation.name)
        if relation.name in slow:
            raise TimeoutError
        return await compare(tables, relation, *rest)

    monkeypatch.setattr(_Tables, "compare", noted)

    def order() -> str:
        compared.clear()
        report = verify(replica)
        assert [table.relation for table in report.tables] == [f"public.{name}" for name in "abcd"]
        return "".join(compared)

    verify(replica, "b")
    assert order() == "acdb"
    verify(replica, "c")
    assert order() == "abdc"
    verify(replica, "d", "c")
    slow.add("a")
    with pytest.raises(PubsubError, match="the verification was not done within"):
        order()
    assert compared == ["a"]
    (found,) = (one for one in replica.node.status_json(replica.name)["tables"] if one["name"] == "public.a")
    assert found["verification"]["outcome"] == "failed"
    assert found["verification"]["equal"] is True, "it was, before"
    assert "not done within" in found["verification"]["reason"]
    slow.clear()
    assert order() == "bcda"


def test_the_publisher_is_read_at_the_rate(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that is read is asked for first, and no more than the rate allows; the time is the test's own."""
    replica.execute(
        "CREATE TABLE t (id int PRIMARY KEY, v text)",
        "INSERT INTO t SELECT g, repeat('x', 100) FROM generate_series(1, 40000) g",
        "CREATE PUBLICATION p FOR TABLE t",
    )
    replica.subscribe()
    replica.caught_up()
    rate = 1000.0
    monkeypatch.setattr(Bounds, "of", lambda _: Bounds(connections=2, bytes_per_second=rate, timeout=0, sample_rows=50))
    paces: list[Pace] = []
    asked: list[tuple[float, int]] = []
    clock = Clock()

    class Noted(Pace):
        def __init__(self, bytes_per_second: float) -> None:
            super().__init__(bytes_per_second)
            self.stopping = cast(threading.Event, clock)
            paces.append(self)

        def wait(self, nbytes: int) -> None:
            # One session at a time, so that the time of a read is that of its own wait.
            with clock.lock:
                super().wait(nbytes)
                asked.append((clock.now, nbytes))

    monkeypatch.setattr(comparison, "time", clock)
    monkeypatch.setattr(digest_source, "_LEAST_STRETCH", 100)
    monkeypatch.setattr(verification, "Pace", Noted)
    assert verify(replica).outcome == "equal"
    assert len(paces) == 1
    ((size,),) = replica.database.query("SELECT pg_relation_size('t')")
    assert len(asked) > 2
    assert sum(nbytes for _, nbytes in asked) >= 0.9 * size
    for number, (at, _) in enumerate(asked):
        assert at * rate >= sum(nbytes for _, nbytes in asked[:number])


@pytest.mark.full
def test_a_name_that_another_column_has_now_is_not_compared_with_it(replica: Replica) -> None:
    """The stream knows columns by their numbers: the next row drops and renames, whatever a repair wrote under the names."""
    create_and_subscribe(replica)
    rename(replica)
    report = verify(replica, repair=True)
    assert set(outcomes(report).values()) == {"different"}, report
    assert all("other columns under the names" in (one.reason or "") for one in report.tables), report
    assert all("next row" in (one.hint or "") for one in report.tables), report
    assert not any(one.repaired for one in report.tables)
    assert_followed(replica)


@pytest.mark.full
def test_a_table_whose_columns_were_renamed_since_it_was_compared_is_not_repaired(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    create_and_subscribe(replica)
    for table in RENAMINGS:
        spoil(replica, "UPDATE {} SET c = 7 WHERE id = 3", table)
    repair = Repair.run

    async def renamed_first(self: Repair, tables: Sequence[Broken]) -> Repaired:
        monkeypatch.undo()
        await asyncio.to_thread(rename, replica)
        return await repair(self, tables)

    monkeypatch.setattr(Repair, "run", renamed_first)
    report = verify(replica, repair=True)
    assert set(outcomes(report).values()) == {"different"}, report
    assert all("it was not repaired: column" in (one.reason or "") for one in report.tables), report
    replica.execute(*(f"INSERT INTO {table} (id, d) VALUES (6, 6)" for table in RENAMINGS))
    replica.caught_up()
    assert verify(replica, repair=True).outcome == "equal"
    replica.assert_equal(*(table for table in RENAMINGS if table != "closed"))


@pytest.mark.full
def test_keys_whose_equality_is_an_extensions(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sessions' search_path is empty, so that their operators are not found by themselves."""
    replica.execute(
        'CREATE SCHEMA "ex t"; CREATE EXTENSION ltree SCHEMA "ex t"; CREATE EXTENSION citext; CREATE EXTENSION isn',
        'CREATE DOMAIN tree AS "ex t".ltree',
        "CREATE TABLE trees (id int, k tree, v int, PRIMARY KEY (id, k))",
        "CREATE TABLE books (id int, k isbn13, v int, PRIMARY KEY (k) INCLUDE (id))",
        "CREATE TABLE words (v0 int, k citext, v int, id int, PRIMARY KEY (k, v0, id))",
    )
    replica.execute(
        "INSERT INTO trees SELECT g, \"ex t\".text2ltree('r.n' || g), g FROM generate_series(1, 400) g",
        "INSERT INTO books SELECT g, ('978' || lpad(g::text, 9, '0') || '?')::isbn13, g FROM generate_series(1, 400) g",
        "INSERT INTO words SELECT g, 'W' || g, g, g FROM generate_series(1, 400) g",
        "CREATE PUBLICATION p FOR TABLE trees, books, words",
        "ANALYZE",
    )
    replica.subscribe()
    replica.caught_up()
    assert verify(replica).outcome == "equal"
    tables = ("trees", "books", "words")
    for table in tables:
        spoil(replica, "UPDATE {} SET v = -1 WHERE id % 2 = 0", table)
    monkeypatch.setattr(Bounds, "of", lambda _: Bounds(connections=1, bytes_per_second=0, timeout=0, sample_rows=50))
    found = verify(replica, sample=True)
    assert all(one.sampled for one in found.tables)
    assert set(outcomes(found).values()) == {"different"}, found
    repaired = verify(replica, repair=True)
    assert repaired.outcome == "equal", repaired
    assert {one.repaired for one in repaired.tables} == {200}
    replica.assert_equal(*tables)


@pytest.mark.full
def test_what_the_publisher_refuses_in_a_repair_is_that_tables_reason(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in ("a", "b"):
        replica.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)", f"INSERT INTO {table} VALUES (1), (2)")
    replica.execute("CREATE PUBLICATION p FOR TABLE a, b")
    replica.subscribe()
    replica.caught_up()
    for table in ("a", "b"):
        spoil(replica, "DELETE FROM {} WHERE id = 1", table)
    read = repairs.rows_under

    def refused_once(session: psycopg.Connection, *given: Any) -> Any:
        monkeypatch.undo()
        session.execute("SELECT 1 / 0")
        return read(session, *given)

    monkeypatch.setattr(repairs, "rows_under", refused_once)
    report = verify(replica, repair=True)
    assert outcomes(report) == {"public.a": "different", "public.b": "equal"}
    assert of(report, "public.a").reason == "it was not repaired: division by zero"
    assert of(report, "public.b").repaired == 1


@pytest.mark.full
def test_repair_copies_the_rows_that_differ_anew_under_load(replica: Replica) -> None:
    """Writers change the spoilt tables all the time; after the repair both sides are equal, and stay so."""
    replica.execute(BANK, OPENING, "CREATE TABLE unchanged (a text, b numeric, PRIMARY KEY (a, b))")
    replica.execute("INSERT INTO unchanged SELECT 'x' || g, g + 0.50 FROM generate_series(1, 100) g")
    replica.execute("ALTER PUBLICATION p ADD TABLE unchanged")
    replica.subscribe()
    replica.caught_up()
    for table, statement in {
        "accounts": "UPDATE {} SET balance = balance + 1 WHERE id < 50",
        "savings": "DELETE FROM {} WHERE id > 90",
        "moves": "INSERT INTO {} (id, account, saving, amount) VALUES (1000001, 1, 1, 1), (1000002, 2, 2, 2)",
        "words": "INSERT INTO {} VALUES (3, 'spoilt'), (3, 'spoilt'), (NULL, NULL)",
        "unchanged": "UPDATE {} SET b = '7.5' WHERE a = 'x7'",
    }.items():
        spoil(replica, statement, table)
    # The writers come to every account sooner or later, and so mend it; not to one that is not theirs.
    spoil(replica, "INSERT INTO {} VALUES (100001, 5, 'extra')", "accounts")
    with writers(replica.conninfo, 3) as transactions:
        wait_until(lambda: transactions() > 20, "the load")
        found = verify(replica)
        assert set(outcomes(found).values()) == {"different"}, found
        before = transactions()
        report = verify(replica, repair=True)
        assert report.outcome == "equal", report
        assert {one.relation: one.repaired > 0 for one in report.tables} == dict.fromkeys(outcomes(found), True), report
        wait_until(lambda: transactions() > before + 10, "the load")
        assert verify(replica).outcome == "equal"
    replica.assert_equal("accounts", "savings", "moves", "words", "unchanged")
