"""Pipeline: from a stream to Delta tables in memory, in virtual time."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest

import apply.pipeline.pipeline
from apply.batch import Batch
from apply.conflicts import Conflicts, UniqueViolation
from apply.isolation import Failure
from apply.metrics import Figures
from apply.pipeline.interfaces import Limits
from apply.pipeline.pipeline import Pipeline
from apply.staging.destination import Destination
from pubsub.delta.log import OtherCommit
from pubsub.delta.table import TargetTable
from pubsub.errors import ConnectionFailure, InvalidValue, NotInPrerequisiteState, ProgramLimitExceeded, PubsubError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Relation
from tests.support.frames import delete, insert, keepalive, relation, transaction, update
from tests.support.memory import MemoryDelta, MemoryEngine, MemoryStream, commits_then_raises, conflicts, fails, target
from tests.support.virtual_time import run

A = relation(16384, "a")
B = relation(16385, "b")
LIMITS = Limits(rows=1000, nbytes=1 << 20, age=1.0, status_interval=10.0, receiver_timeout=60.0)


class OneTables:
    """around.Tables, with tables named like their relations; `gates` hold back commits."""

    origin = "pg_1"

    def __init__(self, delta: MemoryDelta) -> None:
        self.delta = delta
        self.isolates = False
        self.contested: set[int] = set()
        self.conflicts: Counter[str] = Counter()
        self.failures: dict[int, Failure] = {}
        self.stopped: dict[int, Lsn] = {}
        self.after: dict[str, Lsn] = {}
        self.gates: dict[int, asyncio.Event] = {}
        self.gone: set[int] = set()
        self.durables: list[Lsn] = []
        self.store: Callable[[Lsn], Coroutine[Any, Any, None]] | None = None
        self._versions: dict[int, Lsn] = {}
        self._targets: dict[int, TargetTable] = dict(enumerate(delta.targets.values(), A.oid))

    async def destinations(self, batch: Batch, quiet: Any) -> Mapping[tuple[str, str], Destination]:
        return {
            ("public", t.path): Destination(
                relid, t, "app", self.after.get(t.path, INVALID_LSN), contested=relid in self.contested
            )
            for relid, t in self._targets.items()
            if relid not in self.failures
        }

    def failed(self, failures: Sequence[Failure]) -> None:
        self.failures.update((one.relid, one) for one in failures)

    async def stop(self, failures: Sequence[Failure]) -> None:
        self.stopped.update((one.relid, one.lsn) for one in failures)

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        self.contested.add(destination.relid)

    async def met(self, relation: str, conflicts: Conflicts) -> None:
        self.conflicts += conflicts.counts

    asked = False

    async def settle_columns(self, at: Lsn) -> None: ...

    async def unchanged(self, told: Mapping[int, Relation]) -> bool:
        return True

    async def may_write(self, destination: Destination) -> bool:
        if destination.relid in self.gates:
            await self.gates[destination.relid].wait()
        return destination.relid not in self.gone

    def version(self, relid: int) -> Lsn:
        return self._versions.get(relid, INVALID_LSN)

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        self._versions[destination.relid] = lsn

    async def before_commit(self) -> None:
        """It may."""

    async def durable(self, lsn: Lsn) -> None:
        if self.store is not None:
            await self.store(lsn)
        self.durables.append(lsn)


class Bench:
    """A pipeline for tables a and b, and its effects."""

    def __init__(self, frames: list[bytes] | None = None, limits: Limits = LIMITS, **options: Any) -> None:
        self.delta = MemoryDelta(target("a"), target("b"))
        self.engine = MemoryEngine(self.delta)
        self.tables = OneTables(self.delta)
        self.stream = MemoryStream(frames, limit=options.pop("reads", 1_000_000))
        self.figures = Figures()
        start = options.pop("start", Lsn(10))
        self.pipeline = Pipeline(
            self.stream,  # type: ignore[arg-type]
            start,
            self.tables,
            self.engine,  # type: ignore[arg-type]
            self.delta,  # type: ignore[arg-type]
            limits,
            self.figures,
            **options,
        )

    def rows(self, path: str) -> list[tuple[Any, ...]]:
        return self.delta.rows(path)

    def commits(self, path: str) -> list[tuple[int, int]]:
        return [(commit.first, commit.last) for commit in self.delta.tables[path].log]

    async def run(self) -> None:
        with self.delta.installed():
            try:
                await self.pipeline.run()
            finally:
                assert not self.delta.staged, "staged files stay behind"
                assert not self.engine.running, "a commit goes on"


@pytest.fixture(autouse=True)
def _no_real_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apply.pipeline.pipeline, "pg_now", lambda: 1_000_000)


def virtual(test: Callable[[], Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """Run the test in virtual time, where a wait that nothing can end is an error."""

    def wrapper() -> None:
        run(test(), apply.pipeline.pipeline)

    wrapper.__name__, wrapper.__doc__ = test.__name__, test.__doc__
    return wrapper


async def until(condition: Callable[[], object], seconds: float = 1000.0) -> None:
    """Wait in virtual time until `condition` holds."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def cause(error: BaseException) -> BaseException:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


