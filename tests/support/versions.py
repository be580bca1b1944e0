"""What a Delta table with mode = scd2 must hold: at each LSN at which the publisher was asked, the rows that it had then."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pubsub.protocol.lsn import Lsn

Ask = Callable[[str], list[tuple[Any, ...]]]


@dataclass(frozen=True)
class Snapshot:
    """A table of the publisher's at an LSN: after all transactions that end up to it, and before all others."""

    lsn: int
    names: tuple[str, ...]
    rows: Counter[tuple[Any, ...]]


@dataclass
class Snapshots:
    """The publisher's table after each change, as it was asked by `ask` while nothing else happened."""

    ask: Ask
    table: str
    columns: str
    taken: list[Snapshot] = field(default_factory=list)

    def take(self) -> None:
        """Remember the rows that the table has now."""
        names = tuple(name.strip() for name in self.columns.split(","))
        ((lsn,),) = self.ask("SELECT pg_current_wal_insert_lsn()::text")
        rows = Counter(self.ask(f"SELECT {self.columns} FROM {self.table}"))
        self.taken.append(Snapshot(int(Lsn.parse(lsn)), names, rows))

    def assert_held(
        self,
        rows: Sequence[Mapping[str, Any]],
        key: str = "id",
        since: int = 0,
        renamed: Mapping[str, str] | None = None,
        unknown: Sequence[tuple[int, int]] = (),
    ) -> None:
        """Check all rows of the Delta table.

        `since`: the LSN of the copy.  `renamed`: the names now of columns that had other ones.  `unknown`: spans before a later copy,
        of which the table does not know everything.
        """
        compared = 0
        for one in self.taken:
            if one.lsn < since or any(first <= one.lsn < last for first, last in unknown):
                continue
            names = [(renamed or {}).get(name, name) for name in one.names]
            held = Counter(tuple(row[name] for name in names) for row in rows if _holds(row, one.lsn))
            assert held == one.rows, f"as of {Lsn(one.lsn)}"
            compared += 1
        assert compared
        assert_spans(rows, key)


def _holds(row: Mapping[str, Any], lsn: int) -> bool:
    ended = row["_pubsub_valid_to_lsn"]
    return bool(row["_pubsub_valid_from_lsn"] <= lsn and (ended is None or ended > lsn))


def current(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the rows that have not ended."""
    return [row for row in rows if row["_pubsub_valid_to_lsn"] is None]


def assert_spans(rows: Sequence[Mapping[str, Any]], key: str = "id") -> None:
    """Check that the spans of a key's rows have some length, that no two have an LSN in common, and that times go with the LSNs."""
    spans: defaultdict[Any, list[tuple[int, int]]] = defaultdict(list)
    times: defaultdict[int, set[Any]] = defaultdict(set)
    for row in rows:
        begun, ended = row["_pubsub_valid_from_lsn"], row["_pubsub_valid_to_lsn"]
        spans[tuple(row[name.strip()] for name in key.split(","))].append((begun, 1 << 63 if ended is None else ended))
        times[begun].add(row["_pubsub_valid_from"])
        if ended is None:
            assert row["_pubsub_valid_to"] is None
        else:
            times[ended].add(row["_pubsub_valid_to"])
    for of_key, some in spans.items():
        last = 0
        for begun, ended in sorted(some):
            assert last <= begun < ended, (of_key, sorted(some))
            last = ended
    for lsn, at in times.items():
        assert len(at) == 1, (Lsn(lsn), at)
