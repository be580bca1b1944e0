"""Describe a worker's failure: find its cause, turn it into a PubsubError, format its traceback.

launcher.runner decides what to do about a failure.  What a failed worker had not committed needs no undoing: nothing is
acknowledged before it is durable, so the publisher sends it again.
"""

from __future__ import annotations

import re
import traceback
from typing import Final

import psycopg

from apply.isolation import NO_SNAPSHOT
from pubsub import errors
from pubsub.errors import PubsubError, SerializationFailure
from pubsub.publisher.conninfo import split_report
from pubsub.texts import first_line

_LONGEST: Final = 4000  # characters of one of an error's texts
# A connection that is not made or breaks; a shutdown, a crash, and a server that takes no connections yet (errcodes.txt).
_AWAY: Final = frozenset({"08000", "08001", "08003", "08004", "08006", "57P01", "57P02", "57P03"})
_OF_A_TASK: Final = re.compile(r"(pubsub|psycopg)\.(?:\w+\.)*(\w+): (.+)")


def cause_of(error: BaseException) -> BaseException:
    """Return the first error of an exception group, which made the other tasks end; another error as it is."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def foreseen(error: BaseException) -> bool:
    """Return whether the error's text is enough; other errors are logged with their traceback."""
    cause = cause_of(error)
    return isinstance(cause, PubsubError | psycopg.Error) or _of_a_task(cause) is not None


def is_absence(error: PubsubError) -> bool:
    """Return whether the publisher was away, or has ended the connection: as it does when it, or the network, is restarted."""
    # A snapshot that was exported is gone with its session.
    return error.sqlstate in _AWAY or error.message.startswith(NO_SNAPSHOT)


def typed(error: BaseException) -> PubsubError:
    """Return the error that ended a worker as a PubsubError; Spark's and Python's errors keep their first line.

    What a publisher says can be of any length: no text is longer than the catalog, logs and `status` can do with.
    """
    known = _typed(error)
    for name in ("message", "detail", "hint", "context"):
        text = getattr(known, name)
        if text is not None and len(text) > _LONGEST:
            setattr(known, name, f"{text[:_LONGEST]} … ({len(text)} characters)")
    return known


def _typed(error: BaseException) -> PubsubError:
    cause = cause_of(error)
    if isinstance(cause, PubsubError):
        return cause
    if isinstance(cause, psycopg.Error):
        # The connection of a copy broke, or the server refused the copy.
        message, detail, hint = split_report(str(cause))
        code = cause.sqlstate or ("08006" if isinstance(cause, psycopg.OperationalError) else "XX000")
        return PubsubError(
            message, sqlstate=code, detail=cause.diag.message_detail or detail, hint=cause.diag.message_hint or hint
        )
    found = _of_a_task(cause)
    if found is not None:
        package, name, message = found.groups()
        if (package, name) == ("pubsub", SerializationFailure.__name__):
            return SerializationFailure(message)
        return PubsubError(message, sqlstate=_sqlstate(package, name))
    return PubsubError(f"{type(cause).__name__}: {first_line(cause)}", sqlstate="XX000")


def _of_a_task(cause: BaseException) -> re.Match[str] | None:
    """Return what a Python task of Spark's says of an error of ours: a traceback, whose last line says what happened."""
    found = [match for line in str(cause).splitlines() if (match := _OF_A_TASK.match(line.strip()))]
    return found[-1] if found else None


def traced(error: BaseException) -> str:
    """Return the error's traceback as Python prints it: a log renderer could add the values of variables."""
    return "".join(traceback.format_exception(error)).rstrip()


def _sqlstate(package: str, name: str) -> str:
    """Return the SQLSTATE of the error class `name` of `package`, which ended one of Spark's Python tasks."""
    known = getattr(errors if package == "pubsub" else psycopg.errors, name, None)
    code = getattr(known, "default_sqlstate" if package == "pubsub" else "sqlstate", None)
    # Without a code of the server's the connection broke.
    return code or ("08006" if known is psycopg.OperationalError else "XX000")
