"""ALTER TABLE inside large streamed transactions and prepared ones, on an old and a new server, text and binary.

Each case has a table of its own in one subscription; after each stage its Delta table is the publisher's.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import apply.pipeline.dispatch
from pubsub.delta.spark.spark_session import Spark
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import Replica, RunningNode, wait_until

# Tables are altered after checkpoints, too.
pytestmark = pytest.mark.usefixtures("frequent_checkpoints")

TABLE = """
CREATE TABLE a (id int PRIMARY KEY, t varchar(20), n numeric(10,2) DEFAULT 0);
INSERT INTO a SELECT g, 'row ' || g, g / 7.0 FROM generate_series(1, 200) g;
"""
FULL = """
CREATE TABLE a (id int, t varchar(20), n numeric(10,2) DEFAULT 0);
ALTER TABLE a REPLICA IDENTITY FULL;
INSERT INTO a SELECT g, 'row ' || g, g / 7.0 FROM generate_series(1, 200) g, generate_series(1, 1 + g % 2);
"""


def rows(first: int) -> str:
    """Return an INSERT of enough rows for the transaction to be streamed."""
    return f"INSERT INTO a (id, t) SELECT g, repeat('p', 20) FROM generate_series({first}, {first} + 999) g;"


AFTER = (
    "UPDATE a SET id = id + 100000 WHERE id % 50 = 7; INSERT INTO a (id) SELECT max(id) + 1 FROM a;"
    "DELETE FROM a WHERE id % 60 = 9"
)


@dataclass(frozen=True)
class Case:
    """`stages`: transactions, after each of which the table is compared; `a` stands for its name."""

    stages: tuple[tuple[str, ...], ...]
    table: str = TABLE
    copies: int = 1


ADDED = "ALTER TABLE a ADD c int DEFAULT 5;"
PREPARE = "PREPARE TRANSACTION 'a'"
COMMIT, ROLLBACK = ("COMMIT PREPARED 'a'",), ("ROLLBACK PREPARED 'a'",)
CHANGES = (
    "UPDATE a SET n = 1 WHERE id < 9; {} UPDATE a SET n = 7 WHERE id < 20; INSERT INTO a (id, n) VALUES (1000, 9);"
)
#: The ALTERs of a transaction; rows are changed before and after each.
ALTERS = (
    ADDED,
    "ALTER TABLE a RENAME t TO u;",
    "ALTER TABLE a DROP t;",
    "ALTER TABLE a ALTER n TYPE numeric(20,2);",
)
STREAMED = (
    Case(((f"BEGIN; {rows(1000)} {ADDED} {rows(2000)} UPDATE a SET c = 6 WHERE id < 1100; COMMIT", AFTER),)),
    Case(((f"BEGIN; {ADDED} {rows(2000)} UPDATE a SET c = 6 WHERE id < 2100; COMMIT", AFTER),)),
    Case(((f"BEGIN; {rows(2000)} UPDATE a SET n = 6 WHERE id < 2100; {ADDED} COMMIT", AFTER),)),
    Case(
        (
            (
                (
                    f"BEGIN; {rows(1000)} SAVEPOINT s; {ADDED} UPDATE a SET c = 1 WHERE id < 30; ROLLBACK TO s; UPDATE a SET n = 5 "
                    f"WHERE id < 3; {rows(3000)} ALTER TABLE a ADD c text DEFAULT 'x'; {rows(4000)} SAVEPOINT s; ALTER TABLE a "
                    "RENAME t TO u; UPDATE a SET u = 'u' WHERE id % 7 = 1; RELEASE s; UPDATE a SET c = 'y' WHERE id % 5 = 1; COMMIT"
                ),
                AFTER,
            ),
        )
    ),
    Case(((f"BEGIN; {rows(1000)} ALTER TABLE a RENAME t TO u; UPDATE a SET u = 'u' WHERE id % 7 = 1; COMMIT", AFTER),)),
    Case(((f"BEGIN; {rows(1000)} UPDATE a SET n = 1; ALTER TABLE a DROP n; {rows(2000)} COMMIT", AFTER),)),
    Case(((f"BEGIN; {rows(1000)} ALTER TABLE a ALTER id TYPE bigint; {rows(2000)} COMMIT", AFTER),), copies=2),
    Case(
        ((f"BEGIN; ALTER TABLE a ALTER n TYPE numeric(10,2) USING n + 100; {rows(2000)} COMMIT", AFTER),),
        copies=2,
    ),
    Case(
        (
            (
                (
                    f"BEGIN; {rows(1000)} ALTER TABLE a ALTER n TYPE numeric(20,2); {rows(2000)} UPDATE a SET n = 12345678901234.5 "
                    "WHERE id % 7 = 1; COMMIT"
                ),
                AFTER,
            ),
        )
    ),
    Case(((f"BEGIN; {rows(1000)} TRUNCATE a; {rows(2000)} ALTER TABLE a DROP n; {rows(3000)} COMMIT", AFTER),)),
    Case(
        (
            (f"BEGIN; {rows(1000)} {ADDED} {rows(2000)} UPDATE a SET c = 6 WHERE id < 30; COMMIT", AFTER),
            (
                "BEGIN; UPDATE a SET t = 'x' WHERE id % 9 = 4; ALTER TABLE a RENAME t TO u; DELETE FROM a WHERE id = 5; COMMIT",
            ),
            ("BEGIN; UPDATE a SET c = 8 WHERE id % 9 = 4; ALTER TABLE a DROP n; DELETE FROM a WHERE id < 100; COMMIT",),
        ),
        FULL,
    ),
)
PREPARED = (
    *(
        Case(((f"BEGIN; {CHANGES.format(alter)} {PREPARE}",), outcome, (AFTER,)))
        for alter in ALTERS
        for outcome in (COMMIT, ROLLBACK)
    ),
    Case(
        (
            (f"BEGIN; {CHANGES.format('ALTER TABLE a ALTER id TYPE bigint;')} {PREPARE}",),
            ROLLBACK,
            ("ALTER TABLE a ADD c text DEFAULT 'q'", "UPDATE a SET c = 'z' WHERE id < 7", AFTER),
        )
    ),
    Case(
        (
            (f"BEGIN; UPDATE a SET n = 1; ALTER TABLE a RENAME TO a_new; UPDATE a_new SET t = 7; {PREPARE}",),
            ROLLBACK,
            (AFTER,),
        )
    ),
    # The stream's first message of the table has a name that is undone.
    Case(((f"BEGIN; ALTER TABLE a RENAME TO a_new; UPDATE a_new SET t = 7; {PREPARE}",), ROLLBACK, (AFTER,))),
    # Altered before: the definition is announced by the prepared transaction, and not again.
    *(
        Case(
            (
                (
                    "UPDATE a SET n = 1 WHERE id < 9",
                    "ALTER TABLE a DROP n, ADD m int",
                    f"BEGIN; INSERT INTO a (id) VALUES (900); {PREPARE}",
                    "INSERT INTO a (id, m) VALUES (901, 7)",
                    "UPDATE a SET m = 8 WHERE id = 4",
                ),
                outcome,
                (AFTER,),
            )
        )
        for outcome in (COMMIT, ROLLBACK)
    ),
    # The same of an ALTER that the message does not show.
    Case(
        (
            ("UPDATE a SET n = 1 WHERE id < 9",),
            (
                "ALTER TABLE a ALTER n TYPE numeric(10,2) USING n + 100",
                f"BEGIN; INSERT INTO a (id) VALUES (900); {PREPARE}",
                "INSERT INTO a (id, n) VALUES (901, 7)",
                *ROLLBACK,
            ),
            (AFTER,),
        ),
        copies=2,
    ),
    Case(
        (
            (
                (
                    f"BEGIN; {rows(1000)} ALTER TABLE a ADD c text DEFAULT 'x'; {rows(4000)} SAVEPOINT s; "
                    f"ALTER TABLE a RENAME t TO u; UPDATE a SET u = 'u'; RELEASE s; UPDATE a SET c = 'y' WHERE id % 5 = 1; {PREPARE}"
                ),
            ),
            COMMIT,
            (AFTER,),
        )
    ),
    Case(
        (
            (
                (
                    f"BEGIN; UPDATE a SET t = 'x' WHERE id % 10 = 4; {ADDED} ALTER TABLE a RENAME t TO u; UPDATE a SET u = 'y', c = 3 "
                    f"WHERE id % 10 = 4; DELETE FROM a WHERE id = 5; {PREPARE}"
                ),
            ),
            COMMIT,
            ("DELETE FROM a WHERE id < 100",),
        ),
        FULL,
    ),
)
KEYS = (
    Case(
        (
            (
                "UPDATE a SET n = 1 WHERE id < 20",
                "ALTER TABLE a DROP CONSTRAINT a_pkey; ALTER TABLE a ALTER t SET NOT NULL, ADD PRIMARY KEY (t)",
                "UPDATE a SET id = 3 WHERE id < 9",
                "UPDATE a SET t = 'key ' || id WHERE id > 190",
                "DELETE FROM a WHERE t = 'row 100'",
            ),
        )
    ),
    Case(
        (
            (
                "UPDATE a SET n = 1 WHERE id < 20",
                "ALTER TABLE a REPLICA IDENTITY USING INDEX a_t",
                "UPDATE a SET n = 2 WHERE id < 9",
                "UPDATE a SET id = -id, t = 'new ' || id WHERE id < 30",
                "DELETE FROM a WHERE id = -4",
                "ALTER TABLE a REPLICA IDENTITY FULL; UPDATE a SET n = 3 WHERE id < -15",
                "ALTER TABLE a REPLICA IDENTITY DEFAULT",
                "UPDATE a SET n = 4 WHERE id < -18; DELETE FROM a WHERE id > 90",
            ),
        ),
        TABLE + "ALTER TABLE a ALTER t SET NOT NULL; CREATE UNIQUE INDEX a_t ON a (t);",
    ),
    Case(
        (
            (
                (
                    "UPDATE a SET n = 1 WHERE id < 20; "
                    "DELETE FROM a WHERE ctid IN (SELECT max(ctid) FROM a GROUP BY id HAVING count(*) > 1)"
                ),
                "ALTER TABLE a ADD PRIMARY KEY (id), REPLICA IDENTITY DEFAULT",
                "UPDATE a SET n = 2 WHERE id < 9",
                "DELETE FROM a WHERE id = 14",
            ),
        ),
        FULL,
    ),
    # Rows repeat the old key.
    Case(
        (
            (
                "UPDATE a SET n = 1 WHERE id < 20",
                "ALTER TABLE a DROP CONSTRAINT a_pkey",
                "INSERT INTO a VALUES (1, 'again', 1), (1, 'again', 1), (2, 'again', 2)",
                "ALTER TABLE a REPLICA IDENTITY FULL",
                "DELETE FROM a WHERE ctid IN (SELECT min(ctid) FROM a WHERE t = 'again' AND id = 1)",
                "UPDATE a SET n = 5 WHERE id = 1",
            ),
        )
    ),
    Case(
        (
            (
                (
                    "BEGIN; UPDATE a SET n = 1 WHERE id < 20; ALTER TABLE a DROP CONSTRAINT a_pkey; "
                    "ALTER TABLE a ALTER t SET NOT NULL, ADD PRIMARY KEY (t); UPDATE a SET id = 3 WHERE id < 9; COMMIT"
                ),
            ),
        ),
        copies=2,
    ),
)


PARTITIONED = """
CREATE TABLE a (id int PRIMARY KEY, t text, n int) PARTITION BY RANGE (id);
CREATE TABLE a_1 PARTITION OF a FOR VALUES FROM (0) TO (100);
CREATE TABLE a_2 PARTITION OF a FOR VALUES FROM (100) TO (200);
INSERT INTO a SELECT g, 'row ' || g, g FROM generate_series(1, 199) g;
"""
NEW = "CREATE TABLE a_3 PARTITION OF a FOR VALUES FROM (200) TO (300)"
#: Published via their roots.
PARTITIONS = (
    # The default is in the partitions' catalog rows alone.
    Case(
        (
            (
                "UPDATE a SET n = 0 WHERE id < 10",
                ADDED,
                "UPDATE a SET c = 6 WHERE id = 150",
                "DELETE FROM a WHERE id = 7",
            ),
        ),
        PARTITIONED,
    ),
    Case(
        (
            (
                NEW,
                "INSERT INTO a VALUES (200, 'x', 1)",
                "ALTER TABLE a ADD c int",
                "INSERT INTO a VALUES (201, 'x', 1, 4)",
            ),
        ),
        PARTITIONED,
    ),
    Case(
        (
            (
                "UPDATE a SET n = 0 WHERE id < 10; ALTER TABLE a RENAME t TO u; UPDATE a SET u = 'x' WHERE id < 20",
                f"{NEW}; INSERT INTO a VALUES (200, 'x', 1)",
                "ALTER TABLE a DROP n",
                "UPDATE a SET u = 'y' WHERE id > 180; UPDATE a SET id = id + 200 WHERE id BETWEEN 5 AND 9",
            ),
        ),
        PARTITIONED,
    ),
    Case(
        (
            (
                (
                    "CREATE TABLE a_3 (n int, x int, t text, id int NOT NULL); ALTER TABLE a_3 DROP x;"
                    "ALTER TABLE a ATTACH PARTITION a_3 FOR VALUES FROM (200) TO (300); INSERT INTO a VALUES (200, 'x'), (201, 'y')"
                ),
                ADDED,
                "UPDATE a SET c = 6, n = 4 WHERE id IN (150, 200)",
            ),
            ("DELETE FROM a WHERE id IN (7, 201)",),
        ),
        PARTITIONED,
    ),
    # An empty partition leaves its table and comes back for other rows.
    Case(
        (
            (
                f"{NEW}; INSERT INTO a VALUES (200, 'x', 1); DELETE FROM a WHERE id = 200",
                "ALTER TABLE a DETACH PARTITION a_3; ALTER TABLE a ATTACH PARTITION a_3 FOR VALUES FROM (300) TO (400)",
                "INSERT INTO a VALUES (300, 'x', 1); UPDATE a SET id = id + 300 WHERE id BETWEEN 5 AND 9",
            ),
        ),
        PARTITIONED,
    ),
    Case((("ALTER TABLE a ALTER n TYPE bigint", "UPDATE a SET n = 6 WHERE id = 150"),), PARTITIONED, copies=2),
    # The root's identity is not its partitions', whose old rows have the key alone.
    Case(
        (("DELETE FROM a WHERE id > 50", "UPDATE a SET id = 60 WHERE id = 3", "UPDATE a SET n = 5 WHERE id = 4"),),
        f"{PARTITIONED} ALTER TABLE a ALTER t SET STORAGE EXTERNAL; ALTER TABLE a REPLICA IDENTITY FULL;"
        "UPDATE a SET t = repeat('x', 9000) WHERE id < 9;",
    ),
)
#: Types that change under their columns; pgoutput does not tell.
USER_TYPES = (
    Case(
        (
            (
                "BEGIN; UPDATE a SET e = 'y' WHERE id = 1; ALTER TYPE a_e ADD VALUE 'z'; INSERT INTO a VALUES (3); COMMIT",
                "INSERT INTO a VALUES (4, 'z', '{z}')",
                "ALTER TYPE a_e ADD VALUE 'b' BEFORE 'x'",
                "UPDATE a SET e = 'b' WHERE id = 1",
            ),
            (
                "ALTER TYPE a_e RENAME VALUE 'b' TO 'c'",
                "INSERT INTO a VALUES (5, 'c')",
                "UPDATE a SET e = 'y' WHERE e = 'c'",
            ),
            ("ALTER TABLE a ADD f a_e DEFAULT 'z'", "INSERT INTO a VALUES (6, 'c')"),
        ),
        "CREATE TYPE a_e AS ENUM ('x', 'y'); CREATE TABLE a (id int PRIMARY KEY, e a_e, es a_e[]);"
        "INSERT INTO a VALUES (1, 'x', '{x,y}'), (2, 'y', NULL);",
    ),
    Case(
        (
            (
                "ALTER TYPE a_c ADD ATTRIBUTE n numeric",
                "UPDATE a SET c = (1, 'y', 2.5) WHERE id = 1",
                "INSERT INTO a VALUES (3, '(3,z,4)')",
            ),
            (
                "ALTER TYPE a_c RENAME ATTRIBUTE n TO m; ALTER TYPE a_c DROP ATTRIBUTE t",
                "UPDATE a SET c = '(9,8)' WHERE id IN (1, 3)",
            ),
        ),
        "CREATE TYPE a_c AS (i int, t text); CREATE TABLE a (id int PRIMARY KEY, c a_c); INSERT INTO a VALUES (1, '(1,x)');",
    ),
    Case(
        (
            (
                "ALTER DOMAIN a_d ADD CHECK (VALUE < 100)",
                "INSERT INTO a VALUES (2, 99)",
                "ALTER DOMAIN a_d SET DEFAULT 4; INSERT INTO a VALUES (3)",
                "UPDATE a SET d = 8 WHERE id = 1",
            ),
        ),
        "CREATE DOMAIN a_d AS int CHECK (VALUE > 0); CREATE TABLE a (id int PRIMARY KEY, d a_d); INSERT INTO a VALUES (1, 1);",
    ),
    # Back and forth: the last message is one that was known.
    Case(
        (
            ("UPDATE a SET n = 1 WHERE id < 4; ALTER TABLE a RENAME t TO u", "UPDATE a SET u = 'x' WHERE id < 3"),
            ("ALTER TABLE a RENAME u TO t", "UPDATE a SET t = 'y' WHERE id < 2"),
            (
                "BEGIN; ALTER TABLE a RENAME t TO u; UPDATE a SET u = 'z'; ALTER TABLE a RENAME u TO t; UPDATE a SET n = 3; END",
            ),
        )
    ),
)


@pytest.fixture(scope="module", params=["15", "18"])
def server(request: pytest.FixtureRequest) -> Iterator[EmbeddedPostgres]:
    settings: dict[str, str | int] = {"max_prepared_transactions": 30, "logical_decoding_work_mem": "64kB"}
    with EmbeddedPostgres(request.param, settings=settings) as server:
        yield server


@pytest.fixture
def altering(server: EmbeddedPostgres, spark: Spark, tmp_path: Path) -> Iterator[Replica]:
    with RunningNode(tmp_path, spark, logical_decoding_work_mem="256kB") as node:
        server.create_database("altering")
        replica = Replica(node, Database(server, "altering"))
        yield replica
        if replica.created:
            replica.drop()
        assert replica.slots() == []
    server.drop_database("altering")


def of(name: str, statement: str) -> str:
    return re.sub(r"\ba(?=\b|_)", name, statement)


def run(replica: Replica, cases: tuple[Case, ...], *, behind: bool = False, **options: object) -> None:
    """Run the cases.  `behind`: the subscription is disabled while a stage runs, so that few batches hold it all."""
    names = [f"a{number}" for number in range(len(cases))]
    for name, case in zip(names, cases, strict=True):
        replica.execute(of(name, case.table))
    replica.execute(f"CREATE PUBLICATION p FOR TABLE {', '.join(names)} WITH (publish_via_partition_root)")
    replica.subscribe(**options)
    replica.assert_equal(*names)
    if options.get("two_phase") == "true":
        enabled = "SELECT bool_and(two_phase) FROM pg_replication_slots WHERE database = current_database()"
        wait_until(lambda: replica.query(enabled) == [(True,)], "two-phase commit to be enabled")
    for stage in range(max(len(case.stages) for case in cases)):
        if behind:
            replica.alter("DISABLE")
        for name, case in zip(names, cases, strict=True):
            replica.execute(*(of(name, one) for some in case.stages[stage : stage + 1] for one in some))
        if behind:
            replica.alter("ENABLE")
        # A table with a prepared transaction is locked, and cannot be compared.
        free = [
            name
            for name, case in zip(names, cases, strict=True)
            if PREPARE not in (*case.stages[stage : stage + 1], ("",))[0][-1]
        ]
        replica.caught_up()
        replica.assert_equal(*free, caught_up=False)
    replica.assert_read_alike(*names)
    assert [replica.relation(name).copy_generation for name in names] == [case.copies for case in cases]


@pytest.mark.full
def test_in_large_and_prepared_transactions(
    altering: Replica, server: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply.pipeline.dispatch, "PART_BYTES", 50_000)
    if server.version == "15":
        run(altering, (*STREAMED[3:6], *PREPARED), streaming="on", binary="true", two_phase="true")
    else:
        run(altering, STREAMED, streaming="parallel")


@pytest.mark.full
def test_keys_that_change_under_a_backlog(altering: Replica, server: EmbeddedPostgres) -> None:
    run(altering, KEYS, behind=True, binary="true" if server.version == "15" else "false")


@pytest.mark.parametrize("server", ["15"], indirect=True)
def test_partitions_and_types(altering: Replica) -> None:
    run(altering, (*PARTITIONS, *USER_TYPES), binary="true")


@pytest.mark.soak
@pytest.mark.parametrize("server", ["15", "16", "17", "18"], indirect=True)
@pytest.mark.parametrize("streaming", ["off", "on", "parallel"])
@pytest.mark.parametrize("binary", ["true", "false"])
@pytest.mark.parametrize("cases", [STREAMED, PREPARED], ids=["streamed", "prepared"])
def test_every_case_with_every_transfer_on_every_version(
    altering: Replica, streaming: str, binary: str, cases: tuple[Case, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(apply.pipeline.dispatch, "PART_BYTES", 50_000)
    # No table is copied again while a transaction is prepared: its slot would wait for that, as PostgreSQL's would.
    run(altering, cases, streaming=streaming, binary=binary, two_phase="true" if cases is PREPARED else "false")
