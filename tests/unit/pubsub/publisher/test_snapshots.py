"""A slot's exported snapshot: nothing is read under it before what it sees is marked as committed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest

from pubsub.errors import ProtocolViolation
from pubsub.publisher import snapshots
from pubsub.publisher.connection import Connection
from tests.support.captured_logs import captured_logs
from tests.support.virtual_time import run


class Publisher:
    """As much of a connection as `settle` uses.  `committing`: for so many seconds a transaction is not marked yet."""

    def __init__(self, committing: float) -> None:
        self._committing = committing
        self._began = asyncio.get_running_loop().time()
        self.executed: list[str] = []

    async def execute(self, statement: str) -> None:
        self.executed.append(statement)

    async def query(self, sql: str, parameters: Sequence[object] = ()) -> list[tuple[str]]:
        if not parameters:
            return [("740:745:741",)]
        assert self.executed[-1] == "COMMIT", "it is asked of later snapshots, not of the exported one"
        assert parameters == ["740:745:741"]
        waits = asyncio.get_running_loop().time() - self._began < self._committing
        return [("t" if waits else "f",)]


def settled(committing: float) -> tuple[str, float]:
    """Return what the snapshot sees, and after how many seconds that was told."""

    async def go() -> tuple[str, float]:
        publisher: Any = Publisher(committing)
        began = asyncio.get_running_loop().time()
        seen = await snapshots.settle(publisher, "00000003-00000002-1")
        return seen, asyncio.get_running_loop().time() - began

    return run(go())


def test_a_transaction_that_is_not_marked_as_committed_is_waited_for() -> None:
    """Its rows would be taken for aborted, and marked so, for everybody."""
    for committing in (0.0, 0.5, 12.0):
        seen, after = settled(committing)
        assert seen == "740:745:741"
        assert committing <= after < committing + 0.1


def test_one_that_is_never_marked_is_told() -> None:
    """A role that must not see what others wait for cannot tell it from a commit that waits for a standby."""
    with captured_logs() as logs:
        _, after = settled(1e9)
    assert 30 <= after < 31
    (told,) = [one for one in logs if one["event"] == "a snapshot sees transactions that have not ended"]
    assert told["snapshot"] == "740:745:741"


@pytest.mark.parametrize("answer", [None, "", "x", "1:2", "1:2:3:4", "a:2:", "1::", f"1:{'9' * 100}:"])
async def test_an_answer_that_is_no_snapshot_is_refused(answer: str | None) -> None:
    class Lying:
        async def query(self, _sql: str) -> list[tuple[str | None]]:
            return [(answer,)]

    with pytest.raises(ProtocolViolation):
        await snapshots.visible(cast(Connection, Lying()))


class Committing:
    """A publisher on which transactions 7 and 8 have altered tables 16384 and 16385, which is seen after `seconds`.

    `standby`: whether the subscription is a synchronous standby.
    """

    def __init__(self, seconds: float, *, standby: bool) -> None:
        self._standby = standby
        self._seen_at = asyncio.get_running_loop().time() + seconds
        self._in_transaction = False
        self.begun = 0

    async def execute(self, statement: str) -> None:
        assert self._in_transaction == (statement == "COMMIT")
        self._in_transaction = not self._in_transaction
        self.begun += self._in_transaction

    async def query(self, sql: str, parameters: Sequence[object]) -> list[tuple[str, str]]:
        unseen = asyncio.get_running_loop().time() < self._seen_at
        if "pg_locks" in sql:
            assert not self._in_transaction, "locks are looked at before the snapshot is taken"
            assert parameters == [[16384, 16385, 16386], [6, 7, 8]]
            return [("7", "16384"), ("8", "16385")] if unseen else []
        assert self._in_transaction
        assert parameters == [[7, 8]]
        return [("8", "t" if self._standby else "f")] if unseen else []


@pytest.mark.parametrize(
    ("seconds", "standby", "hidden", "patience"),
    [
        (0.0, False, set(), 0.0),
        (0.5, False, set(), 0.5),
        (0.5, True, set(), 0.5),
        (20.0, False, set(), 20.0),
        (20.0, True, {16385}, 1.0),
        (1e9, False, {16385}, 30.0),
    ],
)
def test_a_transaction_that_others_do_not_see_yet_is_waited_for(
    seconds: float, *, standby: bool, hidden: set[int], patience: float
) -> None:
    """Not for long by a standby that it may wait for, which it would wait for in vain."""

    async def go() -> None:
        publisher: Any = Committing(seconds, standby=standby)
        began = asyncio.get_running_loop().time()
        assert await snapshots.begin_showing(publisher, [16384, 16385, 16386], [6, 7, 8]) == hidden
        assert patience <= asyncio.get_running_loop().time() - began < patience + 0.1
        assert publisher.begun > patience

    run(go())


def test_no_transaction_is_waited_for_where_none_is_named() -> None:
    async def go() -> None:
        publisher: Any = Committing(1e9, standby=False)
        assert await snapshots.begin_showing(publisher, [16384], []) == set()
        assert publisher.begun == 1

    run(go())
