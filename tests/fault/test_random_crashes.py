"""Some rounds of `python -m tests.crash`; and that its comparison sees a table that differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

from tests.crash import beside, check
from tests.crash.load import Load
from tests.crash.machine import Machine
from tests.crash.plan import generate
from tests.crash.round import run
from tests.crash.world import World

pytestmark = pytest.mark.full


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with Machine(tmp_path_factory.mktemp("crash")) as one:
        yield one


# Of these eight kinds one of each that needs neither a disk of its own nor a Spark job for each batch; all on one server.
@pytest.mark.parametrize("seed", [8, 10, 12, 13])
def test_a_round(machine: Machine, seed: int) -> None:
    result = run(machine, generate(seed))
    assert "difference" not in result, f"{generate(seed).story()}\n{result['difference']}\n{result['kept']}"
    assert sum(result["done"].values()) > 0


def test_a_table_that_differs_is_found(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is written behind the comparison's back fails the round, which tells where its logs are."""
    compare = check.compare

    def behind_its_back(world: World) -> int:
        world.node.daemon.execute(f"ALTER SUBSCRIPTION {world.name} DISABLE")
        with psycopg.connect(world.conninfo) as connection:
            connection.execute("UPDATE plain SET c0 = -1 WHERE id = 2000000000")
        return compare(world)

    monkeypatch.setattr(check, "compare", behind_its_back)
    # Neither the load nor another fault alters the column.
    monkeypatch.setattr(Load, "start", lambda _: None)
    result: dict[str, Any] = run(machine, generate(9))
    assert "public.plain" in result["difference"]
    assert Path(result["kept"], "home.log").exists()


def _history(*changes: tuple[str, int, int | None, list[str]]) -> pa.Table:
    """Return the rows of a history: of each operation the key, a value, and what was unchanged; each a transaction of its own."""
    ops, ids, values, unchanged = zip(*changes, strict=True)
    places = [*range(1, len(changes) + 1)]
    return pa.table(
        {
            "_pubsub_op": pa.array(ops),
            "_pubsub_lsn": pa.array(places, pa.int64()),
            "_pubsub_seq": pa.array(places, pa.int64()),
            "_pubsub_unchanged": pa.array(unchanged, pa.list_(pa.string())),
            "id": pa.array(ids, pa.int64()),
            "n": pa.array(values, pa.int64()),
        }
    )


def test_a_history_gives_the_rows_that_it_ends_with() -> None:
    changes = [("R", 1, 10, []), ("I", 2, 20, []), ("U", 1, None, ["n"]), ("O", 2, None, []), ("U", 3, None, ["n"])]
    found = beside.ends_with(_history(*changes, ("I", 4, 40, []), ("D", 4, None, [])), ("id",))
    assert sorted(zip(*(found[name].to_pylist() for name in ("id", "n")), strict=True)) == [(1, 10), (3, 20)]
    emptied = beside.ends_with(_history(*changes, ("T", 0, None, []), ("I", 4, 40, [])), ("id",))
    assert emptied.to_pylist() == [{"id": 4, "n": 40}]


@pytest.mark.parametrize("lost", range(3))
def test_a_history_that_lacks_a_change_is_found(lost: int) -> None:
    changes = [("I", 1, 10, []), ("D", 1, None, []), ("I", 1, 11, []), ("U", 1, 12, []), ("D", 1, None, [])]
    del changes[lost]
    with pytest.raises(AssertionError, match="there"):
        beside.ends_with(_history(*changes), ("id",))
