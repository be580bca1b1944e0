"""What the deltalake package knows of a table's log; of a table on HDFS one thread asks at a time.

With four threads that open tables at once by a name service whose first name node is away, one of some two thousand calls of
deltalake 1.6.6 never returns; with one at a time none of nine thousand did.  A call that gives no answer is made once more,
and its thread is left to itself: there is no way to end it.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Final, TypeVar

import structlog

from pubsub.object_stores import has_directories, options

if TYPE_CHECKING:
    from deltalake import DeltaTable

_T = TypeVar("_T")

_PATIENCE: Final = 300.0
"""Seconds for one answer; a long log takes a while."""

_turn = threading.Lock()
logger = structlog.get_logger()


def ask(path: str, question: Callable[[DeltaTable], _T], version: int | None = None) -> _T:
    """Return the answer for the table at `path`, of this version or the newest one.

    Raises deltalake's errors, those of the question, and TimeoutError if HDFS is asked in vain.
    """
    from deltalake import DeltaTable

    def work() -> _T:
        return question(DeltaTable(path, version=version, storage_options=options(path)))

    return _in_turn(path, work) if has_directories(path) else work()


def _in_turn(path: str, work: Callable[[], _T]) -> _T:
    if not _turn.acquire(timeout=3 * _PATIENCE):
        raise TimeoutError(errno.ETIMEDOUT, "others wait for answers of HDFS", path)
    try:
        for _ in range(2):
            answer: Future[_T] = Future()
            threading.Thread(target=_answer, args=(answer, work), name="deltalake", daemon=True).start()
            try:
                return answer.result(_PATIENCE)
            except TimeoutError:
                if answer.done():
                    raise
            logger.warning("deltalake does not answer", path=path)
        raise TimeoutError(errno.ETIMEDOUT, f"no answer within {2 * _PATIENCE:.0f} s", path)
    finally:
        _turn.release()


def _answer(answer: Future[_T], work: Callable[[], _T]) -> None:
    try:
        answer.set_result(work())
    except BaseException as error:
        answer.set_exception(error)
