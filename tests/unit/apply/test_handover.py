"""Handover: the states w and c, promises that outlive workers, and which worker waits for which."""

from __future__ import annotations

import asyncio

import pytest

from apply.handover import Handover
from pubsub.protocol.lsn import Lsn
from tests.support.virtual_time import run


class Applying:
    """An apply worker that has decided about all transactions up to `decided`."""

    def __init__(self, decided: int) -> None:
        self.decided = Lsn(decided)
        self.asked: list[tuple[int, Lsn]] = []
        self.restarts = self.changes = 0

    def answer(self, relid: int, at: Lsn) -> Lsn:
        self.asked.append((relid, at))
        return max(at, self.decided)

    def start_again(self) -> None:
        self.restarts += 1

    def tables_changed(self) -> None:
        self.changes += 1


async def waits(task: asyncio.Task[object]) -> bool:
    for _ in range(10):
        await asyncio.sleep(0)
    return not task.done()


def test_an_attached_apply_worker_answers_w_with_c() -> None:
    async def main() -> None:
        handover = Handover()
        assert handover.state(1) is None
        task = asyncio.create_task(handover.catchup_lsn(1, Lsn(50)))
        assert await waits(task)
        assert handover.state(1) == ("w", 50)
        handover.attach(Applying(80))
        assert await task == 80
        assert handover.state(1) == ("c", 80)
        assert handover.promised == {1: 80}

    run(main())


def test_a_promise_outlives_both_workers() -> None:
    async def main() -> None:
        handover = Handover()
        first, second = Applying(80), Applying(40)
        handover.attach(first)
        assert await handover.catchup_lsn(1, Lsn(50)) == 80
        handover.detach()
        handover.attach(second)
        assert await handover.catchup_lsn(1, Lsn(60)) == 80
        assert not second.asked

    run(main())


def test_no_answer_is_asked_of_a_worker_that_has_gone() -> None:
    async def main() -> None:
        handover = Handover()
        gone, here = Applying(10), Applying(20)
        task = asyncio.create_task(handover.catchup_lsn(1, Lsn(5)))
        await asyncio.sleep(0)
        handover.attach(gone)
        handover.detach()
        assert await waits(task)
        handover.attach(here)
        assert await task == 20
        assert not gone.asked

    run(main())


def test_a_new_copy_breaks_the_promise_and_apply_starts_again() -> None:
    async def main() -> None:
        handover, applying = Handover(), Applying(80)
        handover.attach(applying)
        handover.new_copy(1)
        assert applying.restarts == 0, "nothing was promised"
        await handover.catchup_lsn(1, Lsn(50))
        handover.synced(1)
        handover.new_copy(1)
        assert applying.restarts == 1
        assert not handover.promised
        assert handover.state(1) is None
        task = asyncio.create_task(handover.wait_synced(1))
        assert await waits(task), "what an earlier copy came to does not count"
        handover.synced(1)
        await task

    run(main())


def test_s_lets_apply_write() -> None:
    async def main() -> None:
        handover, applying = Handover(), Applying(80)
        handover.attach(applying)
        await handover.catchup_lsn(1, Lsn(50))
        task = asyncio.create_task(handover.wait_synced(1))
        assert await waits(task)
        handover.synced(1)
        await task
        assert applying.changes == 1
        assert handover.state(1) is None
        handover.forget(1)
        assert not handover.promised

    run(main())


def test_a_wait_ends_when_its_table_leaves() -> None:
    """The apply worker once waited forever for a table that REFRESH had removed."""

    async def main() -> None:
        handover = Handover()
        task = asyncio.create_task(handover.wait_synced(1))
        assert await waits(task)
        handover.forget(1)
        await task
        again = asyncio.create_task(handover.wait_synced(1))
        assert await waits(again)
        again.cancel()
        with pytest.raises(asyncio.CancelledError):
            await again

    run(main())
