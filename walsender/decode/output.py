"""What one output plugin is given: transactions in the order in which they end, or parts of them while they last.

Several outputs can be fed by one decoder.  What an output has to do is done at once, if it can take it; otherwise, and for
large transactions, it is queued, and done in steps by `proceed`.  An output that fails does not concern the others.

Follows reorderbuffer.c (ReorderBufferReplay, ReorderBufferStreamTXN, ReorderBufferPrepare, ReorderBufferFinishPrepared).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.reorderbuffer.buffer import Statistics
from walsender.decode.assembly import BATCH, Changes, Rules
from walsender.decode.relations import View
from walsender.decode.replay import Replay
from walsender.decode.transactions import Part
from walsender.historic.names import TextSettings
from walsender.plugins.failure import failure_of
from walsender.plugins.plugin import OutputPlugin, SentTransaction

_numbers: Final = itertools.count(1)


class Origin(NamedTuple):
    """Where a transaction came from; id 0: from here."""

    number: int = 0
    name: str | None = None
    lsn: int = 0


@dataclass(frozen=True, slots=True)
class Ending:
    """What the record of a transaction's end, or of its PREPARE, says; LSNs and times as SentTransaction has them."""

    final_lsn: int
    end_lsn: int
    time: int
    origin: Origin
    gid: bytes = b""

    def tell(self, sent: SentTransaction) -> None:
        sent.final_lsn, sent.end_lsn, sent.time = self.final_lsn, self.end_lsn, self.time
        if self.origin.number:
            sent.origin_id, sent.origin_name, sent.origin_lsn = self.origin
        if self.gid:
            sent.gid = self.gid


@dataclass(eq=False, slots=True)
class Sent:
    """What was sent of a transaction that has not ended, and its replay, if it was streamed."""

    txn: SentTransaction
    replay: Replay


