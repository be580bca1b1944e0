"""The process that others are forked from: `python -m pubsub.forks.fork_server DESCRIPTOR NAME=MODULE …`.

    processes.py ──► F  number, program (2 × 8)       run a program, the n-th of the arguments; its open files come with this
                     K  number, 0 (2 × 8)             kill it
    processes.py ◄── P  number, process id (2 × 8)    it is started
                     N  number, errno (2 × 8)         it cannot be
                     E  number, exit code (2 × 8)     it has ended; negative: by a signal

A program is a module's `main(*descriptors) -> int`.  All modules are imported here, once: that takes a good part of a second
of processor time.  There is no event loop and no thread but those of libraries that know of forks (jemalloc's), so that what
is forked is a whole process.  This one ends when the other end of its socket is gone; so should the programs with theirs.
"""

from __future__ import annotations

import errno
import faulthandler
import gc
import os
import select
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from struct import Struct
from typing import Final

from pubsub.forks import channel

FORK: Final = b"F"
KILL: Final = b"K"
FORKED: Final = b"P"
NOT_FORKED: Final = b"N"
EXITED: Final = b"E"
CONTENTS: Final = Struct(">qq")

_SIGNALS: Final = 1 << 12


class _Request:
    """What a forked process is to run."""

    def __init__(self, program: int, descriptors: Sequence[int]) -> None:
        self.program = program
        self.descriptors = descriptors


def _serve(sock: socket.socket) -> _Request | None:
    """Fork until the other end is gone, and return None then; in a forked process, return what it is to run."""
    running: dict[int, int] = {}
    # A terminal's SIGINT is for the one that has started this, and ends what is forked.
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
                    _tell(sock, EXITED, running.pop(pid), os.waitstatus_to_exitcode(status))
        if sock not in readable:
            continue
        message = channel.receive(sock)
        if message is None:
            return None
        kind, contents, descriptors = message
        number, program = CONTENTS.unpack(contents)
        if kind == KILL:
            # One that is among these has not been waited for: the process id is still its own.
            for pid in [pid for pid, one in running.items() if one == number]:
                os.kill(pid, signal.SIGKILL)
            continue
        try:
            pid = os.fork()
        except OSError as error:
            _close(descriptors)
            _tell(sock, NOT_FORKED, number, error.errno or errno.EAGAIN)
            continue
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            for one in (sock, woken, wakes):
                one.close()
            return _Request(program, descriptors)
        _close(descriptors)
        running[pid] = number
        _tell(sock, FORKED, number, pid)


def _close(descriptors: Sequence[int]) -> None:
    for one in descriptors:
        os.close(one)


def _tell(sock: socket.socket, kind: bytes, number: int, said: int) -> None:
    sock.sendall(channel.framed(kind, CONTENTS.pack(number, said)))


def main(descriptor: int, programs: Sequence[str]) -> int:
    """Serve; in a forked process, run its program.  Return the exit code."""
    # A program may tell more (stacks.py); none ends of being asked where it stands.
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    found: list[tuple[str, Callable[..., int]]] = []
    for one in programs:
        name, _, module = one.partition("=")
        found.append((name, import_module(module).main))
    # What is imported stays: neither this process nor those that it becomes look through it for garbage.
    gc.collect()
    gc.freeze()
    try:
        request = _serve(socket.socket(fileno=descriptor))
    except (BrokenPipeError, ConnectionResetError):
        return 0
    if request is None:
        return 0
    name, program = found[request.program]
    # What `ps -o comm` and `top` show; the arguments stay this module's.
    with suppress(OSError):
        Path("/proc/self/comm").write_text(name)
    return program(*request.descriptors)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
