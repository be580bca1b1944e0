"""Send what a transaction has changed to the outputs that get it (reorderbuffer.c: ReorderBufferReplay, ReorderBufferStreamTXN)."""

from __future__ import annotations

from collections.abc import Callable

from pubsub.errors import NotInPrerequisiteState
from pubsub.protocol.lsn import Lsn
from walsender.decode.assembly import Changes
from walsender.decode.output import Ending, Origin, Output
from walsender.decode.transactions import Part
from walsender.xlog.xact import XactEnd


class Sender:
    """Sends transactions' parts.

    `start` is called for an output that has sent nothing yet; `origin` finds a replication origin by its number.
    """

    def __init__(self, start: Callable[[Output], None], origin: Callable[[int], Origin]) -> None:
        self._start = start
        self._origin = origin

    def commit(self, part: Part, to: list[Output], ending: Ending, end: XactEnd) -> None:
        """Send a transaction that has committed to the outputs `to`."""
        txn, assembly = part.txn, part.assembly
        for output in to:
            if not output.started:
                self._start(output)
        if end.twophase_xid and assembly.rules.prepares(end.gid):
            for output in to:
                if not part.two_phase:
                    output.fail(prepared_before(txn.xid, ending.final_lsn))
            if part.two_phase and txn.has_base:
                self.finish_prepared(part, to, ending, commit=True)
        elif txn.has_base or end.invalidations:
            # A transaction that only invalidates caches has changed the catalogs, too (SnapBuildCommitTxn).
            if part.streamed:
                self._stream_rest(part)
                for output in to:
                    output.stream_commit(part, ending)
            else:
                changes = assembly.take(part, set(to))
                for output in to:
                    output.send(part, ending, changes)

    def stream(self, part: Part) -> None:
        """Send what a transaction in progress has changed so far (ReorderBufferStreamTXN)."""
        assembly = part.assembly
        account = assembly.memory.account(part)
        outputs = assembly.outputs_of(part.txn)
        changes = assembly.take(part, set(outputs))
        origin = self._origin(account.first_origin)
        for output in outputs:
            output.stream(part, account.first_lsn, account.last_lsn, origin, changes)
        part.streamed = True

    def _stream_rest(self, part: Part) -> None:
        memory = part.assembly.memory
        if memory.account(part).first_lsn:
            self.stream(part)
            memory.sent(part)

    def prepare(self, part: Part, to: list[Output], ending: Ending, *, gone: bool) -> None:
        """Send a transaction that is prepared; without what it did, if that is `gone`."""
        if part.streamed:
            if not gone:
                self._stream_rest(part)
            for output in to:
                output.stream_prepare(part, ending)
            return
        changes = Changes((), set(to), 0) if gone else part.assembly.take(part, set(to))
        for output in to:
            output.prepare(part, ending, changes)

    def finish_prepared(self, part: Part, to: list[Output], ending: Ending, *, commit: bool) -> None:
        """Send COMMIT PREPARED or ROLLBACK PREPARED of a transaction with changes (ReorderBufferFinishPrepared).

        A server sends it for transactions without changes, too, whose PREPARE it has not sent.
        """
        late = [output for output in to if commit and part.prepared_at < self._two_phase_at(output)]
        # They were not sent it at its PREPARE: the prepared transaction is sent now.
        changes = part.assembly.take(part, set(late)) if late else None
        for output in to:
            output.finish_prepared(part, ending, changes if output in late else None, commit=commit)

    @staticmethod
    def _two_phase_at(output: Output) -> int:
        return output.start if output.two_phase_at is None else output.two_phase_at


def prepared_before(xid: int, lsn: int) -> NotInPrerequisiteState:
    return NotInPrerequisiteState(
        f"transaction {xid} was prepared before the decoding began, and is committed now",
        hint="Begin further back, or after it.",
        context=f"WAL position {Lsn(lsn)}",
    )
