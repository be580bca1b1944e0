"""`pubsub status --watch` on a terminal: the screen, drawn again every second or two, and its keys.

What is shown comes from the daemon by [http], if it listens at a known port and has the page; otherwise from the catalog, with
the lag and throughput that this command has seen itself, and without what only the daemon knows: its own slots, and its events.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from rich.console import Group
from rich.live import Live

from catalog.home_lock import running_daemon
from pubsub.cli.screen import View, lines
from pubsub.errors import PubsubError
from pubsub.monitoring.document import Observed, Query, document
from pubsub.monitoring.history import STEPS
from pubsub.monitoring.picture import Picture
from pubsub.node.status import from_state
from pubsub.texts import printable

if TYPE_CHECKING:
    from rich.console import Console

    from pubsub.cli.screen import Document
    from pubsub.node.node import Node

#: Seconds from screen to screen: of the catalog, and of the daemon.
_CATALOG: Final = 1.0
_DAEMON: Final = 2.0
_PATIENCE: Final = 5.0
_ANY: Final = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}  # noqa: S104
_SHOW: Final = ("all", "trouble", "copying", "following")
_ORDER: Final = ("attention", "name", "rows", "size", "lag", "committed")
_SEQUENCES: Final = {
    b"\x1b[A": "up", b"\x1bOA": "up", b"\x1b[B": "down", b"\x1bOB": "down", b"\x1b[5~": "page up", b"\x1b[6~": "page down",
    b"\x1b[H": "first", b"\x1bOH": "first", b"\x1b[1~": "first", b"\x1b": "escape",
}  # fmt: skip
_MEANS: Final = {
    "k": "up",
    "j": "down",
    " ": "page down",
    "b": "page up",
    "g": "first",
    "\n": "enter",
    "\r": "enter",
    "\x7f": "erase",
}


class Left(Exception):
    """The person has pressed q."""


class Source:
    """Where the documents come from."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._observed = Observed()
        self.interval = _CATALOG
        self.note = ""
        self._last: Document | None = None

    async def get(self, query: Query) -> Document:
        """Return the document, and set `interval` and `note`.

        While the catalog cannot be read it is the last one, and the note says so.  Raises PubsubError if there is none.
        """
        try:
            self._last = await self._get(query)
        except PubsubError as error:
            if self._last is None:
                raise
            self.interval, self.note = _CATALOG, f"not from now: {printable(error.message)}"
        return self._last

    async def _get(self, query: Query) -> Document:
        settings = self._node.settings.http
        place = settings.place() if settings.page else None
        daemon = running_daemon(self._node.home)
        if daemon is not None and place is not None and place[1] != 0:
            found = await asyncio.to_thread(_ask, place, query)
            # Another node's daemon may have the port.
            if found is not None and found["daemon"] == daemon:
                self.interval, self.note = _DAEMON, ""
                return found
        state = await self._node.state()
        picture = Picture(state, from_state(state, daemon), {})
        self._observed.sample(picture)
        self.interval = _CATALOG
        self.note = "slots here and events: set [http] listen" if daemon is not None else ""
        return document(picture, self._observed, query, settings.ready_lag)


def _ask(place: tuple[str, int], query: Query) -> Document | None:
    """Ask the daemon for its document; None if it does not answer as one."""
    connection = http.client.HTTPConnection(_ANY.get(place[0], place[0]), place[1], timeout=_PATIENCE)
    try:
        connection.request("GET", f"/status.json?{urlencode(asdict(query))}")
        answer = connection.getresponse()
        found: Any = json.loads(answer.read()) if answer.status == 200 else None
    except (OSError, http.client.HTTPException, ValueError):
        return None
    finally:
        connection.close()
    return found if isinstance(found, dict) and found.get("version") == 1 else None


async def watch(node: Node, console: Console) -> None:
    """Show the node until q is pressed.  Raises PubsubError if it cannot be read at first, and CancelledError after Ctrl-C."""
    source, view = Source(node), View(Query())
    wake = asyncio.Event()
    keys: asyncio.Queue[str] = asyncio.Queue(1000)
    loop = asyncio.get_running_loop()

    def typed() -> None:
        data = os.read(sys.stdin.fileno(), 1024)
        if not data:
            loop.remove_reader(sys.stdin.fileno())
        for key in read_keys(data):
            with suppress(asyncio.QueueFull):
                keys.put_nowait(key)
        wake.set()

    with _terminal(), Live(console=console, auto_refresh=False, screen=True) as live, suppress(Left):
        loop.add_signal_handler(signal.SIGWINCH, wake.set)
        if sys.stdin.isatty():
            loop.add_reader(sys.stdin.fileno(), typed)
        try:
            while True:
                height = console.size.height
                view.query = replace(view.query, limit=min(200, max(1, height)))
                found = await source.get(view.query)
                view.query = replace(view.query, offset=found["tables_offset"])
                shown = lines(found, view, console.size.width, console.size.height, source.note)
                live.update(Group(*shown), refresh=True)
                wake.clear()
                if keys.empty():
                    with suppress(TimeoutError):
                        async with asyncio.timeout(source.interval):
                            await wake.wait()
                while not keys.empty():
                    press(view, keys.get_nowait(), found["tables_matching"])
        finally:
            loop.remove_signal_handler(signal.SIGWINCH)
            if sys.stdin.isatty():
                loop.remove_reader(sys.stdin.fileno())


def read_keys(data: bytes) -> Iterator[str]:
    """Yield the keys that a terminal has sent: names of those that have one here, else the characters."""
    while data:
        sequence = next((one for one in _SEQUENCES if data.startswith(one)), None)
        if sequence is not None:
            yield _SEQUENCES[sequence]
            data = data[len(sequence) :]
            continue
        number = next((n for n in range(1, 5) if _decodes(data[:n])), 1)
        yield data[:number].decode(errors="replace")
        data = data[number:]


def _decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def press(view: View, key: str, matching: int) -> None:
    """Do what a key asks for, with so many tables `matching`.  Raises Left."""
    query = view.query
    if view.typing:
        means = _MEANS.get(key, key) if not key.isprintable() else key
        if means in ("enter", "escape"):
            view.typing = False
            search = query.search if means == "enter" else ""
        elif means == "erase":
            search = query.search[:-1]
        else:
            search = (query.search + key)[:100] if len(key) == 1 and key.isprintable() else query.search
        view.query = replace(query, search=search, offset=query.offset if search == query.search else 0)
        return
    means = _MEANS.get(key, key)
    last = max(0, matching - 1)
    moves = {
        "up": -1,
        "down": 1,
        "page up": -max(1, view.shown),
        "page down": max(1, view.shown),
        "first": -query.offset,
    }
    match means:
        case "q":
            raise Left
        case "/":
            view.typing = True
        case "s":
            view.query = replace(query, show=_after(_SHOW, query.show), offset=0)
        case "o":
            view.query = replace(query, order=_after(_ORDER, query.order), offset=0)
        case "h":
            view.query = replace(query, span=_after(tuple(STEPS), query.span))
        case "escape":
            view.query = replace(query, search="", offset=0)
        case _ if means in moves:
            view.query = replace(query, offset=min(last, max(0, query.offset + moves[means])))


def _after(every: tuple[str, ...], one: str) -> str:
    return every[(every.index(one) + 1) % len(every)]


@contextmanager
def _terminal() -> Iterator[None]:
    """Have keys come one by one, without an echo, while the body runs; Ctrl-C interrupts as ever."""
    if not sys.stdin.isatty():
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
