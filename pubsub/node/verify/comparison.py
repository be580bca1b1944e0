"""Compare one table with one version of its Delta table: by ranges, then by rows in the ranges that differ.

    sums       the publisher adds up its rows' hashes by range, stretch by stretch; meanwhile this process does the same
               with the Delta table's
    rows       of the ranges that differ, some million rows' worth at a time, both sides tell each row's hashes
    differing  a row that only one side has; two rows of one key are one difference
    shown      the first of them, with key and columns

Blocks.  Memory holds the hashes of one pass, and the rows that are shown.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import numpy as np
import pyarrow as pa

from pubsub.digest.forms import RowForm
from pubsub.digest.source import SourceTable, Stretch
from pubsub.digest.sums import Hashed, Sums, bits_for, surplus
from pubsub.digest.target import DeltaVersion
from pubsub.digest.texts import output_texts
from pubsub.protocol.arrow_arrays import Indices

if TYPE_CHECKING:
    from psycopg import Connection

Kind = Literal["missing", "extra", "different"]
Texts = Mapping[str, str | None]
T = TypeVar("T")

#: Rows of differing ranges that one pass looks at, and how many passes there are.
_PASS_ROWS: Final = 1_000_000
_PASSES: Final = 4


class Stopped(Exception):
    """The comparison was told to end."""


@dataclass(frozen=True, slots=True)
class RowDifference:
    """A row that differs.  missing: Delta lacks it; extra: only Delta has it; different: some columns differ.

    `key`: the columns that identify it, none without a key.  `publisher`, `delta`: the columns as PostgreSQL's text, of a
    different row only those that differ; None for the side that lacks the row.
    """

    kind: Kind
    key: Texts
    publisher: Texts | None
    delta: Texts | None


@dataclass(slots=True)
class Found:
    """What differs in a table.

    `rows`, `delta_rows`: how many rows there are; if `sampled`, how many were looked at.  `missing`, `extra`, `different`:
    how many of those that were looked at differ.  `ranges_left`: how many differing ranges were not looked at.  `shown`:
    some of the rows.  `keys`: the keys of all rows that differ, in the Delta table's types, if they were asked for; for a
    table without a key, their hashes `h`.
    """

    rows: int
    delta_rows: int
    sampled: bool = False
    missing: int = 0
    extra: int = 0
    different: int = 0
    ranges_left: int = 0
    shown: list[RowDifference] = field(default_factory=list)
    keys: list[pa.RecordBatch] = field(default_factory=list)

    @property
    def differs(self) -> bool:
        """Whether anything differs."""
        return bool(self.missing or self.extra or self.different or self.ranges_left)


class Pace:
    """Bounds the publisher's load: how many bytes of tables are read per second (0: no bound), by all sessions together."""

    def __init__(self, bytes_per_second: float = 0.0) -> None:
        self.stopping = threading.Event()
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = time.monotonic()

    def wait(self, nbytes: int) -> None:
        """Wait until so many bytes may be read.  Raises Stopped."""
        pause = 0.0
        if self._rate:
            with self._lock:
                now = time.monotonic()
                pause = self._free_at - now
                self._free_at = max(self._free_at, now) + nbytes / self._rate
        if self.stopping.wait(max(pause, 0.0)) if pause > 0 else self.stopping.is_set():
            raise Stopped


@dataclass(slots=True)
class Progress:
    """How far a table's comparison is: bytes of the publisher's table, and rows of the Delta table."""

    nbytes: int = 0
    total: int = 0
    delta_rows: int = 0


