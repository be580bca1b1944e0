"""`pubsub status`: show the status, once or repeatedly, as a picture for people or as JSON for machines."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from catalog.figures import Warned
from pubsub.cli.measures import memory_words, size
from pubsub.errors import PubsubError
from pubsub.node.node import Node
from pubsub.node.status import STATE_WORDS, NodeStatus, SubscriptionStatus, TableStatus
from pubsub.texts import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from pubsub.cli.common import Common

_INTERVAL: Final = 1.0
_WIDE: Final = 250
#: How many tables are named at most where several wait for the same.
_NAMED: Final = 5


async def show(common: Common, *, watch: bool, as_json: bool) -> None:
    """Print the status once, or every second until interrupted.  Raises PubsubError."""
    try:
        async with Node(common.home, workers=False, make=False) as node:
            await (_show_json(node, watch=watch) if as_json else _show(common, node, watch=watch))
    except asyncio.CancelledError:
        if not watch:
            raise
        # Ctrl-C is a way to stop watching.


async def _show_json(node: Node, *, watch: bool) -> None:
    async for found in _statuses(node, watch=watch):
        print(json.dumps(found.as_json(), ensure_ascii=False), flush=True)


async def _show(common: Common, node: Node, *, watch: bool) -> None:
    from rich.console import Console

    # A pipe has no width; with a large one, lines are not broken.
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _WIDE)
    if watch and console.is_terminal:
        from pubsub.cli.watch import watch as on_screen

        await on_screen(node, console)
        return
    async for found in _statuses(node, watch=watch):
        console.print(picture(found, str(common.home)))
        console.file.flush()


async def _statuses(node: Node, *, watch: bool) -> AsyncIterator[NodeStatus]:
    """Yield the status once, or every second.  Raises PubsubError if it cannot be read at first; later that is printed."""
    found = await node.status()
    while True:
        yield found
        if not watch:
            return
        await asyncio.sleep(_INTERVAL)
        while True:
            try:
                found = await node.status()
                break
            except PubsubError as error:
                print(error.report(), file=sys.stderr, flush=True)
                await asyncio.sleep(_INTERVAL)


def line(text: str, style: str = "") -> Text:
    """Return a text that may hold anything as a line for a terminal."""
    from rich.text import Text

    return Text(printable(text), style=style)


def picture(found: NodeStatus, home: str) -> RenderableType:
    """Return the status as rich prints it."""
    from rich.console import Group

    daemon = f"daemon {found.daemon}" if found.daemon else "no daemon runs"
    if found.daemons:
        daemon = f"{len(found.daemons)} daemons"
    parts: list[RenderableType] = [
        line(
            f"node {found.node} in {home}, {daemon}, {found.time:%H:%M:%S} UTC", style="" if found.daemon else "yellow"
        )
    ]
    if found.memory is not None and not found.daemons:
        parts.append(line(f"memory: {memory_words(asdict(found.memory))}"))
    for one in found.daemons:
        memory = "" if one.memory is None else f", {memory_words(asdict(one.memory))}"
        parts.append(
            line(f"daemon {one.pid} on {one.host}{memory}: {', '.join(one.subscriptions) or 'no subscriptions'}")
        )
    if not found.subscriptions:
        parts.append(line("no subscriptions"))
    for subscription in found.subscriptions:
        parts.append(line(""))
        parts.extend(_subscription(subscription))
    return Group(*parts)


def _subscription(one: SubscriptionStatus) -> list[RenderableType]:
    from rich.table import Table

    heading = line(one.name, style="bold")
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
    parts: list[RenderableType] = [heading, line("  " + "  ".join(facts))]
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
        state = "stopped" if row.stopped else f"{row.state} {STATE_WORDS.get(row.state, '')}"
        table.add_row(
            line(row.name),
            line(state, style=style),
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
    parts += verified(one)
    for row in one.tables:
        if row.error:
            at = f", at {row.error_lsn}" if row.error_lsn is not None else ""
            parts += _failure(f"{row.name}{at}: {row.error}", row.hint, "    ")
        if row.foreign_commit:
            parts.append(line(f"    WARNING:  {row.name}: written by others ({row.foreign_commit})", style="yellow"))
    return parts


def verified(one: SubscriptionStatus) -> list[Text]:
    """Return lines that say what the last verification found; none if there was none."""
    found = [(row.name, row.verification) for row in one.tables if row.verification is not None]
    if not found:
        return []
    wrong = [name for name, verification in found if verification.equal is False]
    failed = [name for name, verification in found if verification.outcome == "failed" and name not in wrong]
    if not wrong and not failed:
        oldest = min(verification.finished for _, verification in found)
        equal = sum(verification.outcome == "equal" for _, verification in found)
        return [
            line(f"    verified: {equal} of {len(one.tables)} tables equal, at {oldest:%Y-%m-%d %H:%M:%S} UTC or later")
        ]
    parts = []
    if wrong:
        differ = "differs from the publisher's" if len(wrong) == 1 else "differ from the publisher's"
        hint = f"pubsub verify {one.name} names the rows; --repair copies them anew."
        parts += _warning(Warned(f"{_listed(wrong)} {differ}", hint=hint), "    ")
    if failed:
        reason = next(verification.reason for name, verification in found if name == failed[0])
        parts += _warning(Warned(f"{_listed(failed)} could not be verified", detail=reason), "    ")
    return parts


def _wait(wait: Warned, indent: str, who: str) -> list[Text]:
    """Return lines that say who waits for what; they are a warning if a person can end the wait (it has a hint)."""
    if wait.hint is not None:
        return _warning(replace(wait, message=f"{who}: {wait.message}"), indent)
    lines = [line(f"{indent}{who}: {wait.message}")]
    return lines + ([line(f"{indent}DETAIL:  {wait.detail}")] if wait.detail else [])


def _listed(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


def _warning(warning: Warned, indent: str) -> list[Text]:
    lines = [line(f"{indent}WARNING:  {warning.message}", style="yellow")]
    rest = [("DETAIL", warning.detail), ("HINT", warning.hint)]
    return lines + [line(f"{indent}{label}:  {text}") for label, text in rest if text]


def _failure(error: str | None, hint: str | None, indent: str, detail: str | None = None) -> list[Text]:
    lines = []
    if error:
        lines.append(line(f"{indent}ERROR:  {error}", style="red"))
    if error and detail:
        lines.append(line(f"{indent}DETAIL:  {detail}"))
    if error and hint:
        lines.append(line(f"{indent}HINT:  {hint}"))
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