@virtual
async def test_a_batch_is_committed_at_its_age_and_then_reported() -> None:
    b = Bench(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "y")))
    task = asyncio.create_task(b.run())
    await asyncio.sleep(0.9)
    assert not b.rows("a")
    assert not b.tables.durables
    await until(lambda: b.tables.durables)
    assert asyncio.get_running_loop().time() < 1.2
    assert b.rows("a") == [(1, "x")]
    assert b.rows("b") == [(1, "y")]
    assert b.tables.durables == [100]
    assert b.stream.statuses[-1][:3] == (100, 100, 100)
    b.pipeline.drain()
    await task
    assert (b.figures.transactions, b.figures.batches, b.figures.commits, b.figures.inserts) == (1, 1, 2, 2)
    assert b.figures.flush_lsn == 100
    assert b.figures.lag.latest == 1.0


@virtual
async def test_a_full_batch_does_not_wait_for_its_age() -> None:
    frames = [*transaction(100, A, insert(A.oid, 1, "x")), *transaction(200, insert(A.oid, 2, "x"))]
    b = Bench(frames, Limits(1, 1 << 20, 3600.0, 10.0, 60.0), reads=4)
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed == 200, 5.0)
    assert b.commits("a") == [(100, 100), (200, 200)]
    b.pipeline.drain()
    await task


@virtual
async def test_bytes_close_a_batch_too() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x" * 500)), Limits(10**6, 400, 3600.0, 10.0, 60.0))
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed == 100, 5.0)
    b.pipeline.drain()
    await task


@virtual
async def test_while_a_commit_runs_the_next_batch_grows() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")), Limits(10, 1 << 20, 0.1, 10.0, 60.0))
    gate = b.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(b.run())
    await asyncio.sleep(1)
    for number in range(2, 9):
        b.stream.send(transaction(number * 100, insert(A.oid, number, "x")))
        await asyncio.sleep(1)
    assert not b.rows("a")
    gate.set()
    await until(lambda: b.pipeline.flushed == 800)
    assert b.commits("a") == [(100, 100), (200, 800)]
    b.pipeline.drain()
    await task


