"""Runs one server process and never lets it outlive who asked for it.

    python -I -S watcher.py '{"command": […], "uid": …, "gid": …, "cwd": …, "log": …, "remove": …}'

The watcher starts the command, prints its process id, and waits for one of two ends: the command's own, or the end of its
own standard input, which whoever started the watcher holds open.  A process that is killed closes what it held: so a test
run or a demo that ends in any way, kill -9 included, ends its servers.  If the watcher itself is killed, the kernel ends the
server (PR_SET_PDEATHSIG; it follows the thread that started the server, which here is the only one).

Nothing but the standard library is imported: it starts in some 15 ms and runs beside every server.
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
    """Returns the command's exit code, 0 when it was ended because nobody waits for it any more."""
    # Ctrl-C is for who asked, who then stops the server as it sees fit.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    config: dict[str, Any] = json.loads(argument)
    owner = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)

    def before_exec() -> None:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        # After the change of user, which would clear it.
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
        # A forked child of the owner may hold its end of the pipe: the change of parent tells as well.
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
