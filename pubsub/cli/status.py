"""`pubsub status`: for people a picture that can be watched, for machines JSON (interface.md)."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, Final

from pubsub.node import Node
from pubsub.status import NodeStatus, SubscriptionStatus, TableStatus

if TYPE_CHECKING:
    from pubsub.cli.app import Common

_INTERVAL: Final = 1.0
_STATES: Final = {
    "i": "waiting to be copied",
    "d": "being copied",
    "f": "copied",
    "s": "synchronized",
    "r": "ready",
}


async def show(common: Common, *, watch: bool, as_json: bool) -> None:
    """Print it once, or every second until interrupted.  Raises PubsubError."""
    async with Node(common.home, workers=False) as node:
        if as_json:
            while True:
                print(json.dumps((await node.status()).as_json(), ensure_ascii=False), flush=True)
                if not watch:
                    return
                await asyncio.sleep(_INTERVAL)
        await _show(common, node, watch=watch)


async def _show(common: Common, node: Node, *, watch: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not watch:
        console.print(picture(await node.status(), str(common.home)))
        return
    from rich.live import Live

    try:
        with Live(console=console, auto_refresh=False, screen=sys.stdout.isatty()) as live:
            while True:
                live.update(picture(await node.status(), str(common.home)), refresh=True)
                await asyncio.sleep(_INTERVAL)
    except asyncio.CancelledError:
        return  # Ctrl-C is how one stops to watch


def picture(found: NodeStatus, home: str) -> Any:
    """The status as something that rich prints."""
    from rich.console import Group
    from rich.text import Text

    daemon = f"daemon {found.daemon}" if found.daemon else "no daemon runs"
    parts: list[Any] = [
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


def _subscription(one: SubscriptionStatus) -> list[Any]:
    from rich.table import Table
    from rich.text import Text

    heading = Text(one.name, style="bold")
    heading.append("" if one.enabled else "  disabled", style="yellow")
    lag = (
        f"lag {size(one.lag_bytes)}, {one.lag_seconds:.1f} s"
        if one.lag_bytes is not None and one.lag_seconds is not None
        else "lag unknown"
    )
    facts = [
        f"slot {one.slot or '(none)'}",
        f"received {one.received_lsn or '-'}",
        f"durable {one.flush_lsn or '-'}",
        f"publisher {one.publisher_lsn or '-'}",
        lag,
        f"WAL retained {size(one.retained_wal_bytes)}",
        f"workers {one.workers}",
    ]
    parts: list[Any] = [heading, Text("  " + "  ".join(facts))]
    parts += _failure(one.error, one.hint, "  ")
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 2))
    table.add_column("table")
    table.add_column("state")
    table.add_column("LSN")
    table.add_column("rows copied", justify="right")
    for row in one.tables:
        style = "red" if row.error else "green" if row.state == "r" else ""
        state = f"{row.state} {_STATES.get(row.state, '')}"
        table.add_row(Text(row.name), Text(state, style=style), str(row.lsn or "-"), copied(row))
    if one.tables:
        parts.append(table)
    for row in one.tables:
        if row.error:
            parts += _failure(f"{row.name}: {row.error}", row.hint, "    ")
    return parts


def _failure(error: str | None, hint: str | None, indent: str) -> list[Any]:
    from rich.text import Text

    lines = []
    if error:
        lines.append(Text(f"{indent}ERROR:  {error}", style="red"))
    if error and hint:
        lines.append(Text(f"{indent}HINT:  {hint}"))
    return lines


def copied(table: TableStatus) -> str:
    """How much of a copy is done; the estimate is the publisher's, and may be passed."""
    if table.rows_copied is None:
        return "-"
    if table.state in ("i", "d") and table.rows_estimated:
        return f"{table.rows_copied:,} of ~{table.rows_estimated:,}"
    return f"{table.rows_copied:,}"


def size(count: int | None) -> str:
    """Bytes for people (dbsize.c: pg_size_pretty, with one decimal)."""
    if count is None:
        return "-"
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TB"
