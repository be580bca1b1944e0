"""The demo's output: a live table on a terminal, else a line every few seconds."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pubsub.demo.figures import Rate
from pubsub.demo.node import Status

_LINE_SECONDS: Final = 5.0
_STATES: Final = {
    "i": "i  waiting",
    "d": "d  copying",
    "f": "f  copied",
    "w": "w  waits for apply",
    "c": "c  catches up",
    "s": "s  synchronized",
    "r": "r  follows",
}


@dataclass(frozen=True, slots=True)
class TableLine:
    """One table of the live view."""

    name: str
    state: str
    copied: int | None
    estimated: int | None
    copy_rate: float
    error: str | None


@dataclass(frozen=True, slots=True)
class SubscriptionLine:
    """One subscription of the live view; lags are None and rates 0 until known."""

    name: str
    lag_seconds: float | None
    lag_bytes: int | None
    applied: int
    apply_rate: float
    error: str | None
    tables: tuple[TableLine, ...]


class Reader:
    """Turns status documents into lines: a document has counts, the view shows rates."""

    def __init__(self) -> None:
        self.applied: dict[str, Rate] = {}
        self._copied: dict[tuple[str, str], Rate] = {}

    def read(self, status: Status, now: float) -> list[SubscriptionLine]:
        """Return the lines for a document read at `now` (seconds)."""
        return [self._subscription(found, now) for found in status["subscriptions"]]

    def _subscription(self, found: Status, now: float) -> SubscriptionLine:
        name = found["name"]
        applied = int(found.get("rows_applied") or 0)
        return SubscriptionLine(
            name,
            found["lag_seconds"],
            found["lag_bytes"],
            applied,
            self.applied.setdefault(name, Rate(5.0)).add(now, applied),
            found["error"],
            tuple(self._table(name, table, now) for table in found["tables"]),
        )

    def _table(self, subscription: str, found: Status, now: float) -> TableLine:
        copied = found["rows_copied"]
        rate = self._copied.setdefault((subscription, found["name"]), Rate(3.0)).add(now, copied or 0)
        return TableLine(
            found["name"],
            found["state"],
            copied,
            found["rows_estimated"],
            rate if found["state"] == "d" else 0.0,
            found["error"],
        )


class Screen:
    """The demo's output.  `quiet` omits the live view."""

    def __init__(self, *, quiet: bool, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self._quiet = quiet
        self._live: Live | None = None
        self._began = time.monotonic()
        self._reader = Reader()
        self._document: Status | None = None
        self._lines: list[SubscriptionLine] = []
        self._last_line = -_LINE_SECONDS

    @property
    def reader(self) -> Reader:
        """The reader, which has the rates so far."""
        return self._reader

    @property
    def seconds(self) -> float:
        """The time since the demo began."""
        return time.monotonic() - self._began

    def step(self, text: str) -> None:
        """Announce a step of the demo."""
        self.console.print(Text(f"[{self.seconds:5.1f} s] ", style="dim").append(text, style="bold"), soft_wrap=True)

    def say(self, text: str) -> None:
        """Print plain text unchanged: a program's output, figures, commands."""
        self.console.print(Text(text), soft_wrap=True)

    def fail(self, text: str) -> None:
        """Print an error."""
        self.console.print(Text(text, style="red"), soft_wrap=True)

    def show(self, status: Status, doing: str) -> None:
        """Show a status document in the live view; `doing` names the current activity."""
        if status is not self._document:
            self._document = status
            self._lines = self._reader.read(status, time.monotonic())
        if self._quiet:
            return
        if self.console.is_terminal:
            if self._live is None:
                self._live = Live(console=self.console, auto_refresh=False, transient=False)
                self._live.start()
            self._live.update(picture(self._lines, f"{self.seconds:5.1f} s  {doing}"), refresh=True)
        elif self.seconds - self._last_line >= _LINE_SECONDS:
            self._last_line = self.seconds
            for line in summaries(self._lines):
                self.say(f"          {line}")

    def end_live(self) -> None:
        """Freeze the live view; later output is printed below it."""
        if self._live is not None:
            self._live.stop()
            self._live = None


def summaries(lines: Sequence[SubscriptionLine]) -> list[str]:
    """Return a line for each subscription, for output that is not a terminal."""
    found = []
    for line in lines:
        states = "".join(table.state for table in line.tables)
        copied = sum(table.copied or 0 for table in line.tables)
        copying = sum(table.copy_rate for table in line.tables)
        parts = [f"{line.name}: {states}", f"copied {copied:,} rows"]
        if copying:
            parts.append(f"{copying:,.0f} rows/s")
        parts += [f"applied {line.applied:,} changes", f"{line.apply_rate:,.0f}/s", f"lag {_lag(line)}"]
        found.append("  ".join(parts) + (f"  ERROR: {line.error}" if line.error else ""))
    return found


def picture(lines: Sequence[SubscriptionLine], heading: str) -> Group:
    """Return the live view."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("subscription", "table", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("rows copied", "rows/s", "changes", "changes/s", "lag"):
        table.add_column(name, justify="right", no_wrap=True)
    failures = []
    for line in lines:
        table.add_row(
            Text(line.name, style="bold"),
            "",
            "",
            "",
            "",
            f"{line.applied:,}",
            f"{line.apply_rate:,.0f}",
            _lag(line),
        )
        for one in line.tables:
            style = "red" if one.error else "green" if one.state == "r" else "yellow" if one.state != "i" else "dim"
            table.add_row(
                "",
                Text(one.name),
                Text(_STATES.get(one.state, one.state), style=style),
                _copied(one),
                f"{one.copy_rate:,.0f}" if one.copy_rate else "",
                "",
                "",
                "",
            )
        errors = [line.error] if line.error else []
        errors += [f"{one.name}: {one.error}" for one in line.tables if one.error]
        failures += [Text(f"{line.name}: {error}", style="red") for error in errors]
    return Group(Text(heading, style="bold"), table, *failures)


def _copied(table: TableLine) -> str:
    if table.copied is None:
        return f"of ~{table.estimated:,}" if table.estimated else ""
    if table.state == "d" and table.estimated:
        return f"{table.copied:,} of ~{table.estimated:,}"
    return f"{table.copied:,}"


def _lag(line: SubscriptionLine) -> str:
    if line.lag_seconds is None:
        return "-"
    size = "" if not line.lag_bytes else f" {line.lag_bytes / 1024:,.0f} kB"
    return f"{line.lag_seconds:.1f} s{size}"
