"""One daemon per node: an exclusive lock on a file in the node's directory.

The kernel releases the lock when the process ends, however it ends; the pid in the file is for people and for messages
that name the holder.  Children do not inherit the descriptor, so a JVM that outlives its daemon does not keep the node
locked.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final, Self

from pubsub.errors import ObjectInUse, PubsubError

LOCK_FILE: Final = "daemon.pid"

_HINT: Final = "Stop it first, or use another --home."

#: `running_daemon` holds the lock for an instant; a daemon that starts just then tries again.
_TRIES: Final = 10
_PAUSE: Final = 0.02


class DaemonLock:
    """The right to be the daemon of the node at `home`; a context manager."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    @classmethod
    def acquire(cls, home: Path, *, file: str = LOCK_FILE, what: str | None = None, hint: str = _HINT) -> Self:
        """Take the exclusive lock on `file` in the directory `home`.

        Raises ObjectInUse with `hint`, which names the process that holds the lock and what is locked: `what`, by
        default the node.
        """
        path = home / file
        what = what or f'node "{home}"'
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise PubsubError(f'could not open lock file "{path}": {error.strerror}', sqlstate="58030") from error
        try:
            for attempt in range(_TRIES):
                if attempt:
                    time.sleep(_PAUSE)
                if try_lock(descriptor, fcntl.LOCK_EX):
                    break
            else:
                pid = _read_pid(descriptor)
                raise ObjectInUse(
                    f"a daemon is already running on {what}",
                    detail=f"Its process id is {pid}." if pid else None,
                    hint=hint,
                )
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(descriptor)
            raise
        return cls(descriptor)

    def release(self) -> None:
        """Release the lock.  The file stays: if it were removed, two daemons could lock two files of the same name."""
        if self._descriptor >= 0:
            os.ftruncate(self._descriptor, 0)
            # Closing is not enough: a child between fork and exec still has the descriptor.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


def running_daemon(home: Path, *, file: str = LOCK_FILE) -> int | None:
    """Return the process id of the node's daemon; None when none runs; 0 while it starts and has not written its id.

    `file`: as for DaemonLock.acquire.
    """
    try:
        descriptor = os.open(home / file, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        return None if try_lock(descriptor, fcntl.LOCK_SH) else _read_pid(descriptor)
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, kind: int) -> bool:
    """Take a lock of this kind (fcntl.LOCK_EX, fcntl.LOCK_SH) on an open file; return False if another holds it."""
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _read_pid(descriptor: int) -> int:
    text = os.pread(descriptor, 32, 0).strip()
    return int(text) if text.isdigit() else 0
