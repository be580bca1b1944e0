"""Run one server process and end it when the process that requested it ends.

    python -I -S watcher.py '{"command": […], "environment": {…}, "uid": …, "gid": …, "cwd": …, "log": …, "remove": …}'

The watcher starts the command, prints its process id, and waits until the command ends or its own standard input is
closed.  The watcher's parent holds that input open, and a process that is killed closes its files: so a test run or a
demo that ends in any way, kill -9 included, ends its servers.  If the watcher itself is killed, the kernel ends the
server (PR_SET_PDEATHSIG, which is tied to the thread that started the server; the watcher has only one).

It imports only the standard library, because one runs beside every server: it starts in some 15 ms.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import shutil
import signal
import subprocess
import sys
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_GRACE_SECONDS: Final = 10.0
_POLL_MILLISECONDS: Final = 1000


def main(argument: str) -> int:
    """Run the command; return its exit code, or 0 if it was ended because the parent is gone."""
    # Ctrl-C is meant for the parent, which then stops the server in its own way.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config: dict[str, Any] = json.loads(argument)
    owner = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # Set after the change of user, which would clear it.
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGQUIT)

    with open(config["log"], "ab") as log:
        process = subprocess.Popen(
            config["command"],
            cwd=config["cwd"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=config["environment"],
            preexec_fn=before_exec,  # noqa: PLW1509 (one thread only)
            user=config["uid"],
            group=config["gid"],
            extra_groups=[] if config["uid"] is not None else None,
        )
    print(process.pid, flush=True)

    poller = select.poll()
    poller.register(0, select.POLLIN | select.POLLHUP)
    ended = os.pidfd_open(process.pid)
    poller.register(ended, select.POLLIN)
    while True:
        ready = {descriptor for descriptor, _ in poller.poll(_POLL_MILLISECONDS)}
        if ended in ready:
            return process.wait()
        # A forked child of the owner may keep the pipe open, so a change of parent counts too.
        if os.getppid() != owner or (0 in ready and not os.read(0, 4096)):
            break
    process.send_signal(signal.SIGQUIT)
    try:
        process.wait(_GRACE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if config["remove"] is not None:
        shutil.rmtree(config["remove"], ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1]))