class Output:
    """One output plugin.

    `texts`: the settings that its values' text depends on; outputs with the same ones share the object.  `alike`: equal for
    outputs that send the same bytes, but for where they begin.  `start`: transactions
    whose commit record lies before this LSN are not sent; 0: those before the consistent point.  `two_phase_at`: the LSN from
    which on transactions were, or are, sent at PREPARE; None: where decoding starts.  `may_go_on` is asked after each step of
    queued work, of `step` changes at most.  `on_failure` gets the error that ends the output; without it the error is raised.
    """

    def __init__(
        self,
        plugin: OutputPlugin[Any],
        texts: TextSettings,
        rules: Rules,
        alike: Hashable = None,
        *,
        start: int = 0,
        two_phase_at: int | None = None,
        may_go_on: Callable[[], bool] = lambda: True,
        on_failure: Callable[[PubsubError], None] | None = None,
        step: int = BATCH,
    ) -> None:
        self.number = next(_numbers)
        self.plugin = plugin
        self.texts = texts
        self.rules = rules
        self.alike = alike
        self.start = start
        self.wanted = start or 1 << 64
        self.two_phase_at = two_phase_at
        self.started = False
        """Whether it was checked that all relations can be sent."""
        self.failed = False
        self.statistics = Statistics()
        """What was sent, as in pg_stat_replication_slots, since it was last given on (fanout.py: count)."""
        self.views: dict[int, View] = {}
        """Relations as it sends them, by the number that changes have."""
        self.joining: deque[tuple[int, Callable[[], None]]] = deque()
        """What to call before a transaction is sent whose commit record lies at or after an LSN, in that order."""
        self.may_go_on = may_go_on
        self._on_failure = on_failure
        self._step = step
        self._queue: deque[tuple[Iterator[None], Changes | None]] = deque()

    @property
    def waits(self) -> bool:
        """Whether there is work that was not done yet."""
        return bool(self._queue)

    def proceed(self) -> bool:
        """Do queued work for as long as it may go on; return whether all is done.  Raises what a plugin raises."""
        queue = self._queue
        while queue:
            if not self.may_go_on():
                return False
            work, changes = queue[0]
            try:
                for _ in work:
                    if not self.may_go_on():
                        return False
            except Exception as error:
                self._failed(error)
                return True
            queue.popleft()
            if changes is not None:
                changes.leave(self)
        return True

    def _failed(self, error: Exception) -> None:
        """End the output: what is left of its transaction cannot be sent.  Without `on_failure` the error goes on."""
        if self._on_failure is None and not isinstance(error, PubsubError):
            self.discard()
            self.failed = True
            raise error
        self.fail(failure_of(self.plugin, error))

    def fail(self, error: PubsubError) -> None:
        """End the output."""
        self.discard()
        self.failed = True
        if self._on_failure is None:
            raise error
        self._on_failure(error)

    def discard(self) -> None:
        """Leave all work undone."""
        while self._queue:
            work, changes = self._queue.popleft()
            work.close()  # type: ignore[attr-defined]
            if changes is not None:
                changes.leave(self)

    def join(self, lsn: int) -> None:
        """Have those join that want transactions from before or at `lsn`."""
        while self.joining and self.joining[0][0] <= lsn:
            self.joining.popleft()[1]()

    def _do(self, work: Iterator[None], changes: Changes | None = None) -> None:
        if self.failed:
            if changes is not None:
                changes.leave(self)
            return
        self._queue.append((work, changes))
        if len(self._queue) == 1:
            self.proceed()

    # Transactions that have ended

    def send(self, part: Part, end: Ending, changes: Changes) -> None:
        """Send a committed transaction of which nothing was sent."""
        few = changes.few
        queued = few is None or len(few) > self._step or part.errors or self._queue or self.failed
        if few is None or queued or not self.may_go_on():
            self._do(self._send(part, self._error(part), end, changes), changes)
            return
        # The way of nearly all transactions.
        try:
            if self.joining:
                self.join(end.final_lsn)
            sent = SentTransaction(part.txn.xid, part.txn.first_lsn, 0, 0, 0)
            end.tell(sent)
            self.plugin.begin(sent)
            Replay(self.views, self.plugin, sent).run(few)
            self.plugin.commit(sent)
            self.statistics.total_txns += 1
            self.statistics.total_bytes += changes.size
        except Exception as error:
            self._failed(error)
        finally:
            changes.leave(self)

    def _send(self, part: Part, error: PubsubError | None, end: Ending, changes: Changes) -> Iterator[None]:
        if error is not None:
            raise error
        self.join(end.final_lsn)
        sent = SentTransaction(part.txn.xid, part.txn.first_lsn, 0, 0, 0)
        end.tell(sent)
        self.plugin.begin(sent)
        yield from self._replay(Replay(self.views, self.plugin, sent), changes)
        self.plugin.commit(sent)

    def _replay(self, replay: Replay, changes: Changes, *, first: bool = True) -> Iterator[None]:
        """Send changes, the transaction's `first` ones or more of them."""
        counted = self.statistics
        counted.total_txns += first
        counted.total_bytes += changes.size
        if changes.spilled:
            counted.spill_txns += first
            counted.spill_count += 1
            counted.spill_bytes += changes.size
        step = self._step
        for batch in changes.batches():
            if len(batch) <= step:
                replay.run(batch)
                yield
                continue
            for start in range(0, len(batch), step):
                replay.run(batch[start : start + step])
                yield

    # Streams

    def stream(self, part: Part, first_lsn: int, last_lsn: int, origin: Origin, changes: Changes) -> None:
        """Send what a transaction in progress has changed so far; `origin`: of its first change."""
        first = not part.streamed
        state, error = self._state(part), self._error(part)

        def work() -> Iterator[None]:
            if error is not None:
                raise error
            if first:
                state.txn.origin_id, state.txn.origin_name = origin.number, origin.name
            self.plugin.stream_start(state.txn, first_lsn, first)
            self.statistics.stream_txns += first
            self.statistics.stream_count += 1
            self.statistics.stream_bytes += changes.size
            yield from self._replay(state.replay, changes, first=first)
            self.plugin.stream_stop(state.txn, last_lsn)

        self._do(work(), changes)

    def stream_commit(self, part: Part, end: Ending) -> None:
        state = self._state(part)

        def work() -> Iterator[None]:
            end.tell(state.txn)
            self.plugin.stream_commit(state.txn)
            yield

        self._do(work())

    def stream_abort(self, part: Part, xid: int, lsn: int, time: int) -> None:
        state = self._state(part)

        def work() -> Iterator[None]:
            self.plugin.stream_abort(state.txn, xid, lsn, time)
            yield

        self._do(work())

    # Prepared transactions

    def prepare(self, part: Part, end: Ending, changes: Changes | None) -> None:
        """Send a transaction at its PREPARE; without `changes` only take note of it."""
        state, error = self._state(part), self._error(part)

        def work() -> Iterator[None]:
            _tell_prepared(state.txn, end)
            if changes is not None:
                yield from self._prepare(state, error, changes)

        self._do(work(), changes)

    def _prepare(self, state: Sent, error: PubsubError | None, changes: Changes) -> Iterator[None]:
        if error is not None:
            raise error
        sent = state.txn
        self.plugin.begin_prepare(sent)
        yield from self._replay(Replay(self.views, self.plugin, sent), changes)
        self.plugin.prepare(sent)

    def stream_prepare(self, part: Part, end: Ending) -> None:
        """Send the PREPARE of a transaction that was streamed."""
        state = self._state(part)

        def work() -> Iterator[None]:
            _tell_prepared(state.txn, end)
            self.plugin.stream_prepare(state.txn)
            yield

        self._do(work())

    def finish_prepared(self, part: Part, end: Ending, changes: Changes | None, *, commit: bool) -> None:
        """Send COMMIT PREPARED or ROLLBACK PREPARED; with `changes` the prepared transaction first."""
        state, error = self._state(part), self._error(part)

        def work() -> Iterator[None]:
            if changes is not None:
                yield from self._prepare(state, error, changes)
            end.tell(state.txn)
            if commit:
                self.plugin.commit_prepared(state.txn)
            else:
                self.plugin.rollback_prepared(state.txn)
            yield

        self._do(work(), changes)

    # Messages

    def message(
        self, sent: SentTransaction | None, lsn: int, end_lsn: int, xid: int, prefix: bytes, content: bytes
    ) -> None:
        """Send a message that belongs to no transaction's changes; its record lies between the LSNs."""

        def work() -> Iterator[None]:
            self.join(lsn)
            self.plugin.message(sent, end_lsn, xid, False, prefix, content)
            yield

        self._do(work())

    def _state(self, part: Part) -> Sent:
        state: Sent | None = part.sent.get(self)
        if state is None:
            sent = SentTransaction(part.txn.xid, part.txn.first_lsn, 0, 0, 0)
            state = part.sent[self] = Sent(sent, Replay(self.views, self.plugin, sent))
        return state

    def _error(self, part: Part) -> PubsubError | None:
        """Return the error of the first change that cannot be sent."""
        errors = [error for (number, _), error in part.errors.items() if number in (0, self.number)]
        if not errors:
            return None
        lsn, error = min(errors, key=lambda one: one[0])
        error.context = error.context or f"change at WAL position {Lsn(lsn)} of transaction {part.txn.xid}"
        return error


def _tell_prepared(sent: SentTransaction, end: Ending) -> None:
    end.tell(sent)
    sent.origin_id, sent.origin_name, sent.origin_lsn = end.origin
    sent.prepare_end_lsn, sent.prepare_time = end.end_lsn, end.time
