"""Masked tables in scenarios: what they should have, by Python's own means, and that values in clear are nowhere."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pubsub.sql.mask_rules import MaskRule
from tests.support.replica import Replica

KEY, OTHER = "a key of these tests, of no others", "another key of these tests"
#: In every value that is masked.
CLEAR = "ClearText"


def hashed(text: str, key: str = KEY) -> str:
    return hmac.new(key.encode(), text.encode(), hashlib.sha256).hexdigest()


def masked(value: Any, rule: str | None) -> Any:
    """Return what stands for a value, by Python's own means."""
    if value is None or rule is None:
        return value
    match MaskRule.parse(rule):
        case MaskRule("null"):
            return None
        case MaskRule("redact"):
            return "***"
        case MaskRule("truncate", length):
            return str(value)[:length]
        case _:
            return hashed(str(value))


def assert_masked(replica: Replica, table: str, rules: Mapping[str, str], *, caught_up: bool = True) -> None:
    """Check that the Delta table has the publisher's rows, masked; `rules` by the columns' present names."""
    if caught_up:
        replica.caught_up()
    found = replica.rows(table)
    names = list(found[0]) if found else []
    read = {name: "NULL" if rules.get(name) == "null" else f"{name}::text" for name in rules}
    listed = ", ".join(read.get(name, name) for name in names) or "1"
    wanted = [
        tuple(masked(value, rules.get(name)) for name, value in zip(names, row, strict=True))
        for row in replica.query(f"SELECT {listed} FROM {table}")
    ]
    assert sorted(map(repr, (tuple(row.values()) for row in found))) == sorted(map(repr, wanted))


def stored(home: Path) -> Iterator[tuple[Path, str]]:
    """Yield what each file of a node says, data files by their values and statistics."""
    for path in home.rglob("*"):
        if not path.is_file():
            continue
        text = path.read_bytes().decode("latin-1")
        if path.suffix == ".parquet":
            text += str(pq.read_table(path, partitioning=None).to_pydict())
            metadata = pq.read_metadata(path)
            text += str([metadata.row_group(number).to_dict() for number in range(metadata.num_row_groups)])
        yield path, text


def assert_nowhere(replica: Replica, logged: list[Any], *texts: str) -> None:
    """Check that no file of the node, no event of its log and no view has one of these texts."""
    views = ("pg_stat_subscription_stats", "pg_subscription_rel", "pg_stat_subscription")
    shown = [(Path(view), str(replica.node.fetch(f"SELECT * FROM {view}"))) for view in views]
    shown.append((Path("the log"), str(logged)))
    for path, said in (*stored(replica.node.home), *shown):
        for text in (*texts, KEY, OTHER):
            assert text not in said, f"{text} is in {path}"
