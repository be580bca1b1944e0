"""What a worker's failure is called."""

from __future__ import annotations

import pytest

from launcher.failures import cause_of, typed
from pubsub.errors import ConnectionFailure, InvalidValue


def test_the_first_cause_of_nested_groups() -> None:
    first = ValueError("one")
    group = ExceptionGroup("outer", [ExceptionGroup("inner", [first, ValueError("two")]), ValueError("three")])
    assert cause_of(group) is first
    assert cause_of(first) is first


def test_our_own_errors_stay_as_they_are() -> None:
    error = InvalidValue("no", detail="d", hint="h", context="c")
    assert typed(ExceptionGroup("g", [error])) is error
    assert typed(ConnectionFailure("gone")).sqlstate == "08006"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "RuntimeError: RuntimeError"),
        ("\n  first\nsecond", "RuntimeError: first"),
        (
            "An error occurred while calling o70.save.\n: org.apache.spark.SparkException: Job aborted.\n\tat x",
            "RuntimeError: org.apache.spark.SparkException: Job aborted.",
        ),
        (
            (
                "An exception was thrown from the Python worker:\nTraceback (most recent call last):\n  File x\n"
                "psycopg.errors.InsufficientPrivilege: permission denied for table t\n"
            ),
            "permission denied for table t",
        ),
        (
            (
                "Traceback\npubsub.protocol.types.InvalidText: first\n\nThe above exception …\n"
                'pubsub.errors.InvalidValue: column "a" of table "public.t": no\n'
            ),
            'column "a" of table "public.t": no',
        ),
    ],
)
def test_what_spark_said(text: str, message: str) -> None:
    error = typed(RuntimeError(text))
    assert error.message == message
    assert error.sqlstate == "XX000"
