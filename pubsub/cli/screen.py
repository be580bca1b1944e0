"""The screen of `pubsub status --watch`: the node's document (pubsub.monitoring.document) as lines that fill a terminal.

Names, errors and events may hold anything: control characters are shown as pictures of themselves (texts.printable).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pubsub.cli.measures import duration, memory_words, size
from pubsub.monitoring.document import Query
from pubsub.texts import printable

Document = dict[str, Any]

KEYS: Final = "q leave   ↑↓ PgUp PgDn tables   / find   s show   o order   h hour or day"
_LEVELS: Final = {"good": "green", "warn": "yellow", "bad": "red", "idle": "dim"}
_EVENTS: Final = {"error": "red", "critical": "red", "warning": "yellow"}
_BLOCKS: Final = "▁▂▃▄▅▆▇█"
#: Lines of copies, of slots and of events at most while tables need the room, without the heading.
_COPIES: Final = 4
_SLOTS: Final = 4
_LAST_EVENTS: Final = 5
#: Lines of tables at least, with their two headings.
_TABLES: Final = 7
#: A table's columns beside its name, and their widths; those that come last in _LEAST go first where the terminal is narrow.
_COLUMNS: Final = {"state": 20, "rows": 14, "size": 10, "lag": 9, "last commit": 14}
_LEAST: Final = ("state", "rows", "lag", "size", "last commit")
_NAME: Final = 30
_WHERE: Final = {"publisher": "on the publisher", "walsender": "served here", "node": "served here (Delta tables)"}


@dataclass(slots=True)
class View:
    """What a person has chosen; `typing`: keys go to the search."""

    query: Query
    typing: bool = False
    shown: int = 1
    """How many tables the last screen had."""


def lines(found: Document, view: View, width: int, height: int, note: str = "") -> list[Text]:
    """Return `height` lines of at most `width` cells; `note`: what the header says at last.  Sets `view.shown`."""
    left = max(0, height - 2)
    subscriptions = _subscriptions(found, width)
    copies = _section("copies", [_copy(one, width) for one in found["copies"]], found["copies_total"])
    slots = _section("slots and WAL", [_slot(one) for one in found["slots"]], found["slots_total"])
    events = _section("events", [_event(one) for one in found["events"]])
    tables = max(_TABLES, left // 3)
    first = _cut(subscriptions, max(3, left - tables))
    left -= len(first)
    wanted = []
    for section, most in ((copies, _COPIES), (events, _LAST_EVENTS), (slots, _SLOTS)):
        room = min(len(section), most + 1, left - tables)
        wanted.append(_cut(section, room) if room > 1 else [])
        left -= len(wanted[-1])
    below = _tables(found, view, width, left)
    # What the tables leave, the events may have.
    spare = left - len(below)
    if spare and len(wanted[1]) > 1:
        wanted[1] = _cut(events, len(wanted[1]) + spare)
    body = [*first, *wanted[0], *below, *wanted[2], *wanted[1]][: max(0, height - 2)]
    body += [Text()] * (max(0, height - 2) - len(body))
    found_lines = [_header(found, note), *body, _footer(view)]
    for line in found_lines:
        line.truncate(width, overflow="ellipsis")
    return found_lines[:height]


def _section(title: str, content: list[Text], total: int | None = None) -> list[Text]:
    if not content:
        return []
    more = f"  {len(content):,} of {total:,}" if total is not None and total > len(content) else ""
    return [Text.assemble((title, "bold"), (more, "dim")), *content]


def _cut(some: list[Text], room: int) -> list[Text]:
    if len(some) <= room:
        return some
    return [*some[: max(0, room - 1)], Text(f"  … {len(some) - room + 1} more lines", style="dim")][: max(0, room)]


def _header(found: Document, note: str) -> Text:
    total, troubled = found["subscriptions_total"], len(found["obstacles"])
    condition = (
        ("no subscriptions", "dim")
        if not total
        else (f"{troubled} of {total} {'does' if total == 1 else 'do'} not follow", "bold red")
        if troubled
        else ("all follow", "bold green")
    )
    daemon = f"daemon {found['daemon']}" if found["daemon"] else "no daemon runs"
    memory = f"  memory: {memory_words(found['memory'])}" if found.get("memory") else ""
    return Text.assemble(
        ("pubsub", "bold"), f"  node {found['node']}  ", condition, f"  {daemon}  {_clock(found['time'])} UTC",
        (f"  {note}" if note else "", "dim"), (memory, "dim"),
    )  # fmt: skip


def _footer(view: View) -> Text:
    query = view.query
    if view.typing:
        return Text.assemble(
            ("find: ", "bold"), _line(query.search), ("▏", "blink"), ("  Enter: done   Esc: all", "dim")
        )
    chosen = [f"show {query.show}", f"order {query.order}", *([f"find {query.search!r}"] if query.search else [])]
    return Text.assemble((KEYS, "dim"), "   ", (", ".join(chosen), ""))


def _subscriptions(found: Document, width: int) -> list[Text]:
    if not found["subscriptions_total"]:
        return [Text("no subscriptions: CREATE SUBSCRIPTION makes one", style="dim")]
    some = [line for one in found["subscriptions"] for line in _subscription(one, width)]
    more = found["subscriptions_total"] - len(found["subscriptions"])
    return [*some, Text(f"and {more} more subscriptions", style="dim")] if more else some


def _subscription(one: Document, width: int) -> list[Text]:
    lag = "lag unknown"
    if one["lag_seconds"] is not None:
        lag = f"lag {duration(one['lag_seconds'])}"
    elif one["lag_bytes"] is not None:
        lag = f"lag {size(one['lag_bytes'])}"
    follow = sum(one["tables_by_state"].get(state, 0) for state in "sr")
    history = one["history"]
    rate = _last(history["rows_per_second"]) if history else None
    facts = [
        lag,
        *([f"{rate:,.0f} rows/s"] if rate is not None else []),
        f"{follow:,} of {one['tables_total']:,} tables follow",
        f"Delta {size(one['live_bytes'])}",
        f"WAL kept {size(one['retained_wal_bytes'])}",
        f"at {one['flush_lsn'] or '-'}",
    ]
    found = [
        Text.assemble(
            (_line(one["name"]), "bold"),
            "  ",
            (one["condition"], _LEVELS[one["condition_level"]]),
            "  ",
            "  ".join(facts),
        )
    ]
    if history and (_last(history["lag_seconds"]) is not None or any(history["rows_per_second"])):
        room = max(8, (width - 44) // 2)
        lags, rates = history["lag_seconds"], history["rows_per_second"]
        found.append(
            Text.assemble(
                ("  lag ", "dim"), (spark(lags, room, max), "blue"), (f" max {_most(lags, duration)}".ljust(14), "dim"),
                ("  rows/s ", "dim"), (spark(rates, room, _mean), "cyan"), (f" max {_most(rates, _count)}", "dim"),
            )
        )  # fmt: skip
    if one["error"]:
        found += _problem("ERROR", one["error"], one["detail"], one["hint"], "red")
    for warning in one["warnings"]:
        found += _problem("WARNING", warning["message"], warning["detail"], warning["hint"], "yellow")
    if one["waiting"]:
        found += _waiting(one["waiting"])
    return found


def _waiting(wait: Document) -> list[Text]:
    return _problem("WAITS", wait["message"], wait["detail"], wait["hint"], "yellow" if wait["hint"] else "")


def _problem(kind: str, text: str, detail: str | None, hint: str | None, style: str, indent: str = "  ") -> list[Text]:
    rest = [(name, value) for name, value in (("DETAIL", detail), ("HINT", hint)) if value]
    return [
        Text(f"{indent}{kind}:  {_line(text)}", style=style),
        *(Text(f"{indent}{name}:  {_line(value)}") for name, value in rest),
    ]


def _copy(one: Document, width: int) -> Text:
    done, total = one["rows_copied"], one["rows_estimated"]
    text = "not begun" if done is None else f"{done:,} of {f'~{total:,}' if total else 'unknown'} rows"
    if one["copy_seconds_left"] is not None:
        text += f", about {duration(one['copy_seconds_left'])} left"
    bar = ""
    if done is not None and total:
        part = min(1.0, done / total)
        cells = round(part * 20)
        bar = f"{'█' * cells}{'░' * (20 - cells)} {part:4.0%}  "
    return Text.assemble("  ", _wide(f"{one['name']}", min(40, width // 3)), "  ", (bar, "blue"), text)


def _tables(found: Document, view: View, width: int, height: int) -> list[Text]:
    """Return lines of tables from the view's first on, as many as there is room for; a table's problem below it."""
    view.shown = 0
    if height < 3 or not found["tables_total"]:
        return []
    columns, name = _columns(width)
    content = [Text("  " + _row("table", name, {title: title for title in columns}), style="dim")]
    told: list[Document] = []
    for one in found["tables"]:
        more = _table(one, name, columns, several=found["subscriptions_total"] > 1, now=found["time"])
        # What many tables wait for is said at the first of them.
        wait = one["waiting"]
        if wait and wait["hint"] and wait not in told:
            more += [Text("  ").append_text(line) for line in _waiting(wait)]
            told.append(wait)
        if len(content) + len(more) > height - 1:
            break
        content += more
        view.shown += 1
    if not found["tables"]:
        content.append(Text("  no table matches", style="dim"))
    first = found["tables_offset"]
    place = f"{first + 1:,}-{first + view.shown:,} of {found['tables_matching']:,}" if view.shown else ""
    matching = (
        f" that match, {found['tables_total']:,} in all" if found["tables_matching"] < found["tables_total"] else ""
    )
    return [Text.assemble(("tables", "bold"), (f"  {place}{matching}", "dim")), *content]


def _columns(width: int) -> tuple[list[str], int]:
    """Return which columns there is room for, and how wide the names are then."""
    left, chosen = width - 2 - _NAME, set()
    for title in _LEAST:
        left -= _COLUMNS[title] + 2
        if left < 0:
            left += _COLUMNS[title] + 2
            break
        chosen.add(title)
    return [title for title in _COLUMNS if title in chosen], _NAME + left


def _table(one: Document, name: int, columns: Sequence[str], *, several: bool, now: str) -> list[Text]:
    copied = one["state"] == "d" and not one["stopped"]
    rows = one["rows_copied"] if copied else one["rows"]
    held = None if one["live_bytes"] is None else one["live_bytes"] + (one["retained_bytes"] or 0)
    lag = size(one["lag_bytes"]) if one["lag_seconds"] is None else duration(one["lag_seconds"])
    commit = one["lsn"] or "-"
    if one["last_commit"]:
        commit = f"{duration(_seconds(one['last_commit'], now))} ago"
    style = "red" if one["stopped"] or one["error"] else "green" if one["state"] in "sr" else "yellow"
    title = f"{one['name']}  {one['subscription']}" if several else one["name"]
    cells = {
        "state": one["state_words"],
        "rows": "-" if rows is None else f"{rows:,}",
        "size": size(held),
        "lag": lag,
        "last commit": commit,
    }
    text = Text("  " + _row(title, name, {column: cells[column] for column in columns}))
    begin = 2 + len(_wide(title, name)) + 2
    text.stylize(style, begin, begin + _COLUMNS["state"])
    found = [text]
    if one["error"]:
        at = f"at {one['error_lsn']}: " if one["error_lsn"] else ""
        found += _problem("ERROR", f"{at}{one['error']}", None, one["hint"], "red", "    ")
    verified = one["verification"]
    if verified is not None and verified["outcome"] in ("different", "failed"):
        numbers = ", ".join(f"{verified[kind]:,} {kind}" for kind in ("missing", "extra", "different"))
        text_ = verified["reason"] or f"differs from the publisher's: {numbers}"
        found += _problem("WARNING", text_, None, verified["hint"], "yellow", "    ")
    if verified is not None and verified["outcome"] != "different" and verified["equal"] is False:
        found += _problem(
            "WARNING", "differed from the publisher's when it was last compared", None, None, "yellow", "    "
        )
    if one["foreign_commit"]:
        found += _problem("WARNING", f"written by others: {one['foreign_commit']}", None, None, "yellow", "    ")
    return found


def _row(name: str, width: int, cells: Mapping[str, str]) -> str:
    shown = [_wide(cell, _COLUMNS[title], right=title != "state") for title, cell in cells.items()]
    return "  ".join((_wide(name, width), *shown))


def _slot(one: Document) -> Text:
    state = (
        "lost" if one["wal_status"] == "lost" else "unknown" if one["active"] is None or one["unknown_since"] else ""
    )
    state = state or ("in use" if one["active"] else "not in use")
    style = {"lost": "red", "unknown": "yellow", "not in use": "yellow"}.get(state, "green")
    facts = [
        f"confirmed {one['confirmed_flush_lsn'] or '-'}",
        f"server at {one['current_lsn'] or '-'}",
        f"WAL kept {size(one['retained_wal_bytes'])}",
    ]
    if one["safe_wal_bytes"] is not None:
        facts.append(f"{size(one['safe_wal_bytes'])} until lost")
    where = _WHERE.get(one["server"], one["server"])
    return Text.assemble("  ", _line(one["slot_name"]), (f"  {where}  ", "dim"), (state, style), "  ", "  ".join(facts))


def _event(one: Document) -> Text:
    times = f" ({one['times']:,} times)" if one["times"] > 1 else ""
    fields = "  ".join(f"{name}={_line(value)}" for name, value in one["fields"].items())
    return Text.assemble(
        f"  {_clock(one['last'])} ", (f"{one['level']:8}", _EVENTS.get(one["level"], "")), _line(one["text"]), times, "  ",
        (fields, "dim"),
    )  # fmt: skip


def spark(values: Sequence[float | None], width: int, of_several: Callable[[list[float]], float]) -> str:
    """Return the values as a line of blocks, `width` at most, blank where nothing is known."""
    width = min(width, len(values))
    parts: list[float | None] = []
    for at in range(width):
        known = [v for v in values[at * len(values) // width : (at + 1) * len(values) // width] if v is not None]
        parts.append(of_several(known) if known else None)
    most = max((part for part in parts if part is not None), default=0.0) or 1.0
    top = len(_BLOCKS) - 1
    return "".join(" " if part is None else _BLOCKS[min(top, round(part / most * top))] for part in parts)


def _mean(values: list[float]) -> float:
    return sum(values) / len(values)


def _most(values: Sequence[float | None], shown: Callable[[float], str]) -> str:
    return shown(max((value for value in values if value is not None), default=0.0))


def _count(value: float) -> str:
    return f"{value:,.0f}"


def _last(values: Sequence[float | None]) -> float | None:
    return next((value for value in reversed(values) if value is not None), None)


def _line(text: str) -> str:
    return printable(" ".join(text.split()))


def _wide(text: str, width: int, *, right: bool = False) -> str:
    """Return a text of exactly so many cells."""
    text = _line(text)
    if cell_len(text) > width:
        return set_cell_size(text, width - 1) + "…"
    blank = " " * (width - cell_len(text))
    return blank + text if right else text + blank


def _clock(text: str) -> str:
    try:
        return f"{datetime.fromisoformat(text):%H:%M:%S}"
    except ValueError:
        return printable(text)


def _seconds(text: str, now: str) -> float:
    return max(0.0, (datetime.fromisoformat(now) - datetime.fromisoformat(text)).total_seconds())
