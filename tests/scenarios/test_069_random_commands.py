"""ALTER of one table, DROP TABLE of another, REFRESH and DISABLE at random moments: no worker fails, no row is lost.

The publisher's catalog answers slowly now and then, so that commands come while a worker waits for it.

Each run prints its seed.  PUBSUB_SEED repeats the statements, though not the moments when they meet the workers.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Sequence

import pytest

from apply.schema_changes.follow import Looked, Publisher
from tests.support.captured_logs import captured_logs
from tests.support.replica import Replica

SEEDS = [int(seed) for seed in os.environ.get("PUBSUB_SEED", "1 2").split()]
ROWS = 50


class Commands:
    """The publisher's tables, and the commands on them and on the subscription."""

    def __init__(self, replica: Replica, seed: int) -> None:
        self.replica = replica
        self.random = random.Random(seed)
        self.made = 0
        self.columns: dict[str, list[str]] = {}
        self.enabled = True

    def create(self) -> None:
        name = f"t{self.made}"
        self.made += 1
        self.columns[name] = ["v"]
        self.replica.execute(
            f"CREATE TABLE {name} (id int PRIMARY KEY, v text);"
            f"INSERT INTO {name} SELECT g, md5(g::text) FROM generate_series(1, {ROWS}) g"
        )

    def write(self) -> None:
        for name, columns in self.columns.items():
            column = self.random.choice(columns)
            low = self.random.randint(1, ROWS)
            self.replica.execute(
                f"UPDATE {name} SET {column} = md5(random()::text) WHERE id BETWEEN {low} AND {low + 5};"
                f"INSERT INTO {name} (id) SELECT max(id) + 1 FROM {name}"
            )

    def alter(self) -> None:
        name = self.random.choice([*self.columns])
        columns = self.columns[name]
        what = self.random.choice(["add", "add", "drop", "rename"])
        if what == "drop" and len(columns) > 1:
            self.replica.execute(f"ALTER TABLE {name} DROP COLUMN {columns.pop()}")
        elif what == "rename":
            new = f"{columns[-1]}r"
            self.replica.execute(f"ALTER TABLE {name} RENAME COLUMN {columns[-1]} TO {new}")
            columns[-1] = new
        else:
            columns.append(f"c{self.made}_{len(columns)}")
            self.replica.execute(f"ALTER TABLE {name} ADD COLUMN {columns[-1]} text")

    def drop(self) -> None:
        """Drop a table whose copy is made: the sync worker of another would report, rightly, that the table is gone."""
        states = self.replica.states()
        ready = [name for name in self.columns if states.get(f"public.{name}") == "r"]
        if len(ready) > 1:
            name = self.random.choice(ready)
            del self.columns[name]
            self.replica.execute(f"DROP TABLE {name}")

    def refresh(self) -> None:
        self.enable()
        self.replica.alter("REFRESH PUBLICATION")

    def enable(self) -> None:
        if not self.enabled:
            self.replica.alter("ENABLE")
            self.enabled = True

    def disable(self) -> None:
        self.replica.alter("DISABLE")
        self.enabled = False

    def pause(self) -> None:
        """Sleep for a random time: the moments of the commands are what is random."""
        time.sleep(self.random.choice([0, 0, 0.01, 0.05, 0.2, 0.5]))

    def step(self) -> None:
        actions = [self.alter, self.drop, self.refresh, self.disable]
        self.random.shuffle(actions)
        if self.random.random() < 0.5:
            # Have a worker ask for columns, and drop a table while it looks at them.
            actions = [self.alter, self.refresh, self.write, self.drop, self.refresh, self.disable]
        for action in actions:
            action()
            self.pause()
        self.create()
        if self.random.random() < 0.7:
            self.write()
        self.refresh()
        self.pause()

    def check(self) -> None:
        self.refresh()
        self.write()
        self.replica.caught_up()
        for name in self.columns:
            self.replica.assert_equal(name, caught_up=False)
        assert set(self.replica.states()) == {f"public.{name}" for name in self.columns}


@pytest.fixture(autouse=True)
def slow_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    look = Publisher.__call__

    async def slowly(self: Publisher, oids: Sequence[int], xids: Sequence[int]) -> Looked:
        found = await look(self, oids, xids)
        await asyncio.sleep(random.choice([0, 0.1, 0.3, 0.6]))
        return found

    monkeypatch.setattr(Publisher, "__call__", slowly)


def run(replica: Replica, seed: int, steps: int) -> None:
    print(f"PUBSUB_SEED={seed}")
    commands = Commands(replica, seed)
    for _ in range(4):
        commands.create()
    replica.execute("CREATE PUBLICATION p FOR ALL TABLES")
    with captured_logs() as said:
        replica.subscribe()
        replica.caught_up()
        for step in range(steps):
            commands.step()
            if step % 5 == 4:
                commands.check()
        commands.check()
    assert [one for one in said if one["log_level"] == "error"] == []
    statistics = replica.node.statistics(replica.name)
    assert (statistics["apply_error_count"], statistics["sync_error_count"]) == (0, 0)


@pytest.mark.full
@pytest.mark.parametrize("seed", SEEDS)
def test_random_commands(replica: Replica, seed: int) -> None:
    run(replica, seed, 5)


@pytest.mark.soak
def test_random_commands_for_long(replica: Replica) -> None:
    run(replica, int(os.environ.get("PUBSUB_SEED", random.randrange(1 << 30))), 150)
