"""The copy job: the statement that reads a chunk, and its interruption."""

from __future__ import annotations

import socket
import threading
from dataclasses import replace
from typing import Any

import pytest

from apply.isolation import will_last
from launcher.failures import typed
from pubsub.errors import SerializationFailure
from pubsub.publisher.copy_out import Cut
from pubsub.publisher.read_table import ReadTable, hold_as_described
from tablesync.chunk_reader import CopySource, statement

TABLE = ReadTable('a"b', "t.x", ("id", 'we"ird', "Ünï"), True)
SOURCE = CopySource("host=h password=hidden", "app", TABLE, "snap", None)


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
    source = CopySource("", "app", ReadTable("s", "t", ("id",), False), "snap", "a OR b")
    text = statement(source, (1, 2))
    assert "tid AND (a OR b)) TO" in text
    assert "ONLY" not in text
    assert "WHERE (a OR b)) TO" in statement(source, None)
    assert "WHERE id IN (1) AND (a OR b)) TO" in statement(source, None, "id IN (1)")


def test_no_password_in_the_repr() -> None:
    assert "hidden" not in repr(SOURCE)


@pytest.mark.parametrize("early", [True, False])
def test_cutting_a_copy_short_ends_its_wait_for_the_publisher(early: bool) -> None:
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


def test_a_table_truncated_meanwhile_is_copied_again() -> None:
    """With on_table_error = isolate it stopped for good, though the next copy would succeed."""

    class Publisher:
        def __init__(self, *rewritten: int) -> None:
            self.rewritten = rewritten

        pgresult = property(lambda self: self)

        def execute(self, _statement: bytes) -> Any:
            return self

        def fetchall(self) -> list[tuple[int]]:
            return [(oid,) for oid in self.rewritten]

        def ftable(self, _place: int) -> int:
            return 1

        def ftablecol(self, place: int) -> int:
            return place + 1

        def ftype(self, _place: int) -> int:
            return 23

    table = replace(TABLE, oid=1, attributes={name: (place + 1, 23) for place, name in enumerate(TABLE.columns)})
    with pytest.raises(SerializationFailure) as raised:
        hold_as_described(Publisher(1), table)  # type: ignore[arg-type]
    assert not will_last(raised.value)
    hold_as_described(Publisher(), table)  # type: ignore[arg-type]
    for other in (replace(table, oid=2), replace(table, attributes=dict.fromkeys(table.columns, (1, 23)))):
        with pytest.raises(SerializationFailure):
            hold_as_described(Publisher(), other)  # type: ignore[arg-type]
    of_a_task = RuntimeError(f"Traceback …\npubsub.errors.SerializationFailure: {raised.value.message}\n")
    assert isinstance(typed(of_a_task), SerializationFailure)
