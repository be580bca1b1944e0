"""Identifying columns by number, when a Relation message and the publisher's catalog are of different times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from apply.schema_changes import attributes
from apply.schema_changes.attributes import (
    Attribute,
    Attributes,
    LeftOut,
    Numbers,
    Shape,
    identify,
    read,
)
from apply.schema_changes.table_definition import with_left
from pubsub.protocol.ids import Oid
from pubsub.protocol.lsn import Lsn
from pubsub.publisher.definitions import ColumnDefinition
from pubsub.sql.mask_rules import MaskRule

INT, TEXT = 23, 25
NOW = 700


def known(text: str, count: int | None = None) -> Attributes:
    """Parse columns with their numbers, such as "1 id, 2 a"."""
    columns = [part.split() for part in text.split(", ")]
    found = tuple(Attribute(int(number), name, INT, -1) for number, name, *_ in columns)
    return Attributes("app", count or max(column.number for column in found), "s", Lsn(0), found)


def live(text: str) -> list[ColumnDefinition]:
    """Parse columns of the catalog: "2 a later" was altered after the message, "2 a text" has another type."""
    found = []
    for part in text.split(", ") if text else ():
        number, name, *marks = part.split()
        xmin = NOW + 5 if "later" in marks else NOW - 5
        oid = TEXT if "text" in marks else INT
        found.append(
            ColumnDefinition(name, int(number), Oid(oid), -1, "", "b", Oid(oid), -1, "b", False, "", True, None, xmin)
        )
    return found


def message(text: str) -> Shape:
    return tuple((name, TEXT if mark else INT, -1) for name, *mark in (part.split() for part in text.split(", ")))


@pytest.mark.parametrize(
    ("before", "sent", "now", "count", "numbers"),
    [
        # The catalog is of the message's time.
        ("1 id, 2 a", "id, a", "1 id, 2 a", 2, (1, 2)),
        ("1 id, 2 a", "id, a, b", "1 id, 2 a, 3 b", 3, (1, 2, 3)),
        ("1 id, 2 a", "id, b", "1 id, 2 b", 2, (1, 2)),
        ("1 id, 2 a", "id, b", "1 id, 3 b", 3, (1, 3)),
        ("1 id, 2 a", "id", "1 id", 2, (1,)),
        ("1 a, 2 b", "b, a", "1 b, 2 a", 2, (1, 2)),
        ("1 id, 2 a", "id, a", "1 id, 3 a", 3, (1, 3)),
        # The catalog is newer: the message lacks later columns.
        ("1 id, 2 a", "id, a", "1 id, 2 a, 3 b later", 3, (1, 2)),
        ("1 id, 2 a", "id, a, b", "1 id, 2 a, 3 b, 4 c later", 4, (1, 2, 3)),
        # Renamed since, once and twice; swapped since.
        ("1 id, 2 a", "id, a", "1 id, 2 b later", 2, (1, 2)),
        ("1 id, 2 a", "id, x", "1 id, 2 b later", 2, (1, 2)),
        ("1 id, 2 a, 3 b", "id, a, b", "1 id, 2 b later, 3 a later", 3, (1, 2, 3)),
        ("1 id, 2 u, 3 n", "number, u, n, o", "1 number, 2 o later, 3 n, 4 u later", 4, (1, 2, 3, 4)),
        # Dropped since, whether it was known or not.
        ("1 id, 2 a", "id, a", "1 id", 2, (1, 2)),
        ("1 id, 2 a", "id, a, b", "1 id, 2 a", 3, (1, 2, None)),
        ("1 id, 2 a", "id, x", "1 id", 3, (1, None)),
        ("1 id, 2 a, 3 b", "id, a, b", "1 id, 2 a, 4 b later", 4, (1, 2, 3)),
        # A column that takes another's name, while both exist and afterwards.
        ("1 id, 2 b", "id, b, b_new", "1 id, 3 b later", 3, (1, 2, 3)),
        ("1 id, 2 b, 3 b_new", "id, b", "1 id, 3 b", 3, (1, 3)),
        ("1 id, 2 b", "id, b", "1 id, 3 b later", 3, (1, 2)),
        # Altered since without a change of its name, or in the message's own subtransaction.
        ("1 id, 2 a", "id, a", "1 id, 2 a later", 2, (1, 2)),
        ("1 id, 2 a", "id, a, b", "1 id, 2 a, 3 b later", 3, (1, 2, 3)),
        ("1 id, 2 a", "id, a, b", "1 id, 2 a, 3 b later, 4 c later", 4, (1, 2, 3)),
        ("1 id, 2 a", "id, a text", "1 id, 2 a text", 2, (1, 2)),
        # The table was dropped.
        ("1 id, 2 a", "id, a", "", 2, (1, 2)),
    ],
)
def test_columns_are_identified_by_number(before: str, sent: str, now: str, count: int, numbers: Numbers) -> None:
    assert identify(message(sent), known(before), live(now), count, NOW) == numbers


@pytest.mark.parametrize(
    ("before", "sent", "now", "count"),
    [
        # b may have been renamed to c, or dropped.
        ("1 id", "id, b", "1 id, 3 c later", 3),
        ("1 id, 2 a", "id, a, b", "1 id, 2 a, 4 b later", 4),
        # Two new names where one column was renamed since.
        ("1 id, 2 a", "id, x, y", "1 id, 2 b later", 4),
        # The message lacks a column that existed.
        ("1 id, 2 a", "id", "1 id, 2 a later", 2),
    ],
)
def test_ambiguous_columns_are_not_identified(before: str, sent: str, now: str, count: int) -> None:
    assert identify(message(sent), known(before), live(now), count, NOW) is None


def test_attributes_are_read_as_they_were_written() -> None:
    shape: Shape = (("id", INT, -1), ('a"\n', TEXT, 5))
    some = Attributes(
        "app", 4, "abc", Lsn(77), (Attribute(1, "id", INT, -1, "it's", 9),), ((3, "old"),), ((shape, (1, None)),)
    )
    assert attributes.read(some.as_json()) == some
    assert attributes.read(None) is None
    assert some.known(shape) == (1, None)


def test_columns_that_earlier_copies_left_are_kept_but_for_those_that_the_copy_fills() -> None:
    """Whatever numbers they had: these may be other columns' by now."""
    copied = known("1 id, 2 a, 5 B")
    left = with_left(copied, ["id", "old", "A", "b", "older"])
    assert left.kept == ((-1, "old"), (-2, "older"))
    assert {*left.names.values()} == {"id", "a", "B", "old", "older"}
    assert with_left(copied, ["id", "a"]) == copied
    assert with_left(with_left(copied, left.names.values()), ["id"]) == copied


