"""What stands beside the mirrors must tell the same of the publisher's rows: histories by their changes, scd2 by its current rows."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from deltalake import write_deltalake

from catalog.records import SubscriptionRel
from pubsub.delta import change_rows
from pubsub.delta.table import query
from pubsub.sql.identifiers import quote_qualified
from pubsub.testing.compare import compare_tables
from tests.crash.settle import FailedRound
from tests.crash.world import World
from tests.support.versions import assert_spans

#: By table: the columns of its key.
_KEYS: Final = {"pair": ("id", "k"), "parted": ("id", "part"), "Keyless": (), "appended": ()}
#: Tables whose equal rows are told apart by nothing, and whose columns change: their ids are compared.
_FULL: Final = "Keyless"


def compare(world: World, relation: SubscriptionRel) -> None:
    """Compare the rows of before's end with the publisher's.  Raises FailedRound."""
    table = relation.published_name
    key = _KEYS.get(table, ("id",))
    rows = _plain(query(relation.path, "SELECT * FROM t").read_all())
    try:
        if relation.beside == "scd2":
            spans = rows.select([*key, *(name for name in rows.column_names if name.startswith("_pubsub_valid"))])
            assert_spans(spans.to_pylist(), ",".join(key))
            found = rows.filter(rows["_pubsub_valid_to_lsn"].is_null())
        else:
            found = newest(rows, key)
    except AssertionError as error:
        raise FailedRound(f"{relation.qualified_name}: {error}") from error
    if table == _FULL and relation.beside == "history":
        ids = Counter(dict(world.query(f'SELECT id, count(*) FROM "{table}" GROUP BY id')))
        if Counter(found["id"].to_pylist()) != ids:
            raise FailedRound(f"{relation.qualified_name}: its ids are not the publisher's")
        return
    with tempfile.TemporaryDirectory() as directory:
        path = str(Path(directory, "rows"))
        write_deltalake(path, found)
        difference = compare_tables(world.conninfo, quote_qualified(relation.schema, table), path, storage_options={})
    if difference is not None:
        raise FailedRound(f"{relation.qualified_name}: {difference}\n{relation}")


def _plain(rows: pa.Table) -> pa.Table:
    """Return the rows without views of strings, which pyarrow cannot take from."""

    def plain(kind: pa.DataType) -> pa.DataType:
        if pa.types.is_string_view(kind):
            return pa.string()
        if pa.types.is_binary_view(kind):
            return pa.binary()
        if pa.types.is_list(kind):
            return pa.list_(kind.value_field.with_type(plain(kind.value_type)))
        if pa.types.is_struct(kind):
            return pa.struct([field.with_type(plain(field.type)) for field in kind])
        return kind

    # The ids of a mapping of columns are for those who write the table.
    return rows.cast(pa.schema([pa.field(field.name, plain(field.type)) for field in rows.schema]))


def newest(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Return the publisher's rows that a history ends with; without a key those of `_FULL` have their ids only.

    Raises AssertionError if a change follows none that it needs, or two of one transaction have one place.
    """
    columns = [name for name in rows.column_names if name not in change_rows.NAMES]
    rows = rows.sort_by([(change_rows.LSN, "ascending"), (change_rows.SEQ, "ascending")])
    ops = rows[change_rows.OP].to_pylist()
    places = list(zip(rows[change_rows.LSN].to_pylist(), rows[change_rows.SEQ].to_pylist(), strict=True))
    changes = [place for place, op in zip(places, ops, strict=True) if op != "R"]
    assert len(changes) == len(set(changes)), "two changes have one place"
    begins = max((number + 1 for number, op in enumerate(ops) if op == "T"), default=0)
    if not key:
        return rows.take(_kept(rows, ops, begins))
    # Of each row there is now, and of each of its columns, the row of the history with its value.
    held: dict[Any, list[int]] = {}
    moved: list[int] | None = None
    keys = list(zip(*(rows[name].to_pylist() for name in key), strict=True))
    unchanged = rows[change_rows.UNCHANGED].to_pylist()
    for number in range(begins, len(ops)):
        op, at = ops[number], keys[number]
        whole = [number] * len(columns)
        if op in "RI":
            assert at not in held, f"{op} of {at} at {places[number]}, which is there"
            held[at] = whole
        elif op == "O":
            moved = held.pop(at)
        elif op == "D":
            assert at in held, f"D of {at} at {places[number]}, which is not there"
            del held[at]
        else:
            before, moved = held.get(at, moved), None
            assert before is not None, f"U of {at} at {places[number]}, which is not there"
            same = set(unchanged[number] or ())
            held[at] = [old if name in same else new for name, old, new in zip(columns, before, whole, strict=True)]
    taken = zip(*held.values(), strict=True) if held else [()] * len(columns)
    return pa.table(
        {name: rows[name].take(pa.array(numbers, pa.int64())) for name, numbers in zip(columns, taken, strict=True)}
    )


def _kept(rows: pa.Table, ops: list[str], begins: int) -> list[int]:
    """Return the rows that were added and not taken away, told apart by their ids."""
    ids = rows["id"].to_pylist()
    found: dict[Any, list[int]] = {}
    for number in range(begins, len(ops)):
        if ops[number] in "RIU":
            found.setdefault(ids[number], []).append(number)
        else:
            assert found.get(ids[number]), f"{ops[number]} of {ids[number]}, which is not there"
            found[ids[number]].pop()
    return [number for some in found.values() for number in some]
