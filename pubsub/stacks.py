"""What a process does at this moment, for whoever asks why it stands still: SIGUSR1 tells of all its threads and tasks.

The threads are written to standard error by faulthandler, also while the event loop is held up; the tasks are logged.
"""

from __future__ import annotations

import asyncio
import faulthandler
import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final

import structlog

_ROOT: Final = Path(__file__).parent.parent
_STANDARD_ERROR: Final = 2

logger = structlog.get_logger()


def tell_when_asked(loop: asyncio.AbstractEventLoop) -> None:
    """Have SIGUSR1 tell where this process stands.  Call it in the main thread."""
    # One of an earlier loop of this process would stay, and not be chained.
    faulthandler.unregister(signal.SIGUSR1)
    loop.add_signal_handler(signal.SIGUSR1, _log_tasks)
    # Chained: it has written the threads when the loop's handler runs.
    faulthandler.register(signal.SIGUSR1, file=_STANDARD_ERROR, all_threads=True, chain=True)


def _log_tasks() -> None:
    found = sorted(f"{task.get_name()}: {' > '.join(_places(task.get_coro()))}" for task in asyncio.all_tasks())
    logger.info("where this process stands", tasks=found)


def _places(awaited: Any) -> Iterator[str]:
    """Yield where a task is, from its first coroutine to what that waits for in the end."""
    while awaited is not None:
        frame = next((f for name in ("cr_frame", "gi_frame", "ag_frame") if (f := getattr(awaited, name, None))), None)
        if frame is None:
            return
        yield _place(frame)
        names = ("cr_await", "gi_yieldfrom", "ag_await")
        awaited = next((a for name in names if (a := getattr(awaited, name, None)) is not None), None)


def _place(frame: FrameType) -> str:
    path = Path(frame.f_code.co_filename)
    name = path.relative_to(_ROOT) if path.is_relative_to(_ROOT) else path.name
    return f"{name}:{frame.f_lineno} {frame.f_code.co_qualname}"
