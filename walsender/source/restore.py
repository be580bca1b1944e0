"""restore_command: a command of the shell that fetches a file from a WAL archive (xlogarchive.c: RestoreArchivedFile)."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Final

from pubsub.errors import PubsubError

_FATAL: Final = 125
"""Exit codes past it say that the command could not run, not that there is no such file."""
_NO_RESTART_POINT: Final = "0" * 24
_LOOK: Final = 0.1  # seconds


def restore(
    command: str,
    name: str,
    path: Path,
    stop: threading.Event | None = None,
    *,
    timeout: float = 0.0,
    environment: Mapping[str, str] | None = None,
) -> bool:
    """Have a command fetch the file `name` to `path`; return whether it says that it has.

    %f and %p in it are these two, %r the first file that is needed, which here is none.  It is killed, with what it has
    started, after `timeout` seconds (0: never), and once `stop` is set.  Raises PubsubError (58030) where it could not run, was
    killed or took too long: that tells nothing of the archive.
    """
    places = {"%f": name, "%p": str(path), "%r": _NO_RESTART_POINT, "%%": "%"}
    text, at = "", 0
    while at < len(command):
        two = command[at : at + 2]
        text += places.get(two, command[at])
        at += 2 if two in places else 1
    code = _run(text, stop, timeout, environment)
    if code is None:
        how = f"took longer than {timeout:g} s"
    elif code < 0:
        how = f"was terminated by signal {-code}"
    elif code > _FATAL:
        how = f"exited with exit code {code}"
    else:
        return code == 0
    raise PubsubError(
        f'could not restore file "{name}" from archive: child process {how}',
        sqlstate="58030",
        detail=f"The command was: {text}",
    )


def _run(
    command: str, stop: threading.Event | None, timeout: float, environment: Mapping[str, str] | None
) -> int | None:
    """Run a command of the shell; return its exit code, None past the timeout."""
    deadline = time.monotonic() + timeout
    # What it prints goes to the log; standard output belongs to the protocol of decoding processes.
    with subprocess.Popen(
        ["/bin/sh", "-c", command], stdin=subprocess.DEVNULL, stdout=2, start_new_session=True, env=environment
    ) as shell:
        try:
            while stop is None or not stop.is_set():
                if timeout and time.monotonic() > deadline:
                    return None
                with suppress(subprocess.TimeoutExpired):
                    return shell.wait(_LOOK if stop is not None or timeout else None)
            with suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGKILL)
            return shell.wait()
        finally:
            if shell.returncode is None:
                with suppress(ProcessLookupError):
                    os.killpg(shell.pid, signal.SIGKILL)
