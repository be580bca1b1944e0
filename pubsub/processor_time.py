"""Where this process's processor time goes, by part of the work: for metrics, and for `make bench`.

    @spent_on("folding")                       of the thread, until the function returns
    @spent_on("housekeeping", whole=True)      the same, and what other parts do for it counts as this one's

Else a part that is called for another one has its own time.  What no part has is `other`: the event loop's own, commands, the
catalog, and the threads that Arrow divides its work among.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Literal, ParamSpec, TypeVar, get_args

P = ParamSpec("P")
T = TypeVar("T")

Part = Literal["receiving", "decoding", "folding", "finding", "writing", "log", "copying", "housekeeping"]

PARTS: Final[Mapping[str, str]] = {
    "receiving": "frames from libpq into batches",
    "decoding": "frames into columns",
    "folding": "the changes of each key into one",
    "finding": "the rows that a batch changes, in data files and the key index",
    "writing": "data files and deletion vectors, with the rows that are completed for them",
    "log": "Delta's logs, read and committed to; the JVM's part is not in it",
    "copying": "copies that the process makes itself",
    "housekeeping": "merging, checkpoints and VACUUM, without the JVM's part",
    "other": "all else",
}
assert {*PARTS} == {*get_args(Part), "other"}

_TICK: Final = os.sysconf("SC_CLK_TCK")


def together(*of: Mapping[str, float]) -> dict[str, float]:
    """Return what several processes have spent."""
    return {part: sum(one.get(part, 0.0) for one in of) for part in PARTS}


class _Here(threading.local):
    """What a thread works on: for which part, whether that has everything, and the thread's time when that was noted.

    Each thread counts for itself, without a lock, so that no call into it can wait or be left half-way.
    """

    def __init__(self) -> None:
        self.part: str | None = None
        self.whole = False
        self.since = 0.0
        self.spent = dict.fromkeys(get_args(Part), 0.0)
        with _lock:
            for thread in [one for one in _threads if not one.is_alive()]:
                _ended.append(together(*_ended, _threads.pop(thread)))
                del _ended[:-1]
            _threads[threading.current_thread()] = self.spent


_lock = threading.Lock()
_threads: dict[threading.Thread, dict[str, float]] = {}
# What those had that have ended: one sum, or none.
_ended: list[dict[str, float]] = []
_here = _Here()


def spent_on(part: Part, *, whole: bool = False) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Count the processor time of a function, which must be neither a coroutine nor a generator, as a part's."""

    def decorate(work: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(work)
        def counted(*args: P.args, **kwargs: P.kwargs) -> T:
            here = _here
            if here.whole or here.part == part:
                return work(*args, **kwargs)
            outer, now = here.part, time.thread_time()
            if outer is not None:
                here.spent[outer] += now - here.since
            here.part, here.whole, here.since = part, whole, now
            try:
                return work(*args, **kwargs)
            finally:
                now = time.thread_time()
                here.spent[part] += now - here.since
                here.part, here.whole, here.since = outer, False, now

        return counted

    return decorate


def spent() -> dict[str, float]:
    """Return the seconds of each part since this process began; together they are all that it has had."""
    with _lock:
        found = together(*_ended, *_threads.values())
    return found | {"other": max(time.process_time() - sum(found.values()), 0.0)}


def of_process(pid: int | None) -> float | None:
    """Return the seconds that another process has had, without its children; None if it has ended, or there is no /proc."""
    if pid is None:
        return None
    try:
        words = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return (int(words[11]) + int(words[12])) / _TICK
