"""A stream's offsets, and which rows are between two of them."""

from __future__ import annotations

import json

import pyarrow as pa
import pytest

from pubsub.delta import change_rows
from pubsub.delta.change_rows import BEGINNING, Place
from pubsub.delta.files.history_rows import Span
from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.spark_source import offsets

#: One transaction with two changes, a copy and another one at the LSN where it ends, and the transaction after them.
LSNS = [100, 100, 100, 100, 100, 200]
SEQS = [
    0,
    1 << 40,
    change_rows.copied(Lsn(100), 1)[change_rows.SEQ],
    change_rows.begun_anew(Lsn(100), 2)[change_rows.SEQ],
    change_rows.copied(Lsn(100), 2)[change_rows.SEQ],
    3,
]


def inside(start: Place, end: Place) -> list[int]:
    chosen = Span(start, end).rows(pa.array(LSNS), pa.array(SEQS, pa.int64()))
    return [place for place, one in enumerate(chosen.to_pylist()) if one]


def test_what_is_between_two_places() -> None:
    assert inside(BEGINNING, Place(Lsn(200), 2)) == [0, 1, 2, 3, 4, 5]
    assert inside(BEGINNING, Place(Lsn(100), 0)) == [0, 1]
    assert inside(Place(Lsn(100), 0), Place(Lsn(100), 1)) == [2]
    assert inside(Place(Lsn(100), 1), Place(Lsn(199), 2)) == [3, 4], "a later copy at the same LSN is no earlier row"
    assert inside(Place(Lsn(100), 2), Place(Lsn(200), 2)) == [5]
    assert inside(Place(Lsn(100), 2), Place(Lsn(100), 2)) == []
    assert inside(Place(Lsn(99), 2), Place(Lsn(99), 9)) == []


def test_a_row_without_an_lsn_is_in_no_span() -> None:
    chosen = Span(BEGINNING, Place(Lsn(1), 1)).rows(pa.array([None], pa.int64()), pa.array([1], pa.int64()))
    assert chosen.to_pylist() == [None]


def test_which_bounds_are_outside() -> None:
    span = Span(Place(Lsn(100), 1), Place(Lsn(200), 1))
    assert [span.outside(one) for one in ((1, 99), (1, 100), (1, 101), (200, 900), (201, 900), None)] == [
        True, True, False, False, True, False,
    ]  # fmt: skip
    assert not Span(Place(Lsn(100), 1), Place(Lsn(200), 2)).outside((1, 100)), "a later copy may stand there"


def test_json_and_back() -> None:
    place = Place(Lsn.parse("16/B374D848"), 3)
    found = json.loads(json.dumps(offsets.as_json(place, "an id")))
    assert found == {"lsn": "16/B374D848", "generation": 3, "table": "an id"}
    assert offsets.place_of(found, "an id", "/t") == place
    with pytest.raises(NotInPrerequisiteState, match="not the one that the query has read"):
        offsets.place_of(found, "another id", "/t")


@pytest.mark.parametrize("offset", [{}, {"lsn": 5, "generation": 1, "table": "i"}, {"lsn": "0/1", "generation": 1}])
def test_what_is_no_offset(offset: dict[str, object]) -> None:
    with pytest.raises(PubsubError) as refused:
        offsets.place_of(offset, "i", "/t")
    assert refused.value.sqlstate == "22023"
