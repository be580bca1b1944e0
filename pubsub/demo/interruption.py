"""Ctrl-C, at any time, without an exception in the middle of something.

Signals are only noted; whoever waits here is told within a twentieth of a second, and raises `Interrupted` at a place where
all that was started is known to who ends it.  What blocks for long runs in a thread or a process, and is waited for here.
"""

from __future__ import annotations

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, Generic, TypeVar

_T = TypeVar("_T")
_POLL_SECONDS: Final = 0.05
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(Exception):
    """A signal came; `number` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interruption:
    """What this process was told from outside."""

    def __init__(self) -> None:
        self._number: int | None = None

    def install(self) -> None:
        """Take the signals over; from now on they never raise by themselves."""
        for number in _SIGNALS:
            signal.signal(number, self.note)

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """A signal has come; the first one counts."""
        if self._number is None:
            self._number = number

    def check(self) -> None:
        """Raises Interrupted if a signal has come."""
        if self._number is not None:
            raise Interrupted(self._number)

    def sleep(self, seconds: float) -> None:
        """Wait.  Raises Interrupted as soon as a signal comes."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _POLL_SECONDS))

    def wait(self, process: subprocess.Popen[str], timeout: float) -> int:
        """Wait for a process to end and return its exit code.  Raises Interrupted and TimeoutError; then it still runs."""
        deadline = time.monotonic() + timeout
        while (code := process.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            self.sleep(_POLL_SECONDS)
        return code

    def start(self, work: Callable[[], _T]) -> Task[_T]:
        """Begin `work` in a thread, which does not keep the process alive."""
        return Task(self, work)

    def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread and wait for it.  Raises what it raises, or Interrupted: then it is left to itself."""
        return self.start(work).result()


class Task(Generic[_T]):
    """Work in a thread of its own."""

    def __init__(self, interruption: Interruption, work: Callable[[], _T]) -> None:
        self._interruption = interruption
        self._work = work
        self._value: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float) -> None:
        """Wait `timeout` seconds at most, interrupted or not."""
        self._thread.join(timeout)

    def result(self) -> _T:
        """Wait for it.  Raises what it raised, or Interrupted."""
        while not self.done:
            self._interruption.sleep(_POLL_SECONDS)
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as error:  # raised where it is waited for
            self._error = error