@virtual
async def test_what_waits_is_bounded_and_status_goes_on() -> None:
    """With one batch committing, one staged and one open and full, nothing more is read."""
    frames = [f for n in range(1, 20) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    b = Bench(frames, Limits(1, 1 << 20, 0.1, 10.0, 60.0), reads=5)
    gate = b.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(b.run())
    await asyncio.sleep(100)
    assert b.pipeline.dispatcher.position <= 400
    assert len(b.stream.statuses) >= 90
    assert {flushed for _, flushed, _, _ in b.stream.statuses} == {10}
    gate.set()
    await until(lambda: b.pipeline.flushed == 1900)
    assert len(b.rows("a")) == 19
    b.pipeline.drain()
    await task


@virtual
async def test_flushed_never_passes_what_is_stored() -> None:
    """A keepalive may raise `flushed` while the batch's LSN is being stored: only a stored LSN may be reported.

    Otherwise, after a restart, the subscriber would ask from the stored origin, and the publisher would start past it.
    """
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    storing = asyncio.Event()
    gates = {100: asyncio.Event(), 500: asyncio.Event()}

    async def store(lsn: Lsn) -> None:
        storing.set()
        await gates[lsn].wait()

    b.tables.store = store
    task = asyncio.create_task(b.run())
    await storing.wait()
    b.stream.send([keepalive(500, reply=True)])
    await until(lambda: b.pipeline.flushed == 500)
    gates[100].set()
    await until(lambda: b.tables.durables)
    await asyncio.sleep(0)
    assert b.tables.durables == [100]
    assert max(flushed for _, flushed, _, _ in b.stream.statuses) <= 100
    gates[500].set()
    await until(lambda: b.stream.statuses[-1][1] == 500)
    b.pipeline.drain()
    await task


@virtual
async def test_a_keepalive_advances_when_nothing_is_pending() -> None:
    b = Bench([keepalive(500, reply=True)])
    task = asyncio.create_task(b.run())
    await until(lambda: b.stream.statuses, 0.5)
    assert b.stream.statuses[-1][:3] == (500, 500, 500)
    assert b.tables.durables == [500]
    b.stream.send(transaction(600, A, insert(A.oid, 1, "x"))[:-1])
    b.stream.send([keepalive(700, reply=True)])
    await asyncio.sleep(0.1)
    assert b.stream.statuses[-1][1] == 500, "a transaction is open"
    b.stream.send([*transaction(600)[-1:], keepalive(710, reply=True)])
    await asyncio.sleep(0.1)
    assert b.stream.statuses[-1][1] == 500, "its batch is not committed"
    await until(lambda: b.pipeline.flushed == 710, 30.0)
    assert b.rows("a") == [(1, "x")]
    b.pipeline.drain()
    await task


@virtual
async def test_transactions_of_others_advance_without_a_pause_in_the_stream() -> None:
    """The WAL of a busy publisher must not be retained while none of its changes are published to us."""
    b = Bench()
    task = asyncio.create_task(b.run())
    for number in range(1, 60):
        b.stream.send([*transaction(number * 100), keepalive(number * 100 + 50)])
        await asyncio.sleep(0.5)
    assert b.pipeline.flushed > 3000
    assert b.tables.durables[-1] > 3000
    b.pipeline.drain()
    await task


@virtual
async def test_caught_up_is_told_under_load_too() -> None:
    """It once stayed true from the first idle second on, and the lag was shown as zero."""
    b = Bench()
    task = asyncio.create_task(b.run())
    await asyncio.sleep(2)
    assert b.figures.caught_up
    b.stream.send(transaction(100, A, insert(A.oid, 1, "x")))
    await asyncio.sleep(0.1)
    assert not b.figures.caught_up
    await until(lambda: b.figures.caught_up, 20.0)
    assert b.rows("a") == [(1, "x")]
    b.pipeline.drain()
    await task


@virtual
async def test_drain_commits_what_has_come() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    task = asyncio.create_task(b.run())
    await asyncio.sleep(0.01)
    b.stream.send(transaction(200, insert(A.oid, 2, "x"))[:-1])
    await asyncio.sleep(0.01)
    b.pipeline.drain()
    await task
    assert b.rows("a") == [(1, "x")]
    assert b.stream.statuses[-1][:3] == (100, 100, 100)


@virtual
async def test_what_comes_after_drain_is_neither_applied_nor_reported() -> None:
    b = Bench([keepalive(50)], stop_at=Lsn(200))
    task = asyncio.create_task(b.run())
    await asyncio.sleep(0.2)
    b.pipeline.drain()
    await asyncio.sleep(0)
    b.stream.send(transaction(200, A, insert(A.oid, 1, "x")))
    await task
    assert not b.rows("a")
    assert b.pipeline.dispatcher.position == 50
    assert b.pipeline.flushed < 200
    assert b.stream.statuses[-1][1] < 200


@virtual
async def test_stop_at_ends_exactly_there() -> None:
    frames = [f for n in range(1, 6) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    b = Bench(frames, stop_at=Lsn(300))
    await b.run()
    assert b.rows("a") == [(1, "x"), (2, "x"), (3, "x")]
    assert b.pipeline.flushed == 300
    assert max(flushed for _, flushed, _, _ in b.stream.statuses) == 300


@virtual
async def test_stop_at_is_reached_by_a_keepalive_and_asks_for_one() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")), stop_at=Lsn(300))
    task = asyncio.create_task(b.run())
    await until(lambda: any(reply for *_, reply in b.stream.statuses), 3.0)
    b.stream.send([keepalive(310)])
    await task
    assert b.rows("a") == [(1, "x")]
    assert b.pipeline.flushed == 300


@virtual
async def test_nothing_that_ends_after_stop_at_is_applied() -> None:
    b = Bench([*transaction(100, A, insert(A.oid, 1, "x")), *transaction(400, insert(A.oid, 2, "x"))], stop_at=Lsn(300))
    await b.run()
    assert b.rows("a") == [(1, "x")]
    assert b.pipeline.flushed == 300


@virtual
async def test_the_first_batch_closes_where_the_last_life_ended() -> None:
    frames = [f for n in range(1, 6) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    b = Bench(frames, align_at=Lsn(300))
    b.tables.after["a"] = Lsn(300)
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed == 500)
    assert b.tables.durables == [300, 500]
    assert b.commits("a") == [(400, 500)]
    b.pipeline.drain()
    await task


@virtual
async def test_a_batch_that_a_table_holds_already_is_not_committed_to_it() -> None:
    b = Bench(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")))
    b.tables.after["a"] = Lsn(100)
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed == 100)
    assert not b.rows("a")
    assert b.rows("b") == [(1, "x")]
    b.pipeline.drain()
    await task


@virtual
async def test_an_unknown_outcome_that_was_a_commit_is_taken_as_one() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    b.engine.outcomes["a"] = [commits_then_raises]
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed == 100)
    assert b.rows("a") == [(1, "x")]
    b.pipeline.drain()
    await task


@virtual
async def test_a_conflict_is_tried_again() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    b.engine.outcomes["a"] = [conflicts, conflicts]
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed == 100)
    assert b.rows("a") == [(1, "x")]
    b.pipeline.drain()
    await task


