"""Random ALTERs among random rows, alone and inside transactions: the Delta table becomes the publisher's."""

from __future__ import annotations

import os
import random

import pytest

from tests.support.replica import Replica

# Tables are altered after checkpoints, too.
pytestmark = pytest.mark.usefixtures("frequent_checkpoints")

TYPES = {
    "int": "(random() * 100)::int",
    "text": "md5(random()::text)",
    "numeric(8,2)": "round((random() * 1000)::numeric, 2)",
}
DEFAULTS = {"int": "42", "text": "'so far'", "numeric(8,2)": "1.25"}


SEEDS = [int(seed) for seed in os.environ.get("PUBSUB_SEEDS", "1 2 4").split()]


class History:
    """Random statements for one table; its columns are known from the statements alone."""

    def __init__(self, seed: int, *, keyed: bool) -> None:
        self.random = random.Random(seed)
        self.keyed = keyed
        self.columns = {"c0": "int", "c1": "text", "c2": "text"}
        self.names = [f"c{number}" for number in range(6)]

    def create(self) -> str:
        listed = ", ".join(f"{name} {kind}" for name, kind in self.columns.items())
        key = "PRIMARY KEY" if self.keyed else ""
        identity = "" if self.keyed else "ALTER TABLE a REPLICA IDENTITY FULL;"
        return (
            f"CREATE TABLE a (id int {key}, {listed}); {identity}"
            "INSERT INTO a SELECT g FROM generate_series(1, 200) g; CREATE PUBLICATION p FOR TABLE a"
        )

    def rows(self) -> str:
        pick = self.random.randint
        low = pick(1, 200)
        statements = []
        if self.columns:
            name = self.random.choice([*self.columns])
            value = self.random.choice([TYPES[self.columns[name]], "NULL"])
            statements.append(f"UPDATE a SET {name} = {value} WHERE id BETWEEN {low} AND {low + pick(0, 40)}")
            listed = ", ".join(self.columns)
            values = ", ".join(TYPES[kind] for kind in self.columns.values())
            statements.append(
                f"INSERT INTO a (id, {listed}) SELECT coalesce(max(id), 0) + g, {values} FROM a, generate_series(1, 3) g GROUP BY g"
            )
        statements.append(f"DELETE FROM a WHERE id BETWEEN {low} AND {low + pick(0, 5)}")
        if self.keyed:
            statements.append(
                f"UPDATE a SET id = -id WHERE id = {pick(1, 200)} AND NOT EXISTS (SELECT FROM a b WHERE b.id = -a.id)"
            )
        self.random.shuffle(statements)
        return ";".join(statements[: pick(1, len(statements))])

    def alter(self) -> str:
        free = [name for name in self.names if name not in self.columns]
        kinds = ["add"] * 3 * bool(free) + (["drop", "rename", "type", "swap"] if len(self.columns) > 1 else ["add"])
        kind = self.random.choice([*kinds, "nothing"])
        if kind == "add" and free:
            name, of = self.random.choice(free), self.random.choice([*TYPES])
            self.columns[name] = of
            default = self.random.choice(
                ["", "", f"DEFAULT {DEFAULTS[of]}", f"DEFAULT {DEFAULTS[of]}", f"DEFAULT {TYPES[of]}"]
            )
            return f"ALTER TABLE a ADD COLUMN {name} {of} {default}"
        if kind == "drop":
            name = self.random.choice([*self.columns])
            del self.columns[name]
            return f"ALTER TABLE a DROP COLUMN {name}"
        if kind == "rename" and free:
            name, new = self.random.choice([*self.columns]), self.random.choice(free)
            self.columns = {new if one == name else one: of for one, of in self.columns.items()}
            return f"ALTER TABLE a RENAME {name} TO {new}"
        if kind == "swap":
            one, other = self.random.sample([*self.columns], 2)
            swap = {one: other, other: one}
            self.columns = {swap.get(name, name): of for name, of in self.columns.items()}
            return (
                f"ALTER TABLE a RENAME {one} TO swapped; ALTER TABLE a RENAME {other} TO {one};"
                f"ALTER TABLE a RENAME swapped TO {other}"
            )
        if kind == "type":
            name = self.random.choice([*self.columns])
            self.columns[name] = "text"
            return f"ALTER TABLE a ALTER {name} TYPE text"
        return "ALTER TABLE a ALTER id SET STATISTICS 50"

    def transaction(self) -> str:
        """Return a transaction: rows and now and then an ALTER, in any order, some of it rolled back."""
        parts = []
        for _ in range(self.random.randint(1, 4)):
            if self.random.random() < 0.3:
                before = dict(self.columns)
                parts.append(f"SAVEPOINT s; {self.alter()}; {self.rows()}; ")
                if self.random.random() < 0.5:
                    self.columns = before
                    parts[-1] += "ROLLBACK TO s"
                else:
                    parts[-1] += "RELEASE s"
            else:
                parts.append(self.alter() if self.random.random() < 0.4 else self.rows())
        return f"BEGIN; {';'.join(parts)}; COMMIT"


def check(replica: Replica) -> None:
    """Compare the tables after one more row: an ALTER is noticed at the next row."""
    replica.execute("INSERT INTO a (id) SELECT coalesce(max(id), 0) + 1 FROM a")
    replica.assert_equal("a")


def run(replica: Replica, seed: int, steps: int, **options: object) -> None:
    print(f"seed {seed}")
    history = History(seed, keyed=seed % 4 != 0)
    if seed % 3 == 2:
        # Every transaction is streamed.
        replica.execute(f"ALTER DATABASE {replica.database.name} SET debug_logical_replication_streaming = immediate")
    replica.execute(history.create())
    replica.subscribe(**{"dropped_columns": "drop" if seed % 2 else "keep", **options})
    replica.assert_equal("a")
    for step in range(steps):
        behind = history.random.random() < 0.3
        if behind:
            replica.alter("DISABLE")
        for _ in range(history.random.choice([1, 1, 3, 8])):
            replica.execute(history.transaction())
        if behind:
            replica.alter("ENABLE")
        if history.random.random() < 0.6:
            check(replica)
        if step % 5 == 4:
            replica.execute("VACUUM FULL a" if history.random.random() < 0.3 else "ANALYZE a")
    check(replica)
    replica.assert_read_alike("a")
    print(f"{replica.relation('a').copy_generation} copies, {replica.version('a')} versions")


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_random_alters(replica: Replica, seed: int) -> None:
    run(replica, seed, 6)


@pytest.mark.soak
def test_random_alters_for_long(replica: Replica) -> None:
    seed = int(os.environ.get("PUBSUB_SEED", random.randrange(1 << 30)))
    run(replica, seed, 100)
