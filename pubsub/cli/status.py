"""`pubsub status`: shows the status, once or repeatedly, as a picture for people or as JSON for machines."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from catalog.records import Warned
from pubsub.node import Node
from pubsub.status import NodeStatus, SubscriptionStatus, TableStatus

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from pubsub.cli.common import Common

_INTERVAL: Final = 1.0
_WIDE: Final = 250
#: How many tables are named at most where several wait for the same.
_NAMED: Final = 5
_STATES: Final = {
    "i": "waiting to be copied",
    "d": "being copied",
    "f": "copied",
    "w": "waiting for apply",
    "c": "catching up",
    "s": "synchronized",
    "r": "ready",
}


async def show(common: Common, *, watch: bool, as_json: bool) -> None:
    """Print the status once, or every second until interrupted.  Raises PubsubError."""
    async with Node(common.home, workers=False, make=False) as node:
        if as_json:
            while True:
                print(json.dumps((await node.status()).as_json(), ensure_ascii=False), flush=True)
                if not watch:
                    return
                await asyncio.sleep(_INTERVAL)
        await _show(common, node, watch=watch)


async def _show(common: Common, node: Node, *, watch: bool) -> None:
    from rich.console import Console

    # A pipe has no width; with a large one, lines are not broken.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    if not watch:
        console.print(picture(await node.status(), str(common.home)))
        return
    from rich.live import Live

    try:
        if not console.is_terminal:
            while True:
                console.print(picture(await node.status(), str(common.home)))
                console.file.flush()
                await asyncio.sleep(_INTERVAL)
        with Live(console=console, auto_refresh=False, screen=True) as live:
            while True:
                live.update(picture(await node.status(), str(common.home)), refresh=True)
                await asyncio.sleep(_INTERVAL)
    except asyncio.CancelledError:
        return  # Ctrl-C is the way to stop watching


def picture(found: NodeStatus, home: str) -> RenderableType:
    """Return the status as rich prints it."""
    from rich.console import Group
    from rich.text import Text

    daemon = f"daemon {found.daemon}" if found.daemon else "no daemon runs"
    parts: list[RenderableType] = [
        Text(
            f"node {found.node} in {home}, {daemon}, {found.time:%H:%M:%S} UTC", style="" if found.daemon else "yellow"
        )
    ]
    if not found.subscriptions:
        parts.append(Text("no subscriptions"))
    for subscription in found.subscriptions:
        parts.append(Text())
        parts.extend(_subscription(subscription))
    return Group(*parts)


def _subscription(one: SubscriptionStatus) -> list[RenderableType]:
    from rich.table import Table
    from rich.text import Text

    heading = Text(one.name, style="bold")
    heading.append("" if one.enabled else "  disabled", style="yellow")
    unknown = f"unknown since {one.lag_unknown_since:%Y-%m-%d %H:%M:%S} UTC" if one.lag_unknown_since else "unknown"
    lag = f"lag {behind(one.lag_bytes, one.lag_seconds, unknown)}"
    facts = [
        f"slot {one.slot or '(none)'}",
        f"received {one.received_lsn or '-'}",
        f"durable {one.flush_lsn or '-'}",
        f"publisher {one.publisher_lsn or '-'}",
        lag,
        f"WAL retained {size(one.retained_wal_bytes)}",
        f"workers {one.workers}",
    ]
    measured = [row for row in one.tables if row.live_bytes is not None]
    if measured:
        live, old, logs = (
            sum(getattr(row, name) for row in measured) for name in ("live_bytes", "retained_bytes", "log_bytes")
        )
        facts.append(f"Delta {size(live)}, old files {size(old)}, logs {size(logs)}")
    parts: list[RenderableType] = [heading, Text("  " + "  ".join(facts))]
    parts += _failure(one.error, one.hint, "  ", one.detail)
    if one.waiting is not None:
        parts += _wait(one.waiting, "  ", "apply worker")
    for warning in one.warnings:
        parts += _warning(warning, "  ")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column("table")
    table.add_column("state")
    table.add_column("LSN")
    table.add_column("rows", justify="right")
    table.add_column("lag", justify="right")
    for row in one.tables:
        style = "red" if row.error else "green" if row.state == "r" else ""
        state = "stopped" if row.stopped else f"{row.state} {_STATES.get(row.state, '')}"
        table.add_row(
            Text(row.name),
            Text(state, style=style),
            str(row.lsn or "-"),
            rows(row),
            behind(row.lag_bytes, row.lag_seconds, "-"),
        )
    if one.tables:
        parts.append(table)
    waiting: dict[Warned, list[str]] = {}
    for row in one.tables:
        if row.waiting is not None and row.waiting != one.waiting:
            waiting.setdefault(row.waiting, []).append(row.name)
    for wait, names in waiting.items():
        parts += _wait(wait, "    ", _listed(names))
    for row in one.tables:
        if row.error:
            at = f", at {row.error_lsn}" if row.error_lsn is not None else ""
            parts += _failure(f"{row.name}{at}: {row.error}", row.hint, "    ")
        if row.foreign_commit:
            parts.append(Text(f"    WARNING:  {row.name}: written by others ({row.foreign_commit})", style="yellow"))
    return parts


def _wait(wait: Warned, indent: str, who: str) -> list[Text]:
    """Return lines that say who waits for what; they are a warning if a person can end the wait (it has a hint)."""
    from rich.text import Text

    if wait.hint is not None:
        return _warning(replace(wait, message=f"{who}: {wait.message}"), indent)
    lines = [Text(f"{indent}{who}: {wait.message}")]
    return lines + ([Text(f"{indent}DETAIL:  {wait.detail}")] if wait.detail else [])


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _warning(warning: Warned, indent: str) -> list[Text]:
    from rich.text import Text

    lines = [Text(f"{indent}WARNING:  {warning.message}", style="yellow")]
    rest = [("DETAIL", warning.detail), ("HINT", warning.hint)]
    return lines + [Text(f"{indent}{label}:  {text}") for label, text in rest if text]


def _failure(error: str | None, hint: str | None, indent: str, detail: str | None = None) -> list[Text]:
    from rich.text import Text

    lines = []
    if error:
        lines.append(Text(f"{indent}ERROR:  {error}", style="red"))
    if error and detail:
        lines.append(Text(f"{indent}DETAIL:  {detail}"))
    if error and hint:
        lines.append(Text(f"{indent}HINT:  {hint}"))
    return lines


def rows(table: TableStatus) -> str:
    """Format how many rows the table holds, or has copied of the publisher's estimate, which may be too low."""
    if table.state not in ("i", "d"):
        return "-" if table.rows is None else f"{table.rows:,}"
    if table.rows_copied is None:
        return "-"
    if table.rows_estimated is None:
        return f"{table.rows_copied:,} of unknown"
    return f"{table.rows_copied:,} of ~{table.rows_estimated:,}" if table.rows_estimated else f"{table.rows_copied:,}"


def behind(nbytes: int | None, seconds: float | None, unknown: str = "unknown") -> str:
    """Format a lag in bytes and seconds."""
    if nbytes is None:
        return unknown
    return size(nbytes) if seconds is None else f"{size(nbytes)}, {seconds:.1f} s"


def size(count: int | None) -> str:
    """Format bytes for people (dbsize.c: pg_size_pretty, with one decimal)."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"