@virtual
async def test_conflicts_without_end_are_given_up() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    b.engine.outcomes["a"] = [conflicts] * 3
    with pytest.raises(BaseExceptionGroup) as raised:
        await b.run()
    assert isinstance(cause(raised.value), NotInPrerequisiteState)
    assert not b.tables.durables


@virtual
async def test_a_conflict_with_a_commit_of_our_own_name_is_not_tried_again() -> None:
    """Another writer committed under our application id: the batch must be filtered and built again."""
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))

    async def overtaken(commit: Callable[[], None]) -> None:
        b.delta.tables["a"].versions["app"] = Lsn(50)
        await conflicts(commit)

    b.engine.outcomes["a"] = [overtaken]
    with pytest.raises(BaseExceptionGroup) as raised:
        await b.run()
    error = cause(raised.value)
    assert isinstance(error, NotInPrerequisiteState)
    assert error.detail == "The batch ends at 0/64; the table holds everything up to 0/32."
    assert not b.rows("a")


@virtual
async def test_a_failed_commit_does_not_end_the_others_and_advances_nothing() -> None:
    b = Bench(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")))
    b.engine.outcomes["a"] = [fails]

    async def slowly(commit: Callable[[], None]) -> None:
        await asyncio.sleep(5)
        commit()

    b.engine.outcomes["b"] = [slowly]
    with pytest.raises(BaseExceptionGroup) as raised:
        await b.run()
    error = cause(raised.value)
    assert isinstance(error, PubsubError)
    assert "disk on fire" in error.message
    assert '"a"' in error.message
    assert b.rows("b") == [(1, "x")]
    assert not b.tables.durables
    assert all(flushed == 10 for _, flushed, _, _ in b.stream.statuses)


@virtual
async def test_cancelled_it_waits_for_the_commit_under_way() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    begun, done = asyncio.Event(), []

    async def uninterruptible(commit: Callable[[], None]) -> None:
        begun.set()
        work = asyncio.ensure_future(asyncio.sleep(3))
        try:
            await asyncio.shield(work)
        finally:
            await asyncio.wait({work})
            commit()
            done.append(True)

    b.engine.outcomes["a"] = [uninterruptible]
    task = asyncio.create_task(b.run())
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done
    assert not b.tables.durables


@virtual
async def test_cancelled_while_staging_it_leaves_no_file() -> None:
    """The staged files once stayed on disk until the next start, one batch more with each retry."""
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    with pytest.MonkeyPatch.context() as patch:

        async def slow_thread(function: Any, *args: Any) -> Any:
            await asyncio.sleep(3)
            return function(*args)

        async def in_thread(function: Any, *args: Any) -> Any:
            work = asyncio.ensure_future(slow_thread(function, *args))
            return await asyncio.shield(work)

        patch.setattr(asyncio, "to_thread", in_thread)
        task = asyncio.create_task(b.run())
        await asyncio.sleep(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(5)
        assert not b.delta.staged


@virtual
async def test_a_value_that_does_not_fit_commits_nothing_of_its_batch() -> None:
    frames = [
        *transaction(100, A, insert(A.oid, 1, "x"), xid=41),
        *transaction(200, B, insert(B.oid, b"ninety", "x"), xid=42, final=150),
    ]
    b = Bench(frames)
    with pytest.raises(BaseExceptionGroup) as raised:
        await b.run()
    error = cause(raised.value)
    assert isinstance(error, InvalidValue)
    assert error.context is not None
    assert "in transaction 42, finished at 0/96" in error.context
    assert not b.rows("a")
    assert not b.tables.durables


@virtual
async def test_a_table_that_stops_alone_gets_what_was_before_its_failure() -> None:
    frames = [
        *transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")),
        *transaction(200, insert(B.oid, 2, "x"), insert(A.oid, 2, "x")),
        *transaction(300, insert(B.oid, 3, "x"), insert(B.oid, b"ninety", "x"), insert(A.oid, 3, "x"), final=250),
        *transaction(400, insert(B.oid, 4, "x"), insert(A.oid, 4, "x")),
    ]
    b = Bench(frames)
    b.tables.isolates = True
    task = asyncio.create_task(b.run())
    await until(lambda: b.tables.durables)
    assert b.rows("a") == [(1, "x"), (2, "x"), (3, "x"), (4, "x")]
    assert b.rows("b") == [(1, "x"), (2, "x")]
    assert b.commits("b") == [(100, 200)]
    assert b.tables.stopped == {B.oid: 250}
    assert b.tables.durables == [400]
    # Later transactions apply only to the other table.
    b.stream.send(transaction(500, insert(B.oid, 5, "x"), insert(A.oid, 5, "x")))
    await until(lambda: b.pipeline.flushed == 500)
    assert len(b.rows("b")) == 2
    assert len(b.rows("a")) == 5
    b.pipeline.drain()
    await task


@virtual
async def test_a_table_that_stops_in_its_first_transaction_is_left_as_it_was() -> None:
    b = Bench(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, b"ninety", "x"), final=50))
    b.tables.isolates = True
    task = asyncio.create_task(b.run())
    await until(lambda: b.tables.durables)
    assert (b.rows("a"), b.rows("b"), b.tables.stopped) == ([(1, "x")], [], {B.oid: 50})
    b.pipeline.drain()
    await task


