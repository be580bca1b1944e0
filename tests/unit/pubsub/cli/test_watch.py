"""`pubsub status --watch`: the screen at every size, its keys, where it takes its document from, and a real terminal."""

from __future__ import annotations

import asyncio
import fcntl
import os
import pty
import re
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.cells import cell_len

from catalog.records import NewRelation, NewSubscription
from catalog.store import Catalog
from pubsub.cli import status, watch
from pubsub.cli.common import Common
from pubsub.cli.screen import View, lines, spark
from pubsub.cli.watch import Left, Source, press, read_keys
from pubsub.errors import PubsubError
from pubsub.monitoring.document import Query, document
from pubsub.node.status import from_state
from pubsub.setting_tables import HttpSettings
from pubsub.sql.options import SubscriptionOptions
from pubsub.texts import printable
from tests.support.watched_node import HOSTILE, observed, picture, served

PATIENCE = 300.0


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    now = datetime.now(UTC)
    return document(picture(now), observed(now), Query(limit=200), 60)


def screen(found: dict[str, Any], width: int, height: int) -> tuple[list[str], View]:
    view = View(Query())
    return [line.plain for line in lines(found, view, width, height)], view


def test_the_screen_has_what_the_page_has(found: dict[str, Any]) -> None:
    shown, view = screen(found, 200, 60)
    text = "\n".join(shown)
    for part in (
        "pubsub  node 7438921  2 of 3 do not follow  daemon 4711",
        "memory: Python 412.0 MB, JVM 1.0 GB, heap 300.0 MB of 2.0 GB",
        "shop  tables have stopped  lag ",
        "994 of 1,000 tables follow  Delta 165.6 GB  WAL kept 84.0 MB  at 0/16B3748",
        "WARNING:  the slot of another subscriber retains 12 GB",
        "billing  failing  lag unknown",
        "ERROR:  could not connect to the publisher",
        "HINT:  Is the server running there?",
        "archive  disabled",
        "public.stock_0007",
        "of ~60,000,000 rows, about",
        'ERROR:  at 0/16B0000: value "1e400" of column "price" does not fit double precision',
        "WARNING:  differs from the publisher's: 2 missing, 0 extra, 1 different",
        "follower  served here  in use  confirmed 0/16B3000  server at 0/16B4100  WAL kept 16.2 kB",
        "error   worker failed (41 times)  subscription=billing",
    ):
        assert part in text, text
    assert re.search(r"lag [▁-█ ]+ max 6\.\d s .* rows/s [▁-█ ]+ max 1,\d\d\d", text)
    assert f"tables  1-{view.shown} of 1,004" in text
    assert text.count(" ago") >= view.shown - 3, "when each was committed to last"


@pytest.mark.parametrize("hostile", [False, True])
def test_it_fills_a_terminal_of_any_size_and_no_more(hostile: bool) -> None:
    now = datetime.now(UTC)
    of_many = document(picture(now, 60, hostile=hostile), observed(now, hostile=hostile), Query(limit=200), 60)
    empty = document(picture(now, 0), observed(now - timedelta(days=9)), Query(search="none"), 60)
    for one in (of_many, empty):
        for width in (1, 20, 79, 80, 100, 131, 400):
            for height in (1, 2, 3, 8, 24, 50, 300):
                shown, view = screen(one, width, height)
                assert len(shown) == height
                assert all(cell_len(line) <= width for line in shown)
                assert not re.search(r"[\x00-\x1f\x7f-\x9f\u202a-\u202e]", "".join(shown))
                if one is of_many and height >= 50:
                    assert view.shown > 2
    shown, _ = screen(of_many, 80, 24)
    table = next(line for line in shown if line.startswith("  table"))
    assert ("last commit" in table, "rows" in table, "lag" in table) == (False, True, False)


def test_names_are_shown_without_what_a_terminal_would_do() -> None:
    assert printable("a\x1b[2Jb\x07\x9b\tc\nd\u202ee") == "a␛[2Jb␇\ufffd\tc\nd\ufffde"
    assert printable("Größe 表 🙂") == "Größe 表 🙂"
    now = datetime.now(UTC)
    text = "\n".join(screen(document(picture(now, 40, hostile=True), observed(now), Query(limit=99), 60), 900, 90)[0])
    for one in HOSTILE[:4]:
        assert text.count(one) >= 2


