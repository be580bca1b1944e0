"""`pubsub verify`: print whether a subscription's tables hold the publisher's rows, and which rows differ."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from pubsub.cli.output import Format, render
from pubsub.node.node import Node

if TYPE_CHECKING:
    from pubsub.cli.common import Common
    from pubsub.node.verify.comparison import RowDifference, Texts
    from pubsub.node.verify.report import Report, TableReport
    from pubsub.node.verify.verification import Status

#: How often the progress is written on a terminal, in seconds.
_INTERVAL: Final = 0.5
#: The most characters of a value in a line.
_LONGEST: Final = 80


async def run_verify(
    common: Common, subscription: str, tables: Sequence[str], wanted: Mapping[str, Any], *, as_json: bool
) -> int:
    """Verify and print the report; return 1 if a table differs, or could not be compared to the end.  Raises PubsubError."""
    teller = _Teller()
    async with Node(common.home, workers=False, make=False) as node:
        try:
            report = await node.verify(subscription, tables, tell=teller.tell, **wanted)
        finally:
            teller.clear()
    if as_json:
        print(json.dumps(report.as_json(), ensure_ascii=False))
    else:
        print("\n".join(lines(report)))
    return 1 if report.outcome in {"different", "failed"} else 0


class _Teller:
    """Writes the progress to standard error if that is a terminal, each line over the last."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._written = False
        self._next = 0.0

    def tell(self, status: Status) -> None:
        if not self._terminal or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + _INTERVAL
        self._written = True
        print(f"\r\x1b[K{_doing(status)}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Remove the line."""
        if self._written:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _doing(status: Status) -> str:
    if status.table is None:
        return status.doing
    done = ""
    if status.progress is not None and status.progress.total:
        done = f", {min(100 * status.progress.nbytes // status.progress.total, 100)} % read at the publisher"
        done += f", {status.progress.delta_rows:,} rows in Delta"
    return f"{status.doing} {status.table} ({status.number} of {status.tables}){done}"


def lines(report: Report) -> Iterator[str]:
    """Yield the report's lines."""
    asked = f", the first after {report.asked} that the publisher shows" if report.asked is not None else ""
    yield f"Subscription {report.subscription} at LSN {report.lsn}{asked}"
    columns = ("table", "outcome", "rows", "in Delta", "missing", "extra", "different")
    rows = [_row(table) for table in report.tables]
    yield render(columns, rows, Format.TABLE).rstrip("\n")
    for table in report.tables:
        yield from _about(table)


def _row(table: TableReport) -> tuple[object, ...]:
    outcome = f"{table.outcome} in a sample" if table.sampled and table.outcome == "equal" else table.outcome
    if table.version is None:
        return (table.relation, outcome, *[None] * 5)
    counts = (table.rows, table.delta_rows, table.missing, table.extra, table.different)
    return (table.relation, outcome, *counts)


def _about(table: TableReport) -> Iterator[str]:
    if not table.shown and not table.reason and not table.ranges_left and not table.repaired:
        return
    yield ""
    yield f"{table.relation}: {table.reason}" if table.reason else f"{table.relation}:"
    if table.hint:
        yield f"HINT:  {table.hint}"
    if table.repaired:
        yield f"  {table.repaired} rows were copied anew"
    for one in table.shown:
        yield f"  {_difference(one)}"
    more = table.differing - len(table.shown)
    if more > 0 and table.shown:
        yield f"  and {more} more"
    if table.ranges_left:
        yield f"  and {table.ranges_left} ranges of keys that differ, too, whose rows were not looked at"


def _difference(one: RowDifference) -> str:
    where = f" {_texts(one.key)}" if one.key else ""
    if one.kind == "different":
        assert one.publisher is not None
        assert one.delta is not None
        changes = [
            f"{name} is {_value(text)} at the publisher, {_value(one.delta[name])} in Delta"
            for name, text in one.publisher.items()
        ]
        return f"different{where}: {'; '.join(changes)}"
    texts = one.publisher if one.publisher is not None else one.delta
    assert texts is not None
    side = "only at the publisher" if one.kind == "missing" else "only in Delta"
    return f"{one.kind}{where}: {side}: {_texts(texts)}"


def _texts(texts: Texts) -> str:
    return ", ".join(f"{name}={_value(text)}" for name, text in texts.items())


def _value(text: str | None) -> str:
    if text is None:
        return "NULL"
    shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({len(text)} characters)"
    return "'" + shown.replace("'", "''").replace("\n", "\\n") + "'"