@virtual
async def test_conflicts_are_left_out_and_counted_once_committed() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x"), update(A.oid, 2, "y"), delete(A.oid, 3, None)))
    b.tables.contested = {A.oid}
    gate = b.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(b.run())
    await asyncio.sleep(5)
    # A batch staged during this commit is staged against the table after it.
    b.stream.send(transaction(200, update(A.oid, 1, "z"), delete(A.oid, 2, None), insert(A.oid, 4, "w")))
    await asyncio.sleep(5)
    assert not b.tables.conflicts
    gate.set()
    await until(lambda: b.pipeline.flushed == 200)
    assert b.rows("a") == [(1, "z"), (4, "w")]
    assert b.tables.conflicts == {"update_missing": 1, "delete_missing": 2}
    b.pipeline.drain()
    await task


@virtual
async def test_commits_of_others_are_known_once_the_batch_before_is_committed() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")), Limits(1, 1 << 20, 0.1, 10.0, 60.0))
    gate = b.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(b.run())
    await asyncio.sleep(5)
    b.delta.others["a"] = [OtherCommit(3, "DELETE", "an engine", frozenset(), None)]
    b.stream.send(transaction(200, update(A.oid, 2, "y")))
    await asyncio.sleep(5)
    # The first batch's commit, which has not begun, is to find them itself.
    assert b.tables.contested == set()
    assert b.delta.others
    gate.set()
    await until(lambda: b.pipeline.flushed == 200)
    assert b.tables.contested == {A.oid}
    assert not b.delta.others
    assert b.rows("a") == [(1, "x")], "the update of a row that is missing is left out"
    assert b.tables.conflicts == {"update_missing": 1}
    b.pipeline.drain()
    await task


