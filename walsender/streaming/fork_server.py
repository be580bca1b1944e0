"""The process that all decoding processes are forked from: `python -m walsender.streaming.fork_server DESCRIPTOR`.

    server ──► start (a program, its socket) ──► fork ──► the program
    server ◄── started, ended

Importing what decoding needs takes more than half a second of processor time, and is done here once.  There is one thread
and no event loop, so that a fork is a whole process.  A forked process ends when its own socket does; this one ends when
the server is gone.
"""

from __future__ import annotations

import errno
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final

from walsender.streaming import changes, channel, process, requests

_PROGRAMS: Final[tuple[tuple[str, Callable[[int], int]], ...]] = (
    # In the order of requests.py; the names are what `ps -o comm` and `top` show.
    ("decoding", process.main),
    ("slot-changes", changes.main),
)
_SIGNALS: Final = 1 << 12

Program = Callable[[], int]


def serve(sock: socket.socket) -> Program | None:
    """Start programs until the server is gone, and return None; in a forked process, return what is to be run there."""
    running: dict[int, int] = {}
    # A terminal's SIGINT is for the server, which ends its processes.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    woken, wakes = socket.socketpair()
    for one in (woken, wakes):
        one.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda _signal, _frame: None)
    while True:
        readable, _, _ = select.select([sock, woken], [], [])
        if woken in readable:
            woken.recv(_SIGNALS)
            for pid in list(running):
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    _tell(sock, requests.EXITED, running.pop(pid), os.waitstatus_to_exitcode(status))
        if sock not in readable:
            continue
        message = channel.receive(sock)
        if message is None:
            return None
        kind, contents, files = message
        number, which = requests.TWO.unpack(contents)
        if kind == requests.KILL:
            # One that has ended is not waited for before its number is gone: the process id is still its own.
            for pid in [pid for pid, one in running.items() if one == number]:
                os.kill(pid, signal.SIGKILL)
            continue
        (descriptor,) = files
        try:
            pid = os.fork()
        except OSError as error:
            os.close(descriptor)
            _tell(sock, requests.NOT_FORKED, number, error.errno or errno.EAGAIN)
            continue
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for one in (sock, woken, wakes):
                one.close()
            return _program(which, descriptor)
        os.close(descriptor)
        running[pid] = number
        _tell(sock, requests.FORKED, number, pid)


def _program(which: int, descriptor: int) -> Program:
    name, program = _PROGRAMS[which]
    # The arguments stay those of this module.
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    return lambda: program(descriptor)


def _tell(sock: socket.socket, kind: bytes, number: int, said: int) -> None:
    sock.sendall(channel.framed(kind, requests.TWO.pack(number, said)))


def main(descriptor: int) -> int:
    """Serve; in a forked process, run its program.  Return the exit code."""
    # What is imported stays: neither this process nor those that it becomes look through it for garbage.
    gc.collect()
    gc.freeze()
    try:
        program = serve(socket.socket(fileno=descriptor))
    except (BrokenPipeError, ConnectionResetError):
        return 0
    return program() if program is not None else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
