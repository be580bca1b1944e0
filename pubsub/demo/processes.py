"""Processes and their descendants, from /proc."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Final

_END_SECONDS: Final = 20.0


def descendants(pid: int) -> list[int]:
    """Return the children of a process, their children, and so on."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (status := _status(int(entry.name))) is not None:
            children.setdefault(status[1], []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        below = children.get(todo.pop(), [])
        found += below
        todo += below
    return found


def jvm_of(pid: int) -> int | None:
    """Return the java process among the descendants of `pid`, if there is one."""
    return next((child for child in descendants(pid) if name_of(child) == "java"), None)


def name_of(pid: int) -> str:
    """Return the name of a process's program, cut to 15 characters; empty if the process is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def kill_tree(pid: int) -> None:
    """Kill a process and all its descendants with kill -9; wait at most 20 seconds until they are gone."""
    seen: set[int] = set()
    # Suspended first, so that none of them starts another process that would be missed.
    while new := {pid, *descendants(pid)} - seen:
        for each in new:
            _signal(each, signal.SIGSTOP)
        seen |= new
    for each in seen:
        _signal(each, signal.SIGKILL)
    deadline = time.monotonic() + _END_SECONDS
    while any(is_alive(each) for each in seen) and time.monotonic() < deadline:
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process is running; a zombie is not."""
    status = _status(pid)
    return status is not None and status[0] != "Z"


def memory(pid: int, name: str, file: str = "status") -> int:
    """Return a size such as VmHWM from /proc/PID/status or another `file` (proc(5)), in bytes.

    It is 0 if the process is gone.
    """
    try:
        match = re.search(rf"^{name}:\s+(\d+) kB", Path(f"/proc/{pid}/{file}").read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) << 10 if match else 0


def _status(pid: int) -> tuple[str, int] | None:
    """Return a process's state and parent; None if there is no such process."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # proc(5): the name is in parentheses and may contain anything.
    state, parent = text.rpartition(")")[2].split()[:2]
    return state, int(parent)


def _signal(pid: int, number: signal.Signals) -> None:
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        return