def test_a_message_older_than_the_known_columns() -> None:
    # The table joined without a copy, defined as when its Delta table was created.
    now = live("1 id, 2 a, 3 b later")
    assert identify(message("id, a"), known("1 id, 2 a, 3 b"), now, 3, NOW, older=True) == (1, 2)
    assert identify(message("id, a"), known("1 id, 2 a, 3 b"), now, 3, NOW) is None


def test_a_column_that_is_left_out_is_known_while_messages_are_identified() -> None:
    """A dropped one once lent its place to a later column, whose place a replicated column then took."""
    before = replace(known("1 id, 2 name, 4 note", 4), left_out=(LeftOut(3, "ssn", True),))
    shape = tuple((name, INT, -1) for name in ("id", "name", "foo", "note"))
    now = live("1 id, 2 name, 4 n2 later, 5 x later")
    assert identify(shape, before, now, 5, NOW) is None
    assert read(before.as_json()) == before
    assert identify(
        tuple((name, INT, -1) for name in ("id", "name", "ssn", "note")), before, live("1 id, 2 name, 4 note"), 4, NOW
    ) == (1, 2, 3, 4)


def test_a_column_that_is_left_out_under_the_name_of_one_that_is_gone() -> None:
    """Both are dropped by now: nothing tells which of them the message has."""
    before = replace(known("1 id, 2 name", 3), left_out=(LeftOut(3, "ssn", True),))
    shape = (("id", INT, -1), ("name", INT, -1))
    assert identify(shape, before, live("1 id"), 3, NOW) is None
    assert identify(shape, replace(before, left_out=None), live("1 id"), 3, NOW) == (1, 2), (
        "a table that gets all columns"
    )
    shape = (*shape, ("ssn", INT, -1))
    assert identify(shape, before, live("1 id, 3 ssn"), 3, NOW) == (1, 2, 3)


@pytest.mark.parametrize(
    ("sent", "now", "numbers"),
    [
        # Dropped, and its name taken by the masked one, before the table was dropped, or that column.
        ("id, name", "", None),
        ("id, name", "1 id", None),
        # Both renamed, and dropped.
        ("id, name, t", "1 id", None),
        # They have their names.
        ("id, email, name", "1 id", (1, 2, 3)),
        ("id, email", "1 id", None),
        ("id, email", "1 id, 3 name later", None),
        ("id, email, name", "1 id, 3 name", (1, 2, 3)),
        # An ALTER TABLE in a transaction with a lower xid that took the table's lock later; and one that the message has seen.
        ("id, email, name, c", "1 id, 3 email, 4 c", None),
        ("id, name, email, c", "1 id, 2 name, 3 email, 4 c", (1, 2, 3, 4)),
        ("id, email, c", "1 id, 3 email, 4 c", (1, 3, 4)),
    ],
)
def test_a_masked_column_under_the_name_of_one_that_is_gone(sent: str, now: str, numbers: Numbers | None) -> None:
    before = replace(known("1 id, 2 email, 3 name"), left_out=(), masks={2: MaskRule("hash")})
    assert identify(message(sent), before, live(now), 4 if "c" in sent else 3, NOW) == numbers


def test_a_masked_column_that_is_dropped_stays_masked() -> None:
    """The Delta table keeps it, and rows from before may still come."""
    before = replace(known("1 id, 3 name"), kept=((2, "email"),), left_out=(), masks={2: MaskRule("hash")})
    assert before.masked.rules == {"email": MaskRule("hash")}
