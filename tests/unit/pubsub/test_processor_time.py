"""pubsub.processor_time: seconds by part, of the thread that works, without what other parts are called for."""

from __future__ import annotations

import os
import threading
import time

import pytest

from pubsub import processor_time
from pubsub.processor_time import spent_on

#: What `find` and `fold` take, in seconds; a wrong attribution makes more of a difference than a slow machine does.
FOUND, FOLDED = 0.2, 0.04


def work(seconds: float = FOLDED / 2) -> None:
    """Use the processor for so long."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


@spent_on("finding")
def find() -> int:
    work(FOUND)
    return 7


@spent_on("folding")
def fold() -> int:
    work()
    found = find()
    work()
    return found


class Since:
    """What was spent since it was made."""

    def __init__(self) -> None:
        self._before = processor_time.spent()

    def __getitem__(self, part: str) -> float:
        return processor_time.spent()[part] - self._before[part]


@pytest.fixture
def since() -> Since:
    return Since()


def test_a_part_has_its_own_time(since: Since) -> None:
    assert fold() == 7
    assert FOLDED <= since["folding"] < FOUND <= since["finding"]


def test_waiting_costs_nothing(since: Since) -> None:
    spent_on("log")(time.sleep)(FOUND)
    assert since["log"] < FOUND / 2


def test_a_whole_part_has_what_others_do_for_it(since: Since) -> None:
    assert spent_on("housekeeping", whole=True)(fold)() == 7
    assert since["housekeeping"] >= FOUND + FOLDED
    assert since["folding"] == since["finding"] == 0
    find()
    assert since["finding"] > 0, "it has ended"


def test_an_error_ends_a_part(since: Since) -> None:
    @spent_on("writing")
    def fails() -> None:
        raise OSError("no space")

    with pytest.raises(OSError, match="no space"):
        spent_on("folding")(fails)()
    work(FOUND)
    assert since["folding"] + since["writing"] < FOUND


def test_threads_are_counted_apart(since: Since) -> None:
    threads = [threading.Thread(target=work_of) for work_of in (fold, find)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    # Another one begins, which looks for those that have ended.
    another = threading.Thread(target=spent_on("log")(work))
    another.start()
    another.join()
    assert FOLDED <= since["folding"] < 2 * FOUND <= since["finding"]


def test_all_parts_are_all_that_the_process_has_had() -> None:
    fold()
    found = processor_time.spent()
    assert found.keys() == processor_time.PARTS.keys()
    assert sum(found.values()) == pytest.approx(time.process_time(), abs=FOUND)
    both = processor_time.together(found, {"folding": 1.0})
    assert both["folding"] == found["folding"] + 1
    assert both["other"] == found["other"]


def test_of_another_process() -> None:
    work()
    assert processor_time.of_process(os.getpid()) == pytest.approx(time.process_time(), abs=FOUND)
    assert processor_time.of_process(None) is None
    assert processor_time.of_process(2**22 + 1) is None
