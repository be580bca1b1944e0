"""Some rounds of `python -m tests.crash`; and that its comparison sees a table that differs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.crash import check
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


@pytest.mark.parametrize("seed", [8, 11])
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
    result: dict[str, Any] = run(machine, generate(11))
    assert "public.plain" in result["difference"]
    assert Path(result["kept"], "daemon.log").exists()
