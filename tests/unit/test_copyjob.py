"""The copy job: which blocks a task reads, and the statement that reads them."""

from __future__ import annotations

import itertools
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tablesync.copyjob import CopySource, Cut, edges, ranges, statement

SOURCE = CopySource("host=h password=hidden", "app", 'a"b', "t.x", ("id", 'we"ird', "Ünï"), "snap", None, True)


@given(st.integers(0, 2**32), st.integers(1, 64))
def test_every_block_is_read_once(blocks: int, parallelism: int) -> None:
    parts = ranges(edges(blocks, parallelism))
    bounds = [part for part in parts if part is not None]
    assert len(bounds) == len(parts)
    assert bounds[0][0] == 0
    assert bounds[-1][1] is None, "the table may grow until the snapshot is taken"
    for (first, end), (following, _) in itertools.pairwise(bounds):
        assert end == following
        assert first < following
    assert len(parts) <= 4096 + parallelism
    assert len(parts) == 1 or len(parts) % parallelism == 0


def test_small_tables_are_one_task_and_large_ones_many() -> None:
    assert ranges(edges(0, 4)) == [(0, None)]
    assert ranges(edges(10, 4)) == [(0, None)]
    assert ranges(edges(None, 4)) == [None]
    assert len(edges(131072, 2)) == 64  # 1 GB
    assert len(edges(2**31, 2)) == 4096


@pytest.mark.parametrize(
    ("part", "where"),
    [
        (None, ""),
        ((0, None), ""),
        ((0, 7), " WHERE ctid < '(7,0)'::pg_catalog.tid"),
        ((7, None), " WHERE ctid >= '(7,0)'::pg_catalog.tid"),
        ((7, 9), " WHERE ctid >= '(7,0)'::pg_catalog.tid AND ctid < '(9,0)'::pg_catalog.tid"),
    ],
)
def test_statement(part: tuple[int, int | None] | None, where: str) -> None:
    columns = statement(SOURCE, None).removeprefix("COPY (SELECT ").split(" FROM ")[0]
    assert '"we""ird"' in columns
    assert statement(SOURCE, part) == (
        f'COPY (SELECT {columns} FROM ONLY "a""b"."t.x"{where}) TO STDOUT (FORMAT csv, ENCODING \'UTF8\')'
    )


def test_a_row_filter_stands_in_brackets_beside_the_range() -> None:
    source = CopySource("", "app", "s", "t", ("id",), "snap", "a OR b", False)
    text = statement(source, (1, 2))
    assert "tid AND (a OR b)) TO" in text
    assert "ONLY" not in text
    assert "WHERE (a OR b)) TO" in statement(source, None)
    assert "WHERE id IN (1) AND (a OR b)) TO" in statement(source, None, "id IN (1)")


def test_no_password_in_the_repr() -> None:
    assert "hidden" not in repr(SOURCE)


@pytest.mark.parametrize("early", [True, False])
def test_a_cut_ends_what_waits_for_the_publisher(early: bool) -> None:
    cut = Cut()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        if early:
            cut()
        waiting, received = threading.Event(), []

        def work() -> None:
            with cut.watching(ours):
                waiting.set()
                received.append(ours.recv(1))

        thread = threading.Thread(target=work)
        thread.start()
        waiting.wait()
        cut()
        thread.join()
        assert received == [b""]
        cut()  # by now without effect
        assert theirs.recv(1) == b""
