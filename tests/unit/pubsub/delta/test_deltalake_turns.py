"""deltalake_turns: on HDFS one question at a time, and once more if there is no answer."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from pubsub.delta.log import deltalake_turns
from pubsub.delta.log.deltalake_turns import ask
from tests.support.captured_logs import captured_logs

HDFS = "hdfs://lake/t"


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Return what is opened of deltalake, which has no tables."""
    opened: list[tuple[Any, ...]] = []

    def table(path: str, version: int | None = None, storage_options: object = None) -> str:
        opened.append((path, version))
        return f"{path} of {version}"

    monkeypatch.setattr("deltalake.DeltaTable", table)
    monkeypatch.setattr(deltalake_turns, "options", lambda _: None)
    return opened


def _hangs(first: int) -> tuple[Callable[[Any], str], threading.Event]:
    """Return a question whose first calls do not return before an event."""
    release, left = threading.Event(), [first]

    def question(table: Any) -> str:
        left[0] -= 1
        if left[0] >= 0:
            release.wait()
        return f"answer of {table}"

    return question, release


@pytest.mark.parametrize("path", [HDFS, "/t"])
def test_it_is_answered(path: str) -> None:
    assert ask(path, lambda table: f"answer of {table}", 3) == f"answer of {path} of 3"
    with pytest.raises(ValueError, match="one"):
        ask(path, lambda _: int("one"))
    with pytest.raises(TimeoutError, match="its own"):
        ask(path, _raises)


def _raises(_: Any) -> None:
    raise TimeoutError("its own")


def test_without_an_answer_it_is_asked_once_more(
    monkeypatch: pytest.MonkeyPatch, tables: list[tuple[Any, ...]]
) -> None:
    monkeypatch.setattr(deltalake_turns, "_PATIENCE", 0.05)
    question, release = _hangs(1)
    with captured_logs() as logs:
        assert ask(HDFS, question) == f"answer of {HDFS} of None"
    assert [one["event"] for one in logs] == ["deltalake does not answer"]
    assert len(tables) == 2, "the table is opened anew"
    release.set()


def test_without_two_answers_it_fails_and_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    question, release = _hangs(2)
    with monkeypatch.context() as soon:
        soon.setattr(deltalake_turns, "_PATIENCE", 0.05)
        with pytest.raises(TimeoutError, match="no answer"):
            ask(HDFS, question)
    assert ask(HDFS, question) == f"answer of {HDFS} of None"
    release.set()


def test_one_at_a_time() -> None:
    at_once, most = [0], [0]
    lock = threading.Lock()

    def question(_: Any) -> None:
        with lock:
            at_once[0] += 1
            most[0] = max(most[0], at_once[0])
        threading.Event().wait(0.01)
        with lock:
            at_once[0] -= 1

    threads = [threading.Thread(target=ask, args=(HDFS, question)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]
