"""on_table_error = isolate: stop a failing table alone, and go on with the rest of its batch.

A batch is staged whole before its first commit, so a table that cannot be staged is found while nothing is in Delta.  It still
gets the transactions before the failing one, in the same batch, and then nothing more: it holds what the publisher held at one
moment.  Staging starts over after each failure, since failures are rare.

    stage ── fails for table t at transaction x ──► stage again, t up to before x ──► commit ──► t is stored as stopped ──► origin

A crash before the table is stored as stopped loses nothing: the transaction is received again, and fails again.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final

from apply.batch import Batch, Transaction
from apply.staging.destination import Destination, Destinations
from apply.staging.stage_batch import stage_batch
from apply.staging.staged_table import StagedTable
from catalog.records import SubscriptionRel
from pubsub.delta.writers.choose_writer import TableWriters
from pubsub.errors import DataCorrupted, ObjectInUse, PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.sql.identifiers import quote_identifier, quote_qualified

# Connections, resources, an administrator, the system, other writers, how the daemon was started, internal errors: another
# attempt may succeed.
_PASSING: Final = frozenset({"08", "25", "40", "53", "57", "58", "F0", "XX"})
#: How the error begins: a publisher that was restarted knows no snapshot from before (snapmgr.c: ImportSnapshot).
NO_SNAPSHOT: Final = ('snapshot "', "invalid snapshot identifier")

StopAlone = Callable[[int, PubsubError, Lsn], Awaitable[None]]
"""Stop the table with this relid alone, at this LSN; raises the error if the subscription does not isolate failures."""


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a table stops, and the finish LSN of the first transaction that it does not get."""

    relid: int
    error: PubsubError
    lsn: Lsn


def will_last(error: PubsubError) -> bool:
    """Return whether a table's failure would recur at every attempt."""
    if error.sqlstate == DataCorrupted.default_sqlstate:
        return True
    passing = error.sqlstate[:2] in _PASSING or error.sqlstate == ObjectInUse.default_sqlstate
    return not passing and not error.message.startswith(NO_SNAPSHOT)


def is_own(error: PubsubError) -> bool:
    """Return whether the error is one table's own and lasting, so that the table stops."""
    return error.relid is not None and will_last(error)


def failure(error: PubsubError, batch: Batch) -> Failure:
    """Return the failure of the table that `error` is attributed to."""
    assert error.relid is not None
    transaction = _transaction(batch, error) or batch.transactions[0]
    return Failure(error.relid, error, transaction.final_lsn)


def hint_to_resync(error: PubsubError, subscription: str, relation: SubscriptionRel) -> str:
    """Return the hint for a table that stopped alone: the error's own, and how to bring the table back."""
    name = quote_qualified(relation.schema, relation.name)
    resync = f"ALTER SUBSCRIPTION {quote_identifier(subscription)} RESYNC TABLE {name} copies the table anew."
    return resync if error.hint is None or "RESYNC TABLE" in error.hint else f"{error.hint} {resync}"


def stage_isolating(
    batch: Batch, destinations: Destinations, writers: TableWriters, origin: str
) -> tuple[list[StagedTable], list[Failure]]:
    """Stage as stage_batch does, but leave out failing tables, or the transactions from their failure on.

    Raises errors that are not one table's own.
    """
    failures: dict[int, Failure] = {}
    while True:
        try:
            return stage_batch(batch, destinations, writers, origin), list(failures.values())
        except PubsubError as error:
            if error.relid is None or not will_last(error):
                raise
            failures[error.relid] = failure(error, batch)
            destinations = [_narrowed(some, error, batch) for some in destinations]


def _narrowed(
    destinations: Mapping[tuple[str, str], Destination], error: PubsubError, batch: Batch
) -> Mapping[tuple[str, str], Destination]:
    """Limit the failing table to the transactions before the failing one.

    The table is left out if there are none, or if the failing transaction is unknown.
    """
    transaction = _transaction(batch, error)
    found = {}
    for name, destination in destinations.items():
        if destination.relid != error.relid:
            found[name] = destination
        elif transaction is not None and (
            destination.stops_before is None or transaction.end_lsn < destination.stops_before
        ):
            end = transaction.end_lsn
            if any(destination.after < t.end_lsn < end for t in batch.transactions):
                found[name] = replace(destination, stops_before=end)
    return found


def _transaction(batch: Batch, error: PubsubError) -> Transaction | None:
    return next((t for t in batch.transactions if t.final_lsn == error.finish_lsn), None)