class Comparer:
    """Compares tables under one snapshot, one after the other.

    `sessions`: within transactions that have the snapshot.  `show`: how many rows of each table are shown.  `all_keys`: in
    any number of passes, and with the keys of all rows that differ.
    """

    def __init__(self, sessions: Sequence[Connection], pace: Pace, *, show: int, all_keys: bool = False) -> None:
        self.progress = Progress()
        self._sessions = sessions
        self._pace = pace
        self._show = show
        self._all_keys = all_keys

    def compare(self, source: SourceTable, target: DeltaVersion, estimate: int) -> Found:
        """Compare a table.  `estimate`: about how many rows it has.  Raises Stopped, psycopg's errors, and the target's."""
        bits = bits_for(estimate)
        self.progress = Progress(total=source.nbytes)
        with ThreadPoolExecutor(1, thread_name_prefix="delta") as pool:
            adding = pool.submit(self._delta_sums, target, source.form, bits)
            theirs = Sums(bits)
            try:
                for part in self._of_stretches(source, partial(source.sums, bits=bits)):
                    theirs.merge(part)
            except BaseException:
                self._pace.stopping.set()
                raise
            ours = adding.result()
        differing = theirs.differing(ours)
        found = Found(theirs.rows, ours.rows)
        passes = 0
        while len(differing) and (self._all_keys or passes < _PASSES):
            some, differing = _next_pass(differing, np.maximum(theirs.counts, ours.counts))
            passes += 1
            of_source = Hashed.joined(list(self._of_stretches(source, partial(source.rows_in, bits=bits, ranges=some))))
            of_target = target.rows_in(source.form, bits, some)
            places = surplus(of_source, of_target)
            self._add(source, target, of_source.take(places[0]), of_target.take(places[1]), found)
        found.ranges_left = len(differing)
        return found

    def sample(self, source: SourceTable, target: DeltaVersion, estimate: int, rows: int) -> Found:
        """Compare about `rows` rows of each side with the other; small tables are compared whole.

        Of a table without a key only the publisher's rows are looked for: finding one there takes a look at all rows.
        """
        if estimate <= 2 * rows or source.blocks is None:
            return self.compare(source, target, estimate)
        session, form = self._sessions[0], source.form
        self.progress = Progress(total=source.nbytes * rows // estimate)
        self._pace.wait(self.progress.total)
        theirs = source.sample(session, min(100 * rows / estimate, 100.0))
        fewest = np.uint64((1 << 64) * rows // estimate) if form.has_key else None
        ours = target.rows_under(form, theirs.keys, fewest)
        self.progress.nbytes, self.progress.delta_rows = self.progress.total, len(ours)
        if form.has_key:
            theirs = Hashed.joined([theirs, source.rows_under(session, self._keys_of(target, form, theirs, ours))])
        else:
            # How often a row occurs is not known of a sample.
            theirs = theirs.take(np.unique(theirs.keys, return_index=True)[1])
            ours = ours.take(np.unique(ours.keys, return_index=True)[1])
        found = Found(len(theirs), len(ours), sampled=True)
        places = surplus(theirs, ours)
        self._add(source, target, theirs.take(places[0]), ours.take(places[1]), found)
        return found

    @staticmethod
    def _keys_of(target: DeltaVersion, form: RowForm, known: Hashed, ours: Hashed) -> pa.Table:
        """Return the keys of Delta's rows that are not among the publisher's `known` ones."""
        names = [one.column for one in form.key]
        others = ours.take(np.flatnonzero(~np.isin(ours.keys, known.keys)))
        schema = pa.schema([pa.field(name, target.schema.field(name).type) for name in names])
        return pa.Table.from_batches(
            [rows.select(names).cast(schema) for _, rows in target.rows_of(form, others)], schema
        )

    def _delta_sums(self, target: DeltaVersion, form: RowForm, bits: int) -> Sums:
        found = Sums(bits)
        for _, piece in target.pieces(form.columns):
            found.add(*form.hashes(piece))
            self.progress.delta_rows += piece.num_rows
            if self._pace.stopping.is_set():
                raise Stopped
        return found

    def _of_stretches(self, source: SourceTable, work: Callable[[Connection, Stretch], T]) -> list[T]:
        """Return what `work` returns for each stretch; the sessions share the stretches, at the pace."""
        waiting = iter(source.stretches())
        lock = threading.Lock()
        done: list[T] = []

        def run(session: Connection) -> None:
            while True:
                with lock:
                    stretch = next(waiting, _END)
                if stretch == _END:
                    return
                self._pace.wait(source.bytes_of(stretch))
                result = work(session, stretch)
                with lock:
                    done.append(result)
                    self.progress.nbytes += source.bytes_of(stretch)

        with ThreadPoolExecutor(len(self._sessions), thread_name_prefix="publisher") as pool:
            for one in [pool.submit(run, session) for session in self._sessions]:
                one.result()
        return done

    def _add(self, source: SourceTable, target: DeltaVersion, theirs: Hashed, ours: Hashed, found: Found) -> None:
        """Add the rows of some ranges that only the publisher has, `theirs`, and those that only Delta has."""
        form = source.form
        common = np.intersect1d(theirs.keys, ours.keys) if form.has_key else np.empty(0, np.uint64)
        found.different += len(common)
        found.missing += len(theirs) - len(common)
        found.extra += len(ours) - len(common)
        if self._all_keys:
            found.keys += self._keys(source, target, theirs, ours)
        room = self._show - len(found.shown)
        if room > 0:
            found.shown += self._shown(source, target, theirs, ours, room)

    def _keys(
        self, source: SourceTable, target: DeltaVersion, theirs: Hashed, ours: Hashed
    ) -> Iterator[pa.RecordBatch]:
        """Yield the keys of the rows, from both sides; for a table without a key, the hashes."""
        if not source.form.has_key:
            yield pa.record_batch([pa.array(np.union1d(theirs.rows, ours.rows).view(np.int64))], names=["h"])
            return
        names = [form.column for form in source.form.key]
        schema = pa.schema([pa.field(name, target.schema.field(name).type) for name in names])
        yield from source.copy_at(self._sessions[0], theirs.at.to_pylist(), schema)
        for _, rows in target.rows_of(source.form, ours):
            yield pa.RecordBatch.from_arrays(
                [rows.column(rows.schema.get_field_index(name)) for name in names], schema=schema
            )

    def _shown(
        self, source: SourceTable, target: DeltaVersion, theirs: Hashed, ours: Hashed, most: int
    ) -> Iterator[RowDifference]:
        """Yield `most` of the rows, the two of one key as one difference."""
        form = source.form
        chosen = np.unique(np.concatenate([theirs.keys, ours.keys]))[:most]
        theirs = theirs.take(np.flatnonzero(np.isin(theirs.keys, chosen))[:most])
        ours = ours.take(np.flatnonzero(np.isin(ours.keys, chosen))[:most])
        published = self._published(source, theirs)
        delta: dict[int, list[_Row]] = {}
        for hashed, rows in target.rows_of(form, ours):
            for key, row in zip(hashed.keys.tolist(), _Row.all_of(form, rows), strict=True):
                delta.setdefault(key, []).append(row)
        for key in chosen.tolist():
            here, there = published.get(key, []), delta.get(key, [])
            if here and there and form.has_key:
                yield _different(form, here.pop(0), there.pop(0))
            for row in here:
                yield RowDifference("missing", row.of(form.key_columns), row.shown, None)
            for row in there:
                yield RowDifference("extra", row.of(form.key_columns), None, row.shown)

    def _published(self, source: SourceTable, wanted: Hashed) -> dict[int, list[_Row]]:
        """Return rows of the publisher by their keys' hashes."""
        forms = source.form.forms
        expressions = [*(form.shown_sql() for form in forms), *(form.text_sql() for form in forms)]
        values = source.values_at(self._sessions[0], wanted.at.to_pylist(), expressions)
        found: dict[int, list[_Row]] = {}
        names = [form.column for form in forms]
        for key, at in zip(wanted.keys.tolist(), wanted.at.to_pylist(), strict=True):
            texts = values[at]
            row = _Row(dict(zip(names, texts, strict=False)), dict(zip(names, texts[len(names) :], strict=True)))
            found.setdefault(key, []).append(row)
        return found


_END: Final = (-1, -1)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row: its columns' texts as they are shown, and as they are hashed."""

    shown: Texts
    hashed: Texts

    @classmethod
    def all_of(cls, form: RowForm, rows: pa.RecordBatch) -> Iterator[_Row]:
        columns = [rows.column(rows.schema.get_field_index(one.column)) for one in form.forms]
        shown = [output_texts(column).to_pylist() for column in columns]
        hashed = [one.texts(column).to_pylist() for one, column in zip(form.forms, columns, strict=True)]
        names = [one.column for one in form.forms]
        for here, there in zip(zip(*shown, strict=True), zip(*hashed, strict=True), strict=True):
            yield cls(dict(zip(names, here, strict=True)), dict(zip(names, there, strict=True)))

    def of(self, names: Sequence[str]) -> Texts:
        return {name: self.shown[name] for name in names}


def _different(form: RowForm, published: _Row, delta: _Row) -> RowDifference:
    names = [name for name, text in published.hashed.items() if delta.hashed[name] != text]
    return RowDifference("different", published.of(form.key_columns), published.of(names), delta.of(names))


def _next_pass(ranges: Indices, counts: Indices) -> tuple[Indices, Indices]:
    """Divide the ranges into those that one pass looks at, at least one, and the rest."""
    fit = int(np.searchsorted(np.cumsum(counts[ranges]), _PASS_ROWS, side="right"))
    return ranges[: max(fit, 1)], ranges[max(fit, 1) :]
