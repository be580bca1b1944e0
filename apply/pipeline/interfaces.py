"""What a pipeline needs from its owner: limits, and the tables it writes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from apply.batch import Batch
from apply.conflicts import Conflicts
from apply.isolation import Failure
from apply.pipeline.dispatch import PassedSkip
from apply.staging.destination import Destination, Destinations
from catalog.records import LastCommit
from pubsub.delta.log.other_commits import OtherCommit
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.protocol.pgoutput import Relation


@dataclass(frozen=True, slots=True)
class Limits:
    """When a batch closes (rows, bytes, seconds), and the connection's timers in seconds (0: off); see Timers.

    `early`: how many batches may close before their age in a row, when the stream is quiet (trigger).  `memory`: the most bytes
    of data received but not yet staged.  `message`: the most bytes of one message.
    """

    rows: int
    nbytes: int
    age: float
    status_interval: float
    receiver_timeout: float
    memory: int = 64 << 20
    message: int = 1 << 30
    early: int = 2


class Timers(Protocol):
    """A connection's timers in seconds, 0: off.  They may change while a stream runs, as PostgreSQL's do with a reload."""

    @property
    def status_interval(self) -> float: ...

    @property
    def receiver_timeout(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Course:
    """What of a stream is applied, by LSN.

    `start`: everything up to it is durable already.  `sent_from`: the stream has no commit from before it, which may be later: a
    table that is copied follows a slot of its own up to there.  `align_at`: the first batch closes here if the stream reaches it,
    so that tables line up again after a crash between the commits of one batch.  `stop_at`: the last LSN; None: without end.
    `skip`: the finish LSN of a transaction to leave out.
    """

    start: Lsn
    sent_from: Lsn = INVALID_LSN
    align_at: Lsn | None = None
    stop_at: Lsn | None = None
    skip: Lsn = INVALID_LSN


class Stream(Protocol):
    """Where frames come from: publisher.replication.ReplicationStream, or a process of ours that decodes them."""

    last_receive: float
    """When the last frame arrived, or the stream began: time.monotonic(), seconds."""

    async def receive(self) -> Sequence[bytes]:
        """Wait for a frame, then return those that are there: copy-data payloads, in order.  Cancelling loses none."""

    async def send_status(self, written: int, flushed: int, applied: int, *, reply: bool = False) -> None:
        """Tell the sender how far this side is (LSNs, exclusive); with `reply` it is to answer with a keepalive."""

    async def close(self) -> None:
        """End the stream."""


class Tables(Protocol):
    """The tables a pipeline writes: the pipeline's questions about them, and its reports of what happened to them."""

    origin: str

    async def adapt_tables(self, batch: Batch, until_committed: Callable[[], Awaitable[None]] | None) -> Destinations:
        """Adapt the tables to the batch, and return where its relations go.

        A relation without a destination gets nothing.  Waits for sync workers whose tables the batch needs, and reads the
        catalog again where it may have changed.  Renames and alters tables as the publisher's were, after awaiting
        `until_committed`, which returns once all batches before are committed.  With `until_committed` None the batch may still
        be rolled back; NotInPrerequisiteState is raised if a table would have to be renamed or altered.

        Finding the destinations is not a call of its own: a table may leave, or be copied anew, at any later wait.
        """

    async def before_commit(self) -> None:
        """Check that this worker may still commit and store its origin; raise the reason if not."""

    async def may_write(self, destination: Destination) -> bool:
        """Wait until this worker may commit what was staged for `destination`.

        False if the table has since left the subscription, stopped, or been copied anew.
        """

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        """Store durably that others have changed rows of the table; its later destinations are `contested`."""

    def look_up(self, destination: Destination) -> None:
        """Have the rows of a table looked up that a batch did not find as it expected: later destinations are `contested`."""

    async def conflicts_found(self, relation: str, conflicts: Conflicts) -> None:
        """Log and count the conflicts of a batch that was just committed to the table."""

    def version(self, relid: int) -> Lsn:
        """Return the end LSN of the last transaction in the table (0: none, or the table has left)."""

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        """Note that the table of `destination` holds everything up to `lsn`."""


class SubscriptionTables(Tables, Protocol):
    """All tables of a subscription, which the apply worker writes: they have an origin, and some may stop alone.

    A sync worker's one table has nothing of this: its position is its own version, and its failure ends the worker.
    """

    isolates: bool
    """Whether a failing table stops alone."""

    @property
    def refresh_pending(self) -> bool:
        """Whether `refresh_columns` has work to do once the stream has come far enough."""

    def waits_for(self, position: Lsn) -> bool:
        """Tell whether a table in s becomes ready with this position."""

    async def refresh_columns(self, at: Lsn) -> None:
        """Alter the tables that REFRESH asked about to match the publisher's; everything up to `at` is committed."""

    async def unchanged(self, batch: Batch, announced: Mapping[int, Relation]) -> bool:
        """Tell whether these last messages of the batch's relations, and the publisher's catalog, require no alteration."""

    def failed(self, failures: Sequence[Failure]) -> None:
        """Note that these tables get no later changes; what is staged for them is still to be committed."""

    async def stop(self, failures: Sequence[Failure]) -> None:
        """Store durably that these tables have stopped; their last changes are committed."""

    async def durable(self, lsn: Lsn, last: LastCommit | None) -> None:
        """Store the origin: everything up to `lsn` that was decided for these tables is in Delta.

        `last` is the last transaction of it; None: there was none since the stream began.
        """

    async def skip_passed(self, passed: PassedSkip) -> None:
        """Clear SKIP: its transaction was skipped, durably, or another transaction came first."""
