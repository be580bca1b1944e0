"""How far a micro-batch comes: as many whole transactions as the limits allow, and no more files read than that takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from pubsub.protocol.arrow_arrays import Indices
from pubsub.spark_source.admission import Counted, last_admitted


class Files:
    """Files with these LSNs, each read in pieces of three rows."""

    def __init__(self, *contents: list[int]) -> None:
        self.read: list[int] = []
        self.files = [
            Counted(min(lsns), len(lsns), lambda number=number, lsns=lsns: self._pieces(number, lsns))  # type: ignore[misc]
            for number, lsns in enumerate(sorted(contents, key=min))
        ]

    def _pieces(self, number: int, lsns: list[int]) -> Iterator[Indices]:
        self.read.append(number)
        for start in range(0, len(lsns), 3):
            yield np.array(lsns[start : start + 3], np.int64)


def test_whole_transactions() -> None:
    files = Files([10, 10, 20, 30, 30, 30, 40])
    assert last_admitted(files.files, 1, None) == 10
    assert last_admitted(files.files, 3, None) == 30
    assert last_admitted(files.files, 4, None) is None
    assert [last_admitted(files.files, None, most) for most in (1, 2, 3, 5, 6, 7)] == [10, 10, 20, 20, 30, None]
    assert last_admitted(files.files, 2, 6) == 20
    assert last_admitted(files.files, None, None) is None


def test_later_files_are_not_read() -> None:
    files = Files([10, 20], [30, 40], [50, 60], [70])
    assert last_admitted(files.files, 1, None) == 10
    assert files.read == [0]
    files.read.clear()
    assert last_admitted(files.files, None, 7) is None
    assert files.read == [], "the files' counts are enough"


def test_files_that_overlap() -> None:
    """A merged file has rows of all transactions: only all files together tell where the first ones are."""
    assert last_admitted(Files([10, 90], [20, 80], [30]).files, 2, None) == 20
    assert last_admitted(Files([10, 30, 30], [20]).files, None, 2) == 20, "the third is too large, the second is not"
    assert last_admitted(Files([90, 10, 80, 70, 60], [20, 10], [10, 95]).files, None, 3) == 10


@given(
    st.lists(st.lists(st.integers(1, 12), min_size=1, max_size=12), max_size=6),
    st.none() | st.integers(1, 8),
    st.none() | st.integers(1, 20),
)
def test_as_when_all_are_counted(contents: list[list[int]], transactions: int | None, rows: int | None) -> None:
    counts = sorted(Counter(lsn for content in contents for lsn in content).items())
    allowed, total = 0, 0
    for _, count in counts:
        total += count
        if allowed and (allowed == transactions or (rows is not None and total > rows)):
            break
        allowed += 1
    expected = counts[allowed - 1][0] if allowed < len(counts) else None
    assert last_admitted(Files(*contents).files, transactions, rows) == expected
