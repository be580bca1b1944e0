"""What a pipeline is given by those around it: its limits, and whom it asks about tables and tells about them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from apply.batch import Batch
from apply.conflicts import Conflicts
from apply.isolation import Failure
from apply.pipeline.dispatch import PassedSkip
from apply.staging.destination import Destination
from pubsub.delta.log import OtherCommit
from pubsub.protocol.lsn import Lsn
from pubsub.protocol.pgoutput import Relation


@dataclass(frozen=True, slots=True)
class Limits:
    """When a batch closes (rows, bytes, seconds), and the timers of the connection in seconds (0: off).

    `memory` and `message`: the bytes of what is received and not staged, and of one message.
    """

    rows: int
    nbytes: int
    age: float
    status_interval: float
    receiver_timeout: float
    memory: int = 64 << 20
    message: int = 1 << 30


class Tables(Protocol):
    """What the pipeline asks about the tables it writes, and tells about them."""

    origin: str
    isolates: bool
    """Whether a table that fails stops alone."""

    async def destinations(
        self, batch: Batch, quiet: Callable[[], Awaitable[None]] | None
    ) -> Mapping[tuple[str, str], Destination]:
        """Where the batch's relations go, by schema and name; a relation that is not in it gets nothing.

        Tables that the batch needs altered are altered, after `quiet`: then all batches before are committed.  None: the batch may
        yet be rolled back, and NotInPrerequisiteState is raised where a table would have to be altered.
        """

    async def unchanged(self, told: Mapping[int, Relation]) -> bool:
        """Whether these messages, the last of their relations, ask nothing of the tables, as the publisher's catalog says too."""

    @property
    def asked(self) -> bool:
        """Whether `settle_columns` has something to do as soon as the stream has come far enough."""

    async def settle_columns(self, at: Lsn) -> None:
        """Everything up to `at` is decided and committed: tables whose columns were asked for become what the publisher's are."""

    async def before_commit(self) -> None:
        """What was received may be committed, and its origin stored; raises why it must not be any more."""

    async def may_write(self, destination: Destination) -> bool:
        """Waits until this worker may commit what was staged for `destination`.

        False when the table has left the subscription or stopped meanwhile, or is another copy than then.
        """

    def failed(self, failures: Sequence[Failure]) -> None:
        """These tables get nothing more; what is staged for them is not yet committed."""

    async def stop(self, failures: Sequence[Failure]) -> None:
        """What these tables were still to get is committed: store, durably, that they have stopped."""

    async def others_wrote(self, destination: Destination, commits: Sequence[OtherCommit]) -> None:
        """Others have changed rows of the table: store it, durably, and give it out as such from now on."""

    async def met(self, relation: str, conflicts: Conflicts) -> None:
        """These conflicts were met in what is committed to the table now: log and count them."""

    def version(self, relid: int) -> Lsn:
        """The end LSN of the last transaction in the table (0: none, or the table has left)."""

    def committed(self, destination: Destination, lsn: Lsn) -> None:
        """The table of `destination` holds everything up to `lsn`."""

    async def durable(self, lsn: Lsn) -> None:
        """Everything up to `lsn` that was decided for these tables is in Delta."""

    async def skip_passed(self, passed: PassedSkip) -> None:
        """SKIP has had its effect, durably, or came too late: it is taken back."""