@virtual
async def test_a_row_in_the_way_stops_all_or_its_table() -> None:
    frames = [
        *transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x"), final=50),
        *transaction(200, insert(A.oid, 1, "again"), insert(B.oid, 2, "x"), final=150),
    ]
    for isolates in (False, True):
        b = Bench(list(frames))
        b.tables.contested, b.tables.isolates = {A.oid}, isolates
        if isolates:
            task = asyncio.create_task(b.run())
            await until(lambda b=b: b.pipeline.flushed == 200)  # type: ignore[misc]
            assert (b.rows("a"), b.rows("b")) == ([(1, "x")], [(1, "x"), (2, "x")])
            assert b.tables.stopped == {A.oid: 150}
            b.pipeline.drain()
            await task
            continue
        with pytest.raises(BaseExceptionGroup) as raised:
            await b.run()
        error = cause(raised.value)
        assert isinstance(error, UniqueViolation)
        assert error.message == 'conflict detected on relation "a": conflict=insert_exists'
        assert error.detail == "Key already exists in the Delta table.\nKey (id)=(1); remote row (1, again)."
        assert error.context is not None
        assert 'during message type "INSERT"' in error.context
        assert "finished at 0/96" in error.context


@virtual
async def test_a_table_that_has_left_meanwhile_is_passed_over() -> None:
    b = Bench(transaction(100, A, B, insert(A.oid, 1, "x"), insert(B.oid, 1, "x")))
    b.tables.gone = {A.oid}
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed == 100)
    assert not b.rows("a")
    assert b.rows("b") == [(1, "x")]
    b.pipeline.drain()
    await task


@virtual
async def test_a_silent_publisher_is_pinged_at_half_time_and_given_up_at_the_end() -> None:
    b = Bench()
    with pytest.raises(BaseExceptionGroup) as raised:
        await b.run()
    assert isinstance(cause(raised.value), ConnectionFailure)
    assert 60 < asyncio.get_running_loop().time() < 63
    pings = sum(1 for *_, reply in b.stream.statuses if reply)
    assert 25 <= pings <= 31


@virtual
async def test_silence_while_nothing_was_read_is_not_the_publishers() -> None:
    """A commit longer than wal_receiver_timeout once ended the worker, which then repeated its work, without end."""
    frames = [f for n in range(1, 4) for f in transaction(n * 100, A, insert(A.oid, n, "x"))]
    b = Bench(frames, Limits(1, 1 << 20, 0.1, 10.0, 60.0), reads=5)
    gate = b.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(b.run())
    await asyncio.sleep(300)
    assert b.pipeline.dispatcher.position == 300, "all is read"
    gate.set()
    await asyncio.sleep(20)
    assert b.pipeline.flushed == 300
    assert not task.done()
    b.pipeline.drain()
    await task


@virtual
async def test_a_timeout_of_nothing_waits_for_ever() -> None:
    b = Bench(limits=replace(LIMITS, receiver_timeout=0.0))
    task = asyncio.create_task(b.run())
    await asyncio.sleep(1000)
    assert not task.done()
    assert len(b.stream.statuses) >= 90
    b.pipeline.drain()
    await task


@virtual
async def test_without_a_status_interval_nothing_is_said_unasked() -> None:
    """worker.c: send_feedback returns at once unless forced: by a request for a reply, or for its own ping."""
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")), limits=replace(LIMITS, status_interval=0.0))
    b.stream.answers_pings = False
    task = asyncio.create_task(b.run())
    await until(lambda: b.tables.durables == [100])
    b.stream.send([keepalive(150)])
    await until(lambda: b.tables.durables == [100, 150])
    assert b.stream.statuses == []
    b.stream.send([keepalive(200, reply=True)])
    await until(lambda: b.stream.statuses)
    assert b.stream.statuses == [(200, 200, 200, False)]
    await until(lambda: len(b.stream.statuses) > 1)
    assert asyncio.get_running_loop().time() > 30
    assert b.stream.statuses[1] == (200, 200, 200, True), "half of wal_receiver_timeout has passed"
    b.stream.send([keepalive(200)])
    b.pipeline.drain()
    await task
    assert not any(flushed == 200 and not reply for _, flushed, _, reply in b.stream.statuses[1:])


