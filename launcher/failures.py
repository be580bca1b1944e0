"""What is done about a worker's failure: decided here and nowhere else.

Every failure ends its worker with everything it had not committed undone by nature: nothing is acknowledged that is not
durable.  The worker starts again after wal_retrieve_retry_interval, unless the subscription says disable_on_error.
"""

from __future__ import annotations

import re
import traceback
from typing import Final

import psycopg

from pubsub import errors
from pubsub.delta.engine import said
from pubsub.errors import PubsubError
from pubsub.publisher.conninfo import split_report

_OF_A_TASK: Final = re.compile(r"(pubsub|psycopg)\.(?:\w+\.)*(\w+): (.+)")


def cause_of(error: BaseException) -> BaseException:
    """The first error of a group of tasks: what made the others end."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def foreseen(error: BaseException) -> bool:
    """Whether the error says all that is to be known; of others the traceback is wanted."""
    return isinstance(cause_of(error), PubsubError | psycopg.Error)


def typed(error: BaseException) -> PubsubError:
    """A PubsubError for whatever a worker died of; Spark's and Python's errors keep their first line."""
    cause = cause_of(error)
    if isinstance(cause, PubsubError):
        return cause
    if isinstance(cause, psycopg.Error):
        # A copy's own connection broke, or its server refused.
        message, detail, hint = split_report(str(cause))
        code = cause.sqlstate or ("08006" if isinstance(cause, psycopg.OperationalError) else "XX000")
        return PubsubError(
            message, sqlstate=code, detail=cause.diag.message_detail or detail, hint=cause.diag.message_hint or hint
        )
    text = str(cause).strip()
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    # A Python task's error reaches Spark as a traceback: its last line says what happened.
    ours = [found for line in lines if (found := _OF_A_TASK.match(line))]
    if ours:
        package, name, message = ours[-1].groups()
        return PubsubError(message, sqlstate=_sqlstate(package, name))
    return PubsubError(f"{type(cause).__name__}: {said(cause)}", sqlstate="XX000")


def traced(error: BaseException) -> str:
    """The error's traceback as Python prints it, for the log: made here, so that no renderer adds what variables hold."""
    return "".join(traceback.format_exception(error)).rstrip()


def _sqlstate(package: str, name: str) -> str:
    """What the error of that name, which a Python task died of, has for a code."""
    known = getattr(errors if package == "pubsub" else psycopg.errors, name, None)
    code = getattr(known, "default_sqlstate" if package == "pubsub" else "sqlstate", None)
    return code or "XX000"
