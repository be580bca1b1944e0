"""End a command on a signal: in good order, or at once if that takes too long."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

GIVE_UP_SECONDS: Final = 10.0
"""Seconds that an orderly end may take: the output's reader may have stopped.  Closing a connection takes less."""

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """Handlers by which SIGINT, SIGTERM and SIGHUP end the process.

    The first signal calls `end`, between two instructions of the main thread.  A second one calls `give_up`, and so does
    GIVE_UP_SECONDS without an end; a third one ends the process at once.  The handlers stay until
    the process ends: its last steps must be interruptible, too.
    """

    def __init__(self, end: Callable[[], None], give_up: Callable[[], None]) -> None:
        self._asked = False
        self._end = end
        self._give_up = give_up
        # Not with the event loop's handlers: they do not interrupt a write that waits for its reader.
        for number in _ENDING:
            # nohup makes a program ignore SIGHUP.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)
        signal.signal(signal.SIGALRM, self._handle)

    def _handle(self, _number: int, _frame: FrameType | None) -> None:
        if not self._asked:
            self._asked = True
            signal.setitimer(signal.ITIMER_REAL, GIVE_UP_SECONDS)
            self._end()
            return
        for number in (*_ENDING, signal.SIGALRM):
            signal.signal(number, signal.SIG_IGN if number == signal.SIGALRM else signal.SIG_DFL)
        self._give_up()