@virtual
async def test_without_a_status_interval_a_publisher_that_is_not_read_is_answered() -> None:
    """Its request may lie in the socket while the intake waits for room."""
    b = Bench(limits=replace(LIMITS, rows=1, status_interval=0.0), reads=3)
    b.tables.gates[A.oid] = asyncio.Event()
    task = asyncio.create_task(b.run())
    b.stream.send([frame for lsn in range(100, 500, 100) for frame in transaction(lsn, A, insert(A.oid, lsn, "x"))])
    await asyncio.sleep(100)
    assert len(b.stream.statuses) >= 40
    assert {flushed for _, flushed, _, _ in b.stream.statuses} == {10}
    b.tables.gates[A.oid].set()
    await until(lambda: len(b.rows("a")) == 4)
    b.pipeline.drain()
    await task


@virtual
async def test_a_catalog_that_hangs_holds_up_no_feedback() -> None:
    """Requests are answered, and what comes is read, with what was stored before; then what the catalog says ends it."""
    b = Bench([keepalive(500, reply=True)])
    hanging: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    task = asyncio.create_task(b.run())
    await until(lambda: b.tables.durables == [500])
    b.tables.store = lambda lsn: asyncio.wait_for(hanging, None)
    said = len(b.stream.statuses)
    b.stream.send([keepalive(600, reply=True)])
    for number in range(20):
        await until(lambda said=said: len(b.stream.statuses) > said, 2.0)
        said = len(b.stream.statuses)
        b.stream.send([keepalive(700 + number, reply=True)])
        await asyncio.sleep(0.2)
        assert len(b.stream.statuses) > said, "it was not answered at once"
        said = len(b.stream.statuses)
        b.stream.send([keepalive(800 + number, reply=True)])
    assert {flushed for _, flushed, _, _ in b.stream.statuses[1:]} == {500}
    await asyncio.sleep(30)
    assert len(b.stream.statuses) >= said + 2, "nothing is said unasked"
    hanging.set_exception(PubsubError("the catalog does not answer"))
    with pytest.raises(BaseExceptionGroup) as caught:
        await task
    assert "does not answer" in str(cause(caught.value))


@virtual
async def test_a_commit_whose_origin_can_not_be_stored_is_not_reported() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    storing = asyncio.Event()
    b.tables.store = lambda lsn: asyncio.wait_for(storing.wait(), None)  # type: ignore[assignment, return-value]
    task = asyncio.create_task(b.run())
    await until(lambda: b.rows("a"))
    await asyncio.sleep(50)
    assert len(b.stream.statuses) >= 4
    assert {flushed for _, flushed, _, _ in b.stream.statuses} == {10}
    storing.set()
    await until(lambda: b.stream.statuses[-1][1] == 100)
    b.pipeline.drain()
    await task


@virtual
async def test_a_broken_connection_ends_it_with_nothing_lost() -> None:
    b = Bench(transaction(100, A, insert(A.oid, 1, "x")))
    task = asyncio.create_task(b.run())
    await asyncio.sleep(0.5)
    b.stream.fail(ConnectionFailure("could not receive data from WAL stream"))
    with pytest.raises(BaseExceptionGroup) as raised:
        await task
    assert isinstance(cause(raised.value), ConnectionFailure)
    assert not b.tables.durables


@virtual
async def test_a_message_past_the_limit_is_refused() -> None:
    frames = transaction(100, A, insert(A.oid, 1, "x" * 5000))
    b = Bench(frames, Limits(1000, 1 << 20, 1.0, 10.0, 60.0, message=5000))
    with pytest.raises(BaseExceptionGroup) as raised:
        await b.run()
    error = cause(raised.value)
    assert isinstance(error, ProgramLimitExceeded)
    assert error.sqlstate == "54000"
    assert "max_message_size" in str(error.hint)


@virtual
async def test_logs_of_a_batch_hold_half_of_the_memory() -> None:
    """A batch closes at that size, whatever its own bounds are."""
    frames = [f for n in range(1, 9) for f in transaction(n * 100, A, insert(A.oid, n, "x" * 1000))]
    b = Bench(frames, Limits(10**6, 1 << 30, 3600.0, 10.0, 60.0, memory=4000), reads=4)
    task = asyncio.create_task(b.run())
    await until(lambda: b.pipeline.flushed >= 600, 5.0)
    assert max(last - first for first, last in b.commits("a")) <= 100
    b.pipeline.drain()
    await task