def test_a_line_of_blocks_is_scaled_and_has_gaps() -> None:
    assert spark([0, 7, None, 14], 4, max) == "▁▅ █"
    assert spark([0, 7, None, None, 14, 14], 3, max) == "▅ █"
    assert spark([None, None], 2, max) == "  "
    assert spark([0, 0], 9, max) == "▁▁"


def test_keys_move_choose_and_search() -> None:
    view = View(Query(limit=40), shown=10)

    def typed(data: bytes) -> Query:
        for key in read_keys(data):
            press(view, key, 1000)
        return view.query

    assert typed(b"\x1b[B\x1bOBj").offset == 3
    assert typed(b"\x1b[6~").offset == 13
    assert typed(b"k\x1b[5~\x1b[5~").offset == 0
    view.query = Query(offset=995)
    assert typed(b"\x1b[6~").offset == 999, "the last table stays in sight"
    assert typed(b"g").offset == 0
    assert typed(b"s").show == "trouble"
    assert typed(b"sss").show == "all"
    assert typed(b"oo").order == "rows"
    assert typed(b"h").span == "day"
    assert typed("/öq\x7fx".encode()).search == "öx"
    assert view.typing
    assert typed(b"\n").search == "öx"
    assert not view.typing
    assert typed(b"/").search == "öx"
    assert typed(b"\x1b").search == ""
    assert typed(b"\xff\x00\x1b[Z~").show == "all", "what has no meaning does nothing"
    with pytest.raises(Left):
        typed(b"q")


def node(home: Path, listen: str | None, *, page: bool = True) -> Any:
    async def state() -> Any:
        return picture(datetime.now(UTC), 3).state

    settings = SimpleNamespace(http=HttpSettings(listen=listen, page=page))
    return SimpleNamespace(home=home, settings=settings, state=state)


async def test_the_daemon_is_asked_where_it_listens_and_the_catalog_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "running_daemon", lambda home: 4711)
    with served(7) as url:
        place = url.split("/")[2]
        asked = Source(node(tmp_path, place))
        found = await asked.get(Query(search="orders"))
        assert (found["tables_matching"], found["tables_total"]) == (1, 11)
        assert (found["events"] != [], found["slots_total"], asked.note) == (True, 4, "")
        without = Source(node(tmp_path, place, page=False))
        found = await without.get(Query())
        assert (found["tables_total"], found["events"], found["slots_total"]) == (7, [], 3)
        assert "set [http] listen" in without.note
        # The port is another node's now, or nobody's, or not known.
        monkeypatch.setattr(watch, "running_daemon", lambda home: 1)
        assert (await asked.get(Query()))["tables_total"] == 7
    for listen in (place, "127.0.0.1:0", None):
        assert (await Source(node(tmp_path, listen)).get(Query()))["tables_total"] == 7


class Outage(Exception):
    """Ends a loop that goes on for ever."""


def failing(tmp_path: Path, answers: list[Any]) -> Any:
    """A node whose catalog answers, or fails, in this order."""
    one = node(tmp_path, None)
    healthy = one.state

    async def state() -> Any:
        answer = answers.pop(0)
        if isinstance(answer, BaseException):
            raise answer
        return await healthy()

    async def status() -> Any:
        return from_state(await state(), None)

    one.state, one.status = state, status
    return one


async def test_an_outage_of_the_catalog_leaves_the_last_picture(tmp_path: Path) -> None:
    gone = PubsubError("could not access the catalog: refused\x1b[2J")
    source = Source(failing(tmp_path, [None, gone, gone, None]))
    first = await source.get(Query())
    assert "could not" not in source.note
    for _ in range(2):
        assert await source.get(Query()) == first
        assert "could not access the catalog: refused␛[2J" in source.note
    assert (await source.get(Query()))["time"] != first["time"]
    assert "could not" not in source.note
    with pytest.raises(PubsubError, match="could not access"):
        await Source(failing(tmp_path, [gone])).get(Query())


@pytest.mark.parametrize("as_json", [True, False])
async def test_an_outage_of_the_catalog_does_not_end_what_a_pipe_gets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], as_json: bool
) -> None:
    monkeypatch.setattr(status, "_INTERVAL", 0)
    gone = PubsubError("could not access the catalog: refused", hint="Look.")
    show = partial(status._show_json) if as_json else partial(status._show, Common(tmp_path, verbose=False))
    with pytest.raises(Outage):
        await show(failing(tmp_path, [None, gone, None, Outage()]), watch=True)
    out, errors = capsys.readouterr()
    assert errors == "ERROR:  could not access the catalog: refused\nHINT:  Look.\n"
    assert len(re.findall(r'"node": "7438921"|node 7438921', out)) == 2
    with pytest.raises(PubsubError, match="could not access"):
        await show(failing(tmp_path, [gone]), watch=True)


