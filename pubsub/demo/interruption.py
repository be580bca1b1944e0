"""Ctrl-C at any time, without an exception at an arbitrary place.

Signals are only recorded.  The wait functions here raise `Interrupted` within a twentieth of a second, at places where
everything started so far is registered for cleanup.  Work that blocks for long runs in a thread or process, and these
functions wait for it.
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
    """A signal was received; `number` is its number."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Interruption:
    """The first signal that this process received, if any."""

    def __init__(self) -> None:
        self._number: int | None = None

    def install(self) -> None:
        """Install the signal handlers; from now on signals raise only in the wait functions."""
        for number in _SIGNALS:
            signal.signal(number, self.note)

    def note(self, number: int, _frame: FrameType | None = None) -> None:
        """Record a signal; only the first one counts."""
        if self._number is None:
            self._number = number

    def check(self) -> None:
        """Raise Interrupted if a signal was received."""
        if self._number is not None:
            raise Interrupted(self._number)

    def sleep(self, seconds: float) -> None:
        """Sleep.  Raises Interrupted as soon as a signal is received."""
        deadline = time.monotonic() + seconds
        while True:
            self.check()
            left = deadline - time.monotonic()
            if left <= 0:
                return
            time.sleep(min(left, _POLL_SECONDS))

    def wait(self, process: subprocess.Popen[str], timeout: float) -> int:
        """Wait for a process; return its exit code.  Raises Interrupted and TimeoutError, which leave it running."""
        deadline = time.monotonic() + timeout
        while (code := process.poll()) is None:
            if time.monotonic() > deadline:
                raise TimeoutError
            self.sleep(_POLL_SECONDS)
        return code

    def start(self, work: Callable[[], _T]) -> Task[_T]:
        """Start `work` in a thread that does not keep the process alive."""
        return Task(self, work)

    def run(self, work: Callable[[], _T]) -> _T:
        """Run `work` in a thread and wait for it.  Raises its exception, or Interrupted, which leaves it running."""
        return self.start(work).result()


class Task(Generic[_T]):
    """Work in its own thread."""

    def __init__(self, interruption: Interruption, work: Callable[[], _T]) -> None:
        self._interruption = interruption
        self._work = work
        self._value: list[_T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether the work has ended, successfully or not."""
        return not self._thread.is_alive()

    def wait(self, timeout: float) -> None:
        """Wait for at most `timeout` seconds, regardless of signals."""
        self._thread.join(timeout)

    def result(self) -> _T:
        """Wait for the work and return its result.  Raises its exception, or Interrupted."""
        while not self.done:
            self._interruption.sleep(_POLL_SECONDS)
        if self._error is not None:
            raise self._error
        return self._value[0]

    def _run(self) -> None:
        try:
            self._value.append(self._work())
        except BaseException as error:  # raised again by `result`
            self._error = error
