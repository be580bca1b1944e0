"""Synchronize a subscription's sequences: the sequence synchronization worker (sequencesync.c).

    i ──► r    of 100 sequences at a time: one query to the publisher, one commit to the Delta table, one transaction in the
               catalog

The Delta table (tablesync.sequence_table) always has all sequences that were synchronized.  A commit replaces its rows: there
are few, and whatever an interrupted worker left undone is in the next one's.  A sequence that has left the subscription leaves the
Delta table, too.

With schema_changes = follow a sequence that the publisher has altered is taken as it is now; with refuse it is mismatched, as
it would be in PostgreSQL.  Sequences that are missing, mismatched or not readable stay in i: the worker warns of them and
fails, and another one tries again.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Final, Literal

import structlog

from apply.pipeline.commit import commit_table
from apply.publisher_identity import check_system, is_followed
from apply.staging.destination import Destination
from apply.staging.staged_table import StagedTable
from apply.worker_statistics import Figures
from catalog.records import SequenceValue, Subscription, SubscriptionSequence
from catalog.states import RelState
from catalog.store import Catalog
from pubsub import faults
from pubsub.delta import table as delta
from pubsub.delta.spark.engine import Engine
from pubsub.delta.table import Commit
from pubsub.delta.writers.arrow_writer import DirectStaged
from pubsub.delta.writers.choose_writer import TableWriters, discard
from pubsub.errors import ConnectionFailure, NotInPrerequisiteState, PublisherError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.publisher import sequences
from pubsub.publisher.connection import Connection
from pubsub.publisher.sequences import SequenceState
from pubsub.settings import Settings
from tablesync.claim_target import claim_target
from tablesync.sequence_table import sequence_table, stage

#: sequencesync.c: MAX_SEQUENCES_SYNC_PER_BATCH.
BATCH: Final = 100

_Failure = Literal["mismatched", "unreadable", "missing"]
#: The warnings of sequencesync.c: report_sequence_errors, for one sequence and for several, with the hint.
_WARNINGS: Final[dict[_Failure, tuple[str, str, tuple[str, str] | None]]] = {
    "mismatched": (
        "mismatched or renamed sequence on subscriber",
        "mismatched or renamed sequences on subscriber",
        None,
    ),
    "unreadable": (
        "insufficient privileges on publisher sequence",
        "insufficient privileges on publisher sequences",
        (
            "Grant SELECT on the sequence to the role used for the replication connection on the publisher.",
            "Grant SELECT on the sequences to the role used for the replication connection on the publisher.",
        ),
    ),
    "missing": ("missing sequence on publisher", "missing sequences on publisher", None),
}

logger = structlog.get_logger()


def is_pending(one: SubscriptionSequence) -> bool:
    """Return whether a worker has something to do for the sequence."""
    return one.leaving or one.state is RelState.INIT


class SequenceWorker:
    """Synchronizes all sequences of a subscription that are in i, once.  `figures` may be read at any time."""

    def __init__(
        self,
        subscription: Subscription,
        *,
        node_id: str,
        catalog: Catalog,
        engine: Engine,
        writers: TableWriters,
        settings: Settings,
    ) -> None:
        self.figures = Figures()
        self._subscription = subscription
        self._node_id = node_id
        self._catalog = catalog
        self._engine = engine
        self._writers = writers
        self._settings = settings
        self._lane = engine.lane()
        # Relation 0 and copy 0 are no table's.
        self._app_id = delta.application_id(node_id, subscription.oid, 0, 0)

    async def run(self) -> bool:
        """Synchronize; return whether everything that was pending has been done.

        Raises NotInPrerequisiteState if sequences could not be synchronized, after all others were; other PubsubErrors.
        """
        with self.figures.waits_for("an earlier daemon's JVM to end"):
            await self._engine.fence()
        known = await self._catalog.sequences(self._subscription.oid)
        pending = [one for one in known if one.state is RelState.INIT and not one.leaving]
        gone = [one.relid for one in known if one.leaving]
        if gone:
            await self._commit(known, {}, INVALID_LSN)
            await self._catalog.sequences_synchronized(self._subscription.oid, {}, gone)
        if not pending:
            return True
        async with await self._connect() as connection:
            identity = await check_system(connection, await self._catalog.subscription(self._subscription.oid))
            patience = self._settings.wal_retrieve_retry_interval
            if not await is_followed(self._catalog, self._subscription, identity, patience):
                return False
            if connection.server_version < sequences.FIRST_VERSION:
                raise NotInPrerequisiteState(
                    "cannot synchronize sequences if the publisher is running a version earlier than PostgreSQL 19"
                )
            await self._synchronize(connection, pending)
        return True

    async def _connect(self) -> Connection:
        try:
            return await Connection.connect(
                self._subscription.conninfo,
                replication=True,
                application_name=f"pg_{self._subscription.oid}_sequence_sync_{self._node_id}",
            )
        except ConnectionFailure as error:
            raise ConnectionFailure(
                f'sequencesync worker for subscription "{self._subscription.name}" {error.message}',
                detail=error.detail,
                hint=error.hint,
            ) from error

    async def _synchronize(self, connection: Connection, pending: Sequence[SubscriptionSequence]) -> None:
        failed: dict[_Failure, list[SubscriptionSequence]] = defaultdict(list)
        for first in range(0, len(pending), BATCH):
            batch = pending[first : first + BATCH]
            found = await self._states(connection, batch)
            values: dict[int, SequenceValue] = {}
            for place, one in enumerate(batch):
                value = self._value(one, found.get(place))
                if isinstance(value, SequenceValue):
                    values[one.relid] = value
                else:
                    failed[value].append(one)
            if not values:
                continue
            known = await self._catalog.sequences(self._subscription.oid)
            await self._commit(known, values, max(state.wal_lsn for state in found.values()))
            await faults.reached("sequences committed")
            await self._catalog.sequences_synchronized(
                self._subscription.oid,
                {one.relid: (one.asked, values[one.relid]) for one in batch if one.relid in values},
                [one.relid for one in known if one.leaving],
            )
        self._report(failed)

    async def _states(self, connection: Connection, batch: Sequence[SubscriptionSequence]) -> dict[int, SequenceState]:
        try:
            found = await sequences.sequence_states(connection, [(one.schema, one.name) for one in batch])
        except PublisherError as error:
            raise ConnectionFailure(
                f"could not fetch sequence information from the publisher: {error.message}",
                detail=error.detail,
                hint=error.hint,
            ) from error
        return {state.place: state for state in found}

    def _value(self, one: SubscriptionSequence, state: SequenceState | None) -> SequenceValue | _Failure:
        """Return the sequence's value, or why it has none (sequencesync.c: get_and_validate_seq_info)."""
        if state is None or state.readable is None:
            return "missing"
        if state.last_value is None or state.is_called is None or state.page_lsn is None:
            # Dropped while the query ran, unless the role may not read it.
            return "missing" if state.readable else "unreadable"
        if state.definition != one.definition and self._subscription.options.schema_changes == "refuse":
            return "mismatched"
        return SequenceValue(state.last_value, state.is_called, state.page_lsn, state.definition)

    def _report(self, failed: dict[_Failure, list[SubscriptionSequence]]) -> None:
        """Warn of the sequences that could not be synchronized, and raise (sequencesync.c: report_sequence_errors)."""
        for kind, (one, several, hints) in _WARNINGS.items():
            found = failed.get(kind)
            if not found:
                continue
            names = ", ".join(f'"{sequence.qualified_name}"' for sequence in found)
            logger.warning(
                "sequences could not be synchronized",
                reason=f"{one if len(found) == 1 else several} ({names})",
                subscription=self._subscription.name,
                hint=None if hints is None else hints[len(found) > 1],
            )
        if any(failed.values()):
            raise NotInPrerequisiteState(
                f'logical replication sequence synchronization failed for subscription "{self._subscription.name}"',
                detail="; ".join(
                    f"{one if len(found) == 1 else several}: {_listed(found)}"
                    for kind, (one, several, _) in _WARNINGS.items()
                    if (found := failed.get(kind))
                )
                + ".",
                hint=next(
                    (
                        hints[len(found) > 1]
                        for kind, (_, _, hints) in _WARNINGS.items()
                        if hints and (found := failed.get(kind))
                    ),
                    None,
                ),
            )

    async def _commit(
        self, known: Iterable[SubscriptionSequence], values: dict[int, SequenceValue], wal_lsn: Lsn
    ) -> None:
        """Commit what all sequences are now known to be, in place of the rows of the Delta table.

        The commit's position is the publisher's end of WAL, or just past that of the commit before.
        """
        rows = []
        path = ""
        for one in known:
            path = one.path
            value = values.get(one.relid)
            if value is None and one.last_value is not None and one.is_called is not None and one.lsn is not None:
                value = SequenceValue(one.last_value, one.is_called, one.lsn, one.definition)
            if value is not None and not one.leaving:
                rows.append((one.schema, one.name, value))
        table = sequence_table(path)
        await self._claim(path)
        held = await asyncio.to_thread(delta.committed_lsn, path, self._app_id) or INVALID_LSN
        lsn = Lsn(max(wal_lsn, held + 1))
        staged = await asyncio.to_thread(stage, self._writers, table, rows)
        if isinstance(staged, DirectStaged):
            # Whatever others have written there is replaced.
            staged.still_holds = lambda: True
        destination = Destination(0, table, self._app_id, INVALID_LSN)
        record = Commit(self._app_id, lsn, lsn)
        try:
            await commit_table(self._lane, StagedTable(destination, staged, record, len(rows), 0, 0), held)
        finally:
            await self._engine.run_without_spark(discard, staged)

    async def _claim(self, path: str) -> None:
        async def start_spark() -> None:
            with self.figures.waits_for("Spark to start"):
                await self._engine.start()

        await claim_target(
            sequence_table(path),
            self._subscription,
            self._node_id,
            self._engine,
            self._settings.housekeeping,
            start_spark,
        )


def _listed(found: Sequence[SubscriptionSequence]) -> str:
    """Name some of the sequences: a message of the catalog is for people."""
    more = len(found) - 10
    return ", ".join(one.qualified_name for one in found[:10]) + (f" and {more} more" if more > 0 else "")