# A real terminal


@pytest.fixture
def home(tmp_path: Path) -> Path:
    async def make() -> None:
        async with await Catalog.open(tmp_path / "catalog.db") as catalog:
            new = NewSubscription("followed", "host=h", ("p",), SubscriptionOptions(), "s", "s", False)
            tables = [NewRelation(n, "public", f"t{n}", str(tmp_path / f"t{n}")) for n in range(100, 200)]
            await catalog.create_subscription(new, tables)

    asyncio.run(make())
    return tmp_path


class Terminal:
    """`pubsub status --watch` in a terminal of 100 times 30."""

    def __init__(self, home: Path) -> None:
        self._ours, theirs = pty.openpty()
        os.set_blocking(self._ours, False)
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
        self.before = termios.tcgetattr(theirs)
        self.theirs = theirs
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pubsub.cli", "--home", str(home), "status", "--watch"],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509
            env={**os.environ, "TERM": "xterm-256color"},
        )
        self.said = b""

    def press(self, keys: bytes) -> None:
        os.write(self._ours, keys)

    def until(self, condition: Callable[[bytes], object]) -> None:
        end = time.monotonic() + PATIENCE
        while not condition(self.said):
            assert time.monotonic() < end, self.said[-3000:]
            try:
                self.said += os.read(self._ours, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)

    def ended(self) -> int:
        end = time.monotonic() + PATIENCE
        while self.process.poll() is None:
            assert time.monotonic() < end
            self.until(lambda said: True)
            try:
                self.said += os.read(self._ours, 1 << 16)
            except BlockingIOError:
                time.sleep(0.02)
        with suppress(BlockingIOError):
            self.said += os.read(self._ours, 1 << 16)
        return self.process.returncode

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._ours)
        os.close(self.theirs)


@pytest.fixture
def terminal(home: Path) -> Iterator[Terminal]:
    one = Terminal(home)
    try:
        yield one
    finally:
        one.close()


ENTERED, LEFT = b"\x1b[?1049h", b"\x1b[?1049l"


@pytest.mark.parametrize("way", [b"q", b"\x03"], ids=["q", "Ctrl-C"])
def test_a_terminal_gets_a_screen_and_is_given_back_as_it_was(terminal: Terminal, way: bytes) -> None:
    terminal.until(lambda said: b"no daemon runs" in said and b"public.t100" in said)
    assert terminal.said.startswith(ENTERED)
    assert LEFT not in terminal.said
    terminal.press(b"/t15")
    terminal.until(lambda said: b"  1-10 of 10 that match, 100 in all" in said)
    terminal.press(b"\r\x1b[B")
    terminal.until(lambda said: b"  2-10 of 10 that match" in said)
    fcntl.ioctl(terminal.theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 12, 60, 0, 0))
    terminal.process.send_signal(signal.SIGWINCH)
    terminal.press(way)
    assert terminal.ended() == 0
    assert terminal.said.rindex(LEFT) > terminal.said.rindex(ENTERED)
    assert b"Traceback" not in terminal.said
    assert termios.tcgetattr(terminal.theirs) == terminal.before


def test_a_pipe_gets_plain_lines(home: Path) -> None:
    command = [sys.executable, "-m", "pubsub.cli", "--home", str(home), "status", "--watch"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        assert running.stdout is not None
        seen = []
        for said in running.stdout:
            seen.append(said.decode())
            if sum(one.startswith("node ") for one in seen) == 3:
                break
        running.send_signal(signal.SIGINT)
        rest, errors = running.communicate(timeout=PATIENCE)
    assert running.returncode == 0, errors
    assert "\x1b" not in "".join(seen) + rest.decode()
    assert sum(one.lstrip().startswith("public.t100 ") for one in seen) == 2


def test_type_of_the_node_is_what_the_source_needs() -> None:
    """The stand-in above has what Source uses of a node."""
    used = set(re.findall(r"self\._node\.(\w+)", Path(watch.__file__).read_text()))
    assert used <= set(vars(cast(Any, node(Path(), None))))
