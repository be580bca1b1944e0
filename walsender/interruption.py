"""How signals end a command: in good order, and where that takes too long, at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Final

GIVE_UP_SECONDS: Final = 10.0
"""How long a good order may take: someone may have stopped to read what is written.  More than a connection's end does."""

_ENDING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interruption:
    """SIGINT, SIGTERM and SIGHUP call `end`, between two instructions of the main thread.  At a second one, and where the process
    is not over GIVE_UP_SECONDS later, `give_up` is called; a third one ends the process as it stands.

    For as long as the process lives: what comes last is to be ended, too.
    """

    def __init__(self, end: Callable[[], None], give_up: Callable[[], None]) -> None:
        self._asked = False
        self._end = end
        self._give_up = give_up
        # Not by the event loop's handlers: a write that waits for its reader is not interrupted for those.
        for number in _ENDING:
            # nohup has a program ignore it.
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
