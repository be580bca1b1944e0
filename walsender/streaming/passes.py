"""A pass over the WAL in the spool, for the streams that are where it is.

    spool ─► reader ─► decoder ─┬─► output ─► fanout ─┬─► subscriber
                                │                     └─► subscriber      the same publications and options
                                └─► output ─► fanout ───► subscriber

A stream that is behind the others has a pass of its own, which reads as fast as its client takes what comes.  When that
pass has reached the end of the WAL, another pass that is there takes its streams over (sharing.py: absorb).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from pubsub.errors import PubsubError
from pubsub.reorderbuffer.buffer import ReorderBuffer
from walsender.decode.decoder import Decoder
from walsender.decode.output import Output
from walsender.decode.snapbuild import State
from walsender.feed.spool import Spool
from walsender.historic.encodings import python_encoding
from walsender.historic.state import CatalogState
from walsender.historic.upstream import SessionTexts
from walsender.plugin_request import PluginMaker, PluginRequest
from walsender.streaming.ahead import Ahead
from walsender.streaming.fanout import Fanout
from walsender.streaming.spool_reader import SpoolReader
from walsender.streaming.subscriber import STOPPED, Subscriber
from walsender.xlog.formats import format_of_version
from walsender.xlog.geometry import Geometry
from walsender.xlog.reader import WalReader

_PIECE: Final = 256 << 10
"""Bytes of WAL that are read at a time, before another pass has its turn."""
_TURN: Final = 0.02
"""Seconds for which all outputs send at a time."""
_MOST_AHEAD: Final = 32 << 20
"""Bytes of WAL that are read while an output is busy with what came before."""
_RESTARTS: Final = 1000

Warned = Callable[[Subscriber, PubsubError], None]


class Wish(NamedTuple):
    """A stream that is to be fed: what it asks of the plugin, in a session with these texts."""

    subscriber: Subscriber
    asked: PluginRequest
    texts: SessionTexts


class Pass:
    """One pass, which begins at `state`.

    `limited`: it is for failover slots, which wait for standbys.

    `make_room` makes a directory for spilled changes.  `on_warning` gets what a plugin warns a subscriber of.  `on_fetched` is
    called when WAL has come from the archive: there is more to do.
    """

    def __init__(
        self,
        state: CatalogState,
        spool: Spool,
        work_mem: int,
        make_room: Callable[[], Path],
        on_warning: Warned,
        on_fetched: Callable[[], None] = lambda: None,
        *,
        limited: bool = False,
    ) -> None:
        server = state.facts.server
        wal_format = format_of_version(server.version)
        assert wal_format is not None
        self.state = state
        self.limited = limited
        self.decoder = Decoder(
            database=server.database,
            wal_format=wal_format,
            make_tracker=state.tracker,
            encoding=python_encoding(server.encoding),
            make_buffer=lambda memory: ReorderBuffer(make_room(), memory),
            work_mem=work_mem,
        )
        self.decoder.builder.enter(State.BUILDING)
        geometry = Geometry(server.segment_size)
        self.decoder.ahead = self._ends = Ahead(
            Spool(spool.directory, server.segment_size), geometry, lambda: self._tip
        )
        self.reader = WalReader(geometry, state.position)
        self.restarts: deque[tuple[int, int]] = deque(maxlen=_RESTARTS)
        """From which position on a stream can begin again at which list of running transactions."""
        self._maker = PluginMaker(state.facts)
        self._spool = SpoolReader(spool, on_fetched)
        self._tip = 0
        self._on_warning = on_warning
        self._fanouts: dict[Output, Fanout] = {}
        self._may_fold = False
        """Whether there are outputs that send the same."""
        self._turn_ends = 0.0
        self._patient = True
        self._ahead = 0
        """Bytes of WAL that were read since an output could not take everything at once."""

    @property
    def position(self) -> int:
        """LSN of the end of the last record that was read."""
        return self.reader.position

    @property
    def subscribers(self) -> list[Subscriber]:
        return [subscriber for fanout in self._fanouts.values() for subscriber in fanout.all()]

    @property
    def is_consistent(self) -> bool:
        return self.decoder.builder.consistent

    def is_quiet_since(self, lsn: int) -> bool:
        """Return whether it was read here that nothing was sent since `lsn`, and no transaction is in progress."""
        # What ended before it began, it has not seen.
        began_before = self.state.position <= lsn
        return began_before and not self.decoder.transactions.by_xid and self.decoder.ended_at < lsn

    # Subscribers

    def add(self, wishes: Sequence[Wish]) -> None:
        """Feed streams from here on; one with wrong options is ended."""
        kinds: dict[Hashable, list[Wish]] = {}
        for wish in sorted(wishes, key=lambda one: one.asked.start):
            try:
                kinds.setdefault(self._maker.kind(wish.asked, wish.texts), []).append(wish)
            except PubsubError as error:
                wish.subscriber.end(STOPPED, error)
        for alike in kinds.values():
            self._add(alike)

    def _add(self, alike: Sequence[Wish]) -> None:
        """Feed streams that one output can serve, in the order in which they begin."""
        _, asked, texts = alike[0]
        fanout = Fanout([wish.subscriber for wish in alike if wish.asked.start == asked.start])
        try:
            output = self._maker.make(
                asked,
                texts,
                fanout.write,
                partial(self._warn, fanout, asked.start),
                may_go_on=lambda: self._may_go_on(fanout),
                on_failure=fanout.fail,
            )
        except PubsubError as error:
            # A plugin of a user's own says now that its options are wrong.
            for wish in alike:
                wish.subscriber.end(STOPPED, error)
            return
        for wish in alike:
            if wish.asked.start != asked.start:
                fanout.late.append(wish.subscriber)
                output.joining.append((wish.asked.start, partial(_join, output, fanout, wish.subscriber)))
        self._fanouts[output] = fanout
        self._may_fold = True
        self.decoder.add(output)

    def remove(self, subscriber: Subscriber) -> None:
        """Stop feeding a stream."""
        for output, fanout in list(self._fanouts.items()):
            fanout.count(output.statistics)
            fanout.remove(subscriber)
            if not fanout.all():
                del self._fanouts[output]
                self.decoder.remove(output)

    def count(self) -> None:
        """Have the subscribers know what was sent to them."""
        for output, fanout in self._fanouts.items():
            fanout.count(output.statistics)

    def leaves_off(self, subscriber: Subscriber) -> bool:
        """Return whether a stream could end here, and go on in another pass."""
        output = next((one for one, fanout in self._fanouts.items() if subscriber in fanout.subscribers), None)
        return output is not None and self.decoder.sharing.is_between(output)

    def absorb(self, other: Pass) -> None:
        """Take over the streams of a pass that has read as far as this one."""
        self.decoder.absorb(other.decoder)
        self._fanouts |= other._fanouts
        for output, fanout in other._fanouts.items():
            output.may_go_on = partial(self._may_go_on, fanout)
        other._fanouts = {}
        self._may_fold = True
        self.restarts = deque(sorted({*self.restarts, *other.restarts})[-_RESTARTS:], _RESTARTS)

    def fold(self) -> None:
        """Have streams that get the same share an output, as soon as they can."""
        if not self._may_fold:
            return
        self._may_fold = False
        outputs = list(self._fanouts)
        for number, output in enumerate(outputs):
            for other in outputs[number + 1 :]:
                if output.alike != other.alike or other not in self._fanouts or output not in self._fanouts:
                    continue
                if self.decoder.sharing.fold(output, other):
                    self.count()
                    output.plugin.forget(definitions=True)
                    self._fanouts[output].subscribers += self._fanouts.pop(other).subscribers
                    self.decoder.remove(other)
                else:
                    self._may_fold = True

    # Work

    def work(self, tip: int, *, patient: bool) -> bool:
        """Decode a piece of the WAL up to `tip`, and send; return whether there is more that can be done now.

        Unless it is `patient`, what slow clients have to get goes into files.  Raises what ends the pass: WalCorrupted,
        WalMissing, CatalogDiverged …
        """
        self._patient = patient
        self._tip = tip
        # Each has a turn of its own: one with a large transaction does not keep the others waiting for its end.
        turn = _TURN / max(len(self._fanouts), 1)
        for output in self._fanouts:
            self._turn_ends = time.monotonic() + turn
            output.proceed()
        self._turn_ends = time.monotonic() + _TURN
        more = self._may_read() and self._read(tip)
        for output, fanout in self._fanouts.items():
            fanout.flush()
            if not output.waits:
                output.join(self.position)
                for subscriber in fanout.subscribers:
                    subscriber.reached(self.position)
        restart = self.decoder.restarts.known
        if restart and (not self.restarts or self.restarts[-1][1] != restart):
            self.restarts.append((self.position, restart))
        if not more:
            more = self._may_read() and self._can_read(tip)
        return more or any(
            output.waits and (fanout.has_room or not patient) for output, fanout in self._fanouts.items()
        )

    def _may_read(self) -> bool:
        """Return whether an output can take more, and those that cannot are not too far behind."""
        waits = [output.waits or (self._patient and not fanout.has_room) for output, fanout in self._fanouts.items()]
        if not any(waits):
            self._ahead = 0
            return True
        return not all(waits) and self._ahead < _MOST_AHEAD

    def _read(self, tip: int) -> bool:
        reader = self.reader
        if reader.received < reader.position:
            # A segment ended early (XLOG_SWITCH), and the rest of it had not come.
            reader.restart_at(reader.position)
        end = min(tip, reader.received + _PIECE)
        if reader.received < end:
            for lsn, data in self._spool.read(reader.received, end):
                reader.feed(lsn, data)
                self.decoder.run(reader)
                self._ahead += len(data)
        return self._can_read(tip)

    def _can_read(self, tip: int) -> bool:
        return self.reader.received < tip and not self._spool.is_fetching

    def is_at(self, tip: int) -> bool:
        """Return whether everything up to `tip` was read and sent."""
        return self.reader.received >= tip and not any(output.waits for output in self.decoder.outputs)

    def close(self) -> None:
        for output in list(self._fanouts):
            self.decoder.remove(output)
        self._fanouts = {}
        self._ends.close()
        self._spool.close()

    def _may_go_on(self, fanout: Fanout) -> bool:
        return time.monotonic() < self._turn_ends and (fanout.has_room or not self._patient)

    def _warn(self, fanout: Fanout, start: int, warning: PubsubError) -> bool:
        # What is read before the start is not sent, and a publication may have been made since.
        if self.position < start:
            return False
        fanout.flush()
        for subscriber in fanout.subscribers:
            self._on_warning(subscriber, warning)
        return True


def _join(output: Output, fanout: Fanout, subscriber: Subscriber) -> None:
    """Have a subscriber get what an output sends from now on."""
    if subscriber in fanout.late:
        fanout.flush()
        fanout.count(output.statistics)
        fanout.late.remove(subscriber)
        fanout.subscribers.append(subscriber)
        output.plugin.forget(definitions=True)
