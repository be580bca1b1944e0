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
from tests.support.history import newest, since_emptied
from tests.support.versions import assert_spans

#: By table: the columns of its key.
_KEYS: Final = {"pair": ("id", "k"), "parted": ("id", "part"), "Keyless": (), "appended": ()}
#: Tables whose equal rows are told apart by nothing, and whose columns change: their ids are compared.
_FULL: Final = "Keyless"


def compare(world: World, relation: SubscriptionRel) -> None:
    """Compare the rows that the table says there are now with the publisher's.  Raises FailedRound."""
    table = relation.published_name
    key = _KEYS.get(table, ("id",))
    rows = _plain(query(relation.path, "SELECT * FROM t").read_all())
    try:
        if relation.beside == "scd2":
            spans = rows.select([*key, *(name for name in rows.column_names if name.startswith("_pubsub_valid"))])
            assert_spans(spans.to_pylist(), ",".join(key))
            found = rows.filter(rows["_pubsub_valid_to_lsn"].is_null())
        else:
            found = ends_with(rows, key)
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


def ends_with(rows: pa.Table, key: tuple[str, ...]) -> pa.Table:
    """Return the publisher's rows that a history ends with; without a key those of `_FULL` have their ids only.

    Raises AssertionError if a change follows none that it needs, or two of one transaction have one place.
    """
    columns = [name for name in rows.column_names if name not in change_rows.NAMES]
    rows = rows.sort_by([(change_rows.LSN, "ascending"), (change_rows.SEQ, "ascending")])
    ops = rows[change_rows.OP].to_pylist()
    places = zip(rows[change_rows.LSN].to_pylist(), rows[change_rows.SEQ].to_pylist(), strict=True)
    changes = [place for place, op in zip(places, ops, strict=True) if op != "R"]
    assert len(changes) == len(set(changes)), "two changes have one place"
    if not key:
        return rows.take(_kept(rows["id"].to_pylist(), ops))
    keys = list(zip(*(rows[name].to_pylist() for name in key), strict=True))
    held = newest(ops, keys, rows[change_rows.UNCHANGED].to_pylist(), columns)
    taken = zip(*held, strict=True) if held else [()] * len(columns)
    return pa.table(
        {name: rows[name].take(pa.array(numbers, pa.int64())) for name, numbers in zip(columns, taken, strict=True)}
    )


def _kept(ids: list[Any], ops: list[str]) -> list[int]:
    """Return the numbers of the changes whose rows were added and not taken away, told apart by their ids."""
    found: dict[Any, list[int]] = {}
    for number in range(since_emptied(ops), len(ops)):
        if ops[number] in "RIU":
            found.setdefault(ids[number], []).append(number)
        else:
            assert found.get(ids[number]), f"change {number}, {ops[number]} of {ids[number]}, which is not there"
            found[ids[number]].pop()
    return [number for some in found.values() for number in some]
