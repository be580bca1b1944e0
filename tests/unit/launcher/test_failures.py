"""The messages about a worker's failure."""

from __future__ import annotations

import pytest

from apply.isolation import will_last
from launcher.failures import cause_of, foreseen, is_absence, typed
from pubsub.errors import ConnectionFailure, DataCorrupted, InvalidValue, ProtocolViolation, PubsubError
from pubsub.masks import WrongMaskKey


def test_the_first_cause_of_nested_groups() -> None:
    first = ValueError("one")
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [first, ValueError("two")]), ValueError("three")])
    assert cause_of(group) is first
    assert cause_of(first) is first


def test_our_own_errors_stay_as_they_are() -> None:
    error = InvalidValue("no", detail="d", hint="h", context="c")
    assert typed(ExceptionGroup("g", [error])) is error
    assert typed(ConnectionFailure("gone")).sqlstate == "08006"


def test_what_a_publisher_says_at_length_is_cut() -> None:
    known = typed(PubsubError("m" * 1_000_000, detail="d" * 1_000_000, hint="short"))
    assert known.message.startswith("mmm")
    assert max(len(known.message), len(known.detail or "")) < 5000
    assert known.hint == "short"


@pytest.mark.parametrize(
    ("text", "message", "sqlstate"),
    [
        ("", "RuntimeError: RuntimeError", "XX000"),
        ("\n  first\nsecond", "RuntimeError: first", "XX000"),
        (
            "An error occurred while calling o70.save.\n: org.apache.spark.SparkException: Job aborted.\n\tat x",
            "RuntimeError: org.apache.spark.SparkException: Job aborted.",
            "XX000",
        ),
        (
            (
                "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n  File x\n"
                "psycopg.errors.InsufficientPrivilege: permission denied for table t\n"
            ),
            "permission denied for table t",
            "42501",
        ),
        (
            "Traceback\npsycopg.OperationalError: consuming input failed: server closed the connection unexpectedly\n",
            "consuming input failed: server closed the connection unexpectedly",
            "08006",
        ),
        (
            (
                "Traceback\npubsub.protocol.refused_values.InvalidText: first\n\nThe above exception …\n"
                'pubsub.errors.InvalidValue: column "a" of table "public.t": no\n'
            ),
            'column "a" of table "public.t": no',
            "22023",
        ),
    ],
)
def test_spark_errors_keep_their_message(text: str, message: str, sqlstate: str) -> None:
    error = typed(RuntimeError(text))
    # An error of ours that comes back from a task is logged as one that a worker raises itself, without a traceback.
    assert foreseen(RuntimeError(text)) is (sqlstate != "XX000")
    assert error.message == message
    assert error.sqlstate == sqlstate


@pytest.mark.parametrize(
    ("error", "lasts"),
    [
        (InvalidValue("no"), True),
        (DataCorrupted("no"), True),
        (PubsubError("permission denied for table t", sqlstate="42501"), True),
        (ConnectionFailure("gone"), False),
        (PubsubError("no space left", sqlstate="53100"), False),
        (PubsubError("a bug"), False),
        (PubsubError('slot "x" is active', sqlstate="55006"), False),
        (PubsubError('snapshot "x" does not exist', sqlstate="42704"), False),
        (WrongMaskKey("PUBSUB_MASK_KEY is not set"), False),
        (InvalidValue('column "c" of table "public.snapshots": no'), True),
    ],
)
def test_whether_a_table_is_to_stop(error: PubsubError, lasts: bool) -> None:
    assert will_last(error) is lasts


@pytest.mark.parametrize(
    ("error", "absent"),
    [
        (ConnectionFailure("could not connect"), True),
        (PubsubError("terminating connection due to administrator command", sqlstate="57P01"), True),
        (PubsubError("the database system is starting up", sqlstate="57P03"), True),
        (PubsubError('snapshot "00000003-1" does not exist', sqlstate="42704"), True),
        (ProtocolViolation("an LSN goes back"), False),
        (PubsubError("canceling statement due to user request", sqlstate="57014"), False),
        (InvalidValue("no"), False),
    ],
)
def test_whether_the_publisher_is_away(error: PubsubError, absent: bool) -> None:
    assert is_absence(error) is absent
